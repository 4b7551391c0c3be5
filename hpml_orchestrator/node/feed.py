r"""What the ranks of this node say, handed on to exporters: of this job, and of the whole node.

The agent keeps each rank's counters, summed over the processes that have been that rank (torchrun
starts ranks again), and sends all of them once a second when some are new, and every ten seconds
at least, so that an exporter which starts again knows everything soon. Nothing waits for an
exporter: what its queue has no room for is left out, and the next message holds it too.

An exporter is reached by a socket that it inherited from the agent, or by `{run}/exporter.sock`
(SOCK_SEQPACKET: every agent has a queue of its own there). One message, of at most 32 KiB:

    hpml-feed 1 <part>\n
    {"pid": 4242, "binding": [7, 1] or null, "ranks": [
        {"r": 0, "age": 0.4, "t": [samples, steps, data wait s, steps s, communication s],
         "b": [steps by duration, 11 numbers] or null, "m": method of communication or null,
         "g": {"loss": 0.1, "accuracy": 0.97, "mfu": 0.41}}, ...]}

A rank always travels in the same part; each part is complete. `binding` counts ranks where they
should be, and others.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import socket
import stat
import struct
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["EXPORTER_SOCKET", "Feed", "exporter_sockets"]

EXPORTER_SOCKET = "/run/hpml/exporter.sock"
_VARIABLE = "HPML_EXPORTER_SOCKET"

_COUNTERS = (
    "samples_total",
    "steps_total",
    "data_wait_seconds_total",
    "step_seconds_total",
    "comm_seconds_total",
)
_GAUGES = ("loss", "accuracy", "mfu")
_BUCKETS = 11  # of the durations of steps, see hpml_channel.py
_PLACES = {str(place): place for place in range(_BUCKETS)}
_EVERY_SECONDS = 1.0
_BEAT_SECONDS = 10.0
_LOOK_SECONDS = 10.0
_RANKS_PER_PART = 48  # of at most 650 bytes: a part stays under 32 KiB
_MAX_RANKS = 4096
_MAX_PROCESSES = 8192  # ranks that started again and again; forgotten is who was silent longest
_METHOD_CHARACTERS = 64
_HIGHEST = 1e18
_KNOCK = struct.pack("@ll", 0, 200_000)  # a timeval: seconds and microseconds
_FULL = (errno.EAGAIN, errno.ENOBUFS, errno.EMSGSIZE, errno.EINTR)


def exporter_sockets(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return where a node's exporter may listen; HPML_EXPORTER_SOCKET replaces the usual place.

    >>> exporter_sockets({}), exporter_sockets({"HPML_EXPORTER_SOCKET": ""})
    (('/run/hpml/exporter.sock',), ())
    """
    path = environment.get(_VARIABLE, EXPORTER_SOCKET)
    return (path,) if path else ()


class _Rank:
    """One rank: sums over its processes, and what it said last."""

    def __init__(self) -> None:
        self.totals = [0.0] * len(_COUNTERS)
        self.buckets: list[int] | None = None
        self.gauges: dict[str, float] = {}
        self.method: str | None = None
        self.heard = 0.0

    def message(self, rank: int, now: float) -> dict[str, Any]:
        return {
            "r": rank,
            "age": round(max(0.0, now - self.heard), 3),
            "t": [round(one, 6) for one in self.totals],
            "b": self.buckets,
            "m": self.method,
            "g": self.gauges,
        }


