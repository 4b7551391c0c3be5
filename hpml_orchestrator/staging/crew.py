"""Forked workers that take numbers from one queue and tell what goes wrong.

Everything that they need is in memory before the fork; results go through shared memory
(`staging/board.py`). The queue is a pipe that all of them read: the kernel hands out each number
once, without a word to the parent.
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
    from collections.abc import Callable, Sequence
    from typing import Any

    Work = Callable[[int, Callable[[], int | None], Callable[..., None]], None]
    # called in a worker with its number, what returns the next number or None, and what tells

__all__ = ["run_crew"]

_HEARTBEAT_SECONDS = 0.1
_REAP_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1
_NUMBER = struct.Struct("=i")
_LENGTH = struct.Struct("=I")
_NUMBERS_AT_ONCE = 1024  # fits the smallest pipe, a page


def run_crew(
    processes: int,
    work: Work,
    numbers: Sequence[int],
    *,
    told: Callable[..., None],
    heartbeat: Callable[[], None],
    died: str = "was the memory of the job short?",
) -> None:
    """Let forked workers work on numbers until there are no more.

    The workers end with this process (the kernel sees to that), hold none of its descriptors, and
    are killed when this call is left by an error.

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
    crew = _Crew(numbers, died)
    try:
        gc.freeze()  # collecting would copy pages that the workers share with this process
        try:
            for number in range(processes):
                crew.hire(number, work)
        finally:
            gc.unfreeze()
        crew.attend(told, heartbeat)
    finally:
        crew.dismiss()


class _Crew:
    def __init__(self, numbers: Sequence[int], died: str) -> None:
        self._left = numbers
        self._died = died
        self._given = 0
        self._queue, self._feed = os.pipe()
        os.set_blocking(self._feed, False)
        self._workers: dict[int, int] = {}  # line -> process
        self._heard: dict[int, bytearray] = {}
        self._ended: set[int] = set()

    def hire(self, number: int, work: Work) -> None:
        line, theirs = os.pipe()
        parent = os.getpid()
        with warnings.catch_warnings():
            # newer interpreters warn when other threads run: the child only runs what is here
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                process = os.fork()
            except OSError:
                os.close(line)
                os.close(theirs)
                if self._workers:  # no more processes allowed: those that are there do it all
                    return
                raise
        if process == 0:
            _serve(number, work, self._queue, theirs, parent)
        os.close(theirs)
        self._workers[line] = process
        self._heard[line] = bytearray()

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
                elif not self._listen(fd, told):
                    poll.unregister(fd)
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

    def _listen(self, line: int, told: Callable[..., None]) -> bool:
        """Take what a worker told; False when it has ended."""
        data = os.read(line, 1 << 16)
        heard = self._heard[line]
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
                self._ended.add(line)
            else:
                told(*values)
        if data:
            return True
        process = self._workers.pop(line)
        os.close(line)
        status = 0
        with contextlib.suppress(ChildProcessError):  # whoever waits for any child was faster
            status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        if line not in self._ended:
            end = f"signal {-status}" if status < 0 else f"status {status}"
            raise StagingError(f"a worker process died ({end})", hint=self._died)
        return False

    def dismiss(self) -> None:
        """Kill and reap whoever is left; one that the kernel holds in a system call is left."""
        for process in self._workers.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        end = time.monotonic() + _REAP_SECONDS
        for line, process in self._workers.items():
            while time.monotonic() < end:
                with contextlib.suppress(ChildProcessError):
                    if os.waitpid(process, os.WNOHANG)[0] == 0:
                        time.sleep(0.002)
                        continue
                break
            os.close(line)
        self._workers.clear()
        for fd in (self._queue, self._feed):
            if fd >= 0:
                os.close(fd)


def _serve(
    number: int,
    work: Work,
    queue: int,
    line: int,
    parent: int,
) -> NoReturn:
    status = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
        if os.getppid() == parent:
            signal.set_wakeup_fd(-1)
            for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
                signal.signal(name, signal.SIG_IGN)  # the parent gets it too, and ends the workers
            gc.disable()
            _close_others(queue, line)
            tell = _Line(line)
            try:
                work(number, lambda: _take(queue), tell)
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
