"""The jobs of this node: finds them for all collectors, and reads their control groups."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.core import Metric

from hpml_exporters.core.collector import MetricSpec, Row, families, metric
from hpml_exporters.core.procfs import read_or_empty, subdirectories
from hpml_exporters.jobs.board import JobFacts, JobSeen
from hpml_exporters.jobs.finder import JobFinder
from hpml_exporters.options import Context

# Metrics of jobs: their identity, and the use of their control groups and processes.

_INHERITED = "ended ones' included; a new exporter begins with those that live then, each in full"


def _of_job(name: str, help_: str, labels: str = "", *, source: str) -> MetricSpec:
    return metric(name, help_, f"cluster jobid {labels}", source=source)


INFO = _of_job(
    "hpml_job_info",
    "Who a job on this node belongs to; what is not known is left out.",
    "user account partition qos name array_job array_task",
    source="prolog map, control group, owner and environment of the job's processes",
)
START = _of_job(
    "hpml_job_start_timestamp_seconds",
    "When the job started, since the epoch.",
    source="prolog map; SLURM_JOB_START_TIME of the job's processes",
)
END = _of_job(
    "hpml_job_end_timestamp_seconds",
    "When the job's time limit ends it, since the epoch; absent without a limit.",
    source="prolog map; SLURM_JOB_END_TIME of the job's processes",
)
RANKS = _of_job(
    "hpml_job_ranks",
    "World size of the job, over all of its nodes.",
    source="WORLD_SIZE of the job's processes",
)
RUN = _of_job(
    "hpml_run_info",
    "The run of hpml that a job belongs to, and the point of a sweep if it has one.",
    "run sweep point",
    source="node agent; HPML_RUN_DIR of the job's processes",
)
CPUS = _of_job(
    "hpml_job_cpus",
    "CPUs that Slurm bound the job to; absent where Slurm does not constrain cores.",
    source="cpuset.cpus of the job's control group",
)
CPU_SECONDS = _of_job(
    "hpml_job_cpu_seconds_total",
    "CPU time of all processes of the job since it began on this node, ended ones included.",
    "mode",
    source="cpu.stat (v2), cpuacct.stat (v1), else /proc/PID/stat",
)
MEMORY = _of_job(
    "hpml_job_memory_bytes",
    "Memory of the job: rss is anonymous, shmem is shared (such as /dev/shm), cache is of files.",
    "kind",
    source="memory.stat; without control groups rss alone, from /proc/PID/statm and smaps_rollup",
)
MEMORY_LIMIT = _of_job(
    "hpml_job_memory_limit_bytes",
    "Memory at which the kernel ends processes of the job; absent without a limit.",
    source="memory.max (v2), memory.limit_in_bytes (v1)",
)
MEMORY_PEAK = _of_job(
    "hpml_job_memory_peak_bytes",
    "Most memory the job ever had on this node, cache included.",
    source="memory.peak (v2, Linux 5.19 on), memory.max_usage_in_bytes (v1)",
)
OOM_EVENTS = _of_job(
    "hpml_job_oom_events_total",
    "Processes of the job that the kernel ended for want of memory, as seen while it ran.",
    source="oom_kill in memory.events (v2), memory.oom_control (v1)",
)
PRESSURE = _of_job(
    "hpml_job_pressure_seconds_total",
    "Time in which at least one task of the job waited for a resource (v2 only).",
    "resource",
    source="`some` in cpu.pressure, memory.pressure, io.pressure",
)
IO_READ = _of_job(
    "hpml_job_io_read_bytes_total",
    f"Bytes that the job's processes caused to be fetched from storage, {_INHERITED}.",
    source="read_bytes in /proc/PID/io",
)
IO_WRITE = _of_job(
    "hpml_job_io_write_bytes_total",
    f"Bytes that the job's processes caused to be sent to storage, {_INHERITED}.",
    source="write_bytes in /proc/PID/io",
)
IO_SYSCALL_READ = _of_job(
    "hpml_job_io_syscall_read_bytes_total",
    f"Bytes that read calls returned, from caches, RAM disks and pipes too, {_INHERITED}.",
    source="rchar in /proc/PID/io",
)
IO_SYSCALL_WRITE = _of_job(
    "hpml_job_io_syscall_write_bytes_total",
    f"Bytes given to write calls, to RAM disks and pipes too, {_INHERITED}.",
    source="wchar in /proc/PID/io",
)
PROCESSES = _of_job(
    "hpml_job_processes",
    "Processes of the job, without slurmstepd.",
    source="cgroup.procs, else SLURM_JOB_ID in /proc/PID/environ",
)
THREADS = _of_job("hpml_job_threads", "Threads of the job's processes.", source="/proc/PID/stat")
UNREADABLE = _of_job(
    "hpml_job_unreadable_processes",
    "Processes whose I/O the exporter may not read; the job's I/O is absent while there are any.",
    source="/proc/PID/io; CAP_SYS_PTRACE with CAP_DAC_READ_SEARCH opens it",
)

GROUP_SPECS = (
    *(INFO, RUN, START, END, RANKS, PROCESSES, CPUS, CPU_SECONDS, MEMORY, MEMORY_LIMIT),
    *(MEMORY_PEAK, OOM_EVENTS, PRESSURE),
)
"""Metrics of the collector `jobs`."""

PROCESS_SPECS = (
    *(IO_READ, IO_WRITE, IO_SYSCALL_READ, IO_SYSCALL_WRITE, THREADS, UNREADABLE),
    *(CPU_SECONDS, MEMORY),
)
"""Metrics of the collector `processes`; the last two where no control group counts them."""

SPECS = tuple(dict.fromkeys((*GROUP_SPECS, *PROCESS_SPECS)))
"""All of them."""


# Counts of a job's control groups, version 1 and 2.

_TICKS = os.sysconf("SC_CLK_TCK")
_NO_LIMIT = 1 << 60  # version 1 has no word for it, only a number near the largest one
_PRESSURES = ("cpu", "memory", "io")


@dataclass
class JobUsage:
    """Figures of one job in one hierarchy; figures without a counter are missing.

    Attributes:
        counters: by the group that counted, the metric, and its label or none.
        memory: bytes by kind: rss, cache, shmem, which do not overlap.
        levels: by metric: CPUs, limit and peak of memory.
    """

    counters: dict[tuple[str, MetricSpec, str], float] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    levels: dict[MetricSpec, int] = field(default_factory=dict)

    def set(self, spec: MetricSpec, level: int | None) -> None:
        """Record a level, if there is one."""
        if level is not None:
            self.levels[spec] = level


def read_usage(groups: Mapping[str, str]) -> JobUsage:
    """Return the figures of a job's groups.

    Args:
        groups: one of `JobSeen.groups`.
    """
    return _version_2(groups[""]) if "" in groups else _version_1(groups)


def counts_cpu(groups: Mapping[str, str]) -> bool:
    """Return whether a job's groups count CPU time."""
    return "" in groups or "cpuacct" in groups


