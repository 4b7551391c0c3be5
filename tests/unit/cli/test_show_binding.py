"""`hpml show` and `hpml topo --run` on runs of this machine whose records were written by hand."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpml_orchestrator.placement.planfile import write
from hpml_orchestrator.placement.planner import plan
from hpml_orchestrator.placement.proof import NodeProof, RankProof, proof_json
from hpml_orchestrator.records.files import write_json
from hpml_orchestrator.topology import topology_json
from hpml_orchestrator.topology.recognise import parse_xml
from tests.unit.cli.support import COLOUR, HPML, in_terminal
from tests.unit.placement.machines import milan

if TYPE_CHECKING:
    from tests.unit.cli.support import Result, Shell

pytestmark = pytest.mark.xdist_group("local runs")

Hpml = Callable[..., "Result"]
HEADER = "RANK\tNODE\tGPU\tCPUS\tCORES\tNUMA\tDISTANCE\tNIC\tTHREADS\tSTATUS"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def attempt(shell: Shell) -> Path:
    """The last attempt of a run that is over."""
    told = shell.hpml("run", "--local", "--json", shell.job("bound"))
    return Path(told.json()["directory"]) / "attempts" / "0"


@pytest.fixture(autouse=True)
def no_records(attempt: Path) -> None:
    """Each test writes its own records, in the place of what the job wrote of its binding."""
    for name in ("binding", "plan"):
        shutil.rmtree(attempt / name, ignore_errors=True)
        (attempt / name).mkdir()
    for path in (attempt / "nodes").glob("*.topology.json"):
        path.unlink()


def seen(rank: int, *wrong: str) -> RankProof:
    """A rank on a milan node."""
    domain = 3 - rank % 4
    return RankProof(
        rank,
        rank % 4,
        1,
        f"0000:0{rank % 4 + 1}:00.0",
        cpus=f"{16 * domain}-{16 * domain + 15},{64 + 16 * domain}-{79 + 16 * domain}",
        cores=16,
        numa=(domain,),
        nic="mlx5_0",
        distance=10,
        threads=16,
        live=True,
        wrong=wrong,
    )


def prove(attempt: Path, *nodes: NodeProof) -> None:
    for one in nodes:
        write_json(attempt / "binding" / f"{one.node}.proof.json", proof_json(one))


def cluster(count: int) -> list[NodeProof]:
    """Nodes of four ranks each."""
    return [
        NodeProof(
            f"n{node}", "gpu-local", "warn", 4, tuple(seen(4 * node + local) for local in range(4))
        )
        for node in range(count)
    ]


def test_up_to_sixteen_ranks_are_all_shown(hpml: Hpml, attempt: Path) -> None:
    """One line in the summary, one row for each rank."""
    prove(attempt, *cluster(4))
    told = hpml("show", "bound")
    assert "binding    gpu-local, 16 of 16 ranks " in told.out
    rows = told.out.partition(f"\n\n{HEADER}\n")[2].splitlines()
    assert len(rows) == 16
    assert rows[5] == "5\tn1\t0000:02:00.0\t32-47,96-111\t16\t2\t10\tmlx5_0\t16\tok"


def test_of_more_ranks_the_wrong_ones_are_shown(hpml: Hpml, attempt: Path) -> None:
    """What is wrong stands below the table, once for all ranks that it is said of."""
    first, *others = cluster(5)
    alone = "runs on CPUs 0-127, the plan has 48-63,112-127"
    ranks = (seen(0, alone, "shares its GPU"), seen(1), seen(2, "shares its GPU"), seen(3))
    prove(attempt, replace(first, ranks=ranks, warnings=("cold",)), *others)
    prove(attempt, replace(others[3], wrong=("rank 9 was never seen",), warnings=("cold",)))
    told = hpml("show", "bound")
    assert "binding    gpu-local, 2 of 20 ranks WRONG, node n4 WRONG\n" in told.out
    lines = told.out.partition(f"\n\n{HEADER}\n")[2].splitlines()
    assert [line.split("\t")[0] for line in lines[:2]] == ["0", "2"]
    assert lines[2:] == [
        "not shown: 18 ranks bound as planned; `--ranks` shows all 20",
        f"WRONG rank 0 (n0): {alone}",
        "WRONG ranks 0,2 (n0): shares its GPU",
        "WRONG node n4: rank 9 was never seen",
    ]
    assert "warning: n0 and 1 more: cold\n" in told.err
    every = hpml("show", "bound", "--ranks").out.partition(f"{HEADER}\n")[2].splitlines()
    assert [line.split("\t")[0] for line in every[:20]] == [str(rank) for rank in range(20)]
    assert not any("not shown" in line for line in every)


def test_programs_get_all_proofs(hpml: Hpml, attempt: Path) -> None:
    """Each node's proof as it is written, and what cannot be read."""
    prove(attempt, *cluster(5))
    (attempt / "binding" / "n9.proof.json").write_text("{")
    told = hpml("show", "bound", "--json").json()
    assert [one["node"] for one in told["proofs"]] == [f"n{node}" for node in range(5)]
    assert told["proofs"][4] == json.loads((attempt / "binding" / "n4.proof.json").read_text())
    assert len(told["ranks"]) == 20
    assert told["unreadable_proofs"][0]["node"] == "n9"
    assert told["summary"]["binding"].startswith("not proven: the proof of n9 cannot be read")
    assert "warning: the proof of node n9 cannot be read: is not JSON" in hpml("show", "bound").err


