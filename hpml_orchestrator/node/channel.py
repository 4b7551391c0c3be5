"""The agent's side of the training channel: convert reports of ranks to events, and forward them.

Ranks send datagrams to an abstract unix socket (`training_jobs/hpml_channel.py` is their side and
describes the wire format). `ChannelReader` checks the sender's user, reads, and writes the node's
JSONL file of events. The only message to a rank is a stop request (`Peers`).

There are few writes to the shared file system, however fast ranks send. Counters are cumulative, so
only the latest step of each rank is written: once per second at first, later once per 2 % of the
job's age, and at least every ten minutes. If a rank reports too many other events, only the latest
of each name is kept for the next write. A rank's first step after its warm-up is always written,
because it marks the end of the warm-up. The latest step of a rank is also written before its other
events and when the reader stops.

Abstract names belong to a network namespace: a container with its own one has no channel.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import select
import signal
import socket
import struct
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hpml_orchestrator.errors import HpmlError, InputError
from hpml_orchestrator.node.environment import job_key
from hpml_orchestrator.records.feed import (
    BUCKETS,
    COUNTERS,
    GAUGES,
    Event,
    RankFigures,
    encode,
    is_number,
)
from hpml_orchestrator.records.files import append_line

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import TypeAlias

# The feed: forward the counters of this node's ranks to the exporters of the job and of the node.
#
# The agent sums the counters of all processes of a rank (torchrun restarts ranks). It sends all
# counters once per second if some are new, and at least every ten seconds, so that a restarted
# exporter soon has them. It never waits for an exporter: if the queue is full, it drops a message,
# and the next one contains the same counters.
#
# The job's exporter inherits a socket from the agent; the node's listens at `{run}/exporter.sock`
# (SOCK_SEQPACKET: each agent has a separate queue). Messages are those of `records/feed.py`.

EXPORTER_SOCKET = "/run/hpml/exporter.sock"
_VARIABLE = "HPML_EXPORTER_SOCKET"

_PROGRESS = 2  # samples and steps, the first counters
_EVERY_SECONDS = 1.0
_BEAT_SECONDS = 10.0
_LOOK_SECONDS = 10.0
_METHOD_CHARACTERS = 64
_CONNECT_TIMEOUT = struct.pack("@ll", 0, 200_000)  # a timeval: seconds and microseconds
_FULL = (errno.EAGAIN, errno.ENOBUFS, errno.EMSGSIZE, errno.EINTR)


def exporter_sockets(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the possible sockets of a node's exporter; HPML_EXPORTER_SOCKET replaces the default.

    >>> exporter_sockets({}), exporter_sockets({"HPML_EXPORTER_SOCKET": ""})
    (('/run/hpml/exporter.sock',), ())
    """
    path = environment.get(_VARIABLE, EXPORTER_SOCKET)
    return (path,) if path else ()


class _Rank:
    """One rank: the counters and buckets of its processes, and its latest report."""

    def __init__(self) -> None:
        self.processes: dict[int, list[float]] = {}
        self.ended = [0.0] * (len(COUNTERS) + BUCKETS)  # of reopened channels
        self.has_buckets = False
        self.gauges: dict[str, float] = {}
        self.method = ""
        self.heard = 0.0

    def take(self, pid: int, values: list[float | None]) -> None:
        """Store the values of a process; None for a counter that it does not report.

        Counters decrease only if the process opened a new channel and counts from 0 again.
        """
        before = self.processes.get(pid, [0.0] * len(values))
        progress = [(old, new) for old, new in zip(before, values[:_PROGRESS]) if old]
        # Samples and steps both decreased: the process opened a new channel. If only one counter
        # decreases, the program is wrong, and adding the old value would count it twice.
        if progress and all(new is not None and new < old for old, new in progress):
            self.ended = [sum(pair) for pair in zip(self.ended, before)]
            before = [0.0] * len(values)
        self.processes[pid] = [max(old, new or 0.0) for new, old in zip(values, before)]

    def figures(self, rank: int, now: float) -> RankFigures:
        """Return the sums over all processes of the rank."""
        sums = [sum(column) for column in zip(self.ended, *self.processes.values())]
        buckets = tuple(map(int, sums[len(COUNTERS) :])) if self.has_buckets else None
        totals = tuple(sums[: len(COUNTERS)])
        age = max(0.0, now - self.heard)
        return RankFigures(rank, age, totals, buckets, self.method, self.gauges)


