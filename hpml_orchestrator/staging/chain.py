"""A chain of nodes: the head reads the source, each follower writes the data and passes them on.

Messages between neighbours:

    joined    all behind are connected                                         up
    plan      (the copy plan, the source's kind, the hash)                     down
    ready     all behind have room; whether one of them needs the data         up
    data      pieces of files in the order of the plan: [(number, bytes), …]   down
    end       the digest of the tree that was read                             down
    done      all behind have the tree with this digest                        up
    commit    publish; nothing came before it if no node needs the data        down

What comes down is passed on before it is used: all nodes write at the same time. A node that fails
posts the reason and disconnects, and so on to both ends; none publishes before "commit".
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.copy import CopyOptions, copy
from hpml_orchestrator.staging.faults import Retry, StagingStopped, shown
from hpml_orchestrator.staging.link import (
    START,
    BrokenLinkError,
    Link,
    Listener,
    PeerFailedError,
    connect,
)
from hpml_orchestrator.staging.manifest import Listing, hashed, hashing, hashing_named, tree_digest
from hpml_orchestrator.staging.rate_limit import TokenBucket
from hpml_orchestrator.staging.source import BLOCK_BYTES
from hpml_orchestrator.staging.space import readers_for
from hpml_orchestrator.staging.stage import Supply

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from hpml_orchestrator.records.job import Stage
    from hpml_orchestrator.staging.copy import CopyProgress
    from hpml_orchestrator.staging.link import Body, ChainPosition
    from hpml_orchestrator.staging.plan import CopyPlan
    from hpml_orchestrator.staging.source import Buffer, Source, SourceReader
    from hpml_orchestrator.staging.stage import LocalSupply

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
        self._links: dict[str, Link] = {}  # "up" to the node before, "down" to the next one
        self._said: dict[str, Body] = {}  # contents received, by their word
        self._pieces: collections.deque[Piece] = collections.deque()
        self._plan: CopyPlan | None = None
        self._is_needed = self._is_done = self._is_closed = False
        self._heard_at = 0.0
        self._hearing = threading.Lock()

    def _join(self) -> None:
        """Connect with the neighbours; raises as `_hear`, or if one does not appear in time."""
        place = self._place
        with contextlib.ExitStack() as stack:
            if place.index:
                listener = Listener(place, self._secret)
                stack.callback(listener.close)
            if not place.is_last:
                self._links["down"] = connect(place, self._secret)
            if place.index:
                self._links["up"] = listener.link()
        # No message before all are there: nodes may come late, and one that waits does not read.
        self._ask_below("joined")

    def _ask_below(self, word: str) -> Body:
        """Wait for a word of the nodes behind this one; return its content."""
        return None if self._place.is_last else self._wait_for(word)

    def _wait_for(self, word: str) -> Body:
        while word not in self._said:
            self._hear(_POLL_SECONDS)
        return self._said[word]

    def _hear(self, seconds: float = 0.0) -> None:
        """Take a message from each neighbour, waiting for the first one; raises what ends all."""
        if self._place.should_stop():
            raise StagingStopped
        # Copying threads, which only look now and then, must not wait for one that listens.
        if not self._hearing.acquire(blocking=seconds > 0):
            return
        try:
            # Nothing more from above before what came is written: so a slow disk slows the whole
            # chain down, instead of filling this node's memory.
            links = [link for way, link in self._links.items() if way == "down" or not self._pieces]
            ready = wait([link.connection for link in links], seconds)
            # Silence is what this node has waited for in vain: while it was busy, or suspended with
            # its whole job, messages only wait to be read.
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
        """Return whether to stop; raises what `_hear` does. All copying threads call this."""
        if time.monotonic() >= self._heard_at + _POLL_SECONDS:
            self._hear()
        return self._place.should_stop()

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except BrokenLinkError as error:
            # Every node names the one that failed first, not the neighbour that disconnected
            # because of it. The reason may take a moment to appear on the shared file system.
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
        """Give the other nodes the reason why this one ends."""
        self._leave(StagingError(reason, hint=hint))

    def close(self) -> None:
        """Leave the chain."""
        self._leave(None if self._is_done else StagingError("ended before the data came"))


class Head(_Member):
    """The first node of a chain, which reads the source and sends it to all others.

    Args:
        local: reads the source.
        place: this node's among the others.
        secret: of the chain.
        options: how it is copied; files are hashed in any case.
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
            # "ready" travels from the last node to this one, and each sends it when it has a place
            # to write to. So no data moves before every node has found room.
            self._wait_for("ready")
            source = self._sending(plan, retry)
            digests = copy(
                plan, source, partial_dir, options=options, retry=retry, progress=progress
            )
            self._agree(plan, source, digests)
        return digests

    def reuse(self) -> None:
        """Send the source to the others if one of them needs it; this node has it already."""
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
        if rate:  # the caller keeps this limit; what is read ahead comes on top
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
    """All nodes of a chain but the first."""

    @property
    def kind(self) -> str:
        """The source's kind, as the first node found it."""
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
            # The digests are made here, with the first node's hash.
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
        """Forward the data to nodes that need it; this one has it already."""
        self.plan()
        with self._failing():
            self._get_ready()
            while not self._said.keys() & {"end", "commit"}:
                self._hear(_POLL_SECONDS)
            if "commit" not in self._said:
                self._agree()
            self._is_done = True

    def _get_ready(self) -> None:
        # A node that has the data already still takes part: it forwards, and the head must know
        # whether anybody at all needs the data.
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
    """A `Source` and its only `SourceReader`: the files as they come from the node before."""

    read: Callable[[int], Iterator[Buffer]]
    plan: Callable[[], CopyPlan]
    kind = "chain"
    ordered = True

    def reader(self, _plan: CopyPlan) -> SourceReader:
        """Return itself."""
        return self

    def close(self) -> None:
        """Nothing is held."""


class _SendingSource:
    """A `Source` and its only `SourceReader`: sends what it reads, in the order of the plan.

    Args:
        source: is read; by several threads, unless it is ordered itself.
        link: to the next node.
        retry: reads again after faults that pass.
        threads: how many read small files ahead.
        ahead: how many small files they read ahead.
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
        """Yield the bytes of a file, after they were sent."""
        try:
            for data in self._blocks(number):
                # After a fault nothing is published; the rest is read to report all faults at once.
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
        """Yield the bytes of a file; several threads read the small ones that follow."""
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
        """Yield the bytes of a file; after a fault that passes, open it again and continue."""
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
