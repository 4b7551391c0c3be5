"""What is rare: no more threads, files that lie, long names, many removers, a full disk midway."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpml_orchestrator.errors import CapacityError, StagingError
from hpml_orchestrator.staging.copy import CopyOptions, copy
from hpml_orchestrator.staging.faults import Retry
from hpml_orchestrator.staging.plan import scan_tree
from hpml_orchestrator.staging.progress import CopyProgress
from hpml_orchestrator.staging.request import Bases, StageRequest
from hpml_orchestrator.staging.source import TreeSource
from hpml_orchestrator.staging.space import Room, room_at
from hpml_orchestrator.staging.stage import CopyStager
from hpml_orchestrator.staging.supply import LocalSupply, open_source
from tests.unit.staging.conftest import same

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpml_orchestrator.staging.plan import CopyPlan

MIB = 1 << 20
RETRY = Retry(lambda _seconds: None, lambda: False)


def plain_room(path: str) -> Room:
    """The file system's own room: memory limits of this machine play no part."""
    return room_at(path, cgroup_root="/nonexistent")


@pytest.mark.parametrize("processes", [1, 2])
def test_files_that_only_say_that_they_are_empty_are_refused(
    stager: CopyStager, processes: int
) -> None:
    """Those of /proc have no size but contents: they would arrive empty."""
    stager.options = CopyOptions(processes=processes)
    with pytest.raises(StagingError, match="boot_id: has size 0 but is not empty"):
        stager.stage(StageRequest("data", "/proc/sys/kernel/random", target="shm"))
    with pytest.raises(StagingError, match="version: has size 0 but is not empty"):
        stager.stage(StageRequest("data", "/proc/version", target="shm"))
    assert "data" not in os.listdir(stager.area("shm").path)


class Meddled(LocalSupply):
    """A supply to which something happens before or after it fills."""

    def __init__(
        self,
        request: StageRequest,
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
    request = StageRequest("data", str(new), target="shm")
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
        assert not list(base.glob("hpml-*/.cache/*@2.0/.data.partial*"))
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
    supply = Meddled(StageRequest("data", str(many), target="shm"))
    with pytest.raises(CapacityError):
        stager.stage(supply.request, supply)
    assert supply.fills == 0
    need = scan_tree(str(many), RETRY).need(4096)
    roomy = CopyStager("1", bases=Bases(shm=str(small_tmpfs("size=64m"))), room=plain_room)
    path = Path(roomy.stage(StageRequest("data", str(many), target="shm")).path).resolve()
    written = (path.parent / ".data.manifest").stat().st_size
    assert written <= need.bytes <= written + 4 * 4096
    stager.cleanup()
    roomy.cleanup()


def copy_file(path: Path, base: Path, before: Callable[[], object] = bool) -> None:
    """Plan, let something happen, and copy."""
    source = TreeSource(str(path), RETRY, "file")
    plan = source.plan()
    before()
    copy(
        plan,
        source,
        str(base),
        options=CopyOptions(),
        retry=RETRY,
        progress=CopyProgress(None),
    )


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
    supply = LocalSupply(request, open_source(request, RETRY, 1 << 40))
    supply.plan()
    real = os.readv

    def read(*words: object) -> int:
        count = real(*words)  # type: ignore[arg-type]
        archive.touch()
        return count

    planned = supply.plan()
    monkeypatch.setattr(supply, "plan", lambda: planned)
    monkeypatch.setattr(os, "readv", read)
    with pytest.raises(StagingError, match="changed while it was copied"):
        stager.stage(request, supply)
    assert "data" not in os.listdir(stager.area("shm").path)
    stager.cleanup()
