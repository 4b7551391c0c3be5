"""Target `auto` on this machine: real directories, real sizes, real times."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpml_orchestrator.errors import CapacityError, InputError
from hpml_orchestrator.staging.auto import (
    NO_ROOM,
    Candidate,
    choose,
    choose_target,
    own_storage,
)
from hpml_orchestrator.staging.faults import Retry
from hpml_orchestrator.staging.plan import Plan, scan_tree
from hpml_orchestrator.staging.request import (
    IN_PLACE,
    Bases,
    StageRequest,
    name_of,
    names_of,
)
from hpml_orchestrator.staging.space import Need, Room, room_at

RETRY = Retry(lambda _seconds: None, lambda: False)


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


def far(_path: str) -> str:
    """A file system that this test cannot have: one far away."""
    return ""


def ask(source: Path, kind: str = "auto") -> StageRequest:
    return StageRequest("data", str(source), kind, "local")


def test_the_rooms_are_this_machines(tree: Path, bases: Bases) -> None:
    """A small tree from afar goes to the first place, and the plan sees the largest room."""
    seen: list[Room] = []

    def plan(room: Room) -> Plan:
        seen.append(room)
        return scan_tree(str(tree), RETRY)

    found = choose_target(ask(tree), bases, plan, own=far)
    assert found.target == "shm"
    assert seen[0].bytes > 40_000
    assert seen[0].block_bytes == room_at(bases.shm).block_bytes
    small = Room(1000, "the test's", None, 4096, in_memory=True)

    def room(path: str) -> Room:
        return small if path == bases.shm else room_at(path)

    assert choose_target(ask(tree), bases, plan, room=room, own=far).target == "local"
    assert seen[-1].bytes > small.bytes


def test_own_storage_is_not_even_looked_at(tree: Path, bases: Bases) -> None:
    """What is on this node's memory or disk already stays, however large; nobody counts it."""

    def plan(_room: Room) -> Plan:
        raise AssertionError

    found = choose_target(ask(tree), bases, plan, own=lambda _path: "memory (tmpfs)")
    assert found.target == IN_PLACE


def test_places_that_cannot_be_used_are_named(tree: Path, tmp_path: Path) -> None:
    """A missing directory, and a node without a local one, are reasons and no errors."""
    none = Bases(str(tmp_path / "nowhere"), "")
    found = choose_target(ask(tree), none, lambda _room: scan_tree(str(tree), RETRY), own=far)
    assert (found.target, found.why) == (IN_PLACE, "nothing fits")
    assert dict(found.others)["shm"].endswith("No such file or directory")
    assert dict(found.others)["local"] == "this node has no such directory"


def test_archives_must_go_somewhere(tmp_path: Path, bases: Bases) -> None:
    """Nothing fits, and unpacked it must be."""
    archive = tmp_path / "a.tar"
    archive.write_bytes(b"")
    with pytest.raises(CapacityError, match="must be unpacked"):
        choose_target(
            ask(archive),
            bases,
            lambda _room: Plan("", scan_tree(str(tmp_path), RETRY).top),
            room=lambda _path: NO_ROOM,
            own=far,
        )


GIB = 1 << 30


def place(target: str, need: int, free: int, inodes: int | None = None) -> Candidate:
    room = Room(free, "a limit", inodes, 4096, in_memory=target == "shm")
    return Candidate(target, Need(need, 10), room)


@pytest.mark.parametrize(
    ("places", "target", "why_not"),
    [
        ([place("shm", GIB, 2 * GIB), place("local", 1, GIB)], "shm", "shm comes first"),
        (
            [place("shm", GIB + 1, 2 * GIB), place("local", GIB + 1, GIB + 1)],
            "local",
            "needs 1.0 GiB, and half of what is free is 1.0 GiB (a limit)",
        ),
        (
            [place("shm", 1, GIB, 9), place("local", 1, GIB)],
            "local",
            "needs 10 inodes, and 9 are free",
        ),
        ([place("local", GIB, GIB), Candidate("shm")], "local", "its room is not known"),
        ([Candidate("shm", refused="no"), place("local", 2, 1)], IN_PLACE, "no"),
    ],
)
def test_the_first_place_that_fits_is_chosen(
    places: list[Candidate], target: str, why_not: str
) -> None:
    """Memory to half of what is free, a disk to all of it, and neither beyond its inodes."""
    found = choose("/scratch/data", places)
    assert found.target == target
    assert found.others[0][1] == why_not
    assert {target, *dict(found.others)} == {"shm", "local", IN_PLACE}
    assert found.why


def test_what_must_be_unpacked_fits_or_is_an_error() -> None:
    """It is never used where it is; without any place it is the request that is wrong."""
    fits = choose("/scratch/a.tar", [place("shm", 1, GIB)], usable=False)
    assert fits.others == ((IN_PLACE, "it must be unpacked"),)
    large = [place("shm", 3 * GIB, GIB), place("local", 3 * GIB, GIB)]
    with pytest.raises(CapacityError, match="shm: needs 3.0 GiB.*local: needs.*must be unpacked"):
        choose("/scratch/a.tar", large, usable=False)
    nowhere = [Candidate(one, refused="is not there") for one in ("shm", "local")]
    with pytest.raises(InputError, match="shm: is not there; local: is not there") as caught:
        choose("/scratch/a.tar", nowhere, usable=False)
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
    assert StageRequest(name, "/a").name == name


def test_equal_names_are_an_error_with_both() -> None:
    """Two directories of one name cannot both be staged by it."""
    assert names_of(["a/train", "a/val"]) == ["train", "val"]
    with pytest.raises(InputError, match=r"a/train and b/Train\.tar would both be called train"):
        names_of(["a/train", "b/Train.tar"])
