"""Counters of processes that come and go, added up so that nothing is lost or counted twice.

The kernel adds the I/O and the CPU time of an ended child to its parent's once the parent has
waited for it (`wait_task_zombie` in kernel/exit.c; /proc/PID/io shows both as one). So when a
process is gone, what it had may come back as growth of its parent; when nobody waited for it, or
the parent is none of ours, what was seen last is all there is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Counts", "Inherited", "Process"]

Counts = tuple[int, ...]
_READINGS = 2  # of a parent after a child was gone, by which the child's counts are in its own


@dataclass
class Process:
    """What is kept of one process.

    Attributes:
        parent: its process id.
        start: tells apart two processes of one id.
        counts: at its last look.
        owed: counts of children that are gone, each with the parent's readings since.
    """

    parent: int
    start: int
    counts: Counts
    owed: list[list[int]] = field(default_factory=list)
    readings: list[int] = field(default_factory=list)


class Inherited:
    """The counters of one job: totals that never go back.

    Args:
        width: how many counters a process has.
    """

    def __init__(self, width: int) -> None:
        self.total = [0] * width
        self.processes: dict[int, Process] = {}

    def seen(self, pid: int, parent: int, start: int, counts: Counts) -> None:
        """Add what a process has counted since its last look; all of it at the first.

        Args:
            pid: its id.
            parent: id of its parent now.
            start: its start time.
            counts: its counters, its ended children's included.
        """
        known = self.processes.get(pid)
        if known is not None:
            if known.start == start and known.counts == counts and not known.owed:
                known.parent = parent
                return
            if known.start != start:
                self.gone(pid)
                known = None
        if known is None:
            self.processes[pid] = Process(parent, start, counts)
            grown = list(counts)
        else:
            grown = [max(0, new - old) for new, old in zip(counts, known.counts, strict=True)]
            known.parent, known.counts = parent, counts
            if known.owed:
                _settle(known, grown)
        for index, value in enumerate(grown):
            self.total[index] += value

    def gone(self, *pids: int) -> None:
        """Note that processes are no more: their counts may come again with their parents'."""
        known = [pid for pid in pids if pid in self.processes]
        # Children before parents, which hand on what they inherited.
        for pid in sorted(known, key=lambda one: self.processes[one].start, reverse=True):
            process = self.processes.pop(pid)
            heir = self.processes.get(process.parent)
            if heir is not None and heir.start <= process.start:
                # What it had not yet got of its own children will come with its own.
                heir.owed += [list(process.counts), *process.owed]
                heir.readings += [0] * (1 + len(process.owed))


def _settle(process: Process, grown: list[int]) -> None:
    """Take from a parent's growth what its ended children had already been counted with."""
    for owed in process.owed:
        for index, value in enumerate(owed):
            taken = min(value, grown[index])
            grown[index] -= taken
            owed[index] -= taken
    readings = [count + 1 for count in process.readings]
    left = [
        (owed, count)
        for owed, count in zip(process.owed, readings, strict=True)
        if count < _READINGS and any(owed)
    ]
    process.owed = [owed for owed, _ in left]
    process.readings = [count for _, count in left]
