"""A node of a chain that is told what there is, takes it, and passes it on."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import time
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.copy import Copied, make_directories, make_links
from hpml_orchestrator.staging.crew import Worker
from hpml_orchestrator.staging.faults import Retry
from hpml_orchestrator.staging.manifest import Listing, tree_digest
from hpml_orchestrator.staging.many.chunks import (
    ChainLostError,
    Landing,
    chunk_hashing,
    hashing_of_first,
    make_empty,
)
from hpml_orchestrator.staging.many.link import COMMIT, DATA, DONE, END, GO, PLAN, PLAN_END, READY
from hpml_orchestrator.staging.many.member import Member
from hpml_orchestrator.staging.many.planwire import add_part
from hpml_orchestrator.staging.many.relay import Relay
from hpml_orchestrator.staging.plan import Entry, Plan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hpml_orchestrator.staging.hashing import Buffer, Hashing
    from hpml_orchestrator.staging.many.link import Caller
    from hpml_orchestrator.staging.progress import Progress
    from hpml_orchestrator.staging.request import StageRequest

__all__ = ["Follower"]

_POLL_SECONDS = 0.2
_MOST_RELAYS = 256
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


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
        self._said: dict[int, bytes] = {}
        self._relays: list[Worker] = []
        self._landed: dict[int, bytes] = {}
        self._missing = 0
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
            with self._failing():
                self._member.join()
                self._plan = self._hear_plan()
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

    def _hear_plan(self) -> Plan:
        plan = Plan(self._request.source, Entry("", 0, 0))
        member = self._member
        while True:
            for kind, payload, from_up in self._heard():
                if not from_up:
                    self._said[kind] = payload  # READY of a node that has begun to wait
                elif kind == PLAN:
                    add_part(plan, payload)
                    self._pass_on(kind, payload)
                elif kind == PLAN_END:
                    self._pass_on(kind, payload)
                    self._set_terms(payload)
                    plan.at_least = json.loads(payload).get("at_least") is True
                    return plan
                else:
                    raise StagingError(f"{member.names[0]} said something out of turn")

    def _heard(self) -> list[tuple[int, bytes, bool]]:
        """Wait a moment for the neighbours."""
        links = [link for link in (self._member.up, self._member.down) if link is not None]
        select.select(links, [link for link in links if link.is_waiting], [], _POLL_SECONDS)
        return self._member.tick()

    def _pass_on(self, kind: int, payload: bytes = b"") -> None:
        if self._member.down is not None:
            self._member.down.send(kind, payload)

    def _set_terms(self, payload: bytes) -> None:
        try:
            terms = json.loads(payload)
            self._kind, name = str(terms["kind"]), str(terms["hashing"])
        except (ValueError, KeyError, TypeError):
            raise StagingError("the plan that came over the network has no end") from None
        self._how = hashing_of_first(name)

    def _receive(
        self, plan: Plan, fd: int, retry: Retry, progress: Progress | None, *, needed: bool
    ) -> Copied:
        assert self._how is not None  # noqa: S101 - plan() has set it
        self._missing = sum(entry.size > 0 for entry in plan.files)
        if self._wait_ready(needed=needed):
            self._take_all(plan, fd, progress)
        elif needed:
            raise StagingError("the first node sends nothing, but this node has nothing")
        else:
            return Copied()
        if fd >= 0:
            make_links(plan, fd, retry.stopped_by(self._beat))
        digests = self._digests(plan, self._how)
        self._agree(tree_digest(Listing.of(plan, digests), self._how))
        return Copied(digests, max(1, len(self._relays)))

    def _wait_ready(self, *, needed: bool) -> bool:
        """Wait until all nodes are ready; returns whether data will come."""
        member = self._member
        told_up = False
        while GO not in self._said:
            if not told_up and (member.is_last or READY in self._said):
                told_up = True
                any_needs = needed or self._said.get(READY) == b"\1"
                self._tell_up(READY, b"\1" if any_needs else b"\0")
            self._note(self._heard())
        for link in (member.up, member.down):
            if link is not None:
                link.watch()
        return self._said[GO] == b"\1"

    def _beat(self) -> bool:
        """Say whether to stop; on the way, tell and hear signs of life.

        Raises:
            StagingError: another node failed.
        """
        now = self._member.notices.clock()
        if now >= self._tick_at:
            self._tick_at = now + _POLL_SECONDS
            self._note(self._member.tick())
        return self._member.notices.should_stop()

    def _tell_up(self, kind: int, payload: bytes) -> None:
        assert self._member.up is not None  # noqa: S101 - joined
        self._member.up.send(kind, payload)

    def _note(self, said: list[tuple[int, bytes, bool]]) -> None:
        """Remember what neighbours said, and tell the node behind what comes from before."""
        for kind, payload, from_up in said:
            if from_up != (kind in {GO, END, COMMIT}) or kind in self._said:
                name = self._member.names[0 if from_up else 1]
                raise StagingError(f"{name} said something out of turn")
            self._said[kind] = payload
            if from_up:
                self._pass_on(kind, payload)

    def _take_all(self, plan: Plan, fd: int, progress: Progress | None) -> None:
        member = self._member
        assert member.door is not None  # noqa: S101 - joined
        how = self._how
        assert how is not None  # noqa: S101
        digest = chunk_hashing(how.name, member.secret)
        same = how.name != "blake2b_128"
        take = functools.partial(self._take, progress)
        idle_since = member.notices.clock()
        while not (END in self._said and not self._missing and self._relays_are_done()):
            links = [link for link in (member.up, member.down) if link is not None]
            waiting = {relay.line: relay for relay in self._relays if not relay.is_gone}
            writers = [link for link in links if link.is_waiting]
            wanted: list[Any] = [member.door, *links, *waiting]
            ready = select.select(wanted, writers, [], _POLL_SECONDS)[0]
            self._note(member.tick())
            for caller in member.door.poll() if member.door in ready else ():
                self._start_relay(caller, plan, Landing(plan, fd, how, same=same), digest)
                idle_since = member.notices.clock()
            for line, relay in waiting.items():
                if line in ready:
                    relay.listen(take)
                    idle_since = member.notices.clock()
            silent = member.notices.clock() - idle_since
            if END in self._said and self._relays_are_done() and silent > member.place.timeout:
                raise StagingError(f"{self._missing} files did not come")

    def _relays_are_done(self) -> bool:
        return all(relay.is_gone for relay in self._relays)

    def _start_relay(
        self, caller: Caller, plan: Plan, landing: Landing, digest: Callable[[Buffer], bytes]
    ) -> None:
        if caller.kind != DATA or len(self._relays) >= _MOST_RELAYS:
            caller.sock.close()
            return
        member = self._member
        timeout = member.place.timeout
        onward = None if member.is_last else (lambda: member.call(DATA, timeout))
        relay = Relay(caller.sock, onward, digest, names=member.names, timeout=timeout)
        keep = [fd for fd in (caller.sock.fileno(), landing.dir_fd) if fd >= 0]
        with caller.sock:
            self._relays.append(Worker(functools.partial(relay.run, plan, landing), keep))

    def _drop_relays(self) -> None:
        Worker.dismiss(self._relays)

    def _take(
        self,
        progress: Progress | None,
        landed: list[tuple[int, bytes]],
        size: int,
        lost: str,
    ) -> None:
        """Note what a relay told; see `Relay.run`."""
        if lost:
            raise self._member.explain(ChainLostError(lost))
        new = {number for number, _ in landed} - self._landed.keys()
        self._missing -= len(new)
        self._landed.update(landed)
        if progress is not None:
            progress.add(size, len(new))

    def _digests(self, plan: Plan, how: Hashing) -> list[bytes]:
        empty = how.new().digest()
        return [self._landed.get(number, empty) for number in range(len(plan.files))]

    def _agree(self, digest: str) -> None:
        """Compare with the nodes behind, tell the one before, and wait for its word."""
        member = self._member
        while not member.is_last and DONE not in self._said:
            self._note(self._heard())
        below = self._said.get(DONE, digest.encode())
        if below != digest.encode():
            raise StagingError(
                f"what came to {member.names[1]} is not what came to this node: digests "
                f"{below.decode('ascii', 'replace')} and {digest}"
            )
        self._tell_up(DONE, digest.encode())
        while COMMIT not in self._said:
            self._note(self._heard())
