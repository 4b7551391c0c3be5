"""`after`: which runs a job still has to wait for is decided by their records."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.runs.select import pending_dependencies
from hpml_orchestrator.scheduler.model import Dependency, JobState
from hpml_orchestrator.testing.scheduler import Fault, Killed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpml_orchestrator.records.schema import WaitedRun
    from hpml_orchestrator.scheduler.model import SubmitRequest
    from tests.unit.runs.conftest import World


def found(world: World, words: Sequence[str], backend: str = "slurm") -> list[WaitedRun]:
    return pending_dependencies(world.store, words, backend=backend, backends=world.backends)


def run(world: World, name: str, **fields: Any) -> str:
    submission = world.submit(name, **fields)
    return submission.sid


def test_runs_that_are_not_over_are_waited_for(world: World) -> None:
    """By their job ids, an array as a whole or one task; `ok` by default."""
    one, many = run(world, "one"), run(world, "many", array="0-3")
    assert found(world, ["one-", f"any:{many}.3", f"notok:{many}", "ok:1"]) == [
        {"run": one, "end": "ok", "job_id": "1"},
        {"run": f"{many}.3", "end": "any", "job_id": "2_3"},
        {"run": many, "end": "notok", "job_id": "2"},
        {"run": one, "end": "ok", "job_id": "1"},
    ]


@pytest.mark.parametrize("forgotten", [False, True])
@pytest.mark.parametrize(
    ("state", "right", "wrong"),
    [(JobState.COMPLETED, "ok", "notok"), (JobState.FAILED, "notok", "ok")],
)
def test_runs_that_are_over(
    world: World, state: JobState, right: str, wrong: str, forgotten: bool
) -> None:
    """One that ended as wanted needs no waiting, though Slurm may have forgotten it."""
    one = run(world, "one")
    world.scheduler.move("1", state, exit_code=int(state is JobState.FAILED))
    if forgotten:
        found(world, [f"any:{one}"])  # somebody asked in time: the end is on record
        del world.scheduler.jobs["1"]
    assert found(world, [f"any:{one}", f"{right}:{one}"]) == []
    with pytest.raises(InputError, match=f"{one} ended {state.value}, and the job should start"):
        found(world, [f"{wrong}:{one}"])


def test_runs_that_cannot_be_waited_for(world: World) -> None:
    """No such run, no job, another backend's: refused, with the word and what would be right."""
    world.prepare("cut")
    world.prepare("here", backend="local")
    refused = world.prepare("refused")
    refused.record_refusal("no such account", now=0)
    for word, said in {
        "any:nope": "no run 'nope'",
        "cut-": "has no job to wait for: hpml was interrupted",
        "refused-": "has no job to wait for: no such account",
        "here-": "is a run of the local",
        "": "must name a run",
    }.items():
        with pytest.raises(InputError, match=re.escape(said)) as caught:
            found(world, [word])
        assert (caught.value.field, caught.value.value) == ("after", word)


def test_a_resumed_submission_still_waits(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs to wait for are recorded, checked again, and reported while it waits."""
    asked: list[SubmitRequest] = []
    arguments = world.scheduler.arguments

    def seen(request: SubmitRequest) -> list[str]:
        asked.append(request)
        return arguments(request)

    monkeypatch.setattr(world.scheduler, "arguments", seen)
    one, two = run(world, "one"), run(world, "two")
    waits = found(world, [one, f"any:{two}"])
    submission = world.prepare("next", after=waits)
    assert json.loads((submission.directory / "submit.json").read_text())["after"] == waits
    world.scheduler.faults.append(Fault.KILLED_BEFORE)
    with pytest.raises(Killed):
        world.go(submission)
    world.scheduler.move("2", JobState.FAILED)
    world.resume(submission, after=lambda words: found(world, words))
    assert [request.after for request in asked[-2:]] == [
        (Dependency("1", "ok"), Dependency("2", "any")),
        (Dependency("1", "ok"),),
    ]
    job = world.scheduler.jobs["3"]
    for state, reason, told in [
        (JobState.PENDING, "Dependency", f"waits for {one} (ok), {two} (any)"),
        (
            JobState.CANCELLED,
            "DependencyNeverSatisfied",
            f"did not start: it waited for {one}",
        ),
    ]:
        world.scheduler.move("3", state)
        job.status = job.status.__class__(**{**vars(job.status), "reason": reason})
        assert world.state(submission).reason.startswith(told)
