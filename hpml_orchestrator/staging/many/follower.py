"""A node of a chain that is told what there is, takes it, and passes it on."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import select
import time
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.copy import Copied, make_directories, make_links
from hpml_orchestrator.staging.crew import Worker
from hpml_orchestrator.staging.faults import Retry
from hpml_orchestrator.staging.hashing import hashing_named
from hpml_orchestrator.staging.manifest import Listing, tree_digest
from hpml_orchestrator.staging.many.chunks import ChainLostError, Landing, make_empty
from hpml_orchestrator.staging.many.head import LISTS, plan_digest
from hpml_orchestrator.staging.many.link import DATA
from hpml_orchestrator.staging.plan import Entry, HardLink, Plan, Symlink

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hpml_orchestrator.staging.hashing import Hashing
    from hpml_orchestrator.staging.many.link import Caller
    from hpml_orchestrator.staging.many.member import Member
    from hpml_orchestrator.staging.progress import Progress
    from hpml_orchestrator.staging.request import StageRequest

__all__ = ["Follower", "plan_of"]

_POLL_SECONDS = 0.05
_TICK_SECONDS = 0.2
_MOST_RELAYS = 256
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_ROWS: dict[str, Callable[..., Any]] = {
    "directories": Entry._make,
    "files": Entry._make,
    "hard_links": HardLink._make,
    "symlinks": Symlink._make,
    "stamps": tuple,
}


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
            elif name in LISTS:
                getattr(plan, name).extend(map(_ROWS[name], rows))
    except (TypeError, ValueError, IndexError):
        raise StagingError("the plan that came over the network is damaged") from None
    return plan


class Follower:
    """All nodes of a chain but the first; a `Supply`.

    Args:
        request: what is staged.
        member: this node in the chain.
    """

    method = "chain"

    def __init__(self, request: StageRequest, member: Member) -> None:
        self._request = request
        self._member = member
        self._plan: Plan | None = None
        self._kind = ""
        self._how: Hashing | None = None
        self._relays: list[Worker] = []
        self._landed: dict[int, bytes] = {}
        self._tick_at = 0.0

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
            member = self._member
            with self._failing():
                member.join()
                terms = member.wait_for("terms")
                if plan_digest(member.parts, member.secret) != terms.get("digest"):
                    raise StagingError(f"the plan that came from {member.names[0]} is damaged")
                plan = plan_of(self._request.source, member.parts)
                member.parts.clear()
                plan.at_least = terms.get("at_least") is True
                self._kind, name = str(terms.get("kind")), str(terms.get("hashing"))
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
                copied = self._receive(plan, fd, retry, progress, needed=True)
            finally:
                os.close(fd)
        self._member.is_done = True
        return copied

    def reuse(self) -> None:
        """Pass on what others need; this node has the data already.

        Raises:
            StagingError: another node failed.
            StagingStopped: should_stop said so.
        """
        plan = self.plan()
        with self._failing():
            retry = Retry(time.sleep, self._member.notices.should_stop)
            self._receive(plan, -1, retry, None, needed=False)
        self._member.is_done = True

    def fail(self, reason: str, hint: str = "") -> None:
        """Tell the others why this node ends."""
        self._drop_relays()
        self._member.fail(StagingError(reason, hint=hint))

    def close(self) -> None:
        """Leave the chain."""
        self._drop_relays()
        self._member.leave("ended before the data came")

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        with self._member.failing():
            try:
                yield
            except BaseException:
                self._drop_relays()
                raise

    def _receive(
        self, plan: Plan, fd: int, retry: Retry, progress: Progress | None, *, needed: bool
    ) -> Copied:
        member, how = self._member, self._how
        assert how is not None  # noqa: S101 - plan() has set it
        below = not member.is_last and bool(member.wait_for("ready"))
        self._tell_up("ready", needed or below)
        if member.wait_for("go"):
            self._take_all(plan, fd, how, progress)
        elif needed:
            raise StagingError("the first node sends nothing, but this node has nothing")
        else:
            return Copied()
        if fd >= 0:
            make_links(plan, fd, retry.stopped_by(self._beat))
        empty = how.new().digest()
        digests = [self._landed.get(number, empty) for number in range(len(plan.files))]
        self._agree(tree_digest(Listing.of(plan, digests), how))
        return Copied(digests, max(1, len(self._relays)))

    def _beat(self) -> bool:
        """Say whether to stop; on the way, hear whether another node failed.

        Raises:
            StagingError: it did.
        """
        now = self._member.notices.clock()
        if now >= self._tick_at:
            self._tick_at = now + _TICK_SECONDS
            self._member.listen()
        return self._member.notices.should_stop()

    def _tell_up(self, word: str, body: object) -> None:
        assert self._member.up is not None  # noqa: S101 - joined
        self._member.up.send(word, body)

    def _take_all(self, plan: Plan, fd: int, how: Hashing, progress: Progress | None) -> None:
        """Give each data connection a process, until all files have come."""
        member = self._member
        assert member.door is not None  # noqa: S101 - joined
        missing = sum(entry.size > 0 for entry in plan.files)
        take = functools.partial(self._take, progress)
        idle_since = member.notices.clock()
        while len(self._landed) < missing or "end" not in member.said or self._working():
            member.listen()
            with contextlib.suppress(queue.Empty):
                while True:
                    caller = member.door.callers.get_nowait()
                    self._start_relay(caller, Landing(plan, fd, how))
                    idle_since = member.notices.clock()
            working = {relay.line: relay for relay in self._working()}
            for line in select.select(list(working), [], [], _POLL_SECONDS)[0]:
                working[line].listen(take)
                idle_since = member.notices.clock()
            silent = member.notices.clock() - idle_since
            if "end" in member.said and not self._working() and silent > member.place.timeout:
                raise StagingError(f"{missing - len(self._landed)} files did not come")

    def _working(self) -> list[Worker]:
        return [relay for relay in self._relays if not relay.is_gone]

    def _start_relay(self, caller: Caller, landing: Landing) -> None:
        connection = caller.connection
        with connection:
            if caller.kind != DATA or len(self._relays) >= _MOST_RELAYS:
                return
            member = self._member
            timeout = member.place.timeout
            onward = None if member.is_last else (lambda: member.call(DATA, timeout))
            keep = [fd for fd in (connection.fileno(), landing.dir_fd) if fd >= 0]
            work = functools.partial(landing.relay, connection, onward, member.names, timeout)
            self._relays.append(Worker(work, keep))

    def _drop_relays(self) -> None:
        Worker.dismiss(self._relays)

    def _take(
        self, progress: Progress | None, landed: list[tuple[int, bytes]], size: int, broken: str
    ) -> None:
        """Note what a relay told; see `Landing.relay`."""
        if broken:
            raise self._member.explain(ChainLostError(broken))
        before = len(self._landed)
        self._landed.update(landed)
        if progress is not None:
            progress.add(size, len(self._landed) - before)

    def _agree(self, digest: str) -> None:
        """Compare with the nodes behind, tell the one before, and wait for its word."""
        member = self._member
        below = digest if member.is_last else member.wait_for("done")
        if below != digest:
            raise StagingError(
                f"what came to {member.names[1]} is not what came to this node: digests "
                f"{below} and {digest}"
            )
        self._tell_up("done", digest)
        member.wait_for("commit")