class Feed:
    """Stores the counters of ranks and sends them to exporters; thread-safe.

    Args:
        targets: paths of sockets of the node's exporter.
        clock: seconds on a monotonic clock.

    Attributes:
        sent: number of messages accepted by exporters.
        dropped: number of messages dropped because an exporter's queue was full.
    """

    def __init__(
        self, targets: Sequence[str] = (), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.sent = self.dropped = 0
        self._targets = tuple(targets)
        self._clock = clock
        self._lock = threading.Lock()
        self._ranks: dict[int, _Rank] = {}  # in order of arrival, as in the messages
        self._binding: tuple[int, int] | None = None
        self._inherited: list[socket.socket] = []
        self._reached: dict[str, socket.socket] = {}
        self._news = False
        self._send_at = self._beat_at = self._look_at = -math.inf

    def add_socket(self, exporter: socket.socket) -> None:
        """Start sending to a connected socket; close it when the other end disconnects."""
        exporter.setblocking(False)
        with self._lock:
            self._inherited.append(exporter)
            self._beat_at = -math.inf

    def set_binding(self, right: int, wrong: int) -> None:
        """Set the numbers of ranks of this node that are and are not bound as planned."""
        with self._lock:
            if self._binding != (right, wrong):
                self._binding, self._news = (right, wrong), True

    def take(self, rank: int, pid: int, data: Mapping[str, object], buckets: object = None) -> None:
        """Store the counters of a process of a rank.

        Args:
            rank: global rank.
            pid: the process, reported by the kernel.
            data: its counters since its start, and gauges; values other than numbers are ignored.
            buckets: steps by duration, as sent by hpml_channel.py.
        """
        with self._lock:
            state = self._ranks.setdefault(rank, _Rank())
            counts: list[float | None] = [None] * BUCKETS
            if isinstance(buckets, dict) and buckets:
                state.has_buckets = True
                counts = [amount(buckets.get(str(place))) or 0.0 for place in range(BUCKETS)]
            totals = [amount(data.get(f"{name}_total")) for name in COUNTERS]
            state.take(pid, [*totals, *counts])
            gauges = {name: data.get(name) for name in GAUGES}
            state.gauges = {name: value for name, value in gauges.items() if is_number(value)}
            method = data.get("comm_method")
            state.method = method[:_METHOD_CHARACTERS] if isinstance(method, str) else ""
            state.heard = self._clock()
            self._news = True

    def act(self, now: float) -> float:
        """Send messages that are due; return the seconds until the next call.

        Args:
            now: seconds on the clock.
        """
        with self._lock:
            if now >= self._look_at:
                self._look_at = now + _LOOK_SECONDS
                self._look()
            if not self._inherited and not self._reached:
                return self._look_at - now
            if now >= self._send_at and (self._news or now >= self._beat_at):
                self._send(now)
            due = self._send_at if self._news or self._ranks else self._beat_at
            return max(0.0, min(due, self._look_at) - now)

    def flush(self) -> None:
        """Send all counters now, at the end of the training."""
        with self._lock:
            self._look()
            self._send(self._clock())

    def close(self) -> None:
        """Close all sockets."""
        with self._lock:
            for exporter in (*self._inherited, *self._reached.values()):
                exporter.close()
            self._inherited.clear()
            self._reached.clear()

    def _look(self) -> None:
        for path in self._targets:
            exporter = None if path in self._reached else _connect(path)
            if exporter is not None:
                self._reached[path] = exporter
                self._beat_at = -math.inf

    def _send(self, now: float) -> None:
        messages = self._messages(now)
        self._send_at, self._beat_at = now + _EVERY_SECONDS, now + _BEAT_SECONDS
        self._news = False
        self._inherited = [end for end in self._inherited if self._hand_over(end, messages)]
        self._reached = {
            path: end for path, end in self._reached.items() if self._hand_over(end, messages)
        }

    def _hand_over(self, exporter: socket.socket, messages: list[bytes]) -> bool:
        """Send messages; False if the exporter is gone."""
        for message in messages:
            try:
                # Never wait for an exporter: the agent's loop must also stop ranks in time.
                exporter.send(message, socket.MSG_DONTWAIT)
                self.sent += 1
            except OSError as error:
                if error.errno not in _FULL:
                    exporter.close()
                    return False
                self.dropped += 1
                self._news = True  # try again at the next opportunity
        return True

    def _messages(self, now: float) -> list[bytes]:
        ranks = [state.figures(rank, now) for rank, state in self._ranks.items()]
        if not ranks and self._binding is None:
            return []
        return encode(os.getpid(), self._binding, ranks)


def amount(value: object) -> float | None:
    """Return a counter's value; None if it is missing or not a valid counter."""
    return float(value) if is_number(value) and value >= 0 else None


def _connect(path: str) -> socket.socket | None:
    exporter = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        # connect() waits for room in the exporter's backlog, so limit it.
        exporter.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _CONNECT_TIMEOUT)
        exporter.connect(path)
        exporter.setblocking(False)
    except OSError:
        exporter.close()
        return None
    return exporter


