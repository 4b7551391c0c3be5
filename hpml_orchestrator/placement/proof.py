"""Records of the observed ranks of one node, and of what is wrong with their binding.

Standard library only, Python 3.9 or newer: it travels to the nodes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Process:
    """One process of a rank as it was seen."""

    pid: int  # its number
    name: str  # what the kernel calls it
    cpus: tuple[int, ...]  # CPUs that its threads may run on, all together
    first: tuple[int, ...] = ()  # CPUs of its first thread, which are those of what it forks
    load: float = 0.0  # how many CPUs it kept busy since the look before; 0 at its first
    # A variable of its environment that makes OpenMP bind threads, such as `OMP_PROC_BIND=close`;
    # empty if there is none
    openmp: str = ""


@dataclass(frozen=True)
class Seen:
    """One rank as observed, independent of the plan."""

    local_rank: int  # number among the ranks of its node
    rank: int  # number among all ranks
    pid: int  # its process
    # CPUs that it was allowed when hpml-bind started; None if unknown
    inherited: tuple[int, ...] | None = None
    cpus: tuple[int, ...] = ()  # CPUs that hpml-bind read back after it had set them
    # CPUs that a child forked by hpml-bind was allowed; None if none was forked
    child_cpus: tuple[int, ...] | None = None
    # The process that does the rank's work, which a wrapper may have started; None if no process
    # could be read
    main: Process | None = None
    # Its other processes: wrappers, loader workers and others that it started
    others: tuple[Process, ...] = ()
    # CUDA_VISIBLE_DEVICES (or ROCR_VISIBLE_DEVICES) of its main process; None if not set
    visible: str | None = None
    memory: str = ""  # its memory policy, such as `prefer:3`; empty if unknown
    threads: int | None = None  # OMP_NUM_THREADS; None if not set
    nic: str = ""  # its network card; empty without one
    live: bool = False  # whether the live process was read, or only hpml-bind's record of it
    error: str = ""  # why hpml-bind could not bind the rank; empty if it could
    # A failure that is not a fault, such as a memory policy that a container refuses
    note: str = ""


@dataclass(frozen=True)
class RankProof:
    """Where one rank ran, and what is wrong with that."""

    rank: int  # number among all ranks
    local_rank: int  # number among the ranks of its node
    pid: int = 0  # its process
    gpu: str | None = None  # PCI address (or name) of the device it really has; None without one
    uuid: str = ""  # UUID of that device; empty if unknown
    cpus: str = ""  # CPUs that it may run on, in the kernel's list format
    cores: int = 0  # how many physical cores those are in
    numa: tuple[int, ...] = ()  # NUMA domains that those are in
    memory: str = ""  # memory policy, such as `prefer:3`; empty if unknown
    nic: str = ""  # its network card; empty without one
    # Largest NUMA distance from its device to one of its CPUs; None if unknown
    distance: int | None = None
    threads: int | None = None  # OMP_NUM_THREADS; None if not set
    live: bool = False  # whether the live process was read
    wrong: tuple[str, ...] = ()  # the faults, one sentence each; empty if the rank runs as planned


@dataclass(frozen=True)
class NodeProof:
    """The proof of one node: where its ranks run."""

    node: str  # Slurm's name of it
    policy: str  # the plan's
    verify: str  # `strict`, `warn` or `off`
    expected: int  # ranks that the plan has
    ranks: tuple[RankProof, ...] = ()  # those that were seen, by local rank
    warnings: tuple[str, ...] = ()  # the plan's and the topology's
    looks: int = 0  # how often the live processes were read
    time: float = 0.0  # seconds since the epoch of the last change

    @property
    def right(self) -> bool:
        """Whether no rank has a fault."""
        return not any(rank.wrong for rank in self.ranks)


def proof_json(proof: NodeProof) -> dict[str, object]:
    """Return a proof as plain data, ready for `json.dumps`."""
    return {"schema_version": SCHEMA_VERSION, **asdict(proof)}


def proof_of_json(data: Mapping[str, object]) -> NodeProof:
    """Return the proof that plain data hold; unknown fields are ignored.

    Raises:
        ValueError: they are not a proof.
    """
    try:
        ranks = data.get("ranks", [])
        if not isinstance(ranks, (list, tuple)):
            raise TypeError("its ranks are not a list")
        proofs = tuple(RankProof(**_values(RankProof, rank)) for rank in ranks)
        return NodeProof(**_values(NodeProof, {**data, "ranks": proofs}))
    except (TypeError, AttributeError) as error:
        raise ValueError(f"not a proof of a node's binding: {error}") from None


def _values(kind: type[NodeProof | RankProof], data: Mapping[str, object]) -> dict[str, Any]:
    names = {field.name for field in fields(kind)} & set(data)
    values = {name: data[name] for name in names}
    return {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
