"""The state of a run comes from its own records first, then from one question per scheduler."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest

from hpml_orchestrator.records.files import read_json, write_json, write_text
from hpml_orchestrator.records.run import Attempt
from hpml_orchestrator.runs.follow import wait_until_over
from hpml_orchestrator.runs.history import attempt_reports
from hpml_orchestrator.runs.state import State
from hpml_orchestrator.runs.status import states
from hpml_orchestrator.scheduler.model import JobState, JobStatus, Scheduler
from hpml_orchestrator.scheduler.slurm.client import PollSchedule
from hpml_orchestrator.testing.scheduler import Fault, Killed

if TYPE_CHECKING:
    from hpml_orchestrator.records.submission import Submission
    from tests.unit.runs.conftest import World


def no_scheduler(name: str, host: str) -> Scheduler:
    raise AssertionError(f"the scheduler {name} of {host} was asked")


def moments_of_questions(world: World) -> list[float]:
    """Have the scheduler note when it is asked."""
    asked: list[float] = []
    original = world.scheduler.query

    def query(job_ids: Sequence[str]) -> dict[str, JobStatus]:
        asked.append(world.clock.now)
        return original(job_ids)

    world.scheduler.query = query  # type: ignore[method-assign]
    return asked


@pytest.fixture
def submitted(world: World) -> Submission:
    """A submission whose job waits in the queue."""
    return world.submit()


def test_a_job_goes_through_its_states(world: World, submitted: Submission) -> None:
    """The scheduler's status, joined with when it was submitted and started."""
    waiting = world.state(submitted)
    assert (waiting.state, waiting.over, waiting.attempts) == ("PENDING", False, 0)
    assert (waiting.job_id, waiting.name, waiting.backend) == ("1", "probe", "slurm")
    world.clock.sleep(5)
    world.scheduler.move("1", JobState.RUNNING)
    attempt = world.starts(submitted, "1")
    running = world.state(submitted)
    assert (running.state, running.attempts) == ("RUNNING", 1)
    assert running.started == world.clock.now
    world.clock.sleep(7)
    world.ends(attempt)
    world.scheduler.move("1", JobState.COMPLETED, exit_code=0)
    over = world.state(submitted)
    assert (over.state, over.over, over.exit_code) == ("COMPLETED", True, 0)
    assert over.ended == world.clock.now


def test_what_is_over_is_never_asked_for_again(world: World, submitted: Submission) -> None:
    """The end is written down with the submission; from then on no scheduler is needed."""
    world.scheduler.move("1", JobState.TIMEOUT)
    first = world.state(submitted)
    (second,) = states(world.store, [submitted], backends=no_scheduler)
    assert second == first
    assert read_json(submitted.directory / "final.json")["state"] == "TIMEOUT"


def test_a_scheduler_is_asked_once_for_all(world: World) -> None:
    """Submissions from several login nodes are one question to their one Slurm."""
    made = []
    for host in ("login1", "login1", "login2"):
        submission = world.submit()
        record = submission.record()
        write_json(submission.directory / "submit.json", {**record, "host": host})
        made.append(submission)
    asked = moments_of_questions(world)
    found = states(world.store, [*made, made[0]], backends=world.backends, now=world.clock.time)
    assert [state.job_id for state in found] == ["1", "2", "3", "1"]
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("code", "reason", "state"),
    [
        (0, "completed", "COMPLETED"),
        (3, "failed", "FAILED"),
        (143, "cancelled", "CANCELLED"),
        (143, "time limit", "TIMEOUT"),
        (143, "preempted", "PREEMPTED"),
    ],
)
def test_a_forgotten_job_is_judged_by_its_own_word(
    world: World, submitted: Submission, code: int, reason: str, state: str
) -> None:
    """Without accounting, the last record of the job has its end."""
    world.ends(world.starts(submitted, "1"), code, reason, state)
    world.clock.sleep(3600)
    world.scheduler.jobs.clear()
    found = world.state(submitted)
    assert (found.state, found.over, found.exit_code) == (state, True, code)
    advice = ": 01:00:00 requested; raise it with --set resources.time=…" * (state == "TIMEOUT")
    assert found.reason == f"{reason} (the job's own record){advice}"
    assert found.nodes == found.to_json()["nodes"] == "n[1-2]"


TIME = ": 00:10:00 requested; raise it with --set resources.time=…"
RAISE = "raise it with `hpml resubmit RUN --set resources.memory=…`"
MEMORY = f": 4G per node requested; {RAISE}"
NO_MEMORY = f": the job requested no amount; {RAISE}"


