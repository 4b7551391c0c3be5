"""What a run did adds up, whatever of it was recorded."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpml_orchestrator.records.feed import VOCABULARY, Event, append
from hpml_orchestrator.records.files import append_line
from hpml_orchestrator.records.run import Attempt
from hpml_orchestrator.runs.history import attempt_reports, read_history
from hpml_orchestrator.runs.reporting.summary import summarise
from hpml_orchestrator.runs.reporting.text import summary_lines
from hpml_orchestrator.runs.reporting.timeline import Timeline, phases
from hpml_orchestrator.scheduler.model import JobState

if TYPE_CHECKING:
    from hpml_orchestrator.records.submission import Submission
    from tests.unit.runs.conftest import World

NAMES = "queue start-up staging launch running rendezvous preparation warm-up training end".split()

TIMES = st.floats(0, 1e6, allow_nan=False)
EVENTS = st.lists(
    st.builds(
        Event,
        TIMES,
        st.sampled_from(VOCABULARY),
        st.sampled_from(["n1", "n2"]),
        st.integers(0, 3) | st.none(),
        st.sampled_from([{}, {"final": True}]),
    ),
    max_size=30,
)


def test_a_phase_between_two_clocks_that_differ_is_left_out() -> None:
    """No phase of 0.00 s that took hours; what one host measured by its own clock stays."""
    moments = {
        "started": 90.0,
        "staging": 91.0,
        "ready": 99.0,
        "rendezvous": 95.0,
        "warm-up": 101.0,
    }
    events = [Event(moment, name, "n1") for name, moment in moments.items()]
    found = phases(Timeline(events), queued=100.0, left=103.0, ended=104.0)
    assert [(phase.name, phase.seconds) for phase in found] == [
        ("start-up", 1),
        ("staging", 8),
        ("preparation", 2),
        ("warm-up", 2),
        ("end", 1),
    ]


@given(EVENTS, st.none() | TIMES, st.none() | TIMES, st.lists(TIMES, max_size=3), st.none() | TIMES)
def test_stretches_add_up(
    events: list[Event],
    queued: float | None,
    ended: float | None,
    bound: list[float],
    left: float | None,
) -> None:
    """Whatever events there are: no stretch is negative, none comes twice, and they have no gap."""
    events = sorted(events, key=lambda event: event.time)
    found = phases(Timeline(events), queued=queued, bound=bound, left=left, ended=ended)
    assert all(one.seconds >= 0 for one in found)
    assert [one.name for one in found] == [n for n in NAMES if n in {one.name for one in found}]
    starts = [event.time for event in events if event.event == "started"]
    begin = queued if queued is not None else min(starts, default=None)
    if begin is not None:  # the clock of the submitting host may be ahead of the node's
        begin = min(begin, *starts) if starts else begin
    if begin is None:
        assert found == []
        return
    total = sum(one.seconds for one in found)
    last = max([event.time for event in events] + bound + [begin, ended or 0.0, left or 0.0])
    assert total <= last - begin + 1e-3
    if ended is not None and ended >= last:
        assert total == pytest.approx(ended - begin, abs=1e-3)


def test_a_mark_counts_when_the_last_reaches_it() -> None:
    """Nodes are ready when the last is; a beginning counts when the first begins."""
    marks = (
        "10 started batch, 11 staging n1, 12 staging n2, 13 ready n1, 20 ready n2, "
        "22 rendezvous n1, 23 rendezvous n2, 24 preparation n1, 25 warm-up n1, "
        "27 step n1, 40 step n2"
    )
    events = [
        Event(float(time), name, node, None if name in ("started", "ready") else 0)
        for time, name, node in (mark.split() for mark in marks.split(", "))
    ]
    events.append(Event(45, "evaluation", "n1", 0, {"final": True}))
    found = phases(Timeline(events), queued=4, ended=50)
    assert ", ".join(f"{phase.name} {phase.seconds:g}" for phase in found) == (
        "queue 6, start-up 1, staging 9, launch 2, rendezvous 2, preparation 1, warm-up 2, "
        "training 18, end 5"
    )


@pytest.mark.parametrize(
    ("reached", "stretch"),
    [
        ("started", "start-up"),
        ("staging", "staging"),
        ("ready", "launch"),
        ("rendezvous", "rendezvous"),
        ("preparation", "preparation"),
        ("warm-up", "warm-up"),
    ],
)
def test_a_run_that_stops_on_its_way_spends_its_time_there(reached: str, stretch: str) -> None:
    """What it was about when the script ended has the time until then, not the end."""
    steps = ["started", "staging", "ready", "rendezvous", "preparation", "warm-up"]
    steps = steps[: steps.index(reached) + 1]
    events = [Event(10 + number, name, "n1") for number, name in enumerate(steps)]
    found = {one.name: one.seconds for one in phases(Timeline(events), left=100, ended=101)}
    assert found[stretch] >= 100 - 10 - len(steps)
    assert found["end"] == 1


@pytest.mark.parametrize(
    ("marks", "stretches"),
    [
        ("rendezvous preparation warm-up step", "rendezvous 1, preparation 1, warm-up 1"),
        ("rendezvous preparation training step", "rendezvous 1, preparation 1, warm-up 1"),
        ("rendezvous warm-up step", "preparation 1, warm-up 1"),
        ("rendezvous training step", "preparation 1, warm-up 1"),
        ("rendezvous step", "preparation 1"),
        ("step", "preparation 1"),
    ],
)
def test_a_rendezvous_without_a_reported_end_is_part_of_the_preparation(
    marks: str, stretches: str
) -> None:
    """Of older copies and of scripts that report little: nobody knows when the ranks had met."""
    events = [Event(2.0 + number, name, "n1", 0) for number, name in enumerate(marks.split())]
    bound = [1.0] if marks == "step" else []
    ready = [Event(0.0, "started", "batch"), Event(0.5, "ready", "n1")]
    found = phases(Timeline([*ready, *events]), bound=bound, ended=20)
    names = ("rendezvous", "preparation", "warm-up")
    inner = [one for one in found if one.name in names]
    assert ", ".join(f"{one.name} {one.seconds:g}" for one in inner) == stretches


def trained(world: World, submission: Submission) -> None:
    attempt = world.starts(submission, "1")
    for node_seconds in (1.5, 2.5):
        world.event(attempt, "ready", bytes=1000, files=2, seconds=node_seconds)
    for rank in (0, 1):
        line = {"rank": rank, "node": "n1", "world_size": 4}
        append_line(attempt / "binding" / "n1.jsonl", json.dumps(line))
        for waited, stepped in ((0.5, 2.0), (1.5 + rank, 12.0)):
            counters = {"data_wait_seconds_total": waited, "step_seconds_total": stepped}
            world.event(attempt, "step", rank, **counters)
    world.clock.sleep(20)
    world.event(
        attempt,
        "evaluation",
        0,
        final=True,
        samples_per_second=1234.6,
        test_accuracy=0.9712,
        target_accuracy=0.95,
        seconds_to_accuracy=12.5,
    )
    world.ends(attempt)
    world.scheduler.move("1", JobState.COMPLETED)


@pytest.fixture
def submitted(world: World) -> Submission:
    """A submission with a job."""
    submission = world.submit()
    world.clock.sleep(5)
    return submission


def test_a_run_in_figures(world: World, submitted: Submission) -> None:
    """Staging of all nodes together, the ranks' waiting since the warm-up, the result."""
    trained(world, submitted)
    summary = summarise(world.state(submitted))
    assert (summary.staged_bytes, summary.staged_files) == (2000, 4)
    assert (summary.staging_seconds, summary.nodes, summary.ranks) == (2.5, 2, 2)
    assert summary.world_size == 4  # two of them were not heard of
    assert summary.data_wait_ratio == pytest.approx(3 / 20)
    assert summary.samples_per_second == 1234.6
    assert summary.result["test_accuracy"] == 0.9712
    assert "final" not in summary.result
    assert (summary.phases[0].name, summary.phases[0].seconds) == ("queue", 5)
    shown: Any = summary.to_json()
    assert shown["phases"][0] == {"name": "queue", "seconds": 5}


