"""What is staged can be listed, and what nothing uses removed; the rest stays, with the reason."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpml_orchestrator.records.job import Stage
from hpml_orchestrator.staging.request import Bases
from hpml_orchestrator.staging.stage import CopyStager
from hpml_orchestrator.staging.store import StoredData, clean, list_staged

if TYPE_CHECKING:
    from collections.abc import Callable

STAGE = """
import sys, time
from hpml_orchestrator.records.job import Stage
from hpml_orchestrator.staging.request import Bases
from hpml_orchestrator.staging.stage import CopyStager
base, source, key = sys.argv[1:4]
stager = CopyStager(key, bases=Bases(shm=base))
stager.stage(Stage("data", source, target="shm"))
stager.stage(Stage("kept", f"{source}/a", target="shm", keep=True))
print("staged", flush=True)
time.sleep(600)
"""


def stager(base: Path, key: str = "") -> CopyStager:
    """A job's stager on one base, or a person's."""
    return CopyStager(key, bases=Bases(shm=str(base)))


def stage(job: CopyStager, source: Path, name: str, *, keep: bool = False) -> Path:
    """Stage under a name; return the path of the data."""
    return Path(job.stage(Stage(name, str(source), target="shm", keep=keep)).path)


def root(base: Path) -> Path:
    """The user's root."""
    return base / f"hpml-{os.getuid()}"


def paths(found: list[StoredData]) -> list[str]:
    return sorted(one.path for one in found)


def test_all_that_is_staged_is_listed(base: Path, source: Path, tmp_path: Path) -> None:
    """What goes with a job, what stays, what a person staged: each with what uses it."""
    job, person = stager(base, "1.0"), stager(base)
    own, kept = stage(job, source, "own"), stage(job, source / "a", "kept", keep=True)
    written = Path(job.directory("shm"), "shm.dir")
    written.mkdir()
    (written / "file").write_text("12345")
    (tmp_path / "b").mkdir()
    hand = stage(person, tmp_path / "b", "b")
    person.leave()
    half_path = own.parent / ".data.partial-1-aa"
    half_path.mkdir()
    found = {Path(one.path): one for one in list_staged([str(base)])}
    assert set(found) == {own, kept, hand, written, half_path}
    assert own in root(base).glob("source-*@1.0/data")
    mine = found[own]
    assert (mine.name, mine.source, mine.kind, mine.bytes, mine.files) == (
        "source", str(source), "tree", 5003, 3,
    )  # fmt: skip
    assert (mine.job, mine.by_hand, mine.state) == ("1.0", False, "ok")
    assert mine.in_use == f"process {os.getpid()}"
    entry = found[kept]
    assert (entry.name, entry.source, entry.job) == ("a", str(source / "a"), "")
    assert (entry.in_use, entry.state) == (f"process {os.getpid()}", "ok")
    assert abs(entry.last_used - time.time()) < 600
    assert (found[hand].by_hand, found[hand].in_use, found[hand].job) == (True, "", "")
    there = found[written]
    assert (there.name, there.state, there.bytes, there.job) == ("shm.dir", "own", 5, "1.0")
    half = found[half_path]
    assert (half.name, half.state, half.source) == ("source", "incomplete", "")
    job.cleanup()
    assert {one.path: one.in_use for one in list_staged([str(base)])} == {
        str(kept): "",
        str(hand): "",
    }


