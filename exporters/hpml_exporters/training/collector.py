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
from hpml_exporters.training import metrics as train
from hpml_exporters.training.message import parse
from hpml_exporters.training.sockets import Inherited, Listener, Refused
from hpml_exporters.training.totals import Figures, JobTotals

__all__ = ["STEP_BOUNDS_SECONDS", "Training", "make"]

STEP_BOUNDS_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 60.0)
"""Bounds of the steps' histogram; the same as in training_jobs/hpml_channel.py."""


def make(context: Context) -> Training:
    """Return the collector of this exporter's options.

    Raises:
        NotHereError: nobody can reach this exporter.
    """
    return Training(context)


class Training:
    """The collector `training`."""

    name = "training"
    specs: Sequence[MetricSpec] = train.SPECS

    def __init__(self, context: Context) -> None:
        options = context.options
        self.interval = options.job_interval
        self._board = context.jobs
        self._own = options.job.jobid if options.job is not None else None
        self._refused = Refused()
        self._jobs: dict[str, JobTotals] = {}
        self._source: Inherited | Listener
        if options.job is None:
            self._source = Listener(options.roots.run, context.jobs)
        elif options.feed_fd >= 0:
            self._source = Inherited(options.feed_fd, options.job.jobid)
        else:
            raise NotHereError("the job's agent gave no feed")

    def sample(self, now: float) -> list[Metric]:
        """Return the families as they are now; see `Collector.sample`."""
        for connection in self._source.read(self._refused):
            for datagram in connection.take():
                try:
                    message = parse(datagram)
                except ValueError:
                    self._refused.malformed += 1
                    continue
                agent = message.pid if connection.agent < 0 else connection.agent
                job = self._jobs.setdefault(connection.jobid, JobTotals())
                job.add(message, agent, now)
        if self._own is None:
            there = self._board.now.by_id
            self._jobs = {jobid: job for jobid, job in self._jobs.items() if jobid in there}
        shown: dict[MetricSpec, list[Row]] = {spec: [] for spec in self.specs}
        for jobid, job in self._jobs.items():
            figures = job.figures(now)
            if figures is not None:
                for spec, sample in _samples(jobid, figures):
                    shown[spec].append(sample)
        for reason, count in vars(self._refused).items():
            shown[train.FEED_REFUSED].append(((reason,), count))
        return families(shown)

    def close(self) -> None:
        """Close the sockets."""
        self._source.close()


def _samples(jobid: str, of: Figures) -> Iterator[tuple[MetricSpec, Row]]:
    """Yield the series of one job."""
    job = (jobid,)
    if of.totals[1]:  # before, its ranks have counted nothing: there may be no channel at all
        yield train.SAMPLES, (job, of.totals[0])
        yield train.STEPS, (job, of.totals[1])
        yield train.DATA_WAIT_SECONDS, (job, of.totals[2])
        yield train.RANKS, (job, of.ranks)
    for method, seconds in of.comm:
        yield train.COMM_SECONDS, ((jobid, method), seconds)
    if of.buckets is not None:
        yield train.STEP_DURATION, (job, _histogram(of.buckets, of.bucket_seconds))
    yield from _spread(jobid, of)
    for spec, value in (
        (train.LOSS, of.loss),
        (train.ACCURACY, of.accuracy),
        (train.MFU, of.mfu),
    ):
        if value is not None:
            yield spec, (job, value)
    if of.binding is not None:
        yield train.BINDING_OK, (job, float(of.binding[1] == 0))
        yield train.BINDING_WRONG, (job, of.binding[1])


def _spread(jobid: str, of: Figures) -> Iterator[tuple[MetricSpec, Row]]:
    """Yield what tells ranks apart, in as many series whatever their number."""
    for spec, names, figures in (
        (train.RANK_STEP_SECONDS, ("fastest", "slowest"), of.step_seconds),
        (train.RANK_DATA_WAIT_SECONDS, ("shortest", "longest"), of.data_wait),
    ):
        for name, seconds in zip(names, figures or (), strict=False):
            yield spec, ((jobid, name), seconds)
    if of.longest_wait is not None:
        yield train.LONGEST_DATA_WAIT, ((jobid, str(of.longest_wait)), 1.0)


def _histogram(buckets: tuple[int, ...], seconds: float) -> Histogram:
    return Histogram(STEP_BOUNDS_SECONDS, buckets, seconds)