def test_samples_per_second_from_the_counters(world: World, submitted: Submission) -> None:
    """A result without a rate leaves it to the counters: all ranks', from the warm-up's end on."""
    attempt = world.starts(submitted, "1")
    for samples in (100, 300, 1100):
        for rank in (0, 1):
            world.event(attempt, "step", rank, samples_total=samples)
        world.clock.sleep(4)
    world.event(attempt, "evaluation", 0, final=True, weight=3.0)
    assert summarise(world.state(submitted)).samples_per_second == pytest.approx(2000 / 8)
    world.event(attempt, "evaluation", 0, final=True, samples_per_second=None)
    assert summarise(world.state(submitted)).samples_per_second is None


def test_what_ranks_counted_since_the_warm_up(world: World, submitted: Submission) -> None:
    """Rank by rank and counter by counter; of a rank that was started again, both starts."""
    attempt = world.starts(submitted, "1")
    for steps in (20, 30, 70):
        for rank in (1, 0):
            # Rank 1 was started again after 30 steps.
            done = 5 if (rank, steps) == (1, 70) else steps
            more = {"save_seconds_total": 1.5} if steps == 70 else {}
            world.event(
                attempt, "step", rank, steps_total=done, wait_seconds_total=done / 10, **more
            )
        world.clock.sleep(4)
    assert summarise(world.state(submitted)).training == [
        {"rank": 0, "seconds": 8, "steps": 50, "wait_seconds": 5.0, "save_seconds": 1.5},
        {"rank": 1, "seconds": 8, "steps": 15, "wait_seconds": 1.5, "save_seconds": 1.5},
    ]


