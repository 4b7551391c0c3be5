"""The jobs of this node: finds them for all collectors, and reads their control groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.core import Metric

from hpml_exporters.core.metric import MetricSpec, Row, families
from hpml_exporters.jobs import metrics
from hpml_exporters.jobs.board import JobFacts
from hpml_exporters.jobs.finder import JobFinder
from hpml_exporters.jobs.raw import Kept
from hpml_exporters.jobs.usage import Usage, UsageReader
from hpml_exporters.options import Context

__all__ = ["JobsCollector", "make"]

_SPECS = (
    metrics.INFO,
    metrics.RUN,
    metrics.CPUS,
    metrics.CPU_SECONDS,
    metrics.MEMORY,
    metrics.MEMORY_LIMIT,
    metrics.MEMORY_PEAK,
    metrics.OOM_EVENTS,
    metrics.PRESSURE,
    metrics.PROCESSES,
)


class JobsCollector:
    """Posts the view of the jobs, and shows what their control groups counted.

    Args:
        context: the exporter's; its board is the one that is posted to.
    """

    name = "jobs"
    specs: Sequence[MetricSpec] = _SPECS

    def __init__(self, context: Context) -> None:
        self.interval = context.options.job_interval
        self._board = context.jobs
        self._finder = JobFinder(context.options)
        self._counted: dict[str, _Counted] = {}
        self._files = Kept()

    def sample(self, now: float) -> list[Metric]:
        """Look for jobs, post them, and read their groups.

        Args:
            now: monotonic seconds.
        """
        jobs = self._finder.look(now)
        self._board.post(jobs)
        rows: dict[MetricSpec, list[Row]] = {spec: [] for spec in _SPECS}
        for jobid, seen in jobs.by_id.items():
            _identity(rows, seen.facts)
            rows[metrics.PROCESSES].append(((jobid,), len(seen.pids)))
            counted = self._counted.get(jobid)
            if counted is None:
                counted = self._counted[jobid] = _Counted(UsageReader(self._files))
            read = counted.read(self._finder.groups(jobid))
            _figures(rows, jobid, list(read.values()), counted.add(read))
        for jobid in self._counted.keys() - jobs.by_id.keys():
            self._counted.pop(jobid).read(())
        return families(rows)

    def close(self) -> None:
        """Close the files that were kept open."""
        self._files.close()


class _Counted:
    """Counters of a job, whose groups (one per slurmd of this machine) may end one by one."""

    def __init__(self, reader: UsageReader) -> None:
        self._reader = reader
        self._groups: dict[str, Mapping[str, str]] = {}
        self._ended: dict[tuple[str, str], float] = {}
        self._last: dict[str, dict[tuple[str, str], float]] = {}

    def read(self, groups: Iterable[Mapping[str, str]]) -> dict[str, Usage]:
        """Return what each of the job's groups counted, by its directory; forget the others."""
        now = {min(one.values()): one for one in groups}
        for path in self._groups.keys() - now.keys():
            self._reader.forget(self._groups[path])
        self._groups = now
        return {path: self._reader.usage(one) for path, one in now.items()}

    def add(self, read: Mapping[str, Usage]) -> dict[tuple[str, str], float]:
        """Return the counters by what they count and its label, groups that ended included."""
        now = {path: _counters(usage) for path, usage in read.items()}
        for path in self._last.keys() - now.keys():
            _sum_into(self._ended, self._last[path])
        for path, before in self._last.items():
            # Read while it was being removed: what was seen last still holds.
            for key, value in before.items() if path in now else ():
                now[path][key] = max(value, now[path].get(key, 0.0))
        self._last = now
        total = dict(self._ended)
        for counters in now.values():
            _sum_into(total, counters)
        return total


def make(context: Context) -> JobsCollector:
    """Return the collector."""
    return JobsCollector(context)


def _counters(usage: Usage) -> dict[tuple[str, str], float]:
    found = {("cpu", mode): seconds for mode, seconds in usage.cpu_seconds.items()}
    found |= {("pressure", resource): value for resource, value in usage.pressure.items()}
    found |= {("oom", path): float(kills) for path, kills in usage.oom_kills.items()}
    return found


def _sum_into(total: dict[tuple[str, str], float], more: Mapping[tuple[str, str], float]) -> None:
    for key, value in more.items():
        total[key] = total.get(key, 0.0) + value


def _identity(rows: dict[MetricSpec, list[Row]], facts: JobFacts) -> None:
    who = (facts.jobid, facts.user, facts.account, facts.partition, facts.name)
    rows[metrics.INFO].append((who, 1.0))
    if facts.run:
        run = (facts.jobid, facts.run, facts.sweep, facts.point)
        rows[metrics.RUN].append((run, 1.0))


def _figures(
    rows: dict[MetricSpec, list[Row]],
    jobid: str,
    read: list[Usage],
    counters: Mapping[tuple[str, str], float],
) -> None:
    by_kind = {"cpu": metrics.CPU_SECONDS, "pressure": metrics.PRESSURE}
    for (kind, label), value in counters.items():
        if kind in by_kind:
            rows[by_kind[kind]].append(((jobid, label), value))
    kills = [value for (kind, _), value in counters.items() if kind == "oom"]
    if kills:
        rows[metrics.OOM_EVENTS].append(((jobid,), sum(kills)))
    for kind in ("rss", "cache", "shmem"):
        found = [usage.memory[kind] for usage in read if kind in usage.memory]
        if found:
            rows[metrics.MEMORY].append(((jobid, kind), sum(found)))
    for spec, values in (
        (metrics.CPUS, [usage.cpus for usage in read]),
        (metrics.MEMORY_LIMIT, [usage.limit for usage in read]),
        # Peaks of two groups need not have been at the same time: one group only.
        (metrics.MEMORY_PEAK, [usage.peak for usage in read] if len(read) == 1 else []),
    ):
        known = [value for value in values if value is not None]
        if known and len(known) == len(read):
            rows[spec].append(((jobid,), sum(known)))
