"""The last word: nothing where all ranks are where they should be, else the table of who is not."""

from __future__ import annotations

from typing import Any

import pytest

from hpml_orchestrator.node.finish import Verdict, verdict
from hpml_orchestrator.placement import planfile
from hpml_orchestrator.placement.model import Plan, RankPlan
from hpml_orchestrator.placement.proof import NodeProof, RankProof, proof_json

ELSEWHERE = "runs on CPUs 0-15 (NUMA 0), its GPU 0000:b7:00.0 is next to NUMA 7"


def text(ranks: int, verify: str = "warn", policy: str = "gpu-local") -> str:
    plans = tuple(RankPlan(rank, cpus=(rank,)) for rank in range(ranks))
    return planfile.write(Plan(plans, policy), {"verify": verify})


def proof(
    node: str, first: int, ranks: int, expected: int = 8, wrong: tuple[str, ...] = ()
) -> dict[str, Any]:
    """A node's proof, the fault with its last rank."""
    found = [RankProof(first + n, n, gpu="0000:b7:00.0", cpus="0-15", numa=(0,)) for n in range(8)]
    found = found[:ranks]
    if wrong:
        last = found[-1]
        found[-1] = RankProof(
            last.rank, last.local_rank, gpu=last.gpu, cpus=last.cpus, numa=(0,), wrong=wrong
        )
    return proof_json(NodeProof(node, "gpu-local", "warn", expected, tuple(found)))


def test_all_is_right() -> None:
    """Nobody need be told: how ranks are bound was told before they began."""
    plans = {"n1": text(8), "n2": text(8)}
    told = verdict(plans, [proof("n1", 0, 8), proof("n2", 8, 8)], completed=True)
    assert told == Verdict((), failed=False)


@pytest.mark.parametrize("verify", ["warn", "strict"])
def test_somebody_is_elsewhere(verify: str) -> None:
    """The table names rank, node, GPU, CPUs and domain; a second fault stands below the first."""
    plans = {"n1": text(8, verify), "n2": text(8, verify)}
    told = verdict(
        plans, [proof("n1", 0, 8), proof("n2", 8, 8, wrong=(ELSEWHERE, "shares"))], completed=False
    )
    assert told.failed == (verify == "strict")
    count, *rows = told.lines
    assert count == "binding: 1 of 16 ranks WRONG"
    if verify == "warn":
        assert rows == [], "the agents have told it while the ranks ran"
        return
    assert rows == [
        "RANK  NODE  GPU           CPUS  NUMA  WRONG",
        f"15    n2    0000:b7:00.0  0-15  0     {ELSEWHERE}",
        "                                      shares",
    ]


def test_a_rank_that_was_never_recorded() -> None:
    """A fault of its own only where the job ended well."""
    plans = {"n1": text(8, "strict")}
    told = verdict(plans, [proof("n1", 0, 7)], completed=True)
    assert told.failed
    assert told.lines[0] == "binding: 7 of 8 ranks where they should be"
    assert told.lines[2].endswith("7 of its 8 ranks were recorded")
    failed_before = verdict(plans, [proof("n1", 0, 7)], completed=False)
    assert failed_before == Verdict((), failed=False)
    assert (
        verdict(plans, [proof("n1", 0, 1)], completed=True)
        .lines[2]
        .endswith("1 of its 8 ranks was recorded")
    )


def test_a_node_without_a_proof() -> None:
    """Its agent ended early: what nobody saw is not proven."""
    plans = {"n1": text(8, "strict"), "n2": text(8, "strict")}
    told = verdict(plans, [proof("n1", 0, 8)], completed=True)
    assert told.failed
    assert told.lines[0] == "binding: 8 of 16 ranks where they should be"
    assert told.lines[2].split()[:2] == ["-", "n2"]
    assert told.lines[2].endswith("none of its 8 ranks were recorded")
    assert not verdict(plans, [proof("n1", 0, 8)], completed=False).failed


@pytest.mark.parametrize(("verify", "policy"), [("off", "gpu-local"), ("warn", "none")])
def test_nothing_is_said_where_nothing_is_judged(verify: str, policy: str) -> None:
    """Off, or not bound at all."""
    assert verdict({"n1": text(8, verify, policy)}, [], completed=True) == Verdict((), failed=False)


def test_damaged_files_are_no_proof() -> None:
    """A plan that cannot be read says nothing; a proof that cannot be read is none."""
    assert verdict({"n1": "hello\n"}, [], completed=True) == Verdict((), failed=False)
    told = verdict({"n1": text(1, "strict")}, [{"node": "n1", "ranks": 3}], completed=True)
    assert told.failed
    assert told.lines[2].endswith("its rank was never recorded")


def test_a_long_table_is_cut() -> None:
    """Everybody elsewhere on many nodes: so many rows, and how many more there are."""
    plans = {f"n{n}": text(8, "strict") for n in range(100)}
    proofs = [proof(f"n{n}", 8 * n, 8, wrong=(ELSEWHERE,)) for n in range(100)]
    lines = verdict(plans, proofs, completed=True).lines
    assert lines[0] == "binding: 100 of 800 ranks WRONG"
    assert (len(lines), lines[-1]) == (67, "… and 36 more")
