"""Which types of file systems are the node's own, and which are served to it."""

from __future__ import annotations

__all__ = [
    "MEMORY_TYPES",
    "SHARED_TYPES",
    "is_own_type",
    "is_served_type",
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
