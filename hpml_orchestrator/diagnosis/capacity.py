"""How many more resources of a node a job may request, if the size of the node is known."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from hpml_orchestrator.diagnosis.shares import busy_cpus

if TYPE_CHECKING:
    from hpml_orchestrator.diagnosis.model import Facts

_WORKERS = re.compile(r"(--(?:num[-_]?)?(?:data[-_]?|loader[-_]?)?workers)(?:=(\d+))?")
BUSY = 0.9  # from this share on the CPUs have no time left


def cpus_busy(facts: Facts) -> float | None:
    """Return the share of the CPUs that were busy; None if it is not known."""
    known = busy_cpus(facts)
    return known[0] / known[1] if known else None


def cpus_per_rank(facts: Facts) -> int:
    """Return how many CPUs the job asked for, for each rank."""
    return facts.job.resources.cpus_per_rank


def worker_argument(facts: Facts) -> tuple[int, str, int] | None:
    """Return the argument with the number of loader workers: its index, `--workers=`, the number.

    The second is empty if the number is an argument of its own.
    """
    args = facts.job.args
    for index, word in enumerate(args):
        if match := _WORKERS.fullmatch(word):
            value = match[2] or "".join(args[index + 1 : index + 2])
            if value.isdecimal():
                is_joined = match[2] is not None
                return index + (not is_joined), f"{match[1]}=" * is_joined, int(value)
    return None


def more_cpus(facts: Facts, wanted: int) -> int | None:
    """Return the CPUs per rank to ask for: what is wanted, or less if a node has no more.

    None: a node has no more than the job has already, or the size of the nodes is not known.
    """
    ranks = math.ceil(facts.world_size / max(1, facts.node_count)) or 1
    # Slurm refuses a request that no node can meet, so advice stays within the smallest node.
    most = min(wanted, (facts.node_cpus or 0) // ranks)
    return most if most > cpus_per_rank(facts) else None


def fits_in_ram(facts: Facts, size_bytes: float, own_bytes: float | None) -> bool | None:
    """Return whether data and the job fit into the memory of the nodes; None if unknown.

    Data in /dev/shm counts as memory of the job, so it is added to the requested memory. If the
    job requests no memory, only its monitor may know the limit.

    Args:
        facts: of the run.
        size_bytes: of the data, on each node.
        own_bytes: what the job asks for itself; None: nothing.
    """
    if own_bytes is not None:
        known = facts.node_memory_bytes
        return None if known is None else own_bytes + size_bytes <= known
    limits = [
        (node.memory_peak_bytes, node.memory_limit_bytes)
        for node in facts.nodes
        if node.memory_peak_bytes and node.memory_limit_bytes
    ]
    return all(peak + size_bytes <= limit for peak, limit in limits) if limits else None
