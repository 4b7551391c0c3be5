"""The result of each entry of `stage`, combined over the nodes, as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.node.stages import NodeResults
from hpml_orchestrator.records.feed import Event
from hpml_orchestrator.records.files import read_json
from hpml_orchestrator.runs.reporting.summary import (
    collected_lines,
    staged_entries,
    staged_lines,
)

ENTRY = {
    "name": "train",
    "path": "/local/hpml-7/c-1/train",
    "bytes": 3 * 1024**2,
    "files": 30,
    "seconds": 2.0,
    "bytes_per_second": 1572864,
    "method": "copy",
    "reused": False,
    "kept": False,
    "digest": "xxh3_128:00",
}


def ready(*entries: dict[str, Any], node: str = "n1") -> Event:
    return Event(10.0, "ready", node, None, {"bytes": 1, "stages": list(entries)})


def lines(*events: Event) -> list[str]:
    return staged_lines(staged_entries(events))


def test_one_node_tells_where_how_and_how_fast() -> None:
    """Path, size, method, time and rate, in one line."""
    assert lines(ready(ENTRY)) == [
        "train: 30 files, 3.0 MiB in /local/hpml-7/c-1/train, by copy in 2.00 s, 1.5 MiB/s"
    ]


def test_nodes_are_joined() -> None:
    """Sums of bytes and files, the slowest node's time and rate, each method once."""
    slow = {**ENTRY, "seconds": 4.0, "bytes_per_second": 786432, "method": "chain"}
    reused = {**ENTRY, "seconds": 0.001, "bytes_per_second": 0, "reused": True, "kept": True}
    (found,) = staged_entries([ready(ENTRY), ready(slow), ready(reused)])
    assert (found.nodes, found.files, found.bytes, found.seconds) == (3, 90, 9 * 1024**2, 4.0)
    assert (found.bytes_per_second, found.methods) == (786432, ("copy", "chain"))
    assert (found.reused, found.kept, found.digests) == (1, 1, ("xxh3_128:00",))
    assert staged_lines([found])[0] == (
        "train: 90 files, 9.0 MiB in /local/hpml-7/c-1/train on 3 nodes, by copy and chain in "
        "4.00 s, 768.0 KiB/s per node, reused on 1 of 3 nodes; kept on 1 of 3 nodes for "
        "later jobs"
    )


def test_reuse_and_what_it_cost_is_said() -> None:
    """Data that was there already has no rate; removed data are reported."""
    again = {**ENTRY, "seconds": 0.004, "reused": True, "kept": True, "bytes_per_second": 0}
    assert lines(ready(again))[0].endswith("there already (4 ms); kept for later jobs")
    crowded = {**ENTRY, "evicted": ["/data/old", "/data/older"]}
    assert lines(ready(crowded))[0].endswith(
        "1.5 MiB/s; removed to make room: /data/old, /data/older"
    )


def test_nodes_that_differ_are_told() -> None:
    """Two digests of one entry mean that nodes have other data than each other."""
    other = {**ENTRY, "digest": "xxh3_128:ff"}
    assert "NOT have the same data" in lines(ready(ENTRY), ready(other, node="n2"))[1]
    without = {**ENTRY, "digest": ""}
    assert len(lines(ready(ENTRY), ready(without))) == 1
    other_function = {**ENTRY, "digest": "blake2b_128:ff"}
    assert len(lines(ready(ENTRY), ready(other_function, node="n2"))) == 1


def test_results_of_a_node_that_was_killed_meanwhile(tmp_path: Path) -> None:
    """Collected and missing results are reported, and nodes without a record."""

    class KilledError(BaseException):
        """Ends the node, as SIGKILL would."""

    attempt = tmp_path / "runs" / "train-1" / "attempts" / "0"
    (attempt / "nodes").mkdir(parents=True)
    entries = []
    for name in ("first", "second"):
        (tmp_path / name).write_text(name)
        entries.append((str(tmp_path / name), str(tmp_path / "results")))
    results = NodeResults(entries, attempt, "n1")

    def killed() -> bool:
        if (tmp_path / "results/train-1/n1/first").exists():
            raise KilledError
        return False

    with pytest.raises(KilledError):
        results.collect(killed, {})
    told = read_json(attempt / "nodes" / "n1.collected.json")
    assert collected_lines([told], ["first", "second"], ["n2"]) == [
        f"first: 1 file, 5 bytes in {tmp_path}/results/train-1/n1/first",
        "second of n1: NOT collected: the node was stopped before this was copied",
        "NOT collected from n2: the node ended before it could",
    ]
