"""Two real clusters and one home: what is a job of one cluster is left alone on the other."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import booted
from tests.cluster.hpml_on_slurm import Desk, eventually

_HERE = "on cluster devcluster; this is other"


@dataclass
class Clusters:
    """One user's desk, seen from a login node of each cluster.

    The run of `here` and the run of `there` have the same job id.
    """

    here: Desk
    there: Desk
    run: Any  # of `here`, as `hpml submit --json` prints it
    other: Any  # of `there`


@pytest.fixture(scope="module")
def other_cluster() -> Iterator[Any]:
    """A cluster of another name, whose job ids begin where those of the first one are."""
    with tempfile.NamedTemporaryFile("w", suffix=".conf") as lines:
        lines.write("ClusterName=other\n")
        lines.flush()
        with booted("--nodes", "1", "--no-accounting", "--slurm-conf", lines.name) as cluster:
            yield cluster


def _wait_for(desk: Desk, job: Any, state: str) -> None:
    eventually(lambda: desk.json("status", job["id"])[0]["state"] == state)


@pytest.fixture
def clusters(desk: Desk, other_cluster: Any) -> Iterator[Clusters]:
    """A long job on each, with one job id."""
    there = replace(desk, cluster=other_cluster)
    run = desk.submit("train", command=["sleep", "600"])
    conf = other_cluster.slurm_conf.read_text().replace("FirstJobId=", "#FirstJobId=")
    other_cluster.reconfigure(f"{conf}FirstJobId={run['job_id']}\n")
    made = Clusters(desk, there, run, there.submit("another", command=["sleep", "600"]))
    assert made.run["job_id"] == made.other["job_id"]
    for one, job in ((desk, made.run), (there, made.other)):
        _wait_for(one, job, "RUNNING")
    try:
        yield made
    finally:
        for one in (desk, there):
            one.slurm("scancel", run["job_id"])


def test_each_cluster_sees_its_own_job_and_names_the_other(clusters: Clusters) -> None:
    """`list` judges no job of the other cluster, and leaves no verdict in its records."""
    clusters.there.slurm("scancel", clusters.other["job_id"])
    _wait_for(clusters.there, clusters.other, "CANCELLED")
    listed = {job["id"]: job for job in clusters.there.json("list")}
    one = listed[clusters.run["id"]]
    assert (one["state"], one["cluster"], one["over"]) == ("UNKNOWN", "devcluster", False)
    assert one["reason"] == _HERE
    assert not Path(clusters.run["submission"], "final.json").exists()
    assert _HERE in clusters.there.hpml("show", clusters.run["id"]).stdout
    (here,) = clusters.here.json("status", clusters.run["id"])
    assert (here["state"], here["cluster"]) == ("RUNNING", "devcluster")


REFUSED = {
    "cancel {run}": 5,
    "cancel train": 5,
    "wait {run}": 2,
    "logs -f {run}": 2,
    "prune {run} --yes": 2,
    "prune --state CANCELLED,FAILED --yes": 0,
    "submit later.yaml --after any:{run}": 2,
    "submit --resume {run}": 0,  # its job is on record: nothing is submitted
}


def test_no_command_touches_a_job_of_the_other_cluster(clusters: Clusters) -> None:
    """It finds neither the run of that name, nor the job with its id here."""
    clusters.there.job("later", command=["true"])
    for command, code in REFUSED.items():
        done = clusters.there.hpml(*command.format(run=clusters.run["id"]).split(), code=code)
        assert (_HERE in done.stdout + done.stderr) >= bool(code), command
        for one in (clusters.here, clusters.there):
            asked = ("squeue", f"--jobs={clusters.run['job_id']}", "--noheader", "--format=%T")
            assert one.slurm(*asked).split() == ["RUNNING"], command
    assert len(clusters.there.json("list")) == 2


def test_a_job_id_names_the_run_of_this_cluster(clusters: Clusters) -> None:
    """Both clusters have that id; the job of the other one runs on."""
    for desk, job in ((clusters.there, clusters.other), (clusters.here, clusters.run)):
        done = desk.hpml("cancel", job["job_id"])
        assert done.stdout == f"{job['id']}: cancelled job {job['job_id']}\n"
        _wait_for(desk, job, "CANCELLED")


def test_a_module_that_names_another_cluster(clusters: Clusters) -> None:
    """Sbatch would submit there, and no other command of hpml would look there."""
    clusters.there.job("later", command=["true"])
    there = replace(clusters.there, more={"SLURM_CLUSTERS": "devcluster"})
    for command, name in ("submit", "SLURM_CLUSTERS"), ("check", "SLURM_CLUSTERS (devcluster)"):
        done = there.hpml(command, "later.yaml", code=2)
        text = f"{name}: jobs go to the cluster of this login node, other"
        assert text in done.stdout + done.stderr


def test_a_sweep_goes_on_where_it_began(desk: Desk, other_cluster: Any) -> None:
    """Elsewhere it is neither continued nor cancelled, and waits for nothing."""
    there = replace(desk, cluster=other_cluster)
    job = desk.job("base", command=["bash", "-c", "sleep 600 # $@", "bash"])
    sweep = ["sweep", "run", str(job), "--grid", "X=1,2", "--repeats", "1", "--detach"]
    planned = desk.hpml(*sweep).stdout.strip()
    for words in ("resume", "tick", "cancel"):
        done = there.hpml("sweep", words, planned, code=2)
        assert _HERE in done.stderr
    desk.hpml("sweep", "cancel", planned)
    desk.hpml("sweep", "tick", planned)
