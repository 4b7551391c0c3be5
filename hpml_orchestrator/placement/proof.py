"""Records of the observed ranks of one node, and of what is wrong with their binding.

Standard library only, Python 3.9 or newer: it travels to the nodes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

__all__ = ["NodeProof", "Process", "RankProof", "Seen", "proof_json", "proof_of_json"]

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Process:
    """One process of a rank as it was seen.

    Attributes:
        pid: its number.
        name: what the kernel calls it.
        cpus: CPUs that its threads may run on, all together.
        first: CPUs of its first thread, which are those of what it forks.
        load: how many CPUs it kept busy since the look before; 0 at its first.
        openmp: a variable of its environment that makes OpenMP bind threads, such as
            `OMP_PROC_BIND=close`; empty if there is none.
    """

    pid: int
    name: str
    cpus: tuple[int, ...]
    first: tuple[int, ...] = ()
    load: float = 0.0
    openmp: str = ""


@dataclass(frozen=True)
class Seen:
    """One rank as observed, independent of the plan.

    Attributes:
        local_rank: number among the ranks of its node.
        rank: number among all ranks.
        pid: its process.
        inherited: CPUs that it was allowed when hpml-bind started; None if unknown.
        cpus: CPUs that hpml-bind read back after it had set them.
        child_cpus: CPUs that a child forked by hpml-bind was allowed; None if none was forked.
        main: the process that does the rank's work, which a wrapper may have started; None if
            no process could be read.
        others: its other processes: wrappers, loader workers and others that it started.
        visible: CUDA_VISIBLE_DEVICES (or ROCR_VISIBLE_DEVICES) of its main process; None if not
            set.
        memory: its memory policy, such as `prefer:3`; empty if unknown.
        threads: OMP_NUM_THREADS; None if not set.
        nic: its network card; empty without one.
        live: whether the live process was read, or only hpml-bind's record of it.
        error: why hpml-bind could not bind the rank; empty if it could.
        note: a failure that is not a fault, such as a memory policy that a container refuses.
    """

    local_rank: int
    rank: int
    pid: int
    inherited: tuple[int, ...] | None = None
    cpus: tuple[int, ...] = ()
    child_cpus: tuple[int, ...] | None = None
    main: Process | None = None
    others: tuple[Process, ...] = ()
    visible: str | None = None
    memory: str = ""
    threads: int | None = None
    nic: str = ""
    live: bool = False
    error: str = ""
    note: str = ""


@dataclass(frozen=True)
class RankProof:
    """Where one rank ran, and what is wrong with that.

    Attributes:
        rank: number among all ranks.
        local_rank: number among the ranks of its node.
        pid: its process.
        gpu: PCI address (or name) of the device it really has; None without one.
        uuid: UUID of that device; empty if unknown.
        cpus: CPUs that it may run on, in the kernel's list format.
        cores: how many physical cores those are in.
        numa: NUMA domains that those are in.
        memory: memory policy, such as `prefer:3`; empty if unknown.
        nic: its network card; empty without one.
        distance: largest NUMA distance from its device to one of its CPUs; None if unknown.
        threads: OMP_NUM_THREADS; None if not set.
        live: whether the live process was read.
        wrong: the faults, one sentence each; empty if the rank runs as planned.
    """

    rank: int
    local_rank: int
    pid: int = 0
    gpu: str | None = None
    uuid: str = ""
    cpus: str = ""
    cores: int = 0
    numa: tuple[int, ...] = ()
    memory: str = ""
    nic: str = ""
    distance: int | None = None
    threads: int | None = None
    live: bool = False
    wrong: tuple[str, ...] = ()


@dataclass(frozen=True)
class NodeProof:
    """The proof of one node: where its ranks run.

    Attributes:
        node: Slurm's name of it.
        policy: the plan's.
        verify: `strict`, `warn` or `off`.
        expected: ranks that the plan has.
        ranks: those that were seen, by local rank.
        wrong: what is wrong with the node as a whole, one sentence each.
        warnings: the plan's and the topology's.
        looks: how often the live processes were read.
        time: seconds since the epoch of the last change.
    """

    node: str
    policy: str
    verify: str
    expected: int
    ranks: tuple[RankProof, ...] = ()
    wrong: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    looks: int = 0
    time: float = 0.0

    @property
    def right(self) -> bool:
        """Whether nothing is wrong."""
        return not self.wrong and not any(rank.wrong for rank in self.ranks)


def proof_json(proof: NodeProof) -> dict[str, Any]:
    """Return a proof as plain data, ready for `json.dumps`."""
    return {"schema_version": SCHEMA_VERSION, **asdict(proof)}


def proof_of_json(data: dict[str, Any]) -> NodeProof:
    """Return the proof that plain data hold; unknown fields are ignored.

    Raises:
        ValueError: they are not a proof.
    """
    try:
        ranks = tuple(RankProof(**_values(RankProof, rank)) for rank in data.get("ranks", ()))
        return NodeProof(**_values(NodeProof, {**data, "ranks": ranks}))
    except (TypeError, AttributeError) as error:
        raise ValueError(f"not a proof of a node's binding: {error}") from None


def _values(kind: Any, data: dict[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(kind)} & set(data)
    return {
        name: tuple(data[name]) if isinstance(data[name], list) else data[name] for name in names
    }
