"""How the nodes of a chain find each other, and the connections between them.

Nodes meet by small files in `attempts/<n>/chain/`, which appear by rename and are readable by the
job's user alone: `<name>.start` has the method and the secret, `<name>.<index>` where a node
listens, `<name>.failed` which node failed first, and why.

Each node connects to the node behind it: a connection of `multiprocessing.connection` over TCP,
with the secret as authentication key. Nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import json
import os
import pickle
import queue
import socket
import struct
import threading
import time
from dataclasses import dataclass
from multiprocessing import ProcessError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import HpmlError, NotFoundError, RecordError, StagingError
from hpml_orchestrator.records.files import read_text, write_text
from hpml_orchestrator.staging.faults import StagingStopped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import TypeAlias

    Body: TypeAlias = Any  # content of a message or record; its type depends on the word

START = "start"
"""The first node's record: the method, and of a chain the secret."""
_FAILED = "failed"
_STRANGER = (EOFError, ValueError, AssertionError, ProcessError)  # of `_authenticated`
_BEATS_PER_TIMEOUT = 5.0
_CLOSE_SECONDS = 1.0
_MOST_PAUSE_SECONDS = 1.0
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_TIMEVAL = struct.Struct("ll")
_SIOCGIFADDR = 0x8915
_IFREQ = struct.Struct("256s")
_GLOBAL_SCOPE = "00"


class PeerFailedError(StagingError):
    """Another node of the chain ended; its reason is in the message."""


class BrokenLinkError(StagingError):
    """The neighbour has disconnected or hangs.

    Attributes:
        grace: seconds within which the reason of the node that failed first should appear.
    """

    grace = 2.0


