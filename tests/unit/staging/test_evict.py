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
from hpml_orchestrator.staging import Bases, CopyStager, Room, StageRequest
from hpml_orchestrator.staging.auto import Outcome, stage_chosen
from hpml_orchestrator.staging.distribution import supply_for
from hpml_orchestrator.staging.space import room_at
from hpml_orchestrator.staging.store import Store, whole
from tests.patience import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpml_orchestrator.staging.source import Supply

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
    return CopyStager(key, bases=bases, room=plain_room, owner_pid=owner_pid, job_id="")


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
    """Stage a tree by a name of its own."""
    return StageRequest(tree.stem, str(tree), target="shm", keep=keeps)


@pytest.mark.parametrize("keeps", [True, False])
def test_the_least_recently_used_goes_first(
    small_tmpfs: Callable[[str], Path], trees: list[Path], keeps: bool
) -> None:
    """One of three has to go, and that is the oldest; the result tells."""
    base = small_tmpfs("size=8m")
    for number, used in ((0, 2000.0), (1, 1000.0), (2, 3000.0)):
        keep(base, trees[number], f"{number}.0", used)
    job = stager(base, "9.0")
    result = job.stage(request(trees[3], keeps=keeps))
    assert result.evicted == (str(trees[1]),)
    assert held(base) == {0, 2} | ({3} if keeps else set())
    assert list(base.glob("hpml-*/.trash-*")) == []
    job.cleanup()


def test_reuse_counts_as_use(small_tmpfs: Callable[[str], Path], trees: list[Path]) -> None:
    """An old entry that a job used lately stays."""
    base = small_tmpfs("size=8m")
    for number in range(3):
        keep(base, trees[number], f"{number}.0", 1000.0 + number)
    user = stager(base, "8.0")
    assert user.stage(request(trees[0])).reused
    user.cleanup()
    job = stager(base, "9.0")
    assert job.stage(request(trees[3])).evicted == (str(trees[1]),)
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


def test_what_the_same_shell_was_given_stays(
    small_tmpfs: Callable[[str], Path], trees: list[Path]
) -> None:
    """Each `hpml stage` of a script is a process of its own, and holds no lease when it is over."""
    base = small_tmpfs("size=8m")
    keep(base, trees[0], "1.0", 1000.0)
    shell = subprocess.Popen(["sleep", "600"])
    try:
        given = []
        for number in (1, 2):
            first = stager(base, "shell-1", owner_pid=shell.pid)
            given.append(Path(first.stage(request(trees[number])).path))
            first.leave()
        later = stager(base, "shell-1", owner_pid=shell.pid)
        assert later.stage(request(trees[3])).evicted == (str(trees[0]),)
        with pytest.raises(CapacityError, match="needs"):
            later.stage(request(trees[4]))
        later.leave()
        assert [(path / "data").stat().st_size for path in given] == [2 * MIB, 2 * MIB]
    finally:
        shell.kill()
        shell.wait()


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
    """There is no room for a second one beside it: it goes, or serves; no part is published."""
    base = small_tmpfs("size=8m")
    path = tmp_path / "a.tar"
    reused: list[bool] = []
    for seed in (1, 11 if changes else 1):
        if not reused or changes:
            make_tar(path, seed)
        bases = Bases(shm=str(base))
        job = CopyStager("shell-1", bases=bases, room=plain_room, job_id="", checks_source=True)
        found = job.stage(request(path, keeps=keeps))
        data = Path(found.path)
        assert sorted(one.name for one in data.iterdir()) == [f"{n}.bin" for n in range(5)]
        assert (data / "4.bin").read_bytes()[0] == seed + 4
        assert (found.files, found.kept) == (5, keeps)
        reused.append(found.reused)
        job.leave()
    assert reused == [False, not changes]


def test_an_archive_that_another_job_uses_is_found_though_no_other_fits(
    small_tmpfs: Callable[[str], Path], tmp_path: Path
) -> None:
    """It is there: how little room is left does not matter."""
    base = small_tmpfs("size=8m")
    path = tmp_path / "a.tar"
    make_tar(path, 1)
    first, second = stager(base, "1.0"), stager(base, "2.0")
    first.stage(request(path))
    found = second.stage(request(path))
    assert (found.reused, found.files) == (True, 5)
    for one in (first, second):
        one.cleanup()


