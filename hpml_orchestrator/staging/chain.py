"""Distribute data from node to node along a chain of TCP connections.

The first node reads the source (`Head`) and sends everything to the second; each other node
(`Follower`) writes what it receives and forwards it to the next.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import ProcessError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import HpmlError, NotFoundError, RecordError, StagingError
from hpml_orchestrator.records.files import read_text, write_text
from hpml_orchestrator.staging.copy import CopyOptions, copy
from hpml_orchestrator.staging.manifest import Listing, hashed, hashing, hashing_named, tree_digest
from hpml_orchestrator.staging.request import Retry, StagingStopped, shown
from hpml_orchestrator.staging.source import BLOCK_BYTES
from hpml_orchestrator.staging.space import readers_for
from hpml_orchestrator.staging.stage import Supply
from hpml_orchestrator.staging.workers import TokenBucket

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future
    from typing import TypeAlias

    from hpml_orchestrator.records.job import Stage
    from hpml_orchestrator.staging.copy import CopyProgress
    from hpml_orchestrator.staging.plan import CopyPlan
    from hpml_orchestrator.staging.source import Buffer, Source, SourceReader
    from hpml_orchestrator.staging.stage import LocalSupply

# Rendezvous and connections.
#
# Nodes find each other through small files in `attempts/<n>/chain/`, which appear by rename and are
# readable only by the job's user: `<name>.start` holds the method and the secret, `<name>.<index>`
# the address of a node, `<name>.failed` the node that failed first, and the reason.
#
# Each node connects to the next one through a `multiprocessing.connection` over TCP, with the
# secret as authentication key. The traffic is not encrypted.

if TYPE_CHECKING:
    Body: TypeAlias = Any  # content of a message or record; its type depends on the message

START = "start"
"""Name of the first node's record: the method and, for a chain, the secret."""
_FAILED = "failed"
_STRANGER = (EOFError, ValueError, AssertionError, ProcessError)  # raised by `_authenticated`
_BEATS_PER_TIMEOUT = 5.0
_CLOSE_SECONDS = 1.0
_MOST_PAUSE_SECONDS = 1.0
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_TIMEVAL = struct.Struct("ll")
_SIOCGIFADDR = 0x8915
_IFREQ = struct.Struct("256s")
_GLOBAL_SCOPE = "00"


class PeerFailedError(StagingError):
    """Another node of the chain failed; the message has its reason."""


class BrokenLinkError(StagingError):
    """The neighbour has disconnected or hangs.

    Attributes:
        grace: seconds to wait for the reason of the node that failed first.
    """

    grace = 2.0


@dataclass(frozen=True)
class ChainPosition:
    """A node's position in a chain, and the files through which the nodes find each other.

    Attributes:
        path: path of these files, without the suffix of their names.
        should_stop: when it returns True, waiting ends with StagingStopped.
        index: position in the chain; node 0 reads the source.
        nodes: number of nodes.
        node: this node's name, used as its address if no interface is given.
        names: names of all nodes, in order; empty if unknown.
        interfaces: network interfaces to use, best first.
        timeout: seconds of silence after which a node counts as hung.
        join_seconds: time limit for reaching a neighbour that has registered.
        come_seconds: time limit for all nodes to register.
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
            # NFS caches for up to a minute that a file is missing; opening the directory ends that.
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

        A registered node may take long to post other records, for example while it scans the
        source.

        Raises:
            StagingError: the node did not register, or one failed; with its reason.
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
        """Sleep with growing pauses, since all nodes poll one directory; yield 0 when time is up.

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
        """Return the error for a node that has not registered."""
        name = self.names[index] if index < len(self.names) else f"node {index} of {self.nodes}"
        return StagingError(
            f"{name} did not come within {seconds:.0f} s{f' ({trouble})' if trouble else ''}",
            hint="if the nodes cannot reach one another, name the interfaces that can in the site "
            "profile, or use distribution: shared",
        )

    def fail(self, error: BaseException) -> None:
        """Publish why this node fails, unless another one failed before."""
        reason = "was stopped" if isinstance(error, StagingStopped) else str(error)
        reason, hint = reason or type(error).__name__, str(getattr(error, "hint", ""))
        with contextlib.suppress(HpmlError, OSError):
            if self.failure() is None:
                self.post(_FAILED, node=self.node, reason=reason, hint=hint)

    def failure(self) -> PeerFailedError | None:
        """Return the failure of the node that failed first, if any."""
        found = self._read(_FAILED)
        if found is None:
            return None
        return PeerFailedError(f"{found['node']}: {found['reason']}", hint=str(found["hint"]))


