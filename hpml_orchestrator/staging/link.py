"""How the nodes of a chain find each other, and the connections between them.

Nodes meet by small files in `attempts/<n>/chain/`, which appear by rename and are readable by the
job's user alone; nothing is locked.

Each node connects once to the node behind it, and this one connection carries everything: messages
of `multiprocessing.connection` over TCP. First both ends prove that they have the job's secret
(HMAC-SHA256 over a nonce of each). Control messages carry a keyed digest; file contents are covered
by the digest of the whole tree. Nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import ipaddress
import json
import os
import pickle
import queue
import secrets
import socket
import struct
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import NotFoundError, RecordError, StagingError
from hpml_orchestrator.records.files import read_text, write_text
from hpml_orchestrator.staging.faults import StagingStopped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hpml_orchestrator.staging.hashing import Buffer

    Inbox = queue.Queue[tuple[object, str, object, bytes]]
    # of (link, word, body, raw message): the body of "data" is file contents, of "lost" the reason
    # why the link ended, of "caller" the connection and name of the previous node

START = "start"
"""The first node's record: the method, and of a chain the secret."""
SECRET_BYTES = 32
DATA = b"D"
"""The first byte of a message with file contents; control messages begin with another."""
_CONTROL = b"C"
_DIGEST_BYTES = 32
_HELLO_BYTES = 4096
_BEATS_PER_TIMEOUT = 5.0
_SUSPENDED_SECONDS = 1.0
_POLL_SECONDS = 0.2
_CLOSE_SECONDS = 1.0
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_TIMEVAL = struct.Struct("ll")
_TCP_USER_TIMEOUT = 18
_SIOCGIFADDR = 0x8915
_IFREQ = struct.Struct("256s")
_GLOBAL_SCOPE = "00"
_NOWHERE = "192.0.2.1"  # RFC 5737: an address for documentation; only the route to it is used


