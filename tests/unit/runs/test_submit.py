"""A submission is written down before it is made, and completed when it was cut off."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpml_orchestrator.errors import InputError, SchedulerError, SchedulerUnavailable
from hpml_orchestrator.records.job import NodeJob
from hpml_orchestrator.runs.backend import choose
from hpml_orchestrator.runs.submit import submit
from hpml_orchestrator.scheduler.model import SubmitRequest
from hpml_orchestrator.script import archive
from hpml_orchestrator.testing.scheduler import Fault, Killed

if TYPE_CHECKING:
    from tests.unit.runs.conftest import World


def test_a_prepared_submission_says_everything(world: World) -> None:
    """Job, script, its files, provenance, and which variables travel, but not their values."""
    submission = world.prepare()
    record = submission.record()
    assert (record["name"], record["backend"]) == ("probe", "slurm")
    assert record["created"] == world.clock.now
    assert record["comment"] == f"hpml:{submission.sid}"
    assert record["output"] == f"{world.store.runs_dir}/{submission.sid}/output.log"
    assert record["environment_names"] == ["PATH", "TOKEN", "USER"]
    assert record["job"]["command"] == ["true"]
    assert record["provenance"]["command_line"] == ["hpml", "submit"]
    assert submission.script.read_text().startswith("#!/bin/bash\n#SBATCH --job-name=probe\n")
    for name, content in archive.node_files().items():
        assert (submission.directory / name).read_bytes() == content
    assert NodeJob.read(submission.directory).job.to_json() == record["job"]
    assert world.scheduler.jobs == {}


def test_the_job_is_recorded(world: World) -> None:
    """The marker is written before sbatch is called, the id after it, the arguments exactly."""
    submission = world.prepare()
    assert world.go(submission) == "1"
    job = submission.job()
    assert job is not None
    assert (job["job_id"], job["how"]) == ("1", "sbatch")
    assert submission.started_at() == world.clock.now
    arguments = (submission.directory / "arguments").read_bytes().split(b"\0")[:-1]
    assert arguments == [b"sbatch", str(submission.script).encode()]
    assert world.resume(submission) == "1"
    assert len(world.scheduler.jobs) == 1


def test_a_refusal_is_recorded(world: World) -> None:
    """No job exists, and resuming reports the reason instead of trying again."""
    submission = world.prepare()
    world.scheduler.faults = [Fault.REFUSED]
    with pytest.raises(SchedulerError, match="Invalid account"):
        world.go(submission)
    refused = submission.refused()
    assert refused is not None
    assert "Invalid account" in refused["reason"]
    with pytest.raises(InputError, match="the scheduler refused it: .*Invalid account"):
        world.resume(submission)
    assert world.scheduler.jobs == {}


@pytest.mark.parametrize("fault", [Fault.UNAVAILABLE, Fault.LOST_ANSWER])
def test_no_answer_is_no_refusal(world: World, fault: Fault) -> None:
    """The hint names `--resume`, which finds the job, or submits it if none exists."""
    submission = world.prepare()
    world.scheduler.faults = [fault]
    with pytest.raises(SchedulerUnavailable) as caught:
        world.go(submission)
    assert f"hpml submit --resume {submission.sid}" in caught.value.hint
    said: list[str] = []
    assert world.resume(submission, said) == "1"
    assert len(world.scheduler.jobs) == 1
    job = submission.job()
    assert job is not None
    assert job["how"] == ("queue" if fault is Fault.LOST_ANSWER else "sbatch")


@pytest.mark.parametrize("array", [None, "0-3"])
@pytest.mark.parametrize(
    "fault", [Fault.KILLED_BEFORE, Fault.KILLED_DURING, Fault.BOTH_KILLED, Fault.KILLED_AFTER]
)
def test_a_killed_hpml_makes_one_job(world: World, fault: Fault, array: str | None) -> None:
    """Wherever it is killed: resuming, twice, leaves exactly one job, or one array."""
    submission = world.prepare(array=array)
    world.scheduler.faults = [fault]
    with pytest.raises(Killed):
        world.go(submission)
    first = world.resume(submission)
    world.clock.sleep(1000)
    assert world.resume(submission) == first
    tasks = [f"1_{index}" for index in range(4)]
    assert list(world.scheduler.jobs) == (tasks if array else ["1"])


@pytest.mark.parametrize("killed", [False, True])
def test_who_looked_too_early_does_not_submit(world: World, killed: bool) -> None:
    """While one hpml looks, another submits: the first finds its start taken, and then the job.

    The same when there was a start before, whose hpml was killed.
    """
    submission = world.prepare()
    if killed:
        submission.mark_started(now=world.clock.now)
        world.clock.sleep(1000)
    look = world.scheduler.find
    between: list[str] = []

    def find(directory: Path, *, name: str, since: float) -> list[str]:
        found = look(directory, name=name, since=since)
        if not between:
            between.append("")  # the other one's own look
            between.append(world.resume(submission))
        return found

    world.scheduler.find = find  # type: ignore[method-assign]
    assert world.resume(submission) == between[1] == "1"
    assert len(world.scheduler.jobs) == 1
    assert submission.starts() == 1 + killed


def test_a_submission_that_another_hpml_has_taken_is_left_to_it(world: World) -> None:
    """Resumed in the moment between its records and its sbatch: the first hpml calls none."""
    submission = world.prepare()
    assert world.resume(submission) == "1"
    with pytest.raises(SchedulerUnavailable, match="another hpml") as caught:
        world.go(submission)
    assert f"hpml submit --resume {submission.sid}" in caught.value.hint
    assert len(world.scheduler.jobs) == 1


def test_a_start_that_was_long_under_way_is_not_used(world: World) -> None:
    """The file server hung for minutes: other processes may have continued; no call of sbatch."""
    submission = world.prepare()
    times = iter([100.0, 400.0])
    with pytest.raises(SchedulerUnavailable, match="too slow"):
        submit(submission, world.scheduler, environment={}, clock=lambda: next(times))
    assert world.scheduler.jobs == {}
    assert world.resume(submission) == "1"


def test_a_waiting_hpml_sees_the_job_of_the_other_at_once(world: World) -> None:
    """It does not sit out the two minutes that it would wait for an sbatch that nobody sees."""
    submission = world.prepare()
    begun = world.clock.now
    submission.mark_started(now=begun)

    def sleep(seconds: float) -> None:
        world.clock.sleep(seconds)
        if world.clock.now - begun >= 3:
            submission.record_job("7", how="sbatch", now=world.clock.now)

    assert world.resume(submission, sleep=sleep) == "7"
    assert world.clock.now - begun < 5
    assert world.scheduler.jobs == {}


def test_a_job_that_has_started_is_known_by_its_own_word(world: World) -> None:
    """The attempt that it claimed names it, also when the queue no longer shows it."""
    submission = world.prepare()
    submission.mark_started(now=world.clock.now)
    world.starts(submission, "77")
    assert world.resume(submission) == "77"
    job = submission.job()
    assert job is not None
    assert job["how"] == "job"
    assert world.scheduler.jobs == {}


def test_the_same_travels_to_every_backend(world: World) -> None:
    """The request carries exactly the variables that the record names."""
    submission = world.prepare(environment={"inherit": "minimal"})
    seen: dict[str, str] = {}
    original = world.scheduler.submit

    def spy(request: SubmitRequest, arguments: Sequence[str] = ()) -> str:
        seen.update(request.environment)
        return original(request, arguments)

    world.scheduler.submit = spy  # type: ignore[method-assign]
    submit(submission, world.scheduler, environment={"PATH": "/b", "X": "y", "SLURM_JOB_ID": "3"})
    assert seen == {"PATH": "/b"}


def test_the_backend_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the variable, the profile, or whether there is sbatch; other names are refused."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert choose("auto") == "local"
    (tmp_path / "sbatch").write_text("#!/bin/sh\n")
    (tmp_path / "sbatch").chmod(0o755)
    assert (choose("auto"), choose("local"), choose("slurm")) == ("slurm", "local", "slurm")
    with pytest.raises(InputError, match="--backend: must be auto, slurm or local"):
        choose("pbs")
    job_file = tmp_path / "project" / "job.yaml"
    job_file.parent.mkdir()
    (job_file.parent / "hpml.toml").write_text('backend = "local"\n')
    assert (choose("auto", job_file), choose("slurm", job_file)) == ("local", "slurm")
    assert choose("auto", job_file, "none") == "slurm"
    own = tmp_path / "config" / "hpml" / "site.toml"
    own.parent.mkdir(parents=True)
    own.write_text('backend = "local"\n')
    monkeypatch.setenv("XDG_CONFIG_HOME", str(own.parents[1]))
    (job_file.parent / "hpml.toml").write_text("backend = 'slurm\n")
    with pytest.raises(InputError, match=r"hpml\.toml"):  # not silently on this machine
        choose("auto", job_file)
    for name in ("slurm", "local"):
        monkeypatch.setenv("HPML_BACKEND", name)
        assert (choose("auto"), choose("auto", job_file)) == (name, name)
    monkeypatch.setenv("HPML_BACKEND", "pbs")
    with pytest.raises(InputError, match="HPML_BACKEND: must be auto, slurm or local"):
        choose("auto")
