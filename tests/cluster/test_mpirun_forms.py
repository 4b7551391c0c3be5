"""Open MPI binds by sockets, whatever its version calls them: two nodes of a real Slurm."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING

import pytest

from tests.cluster.conftest import booted
from tests.cluster.hpml_on_slurm import HPML, PYTHON, Desk

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.cluster.conftest import SlurmCluster

# Two ranks on each node of the machine cpu-2s: 2 sockets of 12 cores, in order, without GPUs.
BY_HAND = ("0-11", "12-23")


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Two nodes of two sockets."""
    if not shutil.which("mpirun"):
        pytest.skip("NO MPIRUN TESTS: openmpi-bin is not installed")
    options = ("--nodes", "2", "--machine", "cpu-2s", "--no-accounting")
    with booted(*options, shares=[tmp_path_factory.getbasetemp()]) as cluster:
        yield cluster


@pytest.fixture
def desk(nodes: SlurmCluster, tmp_path: Path) -> Desk:
    """A desk whose site profile knows the nodes."""
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    made = Desk(nodes, tmp_path, allowed if os.geteuid() == 0 else {})
    told = nodes.exec("node1", *HPML, "topo", "--json")
    assert told.returncode == 0, told.stderr
    (tmp_path / "node.json").write_text(told.stdout)
    (tmp_path / "site.toml").write_text(
        "schema_version = 1\n"
        '[partitions.main]\ndefault = true\nnode_types = ["cpu"]\n'
        '[node_types.cpu]\ntopology = "node.json"\n'
    )
    made.more["HPML_SITE"] = str(tmp_path / "site.toml")
    return made


def test_mpirun_binds_by_sockets(desk: Desk) -> None:
    """One rank per socket is started where the plan says, by either version's word for one."""
    made = desk.job(
        "sockets",
        launcher="mpirun",
        command=[PYTHON, "-c", "import time; time.sleep(2)"],
        resources={
            "nodes": 2,
            "ranks_per_node": 2,
            "cpus_per_rank": 12,
            "time": "5",
            "exclusive": True,
        },
        binding={"policy": "socket", "form": "static", "verify": "strict"},
    )
    script = desk.hpml("render", made).stdout
    assert "\nhpml_place=(--map-by ppr:1:socket --bind-to socket)\n" in script
    done = desk.hpml("run", made)
    assert "4 of 4 ranks" in done.stdout + done.stderr
    lines = [
        json.loads(line)
        for path in desk.records.glob("runs/*/attempts/0/binding/*.jsonl")
        for line in path.read_text().splitlines()
    ]
    # mpirun had bound them before hpml-bind did
    assert sorted((one["local_rank"], one["inherited"]) for one in lines) == [
        (0, BY_HAND[0]),
        (0, BY_HAND[0]),
        (1, BY_HAND[1]),
        (1, BY_HAND[1]),
    ]
    logs = desk.hpml("logs", "last").stdout
    assert "deprecated" not in logs.lower()
