"""Reading the small files of procfs and cgroupfs with as few system calls as there can be."""

from __future__ import annotations

import os

__all__ = ["numbers", "read", "read_once", "subdirectories", "text"]

_SIZE = 1 << 16
_FLAGS = os.O_RDONLY | os.O_CLOEXEC


def read(path: str) -> bytes | None:
    """Return what a file holds now; None when it, or the process or group behind it, is gone.

    Raises:
        PermissionError: it is there, and not for us.
    """
    try:
        descriptor = os.open(path, _FLAGS)
    except PermissionError:
        raise
    except OSError:
        return None
    try:
        parts = [os.read(descriptor, _SIZE)]
        # A file of cgroup.procs may come in pieces smaller than what was asked for.
        while parts[-1]:
            parts.append(os.read(descriptor, _SIZE))
    except PermissionError:
        raise
    except OSError:  # ENODEV: the group was removed; ESRCH: the process ended
        return None
    finally:
        os.close(descriptor)
    return parts[0] if len(parts) == 2 else b"".join(parts)  # noqa: PLR2004 - the end is empty


def read_once(path: str, size: int = 4096) -> bytes | None:
    """Return what one read gives of a file that is smaller; None when it is gone.

    Raises:
        PermissionError: it is there, and not for us.
    """
    try:
        descriptor = os.open(path, _FLAGS)
        try:
            return os.read(descriptor, size)
        finally:
            os.close(descriptor)
    except PermissionError:
        raise
    except OSError:
        return None


def text(path: str) -> str:
    """Return what a file holds as one stripped line; empty when it cannot be read."""
    try:
        return (read(path) or b"").decode("utf-8", "replace").strip()
    except PermissionError:
        return ""


def numbers(path: str) -> list[int] | None:
    """Return the numbers in a file, one a line; None when it is gone or not for us."""
    try:
        data = read(path)
    except PermissionError:
        return None
    if data is None:
        return None
    try:
        return [int(word) for word in data.split()]
    except ValueError:
        return []


def subdirectories(path: str) -> list[str] | None:
    """Return the names of the directories in a directory; None when it is gone or not for us."""
    try:
        with os.scandir(path) as entries:
            return [one.name for one in entries if one.is_dir(follow_symlinks=False)]
    except OSError:
        return None