@dataclass(frozen=True)
class ChainPosition:
    """A node's position among the nodes of a chain, and the files by which they find each other.

    Attributes:
        path: of those files, without the last part of their names.
        should_stop: True ends waiting with StagingStopped.
        index: 0 reads the source.
        nodes: how many there are.
        node: this node's name.
        names: of all nodes, in order; empty if unknown.
        interfaces: network interfaces to use, the best first.
        timeout: seconds of silence after which a node counts as hung.
        join_seconds: within how long a neighbour that has come must be reached.
        come_seconds: how long nodes wait for one another to come.
    """

    path: str
    should_stop: Callable[[], bool]
    index: int
    nodes: int
    node: str
    names: Sequence[str] = ()
    interfaces: Sequence[str] = ()
    timeout: float = 30.0
    join_seconds: float = 300.0
    come_seconds: float = 300.0

    @property
    def is_last(self) -> bool:
        """Whether this is the last node."""
        return self.index == self.nodes - 1

    def name_of(self, index: int) -> str:
        """Return a name for a node, its index if the names are unknown."""
        return self.names[index] if index < len(self.names) else f"node {index} of {self.nodes}"

    def post(self, what: str, **record: object) -> None:
        """Publish a record.

        Raises:
            RecordError: the attempt's directory cannot be written.
        """
        directory = os.path.dirname(self.path)
        try:
            os.makedirs(directory, mode=0o700, exist_ok=True)
        except OSError as error:
            raise RecordError(f"cannot write {directory}: {error.strerror}") from error
        write_text(f"{self.path}.{what}", json.dumps(record), mode=0o600)

    def read(self, what: str) -> dict[str, object] | None:
        """Return a record; None until it is there."""
        with contextlib.suppress(OSError):
            # NFS caches that a file is missing for up to a minute; opening the directory ends that.
            os.close(os.open(os.path.dirname(self.path), _DIRECTORY))
        try:
            found = json.loads(read_text(f"{self.path}.{what}"))
        except (NotFoundError, RecordError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def start(self) -> dict[str, object]:
        """Wait for the first node's record and return it.

        Raises:
            StagingError: the first node did not come, or failed; with its reason.
            StagingStopped: should_stop returned True.
        """
        end = time.monotonic() + self.come_seconds
        pauses = growing_pauses()
        while (found := self.read(START)) is None:
            if self.should_stop():
                raise StagingStopped
            # Scanning the source may take the first node long. If its agent dies, the job ends
            # anyway.
            if time.monotonic() > end and self.read("0") is None:
                within = f"within {self.come_seconds:.0f} s"
                raise StagingError(f"{self.name_of(0)} did not come {within}")
            time.sleep(next(pauses))
        if "error" in found:
            raise StagingError(str(found["error"]), hint=str(found.get("hint", "")))
        return found

    def refuse(self, error: BaseException) -> None:
        """Publish the reason why this first node ends, for the nodes that wait for its record."""
        told = f"{self.node}: {reason_of(error)}"
        self.post(START, error=told, hint=str(getattr(error, "hint", "")))

    def remove(self, what: str) -> None:
        """Remove a record, but not the directory: another node may be about to post one there."""
        with contextlib.suppress(OSError):
            os.unlink(f"{self.path}.{what}")


def growing_pauses() -> Iterator[float]:
    """Yield growing pauses, since all nodes poll one directory of the shared file system."""
    pause = 0.02
    while True:
        yield pause
        pause = min(1.0, pause * 1.3)


def reason_of(error: BaseException) -> str:
    """Return the reason that the other nodes get for an error of this one."""
    if isinstance(error, StagingStopped):
        return "was stopped"
    return str(error) or type(error).__name__


class BrokenLinkError(StagingError):
    """The neighbour has disconnected or hangs; its last message may contain the reason."""


def connect(
    address: str, port: int, secret: bytes, own: tuple[int, str], timeout: float
) -> Connection:
    """Connect to the next node and send this node's index and name; both prove the secret.

    Raises:
        StagingError: another program answers, which does not have the secret.
        OSError: nothing answers there, or not in time.
    """
    connection = _connection(socket.create_connection((address, port), timeout=timeout), timeout)
    try:
        _prove(connection, secret, b"connector", b"acceptor")
        connection.send_bytes(json.dumps(own).encode())
    except BaseException as error:
        connection.close()
        if isinstance(error, (ValueError, EOFError)):
            message = f"what answers at {address} port {port} is not a node of this job"
            raise StagingError(message) from error
        raise
    return connection


class Listener:
    """Accepts the connection of the previous node; other callers cannot delay it.

    Args:
        address: to listen at, and at no other.
        secret: the job's.
        caller: index of the only node that may connect.
        timeout: seconds after which a neighbour that takes nothing counts as hung.
        inbox: receives the connection.
    """

    def __init__(
        self, address: str, secret: bytes, caller: int, timeout: float, inbox: Inbox
    ) -> None:
        self._secret = secret
        self._caller = caller
        self._timeout = timeout
        self._inbox = inbox
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family, backlog=1024)
        self._socket.settimeout(_POLL_SECONDS)
        self._is_open = True
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while self._is_open:
            with contextlib.suppress(OSError, RuntimeError):  # no more threads: the caller retries
                sock, _ = self._socket.accept()
                # A thread for each caller: one that connects and stays silent must not keep the
                # neighbour out.
                threading.Thread(target=self._greet, args=(sock,), daemon=True).start()
        self._socket.close()

    def _greet(self, sock: socket.socket) -> None:
        connection = _connection(sock, self._timeout)
        try:
            _prove(connection, self._secret, b"acceptor", b"connector")
            index, name = json.loads(connection.recv_bytes(_HELLO_BYTES))
            if index != self._caller or not self._is_open:
                raise ValueError(index)
            self._inbox.put((None, "caller", (connection, str(name)[:255]), b""))
        except (OSError, EOFError, ValueError, TypeError):
            connection.close()

    def close(self) -> None:
        """Stop listening."""
        self._is_open = False


def _connection(sock: socket.socket, timeout: float) -> Connection:
    sock.settimeout(None)
    limit = _TIMEVAL.pack(int(timeout), int(timeout % 1 * 1e6))
    # `Connection` reads and writes the bare descriptor, which Python's own timeouts do not cover.
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, limit)
    # Short control messages would otherwise wait until the neighbour acknowledges earlier data.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Longer than the silence after which `Link` reports the neighbour by its name.
    sock.setsockopt(socket.IPPROTO_TCP, _TCP_USER_TIMEOUT, int(timeout * 3000))
    return Connection(sock.detach())


def _prove(connection: Connection, secret: bytes, mine: bytes, theirs: bytes) -> None:
    # A new nonce from each end makes a recorded proof worthless. The role in the digest stops a
    # stranger from sending our own proof back to us.
    ours = secrets.token_bytes(_DIGEST_BYTES)
    connection.send_bytes(ours)
    other = connection.recv_bytes(_DIGEST_BYTES)
    connection.send_bytes(hmac.digest(secret, mine + ours + other, "sha256"))
    proof = connection.recv_bytes(_DIGEST_BYTES)
    if not hmac.compare_digest(proof, hmac.digest(secret, theirs + other + ours, "sha256")):
        raise ValueError("the secret differs")


