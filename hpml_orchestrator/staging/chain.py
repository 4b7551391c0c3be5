"""A chain of nodes: the first reads the source, the others take what comes and pass it on."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import queue
import select
import time
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.chunks import (
    ChainLostError,
    Landing,
    Sender,
    SendingSource,
    make_empty,
)
from hpml_orchestrator.staging.copy import Copied, copy, make_directories, make_links
from hpml_orchestrator.staging.crew import Worker
from hpml_orchestrator.staging.faults import StagingStopped
from hpml_orchestrator.staging.hashing import hashed, hashing, hashing_named
from hpml_orchestrator.staging.link import DATA, BrokenLinkError
from hpml_orchestrator.staging.manifest import Listing, tree_digest
from hpml_orchestrator.staging.member import POLL_SECONDS, Member, PeerFailedError
from hpml_orchestrator.staging.plan import Entry, HardLink, Plan, Symlink

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hpml_orchestrator.staging.copy import CopyOptions
    from hpml_orchestrator.staging.faults import Retry
    from hpml_orchestrator.staging.hashing import Buffer, Hashing
    from hpml_orchestrator.staging.link import Caller
    from hpml_orchestrator.staging.member import Notices
    from hpml_orchestrator.staging.progress import Progress
    from hpml_orchestrator.staging.sources import LocalSupply

__all__ = ["Follower", "Head", "plan_of", "plan_parts"]

_MOST_RELAYS = 256
_ROWS_AT_ONCE = 1000
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_ROWS: dict[str, Callable[..., Any]] = {
    "directories": Entry._make,
    "files": Entry._make,
    "hard_links": HardLink._make,
    "symlinks": Symlink._make,
    "stamps": tuple,
}


def plan_parts(plan: Plan) -> Iterator[list[Any]]:
    """Yield a plan in parts, so that one node reads the metadata and the others are told."""
    yield ["top", [plan.top]]
    for name in _ROWS:
        rows = getattr(plan, name)
        for at in range(0, len(rows), _ROWS_AT_ONCE):
            yield [name, rows[at : at + _ROWS_AT_ONCE]]


def plan_of(source: str, parts: list[Any]) -> Plan:
    """Return the plan that came in parts.

    Raises:
        StagingError: they make none.
    """
    plan = Plan(source, Entry("", 0, 0))
    try:
        for name, rows in parts:
            if name == "top":
                plan.top = Entry(*rows[0])
            elif name in _ROWS:
                getattr(plan, name).extend(map(_ROWS[name], rows))
    except (TypeError, ValueError, IndexError):
        raise StagingError("the plan that came over the network is damaged") from None
    return plan


class Head(Member):
    """The first node of a chain: it reads the source, and what it reads goes to all the others.

    Args:
        local: reads the source.
        notices, secret: see `Member`.
        options: how it is copied; files are hashed in any case.
    """

    def __init__(
        self, local: LocalSupply, notices: Notices, secret: bytes, options: CopyOptions
    ) -> None:
        super().__init__(notices, secret)
        self._local = local
        self._options = dataclasses.replace(options, hash=True)
        self.kind = local.kind

    def plan(self) -> Plan:
        """Look at the source and tell the others.

        Raises:
            StagingError: it cannot be staged, or a node did not come or failed.
            StagingStopped: should_stop said so.
            OSError: the source cannot be read.
        """
        if self._plan is None:
            with self._failing():
                self._join()
                plan = self._local.plan()
                self._pass_on(*(("plan", part) for part in plan_parts(plan)))
                terms = {"kind": self.kind, "hashing": hashing().name, "at_least": plan.at_least}
                self._pass_on(("terms", terms))
                self._plan = plan
        return self._plan

    def fill(self, plan: Plan, partial_dir: str, *, retry: Retry, progress: Progress) -> Copied:
        """Copy the source; what is read is sent, too.

        Raises:
            StagingError: this or another node failed; all nodes end, and none publishes.
            StagingStopped: should_stop said so.
            OSError: the directory cannot be written.
        """
        with self._failing():
            self._wait_for("ready")
            self._pass_on(("go", True))
            try:
                copied = copy(
                    plan,
                    self._sending(),
                    partial_dir,
                    options=self._options,
                    retry=retry.stopped_by(self._beat),
                    progress=progress,
                )
            except (PeerFailedError, BrokenLinkError):
                raise
            except StagingError as error:  # maybe a worker's, whose connection broke
                raise self._explain(error) from error
            self._agree(plan, copied.digests)
        return copied

    def reuse(self) -> None:
        """Send the source to the others, if any of them needs it; this node has it already.

        Raises:
            StagingError: another node failed, or the source is not what it was.
            StagingStopped: should_stop said so.
        """
        plan = self.plan()
        with self._failing():
            is_needed = bool(self._wait_for("ready"))
            self._pass_on(("go", is_needed))
            if is_needed:
                with contextlib.closing(self._sending().reader(plan)) as reader:
                    numbers = range(len(plan.files))
                    how = hashing()
                    digests = [hashed(self._heeding(reader.read(one)), how) for one in numbers]
                self._agree(plan, digests)
        self._is_done = True

    def close(self) -> None:
        """Leave the chain and close the source."""
        with contextlib.closing(self._local):
            super().close()

    def _sending(self) -> SendingSource:
        assert self._down is not None  # noqa: S101 - joined
        timeout, peer = self._place.timeout, self._down.peer
        connect = functools.partial(self._call, DATA, timeout)
        return SendingSource(self._local.source, lambda: Sender(connect, peer, timeout))

    def _heeding(self, blocks: Iterator[Buffer]) -> Iterator[Buffer]:
        for data in blocks:
            yield data
            if self._beat():
                raise StagingStopped

    def _agree(self, plan: Plan, digests: list[bytes]) -> None:
        """Say that all was sent, wait for what came of it, and let all publish."""
        digest = tree_digest(Listing.of(plan, digests), hashing())
        self._pass_on(("end", None))
        below = self._wait_for("done")
        if below != digest:
            raise StagingError(
                f"what came to {self._place.called(1)} is not what was read: digests {below} and "
                f"{digest}"
            )
        self._pass_on(("commit", None))
        self._is_done = True


class Follower(Member):
    """All nodes of a chain but the first.

    Args:
        source: path of what is staged.
        notices, secret: see `Member`.
    """

    def __init__(self, source: str, notices: Notices, secret: bytes) -> None:
        super().__init__(notices, secret)
        self._source = source
        self._kind = ""
        self._how: Hashing | None = None
        self._relays: list[Worker] = []
        self._landed: dict[int, bytes] = {}

    @property
    def kind(self) -> str:
        """The source's kind, as the first node found it."""
        self.plan()
        return self._kind

    def plan(self) -> Plan:
        """Join the chain and hear what will be made.

        Raises:
            StagingError: a node did not come, is gone or failed.
            StagingStopped: should_stop said so.
        """
        if self._plan is None:
            with self._failing():
                self._join()
                terms = self._wait_for("terms")
                plan = plan_of(self._source, self._parts)
                self._parts.clear()
                plan.at_least = terms["at_least"] is True
                self._kind, name = str(terms["kind"]), str(terms["hashing"])
                self._how = hashing_named(name)
                if self._how is None:
                    raise StagingError(
                        f"this node cannot hash with {name}, as the first node does",
                        hint="install xxhash for this node's interpreter, or use distribution: "
                        "shared",
                    )
                self._plan = plan
        return self._plan

    def fill(self, plan: Plan, partial_dir: str, *, retry: Retry, progress: Progress) -> Copied:
        """Take all files from the node before, and pass them on.

        Raises:
            StagingError: this or another node failed; all nodes end, and none publishes.
            StagingStopped: should_stop said so.
        """
        with self._failing():
            fd = os.open(partial_dir, _DIRECTORY)
            try:
                make_directories(plan, fd, retry)
                make_empty(plan, fd)
                return self._receive(plan, fd, progress, retry.stopped_by(self._beat))
            finally:
                os.close(fd)

    def reuse(self) -> None:
        """Pass on what others need; this node has the data already.

        Raises:
            StagingError: another node failed.
            StagingStopped: should_stop said so.
        """
        plan = self.plan()
        with self._failing():
            self._receive(plan, -1, None, None)

    def _leave(self, error: BaseException | None) -> None:
        Worker.dismiss(self._relays)
        super()._leave(error)

    def _receive(
        self, plan: Plan, fd: int, progress: Progress | None, retry: Retry | None
    ) -> Copied:
        """Take and pass on what comes; without a descriptor nothing is written."""
        place, how = self._place, self._how
        assert how is not None  # noqa: S101 - plan() has set it
        below = not place.is_last and bool(self._wait_for("ready"))
        self._tell_up("ready", fd >= 0 or below)
        if not self._wait_for("go"):
            if fd >= 0:
                raise StagingError("the first node sends nothing, but this node has nothing")
            self._is_done = True
            return Copied()
        self._take_all(plan, fd, how, progress)
        if retry is not None:
            make_links(plan, fd, retry)
        empty = how.new().digest()
        digests = [self._landed.get(number, empty) for number in range(len(plan.files))]
        digest = tree_digest(Listing.of(plan, digests), how)
        theirs = digest if place.is_last else self._wait_for("done")
        if theirs != digest:
            raise StagingError(
                f"what came to {place.called(place.index + 1)} is not what came to this node: "
                f"digests {theirs} and {digest}"
            )
        self._tell_up("done", digest)
        self._wait_for("commit")
        self._is_done = True
        return Copied(digests, max(1, len(self._relays)))

    def _take_all(self, plan: Plan, fd: int, how: Hashing, progress: Progress | None) -> None:
        """Give each data connection a process, until all files have come."""
        assert self._door is not None  # noqa: S101 - joined
        missing = sum(entry.size > 0 for entry in plan.files)
        take = functools.partial(self._take, progress)
        idle_since = time.monotonic()
        while len(self._landed) < missing or "end" not in self._said or self._working():
            self._listen()
            with contextlib.suppress(queue.Empty):
                while True:
                    self._start_relay(self._door.callers.get_nowait(), Landing(plan, fd, how))
                    idle_since = time.monotonic()
            working = {relay.line: relay for relay in self._working()}
            for line in select.select(list(working), [], [], POLL_SECONDS)[0]:
                working[line].listen(take)
                idle_since = time.monotonic()
            silent = time.monotonic() - idle_since
            if "end" in self._said and not self._working() and silent > self._place.timeout:
                raise StagingError(f"{missing - len(self._landed)} files did not come")

    def _working(self) -> list[Worker]:
        return [relay for relay in self._relays if not relay.is_gone]

    def _start_relay(self, caller: Caller, landing: Landing) -> None:
        with caller.connection as connection:
            if caller.kind != DATA or len(self._relays) >= _MOST_RELAYS:
                return
            timeout = self._place.timeout
            onward = None if self._place.is_last else functools.partial(self._call, DATA, timeout)
            names = (self._up.peer if self._up else "", self._down.peer if self._down else "")
            keep = [fd for fd in (connection.fileno(), landing.dir_fd) if fd >= 0]
            work = functools.partial(landing.relay, connection, onward, names, timeout)
            self._relays.append(Worker(work, keep))

    def _take(
        self, progress: Progress | None, landed: list[tuple[int, bytes]], size: int, broken: str
    ) -> None:
        """Note what a relay told; see `Landing.relay`."""
        if broken:
            raise self._explain(ChainLostError(broken))
        before = len(self._landed)
        self._landed.update(landed)
        if progress is not None:
            progress.add(size, len(self._landed) - before)
