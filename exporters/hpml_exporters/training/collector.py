"""Reports of trainings: samples, steps, waits, loss, and the places of their ranks.

The ranks report to their node's agent (training_jobs/hpml_channel.py). The agent forwards to its
job's exporter through an inherited socket, and to the node's through `{run}/exporter.sock`. A job's
series end when it has left the node, or its agent was silent for a minute.

The figures of each agent's ranks only grow, so what a message adds is the difference to the one
before; the first message of an agent counts in full. So the job's counters never
fall: not when a rank starts again (its agent adds up its processes), and not when the agent does
(a job that Slurm requeued).
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from prometheus_client.core import Metric

from hpml_exporters.core.collector import Histogram, MetricSpec, NotHereError, Row, families, metric
from hpml_exporters.jobs.board import JobsBoard
from hpml_exporters.options import Context
from hpml_orchestrator.records.feed import (
    BUCKETS,
    COUNTERS,
    MAX_MESSAGE_BYTES,
    STEP_BOUNDS_SECONDS,
    FeedMessage,
    RankFigures,
    decode,
    part_of,
)

# Metrics that a training reports, summed over the ranks of a job on this node.

_CHANNEL = "training channel (training_jobs/hpml_channel.py), through the job's node agent"
_MEASURED = f"{_CHANNEL}; only when the training measures it"
_VERIFIED = "the node agent's look at the ranks' live processes"


def _of_job(name: str, help_: str, labels: str = "", *, source: str) -> MetricSpec:
    return metric(name, help_, f"cluster jobid {labels}", source=source)


SAMPLES = _of_job(
    "hpml_train_samples_total",
    "Samples that the ranks on this node have trained on since the job began.",
    source=_CHANNEL,
)
STEPS = _of_job(
    "hpml_train_steps_total",
    "Steps that the ranks on this node have taken, each rank's counted.",
    source=_CHANNEL,
)
DATA_WAIT_SECONDS = _of_job(
    "hpml_train_data_wait_seconds_total",
    "Time that the ranks on this node have waited for their next batch, summed over ranks.",
    source=_CHANNEL,
)
COMM_SECONDS = _of_job(
    "hpml_train_comm_seconds_total",
    "Time spent in communication, summed over ranks, as measured by the named method.",
    "method",
    source=f"{_CHANNEL}; only when the training names its method",
)
TRANSFER_SECONDS = _of_job(
    "hpml_train_transfer_seconds_total",
    "Time that the ranks on this node have copied batches to their devices, summed over ranks.",
    source=_MEASURED,
)
WAIT_SECONDS = _of_job(
    "hpml_train_wait_seconds_total",
    "Time that the ranks on this node have waited for slower ranks before they averaged gradients, "
    "summed over ranks.",
    source=_MEASURED,
)
SAVE_SECONDS = _of_job(
    "hpml_train_save_seconds_total",
    "Time that the ranks on this node have spent on checkpoints, summed over ranks.",
    source=_MEASURED,
)
EVALUATION_SECONDS = _of_job(
    "hpml_train_evaluation_seconds_total",
    "Time that the ranks on this node have spent on evaluations, summed over ranks.",
    source=_MEASURED,
)
STEP_DURATION = MetricSpec(
    "hpml_train_step_duration_seconds",
    "histogram",
    "Duration of a step with its wait for data, over all ranks on this node.",
    ("cluster", "jobid"),
    "seconds",
    _CHANNEL,
)
RANK_STEP_SECONDS = _of_job(
    "hpml_train_rank_step_duration_seconds",
    "Mean duration of a step over the last minute, of the fastest and the slowest rank here; "
    "alike where ranks wait for each other in every step.",
    "which",
    source=_CHANNEL,
)
RANK_DATA_WAIT_SECONDS = _of_job(
    "hpml_train_rank_data_wait_seconds",
    "Mean wait for data in a step over the last minute, of the rank here that waits shortest and "
    "of the one that waits longest.",
    "which",
    source=_MEASURED,
)
LONGEST_DATA_WAIT = _of_job(
    "hpml_train_longest_data_wait_info",
    "The global rank here that waited longest for data in a step of the last minute.",
    "rank",
    source=_MEASURED,
)
RANK_WAIT_SECONDS = _of_job(
    "hpml_train_rank_wait_seconds",
    "Mean wait for slower ranks in a step over the last minute, of the rank here that waits "
    "shortest and of the one that waits longest.",
    "which",
    source=_MEASURED,
)
SHORTEST_WAIT = _of_job(
    "hpml_train_shortest_wait_info",
    "The global rank here that waited shortest for others in a step of the last minute: if others "
    "wait long, they wait for this one.",
    "rank",
    source=_MEASURED,
)
RANKS = _of_job(
    "hpml_train_ranks", "Ranks on this node that have reported in the last minute.", source=_CHANNEL
)
LOSS = _of_job(
    "hpml_train_loss",
    "Training loss that was reported last, the mean over the ranks on this node.",
    source=_CHANNEL,
)
ACCURACY = _of_job(
    "hpml_train_accuracy_ratio",
    "Accuracy of the last evaluation, the mean over the ranks on this node.",
    source=_CHANNEL,
)
MFU = _of_job(
    "hpml_train_mfu_ratio",
    "Model FLOP/s over the peak of the devices, the mean over the ranks on this node.",
    source=f"{_CHANNEL}; only when the training reports it",
)
BINDING_OK = _of_job(
    "hpml_rank_binding_ok",
    "Whether every rank on this node runs on the CPUs, memory and devices planned for it.",
    source=_VERIFIED,
)
BINDING_WRONG = _of_job(
    "hpml_rank_binding_wrong_ranks",
    "Ranks on this node that do not run on the planned CPUs, memory or devices.",
    source=_VERIFIED,
)
FEED_REFUSED = metric(
    "hpml_train_feed_refused_total",
    "Connections and messages of training feeds that were not taken, by reason.",
    "reason",
    source="the exporter itself",
)

OF_COUNTERS = {"samples": SAMPLES, "steps": STEPS, "data_wait_seconds": DATA_WAIT_SECONDS}
"""By the names in `records.feed.COUNTERS`."""

OF_PARTS = {
    "transfer_seconds": TRANSFER_SECONDS,
    "wait_seconds": WAIT_SECONDS,
    "save_seconds": SAVE_SECONDS,
    "evaluation_seconds": EVALUATION_SECONDS,
}
"""The same, of what few trainings measure."""

OF_GAUGES = {"loss": LOSS, "accuracy": ACCURACY, "mfu": MFU}
"""By the names in `records.feed.GAUGES`."""

SPECS = (
    *OF_COUNTERS.values(),
    *(COMM_SECONDS, *OF_PARTS.values(), STEP_DURATION, RANK_STEP_SECONDS),
    *(RANK_DATA_WAIT_SECONDS, LONGEST_DATA_WAIT, RANK_WAIT_SECONDS, SHORTEST_WAIT, RANKS),
    *OF_GAUGES.values(),
    *(BINDING_OK, BINDING_WRONG, FEED_REFUSED),
)
"""All of them."""


# Where the messages of node agents arrive: an inherited socket, or `{run}/exporter.sock`.
#
# Nothing is read between two samples. If a connection's queue is full, its sender waits and loses
# nothing (counters are sums). Each sample reads a limited amount per connection, so a flood of
# messages harms only its sender.
#
# A connection belongs to the job of its process, by the kernel's credentials. A job that just began
# may not be on the board yet: its connection waits for some samples.

SOCKET_NAME = "exporter.sock"
_BACKLOG = 512
_MESSAGES = 128  # of one connection at a sample
_CONNECTIONS = 1024
_PER_OWNER = 16  # connections of one job, or of one user without a known job
_ACCEPTS = 400  # at once
_PAUSE_SECONDS = 0.1  # after those
_WAIT_SAMPLES = 4
_UCRED = struct.Struct("=iII")  # pid, uid, gid


class Said(NamedTuple):
    """The latest message of each part on one connection; `key` is the job's in `Jobs`."""

    key: str
    agent: int
    messages: list[FeedMessage]


