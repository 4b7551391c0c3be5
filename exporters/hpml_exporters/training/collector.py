"""What trainings say of themselves: samples, steps, waits, loss, and where their ranks run.

The ranks tell their node's agent (training_jobs/hpml_channel.py), which tells its job's exporter
through an inherited socket, and the node's through `{run}/exporter.sock`. A job's series end when
it has left the node, or its agent was silent for a minute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import Metric

from hpml_exporters.core.collector import NotHereError
from hpml_exporters.core.metric import Histogram, MetricSpec, Row, families
from hpml_exporters.options import Context
from hpml_exporters.training import metrics
from hpml_exporters.training.feed import InheritedFeed, ListeningFeed
from hpml_exporters.training.totals import JobTotals
from hpml_orchestrator.records.feed import STEP_BOUNDS_SECONDS

__all__ = ["TrainingCollector", "make"]


def make(context: Context) -> TrainingCollector:
    """Return the collector of this exporter's options.

    Raises:
        NotHereError: nobody can reach this exporter.
    """
    return TrainingCollector(context)


class TrainingCollector:
    """The collector `training`."""

    name = "training"
    specs: Sequence[MetricSpec] = metrics.SPECS

    def __init__(self, context: Context) -> None:
        options = context.options
        self.interval = options.job_interval
        self._cluster = options.cluster
        self._board = context.jobs
        self._own = options.job.jobid if options.job is not None else None
        self._jobs: dict[str, JobTotals] = {}
        self._feed: InheritedFeed | ListeningFeed
        if options.job is None:
            self._feed = ListeningFeed(options.roots.run, context.jobs)
        elif options.feed_fd >= 0:
            self._feed = InheritedFeed(options.feed_fd, options.job.jobid)
        else:
            raise NotHereError("the job's agent gave no feed")

    def sample(self, now: float) -> list[Metric]:
        """Return the families as they are now; see `Collector.sample`."""
        for said in self._feed.read():
            job = self._jobs.setdefault(said.jobid, JobTotals())
            for message in said.messages:
                job.add(message, said.agent, now)
        if self._own is None:
            there = self._board.now.by_id
            self._jobs = {jobid: job for jobid, job in self._jobs.items() if jobid in there}
        rows: dict[MetricSpec, list[Row]] = {spec: [] for spec in self.specs}
        for jobid, job in self._jobs.items():
            if not job.is_silent(now):
                for spec, labels, value in _series(job, now):
                    rows[spec].append(((self._cluster, jobid, *labels), value))
        rows[metrics.FEED_REFUSED] += [((why,), n) for why, n in self._feed.refused.items()]
        return families(rows)

    def close(self) -> None:
        """Close the sockets."""
        self._feed.close()


def _series(
    job: JobTotals, now: float
) -> Iterator[tuple[MetricSpec, tuple[str, ...], float | Histogram]]:
    """Yield the series of one job: metric, labels after the job's, value."""
    if job.totals["steps"]:  # before, its ranks have counted nothing: there may be no channel
        for name, spec in metrics.OF_COUNTERS.items():
            yield spec, (), job.totals[name]
        yield metrics.RANKS, (), len(job.ranks(now))
    for method, seconds in sorted(job.comm.items()):
        yield metrics.COMM_SECONDS, (method,), seconds
    if job.buckets is not None:
        steps = Histogram(STEP_BOUNDS_SECONDS, tuple(job.buckets), job.bucket_seconds)
        yield metrics.STEP_DURATION, (), steps
    for gauge, spec in metrics.OF_GAUGES.items():
        if (mean := job.mean(gauge, now)) is not None:
            yield spec, (), mean
    if (binding := job.binding(now)) is not None:
        yield metrics.BINDING_OK, (), binding[1] == 0
        yield metrics.BINDING_WRONG, (), binding[1]
    yield from _spread(job, now)


def _spread(job: JobTotals, now: float) -> Iterator[tuple[MetricSpec, tuple[str, ...], float]]:
    """Yield what tells ranks apart, in as many series whatever their number."""
    each = [(rank, rank.per_step("step_seconds")) for rank in job.ranks(now)]
    steps = [seconds for _, seconds in each if seconds is not None]
    if steps:
        yield metrics.RANK_STEP_SECONDS, ("fastest",), min(steps)
        yield metrics.RANK_STEP_SECONDS, ("slowest",), max(steps)
    if steps and job.totals["data_wait_seconds"]:  # else the training does not measure it
        # Of ranks that wait alike the lowest counts as the longest, so that the series stays.
        waits = [
            (rank.per_step("data_wait_seconds") or 0.0, -rank.number)
            for rank, seconds in each
            if seconds is not None
        ]
        yield metrics.RANK_DATA_WAIT_SECONDS, ("shortest",), min(waits)[0]
        yield metrics.RANK_DATA_WAIT_SECONDS, ("longest",), max(waits)[0]
        yield metrics.LONGEST_DATA_WAIT, (str(-max(waits)[1]),), 1.0
