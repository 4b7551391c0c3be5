"""The entries of `stage` as they were staged: where, how fast, and whether that paid."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.records.texts import human_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpml_orchestrator.records.events import Event

__all__ = ["Staged", "payback_text", "staged_entries", "staged_lines"]

_SHORT_SECONDS = 0.01


@dataclass(frozen=True)
class Staged:
    """One entry of `stage`, on all nodes.

    Attributes:
        name: the entry's.
        path: its place on the first node.
        nodes: number of nodes that had it.
        bytes, files: on all of them together.
        seconds: of the slowest node.
        bytes_per_second: of the slowest node that copied something; 0 where none did.
        methods: how it was copied, each once.
        reused: number of nodes where it was already.
        kept: number of nodes where it stays for later jobs.
        private: why later jobs cannot reuse it, if so.
        evicted: sources that were removed to make room for it.
        digests: of names, sizes and contents, each once.
        payback: of the node on which staging pays last: times of one epoch and of staging in
            seconds, and `epochs` after which it has paid, None for never; empty if not measured.
        epochs: how often the job file says that the data is read; 0 where it does not.
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

    Damaged parts of records, and those of a later release, are skipped.
    """
    reports: dict[str, list[Mapping[str, Any]]] = {}
    for event in ready:
        stages = event.data.get("stages")
        for report in stages if isinstance(stages, list) else []:
            if isinstance(report, dict) and isinstance(report.get("name"), str):
                reports.setdefault(report["name"], []).append(report)
    return [_combined(name, of_nodes) for name, of_nodes in reports.items()]


def _combined(name: str, nodes: Sequence[Mapping[str, Any]]) -> Staged:
    rates = [rate for node in nodes if (rate := _number(node, "bytes_per_second"))]
    paybacks = [node["payback"] for node in nodes if isinstance(node.get("payback"), dict)]
    evicted = [node["evicted"] for node in nodes if isinstance(node.get("evicted"), list)]

    def texts(key: str) -> tuple[str, ...]:
        values = [node.get(key) for node in nodes]
        return tuple(dict.fromkeys(value for value in values if value and isinstance(value, str)))

    def late(payback: Mapping[str, Any]) -> float:
        epochs = payback.get("epochs")
        return float(epochs) if isinstance(epochs, int) else math.inf

    return Staged(
        name=name,
        path=next(iter(texts("path")), ""),
        nodes=len(nodes),
        bytes=sum(int(_number(node, "bytes")) for node in nodes),
        files=sum(int(_number(node, "files")) for node in nodes),
        seconds=max(_number(node, "seconds") for node in nodes),
        bytes_per_second=min(rates, default=0.0),
        methods=texts("method"),
        reused=sum(node.get("reused") is True for node in nodes),
        kept=sum(node.get("kept") is True for node in nodes),
        private=next(iter(texts("private")), ""),
        evicted=tuple(
            dict.fromkeys(one for listed in evicted for one in listed if isinstance(one, str))
        ),
        digests=texts("digest"),
        payback=max(paybacks, key=late, default=None),
        epochs=max(int(_number(node, "epochs")) for node in nodes),
    )


def staged_lines(entries: Sequence[Staged]) -> list[str]:
    """Return a line per entry, and one more where it was measured whether staging pays."""
    lines = []
    for entry in entries:
        files = f"{entry.files} file{'s' * (entry.files != 1)}, {human_bytes(entry.bytes)}"
        nodes = f" on {entry.nodes} nodes" if entry.nodes > 1 else ""
        text = f"{files} in {entry.path}{nodes}, {_how(entry)}"
        if entry.kept:
            some = "" if entry.kept == entry.nodes else f" on {entry.kept} of {entry.nodes} nodes"
            text += f"; kept{some} for later jobs"
        if entry.private:
            text += f"; later jobs cannot reuse it: {entry.private}"
        if entry.evicted:
            text += f"; removed to make room: {', '.join(entry.evicted)}"
        lines.append(f"{entry.name}: {text}")
        # Parts of a partition differ, and so do digests of different functions, as on nodes with
        # and without xxhash.
        functions = [digest.partition(":")[0] for digest in entry.digests]
        if "partition" not in entry.methods and len(set(functions)) < len(functions):
            lines.append(f"{entry.name}: the nodes do NOT have the same data, by their digests")
        sentence = payback_text(entry)
        if sentence:
            lines.append(f"{entry.name}: {sentence}")
    return lines


def _how(entry: Staged) -> str:
    if entry.reused == entry.nodes:
        return f"there already ({_seconds(entry.seconds)})"
    by = f"by {' and '.join(entry.methods)} " if entry.methods else ""
    rate = f", {human_bytes(entry.bytes_per_second)}/s" if entry.bytes_per_second else ""
    each = " per node" if entry.nodes > 1 and rate else ""
    reused = f", reused on {entry.reused} of {entry.nodes} nodes" if entry.reused else ""
    return f"{by}in {_seconds(entry.seconds)}{rate}{each}{reused}"


def payback_text(entry: Staged) -> str:
    """Return the sentence on whether staging an entry paid; empty where that was not measured."""
    payback = entry.payback
    if not payback:
        return ""
    stage, remote, local = (
        _number(payback, key) for key in ("stage_seconds", "remote_seconds", "local_seconds")
    )
    warm = " out of the page cache" if payback.get("warm") else ""
    times = (
        f"one reading takes {_seconds(remote)} from the source and {_seconds(local)} from the "
        f"node{warm}, staging took {_seconds(stage)}"
    )
    epochs = payback.get("epochs")
    if not isinstance(epochs, int):
        return f"staging never pays: {times}"
    after = f"staging pays after {epochs} epoch{'s' * (epochs != 1)}"
    if not entry.epochs:
        return f"{after}: {times}"
    saved = entry.epochs * (remote - local) - stage
    if saved > 0:
        return f"{after} of {entry.epochs}, and saves {_seconds(saved)}: {times}"
    return f"{after}, but the job reads it {entry.epochs} time{'s' * (entry.epochs != 1)}: {times}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= _SHORT_SECONDS else f"{seconds * 1e3:.2g} ms"


def _number(data: Mapping[str, Any], key: str) -> float:
    value = data.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return 0.0
    return float(value) if math.isfinite(value) and value >= 0 else 0.0
