"""An exporter of one job tells its processes from those of another job of that number."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator

import pytest
from hpml_exporters.jobs.bare import OWN, BareJobs

from tests.patience import eventually

JOBID = "912345678"  # no job of this machine has it
Start = Callable[..., int]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start processes of a job with these variables."""
    made: list[subprocess.Popen[bytes]] = []

    def run(**variables: str) -> int:
        made.append(subprocess.Popen(["sleep", "600"], env={"SLURM_JOB_ID": JOBID, **variables}))
        return made[-1].pid

    yield run
    for one in made:
        one.kill()
        one.wait()


def pids(own: dict[bytes, bytes], wanted: set[int]) -> set[int]:
    """The processes of the job, once they are all what they were started to be."""

    def seen() -> set[int]:
        jobs = BareJobs("/proc", own).jobs(time.monotonic(), JOBID)
        return {pid for job in jobs for step in job.steps.values() for pid in step}

    eventually(lambda: seen() >= wanted, pause=0.05)
    return seen()


def test_jobs_of_one_number(start: Start) -> None:
    """Local jobs of two directories of records, and a machine that is two nodes of a job."""
    here = start(SLURM_CLUSTER_NAME="local-1", SLURMD_NODENAME="n1")
    other = start(SLURM_CLUSTER_NAME="local-2", SLURMD_NODENAME="n1")
    beside = start(SLURM_CLUSTER_NAME="local-1", SLURMD_NODENAME="n2")
    silent = start()
    everybody = {here, other, beside, silent}
    assert pids({}, everybody) == everybody
    own = dict(zip(OWN, (b"local-1", b"n1"), strict=True))
    assert pids(own, {here, silent}) == {here, silent}
