"""What a job requests from the cluster, in Slurm's own terms."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml_orchestrator.check.finding import CheckFinding, error
from hpml_orchestrator.errors import counted
from hpml_orchestrator.records import units
from hpml_orchestrator.scheduler.cluster import Cluster, Node, Partition

if TYPE_CHECKING:
    from hpml_orchestrator.records.job import Job


def cpus_field(job: Job) -> str:
    """Return the field of `resources` that its number of CPUs per node comes from."""
    resources = job.resources
    if resources.cpus_per_rank == 1 and resources.ranks > 1:
        for name in ("ranks_per_node", "ranks_per_gpu"):
            if getattr(resources, name) not in (None, 1):
                return name
        return "gpus"
    return "cpus_per_rank"


def memory_field(job: Job) -> str:
    """Return the field of `resources` that its memory per node comes from."""
    return "memory_per_cpu" if job.resources.memory_per_cpu else "memory"


@dataclass(frozen=True)
class JobRequest:
    """A job's request.

    Attributes:
        job: the job, complete.
        nodes: number of nodes.
        tasks, cpus: tasks and CPUs per node.
        memory_mib: per node, with what is staged to RAM; None where the job names none.
        staged_mib: the part of it that is staged to RAM.
        gpus: types and numbers per node; an empty type is any.
        minutes: time limit, rounded up as Slurm does.
        partitions: names; empty for the default one.
        options: the other sbatch options, without their dashes; None for one without a value.
        disk_mib, shm_mib: what is staged to each node's local disk and RAM, as far as known.
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
    disk_mib: int = 0
    shm_mib: int = 0

    def fault(
        self, code: str, name: str, message: str, limit: object = None, hint: str = ""
    ) -> CheckFinding:
        """Return an error about a field of `resources`, with its value in the job file."""
        value = self.job.resources.written(name)
        return error(code, f"resources.{name}", value, message, limit, hint)


@dataclass(frozen=True)
class Placement:
    """A request in one partition of a cluster."""

    request: JobRequest
    partition: Partition
    cluster: Cluster

    @property
    def whole_nodes(self) -> bool:
        """Whether the job gets whole nodes, by its wish or the partition's."""
        return self.partition.exclusive or self.request.job.resources.exclusive

    @property
    def memory_mib(self) -> int:
        """Memory per node: the job's own, else the default; 0 where neither is fixed."""
        if self.request.memory_mib is not None:
            return self.request.memory_mib
        # A whole node comes with all of its memory, and without MEMORY in SelectTypeParameters none
        # is counted.
        if not self.cluster.limits.memory_consumable or self.whole_nodes:
            return 0
        for owner in (self.partition, self.cluster.limits):
            if owner.default_memory_per_node_mib:
                return owner.default_memory_per_node_mib
            if owner.default_memory_per_cpu_mib:
                return owner.default_memory_per_cpu_mib * self.request.cpus
        return 0

    @property
    def memory_text(self) -> str:
        """Memory per node as a message shows it, and where the number comes from."""
        origin = ""
        if self.request.memory_mib is None:
            origin = f" (the default for {counted(self.request.cpus, 'CPU')})"
        elif self.request.staged_mib:
            origin = f" ({units.size_text(self.request.staged_mib)} of it staged to shm)"
        return f"{units.size_text(self.memory_mib)} of memory per node{origin}"

    @property
    def cpus(self) -> int:
        """CPUs per node; Slurm raises them where memory is above MaxMemPerCPU."""
        most = self.cluster.limits.max_memory_per_cpu_mib
        if self.partition.max_memory_per_cpu_mib or self.partition.max_memory_per_node_mib:
            most = self.partition.max_memory_per_cpu_mib
        memory = self.request.memory_mib
        return max(self.request.cpus, -(-memory // most)) if most and memory else self.request.cpus

    def tres(self, fitting: list[Node]) -> dict[str, int]:
        """Return the TRES that the whole job is charged for, by Slurm's names; memory in MiB.

        It counts as one `job`: the tasks of an array may run one after the other.
        """
        nodes = self.request.nodes
        cpus = self.cpus * nodes
        if self.whole_nodes or self.cluster.limits.whole_nodes:
            # A whole node is charged with all of its CPUs. The smallest that fit give the least
            # charge, so no limit is reported that the job might not reach.
            cpus = max(cpus, sum(sorted(node.cpus for node in fitting)[:nodes]))
        gpus = {f"gres/gpu:{kind}": count * nodes for kind, count in self.request.gpus if kind}
        gpus["gres/gpu"] = sum(count for _, count in self.request.gpus) * nodes
        return {"job": 1, "cpu": cpus, "node": nodes, "mem": self.memory_mib * nodes, **gpus}


def job_request(job: Job, *, disk_mib: int = 0, shm_mib: int = 0) -> JobRequest:
    """Return the request of a complete job; other arguments are those of `JobRequest`."""
    resources = job.resources
    options: dict[str, str | None] = {}
    for option in resources.extra:
        name, equals, value = option.removeprefix("--").partition("=")
        options[name] = value if equals else None
    memory = job.memory_mib
    seconds = resources.time
    with contextlib.suppress(ValueError):  # `--time-min` lets Slurm shorten the time limit
        shortest = units.parse_time_limit(options.get("time-min") or "")
        seconds = min(seconds, shortest or seconds)
    return JobRequest(
        job=job,
        nodes=resources.nodes,
        tasks=1 if job.launcher == "torchrun" else resources.ranks,
        cpus=1 if "overcommit" in options else resources.ranks * resources.cpus_per_rank,
        memory_mib=memory if resources.node_memory else None,
        staged_mib=memory - resources.node_memory,
        gpus=resources.gpus.kinds,
        minutes=-(-seconds // 60),
        partitions=tuple(filter(None, (resources.partition or "").split(","))),
        options=options,
        disk_mib=disk_mib,
        shm_mib=shm_mib,
    )
