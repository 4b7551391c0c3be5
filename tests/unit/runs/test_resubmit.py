"""Which runs may be submitted again, where their checkpoints are, and that prune keeps those."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.records.files import write_json
from hpml_orchestrator.runs.load import load_job
from hpml_orchestrator.runs.prune import prune
from hpml_orchestrator.runs.requeue import (
    checkpoint_directory,
    claim_checkpoints,
    job_to_resubmit,
    refuse_to_resubmit,
    requeue,
)
from hpml_orchestrator.scheduler.model import JobState
from hpml_orchestrator.testing.clock import FakeClock
from hpml_orchestrator.testing.scheduler import FakeScheduler

if TYPE_CHECKING:
    from hpml_orchestrator.records.submission import Submission
    from tests.unit.runs.conftest import World


def rewrite(submission: Submission, **more: Any) -> None:
    """Add to the record `submit.json`."""
    path = submission.directory / "submit.json"
    write_json(path, {**json.loads(path.read_text()), **more})


def ended(world: World, name: str = "probe", **fields: Any) -> Submission:
    """A run that has timed out."""
    submission = world.submit(name, **fields)
    job_id = str((submission.job() or {})["job_id"])
    attempt = world.starts(submission, job_id)
    world.scheduler.move(job_id, JobState.RUNNING)
    world.ends(attempt, 1, "time limit", "TIMEOUT")
    world.scheduler.move(job_id, JobState.TIMEOUT)
    return submission


def refused(world: World, submission: Submission) -> InputError:
    """The error for a run that may not be submitted again."""
    with pytest.raises(InputError) as caught:
        refuse_to_resubmit(world.store, world.state(submission), backends=world.backends)
    return caught.value


@pytest.mark.parametrize(
    ("checkpoint", "directory"),
    [
        (False, ""),
        (True, "{run}/checkpoints"),
        ({"directory": "out/saved"}, "{run}/out/saved"),
        ({"directory": "{run.dir}/saved", "requeue": []}, "{run}/saved"),
        ({"directory": "/scratch/mine"}, "/scratch/mine"),
        ({"directory": "/scratch/{run.id}"}, "/scratch/{id}"),
    ],
)
@pytest.mark.parametrize("array", [None, "0-1"])
def test_the_checkpoints_of_the_old_run(
    world: World, checkpoint: Any, directory: str, array: str | None
) -> None:
    """The new job names them absolutely, whatever the old one had; each task its own."""
    if array and directory == "/scratch/mine":
        checkpoint = {"directory": "/scratch/mine/{array.index}"}
        directory = "/scratch/mine/{array.index}"
    submission = world.submit(checkpoint=checkpoint, array=array)
    state = world.state(submission)
    name = f"{submission.sid}.{{array.index}}" if array else submission.sid
    run = str(world.store.runs_dir / name)
    wanted = directory.replace("{run}", run).replace("{id}", name)
    assert checkpoint_directory(submission) == wanted
    job = job_to_resubmit(state)
    if wanted:
        assert job.checkpoint.directory == wanted
    (world.root / "again.yaml").write_text(json.dumps(job.to_json()))
    again = load_job(world.root / "again.yaml").job
    assert again.checkpoint.directory == (wanted or "checkpoints")
    assert again.checkpoint.enabled == bool(wanted)


def test_a_job_that_has_started_waits_for_nobody_again(world: World) -> None:
    """The runs that it waited for may be gone by now."""
    submission = ended(world)
    path = submission.directory / "submit.json"
    record = json.loads(path.read_text())
    record["job"]["after"] = ["ok:gone"]
    write_json(path, record)
    assert job_to_resubmit(world.state(submission)).after == ()
    cancelled = world.submit("never")
    world.scheduler.move(str((cancelled.job() or {})["job_id"]), JobState.CANCELLED)
    record = json.loads((cancelled.directory / "submit.json").read_text())
    record["job"]["after"] = ["any:gone"]
    write_json(cancelled.directory / "submit.json", record)
    assert job_to_resubmit(world.state(cancelled)).after == ("any:gone",)


@pytest.mark.parametrize("saves", [True, False])
def test_a_run_that_is_not_over_is_requeued_instead(world: World, saves: bool) -> None:
    """Two jobs would write the same checkpoints. A requeue is advised only if it is possible."""
    submission = world.submit(checkpoint=saves)
    error = refused(world, submission)
    assert "has not ended: it is PENDING" in str(error)
    assert error.hint == f"`hpml cancel {submission.sid}` first"
    world.scheduler.move("1", JobState.RUNNING)
    world.starts(submission, "1")
    assert (f"hpml requeue {submission.sid}" in refused(world, submission).hint) == saves


def test_what_something_else_starts_again(world: World) -> None:
    """A sweep's point, a function, and one task."""
    submission = ended(world)
    rewrite(submission, sweep="s-1")
    assert refused(world, submission).hint == "hpml sweep resume s-1"
    function = ended(world, "call", environment={"variables": {"SUBMITIT_EXECUTOR": "hpml"}})
    assert "submitit" in str(refused(world, function))
    array = world.submit("tasks", array="0-1")
    job_id = str((array.job() or {})["job_id"])
    for index in (0, 1):
        world.scheduler.move(f"{job_id}_{index}", JobState.FAILED)
    assert refused(world, replace(array, index=1)).hint == f"hpml resubmit {array.sid}"
    refuse_to_resubmit(world.store, world.state(array), backends=world.backends)


