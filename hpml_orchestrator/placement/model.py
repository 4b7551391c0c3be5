"""The plan of one node: for every local rank its GPU, cores, memory and network card.

Standard library only, Python 3.9 or newer: it travels to the nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hpml_orchestrator.topology.cpulist import format_list

__all__ = ["PLAN_COLUMNS", "Plan", "RankPlan", "plan_json", "plan_rows"]

PLAN_COLUMNS = ("rank", "GPU", "CPUs", "cores", "NUMA", "distance", "memory", "NIC", "threads")


@dataclass(frozen=True)
class RankPlan:
    """Where one rank runs.

    Attributes:
        local_rank: number among the ranks of its node, from 0.
        gpu: PCI address of its GPU, or the source's name of it; None without a GPU, or if the GPU
            is not in the topology.
        gpu_index: the GPU's index in the topology.
        gpu_uuid: UUID of the GPU or MIG instance; empty if unknown.
        cpus: CPUs that it may run on, ascending.
        cores: numbers of the physical cores that those are in, ascending.
        numa: NUMA domains that those are in, ascending.
        memory: the NUMA domain whose memory to prefer; None for no preference.
        nic: name of its network card; None without one.
        threads: OpenMP threads: its cores less its loader workers, at least 1.
        loader_workers: processes that load data for it, on its cores.
        distance: the largest NUMA distance from its GPU to one of its cores (10 is local); None
            without a GPU, or if unknown.
    """

    local_rank: int
    gpu: str | None = None
    gpu_index: int | None = None
    gpu_uuid: str = ""
    cpus: tuple[int, ...] = ()
    cores: tuple[int, ...] = ()
    numa: tuple[int, ...] = ()
    memory: int | None = None
    nic: str | None = None
    threads: int = 1
    loader_workers: int = 0
    distance: int | None = None

    def cpu_list(self) -> str:
        """Return its CPUs in the kernel's list format."""
        return format_list(self.cpus)


@dataclass(frozen=True)
class Plan:
    """The ranks of one node.

    Attributes:
        ranks: by local rank, from 0 without a gap.
        policy: the policy that it was made with; `none` means that nothing is bound.
        warnings: which rules could not be kept, one sentence each.
    """

    ranks: tuple[RankPlan, ...]
    policy: str = "gpu-local"
    warnings: tuple[str, ...] = ()


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return a plan as plain data, ready for `json.dumps`; CPUs are in the kernel's list format."""
    return {
        "ranks": [
            {**vars(rank), "cpus": rank.cpu_list(), "gpu_uuid": rank.gpu_uuid or None}
            for rank in plan.ranks
        ],
        "policy": plan.policy,
        "warnings": list(plan.warnings),
    }


def plan_rows(plan: Plan) -> list[tuple[str, ...]]:
    """Return one row per rank, its cells as in `PLAN_COLUMNS`; what is unknown is a dash."""
    rows = []
    for rank in plan.ranks:
        cells = (
            rank.local_rank,
            rank.gpu,
            rank.cpu_list() or None,
            len(rank.cores),
            ",".join(map(str, rank.numa)) or None,
            rank.distance,
            rank.memory,
            rank.nic,
            rank.threads,
        )
        rows.append(tuple("-" if cell is None else str(cell) for cell in cells))
    return rows
