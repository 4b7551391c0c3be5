"""Directories of one job alone differ from those that later jobs can use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import hpml_orchestrator
from hpml_orchestrator.records.mounts import Mount, parse_mounts
from hpml_orchestrator.staging.request import Bases, StageRequest
from hpml_orchestrator.staging.space import reason_from
from hpml_orchestrator.staging.stage import CopyStager

# Read by a job of Slurm 22.05.8 with JobContainerType=job_container/tmpfs on a virtual node, and by
# process 1 meanwhile; lines of other file systems and the machine's own names are left out.
DATA = Path(__file__).parent / "data"
MINE = parse_mounts((DATA / "job_container-22.05.8.self.mountinfo").read_text())
EVERYONES = parse_mounts((DATA / "job_container-22.05.8.init.mountinfo").read_text())
CHECKOUT = Path(hpml_orchestrator.__file__).parents[1]


NODE = [mount for mount in MINE if "container" not in mount.root]
SHM_ALONE = "/dev/shm belongs to job 2 alone (a new tmpfs) and ends with it"
ALONE = "/tmp belongs to job 2 alone (/var/spool/slurm/container/node1/2/.2 is mounted there)"


@pytest.mark.parametrize(
    ("base", "job", "mine", "everyones", "reason"),
    [
        ("/tmp/x", "2", MINE, EVERYONES, f"{ALONE} and ends with it"),
        # a tmpfs names no job: process 1 does not have it
        ("/dev/shm", "2", MINE, EVERYONES, SHM_ALONE),
        ("/scratch", "2", MINE, EVERYONES, ""),  # what Slurm did not mount over is the node's
        ("/", "2", MINE, EVERYONES, ""),
        ("/dev/shm", "2", NODE, EVERYONES, ""),  # a namespace that no job container made
        ("/tmp", "2", NODE, EVERYONES, ""),
        ("/tmp", "22", MINE, EVERYONES, ""),  # of another job
        ("/dev/shm", "22", MINE, EVERYONES, ""),
        ("/dev/shm", "2", MINE, [], ""),  # the mounts of process 1 may be hidden
        ("/tmp", "2", MINE, [], f"{ALONE} and ends with it"),
    ],
)  # fmt: skip
def test_what_slurm_mounted_for_a_job_is_its_own(
    base: str, job: str, mine: list[Mount], everyones: list[Mount], reason: str
) -> None:
    """By the directory that is mounted there, or because process 1 does not have the mount."""
    assert reason_from(base, job, mine, everyones) == reason


@pytest.mark.parametrize(
    "base", ["/scratch/4711", "/scratch/slurm-job.4711/x", "/tmp/job_4711", "/local/.4711"]
)
def test_a_directory_named_after_the_job_is_its_own(base: str) -> None:
    """A prolog made it and an epilog removes it."""
    assert "is named after job 4711" in reason_from(base, "4711", [], [])


@pytest.mark.parametrize(
    "base", ["/scratch", "/nvme1", "/data-1", "/tmp/pytest-1", "/mnt/disk1", "/user1", "/11"]
)
def test_a_number_in_a_name_is_not_the_job(base: str) -> None:
    """Numbers of disks, users and runs are not job ids."""
    assert reason_from(base, "1", [], []) == ""


CONTAINED = """
set -e
mkdir -p "$1/4711/.4711"
touch "$1/4711/.ns"
mount --bind "$1/4711/.4711" "$2"
umount -l "$3" 2>/dev/null || true
mount -t tmpfs tmpfs "$3"
exec "$4" -c "$5" "$2" "$3" "$6"
"""
STAGE = """
import sys
from hpml_orchestrator.staging.request import Bases, StageRequest
from hpml_orchestrator.staging.stage import CopyStager
local, shm, source = sys.argv[1:4]
stager = CopyStager("4711.0", bases=Bases(shm=shm, local=local), job_id="4711")
for target in ("local", "shm"):
    result = stager.stage(StageRequest("data", source, target=target, keep=True))
    print(result.kept, result.private)
stager.cleanup()
"""


def test_a_job_in_a_container_is_told_that_nothing_can_be_kept(
    tmp_path: Path, source: Path
) -> None:
    """In the layout of job_container/tmpfs, really mounted: staged, not kept, and why not."""
    folders = [tmp_path / name for name in ("container", "tmp", "shm")]
    for folder in folders:
        folder.mkdir()
    done = subprocess.run(
        [
            "unshare", "-m", "/bin/sh", "-c", CONTAINED, "sh", *map(str, folders),
            sys.executable, STAGE, str(source),
        ],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    if done.returncode and os.getuid() != 0:
        pytest.skip("NOT TESTED: mounting needs root")
    assert done.returncode == 0, done.stderr
    local, shm = done.stdout.splitlines()
    assert local.startswith(f"False {folders[1]} belongs to job 4711 alone (")
    assert "/container/4711/.4711 is mounted there" in local
    assert shm == f"False {folders[2]} belongs to job 4711 alone (a new tmpfs) and ends with it"
    assert [os.listdir(folder) for folder in folders] == [["4711"], [], []]
    assert os.listdir(folders[0] / "4711" / ".4711") == []


def test_a_private_base_stages_without_the_cache(tmp_path: Path, source: Path) -> None:
    """A directory named after the job gets no cache: nobody would find it."""
    local = tmp_path / "4711"
    local.mkdir()
    stager = CopyStager("4711.0", bases=Bases(local=str(local)), job_id="4711")
    result = stager.stage(StageRequest("data", str(source), target="local", keep=True))
    assert (result.kept, result.private) == (
        False,
        f"{local} is named after job 4711 and ends with it",
    )
    stager.cleanup()
    assert os.listdir(local) == []
