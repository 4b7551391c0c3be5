"""I/O and threads of the jobs' processes; CPU time and memory where no control group counts them.

The I/O controller of version 2 is not used: Slurm enables cpuset, cpu and memory for its
jobs and not io, so their io.stat is missing; and it would not know of network file systems.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from prometheus_client.core import Metric

from hpml_exporters.core import procfs
from hpml_exporters.core.collector import MetricSpec, Row, families
from hpml_exporters.jobs import collector
from hpml_exporters.jobs.board import JobSeen
from hpml_exporters.jobs.collector import counts_cpu, counts_memory
from hpml_exporters.options import Context

_IO_NAMES = (b"rchar:", b"wchar:", b"syscr:", b"syscw:", b"read_bytes:", b"write_bytes:")
_IO = (collector.IO_SYSCALL_READ, collector.IO_SYSCALL_WRITE, collector.IO_READ, collector.IO_WRITE)
_NO_IO = (0,) * len(_IO)
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_GRACE_SECONDS = 60.0  # a job whose groups are missing once must not restart at zero
_BUDGET_SECONDS = 0.05  # of CPU time per look: some 3,000 processes
_FIRST_WAIT_SECONDS = 5.0
_STAT_LOOKS = 3  # after which parent and threads of a process are read again
_LARGE = 8 << 20  # bytes; the pages of smaller processes are not worth a walk
_WALK_SHARE = 0.005  # of a core
_WALK_BURST_SECONDS = 0.5  # of CPU time, at first and after a rest


class _Counted(NamedTuple):
    parent: int
    start: int
    counts: tuple[int, ...]


class ProcessTotals:
    """Counters of a job's processes, added up so that nothing is lost or counted twice.

    The kernel adds the I/O and the CPU time of a child that ended to its parent's once the parent
    has waited for it (`wait_task_zombie` in kernel/exit.c; /proc/PID/io shows both as one). So when
    a process is gone, its counts come back with those of its parent. Only if that is no process of
    the job, as slurmstepd, they are added here.

    Args:
        width: how many counters a process has.
    """

    def __init__(self, width: int) -> None:
        self._sums = [0] * width
        self._shown = [0] * width
        self._processes: dict[int, _Counted] = {}

    def seen(self, pid: int, parent: int, start: int, counts: tuple[int, ...]) -> None:
        """Record the counters of a process, with those of its ended children."""
        known = self._processes.get(pid)
        process = _Counted(parent, start, counts)
        if known == process:
            return
        if known is not None and known.start != start:
            # The id was reused: the old process must leave its counts before the new one begins.
            self.keep(self._processes.keys() - {pid})
            known = None
        self._processes[pid] = process
        for place, count in enumerate(counts):
            self._sums[place] += count - (known.counts[place] if known else 0)

    def keep(self, pids: Collection[int]) -> None:
        """Drop all processes except these."""
        gone = {pid: self._processes.pop(pid) for pid in self._processes.keys() - set(pids)}
        for process in gone.values():
            heir = process.parent
            while heir in gone:
                heir = gone[heir].parent
            # A living parent reports the counts of a child that it has waited for with its own:
            # without this they would count twice. If no parent in the job is left, they stay.
            if heir in self._processes:
                for place, count in enumerate(process.counts):
                    self._sums[place] -= count

    def total(self) -> tuple[int, ...]:
        """Return the counters of the job, which never fall, even if a parent's counts come late."""
        self._shown = list(map(max, self._shown, self._sums))
        return tuple(self._shown)


@dataclass(slots=True)
class _Process:
    """The latest readings of one process.

    Attributes:
        stat: from one of the last looks.
        looked: when it was last read, monotonic seconds.
        readable: whether its I/O may be read.
        anonymous: bytes; None where the job's group counts memory.
        own_share: part of them that counts for this process, see `_Pages`.
        shared_at: when that was read; 0: never.
    """

    stat: procfs.Stat
    looked: float = 0.0
    readable: bool = True
    anonymous: int | None = None
    own_share: float = 1.0
    shared_at: float = 0.0


@dataclass
class _Job:
    """State of one job."""

    seen: float = 0.0
    totals: ProcessTotals = field(default_factory=lambda: ProcessTotals(2 + len(_IO)))
    processes: dict[int, _Process] = field(default_factory=dict)
    has_io: bool = False  # some of it could be read
    has_cpu: bool = False  # no group counts CPU time
    has_memory: bool = False  # no group counts memory

    def keep(self, pids: frozenset[int]) -> None:
        """Drop all processes except these."""
        for pid in self.processes.keys() - pids:
            del self.processes[pid]
        self.totals.keep(pids)


