"""What a process does with a data connection: take chunks, check, pass on and write them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.faults import FULL, shown, why
from hpml_orchestrator.staging.many.chunks import (
    END_OF_STREAM,
    HEAD_BYTES,
    ChainLostError,
    ChunkHead,
    Landed,
    Landing,
    lost,
    unpack_head,
)
from hpml_orchestrator.staging.source import BLOCK_BYTES

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from hpml_orchestrator.staging.hashing import Buffer
    from hpml_orchestrator.staging.many.link import Caller
    from hpml_orchestrator.staging.plan import Plan

__all__ = ["Relay"]

_BUFFER_BYTES = 4 << 20
_LARGEST_BYTES = HEAD_BYTES + BLOCK_BYTES
_TOLD_EVERY_SECONDS = 0.2


class Relay:
    """What one relay does with its connection.

    Args:
        sock: the data connection from the node before.
        onward: opens the one to the node after; None on the last node.
        digest: see `chunk_hashing`.
        names: of the nodes before and after, for errors.
        timeout: seconds after which a node that takes nothing counts as hung.
    """

    def __init__(
        self,
        sock: socket.socket,
        onward: Callable[[], Caller] | None,
        digest: Callable[[Buffer], bytes],
        *,
        names: tuple[str, str],
        timeout: float,
    ) -> None:
        self.sock = sock
        self._onward = onward
        self._digest = digest
        self._before, self._after = names
        self._timeout = timeout
        self._next: socket.socket | None = None
        self._is_done = False
        self._landed: list[Landed] = []  # since it was told
        self._bytes = 0

    def run(self, plan: Plan, landing: Landing, tell: Callable[..., None]) -> None:
        """Work until the end of the stream.

        Args:
            plan: what comes.
            landing: where it goes.
            tell: called a few times a second with the files that landed, the bytes that came, and
                at last perhaps why a neighbour was lost.

        Raises:
            StagingError: a chunk is damaged or has no place, or a file cannot be written.
        """
        try:
            self._run(plan, landing, tell)
        except ChainLostError as error:
            tell([], 0, str(error))

    def _run(self, plan: Plan, landing: Landing, tell: Callable[..., None]) -> None:
        buffer = memoryview(bytearray(_BUFFER_BYTES))
        at = filled = 0
        told_at = time.monotonic()
        while not self._is_done:
            if _BUFFER_BYTES - filled < _LARGEST_BYTES:
                buffer[: filled - at] = buffer[at:filled]
                at, filled = 0, filled - at
            filled += self._receive(buffer[filled:])
            at = self._whole_chunks(buffer, at, filled, plan, landing)
            if at == filled:
                at = filled = 0
            now = time.monotonic()
            if self._is_done or now - told_at >= _TOLD_EVERY_SECONDS:
                tell([tuple(one) for one in self._landed], self._bytes, "")
                self._landed, self._bytes, told_at = [], 0, now
        if self._next is not None:
            self._next.close()

    def _receive(self, into: memoryview) -> int:
        try:
            count = self.sock.recv_into(into)
        except OSError as error:
            raise lost(self._before, self._timeout, error) from error
        if not count:
            raise ChainLostError(f"{self._before} was lost: its data ended in the middle")
        return count

    def _whole_chunks(
        self,
        buffer: memoryview,
        at: int,
        filled: int,
        plan: Plan,
        landing: Landing,
    ) -> int:
        """Check what is complete in the buffer, pass it on, write it; returns where it ends."""
        begin, found = at, []
        while filled - at >= HEAD_BYTES:
            try:
                head = unpack_head(buffer, at)
            except StagingError as error:
                raise StagingError(f"{error} from {self._before}") from None
            end = at + HEAD_BYTES + head.length
            if end > filled:
                break
            data = buffer[at + HEAD_BYTES : end]
            if head.kind == END_OF_STREAM:
                self._is_done = True
            else:
                landing.check(head)
                self._check(head, data, plan)
                found.append((head, data))
            at = end
        if at > begin:
            self._pass_on(buffer[begin:at])
        for head, data in found:
            self._bytes += head.length
            landed = self._land(landing, head, data, plan)
            if landed is not None:
                self._landed.append(landed)
        return at

    def _check(self, head: ChunkHead, data: Buffer, plan: Plan) -> None:
        if self._digest(data) != head.digest:
            raise StagingError(
                f"a chunk of {shown(plan.files[head.number].path)} was damaged on its way from "
                f"{self._before}: its digest is not that of its bytes",
                hint="if it comes again, look at that node's network card and memory",
            )

    def _pass_on(self, data: memoryview) -> None:
        if self._onward is None:
            return
        try:
            if self._next is None:
                self._next = self._onward().sock
                self._next.settimeout(self._timeout)
            self._next.sendall(data)
        except OSError as error:
            raise lost(self._after, self._timeout, error) from error

    def _land(self, landing: Landing, head: ChunkHead, data: Buffer, plan: Plan) -> Landed | None:
        try:
            return landing.take(head, data)
        except OSError as error:
            hint = "something else took the room that was free before; choose another target"
            raise StagingError(
                f"cannot write {shown(plan.files[head.number].path)}: {why(error)}",
                hint=hint if error.errno in FULL else "",
            ) from error
