"""Room is made by removing what nothing uses, the least recently used first, and never more."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import tarfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpml_orchestrator.errors import CapacityError, StagingError
from hpml_orchestrator.records.job import Stage
from hpml_orchestrator.staging.copy import CopyOptions, CopyProgress
from hpml_orchestrator.staging.distribution import StageOutcome, stage_chosen
from hpml_orchestrator.staging.plan import scan_tree
from hpml_orchestrator.staging.request import Bases, Retry
from hpml_orchestrator.staging.source import TreeSource
from hpml_orchestrator.staging.space import Room, room_at
from hpml_orchestrator.staging.stage import CopyStager, LocalSupply
from tests.patience import eventually
from tests.unit.staging.conftest import entries, same

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    from hpml_orchestrator.staging.plan import CopyPlan

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


def stager(base: Path, key: str = "") -> CopyStager:
    """A job's stager on a small file system, or a person's."""
    return CopyStager(key, bases=Bases(shm=str(base)), room=plain_room)


def keep(base: Path, tree: Path, key: str, used: float) -> None:
    """Leave a tree in the cache, last used at some time."""
    job = stager(base, key)
    path = job.stage(Stage("data", str(tree), target="shm", keep=True)).path
    lease = Path(path).parent / ".lease"
    job.cleanup()
    os.utime(lease, (used, used))


def held(base: Path) -> set[int]:
    """Which of the trees are kept."""
    return {(entry / "data/data").read_bytes()[0] for entry in entries(base)}


def request(tree: Path, *, keeps: bool = True) -> Stage:
    """Stage a tree by its own name."""
    return Stage(tree.stem, str(tree), target="shm", keep=keeps)


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


@pytest.mark.parametrize("key", ["", "7.0"])
@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("changes", [True, False])
def test_an_archive_that_was_staged_already_comes_whole_again(
    small_tmpfs: Callable[[str], Path], tmp_path: Path, key: str, keeps: bool, changes: bool
) -> None:
    """There is no room for two: a job's old one is removed or reused, a person's stays."""
    base = small_tmpfs("size=8m")
    path = tmp_path / "a.tar"
    make_tar(path, 1)
    job = stager(base, key)
    assert not job.stage(request(path, keeps=keeps or not key)).reused
    job.leave()
    if changes:
        make_tar(path, 11)
    if changes and not key:
        with pytest.raises(CapacityError):
            job.stage(request(path))
        assert len(entries(base)) == 1
        return
    found = job.stage(request(path, keeps=keeps or not key))
    data = Path(found.path)
    assert sorted(one.name for one in data.iterdir()) == [f"{n}.bin" for n in range(5)]
    assert (data / "4.bin").read_bytes()[0] == (15 if changes else 5)
    assert (found.files, found.kept) == (5, keeps or not key)
    # What goes with a job goes with its last process.
    assert found.reused == (not changes and found.kept)
    job.leave()


def by_auto(
    base: Path,
    path: Path,
    key: str,
    *,
    keeps: bool = True,
    small: Path | None = None,
) -> tuple[CopyStager, StageOutcome]:
    """Stage an archive as `hpml stage --to auto` does; returns the stager, which still uses it."""
    bases = Bases(str(small) if small else "", str(base))
    job = CopyStager(key, bases=bases, room=disk_room)
    return job, stage_chosen(Stage("a", str(path), target="auto", keep=keeps), job)


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
    assert entries(base, job="9.0") == []
    job.cleanup()


@pytest.mark.parametrize("inodes", [3, 4, 0])
def test_a_disk_that_is_full_to_the_last_byte_keeps_no_trace(
    small_tmpfs: Callable[[str], Path], trees: list[Path], inodes: int
) -> None:
    """Not even entry or lease can be made, or no data: nothing of hpml is there afterwards."""
    base = small_tmpfs(f"size=64k,nr_inodes={inodes}")
    fill_up(base / "filler")
    job = stager(base, "1.0")
    with pytest.raises((StagingError, CapacityError), match=r"No space left|available 0 bytes"):
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


def test_data_of_a_person_stays(small_tmpfs: Callable[[str], Path], trees: list[Path]) -> None:
    """What was staged by hand is never removed for other data, though no process uses it."""
    base = small_tmpfs("size=6m")
    person = stager(base)
    path = person.stage(request(trees[0])).path
    person.leave()
    os.utime(Path(path).parent / ".lease", (1000.0, 1000.0))
    keep(base, trees[1], "2.0", time.time() + 60)
    job = stager(base, "9.0")
    assert job.stage(request(trees[2])).evicted == (str(trees[1]),)
    assert Path(path, "data").read_bytes()[0] == 0
    with pytest.raises(CapacityError, match="needs"):
        job.stage(request(trees[3]))
    job.cleanup()
    last = stager(base, "10.0")
    assert last.stage(request(trees[0])).reused
    last.cleanup()
    last = stager(base, "11.0")
    assert last.stage(request(trees[4])).evicted == (str(trees[2]),)
    last.cleanup()


USE = """
import os, sys, time
from hpml_orchestrator.records.job import Stage
from hpml_orchestrator.staging.request import Bases
from hpml_orchestrator.staging.stage import CopyStager
base, source, key = sys.argv[1:4]
for number in range(40):
    job = CopyStager(f"{key}.{number}", bases=Bases(shm=base))
    path = job.stage(Stage("data", source, target="shm", keep=True)).path
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
    removed += sum(store.remove(os.path.basename(entry)) for entry in store.idle())
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
    eventually(lambda: not entries(base), "no job uses it")
    stop.touch()
    removed = [int(evictor.communicate(timeout=120)[0]) for evictor in evictors]
    assert sum(removed) > 0