class Feed:
    """Keeps what ranks say, and sends it on; safe to use from several threads.

    Args:
        targets: paths where an exporter of the whole node may listen.
        clock: seconds on a monotonic clock.

    Attributes:
        sent: messages that an exporter has taken.
        dropped: messages that found no room.
    """

    def __init__(self, targets: Sequence[str] = (), clock: Any = time.monotonic) -> None:
        self.sent = self.dropped = 0
        self._targets = tuple(targets)
        self._clock = clock
        self._lock = threading.Lock()
        self._ranks: dict[
            int, _Rank
        ] = {}  # in the order in which they came, which is that of parts
        self._processes: OrderedDict[tuple[int, int], tuple[list[float], list[int] | None]] = (
            OrderedDict()
        )
        self._binding: tuple[int, int] | None = None
        self._inherited: list[socket.socket] = []
        self._reached: dict[str, socket.socket] = {}
        self._news = False
        self._turn = 0
        self._send_at = self._beat_at = self._look_at = -math.inf

    def add_socket(self, one: socket.socket) -> None:
        """Send to a connected socket from now on; it is closed when its other end is gone."""
        one.setblocking(False)
        with self._lock:
            self._inherited.append(one)
            self._beat_at = -math.inf

    def tell_binding(self, right: int, wrong: int) -> None:
        """Say how many ranks of this node run where they should, and how many do not."""
        with self._lock:
            if self._binding != (right, wrong):
                self._binding, self._news = (right, wrong), True

    def take(self, rank: int, pid: int, data: Mapping[str, Any], buckets: Any = None) -> None:
        """Note the counters of a process of a rank.

        Args:
            rank: global rank.
            pid: the process, as the kernel vouches for it.
            data: its counters since it began, and gauges; what is no number counts as none.
            buckets: steps by duration, as hpml_channel.py sends them.
        """
        said = [_amount(data.get(name)) for name in _COUNTERS]
        counts = _counts(buckets)
        with self._lock:
            one = self._ranks.get(rank)
            if one is None:
                if len(self._ranks) >= _MAX_RANKS:
                    return
                one = self._ranks[rank] = _Rank()
            before, counted = self._processes.pop((rank, pid), ([0.0] * len(said), None))
            values = [old if new is None else new for new, old in zip(said, before)]
            if any(new < old for new, old in zip(values, before)):
                before, counted = [0.0] * len(values), None  # another process of the same number
            self._processes[rank, pid] = values, counts
            if len(self._processes) > _MAX_PROCESSES:
                self._processes.popitem(last=False)
            for number, (new, old) in enumerate(zip(values, before)):
                one.totals[number] += new - old
            if counts is not None:
                one.buckets = one.buckets or [0] * _BUCKETS
                for number, (new, old) in enumerate(zip(counts, counted or [0] * _BUCKETS)):
                    one.buckets[number] += max(0, new - old)
            one.gauges = {name: data[name] for name in _GAUGES if _is_number(data.get(name))}
            one.method = _method(data.get("comm_method"))
            one.heard = self._clock()
            self._news = True

    def act(self, now: float) -> float:
        """Send what is due; return after how many seconds there may be more.

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
        """Send the last word now; the training is over, or its node is told to end."""
        with self._lock:
            self._look()
            self._send(self._clock())

    def close(self) -> None:
        """Close all sockets."""
        with self._lock:
            for one in (*self._inherited, *self._reached.values()):
                one.close()
            self._inherited.clear()
            self._reached.clear()

    def _look(self) -> None:
        """Connect to exporters that have come since the last look."""
        for path in self._targets:
            if path not in self._reached:
                found = _connected(path)
                if found is not None:
                    self._reached[path] = found
                    self._beat_at = -math.inf

    def _send(self, now: float) -> None:
        messages = self._messages(now)
        if messages:  # begin with what found no room, else the last parts of many would never
            turn = self._turn % len(messages)
            messages = messages[turn:] + messages[:turn]
        self._send_at, self._beat_at = now + _EVERY_SECONDS, now + _BEAT_SECONDS
        self._news = False
        for one in tuple(self._inherited):
            if not self._hand_over(one, messages):
                self._inherited.remove(one)
        for path, one in tuple(self._reached.items()):
            if not self._hand_over(one, messages):
                del self._reached[path]

    def _hand_over(self, one: socket.socket, messages: list[bytes]) -> bool:
        """Give messages to the kernel; False where nobody will ever take them."""
        full = False
        for message in messages:
            try:
                one.send(message, socket.MSG_DONTWAIT)
            except OSError as error:
                if error.errno in _FULL:
                    self.dropped += 1
                    self._news = True  # there may be room at the next time
                    if not full:
                        full, self._turn = True, _part(message)
                    continue
                one.close()
                return False
            self.sent += 1
        return True

    def _messages(self, now: float) -> list[bytes]:
        ranks = [one.message(rank, now) for rank, one in self._ranks.items()]
        if not ranks and self._binding is None:
            return []
        found = []
        for part, first in enumerate(range(0, max(1, len(ranks)), _RANKS_PER_PART)):
            whole = {
                "pid": os.getpid(),
                "binding": self._binding,
                "ranks": ranks[first : first + _RANKS_PER_PART],
            }
            text = json.dumps(whole, separators=(",", ":"), allow_nan=False)
            found.append(f"hpml-feed 1 {part}\n{text}".encode("ascii"))
        return found


def _part(message: bytes) -> int:
    """Return which part a message of our own is."""
    return int(message.split(b"\n", 1)[0].rpartition(b" ")[2])


def _amount(value: Any) -> float | None:
    """Return a counter; None where it is not told, or cannot be."""
    return float(value) if _is_number(value) and value >= 0 else None


def _is_number(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and abs(value) < _HIGHEST  # not infinite, and not NaN either


def _counts(told: Any) -> list[int] | None:
    """Return the steps by duration that a datagram tells, None where it tells none."""
    if not isinstance(told, dict) or not told:
        return None
    counts = [0] * _BUCKETS
    for key, value in told.items():
        place = _PLACES.get(key, -1)
        if 0 <= place < _BUCKETS and type(value) is int and 0 <= value < _HIGHEST:
            counts[place] = value
    return counts


def _method(told: Any) -> str | None:
    """Return how communication was measured, as a label can hold it."""
    if not isinstance(told, str):
        return None
    text = "".join(one if " " <= one <= "~" and one not in '"\\' else "?" for one in told[:64])
    return text.strip()[:_METHOD_CHARACTERS] or None


def _connected(path: str) -> socket.socket | None:
    """Return a socket to who listens at a path, if the system's owner let them do so."""
    if not _is_trusted(path):
        return None
    one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        # A short wait puts it in the line, which those who flood the exporter do not stand in.
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _KNOCK)
        one.connect(path)
        one.setblocking(False)
    except OSError:  # nobody listens any more, or more knock there than it can take
        one.close()
        return None
    return one


def _is_trusted(path: str) -> bool:
    """Say whether what lies there was put there by root, by this user, or with root's leave.

    With leave: the directory is another user's, as systemd makes it for a service, but lies where
    only root can put one.
    """
    directory = os.path.dirname(path)
    with contextlib.suppress(OSError):
        place, there = os.lstat(directory), os.lstat(path)
        above = os.stat(os.path.dirname(directory))
        ours = (0, os.getuid())
        return (
            stat.S_ISSOCK(there.st_mode)
            and stat.S_ISDIR(place.st_mode)
            and not place.st_mode & stat.S_IWOTH
            and (place.st_uid in ours or (above.st_uid == 0 and not above.st_mode & 0o022))
        )
    return False