STEP = Event(9.0, "step", "n1", 0, {"samples_total": 7}).to_json() + "\n"


@pytest.mark.parametrize(
    "end",
    [
        "",
        STEP,
        STEP[:-5],
        STEP[:-5] + STEP,
        "\0" * 9 + STEP,
        STEP.replace("7", '{"train":0.5}'),
        STEP.replace("7", '"{"'),
        STEP.replace('"rank":0', '"rank":null'),
        STEP.replace('"rank":0', '"rank":1'),
        STEP.replace("step", "evaluation").replace("7", '7,"final":true'),
    ],
)
def test_the_milestones_tell_all(world: World, submitted: Submission, end: str) -> None:
    """However the files end; events between the first and last of a rank do not matter."""
    directory = world.starts(submitted, "1")
    for node in ("a1", "n1"):
        path = directory / "events" / f"{node}.jsonl"
        for number in range(1, 6):
            for rank in (0, 1, 10):
                append(path, "step", node=node, rank=rank, now=number, samples_total=number)
            append(path, "checkpoint", node=node, rank=0, now=number)
        with path.open("a") as stream:
            stream.write(end)
    attempt = Attempt(directory)
    found = list(attempt.milestones())
    assert vars(Timeline(found)) == vars(Timeline(attempt.events()))
    assert len([event for event in found if event.event == "step"]) <= 2 * 4 * 2


@pytest.mark.parametrize("says_so", [True, False])
def test_the_phases_reach_the_schedulers_end(
    world: World, submitted: Submission, says_so: bool
) -> None:
    """Ranks that ignore SIGTERM hold the job after its script's last act, if it has one at all."""
    attempt = world.starts(submitted, "1")
    world.scheduler.move("1", JobState.RUNNING)
    world.clock.sleep(60)
    if says_so:
        world.ends(attempt, 143, "time limit")
    world.clock.sleep(30)
    world.scheduler.move("1", JobState.TIMEOUT)
    found = summarise(world.state(submitted)).phases
    assert (found[-1].name, found[-1].seconds) == ("end", 30 if says_so else 0)
    assert (found[-2].name, found[-2].seconds) == ("start-up", 60 if says_so else 90)
    assert sum(one.seconds for one in found) == 95