class Link:
    """The connection to a neighbour.

    One thread reads. Another sends heartbeats however busy the process is, so a silent neighbour
    hangs.

    Args:
        connection: to the neighbour.
        peer: its name.
        secret: the job's.
        timeout: seconds without a sign of life after which it counts as hung.
        inbox: receives what arrives.
    """

    def __init__(
        self, connection: Connection, peer: str, secret: bytes, timeout: float, inbox: Inbox
    ) -> None:
        self.peer = peer
        self._connection = connection
        self._secret = secret
        self._timeout = timeout
        self._inbox = inbox
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        threading.Thread(target=self._beat, daemon=True).start()

    def send(self, message: Buffer) -> None:
        """Send a message: file contents, or what `packed` returned.

        Raises:
            BrokenLinkError: the neighbour is gone, or took nothing for the whole timeout.
        """
        try:
            with self._lock:
                self._connection.send_bytes(message)
        except OSError as error:
            raise BrokenLinkError(self._lost(error)) from error

    def _lost(self, error: BaseException) -> str:
        if isinstance(error, (BlockingIOError, TimeoutError)):
            return f"{self.peer} hangs: nothing went through for {self._timeout:.0f} s"
        why = getattr(error, "strerror", "") or "its connection ended"
        return f"{self.peer} was lost: {why}"

    def _beat(self) -> None:
        beat = packed(self._secret, "beat")
        with contextlib.suppress(BrokenLinkError):  # the reader reports it
            while not self._closed.wait(self._timeout / _BEATS_PER_TIMEOUT):
                self.send(beat)

    def _read(self) -> None:
        try:
            while True:
                self._wait()
                message = self._connection.recv_bytes()
                self._deliver(*_unpacked(self._secret, message), message)
        except TimeoutError:
            reason = f"{self.peer} hangs: no sign of life for {self._timeout:.0f} s"
        except ValueError:
            reason = f"what came from {self.peer} is damaged"
        except (OSError, EOFError) as error:
            reason = self._lost(error)
        self._deliver("lost", reason, b"")

    def _wait(self) -> None:
        began = time.monotonic()
        while not self._connection.poll(self._timeout):
            now = time.monotonic()
            # If `poll` took longer than its timeout, this process was stopped, for example with its
            # whole job. Then silence means nothing, and the neighbour gets a full timeout again.
            if now - began < self._timeout + _SUSPENDED_SECONDS:
                raise TimeoutError
            began = now

    def _deliver(self, word: str, body: object, message: bytes) -> None:
        while word != "beat" and not self._closed.is_set():
            with contextlib.suppress(queue.Full):
                # A full inbox stops the reader, TCP then stops the neighbour, and so on up to the
                # source: a slow disk slows the whole chain down instead of filling this node's
                # memory.
                self._inbox.put((self, word, body, message), timeout=_POLL_SECONDS)
                return

    def close(self) -> None:
        """Close without losing what was sent: keep reading until the neighbour closes, too."""
        self._closed.set()
        with contextlib.suppress(OSError), self._lock:
            # End only the sending half, through a copy of the descriptor: the reader still uses the
            # original one.
            sock = socket.socket(fileno=os.dup(self._connection.fileno()))
            with sock:
                sock.shutdown(socket.SHUT_WR)
        # Read until the neighbour closes too: closing with unread data resets the connection, and
        # the neighbour would lose messages that are still under way, such as our reason.
        self._reader.join(_CLOSE_SECONDS)


def packed(secret: bytes, word: str, body: object = None) -> bytes:
    """Return a control message with its digest."""
    data = pickle.dumps((word, body), protocol=4)
    return _CONTROL + hmac.digest(secret, data, "sha256") + data


def _unpacked(secret: bytes, message: bytes) -> tuple[str, object]:
    if message[:1] == DATA:
        return "data", memoryview(message)[1:]
    digest, data = message[1 : 1 + _DIGEST_BYTES], message[1 + _DIGEST_BYTES :]
    # Check before unpickling, which would run any code that a stranger sends.
    if not hmac.compare_digest(digest, hmac.digest(secret, data, "sha256")):
        raise ValueError("another digest")
    word, body = pickle.loads(data)  # noqa: S301 - made by this job
    return word, body


def own_address(interfaces: Sequence[str] = (), *, towards: str = "") -> str:
    """Return the address to listen at.

    The first of these that exists: the address of one of the given interfaces, in their order; of
    the host's name, unless it is the loopback; of the route to the other node; of any interface.

    Args:
        interfaces: names of network interfaces, the best first.
        towards: name or address of another node.
    """
    for name in interfaces:
        found = interface_address(name)
        if found:
            return found
    # Debian gives a host's own name the loopback address 127.0.1.1, so names need not help; the
    # kernel's route to another node then does.
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
