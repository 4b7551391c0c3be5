"""Whether a job's ranks find GPUs, cores and domains as its binding wants them: pure rules.

All of it is warnings: the job runs all the same, and each node's plan says what became of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml_orchestrator.check.finding import Finding
from hpml_orchestrator.errors import counted

if TYPE_CHECKING:
    from hpml_orchestrator.scheduler.cluster import Node
    from hpml_orchestrator.spec import Job
    from hpml_orchestrator.spec.site import NodeType
    from hpml_orchestrator.topology import Topology

__all__ = ["Shape", "check_binding", "shape_of_kind", "shape_of_node"]


@dataclass(frozen=True)
class Shape:
    """What of a kind of nodes matters here; 0 where it is not known.

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


def shape_of_kind(name: str, kind: NodeType, topology: Topology | None) -> Shape:
    """Return the shape of a site profile's node type, by its topology where it has one."""
    words = f"node type {name}"
    if topology is not None:
        cores = len(topology.cores)
        return Shape(
            words,
            cores,
            max(1, (kind.cpus or len(topology.cpus)) // cores),
            len({core.socket for core in topology.cores}) if topology.sockets_told else 0,
            sum(bool(domain.cpus) for domain in topology.domains),
        )
    cores = (kind.sockets or 0) * (kind.cores_per_socket or 0)
    each = (kind.cpus or 0) // cores if cores and kind.cpus else kind.threads_per_core or 1
    return Shape(words, cores, max(1, each), kind.sockets or 0)


def shape_of_node(node: Node) -> Shape:
    """Return the shape of a node as Slurm has it; of NUMA domains it says nothing."""
    cores = node.sockets * node.cores_per_socket
    return Shape(f"node {node.name}", cores, max(1, node.cpus // max(1, cores)), node.sockets)


def check_binding(job: Job, shapes: Iterable[Shape] = (), *, whole: bool = False) -> list[Finding]:
    """Return what of a job's binding will not come out as it is meant.

    Args:
        job: a complete job.
        shapes: of the nodes that it may land on, as far as known.
        whole: whether it gets whole nodes.
    """
    found = list(_gpus(job))
    if job.binding.policy == "none":
        return found
    for shape in [*shapes] or [Shape("")]:
        found += [*_cores(job, shape, whole=whole), *_units(job, shape), *_idle(job, shape)]
    first: dict[str, Finding] = {}
    for one in found:
        first.setdefault(one.code, one)
    return list(first.values())


def _gpus(job: Job) -> Iterator[Finding]:
    """More ranks than GPUs for them."""
    resources = job.resources
    gpus, ranks = resources.gpu_count, resources.ranks
    if gpus and ranks > gpus * resources.ranks_per_gpu:
        each = -(-ranks // gpus)
        yield Finding(
            "warning",
            "binding.gpus",
            "resources.ranks_per_node",
            ranks,
            f"{ranks} ranks per node share {gpus} GPU{'s' * (gpus != 1)}, up to {each} on one",
            gpus * resources.ranks_per_gpu,
            f"`ranks_per_gpu: {each}` says that they shall",
        )


def _cores(job: Job, shape: Shape, *, whole: bool) -> Iterator[Finding]:
    """Fewer cores than the ranks and their loader workers need."""
    resources, workers = job.resources, job.binding.loader_workers
    ranks, each = resources.ranks, shape.cpus_per_core
    cores = -(-ranks * resources.cpus_per_rank // each)
    if whole and shape.cores:
        cores = shape.cores
    if cores >= ranks * (1 + workers):
        return
    where = f" on {shape.name}" * bool(shape.name)
    smt = f"; Slurm counts {each} CPUs for each there" * (each > 1)
    if cores < ranks:
        says = f"{ranks} ranks get {counted(cores, 'core')}{where}, so that some share one{smt}"
    else:
        says = (
            f"each rank gets {counted(cores // ranks, 'core')}{where} and needs {1 + workers}: its "
            f"own and those of {workers} loader worker{'s' * (workers != 1)}{smt}"
        )
    yield Finding(
        "warning",
        "binding.cores",
        "resources.cpus_per_rank",
        resources.cpus_per_rank,
        says,
        (1 + workers) * each,
        "ask for fewer ranks or loader workers"
        if whole and shape.cores
        else f"`cpus_per_rank: {(1 + workers) * each}`",
    )


def _units(job: Job, shape: Shape) -> Iterator[Finding]:
    """Ranks without GPUs that are to have a socket or a domain each, and more of them than those.

    With GPUs it is the GPU's socket or domain that is meant, and sharing that is as usual.
    """
    policy, ranks = job.binding.policy, job.resources.ranks
    there = {"socket": shape.sockets, "numa": shape.domains}.get(policy, 0)
    if job.resources.gpu_count or not there or ranks <= there:
        return
    unit = "socket" if policy == "socket" else "NUMA domain"
    yield Finding(
        "warning",
        "binding.units",
        "resources.ranks_per_node",
        ranks,
        f"policy {policy} gives each rank a {unit}, and {shape.name} has {there} for {ranks} ranks",
        there,
        f"`ranks_per_node: {there}`, or `binding: spread`",
    )


def _idle(job: Job, shape: Shape) -> Iterator[Finding]:
    """Fewer ranks than GPUs: a domain whose GPUs have no rank lends its cores to nobody."""
    gpus, ranks = job.resources.gpu_count, job.resources.ranks
    several = max(shape.domains, shape.sockets) > 1  # a socket has a domain at least
    if job.binding.policy != "gpu-local" or ranks >= gpus or not several:
        return
    yield Finding(
        "warning",
        "binding.idle",
        "resources.ranks_per_node",
        ranks,
        f"{counted(ranks, 'rank')} per node for {gpus} GPUs: a NUMA domain that only GPUs without "
        "a rank are next to keeps its cores idle",
        gpus,
        "`binding: spread` for ranks that drive several GPUs each",
    )
