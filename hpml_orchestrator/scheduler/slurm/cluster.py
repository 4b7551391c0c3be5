"""Ask a live Slurm cluster for its limits, partitions, nodes and accounts.

`scontrol` prints text, which every version supports and which has hardly changed; JSON needs 24.11
or later. The calls run in parallel, since each waits 10-20 s for a controller that does not answer.
"""

from __future__ import annotations

import grp
import os
import pwd
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import SchedulerUnavailable
from hpml_orchestrator.records.run import user_name
from hpml_orchestrator.scheduler.cluster import Cluster
from hpml_orchestrator.scheduler.command import SubprocessRunner
from hpml_orchestrator.scheduler.slurm.client import ask, slurm_error
from hpml_orchestrator.scheduler.slurm.messages import denied
from hpml_orchestrator.scheduler.slurm.records import (
    ASSOCIATION_FIELDS,
    QOS_FIELDS,
    limits_from,
    node_from,
    parse_associations,
    parse_config,
    parse_qos,
    parse_records,
    parse_rows,
    parse_tres,
    partition_from,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from hpml_orchestrator.scheduler.command import Runner

_GROUP_FIELDS = "account,parentname,grptres,grpjobs"
_ACCOUNTING_SECONDS = 25.0  # optional, so not worth a long wait
_GROUP_LIMITS_SECONDS = 10.0


def read_cluster(
    run: Runner | None = None,
    *,
    env: Mapping[str, str] | None = None,
    user: str | None = None,
    groups: Iterable[str] | None = None,
) -> Cluster:
    """Return the cluster as described by its controller and, if available, its accounting.

    Args:
        run: starts commands.
        env: environment of the commands; default: that of this process.
        user: user whose associations to read; default: the current user.
        groups: that user's groups; looked up by default.

    Returns:
        What the user may see; `hidden` names what the site hides. `associations` and `qos` are
        None if accounting is off, refuses or does not answer.

    Raises:
        SchedulerUnavailable: the controller gave no usable answer.
    """
    runner = run or SubprocessRunner()
    if user is None:
        user = user_name(os.getuid())
        user = os.environ.get("USER", user) if user.isdecimal() else user  # container

    def show(kind: str) -> str:
        # --all: also report partitions that are hidden from the user or closed to them.
        done = ask(runner, ["scontrol", "--all", "show", kind], env=env)
        if done.returncode == 0:
            return done.stdout
        if kind != "config" and denied(done.stderr):
            return ""  # PrivateData; newer versions print nothing and exit with 0
        raise slurm_error("scontrol", done)

    def account(*arguments: str) -> str | None:
        return _account(runner, arguments, env, _ACCOUNTING_SECONDS)

    with ThreadPoolExecutor(max_workers=4, thread_name_prefix="hpml-slurm") as pool:
        texts = {kind: pool.submit(show, kind) for kind in ("config", "partition", "node")}
        limits = limits_from(parse_config(texts["config"].result()))
        associations, qos = None, None
        if limits.accounting:
            which = [f"name={user}", f"cluster={limits.cluster}", "withassoc"]
            users = pool.submit(account, "user", "where", *which, f"format={ASSOCIATION_FIELDS}")
            qos = pool.submit(account, "qos", f"format={QOS_FIELDS}").result()
            associations = users.result()
        return Cluster(
            limits=limits,
            partitions=tuple(map(partition_from, parse_records(texts["partition"].result()))),
            nodes=tuple(map(node_from, parse_records(texts["node"].result()))),
            user=user,
            groups=groups_of(user) if groups is None else tuple(groups),
            associations=(
                None if associations is None else parse_associations(associations, limits.cluster)
            ),
            qos=None if qos is None else parse_qos(qos),
        )


def with_group_limits(
    cluster: Cluster, run: Runner | None = None, *, env: Mapping[str, str] | None = None
) -> Cluster:
    """Return the cluster with the `group_tres` that apply to a job in its associations.

    For a user's association sacctmgr prints inherited limits per job, but only the association's
    own limits for a group, although those of the parent accounts apply as well. If accounting
    does not answer, or limits are not enforced, the cluster is returned unchanged.
    """
    # A limit that the site does not enforce blocks no job; reporting it would be wrong.
    if not cluster.associations or not {"limits", "safe"} & cluster.limits.accounting_enforce:
        return cluster
    which = ["associations", "where", f"cluster={cluster.limits.cluster}", "user="]
    arguments = [*which, f"format={_GROUP_FIELDS}"]
    text = _account(run or SubprocessRunner(), arguments, env, _GROUP_LIMITS_SECONDS)
    parents = {
        row["account"]: (row["parentname"], parse_tres(f"{row['grptres']},job={row['grpjobs']}"))
        for row in parse_rows(text or "", _GROUP_FIELDS)
    }

    def smallest(account: str, own: Mapping[str, int]) -> dict[str, int]:
        """Return the smallest value of each limit on the path from an association to the root."""
        limits = dict(own)
        left = dict(parents)
        # `pop` also ends the loop if accounting reports a cycle.
        while account in left:
            account, tres = left.pop(account)
            limits |= {name: min(most, limits.get(name, most)) for name, most in tres.items()}
        return limits

    associations = tuple(
        replace(association, group_tres=smallest(association.account, association.group_tres))
        for association in cluster.associations
    )
    return replace(cluster, associations=associations)


def _account(
    run: Runner, arguments: Iterable[str], env: Mapping[str, str] | None, timeout: float
) -> str | None:
    """Return the output of `sacctmgr show`; None if accounting refuses or does not answer."""
    try:
        done = ask(run, ["sacctmgr", "-nP", "show", *arguments], env=env, timeout=timeout)
    except SchedulerUnavailable:
        return None
    return done.stdout if done.returncode == 0 else None


def groups_of(user: str) -> tuple[str, ...]:
    """Return the names of a user's groups, the main one first; empty for an unknown user."""
    try:
        main = pwd.getpwnam(user).pw_gid
        numbers = dict.fromkeys([main, *os.getgrouplist(user, main)])
    except (KeyError, OSError):
        return ()
    return tuple(filter(None, map(_group_name, numbers)))


def _group_name(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return ""
