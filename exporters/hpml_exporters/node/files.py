"""Small files of the kernel, read whole in one go, and the paths in them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["MAX_BYTES", "Mounted", "mounted", "plain_path", "read"]

MAX_BYTES = 4 * 1024**2
_ESCAPES = (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\"))
_FLAGS = os.O_RDONLY | os.O_CLOEXEC
_MOUNT_FIELDS = 6  # at least, before the separator


def read(path: str, most: int = MAX_BYTES) -> bytes:
    """Return what a file holds, at most so many bytes of it.

    Raises:
        OSError: it cannot be read.
    """
    fd = os.open(path, _FLAGS)
    try:
        data = os.read(fd, min(most, 65536))
        if not data:
            return data
        parts = [data]
        size = len(data)
        # procfs gives a page or so at a time: only an empty answer is the end.
        while size < most and (data := os.read(fd, min(most - size, 65536))):
            parts.append(data)
            size += len(data)
        return b"".join(parts)
    finally:
        os.close(fd)


class Mounted(NamedTuple):
    """A mount.

    Attributes:
        device: number of the file system's device, MAJOR:MINOR.
        path: where it is mounted, as the file writes it: see `plain_path`.
        kind: type of the file system.
    """

    device: str
    path: str
    kind: str


def mounted(mountinfo: str) -> Iterator[Mounted]:
    """Yield the mounts in the text of /proc/self/mountinfo (proc(5)), without torn lines.

    Of what ends a line elsewhere the kernel escapes the newline alone: users' mount points may have
    carriage returns and line separators of Unicode.
    """
    for line in mountinfo.split("\n"):
        head, _, tail = line.partition(" - ")
        fields = head.split(" ")
        if len(fields) >= _MOUNT_FIELDS:
            yield Mounted(fields[2], fields[4], tail.partition(" ")[0])


def plain_path(path: str) -> str:
    r"""Return a path as mountinfo and mountstats write it, with octal numbers, as it is.

    >>> plain_path(r"/data\040sets")
    '/data sets'
    """
    if "\\" in path:
        for escape, character in _ESCAPES:
            path = path.replace(escape, character)
    return path
