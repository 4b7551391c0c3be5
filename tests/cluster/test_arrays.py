"""Job arrays on a real Slurm: tasks that fail, are cancelled and requeued; MPI's PMIx."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hpml_on_slurm import Desk, eventually

SMALL = {"time": "5:00", "memory": "50M"}
# Task 2 fails; the others wait for their release, so that nothing depends on the machine's speed.
TASK = """\
index=$0 run=$1 release=$2
echo "task $index of $SLURM_ARRAY_TASK_COUNT, staged $(cat "$3"/word)"
[ "$index" != 2 ] || exit 3
while [ ! -e "$release" ]; do sleep 0.05; done
"""


def says(output: Path, words: str) -> bool:
    return output.exists() and words in output.read_text()


def array(desk: Desk, tasks: str) -> Any:
    """Submit an array of tasks that stage a word and wait for the file `release`."""
    data = desk.directory / "data"
    data.mkdir()
    (data / "word").write_text("hello\n")
    return desk.submit(
        "many",
        array=tasks,
        command=["bash", "-c", TASK, "{array.index}", "{run.dir}", str(desk.directory / "release")],
        args=["{stage.words}"],
        stage=[{"name": "words", "source": str(data), "target": "shm"}],
        resources=SMALL,
    )


def states(desk: Desk, sid: str) -> list[str]:
    (state,) = desk.json("status", sid)
    return [task["state"] for task in state["tasks"]]


def started(desk: Desk, sid: str) -> int:
    """How many starts of tasks are on record."""
    return len(list(desk.records.glob(f"runs/{sid}.*/attempts/*/started/job_id")))


def test_an_array_with_a_failure_a_cancel_and_a_requeue(desk: Desk) -> None:
    """Two at a time; one fails, one is cancelled, one requeued; the report shows each."""
    submitted = array(desk, "0-5%2")
    sid, job_id = submitted["id"], submitted["job_id"]
    assert [task["index"] for task in submitted["tasks"]] == list(range(6))
    eventually(lambda: states(desk, sid) == ["RUNNING"] * 2 + ["PENDING"] * 4)
    (line,) = desk.hpml("status", sid).stdout.splitlines()[1:]
    assert line.split("\t")[3] == "RUNNING"
    assert line.split("\t")[6] == "0 of 6 done, 2 running, 4 waiting"
    cancelled = desk.hpml("cancel", f"{sid}.5").stdout
    assert f"{sid}.5: cancelled job {job_id}_5" in cancelled
    assert states(desk, sid)[5] == "CANCELLED"
    eventually(lambda: started(desk, sid) == 2)
    desk.slurm("scontrol", "requeue", f"{job_id}_1")
    eventually(lambda: started(desk, sid) >= 4, what="the next task, and later the requeued one")
    (desk.directory / "release").touch()
    done = desk.hpml("wait", sid, code=6)
    assert "4 of 6 done, 1 failed, 1 cancelled" in done.stderr
    assert f"hint: hpml logs {sid}.2" in done.stderr
    (state,) = desk.json("status", sid)
    assert (state["state"], state["exit_code"], state["over"]) == ("FAILED", 3, True)
    ends = "COMPLETED COMPLETED FAILED COMPLETED COMPLETED CANCELLED".split()
    assert [task["state"] for task in state["tasks"]] == ends
    assert [task["attempts"] for task in state["tasks"]] == [1, 2, 1, 1, 1, 0]
    assert "task 2 of 6, staged hello" in desk.hpml("logs", f"{sid}.2").stdout
    assert desk.hpml("logs", f"{job_id}_1").stdout.count("task 1 of 6") >= 1
    assert "name one" in desk.hpml("logs", sid, code=2).stderr
    shown = desk.hpml("show", sid).stdout
    assert re.search(rf"^{sid}\.2\t{job_id}_2\tFAILED\t.*\t3\t", shown, re.MULTILINE)
    assert desk.json("show", f"{sid}.1")["summary"]["staged_files"] == 1
    eventually(lambda: desk.staged() == [], what="what tasks staged is removed")


def test_an_array_submitted_by_hand(desk: Desk) -> None:
    """`sbatch job.sh` runs the same tasks; their records are next to the script."""
    job = desk.job("hand", array="3,7", command=["true"], resources=SMALL)
    desk.hpml("render", job, "-o", desk.directory / "by-hand")
    told = desk.call("sbatch", "--wait", "job.sh", cwd=desk.directory / "by-hand")
    job_id = told.stdout.split()[-1]
    runs = desk.directory / "by-hand" / "runs"
    assert sorted(path.name for path in runs.iterdir()) == [f"{job_id}_3", f"{job_id}_7"]
    for path in runs.iterdir():
        ended = json.loads((path / "attempts" / "0" / "ended.json").read_text())
        assert ended["exit_code"] == 0


def test_a_killed_submission_finds_its_array(desk: Desk) -> None:
    """Without sbatch's answer the array is found by the tasks that it runs, under its own id."""
    submitted = array(desk, "4-6%2")
    sid, job_id = submitted["id"], submitted["job_id"]
    eventually(lambda: started(desk, sid) == 2)
    submission = Path(submitted["submission"])
    for name in ("job.json", "sbatch.out"):
        (submission / name).unlink()
    resumed = desk.json("submit", "--resume", sid)
    assert resumed["job_id"] == job_id
    assert json.loads((submission / "job.json").read_text())["how"] == "job"
    (desk.directory / "release").touch()
    assert "3 of 3 done" in desk.hpml("wait", sid).stderr


