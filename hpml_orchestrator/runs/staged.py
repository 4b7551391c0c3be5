"""What came of each entry of `stage`: where it lay, how it came there, and whether that paid."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.staging.capacity import human_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpml_orchestrator.records.events import Event

__all__ = ["Staged", "payback_text", "staged_entries", "staged_lines"]


@dataclass(frozen=True)
class Staged:
    """One entry of `stage`, on all nodes that brought it.

    Attributes:
        name: the entry's.
        path: where it lay, on the first of the nodes.
        nodes: how many had it.
        bytes, files: on all of them together.
        seconds: of the slowest node.
        bytes_per_second: of the slowest node that copied something; 0 where none did.
        methods: how it came, each once.
        reused: on how many nodes it lay already.
        kept: on how many it stays for later jobs.
        private: why later jobs cannot find it, where that is so.
        evicted: sources of what had to go to make room for it.
        digests: of names, sizes and contents, each once.
        payback: of the node on which staging pays last: times of one epoch and of staging in
            seconds, and `epochs` after which it has paid, None for never; empty where no node
            could tell.
        epochs: how often the job file says that the data are read; 0 where it does not.
    """

    name: str
    path: str = ""
    nodes: int = 0
    bytes: int = 0
    files: int = 0
    seconds: float = 0.0
    bytes_per_second: float = 0.0
    methods: tuple[str, ...] = ()
    reused: int = 0
    kept: int = 0
    private: str = ""
    evicted: tuple[str, ...] = ()
    digests: tuple[str, ...] = ()
    payback: Mapping[str, Any] | None = None
    epochs: int = 0


def staged_entries(ready: Sequence[Event]) -> list[Staged]:
    """Return the entries, in the job file's order, of the events of nodes that became ready.

    Records may be of another release or damaged: what is not of the right form is passed over.
    """
    found: dict[str, list[Mapping[str, Any]]] = {}
    for event in ready:
        told = event.data.get("stages")
        for one in told if isinstance(told, list) else []:
            if isinstance(one, dict) and isinstance(one.get("name"), str):
                found.setdefault(one["name"], []).append(one)
    return [_joined(name, here) for name, here in found.items()]


def staged_lines(entries: Sequence[Staged]) -> list[str]:
    """Return a line per entry, and one more where it is known whether staging it paid."""
    lines = []
    for one in entries:
        lines.append(f"{one.name}: {_where(one)}, {_how(one)}{_fate(one)}")
        if _differ(one):
            lines.append(f"{one.name}: the nodes do NOT have the same data, by their digests")
        sentence = payback_text(one)
        if sentence:
            lines.append(f"{one.name}: {sentence}")
    return lines


def payback_text(one: Staged) -> str:
    """Return the sentence about whether staging an entry paid; empty where nothing is known."""
    told = one.payback
    if not told:
        return ""
    stage, remote, local = (
        _figure(told, key) for key in ("stage_seconds", "remote_seconds", "local_seconds")
    )
    warm = " out of the page cache" if told.get("warm") else ""
    times = (
        f"one reading takes {_seconds(remote)} from the source and {_seconds(local)} from the "
        f"node{warm}, staging took {_seconds(stage)}"
    )
    epochs = told.get("epochs")
    if not isinstance(epochs, int):
        return f"staging never pays: {times}"
    after = f"staging pays after {epochs} epoch{'s' * (epochs != 1)}"
    if not one.epochs:
        return f"{after}: {times}"
    saved = one.epochs * (remote - local) - stage
    if saved > 0:
        return f"{after} of {one.epochs}, and saves {_seconds(saved)}: {times}"
    return f"{after}, but the job reads it {one.epochs} time{'s' * (one.epochs != 1)}: {times}"


def _differ(one: Staged) -> bool:
    """Say whether nodes that should have the same have not.

    Parts of a partition differ, and so do digests that were made with different functions, as
    nodes with and without xxhash do.
    """
    functions = [digest.partition(":")[0] for digest in one.digests]
    return "partition" not in one.methods and len(set(functions)) < len(functions)


def _joined(name: str, here: Sequence[Mapping[str, Any]]) -> Staged:
    rates = [rate for one in here if (rate := _figure(one, "bytes_per_second"))]
    paybacks = [one["payback"] for one in here if isinstance(one.get("payback"), dict)]
    return Staged(
        name=name,
        path=_text(here[0], "path"),
        nodes=len(here),
        bytes=sum(int(_figure(one, "bytes")) for one in here),
        files=sum(int(_figure(one, "files")) for one in here),
        seconds=max(_figure(one, "seconds") for one in here),
        bytes_per_second=min(rates, default=0.0),
        methods=tuple(dict.fromkeys(filter(None, (_text(one, "method") for one in here)))),
        reused=sum(one.get("reused") is True for one in here),
        kept=sum(one.get("kept") is True for one in here),
        private=next(filter(None, (_text(one, "private") for one in here)), ""),
        evicted=tuple(dict.fromkeys(source for one in here for source in _texts(one, "evicted"))),
        digests=tuple(dict.fromkeys(filter(None, (_text(one, "digest") for one in here)))),
        payback=max(paybacks, key=_late, default=None),
        epochs=max(int(_figure(one, "epochs")) for one in here),
    )


def _late(payback: Mapping[str, Any]) -> float:
    epochs = payback.get("epochs")
    return float(epochs) if isinstance(epochs, int) else math.inf


def _where(one: Staged) -> str:
    files = f"{one.files} file{'s' * (one.files != 1)}, {human_bytes(one.bytes)}"
    return f"{files} in {one.path}" + (f" on {one.nodes} nodes" if one.nodes > 1 else "")


def _how(one: Staged) -> str:
    if one.reused == one.nodes:
        return f"there already ({_seconds(one.seconds)})"
    by = f"by {' and '.join(one.methods)} " if one.methods else ""
    rate = f", {human_bytes(one.bytes_per_second)}/s" if one.bytes_per_second else ""
    each = " and node" if one.nodes > 1 and rate else ""
    had = f", {one.reused} of {one.nodes} nodes had it already" if one.reused else ""
    return f"{by}in {_seconds(one.seconds)}{rate}{each}{had}"


def _fate(one: Staged) -> str:
    words = ""
    if one.kept:
        some = "" if one.kept == one.nodes else f" on {one.kept} of {one.nodes} nodes"
        words += f"; kept{some} for later jobs"
    if one.private:
        words += f"; later jobs cannot reuse it: {one.private}"
    if one.evicted:
        words += f"; {', '.join(one.evicted)} had to go for it"
    return words


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.01 else f"{seconds * 1e3:.2g} ms"  # noqa: PLR2004


def _text(data: Mapping[str, Any], key: str) -> str:
    value = data.get(key)
    return value if isinstance(value, str) else ""


def _texts(data: Mapping[str, Any], key: str) -> list[str]:
    value = data.get(key)
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []


def _figure(data: Mapping[str, Any], key: str) -> float:
    value = data.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return 0.0
    return float(value) if math.isfinite(value) and value >= 0 else 0.0
