"""A plan for people and programs: the form of `hpml topo --json`, and rows of a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpml_orchestrator.placement.model import Plan

__all__ = ["PLAN_COLUMNS", "plan_json", "plan_rows"]

PLAN_COLUMNS = ("rank", "GPU", "CPUs", "cores", "NUMA", "distance", "memory", "NIC", "threads")


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return a plan as plain data, ready for `json.dumps`.

    Every rank has `local_rank`, `gpu` (PCI address, else the source's name, else null), `cpus`
    (kernel list format), `cores` and `numa` (lists of numbers) and `nic`; then what the plan says
    beyond these.
    """
    return {
        "ranks": [
            {
                "local_rank": one.local_rank,
                "gpu": one.gpu,
                "cpus": one.cpu_list(),
                "cores": list(one.cores),
                "numa": list(one.numa),
                "nic": one.nic,
                "gpu_index": one.gpu_index,
                "gpu_uuid": one.gpu_uuid or None,
                "memory": one.memory,
                "threads": one.threads,
                "loader_workers": one.loader_workers,
                "distance": one.distance,
            }
            for one in plan.ranks
        ],
        "policy": plan.policy,
        "warnings": list(plan.warnings),
    }


def plan_rows(plan: Plan) -> list[tuple[str, ...]]:
    """Return one row per rank, its cells as in `PLAN_COLUMNS`; what is not known is a dash."""
    return [
        (
            str(one.local_rank),
            one.gpu or "-",
            one.cpu_list() or "-",
            str(len(one.cores)),
            ",".join(str(domain) for domain in one.numa) or "-",
            "-" if one.distance is None else str(one.distance),
            "-" if one.memory is None else str(one.memory),
            one.nic or "-",
            str(one.threads),
        )
        for one in plan.ranks
    ]
