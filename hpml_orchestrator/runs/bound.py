"""Where the ranks of an attempt were seen, and whether that is right: from its own records."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from types import NoneType
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import HpmlError
from hpml_orchestrator.placement.proof import NodeProof, RankProof, proof_json, proof_of_json
from hpml_orchestrator.records.files import read_json
from hpml_orchestrator.topology.cpulist import format_list, parse_list

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from hpml_orchestrator.records.store import Attempt
    from hpml_orchestrator.topology import Topology

__all__ = ["Bound", "Place", "Unreadable", "bound_of", "node_topology"]

_SUFFIX = ".proof.json"
_BINDING = "binding"
# Of a number in decimal; what needs more is none of ours, and Python refuses thousands of them.
_DIGITS = 19


@dataclass(frozen=True)
class Place:
    """Where one rank was seen.

    Attributes:
        rank: number among all ranks.
        local_rank: number among the ranks of its node.
        node: Slurm's name of its node.
        gpu: PCI address (or name) of its GPU; None without one, and where it is not known.
        cpus: CPUs that it may run on, in the kernel's list format; empty where not known.
        cores: how many physical cores those are in; None where not known.
        numa: NUMA domains that those are in.
        distance: largest NUMA distance from its GPU to one of its CPUs; None where not known.
        nic: its network card; empty without one.
        threads: OMP_NUM_THREADS; None where not set.
        right: whether it is where it should be; None where nobody judged that.
        wrong: what is wrong, one sentence each.
    """

    rank: int
    local_rank: int
    node: str
    gpu: str | None = None
    cpus: str = ""
    cores: int | None = None
    numa: tuple[int, ...] = ()
    distance: int | None = None
    nic: str = ""
    threads: int | None = None
    right: bool | None = None
    wrong: tuple[str, ...] = ()


@dataclass(frozen=True)
class Unreadable:
    """A node's proof that cannot be read.

    Attributes:
        node: the node.
        why: what is the matter with it.
    """

    node: str
    why: str


@dataclass(frozen=True)
class Bound:
    """What an attempt's records tell of its binding.

    Attributes:
        line: all of it in one line; empty where nothing was recorded.
        places: by rank.
        proofs: of the nodes, by name.
        unreadable: the other nodes' proofs.
        fatal: whether the job failed for what the proofs tell rank by rank.
    """

    line: str = ""
    places: tuple[Place, ...] = ()
    proofs: tuple[NodeProof, ...] = ()
    unreadable: tuple[Unreadable, ...] = ()
    fatal: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return ranks, proofs and what could not be read for programs."""
        return {
            "ranks": [asdict(one) for one in self.places],
            "proofs": [proof_json(one) for one in self.proofs],
            "unreadable_proofs": [asdict(one) for one in self.unreadable],
        }


def bound_of(attempt: Attempt, asked: object = None) -> Bound:
    """Return what is known of an attempt's binding; damaged records are told, never raised.

    Args:
        attempt: which one.
        asked: what the job's record says under `binding`: a mapping, or a policy's name.
    """
    proofs, unreadable = _proofs(attempt.directory / "binding")
    records = attempt.bindings()
    places = {
        (proof.node, one.local_rank): _of_proof(proof, one)
        for proof in proofs
        for one in proof.ranks
    }
    judged = len(places)
    topologies: dict[str, Topology | None] = {}
    for record in records:
        place = _of_record(record)
        if (place.node, place.local_rank) not in places:
            if place.node not in topologies:
                topologies[place.node] = node_topology(attempt, place.node)
            found = _measured(place, _visible(record), topologies[place.node])
            places[place.node, place.local_rank] = found
    wanted = [one["world_size"] for one in records if isinstance(one.get("world_size"), int)]
    total = max([len(places), sum(one.expected for one in proofs), *wanted])
    ordered = sorted(places.values(), key=lambda one: (one.rank, one.node, one.local_rank))
    line = ""
    if proofs or unreadable or records:
        line = _line(proofs, unreadable, total, judged, attempt.ended, asked)
    elif asked is not None and _had_ranks(attempt):
        line = _lost(attempt.ended, asked)
    wrong = any(proof.wrong or any(one.wrong for one in proof.ranks) for proof in proofs)
    fatal = wrong and _failed(attempt.ended)
    return Bound(line, tuple(ordered), tuple(proofs), tuple(unreadable), fatal)


