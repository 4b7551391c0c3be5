"""Compare a job with a cluster before it is submitted: pure rules, no command is run.

The rules follow experiments with Slurm 22.05, which `tests/cluster/test_check_against_slurm.py`
repeats. An error means that Slurm refuses the job, or accepts it and never starts it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpml_orchestrator.check import accounting
from hpml_orchestrator.check.accounting import AccountSelection, select_account
from hpml_orchestrator.check.finding import CheckFinding, error, errors_first, warning
from hpml_orchestrator.check.nodes import fit, plain_features, unknown_to_cluster
from hpml_orchestrator.check.request import JobRequest, Placement, job_request, memory_field
from hpml_orchestrator.errors import counted, did_you_mean
from hpml_orchestrator.records.texts import first_few
from hpml_orchestrator.records.units import format_time, size_text

if TYPE_CHECKING:
    from hpml_orchestrator.records.job import Job
    from hpml_orchestrator.scheduler.cluster import Cluster, Node, Partition

_STAGED_TO = "/tmp"  # noqa: S108 - the default directory of `target: local`
_IMPLIED = {
    "gpus.type": "gpus.most",
    "gpus.none": "gpus.most",
    "features.unknown": "features.nodes",
}
"""Findings for the whole cluster, and those of single partitions that they make redundant."""


_CHECKED = ("overcommit", "time-min")  # options of resources.extra
_STATES = {
    "DOWN": ("partition.down", "is DOWN: a job waits until it is up again"),
    "DRAIN": ("partition.drain", "is draining and takes no jobs"),
    "INACTIVE": ("partition.inactive", "is INACTIVE and takes no jobs"),
}


@dataclass(frozen=True)
class ClusterAnswer:
    """A cluster's answer to a job.

    Attributes:
        findings: what prevents the job from running, or may; errors first.
        partitions: names of those that would accept the job.
        shared_limits: whose limits running jobs fill, such as `QOS long`.
        not_checked: requests that were not compared with the cluster, such as `--signal=USR1@60`.
    """

    findings: list[CheckFinding] = field(default_factory=list)
    partitions: tuple[str, ...] = ()
    shared_limits: tuple[str, ...] = ()
    not_checked: tuple[str, ...] = ()


@dataclass(frozen=True)
class _PartitionAnswer:
    """A partition's answer to a job, and its nodes that fit it."""

    partition: Partition
    closed: list[CheckFinding]
    limits: list[CheckFinding]
    accounting: list[CheckFinding]
    others: list[CheckFinding]
    nodes: list[Node]

    @property
    def findings(self) -> list[CheckFinding]:
        return [*self.closed, *self.limits, *self.accounting, *self.others]


def check(job: Job, cluster: Cluster, *, disk_mib: int = 0, shm_mib: int = 0) -> ClusterAnswer:
    """Return everything that prevents a job from running on a cluster, or may.

    `disk_mib` and `shm_mib` are what will be staged to each node's disk and RAM, as far as known.
    """
    if cluster.limits.tmp_fs != _STAGED_TO:
        disk_mib = 0  # TmpDisk is the size of another directory than the one that is staged to
    request = job_request(job, disk_mib=disk_mib, shm_mib=shm_mib)
    selection = select_account(request, cluster)
    chosen, faults = _partitions(request, cluster)
    unknown = unknown_to_cluster(request, cluster)
    findings = [*_array(job, cluster), *selection.findings, *unknown, *faults]
    answers = [_compare(Placement(request, partition, cluster), selection) for partition in chosen]
    # Slurm starts a job in any of its partitions that can run it, so one that fits is enough. What
    # the others lack matters only to a site that enforces the limits of all.
    usable = [answer for answer in answers if not answer.findings]
    if answers:
        findings += _combined(request, answers, usable, cluster, selection)
    # A type of GPU that no node has would also be reported as missing in each partition: once is
    # enough.
    implied = {_IMPLIED.get(finding.code) for finding in findings}
    findings = errors_first(finding for finding in findings if finding.code not in implied)
    names = tuple(answer.partition.name for answer in usable)
    not_checked = [*_not_checked(request)]
    if cluster.partitions and not (chosen or faults):
        not_checked.append("the partition, which this site chooses at submission")
    places = [Placement(request, answer.partition, cluster) for answer in usable[:1]]
    shared = [name for place in places for name in accounting.shared_limits(place, selection)]
    return ClusterAnswer(findings, names, (*shared,), (*not_checked,))


def _not_checked(request: JobRequest) -> Iterator[str]:
    for option in request.job.resources.extra:
        if option.removeprefix("--").partition("=")[0] not in _CHECKED:
            yield option
    constraint = request.job.resources.constraint
    if constraint and not plain_features(request):
        yield f"--constraint={constraint}"


