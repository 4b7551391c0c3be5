"""Ranks wait until every node is ready, or are told why that will not be."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from hpml_orchestrator.errors import BindingError, HpmlError, StagingError
from hpml_orchestrator.node.startup import wait_ready
from hpml_orchestrator.records.files import write_json, write_text
from hpml_orchestrator.records.store import Attempt
from hpml_orchestrator.testing import FakeClock


@pytest.fixture
def attempt(tmp_path: Path) -> Path:
    """An attempt in which no node has said anything."""
    (tmp_path / "nodes").mkdir()
    return tmp_path


def mark(attempt: Path, node: str, kind: str, **data: object) -> None:
    write_json(attempt / "nodes" / f"{node}.{kind}.json", {"node": node, **data})


def wait(attempt: Path, nodes: int, pid: int, clock: FakeClock | None = None) -> int:
    clock = clock or FakeClock()
    return wait_ready(str(attempt), str(nodes), str(pid), sleep=clock.sleep, clock=clock.monotonic)


def test_all_nodes_are_ready(attempt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It ends at once and sums up what was staged."""
    mark(attempt, "n1", "ready", bytes=10, files=2, seconds=0.5)
    mark(attempt, "n2", "ready", bytes=20, files=3, seconds=1.25)
    assert wait(attempt, 2, os.getpid()) == 0
    err = capsys.readouterr().err
    assert err == "hpml: 2 nodes ready, staged 5 files, 30 bytes, slowest 1.25 s\n"
    mark(attempt, "n3", "ready")
    assert wait(attempt, 1, os.getpid()) == 0


def placed(cores: list[int], *warnings: str, policy: str = "gpu-local") -> dict[str, object]:
    """What an agent tells of its node's plan."""
    return {
        "policy": policy,
        "ranks": 8,
        "cores": cores,
        "threads": [4],
        "warnings": list(warnings),
    }


def test_how_ranks_are_bound_is_told_once_for_all_nodes(
    attempt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, and each warning once, however many nodes have it."""
    mark(attempt, "n1", "ready", placed=placed([16], "GPU0 is far", "odd"))
    mark(attempt, "n2", "ready", placed=placed([15, 16], "GPU0 is far"))
    mark(attempt, "n3", "ready", placed=placed([0], "nothing is bound", policy="none"))
    assert wait(attempt, 3, os.getpid()) == 0
    assert capsys.readouterr().err == (
        "hpml: 3 nodes ready\n"
        "hpml: 16 ranks bound (gpu-local), 15-16 cores and 4 threads each\n"
        "hpml: warning: n1 and 1 more: GPU0 is far\n"
        "hpml: warning: n1: odd\n"
        "hpml: warning: n3: nothing is bound\n"
    )


def test_many_warnings_are_cut(attempt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Twenty, and how many more there are."""
    told = [f"GPU{number} is far" for number in range(30)]
    mark(attempt, "n1", "ready", placed=placed([1], *told))
    assert wait(attempt, 1, os.getpid()) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == "hpml: … and 10 more warnings: `hpml show` has them"
    assert len(lines) == 2 + 20 + 1


def test_it_waits_ever_more_rarely_and_says_so(
    attempt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of the nodes are there: it looks again, at most a second apart, and tells every 30 s."""
    clock = FakeClock()
    mark(attempt, "n1", "ready")
    naps = 0

    def sleep(seconds: float) -> None:
        nonlocal naps
        naps += 1
        clock.sleep(seconds)
        if clock.now > 1_800_000_061:
            mark(attempt, "n2", "ready")

    pid = str(os.getpid())
    assert wait_ready(str(attempt), "2", pid, sleep=sleep, clock=clock.monotonic) == 0
    assert 60 < naps < 80
    assert max(clock.sleeps) == 1.0
    assert capsys.readouterr().err.count("hpml: 1 of 2 nodes are ready\n") == 2


def test_a_node_that_failed_ends_the_waiting(attempt: Path) -> None:
    """The message names every failed node with its reason, and carries the first hint."""
    mark(attempt, "n1", "ready")
    mark(attempt, "n2", "failed", message="no space", hint="")
    mark(attempt, "n3", "failed", message="no source", hint="look there")
    with pytest.raises(StagingError, match="^n2: no space; n3: no source$") as caught:
        wait(attempt, 4, os.getpid())
    assert caught.value.hint == "look there"


def test_agents_that_die_end_the_waiting(attempt: Path) -> None:
    """When their step is gone and a node is still missing, it will never come."""
    agent = subprocess.Popen(["sleep", "0.2"])
    mark(attempt, "n1", "ready")
    with pytest.raises(HpmlError, match=r"ended before all nodes were ready \(1 of 2 are\)"):
        wait_ready(str(attempt), "2", str(agent.pid))
    # nobody has waited for the agent yet: a zombie counts as gone
    assert Path(f"/proc/{agent.pid}/stat").read_text().split()[2] == "Z"
    assert agent.wait() == 0


def test_what_the_agents_said_last_counts(attempt: Path) -> None:
    """A step that is over but has made every node ready, or failed, is judged by that."""
    agent = subprocess.Popen(["true"])
    agent.wait()
    mark(attempt, "n1", "ready")
    assert wait(attempt, 1, agent.pid) == 0
    mark(attempt, "n1", "failed", message="late")
    with pytest.raises(StagingError, match="late"):
        wait(attempt, 1, agent.pid)


def test_half_written_markers_do_not_count(attempt: Path) -> None:
    """Temporary files and files that are no JSON are passed over."""
    write_text(attempt / "nodes" / "n1.ready.json", "{")
    write_text(attempt / "nodes" / ".n2.ready.json.abcd", '{"node": "n2"}')
    mark(attempt, "n3", "ready")
    assert [one["node"] for one in Attempt(attempt).markers("ready")] == ["n3"]


def test_a_node_that_cannot_place_its_ranks(attempt: Path) -> None:
    """The job's status says which kind of failure it was; with both kinds it is the data's."""
    mark(attempt, "n1", "failed", message="no CPUs are told", hint="is /sys there?", exit_code=79)
    with pytest.raises(BindingError, match="n1: no CPUs are told") as caught:
        wait(attempt, 2, os.getpid())
    assert (caught.value.exit_code, caught.value.hint) == (79, "is /sys there?")
    mark(attempt, "n2", "failed", message="disk full", exit_code=8)
    with pytest.raises(StagingError, match="n1: no CPUs are told; n2: disk full"):
        wait(attempt, 2, os.getpid())
