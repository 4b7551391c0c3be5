"""What `hpml attach` runs, for a job in an in-memory Slurm."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.records.files import write_json, write_text
from hpml_orchestrator.runs.attach import Attachment, attachment
from hpml_orchestrator.scheduler.model import JobState

if TYPE_CHECKING:
    from hpml_orchestrator.records.submission import Submission
    from tests.unit.runs.conftest import World

LOGIN = {"PATH": "/bin", "HOME": "/home/ada", "SLURM_JOB_ID": "9", "CUDA_VISIBLE_DEVICES": "7"}


def attach(world: World, submission: Submission, *command: str, **options: Any) -> Attachment:
    """What is run for a submission as it is now."""
    return attachment(world.state(submission), command, environment=LOGIN, **options)


@pytest.fixture
def running(world: World) -> Submission:
    """A job on two nodes."""
    submission = world.submit(resources={"nodes": 2}, workdir="/data/project")
    started = world.starts(submission, "1")
    write_json(started / "head.json", {"node": "n1", "cluster": "fake"})
    world.scheduler.move("1", JobState.RUNNING)
    return submission


def test_a_program_is_a_step_of_the_job_that_shares_all_of_it(
    world: World, running: Submission
) -> None:
    """It is not bound, runs where the job does, and knows the run; the login's job is dropped."""
    made = attach(world, running, "nvidia-smi", "-l", "5", node="n2")
    options, program = made.argv[:-3], made.argv[-3:]
    assert program == ["nvidia-smi", "-l", "5"]
    wanted = {"srun", "--jobid=1", "--overlap", "--nodes=1", "--ntasks=1", "--nodelist=n2"}
    assert wanted <= {*options}
    assert {"--cpu-bind=none", "--mpi=none", "--chdir=/data/project"} <= {*options}
    assert "--pty" not in options
    run = world.store.runs_dir / running.sid
    assert made.environment == {
        "PATH": "/bin",
        "HOME": "/home/ada",
        "HPML_ATTEMPT_DIR": str(run / "attempts" / "0"),
        "HPML_RUN_DIR": str(run),
        "HPML_JOB_KEY": "fake-1",
    }


def test_without_a_command_it_is_a_shell_on_the_first_node(
    world: World, running: Submission
) -> None:
    """On a terminal it gets one."""
    made = attach(world, running, terminal=True)
    assert made.argv[-2:] == ["--pty", "bash"]
    assert "--nodelist=n1" in made.argv


def test_a_task_of_an_array_is_joined_by_its_own_job(world: World) -> None:
    """The number that Slurm gave the task is used, not `1_3`."""
    submission = replace(world.submit(array="3-4"), index=3)
    started = world.starts(submission, "17")
    write_text(started / "started" / "array_job_id", "1\n")
    world.scheduler.move("1_3", JobState.RUNNING)
    assert "--jobid=17" in attach(world, submission).argv


def test_a_job_that_was_started_again_under_another_id(world: World, running: Submission) -> None:
    """The newest attempt names the job to join."""
    ended = world.store.runs_dir / running.sid / "attempts" / "0"
    world.ends(ended, 75)
    with pytest.raises(InputError, match="has not started its script yet"):
        attach(world, running)
    world.starts(running, "2", 1)
    assert "--jobid=2" in attach(world, running).argv


@pytest.mark.parametrize(
    ("state", "node", "message", "hint"),
    [
        (JobState.PENDING, "", "is PENDING", "hpml status"),
        (JobState.COMPLETED, "", "is COMPLETED", "hpml status"),
        (JobState.RUNNING, "n3", "--node: is not a node of this job", "its nodes: n1 and n2"),
        (JobState.RUNNING, "login", "--node: is not a node of this job", "its nodes: n1 and n2"),
        (JobState.RUNNING, "n", "--node: is not a node of this job", "its nodes"),
    ],
)
def test_refusals(
    world: World, running: Submission, state: JobState, node: str, message: str, hint: str
) -> None:
    """Only a running job can be joined, and only on its own nodes."""
    world.scheduler.move("1", state, exit_code=0)
    with pytest.raises(InputError, match=message) as caught:
        attach(world, running, node=node)
    assert hint in caught.value.hint


def test_a_run_of_another_cluster(world: World, running: Submission) -> None:
    """Its job id means another job here."""
    world.scheduler.cluster_name = "other"
    with pytest.raises(InputError, match="is on cluster fake; this is other"):
        attach(world, running)
