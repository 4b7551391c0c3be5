"""What is staged can be listed, and what nothing uses removed; the rest stays, with the reason."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

from hpml_orchestrator.staging.inventory import clean, list_staged
from hpml_orchestrator.staging.request import Bases, StageRequest
from hpml_orchestrator.staging.stage import CopyStager

if TYPE_CHECKING:
    from collections.abc import Callable

STAGE = """
import sys, time
from hpml_orchestrator.staging.request import Bases, StageRequest
from hpml_orchestrator.staging.stage import CopyStager
base, source, key = sys.argv[1:4]
stager = CopyStager(key, bases=Bases(shm=base))
stager.stage(StageRequest("data", source, target="shm"))
stager.stage(StageRequest("kept", f"{source}/a", target="shm", keep=True))
print("staged", flush=True)
time.sleep(600)
"""


def stager(base: Path, key: str) -> CopyStager:
    """A job's stager on one base."""
    return CopyStager(key, bases=Bases(shm=str(base)))


def stage(job: CopyStager, source: Path, name: str, *, keep: bool = False) -> Path:
    """Stage under a name; return the real path of the data."""
    path = job.stage(StageRequest(name, str(source), target="shm", keep=keep)).path
    return Path(os.path.realpath(path))


def root(base: Path) -> Path:
    """The user's root."""
    return base / f"hpml-{os.getuid()}"


def test_all_that_is_staged_is_listed(base: Path, source: Path) -> None:
    """Data of jobs and of the cache, each once, with its owner and its users."""
    job = stager(base, "1.0")
    own, kept = stage(job, source, "own"), stage(job, source / "a", "kept", keep=True)
    half_path = own.parent / ".data.partial-1-aa"
    half_path.mkdir()
    found = {staged.path: staged for staged in list_staged([str(base)])}
    assert set(found) == {f"{root(base)}/1.0/own", str(kept), str(half_path)}
    mine, entry = found[f"{root(base)}/1.0/own"], found[str(kept)]
    assert (mine.name, mine.source, mine.kind, mine.bytes, mine.files) == (
        "own", str(source), "tree", 5003, 3,
    )  # fmt: skip
    assert (mine.owner, mine.kept, mine.state) == ("1.0", False, "ok")
    assert mine.in_use == f"process {os.getpid()}"
    assert (entry.source, entry.kept, entry.in_use) == (str(source / "a"), True, "job 1.0")
    assert (entry.owner, entry.state) == ("1.0", "ok")
    assert abs(entry.last_used - time.time()) < 600
    half = found[str(half_path)]
    assert (half.name, half.state, half.source) == ("own", "incomplete", "")
    job.cleanup()
    assert [(one.path, one.in_use) for one in list_staged([str(base)])] == [(str(kept), "")]


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
    (root(base) / ".trash-9.0-aa").mkdir()
    preview = clean([str(base)], dry_run=True)
    assert (root(base) / "1.0" / "data").is_dir()
    done = clean([str(base)])
    assert [one.path for one in done.removed] == [f"{root(base)}/1.0/data"]
    assert [one.path for one in preview.removed] == [one.path for one in done.removed]
    assert done.bytes == 5003
    assert done.leftovers == [f"{root(base)}/.trash-9.0-aa"]
    entry = next(one for one in (root(base) / ".cache").iterdir() if "@" not in one.name)
    assert dict(done.kept) == {
        f"{root(base)}/2.0": f"in use by process {jobs[1].pid}",
        str(entry): "in use by job 2.0",
    }
    assert sorted(os.listdir(root(base))) == [".cache", ".hpml-staging", ".lock", "2.0"]
    everything = clean([str(base)], everything=True)
    assert everything.removed == []
    jobs[1].kill()
    jobs[1].wait()
    assert len(clean([str(base)], everything=True).removed) == 2
    assert os.listdir(base) == []


def test_kept_data_goes_by_age_or_when_all_is_to_go(base: Path, source: Path) -> None:
    """By default it stays; older takes what was not used for so long."""
    job = stager(base, "1.0")
    old, new = stage(job, source, "old", keep=True), stage(job, source / "a", "new", keep=True)
    job.cleanup()
    day_ago = time.time() - 86400
    os.utime(old.parent / ".lease", (day_ago, day_ago))
    done = clean([str(base)])
    assert done.removed == []
    reason = dict(done.kept)[str(old.parent)]
    assert reason.startswith("kept for later jobs, last used 1 day ago")
    assert [one.path for one in clean([str(base)], older_seconds=3600).removed] == [str(old)]
    assert [one.path for one in clean([str(base)], everything=True).removed] == [str(new)]
    assert os.listdir(base) == []


def test_entries_that_are_not_whole_are_cleaned(base: Path, source: Path) -> None:
    """Damaged data and what a killed copier left are of no use to later jobs."""
    job = stager(base, "1.0")
    damaged = stage(job, source, "data", keep=True)
    job.cleanup()
    (damaged / "extra").touch()
    half = root(base) / ".cache" / ("1" * 32)
    (half / ".data.partial-7-aa").mkdir(parents=True)
    done = clean([str(base)])
    assert {one.state for one in done.removed} == {"damaged", "incomplete"}
    assert os.listdir(base) == []


def test_cleaning_never_leaves_the_root(base: Path, source: Path, tmp_path: Path) -> None:
    """Links among jobs, in the cache and in data are not followed."""
    outside = tmp_path / "outside"
    (outside / "data").mkdir(parents=True)
    (outside / ".owner.json").write_text("{}")
    job = stager(base, "1.0")
    data = stage(job, source, "data", keep=True)
    job.cleanup()
    (root(base) / "linked.0").symlink_to(outside)
    (root(base) / ".cache" / ("2" * 32)).symlink_to(outside)
    (data / "link").symlink_to(outside)
    (root(base) / ".trash-link").symlink_to(outside)
    clean([str(base)], everything=True)
    assert sorted(os.listdir(outside)) == [".owner.json", "data"]
    assert not data.exists()


def test_data_that_resists_is_told(
    small_tmpfs: Callable[[str], Path], base: Path, source: Path
) -> None:
    """What cannot be removed to the end is named as kept, not as removed; the rest goes."""
    point = small_tmpfs("size=1m")
    job = stager(base, "1.0")
    first, second = stage(job, source, "a", keep=True), stage(job, source / "a", "b", keep=True)
    job.cleanup()
    subprocess.run(["mount", "--bind", str(point), str(first / "empty")], check=True)
    done = clean([str(base)], everything=True)
    (stuck, reason), *_ = done.kept
    assert "Device or resource busy" in reason
    assert [one.path for one in done.removed] == [str(second)]
    subprocess.run(["umount", f"{stuck}/data/empty"], check=True)
    assert clean([str(base)]).kept == []
    assert os.listdir(base) == []
