"""Facts for a diagnosis come from records as jobs write them, whatever is missing or damaged."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from hpml_orchestrator.diagnosis.diagnose import diagnose
from hpml_orchestrator.errors import RecordError
from hpml_orchestrator.records.files import write_json
from hpml_orchestrator.runs.facts import gather
from hpml_orchestrator.runs.prometheus import Prometheus
from hpml_orchestrator.scheduler.model import JobState

if TYPE_CHECKING:
    from pathlib import Path

    from hpml_orchestrator.records.store import Submission
    from tests.unit.runs.conftest import World

GIB = 1 << 30
STEP = {"samples": 320, "steps": 10, "step_seconds": 10, "data_wait_seconds": 4, "comm_seconds": 1}
MONITORED = {
    "seconds": 100,
    "updated": 1,
    "job": {"mean_cpus": 1.5, "cpus": 2, "memory_peak_bytes": GIB, "io_read_bytes": 7e9},
    "gpus": [
        {
            "uuid": "G0",
            "name": "NVIDIA H100 80GB HBM3",
            "seconds": 90,
            "utilization_ratio": 0.5,
            "memory_peak_bytes": 70 * GIB,
            "memory_total_bytes": 80 * GIB,
            "throttled_seconds": {"hw_thermal": 3},
            "xid_errors": {"79": 1},
        }
    ],
}


def trained(world: World, **fields: Any) -> tuple[Submission, Path]:
    """A run of two ranks that has trained 100 s, and continues."""
    asked = {"ranks_per_node": 2, "memory": "4G", "time": "10:00"}
    submission = world.submit(resources=asked, **fields)
    world.scheduler.move("1", JobState.RUNNING)
    attempt = world.starts(submission, "1")
    for number in range(11):
        for rank in (0, 1):
            data = {f"{name}_total": value * (number + 2) for name, value in STEP.items()}
            world.event(attempt, "step", rank, **data, mfu=0.4)
        world.clock.sleep(10)
    for rank in (0, 1):
        line = {"rank": rank, "local_rank": rank, "node": "n1", "world_size": 2, "cpus": str(rank)}
        with (attempt / "binding" / "n1.jsonl").open("a") as stream:
            stream.write(json.dumps({**line, "time": world.clock.now}) + "\n")
    return submission, attempt


def test_a_run_that_goes_on(world: World) -> None:
    """The counters since the warm-up, the time so far, and what was asked for."""
    submission, attempt = trained(world)
    write_json(attempt / "nodes" / "n1.monitor.json", MONITORED)
    facts = gather(world.state(submission), now=world.clock.now)
    assert (facts.state, facts.over, facts.elapsed_seconds) == ("RUNNING", False, 110)
    assert (facts.limit_seconds, facts.world_size, facts.core_count) == (600, 2, 2)
    for number, rank in enumerate(facts.ranks):
        assert (rank.rank, rank.node, rank.cpus) == (number, "n1", (number,))
        assert (rank.steps, rank.step_seconds, rank.data_wait_seconds) == (100, 100, 40)
        assert (rank.wait_seconds, rank.save_seconds, rank.bound_as_planned) == (None, None, None)
    (node,) = facts.nodes
    assert (node.cpus, node.mean_cpus, node.read_bytes) == (2, 1.5, 7e9)
    assert node.memory_limit_bytes == 4 * GIB  # what was asked for: the kernel knows no limit
    (gpu,) = node.gpus
    assert (gpu.memory_total_bytes, gpu.throttled_seconds["hw_thermal"]) == (80 * GIB, 3)
    found = diagnose(facts)
    assert [one.kind for one in found.findings] == ["waits-for-data", "faulty-gpu"]


def test_a_run_of_another_cluster(world: World) -> None:
    """Its time ends with its last event: nobody here knows whether it still runs."""
    submission, attempt = trained(world)
    for path in (attempt / "events").iterdir():
        os.utime(path, (world.clock.now, world.clock.now))
    state = replace(world.state(submission), state="UNKNOWN", elsewhere=True)
    facts = gather(state, now=world.clock.now + 1e6)
    assert (facts.over, facts.elapsed_seconds) == (False, 110)


def test_figures_of_prometheus(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run without a monitor has those of its nodes and GPUs; the record's own come first."""
    submission, attempt = trained(world)
    node, gpu = {"node": "n1"}, {"node": "n1", "of": "gpu", "uuid": "G0", "name": "H100"}
    samples = [
        ({**node, "figure": "mean_cpus"}, 1.5),
        ({**node, "figure": "cpus"}, 2.0),
        ({**gpu, "figure": "sm_active_ratio"}, 0.4),
        ({**gpu, "figure": "throttled_seconds", "reason": "hw_thermal"}, 55.0),
        ({**gpu, "figure": "xid_errors", "xid": "79"}, 1.0),
    ]
    server = Prometheus("http://127.0.0.1:1")
    asked: list[Any] = []

    def job_over(*words: str, **more: float) -> Any:
        asked.append((words, more))
        return samples

    monkeypatch.setattr(server, "job_over", job_over)
    facts = gather(world.state(submission), prometheus=server, now=world.clock.now)
    assert asked == [(("", "1"), {"seconds": 110, "ended": world.clock.now})]
    (found,) = facts.nodes
    assert (found.node, found.cpus, found.mean_cpus, found.memory_peak_bytes) == (
        "n1",
        2,
        1.5,
        None,
    )
    (one,) = found.gpus
    assert (one.uuid, one.sm_active_ratio, one.seconds) == ("G0", 0.4, 110)
    assert (one.throttled_seconds, one.xid_errors) == ({"hw_thermal": 55}, {"79": 1})
    write_json(attempt / "nodes" / "n1.monitor.json", MONITORED)
    assert gather(world.state(submission), prometheus=server).nodes[0].seconds == 100
    assert len(asked) == 1


