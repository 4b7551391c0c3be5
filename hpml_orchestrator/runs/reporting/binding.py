"""Where the ranks of an attempt ran, and whether as planned, from its own records."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import HpmlError, counted
from hpml_orchestrator.placement.verify import NodeProof, RankProof, proof_json, proof_of_json
from hpml_orchestrator.records.files import read_json
from hpml_orchestrator.records.job import Binding
from hpml_orchestrator.records.texts import first_few
from hpml_orchestrator.topology.model import parse_list

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hpml_orchestrator.records.run import Attempt
    from hpml_orchestrator.records.schema import BindingRecord
    from hpml_orchestrator.topology.model import Topology

_SUFFIX = ".proof.json"
_SHOWN_NODES = 3


@dataclass(frozen=True)
class RankLocation:
    """Where one rank ran."""

    rank: int
    local_rank: int
    node: str  # Slurm's name of it
    gpu: str | None = None  # PCI address (or name); None without one, or if unknown
    cpus: str = ""  # CPUs that it may run on, in the kernel's list format; empty where not known
    cores: int | None = None  # number of physical cores of those
    numa: tuple[int, ...] = ()  # NUMA domains that those are in
    distance: int | None = None  # largest NUMA distance from its GPU to one of its CPUs
    nic: str = ""  # its network card; empty without one
    threads: int | None = None  # OMP_NUM_THREADS; None where not set
    right: bool | None = None  # whether it is bound as planned; None if not verified
    wrong: tuple[str, ...] = ()  # what is wrong, one sentence each


@dataclass(frozen=True)
class Unreadable:
    """A node whose proof cannot be read, and why."""

    node: str
    why: str


@dataclass(frozen=True)
class BindingReport:
    """The binding of an attempt, as far as it was recorded."""

    line: str = ""  # a summary in one line; empty if nothing was recorded
    places: tuple[RankLocation, ...] = ()  # by rank
    proofs: tuple[NodeProof, ...] = ()  # of the nodes, by name
    unreadable: tuple[Unreadable, ...] = ()
    fatal: bool = False  # whether the job failed because of ranks in `places` that are wrong

    def to_json(self) -> dict[str, object]:
        """Return ranks, proofs and unreadable proofs for programs."""
        return {
            "ranks": [asdict(place) for place in self.places],
            "proofs": [proof_json(proof) for proof in self.proofs],
            "unreadable_proofs": [asdict(node) for node in self.unreadable],
        }


def read_binding(
    attempt: Attempt, asked: Binding | None = None, records: Sequence[BindingRecord] | None = None
) -> BindingReport:
    """Return the binding of an attempt; damaged records are reported, never raised.

    Args:
        attempt: which one.
        asked: what the job asked for, if that is known.
        records: of its ranks' binding, if they were read already.
    """
    proofs, unreadable = _read_proofs(attempt.directory / "binding")
    records = attempt.bindings() if records is None else records
    places = {
        (proof.node, rank.local_rank): _verified(proof, rank)
        for proof in proofs
        for rank in proof.ranks
    }
    verified = len(places)
    for record in records:
        place = _recorded(record)
        # setdefault: the agent's verification of a rank counts more than what the rank wrote about
        # itself.
        places.setdefault((place.node, place.local_rank), place)
    sizes = [record["world_size"] for record in records if record.get("world_size")]
    # A node that died left no proof and no record. Its ranks are missing from any single source,
    # but not from the world size that the other ranks know.
    total = max([len(places), sum(proof.expected for proof in proofs), *sizes])
    ended = attempt.ended
    failed = ended is not None and ended.get("reason") == "binding"
    # Before the ranks start there is nothing to record, so silence means nothing.
    planned = next((attempt.directory / "plan").glob("*.txt"), None) is not None
    had_ranks = ended is not None and (planned or failed or ended.get("exit_code") == 0)
    line = ""
    if proofs or unreadable or records or (asked is not None and had_ranks):
        line, bad = _line(proofs, unreadable, asked, total, verified, over=ended is not None)
        if bad and failed:
            line += "; the job failed for it (verify: strict)"
    wrong = not all(proof.right for proof in proofs)
    ordered = sorted(places.values(), key=lambda place: (place.rank, place.node, place.local_rank))
    return BindingReport(
        line, tuple(ordered), tuple(proofs), tuple(unreadable), fatal=wrong and failed
    )


def node_topology(attempt: Attempt, node: str) -> Topology | None:
    """Return the topology that a node's agent recorded; None if missing or damaged."""
    from hpml_orchestrator.topology.model import topology_of_json  # noqa: PLC0415 - one command needs it

    try:
        return topology_of_json(read_json(attempt.directory / "nodes" / f"{node}.topology.json"))
    except (HpmlError, ValueError):  # a node's name may hold what no path can
        return None


