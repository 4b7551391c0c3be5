"""Compare a job with a cluster before submission: pure rules that run no command.

The rules follow experiments with Slurm 22.05, which `tests/cluster/test_check_against_slurm.py`
repeats. An error means that Slurm refuses the job, or accepts it and never starts it.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpml_orchestrator.check.request import (
    CheckFinding,
    JobRequest,
    Level,
    Placement,
    cpus_field,
    error,
    errors_first,
    job_request,
    memory_field,
    warning,
)
from hpml_orchestrator.errors import counted, did_you_mean
from hpml_orchestrator.records.texts import first_few
from hpml_orchestrator.records.units import format_time, size_text
from hpml_orchestrator.scheduler.cluster import Association, Cluster, Node, Qos

if TYPE_CHECKING:
    from hpml_orchestrator.records.job import Job
    from hpml_orchestrator.scheduler.cluster import Partition
    from hpml_orchestrator.site.model import Site

# Limits of accounting: accounts, QOS, and what they allow.

_FIELDS = {
    "cpu": ("cpus_per_rank", "CPUs"),
    "mem": ("memory", "of memory"),
    "node": ("nodes", "nodes"),
    "gres/gpu": ("gpus", "GPUs"),
    "job": ("qos", "running jobs"),
}
_PER_NODE = ("cpu", "mem", "gres/gpu")
_NOT_ABOUT_ACCOUNTS = {"nojobs", "nosteps", "wckeys"}


@dataclass(frozen=True)
class AccountSelection:
    """Account and QOS of a job.

    Attributes:
        account: account that is charged; empty if unknown.
        association: the association of the user and that account.
        qos_name: name of the job's QOS; empty if it has none.
        qos: that QOS.
        findings: what is wrong with the choice.
    """

    account: str = ""
    association: Association | None = None
    qos_name: str = ""
    qos: Qos | None = None
    findings: tuple[CheckFinding, ...] = ()


def select_account(request: JobRequest, cluster: Cluster) -> AccountSelection:
    """Return account and QOS of a job, and what is wrong with them."""
    findings: list[CheckFinding] = []
    resources = request.job.resources
    if cluster.associations is None:  # no slurmdbd, or it did not answer
        return AccountSelection(resources.account or "", None, resources.qos or "")
    association = _association(request, cluster)
    if association is None:
        findings += _account(request, cluster, cluster.associations)
    if resources.qos:
        findings += _qos(resources.qos, cluster, association)
    name = resources.qos or _default_qos(association, cluster)
    account = resources.account or (association.account if association else "")
    return AccountSelection(account, association, name, _qos_named(cluster, name), (*findings,))


def accounting_limits(
    placement: Placement, selection: AccountSelection, tres: Mapping[str, int]
) -> Iterator[CheckFinding]:
    """Yield the limits of the partition's QOS, the job's QOS and the association that are exceeded.

    For each kind of limit only the first one that is set applies, in Slurm's order. `tres` is what
    the whole job is charged with.
    """
    request = placement.request
    owners = list(_limit_owners(placement, selection))
    # Slurm uses the first owner that sets a limit and ignores the others, even stricter ones.
    # Reporting every limit would refuse jobs that run.
    timed = [(name, owner, owner.max_seconds) for name, owner in owners if owner.max_seconds]
    for name, owner, seconds in timed[:1]:
        if request.minutes * 60 > seconds:
            most = format_time(seconds)
            message = f"{name} allows at most {most} per job{_enforcement_note(owner)}"
            yield request.fault(_code("time", owner), "time", message, most)
    per_node = {name: tres[name] // request.nodes for name in _PER_NODE}
    minutes = {kind: amount * request.minutes for kind, amount in tres.items()}
    for attribute, scope, amounts in (
        ("max_tres_per_job", "per job", tres),
        ("max_tres_minutes_per_job", "x minutes per job", minutes),
        ("max_tres_per_node", "per node", per_node),
        ("max_tres_per_user", "for all jobs of a user", tres),
        ("group_tres", "for all its jobs together", tres),
        ("min_tres_per_job", "per job", tres),
    ):
        at_least = attribute.startswith("min")
        for resource, (name, owner, limit) in _first_limits(owners, attribute).items():
            wanted = amounts.get(resource, 0)
            if wanted >= limit if at_least else wanted <= limit:
                continue
            bound = "requires at least" if at_least else "allows at most"
            message = f"{name} {bound} {_amount(resource, limit)} {scope}; "
            message += f"this job asks for {_amount(resource, wanted)}"
            message += " x minutes" * (amounts is minutes)
            message += _enforcement_note(owner) * (not at_least)
            code = _code(resource.removeprefix("gres/"), owner)
            field, _ = _FIELDS[resource.partition(":")[0]]
            job = request.job
            field = {"cpu": cpus_field(job), "mem": memory_field(job)}.get(resource, field)
            if amounts is minutes:
                code, field = _code("minutes", owner), "time"
            elif resource == "job" and not isinstance(owner, Qos):
                field = "account"
            shown = size_text(limit) if resource == "mem" else str(limit)
            yield request.fault(code, field, message, shown)


def shared_limits(placement: Placement, selection: AccountSelection) -> Iterator[str]:
    """Yield the owners of limits that running jobs use up, so that the job may have to wait."""
    for name, owner in _limit_owners(placement, selection):
        if owner.max_tres_per_user or owner.group_tres:
            yield name


def _first_limits(
    owners: list[tuple[str, Qos | Association]], attribute: str
) -> dict[str, tuple[str, Qos | Association, int]]:
    """Return the owner, name and limit that apply to each resource."""
    first: dict[str, tuple[str, Qos | Association, int]] = {}
    for name, owner in owners:
        for resource, limit in getattr(owner, attribute, {}).items():
            if resource.partition(":")[0] in _FIELDS:  # billing is unknown before submission
                first.setdefault(resource, (name, owner, limit))
    return first


def _amount(resource: str, number: int) -> str:
    base, _, kind = resource.partition(":")
    noun = f"GPUs of type {kind}" if kind else _FIELDS[base][1]
    return f"{size_text(number) if resource == 'mem' else number} {noun}"


def _limit_owners(
    placement: Placement, selection: AccountSelection
) -> Iterator[tuple[str, Qos | Association]]:
    # Without enforcement sacctmgr still shows limits, but Slurm ignores them.
    if not {"limits", "safe"} & placement.cluster.limits.accounting_enforce:
        return
    own = _qos_named(placement.cluster, placement.partition.qos)
    owners: list[tuple[str, Qos | Association]] = []
    if own is not None:
        owners.append((f"partition {placement.partition.name} (by its QOS {own.name})", own))
    if selection.qos is not None:
        # The partition's QOS comes before the job's, unless the job's QOS has this flag.
        index = 0 if "OverPartQOS" in selection.qos.flags else len(owners)
        owners.insert(index, (f"QOS {selection.qos.name}", selection.qos))
    yield from owners
    if selection.association is not None:
        yield f"account {selection.account}", selection.association


def _code(limit: str, owner: Qos | Association) -> str:
    return f"{limit}.{'qos' if isinstance(owner, Qos) else 'account'}"


def _enforcement_note(owner: Qos | Association) -> str:
    refused = isinstance(owner, Qos) and "DenyOnLimit" in owner.flags
    return "" if refused else "; Slurm would accept the job and never start it"


def _association(request: JobRequest, cluster: Cluster) -> Association | None:
    """Return a job's association: the one with its account and, if possible, partition."""
    wanted = request.job.resources.account
    partitions, default = request.partitions, cluster.default_partition
    if not partitions and default is not None:  # the association may apply to that partition only
        partitions = (default.name,)
    fitting = [
        association
        for association in cluster.associations or ()
        if (_same(association.account, wanted) if wanted else association.default)
        and association.partition in ("", *partitions)
    ]
    # An association with a partition is more specific than one for all of them, and Slurm prefers
    # it.
    return max(fitting, key=lambda association: bool(association.partition), default=None)