def test_damaged_records_are_no_failure(hpml: Hpml, attempt: Path) -> None:
    """Whatever lies there, the run is shown."""
    (attempt / "binding" / "n0.proof.json").write_bytes(b"\xff\x00[")
    (attempt / "binding" / "n0.jsonl").write_text('{"rank": 0, "node": null}\n')
    (attempt / "binding" / "n1.jsonl").mkdir()
    (attempt / "nodes" / "n0.topology.json").write_text("[]")
    told = hpml("show", "bound")
    assert (told.code, "Traceback" in told.err) == (0, False)
    assert "0\t?\t-\t-\t-\t-\t-\t-\t-\t-" in told.out


def test_a_run_that_goes_on_is_shown(shell: Shell, hpml: Hpml) -> None:
    """The proofs of ranks that run are there to be read, and an array's task has its own."""
    job = shell.job("going", command=["sleep", "600"], array="0-1")
    made = hpml("submit", "--local", "--json", job).json()
    try:
        task = made["tasks"][1]
        directory = Path(task["directory"]) / "attempts" / "0"
        (directory / "binding").mkdir(parents=True, exist_ok=True)
        prove(directory, *cluster(1))
        told = hpml("show", f"{made['id']}.1")
        assert "binding    gpu-local, 4 of 4 ranks " in told.out
        assert HEADER in told.out
        refused = hpml("show", made["id"], "--ranks")
        assert (refused.code, f"{made['id']}.0 --ranks" in refused.err) == (2, True)
    finally:
        hpml("cancel", made["id"])
        hpml("wait", made["id"])


def test_wrong_is_red_where_colours_are_wanted(shell: Shell, attempt: Path) -> None:
    """On a terminal, and nothing is coloured with NO_COLOR."""
    (node,) = cluster(1)
    prove(attempt, replace(node, ranks=(seen(0, "off"),), expected=1))
    environment = {**shell.environment(), "TERM": "xterm-256color", "COLUMNS": "120"}
    environment.pop("NO_COLOR", None)
    told = in_terminal([HPML, "show", "bound"], environment)
    assert "\x1b[1;31mWRONG" in told
    plain = in_terminal([HPML, "show", "bound"], {**environment, "NO_COLOR": "1"})
    assert "WRONG" in plain
    assert not COLOUR.search(plain)


