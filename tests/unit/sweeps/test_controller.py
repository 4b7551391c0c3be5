"""A sweep is carried on by whoever ticks: nothing twice, nothing lost, within all limits."""

from __future__ import annotations

import copy
import os
import random
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import pytest

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.records.feed import append
from hpml_orchestrator.records.files import write_json
from hpml_orchestrator.records.ids import parse_array
from hpml_orchestrator.records.owner import this_owner
from hpml_orchestrator.records.run import Attempt
from hpml_orchestrator.scheduler.model import JobState
from hpml_orchestrator.sweeps.batches import read_batches
from hpml_orchestrator.sweeps.controller import cancel, resume, top_up
from hpml_orchestrator.sweeps.plan import SweepPlan, directory_of
from hpml_orchestrator.sweeps.report import build
from hpml_orchestrator.testing.scheduler import Fault, Killed

if TYPE_CHECKING:
    from tests.unit.sweeps.conftest import SweepFolder

TWO_SHAPES = {"axes": {"--lr": [0.1, 0.2], "resources.cpus_per_rank": [1, 2]}}
TWO_TWICE = {"axes": {"--lr": [0.1], "resources.cpus_per_rank": [1, 2]}}
FOUR: dict[str, Any] = {"axes": {"--lr": [0.1, 0.2, 0.3, 0.4]}, "repeats": 1}
TWENTY: dict[str, Any] = {"axes": {"--lr": [index / 100 for index in range(20)]}, "repeats": 1}
ENDS = [JobState[end] for end in "FAILED TIMEOUT FAILED PREEMPTED FAILED".split()]
INVALID = "Batch job submission failed: Invalid qos"
WALL = "QOSMaxWallDurationPerJobLimit; Batch job submission failed: Job violates accounting"
UNNAMED = "Batch job submission failed: Job violates accounting/QOS policy"
FIRST = "the scheduler refused the first jobs: "
SUBMIT_FAULTS = [
    Fault.NONE,
    Fault.UNAVAILABLE,
    Fault.LOST_ANSWER,
    Fault.KILLED_BEFORE,
    Fault.KILLED_DURING,
    Fault.BOTH_KILLED,
    Fault.KILLED_AFTER,
]


def states(folder: SweepFolder, plan: SweepPlan) -> Counter[str]:
    """How many rows are in which state."""
    return Counter(row.state for row in folder.rows(plan))


def test_a_sweep_runs_to_its_end(folder: SweepFolder) -> None:
    """One array for the points of one shape, one question per 30 s, a row for each point."""
    plan = folder.plan()
    assert states(folder, plan) == {"WAITING": 6}
    progress = folder.carry_on(plan)
    assert (progress.done, progress.total, progress.counts) == (6, 6, {"COMPLETED": 6})
    assert folder.slurm.sizes == [6]
    assert folder.started() == list(range(6))
    assert folder.slurm.calls["squeue"] <= 4
    row = folder.rows(plan)[3]
    assert row.over
    assert row.run == f"{next(folder.store.submissions()).sid}.3"
    assert row.core_hours == pytest.approx(60 / 3600)


def test_points_sh_sets_the_values_of_each_task(folder: SweepFolder) -> None:
    """Whatever the shell makes of a value: it reaches the program as it is."""
    plan = folder.plan(axes={"--lr": ["a b", "$HOME'`x`\"", "äö;"]}, repeats=1)
    folder.carry_on(plan)
    (submission,) = folder.store.submissions()
    for index, point in enumerate(plan.points):
        script = f'. {submission.directory}/points.sh; printf %s "$HPML_POINT_LR|$HPML_POINT"'
        environment = {"SLURM_ARRAY_TASK_ID": str(index)}
        done = subprocess.check_output(["bash", "-c", script], env=environment, text=True)
        assert done == f"{point.values['--lr']}|{point.number}"


