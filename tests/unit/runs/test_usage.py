"""GPU-hours of one's own runs come from records: over attempts, with and without a monitor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from hpml_orchestrator.records.files import write_json
from hpml_orchestrator.runs.reporting.usage import Selection, recorded_usage
from hpml_orchestrator.scheduler.model import JobState

if TYPE_CHECKING:
    from tests.unit.runs.conftest import World

GPU = {"uuid": "G0", "seconds": 7200, "utilization_ratio": 0.25, "busy_seconds": 1800}
NODE = {"seconds": 7200, "updated": 1, "job": {}}


@pytest.fixture
def runs(world: World) -> World:
    """Two hours on two monitored GPUs, one hour on one GPU without a monitor, and one on none."""
    jobs: list[tuple[dict[str, Any], int, list[dict[str, Any]]]] = [
        (
            {"gpus": 2, "account": "vision"},
            2,
            [GPU | {"energy_joules": 3.6e6}, GPU | {"uuid": "G1"}],
        ),
        ({"gpus": 1, "account": "speech"}, 1, []),
        ({"gpus": 0}, 1, []),
    ]
    for number, (resources, hours, gpus) in enumerate(jobs, 1):
        submission = world.submit(resources={**resources, "time": "10:00:00"})
        world.scheduler.move(str(number), JobState.RUNNING)
        attempt = world.starts(submission, str(number))
        if gpus:
            write_json(attempt / "nodes" / "n1.monitor.json", {**NODE, "gpus": gpus})
        world.clock.sleep(hours * 3600)
        world.scheduler.move(str(number), JobState.COMPLETED)
        world.state(submission)
    return world


def chosen(world: World, by: str, **more: Any) -> Selection:
    return Selection(by=by, since=world.clock.now - 1e6, until=world.clock.now, **more)


def test_hours_of_runs(runs: World) -> None:
    """Without a monitor the hours count and the activity is unknown; runs without GPUs are none."""
    rows, total = recorded_usage(runs.store, chosen(runs, "job"))
    assert [(row.labels["jobid"], round(row.gpu_hours, 2)) for row in rows] == [("1", 4), ("2", 1)]
    monitored, other = rows
    assert (monitored.active, monitored.unused_hours) == (0.25, 3)
    assert monitored.energy_kwh == 1
    assert (other.active, other.unused_hours, other.energy_kwh) == (None, None, None)
    assert (total.jobs, round(total.gpu_hours, 2), total.active) == (2, 5, 0.25)


def test_selected_and_grouped(runs: World) -> None:
    """Accounts are summed up; what is not selected counts nowhere, not even in the sum."""
    rows, total = recorded_usage(runs.store, chosen(runs, "account", accounts=["vision"]))
    assert [(row.labels, row.jobs) for row in rows] == [({"account": "vision"}, 1)]
    assert total.jobs == 1
    rows, _ = recorded_usage(runs.store, chosen(runs, "job", min_unused_hours=3.5))
    assert rows == []
    rows, _ = recorded_usage(runs.store, chosen(runs, "job", number=1))
    assert len(rows) == 1
