"""`scontrol show node|partition --json` and `sinfo --json` as records of `cluster.model`.

What JSON does not tell stays at its default: whether a partition is the default one is said from
26.05 on only, and whether root or reservations alone may use it nowhere before. `read_cluster`
therefore reads text; this is for answers that are at hand as JSON.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hpml_orchestrator.cluster.model import Node, Partition
from hpml_orchestrator.scheduler.slurm_json import at, load, number, text, whole, words
from hpml_orchestrator.scheduler.slurm_records import expand_known
from hpml_orchestrator.scheduler.slurm_values import node_states, parse_gres

__all__ = ["parse_nodes_json", "parse_partitions_json", "parse_sinfo_json"]

_MINUTE = 60
_SHARED_NODES = ("NO", "USER", "MCS")  # values of 26.05's `exclusive` that leave nodes shared


def parse_nodes_json(said: str) -> tuple[Node, ...]:
    """Return the nodes of `scontrol show node --json`, or of 22.05's `sinfo --json`.

    Raises:
        SchedulerUnavailable: it is no JSON, or holds no nodes.
    """
    return tuple(_node(one) for one in load(said, "nodes") if text(at(one, "name")))


def parse_partitions_json(said: str) -> tuple[Partition, ...]:
    """Return the partitions of `scontrol show partition --json`.

    Raises:
        SchedulerUnavailable: it is no JSON, or holds no partitions.
    """
    return tuple(_partition(one) for one in load(said, "partitions") if text(at(one, "name")))


def parse_sinfo_json(said: str) -> tuple[tuple[Node, ...], tuple[Partition, ...]]:
    """Return nodes and partitions of `sinfo --json`.

    22.05 lists nodes, of which it tells the partitions by name alone. From 24.11 on there are
    groups of like nodes, once per partition; where the nodes of a group differ, each is given
    what the least of them has.

    Raises:
        SchedulerUnavailable: it is no JSON, or holds neither.
    """
    nodes: dict[str, Node] = {}
    partitions: dict[str, Partition] = {}
    for group in load(said, "sinfo", "nodes"):
        if text(at(group, "name")):
            node = _node(group)
            nodes[node.name] = node
            for name in node.partitions:
                known = partitions.get(name) or Partition(name)
                partitions[name] = replace(
                    known,
                    nodes=(*known.nodes, node.name),
                    total_nodes=known.total_nodes + 1,
                    total_cpus=known.total_cpus + node.cpus,
                )
            continue
        partition = _partition(at(group, "partition"))
        if partition.name:
            partitions.setdefault(partition.name, partition)
        for name in words(at(group, "nodes", "nodes")):
            known_node = nodes.get(name)
            if known_node is None:
                nodes[name] = _of_group(name, group, partition.name)
            elif partition.name and partition.name not in known_node.partitions:
                nodes[name] = replace(
                    known_node, partitions=(*known_node.partitions, partition.name)
                )
    return tuple(nodes.values()), tuple(partitions.values())


def _node(one: Any) -> Node:
    states = words(at(one, "state")) + words(at(one, "state_flags"))
    memory = (whole(at(one, "real_memory")) or 1) - (whole(at(one, "specialized_memory")) or 0)
    return Node(
        name=text(at(one, "name")),
        states=node_states("+".join(states)),
        partitions=words(at(one, "partitions")),
        sockets=whole(at(one, "sockets")) or 1,
        cores_per_socket=whole(at(one, "cores")) or 1,
        threads_per_core=whole(at(one, "threads")) or 1,
        cpus=whole(at(one, "effective_cpus")) or whole(at(one, "cpus")) or 1,
        memory_mib=max(memory, 1),
        tmp_disk_mib=whole(at(one, "temporary_disk")) or 0,
        gres=parse_gres(text(at(one, "gres"))),
        features=frozenset(words(at(one, "features"))),
        reason=text(at(one, "reason")),
    )


def _of_group(name: str, group: Any, partition: str) -> Node:
    def least(key: str) -> int:
        return whole(at(group, key, "minimum")) or 0

    special = whole(at(group, "resource_spec", "memory")) or 0
    return Node(
        name=name,
        states=node_states("+".join(words(at(group, "node", "state")))),
        partitions=(partition,) if partition else (),
        sockets=least("sockets") or 1,
        cores_per_socket=least("cores") or 1,
        threads_per_core=least("threads") or 1,
        cpus=least("cpus") or 1,
        memory_mib=max(least("memory") - special, 1),
        tmp_disk_mib=least("disk"),
        gres=parse_gres(text(at(group, "gres", "total"))),
        features=frozenset(words(at(group, "features", "total"))),
        reason=text(at(group, "reason", "description")),
    )


def _partition(one: Any) -> Partition:
    flags = frozenset(words(at(one, "flags")))
    return Partition(
        name=text(at(one, "name")),
        state=(words(at(one, "partition", "state")) or ("UP",))[0].upper(),
        default="DEFAULT" in flags,
        nodes=expand_known(text(at(one, "nodes", "configured"))),
        total_nodes=whole(at(one, "nodes", "total")) or 0,
        total_cpus=whole(at(one, "cpus", "total")) or 0,
        max_seconds=_seconds(at(one, "maximums", "time")),
        default_seconds=_seconds(at(one, "defaults", "time")),
        min_nodes=whole(at(one, "minimums", "nodes")) or 0,
        max_nodes=whole(at(one, "maximums", "nodes")),
        max_cpus_per_node=whole(at(one, "maximums", "cpus_per_node")),
        max_memory_per_node_mib=_memory(one, "maximums", "node"),
        max_memory_per_cpu_mib=_memory(one, "maximums", "cpu"),
        default_memory_per_node_mib=_memory(one, "defaults", "node"),
        default_memory_per_cpu_mib=_memory(one, "defaults", "cpu"),
        allow_accounts=_allowed(at(one, "accounts", "allowed")),
        deny_accounts=words(at(one, "accounts", "deny")),
        allow_qos=_allowed(at(one, "qos", "allowed")),
        deny_qos=words(at(one, "qos", "deny")),
        allow_groups=_allowed(at(one, "groups", "allowed")),
        exclusive=_exclusive(one),
        qos=text(at(one, "qos", "assigned")),
        root_only="ROOT_ONLY" in flags,
        reservation_only=bool(flags & {"REQ_RESV", "RESERVATION_REQUIRED"}),
    )


def _exclusive(one: Any) -> bool:
    said = text(at(one, "partition", "exclusive")).upper()
    shared = text(at(one, "partition", "oversubscribe")).upper()
    if said or shared:
        return bool(said and said not in _SHARED_NODES) or shared == "EXCLUSIVE"
    # Before, the number of jobs that may share: none is "exclusive".
    return whole(at(one, "maximums", "oversubscribe", "jobs")) == 0


def _memory(one: Any, which: str, per: str) -> int | None:
    return whole(at(one, which, f"partition_memory_per_{per}")) or None  # 0 is no limit


def _seconds(value: Any) -> int | None:
    minutes = number(value)
    return None if minutes is None else int(minutes * _MINUTE)


def _allowed(value: Any) -> tuple[str, ...] | None:
    names = words(value)
    return None if not names or names == ("ALL",) else names