def test_a_node_of_a_run_with_its_ranks(shell: Shell, hpml: Hpml, attempt: Path) -> None:
    """The node of the first rank, or the one that is named; ranks where they really ran."""
    prove(attempt, *cluster(2))
    for node in ("n0", "n1"):
        write_json(attempt / "nodes" / f"{node}.topology.json", topology_json(milan()))
    told = hpml("topo", "--run", "bound")
    assert told.code == 0
    assert told.out.startswith("n0 of bound-")
    assert told.out.partition(f"\n\n{HEADER}\n")[2].splitlines()[3].startswith("3\tn0\t0000:04:")
    assert "note: n0 is one of 2 nodes; --node shows another\n" in told.err
    told = hpml("topo", "--run", "bound", "--node", "n1", "--json", "--svg", "n1.svg").json()
    assert (told["node"], told["seen"]) == ("n1", True)
    assert [one["rank"] for one in told["ranks"]] == [4, 5, 6, 7]
    assert told["ranks"][0]["cores"] == list(range(48, 64))
    assert told["ranks"][0]["numa"] == [3]
    assert len(told["topology"]["cores"]) == 64
    words = [
        text.text for text in parse_xml((shell.root / "n1.svg").read_text()).iter(f"{SVG}text")
    ]
    assert "rank 4: GPU0, mlx5_0" in words
    assert words.count("4") == 16 + 1 + 1
    told = hpml("topo", "--run", "bound", "--node", "n7")
    assert (told.code, "has no record of a node 'n7'" in told.err) == (3, True)
    assert "hint: it has n0, n1" in told.err


def test_a_node_whose_ranks_have_not_started(hpml: Hpml, shell: Shell, attempt: Path) -> None:
    """The agent's plan stands in for ranks that nobody has seen."""
    write_json(attempt / "nodes" / "n0.topology.json", topology_json(milan()))
    assert hpml("topo", "--run", "bound").out.endswith("no rank has recorded where it runs\n")
    (attempt / "plan" / "n0.txt").write_text(write(plan(milan(), 4)))
    told = hpml("topo", "--run", "bound", "--svg", "-")
    assert (told.code, parse_xml(told.out).tag) == (0, f"{SVG}svg")
    told = hpml("topo", "--run", "bound", "--svg", "planned.svg")
    assert "it runs; the plan is:\nRANK\tGPU\tCPUS" in told.out
    assert ": plan</title>" in (shell.root / "planned.svg").read_text()
    told = hpml("topo", "--run", "bound", "--json").json()
    assert (told["seen"], told["ranks"][0]["cpus"]) == (False, "48-63,112-127")
    (attempt / "plan" / "n0.txt").write_text("nonsense")
    told = hpml("topo", "--run", "bound")
    assert told.code == 0
    assert "warning: the plan of node n0 cannot be read: " in told.err
    assert str(attempt) not in told.err


def test_what_is_lost_of_a_run_is_told(hpml: Hpml, attempt: Path) -> None:
    """No record at all, a part of a node's ranks, and a proof that is damaged."""
    there_is_none = "binding    not proven: gpu-local, there is no record of any rank\n"
    assert there_is_none in hpml("show", "bound").out
    write_json(attempt / "nodes" / "n0.topology.json", topology_json(milan()))
    (attempt / "plan" / "n0.txt").write_text(write(plan(milan(), 4)))
    (attempt / "binding" / "n0.proof.json").write_text("{")
    line = {"rank": 1, "local_rank": 1, "world_size": 4, "node": "n0", "cpus": "16-31"}
    (attempt / "binding" / "n0.jsonl").write_text(f"{json.dumps(line)}\n")
    told = hpml("topo", "--run", "bound")
    assert told.code == 0
    assert "warning: the proof of node n0 cannot be read: is not JSON" in told.err
    some = "1 of the node's 4 ranks are shown: the others left no record"
    assert f"warning: {some}\n" in told.err
    assert some in hpml("topo", "--run", "bound", "--json").json()["warnings"]
    prove(attempt, *cluster(1))
    assert hpml("topo", "--run", "bound").err == ""


def test_a_run_without_a_record_of_its_nodes(hpml: Hpml, attempt: Path) -> None:
    """What is missing is told, and what is damaged as well."""
    told = hpml("topo", "--run", "bound")
    assert (told.code, "has recorded its topology" in told.err) == (3, True)
    (attempt / "nodes" / f"{os.uname().nodename}.topology.json").write_text("{}")
    told = hpml("topo", "--run", "bound")
    assert (told.code, "its record is damaged" in told.err) == (2, True)
    assert hpml("topo", "--run", "nothing").code == 3
