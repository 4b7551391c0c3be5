"""A node's staging tells how far it is, waits for other tasks, and says what came of it."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.node.options import AgentOptions, Entry, Limits, parse_options
from hpml_orchestrator.node.stages import NodeStaging, Progress, figures_of, parts_of
from hpml_orchestrator.records import events
from hpml_orchestrator.staging import StageRequest, StageResult, StagingStopped
from hpml_orchestrator.staging.manners import array_delay
from hpml_orchestrator.staging.many import distribute
from hpml_orchestrator.staging.payback import Payback

MIB = 1 << 20


class Heard:
    """What was told, and the time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events: list[dict[str, Any]] = []
        self.lines: list[str] = []

    def note(self, **data: object) -> None:
        """Take an event."""
        self.events.append(data)

    def progress(self, **more: Any) -> Progress:
        """Make a progress that tells this."""
        return Progress("train", self.note, clock=lambda: self.now, **more)


def test_progress_is_told_every_ten_seconds_and_not_before() -> None:
    """Figures with units in the keys, and one line for the output."""
    heard = Heard()
    progress = heard.progress(say=heard.lines.append)
    for second in range(31):
        heard.now = float(second)
        progress(second * MIB, second * 2, 100 * MIB, 200)
    assert [one["bytes_done"] // MIB for one in heard.events] == [10, 20, 30]
    assert heard.events[0] == {
        "name": "train",
        "bytes_done": 10 * MIB,
        "files_done": 20,
        "bytes_total": 100 * MIB,
        "files_total": 200,
        "bytes_per_second": MIB,
        "seconds_left": 90.0,
    }
    assert heard.lines[0] == (
        "staging train: 10%, 10.0 MiB of 100.0 MiB, 20 of 200 files, 1.0 MiB/s, 1:30 left"
    )
    assert len(heard.lines) == 3


def test_other_nodes_say_nothing_and_record_all_the_same() -> None:
    """The output has one line for the job, not one per node; nothing done yet has no rate."""
    heard = Heard()
    progress = heard.progress()
    heard.now = 11.0
    progress(0, 0, 0, 5)
    assert heard.events[0]["seconds_left"] is None
    assert heard.lines == []


def staging(tmp_path: Path, *words: str, **environment: str) -> NodeStaging:
    asked = parse_options([str(tmp_path / "attempt"), *words])
    key = {"HPML_JOB_KEY": "test-1"}
    log = tmp_path / "events" / "n1.jsonl"
    return NodeStaging(asked, "n1", log, lambda: False, environment={**key, **environment})


def test_what_came_of_an_entry(tmp_path: Path) -> None:
    """Path, size, time, rate and method of each entry, and what the job file says of epochs."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "x").write_bytes(b"x" * 3000)
    (tmp_path / "target").mkdir()
    where = f"{tmp_path}/source {tmp_path}/target"
    words = f"--stage a tree {where} --epochs 7 --stage b tree {where}"
    one = staging(tmp_path, *words.split())
    first, second = one.stage_all()
    assert (first["name"], first["bytes"], first["files"], first["epochs"]) == ("a", 3000, 1, 7)
    assert (Path(first["path"]) / "x").read_bytes() == b"x" * 3000
    assert first["bytes_per_second"] > 0
    assert "epochs" not in second
    assert [event.data["name"] for event in events.read(one.log)] == ["a", "b"]
    json.dumps([first, second])
    one.stager.cleanup()
    assert list((tmp_path / "target").iterdir()) == []


def test_a_requeued_job_does_not_take_what_a_killed_attempt_left(tmp_path: Path) -> None:
    """A node may have another number than before, and the source may have changed."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    for name in "abcd":
        (source / name).write_text(name)
    words = f"--stage d tree {source} {target}".split()
    part = [*words, "--distribution", "partition"]
    found = []
    for index in ("0", "1", "1"):
        one = staging(tmp_path, *part, SLURM_NODEID=index, SLURM_NNODES="2")
        (told,) = one.stage_all()
        found.append((sorted(os.listdir(told["path"])), told["reused"]))
    assert found == [(["a", "c"], False), (["b", "d"], False), (["b", "d"], True)]
    (source / "b").write_text("other")
    one = staging(tmp_path, *words)
    (told,) = one.stage_all()
    assert (Path(told["path"]) / "b").read_text() == "other"
    assert (told["files"], told["reused"]) == (4, False)


def test_nodes_wait_for_those_that_are_busy_with_an_earlier_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not longer than a few minutes at the beginning, which all have at one time."""
    (tmp_path / "target").mkdir()
    where = f"tree {tmp_path}/source {tmp_path}/target"
    words = f"--stage a {where} --stage b {where}"
    one = staging(tmp_path, *words.split(), SLURM_NODEID="1", SLURM_NNODES="2")
    seen: list[float] = []
    monkeypatch.setattr(
        distribute, "supply_for", lambda *_, **more: seen.append(more["come_seconds"])
    )
    monkeypatch.setattr(
        one.stager, "stage", lambda *_: StageResult("a", "/", 1, 1, 1.0, "chain", True)
    )
    one.stage_all()
    assert seen == [300.0, math.inf]
    one.stager.cleanup()


def test_figures_leave_out_what_is_empty() -> None:
    """Only what there is to say stands in a record."""
    bare = StageResult("a", "/a", 10, 1, 2.0, "copy", reused=False)
    full = StageResult("a", "/a", 10, 1, 2.0, "chain", True, "xxh3_128:0", True, "why")
    assert set(figures_of(full, None)) - set(figures_of(bare, None)) == {"digest", "private"}
    assert figures_of(bare, None)["bytes_per_second"] == 5
    assert figures_of(full, None)["bytes_per_second"] == 0
    assert figures_of(bare, Payback(2.0, 3.0, 1.0, 2))["payback"]["epochs"] == 2


def test_tasks_of_an_array_wait_each_its_own_time(tmp_path: Path) -> None:
    """As long as its index says, told in the record; a single job and one without data do not."""
    (tmp_path / "source").write_bytes(b"x")
    (tmp_path / "target").mkdir()
    limits = "--array-jitter 60 --array-tasks 2"
    words = f"{limits} --stage a file {tmp_path}/source {tmp_path}/target".split()
    array = {"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_JOB_ID": "77"}
    delay = array_delay(60, 2, 1, "77")
    one = staging(tmp_path, *words, **array)
    began = time.monotonic()
    (told,) = one.stage_all()
    assert time.monotonic() - began >= delay > 0.01
    assert told["waited_seconds"] == round(delay, 3)
    one.stager.cleanup()
    assert "waited_seconds" not in staging(tmp_path, *words).stage_all()[0]
    assert staging(tmp_path, *limits.split(), **array).stage_all() == []


def test_a_task_that_waits_ends_when_told(tmp_path: Path) -> None:
    """SIGTERM while it waits for its turn is not kept waiting."""
    entry = Entry(StageRequest("a", "/none", "file", str(tmp_path)))
    asked = AgentOptions(tmp_path, [entry], limits=Limits(array_jitter=3600, array_tasks=9999))
    ending = {"SLURM_ARRAY_TASK_ID": "5", "HPML_JOB_KEY": "test-1"}
    one = NodeStaging(asked, "n1", tmp_path / "log", lambda: True, environment=ending)
    with pytest.raises(StagingStopped):
        one.stage_all()


def test_parts_are_those_of_the_job_file(tmp_path: Path) -> None:
    """Entries that say `partition`, and which of the job's nodes this is."""
    part = "--distribution partition"
    words = f"--stage a tree /s /t {part} --stage b tree /s /t --stage c tree /s /t {part}"
    entries = staging(tmp_path, *words.split()).asked.entries
    place = {"SLURM_NODEID": "1", "SLURM_NNODES": "3"}
    assert parts_of(entries, place) == "1/3:a,c"
    assert parts_of(entries[1:2], place) == ""
    assert parts_of(entries, {}) == "0/1:a,c"
