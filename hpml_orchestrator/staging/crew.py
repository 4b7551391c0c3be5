"""Forked workers that take numbers from a queue and report results and errors to their parent.

All their input is in memory before the fork. The queue is a pipe that all of them read: the kernel
hands out each number once, and the parent is not involved.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import marshal
import os
import select
import signal
import struct
import threading
import time
import warnings
from typing import TYPE_CHECKING, NoReturn

from hpml_orchestrator.errors import HpmlError, StagingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

    Tell = Callable[..., None]
    Work = Callable[[int, Callable[[], int | None], Tell], None]
    # called in a worker with its number, a function that takes the next number (None at the end),
    # and a function that reports to the parent

_HEARTBEAT_SECONDS = 0.1
_REAP_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1
_NUMBER = struct.Struct("=i")
_LENGTH = struct.Struct("=I")
_NUMBERS_AT_ONCE = 1024  # 4 KiB: fits the smallest pipe, and such writes are atomic


def run_crew(
    processes: int,
    work: Work,
    numbers: Sequence[int],
    *,
    on_report: Callable[..., None],
    heartbeat: Callable[[], None],
) -> None:
    """Run forked workers on a queue of numbers until it is empty.

    Args:
        processes: how many.
        work: what a worker does.
        numbers: the queue.
        on_report: called with what a worker reports, several plain values.
        heartbeat: called about ten times a second; may raise.

    Raises:
        StagingError: a worker died, or raised an HpmlError.
        Exception: what `on_report` and `heartbeat` raise.
        OSError: a worker raised it, or there can be no worker.
    """
    queue, feed = os.pipe()
    # A blocking write could deadlock: workers that wait for room in their report pipes take no
    # numbers, and this process would not read reports while it waits for room in the queue.
    os.set_blocking(feed, False)
    workers: dict[int, _Worker] = {}
    poll = select.poll()
    poll.register(feed, select.POLLOUT)
    given = 0
    try:
        for worker in _hired(processes, work, queue):
            workers[worker.line] = worker
            poll.register(worker.line, select.POLLIN)
        while workers:
            for fd, _ in poll.poll(_HEARTBEAT_SECONDS * 1000):
                if fd == feed:
                    given += _feed(feed, numbers[given : given + _NUMBERS_AT_ONCE])
                    if given >= len(numbers):
                        poll.unregister(feed)
                        # Workers have closed their copy of this end, so closing it ends the queue:
                        # they read EOF once the numbers are used up.
                        os.close(feed)
                        feed = -1
                elif not workers[fd].listen(on_report):
                    poll.unregister(fd)
                    del workers[fd]
            heartbeat()
    finally:
        _dismiss(list(workers.values()))
        for fd in (queue, feed):
            if fd >= 0:
                os.close(fd)


def _hired(processes: int, work: Work, queue: int) -> Iterator[_Worker]:
    for number in range(processes):
        try:
            yield _Worker(number, work, queue)
        except OSError:
            if not number:
                raise
            return  # process limit reached: continue with the workers there are


def _feed(feed: int, numbers: Sequence[int]) -> int:
    with contextlib.suppress(BlockingIOError, BrokenPipeError):
        return os.write(feed, b"".join(map(_NUMBER.pack, numbers))) // _NUMBER.size
    return 0


class _Worker:
    """A forked process that dies with this one and shares none of its descriptors."""

    def __init__(self, number: int, work: Work, queue: int) -> None:
        self._heard = bytearray()
        self._has_ended = False
        self.line, theirs = os.pipe()  # readable when `listen` has something to do
        parent = os.getpid()
        gc.freeze()  # a collection would write to the pages shared with the worker, copying them
        try:
            with warnings.catch_warnings():
                # Newer Pythons warn about forking while threads run, for children that use their
                # locks. This child only runs the code below.
                warnings.simplefilter("ignore", DeprecationWarning)
                self.process = os.fork()
            if self.process == 0:  # still frozen, so the worker never collects those objects
                _serve(number, work, queue, theirs, parent)
        except OSError:
            os.close(self.line)
            raise
        finally:
            gc.unfreeze()
            os.close(theirs)

    def listen(self, on_report: Callable[..., None]) -> bool:
        """Call `on_report` for each report, raise its error; False once it ended without one."""
        data = os.read(self.line, 1 << 16)
        heard = self._heard
        heard += data
        while len(heard) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(heard)[0]
            if len(heard) < end:
                break
            word, *values = marshal.loads(bytes(heard[_LENGTH.size : end]))  # noqa: S302 - our own
            del heard[:end]
            if word == "failed":
                raise StagingError(values[0], hint=values[1])
            if word == "fault":
                raise OSError(*values)
            if word == "end":
                self._has_ended = True
            else:
                on_report(*values)
        if data:
            return True
        status = 0
        with contextlib.suppress(ChildProcessError):  # something else has reaped it
            status = os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
        if not self._has_ended:
            how = f"signal {-status}" if status < 0 else f"status {status}"
            hint = "was the memory of the job short?"
            raise StagingError(f"a worker process died ({how})", hint=hint)
        os.close(self.line)
        return False


def _dismiss(workers: list[_Worker]) -> None:
    """Kill and reap the remaining workers; give up on one that hangs in the kernel."""
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.process, signal.SIGKILL)
    end = time.monotonic() + _REAP_SECONDS
    # Kill all before waiting for the first, so that they end at the same time.
    for worker in workers:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(worker.process, os.WNOHANG)[0] == 0 and time.monotonic() < end:
                time.sleep(0.002)
        os.close(worker.line)


def _serve(number: int, work: Work, queue: int, line: int, parent: int) -> NoReturn:
    status = 1
    try:
        # The kernel kills this worker when its parent dies, so no orphan writes into a directory
        # that the next stager removes. The parent may have died before this call, hence the check
        # after it.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
        if os.getppid() == parent:
            signal.set_wakeup_fd(-1)
            for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
                signal.signal(name, signal.SIG_IGN)  # the parent gets it too and kills the workers
            gc.disable()
            _close_others(line, queue)
            tell = _Line(line)
            try:
                work(number, lambda: _take(queue), tell)
                tell.send("end")
            except HpmlError as error:
                tell.send("failed", str(error), error.hint)
            except OSError as error:
                tell.send("fault", error.errno or 0, error.strerror or str(error), error.filename)
            except Exception as error:  # noqa: BLE001 - the parent reports it
                tell.send("failed", f"{type(error).__name__}: {error}", "")
            status = 0
    finally:
        os._exit(status)


def _take(queue: int) -> int | None:
    data = os.read(queue, _NUMBER.size)
    found: int | None = _NUMBER.unpack(data)[0] if data else None
    return found


def _close_others(*keep: int) -> None:
    """Close the parent's descriptors: its locks must be free as soon as it is gone."""
    at = 3
    for fd in sorted(keep):
        os.closerange(at, fd)
        at = fd + 1
    # `closerange` up to the limit of open files could take a million calls on some systems; /proc
    # lists what is open.
    os.closerange(at, max(at, *map(int, os.listdir("/proc/self/fd"))) + 1)


class _Line:
    """Reports to the parent; safe from several threads."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()

    def __call__(self, *values: Any) -> None:
        self.send("report", *values)

    def send(self, word: str, *values: Any) -> None:
        data = marshal.dumps((word, *values))
        view = memoryview(_LENGTH.pack(len(data)) + data)
        # Threads of one worker share the pipe, and a long report takes several writes.
        with self._lock:
            while view:
                view = view[os.write(self._fd, view) :]
