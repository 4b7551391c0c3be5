"""What the text readers say of real jobs is what the jobs were told to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from hpml_orchestrator.scheduler.command import SubprocessRunner
from hpml_orchestrator.scheduler.model import JobState
from hpml_orchestrator.scheduler.slurm_detail import DetailedJob, GresAllocation, parse_detailed
from hpml_orchestrator.scheduler.slurm_sacct import read_accounted
from hpml_orchestrator.scheduler.slurm_sdiag import parse_sdiag
from hpml_orchestrator.scheduler.slurm_version import slurm_version
from tests.cluster.hpml_on_slurm import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from hpml_orchestrator.scheduler.accounting import AccountedJob
    from tests.cluster.conftest import SlurmCluster

MIB = 1024 * 1024
BURN = (
    "import time; x = bytearray(200 << 20)\n"
    "while time.process_time() < 2.5: pass\n"  # longer than one sampling interval of 2 s
)


@dataclass
class Played:
    """Jobs that have ended: their ids, what accounting kept, and the controller's details."""

    ids: dict[str, str]
    accounted: tuple[AccountedJob, ...]
    details: tuple[DetailedJob, ...]

    def of(self, name: str) -> list[AccountedJob]:
        return [job for job in self.accounted if job.status.name == name]

    def detail(self, job_id: str) -> DetailedJob:
        return next(job for job in self.details if job.job_id == job_id)


