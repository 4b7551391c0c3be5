"""A cluster without accounting: there is no sacct, and hpml does without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.conftest import SlurmCluster
from tests.cluster.hpml_on_slurm import Desk, eventually


@pytest.fixture
def desk(bare_cluster: SlurmCluster, tmp_path: Path) -> Desk:
    """A desk in front of a one-node cluster of its own, without accounting."""
    return Desk(bare_cluster, tmp_path)


def test_jobs_run_and_their_ends_are_known(desk: Desk) -> None:
    """Completed and failed jobs are told apart without sacct, now and when Slurm has forgotten."""
    good = desk.json("run", desk.job("good", command=["true"]))
    bad = desk.json("run", desk.job("bad", command=["sh", "-c", "exit 3"]), code=6)
    assert (good["state"], good["exit_code"]) == ("COMPLETED", 0)
    assert (bad["state"], bad["exit_code"]) == ("FAILED", 3)
    checks = {check["check"]: check["result"] for check in desk.json("doctor")}
    assert (checks["Slurm"], checks["accounting"]) == ("ok", "none")


def test_an_end_that_slurm_has_forgotten_is_in_the_runs_own_record(desk: Desk) -> None:
    """When the controller no longer knows the job, what the job wrote down itself counts."""
    submitted = desk.json("submit", desk.job("forgotten", command=["sh", "-c", "exit 4"]))
    ended = Path(submitted["directory"], "attempts", "0", "ended.json")
    eventually(ended.exists)
    job = Path(submitted["submission"], "job.json")
    record = json.loads(job.read_text())
    job.write_text(json.dumps({**record, "job_id": "4242"}))  # an id the controller never had
    (state,) = desk.json("status", submitted["id"])
    assert (state["state"], state["exit_code"]) == ("FAILED", 4)
    assert state["reason"] == "rank 0 exited with code 4"
    assert state["nodes"] == "node1"
    assert "(slurm) on node1, 1 rank" in desk.hpml("show", submitted["id"]).stdout
    assert "\tnode1\t" in desk.hpml("list").stdout