@pytest.mark.parametrize(
    ("state", "said", "end", "memory", "told"),
    [
        ("TIMEOUT", "TimeLimit", None, "4G", f"time limit{TIME}"),
        ("TIMEOUT", "None", (143, "time limit", "TIMEOUT"), None, f"time limit{TIME}"),
        ("FAILED", "NonZeroExitCode", (143, "time limit", "TIMEOUT"), None, f"time limit{TIME}"),
        ("OUT_OF_MEMORY", "OutOfMemory", None, "4G", f"out of memory{MEMORY}"),
        ("OUT_OF_MEMORY", "", (1, "failed", "FAILED"), "4G", f"out of memory{MEMORY}"),
        (
            "FAILED",
            "NonZeroExitCode",
            (137, "rank 3 ran out of memory", "OUT_OF_MEMORY"),
            None,
            f"rank 3 ran out of memory{NO_MEMORY}",
        ),
        ("FAILED", "NonZeroExitCode", (1, "no conda on PATH", "FAILED"), None, "no conda on PATH"),
        ("FAILED", "NonZeroExitCode", (3, "failed", "FAILED"), None, "exit code 3"),
        ("CANCELLED", "None", (143, "time limit", "TIMEOUT"), None, ""),
    ],
)
def test_the_reason_is_the_most_specific_one(
    world: World,
    state: str,
    said: str,
    end: tuple[int, str, str] | None,
    memory: str | None,
    told: str,
) -> None:
    """The job's own record before the scheduler's word; a limit with what was requested."""
    submission = world.submit(resources={"time": "10:00", "memory": memory})
    attempt = world.starts(submission, "1")
    if end:
        world.ends(attempt, *end)
    world.scheduler.move("1", JobState(state), exit_code=3)
    job = world.scheduler.jobs["1"]
    job.status = replace(job.status, reason=said)
    told = told.replace("RUN", submission.sid)
    assert world.state(submission).reason == told
    assert read_json(submission.directory / "final.json")["reason"] == told


def test_more_time_is_no_advice_for_a_run_that_saves_nothing(
    world: World, submitted: Submission
) -> None:
    """It says why the run does not continue, and nothing else."""
    attempt = world.starts(submitted, "1")
    end = {"exit_code": 75, "state": "TIMEOUT", "reason": "time limit; 3 attempts", "time": 9.0}
    write_json(attempt / "ended.json", {**end, "stays": "3 attempts", "goes_on": False})
    world.scheduler.move("1", JobState("FAILED"), exit_code=75)
    assert world.state(submitted).reason == "time limit; 3 attempts"


EXCEEDED = (
    "slurmstepd-n2: error: StepId={}.batch exceeded memory limit (3319001088 > 3232759808), being"
    " killed\nslurmstepd-n2: error: *** JOB 1 ON n2 CANCELLED AT 2026-11-28T16:42:23 ***\n"
)


@pytest.mark.parametrize(
    ("state", "signal", "output", "reason", "code"),
    [
        ("FAILED", 9, "", "the job's script was ended by SIGKILL", 137),
        (
            "FAILED",
            9,
            EXCEEDED.format(1),
            f"out of memory on n2, 3.1 GiB of at most 3.0 GiB{NO_MEMORY}",
            137,
        ),
        ("FAILED", 9, EXCEEDED.format(11), "the job's script was ended by SIGKILL", 137),
        ("FAILED", 0, "", "JobLaunchFailure", None),
        (
            "NODE_FAIL",
            0,
            "",
            "a node failed, probably n1: the job's script left no record of its end",
            0,
        ),
    ],
)
def test_a_script_that_was_killed_has_an_end(
    world: World, state: str, signal: int, output: str, reason: str, code: int | None
) -> None:
    """From Slurm's signal and from what slurmstepd printed; never `FAILED` with exit code 0."""
    submission = world.submit()
    attempt = world.starts(submission, "1")
    write_json(attempt / "head.json", {"node": "n1", "output_bytes": 0})
    (world.store.runs_dir / submission.sid / "output.log").write_text(output)
    world.scheduler.move("1", JobState(state), exit_code=0, signal=signal)
    job = world.scheduler.jobs["1"]
    job.status = replace(job.status, reason="JobLaunchFailure", may_requeue=False)
    found = world.state(submission)
    assert (found.state, found.exit_code) == (state, code)
    assert found.reason == reason.replace("RUN", submission.sid)