def _read_proofs(directory: Path) -> tuple[list[NodeProof], list[Unreadable]]:
    proofs: list[NodeProof] = []
    unreadable: list[Unreadable] = []
    for path in sorted(directory.glob(f"*{_SUFFIX}")):
        try:
            proof = proof_of_json(read_json(path))
            for rank in proof.ranks:
                parse_list(rank.cpus)
        except (HpmlError, AttributeError, TypeError, ValueError) as error:
            why = str(error).replace(f"{path} ", "").replace(str(path), path.name)
            unreadable.append(Unreadable(path.name.removesuffix(_SUFFIX), why))
        else:
            proofs.append(proof)
    return proofs, unreadable


def _verified(proof: NodeProof, rank: RankProof) -> RankLocation:
    """Return the place of a rank that the node's agent verified; `none` judges no place."""
    names = {field.name for field in fields(RankLocation)} - {"node", "right"}
    common = {name: getattr(rank, name) for name in names}
    right = None if proof.policy == "none" else not rank.wrong
    return RankLocation(node=proof.node, right=right, **common)


def _recorded(record: BindingRecord) -> RankLocation:
    local_rank = record.get("local_rank")
    number = record["rank"] if local_rank is None else local_rank
    gpus = (record.get("visible") or "").split(",")
    return RankLocation(
        rank=record["rank"],
        local_rank=number,
        node=record.get("node") or "?",
        gpu=gpus[number % len(gpus)].strip() or None,
        cpus=record.get("cpus") or "",
        nic=record.get("nic") or "",
        threads=record.get("threads"),
    )


def _line(
    proofs: Sequence[NodeProof],
    unreadable: Sequence[Unreadable],
    asked: Binding | None,
    total: int,
    verified: int,
    *,
    over: bool,
) -> tuple[str, bool]:
    """Return in one line whether the ranks are bound as planned, and whether that is in doubt."""
    planned = proofs[0] if proofs else asked or Binding(policy="none")
    policy, verify = planned.policy, planned.verify
    of_all = f"of {counted(total, 'rank')}"
    wrong = sum(bool(rank.wrong) for proof in proofs for rank in proof.ranks)
    # From bad to good: one rank in the wrong place matters more than a proof that is missing, and
    # the line must never read as proven while a rank is in doubt.
    if wrong:
        return f"{policy}, {wrong} {of_all} WRONG", True
    if unreadable:
        names = first_few([node.node for node in unreadable], _SHOWN_NODES)
        return f"not proven: the proof of {names} cannot be read ({unreadable[0].why})", True
    if policy == "none":
        return "none: nothing was bound", False
    if not total:
        return f"not proven: {policy}, no rank left a record", True
    if verify == "off":
        return f"not proven: {policy}, verify is off", True
    if verified < total:
        count = f"{verified} {of_all}" if verified else "no rank"
        return f"not proven: {policy}, {count} verified{'' if over else ' so far'}", True
    own = sum(not rank.live for proof in proofs for rank in proof.ranks)
    by = f" ({own} checked at their start only)" if own else ""
    warnings = len({warning for proof in proofs for warning in proof.warnings})
    warned = f"; {counted(warnings, 'warning')}" if warnings else ""
    return f"{policy}, {total} {of_all} bound as planned{by}{warned}", False
