"""The cache: one copy for all jobs, whoever is killed, and never the wrong data."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.area import JobArea
from hpml_orchestrator.staging.copy import CopyOptions
from hpml_orchestrator.staging.faults import Retry
from hpml_orchestrator.staging.files import NameLock
from hpml_orchestrator.staging.manifest import Listing, Manifest, manifest_path
from hpml_orchestrator.staging.request import Bases, StageRequest
from hpml_orchestrator.staging.source import TreeSource
from hpml_orchestrator.staging.stage import CopyStager
from hpml_orchestrator.staging.supply import LocalSupply
from tests.patience import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.context import ForkProcess

    from hpml_orchestrator.staging.area import StoreEntry
    from hpml_orchestrator.staging.progress import OnProgress

FORK = multiprocessing.get_context("fork")
KEY = "0" * 32
FILES = 20


@pytest.fixture
def start() -> Iterator[Callable[..., ForkProcess]]:
    """Run functions in forked processes; they are killed when the test ends."""
    started: list[ForkProcess] = []

    def run(work: Callable[..., None], *arguments: object) -> ForkProcess:
        process = FORK.Process(target=work, args=arguments)
        process.start()
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.join()


def stager(base: Path, key: str) -> CopyStager:
    """A job's stager on one base."""
    return CopyStager(key, bases=Bases(shm=str(base)))


def kept(
    source: Path, *, keep: bool = True, name: str = "data", trust_mtime: bool = False
) -> StageRequest:
    """A request for data that stays."""
    return StageRequest(name, str(source), target="shm", keep=keep, trust_mtime=trust_mtime)


def entries(base: Path) -> list[Path]:
    """The entries that are kept for later jobs."""
    return sorted(path for path in base.glob("hpml-*/.cache/*") if "@" not in path.name)


def leftovers(base: Path) -> list[str]:
    """What must not be there once all is quiet."""
    patterns = ("hpml-*/.trash-*", "hpml-*/.new-*", "hpml-*/.cache/*/.data.partial-*")
    return [str(path) for pattern in patterns for path in base.glob(pattern)]


def contents(path: Path | str) -> dict[str, bytes]:
    """All files below a directory."""
    root = Path(path).resolve()
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def stage_at_once(key: str, base: Path, source: Path, barrier: Any, told: Any) -> None:
    """One of several jobs: all begin together and end together."""
    mine = stager(base, key)
    barrier.wait()
    result = mine.stage(kept(source))
    told.put((key, result.reused, result.kept, contents(result.path) == contents(source)))
    barrier.wait()
    mine.cleanup()


def test_eight_jobs_copy_the_same_data_once(
    base: Path, source: Path, start: Callable[..., ForkProcess]
) -> None:
    """One of them copies, seven wait and use its copy; it outlives them all."""
    barrier, told = FORK.Barrier(8), FORK.Queue()
    jobs = [start(stage_at_once, f"{n}.0", base, source, barrier, told) for n in range(8)]
    said = [told.get(timeout=120) for _ in jobs]
    for job in jobs:
        job.join()
    assert sorted(reused for _, reused, _, _ in said) == [False] + [True] * 7
    assert all(is_kept and is_right for _, _, is_kept, is_right in said)
    assert len(entries(base)) == 1
    assert contents(entries(base)[0] / "data") == contents(source)
    assert leftovers(base) == []
    assert not list(base.glob("hpml-*/[0-9]*"))


def test_eight_jobs_copy_different_data_at_once(
    base: Path, source: Path, tmp_path: Path, start: Callable[..., ForkProcess]
) -> None:
    """Each gets its own entry."""
    barrier, told = FORK.Barrier(8), FORK.Queue()
    jobs = []
    for number in range(8):
        tree = shutil.copytree(source, tmp_path / f"tree{number}")
        (tree / "own").write_text(str(number))
        jobs.append(start(stage_at_once, f"{number}.0", base, tree, barrier, told))
    said = [told.get(timeout=120) for _ in jobs]
    for job in jobs:
        job.join()
    assert all(is_right and not reused for _, reused, _, is_right in said)
    assert len(entries(base)) == 8
    assert leftovers(base) == []


class Slow:
    """A copier that takes its time; the real one is over before a test can act."""

    def __init__(self, seconds: float, doomed: int = 0) -> None:
        self.seconds = seconds
        self.doomed = doomed  # this many copiers run until they are killed
        self.begun = FORK.Value("i", 0)
        self.pid = FORK.Value("i", 0)

    def __call__(self, directory: str, lock: NameLock) -> Manifest:
        """Publish FILES small files."""
        partial = f"{directory}/.data.partial-{os.getpid()}-slow"
        self.pid.value = os.getpid()
        self.begun.value += 1
        os.mkdir(partial)
        for number in range(FILES):
            (Path(partial) / str(number)).write_text(str(number))
            lock.tell(number, number, FILES, FILES)
            time.sleep(self.seconds / FILES)
        while self.begun.value <= self.doomed:
            time.sleep(0.01)
        size = sum(len(str(number)) for number in range(FILES))
        names = [str(number) for number in range(FILES)]
        listing = Listing(names, [len(name) for name in names])
        manifest = Manifest("data", "/source", "tree", "copy", size, FILES, listing=listing)
        manifest.write(manifest_path(f"{directory}/data"))
        os.rename(partial, f"{directory}/data")
        return manifest


