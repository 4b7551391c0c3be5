"""Whether a site profile's topology is that of the nodes that Slurm would give a job: pure rules.

Where the launcher binds the ranks, it does so by that file: with a topology of another machine srun
refuses to start ("Unable to satisfy cpu bind request"), or binds ranks to cores of other GPUs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpml_orchestrator.check.finding import Finding, listed
from hpml_orchestrator.errors import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from hpml_orchestrator.scheduler.cluster import Node
    from hpml_orchestrator.topology import Topology

__all__ = ["check_topology"]


def check_topology(
    name: str, topology: Topology, nodes: Iterable[Node], *, strict: bool, origin: str
) -> list[Finding]:
    """Return what of a node type's topology is not as Slurm has its nodes.

    Args:
        name: of the node type.
        topology: what the site profile has of it.
        nodes: that Slurm has of it; of no nodes nothing is said.
        strict: whether all these nodes are of that type; else one that fits is enough.
        origin: the profile that names the topology.
    """
    nodes = list(nodes)
    wrong = {node.name: list(_differences(topology, node)) for node in nodes}
    wrong = {node: told for node, told in wrong.items() if told}
    if not wrong or (not strict and len(wrong) < len(nodes)):
        return []
    first = next(iter(wrong.values()))
    same = [node for node, told in wrong.items() if told == first]
    message = (
        f"in {origin}, which the launcher binds ranks by, is of another machine: "
        f"{'; '.join(f'it has {ours}, and {_named(same)} {theirs}' for ours, theirs in first)}"
    )
    return [
        Finding(
            "error",
            "site.topology",
            f"node_types.{name}.topology",
            None,
            message,
            None,
            f"make it anew on such a node: srun -N1 -n1 --exclusive -w {same[0]} hpml topo --json "
            "> FILE; or let each node plan for itself: `form: node` under `binding`",
        )
    ]


def _differences(topology: Topology, node: Node) -> Iterator[tuple[str, str]]:
    """Yield what the topology has, and the node instead."""
    cpus = len(topology.cpus)
    cores = node.sockets * node.cores_per_socket
    # Where Slurm counts one CPU per core, a job gets all hardware threads of its cores.
    whole = cores * node.threads_per_core if node.cpus == cores else node.cpus
    if cpus not in (node.cpus, whole):
        yield f"{counted(cpus, 'CPU')}", f"{counted(node.cpus, 'CPU')}"
    gpus, there = len(topology.devices), node.gpus()
    if gpus and there and gpus != there:
        yield f"{counted(gpus, 'GPU')}", f"{counted(there, 'GPU')}"


def _named(nodes: Sequence[str]) -> str:
    """Name nodes with their verb."""
    return f"{listed(nodes)} {'has' if len(nodes) == 1 else 'have'}"
