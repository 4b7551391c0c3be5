"""Real local runs become rows; what waits and what runs has rows too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hpml_orchestrator.records import feed
from hpml_orchestrator.records.files import write_json
from hpml_orchestrator.sweeps.controller import Controller
from hpml_orchestrator.sweeps.table import Table
from tests.patience import eventually

if TYPE_CHECKING:
    from tests.unit.sweeps.conftest import SweepFolder

# What a small training reports, in a file; the second rate fails.
TRAINING = """\
import json, os, sys
rate, seed, directory = float(sys.argv[1][5:]), int(sys.argv[2][7:]), sys.argv[3]
if rate == 0.5:
    sys.exit(3)
result = {"test_accuracy": rate, "seed": seed, "batch_size_per_rank": 16, "world_size": 2,
          "train_seconds": 1.5, "samples_per_second": 640.0, "evaluation_seconds": 0.25,
          "learning_rate": rate, "epochs": 2, "device": "cpu",
          "point": os.environ["HPML_POINT"], "sweep": os.environ["HPML_SWEEP"]}
with open(os.path.join(directory, "result.json"), "w") as stream:
    json.dump(result, stream)
"""
JOB: dict[str, Any] = {
    "command": [sys.executable, "-c", TRAINING],
    "args": ["--lr=0.1", "--seed=1", "{run.dir}"],
    "resources": {"nodes": 1, "ranks_per_node": 1, "time": "5:00"},
}


def cpu_model() -> str:
    """This machine's model of CPUs; empty if the kernel gives none."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "")


def test_a_local_sweep(folder: SweepFolder) -> None:
    """Values reach the program, results its row; a failed point keeps its row and its reason."""
    plan = folder.local_plan(JOB, mode="grid", axes={"--lr": [0.1, 0.5]}, repeats=2)
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder.root)}
    controller = Controller(folder.store, plan, environment=environment)
    eventually(lambda: controller.tick().finished, pause=0.1)
    found = Table(folder.store, plan).progress()
    assert (found.done, found.counts) == (4, {"COMPLETED": 2, "FAILED": 2})
    assert found.finished
    rows = folder.rows(plan)
    assert [row.point for row in rows] == [0, 1, 2, 3]
    for point, row in zip(plan.points, rows, strict=True):
        failed = point.values["--lr"] == 0.5
        assert row.state == ("FAILED" if failed else "COMPLETED")
        assert row.verified
        assert row.total_seconds == pytest.approx(
            sum(seconds for name, seconds in row.phases.items() if name not in SIDE_PHASES), abs=0.1
        )
        assert row.started
        assert row.ended
        assert row.core_hours == pytest.approx((row.ended - row.started) / 3600)
        assert row.hardware.endswith(f"{os.cpu_count()} cores")
        assert row.hardware.startswith(cpu_model())
        if failed:
            assert row.accuracy is None
            continue
        assert (row.accuracy, row.metric, row.learning_rate) == (0.1, 0.1, 0.1)
        assert (row.batch_per_rank, row.batch_global, row.world_size) == (16, 32, 2)
        assert (row.samples_per_second, row.training_seconds) == (640.0, 1.5)
        assert (row.device, row.epochs, row.phases["evaluation"]) == ("cpu", 2, 0.25)
        assert row.result["seed"] == point.seed
        assert row.result["point"] == str(point.number)
        assert row.result["sweep"] == plan.id
    assert len({row.environment for row in rows}) == 1


def test_several_processes_at_once(folder: SweepFolder) -> None:
    """Whoever ticks at the same moment: one submits, the others look on."""
    plan = folder.local_plan(JOB, mode="grid", axes={"--lr": [0.1]}, repeats=2)
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder.root)}
    hpml = [sys.executable, "-m", "hpml_orchestrator.cli", "--records", str(folder.store.root)]
    tick = [*hpml, "sweep", "tick", plan.id]
    processes = [
        subprocess.Popen(tick, env=environment, stdout=subprocess.DEVNULL) for _ in range(3)
    ]
    assert [process.wait(120) for process in processes] == [0, 0, 0]
    controller = Controller(folder.store, plan, environment=environment)
    eventually(lambda: controller.tick().finished, pause=0.1)
    assert len(list(folder.store.submissions())) == 1
    assert {row.state for row in folder.rows(plan)} == {"COMPLETED"}


