"""Clusters to write profiles of: a small one, a big one of many kinds, and a real one."""

from __future__ import annotations

import pytest

from hpml_orchestrator.scheduler.cluster import Association, Cluster, Gres, Limits, Node, Partition
from hpml_orchestrator.scheduler.slurm.cluster import read_cluster
from hpml_orchestrator.testing import FakeRunner
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
        limits=Limits(version=(22, 5, 8), cluster="elbe", accounting=True),
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
def big() -> Cluster:
    """10,000 nodes of 40 kinds in 60 partitions, one with MIG."""
    nodes = []
    for number in range(10_000):
        kind = number % 40
        gres: tuple[Gres, ...] = ()
        if kind == 39:
            gres = (Gres("gpu", "1g.10gb", 7), Gres("gpu", "a100", 1))
        elif kind % 2:
            gres = (Gres("gpu", f"h{100 + kind}", 4), Gres("shard", "", 16))
        nodes.append(
            Node(
                f"n{number:05}",
                IDLE,
                (f"p{number % 60}",),
                *(2, 32, 1, 64, 256_000 + kind, 0, gres),
                features=frozenset({f"rack{number // 40}", "ib"}),
            )
        )
    return Cluster(
        limits=Limits(version=(24, 11, 5), cluster="mole"),
        partitions=tuple(
            Partition(
                f"p{number}",
                default=number == 0,
                nodes=nodes_of(nodes, f"p{number}"),
                total_nodes=sum(f"p{number}" in node.partitions for node in nodes),
                max_seconds=(number + 1) * 3_600,
                max_nodes=number + 1,
            )
            for number in range(60)
        ),
        nodes=tuple(nodes),
    )


@pytest.fixture
def captured() -> Cluster:
    """A real cluster of Slurm 22.05.8."""
    return read_cluster(FakeRunner(slurm_answers()), user="ada", groups=["users"])
