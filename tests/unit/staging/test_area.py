"""The job directory: who may have it, and that it goes away."""

from __future__ import annotations

import dataclasses
import os
import stat
from typing import TYPE_CHECKING

import pytest

from hpml_orchestrator.errors import InputError, StagingError
from hpml_orchestrator.records.owner import Owner, owner_is_alive, this_owner
from hpml_orchestrator.staging.area import JobArea
from hpml_orchestrator.staging.store import MARKER

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable
    from pathlib import Path


def area(base: Path, key: str = "1.0") -> JobArea:
    return JobArea(str(base), key)


def test_an_area_is_private_and_marked(base: Path) -> None:
    """Root and job directory are 0700 whatever the umask, and carry marker and owner."""
    old = os.umask(0)
    try:
        job = area(base)
        job.open()
        job.open()
    finally:
        os.umask(old)
    for path in (job.store.path, job.path):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o700
    assert os.path.exists(f"{job.store.path}/{MARKER}")
    assert Owner.read(f"{job.path}/.owner.json") == this_owner("1.0")
    assert job.path == f"{base}/hpml-{os.getuid()}/1.0"


def test_cleanup_leaves_the_base_as_it_was(base: Path) -> None:
    """The job directory goes; the root goes with the last job; twice is fine."""
    first, second = area(base), area(base, "2.0")
    first.open()
    second.open()
    (base / "other").touch()
    assert first.cleanup()
    assert os.path.isdir(second.path)
    assert second.cleanup()
    assert second.cleanup()
    assert os.listdir(base) == ["other"]


def test_cleanup_waits_for_the_last_process_of_the_job(base: Path) -> None:
    """Two agents of one job on one machine: the second one to end removes the data."""
    first, second = area(base), area(base)
    first.open()
    second.open()
    assert not first.cleanup()
    assert os.path.isdir(second.path)
    assert second.cleanup()
    assert os.listdir(base) == []


def test_cleanup_removes_what_the_job_locked_for_itself(base: Path) -> None:
    """Directories without write permission are removed too, and links are not followed."""
    job = area(base)
    job.open()
    outside = base / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    inner = f"{job.path}/x/y"
    os.makedirs(inner)
    os.symlink(outside, f"{inner}/link")
    os.chmod(inner, 0o500)
    job.cleanup()
    assert os.listdir(base) == ["outside"]
    assert os.listdir(outside) == ["kept"]


@pytest.mark.parametrize("fault", ["link", "file", "writable", "unmarked", "owner"])
def test_roots_that_are_not_ours_are_refused(base: Path, tmp_path: Path, fault: str) -> None:
    """Links, files, other users' and unmarked directories are neither used nor emptied."""
    root = base / f"hpml-{os.getuid()}"
    if fault == "link":
        (tmp_path / "elsewhere").mkdir()
        root.symlink_to(tmp_path / "elsewhere")
    elif fault == "file":
        root.touch()
    else:
        (root / "1.0" / "data").mkdir(parents=True)
        if fault != "unmarked":
            (root / MARKER).touch()
        root.chmod(0o770 if fault == "writable" else 0o700)
        if fault == "owner":
            if os.getuid() != 0:
                pytest.skip("needs root to give a directory away")
            os.chown(root, 65534, 65534)
    job = area(base)
    for call in (job.open, job.cleanup, job.remove_stale):
        with pytest.raises(StagingError, match="not used"):
            call()
    assert root.is_dir() == (fault != "file")
    if fault not in {"link", "file"}:
        assert (root / "1.0" / "data").is_dir()


def test_bases_must_be_there_and_local(base: Path, tmp_path: Path) -> None:
    """A missing base and one on a shared file system are the caller's error."""
    with pytest.raises(InputError, match="no such directory"):
        area(base / "none").open()
    with pytest.raises(InputError, match="absolute"):
        JobArea("relative", "1.0")
    (tmp_path / "self").mkdir()
    device = os.stat(base).st_dev
    line = f"1 0 {os.major(device)}:{os.minor(device)} / / rw - nfs4 server:/ rw\n"
    (tmp_path / "self" / "mountinfo").write_text(line)
    with pytest.raises(InputError, match="nfs4, which nodes share"):
        JobArea(str(base), "1.0", proc_root=str(tmp_path)).open()


HOLD = """
import sys
from hpml_orchestrator.staging.area import JobArea
area = JobArea(sys.argv[1], sys.argv[2])
area.open()
print("open", flush=True)
sys.stdin.read() if len(sys.argv) > 3 else __import__("time").sleep(600)
"""


def test_what_a_killed_job_left_is_removed(
    base: Path, child: Callable[..., subprocess.Popen[str]]
) -> None:
    """Kill -9 leaves a directory; the next job of the user removes it, but not a living one's."""
    running = child(HOLD, base, "running.0")
    killed = child(HOLD, base, "killed.0")
    for process in (running, killed):
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
    killed.kill()
    killed.wait()
    job = area(base)
    job.open()
    job.remove_stale()
    assert set(os.listdir(job.store.path)) == {MARKER, ".lock", "1.0", "running.0"}
    running.kill()
    running.wait()
    job.cleanup()
    area(base, "2.0").remove_stale()
    assert os.listdir(base) == []


def test_the_living_are_told_from_the_dead() -> None:
    """A reused pid and another boot are dead; another host and PID namespace cannot be judged."""
    me = this_owner("x")
    assert me.start_ticks > 0
    assert owner_is_alive(me)
    assert not owner_is_alive(dataclasses.replace(me, start_ticks=me.start_ticks + 1))
    assert not owner_is_alive(dataclasses.replace(me, pid=2**22 + 5))
    assert not owner_is_alive(dataclasses.replace(me, boot_id="another"))
    assert owner_is_alive(dataclasses.replace(me, hostname="elsewhere", pid=2**22 + 5))
    assert owner_is_alive(dataclasses.replace(me, pid_namespace="pid:[1]", pid=2**22 + 5))


CHURN = """
import os, sys
from hpml_orchestrator.staging.area import JobArea
for number in range(60):
    area = JobArea(sys.argv[1], f"{sys.argv[2]}.{number}")
    area.open()
    os.mkdir(area.path_of("data"))
    area.remove_stale()
    assert os.path.isdir(area.path_of("data")), "removed under a living job"
    assert area.cleanup()
"""


def test_jobs_that_begin_and_end_at_once_do_not_disturb_each_other(
    base: Path, child: Callable[..., subprocess.Popen[str]]
) -> None:
    """Four jobs make and remove the common root 60 times each; none loses its directory."""
    processes = [child(CHURN, base, name) for name in "abcd"]
    assert [process.wait(timeout=120) for process in processes] == [0, 0, 0, 0]
    assert os.listdir(base) == []