def by_auto(
    base: Path,
    path: Path,
    key: str,
    *,
    keeps: bool = True,
    small: Path | None = None,
    owner_pid: int | None = None,
) -> tuple[CopyStager, Outcome]:
    """Stage an archive as `hpml stage --to auto` does; returns the stager, which still uses it."""
    bases = Bases(str(small) if small else "", str(base))
    job = CopyStager(
        key, bases=bases, room=disk_room, job_id="", checks_source=True, owner_pid=owner_pid
    )
    return job, stage_chosen(StageRequest("a", str(path), target="auto", keep=keeps), job, bases)


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


def test_auto_finds_what_the_same_shell_staged_without_keeping_it(
    small_tmpfs: Callable[[str], Path], tmp_path: Path
) -> None:
    """A second `hpml stage` of a script finds the copy of the first, though no second one fits."""
    base = small_tmpfs("size=8m")
    path = tmp_path / "a.tar"
    make_tar(path, 1)
    first, _ = by_auto(base, path, "shell-1", keeps=False)
    first.leave()
    second, found = by_auto(base, path, "shell-1", keeps=False)
    assert (found.result.reused, found.result.kept) == (True, False)
    second.cleanup()


@pytest.mark.parametrize("first", ["kept", "in use", "of a dead shell"])
def test_auto_counts_what_can_go(
    small_tmpfs: Callable[[str], Path], tmp_path: Path, first: str
) -> None:
    """Other data takes the place of a kept copy that nothing uses, or whose shell is dead."""
    base = small_tmpfs("size=8m")
    path, other = tmp_path / "a.tar", tmp_path / "b.tar"
    make_tar(path, 1)
    make_tar(other, 11)
    with subprocess.Popen(["true"]) as shell:
        owner = None if first != "of a dead shell" else shell.pid
        user, _ = by_auto(base, path, "1.0", keeps=first != "of a dead shell", owner_pid=owner)
    if first == "in use":
        with pytest.raises(CapacityError, match="needs"):
            by_auto(base, other, "2.0")
        user.cleanup()
        return
    user.leave() if owner else user.cleanup()
    job, found = by_auto(base, other, "2.0")
    evicted = (str(path),) if first == "kept" else ()
    assert (found.result.evicted, found.result.files) == (evicted, 5)
    job.cleanup()


def job_supply(path: Path, most: Callable[[], Room]) -> tuple[StageRequest, Supply]:
    """What a job's agent makes of an archive, as `node/stages.py` does."""
    one = request(path)
    return one, supply_for(
        one,
        "shared",
        node_index=0,
        nodes=1,
        attempt=str(path.parent),
        node="n0",
        should_stop=lambda: False,
        most=most,
    )


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
    found = job.stage(*job_supply(path, lambda: job.most_room(request(path))))
    assert (found.files, found.evicted) == (5, (str(trees[0]),))
    job.cleanup()


@pytest.mark.parametrize("frees", ["kept", "other"])
def test_a_part_of_an_archive_is_never_published(
    small_tmpfs: Callable[[str], Path], trees: list[Path], tmp_path: Path, frees: str
) -> None:
    """Kept data that could go, or room that comes free behind the counting, make no whole of it."""
    base = small_tmpfs("size=8m")
    for number in range(2 if frees == "kept" else 1):
        keep(base, trees[number], f"{number}.0", 1000.0)
    path, other = tmp_path / "a.tar", base / "other"
    make_tar(path, 1)
    other.write_bytes(bytes(2 * MIB if frees == "other" else 0))
    job = stager(base, "9.0")
    one, supply = job_supply(path, lambda: plain_room(str(base)))
    assert supply.plan().at_least
    other.unlink()
    error = CapacityError if frees == "kept" else StagingError
    with pytest.raises(error, match="at least" if frees == "kept" else "came free"):
        job.stage(one, supply)
    assert held(base) == ({0, 1} if frees == "kept" else {0})
    assert not list(base.glob("hpml-*/9.0/a"))
    job.cleanup()


def test_a_disk_that_is_full_to_the_last_byte_keeps_no_trace(
    small_tmpfs: Callable[[str], Path], trees: list[Path]
) -> None:
    """Not even the directory of the job can be made: nothing of hpml is there afterwards."""
    base = small_tmpfs("size=64k")
    with contextlib.suppress(OSError), open(base / "filler", "wb", buffering=0) as filler:
        while filler.write(bytes(4096)):
            pass
    job = stager(base, "1.0")
    with pytest.raises(StagingError, match="No space left"):
        job.stage(request(trees[0]))
    job.leave()
    assert os.listdir(base) == ["filler"]


