"""Cancelling ends jobs, waits for those being submitted, and names what it did not cancel."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hpml_orchestrator.records.submission import Submission
from hpml_orchestrator.runs.cancel import cancel
from hpml_orchestrator.scheduler.model import JobState
from hpml_orchestrator.testing.scheduler import Fault, Killed
from tests.unit.runs.conftest import World


def cut_off(world: World, seconds: float) -> Submission:
    """A submission whose hpml was killed and whose sbatch is answered after so many seconds."""
    submission = world.prepare()
    world.scheduler.delay_seconds = seconds
    world.scheduler.faults = [Fault.KILLED_DURING]
    with pytest.raises(Killed):
        world.go(submission)
    return submission


def cancelled(
    world: World, *submissions: Submission, sleep: Callable[[float], None] | None = None
) -> tuple[list[dict[str, str]], list[str]]:
    said: list[str] = []
    done = cancel(
        world.store,
        list(submissions),
        notice=said.append,
        clock=world.clock.time,
        sleep=sleep or world.clock.sleep,
        backends=world.backends,
    )
    return done, said


def test_a_run_that_is_being_submitted_is_waited_for(world: World) -> None:
    """Its job appears after some seconds, and is cancelled."""
    submission = cut_off(world, 4.0)
    (one,), said = cancelled(world, submission)
    assert one == {"id": submission.sid, "job_id": "1", "outcome": "cancelled job 1"}
    assert said == [f"{submission.sid} is being submitted: waiting for its job"]
    assert world.scheduler.jobs["1"].states[-1][1] is JobState.CANCELLED


def test_a_run_whose_hpml_is_about_to_call_sbatch_is_waited_for(world: World) -> None:
    """Its records are there, its sbatch is not yet: that hpml lives, and the job will come."""
    submission = world.prepare()

    def sleep(_: float) -> None:
        world.go(submission)

    (one,), said = cancelled(world, submission, sleep=sleep)
    assert one["outcome"] == "cancelled job 1"
    assert said == [f"{submission.sid} is being submitted: waiting for its job"]


def test_a_run_that_gets_no_job_in_time_is_not_cancelled(world: World) -> None:
    """The others are cancelled at once; the outcome of this one is `not cancelled`."""
    stuck = cut_off(world, 1000.0)
    other = world.submit()
    began = world.clock.now
    done, _ = cancelled(world, stuck, other, stuck)
    assert [(one["id"], one["job_id"]) for one in done] == [(stuck.sid, ""), (other.sid, "1")]
    assert done[0]["outcome"].startswith("not cancelled: it is being submitted (sbatch still")
    assert done[1]["outcome"] == "cancelled job 1"
    assert 10 < world.clock.now - began < 30


def test_a_run_without_a_job_needs_no_waiting(world: World) -> None:
    """Never submitted is over: there is nothing to cancel, and nothing will come."""
    submission = world.prepare()
    world.clock.sleep(1000)
    world.clock.sleeps.clear()
    (one,), said = cancelled(world, submission)
    assert one["outcome"] == "is over already (NOT SUBMITTED)"
    assert not said
    assert not world.clock.sleeps
