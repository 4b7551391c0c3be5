"""The attempts of a run together, from records written by hand."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from hpml_orchestrator.diagnosis.model import Diagnosis
from hpml_orchestrator.diagnosis.report import status_line
from hpml_orchestrator.errors import JobFailedError
from hpml_orchestrator.records.feed import Event
from hpml_orchestrator.records.files import write_json
from hpml_orchestrator.runs.facts import gather
from hpml_orchestrator.runs.follow import refuse_failed
from hpml_orchestrator.runs.history import (
    AttemptReport,
    RunHistory,
    RunLimits,
    history_of,
    read_history,
)
from hpml_orchestrator.runs.live import LiveJobs
from hpml_orchestrator.runs.reporting.description import last_result
from hpml_orchestrator.runs.reporting.monitor import last_report
from hpml_orchestrator.runs.reporting.summary import summarise
from hpml_orchestrator.runs.reporting.text import summary_lines
from hpml_orchestrator.scheduler.model import JobState

if TYPE_CHECKING:
    from pathlib import Path

    from hpml_orchestrator.records.submission import Submission
    from tests.unit.runs.conftest import World

CHECKPOINT = {"requeue": ["time_limit", "preemption"], "attempts": 20}


@dataclass
class Training:
    """A job that saves, is stopped and continues; its records are those of two ranks."""

    world: World
    submission: Submission
    attempts: int = 0

    def start(self, *, step: int = 0, after: float = 100.0) -> Path:
        """Begin an attempt, which takes its first step after some seconds."""
        world = self.world
        attempt = world.starts(self.submission, "1", self.attempts)
        self.attempts += 1
        world.scheduler.move("1", JobState.RUNNING)
        world.clock.sleep(after)
        for rank in (0, 1):
            if step:
                world.event(attempt, "resumed", rank, step=step, checkpoint="c")
            world.event(attempt, "training", rank, step=step, total_steps=10_000)
            world.event(attempt, "step", rank, steps_total=0)
        return attempt

    def train(self, attempt: Path, seconds: float, steps: int) -> None:
        """Let both ranks take steps since the attempt began, `steps` in all."""
        self.world.clock.sleep(seconds)
        for rank in (0, 1):
            self.world.event(attempt, "step", rank, steps_total=steps)

    def save(self, attempt: Path, step: int, seconds: float) -> None:
        """Let both ranks write their part of a checkpoint."""
        self.world.clock.sleep(seconds)
        for rank in (0, 1):
            self.world.event(attempt, "checkpoint", rank, step=step, seconds=seconds)

    def end(self, attempt: Path, why: str, *, requeue: bool = True, **more: Any) -> None:
        """End an attempt; the job waits again, or is over."""
        world = self.world
        reason = {"time_limit": "time limit", "preemption": "preempted"}.get(why, "failed")
        code = {"exit_code": 75, "reason": reason, "time": world.clock.now}
        write_json(attempt / "ended.json", {**code, "why": why, "goes_on": requeue, **more})
        world.scheduler.move("1", JobState.PENDING if requeue else JobState.TIMEOUT)

    def life(self) -> RunHistory:
        """The attempts as of now."""
        life = read_history(self.world.state(self.submission), now=self.world.clock.now)
        assert life is not None
        return life

    def lines(self) -> dict[str, list[str]]:
        """The lines of `hpml show` now, by name."""
        state = self.world.state(self.submission)
        shown: dict[str, list[str]] = {}
        name = ""
        for head, text in summary_lines(state, summarise(state), self.life()):
            name = head or name
            shown.setdefault(name, []).append(text)
        return shown


@pytest.fixture
def training(world: World) -> Training:
    """A submitted job with a limit of one hour that continues by itself."""
    submission = world.submit(resources={"time": "1:00:00"}, checkpoint=CHECKPOINT)
    return Training(world, submission)


def test_three_attempts_and_what_they_lost(training: Training) -> None:
    """A planned end loses the queue and the start-up, one without a warning the work since then."""
    world = training.world
    first = training.start()
    assert training.life().line == "attempt 1 of at most 20, time limit in 58 min"
    training.train(first, 2000, 2000)
    training.save(first, 2000, 10)
    world.event(first, "stopping", 0, step=2000)
    training.end(first, "time_limit", step=2000)
    world.clock.sleep(300)  # in the queue
    second = training.start(step=2000, after=60)
    training.train(second, 1000, 1000)
    training.save(second, 3000, 10)
    training.train(second, 500, 1500)  # of which nothing is saved
    training.end(second, "preemption", step=3000)
    world.clock.sleep(200)
    waiting = training.life()
    assert waiting.lost_seconds == pytest.approx(300 + 60 + 500 + 200)
    third = training.start(step=3000, after=40)
    training.train(third, 100, 100)
    life = training.life()
    assert [one.lost_seconds for one in life.attempts] == [0, 300 + 60 + 500, 200 + 40]
    assert life.elapsed_seconds == pytest.approx(100 + 2010 + 300 + 60 + 1510 + 200 + 40 + 100)
    assert life.lost_ratio == pytest.approx(1100 / life.elapsed_seconds)
    assert (life.saving_seconds, life.step, life.total_steps) == (20, 3100, 10_000)
    assert life.line == "attempt 3 of at most 20, resumed at step 3,000, time limit in 58 min"
    # 6,900 s are left to train, 3,460 of them before the limit, and an attempt has 3,533.
    assert (life.left_seconds, life.needed_seconds, life.more_attempts) == (3460, 6900, 1)
    lines = training.lines()
    one, two, three = lines["attempts"]
    assert one.startswith("1: time limit after 35:10")
    assert one.endswith("; steps 0 to 2,000, saved at 2,000")
    assert two.endswith(
        "; steps 2,000 to 3,500, saved at 3,000, "
        "14:20 lost (queue 5:00, start-up 1:00, unsaved work 8:20)"
    )
    assert three.endswith("; steps 3,000 to 3,100, 4:00 lost (queue 3:20, start-up 40 s)")
    lost = "25.5% of the time lost to restarts: 18:20 of 1:12:00 "
    kinds = "(unsaved work 8:20, queue 8:20, start-up 1:40); 2 checkpoints took 20.0 s"
    assert lines["restarts"] == [lost + kinds]
    left = "step 3,100 of 10,000 (31%), 1 steps/s, time limit in 58 min; "
    more = "will not finish before the time limit at this rate: about 1 more attempt"
    assert lines["progress"] == [left + more]
    # sqrt(2 * 10 s * 3600 s): one end without a warning in an hour of training
    (advice,) = lines["advice"]
    assert advice.startswith("save about every 4 min, now every 30 min: a checkpoint takes 10.0 s")
    assert life.best_save_every_seconds == pytest.approx((2 * 10 * 3610) ** 0.5)


def test_a_run_that_may_not_continue(training: Training) -> None:
    """The last attempt has the reason; its own work is not lost to a restart."""
    attempt = training.start()
    training.train(attempt, 100, 100)
    training.end(attempt, "preemption", requeue=False, stays="20 attempts are used up")
    assert training.lines()["attempts"][0].endswith(
        "steps 0 to 100; does not continue: 20 attempts are used up"
    )
    assert training.life().lost_seconds == 0


@pytest.mark.parametrize(
    ("state", "command"),
    [
        ("TIMEOUT", "hpml requeue RUN continues from step 60"),
        ("FAILED", "hpml requeue RUN continues from step 60"),
        # not into the same limit
        ("OUT_OF_MEMORY", "hpml resubmit RUN --set resources.memory=… continues from step 60"),
    ],
)
def test_the_last_word_of_a_run_is_how_it_continues(
    training: Training, state: str, command: str
) -> None:
    """`show` has it, and so has the error of `run` and `wait`."""
    ignored = "your program did not react to the request to stop and was ended"
    attempt = training.start()
    training.save(attempt, 60, 1.0)
    training.end(attempt, "time_limit", requeue=False, ignored=ignored, state=state)
    training.world.scheduler.move("1", JobState.FAILED if "MEM" in state else JobState(state))
    command = command.replace("RUN", training.submission.sid)
    lines = training.lines()
    assert (lines["next"], lines["stop"]) == ([command], [ignored])
    with pytest.raises(JobFailedError) as error:
        refuse_failed(training.world.state(training.submission))
    assert error.value.hint == command


def test_an_attempt_that_never_trained_is_lost(training: Training) -> None:
    """A node that failed before the first step leaves no record of the end, and no work."""
    world = training.world
    world.starts(training.submission, "1", 0)
    world.scheduler.move("1", JobState.PENDING)
    training.attempts = 1
    world.clock.sleep(500)
    attempt = training.start()
    training.train(attempt, 10, 10)
    told = training.life()
    assert told.line == "attempt 2 of at most 20, time limit in 58 min"
    assert told.best_save_every_seconds is None


@pytest.mark.parametrize(
    ("event", "data"),
    [
        ("training", {"step": "x", "total_steps": None}),
        ("resumed", {"step": [1]}),
        ("checkpoint", {"seconds": "long", "step": {}}),
        ("step", {"steps_total": "many"}),
        ("training", {"step": 0, "total_steps": 0}),
    ],
)
def test_odd_events_do_no_harm(training: Training, event: str, data: dict[str, Any]) -> None:
    """Any program may send them."""
    attempt = training.start()
    training.world.event(attempt, event, 0, **data)
    assert training.life().to_json()["at_most"] == 20
    assert "run" in training.lines()


def test_a_job_without_checkpoints_has_its_progress(world: World) -> None:
    """The limit comes first, and no further attempt is promised."""
    training = Training(world, world.submit(resources={"time": "1:00:00"}))
    attempt = training.start()
    training.train(attempt, 100, 100)
    life = training.life()
    assert (life.line, life.at_most, life.more_attempts) == ("", None, None)
    assert life.progress.endswith(
        "will not finish before the time limit at this rate: it needs 2.8 h"
    )
    assert "restarts" not in training.lines()


@pytest.mark.parametrize(
    ("why", "stopped", "failures"),
    [
        ("time_limit", False, 0),
        ("requested", False, 0),
        ("preemption", True, 0),
        ("preemption", False, 1),
        ("node_failure", False, 1),
        ("hang", False, 1),
        ("", False, 1),
    ],
)
def test_ends_without_a_warning(why: str, stopped: bool, failures: int) -> None:
    """Only those make checkpoints in between worth their time."""
    one = AttemptReport(
        0,
        why=why,
        goes_on=True,
        started=1.0,
        ended=1001.0,
        trained_from=1.0,
        trained_until=1001.0,
        saves=1,
        saving_seconds=5.0,
        stopped=stopped,
    )
    last = AttemptReport(1, started=1001.0, trained_from=1001.0, trained_until=2001.0)
    life = history_of([one, last], limits=RunLimits(3600.0), left_seconds=10.0, now=2001.0)
    best = (2 * 5.0 * 2000.0) ** 0.5 if failures else None
    assert life.best_save_every_seconds == (best and pytest.approx(best))


def test_the_time_until_a_user_continues_a_run_is_not_lost(training: Training) -> None:
    """A run that was stopped on Monday and continued on Thursday did not wait in a queue."""
    world = training.world
    first = training.start()
    training.train(first, 1000, 1000)
    training.save(first, 1000, 10)
    training.end(first, "", requeue=False, state="CANCELLED")
    world.clock.sleep(3 * 86400)
    following = {"how": "continuation", "job_id": "1", "exclude": []}
    write_json(first / "next.json", {**following, "time": world.clock.now})
    world.clock.sleep(20)
    second = training.start(step=1000, after=40)
    training.train(second, 100, 100)
    life = training.life()
    assert [one.lost_seconds for one in life.attempts] == [0, 20 + 40]
    assert life.elapsed_seconds == pytest.approx(100 + 1000 + 10 + 20 + 40 + 100)
    (cost,) = training.lines()["restarts"]
    assert "; not counted: 3 d 0:00:00 until it was continued by hand; " in cost


def test_work_that_was_saved_is_not_lost(training: Training) -> None:
    """The last seconds of a job, after its last checkpoint, are no work."""
    first = training.start()
    training.train(first, 100, 100)
    training.save(first, 100, 1)
    training.world.clock.sleep(5)
    training.end(first, "preemption")
    training.start(step=100, after=40)
    assert [one.unsaved_seconds for one in training.life().attempts] == [0, 0]


def test_before_it_trains_a_run_is_where_it_was_saved(training: Training) -> None:
    """Steps after the last checkpoint are done again, so that they do not count as progress."""
    first = training.start()
    training.train(first, 100, 100)
    training.save(first, 100, 1)
    training.train(first, 50, 150)
    training.end(first, "preemption")
    training.world.starts(training.submission, "1", 1)
    training.world.scheduler.move("1", JobState.RUNNING)
    assert training.life().progress.startswith("step 100 of 10,000 (1%)")


@pytest.mark.parametrize(
    ("state", "seconds", "every", "is_advised"),
    [
        ("FAILED", 2000.0, 500.0, True),
        ("CANCELLED", 2000.0, 500.0, False),  # by a user, who may have waited for a checkpoint
        ("COMPLETED", 2000.0, 500.0, False),
        ("FAILED", 100.0, 25.0, False),  # too little data
        ("FAILED", 2000.0, 125.0, False),  # near the best interval, 141 s
    ],
)
def test_the_interval_is_advised_only_from_enough_data(
    state: str, seconds: float, every: float, is_advised: bool
) -> None:
    """After a failure, from minutes of training, and if the interval is not good already."""
    saves = round(seconds / every)
    first = AttemptReport(
        0,
        state=state,
        started=1.0,
        ended=1.0 + seconds,
        trained_from=1.0,
        trained_until=1.0 + seconds,
        saves=saves,
        saving_seconds=5.0 * saves,
    )
    last = AttemptReport(1, started=1.0 + seconds)
    life = history_of([first, last], limits=RunLimits(3600.0), left_seconds=10.0, now=2.0 + seconds)
    assert bool(life.advice) == is_advised


def test_each_figure_names_its_attempt(training: Training) -> None:
    """Of a run with two attempts: the start of both, and which of them the figures are of."""
    first = training.start()
    training.train(first, 100, 100)
    result = training.world.store.runs_dir / training.submission.label / "result.json"
    write_json(first / "head.json", {"node": "n1"})
    training.end(first, "time_limit")
    write_json(result, {"test_accuracy": 0.5, "stopped": True})
    os.utime(result, (1e9, 1e9))
    os.utime(first / "head.json", (0.9e9, 0.9e9))
    second = training.start(step=100, after=40)
    write_json(second / "head.json", {"node": "n1"})
    lines = training.lines()
    assert "; attempt 2 2" in lines["started"][0]
    assert lines["attempt"] == ["2 of 2: the figures below are of this attempt"]
    assert [*lines].index("attempt") > [*lines].index("requested")
    assert lines["result"] == [
        "of attempt 1, from its result.json:",
        "test_accuracy 0.5, stopped true",
    ]
    assert last_result(training.world.state(training.submission)) == {}
    training.world.event(second, "evaluation", 0, final=True, test_accuracy=0.9)
    assert training.lines()["result"] == ["test_accuracy 0.9"]
    assert last_result(training.world.state(training.submission)) == {"test_accuracy": 0.9}
    training.world.scheduler.move("1", JobState.FAILED)
    assert " of attempt 2" in training.lines()["ended"][0]
    facts = gather(training.world.state(training.submission), now=training.world.clock.now)
    assert "  attempt 2 of 2: FAILED in " in status_line(facts)


def test_an_attempt_that_is_ending_keeps_its_figures(training: Training) -> None:
    """Slurm's epilog may take minutes; the attempt has left no record of its end yet."""
    first = training.start()
    training.train(first, 100, 100)
    training.end(first, "preemption")
    training.world.clock.sleep(20)
    training.start(step=100, after=40)
    training.world.scheduler.move("1", JobState.COMPLETING)
    life = training.life()
    assert life.elapsed_seconds == pytest.approx(100 + 100 + 20 + 40)
    assert life.restarts.startswith("61.5% of the time lost to restarts: 2:40 of 4:20 ")