@dataclass
class _Connection:
    """A socket that an agent writes to.

    Attributes:
        channel: the socket, not blocking.
        pid: process id of the agent; 0: taken from its messages.
        owner: job id, or the user's number as long as the job is unknown.
        looks: samples at which the job was looked for.
    """

    channel: socket.socket
    pid: int = 0
    owner: str | int = ""
    looks: int = 0

    def read(self, refused: Counter[str]) -> tuple[list[FeedMessage], bool]:
        """Return the latest message of each part, and whether the connection is open."""
        parts: dict[int, bytes] = {}
        is_open = True
        for _ in range(_MESSAGES):
            try:
                datagram = self.channel.recv(MAX_MESSAGE_BYTES + 1)
            except BlockingIOError:
                break
            except OSError:
                datagram = b""
            if not datagram:
                is_open = False
                break
            try:
                # Counters are sums, so the newest message of a part says all: older ones are not
                # decoded.
                parts[part_of(datagram)] = datagram
            except ValueError:
                refused["malformed"] += 1
        messages = []
        for datagram in parts.values():
            try:
                messages.append(decode(datagram))
            except ValueError:
                refused["malformed"] += 1
        return messages, is_open


class InheritedFeed:
    """The feed of the job that this exporter runs in.

    Args:
        fd: descriptor of a socket.
        jobid: the job.

    Attributes:
        refused: number of refused messages, by reason.

    Raises:
        NotHereError: it is not a socket.
    """

    def __init__(self, fd: int, jobid: str) -> None:
        self.refused: Counter[str] = Counter(malformed=0)
        self._jobid = jobid
        try:
            # Work on a copy: a collector that is created again needs the inherited descriptor,
            # which closing this feed must leave open.
            kind = socket.socket(fileno=fd)  # only to see that it is one
            self._connection = _Connection(kind.dup())
            kind.detach()
        except OSError as error:
            raise NotHereError(f"the feed's descriptor {fd}: {error.strerror}") from error
        self._connection.channel.setblocking(False)

    def read(self) -> list[Said]:
        """Return the messages since the last call."""
        messages, _ = self._connection.read(self.refused)
        return [Said(self._jobid, one.pid, [one]) for one in messages]

    def close(self) -> None:
        """Close the copy of the descriptor."""
        self._connection.channel.close()


