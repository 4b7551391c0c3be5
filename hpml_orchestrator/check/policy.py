"""What accounting allows: accounts, QOS, their limits, and reservations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hpml_orchestrator.check.ask import Ask
from hpml_orchestrator.check.finding import Finding, listed
from hpml_orchestrator.errors import did_you_mean
from hpml_orchestrator.scheduler.cluster import Association, Cluster, Partition, Qos
from hpml_orchestrator.spec import values
from hpml_orchestrator.spec.values import size_text

__all__ = ["Standing", "limits_of_policy", "standing_of"]

_FIELDS = {
    "cpu": ("resources.cpus_per_rank", "CPUs"),
    "mem": ("resources.memory", "of memory"),
    "node": ("resources.nodes", "nodes"),
    "gres/gpu": ("resources.gpus", "GPUs"),
}
_PER_NODE = ("cpu", "mem", "gres/gpu")


@dataclass(frozen=True)
class Standing:
    """Who a job is for.

    Attributes:
        account: that it is charged to; empty where nobody knows.
        association: of the user and that account.
        qos_name: of the job, empty where it has none.
        qos: that QOS.
        accounts, allowed_qos: what the user may choose from.
        findings: what is wrong with the choice.
    """

    account: str = ""
    association: Association | None = None
    qos_name: str = ""
    qos: Qos | None = None
    accounts: tuple[str, ...] = ()
    allowed_qos: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()


def standing_of(ask: Ask, cluster: Cluster, now: float | None = None) -> Standing:
    """Return account and QOS of a job, and what is wrong with them and with its reservation."""
    found = list(_reservation(ask, cluster, now))
    resources = ask.job.resources
    mine = cluster.associations
    if mine is None:
        return Standing(resources.account or "", None, resources.qos or "", findings=(*found,))
    accounts = tuple(dict.fromkeys(one.account for one in mine))
    association = _association(ask, mine)
    account = resources.account or (association.account if association else "")
    if association is None:
        found += _account(ask, cluster, accounts)
    allowed = association.qos if association else ()
    name = resources.qos or _default_qos(association, cluster)
    if resources.qos:
        found += _qos(ask, cluster, association)
    qos = next((one for one in cluster.qos or () if _same(one.name, name)), None)
    return Standing(account, association, name, qos, accounts, allowed, tuple(found))


def limits_of_policy(
    ask: Ask,
    partition: Partition,
    cluster: Cluster,
    standing: Standing,
    tres: Mapping[str, int],
) -> list[Finding]:
    """Return which limits of partition QOS, QOS and association a job is over.

    Of each kind of limit the first that is set counts, in the order that Slurm takes them.

    Args:
        ask: the job's request.
        partition: where it would run.
        cluster: the cluster.
        standing: its account and QOS.
        tres: what the whole job would be charged with.
    """
    if not {"limits", "safe"} & cluster.limits.accounting_enforce:
        return []
    found = []
    holders = list(_holders(partition, cluster, standing))
    for words, holder in holders:
        if holder.max_seconds is None:
            continue
        if ask.minutes * 60 > holder.max_seconds:
            most = values.format_time(holder.max_seconds)
            found.append(
                Finding(
                    "error",
                    _code("time", holder),
                    "resources.time",
                    ask.job.resources.time,
                    f"{words} allows at most {most} per job{_fate(holder)}",
                    most,
                    f"ask for at most {most}{_or_other(holder)}",
                )
            )
        break
    found += _counted(ask, holders, tres)
    return found


def _counted(
    ask: Ask, holders: list[tuple[str, Qos | Association]], tres: Mapping[str, int]
) -> Iterator[Finding]:
    kinds = (
        ("max_tres_per_job", "per job", tres),
        ("max_tres_per_node", "per node", {k: tres[k] // ask.nodes for k in _PER_NODE}),
        ("max_tres_per_user", "for all jobs of a user", tres),
        ("group_tres", "for all its jobs together", tres),
    )
    seen = set()
    for kind, scope, wanted in kinds:
        settled = set()
        for words, holder in holders:
            limits = getattr(holder, kind, {})
            for name, most in limits.items():
                if name in settled:
                    continue
                settled.add(name)
                if wanted.get(name, 0) > most and (name, words) not in seen:
                    seen.add((name, words))
                    yield _over(ask, name, wanted[name], most, scope, words, holder)
    for words, holder in holders:
        for name, least in getattr(holder, "min_tres_per_job", {}).items():
            if tres.get(name, 0) < least:
                yield _over(
                    ask, name, tres.get(name, 0), least, "per job", words, holder, least=True
                )


def _over(
    ask: Ask,
    name: str,
    wanted: int,
    limit: int,
    scope: str,
    words: str,
    holder: Qos | Association,
    *,
    least: bool = False,
) -> Finding:
    base = "gres/gpu" if name.startswith("gres/gpu") else name
    field, noun = _FIELDS.get(base, ("resources", name))
    if base != name:
        noun = f"GPUs of type {name.partition(':')[2]}"

    def amount(number: int) -> str:
        return size_text(number) if name == "mem" else str(number)

    bound = "wants at least" if least else "allows at most"
    here = ask.job.resources
    value = {
        "resources.cpus_per_rank": here.cpus_per_rank,
        "resources.memory": here.memory,
        "resources.nodes": here.nodes,
        "resources.gpus": here.gpus,
    }.get(field)
    order = "at least" if least else "at most"
    return Finding(
        "error",
        _code(name.replace("gres/", ""), holder),
        field,
        value,
        f"{words} {bound} {amount(limit)} {noun} {scope}; this job asks for {amount(wanted)}"
        f"{'' if least else _fate(holder)}",
        amount(limit),
        f"ask for {order} {amount(limit)} {noun} {scope}{_or_other(holder)}",
    )


def _holders(
    partition: Partition, cluster: Cluster, standing: Standing
) -> Iterator[tuple[str, Qos | Association]]:
    """Yield whose limits count, the first one first."""
    own = next((one for one in cluster.qos or () if _same(one.name, partition.qos)), None)
    pair: list[tuple[str, Qos | Association]] = []
    if own is not None:
        pair.append((f"partition {partition.name} (by its QOS {own.name})", own))
    if standing.qos is not None:
        place = 0 if "OverPartQOS" in standing.qos.flags else len(pair)
        pair.insert(place, (f"QOS {standing.qos.name}", standing.qos))
    yield from pair
    if standing.association is not None:
        yield f"account {standing.account}", standing.association


def _code(what: str, holder: Qos | Association) -> str:
    return f"{what}.{'qos' if isinstance(holder, Qos) else 'account'}"


def _fate(holder: Qos | Association) -> str:
    denies = isinstance(holder, Qos) and "DenyOnLimit" in holder.flags
    return "" if denies else "; Slurm would take the job and never start it"


def _or_other(holder: Qos | Association) -> str:
    return f", or name another {'QOS' if isinstance(holder, Qos) else 'account'}"


def _association(ask: Ask, mine: tuple[Association, ...]) -> Association | None:
    """Return the association that a job would use: with its account and, best, its partition."""
    wanted = ask.job.resources.account
    fitting = [
        one
        for one in mine
        if (_same(one.account, wanted) if wanted else one.default)
        and (not one.partition or one.partition in ask.partitions)
    ]
    return next((one for one in fitting if one.partition), fitting[0] if fitting else None)


def _account(ask: Ask, cluster: Cluster, accounts: tuple[str, ...]) -> Iterator[Finding]:
    wanted = ask.job.resources.account
    enforced = bool(cluster.limits.accounting_enforce - {"nojobs", "nosteps", "wckeys"})
    level = "error" if enforced else "warning"
    if wanted:
        near = did_you_mean(wanted, accounts)
        elsewhere = any(_same(one.account, wanted) for one in cluster.associations or ())
        why = "holds for other partitions only" if elsewhere else "is not one of yours"
        yield Finding(
            level,  # type: ignore[arg-type]
            "account.unknown",
            "resources.account",
            wanted,
            f"account {wanted} {why}; yours are {listed(accounts)}",
            list(accounts),
            near or (f"`account: {accounts[0]}`" if accounts else "ask the site for an account"),
        )
    elif enforced and "all_partitions" not in cluster.limits.submit_plugins:
        why = "you have no default account" if accounts else "you have no account on this cluster"
        yield Finding(
            "error",
            "account.none",
            "resources.account",
            None,
            f"{why}, and jobs need one here",
            list(accounts),
            f"`account: {accounts[0]}`" if accounts else "ask the site for an account",
        )


def _default_qos(association: Association | None, cluster: Cluster) -> str:
    if association is None:
        return ""
    if association.default_qos:
        return association.default_qos
    if len(association.qos) == 1:
        return association.qos[0]
    known = {one.name for one in cluster.qos or ()}
    return "normal" if "normal" in known else ""


def _qos(ask: Ask, cluster: Cluster, association: Association | None) -> Iterator[Finding]:
    wanted = ask.job.resources.qos or ""
    known = [one.name for one in cluster.qos or ()]
    allowed = list(association.qos) if association else known
    enforced = "qos" in cluster.limits.accounting_enforce
    if cluster.qos is not None and not any(_same(one, wanted) for one in known):
        yield Finding(
            "error" if enforced else "warning",
            "qos.unknown",
            "resources.qos",
            wanted,
            f"there is no QOS {wanted}; you may use {listed(allowed)}",
            allowed,
            did_you_mean(wanted, allowed) or "leave it out, or name one of these",
        )
    elif association is not None and not any(_same(one, wanted) for one in allowed):
        yield Finding(
            "error" if enforced else "warning",
            "qos.account",
            "resources.qos",
            wanted,
            f"account {association.account} may not use QOS {wanted}; it may use {listed(allowed)}",
            allowed,
            "leave it out, or name one of these",
        )


def _reservation(ask: Ask, cluster: Cluster, now: float | None) -> Iterator[Finding]:
    wanted = ask.options.get("reservation")
    if wanted is None:
        return
    index = next(
        place
        for place, option in enumerate(ask.job.resources.extra)
        if option.startswith("--reservation=")
    )
    field = f"resources.extra.{index}"
    known = {one.name: one for one in cluster.reservations}
    for name in wanted.split(","):
        reservation = known.get(name)
        if reservation is None:
            yield Finding(
                "error",
                "reservation.unknown",
                field,
                name,
                f"there is no reservation {name}; there are {listed(sorted(known))}",
                sorted(known),
                did_you_mean(name, known) or "leave it out",
            )
            continue
        mine = {one.account.lower() for one in cluster.associations or ()}
        for_user = reservation.users is not None and cluster.user in reservation.users
        for_account = reservation.accounts is not None and any(
            one.lower() in mine for one in reservation.accounts
        )
        open_to_all = reservation.users is None and reservation.accounts is None
        if not (for_user or for_account or open_to_all or cluster.user == "root"):
            whose = [*(reservation.users or ()), *(reservation.accounts or ())]
            yield Finding(
                "error",
                "reservation.others",
                field,
                name,
                f"reservation {name} is not yours; it is for {listed(whose)}",
                whose,
                "leave it out",
            )
        elif now is not None and reservation.ended is not None and reservation.ended <= now:
            yield Finding(
                "error",
                "reservation.over",
                field,
                name,
                f"reservation {name} is over",
                hint="leave it out",
            )


def _same(one: str, other: str | None) -> bool:
    return other is not None and one.lower() == other.lower()
