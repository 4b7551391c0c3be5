"""The ranks of a node as seen on the training channel: their addresses and signs of life."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from hpml_orchestrator.node.feed import amount

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

_REAL_TIME_SIGNALS = range(signal.SIGRTMIN, signal.SIGRTMAX + 1)
_MAX_SECONDS = 7 * 86400.0  # a longer save or step must be an error of the sender


@dataclass
class Peer:
    """One process that uses the channel."""

    rank: int  # global rank
    address: bytes = b""  # of its socket; empty if it cannot receive anything
    stacks_fd: int = -1  # descriptor in that process of the file for its stacks; -1 for none
    stacks_signal: int = 0  # makes it write its stacks; 0 for none


class Slowest(NamedTuple):
    """The longest times that ranks reported, in seconds; None without a report."""

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
            pid: the process, as the kernel vouches for it.
            rank: its global rank.
            address: of the sender's socket; empty if it has none.
        """
        with self._lock:
            self._heard += 1
            peer = self._peers.setdefault(pid, Peer(rank))
            peer.rank, peer.address = rank, address or peer.address

    def hello(self, pid: int, data: Mapping[str, object]) -> None:
        """Record how to read the stacks of a process; invalid values are ignored.

        Only a real-time signal is accepted: another one could end a process without a handler.
        """
        number, descriptor = data.get("stacks_signal"), data.get("stacks_fd")
        if type(number) is int and type(descriptor) is int and number in _REAL_TIME_SIGNALS:
            with self._lock:
                peer = self._peers[pid]
                peer.stacks_fd, peer.stacks_signal = descriptor, number

    def take(self, pid: int, event: str, data: Mapping[str, object]) -> None:
        """Record the duration of steps and saves that an event reports."""
        with self._lock:
            if event == "checkpoint":
                seconds = _seconds(data.get("seconds"))
                self._slowest = self._slowest.over(Slowest(save=seconds))
            elif event == "step":
                self._stepping.add(pid)
                steps, total = data.get("steps_total"), amount(data.get("step_seconds_total"))
                if isinstance(steps, (int, float)) and total is not None:
                    steps_before, total_before = self._counted.get(pid, (0.0, 0.0))
                    # Counters are cumulative, so two reports give the mean over the steps in
                    # between.
                    if steps > steps_before:
                        mean = (total - total_before) / (steps - steps_before)
                        self._slowest = self._slowest.over(Slowest(step=_seconds(mean)))
                    self._counted[pid] = float(steps), total

    @property
    def slowest(self) -> Slowest:
        """The slowest save and the slowest step so far; a step's time is a mean over a second."""
        return self._slowest

    @property
    def heard(self) -> int:
        """How many datagrams have arrived so far."""
        return self._heard

    @property
    def stepping(self) -> frozenset[int]:
        """Processes that have reported a step."""
        with self._lock:
            return frozenset(self._stepping)

    def by_pid(self) -> dict[int, Peer]:
        """Return all processes so far, ended ones too."""
        with self._lock:
            return {pid: Peer(**vars(peer)) for pid, peer in self._peers.items()}

    def ask_to_stop(self, channel: socket.socket, reason: str) -> None:
        """Send a stop request to every process; an ended process is not asked again."""
        datagram = json.dumps({"v": 1, "stop": reason}).encode("ascii")
        for pid, peer in self.by_pid().items():
            if peer.address:
                try:
                    channel.sendto(datagram, peer.address)
                except BlockingIOError:
                    continue  # its queue is full of requests that it has not read yet
                except OSError:
                    # The socket is gone, and with it the process. A new one introduces itself with
                    # a new address.
                    with self._lock, contextlib.suppress(KeyError):
                        self._peers[pid].address = b""


def _seconds(value: object) -> float | None:
    seconds = amount(value)
    return seconds if seconds is not None and seconds < _MAX_SECONDS else None


def _longer(one: float | None, other: float | None) -> float | None:
    return max((value for value in (one, other) if value is not None), default=None)
