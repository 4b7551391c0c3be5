"""Numbered tasks in forked processes: a `ProcessPoolExecutor` whose workers die with this process.

All that the tasks need is in the workers' memory from the fork, so only numbers go to them.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import queue
import signal
import time
import warnings
from typing import TYPE_CHECKING, TypeVar, cast

from hpml_orchestrator.errors import HpmlError, StagingError

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from contextlib import AbstractContextManager
    from multiprocessing.context import ForkProcess

    Report = Callable[[int, int], object]
    # called with the bytes and files done since the last call

T = TypeVar("T")

_HEARTBEAT_SECONDS = 0.1
_REAP_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1


def run_here(
    tasks: int,
    begin: Callable[[Report], AbstractContextManager[Callable[[int], T]]],
    *,
    on_result: Callable[[T], object],
    on_report: Report,
) -> None:
    """Run tasks in this process, in order; see `run_forked`."""
    with begin(on_report) as do:
        for number in range(tasks):
            on_result(do(number))


def run_forked(
    tasks: int,
    begin: Callable[[Report], AbstractContextManager[Callable[[int], T]]],
    *,
    workers: int,
    on_result: Callable[[T], object],
    heartbeat: Callable[[], object],
    on_report: Report = lambda _bytes, _files: None,
) -> None:
    """Run tasks in forked workers; in fewer, or in this process, if there cannot be so many.

    Args:
        tasks: their number; they are numbered from 0.
        begin: called in each worker, with a function that takes live figures; yields the function
            that does a task, given its number.
        workers: how many.
        on_result: called with the result of each task, in the order in which they end.
        heartbeat: called about ten times a second; may raise, which kills the workers.
        on_report: called with live figures of the workers.

    Raises:
        StagingError: a worker died, or a task raised something else than an OSError.
        Exception: what `on_result`, `heartbeat` and `on_report` raise.
        OSError: a task raised it.
    """
    from concurrent.futures.process import BrokenProcessPool  # noqa: PLC0415 - takes time

    pool = _started(workers, begin)
    if pool is None:
        run_here(tasks, begin, on_result=on_result, on_report=on_report)
        return
    finished: queue.SimpleQueue[Future[T]] = queue.SimpleQueue()
    left = tasks
    try:
        for number in range(tasks):
            future = cast("Future[T]", pool.executor.submit(_do, number))
            future.add_done_callback(finished.put)
        while left:
            with contextlib.suppress(queue.Empty):
                on_result(finished.get(timeout=_HEARTBEAT_SECONDS).result())
                left -= 1
            while not pool.reports.empty():
                on_report(*pool.reports.get())
            heartbeat()
    except BrokenProcessPool:
        raise _death(pool.end(kill=True)) from None
    finally:
        pool.end(kill=left > 0)


def _started(
    workers: int, begin: Callable[[Report], AbstractContextManager[Callable[[int], T]]]
) -> _Pool | None:
    while workers:
        try:
            return _Pool(workers, begin)
        except (OSError, RuntimeError):  # the limit of processes, or no room for its semaphores
            workers //= 2
    return None


class _Pool:
    """A started executor and the queue of its workers' live figures."""

    def __init__(
        self, workers: int, begin: Callable[[Report], AbstractContextManager[Callable[[int], T]]]
    ) -> None:
        from concurrent.futures import ProcessPoolExecutor  # noqa: PLC0415 - takes time
        from multiprocessing import get_context  # noqa: PLC0415 - takes time

        context = get_context("fork")
        # Messages are much smaller than PIPE_BUF, so a killed worker never leaves part of one.
        self.reports = context.SimpleQueue()

        def report(more_bytes: int, more_files: int) -> None:
            self.reports.put((more_bytes, more_files))

        start = (os.getpid(), begin, report)
        self.executor = ProcessPoolExecutor(workers, context, _begin, start)
        # kill_workers() is of Python 3.14
        self._processes = cast("dict[int, ForkProcess]", self.executor._processes)  # noqa: SLF001
        try:
            with warnings.catch_warnings():
                # Newer Pythons warn about forking while threads run, for children that use their
                # locks. The workers only run tasks.
                warnings.simplefilter("ignore", DeprecationWarning)
                self.executor.submit(int)  # forks all workers
        except (OSError, RuntimeError):
            self.end(kill=True)
            raise

    def end(self, *, kill: bool) -> list[int | None]:
        """End the workers and return their exit codes; give up on one that hangs in the kernel."""
        processes = list(self._processes.values())
        end = time.monotonic() + _REAP_SECONDS
        if kill:
            for process in processes:
                process.kill()
        self.executor.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
            process.kill()
        return [process.exitcode for process in processes]


def _death(codes: list[int | None]) -> StagingError:
    # After one has died, the executor and then this process ended the others by signals.
    ended = {0, None, -signal.SIGKILL, -signal.SIGTERM}
    code = next((code for code in codes if code not in ended), None)
    code = -signal.SIGKILL if code is None else code
    how = f"signal {-code}" if code < 0 else f"status {code}"
    return StagingError(f"a worker process died ({how})", hint="was the memory of the job short?")


_task: Callable[[int], object]  # of a worker process


def _begin(
    parent: int,
    begin: Callable[[Report], AbstractContextManager[Callable[[int], object]]],
    report: Report,
) -> None:
    """Prepare a worker process; what `begin` does waits for the first task, which can raise."""
    global _task  # noqa: PLW0603 - an executor's workers have no other place
    from multiprocessing.util import Finalize  # noqa: PLC0415 - takes time

    # The kernel kills this worker when its parent dies, so no orphan writes into a directory that
    # the next stager removes. The parent may have died before this call, hence the check after it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    signal.set_wakeup_fd(-1)
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(name, signal.SIG_IGN)  # the parent gets it too and kills the workers
    gc.disable()  # a collection would write to the pages shared with the parent, copying them
    stack = contextlib.ExitStack()
    Finalize(None, stack.close, exitpriority=0)

    def first(number: int) -> object:
        global _task  # noqa: PLW0603
        _task = stack.enter_context(begin(report))
        return _task(number)

    _task = first


def _do(number: int) -> object:
    try:
        return _task(number)
    except OSError:
        raise
    except HpmlError as error:  # not all of them can be pickled
        raise StagingError(str(error), hint=error.hint) from error
    except Exception as error:
        raise StagingError(f"{type(error).__name__}: {error}") from error
