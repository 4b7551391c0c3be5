"""The main job on a real Slurm of two nodes: trained, recorded, cleaned up, however it ends."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import SlurmCluster
from tests.cluster.hpml_on_slurm import PYTHON, ROOT, Desk, eventually

TWO_BY_TWO = {"nodes": 2, "ranks_per_node": 2, "time": "10:00", "memory": "2G"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small tree of 200 files to stage."""
    root = tmp_path_factory.mktemp("data")
    for index in range(200):
        folder = root / f"class{index % 10}"
        folder.mkdir(exist_ok=True)
        (folder / f"{index}.bin").write_bytes(os.urandom(1000))
    return root


def stage_both(data: Path) -> list[dict[str, str]]:
    """The tree on both of a node's file systems."""
    return [
        {"name": "ram", "source": str(data), "target": "shm"},
        {"name": "disk", "source": str(data), "target": "local"},
    ]


@pytest.fixture(scope="module")
def at_its_limit(
    slurm_cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory, data: Path
) -> Iterator[tuple[Desk, str]]:
    """A job of ten minutes with a limit of one minute, started before everything else here.

    Slurm's limits are whole minutes: it runs during the other tests, which need not wait for it.
    """
    desk = Desk(slurm_cluster, tmp_path_factory.mktemp("limit"))
    short = {"nodes": 2, "time": 1}
    job = desk.submit("limit", command=["sleep", "600"], resources=short, stage=stage_both(data))
    yield desk, job["id"]
    desk.hpml("cancel", job["id"])


def test_the_digits_train_on_two_nodes_and_leave_nothing_behind(
    at_its_limit: tuple[Desk, str], desk: Desk, tmp_path: Path
) -> None:
    """`hpml run` trains on 2 nodes x 2 ranks; script, records, accounting and nodes agree."""
    jobs = ROOT / "training_jobs"
    for file in (*jobs.glob("*.py"), jobs / "digits.yaml"):
        shutil.copy(file, tmp_path)
    desk.call(PYTHON, "make_digits.py", "digits")
    sets = [f"--set=resources.{key}={value}" for key, value in TWO_BY_TWO.items()]
    sets.append(f"--set=environment.python={PYTHON}")
    rendered = desk.hpml("render", *sets, "digits.yaml").stdout

    ran = desk.json("run", *sets, "digits.yaml")

    assert ran["state"] == "COMPLETED"
    result = ran["summary"]["result"]
    assert result["test_accuracy"] >= 0.95
    assert result["world_size"] == 4
    assert ran["summary"]["ranks"] == 4
    assert ran["summary"]["staged_files"] == 2 * 1797
    assert ran["summary"]["staged_bytes"] > 2 * 1797 * 60
    phases = "queue start-up staging launch rendezvous preparation warm-up training end".split()
    assert [phase["name"] for phase in ran["summary"]["phases"]] == phases
    asked = ("sacct", "-X", "-n", "-P", "-o", "State,ExitCode", "-j", ran["job_id"])
    accounted = eventually(lambda: desk.slurm(*asked).strip())
    assert accounted == "COMPLETED|0:0"
    stored = Path(ran["submission"], "job.sh").read_text()
    assert rendered == stored == desk.slurm("scontrol", "write", "batch_script", ran["job_id"], "-")
    ranks = [(rank["rank"], rank["node"]) for rank in desk.json("show", ran["id"])["bindings"]]
    assert ranks == [(0, "node1"), (1, "node1"), (2, "node2"), (3, "node2")]
    assert "0.95 on the validation part reached" in desk.hpml("show", "last").stdout
    assert desk.staged(ran["job_id"]) == []


def test_ranks_started_by_srun_see_their_data_and_their_places(desk: Desk, data: Path) -> None:
    """With the srun launcher every rank has torchrun's variables, the staged data and one port."""
    program = (
        "import json, os; e = os.environ; print('SEEN ' + json.dumps([e['RANK'], e['LOCAL_RANK'],"
        " e['WORLD_SIZE'], e['LOCAL_WORLD_SIZE'], e['MASTER_ADDR'], e['MASTER_PORT'],"
        " sum(len(f) for _, _, f in os.walk(e['HPML_STAGE_RAM'])), os.uname().nodename]))"
    )
    command = [PYTHON, "-c", program]
    ran = desk.run("places", command=command, resources=TWO_BY_TWO, stage=stage_both(data))
    log = Path(ran["output"]).read_text()
    seen = sorted(json.loads(line[5:]) for line in log.splitlines() if line.startswith("SEEN "))
    port = seen[0][5]
    assert 10_000 <= int(port) < 32_000
    assert seen == [
        [str(rank), str(rank % 2), "4", "2", "node1", port, 200, f"node{rank // 2 + 1}"]
        for rank in range(4)
    ]
    assert ran["summary"]["staged_files"] == 2 * 2 * 200
    assert desk.staged(ran["job_id"]) == []


