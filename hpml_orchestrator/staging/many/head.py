"""The first node of a chain: it reads the source, and what it reads goes to all the others."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import threading
import time
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.copy import Copied, copy
from hpml_orchestrator.staging.hashing import hashed, hashing
from hpml_orchestrator.staging.manifest import Listing, tree_digest
from hpml_orchestrator.staging.many.chunks import Sender, SendingSource, chunk_hashing
from hpml_orchestrator.staging.many.link import (
    COMMIT,
    DATA,
    DONE,
    END,
    GO,
    PLAN,
    PLAN_END,
    READY,
    BrokenLinkError,
)
from hpml_orchestrator.staging.many.member import PeerFailedError
from hpml_orchestrator.staging.many.planwire import plan_parts
from hpml_orchestrator.staging.request import StagingStopped

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpml_orchestrator.staging.copy import CopyOptions
    from hpml_orchestrator.staging.faults import Retry
    from hpml_orchestrator.staging.hashing import Buffer
    from hpml_orchestrator.staging.many.link import Link
    from hpml_orchestrator.staging.many.member import Member
    from hpml_orchestrator.staging.plan import Plan
    from hpml_orchestrator.staging.progress import Progress
    from hpml_orchestrator.staging.source import Source

__all__ = ["Head"]

_POLL_SECONDS = 0.2
_TICK_SECONDS = 0.1


class Head:
    """The first node of a chain; a `Supply`.

    Args:
        source: what is staged.
        member: this node in the chain.
        options: how the engine copies; files are hashed in any case.
    """

    method = "chain"

    def __init__(self, source: Source, member: Member, options: CopyOptions) -> None:
        self._source = source
        self._member = member
        self._options = dataclasses.replace(options, hash=True)
        self._plan: Plan | None = None
        self._said: dict[int, bytes] = {}
        self._ticks = threading.Lock()
        self._tick_at = 0.0
        self._pid = os.getpid()
        self.kind = source.kind

    def plan(self) -> Plan:
        """Look at the source and tell the others.

        Raises:
            StagingError: it cannot be staged, or a node did not come or failed.
            StagingStopped: should_stop said so.
            OSError: the source cannot be read.
        """
        if self._plan is None:
            with self._member.failing():
                self._member.join()
                plan = self._source.plan()
                for part in plan_parts(plan):
                    self._down.send(PLAN, part)
                terms = {"kind": self.kind, "hashing": hashing().name, "at_least": plan.at_least}
                self._down.send(PLAN_END, json.dumps(terms).encode())
                self._plan = plan
        return self._plan

    def fill(self, plan: Plan, partial_dir: str, *, retry: Retry, progress: Progress) -> Copied:
        """Copy the source; what is read is sent, too.

        Raises:
            StagingError: this or another node failed; all nodes end, and none publishes.
            StagingStopped: should_stop said so.
            OSError: the directory cannot be written.
        """
        with self._member.failing():
            self._wait_ready()
            self._go(b"\1")
            source = SendingSource(self._source, self._sender)
            try:
                copied = copy(
                    plan,
                    source,
                    partial_dir,
                    options=self._options,
                    retry=retry.stopped_by(self._beat),
                    progress=progress,
                )
            except (PeerFailedError, BrokenLinkError):
                raise
            except StagingError as error:  # maybe a worker's, whose connection broke
                raise self._member.explain(error) from error
            self._agree(plan, copied.digests)
        self._member.is_done = True
        return copied

    def reuse(self) -> None:
        """Send the source to the others, if any of them needs it; this node has it already.

        Raises:
            StagingError: another node failed, or the source is not what it was.
            StagingStopped: should_stop said so.
        """
        plan = self.plan()
        with self._member.failing():
            if self._wait_ready():
                self._go(b"\1")
                self._agree(plan, self._send_all(plan))
            else:
                self._go(b"\0")
        self._member.is_done = True

    def fail(self, reason: str, hint: str = "") -> None:
        """Tell the others why this node ends."""
        self._member.fail(StagingError(reason, hint=hint))

    def close(self) -> None:
        """Leave the chain and close the source."""
        with contextlib.closing(self._source):
            self._member.leave("ended before the data was sent")

    @property
    def _down(self) -> Link:
        assert self._member.down is not None  # noqa: S101 - joined
        return self._member.down

    def _note(self) -> None:
        for kind, payload, _ in self._member.tick():
            if kind not in {READY, DONE} or kind in self._said:
                raise StagingError(f"{self._down.peer} said something out of turn")
            self._said[kind] = payload

    def _wait_for(self, kind: int) -> bytes:
        while kind not in self._said:
            waiting = [self._down] if self._down.is_waiting else []
            select.select([self._down], waiting, [], _POLL_SECONDS)
            self._note()
        return self._said[kind]

    def _wait_ready(self) -> bool:
        """Wait until all nodes are; returns whether any of the others needs the data."""
        return self._wait_for(READY) == b"\1"

    def _go(self, payload: bytes) -> None:
        self._down.send(GO, payload)
        self._down.watch()

    def _beat(self) -> bool:
        """Say whether to stop; on the way, tell and hear signs of life.

        Raises:
            StagingError: another node failed.
        """
        now = time.monotonic()
        if (
            os.getpid() == self._pid
            and now >= self._tick_at
            and self._ticks.acquire(blocking=False)
        ):
            try:
                self._tick_at = now + _TICK_SECONDS
                self._note()
            finally:
                self._ticks.release()
        return self._member.notices.should_stop()

    def _sender(self) -> Sender:
        member = self._member
        timeout = member.place.timeout
        return Sender(
            lambda: member.call(DATA, timeout),
            chunk_hashing(hashing().name, member.secret),
            self._down.peer,
            timeout,
        )

    def _send_all(self, plan: Plan) -> list[bytes]:
        """Read and send all files without writing them; returns their digests."""
        how = hashing()
        reader = SendingSource(self._source, self._sender).reader(plan)
        try:
            numbers = range(len(plan.files))
            return [hashed(self._heeding(reader.read(number)), how) for number in numbers]
        finally:
            reader.close()

    def _heeding(self, blocks: Iterator[Buffer]) -> Iterator[Buffer]:
        for data in blocks:
            yield data
            if self._beat():
                raise StagingStopped

    def _agree(self, plan: Plan, digests: list[bytes]) -> None:
        """Say that all was sent, wait for what came of it, and let all publish."""
        digest = tree_digest(Listing.of(plan, digests), hashing())
        self._down.send(END)
        below = self._wait_for(DONE)
        if below != digest.encode():
            raise StagingError(
                f"what came to {self._down.peer} is not what was read: digests "
                f"{below.decode('ascii', 'replace')} and {digest}"
            )
        self._down.send(COMMIT)
