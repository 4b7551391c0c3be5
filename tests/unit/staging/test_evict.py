"""Room is made by removing what nothing uses, the least recently used first, and never more."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpml_orchestrator.errors import CapacityError, StagingError
from hpml_orchestrator.staging.auto import StageOutcome, stage_chosen
from hpml_orchestrator.staging.request import Bases, StageRequest
from hpml_orchestrator.staging.space import Room, room_at
from hpml_orchestrator.staging.stage import CopyStager
from hpml_orchestrator.staging.store import NodeStore
from tests.patience import eventually

if TYPE_CHECKING:
    from collections.abc import Callable


MIB = 1 << 20


@pytest.fixture
def trees(tmp_path: Path) -> list[Path]:
    """Give five trees of 2 MiB each."""
    made = []
    for number in range(5):
        tree = tmp_path / f"tree{number}"
        tree.mkdir()
        (tree / "data").write_bytes(bytes([number]) * 2 * MIB)
        made.append(tree)
    return made


def plain_room(path: str) -> Room:
    """The file system's own room: memory limits of this machine play no part."""
    return room_at(path, cgroup_root="/nonexistent")


def disk_room(path: str) -> Room:
    """The same, as if it were a disk, which may be filled."""
    return dataclasses.replace(plain_room(path), in_memory=False)


def stager(base: Path, key: str, *, owner_pid: int | None = None) -> CopyStager:
    """A job's stager on a small file system."""
    bases = Bases(shm=str(base))
    return CopyStager(key, bases=bases, room=plain_room, owner_pid=owner_pid)


def keep(base: Path, tree: Path, key: str, used: float) -> None:
    """Leave a tree in the cache, last used at some time."""
    job = stager(base, key)
    path = job.stage(StageRequest("data", str(tree), target="shm", keep=True)).path
    lease = Path(path).resolve().parent / ".lease"
    job.cleanup()
    os.utime(lease, (used, used))


def held(base: Path) -> set[int]:
    """Which of the trees are kept."""
    found = base.glob("hpml-*/.cache/*/data/data")
    return {path.read_bytes()[0] for path in found if "@" not in str(path)}


def request(tree: Path, *, keeps: bool = True) -> StageRequest:
    """Stage a tree by its own name."""
    return StageRequest(tree.stem, str(tree), target="shm", keep=keeps)


@pytest.mark.parametrize("keeps", [True, False])
def test_the_least_recently_used_goes_first(
    small_tmpfs: Callable[[str], Path], trees: list[Path], keeps: bool
) -> None:
    """One of three has to go, and that is the oldest; the result names it."""
    base = small_tmpfs("size=8m")
    for number, used in ((0, 2000.0), (1, 1000.0), (2, 3000.0)):
        keep(base, trees[number], f"{number}.0", used)
    job = stager(base, "9.0")
    result = job.stage(request(trees[3], keeps=keeps))
    assert result.evicted == (str(trees[1]),)
    assert held(base) == {0, 2} | ({3} if keeps else set())
    assert list(base.glob("hpml-*/.trash-*")) == []
    job.cleanup()


def test_what_is_leased_stays(small_tmpfs: Callable[[str], Path], trees: list[Path]) -> None:
    """The oldest is in use: the next one goes; with all in use nothing fits, and all stay."""
    base = small_tmpfs("size=8m")
    for number in range(3):
        keep(base, trees[number], f"{number}.0", 1000.0 + number)
    users = [stager(base, "8.0")]
    users[0].stage(request(trees[0]))
    job = stager(base, "9.0")
    assert job.stage(request(trees[3])).evicted == (str(trees[1]),)
    users.append(stager(base, "7.0"))
    users[1].stage(request(trees[2]))
    with pytest.raises(CapacityError, match="needs"):
        job.stage(request(trees[4]))
    assert held(base) == {0, 2, 3}
    for one in (*users, job):
        one.cleanup()