class Listener:
    """Accepts the connection of the previous node; other callers cannot delay it.

    Args:
        place: this node's position.
        secret: key that callers must prove to have.
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
            with contextlib.suppress(OSError, RuntimeError):  # out of threads: the caller retries
                sock, _ = self._socket.accept()
                # One thread per caller, so that a silent one cannot block the neighbour.
                threading.Thread(target=self._greet, args=(sock,), daemon=True).start()

    def _greet(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError, *_STRANGER):
            self._callers.put(Link(sock, self._secret, "", self._place.timeout, calls=False))

    def link(self) -> Link:
        """Wait for the previous node to connect; raises as `ChainPosition.record`."""
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
    """Return a socket's connection once both ends have proven that they know the secret.

    This does what the module's `Client` and `Listener` do, but with time-outs and for IPv6.
    """
    sock.settimeout(None)
    limit = _TIMEVAL.pack(int(timeout), int(timeout % 1 * 1e6))
    # `Connection` uses the bare descriptor, which Python's own time-outs do not cover. These two
    # also detect a hanging process. TCP_USER_TIMEOUT does not, and would end suspended jobs.
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, limit)
    # Without this, short messages wait until the neighbour acknowledges earlier data.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection = Connection(sock.detach())
    steps = [deliver_challenge, answer_challenge]
    for step in reversed(steps) if calls else steps:
        step(connection, secret)
    return connection


class Link:
    """Connection to a neighbour; a message is a pickled pair of a word and its content.

    A thread sends empty messages, however busy the process is, so silence means a hang.

    Args:
        sock: connected socket; the link takes ownership.
        secret: key that the neighbour must prove to have.
        peer: the neighbour's name.
        timeout: seconds after which a silent neighbour counts as hung.
        calls: whether this end initiated the connection.

    Raises:
        OSError or one of _STRANGER: the other end does not know the secret, or is silent.
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
        with contextlib.suppress(BrokenLinkError):  # the waiting thread reports it
            while not self._closed.wait(self._timeout / _BEATS_PER_TIMEOUT):
                self.forward(b"")

    def send(self, word: str, body: object = None) -> None:
        """Send a message; raises as `forward`."""
        self.forward(pickle.dumps((word, body), protocol=4))

    def forward(self, message: bytes) -> None:
        """Send a received message on.

        Raises:
            BrokenLinkError: the neighbour is gone, or accepted no data for the whole timeout.
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
        """Wait for a message; return it, its word ("" for a heartbeat) and its content.

        Raises:
            BrokenLinkError: the neighbour is gone, or stopped in mid-message.
            StagingError: the message is damaged.
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
        """Add to the time of silence; raises BrokenLinkError after the timeout."""
        self._quiet += seconds
        if self._quiet > self._timeout:
            raise BrokenLinkError(f"{self.peer} hangs: no sign of life for {self._timeout:.0f} s")

    def _lost(self, error: BaseException) -> BrokenLinkError:
        if isinstance(error, (BlockingIOError, TimeoutError)):
            told = f"{self.peer} hangs: nothing went through for {self._timeout:.0f} s"
            broken = BrokenLinkError(told)
            if self.connection.poll():  # it is alive; a later node hangs, and others report it
                broken.grace += self._timeout
            return broken
        why = getattr(error, "strerror", "") or "its connection ended"
        return BrokenLinkError(f"{self.peer} was lost: {why}")

    def close(self) -> None:
        """Close without losing data that was sent.

        Closing with unread data resets the connection, which would lose messages in flight. So
        shut down our half, and read until the neighbour closes as well.
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


if TYPE_CHECKING:
    Piece = tuple[int, bytes]  # file number, contents

_POLL_SECONDS = 0.1
_FEWEST_THREADS = 4
_GATHERED_BYTES = 256 << 10  # small files share a message


class _Member(Supply):
    """A node in the chain."""

    method = "chain"

    def __init__(self, request: Stage, place: ChainPosition, secret: bytes) -> None:
        super().__init__(request)
        self._place = place
        self._secret = secret
        self._links: dict[str, Link] = {}  # "up": previous node, "down": next node
        self._said: dict[str, Body] = {}  # received contents by word
        self._pieces: collections.deque[Piece] = collections.deque()
        self._plan: CopyPlan | None = None
        self._is_needed = self._is_done = self._is_closed = False
        self._heard_at = 0.0
        self._hearing = threading.Lock()

    def _join(self) -> None:
        """Connect to the neighbours; raises as `_hear`, or if one does not register in time."""
        place = self._place
        with contextlib.ExitStack() as stack:
            if place.index:
                listener = Listener(place, self._secret)
                stack.callback(listener.close)
            if not place.is_last:
                self._links["down"] = connect(place, self._secret)
            if place.index:
                self._links["up"] = listener.link()
        # Send no data before all nodes have joined: one that still waits for others does not read.
        self._ask_below("joined")

    def _ask_below(self, word: str) -> Body:
        """Wait for a word from the later nodes; return its content."""
        return None if self._place.is_last else self._wait_for(word)

    def _wait_for(self, word: str) -> Body:
        while word not in self._said:
            self._hear(_POLL_SECONDS)
        return self._said[word]

    def _hear(self, seconds: float = 0.0) -> None:
        """Take a message from each neighbour, waiting for the first; raises what ends the chain."""
        if self._place.should_stop():
            raise StagingStopped
        # Copying threads only poll; they must not wait for a thread that is listening.
        if not self._hearing.acquire(blocking=seconds > 0):
            return
        try:
            # Take no new data before earlier pieces are written, so that a slow disk slows the
            # chain down instead of filling this node's memory.
            links = [link for way, link in self._links.items() if way == "down" or not self._pieces]
            ready = wait([link.connection for link in links], seconds)
            # Only count time spent waiting as silence: while this node was busy, or suspended with
            # its whole job, messages may be waiting to be read.
            now = time.monotonic()
            waited = min(now - self._heard_at, max(seconds, _POLL_SECONDS))
            self._heard_at = now
            for link in links:
                if link.connection in ready:
                    self._take(link is self._links.get("up"), *link.receive())
                else:
                    link.waited(waited)
        finally:
            self._hearing.release()

    def _take(self, comes_down: bool, message: bytes, word: str, body: Body) -> None:
        if word and comes_down and not self._place.is_last:
            self._links["down"].forward(message)
        if word == "data":
            self._pieces.extend(body if self._is_needed else ())
        elif word:
            self._said[word] = body

    def _stops(self) -> bool:
        """Return whether to stop; raises as `_hear`. All copying threads call this."""
        if time.monotonic() >= self._heard_at + _POLL_SECONDS:
            self._hear()
        return self._place.should_stop()

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except BrokenLinkError as error:
            # Report the node that failed first, not the neighbour that disconnected because of it.
            # The reason may take a moment to appear on the shared file system.
            place, end = self._place, time.monotonic() + error.grace
            while (known := place.failure()) is None and time.monotonic() < end:
                if place.should_stop():
                    break
                time.sleep(_POLL_SECONDS)
            self._leave(known or error)
            if known is None:
                raise
            raise known from error
        except BaseException as error:
            self._leave(error)
            raise

    def _leave(self, error: BaseException | None) -> None:
        """Leave the chain: post the reason, and remove this node's records."""
        if self._is_closed:
            return
        self._is_closed = True
        if error is not None and not isinstance(error, PeerFailedError):
            self._place.fail(error)
        for link in self._links.values():
            link.close()
        for what in (str(self._place.index), *([] if self._place.index else [START])):
            self._place.remove(what)

    def fail(self, reason: str, hint: str = "") -> None:
        """Tell the other nodes why this one fails."""
        self._leave(StagingError(reason, hint=hint))

    def close(self) -> None:
        """Leave the chain."""
        self._leave(None if self._is_done else StagingError("ended before the data came"))


