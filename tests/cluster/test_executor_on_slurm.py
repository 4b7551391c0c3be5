"""Functions submitted with submitit to a real Slurm, by an ordinary user."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import booted
from tests.cluster.hpml_on_slurm import PYTHON, Desk, eventually

SCRIPT = """\
import json, sys, time
from pathlib import Path
import submitit

executor = submitit.AutoExecutor("logs", cluster="hpml")
executor.update_parameters(timeout_min=5, mem_gb=0.05, name="function", **json.loads(sys.argv[1]))

def place(item):
    environment = submitit.JobEnvironment()
    return {
        "item": item,
        "hostnames": list(environment.hostnames),
        "rank": [environment.global_rank, environment.local_rank, environment.node],
        "size": [environment.num_tasks, environment.num_nodes],
        "job_id": environment.job_id,
    }

def fail():
    raise ValueError("on purpose")

class Slow(submitit.helpers.Checkpointable):
    def __init__(self):
        self.starts = 0
    def __call__(self, started):
        Path(started).touch()
        while not self.starts:
            time.sleep(0.05)
        return self.starts, submitit.JobEnvironment().job_id
    def checkpoint(self, started):
        self.starts += 1
        return submitit.helpers.DelayedSubmission(self, started)

def say(**facts):
    print(json.dumps(facts), flush=True)
"""


def script(desk: Desk, text: str, **parameters: Any) -> dict[str, Any]:
    """Run a script of the user; returns what it prints last."""
    (desk.directory / "functions.py").write_text(SCRIPT + text)
    done = desk.call(PYTHON, "functions.py", json.dumps(parameters))
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_a_function_on_two_nodes(desk: Desk) -> None:
    """Every rank has its result; hpml has bound them, and finds the job by Slurm's id.

    Slurm shows the user's own name and comment, whatever they are.
    """
    answer = script(
        desk,
        "job = executor.submit(place, 'x')\nsay(results=job.results(), job_id=job.job_id)\n",
        nodes=2,
        tasks_per_node=2,
        hpml_binding={"verify": "strict"},
        hpml_job_name="sweep [lr: 0.1]/a 'b'",
        hpml_comment="why: $HOME 'b'",
    )
    job_id = answer["job_id"]
    record = desk.slurm("scontrol", "show", "job", job_id)
    assert f"JobId={job_id} JobName=sweep [lr: 0.1]/a 'b'\n" in record
    assert "Comment=why: $HOME 'b'" in record
    wanted = {"item": "x", "hostnames": list(desk.cluster.nodes), "size": [4, 2], "job_id": job_id}
    ranks = [[0, 0, 0], [1, 1, 0], [2, 0, 1], [3, 1, 1]]
    assert answer["results"] == [{**wanted, "rank": rank} for rank in ranks]
    desk.hpml("wait", job_id)
    shown = desk.json("show", job_id)
    assert shown["name"] == "sweep_lr_0.1_a_b_"
    assert "Job completed successfully" in desk.hpml("logs", job_id).stdout


@pytest.mark.slow
def test_fifty_calls_are_arrays_of_what_the_cluster_takes(desk: Desk) -> None:
    """One array for all."""
    answer = script(
        desk,
        "jobs = executor.map_array(place, range(50))\n"
        "say(results=[job.result()['item'] for job in jobs], ids=[job.job_id for job in jobs])\n",
        hpml_array_parallelism=20,
    )
    assert answer["results"] == list(range(50))
    (submission,) = (desk.records / "submissions").iterdir()
    array = json.loads((submission / "job.json").read_text())["job_id"]
    assert answer["ids"] == [f"{array}_{index}" for index in range(50)]
    assert "#SBATCH --array=0-49%20" in (submission / "job.sh").read_text()


def test_arrays_are_as_large_as_the_cluster_takes(tmp_path: Path) -> None:
    """What is over MaxArraySize is a second array, and the tasks at the same time are shared."""
    (tmp_path / "own.conf").write_text("MaxArraySize=8\n")
    with booted("--nodes", "1", "--no-accounting", "--slurm-conf", tmp_path / "own.conf") as own:
        desk = Desk(own, tmp_path)
        answer = script(
            desk,
            "jobs = executor.map_array(place, range(10))\n"
            "say(items=[job.result()['item'] for job in jobs], ids=[job.job_id for job in jobs])\n",
            hpml_array_parallelism=6,
        )
    assert answer["items"] == list(range(10))
    assert [job_id.partition("_")[2] for job_id in answer["ids"]] == [*"01234567", *"01"]
    scripts = [path.read_text() for path in (desk.records / "submissions").glob("*/job.sh")]
    arrays = sorted(re.findall(r"--array=(.*)", text)[0] for text in scripts)
    assert arrays == ["0-1%2", "0-7%3"]


def test_an_exception_and_a_refusal(desk: Desk) -> None:
    """The traceback comes back; what sbatch refuses raises at once, and nothing is left of it."""
    answer = script(desk, "say(error=str(executor.submit(fail).exception()))\n")
    assert "in fail\n" in answer["error"], answer["error"]
    assert "ValueError: on purpose" in answer["error"], answer["error"]
    refused = (
        "from hpml_orchestrator.errors import SchedulerError\n"
        "try:\n    executor.submit(fail)\n"
        "except SchedulerError as error:\n    say(error=str(error))\n"
    )
    assert "invalid partition" in script(desk, refused, hpml_partition="none")["error"]
    logs = desk.directory / "logs"
    assert len(list(logs.glob("*_submitted.pkl"))) == 1
    assert len(list(logs.glob("*.pkl"))) == 2


def test_a_checkpoint_and_a_requeue(desk: Desk) -> None:
    """The warning before the time limit has the call checkpointed, and Slurm starts it again."""
    started = desk.directory / "started"
    submitted = script(desk, f"say(job_id=executor.submit(Slow(), {str(started)!r}).job_id)\n")
    job_id = submitted["job_id"]
    eventually(started.exists)
    assert "--signal=USR2@90" in (desk.directory / "logs" / f"{job_id}_submission.sh").read_text()
    desk.slurm("scancel", "--signal=USR2", job_id)
    rest = (
        "from hpml_orchestrator.sweeps.executor import HpmlJob\n"
        f"job = HpmlJob('logs', {job_id!r})\n"
        "say(result=job.result(), log=job.stdout())\n"
    )
    answer = script(desk, rest)
    assert answer["result"] == [1, job_id]
    assert f"Requeued job {job_id}" in answer["log"]
    desk.hpml("wait", job_id)
    (state,) = desk.json("status", job_id)
    assert (state["state"], state["attempts"]) == ("COMPLETED", 2)