def make_tar(path: Path, seed: int) -> None:
    """Write an archive of five files of 1 MiB."""
    with tarfile.open(path, "w") as archive:
        for number in range(5):
            info = tarfile.TarInfo(f"{number}.bin")
            info.size = MIB
            archive.addfile(info, io.BytesIO(bytes([seed + number]) * MIB))


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("changes", [True, False])
def test_an_archive_that_this_shell_has_already_comes_whole_again(
    small_tmpfs: Callable[[str], Path], tmp_path: Path, keeps: bool, changes: bool
) -> None:
    """There is no room for two: the old one is removed or reused; no part is published."""
    base = small_tmpfs("size=8m")
    path = tmp_path / "a.tar"
    reused: list[bool] = []
    for seed in (1, 11 if changes else 1):
        if not reused or changes:
            make_tar(path, seed)
        bases = Bases(shm=str(base))
        job = CopyStager("shell-1", bases=bases, room=plain_room)
        found = job.stage(request(path, keeps=keeps))
        data = Path(found.path)
        assert sorted(one.name for one in data.iterdir()) == [f"{n}.bin" for n in range(5)]
        assert (data / "4.bin").read_bytes()[0] == seed + 4
        assert (found.files, found.kept) == (5, keeps)
        reused.append(found.reused)
        job.leave()
    assert reused == [False, not changes]


def by_auto(
    base: Path,
    path: Path,
    key: str,
    *,
    keeps: bool = True,
    small: Path | None = None,
    owner_pid: int | None = None,
) -> tuple[CopyStager, StageOutcome]:
    """Stage an archive as `hpml stage --to auto` does; returns the stager, which still uses it."""
    bases = Bases(str(small) if small else "", str(base))
    job = CopyStager(key, bases=bases, room=disk_room, owner_pid=owner_pid)
    return job, stage_chosen(StageRequest("a", str(path), target="auto", keep=keeps), job)


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("uses", [True, False])
def test_auto_finds_a_kept_copy_that_fills_most_of_the_disk(
    small_tmpfs: Callable[[str], Path], tmp_path: Path, keeps: bool, uses: bool
) -> None:
    """The same data needs no more room, whether or not another job uses the copy now."""
    base, small = small_tmpfs("size=8m"), small_tmpfs("size=1m")
    path = tmp_path / "a.tar"
    make_tar(path, 1)
    first, _ = by_auto(base, path, "1.0")
    if not uses:
        first.cleanup()
    second, found = by_auto(base, path, "2.0", keeps=keeps, small=small)
    assert (found.result.reused, found.result.kept, found.result.files) == (True, True, 5)
    assert found.choice is not None
    assert (found.choice.target, found.choice.why) == ("local", "a copy is there already")
    for one in (first, second):
        one.cleanup()


def test_kept_data_goes_for_an_archive_of_a_job(
    small_tmpfs: Callable[[str], Path], trees: list[Path], tmp_path: Path
) -> None:
    """All of it is counted, though it takes the place of what is kept."""
    base = small_tmpfs("size=8m")
    for number in range(2):
        keep(base, trees[number], f"{number}.0", 1000.0 + number)
    path = tmp_path / "a.tar"
    make_tar(path, 1)
    job = stager(base, "9.0")
    found = job.stage(request(path))
    assert (found.files, found.evicted) == (5, (str(trees[0]),))
    job.cleanup()


def test_a_part_of_an_archive_is_never_published(
    small_tmpfs: Callable[[str], Path], trees: list[Path], tmp_path: Path
) -> None:
    """One larger than the file system is counted in part, and removes nothing."""
    base = small_tmpfs("size=8m")
    for number in range(2):
        keep(base, trees[number], f"{number}.0", 1000.0)
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        for number in range(20):
            info = tarfile.TarInfo(f"f{number}")
            info.size = MIB
            tar.addfile(info, io.BytesIO(bytes(MIB)))
    job = stager(base, "9.0")
    with pytest.raises(CapacityError, match="at least 9"):
        job.stage(request(path))
    assert held(base) == {0, 1}
    assert not list(base.glob("hpml-*/9.0/a"))
    job.cleanup()


def test_a_disk_that_is_full_to_the_last_byte_keeps_no_trace(
    small_tmpfs: Callable[[str], Path], trees: list[Path]
) -> None:
    """Not even the directory of the job can be made: nothing of hpml is there afterwards."""
    base = small_tmpfs("size=64k")
    fill_up(base / "filler")
    job = stager(base, "1.0")
    with pytest.raises(StagingError, match="No space left"):
        job.stage(request(trees[0]))
    job.leave()
    assert os.listdir(base) == ["filler"]