def _account(
    request: JobRequest, cluster: Cluster, mine: tuple[Association, ...]
) -> Iterator[CheckFinding]:
    wanted = request.job.resources.account
    enforced = bool(cluster.limits.accounting_enforce - _NOT_ABOUT_ACCOUNTS)
    accounts = list(dict.fromkeys(association.account for association in mine))
    field = "resources.account"
    level: Level
    if wanted:
        elsewhere = any(_same(account, wanted) for account in accounts)
        reason = "is valid in other partitions only" if elsewhere else "is not one of yours"
        message = f"account {wanted} {reason}; yours are {first_few(accounts)}"
        hint = did_you_mean(wanted, accounts)
        level = "error" if enforced else "warning"
        yield CheckFinding(level, "account.unknown", field, wanted, message, accounts, hint)
    elif enforced and "all_partitions" not in cluster.limits.submit_plugins:
        message = "this cluster requires an account, and you have no "
        message += "default account" if accounts else "account"
        hint = f"`account: {accounts[0]}`" if accounts else "ask the site for an account"
        # Slurm sets it after the site's plugin, which may have changed it
        level = "warning" if cluster.may_rewrite_jobs else "error"
        yield CheckFinding(level, "account.none", field, None, message, accounts, hint)


def _default_qos(association: Association | None, cluster: Cluster) -> str:
    if association is None:
        return ""
    if association.default_qos:
        return association.default_qos
    if len(association.qos) == 1:
        return association.qos[0]
    return "normal" if any(qos.name == "normal" for qos in cluster.qos or ()) else ""