def node_topology(attempt: Attempt, node: str) -> Topology | None:
    """Return the topology that a node's agent wrote down; None where it is missing or damaged."""
    from hpml_orchestrator.topology.record import topology_of_json  # noqa: PLC0415

    try:
        return topology_of_json(read_json(attempt.directory / "nodes" / f"{node}.topology.json"))
    except (HpmlError, ValueError, RecursionError):  # a node's name may hold what no path can
        return None


def _had_ranks(attempt: Attempt) -> bool:
    """Return whether an attempt is over whose ranks must have left records, or were to start."""
    ended = attempt.ended
    if ended is None:
        return False
    planned = next((attempt.directory / "plan").glob("*.txt"), None) is not None
    return planned or ended.get("exit_code") == 0 or _failed(ended)


def _lost(ended: Mapping[str, Any] | None, asked: object) -> str:
    """Say in one line that nothing at all was recorded."""
    policy, verify = _asked((), asked)
    if policy == "none":
        return "none: nothing was bound"
    off = ", and with verify: off nobody looked" if verify == "off" else ""
    failed = "; the job failed for it (verify: strict)" if _failed(ended) else ""
    return f"not proven: {policy}, there is no record of any rank{off}{failed}"


def _proofs(directory: Path) -> tuple[list[NodeProof], list[Unreadable]]:
    proofs: list[NodeProof] = []
    unreadable: list[Unreadable] = []
    for path in sorted(directory.glob(f"*{_SUFFIX}")):
        try:
            proof = proof_of_json(read_json(path))
            _check(proof)
        except (HpmlError, ValueError, RecursionError) as error:
            why = error.message if isinstance(error, HpmlError) else str(error)
            why = why.replace(f"{path} ", "").replace(str(path), path.name)
            unreadable.append(Unreadable(path.name.removesuffix(_SUFFIX), why))
        else:
            proofs.append(proof)
    return proofs, unreadable


_NUMBER, _TEXT = (int,), (str,)
_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("rank", "local_rank", "pid", "cores", "expected", "looks"), _NUMBER),
    **dict.fromkeys(("node", "policy", "verify", "uuid", "cpus", "memory", "nic"), _TEXT),
    "gpu": (str, NoneType),
    "distance": (int, NoneType),
    "threads": (int, NoneType),
    "time": (int, float),
    "live": (bool,),
}
_ITEMS = {"numa": int, "wrong": str, "warnings": str, "ranks": RankProof}


def _check(record: NodeProof | RankProof) -> None:
    """Refuse values of another kind than they should have, which would fail later, or mislead.

    Raises:
        ValueError: there is one.
    """
    for name in (one.name for one in fields(record)):
        value = getattr(record, name)
        item = _ITEMS.get(name)
        if item is not None:
            good = isinstance(value, tuple) and all(isinstance(one, item) for one in value)
        else:
            good = isinstance(value, _KINDS[name])
        if not good:
            raise ValueError(f"no proof of a node's binding: {name} is {value!r:.60}")
    if isinstance(record, RankProof):
        parse_list(record.cpus)
    else:
        for one in record.ranks:
            _check(one)


def _of_proof(proof: NodeProof, one: RankProof) -> Place:
    """Return what a node's agent saw; with the policy `none` no place is right or wrong."""
    return Place(
        rank=one.rank,
        local_rank=one.local_rank,
        node=proof.node,
        gpu=one.gpu,
        cpus=one.cpus,
        cores=one.cores,
        numa=one.numa,
        distance=one.distance,
        nic=one.nic,
        threads=one.threads,
        right=None if proof.policy == "none" else not one.wrong,
        wrong=one.wrong,
    )


def _of_record(record: Mapping[str, Any]) -> Place:
    """Return what hpml-bind wrote of a rank; its version 1 has the CPUs as a list of numbers."""
    local_rank = _whole(record.get("local_rank"))
    return Place(
        rank=int(record["rank"]),
        local_rank=int(record["rank"]) if local_rank is None else local_rank,
        node=str(record.get("node") or "?"),
        cpus=_cpus(record.get("cpus")),
        nic=str(record.get("nic") or ""),
        threads=_whole(record.get("threads")),
    )


