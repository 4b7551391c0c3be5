"""The records of a live cluster say what the development cluster is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpml_orchestrator.errors import SchedulerUnavailable
from hpml_orchestrator.scheduler.cluster import Cluster, Gres
from hpml_orchestrator.scheduler.slurm.cluster import read_cluster
from tests.cluster.conftest import SlurmCluster
from tests.cluster.hpml_on_slurm import eventually


def test_a_live_cluster_is_read(slurm_cluster: SlurmCluster) -> None:
    """Two partitions, two nodes of 4 CPUs and 2 GPUs, and root's accounts."""

    def with_all_nodes() -> Cluster | None:  # one that was busy may not have answered in time
        read = read_cluster(env=slurm_cluster.environment, user="root")
        return read if all(node.up for node in read.nodes) else None

    read = eventually(with_all_nodes)
    assert read is not None
    limits = read.limits
    assert (limits.cluster, limits.default_memory_per_cpu_mib) == ("devcluster", 4000)
    assert limits.version >= (22, 5)
    assert limits.accounting
    assert limits.memory_consumable
    main = read.default_partition
    assert main is not None
    assert (main.name, main.default) == ("main", True)
    assert {"main", "low"} <= {partition.name for partition in read.partitions}
    assert main.nodes == slurm_cluster.nodes
    assert main.total_nodes == 2
    assert main.max_seconds is None
    assert [node.name for node in read.nodes_of(main)] == ["node1", "node2"]
    for node in read.nodes:
        assert {"main", "low"} <= set(node.partitions)
        assert (node.cpus, node.memory_mib) == (4, 16_000)
        assert node.gres == (Gres("gpu", "a100", 2),)
    assert read.associations is not None
    accounts = {(association.account, association.default) for association in read.associations}
    assert accounts == {("dev", False), ("root", True)}
    assert "normal" in {qos.name for qos in read.qos or ()}


def test_a_user_without_accounts_has_none(slurm_cluster: SlurmCluster) -> None:
    """Accounting is asked for that user alone."""
    read = read_cluster(env=slurm_cluster.environment, user="daemon")
    assert read.associations == ()
    assert "daemon" in read.groups


def test_a_controller_that_is_not_there(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    """The same configuration with a port on which no process listens."""
    elsewhere = tmp_path / "slurm.conf"
    text = slurm_cluster.slurm_conf.read_text()
    elsewhere.write_text(re.sub(r"SlurmctldPort=\S+", "SlurmctldPort=1", text))
    with pytest.raises(SchedulerUnavailable, match="^scontrol: ") as caught:
        read_cluster(env={**slurm_cluster.environment, "SLURM_CONF": str(elsewhere)})
    assert caught.value.hint
