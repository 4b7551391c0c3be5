"""`hpml report RUN --try`: the plan of a trial, and what its runs say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.diagnosis.model import Change, Facts
from hpml_orchestrator.errors import InputError
from hpml_orchestrator.records.submission import Submission
from hpml_orchestrator.sweeps import plan as plans
from hpml_orchestrator.sweeps.plan import SweepPlan
from hpml_orchestrator.sweeps.report import build
from hpml_orchestrator.sweeps.rows import PointRow
from hpml_orchestrator.sweeps.trial import make_trial, summary_lines
from tests.unit.runs.tuning import Desk, chosen

JOB = """\
name: probe
launcher: srun
command: [./train]
args: [--workers=0, --seed=7]
resources: {time: 10-00, ranks_per_node: 2, mail: {to: me}}
collect: [{source: "{local.dir}/out", target: /results}]
"""
WORKERS = Change("start 2 workers", "args.0", "--workers=2", also={"resources.cpus_per_rank": 3})


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    """A new one."""
    return Desk(tmp_path)


def trial(
    run: Submission, *changes: Change, channel: bool = True, minutes: float = 2, **facts: Any
) -> SweepPlan:
    """The plan of a trial of these changes."""
    known = Facts(
        run.label,
        "COMPLETED",
        over=True,
        job=run.requested_job(),
        channel=channel,
        elapsed_seconds=3600,
        phases={"staging": 10, "start-up": 20, "training": 3560, "end": 10},
    )
    facts = {"repeats": None, "now": 1e9, "minutes": minutes, **facts}
    return make_trial(run, known, chosen(run, *(changes or (WORKERS,))), **facts)


def test_both_jobs_run_in_turn_with_the_same_seeds(desk: Desk) -> None:
    """Who is first changes; neither writes mail nor results, nor asks for days."""
    planned = trial(desk.ran(JOB))
    assert [point.shape for point in planned.points] == [0, 1, 1, 0] * 3
    assert [point.variables["seed"] for point in planned.points] == list("112233445566")
    assert [len(block) for block in planned.blocks] == [2] * 6
    original, changed = (plans.job_of(planned, shape, "0").job for shape in planned.shapes)
    assert original.args == ("--workers=0", "--seed={point.seed}")
    assert changed.args == ("--workers=2", "--seed={point.seed}")
    assert (original.resources.cpus_per_rank, changed.resources.cpus_per_rank) == (1, 3)
    for job in (original, changed):
        assert (job.collect, job.resources.mail, job.resources.time) == ((), None, 1980)
    assert planned.spec.parallel == 1
    text = "\n".join(summary_lines(planned))
    for part in (
        "12 runs in turn: 6 of",
        "after 2:00 of training",
        "about 0.53 node-hours, by what",
    ):
        assert part in text, text


def test_without_a_channel_runs_are_whole(desk: Desk) -> None:
    """Nobody knows when such a program trains, so its time limit stays, too."""
    planned = trial(desk.ran(JOB), channel=False, repeats=2)
    assert planned.trial is not None
    assert planned.trial.seconds == 0
    assert planned.shapes[0].job.resources.time == 864000
    assert "4 runs" in (text := "\n".join(summary_lines(planned)))
    assert "about 4 node-hours" in text


def test_a_task_of_an_array_is_tried_by_itself(desk: Desk) -> None:
    """With its own index in the place of the placeholder."""
    text = JOB.replace("--seed=7", '"--fold={array.index}"') + "array: 0-4\n"
    planned = trial(replace(desk.ran(text), index=3))
    jobs = [shape.job for shape in planned.shapes]
    assert [job.args for job in jobs] == [
        ("--workers=0", "--fold=3"),
        ("--workers=2", "--fold=3"),
    ]
    assert [job.array for job in jobs] == [None, None]
    assert planned.placeholders == {}


@pytest.mark.parametrize(
    ("more", "change", "part"),
    [
        ("", Change("pin the memory"), "no advice for this run changes its job file"),
        ("checkpoint: {directory: /mine}\n", WORKERS, "would be the directory of every run"),
        ("environment: {variables: {SUBMITIT_EXECUTOR: x}}\n", WORKERS, "has no job file"),
        ("", Change("share", "resources.ranks_per_gpu", 2), "ranks_per_gpu: needs GPUs to share"),
        ("", Change("more", "resources.cpus_per_rank", 10**6), "cpus_per_rank: must be at most"),
    ],
)
def test_what_cannot_be_tried(desk: Desk, more: str, change: Change, part: str) -> None:
    """The error has the reason."""
    with pytest.raises(InputError, match=part):
        trial(desk.ran(JOB + more), change)


NOISE = (0.99, 1.0, 1.02, 0.98, 1.01, 1.0)
UP = (1.16, 1.18, 1.2, 1.15, 1.21, 1.19)


def rows(
    planned: SweepPlan, gains: tuple[float, ...], *, whole: bool = False, **changed: Any
) -> list[PointRow]:
    """Rows of a trial: the changed job is as many times as fast in each repeat."""
    found = []
    for point in planned.points:
        is_changed = point.values["job"] == "changed"
        speed = (gains[point.repeat] if is_changed else 1.0) * (1 + point.repeat / 10)
        row = PointRow(
            point.number,
            run=f"r{point.number}",
            state="COMPLETED",
            over=True,
            reason="" if whole else "stopped after 2:00 of training",
            phases={"start-up": 20.0},
            total_seconds=100 / speed if whole else 150.0,
            samples_per_second=50 * speed,
            data_wait_ratio=0.04 if is_changed else 0.31,
            accuracy=0.94 if is_changed else 0.95,
            accuracy_name="test_accuracy",
        )
        found.append(replace(row, **changed) if is_changed else row)
    return found


WAITS = "waiting for data 31% -> 4%"


@pytest.mark.parametrize(
    ("gains", "options", "first", "others"),
    [
        (
            UP,
            {},
            f"The changed job is 18% faster [15, 21] (6 pairs), {WAITS}.",
            ["Samples per second: 62.5 -> 73.38."],
        ),
        (UP, {"whole": True, "samples_per_second": None}, "The changed job is 18% faster [15", []),
        (NOISE, {}, "Not distinguishable: the changed job is 0.0% faster [-2.0, 2.0] (6", []),
        ([1 / up for up in UP], {}, "The changed job is 16% slower [13, 17] (6 pairs)", []),
        ([10 * up for up in UP], {}, "The changed job is 12 times as fast [12, 12] (6 p", []),
        (
            UP,
            {"phases": {"start-up": 20.0, "staging": 400.0}},
            "The changed job is 18% faster",
            ["takes 20 -> 420 s, so all of {run} would be 5% faster."],
        ),
        (
            UP,
            {"state": "FAILED", "reason": "no room"},
            "No pair of runs can be compared.",
            ["Of the changed job 6 runs cannot be compared: FAILED, no room (r"],
        ),
        (UP, {"state": "RUNNING", "over": False}, "No pair of runs can be compared yet.", []),
    ],
)
def test_the_answer_is_one_sentence(
    desk: Desk, gains: Any, options: dict[str, Any], first: str, others: list[str]
) -> None:
    """Also if the change brings nothing, or the changed job fails."""
    planned = trial(desk.ran(JOB))
    found = rows(planned, tuple(gains), **options)
    lines = build(planned, found).answer
    assert lines[0].startswith(first), lines
    assert planned.trial is not None
    for part in others:
        assert part.format(run=planned.trial.run) in " ".join(lines), lines


def test_two_pairs_prove_nothing(desk: Desk) -> None:
    """The figure is there, and that it may be chance."""
    planned = trial(desk.ran(JOB), repeats=2)
    (first, *_) = build(planned, rows(planned, UP)).answer
    assert "was 17% faster, but 2 pairs are not enough to exclude noise, 6 are" in first
    (first, *others) = build(planned, rows(planned, UP)[:3]).answer
    assert "but 1 pair is not enough" in first
    assert "1 of 2 pairs are done." in others


@pytest.mark.parametrize(
    ("whole", "part"),
    [(True, "Test accuracy: 0.9500 -> 0.9400."), (False, "`--minutes 0` compares it")],
)
def test_accuracy_stands_beside_a_change_that_can_alter_it(
    desk: Desk, whole: bool, part: str
) -> None:
    """Of whole runs; the change of another kind is silent about it."""
    lossy = replace(WORKERS, touches_accuracy=True)
    for change in (lossy, WORKERS):
        planned = trial(desk.ran(JOB), change, minutes=0 if whole else 2)
        text = " ".join(build(planned, rows(planned, UP, whole=whole)).answer)
        assert (part in text) == (change is lossy), text