def counts_memory(groups: Mapping[str, str]) -> bool:
    """Return whether a job's groups count memory; in version 2 it may be switched off."""
    if "" in groups:
        return os.path.exists(f"{groups['']}/memory.stat")
    return "memory" in groups


def _version_2(path: str) -> JobUsage:
    cpu = _pairs(f"{path}/cpu.stat")
    # `file` contains shmem.
    usage = JobUsage(memory=_kinds(_pairs(f"{path}/memory.stat"), b"anon", b"file", b"shmem"))
    # Not cpuset.cpus.effective: where Slurm sets no CPUs, it lists those of the whole machine.
    usage.set(CPUS, _cpus(f"{path}/cpuset.cpus"))
    for mode in ("user", "system"):
        if (counted := cpu.get(f"{mode}_usec".encode())) is not None:
            usage.counters[path, CPU_SECONDS, mode] = int(counted) / 1e6
    if usage.memory:
        usage.set(MEMORY_LIMIT, _number(read_or_empty(f"{path}/memory.max")))
        usage.set(MEMORY_PEAK, _number(read_or_empty(f"{path}/memory.peak")))
        _add_kills(usage, path, "memory.events")
    for resource in _PRESSURES:
        # The first line is `some avg10=… total=<microseconds>`.
        line = read_or_empty(f"{path}/{resource}.pressure").partition(b"\n")[0]
        stalled = _number(line.rpartition(b"total=")[2])
        if stalled is not None:
            usage.counters[path, PRESSURE, resource] = stalled / 1e6
    return usage


def _version_1(groups: Mapping[str, str]) -> JobUsage:
    usage = JobUsage()
    if path := groups.get("cpuacct"):
        cpu = _pairs(f"{path}/cpuacct.stat")
        for mode in ("user", "system"):
            if (counted := cpu.get(mode.encode())) is not None:
                usage.counters[path, CPU_SECONDS, mode] = int(counted) / _TICKS
    if path := groups.get("cpuset"):
        usage.set(CPUS, _cpus(f"{path}/cpuset.cpus"))
    if path := groups.get("memory"):
        memory = _pairs(f"{path}/memory.stat")
        usage.memory = _kinds(memory, b"total_rss", b"total_cache", b"total_shmem")
        limit = _number(read_or_empty(f"{path}/memory.limit_in_bytes"))
        usage.set(MEMORY_LIMIT, limit if limit and limit < _NO_LIMIT else None)
        peak = read_or_empty(f"{path}/memory.max_usage_in_bytes")
        usage.set(MEMORY_PEAK, _number(peak))
        for group in _leaves(path):
            _add_kills(usage, group, "memory.oom_control")  # since Linux 4.13
    return usage


