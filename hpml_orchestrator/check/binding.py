"""Compare a job's binding with the GPUs, cores and domains of the nodes: pure rules.

These are warnings: the job runs anyway, and each node's plan records the binding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml_orchestrator.check.finding import CheckFinding, warning
from hpml_orchestrator.check.request import cpus_field
from hpml_orchestrator.errors import counted
from hpml_orchestrator.script.directives import effective_job
from hpml_orchestrator.topology.sysfs import read_topology_field

if TYPE_CHECKING:
    from hpml_orchestrator.records.job import Job
    from hpml_orchestrator.scheduler.cluster import Node
    from hpml_orchestrator.site.model import NodeType, ResolvedSite
    from hpml_orchestrator.topology.model import Topology

_RANKS = "resources.ranks_per_node"


def kinds_for(job: Job, site: ResolvedSite) -> dict[str, NodeType]:
    """Return the node types that a job may land on by the site's own rules, by name."""
    return site.site.kinds_of(effective_job(job, site.site.directives).resources.partition)


def topologies_of(job: Job, site: ResolvedSite | None) -> dict[str, Topology]:
    """Return the topologies of the node types that a job may land on, by the type's name.

    Raises:
        InputError: a file of the profile does not exist or describes no node; names file and field.
    """
    found = {}
    for name, kind in (kinds_for(job, site) if site else {}).items():
        field = f"node_types.{name}.topology"
        if kind.topology and site:
            found[name] = read_topology_field(kind.topology, field=field, origin=site.origin(field))
    return found


@dataclass(frozen=True)
class NodeShape:
    """The properties of a kind of nodes that matter for binding; 0 if unknown.

    Attributes:
        name: what to call such a node.
        cores: physical cores.
        cpus_per_core: CPUs that Slurm counts for each of them.
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
    """Return the shape of a node as Slurm has it; NUMA domains are unknown."""
    cores = node.sockets * node.cores_per_socket
    return NodeShape(f"node {node.name}", cores, max(1, node.cpus // max(1, cores)), node.sockets)


def check_binding(
    job: Job, shapes: Iterable[NodeShape] = (), *, whole: bool = False
) -> list[CheckFinding]:
    """Return warnings about a job's binding that will not work as intended, one of each kind.

    Args:
        job: a complete job.
        shapes: of the nodes that it may land on, as far as known.
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
    """Yield a warning if there are more ranks than sockets or domains, if each must have one.

    With GPUs the policy means the GPU's socket or domain, and ranks usually share that.
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