def test_a_run_without_anything(world: World) -> None:
    """One that is over and reported nothing has its time, and no figure that is made up."""
    submission = world.submit()
    world.scheduler.move("1", JobState.RUNNING)
    attempt = world.starts(submission, "1")
    world.clock.sleep(700)
    world.ends(attempt)
    world.scheduler.move("1", JobState.COMPLETED)
    facts = gather(world.state(submission))
    assert (facts.over, facts.elapsed_seconds, facts.channel) == (True, 700, False)
    assert (facts.ranks, facts.nodes, facts.stages) == ([], [], [])
    found = diagnose(facts)
    assert found.findings == ()
    assert {one.kind for one in found.unknown} == {"waits-for-data", "cpus-unused"}


def test_before_its_start(world: World) -> None:
    """What it asked for is known."""
    facts = gather(world.state(world.submit(resources={"gpus": "a100:2", "nodes": 3})))
    assert (facts.gpu_count, facts.world_size, facts.elapsed_seconds) == (6, 6, None)
    assert diagnose(facts).findings == ()


@pytest.mark.parametrize("of_run", [False, True])
@pytest.mark.parametrize("text", ["", "{", "[]", '{"job": 1}', '{"schema_version": 1, "job": {}}'])
def test_damaged_records(world: World, text: str, of_run: bool) -> None:
    """A damaged submission is named; a damaged file of a monitor is as if it were missing."""
    submission, attempt = trained(world)
    state = world.state(submission)
    if of_run:
        (attempt / "nodes" / "n1.monitor.json").write_text(text)
        assert diagnose(gather(state, now=world.clock.now)).findings[0].kind == "waits-for-data"
    else:
        (submission.directory / "submit.json").write_text(text)
        with pytest.raises(RecordError):
            gather(state)


def test_torn_events(world: World) -> None:
    """Lines that were cut off, or are not events, are skipped."""
    submission, attempt = trained(world)
    with (attempt / "events" / "n1.jsonl").open("a") as stream:
        stream.write('{"schema_version":1,"time":"x"}\nnull\n[1]\n{"event":"step","da')
    shutil.rmtree(attempt / "binding")
    facts = gather(world.state(submission), now=world.clock.now)
    assert [rank.steps for rank in facts.ranks] == [100, 100]
