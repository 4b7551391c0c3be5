"""An array is one submission with a state per task; its own state is made of theirs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.records.files import read_json
from hpml_orchestrator.records.texts import zoned_text
from hpml_orchestrator.runs.cancel import cancel
from hpml_orchestrator.runs.reporting.text import array_lines, task_rows
from hpml_orchestrator.runs.status import states
from hpml_orchestrator.scheduler.model import JobState, Scheduler

if TYPE_CHECKING:
    from hpml_orchestrator.records.submission import Submission
    from tests.unit.runs.conftest import World


def task(submission: Submission, index: int) -> Submission:
    return submission.at(index)


@pytest.fixture
def submitted(world: World) -> Submission:
    """An array of four tasks that wait in the queue."""
    return world.submit(array="0-3%2")


def test_the_counts_say_how_far_it_is(world: World, submitted: Submission) -> None:
    """Done, running, waiting and failed tasks are counted; it runs until the last one is over."""
    waiting = world.state(submitted)
    assert (waiting.state, waiting.reason, waiting.over) == (
        "PENDING",
        "0 of 4 done, 4 waiting",
        False,
    )
    assert (waiting.job_id, len(waiting.tasks)) == ("1", 4)
    world.scheduler.move("1_0", JobState.COMPLETED)
    world.scheduler.move("1_1", JobState.FAILED, exit_code=3)
    world.scheduler.move("1_2", JobState.RUNNING)
    running = world.state(submitted)
    assert (running.state, running.over) == ("RUNNING", False)
    assert running.reason == "1 of 4 done, 1 running, 1 waiting, 1 failed"
    assert running.exit_code is None
    for job_id in ("1_2", "1_3"):
        world.scheduler.move(job_id, JobState.COMPLETED)
    over = world.state(submitted)
    assert (over.state, over.over, over.exit_code) == ("FAILED", True, 3)
    assert over.reason == "3 of 4 done, 1 failed"


def test_the_times_of_an_array_are_those_of_all_attempts(
    world: World, submitted: Submission
) -> None:
    """A state has the start of the last attempt; the array began with the first."""
    began = world.clock.now
    for number in range(2):
        world.starts(task(submitted, 0), "2", number)
        world.scheduler.jobs["1_0"].status = replace(
            world.scheduler.jobs["1_0"].status, started=world.clock.now, restarts=number
        )
        world.clock.sleep(100)
    for index in range(4):
        world.scheduler.move(f"1_{index}", JobState.COMPLETED)
    state = world.state(submitted)
    assert dict(array_lines(state))["started"] == zoned_text(began)
    assert "after 3:20" in dict(array_lines(state))["ended"]
    assert [row[3] for row in task_rows(state)] == ["0 s (attempt 2)", "0 s", "0 s", "0 s"]


@pytest.mark.parametrize(
    ("ends", "state"),
    [
        (("COMPLETED",) * 4, "COMPLETED"),
        (("COMPLETED", "CANCELLED", "COMPLETED", "COMPLETED"), "CANCELLED"),
        (("CANCELLED", "TIMEOUT", "COMPLETED", "CANCELLED"), "TIMEOUT"),
        (("TIMEOUT", "OUT_OF_MEMORY", "COMPLETED", "FAILED"), "FAILED"),
    ],
)
def test_an_array_that_is_over_is_as_its_worst_task(
    world: World, submitted: Submission, ends: tuple[str, ...], state: str
) -> None:
    """It is COMPLETED only if all tasks are."""
    for index, end in enumerate(ends):
        world.scheduler.move(f"1_{index}", JobState(end))
    assert (world.state(submitted).state, world.state(submitted).over) == (state, True)


def test_tasks_that_the_scheduler_forgets_are_remembered(
    world: World, submitted: Submission
) -> None:
    """What was seen to be over stays so while others wait, without another question."""
    world.scheduler.move("1_0", JobState.TIMEOUT)
    world.starts(task(submitted, 1), "5")
    world.scheduler.move("1_1", JobState.COMPLETED)
    world.state(submitted)
    for job_id in ("1_0", "1_1"):
        del world.scheduler.jobs[job_id]
    world.clock.sleep(1000)
    found = world.state(submitted)
    assert [one.state for one in found.tasks] == ["TIMEOUT", "COMPLETED", "PENDING", "PENDING"]
    assert found.tasks[1].attempts == 1
    assert sorted(read_json(submitted.directory / "ends.json")["tasks"]) == ["0", "1"]


def test_a_task_without_any_trace_was_cancelled(world: World, submitted: Submission) -> None:
    """Slurm keeps nothing of a task cancelled while its array waits; the others are still known."""
    del world.scheduler.jobs["1_3"]
    found = world.state(submitted)
    assert (found.tasks[3].state, found.tasks[3].over) == ("CANCELLED", True)
    assert found.tasks[3].reason == "cancelled before it started"
    assert found.tasks[3].exit_code is None


def test_what_is_over_is_never_asked_for_again(world: World, submitted: Submission) -> None:
    """The end with all tasks is written down; from then on no scheduler is needed."""
    world.scheduler.cancel(["1"])
    world.ends(world.starts(task(submitted, 1), "5"), 143, "cancelled", "CANCELLED")
    first = world.state(submitted)

    def nobody(name: str, host: str) -> Scheduler:
        raise AssertionError(f"the scheduler {name} of {host} was asked")

    (second,) = states(world.store, [submitted], backends=nobody)
    assert second == first
    (third,) = states(world.store, [task(submitted, 1)], backends=nobody)
    assert third == first.tasks[1]
    assert not (submitted.directory / "ends.json").exists()


def test_cancelling(world: World, submitted: Submission) -> None:
    """One task or all of them; the end is written down at once."""
    (one,) = cancel(world.store, [task(submitted, 3)], backends=world.backends)
    assert (one["id"], one["outcome"]) == (f"{submitted.sid}.3", "cancelled job 1_3")
    assert sorted(read_json(submitted.directory / "ends.json")["tasks"]) == ["3"]
    assert world.state(submitted).reason == "0 of 4 done, 3 waiting, 1 cancelled"
    (again,) = cancel(world.store, [task(submitted, 3)], backends=world.backends)
    assert again["outcome"] == "is over already (CANCELLED)"
    (rest,) = cancel(world.store, [submitted], backends=world.backends)
    assert (rest["id"], rest["outcome"]) == (submitted.sid, "cancelled job 1")
    assert read_json(submitted.directory / "final.json")["state"] == "CANCELLED"


def test_what_a_backend_cannot_run(world: World) -> None:
    """Named by its field before anything is written."""
    with pytest.raises(InputError) as caught:
        world.prepare(backend="local", launcher="srun", mpi="pmix")
    assert caught.value.field == "mpi"
    assert not world.store.root.exists()