class Head(_Member):
    """First node of a chain: reads the source and sends it to all others.

    Args:
        local: reads the source.
        place: this node's position.
        secret: key of the chain.
        options: how to copy; files are hashed in any case.
    """

    def __init__(
        self, local: LocalSupply, place: ChainPosition, secret: bytes, options: CopyOptions
    ) -> None:
        super().__init__(local.request, place, secret)
        self._local = local
        self._options = dataclasses.replace(options, hash=True)

    @property
    def kind(self) -> str:
        """The source's kind."""
        return self._local.kind

    def plan(self) -> CopyPlan:
        """Scan the source and send the plan down the chain; see `Supply`."""
        if self._plan is None:
            with self._failing():
                self._join()
                plan = self._local.plan()
                self._links["down"].send("plan", (plan, self.kind, hashing().name))
                self._plan = plan
        return self._plan

    def fill(
        self, plan: CopyPlan, partial_dir: str, *, retry: Retry, progress: CopyProgress
    ) -> list[bytes]:
        """Copy the source and send it down the chain. If one node fails, none publishes."""
        retry, options = retry.stopped_by(self._stops), self._options
        with self._failing():
            # "ready" travels from the last node to this one; each node adds it once it has room for
            # the data. So no data is sent before every node has found room.
            self._wait_for("ready")
            source = self._sending(plan, retry)
            digests = copy(
                plan, source, partial_dir, options=options, retry=retry, progress=progress
            )
            self._agree(plan, source, digests)
        return digests

    def reuse(self) -> None:
        """Send the source if other nodes need it; this node already has a copy."""
        plan = self.plan()
        with self._failing():
            if self._wait_for("ready"):
                retry, digests = Retry(should_stop=self._stops), []
                limit = TokenBucket(self._options.opens_per_second, check_stop=retry.check_stop)
                source = self._sending(plan, retry)
                with contextlib.closing(source.reader(plan)) as reader:
                    for number in range(len(plan.files)):
                        limit.take()
                        digests.append(hashed(self._heeding(reader.read(number)), hashing()))
                self._agree(plan, source, digests)
            else:
                self._commit()

    def close(self) -> None:
        """Leave the chain and close the source."""
        with contextlib.closing(self._local):
            super().close()

    def _sending(self, plan: CopyPlan, retry: Retry) -> _SendingSource:
        threads = self._options.threads or max(_FEWEST_THREADS, readers_for(plan.source_root))
        ahead, rate = 2 * threads, self._options.opens_per_second
        if rate:  # the caller enforces this limit; read-ahead comes on top
            ahead = max(1, min(ahead, int(rate)))
        return _SendingSource(self._local.source, self._links["down"], retry, threads, ahead)

    def _heeding(self, blocks: Iterator[Buffer]) -> Iterator[Buffer]:
        for data in blocks:
            yield data
            if self._stops():
                raise StagingStopped

    def _agree(self, plan: CopyPlan, source: _SendingSource, digests: list[bytes]) -> None:
        source.flush()
        self._links["down"].send("end", tree_digest(Listing.of(plan, digests), hashing()))
        self._wait_for("done")
        self._commit()

    def _commit(self) -> None:
        self._links["down"].send("commit")
        self._is_done = True


