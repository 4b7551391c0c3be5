"""Two clusters with one home: a job id means nothing on the other cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hpml_orchestrator.errors import InputError, SchedulerUnavailable
from hpml_orchestrator.records.submission import Submission
from hpml_orchestrator.runs.cancel import cancel
from hpml_orchestrator.runs.follow import wait_until_over
from hpml_orchestrator.runs.prune import prune
from hpml_orchestrator.runs.select import pending_dependencies
from hpml_orchestrator.runs.status import states
from hpml_orchestrator.scheduler.model import JobState
from hpml_orchestrator.testing.scheduler import FakeScheduler, Fault, Killed
from tests.unit.runs.conftest import World


def log_in_to(world: World, name: str) -> FakeScheduler:
    """Let hpml run on a login node of another cluster from here on."""
    there = FakeScheduler(world.clock)
    there.cluster_name = name
    world.scheduler = there
    return there


@pytest.fixture
def a_run(world: World) -> Submission:
    """A run of cluster A with job 1; hpml now runs on B, where job 1 is another run's."""
    world.scheduler.cluster_name = "a"
    submission = world.submit("here")
    world.scheduler.move("1", JobState.RUNNING)
    log_in_to(world, "b")
    world.submit("there")
    world.scheduler.move("1", JobState.CANCELLED)
    return submission


def test_a_run_of_another_cluster_is_not_judged(world: World, a_run: Submission) -> None:
    """Its cluster is named, nothing is recorded, and on its own cluster it still runs."""
    state = world.state(a_run)
    assert (state.state, state.over, state.lost) == ("UNKNOWN", False, False)
    assert (state.cluster, state.job_id) == ("a", "1")
    assert state.reason == "on cluster a; this is b"
    assert not (a_run.directory / "final.json").exists()


def cancelled(world: World, run: Submission) -> str:
    (outcome,) = cancel(world.store, [run], backends=world.backends, clock=world.clock.time)
    return outcome["outcome"]


def pruned(world: World, run: Submission) -> str:
    done = prune(world.store, [run], dry_run=False, backends=world.backends, now=world.clock.time)
    assert run.directory.exists()
    ((_, reason),) = done.kept
    return reason


def waited(world: World, run: Submission) -> str:
    with pytest.raises(InputError) as refused:
        wait_until_over(world.store, run, backends=world.backends, now=world.clock.time)
    return str(refused.value)


def depended(world: World, run: Submission) -> str:
    with pytest.raises(InputError) as refused:
        pending_dependencies(
            world.store, [f"any:{run.sid}"], backend="slurm", backends=world.backends
        )
    return str(refused.value)


@pytest.mark.parametrize("command", [cancelled, pruned, waited, depended])
def test_commands_leave_a_run_of_another_cluster_alone(
    world: World, a_run: Submission, command: Callable[[World, Submission], str]
) -> None:
    """They name the cluster, and touch neither the run nor the job that has its id here."""
    world.scheduler.move("1", JobState.RUNNING)
    printed = command(world, a_run)
    assert "on cluster a; this is b" in printed
    assert command is not cancelled or printed.endswith("run hpml on a login node of that cluster")
    assert world.scheduler.query(["1"])["1"].state is JobState.RUNNING


def test_a_submission_of_another_cluster_is_not_submitted_again(world: World) -> None:
    """The answer of sbatch was lost on cluster A: B must not make a second job."""
    world.scheduler.cluster_name = "a"
    submission = world.prepare()
    world.scheduler.faults = [Fault.LOST_ANSWER]
    with pytest.raises(SchedulerUnavailable):
        world.go(submission)
    there = log_in_to(world, "b")
    world.clock.sleep(1000)
    state = world.state(submission)
    assert (state.state, state.reason) == ("UNKNOWN", "on cluster a; this is b")
    with pytest.raises(InputError, match="on cluster a; this is b"):
        world.resume(submission)
    assert not there.jobs


@pytest.mark.parametrize("recorded", ["fake", ""])
def test_a_job_of_another_directory_is_another_job(world: World, recorded: str) -> None:
    """After a controller is set up anew, or without a cluster on record, job 1 is another one."""
    world.scheduler.cluster_name = recorded
    submission = world.submit()
    world.scheduler.cluster_name = "fake"
    status = world.scheduler.jobs["1"].status
    world.scheduler.jobs["1"].status = replace(status, directory="/somewhere/else")
    state = world.state(submission)
    assert (state.state, state.over, state.lost) == ("UNKNOWN", False, True)
    assert cancelled(world, submission).startswith("not cancelled: the scheduler has forgotten it")
    assert world.scheduler.query(["1"])["1"].state is JobState.PENDING


def test_an_id_that_the_cluster_does_not_know_is_not_called_cancelled(world: World) -> None:
    """The job was removed from the controller, and recorded no end."""
    submission = world.submit()
    del world.scheduler.jobs["1"]
    assert cancelled(world, submission).startswith("asked to cancel job 1, which is unknown: ")
    world.clock.sleep(1000)
    assert cancelled(world, submission).startswith("not cancelled: the scheduler has forgotten it")


def test_a_cluster_that_cannot_be_named_is_not_asked(world: World, a_run: Submission) -> None:
    """Without knowing which cluster answers, nothing is judged and nothing is cancelled."""
    asked = []

    def silent() -> str:
        asked.append(1)
        raise SchedulerUnavailable("no answer")

    others = [world.submit("one"), world.submit("two")]
    world.scheduler.cluster = silent  # type: ignore[method-assign]
    every = states(world.store, [a_run, *others], backends=world.backends, now=world.clock.time)
    for state in every:
        assert (state.state, state.reason, state.elsewhere) == ("UNKNOWN", "no answer", False)
    assert len(asked) == 1  # each question may take a minute
    with pytest.raises(SchedulerUnavailable):
        cancel(world.store, [a_run], backends=world.backends)
    assert world.scheduler.query(["1"])["1"].state is JobState.CANCELLED


def test_a_run_that_was_never_submitted_is_asked_about_once(world: World) -> None:
    """What is certain is kept on record: later looks cost the scheduler nothing."""
    submission = world.prepare()
    world.scheduler.faults = [Fault.KILLED_BEFORE]
    with pytest.raises(Killed):
        world.go(submission)
    world.clock.sleep(1000)
    find, looked = world.scheduler.find, []

    def counted_find(directory: Path, *, name: str, since: float) -> list[str]:
        looked.append(directory)
        return find(directory, name=name, since=since)

    world.scheduler.find = counted_find  # type: ignore[method-assign]
    for _ in range(3):
        assert world.state(submission).state == "NOT SUBMITTED"
    assert len(looked) == 1
    world.resume(submission)
    state = world.state(submission)
    assert (state.state, state.job_id) == ("PENDING", "1")
