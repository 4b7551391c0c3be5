"""I/O and threads of the jobs' processes, kept when they end; CPU time where no group counts it.

The I/O controller of version 2 is no source here: Slurm enables cpuset, cpu and memory for its
jobs and not io, so their io.stat is missing; and it would not know of network file systems.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from prometheus_client.core import Metric

from hpml_exporters.core.metric import MetricSpec, Row, families
from hpml_exporters.jobs import metrics, process, raw
from hpml_exporters.jobs.board import JobsBoard, JobSeen
from hpml_exporters.jobs.inherit import Inherited
from hpml_exporters.jobs.process import Stat
from hpml_exporters.jobs.shared import SharedPages
from hpml_exporters.jobs.usage import counts_cpu, counts_memory
from hpml_exporters.options import Context

__all__ = ["ProcessesCollector", "make"]

_SPECS = (
    metrics.IO_READ,
    metrics.IO_WRITE,
    metrics.IO_SYSCALL_READ,
    metrics.IO_SYSCALL_WRITE,
    metrics.THREADS,
    metrics.UNREADABLE,
    metrics.CPU_SECONDS,
    metrics.MEMORY,
)
_IO_NAMES = (b"rchar:", b"wchar:", b"syscr:", b"syscw:", b"read_bytes:", b"write_bytes:")
_IO = (metrics.IO_SYSCALL_READ, metrics.IO_SYSCALL_WRITE, metrics.IO_READ, metrics.IO_WRITE)
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_GRACE_SECONDS = 60.0  # a job that was missed once must not begin again at zero
_BUDGET_SECONDS = 0.05  # of CPU time: some 3,000 processes
_AT_ONCE = 100  # processes between two looks at the clock, which is a system call
_FIRST_WAIT_SECONDS = 5.0
_STAT_LOOKS = 3  # its parent and its threads are read anew only now and then


@dataclass(slots=True)
class _Process:
    """What was seen of one process."""

    start: int
    parent: int
    threads: int
    rss: int | None
    readable: bool
    looked: float


@dataclass
class _Job:
    """What is kept of one job."""

    whose: str = ""
    seen: float = 0.0
    io: Inherited = field(default_factory=lambda: Inherited(len(_IO)))
    cpu: Inherited = field(default_factory=lambda: Inherited(2))
    processes: dict[int, _Process] = field(default_factory=dict)
    ticks: bool = False  # CPU time is counted here, since no group does
    pages: bool = False  # so is memory


class _Reading(NamedTuple):
    """One process at one moment.

    Attributes:
        stat: None: as it was, for all that is of interest.
        io: counters in the order of `_IO`; None: not for us.
        rss: anonymous bytes; None where the job's group counts them.
    """

    stat: Stat | None
    io: tuple[int, ...] | None
    rss: int | None


class ProcessesCollector:
    """Looks at all processes of all jobs within a budget of time, the longest not seen first.

    Args:
        context: the exporter's.
        budget: seconds of CPU time for one look; what is left over comes first the next time.
    """

    name = "processes"
    specs: Sequence[MetricSpec] = _SPECS

    def __init__(self, context: Context, budget: float = _BUDGET_SECONDS) -> None:
        self.interval = context.options.process_interval
        self._proc = context.options.roots.proc
        self._board: JobsBoard = context.jobs
        self._budget = budget
        self._shared = SharedPages(self._proc)
        self._jobs: dict[str, _Job] = {}
        self._waited = False
        self._looks = 0

    def sample(self, now: float) -> list[Metric]:
        """Look at processes and show the sums of their jobs.

        Args:
            now: monotonic seconds.
        """
        if not self._waited:
            self._board.wait(_FIRST_WAIT_SECONDS)
            self._waited = True
        jobs = self._board.now.by_id
        here = self._here()
        for jobid, kept in list(self._jobs.items()):
            self._forget_gone(kept, here)
            if jobid not in jobs and now - kept.seen > _GRACE_SECONDS:
                del self._jobs[jobid]
        for jobid, seen in jobs.items():
            if jobid not in self._jobs or self._jobs[jobid].whose != seen.whose:
                self._jobs[jobid] = _Job(seen.whose)  # perhaps after another of that number
            kept = self._jobs[jobid]
            kept.seen = now
            kept.ticks = not counts_cpu(seen.groups)
            kept.pages = not counts_memory(seen.groups)
        self._looks += 1
        self._look(jobs, here, now)
        rows: dict[MetricSpec, list[Row]] = {spec: [] for spec in _SPECS}
        for jobid, seen in jobs.items():
            _figures(rows, seen, self._jobs[jobid])
        return families(rows)

    def close(self) -> None:
        """Nothing is kept open."""

    def _here(self) -> frozenset[int]:
        return frozenset(int(name) for name in os.listdir(self._proc) if name.isdigit())

    @staticmethod
    def _forget_gone(kept: _Job, here: frozenset[int]) -> None:
        gone = kept.processes.keys() - here
        for pid in gone:
            del kept.processes[pid]
        kept.io.gone(*gone)
        kept.cpu.gone(*gone)

    def _look(self, jobs: Mapping[str, JobSeen], here: frozenset[int], now: float) -> None:
        """Read, then add up: who is found gone must be known before its parent's growth counts."""
        readings: list[tuple[str, int, _Reading | None]] = []
        end = time.thread_time() + self._budget
        for count, (jobid, pid) in enumerate(self._order(jobs, here)):
            if count % _AT_ONCE == _AT_ONCE - 1 and time.thread_time() > end:
                break
            readings.append((jobid, pid, self._read(pid, self._jobs[jobid], here)))
        self._divide(readings, now)
        ended = {pid for _, pid, reading in readings if reading is None}
        for jobid in {jobid for jobid, _, reading in readings if reading is None}:
            self._forget_gone(self._jobs[jobid], here - ended)
        for jobid, pid, reading in readings:
            if reading is not None:
                self._add(self._jobs[jobid], pid, reading, now)

    def _divide(self, readings: list[tuple[str, int, _Reading | None]], now: float) -> None:
        """Count memory that processes of a job share once."""
        sizes: dict[str, dict[int, int]] = {}
        for jobid, pid, reading in readings:
            if reading is not None and reading.rss is not None:
                sizes.setdefault(jobid, {})[pid] = reading.rss
        self._shared.keep(pid for of_job in sizes.values() for pid in of_job)
        parts = {jobid: self._shared.parts(of_job, now) for jobid, of_job in sizes.items()}
        for place, (jobid, pid, reading) in enumerate(readings):
            if reading is not None and reading.rss is not None:
                readings[place] = (jobid, pid, reading._replace(rss=parts[jobid][pid]))

    def _order(self, jobs: Mapping[str, JobSeen], here: frozenset[int]) -> list[tuple[str, int]]:
        """Return what to read: the longest not looked at, and among those parents first.

        A child that is read after its parent cannot have gone over into the parent's counts.
        """
        found = []
        for jobid, seen in jobs.items():
            known = self._jobs[jobid].processes
            for pid in seen.pids & here:
                one = known.get(pid)
                found.append((one.looked, one.start, jobid, pid) if one else (0.0, 0, jobid, pid))
        found.sort()
        return [(jobid, pid) for _, _, jobid, pid in found]

    def _read(self, pid: int, kept: _Job, here: frozenset[int]) -> _Reading | None:
        stat = None
        known = kept.processes.get(pid)
        # Who lost its parent has another by now (a subreaper), which may inherit from it soon.
        lost = known is None or known.parent not in here
        if kept.ticks or lost or (pid + self._looks) % _STAT_LOOKS == 0:
            stat = process.stat(self._proc, pid)
            if stat is None:
                return None
        try:
            data = raw.read_once(f"{self._proc}/{pid}/io")
            if data is None:
                return None
            io = _parse_io(data)
        except PermissionError:
            io = None
        return _Reading(stat, io, self._rss(pid) if kept.pages else None)

    def _rss(self, pid: int) -> int | None:
        try:
            words = (raw.read_once(f"{self._proc}/{pid}/statm") or b"").split()
        except PermissionError:
            return None
        # Resident less what is shared with files and shared memory: the anonymous part.
        return max(0, int(words[1]) - int(words[2])) * _PAGE if len(words) > 2 else None  # noqa: PLR2004

    @staticmethod
    def _add(kept: _Job, pid: int, reading: _Reading, now: float) -> None:
        stat, io = reading.stat, reading.io
        known = kept.processes.get(pid)
        if stat is not None:
            known = kept.processes[pid] = _Process(
                stat.start, stat.parent, stat.threads, reading.rss, io is not None, now
            )
            if kept.ticks:
                kept.cpu.seen(pid, stat.parent, stat.start, (stat.user, stat.system))
        elif known is not None:
            known.rss, known.readable, known.looked = reading.rss, io is not None, now
        if io is not None and known is not None:
            kept.io.seen(pid, known.parent, known.start, io)


