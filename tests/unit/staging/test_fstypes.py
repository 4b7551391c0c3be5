"""One list says which file systems are the node's own and which are served to it."""

from __future__ import annotations

import pytest

from hpml_orchestrator.staging import space


@pytest.mark.parametrize(
    ("kinds", "served", "own"),
    [
        ("nfs nfs4 lustre gpfs beegfs ceph wekafs fuse.sshfs fuse.s3fs", True, False),
        ("9p virtiofs cvmfs2 gfs2", True, False),
        ("fuse fuseblk autofs", False, False),
        ("ext4 xfs btrfs overlay tmpfs ramfs", False, True),
    ],
)
def test_types_are_known_as_mountinfo_names_them(kinds: str, served: bool, own: bool) -> None:
    """What is served leaves the page cache once it is read; what is own may be read in place."""
    for kind in kinds.split():
        assert (space.is_served_type(kind), space.is_own_type(kind)) == (served, own), kind


@pytest.mark.parametrize(
    "kind", "gfs2 virtiofs 9p beegfs_nodev fuse.ceph-fuse fuse.juicefs fuse.dfuse".split()
)
def test_nothing_is_staged_to_what_nodes_share(kind: str) -> None:
    """Else a copy for each node would go to one place."""
    assert kind in space.SHARED_TYPES


def test_a_type_that_is_not_known_is_neither() -> None:
    """Without mountinfo nothing is promised."""
    assert not space.is_served_type("")
    assert not space.is_own_type("")
