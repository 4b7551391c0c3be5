"""Forked workers that tell what they do and what goes wrong.

Everything that they need is in memory before the fork. Those of a crew take numbers from one queue,
a pipe that all of them read: the kernel hands out each number once, without a word to the parent.
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
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any

    Tell = Callable[..., None]
    Work = Callable[[int, Callable[[], int | None], Tell], None]
    # called in a worker with its number, what returns the next number or None, and what tells

__all__ = ["Worker", "run_crew"]

_HEARTBEAT_SECONDS = 0.1
_REAP_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1
_MEMORY = "was the memory of the job short?"
_NUMBER = struct.Struct("=i")
_LENGTH = struct.Struct("=I")
_NUMBERS_AT_ONCE = 1024  # fits the smallest pipe, a page


class Worker:
    """A forked process that ends with this one and holds none of its descriptors.

    Args:
        work: called there, with what tells this process some plain values.
        keep: descriptors that it needs.
        died: the hint where it was killed.

    Attributes:
        process: its number.
        line: a descriptor that is readable when `listen` has something to do.
        is_gone: whether it has ended.

    Raises:
        OSError: no more processes are allowed.
    """

    def __init__(
        self, work: Callable[[Tell], None], keep: Sequence[int], died: str = _MEMORY
    ) -> None:
        self._died = died
        self._heard = bytearray()
        self._has_ended = False
        self.is_gone = False
        self.line, theirs = os.pipe()
        parent = os.getpid()
        gc.freeze()  # collecting would copy pages that the worker shares with this process
        try:
            with warnings.catch_warnings():
                # newer interpreters warn when other threads run: the child only runs what is here
                warnings.simplefilter("ignore", DeprecationWarning)
                self.process = os.fork()
            if self.process == 0:  # still frozen: nothing is collected there
                _serve(work, theirs, keep, parent)
        except OSError:
            os.close(self.line)
            os.close(theirs)
            raise
        finally:
            gc.unfreeze()
        os.close(theirs)

    def listen(self, told: Callable[..., None]) -> bool:
        """Call `told` with what the worker told; False when it has ended well.

        Raises:
            StagingError: it died, or raised an HpmlError.
            OSError: it raised that.
        """
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
                text, hint = values
                raise StagingError(text, hint=hint)
            if word == "fault":
                raise OSError(*values)
            if word == "end":
                self._has_ended = True
            else:
                told(*values)
        if data:
            return True
        self.is_gone = True
        os.close(self.line)
        status = 0
        with contextlib.suppress(ChildProcessError):  # whoever waits for any child was faster
            status = os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
        if not self._has_ended:
            how = f"signal {-status}" if status < 0 else f"status {status}"
            raise StagingError(f"a worker process died ({how})", hint=self._died)
        return False

    @staticmethod
    def dismiss(workers: Iterable[Worker]) -> None:
        """Kill and reap those that are left; one that the kernel holds in a call is left."""
        left = [worker for worker in workers if not worker.is_gone]
        for worker in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.process, signal.SIGKILL)
        end = time.monotonic() + _REAP_SECONDS
        for worker in left:
            while time.monotonic() < end:
                with contextlib.suppress(ChildProcessError):
                    if os.waitpid(worker.process, os.WNOHANG)[0] == 0:
                        time.sleep(0.002)
                        continue
                break
            worker.is_gone = True
            os.close(worker.line)


def run_crew(
    processes: int,
    work: Work,
    numbers: Sequence[int],
    *,
    told: Callable[..., None],
    heartbeat: Callable[[], None],
    died: str = _MEMORY,
) -> None:
    """Let forked workers work on numbers until there are no more.

    Args:
        processes: how many.
        work: what a worker does.
        numbers: the queue.
        told: called with what a worker tells, several plain values.
        heartbeat: called about ten times a second; may raise.
        died: the hint where a worker was killed.

    Raises:
        StagingError: a worker died, or raised an HpmlError; or what `told` or `heartbeat` raise.
    """
    crew = _Crew(numbers)
    try:
        for number in range(processes):
            crew.hire(number, work, died)
        crew.attend(told, heartbeat)
    finally:
        crew.dismiss()


class _Crew:
    def __init__(self, numbers: Sequence[int]) -> None:
        self._left = numbers
        self._given = 0
        self._queue, self._feed = os.pipe()
        os.set_blocking(self._feed, False)
        self._workers: dict[int, Worker] = {}  # by descriptor

    def hire(self, number: int, work: Work, died: str) -> None:
        queue = self._queue
        try:
            worker = Worker(lambda tell: work(number, lambda: _take(queue), tell), [queue], died)
        except OSError:
            if not self._workers:
                raise
            return  # no more processes allowed: those that are there do it all
        self._workers[worker.line] = worker

    def attend(self, told: Callable[..., None], heartbeat: Callable[[], None]) -> None:
        """Feed the queue and listen until every worker has ended well."""
        poll = select.poll()
        poll.register(self._feed, select.POLLOUT)
        for line in self._workers:
            poll.register(line, select.POLLIN)
        while self._workers:
            ready = poll.poll(_HEARTBEAT_SECONDS * 1000)
            for fd, _ in ready:
                if fd == self._feed:
                    if not self._feed_some():
                        poll.unregister(fd)
                        os.close(fd)
                        self._feed = -1
                elif not self._workers[fd].listen(told):
                    poll.unregister(fd)
                    del self._workers[fd]
            heartbeat()

    def _feed_some(self) -> bool:
        """Put numbers in the queue; False when all are in, or nobody takes them any more."""
        some = self._left[self._given : self._given + _NUMBERS_AT_ONCE]
        try:
            wrote = os.write(self._feed, b"".join(map(_NUMBER.pack, some))) if some else 0
        except BlockingIOError:
            return True
        except BrokenPipeError:
            return False
        self._given += wrote // _NUMBER.size
        return self._given < len(self._left)

    def dismiss(self) -> None:
        Worker.dismiss(self._workers.values())
        for fd in (self._queue, self._feed):
            if fd >= 0:
                os.close(fd)


def _serve(work: Callable[[Tell], None], line: int, keep: Sequence[int], parent: int) -> NoReturn:
    status = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
        if os.getppid() == parent:
            signal.set_wakeup_fd(-1)
            for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
                signal.signal(name, signal.SIG_IGN)  # the parent gets it too, and ends the workers
            gc.disable()
            _close_others(line, *keep)
            tell = _Line(line)
            try:
                work(tell)
                tell.send("end")
            except HpmlError as error:
                tell.send("failed", str(error), error.hint)
            except OSError as error:
                tell.send("fault", error.errno or 0, error.strerror or str(error), error.filename)
            except Exception as error:  # noqa: BLE001 - the parent tells it
                tell.send("failed", f"{type(error).__name__}: {error}", "")
            status = 0
    finally:
        os._exit(status)


def _take(queue: int) -> int | None:
    data = os.read(queue, _NUMBER.size)
    found: int | None = _NUMBER.unpack(data)[0] if data else None
    return found


def _close_others(*keep: int) -> None:
    """Close what the parent has open: a lock must be free when the parent is gone."""
    at = 3
    for fd in sorted(keep):
        os.closerange(at, fd)
        at = fd + 1
    os.closerange(at, max(at, _highest() + 1))


def _highest() -> int:
    return max(map(int, os.listdir("/proc/self/fd")))


class _Line:
    """Tells the parent; safe from several threads."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()

    def __call__(self, *values: Any) -> None:
        self.send("told", *values)

    def send(self, word: str, *values: Any) -> None:
        data = marshal.dumps((word, *values))
        view = memoryview(_LENGTH.pack(len(data)) + data)
        with self._lock:
            while view:
                view = view[os.write(self._fd, view) :]
