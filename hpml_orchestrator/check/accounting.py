"""Limits of accounting: accounts, QOS, and what they allow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hpml_orchestrator.check.finding import CheckFinding, Level
from hpml_orchestrator.check.request import JobRequest, Placement, cpus_field, memory_field
from hpml_orchestrator.errors import did_you_mean
from hpml_orchestrator.records.texts import first_few
from hpml_orchestrator.records.units import format_time, size_text
from hpml_orchestrator.scheduler.cluster import Association, Cluster, Qos

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
        account: that it is charged to; empty if unknown.
        association: of the user and that account.
        qos_name: of the job; empty if it has none.
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
    """Yield the limits of the partition's QOS, the job's QOS and the association that it exceeds.

    For each kind of limit only the first one that is set applies, in Slurm's order. `tres` is what
    the whole job is charged with.
    """
    request = placement.request
    owners = list(_limit_owners(placement, selection))
    # Slurm takes the first owner that sets a limit and ignores the others, even stricter ones.
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
    """Yield whose limits running jobs fill, so that the job may wait for their end."""
    for name, owner in _limit_owners(placement, selection):
        if owner.max_tres_per_user or owner.group_tres:
            yield name


def _first_limits(
    owners: list[tuple[str, Qos | Association]], attribute: str
) -> dict[str, tuple[str, Qos | Association, int]]:
    """Return for each resource the owner whose limit counts, its name, and the limit."""
    first: dict[str, tuple[str, Qos | Association, int]] = {}
    for name, owner in owners:
        for resource, limit in getattr(owner, attribute, {}).items():
            if resource.partition(":")[0] in _FIELDS:  # billing is not known before submission
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
    """Return the association that a job would use: with its account and, best, its partition."""
    wanted = request.job.resources.account
    partitions, default = request.partitions, cluster.default_partition
    if not partitions and default is not None:  # the association may be of that partition alone
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
        # Slurm fills it in after the site's plugin, which may have
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