def test_a_run_in_words(world: World, submitted: Submission) -> None:
    """Each line has a name and its text."""
    trained(world, submitted)
    state = world.state(submitted)
    lines = dict(summary_lines(state, summarise(state)))
    assert lines["run"] == f"{submitted.sid}  COMPLETED"
    assert lines["job"] == "1 (slurm, cluster fake) on n[1-2], 2 of 4 ranks"
    assert lines["staged"] == "4 files, 2.0 KiB (2000 bytes) in 2.50 s"
    assert lines["training"] == "1235 samples/s, 15% of the step time spent waiting for data"
    assert (
        lines["accuracy"] == "0.9712 on the test set; 0.95 reached after 12.50 s, warm-up included"
    )
    assert lines["record"] == str(state.run.directory)


def test_the_loss_of_the_test_set_is_shown(world: World, submitted: Submission) -> None:
    """As the accuracy is, for trainings that have none."""
    attempt = world.starts(submitted, "1")
    result = {"final": True, "test_loss": 2.51237, "target_loss": 2.4, "seconds_to_loss": None}
    world.event(attempt, "evaluation", 0, validation_loss=2.41, **result)
    world.ends(attempt)
    world.scheduler.move("1", JobState.COMPLETED)
    state = world.state(submitted)
    lines = dict(summary_lines(state, summarise(state)))
    assert lines["loss"] == "2.5124 on the test set; 2.4 on the validation part not reached"
    assert "accuracy" not in lines


@pytest.mark.usefixtures("zone")
def test_a_requeued_run_says_how_each_attempt_ended(world: World) -> None:
    """When, where and why; one that left no record of its end was alive at its newest event."""
    submission = world.submit()
    told = []
    for number, reason in enumerate(["preempted", "", "failed"]):
        attempt = world.starts(submission, "1", number)
        world.scheduler.move("1", JobState.RUNNING)
        told.append(_attempts_told(world, submission))
        world.clock.sleep(3725)
        if reason:
            world.ends(attempt, int(reason == "failed"), reason)
        else:
            Attempt(attempt).request_stop("time_limit", by="n1", now=world.clock.now)
            os.utime(attempt / "events" / "batch.jsonl", (world.clock.now, world.clock.now))
        world.scheduler.move("1", JobState.PENDING)
        told.append(_attempts_told(world, submission))
        world.clock.sleep(60)
    lost = "; 1:00 lost (queue)"
    zero = "1: preempted after 1:02:05 on n[1-2], 2027-01-15 11:02:05"
    one = "2: asked to stop (time limit), left no record of its end; last event after 1:02:05 on "
    one += f"n[1-2], 2027-01-15 12:05:10{lost}"
    two = "3: failed with exit code 1 after 1:02:05 on n[1-2], 2027-01-15 13:08:15"
    two += lost
    assert told == [
        [],
        [zero],
        [zero, f"2: running since 2027-01-15 11:03:05 on n[1-2]{lost}"],
        [zero, one],
        [zero, one, f"3: running since 2027-01-15 12:06:10 on n[1-2]{lost}"],
        [zero, one, two],
    ]
    state = world.state(submission)
    first = attempt_reports(state)[0].to_json()
    assert (first["number"], first["reason"], first["nodes"]) == (0, "preempted", "n[1-2]")
    assert float(str(first["ended"])) - float(str(first["started"])) == 3725


def _attempts_told(world: World, submission: Submission) -> list[str]:
    """The line about attempts; none without requeues."""
    state = world.state(submission)
    lines = summary_lines(state, summarise(state), read_history(state, now=world.clock.now))
    names = [name for name, _ in lines]
    if "attempts" not in names:
        return []
    first = names.index("attempts")
    last = next(n for n in range(first + 1, len(names)) if names[n])
    return [text for _, text in lines[first:last]]