@pytest.mark.parametrize("inodes", range(1, 13))
def test_a_target_without_inodes_keeps_no_trace(
    small_tmpfs: Callable[[str], Path], tmp_path: Path, inodes: int
) -> None:
    """Whichever file or directory of hpml is the one that cannot be made."""
    base = small_tmpfs(f"size=8m,nr_inodes={inodes}")
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "data").touch()
    job = stager(base, "1.0")
    with pytest.raises((StagingError, CapacityError)):
        job.stage(request(tree))
    job.leave()
    assert os.listdir(base) == []


def test_nothing_goes_in_vain(
    small_tmpfs: Callable[[str], Path], trees: list[Path], tmp_path: Path
) -> None:
    """What would not fit into the empty file system leaves the cache as it is."""
    base = small_tmpfs("size=8m")
    for number in range(3):
        keep(base, trees[number], f"{number}.0", 1000.0)
    big = tmp_path / "big"
    big.mkdir()
    (big / "data").write_bytes(bytes(9 * MIB))
    job = stager(base, "9.0")
    with pytest.raises(CapacityError):
        job.stage(request(big))
    assert held(base) == {0, 1, 2}
    job.cleanup()


def test_inodes_are_room_too(
    small_tmpfs: Callable[[str], Path], trees: list[Path], tmp_path: Path
) -> None:
    """Entries go for their inodes where bytes are plenty."""
    base = small_tmpfs("size=64m,nr_inodes=40")
    many = tmp_path / "many"
    many.mkdir()
    for number in range(12):
        (many / str(number)).touch()
    keep(base, many, "1.0", 1000.0)
    keep(base, trees[0], "2.0", 2000.0)
    (many / "another").touch()
    job = stager(base, "9.0")
    assert job.stage(request(many)).evicted == (str(many),)
    assert held(base) == {0}
    job.cleanup()


def fill_up(path: Path) -> None:
    """Write a file until the file system is full."""
    with path.open("wb", buffering=0) as stream, contextlib.suppress(OSError):
        while stream.write(bytes(4096)):
            pass


def test_a_job_can_begin_where_kept_data_took_the_last_block(
    small_tmpfs: Callable[[str], Path], trees: list[Path], tmp_path: Path
) -> None:
    """Not even an owner's record fits: kept data goes first, and the result tells."""
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
from hpml_orchestrator.staging import Bases, CopyStager, StageRequest
stager = CopyStager("shell-1", bases=Bases(shm=sys.argv[1]), owner_pid=os.getppid(), job_id="")
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
    store, entry = Store(str(base)), str(Path(path).resolve().parent)
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
from hpml_orchestrator.staging import Bases, CopyStager, StageRequest
base, source, key = sys.argv[1:4]
for number in range(40):
    job = CopyStager(f"{key}.{number}", bases=Bases(shm=base), job_id="")
    path = job.stage(StageRequest("data", source, target="shm", keep=True)).path
    for _ in range(5):
        assert os.path.getsize(f"{path}/data") == 1000, "evicted under a reader"
    job.cleanup()
"""
EVICT = """
import os, sys, time
from hpml_orchestrator.staging.store import Store
store = Store(sys.argv[1])
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
    eventually(lambda: not list(base.glob("hpml-*/.cache/*/data")), "nobody uses it any more")
    stop.touch()
    removed = [int(evictor.communicate(timeout=120)[0]) for evictor in evictors]
    assert sum(removed) > 0
    assert list(base.glob("hpml-*/.trash-*")) == []


def test_a_full_cache_of_another_user_is_not_looked_at(base: Path, trees: list[Path]) -> None:
    """Only the caller's own root is ever a place to make room in."""
    other = base / "hpml-4242"
    entry = other / ".cache" / ("0" * 32) / "data"
    entry.mkdir(parents=True)
    (other / ".hpml-staging").touch()
    store = Store(str(base))
    assert store.idle() == []
    assert not store.remove(str(entry.parent))
    assert entry.is_dir()
    assert whole(str(entry)) is None
    assert trees[0].is_dir()
