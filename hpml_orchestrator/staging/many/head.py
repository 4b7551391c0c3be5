"""The first node of a chain: it reads the source, and what it reads goes to all the others."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.copy import Copied, copy
from hpml_orchestrator.staging.faults import StagingStopped
from hpml_orchestrator.staging.hashing import hashed, hashing
from hpml_orchestrator.staging.manifest import Listing, tree_digest
from hpml_orchestrator.staging.many.chunks import Sender, SendingSource
from hpml_orchestrator.staging.many.link import DATA, BrokenLinkError
from hpml_orchestrator.staging.many.member import PeerFailedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hpml_orchestrator.staging.copy import CopyOptions
    from hpml_orchestrator.staging.faults import Retry
    from hpml_orchestrator.staging.hashing import Buffer
    from hpml_orchestrator.staging.many.link import Link
    from hpml_orchestrator.staging.many.member import Member
    from hpml_orchestrator.staging.plan import Plan
    from hpml_orchestrator.staging.progress import Progress
    from hpml_orchestrator.staging.source import Source

__all__ = ["LISTS", "Head", "plan_digest", "plan_parts"]

LISTS = ("directories", "files", "hard_links", "symlinks", "stamps")
"""What a plan is told in."""

_ROWS_AT_ONCE = 1000
_TICK_SECONDS = 0.1


def plan_digest(parts: Iterable[Any], secret: bytes) -> str:
    """Return a digest of the parts of a plan that only those make who know the secret."""
    digest = hashlib.blake2b(key=secret)
    for part in parts:
        digest.update(json.dumps(part).encode())
    return digest.hexdigest()


def plan_parts(plan: Plan) -> Iterator[list[Any]]:
    """Yield a plan in parts, so that one node reads the metadata and the others are told."""
    yield ["top", [plan.top]]
    for name in LISTS:
        rows = getattr(plan, name)
        for at in range(0, len(rows), _ROWS_AT_ONCE):
            yield [name, rows[at : at + _ROWS_AT_ONCE]]


class Head:
    """The first node of a chain; a `Supply`.

    Args:
        source: what is staged.
        member: this node in the chain.
        options: how it is copied; files are hashed in any case.
    """

    method = "chain"

    def __init__(self, source: Source, member: Member, options: CopyOptions) -> None:
        self._source = source
        self._member = member
        self._options = dataclasses.replace(options, hash=True)
        self._plan: Plan | None = None
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
                parts = list(plan_parts(plan))
                for part in parts:
                    self._down.send("plan", part)
                terms = {"kind": self.kind, "hashing": hashing().name, "at_least": plan.at_least}
                self._down.send(
                    "terms", {**terms, "digest": plan_digest(parts, self._member.secret)}
                )
                self._plan = plan
        return self._plan

    def fill(self, plan: Plan, partial_dir: str, *, retry: Retry, progress: Progress) -> Copied:
        """Copy the source; what is read is sent, too.

        Raises:
            StagingError: this or another node failed; all nodes end, and none publishes.
            StagingStopped: should_stop said so.
            OSError: the directory cannot be written.
        """
        member = self._member
        with member.failing():
            member.wait_for("ready")
            self._down.send("go", True)
            try:
                copied = copy(
                    plan,
                    SendingSource(self._source, self._sender),
                    partial_dir,
                    options=self._options,
                    retry=retry.stopped_by(self._beat),
                    progress=progress,
                )
            except (PeerFailedError, BrokenLinkError):
                raise
            except StagingError as error:  # maybe a worker's, whose connection broke
                raise member.explain(error) from error
            self._agree(plan, copied.digests)
        member.is_done = True
        return copied

    def reuse(self) -> None:
        """Send the source to the others, if any of them needs it; this node has it already.

        Raises:
            StagingError: another node failed, or the source is not what it was.
            StagingStopped: should_stop said so.
        """
        plan = self.plan()
        with self._member.failing():
            is_needed = bool(self._member.wait_for("ready"))
            self._down.send("go", is_needed)
            if is_needed:
                self._agree(plan, self._send_all(plan))
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

    def _beat(self) -> bool:
        """Say whether to stop; on the way, hear whether another node failed.

        Raises:
            StagingError: it did.
        """
        now = time.monotonic()
        if (
            os.getpid() == self._pid
            and now >= self._tick_at
            and self._ticks.acquire(blocking=False)
        ):
            try:
                self._tick_at = now + _TICK_SECONDS
                self._member.listen()
            finally:
                self._ticks.release()
        return self._member.notices.should_stop()

    def _sender(self) -> Sender:
        member = self._member
        timeout = member.place.timeout
        return Sender(lambda: member.call(DATA, timeout), self._down.peer, timeout)

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
        self._down.send("end")
        below = self._member.wait_for("done")
        if below != digest:
            raise StagingError(
                f"what came to {self._down.peer} is not what was read: digests {below} and {digest}"
            )
        self._down.send("commit")
