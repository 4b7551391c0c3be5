"""A run that is over continues in one job, whenever hpml is killed; a running one is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from hpml_orchestrator.errors import InputError, SchedulerError, SchedulerUnavailable
from hpml_orchestrator.records.files import write_json
from hpml_orchestrator.records.run import Attempt
from hpml_orchestrator.runs.cancel import cancel
from hpml_orchestrator.runs.status import state_of
from hpml_orchestrator.scheduler.model import JobState
from hpml_orchestrator.testing.scheduler import Fault, Killed

if TYPE_CHECKING:
    from hpml_orchestrator.records.submission import Submission
    from tests.unit.runs.conftest import World


def ended(world: World, **fields: Any) -> tuple[Submission, Attempt]:
    """A run whose first job reached its time limit and did not continue."""
    submission = world.submit(**fields)
    world.scheduler.move("1", JobState.RUNNING)
    attempt = world.starts(submission, "1")
    world.scheduler.move("1", JobState.TIMEOUT)
    world.ends(attempt, 143, "time limit", "TIMEOUT")
    assert world.state(submission).over
    return submission, Attempt(attempt)


def test_a_run_that_is_over_is_continued(world: World) -> None:
    """Another job of the same submission; it can be found by both ids, and ends once more."""
    submission, attempt = ended(world)
    answer = world.requeue(submission)
    assert answer == {"id": submission.sid, "job_id": "2", "outcome": "continues in job 2"}
    state = world.state(submission)
    assert (state.state, state.job_id, state.over) == ("PENDING", "2", False)
    assert (attempt.next or {})["job_id"] == "2"
    assert [world.store.resolve(word).sid for word in ("1", "2")] == [submission.sid] * 2
    with pytest.raises(InputError, match="is PENDING, job 2: it needs no requeue"):
        world.requeue(submission)
    cancel(world.store, [submission], backends=world.backends)
    assert world.state(submission).state == "CANCELLED"
    assert world.requeue(submission)["job_id"] == "3"
    world.starts(submission, "3", 1)
    world.scheduler.move("3", JobState.COMPLETED)
    assert world.state(submission).state == "COMPLETED"
    with pytest.raises(InputError, match="has completed: there is nothing to continue"):
        world.requeue(submission)
    assert len(world.scheduler.jobs) == 3


def test_a_continuation_that_another_hpml_makes_meanwhile(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the look at the state and before the start: that job is the answer, and no second."""
    submission, _ = ended(world)
    look = state_of

    def too_late(*arguments: Any, **options: Any) -> Any:
        seen = look(*arguments, **options)
        monkeypatch.undo()
        assert world.requeue(submission)["job_id"] == "2"
        return seen

    monkeypatch.setattr("hpml_orchestrator.runs.requeue.state_of", too_late)
    assert world.requeue(submission)["job_id"] == "2"
    assert sorted(world.scheduler.jobs) == ["1", "2"]


@pytest.mark.parametrize(
    "fault",
    [
        Fault.UNAVAILABLE,
        Fault.LOST_ANSWER,
        Fault.KILLED_BEFORE,
        Fault.KILLED_DURING,
        Fault.BOTH_KILLED,
        Fault.KILLED_AFTER,
    ],
)
def test_a_continuation_that_was_cut_off(world: World, fault: Fault) -> None:
    """The same call finds its job, or makes one: never two, never none."""
    submission, _ = ended(world)
    world.scheduler.faults = [Fault.NONE, fault]  # of the look for a job, and of sbatch
    with pytest.raises((Killed, SchedulerUnavailable)):
        world.requeue(submission)
    if world.state(submission).state == "PENDING":  # the look has found and recorded it
        with pytest.raises(InputError, match="is PENDING, job 2: it needs no requeue"):
            world.requeue(submission)
    else:
        assert world.requeue(submission)["job_id"] == "2"
    world.clock.sleep(300)
    assert sorted(world.scheduler.jobs) == ["1", "2"]
    assert world.state(submission).job_id == "2"


def test_a_refused_continuation(world: World) -> None:
    """The end on record holds; when the reason is gone, the next call makes the job."""
    submission, _ = ended(world)
    world.scheduler.faults = [Fault.NONE, Fault.REFUSED]
    with pytest.raises(SchedulerError, match="Invalid account"):
        world.requeue(submission)
    assert world.state(submission).state == "TIMEOUT"
    assert world.requeue(submission)["job_id"] == "2"


@pytest.mark.parametrize(("marked", "seconds"), [(False, 0), (True, 0), (False, 200), (True, 200)])
def test_between_two_jobs_a_run_is_not_over(world: World, marked: bool, seconds: float) -> None:
    """For two minutes: then its script was killed before it could continue."""
    submission = world.submit()
    attempt = Attempt(world.starts(submission, "1"))
    world.scheduler.move("1", JobState.FAILED, exit_code=75)
    end = {"exit_code": 0, "goes_on": True, "state": "REQUEUED", "reason": "time limit"}
    write_json(attempt.directory / "ended.json", {**end, "time": world.clock.now})
    if marked:
        attempt.mark_start(1, now=world.clock.now)
    world.clock.sleep(seconds)
    state = world.state(submission)
    assert (state.state, state.over) == (("FAILED", True) if seconds else ("SUBMITTING", False))
    if seconds:
        assert state.reason == (
            f"interrupted before it could continue: `hpml requeue {submission.sid}`"
        )
    assert not (submission.directory / "final.json").exists()
    assert world.requeue(submission)["job_id"] == "2"
    assert world.state(submission).state == "PENDING"


def test_only_a_run_with_checkpoints_is_asked_to_stop(world: World) -> None:
    """It is asked once; without `checkpoint` nobody would listen."""
    submission = world.submit()
    attempt = Attempt(world.starts(submission, "1"))
    world.scheduler.move("1", JobState.RUNNING)
    with pytest.raises(InputError, match="runs without `checkpoint`"):
        world.requeue(submission)
    assert attempt.stop_request() is None
    record = submission.record()
    record["job"]["checkpoint"]["enabled"] = True
    write_json(submission.directory / "submit.json", record)
    for _ in range(2):
        assert "was asked to save and continue (requested)" in world.requeue(submission)["outcome"]
    assert len((attempt.directory / "stop").read_text().splitlines()) == 1


def test_a_task_is_continued_by_itself(world: World) -> None:
    """The others stay as they ended; an array as a whole cannot be continued."""
    submission = world.submit(array="0-1")
    for index in (0, 1):
        task = type(submission)(submission.directory, index)
        world.ends(world.starts(task, "1"), index)
        world.scheduler.move(
            f"1_{index}", (JobState.COMPLETED, JobState.FAILED)[index], exit_code=index
        )
    assert world.state(submission).over
    with pytest.raises(InputError, match="is a job array"):
        world.requeue(submission)
    task = type(submission)(submission.directory, 1)
    assert world.requeue(task)["job_id"] == "2"
    whole = world.state(submission)
    assert [(one.state, one.job_id) for one in whole.tasks] == [
        ("COMPLETED", "1_0"),
        ("PENDING", "2_1"),
    ]
    assert not whole.over
    world.scheduler.move("2_1", JobState.COMPLETED)
    assert world.state(submission).state == "COMPLETED"
    assert world.state(submission).over


def test_a_run_of_another_cluster_is_refused(world: World) -> None:
    """Its job would be another one here."""
    submission, _ = ended(world)
    world.scheduler.cluster_name = "other"
    with pytest.raises(InputError, match="on cluster fake; this is other"):
        world.requeue(submission)
    assert len(world.scheduler.jobs) == 1
