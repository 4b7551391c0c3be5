"""Limits of the accounts above a user's hold for the user's jobs as well."""

from __future__ import annotations

import dataclasses

import pytest

from hpml_orchestrator.errors import SchedulerUnavailable
from hpml_orchestrator.scheduler.cluster import Association, Cluster, Limits
from hpml_orchestrator.scheduler.command import Completed
from hpml_orchestrator.scheduler.slurm.groups import with_group_limits
from hpml_orchestrator.testing import FakeRunner

# As 22.05.8 printed it, with one more level.
TREE = "root|||\ncourse|physics|mem=6000M\nphysics|root|mem=8000M,cpu=4\ndev|root||\n"
CLUSTER = Cluster(
    limits=Limits(cluster="c", accounting=True, accounting_enforce=frozenset({"limits"})),
    associations=(
        Association("course", group_tres={"cpu": 2, "node": 1}),
        Association("dev"),
    ),
)


def test_the_least_of_all_levels_counts() -> None:
    """From the association over its account up to the root."""
    run = FakeRunner({"sacctmgr": [Completed(0, TREE)]})
    course, dev = with_group_limits(CLUSTER, run, env={}).associations or ()
    assert course.group_tres == {"cpu": 2, "node": 1, "mem": 6000}
    assert dev.group_tres == {}
    assert "cluster=c" in run.calls[0].argv


@pytest.mark.parametrize(
    "answer", [Completed(1, "", "sacctmgr: error: no"), SchedulerUnavailable("silent")]
)
def test_where_nobody_answers_the_cluster_stays_as_it_is(
    answer: Completed | SchedulerUnavailable,
) -> None:
    """The check goes on without."""
    assert with_group_limits(CLUSTER, FakeRunner({"sacctmgr": [answer]}), env={}) == CLUSTER


def test_limits_that_are_not_enforced_are_not_asked_for() -> None:
    """Nor those of a user without associations."""
    run = FakeRunner({})
    lax = dataclasses.replace(CLUSTER, limits=Limits(accounting=True))
    assert with_group_limits(lax, run, env={}) is lax
    nobody = dataclasses.replace(CLUSTER, associations=())
    assert with_group_limits(nobody, run, env={}) is nobody