SIDE_PHASES = ("queue", "evaluation", "checkpoint")


def test_a_row_is_collected_once(folder: SweepFolder) -> None:
    """Done markers need no question to the scheduler; a torn line is collected again."""
    plan = folder.plan()
    folder.controller(plan).tick()
    jobs = list(folder.slurm.jobs)
    for job_id in jobs:
        folder.report(job_id, test_accuracy=0.5)
    assert folder.controller(plan).tick().finished
    assert folder.slurm.calls["squeue"] == 0
    path = folder.store.root / "sweeps" / plan.id / "rows.jsonl"
    lines = path.read_text().splitlines()
    assert len(lines) == 6
    path.write_text("\n".join([*lines[:5], lines[5][:40]]))
    folder.report(jobs[-1], test_accuracy=0.75)
    assert folder.controller(plan).tick().finished
    assert [row.accuracy for row in folder.rows(plan)] == [0.5] * 5 + [0.75]


EVALUATED = [0.5, 0.4, 0.9, 0.85]


@pytest.mark.parametrize(
    ("result", "evaluations", "expected"),
    [
        ({"test_accuracy": 0.8, "accuracy": 0.99}, EVALUATED, ("test_accuracy", 0.8)),
        ({"eval_accuracy": 0.7, "train_accuracy": 1.0}, [], ("eval_accuracy", 0.7)),
        ({"accuracy": 0.99}, EVALUATED, ("accuracy of the last evaluation", 0.85)),
        ({"validation_accuracy": 0.9}, EVALUATED, ("accuracy of the last evaluation", 0.85)),
        ({"validation_accuracy": 0.9, "test_accuracy": 0.8}, EVALUATED, ("test_accuracy", 0.8)),
        ({"accuracy": 0.99}, [], ("accuracy", 0.99)),
        ({"train_accuracy": 0.99, "target_accuracy": 0.5}, [], ("train_accuracy", 0.99)),
        ({"seconds_to_accuracy": 3.0, "target_accuracy": 0.5}, [], ("", None)),
    ],
    ids=["test", "Trainer", "evaluation", "stopped", "validation", "any", "training", "none"],
)
def test_only_what_is_called_a_test_is_one(
    folder: SweepFolder, result: dict[str, float], evaluations: list[float], expected: Any
) -> None:
    """A result's accuracy keeps the name that the program gave it."""
    plan = folder.plan(axes={"--lr": [0.1]}, repeats=1)
    folder.controller(plan).tick()
    ((job_id, _),) = folder.slurm.jobs.items()
    log = folder.attempt(job_id) / "events" / "n1.jsonl"
    feed.append(log, "warm-up", node="n1", rank=0, now=100.0)
    for epoch, value in enumerate(evaluations, 1):
        time = 100.0 + 10 * epoch
        feed.append(log, "evaluation", node="n1", rank=0, now=time, accuracy=value, epoch=epoch)
    folder.report(job_id, **result)
    folder.controller(plan).tick()
    (row,) = folder.rows(plan)
    assert (row.accuracy_name, row.accuracy) == expected
    assert row.evaluations == (((10.0, 0.5), (30.0, 0.9)) if evaluations else ())
    argv = f"--records {folder.store.root} sweep report {plan.id} --json"
    command = [sys.executable, "-W", "error", "-m", "hpml_orchestrator.cli", *argv.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    (attempt,) = json.loads(done.stdout)["attempts"]
    assert attempt["row"]["evaluations"] == [[10.0, 0.5], [30.0, 0.9]][: len(row.evaluations)]


def started_again(folder: SweepFolder) -> tuple[Path, Path, float]:
    """Have the only job claim a second attempt; return both attempts' directories and the time."""
    ((job_id, _),) = folder.slurm.jobs.items()
    start = folder.attempt(job_id)
    last = start.with_name("1")
    (last / "started").mkdir(parents=True)
    (last / "started" / "job_id").write_text(job_id)
    return start, last, folder.slurm.clock.now


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "not recorded"])
def test_hours_are_those_of_the_allocation(folder: SweepFolder, *, recorded: bool) -> None:
    """All cores of the nodes, and a start that Slurm requeued; the budget counts them too."""
    plan = folder.plan(axes={"--lr": [0.1]}, repeats=2, budget={"core_hours": 0.6})
    controller = folder.controller(plan)
    controller.tick()
    start, last, now = started_again(folder)
    data: dict[str, Any] = {"nodes": "n[1-2]", **({"cpus": 16} if recorded else {})}
    for attempt, begun in ((start, now), (last, now + 1000)):
        feed.append(attempt / "events/batch.jsonl", "started", node="batch", now=begun, **data)
    write_json(start / "ended.json", {"exit_code": 143, "reason": "SIGTERM", "time": now + 900})
    write_json(last / "ended.json", {"exit_code": 0, "state": "COMPLETED", "time": now + 1900})
    controller.tick()
    row = folder.rows(plan)[0]
    assert row.state == "COMPLETED"
    assert row.allocated == (16 if recorded else None)
    assert row.core_hours == pytest.approx(1800 / 3600 * (16 if recorded else 1))
    (earlier,) = row.requeued
    assert (earlier["seconds"], earlier["nodes"], earlier["reason"]) == (900, "n[1-2]", "SIGTERM")
    assert f"the next point may take {'8' if recorded else '0.5'}" in controller.tick().waits_for


