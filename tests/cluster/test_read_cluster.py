"""The records of a live cluster say what the development cluster is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hpml_orchestrator.errors import SchedulerUnavailable
from hpml_orchestrator.scheduler.cluster import Gres
from hpml_orchestrator.scheduler.slurm.cluster import read_cluster

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cluster.conftest import SlurmCluster


def test_a_live_cluster_is_read(slurm_cluster: SlurmCluster) -> None:
    """Two partitions, two nodes of 4 CPUs and 2 GPUs, and root's accounts."""
    read = read_cluster(env=slurm_cluster.environment, user="root")
    assert read.limits.cluster == "devcluster"
    assert read.limits.version >= (22, 5)
    assert read.limits.accounting
    assert read.limits.memory_consumable
    assert read.limits.default_memory_per_cpu_mib == 4000
    by_name = {one.name: one for one in read.partitions}
    assert {"main", "low"} <= set(by_name)
    main = by_name["main"]
    assert main.default
    assert read.default_partition == main
    assert main.nodes == slurm_cluster.nodes
    assert main.total_nodes == 2
    assert main.max_seconds is None
    assert [node.name for node in read.nodes_of(main)] == ["node1", "node2"]
    for node in read.nodes:
        assert {"main", "low"} <= set(node.partitions)
        assert (node.cpus, node.memory_mib) == (4, 16_000)
        assert node.gres == (Gres("gpu", "a100", 2),)
        assert node.up
    assert read.associations is not None
    assert {(one.account, one.default) for one in read.associations} == {
        ("dev", False),
        ("root", True),
    }
    assert read.qos is not None
    assert "normal" in {one.name for one in read.qos}


def test_a_user_without_accounts_has_none(slurm_cluster: SlurmCluster) -> None:
    """Accounting is asked for that user alone."""
    read = read_cluster(env=slurm_cluster.environment, user="daemon")
    assert read.associations == ()
    assert "daemon" in read.groups


def test_a_controller_that_is_not_there(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    """The same configuration with a port where nobody listens."""
    elsewhere = tmp_path / "slurm.conf"
    lines = slurm_cluster.slurm_conf.read_text().splitlines()
    elsewhere.write_text(
        "\n".join("SlurmctldPort=1" if one.startswith("SlurmctldPort") else one for one in lines)
    )
    with pytest.raises(SchedulerUnavailable, match="^scontrol: ") as caught:
        read_cluster(env={**slurm_cluster.environment, "SLURM_CONF": str(elsewhere)})
    assert caught.value.hint
