"""A chain of nodes: the first reads the source, each other one writes the data and forwards it.

Messages between neighbours:

    plan      the copy plan and the hash algorithm        down, forwarded by each node
    ready     this node and all behind it are ready,      up, once all behind are ready
              and whether one of them needs the data
    go        all are ready; whether data follows         down, forwarded
    data      file contents (chunks.py)                   down, forwarded
    end       all data was sent                           down, forwarded
    done      digest of the tree                          up, once all behind have the same
    commit    all have the same digest: publish           down, forwarded
    fail      which node failed and why                   both ways, at any time, forwarded

A node that fails sends its neighbours the reason, so that all end; none publishes before "commit".
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import threading
import time
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.chunks import ChunkWriter, SendingSource
from hpml_orchestrator.staging.copy import copy, make_directories, make_links
from hpml_orchestrator.staging.faults import StagingStopped
from hpml_orchestrator.staging.hashing import hashed, hashing, hashing_named
from hpml_orchestrator.staging.link import (
    START,
    BrokenLinkError,
    Link,
    Listener,
    connect,
    growing_pauses,
    own_address,
    packed,
    reason_of,
)
from hpml_orchestrator.staging.manifest import Listing, tree_digest
from hpml_orchestrator.staging.space import readers_for
from hpml_orchestrator.staging.supply import Supply

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from multiprocessing.connection import Connection
    from typing import TypeAlias

    from hpml_orchestrator.staging.copy import CopyOptions
    from hpml_orchestrator.staging.faults import Retry
    from hpml_orchestrator.staging.hashing import Buffer
    from hpml_orchestrator.staging.link import ChainPosition
    from hpml_orchestrator.staging.plan import CopyPlan
    from hpml_orchestrator.staging.progress import CopyProgress
    from hpml_orchestrator.staging.request import StageRequest
    from hpml_orchestrator.staging.supply import LocalSupply

    Body: TypeAlias = Any  # content of a control message; its type depends on the word

_MOST_MESSAGES = 32  # limit of the inbox; a message has at most 1.25 MiB
_POLL_SECONDS = 0.05
_BEAT_SECONDS = 0.1
_GRACE_SECONDS = 2.0
_FEWEST_THREADS = 4
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class PeerFailedError(StagingError):
    """Another node of the chain ended; its reason is in the message."""


class _Member(Supply):
    """A node in the chain."""

    method = "chain"

    def __init__(self, request: StageRequest, place: ChainPosition, secret: bytes) -> None:
        super().__init__(request)
        self._place = place
        self._secret = secret
        self._inbox: queue.Queue[tuple[Body, str, Body, bytes]] = queue.Queue(_MOST_MESSAGES)
        self._listener: Listener | None = None
        self._up: Link | None = None
        self._down: Link | None = None
        self._said: dict[str, Body] = {}  # messages received, by their word
        self._later: list[Buffer] = []  # for the next node, until it has connected
        self._writer: ChunkWriter | None = None
        self._plan: CopyPlan | None = None
        self._is_done = self._is_closed = False
        self._beat_at = 0.0
        self._beating = threading.Lock()

    def _join(self) -> None:
        """Connect with the neighbours; raises as `_listen`, or if one does not appear in time."""
        place = self._place
        if place.index:
            address = own_address(place.interfaces, towards=place.names[0] if place.names else "")
            self._listener = Listener(
                address, self._secret, place.index - 1, place.timeout, self._inbox
            )
            port = self._listener.port
            place.post(str(place.index), node=place.node, address=address, port=port)
        began = time.monotonic()
        came: dict[int, float] = {}
        trouble = ""
        pauses = growing_pauses()
        while missing := self._missing():
            for one in missing:
                card = place.read(str(one))
                if card is not None:
                    came.setdefault(one, time.monotonic())
                    if one > place.index:
                        trouble = self._call(card) or trouble
                # Two limits: agents may start minutes apart. But a neighbour that has posted its
                # address is up, so if it cannot be reached, the network does not connect them.
                patience = place.join_seconds if one in came else place.come_seconds
                if one in self._missing() and time.monotonic() - came.get(one, began) > patience:
                    raise StagingError(
                        f"{place.name_of(one)} did not come within {patience:.0f} s"
                        f"{f' ({trouble})' if trouble else ''}",
                        hint="if the nodes cannot reach one another, name the interfaces that can "
                        "in the site profile, or use distribution: shared",
                    )
            self._listen(next(pauses))

    def _missing(self) -> list[int]:
        index = self._place.index
        up = [index - 1] if index and self._up is None else []
        return up + ([index + 1] if not self._place.is_last and self._down is None else [])

    def _call(self, card: Mapping[str, Body]) -> str:
        """Connect to the next node; returns the error, if any."""
        place, name = self._place, str(card.get("node"))
        address, port = str(card.get("address")), int(card.get("port") or 0)
        try:
            connection = connect(
                address, port, self._secret, (place.index, place.node), place.timeout
            )
        except (OSError, StagingError) as error:
            return f"{name} at {address}: {error}"
        self._down = self._link(connection, name)
        self._pass_on()
        return ""

    def _link(self, connection: Connection, name: str) -> Link:
        return Link(connection, name, self._secret, self._place.timeout, self._inbox)

    def _send(self, link: Link | None, word: str, body: object = None) -> None:
        assert link is not None  # noqa: S101 - joined
        link.send(packed(self._secret, word, body))

    def _pass_on(self, *messages: Buffer) -> None:
        self._later += messages
        if self._down is not None:
            for message in self._later:
                self._down.send(message)
            self._later.clear()

    def _listen(self, seconds: float = 0.0) -> None:
        if self._place.should_stop():
            raise StagingStopped
        with contextlib.suppress(queue.Empty):
            message = self._inbox.get(timeout=seconds) if seconds else self._inbox.get_nowait()
            while True:
                self._take(*message)
                message = self._inbox.get_nowait()

    def _take(self, link: Link | None, word: str, body: Body, message: bytes) -> None:
        if word == "caller":
            connection, name = body

            if self._up is None:
                self._up = self._link(connection, name or "the node before")
            else:
                connection.close()
        elif word == "lost":
            # After "commit", or when nobody needs the data, neighbours leave at their own pace.
            if "commit" not in self._said and self._said.get("go") is not False:
                raise BrokenLinkError(str(body))
        elif word == "fail":
            node, reason, hint = body
            # Pass the reason on before raising: every node then names the one that failed first,
            # instead of the neighbour that disappeared because of it.
            self._give_reason(self._down if link is self._up else self._up, *body)
            raise PeerFailedError(f"{node}: {reason}", hint=hint)
        else:
            if link is self._up:
                self._pass_on(message)
            # Forwarded before it is written here, so the nodes behind write at the same time and
            # the chain takes as long as its slowest link, not the sum of all.
            if word == "data" and self._writer is not None:
                self._writer.take(body)
            else:
                self._said[word] = body

    def _give_reason(self, link: Link | None, *reason: str) -> None:
        if link is not None:
            with contextlib.suppress(BrokenLinkError):
                self._send(link, "fail", reason)

    def _wait_for(self, word: str) -> Body:
        while word not in self._said:
            self._listen(_POLL_SECONDS)
        return self._said[word]

    def _beat(self) -> bool:
        """Return whether to stop; raises what `_listen` does, if another node failed."""
        # All copying threads come through here for each file. One of them at a time reads the
        # inbox; the others must not wait for it.
        if time.monotonic() >= self._beat_at and self._beating.acquire(blocking=False):
            try:
                self._beat_at = time.monotonic() + _BEAT_SECONDS
                self._listen()
            finally:
                self._beating.release()
        return self._place.should_stop()

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except BrokenLinkError as error:
            known = self._known_reason(error)
            self._leave(known)
            raise known from error
        except BaseException as error:
            self._leave(error)
            raise

    def _known_reason(self, broken: BrokenLinkError) -> StagingError:
        # A failing node sends its reason and then disconnects. A send of ours may hit the broken
        # connection before that message has been read, so wait for it a moment.
        end = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < end:
            try:
                self._listen(_POLL_SECONDS)
            except BrokenLinkError:
                continue
            except StagingError as error:
                return error
        return broken

    def _leave(self, error: BaseException | None) -> None:
        """Leave the chain: remove this node's records, and send the neighbours the reason."""
        if self._is_closed:
            return
        self._is_closed = True
        links = [link for link in (self._up, self._down) if link is not None]
        if error is not None and not isinstance(error, PeerFailedError):
            hint = str(getattr(error, "hint", ""))
            for link in links:
                self._give_reason(link, self._place.node, reason_of(error), hint)
        for link in links:
            link.close()
        if self._listener is not None:
            self._listener.close()
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
        place, secret: see `_Member`.
        options: how it is copied; files are hashed in any case.
    """

    def __init__(
        self, local: LocalSupply, place: ChainPosition, secret: bytes, options: CopyOptions
    ) -> None:
        super().__init__(local.request, place, secret)
        self._local = local
        # One process: the connection and the lock that keeps messages whole are shared by threads.
        # Forked workers would garble each other's messages.
        self._options = dataclasses.replace(options, hash=True, processes=1)

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
                terms = (plan, self.kind, hashing().name)
                self._send(self._down, "plan", terms)
                self._plan = plan
        return self._plan

    def fill(
        self, plan: CopyPlan, partial_dir: str, *, retry: Retry, progress: CopyProgress
    ) -> list[bytes]:
        """Copy the source and send it down the chain. If one node fails, none publishes."""
        threads = self._options.threads or max(_FEWEST_THREADS, readers_for(plan.source_root))
        with self._failing():
            # "ready" travels from the last node to this one, and each sends it when it has a place
            # to write to. So no data moves before every node has found room.
            self._wait_for("ready")
            self._send(self._down, "go", True)
            source = self._sending()
            digests = copy(
                plan,
                source,
                partial_dir,
                options=dataclasses.replace(self._options, threads=threads),
                retry=retry.stopped_by(self._beat),
                progress=progress,
            )
            self._agree(plan, source, digests)
        return digests

    def reuse(self) -> None:
        """Send the source to the others if one of them needs it; this node has it already."""
        plan = self.plan()
        with self._failing():
            is_needed = bool(self._wait_for("ready"))
            self._send(self._down, "go", is_needed)
            if is_needed:
                source = self._sending()
                with contextlib.closing(source.reader(plan)) as reader:
                    each = (reader.read(number) for number in range(len(plan.files)))
                    digests = [hashed(self._heeding(blocks), hashing()) for blocks in each]
                self._agree(plan, source, digests)
        self._is_done = True

    def close(self) -> None:
        """Leave the chain and close the source."""
        with contextlib.closing(self._local):
            super().close()

    def _sending(self) -> SendingSource:
        assert self._down is not None  # noqa: S101 - joined
        return SendingSource(self._local.source, self._down.send)

    def _heeding(self, blocks: Iterator[Buffer]) -> Iterator[Buffer]:
        for data in blocks:
            yield data
            if self._beat():
                raise StagingStopped

    def _agree(self, plan: CopyPlan, source: SendingSource, digests: list[bytes]) -> None:
        source.flush()
        digest = tree_digest(Listing.of(plan, digests), hashing())
        self._send(self._down, "end")
        # Each node compares its own digest with that of the node behind it, so a difference names
        # the link where the data changed.
        below = self._wait_for("done")
        if below != digest:
            raise StagingError(
                f"what came to {self._place.name_of(1)} is not what was read: digests {below} and "
                f"{digest}"
            )
        self._send(self._down, "commit")
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
        with self._failing():
            fd = os.open(partial_dir, _DIRECTORY)
            try:
                make_directories(plan, fd, retry)
                return self._receive(plan, fd, progress, retry.stopped_by(self._beat))
            finally:
                os.close(fd)

    def reuse(self) -> None:
        """Forward the data to nodes that need it; this one has it already."""
        plan = self.plan()
        with self._failing():
            self._receive(plan, -1, None, None)

    def _receive(
        self, plan: CopyPlan, fd: int, progress: CopyProgress | None, retry: Retry | None
    ) -> list[bytes]:
        """Receive the data; without a descriptor nothing is written."""
        place, how = self._place, hashing_named(self._said["plan"][2])
        assert how is not None  # noqa: S101 - `plan` has looked
        writer = self._writer = ChunkWriter(plan, fd, how)
        below = not place.is_last and bool(self._wait_for("ready"))
        # A node that has the data already still takes part: it forwards, and the head must know
        # whether anybody at all needs the data.
        self._send(self._up, "ready", fd >= 0 or below)
        if not self._wait_for("go"):
            if fd >= 0:
                raise StagingError("the first node sends nothing, but this node has nothing")
            self._is_done = True
            return []
        while "end" not in self._said:
            before = (writer.bytes, len(writer.digests))
            self._listen(_POLL_SECONDS)
            if progress is not None:
                progress.add(writer.bytes - before[0], len(writer.digests) - before[1])
        if len(writer.digests) < len(plan.files):
            raise StagingError(f"{len(plan.files) - len(writer.digests)} files did not come")
        # Links last: until all files are written, nothing in the directory can redirect a write.
        if retry is not None:
            make_links(plan, fd, retry)
        digests = [writer.digests[number] for number in range(len(plan.files))]
        digest = tree_digest(Listing.of(plan, digests), how)
        theirs = digest if place.is_last else self._wait_for("done")
        if theirs != digest:
            raise StagingError(
                f"what came to {place.name_of(place.index + 1)} is not what came to this node: "
                f"digests {theirs} and {digest}"
            )
        self._send(self._up, "done", digest)
        self._wait_for("commit")
        self._is_done = True
        return digests
