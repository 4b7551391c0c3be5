"""The mounts of a process, read from mountinfo (proc_pid_mountinfo(5))."""

from __future__ import annotations

import contextlib
import os
import re
from typing import NamedTuple

SHARED_TYPES = frozenset(
    "9p afs beegfs beegfs_nodev ceph cifs fhgfs fuse.ceph-fuse fuse.dfuse fuse.glusterfs "
    "fuse.juicefs fuse.sshfs gfs2 gpfs lustre ncpfs nfs nfs4 ocfs2 orangefs panfs pvfs2 smb3 smbfs "
    "virtiofs wekafs".split()
)
"""Shared file systems; data are never staged to them."""

_UNKNOWN_TYPES = frozenset({"", "autofs"})

_PRIVATE = ("/tmp", "/var/tmp", "/dev/shm", "/run")  # noqa: S108 - where no job may write
_EXPORTS = ("/var/lib/nfs/etab", "/etc/exports")
_FIELDS = 6  # minimum before the separator


class Mount(NamedTuple):
    """One line of mountinfo.

    Attributes:
        device: major and minor number.
        root: the mounted directory of the device.
        point: mount point.
        kind: type of the file system.
        options: of the file system.
        here: options of this mount; if the kernel makes a file system read-only after an error, its
            `options` change to `ro`, but the mounts stay `rw`.
    """

    device: str
    root: str
    point: str
    kind: str
    options: tuple[str, ...] = ()
    here: tuple[str, ...] = ()


def read_mounts(path: str) -> list[Mount]:
    """Return the mounts in a mountinfo file in order; empty if it cannot be read."""
    try:
        with open(path, "rb") as stream:
            return parse_mounts(os.fsdecode(stream.read()))
    except OSError:
        return []


def parse_mounts(text: str) -> list[Mount]:
    """Return the mounts in a mountinfo text in order; skip incomplete lines.

    The kernel escapes newlines in paths, but no other line separator of `splitlines`.
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
    r"""Decode the octal escapes in a path of mountinfo or mountstats.

    >>> plain_path(r"/data\040sets")
    '/data sets'
    """
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), path)


def is_served_type(kind: str) -> bool:
    """Return whether a file system of this type has its data outside the node.

    >>> is_served_type("lustre"), is_served_type("fuse.s3fs"), is_served_type("ext4")
    (True, True, False)
    """
    return kind in SHARED_TYPES or kind == "cvmfs2" or kind.startswith("fuse.")


def is_own_type(kind: str) -> bool:
    """Return whether a file system of this type is the node's own storage.

    >>> is_own_type("xfs"), is_own_type("tmpfs"), is_own_type("fuseblk"), is_own_type("9p")
    (True, True, False, False)
    """
    return not (is_served_type(kind) or kind in _UNKNOWN_TYPES or kind.startswith("fuse"))


def file_system_type(path: str, *, proc_root: str = "/proc") -> str:
    """Return a path's file system type as in mountinfo ("tmpfs", "nfs4"); empty if unknown.

    Find the mount by device number, or by the longest mount point if that is missing (btrfs).
    """
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    real = os.path.realpath(path).rstrip("/") + "/"
    best, longest = "", -1
    for mount in read_mounts(f"{proc_root}/self/mountinfo"):
        # On btrfs, files of a subvolume have a device number that mountinfo does not contain. Use
        # the longest mount point, and of equal ones the last.
        if mount.device == wanted:
            return mount.kind
        point = mount.point.rstrip("/") + "/"
        if real.startswith(point) and len(point) >= longest:
            best, longest = mount.kind, len(point)
    return best


def private_directory(path: str) -> str:
    """Return the machine's own directory, such as /tmp, that contains a path; empty if none."""
    real = os.path.realpath(path)
    return next((top for top in _PRIVATE if f"{real}/".startswith(f"{top}/")), "")


def own_file_system(path: str) -> str:
    """Return the type of this machine's own file system that a path is or will be on.

    Empty if other machines may see it: a file server, an NFS export of this machine, or an unknown
    type.
    """
    real = os.path.realpath(path)
    for table in _EXPORTS:
        with contextlib.suppress(OSError), open(table, encoding="utf-8", errors="replace") as lines:
            words = [line.split(maxsplit=1)[0].strip('"') for line in lines if line.strip()]
            if any(f"{real}/".startswith(f"{word.rstrip('/')}/") for word in words):
                return ""
    while not os.path.exists(real):
        real = os.path.dirname(real)
    kind = file_system_type(real)
    return kind if is_own_type(kind) else ""
