"""What the checks share: findings, the request as Slurm sees it, and the binding."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from hpml_orchestrator.errors import counted
from hpml_orchestrator.records import units
from hpml_orchestrator.scheduler.cluster import Cluster, Node, Partition
from hpml_orchestrator.script.render import effective_job
from hpml_orchestrator.topology.sysfs import read_topology_field

if TYPE_CHECKING:
    from hpml_orchestrator.records.job import Job
    from hpml_orchestrator.site.model import NodeType, ResolvedSite
    from hpml_orchestrator.topology.model import Topology

# A finding of a check: one problem of a job, and the limit.

Level = Literal["error", "warning"]


@dataclass(frozen=True)
class CheckFinding:
    """One problem, or a possible one.

    Attributes:
        level: `error` (the job would not run) or `warning` (it may not, or not as intended).
        code: short identifier for programs, such as `time.partition`; stable across releases.
        field: field of the job file.
        value: value of the field; None if it has none.
        message: what is wrong with it.
        limit: the allowed value, if there is one.
        hint: how to fix it, unless the message explains that.
    """

    level: Level
    code: str
    field: str
    value: object
    message: str
    limit: object = None
    hint: str = ""

    def __str__(self) -> str:
        """Return the finding in one line, without its hint."""
        value = str(self.value).lower() if isinstance(self.value, bool) else str(self.value)
        repeated = re.search(rf"(?<![\w.]){re.escape(value)}(?![\w])", self.message)
        shown = "" if self.value is None or repeated else f" ({value})"
        return f"{self.field}{shown}: {self.message}"

    def to_json(self) -> dict[str, object]:
        """Return the finding for programs."""
        return asdict(self)


error = functools.partial(CheckFinding, "error")
warning = functools.partial(CheckFinding, "warning")


def errors_first(findings: Iterable[CheckFinding]) -> list[CheckFinding]:
    """Return each finding once, errors before warnings."""
    unique = {(finding.code, finding.field, finding.message): finding for finding in findings}
    return sorted(unique.values(), key=lambda finding: finding.level != "error")


def cpus_field(job: Job) -> str:
    """Return the field of `resources` that determines a job's CPUs per node."""
    resources = job.resources
    if resources.cpus_per_rank == 1 and resources.ranks > 1:
        for name in ("ranks_per_node", "ranks_per_gpu"):
            if getattr(resources, name) not in (None, 1):
                return name
        return "gpus"
    return "cpus_per_rank"


def memory_field(job: Job) -> str:
    """Return the field of `resources` that determines a job's memory per node."""
    return "memory_per_cpu" if job.resources.memory_per_cpu else "memory"