def test_a_failing_rank_fails_the_job_and_its_data_goes(desk: Desk, data: Path) -> None:
    """One rank that fails ends the others, the output names it, and `hpml run` exits 6."""
    program = "import os, sys, time; os.environ['RANK'] == '3' and sys.exit(9); time.sleep(600)"
    job = {"command": [PYTHON, "-c", program], "resources": TWO_BY_TWO, "stage": stage_both(data)}
    ran = desk.run("failing", code=6, **job)
    assert ran["state"] == "FAILED"
    # srun's own status is the highest of its tasks': those that it ended count as 143
    assert ran["exit_code"] in {9, 143}
    assert "task 3: Exited with exit code 9" in Path(ran["output"]).read_text()
    assert desk.staged(ran["job_id"]) == []


def test_ranks_never_start_when_a_node_cannot_be_made_ready(desk: Desk) -> None:
    """A missing source is reported with node and path, and no rank has run."""
    gone = {"name": "gone", "source": "/no/such/data", "target": "local"}
    command = ["sh", "-c", "echo RANK RAN"]
    file = desk.job("no-source", command=command, resources={"nodes": 2}, stage=[gone])
    ran = desk.json("run", "--no-check", file, code=6)
    log = Path(ran["output"]).read_text()
    assert ran["state"] == "FAILED"
    assert "RANK RAN" not in log
    assert "node1: " in log
    assert "/no/such/data" in log
    assert desk.staged(ran["job_id"]) == []


def test_a_second_job_of_the_same_submission_ends_at_once(desk: Desk) -> None:
    """A duplicate that reaches the queue after all finds the run claimed and does nothing."""
    ran = desk.run("twice", command=["sh", "-c", "echo RAN"])
    log = desk.directory / "again.log"
    again = desk.cluster.run(
        "sbatch", "--wait", f"--output={log}", "job.sh", cwd=ran["submission"], check=False
    )
    assert again.returncode == 75
    assert "duplicate" in log.read_text()
    assert Path(ran["output"]).read_text().count("RAN\n") == 1


def test_the_ranks_need_no_hpml_of_their_own(desk: Desk) -> None:
    """Even in a virtual environment without hpml the ranks start, bound and recorded."""
    venv = desk.directory / "bare venv"
    subprocess.run([PYTHON, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=120)
    program = (
        "import importlib.util, os, sys; print('HPML', importlib.util.find_spec("
        "'hpml_orchestrator'), sys.prefix, os.environ['HPML_CHANNEL'][:5])"
    )
    minimal = {"venv": str(venv), "inherit": "minimal"}
    command = ["python", "-c", program]
    ran = desk.run("bare", command=command, environment=minimal, resources={"nodes": 2})
    assert Path(ran["output"]).read_text().count(f"HPML None {venv} hpml") == 2
    assert ran["summary"]["ranks"] == 2


def test_what_slurm_refuses_is_told_recorded_and_makes_no_job(desk: Desk) -> None:
    """A partition that is not there: exit 4, Slurm's words, a hint, REFUSED in the list, no job."""
    file = desk.job("refused", command=["true"], resources={"partition": "nowhere"})
    before = sorted(desk.slurm("squeue", "--noheader", "--states=all", "--format=%A").split())
    done = desk.hpml("submit", "--no-check", file, code=4)
    assert "invalid partition" in done.stderr.lower()
    (listed,) = desk.json("list")
    assert (listed["state"], listed["job_id"]) == ("REFUSED", "")
    after = sorted(desk.slurm("squeue", "--noheader", "--states=all", "--format=%A").split())
    assert set(after) <= set(before)  # Slurm forgets old ones after five minutes


def test_gpus_are_asked_for_and_seen_by_every_rank(desk: Desk) -> None:
    """`gpus: a100:2` gives two ranks a node, each of which sees both GPUs."""
    command = ["sh", "-c", 'echo "GPUS $LOCAL_RANK $CUDA_VISIBLE_DEVICES"']
    ran = desk.run("gpus", command=command, resources={"nodes": 2, "gpus": "a100:2"})
    seen = sorted(line for line in Path(ran["output"]).read_text().splitlines() if "GPUS" in line)
    assert seen == ["GPUS 0 0,1", "GPUS 0 0,1", "GPUS 1 0,1", "GPUS 1 0,1"]


def test_the_queue_is_asked_in_words_for_people_and_programs(desk: Desk) -> None:
    """status, list, logs and doctor speak of a job on Slurm; `--lines` cuts."""
    ran = desk.run("words", command=["sh", "-c", "echo one; echo two"])
    assert desk.json("status") == []
    (listed,) = desk.json("list")
    assert (listed["state"], listed["backend"]) == ("COMPLETED", "slurm")
    assert desk.hpml("logs", ran["job_id"], "-n", "1").stdout == "two\n"
    # srun's warning about each --cpu-bind on a cluster without a task plugin, such as this one
    assert "lacks support for cpu binding" not in Path(ran["output"]).read_text()
    checks: list[dict[str, Any]] = desk.json("doctor")
    assert {"check": "accounting", "result": "ok", "found": "sacct answers", "hint": ""} in checks


def test_a_job_at_its_time_limit_leaves_no_data_on_its_nodes(
    at_its_limit: tuple[Desk, str],
) -> None:
    """When Slurm ends a job at its time limit, the nodes are clean and the state is TIMEOUT."""
    desk, sid = at_its_limit
    assert desk.json("wait", sid, code=6)["state"] == "TIMEOUT"
    assert desk.staged() == []
