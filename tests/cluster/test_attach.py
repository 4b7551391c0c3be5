"""`hpml attach` to jobs of a real Slurm."""

from __future__ import annotations

from tests.cluster.hpml_on_slurm import PYTHON, Desk, eventually
from tests.cluster.user import AS_USER
from tests.unit.cli.support import in_terminal

ASK = 'echo "$SLURMD_NODENAME $SLURM_JOB_ID $PWD $HPML_RUN_DIR $(nproc)"; exit 7'


def test_a_program_on_each_node_of_a_running_job(desk: Desk) -> None:
    """It shares all CPUs with the ranks, whatever those are bound to; its status is passed on."""
    gate = desk.directory / "gate"
    wait = ["bash", "-c", f"touch {gate}.$RANK; while [ ! -e {gate} ]; do sleep 0.05; done"]
    resources = {"nodes": 2, "ranks_per_node": 2, "time": "5:00", "memory": "50M"}
    run = desk.submit("waits", command=wait, resources=resources)["id"]
    eventually(lambda: all(gate.with_suffix(f".{rank}").exists() for rank in range(4)))
    directory, job_id = desk.records / "runs" / run, desk.json("status", run)[0]["job_id"]
    for node in desk.cluster.nodes[:2]:
        done = desk.hpml("attach", run, "--node", node, "--", "bash", "-c", ASK, code=7)
        assert done.stdout.split()[:-1] == [node, job_id, str(desk.directory), str(directory)]
        assert int(done.stdout.split()[-1]) >= 2
    refused = desk.hpml("attach", run, "--node", "nowhere", code=2)
    assert f"its nodes: {' and '.join(desk.cluster.nodes[:2])}" in refused.stderr
    test = ["--", "bash", "-c", "test -t 1 && echo a terminal"]
    words = [*AS_USER, PYTHON, "-m", "hpml_orchestrator.cli", "attach", run, *test]
    assert "a terminal" in in_terminal(words, desk.environment)
    gate.touch()
    desk.hpml("wait", run)
    over = desk.hpml("attach", run, code=2)
    assert "is COMPLETED, not RUNNING" in over.stderr


def test_one_task_of_an_array(desk: Desk) -> None:
    """Without a task the error names them."""
    gate = desk.directory / "gate"
    wait = ["bash", "-c", f"while [ ! -e {gate} ]; do sleep 0.05; done"]
    small = {"time": "5:00", "memory": "50M"}
    run = desk.submit("tasks", command=wait, array="3-4", resources=small)["id"]
    eventually(lambda: desk.json("status", f"{run}.4")[0]["state"] == "RUNNING")
    attempt = desk.records / "runs" / f"{run}.4" / "attempts" / "0" / "started" / "job_id"
    eventually(attempt.exists)
    ask = ["--", "bash", "-c", "echo $SLURM_JOB_ID $HPML_RUN_DIR"]
    done = desk.hpml("attach", f"{run}.4", *ask)
    where = attempt.parents[3]
    assert done.stdout.split() == [attempt.read_text().strip(), str(where)]
    assert f"{run}.3 and {run}.4" in desk.hpml("attach", run, *ask, code=2).stderr
    gate.touch()
    desk.hpml("wait", run)