def _array(job: Job, cluster: Cluster) -> Iterator[CheckFinding]:
    if job.array is None:
        return
    size, last = cluster.limits.max_array_size, job.array.max_index
    if size == 0:
        count = len(job.array.indices)
        yield error("array.off", "array", count, "this cluster takes no job arrays", 0)
    elif last >= size:
        message = f"the largest index that this cluster takes is {size - 1} (MaxArraySize {size})"
        yield error("array.index", "array", last, message, size - 1)


def _partitions(
    request: JobRequest, cluster: Cluster
) -> tuple[list[Partition], list[CheckFinding]]:
    names = [partition.name for partition in cluster.partitions]
    plugins = cluster.limits.submit_plugins
    if not names:
        return [], []
    if request.partitions:
        faults = []
        for name in set(request.partitions) - set(names):
            message = f"there is no partition {name}; there are {first_few(names)}"
            hint = did_you_mean(name, names)
            faults.append(request.fault("partition.unknown", "partition", message, names, hint))
        return [found for name in request.partitions if (found := cluster.partition(name))], faults
    if "all_partitions" in plugins:
        return list(cluster.partitions), []
    if cluster.may_rewrite_jobs:
        return [], []  # the site's plugin may choose one; which one is unknown before submission
    if cluster.default_partition is not None:
        return [cluster.default_partition], []
    if request.options.get("reservation"):
        return [], []
    message = f"must be given: this cluster has no default partition; there are {first_few(names)}"
    hint = f"`partition: {names[0]}`"
    return [], [request.fault("partition.none", "partition", message, names, hint)]


def _compare(placement: Placement, selection: AccountSelection) -> _PartitionAnswer:
    nodes, missing = fit(placement) if placement.cluster.nodes else ([], [])
    limits = list(_limit_findings(placement, selection.qos.flags if selection.qos else ()))
    if any(finding.code == "nodes.most" for finding in limits):
        missing = []  # reported once
    return _PartitionAnswer(
        placement.partition,
        closed=list(_closed_findings(placement)),
        limits=[*_access_findings(placement, selection), *limits],
        accounting=list(accounting.accounting_limits(placement, selection, placement.tres(nodes))),
        others=[*_state_findings(placement), *missing],
        nodes=nodes,
    )


def _state_findings(placement: Placement) -> Iterator[CheckFinding]:
    """Yield a finding about the partition's state: `DOWN` takes jobs and starts none."""
    if placement.partition.state in _STATES:
        code, reason = _STATES[placement.partition.state]
        message = f"partition {placement.partition.name} {reason}"
        yield placement.request.fault(code, "partition", message)


def _closed_findings(placement: Placement) -> Iterator[CheckFinding]:
    """Yield why the user may not name the partition at all, not even as one of several."""
    request, partition, cluster = placement.request, placement.partition, placement.cluster
    where, groups, root = f"partition {partition.name}", partition.allow_groups, "root"
    if partition.root_only and cluster.user != root:
        yield request.fault("partition.root-only", "partition", f"{where} is for root alone")
    mine = cluster.groups if cluster.user != root else ()
    if groups is not None and mine and not {*mine} & {*groups}:
        message = f"{where} is for members of {first_few(groups)}; you are in {first_few(mine)}"
        yield request.fault("partition.groups", "partition", message)
    if partition.reservation_only and "reservation" not in request.options:
        message = f"{where} is for jobs in a reservation"
        hint = "`resources.extra: [--reservation=NAME]`"
        yield request.fault("partition.reservation-only", "partition", message, None, hint)


def _access_findings(placement: Placement, selection: AccountSelection) -> Iterator[CheckFinding]:
    partition, resources = placement.partition, placement.request.job.resources
    accounts = (selection.account, partition.allow_accounts, partition.deny_accounts)
    qos = (selection.qos_name, partition.allow_qos, partition.deny_qos)
    rules = {"account": ("account", *accounts), "qos": ("QOS", *qos)}
    for option, (label, name, allowed, denied) in rules.items():
        message = f"partition {partition.name} is not open to {label} {name}"
        if not getattr(resources, option):
            message += ", which you have by default"
        if name and allowed is not None and not _among(name, allowed):
            message += f"; it takes {first_few(allowed)}"
            yield placement.request.fault(f"partition.{option}", option, message, list(allowed))
        elif name and allowed is None and _among(name, denied):
            yield placement.request.fault(f"partition.{option}", option, message)


