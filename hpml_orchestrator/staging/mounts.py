"""The mounts of a process, as the kernel tells them in mountinfo (proc_pid_mountinfo(5))."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

__all__ = ["Mount", "parse_mounts", "read_mounts"]


class Mount(NamedTuple):
    """A line of mountinfo: device, the directory of it that is mounted, where, and the type."""

    device: str
    root: str
    point: str
    kind: str


def read_mounts(path: str) -> list[Mount]:
    """Return the mounts in a mountinfo file in order; none where it cannot be read."""
    try:
        with open(path, "rb") as stream:
            return parse_mounts(os.fsdecode(stream.read()))
    except OSError:
        return []


def parse_mounts(text: str) -> list[Mount]:
    """Return the mounts of a mountinfo text in order."""
    mounts = []
    for line in text.split("\n"):  # alone: users' mount points may have other ends of lines
        left, _, right = line.partition(" - ")
        fields = left.split(" ")
        if len(fields) > 4 and right:  # noqa: PLR2004 - up to the mount point
            root, point = _unescaped(fields[3]), _unescaped(fields[4])
            mounts.append(Mount(fields[2], root, point, right.split(" ")[0]))
    return mounts


def _unescaped(text: str) -> str:
    r"""Return a path of mountinfo with its octal escapes resolved.

    >>> _unescaped(r"/a\040b")
    '/a b'
    """
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)
