"""The plan of one node: for every local rank its GPU, cores, memory and network card.

Standard library only, Python 3.9 or newer: it travels to the nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpml_orchestrator.topology.cpulist import format_list

PLAN_COLUMNS = ("rank", "GPU", "CPUs", "cores", "NUMA", "distance", "memory", "NIC", "threads")


@dataclass(frozen=True)
class RankPlan:
    """Where one rank runs."""

    local_rank: int  # number among the ranks of its node, from 0
    # PCI address of its GPU, or the source's name of it; None without a GPU, or if the GPU is not
    # in the topology
    gpu: str | None = None
    gpu_index: int | None = None  # the GPU's index in the topology
    gpu_uuid: str = ""  # UUID of the GPU or MIG instance; empty if unknown
    cpus: tuple[int, ...] = ()  # CPUs that it may run on, ascending
    cores: tuple[int, ...] = ()  # numbers of the physical cores that those are in, ascending
    numa: tuple[int, ...] = ()  # NUMA domains that those are in, ascending
    memory: int | None = None  # the NUMA domain whose memory to prefer; None for no preference
    nic: str | None = None  # name of its network card; None without one
    threads: int = 1  # OpenMP threads: its cores less its loader workers, at least 1
    loader_workers: int = 0  # processes that load data for it, on its cores
    # The largest NUMA distance from its GPU to one of its cores (10 is local); None without a GPU,
    # or if unknown
    distance: int | None = None

    def cpu_list(self) -> str:
        """Return its CPUs in the kernel's list format."""
        return format_list(self.cpus)


@dataclass(frozen=True)
class Plan:
    """The ranks of one node."""

    ranks: tuple[RankPlan, ...]  # by local rank, from 0 without a gap
    # The policy that it was made with; `none` means that nothing is bound
    policy: str = "gpu-local"
    warnings: tuple[str, ...] = ()  # which rules could not be kept, one sentence each


def plan_json(plan: Plan) -> dict[str, object]:
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
