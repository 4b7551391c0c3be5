"""A live Slurm cluster as `cluster.model.Cluster`: limits, partitions, nodes, accounts.

`scontrol` is asked in its text form, which every version has and which has hardly changed; JSON
came to it with 24.11. The calls run side by side, since each waits 10-20 s for a controller that
stands still.
"""

from __future__ import annotations

import getpass
import grp
import os
import pwd
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from hpml_orchestrator.errors import SchedulerUnavailable
from hpml_orchestrator.scheduler.cluster import Cluster
from hpml_orchestrator.scheduler.command import SubprocessRunner
from hpml_orchestrator.scheduler.slurm.ask import ask, unusable
from hpml_orchestrator.scheduler.slurm.messages import denied
from hpml_orchestrator.scheduler.slurm.records import (
    ASSOCIATION_FIELDS,
    QOS_FIELDS,
    limits_from,
    node_from,
    parse_associations,
    parse_qos,
    partition_from,
    reservation_from,
)
from hpml_orchestrator.scheduler.slurm.scontrol import parse_config, parse_records

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from concurrent.futures import Future

    from hpml_orchestrator.scheduler.cluster import Limits
    from hpml_orchestrator.scheduler.command import Runner

__all__ = ["groups_of", "read_cluster", "user_name"]

_T = TypeVar("_T")
_ACCOUNTING_SECONDS = 25.0  # what can be done without should not be waited for


def read_cluster(
    run: Runner | None = None,
    *,
    env: Mapping[str, str] | None = None,
    user: str | None = None,
    groups: Iterable[str] | None = None,
) -> Cluster:
    """Return the cluster as its controller, and its accounting where there is one, tell it.

    Args:
        run: starts commands.
        env: environment of the commands; the process's own when none is given.
        user: whose associations to read; who runs this when none is given.
        groups: that user's groups; looked up when none are given.

    Returns:
        What the user may see; `hidden` tells what not. `associations` and `qos` are None where
        accounting is off, refuses or does not answer.

    Raises:
        SchedulerUnavailable: the controller gave no usable answer.
    """
    runner = run or SubprocessRunner()
    user = user_name() if user is None else user
    groups = groups_of(user) if groups is None else tuple(groups)

    def show(kind: str) -> str:
        # --all: a partition that is hidden, or closed to the user, is one to tell him of.
        argv = ["scontrol", "--all", "show", kind]
        done = ask(runner, argv, env=env)
        if done.returncode == 0:
            return done.stdout
        if kind != "config" and denied(done.stderr):
            return ""  # a site that shows its users less (PrivateData); newer ones print nothing
        raise unusable("scontrol", done)

    def account(*words: str) -> str | None:
        try:
            argv = ["sacctmgr", "-nP", "show", *words]
            done = ask(runner, argv, env=env, timeout=_ACCOUNTING_SECONDS)
        except SchedulerUnavailable:
            return None
        return done.stdout if done.returncode == 0 else None

    with ThreadPoolExecutor(max_workers=4, thread_name_prefix="hpml-slurm") as pool:
        texts = {
            kind: pool.submit(show, kind) for kind in ("config", "partition", "node", "reservation")
        }
        limits = limits_from(parse_config(texts["config"].result()))
        associations, qos = _accounts(pool, account, limits, user)
        return Cluster(
            limits=limits,
            partitions=tuple(map(partition_from, parse_records(texts["partition"].result()))),
            nodes=tuple(map(node_from, parse_records(texts["node"].result()))),
            reservations=tuple(map(reservation_from, parse_records(texts["reservation"].result()))),
            user=user,
            groups=groups,
            associations=_after(
                associations, lambda text: parse_associations(text, limits.cluster)
            ),
            qos=_after(qos, parse_qos),
        )


def user_name() -> str:
    """Return the name of who runs this; the number where nobody knows a name."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        try:
            return getpass.getuser()
        except (KeyError, OSError):
            return str(os.getuid())


def groups_of(user: str) -> tuple[str, ...]:
    """Return the names of a user's groups, the main one first; numbers that have none are left out.

    Empty for a user whom this machine does not know.
    """
    try:
        entry = pwd.getpwnam(user)
        numbers = os.getgrouplist(user, entry.pw_gid)
    except (KeyError, OSError):
        return ()
    found = []
    for number in dict.fromkeys([entry.pw_gid, *numbers]):
        try:
            found.append(grp.getgrgid(number).gr_name)
        except KeyError:
            continue
    return tuple(found)


def _accounts(
    pool: ThreadPoolExecutor,
    account: Callable[..., str | None],
    limits: Limits,
    user: str,
) -> tuple[Future[str | None] | None, Future[str | None] | None]:
    if not limits.accounting:
        return None, None
    which = [f"name={user}", f"cluster={limits.cluster}", "withassoc"]
    return (
        pool.submit(account, "user", "where", *which, f"format={ASSOCIATION_FIELDS}"),
        pool.submit(account, "qos", f"format={QOS_FIELDS}"),
    )


def _after(answer: Future[str | None] | None, read: Callable[[str], _T]) -> _T | None:
    text = answer.result() if answer else None
    return None if text is None else read(text)