def entry_for(
    base: Path, key: str, fill: Slow, on_progress: OnProgress | None = None
) -> tuple[StoreEntry, Manifest]:
    """What a job gets from the cache."""
    got = JobArea(str(base), key).obtain(KEY, fill, Retry(), on_progress=on_progress)
    assert got is not None
    return got


def obtain(key: str, base: Path, fill: Slow, told: Any) -> None:
    """Get the entry and say how that went, then keep it until the end."""
    try:
        entry, _ = entry_for(base, key, fill)
        copied = fill.pid.value == os.getpid()
        told.put((key, "copied" if copied else "reused", sorted(os.listdir(entry.data))))
        time.sleep(600)
    except StagingError as error:
        told.put((key, "error", str(error)))


def begun(fill: Slow, times: int = 1) -> int:
    """Wait until a copy began; returns the process that copies."""
    eventually(lambda: fill.begun.value >= times, pause=0.002)
    return int(fill.pid.value)


def test_what_a_killed_copier_left_goes_with_the_next_job(
    base: Path, source: Path, start: Callable[..., ForkProcess]
) -> None:
    """Nobody waits and nobody asks for the same data again: nothing stays all the same."""
    fill, told = Slow(60), FORK.Queue()
    job = start(obtain, "0.0", base, fill, told)
    begun(fill)
    bystander = stager(base, "1.0")
    bystander.stage(kept(source))
    assert len(entries(base)) == 2, "it is being copied"
    job.kill()
    job.join()
    nextone = stager(base, "2.0")
    nextone.stage(kept(source))
    assert len(entries(base)) == 1
    assert leftovers(base) == []
    for one in (bystander, nextone):
        one.cleanup()


def test_who_waits_is_told_how_far_the_copy_is(
    base: Path, start: Callable[..., ForkProcess]
) -> None:
    """A waiting job receives the progress, so a slow copy does not look like a hang."""
    fill, told = Slow(2.5), FORK.Queue()
    start(obtain, "0.0", base, fill, told)
    begun(fill)
    heard: list[tuple[int, ...]] = []
    mine = Slow(0)
    entry, _ = entry_for(base, "1.0", mine, lambda *figures: heard.append(figures))
    assert mine.begun.value == 0
    entry.release()
    assert len(heard) >= 1
    assert all(0 < done < FILES and total == FILES for done, _, total, _ in heard)


def test_a_later_job_reuses_what_an_earlier_one_kept(base: Path, source: Path) -> None:
    """The path in the job stays as it is without the cache; cleaning up leaves the entry."""
    first, second = stager(base, "1.0"), stager(base, "2.0")
    made = first.stage(kept(source))
    assert made.path == f"{base}/hpml-{os.getuid()}/1.0/data"
    assert (made.kept, made.reused) == (True, False)
    first.cleanup()
    found = second.stage(kept(source))
    assert (found.kept, found.reused, found.bytes) == (True, True, made.bytes)
    assert contents(found.path) == contents(source)
    again = second.stage(kept(source))
    assert (again.kept, again.reused) == (True, True)
    second.cleanup()


def test_data_that_is_not_kept_goes_with_the_job(base: Path, source: Path) -> None:
    """A request without keep leaves nothing, but uses a kept entry that is there."""
    first = stager(base, "1.0")
    assert not first.stage(kept(source, keep=False)).kept
    assert entries(base) == []
    first.cleanup()
    assert os.listdir(base) == []
    second = stager(base, "2.0")
    second.stage(kept(source))
    result = second.stage(kept(source, keep=False, name="other"))
    assert (result.kept, result.reused) == (True, True)
    second.cleanup()


def rewrite(path: Path, data: bytes) -> None:
    """Write a file anew, with the time of before."""
    before = path.stat()
    assert before.st_size == len(data)
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace(path: Path) -> None:
    """Put another file in a file's place, as `rsync -t` does."""
    new = path.with_name("new")
    shutil.copy2(path, new)
    rewrite(new, b"3" * path.stat().st_size)
    new.replace(path)


