"""Times by MLPerf's rule, and the lines of MLLOG, from runs on record."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.records import feed
from hpml_orchestrator.sweeps.mlperf import write_logs
from hpml_orchestrator.sweeps.plan import SweepPlan
from hpml_orchestrator.sweeps.reporting import read_report
from hpml_orchestrator.sweeps.table import Table
from tests.unit.sweeps.conftest import SweepFolder
from tests.unit.sweeps.sweep_rows import completed

TIMES: dict[float, list[float | None]] = {
    0.1: [10.0, 50.0, 20.0, 30.0, 1.0],  # drops 1 and 50
    0.2: [10.0, None, 20.0, 30.0, 40.0],  # drops 10 and the run that missed the target
    0.3: [10.0, None, None, 30.0, 40.0],
}


def on_record(folder: SweepFolder, figure: str, repeats: int = 5) -> SweepPlan:
    """A grid whose runs trained to a target."""
    plan = folder.plan(axes={"--lr": list(TIMES)}, repeats=repeats)
    table = Table(folder.store, plan)
    for point in plan.points:
        time = TIMES[point.values["--lr"]][point.repeat]
        result: dict[str, Any] = {f"seconds_to_{figure}": time}
        fields: dict[str, Any] = {"accuracy": None, "result": result}
        if figure == "accuracy":
            fields |= {"accuracy": 0.9, "target_accuracy": 0.9, "seconds_to_accuracy": time}
        table.end(completed(point, {"training": 60.0}, **fields))
    return plan


@pytest.mark.parametrize("figure", ["accuracy", "loss"])
def test_the_fastest_and_the_slowest_run_are_dropped(folder: SweepFolder, figure: str) -> None:
    """One run that missed the target is the slowest; with two of them there is no result."""
    shown = read_report(folder.store, on_record(folder, figure), mlperf=True)
    found = {shown.facts.settings[one.setting].label: one for one in shown.facts.mlperf}
    means = {label: one.seconds for label, one in found.items()}
    assert means == {"lr=0.1": 20.0, "lr=0.2": 30.0, "lr=0.3": None}
    assert found["lr=0.1"].dropped == (1.0, 50.0)
    assert "enough runs for vision (5), not for other benchmarks (10)" in str(shown)
    assert "| lr=0.2 | 5 | 4 | 10 | missed | 30 |" in str(shown)
    assert "| no result | 2 of 5 runs missed the target |" in str(shown)


def test_too_few_runs_give_no_result(folder: SweepFolder) -> None:
    """Nothing would be left of two; without a target there is nothing to report."""
    plan = on_record(folder, "loss", repeats=2)
    shown = read_report(folder.store, plan, mlperf=True)
    assert {one.seconds for one in shown.facts.mlperf} == {None}
    assert "no result | of 2 runs none would be left" in str(shown)
    assert "MLPerf" not in str(read_report(folder.store, plan))
    plan = folder.plan(axes={"--lr": [0.1]}, repeats=1)
    with pytest.raises(InputError, match="needs runs with a time to a target"):
        read_report(folder.store, plan, mlperf=True)


def test_runs_become_lines_of_mllog(folder: SweepFolder, tmp_path: Path) -> None:
    """In the order of mlperf_logging, up to the evaluation that reached the target."""
    plan = folder.plan(axes={"--lr": [0.1]}, repeats=1)
    folder.controller(plan).tick()
    ((job_id, _),) = folder.slurm.jobs.items()
    attempt, now = folder.attempt(job_id), folder.slurm.clock.now
    log = attempt / "events/n1.jsonl"
    feed.append(attempt / "events/batch.jsonl", "started", node="batch", now=now, cpus=2)
    feed.append(log, "warm-up", node="n1", rank=0, now=now + 5)
    for epoch, accuracy in ((2, 0.5), (4, 0.95), (6, 0.99)):
        told = {"accuracy": accuracy, "epoch": epoch}
        feed.append(log, "evaluation", node="n1", rank=0, now=now + 5 + epoch, **told)
    result = {"batch_size_per_rank": 8, "world_size": 2, "seed": 3, "train_images": 100}
    folder.report(job_id, **result, target_accuracy=0.9, seconds_to_accuracy=4.0)
    folder.controller(plan).tick()
    facts = read_report(folder.store, plan).facts
    assert facts.settings[0].means["epochs_to_target"] == 4
    assert write_logs(folder.store, facts, None, tmp_path / "logs") == 1
    lines = (tmp_path / "logs/lr=0.1/result_0.txt").read_text().splitlines()
    assert all(line.startswith(':::MLLOG {"namespace": "", "time_ms": ') for line in lines)
    found = [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]
    keys = [(one["key"], one["value"], one["metadata"]) for one in found]
    first, second = ({"first_epoch_num": n, "epoch_count": 2} for n in (1, 3))
    assert keys == [
        ("seed", 3, {}),
        ("global_batch_size", 16, {}),
        ("train_samples", 100, {}),
        ("init_start", None, {}),
        ("init_stop", None, {}),
        ("run_start", None, {}),
        ("block_start", None, first),
        ("block_stop", None, first),
        ("eval_accuracy", 0.5, {"epoch_num": 2}),
        ("block_start", None, second),
        ("block_stop", None, second),
        ("eval_accuracy", 0.95, {"epoch_num": 4}),
        ("run_stop", None, {"status": "success"}),
    ]
    times = [one["time_ms"] for one in found]
    assert times == sorted(times)
    assert times[-1] - times[keys.index(("run_start", None, {}))] == 4000
    kinds = {re.sub(".*_", "", one["key"]): one["event_type"] for one in found}
    assert kinds["start"] == "INTERVAL_START"
    assert kinds["stop"] == "INTERVAL_END"