# Peers: the processes that use the channel, their addresses and last messages.

_REAL_TIME_SIGNALS = range(signal.SIGRTMIN, signal.SIGRTMAX + 1)
_MAX_SECONDS = 7 * 86400.0  # a longer save or step is an error of the sender


@dataclass
class Peer:
    """One process that uses the channel."""

    rank: int  # global rank
    address: bytes = b""  # of its socket; empty if it cannot receive anything
    stacks_fd: int = -1  # file descriptor in the process for its stacks; -1 for none
    stacks_signal: int = 0  # signal that makes it write its stacks; 0 for none


class Slowest(NamedTuple):
    """Longest times reported by ranks, in seconds; None if not reported."""

    save: float | None = None
    step: float | None = None

    def over(self, other: Slowest) -> Slowest:
        """Return the longer time of each pair."""
        return Slowest(*(_longer(mine, its) for mine, its in zip(self, other)))


class Peers:
    """Processes that use the channel of one node; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._peers: dict[int, Peer] = {}
        self._counted: dict[int, tuple[float, float]] = {}  # steps and their seconds, by pid
        self._stepping: set[int] = set()
        self._heard = 0
        self._slowest = Slowest()

    def hear(self, pid: int, rank: int, address: bytes) -> None:
        """Record a datagram of a process.

        Args:
            pid: the process, reported by the kernel.
            rank: its global rank.
            address: of the sender's socket; empty without one.
        """
        with self._lock:
            self._heard += 1
            peer = self._peers.setdefault(pid, Peer(rank))
            peer.rank, peer.address = rank, address or peer.address

    def hello(self, pid: int, data: Mapping[str, object]) -> None:
        """Record how to get the stacks of a process; invalid values are ignored.

        Accept only real-time signals: others could end a process without a handler.
        """
        number, descriptor = data.get("stacks_signal"), data.get("stacks_fd")
        if type(number) is int and type(descriptor) is int and number in _REAL_TIME_SIGNALS:
            with self._lock:
                peer = self._peers[pid]
                peer.stacks_fd, peer.stacks_signal = descriptor, number

    def take(self, pid: int, event: str, data: Mapping[str, object]) -> None:
        """Record the durations of steps and saves in an event."""
        with self._lock:
            if event == "checkpoint":
                seconds = _seconds(data.get("seconds"))
                self._slowest = self._slowest.over(Slowest(save=seconds))
            elif event == "step":
                self._stepping.add(pid)
                steps, total = data.get("steps_total"), amount(data.get("step_seconds_total"))
                if isinstance(steps, (int, float)) and total is not None:
                    steps_before, total_before = self._counted.get(pid, (0.0, 0.0))
                    # Counters are cumulative: two reports give the mean of the steps in between.
                    if steps > steps_before:
                        mean = (total - total_before) / (steps - steps_before)
                        self._slowest = self._slowest.over(Slowest(step=_seconds(mean)))
                    self._counted[pid] = float(steps), total

    @property
    def slowest(self) -> Slowest:
        """The slowest save and step so far; step times are means over a second."""
        return self._slowest

    @property
    def heard(self) -> int:
        """Number of received datagrams."""
        return self._heard

    @property
    def stepping(self) -> frozenset[int]:
        """Processes that have reported a step."""
        with self._lock:
            return frozenset(self._stepping)

    def by_pid(self) -> dict[int, Peer]:
        """Return all processes so far, including ended ones."""
        with self._lock:
            return {pid: Peer(**vars(peer)) for pid, peer in self._peers.items()}

    def ask_to_stop(self, channel: socket.socket, reason: str) -> None:
        """Send a stop request to every process that has not ended."""
        datagram = json.dumps({"v": 1, "stop": reason}).encode("ascii")
        for pid, peer in self.by_pid().items():
            if peer.address:
                try:
                    channel.sendto(datagram, peer.address)
                except BlockingIOError:
                    continue  # its queue is full of unread requests
                except OSError:
                    # The process has ended. A new one sends a new address.
                    with self._lock, contextlib.suppress(KeyError):
                        self._peers[pid].address = b""


def _seconds(value: object) -> float | None:
    seconds = amount(value)
    return seconds if seconds is not None and seconds < _MAX_SECONDS else None


def _longer(one: float | None, other: float | None) -> float | None:
    return max((value for value in (one, other) if value is not None), default=None)


if TYPE_CHECKING:
    Message: TypeAlias = Mapping[str, Any]  # fields of a rank, any of which may be missing

WIRE_VERSION = 1
MAX_DATAGRAM_BYTES = 8192
RANK_EVENTS = (
    "rendezvous",
    "preparation",
    "warm-up",
    "training",
    "resumed",
    "step",
    "evaluation",
    "checkpoint",
    "stopping",
    "link",
)
"""Events that ranks may report; scripts and agents report the others."""

STEP_EVERY_SECONDS = 1.0
EVENT_WITHIN_SECONDS = 0.1  # one write for simultaneous events, such as all ranks' rendezvous
EVENTS_PER_WINDOW = 50  # per rank; no healthy training reports more
# A week of 8 ranks is 3.4 MB of steps, and at most as much of other events.
BYTES_PER_GAP = 2500  # counters of 8 to 10 ranks
GAP_OF_AGE = 0.02
LONGEST_GAP_SECONDS = 600.0
MAX_PENDING_EVENTS = 10_000
MAX_RANKS = 4096
MAX_RANK = 1 << 24
MAX_NAME_BYTES = 107  # sun_path has 108 bytes, the first is NUL
BATCH_DATAGRAMS = 256
PAUSE_SECONDS = 0.01  # after a full batch: limits the cost of a flood
STOP_SECONDS = 1.0
CLOCK_TOLERANCE_SECONDS = 3600.0
MAX_DEPTH = 4
MAX_INTEGER = 1 << 63

_UCRED = struct.Struct("=iII")  # pid, uid, gid


def attempt_channel(environment: Mapping[str, str], attempt: str) -> str:
    """Return the abstract name of this node's socket, under 100 bytes and without the leading NUL.

    It depends on user, job, attempt and node, so that jobs, attempts and virtual nodes on one host
    never share a socket.
    """
    node = environment.get("SLURMD_NODENAME") or ""
    place = f"{attempt}\0{node}\0{job_key(environment)}"
    digest = hashlib.sha256(place.encode("utf-8", "surrogateescape")).hexdigest()[:24]
    return f"hpml-{os.getuid()}-{digest}"


def parse(datagram: bytes) -> Message:
    """Return the message in a datagram, with a valid rank and data in strict JSON.

    Raises:
        ValueError: it is not a JSON object of this version.
    """
    if len(datagram) > MAX_DATAGRAM_BYTES:
        raise ValueError("too long")
    try:
        message = json.loads(datagram.decode("utf-8"))
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    if not isinstance(message, dict) or message.get("v") != WIRE_VERSION:
        raise ValueError("not an object of this version")
    rank, data = message.get("rank"), _clean(message.get("data", {}))
    if not isinstance(data, dict) or not isinstance(rank, int) or isinstance(rank, bool):
        raise ValueError("no rank, or data is not an object")  # noqa: TRY004 - the sender's fault
    if not 0 <= rank < MAX_RANK:
        raise ValueError("a rank out of range")
    return {**message, "data": data}


def event_of(message: Message, *, node: str, now: float) -> Event:
    """Return the event in a message.

    Keep the sender's time if it is within an hour of `now` (seconds since the epoch). A `result`
    becomes an `evaluation` with `final: true` and its values in the data.

    Raises:
        ValueError: the event is unknown.
    """
    kind, name = message.get("type"), message.get("event")
    rank, data = message["rank"], message["data"]
    if kind == "result":
        name, data = "evaluation", {**data, "final": True}
    elif kind != "event" or name not in RANK_EVENTS:
        raise ValueError("no event of a rank")
    if name == "rendezvous":  # a rank identifies itself once, not with every step
        for key in ("local_rank", "world_size", "pid"):
            data.setdefault(key, _clean(message.get(key)))
    moment = message.get("time")
    if not is_number(moment) or abs(moment - now) > CLOCK_TOLERANCE_SECONDS:
        moment = now
    return Event(float(moment), str(name), node, rank, data)


def _clean(value: Any, depth: int = 0) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        if abs(value) >= MAX_INTEGER:
            raise ValueError("a number out of range")
        return value
    if depth >= MAX_DEPTH:
        raise ValueError("nested too deep")
    if isinstance(value, list):
        return [_clean(item, depth + 1) for item in value]
    return {key: _clean(item, depth + 1) for key, item in value.items()}


class _Allowance:
    """Limits writing: pauses grow with the written bytes and the job's age."""

    def __init__(self) -> None:
        self.due = self._paid = -math.inf
        self._began: float | None = None

    def spend(self, size: int, now: float) -> None:
        """Count bytes as written at a time (seconds on the clock of `due`)."""
        self._began = now if self._began is None else self._began
        gap = min(max(1.0, GAP_OF_AGE * (now - self._began)), LONGEST_GAP_SECONDS)
        # Writing BYTES_PER_GAP costs one gap. The gap grows with the job's age, so the file grows
        # with the logarithm of the time, until the longest gap limits how much a crash can lose.
        self._paid = max(self._paid, now) + gap * size / BYTES_PER_GAP
        self.due = max(self._paid, now + STEP_EVERY_SECONDS)


