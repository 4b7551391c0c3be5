"""Group limits that an account has from itself and from the accounts above it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import SchedulerUnavailable
from hpml_orchestrator.scheduler.command import SubprocessRunner
from hpml_orchestrator.scheduler.slurm.ask import ask
from hpml_orchestrator.scheduler.slurm.values import parse_tres

if TYPE_CHECKING:
    from hpml_orchestrator.scheduler.cluster import Cluster
    from hpml_orchestrator.scheduler.command import Runner

__all__ = ["with_group_limits"]

_FIELDS = 3
_TIMEOUT_SECONDS = 10.0


def with_group_limits(
    cluster: Cluster, run: Runner | None = None, *, env: Mapping[str, str] | None = None
) -> Cluster:
    """Return the cluster with `group_tres` of associations as they bind a job.

    sacctmgr shows with a user's association the limits per job that it inherits, but of limits for
    a group only its own; those of the accounts above hold all the same. Where nobody answers, or
    limits are not enforced, the cluster is returned as it is.

    Args:
        cluster: as it was read.
        run: starts commands.
        env: environment of the commands; the process's own when none is given.
    """
    if not cluster.associations or not {"limits", "safe"} & cluster.limits.accounting_enforce:
        return cluster
    which = ["where", f"cluster={cluster.limits.cluster}", "user="]
    command = ["sacctmgr", "-nP", "show", "associations", *which]
    command.append("format=account,parentname,grptres")
    try:
        done = ask(run or SubprocessRunner(), command, env=env, timeout=_TIMEOUT_SECONDS)
    except SchedulerUnavailable:
        return cluster
    if done.returncode != 0:
        return cluster
    above: dict[str, tuple[str, dict[str, int]]] = {}
    for line in done.stdout.splitlines():
        words = [word.strip() for word in line.split("|")]
        if len(words) == _FIELDS:
            above[words[0]] = (words[1], parse_tres(words[2]))
    associations = tuple(
        dataclasses.replace(one, group_tres=_least(one.account, one.group_tres, above))
        for one in cluster.associations
    )
    return dataclasses.replace(cluster, associations=associations)


def _least(
    account: str, own: Mapping[str, int], above: Mapping[str, tuple[str, Mapping[str, int]]]
) -> dict[str, int]:
    """Return the smallest of each limit from an association up to the root."""
    limits = dict(own)
    seen = set()
    while account in above and account not in seen:
        seen.add(account)
        account, theirs = above[account]
        for name, most in theirs.items():
            limits[name] = min(most, limits.get(name, most))
    return limits