@dataclass(frozen=True)
class JobRequest:
    """A job's request.

    Attributes:
        job: the job, complete.
        nodes: number of nodes.
        tasks, cpus: tasks and CPUs per node.
        memory_mib: memory per node, including data staged to RAM; None if the job sets none.
        staged_mib: the part of it that is staged to RAM.
        gpus: types and numbers per node; an empty type means any.
        minutes: time limit, rounded up as in Slurm.
        partitions: names; empty for the default one.
        options: the other sbatch options, without their dashes; None for one without a value.
        disk_mib, shm_mib: data staged to each node's local disk and RAM, as far as known.
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
        """Whether the job gets whole nodes, by its request or the partition's rule."""
        return self.partition.exclusive or self.request.job.resources.exclusive

    @property
    def memory_mib(self) -> int:
        """Memory per node: the job's own, else the default; 0 if neither is set."""
        if self.request.memory_mib is not None:
            return self.request.memory_mib
        # A whole node comes with all of its memory, and without MEMORY in SelectTypeParameters
        # Slurm does not count memory.
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
        """Memory per node for a message, and where the number comes from."""
        origin = ""
        if self.request.memory_mib is None:
            origin = f" (the default for {counted(self.request.cpus, 'CPU')})"
        elif self.request.staged_mib:
            origin = f" ({units.size_text(self.request.staged_mib)} of it staged to shm)"
        return f"{units.size_text(self.memory_mib)} of memory per node{origin}"

    @property
    def cpus(self) -> int:
        """CPUs per node; Slurm raises them if memory exceeds MaxMemPerCPU."""
        most = self.cluster.limits.max_memory_per_cpu_mib
        if self.partition.max_memory_per_cpu_mib or self.partition.max_memory_per_node_mib:
            most = self.partition.max_memory_per_cpu_mib
        memory = self.request.memory_mib
        return max(self.request.cpus, -(-memory // most)) if most and memory else self.request.cpus

    def tres(self, fitting: list[Node]) -> dict[str, int]:
        """Return the TRES that the whole job is charged for, by Slurm's names; memory in MiB.

        It counts as one `job`: the tasks of an array may run one after another.
        """
        nodes = self.request.nodes
        cpus = self.cpus * nodes
        if self.whole_nodes or self.cluster.limits.whole_nodes:
            # A whole node is charged with all of its CPUs. Use the smallest nodes that fit, so that
            # no limit is reported that the job might not reach.
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


# Compare a job's binding with the GPUs, cores and domains of the nodes: pure rules.
#
# These are warnings: the job runs anyway, and each node's plan records the binding.

_RANKS = "resources.ranks_per_node"


def kinds_for(job: Job, site: ResolvedSite) -> dict[str, NodeType]:
    """Return the node types that a job may get under the site's own rules, by name."""
    return site.site.kinds_of(effective_job(job, site.site.directives).resources.partition)


def topologies_of(job: Job, site: ResolvedSite | None) -> dict[str, Topology]:
    """Return the topologies of the node types that a job may get, by the type's name.

    Raises:
        InputError: a file of the profile does not exist or is not a topology; names file and field.
    """
    found = {}
    for name, kind in (kinds_for(job, site) if site else {}).items():
        field = f"node_types.{name}.topology"
        if kind.topology and site:
            found[name] = read_topology_field(kind.topology, field=field, origin=site.origin(field))
    return found


@dataclass(frozen=True)
class NodeShape:
    """The properties of a kind of node that matter for binding; 0 if unknown.

    Attributes:
        name: name of such a node.
        cores: physical cores.
        cpus_per_core: CPUs per core, as Slurm counts them.
        sockets: sockets.
        domains: NUMA domains that have CPUs.
    """

    name: str
    cores: int = 0
    cpus_per_core: int = 1
    sockets: int = 0
    domains: int = 0


def shape_of_kind(name: str, kind: NodeType, topology: Topology | None) -> NodeShape:
    """Return the shape of a site profile's node type, by its topology if it has one."""
    label = f"node type {name}"
    if topology is not None:
        cores = len(topology.cores)
        return NodeShape(
            label,
            cores,
            max(1, (kind.cpus or len(topology.cpus)) // cores),
            len({core.socket for core in topology.cores}),
            sum(bool(domain.cpus) for domain in topology.domains),
        )
    cores = (kind.sockets or 0) * (kind.cores_per_socket or 0)
    per_core = (kind.cpus or 0) // cores if cores and kind.cpus else kind.threads_per_core or 1
    return NodeShape(label, cores, max(1, per_core), kind.sockets or 0)


def shape_of_node(node: Node) -> NodeShape:
    """Return the shape of a node as reported by Slurm; NUMA domains are unknown."""
    cores = node.sockets * node.cores_per_socket
    return NodeShape(f"node {node.name}", cores, max(1, node.cpus // max(1, cores)), node.sockets)


def check_binding(
    job: Job, shapes: Iterable[NodeShape] = (), *, whole: bool = False
) -> list[CheckFinding]:
    """Return warnings about a job's binding that will not work as intended, one of each kind.

    Args:
        job: a complete job.
        shapes: shapes of the nodes that it may get, as far as known.
        whole: whether it gets whole nodes.
    """
    findings = list(_gpus(job))
    if job.binding.policy != "none":
        for shape in [*shapes] or [NodeShape("")]:
            findings += [*_cores(job, shape, whole=whole), *_units(job, shape), *_idle(job, shape)]
    return list({finding.code: finding for finding in reversed(findings)}.values())[::-1]


def _gpus(job: Job) -> Iterator[CheckFinding]:
    resources = job.resources
    gpus, ranks = resources.gpu_count, resources.ranks
    most = gpus * resources.ranks_per_gpu
    if gpus and ranks > most:
        shared = -(-ranks // gpus)
        message = f"{ranks} ranks per node share {counted(gpus, 'GPU')}, up to {shared} on one"
        hint = f"`ranks_per_node: {most}`, for NCCL refuses two ranks on one GPU; "
        hint += f"`ranks_per_gpu: {shared}` where sharing is intended"
        yield warning("binding.gpus", _RANKS, ranks, message, most, hint)


def _cores(job: Job, shape: NodeShape, *, whole: bool) -> Iterator[CheckFinding]:
    resources, workers = job.resources, job.binding.loader_workers
    ranks, per_core = resources.ranks, shape.cpus_per_core
    all_cores = whole and bool(shape.cores)
    cores = shape.cores if all_cores else -(-ranks * resources.cpus_per_rank // per_core)
    if cores >= ranks * (1 + workers):
        return
    where = f" on {shape.name}" if shape.name else ""
    if cores < ranks:
        message = f"{ranks} ranks get {counted(cores, 'core')}{where}, so that some share one"
    else:
        message = f"each rank gets {counted(cores // ranks, 'core')}{where} and needs {1 + workers}"
        message += f": its own and those of {counted(workers, 'loader worker')}"
    if per_core > 1:
        message += f"; Slurm counts {per_core} CPUs for each there"
    limit = (1 + workers) * per_core
    hint = "request fewer ranks or loader workers" if all_cores else f"`cpus_per_rank: {limit}`"
    name = cpus_field(job)
    if cores < ranks or resources.cpus_per_rank > 1:
        field, value = f"resources.{name}", getattr(resources, name)
    else:
        field, value = "binding.loader_workers", workers
    yield warning("binding.cores", field, value, message, limit, hint)


def _units(job: Job, shape: NodeShape) -> Iterator[CheckFinding]:
    """Yield a warning if each rank must have its own socket or domain, and there are too few.

    With GPUs, the policy means the GPU's socket or domain, which ranks usually share.
    """
    policy, ranks = job.binding.policy, job.resources.ranks
    units = {"socket": shape.sockets, "numa": shape.domains}.get(policy, 0)
    if units and ranks > units and not job.resources.gpu_count:
        noun = "socket" if policy == "socket" else "NUMA domain"
        message = f"policy {policy} gives each rank a {noun}; "
        message += f"{shape.name} has {units} for {ranks} ranks"
        hint = f"`ranks_per_node: {units}`, or `binding: spread`"
        yield warning("binding.units", _RANKS, ranks, message, units, hint)


def _idle(job: Job, shape: NodeShape) -> Iterator[CheckFinding]:
    """Yield a warning if a domain's cores stay idle because its GPUs have no rank."""
    gpus, ranks = job.resources.gpu_count, job.resources.ranks
    several = max(shape.domains, shape.sockets) > 1  # a socket has at least one domain
    if job.binding.policy == "gpu-local" and ranks < gpus and several:
        message = f"{counted(ranks, 'rank')} per node for {gpus} GPUs: the cores of NUMA domains "
        message += "that are local only to GPUs without a rank stay idle"
        hint = "`binding: spread` for ranks that drive several GPUs each"
        yield warning("binding.idle", _RANKS, ranks, message, gpus, hint)