def test_a_run_without_steps_does_not_look_healthy(training: Training) -> None:
    """Its last rate says nothing about now; every command names the silence, and requeue warns."""
    world, submission = training.world, training.submission
    attempt = training.start()
    training.train(attempt, 100, 100)
    world.clock.sleep(50)
    assert training.life().silence == ""
    world.clock.sleep(330)
    silence = "no step for 6:20 (hang ends it at 30:00)"
    life = training.life()
    assert (life.silent_seconds, life.progress) == (380, f"step 100 of 10,000 (1%), {silence}")
    assert training.lines()["progress"] == [life.progress]
    facts = gather(world.state(submission), now=world.clock.now)
    assert Diagnosis(facts).headline == silence
    jobs = LiveJobs(world.store, backends=world.backends, now=world.clock.time)
    assert jobs.look()[0].bottlenecks == ["stalled: no step for 6:20"]
    done = world.requeue(submission)
    assert f"seems not to react: {silence}. " in done["outcome"]
    assert f"`hpml cancel {submission.sid}`" in done["outcome"]
    training.end(attempt, "preemption")
    assert training.life().silence == ""


@pytest.mark.parametrize(
    ("moments", "last", "due"),
    [
        ([0, 1, 2], "step", 62),
        ([0, 300, 310], "step", 910),  # as often as the program reports, or the records get it
        ([0, 300, 310], "evaluation", 910),
        ([0, 1, 2], "stopping", None),
        ([], "evaluation", None),  # nobody knows yet how long a step takes
    ],
)
def test_from_when_on_silence_is_unusual(
    moments: list[float], last: str, due: float | None
) -> None:
    """By the longest time between two reports so far."""
    events = [Event(moment, "step", "n1", 0) for moment in moments]
    end = max(moments, default=0)
    heard = last_report([*events, Event(end, last, "n2", 1), Event(end + 9, "started", "batch")])
    assert heard == (None if due is None else (end, due))