class ProcessesCollector:
    """Reads the processes of all jobs within a time budget, the least recently read first.

    Args:
        context: of the exporter.
        budget: CPU seconds per reading; the next reading starts with the skipped processes.
    """

    name = "processes"
    specs: Sequence[MetricSpec] = collector.PROCESS_SPECS

    def __init__(self, context: Context, budget: float = _BUDGET_SECONDS) -> None:
        self.interval = context.options.process_interval
        self._cluster = context.options.cluster
        self._proc = context.options.roots.proc
        self._board = context.jobs
        self._budget = budget
        self._pages = _Pages(self._proc)
        self._jobs: dict[str, _Job] = {}
        self._looks = 0

    def sample(self, now: float) -> list[Metric]:
        """Read processes, and return the sums of their jobs.

        Args:
            now: monotonic seconds.
        """
        if not self._looks:
            # Jobs become known a moment after the start. Without the wait the first look would be
            # wasted, and a short job be over before the second.
            self._board.wait(_FIRST_WAIT_SECONDS)
        self._looks += 1
        jobs = self._board.now.by_id
        here = procfs.process_ids(self._proc)
        for jobid, kept in list(self._jobs.items()):
            kept.keep(here)
            # Without control groups the next job of this number may be another one.
            grace = 0.0 if kept.has_cpu else _GRACE_SECONDS
            if jobid not in jobs and now - kept.seen > grace:
                del self._jobs[jobid]
        for jobid, seen in jobs.items():
            kept = self._jobs.setdefault(jobid, _Job())
            kept.seen = now
            kept.has_cpu = not any(map(counts_cpu, seen.groups))
            kept.has_memory = not any(map(counts_memory, seen.groups))
        self._read(jobs, here, now)
        rows: dict[MetricSpec, list[Row]] = {spec: [] for spec in self.specs}
        for jobid, seen in jobs.items():
            _measure(rows, (self._cluster, jobid), seen, self._jobs[jobid])
        return families(rows)

    def close(self) -> None:
        """Do nothing: no file is open."""

    def _read(self, jobs: Mapping[str, JobSeen], here: frozenset[int], now: float) -> None:
        """Read processes, then add them up: a child must be known to be gone before its parent."""
        readings: list[tuple[_Job, int, procfs.Stat, tuple[int, ...] | None]] = []
        ended: set[int] = set()
        end = time.thread_time() + self._budget
        for jobid, pid in self._order(jobs, here):
            job = self._jobs[jobid]
            try:
                readings.append((job, pid, *self._read_one(job, pid, here, now)))
            except ProcessLookupError:
                ended.add(pid)
            if time.thread_time() > end:
                break
        for job in self._jobs.values():
            job.keep(here - ended)
            self._pages.divide(job.processes, now)
        for job, pid, stat, counts in readings:
            job.has_io |= counts is not None
            all_counts = stat.user, stat.system, *(counts or _NO_IO)
            job.totals.seen(pid, stat.parent, stat.start, all_counts)

    def _read_one(
        self, job: _Job, pid: int, here: frozenset[int], now: float
    ) -> tuple[procfs.Stat, tuple[int, ...] | None]:
        known = job.processes.get(pid)
        # A process that lost its parent has a new one, which may soon inherit its counts.
        is_due = (pid + self._looks) % _STAT_LOOKS == 0
        stat = known.stat if known else None
        if stat is None or is_due or job.has_cpu or stat.parent not in here:
            stat = procfs.stat(self._proc, pid)
        if stat is None:
            raise ProcessLookupError
        try:
            counts = _parse_io(procfs.read(f"{self._proc}/{pid}/io"))
        except PermissionError:
            counts = None
        except OSError as error:
            raise ProcessLookupError from error
        if known is None or known.stat.start != stat.start:
            known = job.processes[pid] = _Process(stat)
        known.stat, known.looked, known.readable = stat, now, counts is not None
        known.anonymous = self._pages.anonymous(pid) if job.has_memory else None
        return stat, counts

    def _order(
        self, jobs: Mapping[str, JobSeen], here: frozenset[int]
    ) -> Iterator[tuple[str, int]]:
        """Yield what to read: the least recently read first, and parents before their children.

        A child that is read after its parent cannot already be part of the parent's counts.
        """
        found = []
        for jobid, seen in jobs.items():
            known = self._jobs[jobid].processes
            for pid in seen.pids & here:
                one = known.get(pid)
                place = (one.looked, one.stat.start) if one else (0.0, 0)
                found.append((*place, jobid, pid))
        yield from ((jobid, pid) for *_, jobid, pid in sorted(found))