def _visible(record: Mapping[str, Any]) -> list[str] | None:
    """Return the entries of the visible GPUs; None where the variable was not set."""
    told = record.get("visible", record.get("visible_gpus"))
    if not isinstance(told, str):
        return None
    return [entry.strip() for entry in told.split(",") if entry.strip()]


def _measured(place: Place, entries: list[str] | None, topology: Topology | None) -> Place:
    """Return a place that nobody judged, with what its node's topology adds to it."""
    if topology is None:
        gpu = entries[place.local_rank % len(entries)] if entries else None
        return replace(place, gpu=gpu)
    from hpml_orchestrator.placement.gpus import local_domains, visible  # noqa: PLC0415
    from hpml_orchestrator.placement.machine import Machine  # noqa: PLC0415

    cpus = set(parse_list(place.cpus))
    cores = [core for core in topology.cores if cpus & set(core.cpus)]
    numa = sorted({core.domain for core in cores})
    devices = visible(topology, entries, [])
    device = devices[place.local_rank % len(devices)] if devices else None
    machine = Machine(topology, None, smt=True)
    near = local_domains(topology, machine, device) if device else ()
    return replace(
        place,
        gpu=(device.address or device.name) if device else None,
        cores=len(cores),
        numa=tuple(numa),
        distance=machine.farthest(near, numa),
    )


def _cpus(told: object) -> str:
    try:
        if isinstance(told, list):
            return format_list(parse_list(",".join(str(int(one)) for one in told)))
        return format_list(parse_list(told)) if isinstance(told, str) else ""
    except (TypeError, ValueError, OverflowError):
        return ""


def _whole(value: object) -> int | None:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < _DIGITS:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _line(
    proofs: Sequence[NodeProof],
    unreadable: Sequence[Unreadable],
    total: int,
    judged: int,
    ended: Mapping[str, Any] | None,
    asked: object,
) -> str:
    """Say in one line whether the ranks are where they should be."""
    policy, verify = _asked(proofs, asked)
    ranks = [one for proof in proofs for one in proof.ranks]
    wrong = sum(bool(one.wrong) for one in ranks)
    nodes = [proof.node for proof in proofs if proof.wrong]
    of_all = f"of {total} rank{'s' * (total != 1)}"
    failed = "; the job failed for it (verify: strict)" if _failed(ended) else ""
    if wrong or nodes:
        told = [f"{wrong} {of_all} WRONG"] if wrong else []
        if nodes:
            told.append(f"node{'s' * (len(nodes) > 1)} {_few(nodes)} WRONG")
        return f"{policy}, {', '.join(told)}{failed}"
    if unreadable:
        names = _few([one.node for one in unreadable])
        return f"not proven: the proof of {names} cannot be read ({unreadable[0].why}){failed}"
    if policy == "none":
        return "none: nothing was bound"
    if verify == "off":
        return f"not proven: {policy}, with verify: off nobody looked"
    if judged < total:
        yet = "" if ended is not None else " so far"
        if not judged:
            return f"not proven: {policy}, no rank was looked at{yet}{failed}"
        good = "is where it should be" if judged == 1 else "are where they should be"
        return f"not proven: {policy}, {judged} {of_all} seen{yet}, which {good}{failed}"
    own = sum(not one.live for one in ranks)
    by = f" ({own} by their own record alone)" if own else ""
    good = "where they should be" if total != 1 else "where it should be"
    return f"{policy}, {total} {of_all} {good}{by}{_warned(proofs)}"


def _warned(proofs: Sequence[NodeProof]) -> str:
    """Say that there is more to know, such as GPUs next to which the job got no CPU."""
    count = len({warning for proof in proofs for warning in proof.warnings})
    return f"; {count} warning{'s' * (count > 1)}" if count else ""


def _asked(proofs: Sequence[NodeProof], asked: object) -> tuple[str, str]:
    """Return policy and verify as the nodes had them, else as the job's record says."""
    if proofs:
        return proofs[0].policy, proofs[0].verify
    if isinstance(asked, dict):
        return str(asked.get("policy", "?")), str(asked.get("verify", "warn"))
    return str(asked or "none"), "warn"


def _failed(ended: Mapping[str, Any] | None) -> bool:
    return ended is not None and ended.get("reason") == _BINDING


def _few(names: Sequence[str], most: int = 3) -> str:
    """Write some names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