def test_what_uses_data_is_named_by_its_job(
    base: Path,
    source: Path,
    child: Callable[..., subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A job of Slurm by its number, from the environment of the process."""
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    process = child(STAGE, base, source, "1.0")
    assert process.stdout is not None
    assert process.stdout.readline() == "staged\n"
    assert {one.in_use for one in list_staged([str(base)])} == {"job 4711"}


def test_cleaning_removes_what_dead_jobs_left(
    base: Path, source: Path, child: Callable[..., subprocess.Popen[str]]
) -> None:
    """A killed job's data goes, a living one's stays, and so does what is kept for later jobs."""
    jobs = [child(STAGE, base, source, key) for key in ("1.0", "2.0")]
    for job in jobs:
        assert job.stdout is not None
        assert job.stdout.readline() == "staged\n"
    jobs[0].kill()
    jobs[0].wait()
    preview = clean([str(base)], dry_run=True)
    (gone,) = root(base).glob("source-*@1.0/data")
    done = clean([str(base)])
    assert paths(done.removed) == [str(gone)] == paths(preview.removed)
    assert done.bytes == 5003
    assert [(one.job, reason) for one, reason in done.kept] == [
        ("", f"in use by process {jobs[1].pid}"),
        ("2.0", f"in use by process {jobs[1].pid}"),
    ]
    assert clean([str(base)], everything=True).removed == []
    jobs[1].kill()
    jobs[1].wait()
    assert len(clean([str(base)], everything=True).removed) == 2
    assert os.listdir(base) == []


def test_kept_data_goes_by_age_or_when_all_is_to_go(base: Path, source: Path) -> None:
    """By default it stays; older takes what was not used for so long."""
    job = stager(base, "1.0")
    old, new = stage(job, source, "old", keep=True), stage(job, source / "a", "new", keep=True)
    job.cleanup()
    now = time.time()
    os.utime(old.parent / ".lease", (now - 86400, now - 86400))
    done = clean([str(base)], now=now)
    assert done.removed == []
    reasons = {one.path: reason for one, reason in done.kept}
    assert reasons[str(old)].startswith("kept for later jobs, last used 1 day ago")
    assert paths(clean([str(base)], older_seconds=3600, now=now).removed) == [str(old)]
    assert paths(clean([str(base)], everything=True).removed) == [str(new)]
    assert os.listdir(base) == []


def test_what_a_person_staged_goes_when_cleaned(base: Path, source: Path) -> None:
    """All of it, or what is named, by the path of the data or of the entry; never what is used."""
    job, person = stager(base, "1.0"), stager(base)
    kept, used = stage(job, source, "kept", keep=True), stage(person, source / "a", "a")
    first, second = stage(person, source / "a/deep", "b"), stage(person, source / "empty", "c")
    person.leave()
    user = stager(base, "2.0")
    user.hold(str(used))
    job.leave()
    only = [str(first), str(second.parent), str(used)]
    done = clean([str(base)], only=only)
    assert paths(done.removed) == sorted([str(first), str(second)])
    assert [one.path for one, _ in done.kept] == [str(used)]
    user.cleanup()
    reasons = {one.path: reason for one, reason in clean([str(base)]).kept}
    assert reasons[str(used)].startswith("staged by hand, last used ")
    assert reasons[str(kept)].startswith("kept for later jobs, last used ")
    assert paths(clean([str(base)], only=[str(kept)]).removed) == [str(kept)]
    assert paths(clean([str(base)], everything=True).removed) == [str(used)]
    assert os.listdir(base) == []


def test_entries_that_are_not_whole_are_cleaned(base: Path, source: Path) -> None:
    """Damaged data and what a killed copier left are of no use to later jobs."""
    job = stager(base, "1.0")
    damaged = stage(job, source, "data", keep=True)
    job.cleanup()
    (damaged / "extra").touch()
    half = root(base) / "other-11"
    (half / ".data.partial-7-aa").mkdir(parents=True)
    (half / ".lease").touch()
    done = clean([str(base)])
    assert {one.state for one in done.removed} == {"damaged", "incomplete"}
    assert os.listdir(base) == []


def test_cleaning_never_leaves_the_store(base: Path, source: Path, tmp_path: Path) -> None:
    """Links among entries and in data are not followed."""
    outside = tmp_path / "outside"
    (outside / "data").mkdir(parents=True)
    (outside / ".lease").touch()
    job = stager(base, "1.0")
    data = stage(job, source, "data", keep=True)
    job.cleanup()
    (root(base) / "linked@1.0").symlink_to(outside)
    (root(base) / "linked-22").symlink_to(outside)
    (data / "link").symlink_to(outside)
    clean([str(base)], everything=True)
    assert sorted(os.listdir(outside)) == [".lease", "data"]
    assert not data.exists()


def test_data_that_resists_is_told(
    small_tmpfs: Callable[[str], Path], base: Path, source: Path
) -> None:
    """What cannot be removed to the end is named as such, not as removed; the rest goes."""
    point = small_tmpfs("size=1m")
    job = stager(base, "1.0")
    first, second = stage(job, source, "a", keep=True), stage(job, source / "a", "b", keep=True)
    job.cleanup()
    subprocess.run(["mount", "--bind", str(point), str(first / "empty")], check=True)
    done = clean([str(base)], everything=True)
    subprocess.run(["umount", f"{first}/empty"], check=True)
    ((stuck, reason),) = done.failed
    assert (stuck, "Device or resource busy" in reason) == (str(first.parent), True)
    assert paths(done.removed) == [str(second)]
    again = clean([str(base)])
    assert (again.kept, again.failed) == ([], [])
    assert os.listdir(base) == []
