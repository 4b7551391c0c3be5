"""A cluster without accounting: there is no sacct, and hpml does without."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cluster.conftest import DEVCLUSTER, SlurmCluster, devcluster, require_cluster
from tests.cluster.hpml_on_slurm import Desk, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def desk(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    """A desk in front of a one-node cluster of its own, without accounting."""
    require_cluster()
    box = Path(tempfile.mkdtemp(prefix="hpml-devcluster-bare-", dir="/tmp"))
    try:
        started = devcluster(
            *("up", "--json", "--box", box, "--nodes", "1", "--no-accounting"),
            *("--share", tmp_path_factory.getbasetemp(), "--share", DEVCLUSTER.parents[2]),
        )
        assert started.returncode == 0, started.stderr
        facts = json.loads(started.stdout)
        yield Desk(
            SlurmCluster(
                box=box,
                slurm_conf=Path(facts["slurm_conf"]),
                nodes=tuple(facts["nodes"]),
                visible=tuple(Path(path) for path in facts["visible"]),
                pids=facts["pids"],
            ),
            tmp_path,
        )
    finally:
        devcluster("down", "--purge", "--box", box)
        shutil.rmtree(box, ignore_errors=True)


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
    assert "as the job wrote itself" in state["reason"]