@dataclass(frozen=True)
class ChainPosition:
    """A node's position among the nodes of a chain, and the files by which they find each other.

    Attributes:
        path: of those files, without the last part of their names.
        should_stop: True ends waiting with StagingStopped.
        index: 0 reads the source.
        nodes: how many there are.
        node: this node's name, by which the others reach it if no interface is named.
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

    def _read(self, what: str) -> dict[str, Body] | None:
        with contextlib.suppress(OSError):
            # NFS caches that a file is missing for up to a minute; opening the directory ends that.
            os.close(os.open(os.path.dirname(self.path), _DIRECTORY))
        try:
            found = json.loads(read_text(f"{self.path}.{what}"))
        except (NotFoundError, RecordError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def remove(self, what: str) -> None:
        """Remove a record, but not the directory: another node may be about to post one there."""
        with contextlib.suppress(OSError):
            os.unlink(f"{self.path}.{what}")

    def record(self, index: int, what: str = "") -> dict[str, Body]:
        """Wait for a node's record and return it: its address, or another one.

        A node that has come may take long for another record, such as while it scans the source.

        Raises:
            StagingError: the node did not come, or one failed; with its reason.
            StagingStopped: should_stop returned True.
        """
        for pause in self.pauses(self.come_seconds):
            found = self._read(what or str(index))
            if found is not None:
                return found
            if not pause and self._read(str(index)) is None:
                raise self.absent(index, self.come_seconds)
        raise AssertionError

    def pauses(self, seconds: float) -> Iterator[float]:
        """Sleep ever longer, since all nodes poll one directory; yield 0 after so many seconds.

        Raises:
            PeerFailedError: a node failed.
            StagingStopped: should_stop returned True.
        """
        pause, end = 0.02, time.monotonic() + seconds
        while True:
            yield pause if time.monotonic() < end else 0.0
            if self.should_stop():
                raise StagingStopped
            if failure := self.failure():
                raise failure
            time.sleep(pause)
            pause = min(_MOST_PAUSE_SECONDS, pause * 1.3)

    def absent(self, index: int, seconds: float, trouble: object = "") -> StagingError:
        """Return the error about a node that has not come."""
        name = self.names[index] if index < len(self.names) else f"node {index} of {self.nodes}"
        return StagingError(
            f"{name} did not come within {seconds:.0f} s{f' ({trouble})' if trouble else ''}",
            hint="if the nodes cannot reach one another, name the interfaces that can in the site "
            "profile, or use distribution: shared",
        )

    def fail(self, error: BaseException) -> None:
        """Publish the reason why this node ends, for all others, unless one failed before."""
        reason = "was stopped" if isinstance(error, StagingStopped) else str(error)
        reason, hint = reason or type(error).__name__, str(getattr(error, "hint", ""))
        with contextlib.suppress(HpmlError, OSError):
            if self.failure() is None:
                self.post(_FAILED, node=self.node, reason=reason, hint=hint)

    def failure(self) -> PeerFailedError | None:
        """Return the reason of the node that failed first."""
        found = self._read(_FAILED)
        if found is None:
            return None
        return PeerFailedError(f"{found['node']}: {found['reason']}", hint=str(found["hint"]))


class Listener:
    """Accepts the connection of the previous node; other callers cannot delay it.

    Args:
        place: this node's.
        secret: that callers must have.
    """

    def __init__(self, place: ChainPosition, secret: bytes) -> None:
        self._place = place
        self._secret = secret
        self._callers: queue.SimpleQueue[Link] = queue.SimpleQueue()
        found = filter(None, map(interface_address, place.interfaces))
        address = next(found, "")
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family, backlog=1024)
        threading.Thread(target=self._serve, daemon=True).start()
        port = self._socket.getsockname()[1]
        place.post(str(place.index), node=place.node, address=address or place.node, port=port)

    def _serve(self) -> None:
        while self._socket.fileno() >= 0:
            with contextlib.suppress(OSError, RuntimeError):  # no more threads: the caller retries
                sock, _ = self._socket.accept()
                # A thread for each caller: one that is silent must not keep the neighbour out.
                threading.Thread(target=self._greet, args=(sock,), daemon=True).start()

    def _greet(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError, *_STRANGER):
            self._callers.put(Link(sock, self._secret, "", self._place.timeout, calls=False))

    def link(self) -> Link:
        """Wait for the previous node; raises as `ChainPosition.record`."""
        place = self._place
        name = str(place.record(place.index - 1)["node"])
        for pause in place.pauses(place.join_seconds):
            with contextlib.suppress(queue.Empty):
                link = self._callers.get_nowait()
                link.peer = name
                return link
            if not pause:
                raise place.absent(place.index - 1, place.join_seconds)
        raise AssertionError

    def close(self) -> None:
        """Stop listening."""
        with contextlib.closing(self._socket), contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread


def connect(place: ChainPosition, secret: bytes) -> Link:
    """Wait for the next node and connect to it; raises as `ChainPosition.record`."""
    card = place.record(place.index + 1)
    name, address = str(card["node"]), (str(card["address"]), int(card["port"]))
    for pause in place.pauses(place.join_seconds):
        try:
            sock = socket.create_connection(address, place.timeout)
            return Link(sock, secret, name, place.timeout, calls=True)
        except OSError as error:
            trouble = f"{name} at {address[0]}: {error}"
        except _STRANGER:
            trouble = f"what answers at {address[0]} port {address[1]} is not a node of this job"
        if not pause:
            raise place.absent(place.index + 1, place.join_seconds, trouble)
    raise AssertionError


def _authenticated(
    sock: socket.socket, secret: bytes, timeout: float, *, calls: bool
) -> Connection:
    """Return the connection over a socket once both ends have proven that they have the secret.

    This is what `Client` and `Listener` of the module do, with time-outs and for IPv6.
    """
    sock.settimeout(None)
    limit = _TIMEVAL.pack(int(timeout), int(timeout % 1 * 1e6))
    # `Connection` uses the bare descriptor, which Python's own time-outs do not cover. These two
    # also find a process that hangs. TCP_USER_TIMEOUT does not, and would end jobs suspended.
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, limit)
    # Short messages would otherwise wait until the neighbour acknowledges earlier data.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection = Connection(sock.detach())
    steps = [deliver_challenge, answer_challenge]
    for step in reversed(steps) if calls else steps:
        step(connection, secret)
    return connection


class Link:
    """The connection to a neighbour; messages are pickled pairs of a word and a content.

    A thread sends empty messages, however busy the process is: one that is silent hangs.

    Args:
        sock: connected; the link takes it over.
        secret: that the neighbour must have.
        peer: its name.
        timeout: seconds after which a silent neighbour hangs.
        calls: this end is the one that has connected.

    Raises:
        OSError or one of _STRANGER: the other end does not have the secret, or is silent.
    """

    def __init__(
        self, sock: socket.socket, secret: bytes, peer: str, timeout: float, *, calls: bool
    ) -> None:
        self.connection = _authenticated(sock, secret, timeout, calls=calls)
        self.peer = peer
        self._timeout = timeout
        self._quiet = 0.0
        self._broken: BrokenLinkError | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        with contextlib.suppress(BrokenLinkError):  # who waits for the neighbour reports it
            while not self._closed.wait(self._timeout / _BEATS_PER_TIMEOUT):
                self.forward(b"")

    def send(self, word: str, body: object = None) -> None:
        """Send a message; raises as `forward`."""
        self.forward(pickle.dumps((word, body), protocol=4))

    def forward(self, message: bytes) -> None:
        """Send a message that was received.

        Raises:
            BrokenLinkError: the neighbour is gone, or took nothing for the whole timeout.
        """
        with self._lock:
            if self._broken is not None:
                raise self._broken
            try:
                self.connection.send_bytes(message)
            except OSError as error:
                self._broken = self._lost(error)
                raise self._broken from error

    def receive(self) -> tuple[bytes, str, Body]:
        """Wait for a message; return it, its word ("" of a sign of life) and its content.

        Raises:
            BrokenLinkError: the neighbour is gone, or stopped in mid-message.
            StagingError: what came is damaged.
        """
        try:
            message = self.connection.recv_bytes()
        except (OSError, EOFError) as error:
            raise self._lost(error) from error
        self._quiet = 0.0
        if not message:
            return message, "", None
        try:
            word, body = pickle.loads(message)  # noqa: S301 - made by this job
        except Exception as error:  # damaged pickles raise almost anything
            raise StagingError(f"what came from {self.peer} is damaged") from error
        return message, word, body

    def waited(self, seconds: float) -> None:
        """Add to the seconds of silence; raises BrokenLinkError if they are too many."""
        self._quiet += seconds
        if self._quiet > self._timeout:
            raise BrokenLinkError(f"{self.peer} hangs: no sign of life for {self._timeout:.0f} s")

    def _lost(self, error: BaseException) -> BrokenLinkError:
        if isinstance(error, (BlockingIOError, TimeoutError)):
            told = f"{self.peer} hangs: nothing went through for {self._timeout:.0f} s"
            broken = BrokenLinkError(told)
            if self.connection.poll():  # it is alive: one behind it hangs, whom others will name
                broken.grace += self._timeout
            return broken
        why = getattr(error, "strerror", "") or "its connection ended"
        return BrokenLinkError(f"{self.peer} was lost: {why}")

    def close(self) -> None:
        """Close without losing what was sent.

        Closing with unread data resets the connection, and the neighbour would lose messages under
        way. So end our half, and read until the neighbour closes, too.
        """
        self._closed.set()
        end = time.monotonic() + _CLOSE_SECONDS
        with self._lock, contextlib.suppress(OSError):
            with socket.socket(fileno=os.dup(self.connection.fileno())) as sock:
                sock.shutdown(socket.SHUT_WR)
                while (left := end - time.monotonic()) > 0 and self.connection.poll(left):
                    if not sock.recv(1 << 16):
                        break
            self.connection.close()


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