class Follower(_Member):
    """Any node of a chain except the first."""

    @property
    def kind(self) -> str:
        """The source's kind, as determined by the first node."""
        self.plan()
        return str(self._said["plan"][1])

    def plan(self) -> CopyPlan:
        """Join the chain and receive the plan; see `Supply`."""
        if self._plan is None:
            with self._failing():
                self._join()
                self._links["up"].send("joined")
                plan, _, how = self._wait_for("plan")
                if hashing_named(how) is None:
                    raise StagingError(
                        f"this node cannot hash with {how}, as the first node does",
                        hint="install xxhash for this node's interpreter, or use distribution: "
                        "shared",
                    )
                self._plan = plan
        return self._plan

    def fill(
        self, plan: CopyPlan, partial_dir: str, *, retry: Retry, progress: CopyProgress
    ) -> list[bytes]:
        """Receive, write and forward all files. If one node fails, none publishes."""
        how = hashing_named(self._said["plan"][2])
        assert how is not None  # noqa: S101 - `plan` has looked
        digests: list[bytes] = []

        def read(number: int) -> Iterator[Buffer]:
            at, digest, entry = 0, how.new(), plan.files[number]
            while at < entry.size:
                found, data = self._piece()
                at += len(data)
                if found != number or at > entry.size:
                    raise StagingError(f"data of {shown(entry.path)} came out of order")
                digest.update(data)
                yield data
            digests.append(digest.digest())

        with self._failing():
            self._is_needed = True
            self._get_ready()
            # Digests are computed here, with the first node's hash.
            copy(
                plan,
                _ReceivingSource(read, self.plan),
                partial_dir,
                options=CopyOptions(hash=False),
                retry=retry.stopped_by(self._stops),
                progress=progress,
            )
            theirs, digest = self._wait_for("end"), tree_digest(Listing.of(plan, digests), how)
            if theirs != digest:
                raise StagingError(f"what came is not what was read: digests {digest} and {theirs}")
            self._agree()
        return digests

    def reuse(self) -> None:
        """Forward the data to nodes that need it; this one already has a copy."""
        self.plan()
        with self._failing():
            self._get_ready()
            while not self._said.keys() & {"end", "commit"}:
                self._hear(_POLL_SECONDS)
            if "commit" not in self._said:
                self._agree()
            self._is_done = True

    def _get_ready(self) -> None:
        # A node with a copy still takes part: it forwards, and the head must learn whether any node
        # needs the data.
        below = bool(self._ask_below("ready"))
        self._links["up"].send("ready", self._is_needed or below)

    def _piece(self) -> Piece:
        while not self._pieces:
            if self._said.keys() & {"end", "commit"}:
                raise StagingError("not all files came")
            self._hear(_POLL_SECONDS)
        return self._pieces.popleft()

    def _agree(self) -> None:
        self._ask_below("done")
        self._links["up"].send("done")
        self._wait_for("commit")
        self._is_done = True


