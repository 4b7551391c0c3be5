"""A node that fails under a job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.cluster.hpml_on_slurm import PYTHON, Desk, eventually

if TYPE_CHECKING:
    from tests.cluster.conftest import SlurmCluster

WAITS = (
    "import os, sys, time; path = os.environ['HPML_RUN_DIR'] + '/tried';"
    "sys.exit(0) if os.path.exists(path) else open(path, 'w').close(); time.sleep(600)"
)


@pytest.fixture
def desk(slurm_cluster: SlurmCluster, tmp_path: Path) -> Desk:
    """The desk of an ordinary user."""
    (tmp_path / "data").write_text("data")
    return Desk(slurm_cluster, tmp_path)


def started(desk: Desk) -> dict[str, Any]:
    """Submit a job that waits in its first attempt and ends well in its second."""
    file = desk.job(
        "victim",
        command=[PYTHON, "-c", WAITS],
        resources={"time": "5:00"},
        stage=[{"name": "d", "source": str(desk.directory / "data"), "target": "shm"}],
    )
    job: dict[str, Any] = desk.json("submit", file)
    eventually(Path(job["directory"], "tried").exists)
    return job


def test_a_job_whose_node_fails_starts_again(desk: Desk) -> None:
    """Slurm starts the job again; the first attempt says why it ended."""
    victim = started(desk)
    (node,) = {line.split()[0] for line in desk.slurm("squeue", "-h", "-o", "%N").splitlines()}
    desk.slurm("scontrol", "update", f"nodename={node}", "state=down", "reason=power")
    try:
        done = desk.json("wait", victim["id"])
    finally:
        # a node may have come back by itself
        desk.cluster.run("scontrol", "update", f"nodename={node}", "state=resume", check=False)
    assert (done["state"], done["attempts"]) == ("COMPLETED", 2)
    first, second = desk.json("show", victim["id"])["history"]
    assert (first["nodes"], second["reason"]) == (node, "completed")
    assert "node" in first["reason"].lower()