def test_an_attempt_that_was_killed_gets_its_end_from_accounting(
    world: World, submitted: Submission
) -> None:
    """Its script left no record of it; the start of the job that is nearest in time has the end."""
    attempt = Attempt(world.starts(submitted, "1"))
    began = world.clock.now
    world.clock.sleep(60)
    world.starts(submitted, "1", 1)
    world.scheduler.jobs["1"].status = replace(world.scheduler.jobs["1"].status, restarts=1)
    world.scheduler.move("1", JobState.RUNNING)
    assert world.state(submitted).state == "RUNNING"
    assert attempt.ended is None
    world.scheduler.accounted = [
        JobStatus("1", JobState.PREEMPTED, started=began - 1, ended=began + 9),
        JobStatus("1", JobState.RUNNING, started=began + 60),
    ]
    state = world.state(submitted)
    first, second = attempt_reports(state)
    assert (first.reason, first.ended, second.reason) == ("preempted", began + 9, "running")


def test_nodes_of_an_earlier_attempt_are_not_those_of_one_that_waits(
    world: World, submitted: Submission
) -> None:
    """One that was requeued has none until it starts again; one that nobody knows had some."""
    world.starts(submitted, "1")
    world.scheduler.jobs["1"].status = replace(world.scheduler.jobs["1"].status, restarts=1)
    assert world.state(submitted).nodes == ""
    world.scheduler.jobs.clear()
    world.clock.sleep(100)
    assert (world.state(submitted).nodes, world.state(submitted).lost) == ("n[1-2]", True)


def test_an_uncertain_scheduler_yields_to_the_jobs_own_word(
    world: World, submitted: Submission
) -> None:
    """Gone from the queue while accounting is silent: the job itself knows that it ended."""
    world.scheduler.move("1", JobState.UNKNOWN)
    assert world.state(submitted).state == "UNKNOWN"
    attempt = world.starts(submitted, "1")
    assert not world.state(submitted).over
    world.ends(attempt, 0)
    assert (world.state(submitted).state, world.state(submitted).over) == (
        "COMPLETED",
        True,
    )


def test_a_job_that_nobody_knows(world: World, submitted: Submission) -> None:
    """Right after the submission it may still appear; later it is reported as lost."""
    world.scheduler.jobs.clear()
    found = world.state(submitted)
    assert (found.state, found.over, found.lost) == ("UNKNOWN", False, False)
    assert found.reason == "the scheduler does not know it (yet)"
    world.clock.sleep(100)
    found = world.state(submitted)
    assert (found.state, found.over, found.lost) == ("UNKNOWN", False, True)
    assert "did not record its end" in found.reason
    assert not (submitted.directory / "final.json").exists()


@pytest.mark.parametrize("proven", [True, False])
def test_ranks_that_are_elsewhere_are_the_reason(
    world: World, submitted: Submission, proven: bool
) -> None:
    """A job that wants proof and failed for it: the first rank that is not in its place."""
    attempt = world.starts(submitted, "1")
    if proven:
        ranks = [{"rank": 2, "wrong": []}, {"rank": 3, "wrong": ["runs on CPUs 0"]}]
        ranks.append({"rank": 4, "wrong": ["sees no GPU"]})
        write_json(attempt / "binding" / "n1.proof.json", {"node": "n1", "ranks": ranks})
    world.ends(attempt, 79, "binding")
    world.scheduler.move("1", JobState.FAILED, exit_code=79)
    state = world.state(submitted)
    assert (state.state, state.exit_code) == ("FAILED", 79)
    assert state.reason == (
        "rank 3 on n1 runs on CPUs 0 (and 1 more)"
        if proven
        else "ranks are not bound as planned: the job's output names them"
    )


def test_submissions_without_a_job(world: World) -> None:
    """Refused, never submitted, and interrupted a moment ago: each has its own state."""
    refused = world.prepare()
    refused.record_refusal("no such account", now=1.0)
    assert (world.state(refused).state, world.state(refused).over) == ("REFUSED", True)
    assert world.state(refused).reason == "no such account"
    never = world.prepare()
    found = world.state(never)
    assert (found.state, found.reason) == ("SUBMITTING", "hpml is about to call sbatch")
    world.clock.sleep(1000)
    found = world.state(never)
    assert (found.state, found.over) == ("NOT SUBMITTED", True)
    assert f"hpml submit --resume {never.sid}" in found.reason
    cut = world.prepare()
    world.scheduler.faults = [Fault.KILLED_DURING]
    with pytest.raises(Killed):
        world.go(cut)
    found = world.state(cut)
    assert (found.state, found.over) == ("SUBMITTING", False)
    world.clock.sleep(31)
    assert world.state(cut).state == "PENDING"
    job = cut.job()
    assert job is not None
    assert job["job_id"] == "1"


