"""A sweep is carried on by whoever ticks: nothing twice, nothing lost, within all limits."""

from __future__ import annotations

import os
import random
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import pytest

from hpml_orchestrator.records.files import read_json, write_json
from hpml_orchestrator.records.owner import this_owner
from hpml_orchestrator.scheduler.model import JobState
from hpml_orchestrator.spec.array import parse_array
from hpml_orchestrator.sweeps.controller import cancel, resume
from hpml_orchestrator.sweeps.plan import SweepPlan, directory_of
from hpml_orchestrator.testing import Fault, Killed

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.sweeps.conftest import SweepFolder

TWO_SHAPES = {"axes": {"--lr": [0.1, 0.2], "resources.cpus_per_rank": [1, 2]}}
SUBMIT_FAULTS = [
    Fault.NONE,
    Fault.UNAVAILABLE,
    Fault.LOST_ANSWER,
    Fault.KILLED_BEFORE,
    Fault.KILLED_DURING,
    Fault.BOTH_KILLED,
    Fault.KILLED_AFTER,
]


def arrays(folder: SweepFolder) -> list[str]:
    """The arrays of all submissions, in the order of submission."""
    records = [submission.record() for submission in folder.store.submissions()]
    return [record["job"]["array"] for record in sorted(records, key=lambda one: one["created"])]


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


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_a_kill_at_any_write_harms_nothing(
    folder: SweepFolder, monkeypatch: pytest.MonkeyPatch, *, late: bool
) -> None:
    """Before and after each rename and link of a whole sweep, in turn."""
    calls = Counter(left=0)

    def killing(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            calls["left"] -= 1
            if calls["left"] == 0 and not late:
                raise Killed
            result = real(*arguments, **named)
            if calls["left"] == 0:
                raise Killed
            return result

        return call

    for name in ("rename", "replace", "link"):
        monkeypatch.setattr(os, name, killing(getattr(os, name)))
    steps = 0
    while calls["left"] <= 0:
        steps += 1
        plan = folder.plan(axes={"--lr": [0.1]})
        folder.slurm.jobs.clear()
        calls["left"] = steps
        folder.carry_on(plan)
        assert folder.started() == [0, 1], steps
        assert states(folder, plan) == {"COMPLETED": 2}
    assert steps > 15


def test_a_batch_is_no_larger_than_the_cluster_allows(folder: SweepFolder) -> None:
    """MaxArraySize 8 bounds the index: every array begins at 0. A refused array is halved."""
    plan = folder.plan(axes={"--lr": [index / 100 for index in range(10)]})
    folder.slurm.array_limit = 8
    folder.carry_on(plan)
    assert folder.slurm.sizes == [5, 5, 5, 5]
    assert folder.started() == list(range(20))
    assert states(folder, plan) == {"COMPLETED": 20}
