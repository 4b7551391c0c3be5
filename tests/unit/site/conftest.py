"""Clusters to write profiles of: a small one, a big one of many kinds, and a real one."""

from __future__ import annotations

import pytest

from hpml_orchestrator.scheduler.cluster import Association, Cluster, ClusterLimits, Node, Partition
from hpml_orchestrator.scheduler.slurm.cluster import read_cluster
from hpml_orchestrator.testing.runner import FakeRunner
from tests.unit.site.clusters import A100, IDLE, nodes_of, slurm_answers


@pytest.fixture
def small() -> Cluster:
    """Two GPU nodes, one of which is down, and a node without."""
    nodes = [
        Node("gpu1", IDLE, ("gpu", "all"), 2, 32, 2, 128, 524_288, 1_843_200, A100),
        Node(
            "gpu2",
            frozenset({"DOWN", "NOT_RESPONDING"}),
            ("gpu", "all"),
            *(2, 32, 2, 128, 524_288, 1_843_200, A100),
            reason='fan "3" is\ndead \u00fc',
        ),
        Node("cpu1", IDLE, ("all",), 2, 16, 1, 32, 64_000),
    ]
    return Cluster(
        limits=ClusterLimits(version=(22, 5, 8), cluster="elbe", accounting=True),
        partitions=(
            Partition(
                "gpu",
                nodes=nodes_of(nodes, "gpu"),
                total_nodes=2,
                max_seconds=86_400,
                default_seconds=3_600,
                max_nodes=2,
                max_cpus_per_node=120,
                max_memory_per_node_mib=500_000,
                allow_accounts=("physics",),
                allow_qos=("normal", "long"),
            ),
            Partition(
                "all", state="DRAIN", nodes=nodes_of(nodes, "all"), total_nodes=3, exclusive=True
            ),
        ),
        nodes=tuple(nodes),
        user="ada",
        associations=(Association("physics"),),
    )


@pytest.fixture
def captured() -> Cluster:
    """A real cluster of Slurm 22.05.8."""
    return read_cluster(FakeRunner(slurm_answers()), user="ada", groups=["users"])