@pytest.fixture(scope="module")
def played(slurm_cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Played:
    """Steps, an array, a heterogeneous job, a requeued and a held one, all at the same time."""
    folder = tmp_path_factory.mktemp("read jobs")
    (folder / "burn.py").write_text(BURN)
    ids: dict[str, str] = {}

    def submit(name: str, script: str, *options: str) -> None:
        path: Path = folder / f"{name}.sh"
        path.write_text(f"#!/bin/sh\n{script}\n")
        said = slurm_cluster.run(
            *("sbatch", "--parsable", "-J", name, "-o", "/dev/null"),
            *(f"--chdir={folder}", *options, str(path)),
        )
        ids[name] = said.stdout.strip().partition(";")[0]

    submit(
        "steps",
        "srun python3 burn.py\nsrun -n1 -N1 sh -c 'exit 3'\nexit 4",
        *("-N2", "--ntasks-per-node=1", "--gres=gpu:1", "--mem=1000", "-t", "7"),
        "--comment=two words=one",
    )
    submit("tasks", "exit $SLURM_ARRAY_TASK_ID", "--array=0-2%1", "--mem=100")
    submit("pair", "#SBATCH --mem=200\n#SBATCH hetjob\n#SBATCH --gres=gpu:a100:1 --mem=300\nexit 0")
    submit("again", '[ "${SLURM_RESTART_COUNT:-0}" = 1 ] || sleep 300', "--requeue", "--mem=100")
    submit("held", "exit 0", "--hold", "-n3", "--gres=gpu:2", "-t", "1-02:03:04")

    def show() -> tuple[DetailedJob, ...]:
        return parse_detailed(slurm_cluster.run("scontrol", "show", "job", "-d").stdout)

    def running(name: str) -> bool:
        states = {job.raw_id: job.status.state for job in show()}
        return states[ids[name]] is JobState.RUNNING

    eventually(lambda: running("steps") and running("again"), what="jobs that run")
    details = show()
    slurm_cluster.run("scontrol", "requeue", ids["again"])

    def all_over() -> tuple[AccountedJob, ...]:
        asked = [ids[name] for name in ("steps", "tasks", "pair", "again")]
        jobs = read_accounted(SubprocessRunner(), asked, env=slurm_cluster.environment)
        ended = sum(job.over for job in jobs)
        whole = all(step.state.over for job in jobs for step in job.steps)
        # one, three tasks, two components, two starts
        return jobs if ended == len(jobs) == 8 and whole else ()

    accounted = eventually(all_over, what="accounting of all jobs")
    slurm_cluster.run("scancel", ids["held"])
    return Played(ids, accounted, details)


def test_steps_and_what_they_used(played: Played) -> None:
    """Two tasks held 200 MiB and used 2.5 s of CPU time each; the second step failed alone."""
    (job,) = played.of("steps")
    assert job.job_id == played.ids["steps"]
    assert job.status.state is JobState.FAILED
    assert (job.status.exit_code, job.status.signal) == (4, 0)
    assert job.status.nodes == "node[1-2]"
    assert job.time_limit_seconds == 420
    assert (job.user, job.account, job.partition, job.cluster) == (
        *("root", "root", "main", "devcluster"),
    )
    assert job.allocated_tres["node"] == 2
    assert job.allocated_tres["gres/gpu:a100"] == 2
    assert job.allocated_tres["mem"] == 2000
    assert job.requested_tres["mem"] == 2000
    assert [step.step_id for step in job.steps] == ["batch", "0", "1"]
    burn, failed = job.steps[1:]
    assert (burn.name, burn.state, burn.exit_code, burn.tasks) == (
        *("python3", JobState.COMPLETED, 0, 2),
    )
    assert burn.nodes == "node[1-2]"
    assert burn.max_rss_bytes is not None
    assert 200 * MIB < burn.max_rss_bytes < 300 * MIB
    assert burn.max_rss_node in {"node1", "node2"}
    assert burn.usage_total["mem"] > 400 * MIB
    assert burn.cpu_seconds is not None
    assert 5 <= burn.cpu_seconds < 10
    assert burn.elapsed_seconds is not None
    assert burn.elapsed_seconds >= 2
    assert (failed.state, failed.exit_code, failed.tasks) == (JobState.FAILED, 3, 1)
    assert job.cpu_seconds is not None
    assert job.cpu_seconds >= 5
    assert job.status.started is not None
    assert job.status.ended is not None
    assert job.status.ended - job.status.started == job.elapsed_seconds


def test_tasks_of_an_array(played: Played) -> None:
    """Each ended with its own index as exit code."""
    array = played.ids["tasks"]
    tasks = {job.job_id: job for job in played.of("tasks")}
    assert {job_id: job.status.exit_code for job_id, job in tasks.items()} == {
        f"{array}_0": 0,
        f"{array}_1": 1,
        f"{array}_2": 2,
    }
    assert {(job.array_job_id, job.array_task) for job in tasks.values()} == {
        (array, 0),
        (array, 1),
        (array, 2),
    }


def test_a_heterogeneous_job(played: Played) -> None:
    """Two components, of which the second has a GPU."""
    first, second = sorted(played.of("pair"), key=lambda job: job.job_id)
    base = played.ids["pair"]
    assert (first.job_id, second.job_id) == (f"{base}+0", f"{base}+1")
    assert (first.het_job_id, first.het_offset, second.het_offset) == (base, 0, 1)
    assert first.allocated_tres["mem"] == 200
    assert second.allocated_tres["mem"] == 300
    assert "gres/gpu" not in first.allocated_tres
    assert second.allocated_tres["gres/gpu:a100"] == 1


def test_a_requeued_job(played: Played) -> None:
    """Both starts are told apart; the second ended well."""
    first, second = played.of("again")
    assert first.job_id == second.job_id == played.ids["again"]
    assert (first.status.restarts, second.status.restarts) == (0, 1)
    assert first.status.state is JobState.REQUEUED
    assert first.status.ended is not None
    assert (second.status.state, second.status.exit_code) == (JobState.COMPLETED, 0)
    assert first.status.started is not None
    assert second.status.started is not None
    assert first.status.started < second.status.started


def test_details_of_a_running_and_a_held_job(played: Played) -> None:
    """One CPU and one GPU on each of two nodes; what waits has nothing yet."""
    job = played.detail(played.ids["steps"])
    assert job.status.state is JobState.RUNNING
    assert [one.node for one in job.allocations] == ["node1", "node2"]
    for one in job.allocations:
        assert len(one.cpu_ids) == 1
        assert one.memory_mib == 1000
        (gpu,) = one.gres
        assert gpu == GresAllocation("gpu", "a100", 1, gpu.indices)
        assert len(gpu.indices) == 1
        assert set(gpu.indices) <= {0, 1}
    assert job.comment == "two words=one"
    assert (job.node_count, job.cpus, job.user, job.account) == (2, 2, "root", "root")
    assert job.status.directory.endswith("read jobs0")
    held = played.detail(played.ids["held"])
    assert held.status.state is JobState.PENDING
    assert held.status.reason == "JobHeldUser"
    assert held.allocations == ()
    assert held.allocated_tres == {}
    assert held.time_limit_seconds == 93_840  # Slurm counts whole minutes
    assert held.tasks == 3


def test_the_controller_itself(slurm_cluster: SlurmCluster, played: Played) -> None:
    """It has started the jobs above, and says which Slurm it is."""
    told = parse_sdiag(slurm_cluster.run("sdiag").stdout)
    assert told.jobs_started is not None
    assert told.jobs_started >= 8
    assert told.server_threads is not None
    assert told.calls_by_type["REQUEST_SUBMIT_BATCH_JOB"].count >= 4
    assert told.calls_by_user["root"].count > 10
    assert told.since is not None
    assert told.at is not None
    assert told.since < told.at
    said = slurm_cluster.run("sbatch", "--version").stdout
    version = slurm_version(SubprocessRunner(), env=slurm_cluster.environment)
    assert said.split()[1].startswith(f"{version[0]}.{version[1]:02d}.{version[2]}")
