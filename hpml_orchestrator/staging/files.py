"""Small things done to files: lock them, remove whole trees of them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import sys
from typing import Any

__all__ = ["is_locked", "partial_path", "remove_tree", "try_lock", "unlock"]

_ATTEMPTS = 5


def try_lock(fd: int, *, exclusive: bool) -> bool:
    """Take a flock without waiting; False when another holder is in the way."""
    kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_locked(path: str) -> bool:
    """Say whether anyone holds a flock on a file; False when there is no such file."""
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


def partial_path(directory: str, name: str) -> str:
    """Return a path for data that is not whole yet; one of a kind."""
    return f"{directory}/.{name}.partial-{os.getpid()}-{secrets.token_hex(4)}"


def remove_tree(path: str) -> None:
    """Remove a directory that may be removed by others at the same time; no links are followed.

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
        except PermissionError:  # a job may have taken its own right to write
            _open_up(path)
        except OSError:
            continue  # somebody still wrote into it
        else:
            return
    _remove(path)


def _remove(path: str) -> None:
    """Remove a directory; what others remove at the same time is no error."""

    def fault(_call: object, _path: str, found: Any) -> None:
        error = found[1] if isinstance(found, tuple) else found
        if not isinstance(error, FileNotFoundError):
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