CHANGES: dict[str, Callable[[Path], object]] = {
    "content": lambda root: (root / "one.bin").write_bytes(b"2" * 5000),
    "content, with size and time of before": lambda root: rewrite(root / "one.bin", b"2" * 5000),
    "a file put in its place with the same size and time": lambda root: replace(root / "one.bin"),
    "size": lambda root: (root / "one.bin").write_bytes(b"1"),
    "new": lambda root: (root / "a" / "new").touch(),
    "gone": lambda root: (root / "a" / "deep" / "none").unlink(),
    "name": lambda root: (root / "one.bin").rename(root / "two.bin"),
    "mode": lambda root: (root / "one.bin").chmod(0o755),
    "link": lambda root: (root / "link").symlink_to("one.bin"),
    "hard link": lambda root: (root / "again").hardlink_to(root / "one.bin"),
    "directory": lambda root: (root / "empty" / "new").mkdir(),
    "mode of the top": lambda root: root.chmod(0o700),
    "link's text": lambda root: os.replace(root / "a" / "new link", root / "a" / "old link"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_source_is_another_entry(base: Path, source: Path, change: str) -> None:
    """Whatever changed, the old data is not taken for the new."""
    (source / "a" / "old link").symlink_to("two.txt")
    (source / "a" / "new link").symlink_to("deep")
    first, second = stager(base, "1.0"), stager(base, "2.0")
    first.stage(kept(source))
    CHANGES[change](source)
    result = second.stage(kept(source))
    assert not result.reused
    assert contents(result.path) == contents(source)
    assert len(entries(base)) == 2
    first.cleanup()
    second.cleanup()


@pytest.mark.parametrize("kind", ["file", "tar", "zip"])
def test_a_file_written_anew_is_another_entry(
    base: Path, source: Path, tmp_path: Path, kind: str
) -> None:
    """Also with its former size and time: archives are compared by their own."""
    file = source / "one.bin"
    if kind != "file":
        file = Path(shutil.make_archive(str(tmp_path / "data"), kind, source))
    first, second = stager(base, "1.0"), stager(base, "2.0")
    first.stage(kept(file))
    rewrite(file, file.read_bytes().replace(b"1" * 5000, b"2" * 5000))
    assert not second.stage(kept(file)).reused
    first.cleanup()
    second.cleanup()


def test_kept_data_is_found_by_the_time_of_its_source(
    base: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file of it is looked at, so that a change below goes unseen; one of the top does not."""
    first, second = stager(base, "1.0"), stager(base, "2.0")
    wanted = kept(source, trust_mtime=True)
    first.stage(wanted)
    os.utime(source / "a" / "two.txt", (5, 5))
    with monkeypatch.context() as blind:
        blind.setattr("hpml_orchestrator.staging.source.scan_tree", None)
        assert second.stage(wanted).reused
    (source / "new").touch()
    third = stager(base, "3.0")
    result = third.stage(wanted)
    assert not result.reused
    assert contents(result.path) == contents(source)
    assert not stager(base, "4.0").stage(kept(source)).reused, "by another look"
    for one in (first, second, third):
        one.cleanup()


def test_a_damaged_entry_in_use_stays_with_its_users(base: Path, source: Path) -> None:
    """A job that finds it damaged stages its own copy, and takes nothing from the others."""
    first, second = stager(base, "1.0"), stager(base, "2.0")
    path = Path(first.stage(kept(source)).path)
    (path / "extra").write_text("written by the first job")
    result = second.stage(kept(source))
    assert (result.reused, result.kept) == (False, False)
    assert contents(result.path) == contents(source)
    assert (path / "extra").exists()
    second.cleanup()
    first.cleanup()


@pytest.mark.parametrize("change", ["nothing", "zeros", "no digests"])
def test_contents_are_looked_at_after_a_crash_of_the_machine(
    base: Path, source: Path, change: str
) -> None:
    """Sizes may outlive a crash where contents did not: then only what can be compared counts."""
    first = stager(base, "1.0")
    first.options = CopyOptions(hash=change != "no digests")
    data = Path(first.stage(kept(source)).path).resolve()
    first.cleanup()
    record = data.parent / ".owner.json"
    owner = json.loads(record.read_text())
    record.write_text(json.dumps({**owner, "boot_id": "another boot"}))
    if change == "zeros":
        times = (data / "one.bin").stat()
        (data / "one.bin").write_bytes(bytes(times.st_size))
        os.utime(data / "one.bin", ns=(times.st_mtime_ns, times.st_mtime_ns))
    later = stager(base, "2.0")
    later.options = first.options
    result = later.stage(kept(source))
    assert result.reused == (change == "nothing")
    assert contents(result.path) == contents(source)
    if change == "nothing":
        assert json.loads(record.read_text())["boot_id"] == owner["boot_id"]
    later.cleanup()


def test_a_chain_does_not_wait_for_another_jobs_copy(base: Path, source: Path) -> None:
    """Two chains that wait for each other on two nodes would never end: it makes its own copy."""
    earlier, later = stager(base, "1.0"), stager(base, "2.0")
    earlier.stage(kept(source))
    retry = Retry(lambda _seconds: None)
    supply = LocalSupply(kept(source), TreeSource(str(source), retry))
    supply.method = "chain"  # of one node
    with NameLock(f"{entries(base)[0]}/.data.lock", retry):
        result = later.stage(supply.request, supply)
    assert (result.method, result.reused, result.kept) == ("chain", False, False)
    earlier.cleanup()
    later.cleanup()