def test_a_run_of_another_cluster(world: World) -> None:
    """Its checkpoints may not even be here."""
    submission = world.submit()
    world.scheduler.cluster_name = "other"
    assert "is on cluster fake; this is other" in str(refused(world, submission))


def test_only_one_run_continues_another_at_a_time(world: World) -> None:
    """Also through a third run in between; once it is over the next may."""
    first = ended(world, checkpoint=True)
    directory = checkpoint_directory(first)
    world.clock.sleep(1)
    second = ended(world, "second", checkpoint={"directory": directory})
    rewrite(second, continues=first.sid)
    world.clock.sleep(1)
    third = world.submit("third", checkpoint={"directory": directory})
    rewrite(third, continues=second.sid)
    for submission in (first, second):
        error = refused(world, submission)
        assert f"is continued by {third.sid}, which is PENDING" in str(error)
        assert f"hpml cancel {third.sid}" in error.hint
    with pytest.raises(InputError, match="is continued by third"):
        requeue(world.store, first, environment={}, clock=world.clock.time, backends=world.backends)
    world.scheduler.move(str((third.job() or {})["job_id"]), JobState.CANCELLED)
    refuse_to_resubmit(world.store, world.state(second), backends=world.backends)
    with pytest.raises(InputError, match="is continued by third") as caught:
        requeue(world.store, first, environment={}, clock=world.clock.time, backends=world.backends)
    assert caught.value.hint == f"hpml requeue {third.sid}"  # first has none of its steps left


def test_prune_keeps_the_checkpoints_of_a_run_that_is_continued(world: World) -> None:
    """Until what continues it is removed, too."""
    first = ended(world, checkpoint=True)
    directory = checkpoint_directory(first)
    second = ended(world, "second", checkpoint={"directory": directory})
    rewrite(second, continues=first.sid)
    done = prune(world.store, [first], dry_run=False, backends=world.backends)
    assert done.kept == [(first.sid, f"has the checkpoints of {second.sid}, which continues it")]
    assert (world.store.runs_dir / first.sid).is_dir()
    both = prune(world.store, [first, second], dry_run=False, backends=world.backends)
    assert {run.id for run in both.removed} == {first.sid, second.sid}


def test_prune_keeps_the_checkpoints_of_an_array(world: World) -> None:
    """The directory that the next array has is in the runs of its tasks."""

    def ended_array(name: str, checkpoint: Any) -> Submission:
        submission = world.submit(name, array="0-1", checkpoint=checkpoint)
        for index in (0, 1):
            job_id = (submission.job() or {})["job_id"]
            world.scheduler.move(f"{job_id}_{index}", JobState.FAILED)
        return submission

    used, unused = ended_array("used", True), ended_array("unused", True)
    ended_array("next", {"directory": checkpoint_directory(used)})
    done = prune(world.store, [used, unused], dry_run=False, backends=world.backends)
    assert [sid for sid, _ in done.kept] == [used.sid]
    assert [run.id for run in done.removed] == [unused.sid]


def test_a_directory_belongs_to_whoever_claims_it_first(world: World) -> None:
    """Of submissions, and of what continues a run; a refused continuation leaves no trace."""

    def again() -> None:
        requeue(world.store, first, environment={}, backends=world.backends)

    def claim(submission: Submission) -> None:
        claim_checkpoints(world.store, submission, backends=world.backends)

    world.scheduler = FakeScheduler(FakeClock(time.time()))
    first = ended(world, checkpoint=True)
    directory = {"directory": checkpoint_directory(first)}
    faster, slower = (world.prepare(name, checkpoint=directory) for name in ("faster", "slower"))
    claim(faster)
    before = world.state(first)
    held = f"{faster.sid}, which is SUBMITTING, saves its checkpoints there"
    with pytest.raises(InputError, match=held):
        claim(slower)
    with pytest.raises(InputError, match=held):
        again()
    assert world.state(first) == before
    world.scheduler.move(world.go(faster), JobState.COMPLETED)
    again()
    with pytest.raises(InputError, match=f"{first.sid}, which is PENDING, saves its"):
        claim(slower)
