"""`hpml bench` on two nodes of a real Slurm, as an ordinary user."""

from __future__ import annotations

import json

import pytest

from tests.cluster.hpml_on_slurm import Desk

WITHOUT_GPUS = ("--set", "resources.gpus=0", "--set", "resources.memory=4G")


def test_two_nodes_are_measured(desk: Desk) -> None:
    """Each has its own figures, both share the all-reduce; results are kept by type and node."""
    (desk.directory / "data").mkdir()
    done = desk.hpml(
        "bench", "--nodes", "node[1-2]", "--json", "--shared", "data", *WITHOUT_GPUS, code=None
    )
    found = json.loads(done.stdout)
    outliers = [f for node in found["nodes"] for f in node["figures"] if f["outlier"]]
    failed = [part for node in found["nodes"] for part in node["failed"]]
    unclear = any(node["unclear"] for node in found["nodes"])
    expected = 9 if outliers or failed else 6 if unclear else 0  # 6: a busy machine
    assert done.returncode == expected, done.stderr
    assert [node["node"] for node in found["nodes"]] == ["node1", "node2"]
    assert not failed, done.stdout
    for node in found["nodes"]:
        figures = {figure["name"]: figure for figure in node["figures"]}
        assert {"host.memory.domain0", "shared.read", "shared.opens"} <= set(figures)
        # A virtual node's /tmp and /dev/shm may be in memory, or small.
        left_out = node["not_measured"]
        assert (
            "disk.read" in figures or "in memory" in left_out["disk"] or "free" in left_out["disk"]
        )
        assert "shm.read" in figures or "are free in" in left_out["shm"]
        assert figures["nodes.allreduce"]["ranks"] == 2
        assert figures["shared.read"]["ranks"] == 2
        assert node["cpus"] > 0
        assert node["seconds"] < 120
    assert found["allreduce"]["nodes"]["beta"] > 0
    kept = desk.records / "bench"
    assert found["kept"] == str(kept)
    assert sorted(path.parent.name for path in kept.glob("*/*/*.json")) == ["node1", "node2"]
    assert list((desk.directory / "data").iterdir()) == []
    assert desk.staged() == []


def test_nodes_and_partitions_that_are_not_there(desk: Desk) -> None:
    """The cluster's own names are compared before anything is submitted."""
    for options, message in (
        (("--nodes", "node1,node9"), "--nodes: does not exist in this cluster (got 'node9')"),
        (("--nodes", "3"), "resources.nodes (3): partition main has 2 nodes"),
        (("--set", "resources.partition=man"), "there is no partition man"),
        (("--set", "resources.time=1-0", "--set", "resources.memory=90G"), "resources.memory"),
    ):
        done = desk.hpml("bench", *options, code=2)
        assert message in done.stderr
        assert not list(desk.records.glob("submissions/*"))


@pytest.mark.slow
def test_gpus_that_pytorch_cannot_use(desk: Desk) -> None:
    """The nodes have GPUs by Slurm's account, and PyTorch is of the CPU: status 6, and why."""
    done = desk.hpml("bench", "--set", "resources.memory=4G", code=None)
    assert "not measured: GPUs: this PyTorch has no GPU support" in done.stdout
    assert done.returncode == 6, done.stderr
    assert "it needs PyTorch with GPU support" in done.stderr
