"""Refreshes the cluster's figures, and keeps the last ones while Slurm does not answer."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from prometheus_client.core import Metric

from hpml_exporters.core.collector import (
    Histogram,
    MetricSpec,
    MetricType,
    Row,
    StaleError,
    families,
)
from hpml_exporters.slurm.commands import ENDED, ClusterNode, QueueRow, View
from hpml_orchestrator.errors import SchedulerUnavailable

if TYPE_CHECKING:
    from hpml_exporters.slurm.commands import ViewSource

# The metrics of a cluster.

_UNITS = ("seconds", "bytes", "ratio")
_TYPES: dict[str, MetricType] = {"total": "counter", "info": "info"}


def _spec(
    source: str, name: str, labels: str, text: str, kind: MetricType | None = None
) -> MetricSpec:
    end = name.rpartition("_")[2]
    unit = end if end in _UNITS else ""
    kind = kind or _TYPES.get(end, "gauge")
    return MetricSpec(f"hpml_slurm_{name}", kind, text, tuple(labels.split()), unit, source)


_OWN, _SQUEUE, _SINFO, _SCONTROL = "exporter", "squeue", "sinfo", "scontrol"

AGE = _spec(_OWN, "last_refresh_timestamp_seconds", "", "When the figures shown here were read.")
INTERVAL = _spec(_OWN, "refresh_interval_seconds", "", "Time between two refreshes (--interval).")

QUEUE = _spec(
    *(_SQUEUE, "queue_jobs", "state reason"),
    "Jobs that have not ended, each once, and why pending ones wait.",
)
JOBS = _spec(
    *(_SQUEUE, "jobs", "state partition qos"),
    "Jobs that have not ended; one that waits in several partitions counts in each.",
)
REASONS = _spec(
    *(_SQUEUE, "jobs_pending", "partition reason"),
    "Pending jobs by the reason that Slurm gives; those of several partitions count in each.",
)
USER_JOBS = _spec(
    _SQUEUE, "user_jobs", "user state", "Jobs of a user that have not ended (--users)."
)
ENDED_JOBS = _spec(_SQUEUE, "jobs_ended_total", "partition state", "Jobs that ended.")
WAIT = _spec(
    *(_SQUEUE, "job_wait_seconds", "partition"),
    "Time from being eligible to the start, of jobs that started.",
    "histogram",
)

NODES = _spec(_SINFO, "nodes", "state", "Nodes by state.")
REASON = _spec(
    *(_SINFO, "node_reason_info", "node state reason"),
    "Nodes that are away (down, drained, maintenance, rebooting, powered_down) or have a reason.",
)
CPUS = _spec(_SINFO, "cpus", "state", "CPUs: allocated; else idle, powered_down or down.")
GPUS = _spec(_SINFO, "gpus", "type state", "GPUs: allocated; else idle, powered_down or down.")
PARTITION_GPUS = _spec(
    _SINFO, "partition_gpus", "partition type state", "GPUs of a partition's nodes."
)
NODE_GPUS = _spec(_SINFO, "node_gpus", "node", "GPUs of a node by its Gres in slurm.conf.")

LICENSES = _spec(_SCONTROL, "licenses", "license", "Licences that there are.")
LICENSES_USED = _spec(_SCONTROL, "licenses_used", "license", "Licences in use.")
RESERVATION_NODES = _spec(
    _SCONTROL, "reservation_nodes", "reservation state", "Nodes of a reservation."
)
RESERVATION_START = _spec(
    *(_SCONTROL, "reservation_start_timestamp_seconds", "reservation"),
    "When a reservation begins.",
)
RESERVATION_END = _spec(
    _SCONTROL, "reservation_end_timestamp_seconds", "reservation", "When a reservation ends."
)
FAIRSHARE = _spec(
    *("sshare", "user_fairshare_ratio", "account user"),
    "Fairshare factor of a user, 0 to 1 (--users).",
)

STATISTICS = {
    statistic: _spec("sdiag", f"scheduler_{name}", "", text)
    for statistic, name, text in (
        ("server_thread_count", "threads", "Threads of slurmctld."),
        ("agent_queue_size", "agent_queue", "Messages that wait to be sent."),
        ("dbd_agent_queue_size", "dbd_queue", "Messages that wait for slurmdbd."),
        ("schedule_cycle_last", "cycle_seconds", "Length of the last main cycle."),
        ("backfill_cycle_last", "backfill_cycle_seconds", "Length of the last backfill."),
    )
}
"""Metrics of Slurm's statistics by pyslurm's names; Slurm gives times in microseconds."""

SPECS: tuple[MetricSpec, ...] = (
    *(AGE, INTERVAL, QUEUE, JOBS, REASONS, USER_JOBS, ENDED_JOBS, WAIT, NODES, REASON, CPUS),
    *(GPUS, PARTITION_GPUS, NODE_GPUS, LICENSES, LICENSES_USED, RESERVATION_NODES),
    *(RESERVATION_START, RESERVATION_END, FAIRSHARE, *STATISTICS.values()),
)


INTERVAL_MIN = 30.0
"""Seconds between two refreshes, at least: each asks the controller for the whole queue."""

_BACK_OFF_MAX = 600.0
_BOUNDS = (1.0, 10.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 12 * 3600.0, 86400.0, 7 * 86400.0)
_LABELS_MAX = 200
_WITHDRAWN = frozenset({"CANCELLED", "DEADLINE", "REVOKED"})
_OTHER = "other"
_AWAY = frozenset("down drained maintenance rebooting powered_down".split())
_MICROSECOND = 1e-6

_Rows: TypeAlias = dict[MetricSpec, Iterable[Row]]
_Counts: TypeAlias = Counter[tuple[str, ...]]


class SlurmCollector:
    """The collector `slurm`: `sample` queries Slurm, a scrape shows the latest answer."""

    name = "slurm"
    specs: Sequence[MetricSpec] = SPECS

    def __init__(
        self,
        source: ViewSource,
        *,
        interval: float = INTERVAL_MIN,
        users: bool = False,
    ) -> None:
        """Prepare; see SlurmOptions for the arguments."""
        self.interval = max(interval, INTERVAL_MIN)
        self._source = source
        self._users = users
        self._history = _History()
        self._last: list[Metric] = []
        self._in_a_row = 0
        self._due = 0.0
        self._reason = ""

    def sample(self, now: float) -> Iterable[Metric]:
        """Refresh if due; see `Collector.sample`.

        Raises:
            StaleError: Slurm gave no usable answer; the error has the last figures.
        """
        if now >= self._due:
            try:
                self._refresh()
                self._in_a_row = 0
            except SchedulerUnavailable as error:
                self._reason = str(error)
                self._in_a_row += 1
                pause = min(self.interval * 2**self._in_a_row, _BACK_OFF_MAX)
                # Calls come once per interval, a little early or late: tolerate half an interval.
                self._due = now + pause - self.interval / 2
        if self._in_a_row:
            raise StaleError(self._reason, self._last)
        return self._last

    def close(self) -> None:
        """Do nothing: no file is open."""

    def _refresh(self) -> None:
        view = self._source.read()
        jobs = list(view.jobs)
        self._history.note(jobs)
        rows = self._job_rows(jobs) | self._history.rows()
        rows |= {AGE: [((), time.time())], INTERVAL: [((), self.interval)]}
        self._last = families(rows | _node_rows(view.nodes) | _other_rows(view))

    def _job_rows(self, jobs: list[QueueRow]) -> _Rows:
        queue: _Counts = Counter()
        states: _Counts = Counter()
        reasons: _Counts = Counter()
        users: _Counts = Counter()
        for job in jobs:
            if job.state in ENDED:
                continue
            state = job.state.lower()
            queue[state, job.reason] += job.tasks
            for partition in job.partitions:
                states[state, partition, job.qos] += job.tasks
                if job.reason:
                    reasons[partition, job.reason] += job.tasks
            if self._users:
                users[job.user, state] += job.tasks
        return {
            QUEUE: queue.items(),
            JOBS: states.items(),
            REASONS: reasons.items(),
            USER_JOBS: _capped(users).items(),
        }


class _History:
    """Counts jobs that started and ended between two refreshes."""

    def __init__(self) -> None:
        self._started: set[tuple[str, int]] | None = None
        self._ended_before: set[tuple[str, int]] = set()
        self._ended: _Counts = Counter()
        self._waited: dict[str, _Times] = defaultdict(_Times)

    def note(self, jobs: Iterable[QueueRow]) -> None:
        """Compare the queue with that of the last refresh; the first one is only the baseline."""
        first = self._started is None
        before, now, ended = self._started or set(), set(), set()
        for job in jobs:
            # Cancelled while pending: Slurm sets its start to the time of its end.
            has_run = job.start and not (job.state in _WITHDRAWN and job.start == job.end)
            if has_run:
                # A requeued job keeps its id, but starts at another time.
                key = job.id, job.start
                now.add(key)
                if not first and key not in before and job.eligible:
                    self._waited[job.partitions[0]].add(job.start - job.eligible)
            if job.state in ENDED:
                # squeue lists an ended job for some minutes, so several refreshes see it.
                over = job.id, job.end
                ended.add(over)
                if not first and over not in self._ended_before:
                    self._ended[job.partitions[0], job.state.lower()] += job.tasks
        self._started, self._ended_before = now, ended

    def rows(self) -> _Rows:
        """Return the counts since the exporter's start."""
        return {
            ENDED_JOBS: self._ended.items(),
            WAIT: [((name,), times.histogram()) for name, times in self._waited.items()],
        }