@pytest.mark.parametrize(
    ("resumed", "goes_on", "seconds"),
    [(50, False, 1900), (None, True, 1900), (None, False, 1000)],
    ids=["resumed", "continues without a channel", "from the start"],
)
def test_a_point_that_continues_from_a_checkpoint_took_all_of_its_time(
    folder: SweepFolder, resumed: int | None, goes_on: bool, seconds: float
) -> None:
    """The last attempt alone would look like a point that is many times as fast."""
    plan = folder.plan(axes={"--lr": [0.1]}, repeats=1)
    controller = folder.controller(plan)
    controller.tick()
    start, last, now = started_again(folder)
    for attempt, begun, first in ((start, now, 0), (last, now + 1000, resumed or 0)):
        log, ranks = attempt / "events/batch.jsonl", attempt / "events/n1.jsonl"
        feed.append(log, "started", node="batch", now=begun, nodes="n1", cpus=2 + first)
        if attempt == last and resumed:
            feed.append(ranks, "resumed", node="n1", rank=0, now=begun, step=resumed)
        for moment, steps in ((begun, 0), (begun + 500, 40)):
            feed.append(ranks, "step", node="n1", rank=0, now=moment, steps_total=steps)
        gpu = {"uuid": "GPU-1", "energy_joules": 3.6e6}
        (attempt / "nodes").mkdir()
        write_json(attempt / "nodes/n1.monitor.json", {"seconds": 900, "gpus": [gpu]})
    end = {"exit_code": 75, "reason": "preempted", "time": now + 900, "goes_on": goes_on}
    write_json(start / "ended.json", {**end, "state": "COMPLETED" if goes_on else "PREEMPTED"})
    if goes_on:  # its own record must not be taken for that of the last attempt
        later = last.rename(last.with_name("later"))
        controller.tick()
        assert [row.over for row in folder.rows(plan)] == [False]
        later.rename(last)
    write_json(last / "ended.json", {"exit_code": 0, "state": "COMPLETED", "time": now + 2000})
    controller.tick()
    (row,) = folder.rows(plan)
    assert (row.state, row.attempts, row.total_seconds) == ("COMPLETED", 2, seconds)
    assert row.steps == (90 if resumed else 40)
    assert [bool(one.get("continued")) for one in row.requeued] == [seconds == 1900]
    # 2 cores for 900 s, then those that the second attempt was given for 1,000 s
    cores = 2 + (resumed or 0)
    assert row.core_hours == pytest.approx((2 * 900 + cores * 1000) / 3600)
    assert row.node_hours == pytest.approx(1900 / 3600)
    assert row.energy_kwh == pytest.approx(2)
    assert len(folder.slurm.jobs) == 1  # nothing started it again


