"""Counters of processes that come and go, added up so that nothing is lost or counted twice.

The kernel adds the I/O and the CPU time of a child that ended to its parent's once the parent has
waited for it (`wait_task_zombie` in kernel/exit.c; /proc/PID/io shows both as one). So when a
process is gone, its counts come back with those of its parent. Only if that is no process of the
job, as slurmstepd, they are added here.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

__all__ = ["ProcessTotals"]


class _Process(NamedTuple):
    parent: int
    start: int
    counts: tuple[int, ...]


class ProcessTotals:
    """The counters of one job.

    Args:
        width: how many counters a process has.
    """

    def __init__(self, width: int) -> None:
        self._sums = [0] * width
        self._shown = [0] * width
        self._processes: dict[int, _Process] = {}

    def seen(self, pid: int, parent: int, start: int, counts: tuple[int, ...]) -> None:
        """Note the counters of a process, with those of its ended children."""
        known = self._processes.get(pid)
        process = _Process(parent, start, counts)
        if known == process:
            return
        if known is not None and known.start != start:
            self.keep(self._processes.keys() - {pid})
            known = None
        self._processes[pid] = process
        for place, count in enumerate(counts):
            self._sums[place] += count - (known.counts[place] if known else 0)

    def keep(self, pids: Collection[int]) -> None:
        """Note that all processes but these are gone."""
        gone = {pid: self._processes.pop(pid) for pid in self._processes.keys() - set(pids)}
        for process in gone.values():
            heir = process.parent
            while heir in gone:
                heir = gone[heir].parent
            if heir in self._processes:  # whose counts will have these, too
                for place, count in enumerate(process.counts):
                    self._sums[place] -= count

    def total(self) -> tuple[int, ...]:
        """Return the counters of the job, which never fall: an heir may be a moment late."""
        self._shown = list(map(max, self._shown, self._sums))
        return tuple(self._shown)

    def __bool__(self) -> bool:
        """Return whether any process was ever seen."""
        return bool(self._processes) or any(self._shown)