def test_without_accounting_ends_are_kept(bare: Desk) -> None:
    """Tasks that Slurm has forgotten while others wait are known by their own records."""
    submitted = array(bare, "1-4%2")
    sid, job_id = submitted["id"], submitted["job_id"]
    eventually(lambda: started(bare, sid) == 3, what="1 and 3 run, 2 has failed")
    ended = bare.records / "runs" / f"{sid}.2" / "attempts" / "0" / "ended.json"
    eventually(ended.exists)
    for index in (1, 3):  # a controller may refuse a step while it reloads its settings
        output = bare.records / "runs" / f"{sid}.{index}" / "output.log"
        eventually(partial(says, output, "staged hello"))
    conf = bare.cluster.slurm_conf.read_text()
    bare.cluster.reconfigure(re.sub(r"MinJobAge=\d+", "MinJobAge=2", conf))
    eventually(
        lambda: f"{job_id}_2" not in bare.slurm("squeue", "--states=all", "-h", "-r", "-o", "%i"),
        what="the failed task is forgotten",
    )
    (state,) = bare.json("status", sid)
    failed = state["tasks"][1]
    assert states(bare, sid) == ["RUNNING", "FAILED", "RUNNING", "PENDING"], state
    assert (failed["exit_code"], failed["reason"]) == (3, "rank 0 exited with code 3")
    bare.hpml("cancel", f"{sid}.4")
    (bare.directory / "release").touch()
    done = bare.hpml("wait", sid, code=6)
    assert "2 of 4 done, 1 failed, 1 cancelled" in done.stderr


def test_ranks_find_pmix(desk: Desk) -> None:
    """With `mpi: pmix` each rank finds a PMIx server, which counts the ranks as hpml does."""
    plugins = desk.cluster.run("srun", "--mpi=pmix", "true", check=False)
    if plugins.returncode:
        pytest.skip("no PMIx for srun: deploy/devcluster/devcluster install brings it")
    done = desk.run(
        "ranks",
        mpi="pmix",
        command=["bash", "-c", 'echo "$PMIX_RANK is $RANK of $WORLD_SIZE" >>"$0/$RANK"'],
        args=["{run.dir}"],
        resources={**SMALL, "nodes": 2, "ranks_per_node": 2},
    )
    for rank in range(4):
        told = Path(done["directory"], str(rank)).read_text()
        assert told == f"{rank} is {rank} of 4\n"


def test_the_dashboards_of_tasks_and_their_time_left(desk: Desk) -> None:
    """Each task's address has its own job id and the cluster's name; `top` shows both tasks."""
    site = desk.directory / "dashboards.toml"
    site.write_text('[monitoring]\ndashboards = "https://grafana.example.org"\n')
    desk.more["HPML_SITE"] = str(site)
    submitted = array(desk, "0-1")
    sid, job_id = submitted["id"], submitted["job_id"]
    eventually(lambda: started(desk, sid) == 2 and states(desk, sid) == ["RUNNING"] * 2)
    shown = desk.json("top", sid)["jobs"]
    assert [job["run"] for job in shown] == [f"{sid}.0", f"{sid}.1"]
    assert all(200 < job["left_seconds"] <= 300 for job in shown)
    cluster = re.search(r"ClusterName\s*=\s*(\S+)", desk.slurm("scontrol", "show", "config"))
    assert cluster is not None
    for index, task in enumerate(shown):
        (run,) = desk.records.glob(f"runs/{sid}.{index}/attempts/0/started/job_id")
        raw = run.read_text().strip()
        labels = f"var-cluster={cluster[1]}&var-jobid={raw}&"
        assert f"https://grafana.example.org/d/hpml-job?{labels}from=" in task["dashboard"]
        assert task["dashboard"] in desk.hpml("show", f"{job_id}_{index}").stdout
    (desk.directory / "release").touch()
    desk.hpml("wait", sid)
    (state,) = desk.json("status", sid)
    ends = [task["ended"] * 1000 for task in state["tasks"]]
    assert [int(task["dashboard"].rpartition("=")[2]) for task in state["tasks"]] == ends
