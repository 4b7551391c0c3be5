"""`hpml show` and `hpml topo --run` of runs whose records were written by hand."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from hpml_orchestrator.placement.planfile import write
from hpml_orchestrator.placement.planner import plan
from hpml_orchestrator.placement.verify import NodeProof, RankProof, proof_json
from hpml_orchestrator.records.files import write_json
from hpml_orchestrator.topology.model import topology_json
from hpml_orchestrator.topology.sysfs import parse_xml
from tests.unit.cli.support import HPML, SVG, Hpml, Shell, in_terminal
from tests.unit.placement.machines import milan

pytestmark = pytest.mark.xdist_group("local runs")

HEADER = "RANK\tNODE\tGPU\tCPUS\tCORES\tNUMA\tDISTANCE\tNIC\tTHREADS\tSTATUS"


@pytest.fixture(scope="module")
def attempt(shell: Shell) -> Path:
    """The last attempt of a run that is over."""
    ended = shell.hpml("run", "--local", "--json", shell.job("bound"))
    return Path(ended.json()["directory"]) / "attempts" / "0"


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
    for node in nodes:
        write_json(attempt / "binding" / f"{node.node}.proof.json", proof_json(node))


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
    shown = hpml("show", "bound")
    assert "binding    gpu-local, 16 of 16 ranks " in shown.out
    rows = shown.out.partition(f"\n\n{HEADER}\n")[2].splitlines()
    assert len(rows) == 16
    assert rows[5] == "5\tn1\t0000:02:00.0\t32-47,96-111\t16\t2\t10\tmlx5_0\t16\tok"


def test_of_more_ranks_the_wrong_ones_are_shown(hpml: Hpml, attempt: Path) -> None:
    """Faults are below the table, each once for all ranks that have it."""
    first, *others = cluster(5)
    alone = "runs on CPUs 0-127, the plan has 48-63,112-127"
    ranks = (seen(0, alone, "shares its GPU"), seen(1), seen(2, "shares its GPU"), seen(3))
    prove(attempt, replace(first, ranks=ranks, warnings=("cold",)), *others)
    prove(attempt, replace(others[3], warnings=("cold",)))
    shown = hpml("show", "bound")
    assert "binding    gpu-local, 2 of 20 ranks WRONG\n" in shown.out
    lines = shown.out.partition(f"\n\n{HEADER}\n")[2].splitlines()
    assert [line.split("\t")[0] for line in lines[:2]] == ["0", "2"]
    assert lines[2:] == [
        "not shown: 18 ranks bound as planned; `--ranks` shows all 20",
        f"WRONG rank 0 (n0): {alone}",
        "WRONG ranks 0,2 (n0): shares its GPU",
    ]
    assert "warning: n0 and 1 more: cold\n" in shown.err
    every = hpml("show", "bound", "--ranks").out.partition(f"{HEADER}\n")[2].splitlines()
    assert [line.split("\t")[0] for line in every[:20]] == [str(rank) for rank in range(20)]
    assert "not shown" not in "".join(every)


def test_programs_get_all_proofs(hpml: Hpml, attempt: Path) -> None:
    """Each node's proof as it is written, and what cannot be read; damage stops nothing."""
    prove(attempt, *cluster(5))
    (attempt / "binding" / "n9.proof.json").write_text("{")
    (attempt / "nodes" / "n0.topology.json").write_text("[]")
    shown = hpml("show", "bound", "--json").json()
    assert [proof["node"] for proof in shown["proofs"]] == [f"n{node}" for node in range(5)]
    assert shown["proofs"][4] == json.loads((attempt / "binding" / "n4.proof.json").read_text())
    assert len(shown["ranks"]) == 20
    assert shown["unreadable_proofs"][0]["node"] == "n9"
    assert shown["summary"]["binding"].startswith("not proven: the proof of n9 cannot be read")
    assert "warning: the proof of node n9 cannot be read: is not JSON" in hpml("show", "bound").err