class _Pages:
    """Anonymous memory of processes; a shared page counts once.

    A fork has its parent's pages until one of them writes: of a training with eight forked loaders
    the sum of sizes would be nine times the memory. /proc/PID/smaps_rollup divides each page by
    those who share it (Pss_Anon, since Linux 5.4), but makes the kernel walk through all of them,
    some 25 ms per GiB. So walks are rationed, and until its next one a process keeps its share.

    Args:
        proc: mount point of procfs.
    """

    def __init__(self, proc: str) -> None:
        self._proc = proc
        self._walk_at = 0.0

    def anonymous(self, pid: int) -> int | None:
        """Return the anonymous bytes of a process, shared ones in full; None if it is gone."""
        words = procfs.read_or_empty(f"{self._proc}/{pid}/statm").split()
        # Resident pages less those of files and shared memory.
        return max(0, int(words[1]) - int(words[2])) * _PAGE if words else None

    def divide(self, processes: Mapping[int, _Process], now: float) -> None:
        """Update the shares of a job's processes, as far as the ration allows."""
        large = [(one.shared_at, pid) for pid, one in processes.items() if _is_large(one)]
        if len(large) == 1:  # no other process shares it
            processes[large[0][1]].own_share = 1.0
            return
        for _, pid in sorted(large):
            # A token bucket: unused time adds up, but to one burst at most.
            self._walk_at = max(self._walk_at, now - _WALK_BURST_SECONDS / _WALK_SHARE)
            if self._walk_at > now:
                return
            began = time.thread_time()
            processes[pid].own_share, processes[pid].shared_at = self._share(pid), now
            self._walk_at += (time.thread_time() - began) / _WALK_SHARE

    def _share(self, pid: int) -> float:
        """Return the part of a process's anonymous memory that counts for it; 1 if unknown."""
        pss = {}
        for line in procfs.text(f"{self._proc}/{pid}/smaps_rollup").splitlines():
            name, _, size = line.partition(":")
            if name in {"Pss_Anon", "Anonymous"}:
                pss[name] = int(size.split()[0])
        return min(1.0, pss.get("Pss_Anon", 1) / (pss.get("Anonymous") or 1))


make = ProcessesCollector


def _is_large(process: _Process) -> bool:
    return process.anonymous is not None and process.anonymous >= _LARGE


def _parse_io(data: bytes) -> tuple[int, ...] | None:
    words = data.split()
    if tuple(words[0:12:2]) != _IO_NAMES:
        return None  # a kernel without task I/O accounting
    return int(words[1]), int(words[3]), int(words[9]), int(words[11])


def _measure(
    rows: dict[MetricSpec, list[Row]], label: Sequence[str], seen: JobSeen, job: _Job
) -> None:
    user, system, *io = job.totals.total()
    known = {pid: job.processes[pid] for pid in seen.pids & job.processes.keys()}
    # The extern step's `sleep` belongs to Slurm and root, not to the job. Without any other process
    # a sum is too low, so show the number of unreadable processes instead.
    extern = seen.steps.get("extern", frozenset())
    unreadable = sum(not one.readable for pid, one in known.items() if pid not in extern)
    if unreadable:
        rows[collector.UNREADABLE].append((label, unreadable))
    elif job.has_io:
        for spec, value in zip(_IO, io, strict=True):
            rows[spec].append((label, value))
    if known:
        threads = sum(one.stat.threads for one in known.values())
        rows[collector.THREADS].append((label, threads))
    if job.has_cpu:
        for mode, ticks in (("user", user), ("system", system)):
            rows[collector.CPU_SECONDS].append(((*label, mode), ticks / _TICKS))
    sizes = [one.anonymous * one.own_share for one in known.values() if one.anonymous is not None]
    if sizes:
        rows[collector.MEMORY].append(((*label, "rss"), round(sum(sizes))))
