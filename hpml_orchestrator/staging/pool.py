"""Work on many shards at once, a process each; what they did is told as they do it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, NoReturn

from hpml_orchestrator.errors import StagingError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from multiprocessing.context import ForkProcess
    from types import FrameType
    from typing import Any

__all__ = ["Tell", "default_workers", "in_parallel"]

_TOLD_EVERY_SECONDS = 0.2
_JOIN_SECONDS = 10
_PR_SET_PDEATHSIG = 1


class Tell:
    """How far a worker is."""

    def __init__(self, line: Connection) -> None:
        self._line = line
        self._bytes = self._files = 0
        self._next = time.monotonic() + _TOLD_EVERY_SECONDS

    def add(self, done_bytes: int, done_files: int) -> None:
        """Count what was done, and tell it a few times a second."""
        self._bytes += done_bytes
        self._files += done_files
        if time.monotonic() >= self._next:
            self.flush()

    def flush(self) -> None:
        """Tell what was not yet told."""
        self._line.send(("progress", (self._bytes, self._files)))
        self._bytes = self._files = 0
        self._next = time.monotonic() + _TOLD_EVERY_SECONDS


def default_workers() -> int:
    """Return how many CPUs this process may use."""
    return len(os.sched_getaffinity(0))


def in_parallel(
    numbers: Sequence[int],
    work: Callable[[int, Tell], Any],
    *,
    workers: int,
    progress: Callable[[int, int], None],
) -> Generator[Any, None, None]:
    """Yield what the work returns for each number, as it is done; the order is not fixed.

    Workers are forked, so that they know the plan without being told. Leaving the iteration ends
    them, and whatever they had begun is undone.

    Args:
        numbers: what to work on.
        work: called in a worker with a number.
        workers: processes at most.
        progress: called with (bytes, files) done since the last call, and with zeros when nothing
            was told for a moment.

    Raises:
        StagingError: a worker died, or what the work raised.
    """
    todo = deque(numbers)
    crew: dict[Connection, ForkProcess] = {}
    try:
        gc.freeze()  # collecting would copy pages that the workers share with this process
        for _ in range(min(workers, len(todo))):
            _hire(crew, work)
        gc.unfreeze()
        busy = set(crew)
        for line in crew:
            _give(line, todo.popleft(), crew)
        while busy:
            ready = wait(list(busy), timeout=_TOLD_EVERY_SECONDS)
            progress(0, 0)
            for line in [line for line in crew if line in ready]:
                kind, value = _heard(line, crew)
                if kind == "progress":
                    progress(*value)
                    continue
                if todo:
                    _give(line, todo.popleft(), crew)
                else:
                    busy.discard(line)
                yield value
    finally:
        for process in crew.values():
            process.terminate()
        for process in crew.values():
            process.join(_JOIN_SECONDS)
        for line in crew:
            line.close()


def _hire(crew: dict[Connection, ForkProcess], work: Callable[[int, Tell], Any]) -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    foreign = [*crew, ours]
    process = context.Process(target=_serve, args=(theirs, foreign, os.getpid(), work), daemon=True)
    sys.stdout.flush()
    sys.stderr.flush()
    process.start()
    theirs.close()
    crew[ours] = process


def _heard(line: Connection, crew: dict[Connection, ForkProcess]) -> tuple[str, Any]:
    try:
        kind, value = line.recv()
    except (EOFError, ConnectionResetError):
        raise _dead(crew[line]) from None
    if kind == "error":
        raise value
    return kind, value


def _give(line: Connection, number: int, crew: dict[Connection, ForkProcess]) -> None:
    try:
        line.send(number)
    except (BrokenPipeError, ConnectionResetError):
        raise _dead(crew[line]) from None


def _dead(process: ForkProcess) -> StagingError:
    process.join(_JOIN_SECONDS)
    code = process.exitcode or 0
    end = f"signal {-code}" if code < 0 else f"status {code}"
    return StagingError(
        f"a worker process died ({end})",
        hint="was memory short? What is finished is kept: --resume goes on",
    )


def _serve(
    line: Connection, foreign: list[Connection], parent: int, work: Callable[[int, Tell], Any]
) -> None:
    """Work until there is no more of it; an end of the parent is an end of this process.

    The kernel sees to that: a worker that outlived its parent could rename an archive of an older
    state of the tree over one that `--resume` has made since.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends the workers
    signal.signal(signal.SIGTERM, _leave)
    for one in foreign:
        one.close()  # else the end of the parent would not be seen
    tell = Tell(line)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            number = line.recv()
            try:
                value = work(number, tell)
            except (BrokenPipeError, ConnectionResetError):
                raise
            except Exception as error:  # noqa: BLE001 - the parent raises it again
                line.send(("error", error))
                return
            tell.flush()
            line.send(("done", value))


def _leave(_number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(0)
