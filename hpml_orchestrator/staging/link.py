"""Connections between the nodes of a chain, and the address at which a node listens.

They are `multiprocessing.connection`'s: messages of bytes over TCP. Each node connects to the one
behind it: once to talk (`Link`), and once for each process that sends data. Two nodes prove to each
other that they know the job's secret (HMAC-SHA256 over a nonce of each) before anything else is
sent, and each message of a link carries a keyed digest. Nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import ipaddress
import json
import queue
import secrets
import socket
import struct
import threading
import time
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NamedTuple

from hpml_orchestrator.errors import StagingError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "CONTROL",
    "DATA",
    "BrokenLinkError",
    "Caller",
    "Door",
    "Heard",
    "Link",
    "call",
    "interface_address",
    "lost",
    "own_address",
]

CONTROL, DATA = "control", "data"
SECRET_BYTES = 32
_DIGEST_BYTES = 32
_HELLO_BYTES = 4096
_MOST_BYTES = 64 << 20  # of a message: a thousand names and their sizes
_PATIENCE_SECONDS = 10.0
_MOST_STRANGERS = 512
_BEATS_PER_TIMEOUT = 5.0
_ACCEPT_SECONDS = 0.2
_FAREWELL_SECONDS = 1.0
_TIMEVAL = struct.Struct("ll")
_TCP_USER_TIMEOUT = 18
_SIOCGIFADDR = 0x8915
_IFREQ = struct.Struct("256s")
_GLOBAL_SCOPE = "00"
_NOWHERE = "192.0.2.1"  # RFC 5737: an address for documentation; only the route to it is asked for


class BrokenLinkError(StagingError):
    """The neighbour is gone or hangs; what it said last may tell why."""


def lost(peer: str, timeout: float, error: BaseException) -> str:
    """Return what to say of a connection that failed."""
    if isinstance(error, BlockingIOError):
        return f"{peer} hangs: nothing went through for {timeout:.0f} s"
    why = getattr(error, "strerror", "") or "its connection ended"
    return f"{peer} was lost: {why}"


class Caller(NamedTuple):
    """A connection whose other end proved itself: CONTROL or DATA, and the node's name."""

    connection: Connection
    kind: str
    name: str


class Heard(NamedTuple):
    """What came from a neighbour; `word` is "lost" when nothing will come any more."""

    link: Link
    word: str
    body: Any


class Door:
    """Listens at one address and lets in who knows the secret; strangers do not hold it up.

    Args:
        address: to listen at, and at no other.
        secret: the job's.
        caller: number of the one node that may connect.
        timeout: seconds after which a node that sends nothing on a data connection hangs.

    Attributes:
        callers: who was let in.
    """

    def __init__(self, address: str, secret: bytes, *, caller: int, timeout: float) -> None:
        self._secret = secret
        self._caller = caller
        self._timeout = timeout
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=1024)
        self._listener.settimeout(_ACCEPT_SECONDS)
        self._strangers = threading.Semaphore(_MOST_STRANGERS)
        self._is_open = True
        self.port: int = self._listener.getsockname()[1]
        self.callers: queue.SimpleQueue[Caller] = queue.SimpleQueue()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while self._is_open:
            with contextlib.suppress(OSError, RuntimeError):  # no thread to be had: it calls again
                sock, _ = self._listener.accept()
                if self._strangers.acquire(blocking=False):
                    threading.Thread(target=self._welcome, args=(sock,), daemon=True).start()
                else:
                    sock.close()
        self._listener.close()

    def _welcome(self, sock: socket.socket) -> None:
        connection = _connection(sock, _PATIENCE_SECONDS)
        try:
            _prove(connection, self._secret, b"acceptor", b"connector")
            kind, number, name = json.loads(connection.recv_bytes(_HELLO_BYTES))
            if kind not in {CONTROL, DATA} or number != self._caller or not self._is_open:
                raise ValueError(kind)
            # data comes when there are some: that a node hangs is heard where nodes talk
            _limit(connection.fileno(), self._timeout, receive=kind == CONTROL)
            self.callers.put(Caller(connection, kind, str(name)[:255]))
        except (OSError, EOFError, ValueError, TypeError):
            connection.close()
        finally:
            self._strangers.release()

    def close(self) -> None:
        """Stop listening."""
        self._is_open = False
        with contextlib.suppress(queue.Empty):
            while True:
                self.callers.get_nowait().connection.close()