def _add_kills(usage: JobUsage, group: str, name: str) -> None:
    kills = _pairs(f"{group}/{name}").get(b"oom_kill")
    if kills is not None:
        usage.counters[group, OOM_EVENTS, ""] = int(kills)


def _leaves(group: str) -> Iterator[str]:
    """Yield the innermost groups: version 1 counts a kill only where the process was."""
    children = subdirectories(group)
    if not children:
        yield group
    for name in children:
        yield from _leaves(f"{group}/{name}")


def _cpus(path: str) -> int | None:
    """Return how many CPUs a list like `0-3,8` names; None for an empty one."""
    total = 0
    for part in read_or_empty(path).decode().split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            return None
        total += int(last or first) - int(first) + 1
    return total


def _pairs(path: str) -> dict[bytes, bytes]:
    words = read_or_empty(path).split()
    return dict(zip(words[::2], words[1::2], strict=False))


def _number(data: bytes) -> int | None:
    text = data.strip()
    return int(text) if text.isdigit() else None


def _kinds(memory: Mapping[bytes, bytes], rss: bytes, cache: bytes, shmem: bytes) -> dict[str, int]:
    if rss not in memory or cache not in memory:
        return {}
    shared = int(memory.get(shmem, -1))  # before Linux 4.14 version 1 has no such line
    found = {"rss": int(memory[rss]), "cache": max(0, int(memory[cache]) - max(0, shared))}
    return found if shared < 0 else found | {"shmem": shared}


Rows = dict[MetricSpec, list[Row]]
Counters = dict[tuple[str, MetricSpec, str], float]


class JobsCollector:
    """Posts the view of the jobs, and shows the counts of their control groups.

    Args:
        context: of the exporter, with the board to post to.
    """

    name = "jobs"
    specs: Sequence[MetricSpec] = GROUP_SPECS

    def __init__(self, context: Context) -> None:
        self.interval = context.options.job_interval
        self._cluster = context.options.cluster
        self._board = context.jobs
        self._finder = JobFinder(context.options)
        self._counters: dict[str, Counters] = {}

    def sample(self, now: float) -> list[Metric]:
        """Find the jobs, post them, and read their groups.

        Args:
            now: monotonic seconds.
        """
        jobs = self._finder.look(now)
        # Post before reading the groups: at the start other collectors wait for the first view.
        self._board.post(jobs)
        rows: Rows = {spec: [] for spec in self.specs}
        for key, seen in jobs.by_id.items():
            label = self._cluster, key
            _identify(rows, label, seen.facts)
            rows[PROCESSES].append((label, len(seen.pids)))
            _measure(rows, label, *self._usage(key, seen))
        for key in self._counters.keys() - jobs.by_id.keys():
            del self._counters[key]
        return families(rows)

    def close(self) -> None:
        """Do nothing: no file is open."""

    def _usage(self, key: str, seen: JobSeen) -> tuple[list[JobUsage], Counters]:
        """Return the current figures of a job's groups by slurmd, and their totals."""
        usages = [read_usage(groups) for groups in seen.groups]
        counters = self._counters.setdefault(key, {})
        for usage in usages:
            for counter, value in usage.counters.items():
                # A group that is being removed may show less; a counter must not go back.
                counters[counter] = max(value, counters.get(counter, 0.0))
        return usages, counters


make = JobsCollector


def _identify(rows: Rows, label: Sequence[str], facts: JobFacts) -> None:
    names = INFO.labels[2:]
    rows[INFO].append(((*label, *(getattr(facts, name) for name in names)), 1.0))
    if facts.run:
        rows[RUN].append(((*label, facts.run, facts.sweep, facts.point), 1.0))
    numbers = {START: facts.start, END: facts.end, RANKS: facts.ranks}
    for spec, value in numbers.items():
        if value:
            rows[spec].append((label, value))


def _measure(rows: Rows, label: Sequence[str], usages: list[JobUsage], counters: Counters) -> None:
    """Add the figures of the job's groups; the counters include groups that have ended."""
    totals: dict[tuple[MetricSpec, str], float] = {}
    for (_, spec, more), value in counters.items():
        totals[spec, more] = totals.get((spec, more), 0.0) + value
    for (spec, more), value in totals.items():
        rows[spec].append(((*label, more) if more else label, value))
    for kind in ("rss", "cache", "shmem"):
        sizes = [usage.memory[kind] for usage in usages if kind in usage.memory]
        if sizes:
            rows[MEMORY].append(((*label, kind), sum(sizes)))
    for spec in (CPUS, MEMORY_LIMIT, MEMORY_PEAK):
        levels = [usage.levels[spec] for usage in usages if spec in usage.levels]
        # Two groups may have peaked at different times: their sum need never have been used. And
        # without the part of one slurmd a sum is too low, so show none.
        most = 1 if spec is MEMORY_PEAK else len(levels)
        if levels and len(usages) == len(levels) == most:
            rows[spec].append((label, sum(levels)))
