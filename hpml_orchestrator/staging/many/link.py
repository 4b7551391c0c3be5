"""Connections between nodes of a chain: the proof of the secret, then small messages.

Two nodes prove to each other that they know the job's secret before anything else is said:

    connector -> acceptor   HELLO: magic, kind, its number, the acceptor's number, nonce
    acceptor -> connector   nonce, HMAC-SHA256(secret, "accept" HELLO nonce)
    connector -> acceptor   HMAC-SHA256(secret, "connect" HELLO nonce)

The acceptor goes first, so a connector tells nothing to a stranger. Both nonces are new for every
connection: what was recorded is of no use. What follows is not encrypted. On a control connection:

    message   length of payload u32, kind u8, payload, BLAKE2b of counter, kind and payload,
              keyed with the connection's own key and direction, 16 bytes

Nothing here blocks for long; the owner calls `tick` a few times a second.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import secrets
import select
import selectors
import socket
import struct
import time
from typing import TYPE_CHECKING, NamedTuple

from hpml_orchestrator.errors import StagingError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "BEAT",
    "COMMIT",
    "CONTROL",
    "DATA",
    "DONE",
    "END",
    "FAIL",
    "GO",
    "NAME",
    "PLAN",
    "PLAN_END",
    "READY",
    "BrokenLinkError",
    "Caller",
    "Door",
    "Link",
    "call",
]

CONTROL, DATA = 1, 2
SECRET_BYTES = 32
_HELLO = struct.Struct(">8sBII32s")
_MAGIC = b"HPMLchn1"
_NONCE_BYTES = _PROOF_BYTES = 32
_MOST_PENDING = 64
_PATIENCE_SECONDS = 10.0
_BACKLOG = 1024


class Caller(NamedTuple):
    """A connection whose other end proved itself.

    Attributes:
        sock: blocking.
        kind: CONTROL or DATA.
        key: known to the two ends of this connection alone.
    """

    sock: socket.socket
    kind: int
    key: bytes


class _Pending:
    def __init__(self, sock: socket.socket, until: float) -> None:
        self.sock = sock
        self.until = until
        self.heard = b""
        self.hello = b""
        self.nonce = b""


class Door:
    """Listens at one address and lets in who knows the secret; strangers do not hold it up.

    Args:
        address: to listen at, and at no other.
        secret: the job's.
        me: this node's number.
        caller: number of the one node that may connect.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        *,
        me: int,
        caller: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._secret = secret
        self._who = (caller, me)
        self._clock = clock
        self._pending: dict[int, _Pending] = {}
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.bind((address, 0))
        self._listener.listen(_BACKLOG)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.EpollSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)

    def fileno(self) -> int:
        """Return a descriptor that is readable when `poll` has something to do."""
        return self._selector.fileno()

    def poll(self, timeout: float = 0.0) -> list[Caller]:
        """Go on with all handshakes and return those that are done."""
        done = []
        for key, _ in self._selector.select(timeout):
            if key.fileobj is self._listener:
                self._welcome()
                continue
            pending = self._pending.get(key.fd)
            if pending is not None:
                done += self._advance(pending)
        now = self._clock()
        for pending in [one for one in self._pending.values() if one.until < now]:
            self._drop(pending)
        return done

    def close(self) -> None:
        """Stop listening; handshakes that are not done are cut."""
        for pending in list(self._pending.values()):
            self._drop(pending)
        self._selector.close()
        self._listener.close()

    def _welcome(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            sock.setblocking(False)
            if len(self._pending) >= _MOST_PENDING:
                self._drop(min(self._pending.values(), key=lambda one: one.until))
            self._pending[sock.fileno()] = _Pending(sock, self._clock() + _PATIENCE_SECONDS)
            self._selector.register(sock, selectors.EVENT_READ)

    def _advance(self, pending: _Pending) -> list[Caller]:
        wanted = _PROOF_BYTES if pending.hello else _HELLO.size
        try:
            heard = pending.sock.recv(wanted - len(pending.heard))
        except BlockingIOError:
            return []
        except OSError:
            heard = b""
        pending.heard += heard
        if heard and len(pending.heard) < wanted:
            return []
        if heard and not pending.hello and self._answer(pending):
            return []
        if heard and pending.hello and self._proved(pending):
            self._forget(pending)
            pending.sock.setblocking(True)
            kind = _HELLO.unpack(pending.hello)[1]
            return [Caller(pending.sock, kind, _key(self._secret, pending.hello, pending.nonce))]
        self._drop(pending)
        return []

    def _answer(self, pending: _Pending) -> bool:
        magic, kind, caller, me, _ = _HELLO.unpack(pending.heard)
        if magic != _MAGIC or kind not in {CONTROL, DATA} or (caller, me) != self._who:
            return False
        pending.hello, pending.heard = pending.heard, b""
        pending.nonce = secrets.token_bytes(_NONCE_BYTES)
        proof = _proof(self._secret, b"accept", pending.hello, pending.nonce)
        try:
            return pending.sock.send(pending.nonce + proof) == _NONCE_BYTES + _PROOF_BYTES
        except OSError:
            return False

    def _proved(self, pending: _Pending) -> bool:
        proof = _proof(self._secret, b"connect", pending.hello, pending.nonce)
        return hmac.compare_digest(proof, pending.heard)

    def _forget(self, pending: _Pending) -> None:
        self._selector.unregister(pending.sock)
        del self._pending[pending.sock.fileno()]

    def _drop(self, pending: _Pending) -> None:
        self._forget(pending)
        pending.sock.close()


def call(
    address: str, port: int, secret: bytes, kind: int, *, me: int, callee: int, timeout: float
) -> Caller:
    """Connect to a node and prove each other the secret.

    Raises:
        StagingError: what answers there does not know the secret.
        OSError: nothing answers there, or not in time.
    """
    sock = socket.create_connection((address, port), timeout=timeout)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello = _HELLO.pack(_MAGIC, kind, me, callee, secrets.token_bytes(_NONCE_BYTES))
        sock.sendall(hello)
        answer = _exactly(sock, _NONCE_BYTES + _PROOF_BYTES)
        nonce, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
        if not hmac.compare_digest(proof, _proof(secret, b"accept", hello, nonce)):
            raise StagingError(f"what answers at {address} port {port} is no node of this job")
        sock.sendall(_proof(secret, b"connect", hello, nonce))
        sock.settimeout(None)
    except BaseException:
        sock.close()
        raise
    return Caller(sock, kind, _key(secret, hello, nonce))


def _exactly(sock: socket.socket, count: int) -> bytes:
    heard = b""
    while len(heard) < count:
        more = sock.recv(count - len(heard))
        if not more:
            raise ConnectionResetError("connection closed during the handshake")
        heard += more
    return heard


def _proof(secret: bytes, label: bytes, hello: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, label + hello + nonce, "sha256")


def _key(secret: bytes, hello: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, b"key" + hello + nonce, "sha256")


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
