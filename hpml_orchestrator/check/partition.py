"""Whether a partition takes a job: who may use it, and the limits that are its own."""

from __future__ import annotations

from collections.abc import Iterable

from hpml_orchestrator.check.ask import Ask, cpus_needed, memory_needed
from hpml_orchestrator.check.finding import Finding, listed
from hpml_orchestrator.check.policy import Standing
from hpml_orchestrator.scheduler.cluster import Cluster, Partition
from hpml_orchestrator.spec import values
from hpml_orchestrator.spec.values import size_text

__all__ = ["access", "closed", "limits", "state"]

_ROOT = "root"


def state(ask: Ask, partition: Partition, cluster: Cluster) -> list[Finding]:
    """Return what the partition's state says: `DOWN` takes jobs and starts none."""
    says = {
        "DOWN": ("partition.down", "is DOWN: a job would wait until it is up again"),
        "DRAIN": ("partition.drain", "is draining and takes no jobs"),
        "INACTIVE": ("partition.inactive", "is INACTIVE and takes no jobs"),
    }.get(partition.state)
    if says is None:
        return []
    up = [one.name for one in cluster.partitions if one.state == "UP"]
    return [
        Finding(
            "error",
            says[0],
            "resources.partition",
            ask.job.resources.partition,
            f"partition {partition.name} {says[1]}",
            hint=f"partitions that are up: {listed(up)}",
        )
    ]


def closed(ask: Ask, partition: Partition, cluster: Cluster) -> list[Finding]:
    """Return why the user may not even name the partition, be it one of several."""

    def refused(code: str, why: str, hint: str) -> Finding:
        return Finding(
            "error",
            f"partition.{code}",
            "resources.partition",
            ask.job.resources.partition,
            f"partition {partition.name} {why}",
            hint=hint,
        )

    found = []
    is_root = cluster.user == _ROOT
    if partition.root_only and not is_root:
        found.append(refused("root-only", "is for root alone", "name another partition"))
    groups = partition.allow_groups
    if (
        groups is not None
        and not is_root
        and cluster.groups
        and not set(groups) & {*cluster.groups}
    ):
        found.append(
            refused(
                "groups",
                f"is for members of {listed(groups)}",
                f"you are in {listed(cluster.groups)}: name another partition",
            )
        )
    if partition.reservation_only and "reservation" not in ask.options:
        found.append(
            refused(
                "reservation-only",
                "is for jobs in a reservation",
                "`resources.extra: [--reservation=NAME]`, or name another partition",
            )
        )
    return found


def access(ask: Ask, partition: Partition, standing: Standing) -> list[Finding]:
    """Return why the job's account or QOS may not use the partition."""
    found = []
    for field, name, allowed, denied in (
        ("account", standing.account, partition.allow_accounts, partition.deny_accounts),
        ("qos", standing.qos_name, partition.allow_qos, partition.deny_qos),
    ):
        if not name:
            continue
        word = {"account": "account", "qos": "QOS"}[field]
        own = getattr(ask.job.resources, field)
        said = f"{word} {name}" if own else f"{word} {name}, which you have by default"
        can = standing.accounts if field == "account" else standing.allowed_qos
        if allowed is not None and not _among(name, allowed):
            would = [one for one in allowed if _among(one, can)]
            found.append(
                Finding(
                    "error",
                    f"partition.{field}",
                    f"resources.{field}",
                    own,
                    f"partition {partition.name} is not for {said}; it takes {listed(allowed)}",
                    list(allowed),
                    f"`{field}: {would[0]}`" if would else "name another partition",
                )
            )
        elif allowed is None and _among(name, denied):
            would = [one for one in can if not _among(one, denied)]
            found.append(
                Finding(
                    "error",
                    f"partition.{field}",
                    f"resources.{field}",
                    own,
                    f"partition {partition.name} is closed to {said}",
                    hint=f"`{field}: {would[0]}`" if would else "name another partition",
                )
            )
    return found


def limits(ask: Ask, partition: Partition, cluster: Cluster, flags: Iterable[str]) -> list[Finding]:
    """Return which limits of the partition the job is over; `flags` are its QOS's."""
    lifted = set(flags) if cluster.limits.enforce_partition_limits == "NO" else set()
    found = []
    if "PartitionTimeLimit" not in lifted:
        found += _time(ask, partition, cluster)
    found += _nodes(ask, partition, cluster, lifted)
    found += _memory(ask, partition, cluster)
    if ask.tasks > cluster.limits.max_tasks_per_node:
        found.append(
            Finding(
                "error",
                "ranks.tasks-per-node",
                "resources.ranks_per_node",
                ask.tasks,
                f"Slurm takes at most {cluster.limits.max_tasks_per_node} tasks per node here",
                cluster.limits.max_tasks_per_node,
                "ask for fewer ranks per node",
            )
        )
    return found


