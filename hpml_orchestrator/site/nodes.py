"""Group the nodes of a cluster by equal hardware, and give each kind a name."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.records import units
from hpml_orchestrator.scheduler import model

if TYPE_CHECKING:
    from hpml_orchestrator.scheduler.cluster import Cluster, Gres, Node

_MAX_KINDS = 64
"""Above this number of kinds features are ignored, then disks and memory."""

_DIFFERING: dict[str, Callable[[Node], Hashable]] = {
    "features": lambda node: node.features,
    "memory": lambda node: node.memory_mib,
    "local disk": lambda node: node.tmp_disk_mib,
    "CPUs": lambda node: node.cpus,
    "GPUs": lambda node: frozenset(_gpus(node)),
}


@dataclass(frozen=True)
class NodeGroup:
    """Nodes that are alike."""

    name: str  # such as `a100x4`, `cpu`, `a100x4-2`
    nodes: tuple[Node, ...]  # in the cluster's order
    sample: Node  # with what all of them have: the least memory and disk, common features
    uneven: tuple[str, ...] = ()  # what differs within the group all the same, such as `memory`

    @property
    def gpus(self) -> tuple[Gres, ...]:
        """GPUs of each node, by type."""
        return _gpus(self.sample)

    @property
    def partitions(self) -> tuple[str, ...]:
        """Partitions that any of the nodes is in."""
        return tuple(dict.fromkeys(name for node in self.nodes for name in node.partitions))


def group_nodes(cluster: Cluster) -> tuple[NodeGroup, ...]:
    """Return the kinds of nodes, those with GPUs and the larger ones first.

    Nodes are alike if sockets, cores, threads, CPUs, GPUs, memory, local disk and features are
    equal; some of these are ignored if there would be more than 64 kinds.
    """
    comparisons: tuple[Callable[[Node], Hashable], ...] = (
        lambda node: (_hardware(node), node.memory_mib, node.tmp_disk_mib, node.features),
        lambda node: (_hardware(node), node.memory_mib, node.tmp_disk_mib),
        _hardware,
        _gpus,
    )
    # Features may name each rack or switch, so they are the first to be ignored: 1,000 nodes must
    # not become 1,000 kinds.
    for same in comparisons:
        kinds: dict[Hashable, list[Node]] = {}
        for node in cluster.nodes:
            kinds.setdefault(same(node), []).append(node)
        if len(kinds) <= _MAX_KINDS:
            break
    ordered = sorted(kinds.values(), key=lambda nodes: (not _gpus(nodes[0]), -len(nodes)))
    taken: set[str] = set()
    return tuple(_group(nodes, taken) for nodes in ordered)


def fold(names: Iterable[str]) -> str:
    """Return node names in Slurm's compact form.

    >>> fold(["gpu02", "gpu01", "login"])
    'gpu[01-02],login'
    """
    listed = sorted(names)
    try:
        return model.fold(listed)
    except InputError:  # names that no host has
        return ",".join(listed)


def gpu_text(gpus: Sequence[Gres]) -> str:
    """Return GPUs as a job file names them; their number if it cannot name their types."""
    typed = ",".join(f"{gres.kind}:{gres.count}" if gres.kind else f"{gres.count}" for gres in gpus)
    try:
        return str(units.parse_gpus(typed))
    except ValueError:
        return str(sum(gres.count for gres in gpus))


def _gpus(node: Node) -> tuple[Gres, ...]:
    return tuple(sorted(gres for gres in node.gres if gres.name == "gpu" and gres.count))


def _hardware(node: Node) -> tuple[Hashable, ...]:
    return (node.sockets, node.cores_per_socket, node.threads_per_core, node.cpus, _gpus(node))


def _group(nodes: list[Node], taken: set[str]) -> NodeGroup:
    uneven = [name for name, value in _DIFFERING.items() if len(set(map(value, nodes))) > 1]
    sample = min(nodes, key=lambda node: (node.gpus(), node.cpus, node.memory_mib))
    # A profile promises what each node of a kind has, so the least counts.
    sample = replace(
        sample,
        memory_mib=min(node.memory_mib for node in nodes),
        tmp_disk_mib=min(node.tmp_disk_mib for node in nodes),
        cpus=min(node.cpus for node in nodes),
        features=frozenset.intersection(*(node.features for node in nodes)),
    )
    counts = Counter({gres.kind or "gpu": gres.count for gres in _gpus(nodes[0])})
    parts = [
        f"{re.sub(r'[^A-Za-z0-9_]', '', kind) or 'gpu'}x{number}"
        for kind, number in sorted(counts.items())
    ]
    base = "-".join(parts)[:64] or "cpu"
    names = (base if number == 1 else f"{base}-{number}" for number in itertools.count(1))
    name = next(name for name in names if name not in taken)
    taken.add(name)
    return NodeGroup(name, tuple(nodes), sample, tuple(uneven))
