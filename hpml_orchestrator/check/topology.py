"""Whether a site profile's topology, by which a launcher binds, is that of Slurm's nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from hpml_orchestrator.check.finding import Finding, error, listed
from hpml_orchestrator.check.request import nodes_of_option
from hpml_orchestrator.errors import InputError, counted
from hpml_orchestrator.scheduler.cluster import Cluster, Node
from hpml_orchestrator.scheduler.nodelist import expand
from hpml_orchestrator.script.directives import as_asked
from hpml_orchestrator.script.static_form import static_form

if TYPE_CHECKING:
    from hpml_orchestrator.spec import Job, ResolvedSite
    from hpml_orchestrator.topology import Topology

__all__ = ["check_topologies"]


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
    nodes = {node.name: node for one in partitions if one for node in cluster.nodes_of(one)}
    wanted = nodes_of_option(job, "--nodelist=") or frozenset(nodes)
    usable = nodes.keys() & (wanted - nodes_of_option(job, "--exclude="))
    for name, kind in kinds.items():
        field = f"node_types.{name}"
        own = _expanded(f"{field}.nodes", kind.nodes) if kind.nodes is not None else None
        candidates = [nodes[node] for node in usable if own is None or node in own]
        differences = {
            node.name: tuple(_differences(topologies[name], node)) for node in candidates
        }
        wrong = sorted(node for node, found in differences.items() if found)
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
