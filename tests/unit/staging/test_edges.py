"""What is rare: no more threads, files that lie, long names, many removers, a full disk midway."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpml_orchestrator.errors import CapacityError, StagingError
from hpml_orchestrator.staging import (
    Bases,
    CopyOptions,
    CopyStager,
    LocalSupply,
    Room,
    StageRequest,
    plan,
)
from hpml_orchestrator.staging import copy as copier
from hpml_orchestrator.staging.archives import TarSource
from hpml_orchestrator.staging.copy import copy
from hpml_orchestrator.staging.faults import Retry
from hpml_orchestrator.staging.files import remove_tree
from hpml_orchestrator.staging.manifest import verify
from hpml_orchestrator.staging.plan import HardLink, Symlink, scan_tree
from hpml_orchestrator.staging.progress import Progress
from hpml_orchestrator.staging.sources import FileSource, TreeSource, open_source
from hpml_orchestrator.staging.space import room_at
from hpml_orchestrator.staging.work import entry_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpml_orchestrator.staging.copy import Copied
    from hpml_orchestrator.staging.plan import Plan

MIB = 1 << 20
RETRY = Retry(lambda _seconds: None, lambda: False)


def plain_room(path: str) -> Room:
    """The file system's own room: memory limits of this machine play no part."""
    return room_at(path, cgroup_root="/nonexistent")


def same(left: Path | str, right: Path | str) -> bool:
    """Compare two trees with diff."""
    return subprocess.run(["diff", "-r", "-q", left, right], check=False).returncode == 0


