"""Target `auto` on this machine: real directories, real sizes, real times."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest

from hpml_orchestrator.errors import CapacityError, InputError
from hpml_orchestrator.records.job import Stage
from hpml_orchestrator.staging.distribution import Choice, own_storage, stage_chosen
from hpml_orchestrator.staging.request import IN_PLACE, Bases, name_of
from hpml_orchestrator.staging.space import Room
from hpml_orchestrator.staging.stage import CopyStager

GIB = 1 << 30


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    root.mkdir()
    for number in range(40):
        (root / f"{number}.bin").write_bytes(os.urandom(1000))
    return root


@pytest.fixture
def bases(tmp_path: Path) -> Bases:
    for name in ("ram", "disk"):
        (tmp_path / name).mkdir()
    return Bases(str(tmp_path / "ram"), str(tmp_path / "disk"))


def chosen(source: Path, bases: Bases, free: int = GIB, storage: str = "") -> Choice:
    """Stage with so much free memory; the source counts as remote."""

    def room(path: str) -> Room:
        there = free if path == bases.shm else 64 * free
        return Room(there, "the test's", None, 4096, in_memory=path == bases.shm)

    stager = CopyStager("1", bases=bases, room=room)
    request = Stage("data", str(source), target="auto")
    found = stage_chosen(request, stager, storage=lambda _path: storage)
    stager.cleanup()
    assert found.choice is not None
    assert {found.choice.target, *dict(found.choice.others)} == {"shm", "local", IN_PLACE}
    return found.choice


def test_the_first_place_that_fits_is_chosen(tree: Path, bases: Bases) -> None:
    """Memory if half of what is free is enough, else the disk, else nothing is moved."""
    found = chosen(tree, bases)
    assert (found.target, dict(found.others)["local"]) == ("shm", "shm comes first")
    found = chosen(tree, bases, 300_000)
    assert (found.target, "half of what is free" in found.others[0][1]) == ("local", True)
    found = chosen(tree, bases, 1000)
    assert (found.target, found.why) == (IN_PLACE, "nothing fits")


def test_own_storage_is_used_in_place(tree: Path, bases: Bases) -> None:
    """What is on this node's memory or disk already stays, however large."""
    found = chosen(tree, bases, storage="memory (tmpfs)")
    assert (found.target, "memory (tmpfs) already" in found.why) == (IN_PLACE, True)


def test_places_that_cannot_be_used_are_named(tree: Path, tmp_path: Path) -> None:
    """A missing directory, and a node without a local one, are reasons and not errors."""
    found = chosen(tree, Bases(str(tmp_path / "nowhere"), ""))
    assert (found.target, found.why) == (IN_PLACE, "nothing fits")
    assert "no such directory" in dict(found.others)["shm"]
    assert dict(found.others)["local"] == "this node has no such directory"


def test_archives_must_go_somewhere(tree: Path, tmp_path: Path, bases: Bases) -> None:
    """They are never used in place; without any target the request is invalid."""
    archive = tmp_path / "a.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(tree, ".")
    assert dict(chosen(archive, bases).others)[IN_PLACE] == "it must be unpacked"
    with pytest.raises(CapacityError, match="shm: needs .*local: needs.*must be unpacked"):
        chosen(archive, bases, 1000)
    with pytest.raises(InputError, match="shm: .*no such directory.*; local: ") as caught:
        chosen(archive, Bases(str(tmp_path / "nowhere"), ""))
    assert not isinstance(caught.value, CapacityError)


MOUNTS = """\
20 1 {device} / / rw - {kind} /dev/sda1 rw
"""


@pytest.mark.parametrize(
    ("kind", "turns", "expected"),
    [
        ("ext4", "0", "disk (ext4)"),
        ("ext4", "1", ""),
        ("xfs", None, "disk (xfs)"),
        ("tmpfs", None, "memory (tmpfs)"),
        ("nfs4", None, ""),
        ("lustre", "0", ""),
        ("fuse.sshfs", None, ""),
        ("virtiofs", None, ""),
    ],
)
def test_whose_storage_it_is(tmp_path: Path, kind: str, turns: str | None, expected: str) -> None:
    """Memory and disks that do not turn are the node's own; a partition asks its disk."""
    device = os.stat(tmp_path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    proc = tmp_path / "proc" / "self"
    proc.mkdir(parents=True)
    (proc / "mountinfo").write_text(MOUNTS.format(device=number, kind=kind))
    disk = tmp_path / "sys" / "devices" / "sda"
    (disk / "sda1").mkdir(parents=True)
    (disk / "queue").mkdir()
    if turns is not None:
        (disk / "queue" / "rotational").write_text(f"{turns}\n")
    (tmp_path / "sys" / "dev" / "block").mkdir(parents=True)
    (tmp_path / "sys" / "dev" / "block" / number).symlink_to(disk / "sda1")
    found = own_storage(
        str(tmp_path), proc_root=str(tmp_path / "proc"), sys_root=str(tmp_path / "sys")
    )
    assert found == expected


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("/scratch/digits", "digits"),
        ("data/", "data"),
        ("ImageNet-1k.tar.gz", "imagenet_1k"),
        ("a.b.zip", "a_b"),
        ("train.sqfs", "train_sqfs"),
        ("2024", "data_2024"),
        ("/", "data"),
        ("é", "data"),
        ("\udcff\udcfe", "data"),
        ("x" * 300, "x" * 31),
        ("_a_", "a"),
    ],
)
def test_names_are_made_of_paths(source: str, name: str) -> None:
    """Always valid, and what a person would say."""
    assert name_of(source) == name
    assert Stage(name, "/a").name == name
