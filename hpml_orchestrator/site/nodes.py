"""Group the nodes of a cluster by equal hardware, and give each kind a name."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.scheduler import nodelist

if TYPE_CHECKING:
    from hpml_orchestrator.scheduler.cluster import Cluster, Gres, Node

__all__ = ["MAX_KINDS", "NodeGroup", "fold", "group_nodes"]

MAX_KINDS = 64
"""With more kinds than this, features are no longer compared, then disks, then memory."""

_GPU = "gpu"


@dataclass(frozen=True)
class NodeGroup:
    """Nodes that are alike.

    Attributes:
        name: such as `a100x4`, `cpu`, `a100x4-2`.
        nodes: the nodes, in the cluster's order.
        sample: a node with what all of them have: the least memory and disk, common features.
        uneven: what differs within the group all the same, such as `memory`.
    """

    name: str
    nodes: tuple[Node, ...]
    sample: Node
    uneven: tuple[str, ...] = ()

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

    Compared are sockets, cores, threads, CPUs, GPUs, memory, local disk and features, but less
    where that makes more than `MAX_KINDS`.
    """
    for same in _COMPARISONS:
        kinds: dict[Hashable, list[Node]] = {}
        for node in cluster.nodes:
            kinds.setdefault(same(node), []).append(node)
        if len(kinds) <= MAX_KINDS:
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
        return nodelist.fold(listed)
    except InputError:  # names that no host has
        return ",".join(listed)


def _gpus(node: Node) -> tuple[Gres, ...]:
    return tuple(sorted(gres for gres in node.gres if gres.name == _GPU and gres.count))


def _hardware(node: Node) -> tuple[Hashable, ...]:
    return (node.sockets, node.cores_per_socket, node.threads_per_core, node.cpus, _gpus(node))


_COMPARISONS: tuple[Callable[[Node], Hashable], ...] = (
    lambda node: (_hardware(node), node.memory_mib, node.tmp_disk_mib, node.features),
    lambda node: (_hardware(node), node.memory_mib, node.tmp_disk_mib),
    lambda node: (_hardware(node), node.memory_mib),
    _hardware,
    _gpus,
    lambda node: bool(_gpus(node)),
)


def _group(nodes: list[Node], taken: set[str]) -> NodeGroup:
    differing: dict[str, Callable[[Node], Hashable]] = {
        "features": lambda node: node.features,
        "memory": lambda node: node.memory_mib,
        "local disk": lambda node: node.tmp_disk_mib,
        "CPUs": lambda node: node.cpus,
        "GPUs": _gpus,
    }
    uneven = [name for name, value in differing.items() if len(set(map(value, nodes))) > 1]
    sample = min(nodes, key=lambda node: (node.gpus(), node.cpus, node.memory_mib))
    sample = replace(
        sample,
        memory_mib=min(node.memory_mib for node in nodes),
        tmp_disk_mib=min(node.tmp_disk_mib for node in nodes),
        cpus=min(node.cpus for node in nodes),
        features=frozenset.intersection(*(node.features for node in nodes)),
    )
    return NodeGroup(_name(nodes[0], taken), tuple(nodes), sample, tuple(uneven))


def _name(node: Node, taken: set[str]) -> str:
    counts = Counter({gres.kind or _GPU: gres.count for gres in _gpus(node)})
    parts = [
        f"{re.sub(r'[^A-Za-z0-9_]', '', kind) or _GPU}x{number}"
        for kind, number in sorted(counts.items())
    ]
    base = "-".join(parts)[:64] or "cpu"
    names = (base if number == 1 else f"{base}-{number}" for number in itertools.count(1))
    name = next(name for name in names if name not in taken)
    taken.add(name)
    return name
