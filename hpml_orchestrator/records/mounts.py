"""The mounts of a process, by mountinfo of procfs (proc_pid_mountinfo(5))."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

_FIELDS = 6  # at least, before the separator


class Mount(NamedTuple):
    """A line of mountinfo.

    Attributes:
        device: major and minor number.
        root: the directory of the device that is mounted.
        point: mount point.
        kind: type of the file system.
        options: of the file system.
        here: options of this mount; a file system that the kernel made read-only after an error is
            `ro`, and its mounts stay `rw`.
    """

    device: str
    root: str
    point: str
    kind: str
    options: tuple[str, ...] = ()
    here: tuple[str, ...] = ()


def read_mounts(path: str) -> list[Mount]:
    """Return the mounts in a mountinfo file in order; none if it cannot be read."""
    try:
        with open(path, "rb") as stream:
            return parse_mounts(os.fsdecode(stream.read()))
    except OSError:
        return []


def parse_mounts(text: str) -> list[Mount]:
    """Return the mounts of a mountinfo text in order; torn lines are left out.

    The kernel escapes newlines in paths but nothing else that `splitlines` would split at.
    """
    mounts = []
    for line in text.split("\n"):
        left, _, right = line.partition(" - ")
        fields = left.split(" ")
        if len(fields) >= _FIELDS and right:
            kind, _, rest = right.partition(" ")
            options = tuple(rest.rpartition(" ")[2].split(","))
            root, point = plain_path(fields[3]), plain_path(fields[4])
            here = tuple(fields[5].split(","))
            mounts.append(Mount(fields[2], root, point, kind, options, here))
    return mounts


def plain_path(path: str) -> str:
    r"""Return a path of mountinfo or mountstats without its octal escapes.

    >>> plain_path(r"/data\040sets")
    '/data sets'
    """
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), path)