@pytest.mark.parametrize("seed", range(12))
def test_faults_neither_repeat_nor_lose_a_point(folder: SweepFolder, seed: int) -> None:
    """Controllers and calls of sbatch die at random; every point has one task in the end."""
    plan = folder.plan(**TWO_SHAPES, repeats=3)
    folder.slurm.faults = random.Random(seed).choices(SUBMIT_FAULTS, k=12)
    folder.carry_on(plan)
    assert folder.started() == list(range(12))
    assert states(folder, plan) == {"COMPLETED": 12}
    most = (folder.slurm.clock.now - plan.created) / 30 + 12  # each who follows a killed one asks
    assert folder.slurm.calls["squeue"] <= most


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_a_kill_at_any_write_harms_nothing(
    folder: SweepFolder, monkeypatch: pytest.MonkeyPatch, *, late: bool
) -> None:
    """Before and after each rename and link of a whole sweep, in turn."""
    left = -1

    def killing(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0 and not late:
                raise Killed
            result = real(*arguments, **named)
            if left == 0:
                raise Killed
            return result

        return call

    for name in ("rename", "replace", "link"):
        monkeypatch.setattr(os, name, killing(getattr(os, name)))
    steps = 0
    while left <= 0:
        steps += 1
        plan = folder.plan(axes={"--lr": [0.1]})
        folder.slurm.jobs.clear()
        left = steps
        folder.carry_on(plan)
        assert folder.started() == [0, 1], steps
        assert states(folder, plan) == {"COMPLETED": 2}
    assert steps > 15


def test_a_batch_in_doubt_holds_up_no_other(folder: SweepFolder) -> None:
    """Its job is looked for for two minutes; other points are submitted meanwhile."""
    plan = folder.plan(**TWO_SHAPES, repeats=1)
    folder.slurm.faults = [Fault.KILLED_BEFORE]
    with pytest.raises(Killed):
        folder.controller(plan).tick()
    folder.slurm.clock.sleep(40)
    assert "sbatch" in folder.controller(plan).tick().waits_for
    assert folder.slurm.sizes == [2]
    assert folder.carry_on(plan).counts == {"COMPLETED": 4}


@pytest.mark.parametrize(
    ("fields", "slurm", "rows", "waits_for"),
    [
        pytest.param(TWENTY, {"array_limit": 8}, "20 COMPLETED", "", id="MaxArraySize"),
        pytest.param(TWENTY, {"submit_limit": 8}, "20 COMPLETED", "", id="submit limit"),
        pytest.param(TWO_TWICE, {"refusals": [INVALID]}, "3 EXCLUDED, 1 REFUSED", FIRST,
                     id="first refused"),
        pytest.param(TWO_TWICE, {"refusals": ["", INVALID]}, "3 COMPLETED, 1 REFUSED", "",
                     id="later refused"),
        pytest.param(TWO_TWICE, {"refusals": [WALL]}, "3 EXCLUDED, 1 REFUSED", FIRST,
                     id="other limit"),
        pytest.param(TWO_TWICE, {"refusals": [UNNAMED]}, "4 COMPLETED", "", id="unnamed limit"),
        # Every start has its row; what fails too often, or in another way, is left as it is.
        pytest.param(FOUR | {"retry": {"FAILED": 1}}, {"ends": ENDS},
                     "2 COMPLETED, 3 FAILED, 1 PREEMPTED, 1 TIMEOUT", "", id="retries"),
        # A point is promised all of its time limit; what it did not use is free again.
        pytest.param({"budget": {"core_hours": 5.0}}, {}, "8 COMPLETED", "", id="enough"),
        pytest.param({"budget": {"core_hours": 1.1}}, {}, "2 COMPLETED, 6 EXCLUDED",
                     "budget: of 1.1 core-hours", id="core-hours"),
        pytest.param({"budget": {"gpu_hours": 0.1}}, {}, "8 COMPLETED", "", id="no GPUs"),
        pytest.param({"budget": {"time": "30:00", "parallel": 1}}, {},
                     "4 COMPLETED, 4 EXCLUDED", "budget: 30", id="time"),
    ],
)  # fmt: skip
def test_how_sweeps_end(
    folder: SweepFolder, fields: dict[str, Any], slurm: dict[str, Any], rows: str, waits_for: str
) -> None:
    """Limits make batches smaller, other refusals are final; budgets and retries are kept."""
    plan = folder.plan(**TWO_SHAPES | fields)
    vars(folder.slurm).update(copy.deepcopy(slurm))
    progress = folder.carry_on(plan, task_seconds=1000.0)
    states = Counter(row.state for row in folder.rows(plan))
    assert ", ".join(f"{number} {state}" for state, number in sorted(states.items())) == rows
    assert progress.waits_for.startswith(waits_for)
    assert bool(progress.waits_for) == bool(waits_for)
    assert max(folder.slurm.sizes, default=0) <= 8
    calls = folder.slurm.calls["sbatch"]
    assert folder.controller(plan).tick().finished
    assert folder.slurm.calls["sbatch"] == calls


def test_a_full_queue_is_tried_again_every_five_minutes(folder: SweepFolder) -> None:
    """While other jobs of the user fill it."""
    plan = folder.plan(axes={"--lr": [0.1]}, repeats=1)
    folder.slurm.submit_limit = 0
    tried: list[float] = []
    controller = folder.controller(plan)
    while len(tried) < 3:
        progress = controller.tick()
        assert progress.waits_for.startswith("QOSMaxSubmitJobPerUserLimit; next try in ")
        if folder.slurm.calls["sbatch"] > len(tried):
            tried.append(folder.slurm.clock.now)
        folder.slurm.clock.sleep(max(1.0, progress.next_tick_seconds))
    assert [tried[1] - tried[0], tried[2] - tried[1]] == pytest.approx([300, 300], abs=2)
    assert not list(folder.store.submissions())  # what is tried again leaves nothing in the list
    assert folder.controller(plan).tick().counts.get("REFUSED") is None
    assert folder.slurm.calls["sbatch"] == len(tried)
    folder.slurm.submit_limit = 10
    assert folder.carry_on(plan).counts == {"COMPLETED": 1}
    assert len(list(folder.store.submissions())) == 1


def test_a_submit_limit_is_filled(folder: SweepFolder) -> None:
    """Within the first round, and again as soon as a task ends, although nobody names the limit."""
    plan = folder.plan(**TWENTY)
    folder.slurm.submit_limit = 6
    controller = folder.controller(plan)
    wanted = "QOSMaxSubmitJobPerUserLimit; the next points follow as soon as one ends"
    assert controller.tick().waits_for == wanted
    assert folder.slurm.queued == 6
    assert folder.slurm.calls["sbatch"] <= 6
    for job_id in sorted(folder.slurm.jobs)[:2]:
        folder.slurm.jobs[job_id].states = [(0.0, JobState.COMPLETED)]
    calls = folder.slurm.calls["sbatch"]
    folder.slurm.clock.sleep(31)
    assert controller.tick().waits_for == wanted
    assert (folder.slurm.queued, folder.slurm.calls["sbatch"]) == (6, calls + 1)


def test_a_task_that_slurm_still_counts_costs_half_a_minute(folder: SweepFolder) -> None:
    """By its own record it has ended, but its room is not free yet: not five minutes lost."""
    plan = folder.plan(**TWENTY)
    folder.slurm.submit_limit = 6
    controller = folder.controller(plan)
    controller.tick()
    folder.report(min(folder.slurm.jobs), test_accuracy=0.5)
    controller.tick()
    folder.slurm.jobs[min(folder.slurm.jobs)].states = [(0.0, JobState.COMPLETED)]
    controller.tick()
    assert folder.slurm.queued == 5
    folder.slurm.clock.sleep(31)
    controller.tick()
    assert folder.slurm.queued == 6
    assert folder.carry_on(plan).counts == {"COMPLETED": 20}


def test_a_retry_that_has_to_wait_is_not_forgotten(folder: SweepFolder) -> None:
    """All points have ended, one is due again, and sbatch may not be called this minute."""
    budget = {"submits_per_minute": 1}
    plan = folder.plan(axes={"--lr": [0.1]}, repeats=1, retry={"FAILED": 1}, budget=budget)
    folder.slurm.ends = [JobState.FAILED]
    controller = folder.controller(plan)
    controller.tick()
    folder.slurm.run(1.0)
    folder.slurm.clock.sleep(40)
    progress = controller.tick()
    assert (progress.done, progress.finished) == (0, False)
    assert progress.waits_for == "at most 1 submission per minute"
    assert folder.carry_on(plan).counts == {"COMPLETED": 1}


def test_a_sweep_whose_first_points_fail_stops(folder: SweepFolder) -> None:
    """What waits or runs is cancelled, until somebody resumes the sweep: then all of it runs."""
    plan = folder.plan(repeats=4, budget={"parallel": 6, "core_hours": 4.1})
    folder.slurm.ends = [JobState.FAILED] * 5
    controller = folder.controller(plan)
    controller.tick()
    folder.slurm.run()
    for job_id in sorted(folder.slurm.jobs)[4:]:
        folder.slurm.jobs[job_id].states = [(0.0, JobState.RUNNING)]
    folder.slurm.clock.sleep(100)
    progress = folder.carry_on(plan)
    run = f"{next(folder.store.submissions()).sid}.3"
    assert progress.waits_for.startswith("the first 4 points failed: nothing of this job reached")
    assert progress.waits_for.endswith(
        f"; `hpml logs {run}` shows why, `hpml sweep resume {plan.id}` continues anyway"
    )
    assert states(folder, plan) == {"FAILED": 4, "CANCELLED": 4, "EXCLUDED": 4}
    resume(folder.store, plan, now=folder.slurm.clock.now)
    folder.slurm.ends = []
    assert folder.carry_on(plan).counts == {"FAILED": 4, "COMPLETED": 8}


def test_points_in_parallel(folder: SweepFolder) -> None:
    """The throttles of active arrays never allow more than the sweep does."""
    plan = folder.plan(**TWO_SHAPES, repeats=3, budget={"parallel": 3})
    folder.carry_on(plan)
    records = [submission.record() for submission in folder.store.submissions()]
    records.sort(key=lambda record: float(record["created"]))
    throttles = [parse_array(record["job"]["array"]).limit for record in records]
    assert sum(filter(None, throttles[:2])) <= 3
    assert None not in throttles
    assert folder.started() == list(range(12))


def test_calls_of_sbatch_are_spaced(folder: SweepFolder) -> None:
    """So many per minute, of whatever process."""
    axes = {"resources.cpus_per_rank": list(range(1, 9))}
    plan = folder.plan(axes=axes, repeats=1, budget={"submits_per_minute": 3})
    for seconds, calls in ((0, 3), (30.5, 3), (30.5, 6)):
        folder.slurm.clock.sleep(seconds)
        progress = folder.controller(plan).tick()
        assert folder.slurm.calls["sbatch"] == calls
        assert progress.waits_for == "at most 3 submissions per minute"


@pytest.mark.parametrize(
    ("owner", "seconds", "works"),
    [
        ({}, 0, False),
        ({"hostname": "other"}, 60, False),
        ({"hostname": "other"}, 100, True),
        ({"start_ticks": 1}, 0, True),
    ],
    ids=["alive", "other host", "silent", "dead"],
)
def test_only_one_controller_works(
    folder: SweepFolder, owner: dict[str, Any], seconds: float, *, works: bool
) -> None:
    """Another one reads, until the first is dead or has given no sign of life for 90 s."""
    plan = folder.plan()
    lease = asdict(this_owner(plan.id, pid=1)) | owner
    renewed = folder.slurm.clock.now - seconds
    path = directory_of(folder.store, plan.id) / "controller.9.json"
    write_json(path, lease | {"renewed": renewed})
    progress = folder.controller(plan).tick()
    assert ("process 1 on" not in progress.waits_for) == works
    assert progress.next_tick_seconds > 0
    assert folder.slurm.calls["sbatch"] == works


def test_a_local_sweep_stays_on_its_machine(folder: SweepFolder) -> None:
    """Elsewhere nothing is started."""
    plan = replace(folder.plan(), host="elsewhere")
    assert "elsewhere" in folder.controller(plan).tick().waits_for
    assert folder.slurm.calls["sbatch"] == 0


def test_cancel_and_resume(folder: SweepFolder) -> None:
    """Nothing more is submitted, all is cancelled; afterwards the cancelled points run again."""
    plan = folder.plan(budget={"parallel": 2}, **TWO_SHAPES)
    folder.controller(plan).tick()
    folder.slurm.run()
    outcomes = cancel(folder.store, plan, backends=lambda _name, _host: folder.slurm)
    assert [one["outcome"] for one in outcomes] == ["cancelled job 1", "cancelled job 2"]
    calls = folder.slurm.calls["sbatch"]
    folder.slurm.clock.sleep(60)
    progress = folder.carry_on(plan)
    assert (progress.finished, progress.waits_for) == (True, "the sweep was cancelled")
    assert folder.slurm.calls["sbatch"] == calls
    assert set(states(folder, plan)) == {"CANCELLED", "EXCLUDED"}
    resume(folder.store, plan, now=folder.slurm.clock.now)
    progress = folder.carry_on(plan)
    assert progress.counts == {"COMPLETED": 8}
    assert states(folder, plan) == {"COMPLETED": 8, "CANCELLED": 4}


def topped_up(folder: SweepFolder, plan: SweepPlan) -> int:
    """Let what is missing run again; how many points that are."""
    return top_up(folder.store, plan, backends=lambda _name, _host: folder.slurm)


def test_what_is_missing_runs_again(folder: SweepFolder) -> None:
    """Failed, timed out, refused, out of memory: once each time, and nothing that is complete."""
    plan = folder.plan(**FOUR | {"repeats": 2}, exclude=[{"--lr": 0.4}], retry={"PREEMPTED": 0})
    folder.slurm.ends = [JobState[end] for end in "COMPLETED FAILED TIMEOUT OUT_OF_MEMORY".split()]
    with pytest.raises(InputError, match="has not ended yet"):
        topped_up(folder, plan)
    folder.carry_on(plan)
    first: dict[str, int] = {
        "COMPLETED": 3,
        "FAILED": 1,
        "TIMEOUT": 1,
        "OUT_OF_MEMORY": 1,
        "EXCLUDED": 2,
    }
    assert states(folder, plan) == first
    assert topped_up(folder, plan) == 3
    folder.slurm.refusals = [INVALID]
    assert folder.carry_on(plan).counts == {"COMPLETED": 3, "REFUSED": 3, "EXCLUDED": 2}
    assert topped_up(folder, plan) == 3
    folder.slurm.ends = [JobState.FAILED]
    assert folder.carry_on(plan).counts == {"COMPLETED": 5, "FAILED": 1, "EXCLUDED": 2}
    assert topped_up(folder, plan) == 1
    assert folder.carry_on(plan).counts == {"COMPLETED": 6, "EXCLUDED": 2}
    assert topped_up(folder, plan) == 0
    assert states(folder, plan) == first | {"COMPLETED": 6, "FAILED": 2, "REFUSED": 3}


def test_a_cancelled_sweep_is_topped_up(folder: SweepFolder) -> None:
    """Its cancelled points, and those that never started."""
    plan = folder.plan(budget={"parallel": 2}, **TWO_SHAPES)
    folder.controller(plan).tick()
    cancel(folder.store, plan, backends=lambda _name, _host: folder.slurm)
    folder.slurm.clock.sleep(60)
    folder.carry_on(plan)
    assert topped_up(folder, plan) == 8
    assert folder.carry_on(plan).counts == {"COMPLETED": 8}


def test_a_cancelled_sweep_cancels_what_still_appears(folder: SweepFolder) -> None:
    """The controller died while sbatch was under way: its job is cancelled by a later tick."""
    plan = folder.plan()
    folder.slurm.faults = [Fault.BOTH_KILLED]
    with pytest.raises(Killed):
        folder.controller(plan).tick()
    folder.slurm.clock.sleep(31.0)
    cancelled = directory_of(folder.store, plan.id) / "stopped.json"
    write_json(cancelled, {"reason": "the sweep was cancelled", "cancel": True})
    folder.slurm.clock.sleep(120.0)
    progress = folder.carry_on(plan)
    assert progress.counts == {"CANCELLED": 6}
    assert folder.started() == list(range(6))


def test_blocks_go_out_in_order(folder: SweepFolder) -> None:
    """One block after the other, whatever their shapes."""
    plan = folder.plan(mode="grid", **TWO_SHAPES, repeats=2, order="interleaved")
    folder.carry_on(plan)
    batches = read_batches(directory_of(folder.store, plan.id), plan)
    order = [task.point.number for batch in batches for task in batch.tasks]
    block = {number: index for index, numbers in enumerate(plan.blocks) for number in numbers}
    assert [block[number] for number in order] == sorted(block.values())


def test_a_task_that_everybody_forgot_is_over(folder: SweepFolder) -> None:
    """Ten minutes after its last sign of life, so that the sweep can end."""
    plan = folder.plan(axes={"--lr": [0.1]}, repeats=1)
    folder.controller(plan).tick()
    folder.slurm.jobs.clear()
    progress = folder.carry_on(plan)
    assert progress.counts == {"UNKNOWN": 1}
    assert folder.slurm.clock.now - plan.created > 600


SEARCH: dict[str, Any] = {
    "mode": "random",
    "axes": {"--lr": {"low": 0.1, "high": 1.0}},
    "repeats": 1,
    "search": {"trials": 7},
    "budget": {"parallel": 3},
}


def test_a_search_is_carried_on_by_the_next_controller(folder: SweepFolder) -> None:
    """At most three trials run at a time, and each is one task, whoever dies meanwhile."""
    plan = folder.plan(**SEARCH)
    folder.slurm.faults = [Fault.KILLED_AFTER]
    for _ in range(30):
        try:
            progress = folder.controller(plan).tick()
        except Killed:
            continue
        if progress.finished:
            break
        jobs = {job_id: folder.attempt(job_id) / "ended.json" for job_id in folder.slurm.jobs}
        running = [job_id for job_id, end in jobs.items() if not end.exists()]
        assert len(running) <= 3
        for number, job_id in enumerate(running[:2]):
            folder.report(job_id, test_accuracy=0.1 * number)
        folder.slurm.clock.sleep(progress.next_tick_seconds)
    assert folder.started() == list(range(7))
    assert progress.counts == {"COMPLETED": 7}
    assert {row.metric for row in folder.rows(plan)} <= {0.0, 0.1}


def test_a_search_has_one_figure_for_all_trials(folder: SweepFolder) -> None:
    """The first that reports one decides: a validation accuracy is not compared with a test's."""
    plan = folder.plan(**SEARCH | {"budget": {"parallel": 1}})
    told = [{"validation_accuracy": 0.5, "test_accuracy": 0.9}, {"test_accuracy": 0.8}]
    for number, figures in enumerate(told):
        progress = folder.controller(plan).tick()
        folder.report(max(folder.slurm.jobs, key=int), **figures)
        folder.slurm.clock.sleep(progress.next_tick_seconds)
        assert number == len(folder.slurm.jobs) - 1
    folder.controller(plan).tick()
    rows = folder.rows(plan)[:2]
    assert [row.metric_name for row in rows] == ["validation_accuracy"] * 2
    assert [row.metric for row in rows] == [0.5, None]


def test_a_hopeless_trial_is_asked_to_stop(folder: SweepFolder) -> None:
    """By a stop request; a minute later it is cancelled, and its row is PRUNED."""
    search = {"trials": 7, "pruner": "median"}
    plan = folder.plan(**SEARCH | {"search": search, "budget": {"parallel": 7}})
    controller = folder.controller(plan)
    controller.tick()
    folder.slurm.run(5000.0)
    *good, bad = sorted(folder.slurm.jobs)
    for job_id in [*good, bad]:
        events = folder.attempt(job_id) / "events" / "node1.jsonl"
        accuracy = 0.1 if job_id == bad else 0.9
        for epoch in (1, 2):
            data = {"accuracy": accuracy, "epoch": epoch}
            append(events, "evaluation", node="node1", rank=0, now=folder.slurm.clock.now, **data)
        if job_id != bad:
            folder.report(job_id, test_accuracy=accuracy)
            controller.tick()
    folder.slurm.clock.sleep(30)
    controller.tick()
    request = Attempt(folder.attempt(bad)).stop_request() or {}
    assert request.get("reason") == "pruned"  # after which no job continues
    assert not any(Attempt(folder.attempt(job_id)).stop_request() for job_id in good)
    for _ in range(3):
        folder.slurm.clock.sleep(40)
        progress = controller.tick()
    assert progress.counts == {"COMPLETED": 6, "PRUNED": 1}


def test_a_missing_metric_is_said_after_the_first_run(folder: SweepFolder) -> None:
    """With what the run reports; a search stops after four such runs, and goes on if asked to."""
    search = {"trials": 9, "metric": "score"}
    plan = folder.plan(**SEARCH | {"search": search, "budget": {"parallel": 1}})
    controller = folder.controller(plan)
    for number in range(4):
        controller.tick()
        folder.report(list(folder.slurm.jobs)[-1], test_accuracy=0.5, loss=1.0)
        progress = controller.tick()
        if not number:
            said = "the first run reports no score: it reports loss and test_accuracy"
            assert progress.missing_metric == said
            assert not progress.finished
    assert progress.waits_for == (
        "the first 4 runs report no score: they report loss and test_accuracy; start the search "
        f"again with another search.metric, `hpml sweep resume {plan.id}` continues anyway"
    )
    folder.slurm.clock.sleep(40)
    assert folder.carry_on(plan).counts == {"COMPLETED": 4}
    resume(folder.store, plan, now=folder.slurm.clock.now)
    assert folder.carry_on(plan).counts == {"COMPLETED": 9}


def test_a_metric_of_the_output(folder: SweepFolder) -> None:
    """The last number that the pattern finds, of a program that reports no result."""
    search = {"metric": {"pattern": r"val_loss=([\d.]+|nan|-)"}, "direction": "minimize"}
    plan = folder.plan(axes={"--lr": [0.1, 0.2]}, repeats=1, search=search)
    controller = folder.controller(plan)
    controller.tick()
    for job_id, text in zip(
        sorted(folder.slurm.jobs), ("val_loss=2\rval_loss=0.25 \xe9\nval_loss=-\n", ""), strict=True
    ):
        folder.report(job_id)
        (folder.attempt(job_id).parents[1] / "output.log").write_bytes(text.encode("latin-1"))
    progress = controller.tick()
    assert [row.metric for row in folder.rows(plan)] == [0.25, None]
    assert (progress.counts, progress.missing_metric) == ({"COMPLETED": 2}, "")
    facts = build(plan, folder.rows(plan))
    assert facts.figure.name == "val_loss"
