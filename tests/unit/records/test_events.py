"""Events have one vocabulary, and what cannot be understood is passed over."""

from __future__ import annotations

import json
from pathlib import Path

from hpml_orchestrator.records.feed import VOCABULARY, append, read, read_all


def test_the_vocabulary_is_the_house_s() -> None:
    """The names stand in records.md, in the same order."""
    names = (
        "queued started staging ready rendezvous preparation resumed warm-up training step "
        "evaluation checkpoint signal hang stop stopping link ended"
    )
    assert list(VOCABULARY) == names.split()


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """Time, name, node, rank and data survive, whatever characters are in them."""
    path = tmp_path / "events" / "n1.jsonl"
    made = [
        append(path, "staging", node="n1", now=2.5, source="/d/\u2028\x85\n\"'é"),
        append(path, "step", node="n1", now=1.25, rank=0, steps=3),
    ]
    assert list(read(path)) == made
    append(tmp_path / "events" / "batch.jsonl", "started", node="batch", now=9.0)
    assert [event.time for event in read_all(tmp_path / "events")] == [9.0, 2.5, 1.25]
    line = json.loads(path.read_text("utf-8").split("\n")[1])
    assert line["schema_version"] == 1
    assert line["data"] == {"steps": 3}


def test_strange_lines_are_passed_over(tmp_path: Path) -> None:
    """Newer, unknown, incomplete and wrong lines leave the others as they are."""
    path = tmp_path / "n.jsonl"
    append(path, "ready", node="n", now=1.0)
    good = {"schema_version": 1, "time": 2.0, "event": "ended", "node": "n"}
    strange: list[object] = [
        {**good, "schema_version": 2},
        {**good, "schema_version": "x"},
        {**good, "event": "begun"},
        {**good, "time": "x"},
        {**good, "time": None},
        {**good, "data": 3},
        {"event": "ended"},
        [good],
        "text",
        None,
    ]
    with path.open("a") as stream:
        for line in [*strange, good]:
            stream.write(json.dumps(line) + "\n")
        stream.write('{"torn')
    assert [event.event for event in read(path)] == ["ready", "ended"]


def test_no_events_yet(tmp_path: Path) -> None:
    """An attempt that has written nothing has no events."""
    assert list(read_all(tmp_path / "none")) == []
