"""Facts for a diagnosis come from records as jobs write them, whatever is missing or damaged."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from hpml_orchestrator.diagnosis.diagnose import diagnose
from hpml_orchestrator.diagnosis.report import Report
from hpml_orchestrator.diagnosis.shares import mean_parts
from hpml_orchestrator.errors import RecordError
from hpml_orchestrator.records.files import write_json
from hpml_orchestrator.runs.facts import gather
from hpml_orchestrator.runs.prometheus import Prometheus
from hpml_orchestrator.runs.reporting.summary import summarise
from hpml_orchestrator.runs.reporting.text import summary_lines
from hpml_orchestrator.scheduler.model import JobState

if TYPE_CHECKING:
    from pathlib import Path

    from hpml_orchestrator.records.submission import Submission
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
            world.event(attempt, "step", rank, **data, logging_seconds_total=number, mfu=0.4)
        world.clock.sleep(10)
    for rank in (0, 1):
        line = {"rank": rank, "local_rank": rank, "node": "n1", "world_size": 2, "cpus": str(rank)}
        with (attempt / "binding" / "n1.jsonl").open("a") as stream:
            stream.write(json.dumps({**line, "time": world.clock.now}) + "\n")
    return submission, attempt


def test_a_run_that_goes_on(world: World) -> None:
    """The counters since the warm-up, the time so far, and the request."""
    submission, attempt = trained(world)
    write_json(attempt / "nodes" / "n1.monitor.json", MONITORED)
    for step in (40, 80):
        world.event(attempt, "checkpoint", 0, step=step)
    facts = gather(world.state(submission), now=world.clock.now)
    assert [rank.saves for rank in facts.ranks] == [2, None]
    assert (facts.state, facts.over, facts.elapsed_seconds) == ("RUNNING", False, 110)
    assert (facts.limit_seconds, facts.world_size, facts.core_count) == (600, 2, 2)
    for number, rank in enumerate(facts.ranks):
        assert (rank.rank, rank.node, rank.cpus) == (number, "n1", (number,))
        assert (rank.steps, rank.step_seconds, rank.data_wait_seconds) == (100, 100, 40)
        assert (rank.wait_seconds, rank.save_seconds, rank.bound_as_planned) == (None, None, None)
        assert rank.other_seconds == 10  # a counter with a name of the script's own
    (node,) = facts.nodes
    assert (node.cpus, node.mean_cpus, node.read_bytes) == (2, 1.5, 7e9)
    assert node.memory_limit_bytes == 4 * GIB  # the requested memory: the kernel has no limit
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
    """A damaged submission is named, and a damaged file of a monitor."""
    submission, attempt = trained(world)
    state = world.state(submission)
    if of_run:
        (attempt / "nodes" / "n1.monitor.json").write_text(text)
        with pytest.raises(RecordError, match=r"n1\.monitor\.json is damaged"):
            gather(state, now=world.clock.now)
    else:
        (submission.directory / "submit.json").write_text(text)
        with pytest.raises(RecordError):
            gather(replace(state, submission=replace(submission)))


TOTALS = {f"{name}_total": value for name, value in STEP.items()}


@pytest.mark.parametrize(
    ("added", "why"),
    [
        (
            '{"schema_version":1,"time":"x","event":"ready","node":"n"}\n',
            "line 23 on: not an event",
        ),
        ("null\n", "line 23 on: not a JSON object"),
        ('{"event":"ready"}\n' + "\0" * 9 + "\n", "line 23 on: not an event"),
        ("\0" * 9 + "\n", "line 23 on: not JSON"),
        (
            '{"schema_version":7,"event":"x"}\n',
            "line 23 on: schema_version 7; this hpml reads up to 1",
        ),
        ('{"event":"step","da', "line 23 on: the line is cut off"),
        ('{"schema_version":1,"time":1,"event":"of a newer hpml","node":"n"}\n', ""),
    ],
)
def test_damaged_events(world: World, added: str, why: str) -> None:
    """They are named with their line; an incomplete last line of a running job is not damage."""
    submission, attempt = trained(world)
    with (attempt / "events" / "n1.jsonl").open("a") as stream:
        stream.write(added)
    shutil.rmtree(attempt / "binding")
    running = world.state(submission)
    if why and added.endswith("\n"):
        with pytest.raises(RecordError, match=f"n1.jsonl is damaged from {why}"):
            gather(running, now=world.clock.now)
        return
    assert [rank.steps for rank in gather(running, now=world.clock.now).ranks] == [100, 100]
    over = replace(running, over=True, state="COMPLETED")
    if why:
        with pytest.raises(RecordError, match=f"n1.jsonl is damaged from {why}"):
            gather(over)
    else:
        assert [rank.steps for rank in gather(over).ranks] == [100, 100]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"exit_code": 0}', '{"time": "x", "exit_code": 0}']
)
def test_a_damaged_end(world: World, text: str) -> None:
    """It is named with a sentence, and counts as no end."""
    submission, attempt = trained(world)
    (attempt / "ended.json").write_text(text)
    state = world.state(submission)
    assert state.state == "RUNNING"
    assert state.run.attempts()[-1].ended is None
    with pytest.raises(RecordError, match=r"ended\.json is damaged: ") as error:
        gather(state, now=world.clock.now)
    assert "Error(" not in str(error.value)


def test_all_read_the_same_counters(world: World) -> None:
    """Of a run with two attempts, whose ranks were started again in the second, by one rule."""
    submission, first = trained(world)
    world.ends(first, 1)
    second = first.with_name("1")
    shutil.copytree(first / "started", second / "started")
    world.event(second, "started", nodes="n1")
    begun = world.clock.now
    for data in [
        *({name: value * n for name, value in TOTALS.items()} for n in (10, 12, 20, 30)),
        *({name: value * n for name, value in TOTALS.items()} for n in (2, 12, 22)),
        *({name: value * n for name, value in TOTALS.items()} for n in (1, 3)),
    ]:
        for rank in (0, 1):
            world.event(second, "step", rank, **data)
        world.clock.sleep(10)
    state = replace(world.state(submission), over=True, state="COMPLETED")
    summary = summarise(state)
    steps = 10 * (20 + 22 + 3)  # of each start, but of the first before its first counters
    assert [rank["steps"] for rank in summary.training] == [steps, steps]
    assert summary.data_wait_ratio == pytest.approx(0.4)
    assert summary.samples_per_second == pytest.approx(2 * 32 * steps / 80)
    facts = gather(state, summary=summary, now=begun)
    assert facts == gather(state, now=begun)
    assert [rank.steps for rank in facts.ranks] == [steps, steps]
    assert [rank.samples for rank in facts.ranks] == [32 * steps, 32 * steps]
    diagnosis = diagnose(facts)
    assert diagnosis.headline == "waits for data: 40% of each step"
    lines = dict(summary_lines(state, summary, None))
    assert lines["training"].endswith("40% of the step time spent waiting for data")
    assert diagnosis.headline in Report(diagnosis).html()
    (shown,) = {f"{part:.0%}" for part in [mean_parts(facts.ranks)["waiting for data"] / steps]}
    assert shown == "40%"