def _qos(wanted: str, cluster: Cluster, association: Association | None) -> Iterator[CheckFinding]:
    known = [qos.name for qos in cluster.qos or ()]
    allowed = list(association.qos) if association else known
    level: Level = "error" if "qos" in cluster.limits.accounting_enforce else "warning"
    field = "resources.qos"
    if cluster.qos is not None and not any(_same(name, wanted) for name in known):
        message = f"there is no QOS {wanted}; you may use {first_few(allowed)}"
        hint = did_you_mean(wanted, allowed)
        yield CheckFinding(level, "qos.unknown", field, wanted, message, allowed, hint)
    elif association is not None and not any(_same(name, wanted) for name in allowed):
        message = f"account {association.account} may not use QOS {wanted}; "
        message += f"it may use {first_few(allowed)}"
        yield CheckFinding(level, "qos.account", field, wanted, message, allowed)


def _qos_named(cluster: Cluster, name: str) -> Qos | None:
    return next((qos for qos in cluster.qos or () if _same(qos.name, name)), None)


def _same(name: str, other: str | None) -> bool:
    return other is not None and name.lower() == other.lower()


# Count the nodes that meet all requests of a job at once.

_FEATURES = re.compile(r"[^\[\]()&|*,]+(?:[&,][^\[\]()&|*,]+)*")


@dataclass(frozen=True)
class _Need:
    """One property that a node must have.

    Attributes:
        code: code of the finding, up to its dot.
        field: field of the job's `resources`.
        text: for messages.
        has: returns how much of it a node has.
        least: how much of it a node must have.
        show: formats an amount for a message.
    """

    code: str
    field: str
    text: str
    has: Callable[[Node], int]
    least: int
    show: Callable[[int], str] = str

    def met(self, node: Node) -> bool:
        return self.has(node) >= self.least


def fit(placement: Placement) -> tuple[list[Node], list[CheckFinding]]:
    """Return the nodes that meet all requests of a job, and findings about unmet requests.

    The state of a node does not matter, but one that is only planned (FUTURE) does not count.
    """
    request, partition = placement.request, placement.partition
    members = placement.cluster.nodes_of(partition)
    # A node that is down counts: the job may wait for it. A FUTURE node exists only in the
    # configuration.
    nodes = [node for node in members if "FUTURE" not in node.states]
    needs = list(_needs(placement))
    fitting = [node for node in nodes if all(need.met(node) for need in needs)]
    if len(fitting) >= request.nodes:
        return fitting, []
    # Report a single need that too few nodes meet. Only if each need alone is met often enough is
    # the combination at fault, and the message must say so.
    short = [need for need in needs if sum(map(need.met, nodes)) < request.nodes]
    if short:
        findings = [_short(placement, need, nodes) for need in short]
    else:
        texts = [need.text for need in needs if need.least > 1 or need.code == "features"]
        message = f"{_only(len(fitting))} of partition {partition.name} with "
        message += f"{first_few(texts)} at once; "
        message += f"{request.nodes} needed"
        findings = [request.fault("nodes.together", "nodes", message, len(fitting))]
    return fitting, findings


def unknown_to_cluster(request: JobRequest, cluster: Cluster) -> Iterator[CheckFinding]:
    """Yield requests that no node of the cluster meets: GPUs, their types, features."""
    if not cluster.nodes:
        return
    yield from _unknown_gpus(request, cluster)
    features = sorted({feature for node in cluster.nodes for feature in node.features})
    for name in plain_features(request):
        if name not in features:
            message = f"no node has the feature {name}; there are {first_few(features)}"
            hint = did_you_mean(name, features)
            yield request.fault("features.unknown", "constraint", message, features, hint)