def call(
    address: str, port: int, secret: bytes, kind: str, *, me: int, name: str, timeout: float
) -> Connection:
    """Connect to a node and prove each other the secret.

    Args:
        address: of the node.
        port: likewise.
        secret: the job's.
        kind: CONTROL or DATA.
        me: this node's number.
        name: this node's.
        timeout: seconds until the node answers, and later until it takes bytes.

    Raises:
        StagingError: what answers there does not know the secret.
        OSError: nothing answers there, or not in time.
    """
    sock = socket.create_connection((address, port), timeout=min(timeout, _PATIENCE_SECONDS))
    connection = _connection(sock, min(timeout, _PATIENCE_SECONDS))
    try:
        _prove(connection, secret, b"connector", b"acceptor")
        connection.send_bytes(json.dumps([kind, me, name]).encode())
        _limit(connection.fileno(), timeout)
    except BaseException as error:
        connection.close()
        if isinstance(error, (ValueError, EOFError)):
            message = f"what answers at {address} port {port} is no node of this job"
            raise StagingError(message) from error
        raise
    return connection


def _connection(sock: socket.socket, timeout: float) -> Connection:
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _limit(sock.fileno(), timeout)
    return Connection(sock.detach())


def _limit(fd: int, timeout: float, *, receive: bool = True) -> None:
    """Let the kernel end calls that take too long, and notice a host that is gone."""
    with socket.socket(fileno=_duplicate(fd)) as sock:
        limit = _TIMEVAL.pack(int(timeout), int(timeout % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        limit = limit if receive else _TIMEVAL.pack(0, 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_USER_TIMEOUT, int(timeout * 1000))


def _duplicate(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)


def _prove(connection: Connection, secret: bytes, mine: bytes, theirs: bytes) -> None:
    """Prove the secret and have it proved; what was recorded is of no use.

    Raises:
        ValueError: the other end does not know it.
        OSError, EOFError: it is gone, or talks nonsense.
    """
    ours = secrets.token_bytes(_DIGEST_BYTES)
    connection.send_bytes(ours)
    other = connection.recv_bytes(_DIGEST_BYTES)
    connection.send_bytes(hmac.digest(secret, mine + ours + other, "sha256"))
    proof = connection.recv_bytes(_DIGEST_BYTES)
    if not hmac.compare_digest(proof, hmac.digest(secret, theirs + other + ours, "sha256")):
        raise ValueError("the secret is another")


class Link:
    """One end of a connection on which neighbours talk: a word and what goes with it.

    A thread listens and gives signs of life, whatever else this process is busy with: so silence
    means that the neighbour hangs.

    Args:
        connection: to the neighbour.
        peer: what to call it.
        secret: the job's, for the digest of each message.
        timeout: seconds without a sign of life after which it counts as hung.
        heard: gets what it says.
    """

    def __init__(
        self,
        connection: Connection,
        peer: str,
        secret: bytes,
        timeout: float,
        heard: queue.SimpleQueue[Heard],
    ) -> None:
        self.peer = peer
        self._connection = connection
        self._secret = secret
        self._timeout = timeout
        self._heard = heard
        self._lock = threading.Lock()
        self._is_open = True
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def send(self, word: str, body: Any = None) -> None:
        """Say something.

        Raises:
            BrokenLinkError: the neighbour is gone, or took nothing for the whole timeout.
        """
        data = json.dumps([word, body]).encode()
        try:
            with self._lock:
                self._connection.send_bytes(hmac.digest(self._secret, data, "sha256") + data)
        except OSError as error:
            raise BrokenLinkError(lost(self.peer, self._timeout, error)) from error

    def _listen(self) -> None:
        period = self._timeout / _BEATS_PER_TIMEOUT
        heard_at = beat_at = time.monotonic()
        reason = ""
        while not reason:
            looked = time.monotonic()
            try:
                if self._connection.poll(max(0.0, min(period, beat_at - looked))):
                    self._take(self._connection.recv_bytes(_MOST_BYTES))
                    heard_at = time.monotonic()
            except (OSError, EOFError) as error:
                reason = lost(self.peer, self._timeout, error)
            except (ValueError, TypeError):
                reason = f"what came from {self.peer} is damaged"
            now = time.monotonic()
            if now - looked > self._timeout:  # this process was stopped, and perhaps the whole job
                heard_at = now
            if now - heard_at > self._timeout:
                reason = f"{self.peer} hangs: no sign of life for {self._timeout:.0f} s"
            if self._is_open and now >= beat_at:
                beat_at = now + period
                with contextlib.suppress(BrokenLinkError):  # whoever listens finds out
                    self.send("beat")
        self._heard.put(Heard(self, "lost", reason))

    def _take(self, message: bytes) -> None:
        """Hand on a message.

        Raises:
            ValueError, TypeError: it is none.
        """
        data = message[_DIGEST_BYTES:]
        digest = hmac.digest(self._secret, data, "sha256")
        if not hmac.compare_digest(message[:_DIGEST_BYTES], digest):
            raise ValueError("another digest")
        word, body = json.loads(data)
        if word != "beat":
            self._heard.put(Heard(self, str(word), body))

    def close(self) -> None:
        """Close; what was sent still arrives, and what the neighbour said is read."""
        self._is_open = False
        with contextlib.suppress(OSError), self._lock:
            sock = socket.socket(fileno=_duplicate(self._connection.fileno()))
            with sock:
                sock.shutdown(socket.SHUT_WR)
        # an end with something unread would reset the connection, and lose what was sent
        self._thread.join(_FAREWELL_SECONDS)


def own_address(interfaces: Sequence[str] = (), *, towards: str = "") -> str:
    """Return the address to listen at.

    That of the first given interface which has one; else what the host's name stands for, if that
    is not the loopback; else the one that packets to the other node would leave with; else that
    of any interface.

    Args:
        interfaces: names of network interfaces, the best first.
        towards: name or address of another node.
    """
    for name in interfaces:
        found = interface_address(name)
        if found:
            return found
    for one in [*_resolved(socket.gethostname()), _route(towards), _route(_NOWHERE)]:
        if one and not _is_local(one):
            return one
    for _, name in socket.if_nameindex():
        found = interface_address(name)
        if found and not _is_local(found):
            return found
    return "127.0.0.1"


def interface_address(name: str, *, inet6: str = "/proc/net/if_inet6") -> str:
    """Return an interface's first address, IPv4 before global IPv6; "" if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        asked = _IFREQ.pack(name.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, asked)[20:24])
    with contextlib.suppress(OSError, ValueError), open(inet6, encoding="ascii") as stream:
        for line in stream:
            digits, _, _, scope, _, device = line.split()
            if device == name and scope == _GLOBAL_SCOPE:
                return str(ipaddress.IPv6Address(bytes.fromhex(digits)))
    return ""


def _resolved(name: str) -> list[str]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [str(one[4][0]) for one in found]


def _route(towards: str) -> str:
    """Return the address that packets to another node leave with; none is sent."""
    for one in _resolved(towards)[:1] if towards else []:
        family = socket.AF_INET6 if ":" in one else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            probe.connect((one, 9))
            return str(probe.getsockname()[0])
    return ""


def _is_local(address: str) -> bool:
    """Return whether no other machine can use an address: loopback, or of one link alone."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return True
    return found.is_loopback or found.is_link_local or found.is_unspecified