class ChannelReader:
    """Reads messages of the ranks of one node in a thread and writes their events.

    Args:
        name: abstract name without NUL, see `attempt_channel`.
        events_file: the node's JSONL file; its directory is created if missing.
        node: Slurm's name of the node.
        uid: the only accepted user; the kernel reports the sender.
        clock: seconds since the epoch.
        monotonic: seconds on a clock that is never set.
        feed: receives every rank's counters, for an exporter.

    Attributes:
        received: number of received datagrams.
        refused: number of datagrams of other users, malformed, too long or with unknown events.
        superseded: number of events replaced by a later one of the same rank and name.
        write_errors: number of failed writes; their events are kept for the next write.
        peers: the sending processes.
    """

    def __init__(
        self,
        name: str,
        events_file: Path,
        node: str,
        uid: int | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        feed: Feed | None = None,
    ) -> None:
        if not name or "\0" in name or len(os.fsencode(name)) > MAX_NAME_BYTES:
            raise InputError(
                f"a channel's name has 1 to {MAX_NAME_BYTES} bytes and no NUL",
                field="channel",
                value=name,
                hint="attempt_channel() makes one that fits",
            )
        self.name = name
        self.received = self.refused = self.superseded = self.write_errors = 0
        self.peers = Peers()
        self._file = Path(events_file)
        self._node = node
        self._uid = os.getuid() if uid is None else uid
        self._clock = clock
        self._monotonic = monotonic
        self._feed = feed
        self._socket: socket.socket  # from `start` on
        self._thread: threading.Thread | None = None
        self._wake: tuple[int, int] = (-1, -1)
        self._stopping = threading.Event()
        self._steps: dict[int, Event] = {}
        self._stepping: set[int] = set()  # ranks whose first step after the warm-up has arrived
        self._events: list[Event] = []
        self._excess: dict[
            tuple[int, str, bool], Event
        ] = {}  # the latest events, for the next window
        self._in_window: dict[int, int] = {}
        self._events_due = 0.0
        self._step_allowance, self._event_allowance = _Allowance(), _Allowance()

    def start(self) -> None:
        """Bind the socket and start reading; ranks may send from now on.

        Raises:
            HpmlError: the name is in use, or the directory of events cannot be created.
        """
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            # Before bind: an earlier datagram would have no credentials.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self._socket.setblocking(False)
            self._socket.bind("\0" + self.name)
            self._file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._socket.close()
            raise HpmlError(
                f"cannot open the training channel @{self.name} to {self._file}: {error.strerror}",
                hint="does an agent of this attempt still run on this node?",
            ) from error
        self._wake = os.pipe()
        self._thread = threading.Thread(target=self._read, name="hpml-channel", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Read the queue (at most a second), write all events and close; may be called twice."""
        if self._thread is None:
            return
        self._stopping.set()
        os.write(self._wake[1], b"x")
        self._thread.join()
        self._thread = None
        self._socket.close()
        for fd in self._wake:
            os.close(fd)

    def ask_to_stop(self, reason: str) -> None:
        """Send a stop request to every reachable rank; do nothing before `start`."""
        self.peers.ask_to_stop(self._socket, reason)

    def __enter__(self) -> ChannelReader:  # noqa: PYI034 - typing.Self came with Python 3.11
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _read(self) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(self._wake[0], select.POLLIN)
        while not self._stopping.is_set():
            poll.poll(self._wait_ms())
            # After a full batch, ranks are sending faster than this thread reads. Pausing is
            # safe: a rank whose socket is full keeps its events and never waits.
            if self._receive() >= BATCH_DATAGRAMS:
                self._stopping.wait(PAUSE_SECONDS)
            self._write_due(self._monotonic())
        deadline = time.monotonic() + STOP_SECONDS
        while self._receive() and time.monotonic() < deadline:
            pass
        self._write(self._steps, self._excess)

    def _wait_ms(self) -> float | None:
        """Return the milliseconds until the next write; None if nothing is pending."""
        due = [self._events_due] if self._events else []
        due += [self._step_allowance.due] if self._steps else []
        due += [self._window_due()] if self._excess else []
        return max(0.0, min(due) - self._monotonic()) * 1000 + 1 if due else None

    def _receive(self) -> int:
        """Read at most one batch of queued datagrams; return their number."""
        # Room only for the credentials: the kernel closes descriptors attached by a sender.
        room = socket.CMSG_SPACE(_UCRED.size)
        for taken in range(BATCH_DATAGRAMS):
            try:
                # One byte more than allowed, to detect longer datagrams.
                datagram, ancillary, flags, address = self._socket.recvmsg(
                    MAX_DATAGRAM_BYTES + 1, room
                )
            except OSError:
                return taken
            self.received += 1
            sender = self._sender(ancillary)
            if flags & socket.MSG_TRUNC or sender is None:
                self.refused += 1
                continue
            try:
                self._take(parse(datagram), sender, address)
            except ValueError:
                self.refused += 1
        return BATCH_DATAGRAMS

    def _take(self, message: Message, sender: int, address: bytes) -> None:
        """Process one message; raise ValueError to refuse it."""
        rank, data = message["rank"], message["data"]
        if message.get("type") == "hello":
            self.peers.hear(sender, rank, address)
            self.peers.hello(sender, data)
            return
        event = event_of(message, node=self._node, now=self._clock())
        self._accept(event)
        self.peers.hear(sender, rank, address)
        self.peers.take(sender, event.event, data)
        if self._feed is not None and event.event == "step":
            self._feed.take(rank, sender, data, message.get("step_buckets"))

    def _sender(self, ancillary: list[tuple[int, int, bytes]]) -> int | None:
        """Return the sending process, reported by the kernel; None for other users."""
        for level, kind, data in ancillary:
            ours = level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS
            if ours and len(data) == _UCRED.size:
                pid, uid, _ = _UCRED.unpack(data)
                return pid if uid == self._uid else None
        return None

    def _accept(self, event: Event) -> None:
        rank = -1 if event.rank is None else event.rank
        if rank not in self._in_window and len(self._in_window) >= MAX_RANKS:
            raise ValueError("more ranks than a node has")
        seen = self._in_window.setdefault(rank, 0)
        if event.event == "step":
            # This step ends the warm-up, so write it at once; no later step may replace it.
            if rank not in self._stepping:
                self._stepping.add(rank)
                self._hold(event)
                return
            self.superseded += rank in self._steps
            self._steps[rank] = event
        elif seen >= EVENTS_PER_WINDOW or len(self._events) >= MAX_PENDING_EVENTS:
            key = (rank, event.event, bool(event.data.get("final")))
            self.superseded += key in self._excess
            self._excess[key] = event
        else:
            self._in_window[rank] = seen + 1
            if event.event == "warm-up":
                self._stepping.discard(rank)
            # Write the latest step first: it may be the last one of this process.
            if rank in self._steps:
                self._hold(self._steps.pop(rank))
            self._hold(event)

    def _hold(self, event: Event) -> None:
        if not self._events:
            self._events_due = self._monotonic() + EVENT_WITHIN_SECONDS
        self._events.append(event)

    def _write_due(self, now: float) -> None:
        steps = self._steps if now >= self._step_allowance.due else {}
        excess = {}
        if any(self._in_window.values()) and now >= self._window_due():
            excess, self._in_window = self._excess, dict.fromkeys(self._in_window, 0)
        if steps or excess or (self._events and now >= self._events_due):
            self._write(steps, excess)

    def _window_due(self) -> float:
        """Return the start of the next window of events, after writing the pending ones."""
        return max(self._events_due, self._event_allowance.due)

    def _write(self, steps: dict[int, Event], excess: dict[tuple[int, str, bool], Event]) -> None:
        """Append all pending events with one write; after an error, keep them for the next one."""
        batch = [(event, self._event_allowance) for event in (*self._events, *excess.values())]
        batch += [(event, self._step_allowance) for event in steps.values()]
        if not batch:
            return
        # Kept steps are older than later events; readers expect a node's file in order.
        batch.sort(key=lambda pair: pair[0].time)
        lines = [event.to_json() for event, _ in batch]
        now = self._monotonic()
        try:
            append_line(self._file, "\n".join(lines))
        except OSError:
            self.write_errors += 1
            self._events_due = self._step_allowance.due = self._event_allowance.due = now + 1.0
            return
        for line, (_, allowance) in zip(lines, batch):
            allowance.spend(len(line) + 1, now)
        self._events.clear()
        steps.clear()
        excess.clear()