def test_damaged_records_do_not_hide_the_others(world: World) -> None:
    """A record that is missing, not JSON, or newer is reported; the others are listed."""
    made = [world.prepare(f"p{number}") for number in range(6)]
    for submission in made[1:]:
        world.go(submission)
    write_text(made[0].directory / "submit.json", "{")
    shutil.rmtree(world.store.runs_dir / made[1].sid)
    write_text(made[2].directory / "runs.tsv", "")
    write_text(made[3].directory / "job.json", '{"schema_version": 99}')
    (made[4].directory / "job.json").unlink()
    shutil.rmtree(world.store.runs_dir / made[4].sid)
    found = {
        state.submission.sid: state.state
        for state in states(
            world.store,
            world.store.submissions(),
            backends=world.backends,
            now=world.clock.time,
        )
    }
    assert [found[submission.sid] for submission in made] == [
        "UNREADABLE",
        "PENDING",
        "UNREADABLE",  # it could be a job array
        "UNREADABLE",
        "UNREADABLE",
        "PENDING",
    ]


@pytest.fixture
def wait(world: World) -> Callable[..., State]:
    """Wait for a submission's end in the world's own time."""
    return partial(
        wait_until_over,
        world.store,
        sleep=world.clock.sleep,
        now=world.clock.time,
        backends=world.backends,
    )


def test_waiting_asks_ever_more_rarely(
    world: World, submitted: Submission, wait: Callable[..., State]
) -> None:
    """From every second to every 30 seconds; an hour of waiting is some 130 questions."""
    world.scheduler.jobs["1"].states = [(0, JobState.RUNNING), (3600, JobState.COMPLETED)]
    asked = moments_of_questions(world)
    assert wait(submitted, pauses=PollSchedule(jitter=0)).state == "COMPLETED"
    gaps = [later - earlier for earlier, later in itertools.pairwise(asked)]
    assert gaps[:9] == pytest.approx([1, 2, 3, 5, 8, 13, 20, 30, 30])
    assert max(gaps) == pytest.approx(30)
    assert 110 < len(asked) < 150


@pytest.mark.parametrize(("backend", "at_most_seconds"), [("slurm", 1.01), ("local", 0.21)])
def test_the_jobs_own_end_is_noticed_at_once(
    world: World, wait: Callable[..., State], backend: str, at_most_seconds: float
) -> None:
    """What the job writes as its last act makes the next question come within a second."""
    submission = world.submit(backend=backend)
    attempt = world.starts(submission, "1")
    world.scheduler.move("1", JobState.RUNNING)
    ended = 0.0

    def each(_: State) -> None:
        nonlocal ended
        if world.clock.now > 1_800_000_200 and not ended:
            ended = world.clock.now
            world.ends(attempt)
            world.scheduler.move("1", JobState.COMPLETED)

    assert wait(submission, each=each).over
    assert world.clock.now - ended <= at_most_seconds


def test_a_lost_job_is_not_waited_for_forever(
    world: World, submitted: Submission, wait: Callable[..., State]
) -> None:
    """Three answers in a row without the job end the waiting; a silent scheduler does not."""
    world.scheduler.jobs.clear()
    world.scheduler.faults = [Fault.NONE, Fault.UNAVAILABLE] * 20
    found = wait(submitted)
    assert (found.state, found.lost) == ("UNKNOWN", True)
    assert world.scheduler.faults == []


@pytest.mark.parametrize("word", [JobState.PREEMPTED, JobState.NODE_FAIL, JobState.BOOT_FAIL])
def test_an_end_that_may_be_followed_by_a_requeue_is_not_final_at_once(
    world: World, submitted: Submission, word: JobState
) -> None:
    """A preempted job is waited for a while: it may be on its way back into the queue."""
    world.scheduler.move("1", word)
    found = world.state(submitted)
    assert (found.state, found.over, found.reason) == (word.value, False, "it may be requeued")
    world.scheduler.move("1", JobState.PENDING)
    assert world.state(submitted).state == "PENDING"
    world.scheduler.move("1", word)
    world.clock.sleep(200)
    assert world.state(submitted).over


def test_a_job_that_slurm_does_not_requeue_is_over_at_once(
    world: World, submitted: Submission
) -> None:
    """Its node failed, and its Requeue flag is off: there is nothing to wait for."""
    world.scheduler.move("1", JobState.NODE_FAIL)
    job = world.scheduler.jobs["1"]
    job.status = replace(job.status, may_requeue=False)
    found = world.state(submitted)
    assert (found.state, found.over) == ("NODE_FAIL", True)
