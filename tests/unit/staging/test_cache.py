"""One copy for all jobs and persons, and never the wrong data."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hpml_orchestrator.errors import CapacityError, StagingError
from hpml_orchestrator.records.job import Stage
from hpml_orchestrator.staging.copy import CopyOptions
from hpml_orchestrator.staging.request import Bases, Retry
from hpml_orchestrator.staging.source import TreeSource
from hpml_orchestrator.staging.space import Room
from hpml_orchestrator.staging.stage import CopyStager, LocalSupply, open_source
from hpml_orchestrator.staging.store import NodeStore, clean, list_staged
from tests.patience import eventually
from tests.unit.staging.conftest import FORK, entries, partials, same

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.context import ForkProcess


def stager(base: Path, key: str) -> CopyStager:
    """A job's stager on one base."""
    return CopyStager(key, bases=Bases(shm=str(base)))


def kept(
    source: Path, *, keep: bool = True, name: str = "data", trust_mtime: bool = False
) -> Stage:
    """A request for data that stays."""
    return Stage(name, str(source), target="shm", keep=keep, trust_mtime=trust_mtime)


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


@pytest.mark.parametrize("count", [1, 8])
def test_eight_jobs_copy_the_same_data_once(
    base: Path, source: Path, tmp_path: Path, start: Callable[..., ForkProcess], count: int
) -> None:
    """One of them copies, seven wait and use its copy; different data are copied at once."""
    barrier, told = FORK.Barrier(8), FORK.Queue()
    trees = [shutil.copytree(source, tmp_path / f"tree{number}") for number in range(count)]
    for number in range(8):
        tree = trees[number % count]
        (tree / "own").write_text(tree.name)
        start(stage_at_once, f"{number}.0", base, tree, barrier, told)
    said = [told.get(timeout=120) for _ in range(8)]
    assert [reused for _, reused, _, _ in said].count(False) == count
    assert all(is_kept and is_right for _, _, is_kept, is_right in said)
    eventually(lambda: all("@" not in path.name for path in base.glob("hpml-*/*")))
    assert {contents(entry / "data")["own"].decode() for entry in entries(base)} == {
        tree.name for tree in trees
    }
    assert partials(base) == []


def test_a_later_job_reuses_what_an_earlier_one_kept(base: Path, source: Path) -> None:
    """It is named after the source; the job's name for it and cleaning up leave the entry."""
    first, second = stager(base, "1.0"), stager(base, "2.0")
    made = first.stage(kept(source))
    (entry,) = entries(base)
    assert (made.path, entry.name.rpartition("-")[0]) == (f"{entry}/data", "source")
    assert (made.kept, made.reused) == (True, False)
    first.cleanup()
    found = second.stage(kept(source, name="other"))
    assert (found.kept, found.reused, found.path) == (True, True, made.path)
    assert found.bytes == made.bytes
    assert contents(found.path) == contents(source)
    again = second.stage(kept(source))
    assert (again.kept, again.reused) == (True, True)
    second.cleanup()


@pytest.mark.parametrize("keep", [True, False])
def test_the_path_is_a_directory_to_all_commands(
    base: Path, source: Path, tmp_path: Path, keep: bool
) -> None:
    """No part of it is a link, so `find` and `cp -r` see the files without options."""
    job = stager(base, "1.0")
    path = job.stage(kept(source, keep=keep)).path
    assert path == os.path.realpath(path)
    found = subprocess.run(["find", path, "-type", "f"], check=True, capture_output=True)
    assert len(found.stdout.split()) == 3
    subprocess.run(["cp", "-r", path, tmp_path / "copy"], check=True)
    assert same(tmp_path / "copy", source)
    job.cleanup()


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
    person = stager(base, "")
    by_hand = person.stage(kept(source))
    assert (by_hand.reused, by_hand.kept, by_hand.path == str(path)) == (False, True, False)
    for one in (person, second, first):
        one.cleanup()
    assert not stager(base, "3.0").stage(kept(source)).reused, "now nobody uses it"
    assert not (path / "extra").exists()


def test_data_of_another_process_of_the_job_is_not_replaced(base: Path, source: Path) -> None:
    """The source has changed, or is another: neither the old data are taken, nor taken away."""
    first, second = stager(base, "1.0"), stager(base, "1.0")
    wanted = kept(source, keep=False)
    path = first.stage(wanted).path
    again = second.stage(wanted)
    assert (again.reused, again.path) == (True, path)
    second.leave()
    (source / "one.bin").write_bytes(b"2" * 5000)
    new = second.stage(wanted)
    assert (new.reused, contents(new.path)) == (False, contents(source))
    assert Path(path, "one.bin").read_bytes() == b"1" * 5000
    first.leave()
    second.cleanup()
    assert os.listdir(base) == []


