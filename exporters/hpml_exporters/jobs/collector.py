"""The jobs of this node: finds them for all collectors, and reads their control groups."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client.core import Metric

from hpml_exporters.core.metric import MetricSpec, Row, families
from hpml_exporters.jobs import metrics
from hpml_exporters.jobs.board import JobFacts, JobSeen
from hpml_exporters.jobs.finder import JobFinder
from hpml_exporters.jobs.usage import JobUsage, read_usage
from hpml_exporters.options import Context

Rows = dict[MetricSpec, list[Row]]
Counters = dict[tuple[str, MetricSpec, str], float]


class JobsCollector:
    """Posts the view of the jobs, and shows what their control groups counted.

    Args:
        context: the exporter's; its board is the one that is posted to.
    """

    name = "jobs"
    specs: Sequence[MetricSpec] = metrics.GROUP_SPECS

    def __init__(self, context: Context) -> None:
        self.interval = context.options.job_interval
        self._cluster = context.options.cluster
        self._board = context.jobs
        self._finder = JobFinder(context.options)
        self._counters: dict[str, Counters] = {}

    def sample(self, now: float) -> list[Metric]:
        """Look for jobs, post them, and read their groups.

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
            rows[metrics.PROCESSES].append((label, len(seen.pids)))
            _measure(rows, label, *self._usage(key, seen))
        for key in self._counters.keys() - jobs.by_id.keys():
            del self._counters[key]
        return families(rows)

    def close(self) -> None:
        """Nothing is kept open."""

    def _usage(self, key: str, seen: JobSeen) -> tuple[list[JobUsage], Counters]:
        """Return the present figures of a job's groups by slurmd, and their totals so far."""
        usages = [read_usage(groups) for groups in seen.groups]
        counters = self._counters.setdefault(key, {})
        for usage in usages:
            for counter, value in usage.counters.items():
                # A group that is being removed may show less; a counter must not go back.
                counters[counter] = max(value, counters.get(counter, 0.0))
        return usages, counters


make = JobsCollector


def _identify(rows: Rows, label: Sequence[str], facts: JobFacts) -> None:
    names = metrics.INFO.labels[2:]
    rows[metrics.INFO].append(((*label, *(getattr(facts, name) for name in names)), 1.0))
    if facts.run:
        rows[metrics.RUN].append(((*label, facts.run, facts.sweep, facts.point), 1.0))
    numbers = {metrics.START: facts.start, metrics.END: facts.end, metrics.RANKS: facts.ranks}
    for spec, value in numbers.items():
        if value:
            rows[spec].append((label, value))


def _measure(rows: Rows, label: Sequence[str], usages: list[JobUsage], counters: Counters) -> None:
    """Add what the job's groups show; the counters include groups that have ended."""
    totals: dict[tuple[MetricSpec, str], float] = {}
    for (_, spec, more), value in counters.items():
        totals[spec, more] = totals.get((spec, more), 0.0) + value
    for (spec, more), value in totals.items():
        rows[spec].append(((*label, more) if more else label, value))
    for kind in ("rss", "cache", "shmem"):
        sizes = [usage.memory[kind] for usage in usages if kind in usage.memory]
        if sizes:
            rows[metrics.MEMORY].append(((*label, kind), sum(sizes)))
    for spec in (metrics.CPUS, metrics.MEMORY_LIMIT, metrics.MEMORY_PEAK):
        levels = [usage.levels[spec] for usage in usages if spec in usage.levels]
        # Two groups may have peaked at different times: their sum need never have been used. And
        # without the part of one slurmd a sum is too low, so show none.
        most = 1 if spec is metrics.MEMORY_PEAK else len(levels)
        if levels and len(usages) == len(levels) == most:
            rows[spec].append((label, sum(levels)))
