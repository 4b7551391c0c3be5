"""Data of jobs on a real Slurm of two nodes: kept, passed on, shared out, and gone when killed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import SlurmCluster
from tests.cluster.hpml_on_slurm import UID, Desk, eventually
from tests.cluster.user import PYTHON

FILES = 60
NODES = {"nodes": 2, "time": "10:00"}
COUNT = ("sh", "-c", "ls {stage.data}/ | wc -l")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small tree to stage, on all nodes."""
    root = tmp_path_factory.mktemp("data")
    for index in range(FILES):
        (root / f"{index:03d}.bin").write_bytes(os.urandom(2000))
    return root


@pytest.fixture
def desk(slurm_cluster: SlurmCluster, tmp_path: Path) -> Iterator[Desk]:
    """An empty desk; what it keeps on the nodes goes with it."""
    made = Desk(slurm_cluster, tmp_path)
    yield made
    made.slurm("srun", "-N2", "rm", "-rf", f"/tmp/hpml-{UID}", f"/dev/shm/hpml-{UID}")
    assert made.staged() == []


def run(desk: Desk, data: Path, *command: str, code: int = 0, **stage: Any) -> tuple[Any, str]:
    """Run a job of two nodes with one entry; returns its record and its output."""
    entry = {"name": "data", "source": str(data), "target": "local", **stage}
    argv = list(command or ["true"])
    ran = desk.run("staging", code=code, command=argv, resources=NODES, stage=[entry])
    return ran, Path(ran["output"]).read_text("utf-8")


def test_the_second_job_finds_what_the_first_kept(desk: Desk, data: Path) -> None:
    """Each node copies once; the next job reports that both had it, and ranks see all of it."""
    first, _ = run(desk, data, keep=True, distribution="shared")
    (stage,) = first["summary"]["stages"]
    assert (stage["nodes"], stage["reused"], stage["kept"]) == (2, 0, 2)
    assert len(stage["digests"]) == 1
    again, log = run(desk, data, *COUNT, keep=True, distribution="shared")
    (stage,) = again["summary"]["stages"]
    assert (stage["reused"], stage["kept"], stage["files"]) == (2, 2, 2 * FILES)
    assert log.splitlines().count(str(FILES)) == 2
    assert "on 2 nodes, there already (" in desk.hpml("show", "last").stdout


def test_ranks_of_a_step_stage_once(desk: Desk, data: Path) -> None:
    """Each rank's shell calls hpml stage, and one copies; later jobs find it until cleaned."""
    hpml = f"{PYTHON} -m hpml_orchestrator.cli"
    stage = f"{hpml} stage {data} --to shm --print reused; true"
    told = [desk.slurm("srun", "-wnode1", "-n3", "sh", "-c", stage) for _ in range(2)]
    assert [sorted(one.split()) for one in told] == [["no", "yes", "yes"], ["yes"] * 3]
    cleaned = desk.slurm("srun", "-wnode1", "sh", "-c", f"{hpml} stage clean --all")
    assert f", copy of {data})" in cleaned


def test_a_chain_brings_it_to_both_nodes(desk: Desk, data: Path) -> None:
    """The first node reads and passes on; digests are equal, and the output names the method."""
    ran, log = run(desk, data, *COUNT, distribution="chain")
    (stage,) = ran["summary"]["stages"]
    assert (stage["nodes"], stage["files"], stage["methods"]) == (2, 2 * FILES, ["chain"])
    assert len(stage["digests"]) == 1
    assert log.count("hpml: data comes to 2 nodes by chain, as requested\n") == 1
    assert log.splitlines().count(str(FILES)) == 2


def test_auto_says_what_it_chose_and_why(desk: Desk, data: Path) -> None:
    """One line in the output of the job, by the rates of the site profile."""
    (desk.directory / "hpml.toml").write_text(
        "[staging]\nmetadata_rate = 10\nlink_rate = '10G'\nshared_rate = '1G'\n"
    )
    ran, log = run(desk, data)
    assert ran["summary"]["stages"][0]["methods"] == ["chain"]
    assert log.count("hpml: data: chain") + log.count("hpml: data: ") >= 1


@pytest.mark.parametrize("distribution", ["shared", "chain"])
def test_a_job_that_ends_while_data_come_leaves_nothing(
    desk: Desk, data: Path, distribution: str
) -> None:
    """Cancelled in the middle of slow staging, on both nodes; the next job works."""
    (desk.directory / "hpml.toml").write_text("[staging]\nopens_per_second = 1\n")
    entry = {"name": "data", "source": str(data), "target": "local", "keep": True}
    stage = [{**entry, "distribution": distribution}]
    command = ["sh", "-c", "echo RANK RAN"]
    submitted = desk.submit("slow", command=command, resources=NODES, stage=stage)
    eventually(lambda: any(".partial-" in path for path in desk.staged()))
    desk.hpml("cancel", submitted["id"])
    done = desk.json("wait", submitted["id"], code=6)
    assert done["state"] == "CANCELLED"
    assert "RANK RAN" not in Path(done["output"]).read_text("utf-8")
    eventually(lambda: not any(".bin" in path for path in desk.staged()))
    (desk.directory / "hpml.toml").unlink()
    assert run(desk, data, distribution=distribution)[0]["state"] == "COMPLETED"


def test_progress_of_long_staging_is_told(desk: Desk, data: Path) -> None:
    """Every ten seconds as an event on each node, and by the first node as a line of the output."""
    (desk.directory / "hpml.toml").write_text("[staging]\nopens_per_second = 4\n")
    ran, log = run(desk, data, distribution="shared")
    attempt = Path(ran["directory"], "attempts", "0")
    for node in ("node1", "node2"):
        text = (attempt / "events" / f"{node}.jsonl").read_text("utf-8")
        assert '"bytes_done"' in text
        assert '"seconds_left"' in text
    told = (attempt / "events" / "node1.jsonl").read_text("utf-8").count('"bytes_done"')
    assert log.count("hpml: staging data: ") == told


def test_results_of_every_attempt_come_back(desk: Desk) -> None:
    """From both nodes, when the job is put back in the queue and when it ends well."""
    script = 'mkdir -p "$0/out"; hostname >"$0/out/$SLURM_PROCID"; '
    script += '[ "$SLURM_RESTART_COUNT" = 1 ] || sleep 600'
    job = desk.submit(
        "results",
        command=["bash", "-c", script, "{local.dir}"],
        resources={**NODES, "ranks_per_node": 1},
        collect=[{"source": "{local.dir}/out", "target": "results"}],
    )
    binding = Path(job["directory"], "attempts", "0", "binding")
    eventually(lambda: len(list(binding.glob("*.jsonl"))) == 2)
    desk.slurm("scontrol", "requeue", job["job_id"])
    ended = desk.json("wait", job["id"])
    assert ended["state"] == "COMPLETED"
    there = desk.directory / "results" / job["id"]
    found = {path.relative_to(there).parts[0]: path.name for path in there.glob("*/out/*")}
    assert found == {"node1": "0", "node2": "1", "node1.attempt1": "0", "node2.attempt1": "1"}
    rows = desk.json("show", job["id"])["summary"]["collected"]
    assert [(row["node"], row["files"], row["problem"]) for row in rows] == [
        ("node1", 1, ""),
        ("node2", 1, ""),
    ]
    assert f"in {there}/NODE of 2 nodes" in desk.hpml("show", job["id"]).stdout