def make(context: Context) -> ProcessesCollector:
    """Return the collector."""
    return ProcessesCollector(context)


def _parse_io(data: bytes) -> tuple[int, ...] | None:
    words = data.split()
    if tuple(words[0:12:2]) != _IO_NAMES:
        return None  # a kernel without task I/O accounting
    return int(words[1]), int(words[3]), int(words[9]), int(words[11])


def _figures(rows: dict[MetricSpec, list[Row]], seen: JobSeen, kept: _Job) -> None:
    label = (seen.facts.jobid,)
    known = {pid: kept.processes[pid] for pid in seen.pids & kept.processes.keys()}
    # Slurm's own sleep in the extern step is root's: no part of what the user's processes do.
    extern = seen.steps.get("extern", frozenset())
    unreadable = sum(not one.readable for pid, one in known.items() if pid not in extern)
    if unreadable:
        rows[metrics.UNREADABLE].append((label, unreadable))
    if not unreadable and (any(kept.io.total) or kept.io.processes):
        for spec, value in zip(_IO, kept.io.total, strict=True):
            rows[spec].append((label, value))
    if known:
        rows[metrics.THREADS].append((label, sum(one.threads for one in known.values())))
    if kept.ticks:
        for mode, ticks in zip(("user", "system"), kept.cpu.total, strict=True):
            rows[metrics.CPU_SECONDS].append(((*label, mode), ticks / _TICKS))
    rss = [one.rss for one in known.values() if one.rss is not None]
    if rss:
        rows[metrics.MEMORY].append(((*label, "rss"), sum(rss)))