def test_nodes_have_the_same_path_whatever_earlier_jobs_left(base: Path, source: Path) -> None:
    """A job on several nodes uses kept data only if all of its nodes would have them there."""
    earlier = stager(base, "1.0")
    there = earlier.stage(kept(source)).path
    several = CopyStager("2.0", bases=Bases(shm=str(base)), on_several_nodes=True)
    own = several.stage(kept(source, keep=False))
    assert (own.reused, own.kept, own.path == there) == (False, False, False)
    found = several.stage(kept(source))
    assert (found.reused, found.path) == (True, there)
    for one in (earlier, several):
        one.cleanup()


def test_what_a_person_staged_stays_and_is_found(base: Path, source: Path) -> None:
    """By persons and jobs; once it was changed, a job makes its own and the person is told."""
    person, job = stager(base, ""), stager(base, "1.0")
    made = person.stage(kept(source))
    person.cleanup()
    for one in (job, person):
        found = one.stage(kept(source))
        assert (made.reused, found.reused, found.path) == (False, True, made.path)
        one.cleanup()
    Path(made.path, "extra").touch()
    own = job.stage(kept(source))
    assert (own.reused, own.kept) == (False, False)
    job.cleanup()
    with pytest.raises(StagingError, match="was changed after you staged it"):
        person.stage(kept(source))
    assert [(one.by_hand, one.state) for one in list_staged([str(base)])] == [(True, "damaged")]
    assert Path(made.path, "extra").exists()
    clean([str(base)])
    assert Path(made.path, "extra").exists()
    clean([str(base)], everything=True)
    assert os.listdir(base) == []


def test_a_person_is_told_that_an_archive_does_not_fit(base: Path, source: Path) -> None:
    """Counted only in part it has no key: refused like any other."""
    archive = shutil.make_archive(str(source), "tar", source)
    room = Room(0, "a test's", None, 4096, in_memory=False)
    person = CopyStager(bases=Bases(shm=str(base)), room=lambda _path: room)
    retry = Retry(lambda _seconds: None)
    supply = LocalSupply(kept(Path(archive)), open_source(kept(Path(archive)), retry, 1))
    assert supply.plan().at_least
    with pytest.raises(CapacityError, match="at least"):
        person.stage(supply.request, supply)
    person.leave()
    assert os.listdir(base) == []


@pytest.mark.parametrize("damage", ["missing", "short", "extra", "manifest"])
@pytest.mark.parametrize("keep", [True, False])
def test_published_data_is_verified_before_reuse(
    stager: CopyStager, source: Path, damage: str, keep: bool
) -> None:
    """Data that lost or gained files or bytes, or has no manifest, is staged anew."""
    request = kept(source, keep=keep)
    path = Path(stager.stage(request).path)
    assert stager.stage(request).reused
    if keep:
        stager.leave()  # nothing else uses it
    if damage == "missing":
        (path / "a" / "two.txt").unlink()
    elif damage == "short":
        os.truncate(path / "one.bin", 3)
    elif damage == "extra":
        (path / "cache").touch()
    else:
        (path.parent / ".data.manifest").write_text("{")
    assert not stager.stage(request).reused
    assert sorted(os.listdir(path)) == ["a", "empty", "one.bin"]
    assert stager.stage(request).reused


def test_a_failing_rename_publishes_nothing(
    stager: CopyStager, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault at the last step leaves neither data nor partial."""

    def rename(*_arguments: object) -> None:
        raise OSError(5, "injected")

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(StagingError, match="injected"):
        stager.stage(kept(source))
    monkeypatch.undo()
    assert list_staged([stager.store("shm").base]) == []


@pytest.mark.parametrize("change", ["nothing", "zeros", "no digests"])
def test_contents_are_looked_at_after_a_crash_of_the_machine(
    base: Path, source: Path, change: str
) -> None:
    """Sizes may outlive a crash where contents did not: then only what can be compared counts."""
    first = stager(base, "1.0")
    first.options = CopyOptions(hash=change != "no digests")
    data = Path(first.stage(kept(source)).path)
    first.cleanup()
    lease = data.parent / ".lease"
    boot = lease.read_text()
    lease.write_text("boot another ")
    if change == "zeros":
        times = (data / "one.bin").stat()
        (data / "one.bin").write_bytes(bytes(times.st_size))
        os.utime(data / "one.bin", ns=(times.st_mtime_ns, times.st_mtime_ns))
    later = stager(base, "2.0")
    later.options = first.options
    result = later.stage(kept(source))
    assert result.reused == (change == "nothing")
    assert contents(result.path) == contents(source)
    assert lease.read_text() == boot
    later.cleanup()


def test_a_chain_does_not_wait_for_another_jobs_copy(base: Path, source: Path) -> None:
    """Two chains that wait for each other on two nodes would never end: it makes its own copy."""
    earlier, later = stager(base, "1.0"), stager(base, "2.0")
    earlier.stage(kept(source))
    earlier.leave()
    supply = LocalSupply(kept(source), TreeSource(str(source), Retry(lambda _seconds: None)))
    supply.method = "chain"  # of one node
    copying = NodeStore(str(base)).lock(entries(base)[0].name, exclusive=True)
    assert copying is not None
    result = later.stage(supply.request, supply)
    assert (result.method, result.reused, result.kept) == ("chain", False, False)
    copying.release()
    later.cleanup()
