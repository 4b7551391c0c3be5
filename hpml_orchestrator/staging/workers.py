"""Copying workers, and limits of their rates."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import os
import queue
import signal
import threading
import time
import warnings
from typing import TYPE_CHECKING, TypeVar, cast

from hpml_orchestrator.errors import HpmlError, StagingError

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from contextlib import AbstractContextManager
    from multiprocessing.context import ForkProcess

if TYPE_CHECKING:
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
    """Run tasks in forked workers; in fewer, or in this process, if the job's limits require it.

    Args:
        tasks: number of tasks; they are numbered from 0.
        begin: called in each worker with a function that reports live figures; yields the function
            that runs a task, given its number.
        workers: number of workers.
        on_result: called with the result of each task, in the order of completion.
        heartbeat: called about ten times a second; if it raises, the workers are killed.
        on_report: called with the workers' live figures.

    Raises:
        StagingError: a worker died, or a task raised something other than an OSError.
        Exception: as raised by `on_result`, `heartbeat` and `on_report`.
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
        except (OSError, RuntimeError):  # process limit reached, or no room for semaphores
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
        # Messages are much smaller than PIPE_BUF, so a killed worker never leaves a partial one.
        self.reports = context.SimpleQueue()

        def report(more_bytes: int, more_files: int) -> None:
            self.reports.put((more_bytes, more_files))

        start = (os.getpid(), begin, report)
        self.executor = ProcessPoolExecutor(workers, context, _begin, start)
        # kill_workers() needs Python 3.14
        self._processes = cast("dict[int, ForkProcess]", self.executor._processes)  # noqa: SLF001
        try:
            with warnings.catch_warnings():
                # Newer Pythons warn about forking while threads run, because children may need
                # their locks. The workers only run tasks.
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
    # After one worker died, the executor and then this process ended the others by signals.
    ended = {0, None, -signal.SIGKILL, -signal.SIGTERM}
    code = next((code for code in codes if code not in ended), None)
    code = -signal.SIGKILL if code is None else code
    how = f"signal {-code}" if code < 0 else f"status {code}"
    return StagingError(f"a worker process died ({how})", hint="was the memory of the job short?")


_task: Callable[[int], object]  # in a worker process


def _begin(
    parent: int,
    begin: Callable[[Report], AbstractContextManager[Callable[[int], object]]],
    report: Report,
) -> None:
    """Prepare a worker process; `begin` itself runs with the first task, which can raise."""
    global _task  # noqa: PLW0603 - an executor's workers have no other place
    from multiprocessing.util import Finalize  # noqa: PLC0415 - takes time

    # The kernel kills this worker when its parent dies, so no orphan writes into a directory that
    # the next stager removes. The parent may have died before this call: check again after it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    signal.set_wakeup_fd(-1)
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(name, signal.SIG_IGN)  # the parent gets it as well and kills the workers
    gc.disable()  # a collection would write to, and so copy, pages shared with the parent
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
    except HpmlError as error:  # not all of these can be pickled
        raise StagingError(str(error), hint=error.hint) from error
    except Exception as error:
        raise StagingError(f"{type(error).__name__}: {error}") from error


# Limits of the load on the shared file system: opens per second, and delays of array tasks.
#
# All jobs of a cluster share its metadata servers; a job that opens a million files as fast as it
# can slows down everybody's `ls`.

SECONDS_PER_TASK = 0.5
"""Each task of an array extends the window of start delays by this much."""

_NAP_SECONDS = 0.2
_GOLDEN = 0.6180339887498949  # (sqrt(5) - 1) / 2


class TokenBucket:
    """Limits calls to a rate; safe from several threads of one process.

    It is the generic cell rate algorithm (ITU-T I.371): its only state is the time at which the
    next call would be on schedule. Each forked worker has its own bucket, with a share of the rate.

    Args:
        rate: calls per second; 0 for no limit.
        check_stop: called while waiting, several times a second; may raise to end the wait.
        clock: monotonic clock, seconds.
        sleep: sleeps for some seconds.
    """

    def __init__(
        self,
        rate: float,
        *,
        check_stop: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.rate = max(0.0, rate)
        self._check_stop = check_stop
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._due = clock()

    def take(self, count: float = 1) -> None:
        """Wait until `count` more calls are on schedule; a pause saves up 0.2 s worth of calls."""
        if not self.rate or count <= 0:
            return
        with self._lock:
            now = self._clock()
            due = max(self._due, now - _NAP_SECONDS)
            self._due = due + count / self.rate
        # Wait without the lock: other threads reserve their turns meanwhile, and each checks for a
        # stop.
        while (left := due - self._clock()) > 0:
            self._sleep(min(left, _NAP_SECONDS))
            self._check_stop()


def open_rate(per_node: float, per_job: float, nodes: int) -> float:
    """Return how many files per second one node may open; 0 for no limit.

    Args:
        per_node: the site's limit for one node, opens/s; 0 for none.
        per_job: the site's limit for a whole job, opens/s; 0 for none.
        nodes: number of nodes of the job that read the source at once.
    >>> open_rate(2000, 6000, 4), open_rate(2000, 0, 4), open_rate(0, 6000, 4)
    (1500.0, 2000.0, 1500.0)
    """
    shares = [float(per_node), per_job / max(1, nodes)]
    return min((share for share in shares if share > 0), default=0.0)


def array_delay(most: float, tasks: int, index: int, salt: str = "") -> float:
    """Return how long a task of an array waits before it reads, in seconds.

    Tasks of an array start at the same moment. Multiples of the golden ratio spread their delays
    evenly over the window min(most, tasks * SECONDS_PER_TASK), however many tasks there are. A
    task's delay is always the same.

    Args:
        most: the site's longest delay, seconds; 0 for none.
        tasks: number of tasks of the array; a single job, 1 or 0, never waits.
        index: index of the task.
        salt: for example the array's id, so that other arrays have other delays.
    """
    if tasks <= 1 or most <= 0:
        return 0.0
    window = min(float(most), tasks * SECONDS_PER_TASK)
    digest = hashlib.blake2b(salt.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    offset = int.from_bytes(digest, "big") / 2**64
    return window * ((offset + index * _GOLDEN) % 1.0)