def test_wrong_is_red_on_a_terminal(shell: Shell, attempt: Path) -> None:
    """Where colours are wanted."""
    (node,) = cluster(1)
    prove(attempt, replace(node, ranks=(seen(0, "off"),), expected=1))
    environment = {**shell.environment(), "TERM": "xterm-256color", "COLUMNS": "120"}
    environment.pop("NO_COLOR", None)
    assert "\x1b[1;31mWRONG" in in_terminal([HPML, "show", "bound"], environment)


def test_a_node_of_a_run_with_its_ranks(shell: Shell, hpml: Hpml, attempt: Path) -> None:
    """The node of the first rank, or the named one; ranks on the CPUs that they really used."""
    prove(attempt, *cluster(2))
    for node in ("n0", "n1"):
        write_json(attempt / "nodes" / f"{node}.topology.json", topology_json(milan()))
    shown = hpml("topo", "--run", "bound")
    assert shown.code == 0
    assert shown.out.startswith("n0 of bound-")
    assert shown.out.partition(f"\n\n{HEADER}\n")[2].splitlines()[3].startswith("3\tn0\t0000:04:")
    assert shown.err == "note: n0 is one of 2 nodes; --node NODE shows another\n"
    node = hpml("topo", "--run", "bound", "--node", "n1", "--json", "--svg", "n1.svg").json()
    assert (node["node"], node["seen"], len(node["topology"]["cores"])) == ("n1", True, 64)
    assert [rank["rank"] for rank in node["ranks"]] == [4, 5, 6, 7]
    assert node["ranks"][0]["cores"] == list(range(48, 64))
    svg = parse_xml((shell.root / "n1.svg").read_text())
    assert "rank 4: GPU0, mlx5_0" in [text.text for text in svg.iter(f"{SVG}text")]
    refused = hpml("topo", "--run", "bound", "--node", "n7")
    assert refused.refuses(3, "no record of a node 'n7'", "hint: nodes with a record: n0 and n1")


def test_a_node_whose_ranks_have_not_started(hpml: Hpml, shell: Shell, attempt: Path) -> None:
    """The agent's plan is shown for ranks that have no record."""
    assert hpml("topo", "--run", "bound").refuses(3, "has recorded its topology")
    write_json(attempt / "nodes" / "n0.topology.json", topology_json(milan()))
    assert hpml("topo", "--run", "bound").out.endswith("no rank has recorded where it runs\n")
    (attempt / "plan" / "n0.txt").write_text(write(plan(milan(), 4)))
    shown = hpml("topo", "--run", "bound", "--svg", "planned.svg")
    assert "it runs; the plan is:\nRANK\tGPU\tCPUS" in shown.out
    assert ": plan</title>" in (shell.root / "planned.svg").read_text()
    node = hpml("topo", "--run", "bound", "--json").json()
    assert (node["seen"], node["ranks"][0]["cpus"]) == (False, "48-63,112-127")
    (attempt / "plan" / "n0.txt").write_text("nonsense")
    shown = hpml("topo", "--run", "bound")
    assert (shown.code, "the plan of node n0 cannot be read: " in shown.err) == (0, True)
    (attempt / "nodes" / "n0.topology.json").write_text("{}")
    assert hpml("topo", "--run", "bound").refuses(2, "its record is damaged")


def test_missing_records_are_reported(hpml: Hpml, attempt: Path) -> None:
    """No record at all, a part of a node's ranks, and a proof that is damaged."""
    no_record = "binding    not proven: gpu-local, no rank left a record\n"
    assert no_record in hpml("show", "bound").out
    write_json(attempt / "nodes" / "n0.topology.json", topology_json(milan()))
    (attempt / "plan" / "n0.txt").write_text(write(plan(milan(), 4)))
    (attempt / "binding" / "n0.proof.json").write_text("{")
    line = {"rank": 1, "local_rank": 1, "world_size": 4, "node": "n0", "cpus": "16-31"}
    (attempt / "binding" / "n0.jsonl").write_text(f"{json.dumps(line)}\n")
    warnings = hpml("topo", "--run", "bound", "--json").json()["warnings"]
    assert any("the proof of node n0 cannot be read: is not JSON" in text for text in warnings)
    assert "only 1 of the 4 ranks of n0 left a record" in warnings
    prove(attempt, *cluster(1))
    assert hpml("topo", "--run", "bound").err == ""
