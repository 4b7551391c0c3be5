"""A node's staging reports its progress, waits for other tasks, and returns its figures."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.node import stages
from hpml_orchestrator.node.environment import AgentOptions
from hpml_orchestrator.node.stages import NodeStaging, ProgressReporter
from hpml_orchestrator.records import feed
from hpml_orchestrator.records.ids import parse_array
from hpml_orchestrator.records.job import Job, SiteLimits, Stage
from hpml_orchestrator.staging.request import StageResult, StagingStopped
from hpml_orchestrator.staging.workers import array_delay
from tests.unit.node.conftest import stage

MIB = 1 << 20


def test_progress_is_reported_every_ten_seconds() -> None:
    """Figures with units in the keys, and one line for the output."""
    now = [0.0]
    reports: list[dict[str, Any]] = []
    lines: list[str] = []

    def note(**figures: Any) -> None:
        reports.append(figures)

    progress = ProgressReporter("train", note, lines.append, clock=lambda: now[0])
    for second in range(31):
        now[0] = float(second)
        progress(second * MIB, second * 2, 100 * MIB, 200)
    assert [report["bytes_done"] for report in reports] == [10 * MIB, 20 * MIB, 30 * MIB]
    assert reports[0] == {
        "name": "train",
        "bytes_done": 10 * MIB,
        "files_done": 20,
        "bytes_total": 100 * MIB,
        "files_total": 200,
        "bytes_per_second": MIB,
        "seconds_left": 90.0,
    }
    assert lines[0] == (
        "staging train: 10%, 10.0 MiB of 100.0 MiB, 20 of 200 files, 1.0 MiB/s, 1:30 left"
    )
    assert len(lines) == 3
    on_other_nodes = ProgressReporter("train", note, clock=lambda: now[0])
    now[0] += 11
    on_other_nodes(0, 0, 0, 5)
    assert reports[-1]["seconds_left"] is None, "no rate yet"


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """A source of four files, and a target."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    for name in "abcd":
        (source / name).write_text(name)
    return source, target


def staging(
    tmp_path: Path, *stages: Stage, ends: bool = False, jitter: int = 0, **environment: str
) -> NodeStaging:
    job = Job("probe", stage=stages, array=parse_array("0-1") if jitter else None)
    options = AgentOptions(tmp_path / "attempt", job, SiteLimits(array_jitter=jitter))
    environment["HPML_JOB_KEY"] = "test-1"
    return NodeStaging(options, "n1", tmp_path / "n1.jsonl", lambda: ends, environment)


def test_the_figures_of_an_entry(tmp_path: Path, places: tuple[Path, Path]) -> None:
    """Path, size, time, rate and method of each."""
    entries = (stage("a", *places, kind="tree"), stage("b", *places, kind="tree"))
    node = staging(tmp_path, *entries)
    first, second = node.stage_all()
    assert (first["name"], first["bytes"], first["files"]) == ("a", 4, 4)
    assert (Path(first["path"]) / "b").read_text() == "b"
    assert first["bytes_per_second"] > 0
    assert [event.data["name"] for event in feed.read(node.log)] == ["a", "b"]
    json.dumps([first, second])
    node.stager.cleanup()
    assert list(places[1].iterdir()) == []


def test_a_requeued_job_does_not_take_what_a_killed_attempt_left(
    tmp_path: Path, places: tuple[Path, Path]
) -> None:
    """The source may have changed."""
    entry = stage("d", *places, kind="tree")
    attempts = [staging(tmp_path, entry) for _ in range(2)]
    assert [one.stage_all()[0]["reused"] for one in attempts] == [False, True]
    for one in attempts:
        one.stager.leave()  # as the kernel does for one that is killed
    (places[0] / "b").write_text("other")
    (figures,) = staging(tmp_path, entry).stage_all()
    assert (Path(figures["path"]) / "b").read_text() == "other"
    assert (figures["files"], figures["reused"]) == (4, False)


def test_how_long_nodes_wait_for_one_another(
    tmp_path: Path, places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some minutes before the first entry, as long as the job before a later one."""
    entries = (stage("a", *places), stage("b", *places))
    node = staging(tmp_path, *entries, SLURM_NODEID="1", SLURM_NNODES="2")
    waits: list[float] = []
    result = StageResult("a", "/", 1, 1, 1.0, "chain", True)
    monkeypatch.setattr(
        stages, "supply_for", lambda *given, **_: waits.append(given[2].come_seconds)
    )
    monkeypatch.setattr(node.stager, "stage", lambda *_: result)
    node.stage_all()
    assert waits == [300.0, math.inf]


def test_tasks_of_an_array_wait_each_its_own_time(
    tmp_path: Path, places: tuple[Path, Path]
) -> None:
    """For a time that depends on its index, unless it must end; a single job does not wait."""
    entry = stage("a", *places)
    array: dict[str, Any] = {"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_JOB_ID": "77"}
    began = time.monotonic()
    (figures,) = staging(tmp_path, entry, jitter=60, **array).stage_all()
    assert time.monotonic() - began >= array_delay(60, 2, 1, "77") > 0.01
    assert figures["waited_seconds"] == round(array_delay(60, 2, 1, "77"), 3)
    assert "waited_seconds" not in staging(tmp_path, entry, jitter=60).stage_all()[0]
    assert staging(tmp_path, jitter=60, **array).stage_all() == []
    with pytest.raises(StagingStopped):
        staging(tmp_path, entry, jitter=60, ends=True, **array).stage_all()
