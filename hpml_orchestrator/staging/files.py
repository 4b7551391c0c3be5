"""Locks on files of the node, and the removal of whole trees.

All locks are flocks: the kernel frees those of a process that dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.faults import shown, why

if TYPE_CHECKING:
    from typing import Self

    from hpml_orchestrator.staging.faults import Retry
    from hpml_orchestrator.staging.progress import OnProgress

CREATE_OR_OPEN = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_ATTEMPTS = 5
_POLL_SECONDS = 0.1
_POLLS_PER_REPORT = 10
_TEXT_BYTES = 4096


def try_lock(fd: int, *, exclusive: bool) -> bool:
    """Try to take a flock; False if another process holds it."""
    kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
    try:
        # flock, because the kernel releases it however its holder dies: no lock is ever stale.
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_locked(path: str) -> bool:
    """Return whether a process holds a flock on a file; False if there is no such file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    free = try_lock(fd, exclusive=True)
    if free:
        unlock(fd)
    else:
        os.close(fd)
    return not free


def unlock(fd: int) -> None:
    """Release a flock and close; explicit, because a forked child may share the descriptor."""
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


class BusyError(StagingError):
    """Another process held the lock for longer than this one may wait."""

    def __init__(self) -> None:
        super().__init__("another process is staging this")


class NameLock:
    """One stager per name and node: an exclusive flock on a file, as a context manager.

    While the lock is held, the holder is still copying. The file has its progress, for the
    processes that wait.

    Args:
        path: of the file.
        retry: waits, and is asked whether to stop.
        on_wait: called with the holder's progress about once a second.
        most_seconds: to wait before BusyError; None for no limit.
    """

    def __init__(
        self,
        path: str,
        retry: Retry,
        *,
        on_wait: OnProgress | None = None,
        most_seconds: float | None = None,
    ) -> None:
        self._path = path
        self._retry = retry
        self._on_wait = on_wait
        self._most = most_seconds
        self._fd = -1

    def __enter__(self) -> Self:
        try:
            self._fd = os.open(self._path, CREATE_OR_OPEN, 0o600)
        except OSError as error:
            raise StagingError(f"cannot lock {shown(self._path)}: {why(error)}") from error
        try:
            waited = 0
            while not try_lock(self._fd, exclusive=True):
                if self._most is not None and waited * _POLL_SECONDS >= self._most:
                    raise BusyError
                waited += 1
                self._retry.check_stop()
                if waited % _POLLS_PER_REPORT == 0:
                    self._report_holder()
                self._retry.sleep(_POLL_SECONDS)
            # The progress in the file is the previous holder's.
            os.ftruncate(self._fd, 0)
        except BaseException:
            unlock(self._fd)
            raise
        return self

    def tell(self, done: int, files: int, bytes_total: int, files_total: int) -> None:
        """Leave the progress for the processes that wait."""
        # Waiting processes read while this writes. The trailing space ends the last number even if
        # digits of a longer text still follow it; those go with the truncation.
        data = f"{done} {files} {bytes_total} {files_total} ".encode()
        with contextlib.suppress(OSError):  # a full disk must not hide why the copy failed
            os.pwrite(self._fd, data, 0)
            os.ftruncate(self._fd, len(data))

    def __exit__(self, *_: object) -> None:
        unlock(self._fd)

    def _report_holder(self) -> None:
        numbers = list(map(int, os.pread(self._fd, _TEXT_BYTES, 0).split()[:4]))
        if self._on_wait is not None and len(numbers) == 4:  # noqa: PLR2004 - as `tell` writes them
            self._on_wait(*numbers)


def remove_tree(path: str) -> None:
    """Remove a directory that others may be removing at the same time; no links are followed.

    Raises:
        OSError: it cannot be removed.
    """
    if os.path.islink(path):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        return
    for _ in range(_ATTEMPTS):
        try:
            _remove(path)
        except PermissionError:  # a job may have made its directories read-only
            _open_up(path)
        except OSError:
            continue  # a process was still creating files in it
        else:
            return
    _remove(path)


def _remove(path: str) -> None:
    def fault(_call: object, _path: str, found: object) -> None:
        error = found[1] if isinstance(found, tuple) else found
        if isinstance(error, BaseException) and not isinstance(error, FileNotFoundError):
            raise error

    words: dict[str, Any] = {"onexc" if sys.version_info >= (3, 12) else "onerror": fault}
    shutil.rmtree(path, **words)


def _open_up(path: str) -> None:
    with contextlib.suppress(OSError):
        os.chmod(path, 0o700)
    for directory, names, _ in os.walk(path):
        for name in names:
            full = os.path.join(directory, name)
            if not os.path.islink(full):
                with contextlib.suppress(OSError):
                    os.chmod(full, 0o700)
