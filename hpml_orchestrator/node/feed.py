"""Forwards the reports of this node's ranks to the exporters of the job and of the whole node.

The agent keeps each rank's counters, summed over all processes of that rank (torchrun restarts
ranks). It sends all of them once a second if some are new, and at least every ten seconds, so that
a restarted exporter soon has everything. It never waits for an exporter: if the queue is full, a
message is dropped, and the next one contains the same counters.

The job's exporter inherits a socket from the agent; the node's listens at `{run}/exporter.sock`
(SOCK_SEQPACKET: each agent has a separate queue there). Messages are those of `records/feed.py`.
"""

from __future__ import annotations

import errno
import math
import os
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING

from hpml_orchestrator.records.feed import BUCKETS, COUNTERS, GAUGES, RankFigures, encode, is_number

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

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
    """Return where a node's exporter may listen; HPML_EXPORTER_SOCKET replaces the usual place.

    >>> exporter_sockets({}), exporter_sockets({"HPML_EXPORTER_SOCKET": ""})
    (('/run/hpml/exporter.sock',), ())
    """
    path = environment.get(_VARIABLE, EXPORTER_SOCKET)
    return (path,) if path else ()


class _Rank:
    """One rank: the counters and buckets of its processes, and its latest report."""

    def __init__(self) -> None:
        self.processes: dict[int, list[float]] = {}
        self.ended = [0.0] * (len(COUNTERS) + BUCKETS)  # of channels that were opened again
        self.has_buckets = False
        self.gauges: dict[str, float] = {}
        self.method = ""
        self.heard = 0.0

    def take(self, pid: int, values: list[float | None]) -> None:
        """Store the values of a process; None for a counter that it does not report.

        A counter never decreases, unless the process opened a new channel and counts from 0 again.
        """
        before = self.processes.get(pid, [0.0] * len(values))
        progress = [(old, new) for old, new in zip(before, values[:_PROGRESS]) if old]
        # Both samples and steps fell: the process has opened a new channel. A single falling
        # counter is an error of the program, and adding the old value would count it twice.
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
    """Keeps the counters of ranks and sends them to exporters; thread-safe.

    Args:
        targets: paths where an exporter of the whole node may listen.
        clock: seconds on a monotonic clock.

    Attributes:
        sent: messages that an exporter has taken.
        dropped: messages that an exporter's queue had no room for.
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
        """Send to a connected socket from now on; close it when the other end disconnects."""
        exporter.setblocking(False)
        with self._lock:
            self._inherited.append(exporter)
            self._beat_at = -math.inf

    def set_binding(self, right: int, wrong: int) -> None:
        """Set how many ranks of this node are bound as planned, and how many are not."""
        with self._lock:
            if self._binding != (right, wrong):
                self._binding, self._news = (right, wrong), True

    def take(self, rank: int, pid: int, data: Mapping[str, object], buckets: object = None) -> None:
        """Store the counters of a process of a rank.

        Args:
            rank: global rank.
            pid: the process, as the kernel vouches for it.
            data: its counters since it began, and gauges; anything but a number is ignored.
            buckets: steps by duration, as hpml_channel.py sends them.
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
        """Send what is due; return the seconds until the next call is needed.

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
        """Send everything now, at the end of the training or of the node's part of it."""
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
                # The agent's loop also stops ranks in time, so it must never wait for an exporter.
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
        # connect() waits for room in the exporter's backlog, but not for long.
        exporter.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _CONNECT_TIMEOUT)
        exporter.connect(path)
        exporter.setblocking(False)
    except OSError:
        exporter.close()
        return None
    return exporter
