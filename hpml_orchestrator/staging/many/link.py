"""The control connection between two neighbours of a chain: small messages, and signs of life.

    message   length of payload u32, kind u8, payload, BLAKE2b of counter, kind and payload,
              keyed with the connection's own key and direction, 16 bytes

Nothing here blocks for long; the owner calls `tick` a few times a second.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import select
import socket
import struct
import time
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import StagingError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpml_orchestrator.staging.many.handshake import Caller

__all__ = [
    "BEAT",
    "COMMIT",
    "DONE",
    "END",
    "FAIL",
    "GO",
    "NAME",
    "PLAN",
    "PLAN_END",
    "READY",
    "BrokenLinkError",
    "Link",
]

BEAT, NAME, PLAN, PLAN_END, READY, GO, END, DONE, COMMIT, FAIL = range(1, 11)
_KINDS = frozenset(range(1, 11))
_HEAD = struct.Struct(">IB")
_MAC_BYTES = 16
_MOST_BYTES = 2 << 20
_BACKLOG_BYTES = 4 << 20
_PIECE_BYTES = 256 << 10
_BEATS_PER_TIMEOUT = 10.0
_FAREWELL_SECONDS = 1.0
_WOULD_BLOCK = frozenset({errno.EAGAIN, errno.EWOULDBLOCK, errno.EINTR})


class BrokenLinkError(StagingError):
    """The neighbour is gone or hangs; what it said last may tell why."""


class Link:
    """One end of a control connection.

    Args:
        caller: the connection.
        peer: what to call the neighbour in errors.
        connector: whether this end connected.
        timeout: seconds without a sign of life after which the neighbour counts as hung.
    """

    def __init__(
        self,
        caller: Caller,
        peer: str,
        *,
        connector: bool,
        timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.peer = peer
        self._sock = caller.sock
        self._sock.setblocking(False)
        _notice_dead_hosts(self._sock, timeout)
        ends = (b"connector", b"acceptor")
        mine, theirs = ends if connector else ends[::-1]
        self._key_out = hmac.digest(caller.key, mine, "sha256")
        self._key_in = hmac.digest(caller.key, theirs, "sha256")
        self._count_out = self._count_in = 0
        self._out = bytearray()
        self._in = bytearray()
        self._clock = clock
        self._timeout = timeout
        self._heard_at = self._beat_at = self._ticked_at = clock()
        self.watched = False
        self._closed = ""

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._sock.fileno()

    @property
    def is_waiting(self) -> bool:
        """Whether there is something that could not be sent yet."""
        return bool(self._out)

    def watch(self) -> None:
        """From now on silence counts: the neighbour is known to call `tick` all the time."""
        self.watched = True
        self._heard_at = self._ticked_at = self._clock()

    def send(self, kind: int, payload: bytes = b"") -> None:
        """Send a message, later if need be; waits only for a neighbour that is far behind.

        Raises:
            BrokenLinkError: the neighbour is gone, or took nothing for the whole timeout.
        """
        mac = _mac(self._key_out, self._count_out, kind, payload)
        self._count_out += 1
        self._out += _HEAD.pack(len(payload), kind) + payload + mac
        self._flush()
        end = self._clock() + self._timeout
        while len(self._out) > _BACKLOG_BYTES:
            before = len(self._out)
            select.select([], [self._sock], [], 1.0)
            self._flush()
            if len(self._out) < before:
                end = self._clock() + self._timeout
            elif self._clock() > end:
                raise BrokenLinkError(f"{self.peer} took no bytes for {self._timeout:.0f} s")

    def tick(self) -> list[tuple[int, bytes]]:
        """Send what waits and a sign of life, and return what came.

        Raises:
            BrokenLinkError: the neighbour is gone, hangs, or what it says is damaged; only once
                all that it said before was returned.
        """
        now = self._clock()
        if now - self._ticked_at > self._timeout / 2:
            # This process was stopped, and perhaps the whole job: nobody listened to the silence.
            self._heard_at += now - self._ticked_at
        self._ticked_at = now
        if not self._closed:
            self._read()
        messages = self._parse()
        if messages:
            self._heard_at = now
        elif self._closed:
            raise BrokenLinkError(f"{self.peer} was lost: {self._closed}")
        elif self.watched and now - self._heard_at > self._timeout:
            raise BrokenLinkError(f"{self.peer} hangs: no sign of life for {self._timeout:.0f} s")
        if now - self._beat_at >= self._timeout / _BEATS_PER_TIMEOUT:
            self._beat_at = now
            if not self._out:
                with contextlib.suppress(BrokenLinkError):  # reading tells it, and what came before
                    self.send(BEAT)
        with contextlib.suppress(BrokenLinkError):
            self._flush()
        return [one for one in messages if one[0] != BEAT]

    def close(self) -> None:
        """Close; what was sent still arrives, if the neighbour takes it within a second."""
        end = time.monotonic() + _FAREWELL_SECONDS
        with contextlib.suppress(OSError, BrokenLinkError):
            while self._out and time.monotonic() < end:
                select.select([], [self._sock], [], 0.1)
                self._flush()
            self._sock.shutdown(socket.SHUT_WR)
            while not self._closed and time.monotonic() < end:
                # closing while there is something to read would reset the connection, and the
                # neighbour would lose what it has not read yet
                ready = select.select([self._sock], [], [], end - time.monotonic())[0]
                if not ready or not self._sock.recv(_PIECE_BYTES):
                    break
        self._sock.close()

    def drop(self) -> None:
        """Close this process's copy of the descriptor and do nothing else."""
        self._sock.close()

    def _flush(self) -> None:
        try:
            while self._out:
                del self._out[: self._sock.send(self._out[:_PIECE_BYTES])]
        except OSError as error:
            if error.errno not in _WOULD_BLOCK:
                raise BrokenLinkError(f"{self.peer} was lost: {error.strerror}") from error

    def _read(self) -> None:
        try:
            while len(self._in) <= _MOST_BYTES:
                heard = self._sock.recv(_PIECE_BYTES)
                if not heard:
                    self._closed = "its connection ended"
                    return
                self._in += heard
        except OSError as error:
            if error.errno not in _WOULD_BLOCK:
                self._closed = error.strerror or str(error)

    def _parse(self) -> list[tuple[int, bytes]]:
        messages = []
        at = 0
        while len(self._in) - at >= _HEAD.size:
            length, kind = _HEAD.unpack_from(self._in, at)
            if length > _MOST_BYTES or kind not in _KINDS:
                raise BrokenLinkError(f"what came from {self.peer} is damaged")
            end = at + _HEAD.size + length + _MAC_BYTES
            if len(self._in) < end:
                break
            payload = bytes(self._in[at + _HEAD.size : end - _MAC_BYTES])
            mac = _mac(self._key_in, self._count_in, kind, payload)
            if not hmac.compare_digest(mac, bytes(self._in[end - _MAC_BYTES : end])):
                raise BrokenLinkError(f"what came from {self.peer} is damaged")
            self._count_in += 1
            messages.append((kind, payload))
            at = end
        del self._in[:at]
        return messages


def _mac(key: bytes, count: int, kind: int, payload: bytes) -> bytes:
    made = hashlib.blake2b(struct.pack(">QB", count, kind), digest_size=_MAC_BYTES, key=key)
    made.update(payload)
    return made.digest()


def _notice_dead_hosts(sock: socket.socket, timeout: float) -> None:
    """Have the kernel ask a silent neighbour's kernel whether it is there."""
    seconds = max(1, int(timeout / 3))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", seconds),
        ("TCP_KEEPINTVL", seconds),
        ("TCP_KEEPCNT", 2),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, 18, int(timeout * 1000))  # TCP_USER_TIMEOUT
