"""Two nodes prove to each other that they know the job's secret before anything else is said.

    connector -> acceptor   HELLO: magic, kind, its number, the acceptor's number, nonce
    acceptor -> connector   nonce, HMAC-SHA256(secret, "accept" HELLO nonce)
    connector -> acceptor   HMAC-SHA256(secret, "connect" HELLO nonce)

The acceptor goes first, so a connector tells nothing to a stranger. Both nonces are new for every
connection: what was recorded is of no use. What follows is not encrypted.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import selectors
import socket
import struct
import time
from typing import TYPE_CHECKING, NamedTuple

from hpml_orchestrator.errors import StagingError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CONTROL", "DATA", "Caller", "Door", "call"]

CONTROL, DATA = 1, 2
SECRET_BYTES = 32
_HELLO = struct.Struct(">8sBII32s")
_MAGIC = b"HPMLchn1"
_NONCE_BYTES = _MAC_BYTES = 32
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

    def drop(self) -> None:
        """Close this process's copies of the descriptors; for a forked child."""
        for pending in self._pending.values():
            pending.sock.close()
        self._listener.close()
        os.close(self._selector.fileno())  # to unregister would concern the parent, too

    def _welcome(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            sock.setblocking(False)
            if len(self._pending) >= _MOST_PENDING:
                self._drop(min(self._pending.values(), key=lambda one: one.until))
            self._pending[sock.fileno()] = _Pending(sock, self._clock() + _PATIENCE_SECONDS)
            self._selector.register(sock, selectors.EVENT_READ)

    def _advance(self, pending: _Pending) -> list[Caller]:
        wanted = _MAC_BYTES if pending.hello else _HELLO.size
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
        proof = _mac(self._secret, b"accept", pending.hello, pending.nonce)
        try:
            return pending.sock.send(pending.nonce + proof) == _NONCE_BYTES + _MAC_BYTES
        except OSError:
            return False

    def _proved(self, pending: _Pending) -> bool:
        proof = _mac(self._secret, b"connect", pending.hello, pending.nonce)
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
        answer = _exactly(sock, _NONCE_BYTES + _MAC_BYTES)
        nonce, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
        if not hmac.compare_digest(proof, _mac(secret, b"accept", hello, nonce)):
            raise StagingError(f"what answers at {address} port {port} is no node of this job")
        sock.sendall(_mac(secret, b"connect", hello, nonce))
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


def _mac(secret: bytes, label: bytes, hello: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, label + hello + nonce, "sha256")


def _key(secret: bytes, hello: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, b"key" + hello + nonce, "sha256")