def plain_features(request: JobRequest) -> list[str]:
    """Return the features of `a` or `a&b`; empty with other operators, which only Slurm reads."""
    constraint = request.job.resources.constraint or ""
    return re.split("[&,]", constraint) if _FEATURES.fullmatch(constraint) else []


def _needs(placement: Placement) -> Iterator[_Need]:
    request, resources = placement.request, placement.request.job.resources
    cpus, most_cpus = placement.cpus, placement.partition.max_cpus_per_node

    def cpus_of(node: Node) -> int:
        if most_cpus is None or most_cpus >= node.cpus:
            return node.cpus
        return 0 if placement.whole_nodes else most_cpus  # never given as a whole node

    if cpus > request.cpus:
        text = f"{cpus} CPUs per node, because of its memory (MaxMemPerCPU)"
        yield _Need("cpus", memory_field(request.job), text, cpus_of, cpus)
    else:
        ranks = f" ({resources.ranks} ranks of {resources.cpus_per_rank})"
        text = f"{counted(cpus, 'CPU')} per node{ranks * (resources.ranks > 1)}"
        yield _Need("cpus", cpus_field(request.job), text, cpus_of, cpus)
    memory, disk = placement.memory_mib, request.disk_mib
    if memory:
        text = placement.memory_text
        field = memory_field(request.job)
        yield _Need("memory", field, text, lambda node: node.memory_mib, memory, size_text)
    if disk:
        text = f"{size_text(disk)} of local disk for staging"
        # 0: the site does not set it
        yield _Need("disk", "stage", text, lambda node: node.tmp_disk_mib or disk, disk, size_text)
    for kind, count in request.gpus:
        text = f"{counted(count, 'GPU')}{f' of type {kind}' if kind else ''} per node"
        yield _Need("gpus", "gpus", text, functools.partial(Node.gpus, kind=kind), count)
    features = frozenset(plain_features(request))
    if features:
        text = f"the features {resources.constraint}"
        yield _Need("features", "constraint", text, lambda node: features <= node.features, 1)


def _short(placement: Placement, need: _Need, nodes: Sequence[Node]) -> CheckFinding:
    request, partition = placement.request, placement.partition
    having = sum(map(need.met, nodes))
    # The n-th largest amount is the most that a job of n nodes can request.
    amounts = sorted(map(need.has, nodes), reverse=True)
    most = amounts[request.nodes - 1] if len(amounts) >= request.nodes else 0
    message = f"this job asks for {need.text}; "
    if having:
        message += f"{_only(having)} of partition {partition.name} with that"
        message += f"; {request.nodes} needed"
    elif most:
        message += f"nodes of partition {partition.name} have at most {need.show(most)}"
    elif need.code == "cpus":
        message += f"partition {partition.name} gives no whole node: "
        message += f"at most {partition.max_cpus_per_node} CPUs of each"
    else:
        message += f"no node of partition {partition.name} has any"
    if need.code == "features":
        return request.fault("features.nodes", need.field, message, having)
    if need.code == "disk":
        value = size_text(request.disk_mib)
        return error("disk.most", "stage", value, message, need.show(most))
    return request.fault(f"{need.code}.most", need.field, message, need.show(most))


def _only(count: int) -> str:
    return f"only {counted(count, 'node')}" if count else "no node"


def _unknown_gpus(request: JobRequest, cluster: Cluster) -> Iterator[CheckFinding]:
    types: dict[str, int] = {}
    for gres in (gres for node in cluster.nodes for gres in node.gres if gres.name == "gpu"):
        types[gres.kind] = max(types.get(gres.kind, 0), gres.count)
    if request.gpus and not types:
        yield request.fault("gpus.none", "gpus", "this cluster has no GPUs that Slurm knows of", 0)
        return
    there = [f"{name}:{count}" for name, count in sorted(types.items()) if name]
    for kind, _ in request.gpus:
        if kind and kind not in types:
            noun = "MIG profile" if "g." in kind else "type of GPU"
            message = f"no node has the {noun} {kind}; nodes have up to "
            message += first_few(there, none="GPUs without a type")
            hint = did_you_mean(kind, [name for name in types if name and "g." not in kind])
            yield request.fault("gpus.type", "gpus", message, sorted(types), hint)