def fill_up(path: Path) -> None:
    """Write a file until the file system is full."""
    with path.open("wb", buffering=0) as stream, contextlib.suppress(OSError):
        while stream.write(bytes(4096)):
            pass


def test_a_job_can_begin_where_kept_data_took_the_last_block(
    small_tmpfs: Callable[[str], Path], trees: list[Path], tmp_path: Path
) -> None:
    """Not even an owner's record fits: kept data is removed first, and the result names it."""
    base = small_tmpfs("size=8m")
    for number in range(2):
        keep(base, trees[number], f"{number}.0", 1000.0 + number)
    fill_up(base / "filler")
    small = tmp_path / "small"
    small.mkdir()
    (small / "data").write_bytes(b"\7")
    job = stager(base, "9.0")
    assert job.stage(request(small)).evicted == (str(trees[0]),)
    assert held(base) == {1, 7}
    job.cleanup()


LEAVE = """
import os, sys
from hpml_orchestrator.staging.request import Bases, StageRequest
from hpml_orchestrator.staging.stage import CopyStager
stager = CopyStager("shell-1", bases=Bases(shm=sys.argv[1]), owner_pid=os.getppid())
print(stager.stage(StageRequest("data", sys.argv[2], target="shm", keep=True)).path, flush=True)
stager.leave()
"""


def test_data_of_a_living_shell_stays(
    small_tmpfs: Callable[[str], Path], trees: list[Path]
) -> None:
    """What a shell staged stays while it lives, without any process that holds a lease."""
    base = small_tmpfs("size=6m")
    shell = subprocess.Popen(
        ["/bin/sh", "-c", '"$@"; read line', "sh", sys.executable, "-c", LEAVE, base, trees[0]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert shell.stdout is not None
    path = shell.stdout.readline().strip()
    keep(base, trees[1], "2.0", time.time() + 60)
    store, entry = NodeStore(str(base)), str(Path(path).resolve().parent)
    assert entry not in store.idle()
    assert not store.remove(entry), "it came into use after somebody looked"
    job = stager(base, "9.0")
    assert job.stage(request(trees[2])).evicted == (str(trees[1]),)
    assert Path(path, "data").read_bytes()[0] == 0
    shell.communicate("\n")
    last = stager(base, "10.0")
    assert last.stage(request(trees[3])).evicted == (str(trees[0]),)
    assert not os.path.lexists(path), "the dead shell's directory goes as well"
    for one in (job, last):
        one.cleanup()


USE = """
import os, sys, time
from hpml_orchestrator.staging.request import Bases, StageRequest
from hpml_orchestrator.staging.stage import CopyStager
base, source, key = sys.argv[1:4]
for number in range(40):
    job = CopyStager(f"{key}.{number}", bases=Bases(shm=base))
    path = job.stage(StageRequest("data", source, target="shm", keep=True)).path
    for _ in range(5):
        assert os.path.getsize(f"{path}/data") == 1000, "evicted under a reader"
    job.cleanup()
"""
EVICT = """
import os, sys, time
from hpml_orchestrator.staging.store import NodeStore
store = NodeStore(sys.argv[1])
removed = 0
print("ready", flush=True)
while not os.path.exists(sys.argv[2]):
    removed += sum(store.remove(entry) for entry in store.idle())
print(removed, flush=True)
"""


def test_eviction_races_with_readers(
    base: Path, tmp_path: Path, child: Callable[..., subprocess.Popen[str]]
) -> None:
    """Two evict whatever they may while three jobs come and go: no reader loses its data."""
    source = tmp_path / "small"
    source.mkdir()
    (source / "data").write_bytes(b"x" * 1000)
    stop = tmp_path / "stop"
    evictors = [child(EVICT, base, stop) for _ in range(2)]
    for evictor in evictors:
        assert evictor.stdout is not None
        assert evictor.stdout.readline() == "ready\n"
    users = [child(USE, base, source, name) for name in "abc"]
    assert [user.wait(timeout=120) for user in users] == [0, 0, 0]
    eventually(lambda: not list(base.glob("hpml-*/.cache/*/data")), "no job uses it")
    stop.touch()
    removed = [int(evictor.communicate(timeout=120)[0]) for evictor in evictors]
    assert sum(removed) > 0
    assert list(base.glob("hpml-*/.trash-*")) == []
