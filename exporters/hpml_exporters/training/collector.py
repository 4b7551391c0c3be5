"""What trainings report: samples, steps, waits, loss, and where their ranks run.

The ranks report to their node's agent (training_jobs/hpml_channel.py). It informs its job's
exporter through an inherited socket, and the node's through `{run}/exporter.sock`. A job's series
end when it has left the node, or its agent was silent for a minute.

The figures of each agent's ranks only grow, so what a message adds is the difference to the one
before; the first message of an agent counts in full. So the job's counters never
fall: not when a rank starts again (its agent adds up its processes), and not when the agent does
(a job that Slurm requeued).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from prometheus_client.core import Metric

from hpml_exporters.core.collector import NotHereError
from hpml_exporters.core.metric import Histogram, MetricSpec, Row, families
from hpml_exporters.options import Context
from hpml_exporters.training import metrics
from hpml_exporters.training.feed import InheritedFeed, ListeningFeed
from hpml_orchestrator.records.feed import (
    BUCKETS,
    COUNTERS,
    STEP_BOUNDS_SECONDS,
    FeedMessage,
    RankFigures,
)

_SILENT_SECONDS = 60.0
_STALE_SECONDS = 600.0  # an older loss or accuracy is not shown
_WINDOW_SECONDS = 60.0
_MAX_AGENTS = 64  # nodes that one machine plays, and the job's earlier attempts
_MAX_RANKS = 4096
_MAX_METHODS = 4


class TrainingCollector:
    """The collector `training`.

    Raises:
        NotHereError: nobody can reach this exporter.
    """

    name = "training"
    specs: Sequence[MetricSpec] = metrics.SPECS

    def __init__(self, context: Context) -> None:
        options = context.options
        self.interval = options.job_interval
        self._cluster = options.cluster
        self._board = context.jobs
        self._own = options.job.jobid if options.job is not None else None
        self._jobs: dict[str, _JobTotals] = {}
        self._feed: InheritedFeed | ListeningFeed
        if options.job is None:
            self._feed = ListeningFeed(options.roots.run, context.jobs)
        elif options.feed_fd >= 0:
            self._feed = InheritedFeed(options.feed_fd, options.job.key)
        else:
            raise NotHereError("the job's agent gave no feed")

    def sample(self, now: float) -> list[Metric]:
        """Return the families as they are now; see `Collector.sample`."""
        for said in self._feed.read():
            job = self._jobs.setdefault(said.key, _JobTotals())
            for message in said.messages:
                job.add(message, said.agent, now)
        there = self._board.now.by_id
        if self._own is None:
            self._jobs = {key: job for key, job in self._jobs.items() if key in there}
        rows: dict[MetricSpec, list[Row]] = {spec: [] for spec in self.specs}
        for key, job in self._jobs.items():
            if not job.is_silent(now):
                for spec, labels, value in _series(job, now):
                    rows[spec].append(((self._cluster, key, *labels), value))
        rows[metrics.FEED_REFUSED] += [((why,), n) for why, n in self._feed.refused.items()]
        return families(rows)

    def close(self) -> None:
        """Close the sockets."""
        self._feed.close()


make = TrainingCollector


def _series(
    job: _JobTotals, now: float
) -> Iterator[tuple[MetricSpec, tuple[str, ...], float | Histogram]]:
    """Yield the series of one job: metric, labels after the job's, value."""
    if job.totals["steps"]:  # before, its ranks have counted nothing: there may be no channel
        for name, spec in metrics.OF_COUNTERS.items():
            yield spec, (), job.totals[name]
        for name, spec in metrics.OF_PARTS.items():
            if job.totals[name]:
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


def _spread(job: _JobTotals, now: float) -> Iterator[tuple[MetricSpec, tuple[str, ...], float]]:
    each = [(rank, rank.per_step("step_seconds")) for rank in job.ranks(now)]
    steps = [seconds for _, seconds in each if seconds is not None]
    if steps:
        yield metrics.RANK_STEP_SECONDS, ("fastest",), min(steps)
        yield metrics.RANK_STEP_SECONDS, ("slowest",), max(steps)
    # Among ranks that wait equally long, name the lowest, so that the series stays the same.
    for counter, spec in (
        ("data_wait_seconds", metrics.RANK_DATA_WAIT_SECONDS),
        ("wait_seconds", metrics.RANK_WAIT_SECONDS),
    ):
        waits = {
            rank.number: rank.per_step(counter) or 0.0
            for rank, seconds in each
            if seconds is not None
        }
        if not waits or not job.totals[counter]:  # the training does not measure it
            continue
        ranks = sorted(waits)
        shortest, longest = min(ranks, key=waits.__getitem__), max(ranks, key=waits.__getitem__)
        yield spec, ("shortest",), waits[shortest]
        yield spec, ("longest",), waits[longest]
        if counter == "wait_seconds":
            yield metrics.SHORTEST_WAIT, (str(shortest),), 1.0
        else:
            yield metrics.LONGEST_DATA_WAIT, (str(longest),), 1.0