class _Times:
    """Durations in buckets."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_BOUNDS) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        seconds = max(seconds, 0.0)
        self._counts[bisect_left(_BOUNDS, seconds)] += 1
        self._sum += seconds

    def histogram(self) -> Histogram:
        return Histogram(_BOUNDS, tuple(self._counts), self._sum)


def _capped(counts: _Counts) -> _Counts:
    totals: Counter[str] = Counter()
    for (name, _), count in counts.items():
        totals[name] += count
    kept = {name for name, _ in totals.most_common(_LABELS_MAX)}
    capped: _Counts = Counter()
    for (name, state), count in counts.items():
        capped[name if name in kept else _OTHER, state] += count
    return capped


def _node_rows(nodes: Iterable[ClusterNode]) -> _Rows:
    counts: dict[MetricSpec, _Counts] = defaultdict(Counter)
    reasons: list[Row] = []
    for node in nodes:
        counts[NODES][(node.state,)] += 1
        rest = node.free_state
        counts[CPUS][("allocated",)] += node.cpus_allocated
        counts[CPUS][(rest,)] += max(node.cpus - node.cpus_allocated, 0)
        if node.gpus:
            counts[NODE_GPUS][(node.name,)] = sum(node.gpus.values())
        for kind, (total, allocated) in _by_type(node).items():
            for state, amount in (("allocated", allocated), (rest, max(total - allocated, 0))):
                counts[GPUS][kind, state] += amount
                for partition in node.partitions:
                    counts[PARTITION_GPUS][partition, kind, state] += amount
        if node.reason or node.state in _AWAY:
            reasons.append(((node.name, node.state, node.reason), 1))
    return {**{spec: found.items() for spec, found in counts.items()}, REASON: reasons}


def _by_type(node: ClusterNode) -> dict[str, tuple[int, int]]:
    """Return total and allocated GPUs of each type.

    Slurm may give the type in only one of its two fields. If it does not say which of several
    types a job has, all of the node's GPUs are of an unknown type, so that the counts are right.
    """
    used, total = sum(node.gpus_allocated.values()), sum(node.gpus.values())
    if len(node.gpus) == 1:
        return dict.fromkeys(node.gpus, (total, used))
    if node.gpus and sum(node.gpus_allocated.get(kind, 0) for kind in node.gpus) != used:
        return {"": (total, used)}
    return {kind: (count, node.gpus_allocated.get(kind, 0)) for kind, count in node.gpus.items()}


def _other_rows(view: View) -> _Rows:
    rows: _Rows = {
        LICENSES: [((name,), total) for name, (total, _) in view.licenses.items()],
        LICENSES_USED: [((name,), used) for name, (_, used) in view.licenses.items()],
        RESERVATION_NODES: [((one.name, one.state), one.nodes) for one in view.reservations],
        RESERVATION_START: [((one.name,), one.start) for one in view.reservations if one.start],
        RESERVATION_END: [((one.name,), one.end) for one in view.reservations if one.end],
        FAIRSHARE: view.user_shares.items(),
    }
    for name, value in view.statistics.items():
        spec = STATISTICS[name]
        rows[spec] = [((), value * _MICROSECOND if spec.unit == "seconds" else value)]
    return rows
