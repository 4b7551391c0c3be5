"""The last word about a job's ranks: over all nodes, did they run where they should?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.placement import planfile
from hpml_orchestrator.placement.proof import NodeProof, proof_of_json
from hpml_orchestrator.placement.report import table, wrong_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["Verdict", "verdict"]


@dataclass(frozen=True)
class Verdict:
    """What is told at the end of a job.

    Attributes:
        lines: for people; none where there is nothing to say.
        failed: whether the job wants proof, and something is wrong.
    """

    lines: tuple[str, ...]
    failed: bool


def verdict(
    plans: Mapping[str, str], proofs: Iterable[dict[str, Any]], *, completed: bool
) -> Verdict:
    """Join what the nodes' agents have judged.

    Args:
        plans: the text of each node's plan, by node.
        proofs: what the agents wrote down, as plain data.
        completed: whether the script ended well; else a rank may be missing because the job failed
            before, and is no fault of its own.
    """
    found = _proofs(proofs)
    rows: list[tuple[str, ...]] = []
    ranks = right = wrong = 0
    strict = False
    for node, text in plans.items():
        head = _header(text)
        if head.get("verify", "off") == "off" or head["policy"] == "none":
            continue
        expected = int(head["ranks"])
        proof = found.get(node)
        if proof is None:
            proof = NodeProof(node, head["policy"], head["verify"], expected)
        missing = expected - len(proof.ranks) if completed else 0
        faults = wrong_rows(proof)
        if missing > 0:
            faults.append(("-", node, "-", "-", "-", _missing(missing, expected)))
        if head["verify"] == "strict":  # else the agents have told it while the ranks ran
            rows += faults
        elif missing > 0:
            rows.append(faults[-1])
        ranks += len(proof.ranks) + max(missing, 0)
        faulty = sum(bool(one.wrong) for one in proof.ranks)
        wrong, right = wrong + faulty, right + len(proof.ranks) - faulty
        strict = strict or (head["verify"] == "strict" and bool(faults))
    if not wrong and not rows:
        return Verdict((), strict)
    told = (
        f"{wrong} of {ranks} ranks WRONG"
        if wrong
        else f"{right} of {ranks} ranks where they should be"
    )
    return Verdict((f"binding: {told}", *(table(rows) if rows else ())), strict)


def _proofs(proofs: Iterable[dict[str, Any]]) -> dict[str, NodeProof]:
    found = {}
    for data in proofs:
        try:
            proof = proof_of_json(data)
        except ValueError:
            continue
        found[proof.node] = proof
    return found


def _header(text: str) -> dict[str, str]:
    """Return the first line of a plan; nothing to verify where it is damaged."""
    try:
        return planfile.header(text)
    except ValueError:
        return {}


def _missing(count: int, expected: int) -> str:
    if expected == 1:
        return "its rank was never recorded"
    many = "none" if count == expected else f"{expected - count}"
    return f"{many} of its {expected} ranks {'was' if expected - count == 1 else 'were'} recorded"