@dataclasses.dataclass
class _ReceivingSource:
    """A `Source` and its only `SourceReader`: yields the files received from the previous node."""

    read: Callable[[int], Iterator[Buffer]]
    plan: Callable[[], CopyPlan]
    kind = "chain"
    ordered = True

    def reader(self, _plan: CopyPlan) -> SourceReader:
        """Return itself."""
        return self

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


class _SendingSource:
    """A `Source` and its only `SourceReader`: sends what it reads, in the order of the plan.

    Args:
        source: source to read; by several threads unless it is ordered.
        link: connection to the next node.
        retry: retries reads after transient faults.
        threads: number of threads that read small files ahead.
        ahead: number of small files to read ahead.
    """

    ordered = True

    def __init__(self, source: Source, link: Link, retry: Retry, threads: int, ahead: int) -> None:
        self.kind = source.kind
        self._source = source
        self._link = link
        self._retry = retry
        self._most_ahead = ahead
        self._ahead: collections.deque[Future[bytes] | None] = collections.deque()
        self._next = 0
        self._gathered: list[Piece] = []
        self._bytes = 0
        self._has_failed = False
        self.threads = threads
        self.plan = source.plan

    def reader(self, plan: CopyPlan) -> SourceReader:
        """Open for reading, once."""
        self._files = plan.files
        self._reader = self._source.reader(plan)
        self._pool = ThreadPoolExecutor(self.threads)
        return self

    def read(self, number: int) -> Iterator[Buffer]:
        """Yield the bytes of a file after sending them."""
        try:
            for data in self._blocks(number):
                # After a fault nothing is published; keep reading to report all faults at once.
                if len(data) and not self._has_failed:
                    self._gathered.append((number, bytes(data)))
                    self._bytes += len(data)
                    if self._bytes >= _GATHERED_BYTES:
                        self.flush()
                yield data
        except BaseException:
            self._has_failed = True
            raise

    def _blocks(self, number: int) -> Iterator[Buffer]:
        """Yield the bytes of a file; several threads read ahead the small ones that follow."""
        if self._source.ordered:
            yield from self._reader.read(number)
            return
        while self._next < len(self._files) and len(self._ahead) < self._most_ahead:
            small = self._files[self._next].size <= BLOCK_BYTES
            self._ahead.append(self._pool.submit(self._whole, self._next) if small else None)
            self._next += 1
        coming = self._ahead.popleft()
        if coming is not None:
            yield coming.result()
        else:
            yield from self._steadily(number)

    def _whole(self, number: int) -> bytes:
        return b"".join(self._steadily(number))

    def _steadily(self, number: int) -> Iterator[Buffer]:
        """Yield the bytes of a file; after a transient fault, reopen it and continue."""
        at, blocks = 0, None

        def following() -> Buffer | None:
            nonlocal blocks
            blocks = blocks or self._since(number, at)
            try:
                return next(blocks, None)
            except OSError:
                blocks = None
                raise

        while (data := self._retry(following)) is not None:
            yield data
            at += len(data)

    def _since(self, number: int, start: int) -> Iterator[Buffer]:
        at = 0
        for data in self._reader.read(number):
            if at + len(data) > start:
                yield memoryview(data)[max(0, start - at) :]
            at += len(data)

    def flush(self) -> None:
        """Send what was gathered."""
        pieces, self._gathered, self._bytes = self._gathered, [], 0
        if pieces:
            self._link.send("data", pieces)

    def close(self) -> None:
        """Close the reader; the source stays open."""
        for coming in self._ahead:
            if coming is not None:
                coming.cancel()
        self._pool.shutdown()
        self._reader.close()
