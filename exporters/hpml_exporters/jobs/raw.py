"""Reading the small files of procfs and cgroupfs with as few system calls as there can be."""

from __future__ import annotations

import os
import resource

__all__ = ["Kept", "numbers", "read", "read_once", "subdirectories", "text"]

_SIZE = 1 << 16
# The kernel fills one page per read of a list; what is shorter by more than a record was all.
_WHOLE = 4000
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
        data = part = os.read(descriptor, _SIZE)
        while len(part) >= _WHOLE:
            part = os.read(descriptor, _SIZE)
            data += part
    except PermissionError:
        raise
    except OSError:  # ENODEV: the group was removed; ESRCH: the process ended
        return None
    finally:
        os.close(descriptor)
    return data


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


class Kept:
    """Files that are read again and again, kept open: that halves what a reading costs.

    Args:
        most: files that are kept open at once; further ones are opened each time.
    """

    def __init__(self, most: int = 400) -> None:
        self._most = min(most, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 3)
        self._open: dict[str, int] = {}

    def read(self, path: str) -> bytes:
        """Return what a file of cgroupfs holds now; nothing when it is gone or not for us."""
        descriptor = self._open.get(path)
        if descriptor is None:
            if len(self._open) >= self._most:
                try:
                    return read(path) or b""
                except PermissionError:
                    return b""
            try:
                descriptor = self._open[path] = os.open(path, _FLAGS)
            except OSError:
                return b""
        try:
            return os.pread(descriptor, _SIZE, 0)
        except OSError:
            self._drop(path)
            return b""

    def forget(self, directory: str) -> None:
        """Close the files in a directory and below it."""
        for path in [path for path in self._open if path.startswith(f"{directory}/")]:
            self._drop(path)

    def close(self) -> None:
        """Close all of them."""
        for path in list(self._open):
            self._drop(path)

    def _drop(self, path: str) -> None:
        descriptor = self._open.pop(path, None)
        if descriptor is not None:
            os.close(descriptor)


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