@pytest.mark.parametrize(
    ("age", "accuracy"), [(60.0, None), (-60.0, 0.5)], ids=["of the first attempt", "of the last"]
)
def test_a_result_of_an_earlier_attempt_is_not_that_of_the_point(
    folder: SweepFolder, age: float, accuracy: float | None
) -> None:
    """A training that was asked to stop may have written one; the file stays after a requeue."""
    plan = folder.plan(axes={"--lr": [0.1]}, repeats=1)
    controller = folder.controller(plan)
    controller.tick()
    start, last, now = started_again(folder)
    for attempt in (start, last):
        write_json(attempt / "head.json", {"node": "n1"})
    path = start.parents[1] / "result.json"
    write_json(path, {"test_accuracy": 0.5, "stopped": True})
    written = (last / "head.json").stat().st_mtime - age
    os.utime(path, (written, written))
    write_json(start / "ended.json", {"exit_code": 75, "reason": "preempted", "time": now})
    write_json(last / "ended.json", {"exit_code": 0, "state": "COMPLETED", "time": now + 100})
    controller.tick()
    (row,) = folder.rows(plan)
    assert (row.state, row.attempts, row.accuracy) == ("COMPLETED", 2, accuracy)
    assert bool(row.result) == (accuracy is not None)


def test_a_result_of_the_channel_and_the_file_are_one(folder: SweepFolder) -> None:
    """The metric may be in either; the channel's figure comes first, as in `hpml show`."""
    plan = folder.plan(axes={"--lr": [0.1]}, repeats=1)
    folder.controller(plan).tick()
    ((job_id, _),) = folder.slurm.jobs.items()
    log = folder.attempt(job_id) / "events" / "n1.jsonl"
    told = {"final": True, "test_accuracy": 0.9}
    feed.append(log, "evaluation", node="n1", rank=0, now=100.0, **told)
    folder.report(job_id, test_accuracy=0.5, learning_rate=0.25)
    folder.controller(plan).tick()
    (row,) = folder.rows(plan)
    assert (row.accuracy, row.learning_rate) == (0.9, 0.25)


@pytest.mark.parametrize(
    ("result", "evaluations", "diverged"),
    [
        ('{"test_accuracy": NaN, "train_accuracy": 1.0}', EVALUATED, "test_accuracy is NaN"),
        ('{"test_loss": -Infinity}', [], "test_loss is -Infinity"),
        ('{"test_loss": 1e999}', [], "test_loss is 1e999"),
        ('{"score": NaN, "rate": NaN}', [], "score is NaN"),
        ("{}", [0.5, None], "accuracy of the last evaluation is NaN"),
        ("{}", [None, None], ""),
        ('{"test_loss": null, "target_loss": NaN, "seconds_to_loss": NaN}', [], ""),
        ('{"test_accuracy": 0.9, "device": "nan"}', [], ""),
    ],
)
def test_a_figure_that_is_no_number_is_a_training_that_diverged(
    folder: SweepFolder, result: str, evaluations: list[float | None], diverged: str
) -> None:
    """Not one that reports nothing, and an earlier evaluation does not stand in for it."""
    plan = folder.plan(axes={"--lr": [0.1]}, repeats=1, search={"metric": "score"})
    folder.controller(plan).tick()
    ((job_id, _),) = folder.slurm.jobs.items()
    log = folder.attempt(job_id) / "events" / "n1.jsonl"
    for value in evaluations:
        feed.append(log, "evaluation", node="n1", rank=0, now=100.0, accuracy=value)
    folder.report(job_id)
    (folder.attempt(job_id).parents[1] / "result.json").write_text(result)
    folder.controller(plan).tick()
    (row,) = folder.rows(plan)
    assert row.diverged == diverged
    assert (row.accuracy is None) == (bool(diverged) or "accuracy" not in result)


