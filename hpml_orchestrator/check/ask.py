"""What a job asks of the cluster, in Slurm's own terms."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml_orchestrator.scheduler.cluster import Cluster, Limits, Node, Partition
from hpml_orchestrator.script.render import memory_mebibytes
from hpml_orchestrator.spec import values

if TYPE_CHECKING:
    from hpml_orchestrator.spec import Job

__all__ = ["Ask", "ask_of", "candidates", "cpus_needed", "memory_needed", "tres_of"]

_OUT_OF_THE_CONFIGURATION = "FUTURE"


@dataclass(frozen=True)
class Ask:
    """A job's request.

    Attributes:
        job: whose.
        nodes, tasks, cpus: nodes; tasks of a node; CPUs of a node.
        memory_mib: of a node, what goes to RAM included; None where the job says nothing.
        staged_mib: of that, what goes to RAM.
        gpus: type and number of a node; an empty type is any.
        minutes: time limit, rounded up as Slurm does.
        partitions: names; empty for the default one.
        options: the other sbatch options, without their dashes; None for one without a value.
        required, excluded: nodes that it has to have, or must not have.
        disk_mib: what goes to each node's local disk; 0 where that is nothing, or not known.
        shm_mib: what goes to each node's RAM, as far as known.
    """

    job: Job
    nodes: int
    tasks: int
    cpus: int
    memory_mib: int | None
    staged_mib: int
    gpus: tuple[tuple[str, int], ...]
    minutes: int
    partitions: tuple[str, ...]
    options: Mapping[str, str | None]
    required: frozenset[str] = frozenset()
    excluded: frozenset[str] = frozenset()
    disk_mib: int = 0
    shm_mib: int = 0

    @property
    def gpu_count(self) -> int:
        """GPUs of a node."""
        return sum(count for _, count in self.gpus)


def ask_of(
    job: Job,
    *,
    required: frozenset[str] = frozenset(),
    excluded: frozenset[str] = frozenset(),
    disk_mib: int = 0,
    shm_mib: int = 0,
) -> Ask:
    """Return what a complete job asks for; the rest as in `Ask`."""
    resources = job.resources
    options = {}
    for option in resources.extra:
        name, equals, value = option.removeprefix("--").partition("=")
        options[name] = value if equals else None
    own = int((resources.memory or "0M").removesuffix("M"))
    memory = memory_mebibytes(job)
    return Ask(
        job=job,
        nodes=resources.nodes,
        tasks=1 if job.launcher == "torchrun" else resources.ranks,
        cpus=1 if "overcommit" in options else resources.ranks * resources.cpus_per_rank,
        memory_mib=memory if resources.memory else None,
        staged_mib=memory - own,
        gpus=values.parse_gpus(resources.gpus).kinds,
        minutes=-(-_least_seconds(resources.time, options) // 60),
        partitions=tuple(filter(None, (resources.partition or "").split(","))),
        options=options,
        required=required,
        excluded=excluded,
        disk_mib=disk_mib,
        shm_mib=shm_mib,
    )


def _least_seconds(limit: str, options: dict[str, str | None]) -> int:
    """Return the shortest time limit that will do: `--time-min` lets Slurm shorten it."""
    least = options.get("time-min")
    if least is not None:
        with contextlib.suppress(ValueError):
            return min(values.parse_time(least), values.parse_time(limit))
    return values.parse_time(limit)


def memory_needed(ask: Ask, partition: Partition, limits: Limits) -> int:
    """Return MiB per node: what is asked for, else the default; 0 where that is nothing fixed."""
    if ask.memory_mib is not None:
        return ask.memory_mib
    if not limits.memory_consumable or partition.exclusive or ask.job.resources.exclusive:
        return 0
    for where in (partition, limits):
        if where.default_memory_per_node_mib:
            return where.default_memory_per_node_mib
        if where.default_memory_per_cpu_mib:
            return where.default_memory_per_cpu_mib * ask.cpus
    return 0


def cpus_needed(ask: Ask, partition: Partition, limits: Limits) -> int:
    """Return CPUs per node; memory above MaxMemPerCPU makes them more, as Slurm does."""
    most = _per_cpu(partition, limits)
    if not most or ask.memory_mib is None:
        return ask.cpus
    return max(ask.cpus, -(-ask.memory_mib // most))


def _per_cpu(partition: Partition, limits: Limits) -> int | None:
    if partition.max_memory_per_cpu_mib or partition.max_memory_per_node_mib:
        return partition.max_memory_per_cpu_mib
    return limits.max_memory_per_cpu_mib


def candidates(ask: Ask, partition: Partition, cluster: Cluster) -> list[Node]:
    """Return the nodes that could be the job's, whatever their state is now."""
    return [
        node
        for node in cluster.nodes_of(partition)
        if _OUT_OF_THE_CONFIGURATION not in node.states and node.name not in ask.excluded
    ]


def tres_of(
    ask: Ask, partition: Partition, cluster: Cluster, fitting: list[Node]
) -> dict[str, int]:
    """Return what the whole job would be charged with, by Slurm's names; memory in MiB."""
    cpus = cpus_needed(ask, partition, cluster.limits) * ask.nodes
    if partition.exclusive or ask.job.resources.exclusive or cluster.limits.whole_nodes:
        cpus = max(cpus, sum(sorted(node.cpus for node in fitting)[: ask.nodes]))
    tres = {
        "cpu": cpus,
        "node": ask.nodes,
        "mem": memory_needed(ask, partition, cluster.limits) * ask.nodes,
        "gres/gpu": ask.gpu_count * ask.nodes,
    }
    for kind, count in ask.gpus:
        if kind:
            tres[f"gres/gpu:{kind}"] = count * ask.nodes
    return tres
