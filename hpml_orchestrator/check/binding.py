"""Whether a job's ranks find GPUs, cores and domains as its binding wants them: pure rules.

Most of it is warnings: the job runs all the same, and each node's plan records what became of it. A
topology of the site profile that is another machine's is an error where the launcher binds by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml_orchestrator.check.finding import Finding, error, listed, warning
from hpml_orchestrator.check.request import cpus_field, nodes_of_option
from hpml_orchestrator.errors import InputError, counted
from hpml_orchestrator.scheduler.nodelist import expand
from hpml_orchestrator.script.directives import as_asked
from hpml_orchestrator.script.static_form import static_form

if TYPE_CHECKING:
    from hpml_orchestrator.scheduler.cluster import Cluster, Node
    from hpml_orchestrator.spec import Job, NodeType, ResolvedSite
    from hpml_orchestrator.topology import Topology

__all__ = ["Shape", "check_binding", "check_topologies", "shape_of_kind", "shape_of_node"]

_RANKS = "resources.ranks_per_node"


@dataclass(frozen=True)
class Shape:
    """What of a kind of nodes matters for binding; 0 where it is not known.

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
    label = f"node type {name}"
    if topology is not None:
        cores = len(topology.cores)
        return Shape(
            label,
            cores,
            max(1, (kind.cpus or len(topology.cpus)) // cores),
            len({core.socket for core in topology.cores}) if topology.sockets_told else 0,
            sum(bool(domain.cpus) for domain in topology.domains),
        )
    cores = (kind.sockets or 0) * (kind.cores_per_socket or 0)
    per_core = (kind.cpus or 0) // cores if cores and kind.cpus else kind.threads_per_core or 1
    return Shape(label, cores, max(1, per_core), kind.sockets or 0)


def shape_of_node(node: Node) -> Shape:
    """Return the shape of a node as Slurm has it; it knows nothing of NUMA domains."""
    cores = node.sockets * node.cores_per_socket
    return Shape(f"node {node.name}", cores, max(1, node.cpus // max(1, cores)), node.sockets)


def check_binding(job: Job, shapes: Iterable[Shape] = (), *, whole: bool = False) -> list[Finding]:
    """Return what of a job's binding will not come out as intended, each kind of it once.

    Args:
        job: a complete job.
        shapes: of the nodes that it may land on, as far as known.
        whole: whether it gets whole nodes.
    """
    findings = list(_gpus(job))
    if job.binding.policy != "none":
        for shape in [*shapes] or [Shape("")]:
            findings += [*_cores(job, shape, whole=whole), *_units(job, shape), *_idle(job, shape)]
    return list({finding.code: finding for finding in reversed(findings)}.values())[::-1]


def _gpus(job: Job) -> Iterator[Finding]:
    """More ranks than GPUs for them."""
    resources = job.resources
    gpus, ranks = resources.gpu_count, resources.ranks
    most = gpus * resources.ranks_per_gpu
    if gpus and ranks > most:
        shared = -(-ranks // gpus)
        message = f"{ranks} ranks per node share {counted(gpus, 'GPU')}, up to {shared} on one"
        hint = f"`ranks_per_gpu: {shared}` where that is intended"
        yield warning("binding.gpus", _RANKS, ranks, message, most, hint)


def _cores(job: Job, shape: Shape, *, whole: bool) -> Iterator[Finding]:
    """Fewer cores than the ranks and their loader workers need."""
    resources, workers = job.resources, job.binding.loader_workers
    ranks, per_core = resources.ranks, shape.cpus_per_core
    all_cores = whole and bool(shape.cores)
    cores = shape.cores if all_cores else -(-ranks * resources.cpus_per_rank // per_core)
    if cores >= ranks * (1 + workers):
        return
    where = f" on {shape.name}" * bool(shape.name)
    if cores < ranks:
        message = f"{ranks} ranks get {counted(cores, 'core')}{where}, so that some share one"
    else:
        message = f"each rank gets {counted(cores // ranks, 'core')}{where} and needs {1 + workers}"
        message += f": its own and those of {counted(workers, 'loader worker')}"
    message += f"; Slurm counts {per_core} CPUs for each there" * (per_core > 1)
    limit = (1 + workers) * per_core
    hint = "request fewer ranks or loader workers" if all_cores else f"`cpus_per_rank: {limit}`"
    name = cpus_field(job)
    if cores < ranks or resources.cpus_per_rank > 1:
        field, value = f"resources.{name}", getattr(resources, name)
    else:
        field, value = "binding.loader_workers", workers
    yield warning("binding.cores", field, value, message, limit, hint)


def _units(job: Job, shape: Shape) -> Iterator[Finding]:
    """Ranks without GPUs that are to have a socket or a domain each, and more of them than those.

    With GPUs it is the GPU's socket or domain that is meant, and sharing that is as usual.
    """
    policy, ranks = job.binding.policy, job.resources.ranks
    units = {"socket": shape.sockets, "numa": shape.domains}.get(policy, 0)
    if units and ranks > units and not job.resources.gpu_count:
        noun = "socket" if policy == "socket" else "NUMA domain"
        message = f"policy {policy} gives each rank a {noun}; "
        message += f"{shape.name} has {units} for {ranks} ranks"
        hint = f"`ranks_per_node: {units}`, or `binding: spread`"
        yield warning("binding.units", _RANKS, ranks, message, units, hint)


def _idle(job: Job, shape: Shape) -> Iterator[Finding]:
    """Fewer ranks than GPUs: a domain whose GPUs have no rank keeps its cores idle."""
    gpus, ranks = job.resources.gpu_count, job.resources.ranks
    several = max(shape.domains, shape.sockets) > 1  # a socket has at least one domain
    if job.binding.policy == "gpu-local" and ranks < gpus and several:
        message = f"{counted(ranks, 'rank')} per node for {gpus} GPUs: the cores of NUMA domains "
        message += "that are local only to GPUs without a rank stay idle"
        hint = "`binding: spread` for ranks that drive several GPUs each"
        yield warning("binding.idle", _RANKS, ranks, message, gpus, hint)


def check_topologies(
    job: Job, cluster: Cluster, profile: ResolvedSite, topologies: Mapping[str, Topology]
) -> Iterator[Finding]:
    """Yield each node type of the profile whose topology is of another machine.

    Raises:
        InputError: a node list is not valid, or the form of binding that the job wants cannot be.
    """
    if not static_form(job, profile, topologies).name:
        return
    job, site = as_asked(job, profile.site.directives), profile.site
    kinds = site.kinds_of(job.resources.partition)
    partitions = map(cluster.partition, site.partitions_of(job.resources.partition))
    nodes = {node.name: node for part in partitions if part for node in cluster.nodes_of(part)}
    wanted = nodes_of_option(job, "--nodelist=") or frozenset(nodes)
    usable = nodes.keys() & (wanted - nodes_of_option(job, "--exclude="))
    for name, kind in kinds.items():
        field = f"node_types.{name}"
        own = _expanded(f"{field}.nodes", kind.nodes) if kind.nodes is not None else None
        candidates = [nodes[node] for node in usable if own is None or node in own]
        differences = {
            node.name: tuple(_differences(topologies[name], node)) for node in candidates
        }
        wrong = sorted(node for node, differing in differences.items() if differing)
        # Without a list of its nodes, others of the partition may be of another kind.
        certain = own is not None or (len(kinds) == 1 and not job.resources.constraint)
        if not wrong or (not certain and len(wrong) < len(candidates)):
            continue
        same = [node for node in wrong if differences[node] == differences[wrong[0]]]
        verb = "has" if len(same) == 1 else "have"
        facts = "; ".join(
            f"it has {ours}, and {listed(same)} {verb} {theirs}"
            for ours, theirs in differences[wrong[0]]
        )
        origin = f"{kind.topology} (named in {profile.origin(f'{field}.topology')})"
        message = f"in {origin}, which the launcher binds ranks by, is of another machine: {facts}"
        hint = f"make it anew on such a node: srun -N1 -n1 --exclusive -w {same[0]} "
        hint += "hpml topo --json > FILE; or let each node plan for itself: `form: node` under "
        hint += "`binding`"
        yield error("site.topology", f"{field}.topology", None, message, hint=hint)


def _differences(topology: Topology, node: Node) -> Iterator[tuple[str, str]]:
    """Yield what the topology has, and the node instead."""
    cpus = len(topology.cpus)
    cores = node.sockets * node.cores_per_socket
    # Where Slurm counts one CPU per core, a job gets all hardware threads of its cores.
    whole = cores * node.threads_per_core if node.cpus == cores else node.cpus
    if cpus not in (node.cpus, whole):
        yield counted(cpus, "CPU"), counted(node.cpus, "CPU")
    gpus, there = len(topology.devices), node.gpus()
    if gpus and there and gpus != there:
        yield counted(gpus, "GPU"), counted(there, "GPU")


def _expanded(field: str, text: str) -> frozenset[str]:
    try:
        return frozenset(expand(text))
    except InputError as fault:
        raise InputError(fault.message, field=field, value=text, hint=fault.hint) from fault