def _time(ask: Ask, partition: Partition, cluster: Cluster) -> list[Finding]:
    most = partition.max_seconds
    if most is None or ask.minutes * 60 <= most:
        return []
    longer = [
        f"{one.name} ({_time_text(one.max_seconds)})"
        for one in cluster.partitions
        if one.state == "UP"
        and one is not partition
        and (one.max_seconds is None or one.max_seconds >= ask.minutes * 60)
        and not closed(ask, one, cluster)
    ]
    hint = f"ask for at most {values.format_time(most)}"
    if longer:
        hint += f"; partitions that allow more: {listed(longer)}"
    return [
        Finding(
            "error",
            "time.partition",
            "resources.time",
            ask.job.resources.time,
            f"partition {partition.name} takes jobs of at most {values.format_time(most)}",
            values.format_time(most),
            hint,
        )
    ]


def _time_text(seconds: int | None) -> str:
    return "no limit" if seconds is None else values.format_time(seconds)


def _nodes(ask: Ask, partition: Partition, cluster: Cluster, lifted: set[str]) -> list[Finding]:
    there = len(partition.nodes) or partition.total_nodes
    most = there
    if partition.max_nodes is not None and "PartitionMaxNodes" not in lifted:
        most = min(there, partition.max_nodes)

    def finding(code: str, message: str, limit: int, hint: str) -> Finding:
        return Finding("error", code, "resources.nodes", ask.nodes, message, limit, hint)

    if ask.nodes > most:
        has = f"has {there} node{'s' * (there != 1)}"
        says = has if most == there else f"takes jobs of at most {most} node{'s' * (most != 1)}"
        larger = [
            one.name
            for one in cluster.partitions
            if one.state == "UP"
            and min(len(one.nodes), one.max_nodes or len(one.nodes)) >= ask.nodes
        ]
        hint = f"ask for at most {most}" if most else "name another partition"
        if larger:
            hint += f"; partitions that allow {ask.nodes}: {listed(larger)}"
        return [finding("nodes.most", f"partition {partition.name} {says}", most, hint)]
    if ask.nodes < partition.min_nodes and "PartitionMinNodes" not in lifted:
        least = partition.min_nodes
        return [
            finding(
                "nodes.least",
                f"partition {partition.name} takes jobs of at least {least} nodes",
                least,
                f"ask for {least} nodes, or name another partition",
            )
        ]
    return []


def _memory(ask: Ask, partition: Partition, cluster: Cluster) -> list[Finding]:
    own = partition.max_memory_per_node_mib
    most = own
    if not own and not partition.max_memory_per_cpu_mib:
        most = cluster.limits.max_memory_per_node_mib
    wanted = memory_needed(ask, partition, cluster.limits)
    if not most or wanted <= most:
        return []
    where = f"partition {partition.name}" if own else "this cluster"
    return [
        Finding(
            "error",
            "memory.most",
            "resources.memory",
            ask.job.resources.memory,
            f"{where} takes at most {size_text(most)} of memory per node; "
            f"this job asks for {memory_words(ask, wanted)}",
            size_text(most),
            f"ask for at most {size_text(most)} per node"
            + (", what is staged to shm included" if ask.staged_mib else ""),
        )
    ]


def memory_words(ask: Ask, wanted: int) -> str:
    """Return what memory a job asks for, and how that comes about."""
    words = f"{size_text(wanted)} of memory per node"
    if ask.memory_mib is None:
        return f"{words} (the default for {ask.cpus} CPU{'s' * (ask.cpus != 1)})"
    if ask.staged_mib:
        return f"{words} ({size_text(ask.staged_mib)} of it for what is staged to shm)"
    return words


def cpu_words(ask: Ask, partition: Partition, cluster: Cluster) -> str:
    """Return what CPUs a job asks for on each node, and how that comes about."""
    resources = ask.job.resources
    needed = cpus_needed(ask, partition, cluster.limits)
    if needed > ask.cpus:
        return f"{needed} CPUs per node, which its memory makes of {ask.cpus} (MaxMemPerCPU)"
    if resources.ranks > 1:
        return f"{needed} CPUs per node ({resources.ranks} ranks of {resources.cpus_per_rank})"
    return f"{needed} CPU{'s' * (needed != 1)} per node"


def _among(name: str, names: Iterable[str]) -> bool:
    """Whether a name is among others; Slurm's accounting keeps them in lower case."""
    return name.lower() in {one.lower() for one in names}
