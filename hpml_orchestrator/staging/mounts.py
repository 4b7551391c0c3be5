"""The mounts of a process, as the kernel tells them in mountinfo (proc_pid_mountinfo(5)).

Which types of file systems are the node's own, and which are served to it.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

__all__ = [
    "MEMORY_TYPES",
    "SHARED_TYPES",
    "Mount",
    "is_own_type",
    "is_served_type",
    "parse_mounts",
    "read_mounts",
]

MEMORY_TYPES = frozenset({"tmpfs", "devtmpfs", "ramfs"})
"""They keep their files in the node's memory."""

SHARED_TYPES = frozenset(
    "9p afs beegfs beegfs_nodev ceph cifs fhgfs fuse.ceph-fuse fuse.dfuse fuse.glusterfs "
    "fuse.juicefs fuse.sshfs gfs2 gpfs lustre ncpfs nfs nfs4 ocfs2 orangefs panfs pvfs2 smb3 smbfs "
    "virtiofs wekafs".split()
)
"""Nodes share them: nothing is staged to them."""

_UNKNOWN_TYPES = frozenset({"", "autofs"})


class Mount(NamedTuple):
    """A line of mountinfo.

    Attributes:
        device: major and minor number.
        root: the directory of it that is mounted.
        point: where.
        kind: the type.
        options: of the file system.
    """

    device: str
    root: str
    point: str
    kind: str
    options: tuple[str, ...] = ()


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
            kind, *_, options = right.split(" ")
            mounts.append(Mount(fields[2], root, point, kind, tuple(options.split(","))))
    return mounts


def is_served_type(kind: str) -> bool:
    """Tell whether what is read there comes from outside of the node.

    >>> is_served_type("lustre"), is_served_type("fuse.s3fs"), is_served_type("ext4")
    (True, True, False)
    """
    return kind in SHARED_TYPES or kind == "cvmfs2" or kind.startswith("fuse.")


def is_own_type(kind: str) -> bool:
    """Tell whether it is storage of the node itself, read by its kernel.

    >>> is_own_type("xfs"), is_own_type("tmpfs"), is_own_type("fuseblk"), is_own_type("9p")
    (True, True, False, False)
    """
    return not (is_served_type(kind) or kind in _UNKNOWN_TYPES or kind.startswith("fuse"))


def _unescaped(text: str) -> str:
    r"""Return a path of mountinfo with its octal escapes resolved.

    >>> _unescaped(r"/a\040b")
    '/a b'
    """
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)
