"""Small files of the kernel, and the mounts that /proc/self/mountinfo lists."""

from __future__ import annotations

import os
from typing import NamedTuple

__all__ = ["Mount", "mounts", "plain_path", "read"]

_MAX_BYTES = 4 * 1024**2
_ESCAPES = (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\"))
_MOUNT_FIELDS = 6  # at least, before the separator


class Mount(NamedTuple):
    """A mounted file system.

    Attributes:
        device: number of its device, MAJOR:MINOR.
        path: mount point.
        fstype: type of the file system.
    """

    device: str
    path: str
    fstype: str


def read(path: str, most: int = _MAX_BYTES) -> str:
    """Return the text of a file, at most so many bytes of it.

    Raises:
        OSError: it cannot be read.
    """
    with open(path, "rb") as stream:
        return os.fsdecode(stream.read(most))


def mounts(mountinfo: str) -> list[Mount]:
    """Return the mounts in the text of /proc/self/mountinfo, see proc(5); torn lines are left out.

    The kernel escapes newlines in paths but nothing else that `splitlines` would split at.
    """
    found = []
    for line in mountinfo.split("\n"):
        head, _, tail = line.partition(" - ")
        fields = head.split(" ")
        if len(fields) >= _MOUNT_FIELDS:
            found.append(Mount(fields[2], plain_path(fields[4]), tail.partition(" ")[0]))
    return found


def plain_path(path: str) -> str:
    r"""Return a path of mountinfo or mountstats without its octal escapes.

    >>> plain_path(r"/data\040sets")
    '/data sets'
    """
    for escape, character in _ESCAPES:
        path = path.replace(escape, character)
    return path
