"""The agent's end of the training channel: turns the reports of a node's ranks into events.

Ranks send datagrams to an abstract unix socket (`training_jobs/hpml_channel.py` is their end and
describes the wire format). `ChannelReader` checks the sender's user, reads, and writes the node's
JSONL file of events. The only answer to a rank is a stop request (`node/peers.py`).

The shared file system gets few writes, however fast ranks send. Counters are cumulative, so only
the latest step of each rank is written: once per second at first, later once per 2 % of the job's
age, and at least every ten minutes. A rank that reports too many other events gets the same
treatment: the latest event of each name is kept for the next write.
A rank's first step after its warm-up is always written, since the warm-up ends there. Before any
other event of a rank, and when the reader stops, its latest step is written.

An abstract name belongs to a network namespace: a container with a separate one has no channel.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import select
import socket
import struct
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import HpmlError, InputError
from hpml_orchestrator.node.environment import job_key
from hpml_orchestrator.node.peers import Peers
from hpml_orchestrator.records.feed import Event, is_number
from hpml_orchestrator.records.files import append_line

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import TypeAlias

    from hpml_orchestrator.node.feed import Feed

    Message: TypeAlias = Mapping[str, Any]  # of a rank: its fields, of which any may be missing

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
"""Events that a rank may report; the run and the node report the others."""

STEP_EVERY_SECONDS = 1.0
EVENT_WITHIN_SECONDS = 0.1  # one write for events that come together, as all ranks' rendezvous
EVENTS_PER_WINDOW = 50  # per rank; no healthy training reports more
# A week of 8 ranks is 3.4 MB of steps, and at most as much of other events.
BYTES_PER_GAP = 2500  # counters of 8 to 10 ranks
GAP_OF_AGE = 0.02
LONGEST_GAP_SECONDS = 600.0
MAX_PENDING_EVENTS = 10_000
MAX_RANKS = 4096
MAX_RANK = 1 << 24
MAX_NAME_BYTES = 107  # sun_path has 108, the first is the NUL
BATCH_DATAGRAMS = 256
PAUSE_SECONDS = 0.01  # after a full batch: caps what a flood can cost the node
STOP_SECONDS = 1.0
CLOCK_TOLERANCE_SECONDS = 3600.0
MAX_DEPTH = 4
MAX_INTEGER = 1 << 63

_UCRED = struct.Struct("=iII")  # pid, uid, gid


def attempt_channel(environment: Mapping[str, str], attempt: str) -> str:
    """Return the abstract socket's name (no leading NUL, under 100 bytes) of this node's agent.

    It depends on the user, the job, the attempt's directory and the node, so that jobs, attempts
    and several virtual nodes on one host never share a socket.
    """
    node = environment.get("SLURMD_NODENAME") or ""
    place = f"{attempt}\0{node}\0{job_key(environment)}"
    digest = hashlib.sha256(place.encode("utf-8", "surrogateescape")).hexdigest()[:24]
    return f"hpml-{os.getuid()}-{digest}"


def parse(datagram: bytes) -> Message:
    """Return the message of a datagram, with a valid rank and data of strict JSON.

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
    """Return the event that a message reports.

    The sender's time is kept when it is within an hour of `now` (seconds since the epoch).
    A `result` becomes an `evaluation` with `final: true` and its figures in the data.

    Raises:
        ValueError: it is an unknown event.
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
    """Limits writing: the pause grows with the bytes written and with the job's age."""

    def __init__(self) -> None:
        self.due = self._paid = -math.inf
        self._began: float | None = None

    def spend(self, size: int, now: float) -> None:
        """Count bytes as written now, in seconds on the clock of `due`."""
        self._began = now if self._began is None else self._began
        gap = min(max(1.0, GAP_OF_AGE * (now - self._began)), LONGEST_GAP_SECONDS)
        # Writing BYTES_PER_GAP costs one gap. The gap grows with the job's age, so the file grows
        # with the logarithm of the time, until the longest gap limits how much a crash can lose.
        self._paid = max(self._paid, now) + gap * size / BYTES_PER_GAP
        self.due = max(self._paid, now + STEP_EVERY_SECONDS)


class ChannelReader:
    """Reads the ranks of one node in a thread and writes their events.

    Args:
        name: abstract name without its NUL, see `attempt_channel`.
        events_file: the node's JSONL file; its directory is made when missing.
        node: Slurm's name of the node.
        uid: the only user whose datagrams are accepted; the kernel reports the sender.
        clock: seconds since the epoch.
        monotonic: seconds on a clock that is never set.
        feed: receives every rank's counters, for an exporter.

    Attributes:
        received: datagrams taken from the socket.
        refused: how many of these were another user's, malformed, too long or unknown events.
        superseded: how many were replaced by a later one of the same rank and name.
        write_errors: failed writes; their events are kept for the next write.
        peers: the processes that have sent.
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
        self._stepping: set[int] = set()  # ranks whose first step after the warm-up was taken
        self._events: list[Event] = []
        self._excess: dict[tuple[int, str, bool], Event] = {}  # the latest, for the next window
        self._in_window: dict[int, int] = {}
        self._events_due = 0.0
        self._step_allowance, self._event_allowance = _Allowance(), _Allowance()

    def start(self) -> None:
        """Bind the socket and begin to read; ranks may send from now on.

        Raises:
            HpmlError: the name is taken, or the directory of events cannot be made.
        """
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            # Before bind: a datagram that comes first would be without credentials.
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
        """Read the queue (for a second at most), write everything and close; harmless twice."""
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
        """Send a stop request to every rank that can be reached; to no rank before `start`."""
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
            # A full batch means that ranks send faster than this thread reads. Pausing is safe:
            # a rank whose socket is full keeps its events for later, and never waits.
            if self._receive() >= BATCH_DATAGRAMS:
                self._stopping.wait(PAUSE_SECONDS)
            self._write_due(self._monotonic())
        deadline = time.monotonic() + STOP_SECONDS
        while self._receive() and time.monotonic() < deadline:
            pass
        self._write(self._steps, self._excess)

    def _wait_ms(self) -> float | None:
        """Return the milliseconds until the next write is due; None if nothing is pending."""
        due = [self._events_due] if self._events else []
        due += [self._step_allowance.due] if self._steps else []
        due += [self._window_due()] if self._excess else []
        return max(0.0, min(due) - self._monotonic()) * 1000 + 1 if due else None

    def _receive(self) -> int:
        """Read queued datagrams, at most a batch; return how many."""
        # Room for the credentials only: the kernel closes descriptors that a sender attaches.
        room = socket.CMSG_SPACE(_UCRED.size)
        for taken in range(BATCH_DATAGRAMS):
            try:
                # One byte more than allowed, so that a longer datagram shows as truncated.
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
        """Take in one message of a process; ValueError if it is refused."""
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
        """Return the process that sent, as the kernel vouches; None for another user's."""
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
            # This step ends the warm-up, so it is written at once and never replaced by a later
            # one.
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
            # The latest step first: it may be the last that this process reported.
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
        """Return when the next window of events begins: not before the pending ones are written."""
        return max(self._events_due, self._event_allowance.due)

    def _write(self, steps: dict[int, Event], excess: dict[tuple[int, str, bool], Event]) -> None:
        """Append all pending events with one write; after an error they are kept for the next."""
        batch = [(event, self._event_allowance) for event in (*self._events, *excess.values())]
        batch += [(event, self._step_allowance) for event in steps.values()]
        if not batch:
            return
        # Kept steps are older than events that came later; readers expect a node's file in order.
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