@dataclass
class _Rank:
    """One rank of one agent: its last message, and its steps over the last minute.

    Attributes:
        number: global rank.
        heard: when it last spoke, not when its agent did.
        totals: its counters by name.
        buckets: its steps by duration.
        gauges: its latest values by name.
        recent: its counters over the last minute, each with the time.
    """

    number: int
    heard: float
    totals: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0.0))
    buckets: Sequence[int] = (0,) * BUCKETS
    gauges: dict[str, float] = field(default_factory=dict)
    recent: deque[tuple[float, dict[str, float]]] = field(default_factory=deque)

    def per_step(self, counter: str) -> float | None:
        """Return a counter's growth per step over the last minute; None without a step."""
        before = self.recent[0][1]
        steps = self.totals["steps"] - before["steps"]
        return (self.totals[counter] - before[counter]) / steps if steps > 0 else None


@dataclass
class _Agent:
    heard: float = 0.0
    binding: tuple[int, int] | None = None
    ranks: dict[int, _Rank] = field(default_factory=dict)


class _JobTotals:
    """One job on this node.

    Attributes:
        totals: its counters by name.
        comm: seconds of communication by method.
        buckets: steps by duration, not cumulative; None if no rank reports them.
        bucket_seconds: duration of those steps.
    """

    def __init__(self) -> None:
        self.totals = dict.fromkeys(COUNTERS, 0.0)
        self.comm: dict[str, float] = {}
        self.buckets: list[int] | None = None
        self.bucket_seconds = 0.0
        self._agents: dict[int, _Agent] = {}

    def add(self, message: FeedMessage, agent: int, now: float) -> None:
        """Add an agent's message.

        Args:
            message: its content.
            agent: its process id.
            now: monotonic seconds.
        """
        # Each requeue of a job brings a new agent; their number must not grow for ever.
        if agent not in self._agents and len(self._agents) >= _MAX_AGENTS:
            del self._agents[min(self._agents, key=lambda one: self._agents[one].heard)]
        known = self._agents.setdefault(agent, _Agent())
        known.heard, known.binding = now, message.binding
        for figures in message.ranks:
            if figures.rank in known.ranks or len(known.ranks) < _MAX_RANKS:
                rank = known.ranks.setdefault(figures.rank, _Rank(figures.rank, now))
                self._add_rank(rank, figures, now)

    def ranks(self, now: float, within: float = _SILENT_SECONDS) -> list[_Rank]:
        """Return the ranks heard within these seconds."""
        ranks = [rank for agent in self._speaking(now) for rank in agent.ranks.values()]
        return [rank for rank in ranks if now - rank.heard <= within]

    def is_silent(self, now: float) -> bool:
        """Return whether no agent has spoken in the last minute."""
        return not self._speaking(now)

    def binding(self, now: float) -> tuple[int, int] | None:
        """Return how many ranks are bound as planned, and how many others; None: not judged."""
        judged = [agent.binding for agent in self._speaking(now) if agent.binding is not None]
        return (sum(one[0] for one in judged), sum(one[1] for one in judged)) if judged else None

    def mean(self, gauge: str, now: float) -> float | None:
        """Return the mean of a gauge over the ranks that report it."""
        ranks = self.ranks(now, _STALE_SECONDS)
        values = [rank.gauges[gauge] for rank in ranks if gauge in rank.gauges]
        return sum(values) / len(values) if values else None

    def _speaking(self, now: float) -> list[_Agent]:
        return [one for one in self._agents.values() if now - one.heard <= _SILENT_SECONDS]

    def _add_rank(self, rank: _Rank, figures: RankFigures, now: float) -> None:
        grown = {}
        for name, value in zip(COUNTERS, figures.totals, strict=True):
            # A counter that falls is ignored by itself; the others of its message still count.
            grown[name] = max(0.0, value - rank.totals[name])
            self.totals[name] += grown[name]
        rank.totals = {name: rank.totals[name] + grown[name] for name in COUNTERS}
        rank.gauges, rank.heard = figures.gauges, now - figures.age
        rank.recent.append((now, rank.totals))
        # Keep one entry from before the window, so that the difference spans all of it.
        while len(rank.recent) > 1 and rank.recent[1][0] <= now - _WINDOW_SECONDS:
            rank.recent.popleft()
        if figures.method:
            # The name is the user's free text, and must not create series without limit.
            has_room = figures.method in self.comm or len(self.comm) < _MAX_METHODS
            method = figures.method if has_room else "other"
            self.comm[method] = self.comm.get(method, 0.0) + grown["comm_seconds"]
        if figures.buckets is not None:
            self.buckets = self.buckets or [0] * BUCKETS
            for place, count in enumerate(figures.buckets):
                self.buckets[place] += max(0, count - rank.buckets[place])
            rank.buckets = tuple(map(max, rank.buckets, figures.buckets))
            self.bucket_seconds += grown["step_seconds"]