def check_room(job: Job, site: Site | None, *, disk_mib: int) -> Iterator[CheckFinding]:
    """Yield a finding if the known data exceeds the local disks in the site profile."""
    kinds = site.kinds_of(job.resources.partition) if site else {}
    disks = {name: kind.local_disk for name, kind in kinds.items() if kind.local_disk}
    small = sorted(name for name, size in disks.items() if size < disk_mib)
    if small:
        level = error if len(small) == len(kinds) else warning
        need, limit = size_text(disk_mib), size_text(max(disks[name] for name in small))
        message = f"the job stages {need} to the local disk; nodes of type {first_few(small)} have "
        message += f"at most {limit}, by the site profile"
        yield level("stage.local_disk", "stage", need, message, limit)


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
        partitions: names of partitions that would accept the job.
        shared_limits: owners of limits that running jobs use up, such as `QOS long`.
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

    `disk_mib` and `shm_mib` are the data that will be staged to each node, as far as known.
    """
    if cluster.limits.tmp_fs != _STAGED_TO:
        disk_mib = 0  # TmpDisk describes another directory than the staging target
    request = job_request(job, disk_mib=disk_mib, shm_mib=shm_mib)
    selection = select_account(request, cluster)
    chosen, faults = _partitions(request, cluster)
    unknown = unknown_to_cluster(request, cluster)
    findings = [*_array(job, cluster), *selection.findings, *unknown, *faults]
    answers = [_compare(Placement(request, partition, cluster), selection) for partition in chosen]
    # Slurm starts a job in any of its partitions that can run it, so one that fits is enough. What
    # the others lack matters only if the site enforces the limits of all.
    usable = [answer for answer in answers if not answer.findings]
    if answers:
        findings += _combined(request, answers, usable, cluster, selection)
    # A GPU type that no node has would also be reported as missing in each partition: once is
    # enough.
    implied = {_IMPLIED.get(finding.code) for finding in findings}
    findings = errors_first(finding for finding in findings if finding.code not in implied)
    names = tuple(answer.partition.name for answer in usable)
    not_checked = [*_not_checked(request)]
    if cluster.partitions and not (chosen or faults):
        not_checked.append("the partition, which this site chooses at submission")
    places = [Placement(request, answer.partition, cluster) for answer in usable[:1]]
    shared = [name for place in places for name in shared_limits(place, selection)]
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
        return [], []  # the site's plugin may choose one, unknown before submission
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
        accounting=list(accounting_limits(placement, selection, placement.tres(nodes))),
        others=[*_state_findings(placement), *missing],
        nodes=nodes,
    )


def _state_findings(placement: Placement) -> Iterator[CheckFinding]:
    """Yield a finding about the partition's state: `DOWN` accepts jobs but starts none."""
    if placement.partition.state in _STATES:
        code, reason = _STATES[placement.partition.state]
        message = f"partition {placement.partition.name} {reason}"
        yield placement.request.fault(code, "partition", message)


def _closed_findings(placement: Placement) -> Iterator[CheckFinding]:
    """Yield why the user may not request the partition at all, not even as one of several."""
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
    """Yield the limits of the partition that the job exceeds; `flags` are those of its QOS."""
    request, partition = placement.request, placement.partition
    limits = placement.cluster.limits
    # A QOS may lift a partition's limits by a flag, but not if the site enforces them at
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
    """Return whether a name is among others; Slurm's accounting stores them in lower case."""
    return name.lower() in {other.lower() for other in names}


def _combined(
    request: JobRequest,
    answers: Sequence[_PartitionAnswer],
    usable: Sequence[_PartitionAnswer],
    cluster: Cluster,
    selection: AccountSelection,
) -> list[CheckFinding]:
    """Return the findings for all partitions together; usually one that would run it is enough."""
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
    """Yield a warning if nodes are out of service, so that the job cannot start now."""
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
    # Files in /dev/shm are charged to the job. With the default memory, staging alone would exceed
    # it, and the kernel would kill the ranks.
    if default and request.shm_mib >= default:
        limit = size_text(default)
        message = f"{size_text(request.shm_mib)} are staged to shm, which counts as the job's "
        message += f"memory; a job that asks for none gets {limit} here"
        hint = "set `memory` to what the ranks need: what is staged to shm is added to it"
        yield warning("memory.staged", "resources.memory", None, message, limit, hint)