class ListeningFeed:
    """The socket that all agents of a node may connect to.

    A thread accepts up to 4,000 connections a second, and closes at once those beyond the share of
    their job or user, so nobody can block others by connecting again and again.

    Args:
        directory: of the socket `exporter.sock`; created if that is allowed.
        jobs: which processes belong to which job.

    Attributes:
        refused: number of refused connections and messages, by reason.

    Raises:
        NotHereError: no permission to create it, or another exporter listens there.
    """

    def __init__(self, directory: str, jobs: JobsBoard) -> None:
        self.refused: Counter[str] = Counter(stranger=0, limit=0, malformed=0)
        self._path = f"{directory}/{SOCKET_NAME}"
        self._jobs = jobs
        self._lock = threading.Lock()  # for these three
        self._connections: list[_Connection] = []
        self._shares: Counter[str | int] = Counter()  # connections by owner
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._take, name="feed", daemon=True)
        # Each connection has its own queue, so a flood by one user starves nobody, and no reading
        # is needed between two samples.
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._bind(directory)
        except (OSError, NotHereError) as error:
            self._socket.close()
            if isinstance(error, (PermissionError, FileNotFoundError)):
                raise NotHereError(f"{self._path}: {error.strerror}") from error
            raise

    def read(self) -> list[Said]:
        """Return the messages since the last call."""
        if not self._jobs.wait(0):
            return []  # no jobs are known yet: connections wait in the backlog
        if not self._thread.ident:
            self._thread.start()
        there = self._jobs.now.by_id
        said = []
        with self._lock:
            self._accept()
            for one in list(self._connections):
                if isinstance(one.owner, int):
                    self._look_up(one)
                if isinstance(one.owner, str):
                    messages, is_open = one.read(self.refused)
                    said.append(Said(one.owner, one.pid, messages))
                    if not is_open or one.owner not in there:
                        self._drop(one)
        return said

    def close(self) -> None:
        """Close all sockets, and remove the socket's file."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends the thread's wait
        if self._thread.ident:
            self._thread.join()
        self._socket.close()
        for one in self._connections:
            one.channel.close()
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def _bind(self, directory: str) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory)
            os.chmod(directory, 0o755)  # noqa: S103 - whatever the umask: all users' agents come
        if _is_taken(self._path):
            raise NotHereError(f"another exporter listens at {self._path}")
        # Bind under a temporary name and rename: an agent finds either no socket or one that
        # already listens, with its permissions set.
        new = f"{directory}/.{SOCKET_NAME}.{os.getpid()}"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new)
        self._socket.setblocking(False)
        self._socket.bind(new)
        os.chmod(new, 0o666)  # noqa: S103 - the kernel identifies each connection's owner
        self._socket.listen(_BACKLOG)
        os.rename(new, self._path)

    def _take(self) -> None:
        """Accept connections until `close`; runs in the thread."""
        poll = select.poll()
        poll.register(self._socket.fileno(), select.POLLIN)
        while not self._closed.is_set():
            poll.poll()
            with self._lock:
                self._accept()
            self._closed.wait(_PAUSE_SECONDS)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS):
            try:
                channel, _address = self._socket.accept()
            except OSError:  # nobody waits, or no descriptor is left
                return
            channel.setblocking(False)
            # The kernel identifies a connection's process: a message can claim any job.
            told = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
            pid, uid, _gid = _UCRED.unpack(told)
            jobid = self._jobs.now.job_of(pid)
            owner = uid if jobid is None else jobid
            if self._has_room(owner):
                self._shares[owner] += 1
                self._connections.append(_Connection(channel, pid, owner))
            else:
                channel.close()
                self.refused["stranger" if jobid is None else "limit"] += 1

    def _has_room(self, owner: str | int) -> bool:
        return self._shares[owner] < _PER_OWNER and len(self._connections) < _CONNECTIONS

    def _look_up(self, one: _Connection) -> None:
        jobid = self._jobs.now.job_of(one.pid)
        one.looks += 1
        if jobid is not None and self._has_room(jobid):
            self._shares[one.owner] -= 1
            self._shares[jobid] += 1
            one.owner = jobid
        elif jobid is not None or one.looks >= _WAIT_SAMPLES:
            self.refused["stranger" if jobid is None else "limit"] += 1
            self._drop(one)

    def _drop(self, one: _Connection) -> None:
        one.channel.close()
        self._connections.remove(one)
        self._shares[one.owner] -= 1


def _is_taken(path: str) -> bool:
    # A socket's file outlives its process: only connecting shows whether somebody listens.
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one:
        one.setblocking(False)
        try:
            one.connect(path)
        except BlockingIOError:  # too many connections wait
            return True
        except OSError:
            return False
        return True


_SILENT_SECONDS = 60.0
_STALE_SECONDS = 600.0  # an older loss or accuracy is not shown
_WINDOW_SECONDS = 60.0
_MAX_AGENTS = 64  # nodes that one machine plays, and the job's earlier attempts
_MAX_RANKS = 4096
_MAX_METHODS = 4


class TrainingCollector:
    """The collector `training`.

    Raises:
        NotHereError: no agent can reach this exporter.
    """

    name = "training"
    specs: Sequence[MetricSpec] = SPECS

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
        rows[FEED_REFUSED] += [((why,), n) for why, n in self._feed.refused.items()]
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
        for name, spec in OF_COUNTERS.items():
            yield spec, (), job.totals[name]
        for name, spec in OF_PARTS.items():
            if job.totals[name]:
                yield spec, (), job.totals[name]
        yield RANKS, (), len(job.ranks(now))
    for method, seconds in sorted(job.comm.items()):
        yield COMM_SECONDS, (method,), seconds
    if job.buckets is not None:
        steps = Histogram(STEP_BOUNDS_SECONDS, tuple(job.buckets), job.bucket_seconds)
        yield STEP_DURATION, (), steps
    for gauge, spec in OF_GAUGES.items():
        if (mean := job.mean(gauge, now)) is not None:
            yield spec, (), mean
    if (binding := job.binding(now)) is not None:
        yield BINDING_OK, (), binding[1] == 0
        yield BINDING_WRONG, (), binding[1]
    yield from _spread(job, now)


def _spread(job: _JobTotals, now: float) -> Iterator[tuple[MetricSpec, tuple[str, ...], float]]:
    each = [(rank, rank.per_step("step_seconds")) for rank in job.ranks(now)]
    steps = [seconds for _, seconds in each if seconds is not None]
    if steps:
        yield RANK_STEP_SECONDS, ("fastest",), min(steps)
        yield RANK_STEP_SECONDS, ("slowest",), max(steps)
    # Among ranks that wait equally long, name the lowest, so that the series stays the same.
    for counter, spec in (
        ("data_wait_seconds", RANK_DATA_WAIT_SECONDS),
        ("wait_seconds", RANK_WAIT_SECONDS),
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
            yield SHORTEST_WAIT, (str(shortest),), 1.0
        else:
            yield LONGEST_DATA_WAIT, (str(longest),), 1.0


@dataclass
class _Rank:
    """One rank of one agent: its last message, and its steps over the last minute.

    Attributes:
        number: global rank.
        heard: time of the rank's last report, not of its agent's.
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
        # Each requeue of a job starts a new agent: limit their number.
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
        """Return whether no agent has reported in the last minute."""
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
