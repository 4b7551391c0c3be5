"""Figures of the nodes' monitors: per node, of all nodes, and what is unusual."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hpml_orchestrator.records import targets
from hpml_orchestrator.records.run import Attempt
from hpml_orchestrator.runs.reporting.monitor import (
    Monitored,
    aggregate_nodes,
    monitor_lines,
    monitored_nodes,
)
from hpml_orchestrator.scheduler.model import JobState

if TYPE_CHECKING:
    from tests.unit.runs.conftest import World

GIB = 1 << 30


def gpu(uuid: str = "a", busy: float = 0.5, seconds: float = 100.0, **more: Any) -> dict[str, Any]:
    """A GPU as its exporter writes it."""
    figures = {"utilization_ratio": busy, "busy_seconds": busy * seconds}
    return {"uuid": uuid, "name": "A100", "seconds": seconds, **figures, **more}


def record(*gpus: dict[str, Any], updated: float = 1000.0, **job: float) -> dict[str, Any]:
    """A node's file."""
    return {
        "schema_version": 1,
        "jobid": "17",
        "seconds": 100.0,
        "updated": updated,
        "job": job,
        "training": {"samples": 640.0, "loss": 0.5},
        "gpus": list(gpus),
    }


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    """An attempt without nodes."""
    (tmp_path / "nodes").mkdir()
    return Attempt(tmp_path)


def write(attempt: Attempt, **nodes: Any) -> list[Monitored]:
    """Write nodes' files, and read them."""
    for node, told in nodes.items():
        text = told if isinstance(told, str) else json.dumps(told)
        (attempt.directory / "nodes" / f"{node}.monitor.json").write_text(text)
    return monitored_nodes(attempt)


def test_one_node_is_one_line(attempt: Attempt) -> None:
    """GPUs first, then the host."""
    one = gpu(
        tensor_active_ratio=0.31,
        sm_active_ratio=0.62,
        memory_peak_bytes=30 * GIB,
        energy_joules=3.6e6,
        power_watts=400.0,
    )
    job = {"mean_cpus": 3.14, "cpus": 8.0, "memory_peak_bytes": 2.0 * GIB}
    io = {"io_read_bytes": 1.5 * GIB, "io_write_bytes": 1024.0}
    (line,) = monitor_lines(write(attempt, n1=record(one, **job, **io)))
    assert line == (
        "1 GPU 50% busy, SMs 62%, tensor cores 31%, 30.0 GiB of memory at most, 1 kWh; "
        "3.1 of 8 CPUs busy, 2.0 GiB of memory at most, 1.5 GiB read, 1.0 KiB written"
    )


def test_nodes_are_added_up(attempt: Attempt) -> None:
    """CPU time, I/O and counts are sums, memory is that of the node with most."""
    first = record(mean_cpus=2.0, memory_peak_bytes=3.0 * GIB, io_read_bytes=10.0, oom_events=1.0)
    second = record(mean_cpus=1.5, memory_peak_bytes=1.0 * GIB, io_read_bytes=5.0, cpus=4.0)
    nodes = write(attempt, n1=first, n2=second)
    whole = aggregate_nodes(nodes)
    assert whole is not None
    assert whole.figures == {
        "mean_cpus": 3.5,
        "cpus": 4,
        "memory_peak_bytes": 3 * GIB,
        "io_read_bytes": 15,
        "oom_events": 1,
    }
    assert whole.training == {"samples": 1280}
    lines = monitor_lines(nodes)
    most = "3.0 GiB of memory at most"
    assert lines[0].startswith(f"3.5 of 4 CPUs busy, {most} on one node, 15 bytes")
    assert lines[1].startswith(f"n1: 2.0 CPUs busy, {most}, 10 bytes read; 1 x out")
    assert lines[2].startswith("n2: 1.5 of 4 CPUs busy")


def test_gpus_are_weighed_by_their_time(attempt: Attempt) -> None:
    """100 s at 50 % and 300 s at 90 % are 80 %; energy is a sum, memory the most."""
    one = gpu("a", 0.5, 100, memory_peak_bytes=9 * GIB, energy_joules=3.6e6)
    two = gpu("b", 0.9, 300, memory_peak_bytes=5 * GIB, energy_joules=7.2e6)
    (line,) = monitor_lines(write(attempt, n1=record(one, two)))
    assert line == "2 GPUs 80% busy, 9.0 GiB of memory at most on one, 3 kWh"


def test_trouble_is_told(attempt: Attempt) -> None:
    """Throttling of a second or more, errors of the driver, and processes that were ended."""
    odd = gpu(throttled_seconds={"hw_thermal": 75.0, "sw_power": 0.2}, xid_errors={"79": 2.0})
    (line,) = monitor_lines(write(attempt, n1=record(odd, oom_events=3.0)))
    assert line.endswith("throttled 1:15 (hw_thermal), XID 79 (2 x), 3 x out of memory")


def test_what_is_missing_at_the_end_is_told(attempt: Attempt) -> None:
    """The monitor was killed: its last record is older than the job's end."""
    nodes = write(attempt, n1=record(mean_cpus=1.0, updated=1000.0))
    told = "the last 25 s are missing: the monitor was killed"
    assert monitor_lines(nodes, ended=1025.0)[1:] == [told]
    assert monitor_lines(nodes, ended=1010.0)[1:] == []
    assert monitor_lines(nodes)[1:] == []


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"schema_version": 99}', '{"schema_version": 1, "job": 7, "gpus": [3, "x"]}'],
)
def test_damaged_files_are_passed_over(attempt: Attempt, text: str) -> None:
    """So are values in a good one that are not numbers."""
    nodes = write(attempt, n1=text, n2=record(mean_cpus=1.0, cpus="four"))  # type: ignore[arg-type]
    assert monitor_lines(nodes)[0] == "1.0 CPUs busy"


@pytest.mark.parametrize("monitor", [True, False])
def test_a_submission_sweeps_the_targets_of_the_dead(world: World, monitor: bool) -> None:
    """That of a monitored job does, so that others need not even look."""
    dead = world.store.root / "targets" / "dead.c-1@n1.json"
    targets.publish(dead, "a:1", {"jobid": "1", "run": "dead", "node": "n1"})
    os.utime(dead, (0, 0))
    world.prepare(monitor=monitor)
    assert dead.exists() is not monitor


def test_a_known_end_takes_the_targets_along(world: World) -> None:
    """Its nodes died without a word: who asks how it ended removes what is left."""
    submission = world.submit(monitor=True)
    left = world.store.root / "targets" / f"{submission.sid}.c-1@n1.json"
    targets.publish(left, "a:1", {"jobid": "1", "run": submission.sid, "node": "n1"})
    world.state(submission)
    assert left.exists()
    world.scheduler.move("1", JobState.FAILED)
    world.state(submission)
    assert not left.exists()