@pytest.mark.parametrize(
    ("waited", "cpus", "share"),
    [(46.0, "0-1", 0.46), (1.0, "0-1", 0.01), (None, "0-1", None), (46.0, "0-x", None)],
    ids=["contended", "alone", "not measured", "damaged"],
)
def test_a_row_knows_how_much_others_had_the_cpus(
    folder: SweepFolder, waited: float | None, cpus: str, share: float | None
) -> None:
    """From the counters of the channel, as the finding of `hpml report` has it."""
    plan = folder.plan(axes={"--lr": [0.1]}, repeats=1)
    folder.controller(plan).tick()
    ((job_id, _),) = folder.slurm.jobs.items()
    attempt = folder.attempt(job_id)
    (attempt / "binding").mkdir()
    place = {"rank": 0, "local_rank": 0, "world_size": 1, "node": "n1", "cpus": cpus}
    (attempt / "binding/n1.jsonl").write_text(f"{json.dumps(place)}\n")
    counters = {"step_seconds": 100.0, "cpu_seconds": 50.0, "helper_cpu_seconds": 0.0}
    counters |= {} if waited is None else {"cpu_wait_seconds": waited}
    for moment in (0, 100):
        told = {f"{name}_total": value * moment / 100 for name, value in counters.items()}
        log, now = attempt / "events/n1.jsonl", 1000.0 + moment
        feed.append(log, "step", node="n1", rank=0, now=now, steps_total=2 * moment, **told)
    folder.report(job_id)
    folder.controller(plan).tick()
    (row,) = folder.rows(plan)
    assert row.state == "COMPLETED"
    assert row.cpu_contention == (None if share is None else pytest.approx(share))


@pytest.mark.parametrize(
    ("reused", "expected"),
    [([], None), ([False, False], False), ([True, False], True)],
    ids=["nothing staged", "copied", "on one node already"],
)
def test_a_row_knows_whether_data_was_there(
    folder: SweepFolder, reused: list[bool], expected: bool | None
) -> None:
    """With `keep: true` the first run copies, and the time of the others has no copy."""
    plan = folder.plan(axes={"--lr": [0.1]}, repeats=1)
    folder.controller(plan).tick()
    ((job_id, _),) = folder.slurm.jobs.items()
    log = folder.attempt(job_id) / "events/n1.jsonl"
    stage = {"name": "data", "path": "/dev/shm/data", "bytes": 9, "files": 1, "seconds": 1.0}
    stage |= {"bytes_per_second": 9.0, "method": "copy", "kept": True}
    for number, there in enumerate(reused):
        stages = [{**stage, "reused": there}]
        feed.append(log, "ready", node=f"n{number}", now=1000.0, stages=stages)
    folder.report(job_id)
    folder.controller(plan).tick()
    assert [row.data_reused for row in folder.rows(plan)] == [expected]


def test_rows_of_what_is_not_over(folder: SweepFolder) -> None:
    """Excluded, pending and running points, as of the last tick."""
    plan = folder.plan(exclude=[{"--lr": 0.3}], budget={"parallel": 2}, repeats=1)
    controller = folder.controller(plan)
    for state in ("WAITING", "PENDING", "RUNNING"):
        rows = {row.point: row for row in folder.rows(plan)}
        excluded = [rows.pop(point.number) for point in plan.points if point.excluded]
        assert [(row.state, row.over, bool(row.reason)) for row in excluded] == [
            ("EXCLUDED", True, True)
        ]
        assert {row.state for row in rows.values()} == {state}
        controller.tick()
        folder.slurm.run(1000.0)
        folder.slurm.clock.sleep(40)
    assert sorted(row.job_id for row in rows.values()) == ["1_0", "1_1"]
    assert all(row.started and not row.over for row in rows.values())