RETRY = Retry(lambda _seconds: None, lambda: False)


class Meddled(LocalSupply):
    """A supply to which something happens before or after it fills."""

    def __init__(
        self,
        request: Stage,
        before: Callable[[], object] = bool,
        after: Callable[[], object] = bool,
    ) -> None:
        super().__init__(request, TreeSource(request.source, RETRY))
        self.fills = 0
        self._before = before
        self._after = after

    def fill(
        self, plan: CopyPlan, partial_dir: str, *, retry: Retry, progress: CopyProgress
    ) -> list[bytes]:
        self.fills += 1
        if self.fills == 1:
            self._before()
        done = super().fill(plan, partial_dir, retry=retry, progress=progress)
        self._after()
        return done


def kept_tree(base: Path, tmp_path: Path) -> None:
    """Leave 3 MiB in the cache that nothing uses."""
    old = tmp_path / "old"
    old.mkdir()
    (old / "data").write_bytes(bytes(3 * MIB))
    job = CopyStager("1.0", bases=Bases(shm=str(base)), room=plain_room)
    job.stage(Stage("old", str(old), target="shm", keep=True))
    job.cleanup()


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("has_cache", [True, False])
def test_a_disk_that_fills_up_midway_takes_the_cache_first(
    small_tmpfs: Callable[[str], Path], tmp_path: Path, processes: int, *, has_cache: bool
) -> None:
    """What another one took since the check is made up by kept data that nothing uses, once."""
    base = small_tmpfs("size=8m")
    if has_cache:
        kept_tree(base, tmp_path)
    new = tmp_path / "new"
    new.mkdir()
    for number in range(8):
        (new / str(number)).write_bytes(os.urandom(MIB // 2))
    other = base / "of another user"
    size = 3 * MIB if has_cache else 6 * MIB
    request = Stage("data", str(new), target="shm")
    supply = Meddled(request, before=lambda: other.write_bytes(bytes(size)))
    supply._options = CopyOptions(processes=processes)
    job = CopyStager("2.0", bases=Bases(shm=str(base)), room=plain_room)
    if has_cache:
        result = job.stage(request, supply)
        assert result.evicted == (str(tmp_path / "old"),)
        assert same(new, result.path)
        assert supply.fills == 2
    else:
        with pytest.raises(StagingError, match="No space left"):
            job.stage(request, supply)
        assert supply.fills == 1
        assert not list(base.glob("hpml-*/*@2.0"))
    assert other.stat().st_size == size
    job.cleanup()


def test_the_manifest_counts_as_room(small_tmpfs: Callable[[str], Path], tmp_path: Path) -> None:
    """Names alone take room: found before anything is copied."""
    many = tmp_path / "many"
    many.mkdir()
    for number in range(3000):
        (many / f"{number:0250d}").touch()
    base = small_tmpfs("size=512k")
    stager = CopyStager("1", bases=Bases(shm=str(base)), room=plain_room)
    supply = Meddled(Stage("data", str(many), target="shm"))
    with pytest.raises(CapacityError):
        stager.stage(supply.request, supply)
    assert supply.fills == 0
    need = scan_tree(str(many), RETRY).need(4096)
    roomy = CopyStager("1", bases=Bases(shm=str(small_tmpfs("size=64m"))), room=plain_room)
    path = Path(roomy.stage(Stage("data", str(many), target="shm")).path).resolve()
    written = (path.parent / ".data.manifest").stat().st_size
    assert written <= need.bytes <= written + 4 * 4096
    stager.cleanup()
    roomy.cleanup()
