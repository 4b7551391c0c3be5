"""A process per data connection: take chunks, check them, pass them on, write them."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import time
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.faults import FULL, shown, why
from hpml_orchestrator.staging.many.chunks import (
    END_OF_STREAM,
    HEAD_BYTES,
    ChainLostError,
    Head,
    Landed,
    Landing,
    lost,
    unpack_head,
)
from hpml_orchestrator.staging.source import BLOCK_BYTES

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkProcess

    from hpml_orchestrator.staging.hashing import Buffer
    from hpml_orchestrator.staging.many.link import Caller
    from hpml_orchestrator.staging.plan import Plan

__all__ = ["Relay", "RelayPart", "Report"]

_BUFFER_BYTES = 4 << 20
_LARGEST_BYTES = HEAD_BYTES + BLOCK_BYTES
_TOLD_EVERY_SECONDS = 0.2
_PR_SET_PDEATHSIG = 1
_JOIN_SECONDS = 10


class Report:
    """What a relay tells its parent: pieces that landed, that it is done, or its error."""

    def __init__(self) -> None:
        self.landed: list[Landed] = []
        self.bytes = 0
        self.seconds = 0.0
        self.write_seconds = 0.0
        self.is_done = False
        self.error: Exception | None = None


class RelayPart:
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

    def run(self, plan: Plan, landing: Landing, tell: Callable[[Report], None]) -> None:
        """Work until the end of the stream.

        Raises:
            ChainLostError: a neighbour is gone or hangs.
            StagingError: a chunk is damaged or has no place, or a file cannot be written.
        """
        buffer = memoryview(bytearray(_BUFFER_BYTES))
        at = filled = 0
        report, told_at = Report(), time.monotonic()
        while not report.is_done:
            if _BUFFER_BYTES - filled < _LARGEST_BYTES:
                buffer[: filled - at] = buffer[at:filled]
                at, filled = 0, filled - at
            filled += self._receive(buffer[filled:])
            at = self._whole_chunks(buffer, at, filled, plan, landing, report)
            if at == filled:
                at = filled = 0
            now = time.monotonic()
            if report.is_done or now - told_at >= _TOLD_EVERY_SECONDS:
                tell(report)
                told_at = now
                if not report.is_done:
                    report = Report()
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
        report: Report,
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
                report.is_done = True
            else:
                landing.check(head)
                self._check(head, data, plan)
                found.append((head, data))
            at = end
        if at > begin:
            self._pass_on(buffer[begin:at])
        began = time.perf_counter()
        for head, data in found:
            report.bytes += head.length
            landed = self._land(landing, head, data, plan)
            if landed is not None:
                report.landed.append(landed)
        report.write_seconds += time.perf_counter() - began
        return at

    def _check(self, head: Head, data: Buffer, plan: Plan) -> None:
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

    def _land(self, landing: Landing, head: Head, data: Buffer, plan: Plan) -> Landed | None:
        try:
            return landing.take(head, data)
        except OSError as error:
            hint = "something else took the room that was free before; choose another target"
            raise StagingError(
                f"cannot write {shown(plan.files[head.number].path)}: {why(error)}",
                hint=hint if error.errno in FULL else "",
            ) from error


class Relay:
    """The process of one data connection, seen from its parent.

    Args:
        part: what to do.
        plan: what comes.
        landing: where it goes.
        foreign: descriptors of the parent that the process must not keep open.
    """

    def __init__(
        self, part: RelayPart, plan: Plan, landing: Landing, foreign: Callable[[], None]
    ) -> None:
        context = multiprocessing.get_context("fork")
        self.line: Connection
        self.line, theirs = context.Pipe(duplex=False)
        gc.freeze()  # collecting would copy pages that the processes share
        self._process: ForkProcess = context.Process(
            target=_serve,
            args=(part, plan, landing, theirs, self.line, foreign, os.getpid()),
            daemon=True,
        )
        self._process.start()
        gc.unfreeze()
        theirs.close()
        part.sock.close()
        self.is_done = False

    def report(self) -> Report:
        """Return what the process says; call it when `line` can be read.

        Raises:
            StagingError: the process died.
        """
        try:
            found: Report = self.line.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(_JOIN_SECONDS)
            code = self._process.exitcode or 0
            end = f"signal {-code}" if code < 0 else f"status {code}"
            raise StagingError(
                f"a process that receives data died ({end})", hint="was memory short?"
            ) from None
        self.is_done = found.is_done
        return found

    def close(self) -> None:
        """End the process, done or not."""
        if not self.is_done:
            self._process.kill()
        self._process.join(_JOIN_SECONDS)
        self.line.close()


def _serve(
    part: RelayPart,
    plan: Plan,
    landing: Landing,
    line: Connection,
    theirs: Connection,
    foreign: Callable[[], None],
    parent: int,
) -> None:
    """Run a relay; the kernel ends it with its parent."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # the parent decides
    theirs.close()
    foreign()
    try:
        part.run(plan, landing, line.send)
    except Exception as error:  # noqa: BLE001 - the parent raises it again
        told = Report()
        told.error = _picklable(error)
        line.send(told)


def _picklable(error: Exception) -> Exception:
    if isinstance(error, StagingError):
        kind = ChainLostError if isinstance(error, ChainLostError) else StagingError
        return kind(str(error), hint=error.hint)
    return StagingError(f"{type(error).__name__}: {why(error)}")