@pytest.mark.parametrize("allowed", [0, 3])
def test_a_job_that_may_have_no_more_threads_copies_all(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: int
) -> None:
    """The limit of tasks in a cgroup is met while the source is slow: it goes on with fewer."""
    source = tmp_path / "slow"
    for number in range(500):
        below = source / f"d{number % 20}"
        below.mkdir(parents=True, exist_ok=True)
        (below / f"f{number}").write_bytes(b"%d" % number)
    for name in ("readv", "listdir", "stat", "lstat"):
        real = getattr(os, name)

        def slow(*words: object, real: Callable[..., object] = real, **options: object) -> object:
            time.sleep(0.002)
            return real(*words, **options)

        monkeypatch.setattr(os, name, slow)
    for module in (copier, plan):
        monkeypatch.setattr(module, "readers_for", lambda _path: 32)
    begun = threading.Thread.start
    asked: list[int] = []

    def start(thread: threading.Thread) -> None:
        asked.append(1)
        if threading.active_count() > allowed:  # a fault: this test has one thread itself
            raise RuntimeError("can't start new thread")
        begun(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    options = CopyOptions(processes=1)
    stager = CopyStager("1", bases=Bases(shm=str(base)), options=options)
    result = stager.stage(StageRequest("data", str(source), target="shm"))
    monkeypatch.undo()
    assert asked
    assert same(source, result.path)
    stager.cleanup()


@pytest.mark.parametrize("processes", [1, 2])
def test_files_that_only_say_that_they_are_empty_are_refused(
    stager: CopyStager, processes: int
) -> None:
    """Those of /proc have no size but contents: they would arrive empty."""
    stager.options = CopyOptions(processes=processes)
    with pytest.raises(StagingError, match="boot_id: says that it is empty but is not"):
        stager.stage(StageRequest("data", "/proc/sys/kernel/random", target="shm"))
    with pytest.raises(StagingError, match="version: says that it is empty but is not"):
        stager.stage(StageRequest("data", "/proc/version", target="shm"))
    assert "data" not in os.listdir(stager.area("shm").path)


class Meddled(LocalSupply):
    """A supply to which something happens before or after it fills."""

    def __init__(
        self,
        source: TreeSource | TarSource,
        before: Callable[[], object] = bool,
        after: Callable[[], object] = bool,
    ) -> None:
        super().__init__(source)
        self.fills = 0
        self._before = before
        self._after = after

    def fill(self, plan: Plan, partial_dir: str, *, retry: Retry, progress: Progress) -> Copied:
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
    job = CopyStager("1.0", bases=Bases(shm=str(base)), room=plain_room, job_id="")
    job.stage(StageRequest("old", str(old), target="shm", keep=True))
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
    tree = TreeSource(str(new), RETRY)
    supply = Meddled(tree, before=lambda: other.write_bytes(bytes(size)))
    supply._options = CopyOptions(processes=processes)
    job = CopyStager("2.0", bases=Bases(shm=str(base)), room=plain_room, job_id="")
    request = StageRequest("data", str(new), target="shm")
    if has_cache:
        result = job.stage(request, supply)
        assert result.evicted == (str(tmp_path / "old"),)
        assert same(new, result.path)
        assert supply.fills == 2
    else:
        with pytest.raises(StagingError, match="No space left"):
            job.stage(request, supply)
        assert supply.fills == 1
        assert not list(base.glob("hpml-*/.cache/*@2.0/.data.partial*"))
    assert other.stat().st_size == size
    job.cleanup()


def test_what_the_cache_gave_is_measured_before_it_is_tried_again(
    small_tmpfs: Callable[[str], Path], tmp_path: Path
) -> None:
    """Where another one takes that too, no second copy is begun."""
    base = small_tmpfs("size=8m")
    kept_tree(base, tmp_path)
    new = tmp_path / "new"
    new.mkdir()
    (new / "data").write_bytes(os.urandom(4 * MIB))
    first, second = base / "of another user", base / "of the same"
    supply = Meddled(TreeSource(str(new), RETRY), lambda: first.write_bytes(bytes(3 * MIB)))

    def room(path: str) -> Room:
        found = plain_room(path)
        if first.exists() and not second.exists() and not list(base.glob("hpml-*/.cache/*/data")):
            second.write_bytes(bytes(2 * MIB))  # in the moment after the cache made room
        return found

    job = CopyStager("2.0", bases=Bases(shm=str(base)), room=room, job_id="")
    with pytest.raises(CapacityError, match=r"needs 4\.\d MiB"):
        job.stage(StageRequest("data", str(new), target="shm"), supply)
    assert second.exists()
    assert supply.fills == 1
    assert not list(base.glob("hpml-*/.cache/*@2.0/.data.partial*"))
    job.cleanup()


def test_an_archive_replaced_after_its_last_byte_is_another_one(base: Path, tmp_path: Path) -> None:
    """What is remembered of the source is what was read, so that the next look tells them apart."""
    for name in ("one", "two"):
        (tmp_path / name).write_text(name)
        words = ["tar", "cf", f"{name}.tar", "--transform", "s/.*/file/", name]
        subprocess.run(words, cwd=tmp_path, check=True)
    archive = tmp_path / "one.tar"
    os.utime(archive, (1, 1))
    source = TarSource(str(archive), "tar", RETRY, most_bytes=1 << 30)
    supply = Meddled(source, after=lambda: os.replace(tmp_path / "two.tar", archive))
    stager = CopyStager("1", bases=Bases(shm=str(base)), checks_source=True)
    request = StageRequest("data", str(archive), target="shm")
    path = Path(stager.stage(request, supply).path)
    assert (path / "file").read_text() == "one"
    assert not stager.stage(request).reused
    assert (path / "file").read_text() == "two"
    stager.cleanup()


def test_the_manifest_counts_as_room(small_tmpfs: Callable[[str], Path], tmp_path: Path) -> None:
    """Names alone take room: found before anything is copied."""
    many = tmp_path / "many"
    many.mkdir()
    for number in range(3000):
        (many / f"{number:0250d}").touch()
    base = small_tmpfs("size=512k")
    stager = CopyStager("1", bases=Bases(shm=str(base)), room=plain_room)
    supply = Meddled(TreeSource(str(many), RETRY))
    with pytest.raises(CapacityError):
        stager.stage(StageRequest("data", str(many), target="shm"), supply)
    assert supply.fills == 0
    need = scan_tree(str(many), RETRY).need(4096)
    roomy = CopyStager("1", bases=Bases(shm=str(small_tmpfs("size=64m"))), room=plain_room)
    path = Path(roomy.stage(StageRequest("data", str(many), target="shm")).path).resolve()
    written = (path.parent / ".data.manifest").stat().st_size
    assert written <= need.bytes <= written + 4 * 4096
    stager.cleanup()
    roomy.cleanup()


def test_names_may_be_as_long_as_they_can(base: Path, tmp_path: Path) -> None:
    """255 bytes each, 250 directories deep: copied, verified, found again, removed."""
    source = tmp_path / "deep"
    below = source
    for _ in range(250):
        below /= "d"
    below.mkdir(parents=True)
    (below / "bottom").write_text("x")
    (source / ("n" * 255)).write_text("long")
    (source / ("é" * 127)).mkdir()
    (source / ("é" * 127) / ("m" * 255)).write_text("longer")
    job = CopyStager("1", bases=Bases(shm=str(base)), job_id="")
    request = StageRequest("data", str(source), target="shm", keep=True)
    result = job.stage(request)
    assert same(source, result.path)
    assert verify(result.path).count == 0
    job.cleanup()
    assert job.stage(request).reused
    job.cleanup()


REMOVE = """
import os, sys
from hpml_orchestrator.staging.files import remove_tree
print("ready", flush=True)
sys.stdin.readline()
remove_tree(sys.argv[1])
assert not os.path.lexists(sys.argv[1])
"""


def test_several_may_remove_the_same_tree(tmp_path: Path) -> None:
    """Jobs that begin at once all find what a dead one left; none of them stumbles."""
    top = tmp_path / "left"
    for number in range(60):
        below = top / f"d{number}"
        below.mkdir(parents=True)
        for other in range(100):
            (below / str(other)).touch()
    words = [sys.executable, "-c", REMOVE, str(top)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    crew = [subprocess.Popen(words, text=True, **pipes) for _ in range(4)]  # type: ignore[call-overload]
    for one in crew:
        assert one.stdout.readline() == "ready\n"
    for one in crew:
        one.stdin.write("\n")
        one.stdin.flush()
    assert [one.wait(timeout=120) for one in crew] == [0] * 4
    for one in crew:
        one.communicate()
    assert not top.exists()


def test_a_bind_mount_below_the_source_is_part_of_it(
    stager: CopyStager, source: Path, small_tmpfs: Callable[[str], Path]
) -> None:
    """Data on another file system below the source is copied too; equal inodes are two files."""
    point = small_tmpfs("size=1m")
    (point / "there").write_text("other")
    inside = source / "mounted"
    inside.mkdir()
    subprocess.run(["mount", "--bind", point, inside], check=True)
    try:
        result = stager.stage(StageRequest("data", str(source), target="shm"))
        assert same(source, result.path)
    finally:
        subprocess.run(["umount", inside], check=True)
    shutil.rmtree(inside)


def copy_file(path: Path, base: Path, before: Callable[[], object] = bool) -> None:
    """Plan, let something happen, and copy."""
    source = FileSource(str(path), RETRY)
    plan = source.plan()
    before()
    copy(
        plan,
        source,
        str(base),
        options=CopyOptions(),
        retry=RETRY,
        progress=Progress(None),
    )


@pytest.mark.parametrize("size", [100, 3 * MIB // 2, 5 * MIB])
def test_a_file_that_is_replaced_by_its_equal_is_noticed(
    base: Path, tmp_path: Path, size: int
) -> None:
    """Same size, same time, and nobody looks at a single file's directory: the inode tells."""
    file, other = tmp_path / "file", tmp_path / "other"
    for path in (file, other):
        path.write_bytes(os.urandom(size))
        os.utime(path, (9, 9))
    with pytest.raises(StagingError, match="file: changed while it was copied"):
        copy_file(file, base, lambda: os.replace(other, file))


@pytest.mark.parametrize("size", [100, 3 * MIB // 2, 5 * MIB])
def test_a_change_behind_the_last_read_is_noticed(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """What changes between the last byte and the last look is not the state that was planned."""
    file = tmp_path / "file"
    file.write_bytes(os.urandom(size))
    left = [size]
    for name in ("readv", "preadv"):
        real = getattr(os, name)

        def read(*words: object, real: Callable[..., int] = real) -> int:
            count = real(*words)
            left[0] -= count
            if left[0] == 0:
                file.touch()
            return count

        monkeypatch.setattr(os, name, read)
    with pytest.raises(StagingError, match="file: changed while it was copied"):
        copy_file(file, base)
    assert left == [0]


@pytest.mark.parametrize("kind", ["tree", "tar"])
def test_set_bits_never_arrive(base: Path, tmp_path: Path, kind: str) -> None:
    """On nothing: the top, directories, files of a block, of several, of pieces."""
    source = tmp_path / "source"
    (source / "below").mkdir(parents=True)
    for name, size in (("none", 0), ("small", 10), ("blocks", 3 * MIB // 2), ("pieces", 5 * MIB)):
        (source / "below" / name).write_bytes(bytes(size))
        (source / "below" / name).chmod(0o6755)
    for path in (source / "below", source):
        path.chmod(0o7755)
    request = StageRequest("data", str(source), target="shm")
    if kind == "tar":
        archive = tmp_path / "x.tar"
        subprocess.run(["tar", "cf", archive, "-C", source, "."], check=True)
        request = StageRequest("data", str(archive), target="shm")
    stager = CopyStager("1", bases=Bases(shm=str(base)))
    path = Path(stager.stage(request).path)
    found = {one: one.stat().st_mode & 0o7777 for one in (path, *path.rglob("*"))}
    assert len(found) == 6
    assert set(found.values()) == {0o755}
    stager.cleanup()


@pytest.mark.parametrize("name", ["x.tar", "x.tar.gz", "x.zip"])
def test_an_archive_that_changes_behind_the_last_read_is_noticed(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """While its last bytes are read, after it was opened and looked at."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "file").write_bytes(os.urandom(300))
    kind = {"x.tar": "tar", "x.tar.gz": "gztar", "x.zip": "zip"}[name]
    archive = Path(shutil.make_archive(str(tmp_path / "x"), kind, tmp_path / "in"))
    stager = CopyStager("1", bases=Bases(shm=str(base)))
    request = StageRequest("data", str(archive), target="shm")
    supply = LocalSupply(open_source(request, RETRY, plain_room(str(base))))
    supply.plan()
    real = os.preadv

    def read(*words: object) -> int:
        count = real(*words)  # type: ignore[arg-type]
        archive.touch()
        return count

    planned = supply.plan()
    monkeypatch.setattr(supply, "plan", lambda: planned)
    monkeypatch.setattr(os, "preadv", read)
    with pytest.raises(StagingError, match="changed while it was copied"):
        stager.stage(request, supply)
    assert "data" not in os.listdir(stager.area("shm").path)
    stager.cleanup()


def test_everything_that_a_look_tells_is_in_the_key(source: Path) -> None:
    """Links' texts and the top's mode too, whatever times say."""
    scanned = scan_tree(str(source), RETRY)
    plans = [
        replace(scanned, symlinks=[Symlink("l", "a", 0)], hard_links=[HardLink("h", "one.bin")])
    ]
    plans.append(replace(plans[0], symlinks=[Symlink("l", "b", 0)]))
    plans.append(replace(plans[0], hard_links=[HardLink("h", "a/two.txt")]))
    plans.append(replace(plans[0], top=scanned.top._replace(mode=0o700)))
    assert len({entry_key(plan, source=str(source), kind="tree") for plan in plans}) == 4


def test_only_the_link_is_removed(source: Path, tmp_path: Path) -> None:
    """What it leads to stays."""
    link = tmp_path / "link"
    link.symlink_to(source)
    remove_tree(str(link))
    assert not os.path.lexists(link)
    assert (source / "one.bin").exists()