def _limit_findings(placement: Placement, flags: Iterable[str]) -> Iterator[CheckFinding]:
    """Yield which limits of the partition the job is over; `flags` are those of its QOS."""
    request, partition = placement.request, placement.partition
    limits = placement.cluster.limits
    # A QOS may lift limits of partitions by a flag, but not where the site enforces them at
    # submission.
    lifted = set(flags) if limits.enforce_partition_limits == "NO" else set()
    where = f"partition {partition.name}"
    seconds = partition.max_seconds
    over_time = seconds is not None and request.minutes * 60 > seconds
    if over_time and "PartitionTimeLimit" not in lifted:
        limit = format_time(seconds or 0)
        message = f"{where} takes jobs of at most {limit}"
        yield request.fault("time.partition", "time", message, limit)

    size = most = len(partition.nodes) or partition.total_nodes
    if partition.max_nodes is not None and "PartitionMaxNodes" not in lifted:
        most = min(size, partition.max_nodes)
    least = partition.min_nodes
    if request.nodes > most:
        bound = "has" if most == size else "takes jobs of at most"
        message = f"{where} {bound} {counted(most, 'node')}"
        yield request.fault("nodes.most", "nodes", message, most)
    elif request.nodes < least and "PartitionMinNodes" not in lifted:
        message = f"{where} takes jobs of at least {least} nodes"
        yield request.fault("nodes.least", "nodes", message, least)

    memory = partition.max_memory_per_node_mib
    if not memory and not partition.max_memory_per_cpu_mib:
        memory, where = limits.max_memory_per_node_mib, "this cluster"
    if memory and placement.memory_mib > memory:
        message = f"{where} takes at most {size_text(memory)} of memory per node; "
        message += f"this job asks for {placement.memory_text}"
        yield request.fault("memory.most", memory_field(request.job), message, size_text(memory))

    most = limits.max_tasks_per_node
    if request.tasks > most:
        message = f"this cluster takes at most {most} tasks per node; "
        message += f"this job asks for {request.tasks}"
        yield request.fault("ranks.tasks-per-node", "ranks_per_node", message, most)


def _among(name: str, names: Iterable[str]) -> bool:
    """Return whether a name is among others; Slurm's accounting keeps them in lower case."""
    return name.lower() in {other.lower() for other in names}


def _combined(
    request: JobRequest,
    answers: Sequence[_PartitionAnswer],
    usable: Sequence[_PartitionAnswer],
    cluster: Cluster,
    selection: AccountSelection,
) -> list[CheckFinding]:
    """Return the findings for all partitions together; mostly one that would run it is enough."""
    if not usable:
        return [finding for answer in answers for finding in answer.findings]
    enforced = cluster.limits.enforce_partition_limits
    findings: list[CheckFinding] = []
    for index, answer in enumerate(answers):
        closed = answer.closed
        if enforced == "NO" and index:
            # Observed on a real cluster: Slurm skips a closed partition, unless it is the first
            # one, which blocks the job.
            closed = [dataclasses.replace(finding, level="warning") for finding in closed]
        findings += closed
        if enforced == "ALL":
            findings += answer.limits
    # With DenyOnLimit Slurm refuses a job at submission, by the limits of its first partition.
    first = answers[0]
    own = [qos for qos in cluster.qos or () if qos.name == first.partition.qos]
    if any("DenyOnLimit" in qos.flags for qos in (selection.qos, *own) if qos is not None):
        findings += first.accounting
    return [
        *findings,
        *_nodes_down(request, usable, cluster),
        *_staged_memory(request, usable, cluster),
    ]


def _nodes_down(
    request: JobRequest, usable: Sequence[_PartitionAnswer], cluster: Cluster
) -> Iterator[CheckFinding]:
    """Yield a warning where nodes are out of service, so that the job cannot start now."""
    for answer in usable:
        up = {node.name for node in answer.nodes if node.up}
        if len(up) >= request.nodes:
            return
    best = usable[0]
    down = [node for node in best.nodes if not node.up]
    reasons = [
        f"{node.name} is {'+'.join(sorted(node.states))}{f' ({node.reason})' * bool(node.reason)}"
        for node in down
    ]
    count = len(best.nodes)
    if cluster.nodes:
        limit = count - len(down)
        message = f"the job will wait: {limit} of the {count} nodes of partition "
        message += f"{best.partition.name} that fit it are in service; {first_few(reasons)}"
        yield warning("nodes.down", "resources.nodes", request.nodes, message, limit)


def _staged_memory(
    request: JobRequest, usable: Sequence[_PartitionAnswer], cluster: Cluster
) -> Iterator[CheckFinding]:
    if request.memory_mib is not None:
        return
    placements = [Placement(request, answer.partition, cluster) for answer in usable]
    default = max(placement.memory_mib for placement in placements)
    # Files in /dev/shm are charged to the job. With the default of memory, staging alone would
    # exceed it, and the kernel would kill the ranks.
    if default and request.shm_mib >= default:
        limit = size_text(default)
        message = f"{size_text(request.shm_mib)} are staged to shm, which counts as the job's "
        message += f"memory; a job that asks for none gets {limit} here"
        hint = "set `memory` to what the ranks need: what is staged to shm is added to it"
        yield warning("memory.staged", "resources.memory", None, message, limit, hint)
