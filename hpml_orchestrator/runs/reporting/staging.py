"""The entries of `stage` and `collect`: where the data is, and how fast it was copied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import counted
from hpml_orchestrator.records.texts import beside, human_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpml_orchestrator.records.feed import Event
    from hpml_orchestrator.records.schema import Marker, StageRecord

_SHORT_SECONDS = 0.01


@dataclass(frozen=True)
class StagedEntry:
    """One entry of `stage`, on all nodes; figures of time are those of the slowest node."""

    name: str
    path: str = ""  # on the first node
    nodes: int = 0  # number of nodes that had it
    bytes: int = 0  # on all of them together
    files: int = 0
    seconds: float = 0.0
    bytes_per_second: float = 0.0  # 0 where no node copied anything
    methods: tuple[str, ...] = ()  # how it was copied, each once
    reused: int = 0  # number of nodes that had it already
    kept: int = 0  # number of nodes that keep it for later jobs
    evicted: tuple[str, ...] = ()  # sources that were removed to make room for it
    digests: tuple[str, ...] = ()  # of names, sizes and contents, each once


def staged_entries(ready: Sequence[Event]) -> list[StagedEntry]:
    """Return the staged entries in the job file's order, from the events of ready nodes."""
    reports: dict[str, list[StageRecord]] = {}
    for event in ready:
        for report in event.data.get("stages", ()):
            reports.setdefault(report["name"], []).append(report)
    return [_combined(name, of_nodes) for name, of_nodes in reports.items()]


def _combined(name: str, nodes: Sequence[StageRecord]) -> StagedEntry:
    rates = filter(None, (node["bytes_per_second"] for node in nodes))
    evicted = (source for node in nodes for source in node.get("evicted", ()))
    return StagedEntry(
        name=name,
        path=nodes[0]["path"],
        nodes=len(nodes),
        bytes=sum(node["bytes"] for node in nodes),
        files=sum(node["files"] for node in nodes),
        seconds=max(node["seconds"] for node in nodes),
        bytes_per_second=float(min(rates, default=0)),
        methods=tuple(dict.fromkeys(filter(None, (node["method"] for node in nodes)))),
        reused=sum(node["reused"] for node in nodes),
        kept=sum(node["kept"] for node in nodes),
        evicted=tuple(dict.fromkeys(evicted)),
        digests=tuple(dict.fromkeys(node["digest"] for node in nodes if "digest" in node)),
    )


def staged_lines(entries: Sequence[StagedEntry]) -> list[str]:
    """Return a line per entry, and one more if the nodes have different data."""
    lines = []
    for entry in entries:
        files = f"{counted(entry.files, 'file')}, {human_bytes(entry.bytes)}"
        nodes = f" on {entry.nodes} nodes" if entry.nodes > 1 else ""
        text = f"{files} in {entry.path}{nodes}, {_how(entry)}"
        if entry.kept:
            some = "" if entry.kept == entry.nodes else f" on {entry.kept} of {entry.nodes} nodes"
            text += f"; kept{some} for later jobs"
        if entry.evicted:
            text += f"; removed to make room: {', '.join(entry.evicted)}"
        lines.append(f"{entry.name}: {text}")
        # Nodes with and without xxhash use different functions, whose digests cannot be compared.
        functions = [digest.partition(":")[0] for digest in entry.digests]
        if len(set(functions)) < len(functions):
            lines.append(f"{entry.name}: the nodes do NOT have the same data, by their digests")
    return lines


def collected_lines(
    nodes: Sequence[Marker], sources: Sequence[str], silent: Sequence[str]
) -> list[str]:
    """Return lines about the entries of `collect`.

    Args:
        nodes: what each node recorded about them.
        sources: as in the job file.
        silent: nodes that recorded nothing although the job is over.
    """
    lines = []
    for index, source in enumerate(sources):
        rows = [node["entries"][index] for node in nodes]
        whole = [row for row in rows if not row["problem"]]
        there = [row for row in whole if row["path"]]
        if there:
            files = counted(sum(row["files"] for row in there), "file")
            size = human_bytes(sum(row["bytes"] for row in there))
            first = there[0]["path"]
            where = first if len(there) == 1 else f"{_above(first)}/NODE of {len(there)} nodes"
            lines.append(f"{source}: {files}, {size} in {where}")
        elif whole:
            lines.append(f"{source}: nothing there{beside(whole)}")
        for row in rows:
            if row["problem"]:
                some = f"only {counted(row['files'], 'file')} in {row['path']}"
                what = some if row["path"] else "NOT collected"
                lines.append(f"{source} of {row['node']}: {what}: {row['problem']}")
    if silent:
        lines.append(f"NOT collected from {', '.join(silent)}: the node ended before it could")
    return lines


def _above(path: str) -> str:
    return path.rpartition("/")[0].rpartition("/")[0]


def _how(entry: StagedEntry) -> str:
    if entry.reused == entry.nodes:
        return f"there already ({_seconds(entry.seconds)})"
    by = f"by {' and '.join(entry.methods)} " if entry.methods else ""
    rate = f", {human_bytes(entry.bytes_per_second)}/s" if entry.bytes_per_second else ""
    each = " per node" if entry.nodes > 1 and rate else ""
    reused = f", reused on {entry.reused} of {entry.nodes} nodes" if entry.reused else ""
    return f"{by}in {_seconds(entry.seconds)}{rate}{each}{reused}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= _SHORT_SECONDS else f"{seconds * 1e3:.2g} ms"
