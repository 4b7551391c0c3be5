"""Signals and ends on a real Slurm: what a signal leaves alone, and what a job says ended it."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import SlurmCluster
from tests.cluster.hpml_on_slurm import PYTHON, Desk, eventually
from tests.cluster.user import VENV

# A rank that notes signals, and whether its data are there, until it may end.
CATCH = """\
import os, signal, sys, time
data, go = sys.argv[1:]
def note(number, frame):
    name = signal.Signals(number).name
    os.write(1, f"{os.environ['RANK']}:{name}:{os.path.exists(data)}\\n".encode())
for name in ("USR1", "USR2", "TERM", "INT", "HUP"):
    signal.signal(getattr(signal, f"SIG{name}"), note)
os.write(1, f"{os.environ['RANK']}:begins\\n".encode())
while not os.path.exists(go):
    time.sleep(0.1)
"""
FOR_STEPS = {
    "srun": ["USR1", "USR2", "TERM", "INT", "HUP"],
    "torchrun": ["USR1", "USR2"],
    "mpirun": [],  # its ranks on the first node are in no step
}


@pytest.fixture
def desk(slurm_cluster: SlurmCluster, tmp_path: Path) -> Desk:
    """A desk in front of the session's cluster."""
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return Desk(slurm_cluster, tmp_path, allowed if os.geteuid() == 0 else {})


def submitted(desk: Desk, name: str, **fields: Any) -> dict[str, Any]:
    """Submit a job and return what hpml says of it."""
    told: dict[str, Any] = desk.json("submit", desk.job(name, **fields))
    return told


def output(told: dict[str, Any]) -> str:
    path = Path(told["directory"], "output.log")
    return path.read_text("utf-8") if path.exists() else ""


def _has(told: dict[str, Any], word: str, count: int) -> bool:
    return output(told).count(word) == count


def _holds(path: Path, text: str) -> bool:
    return text in path.read_text("utf-8")


def ended(told: dict[str, Any], attempt: int = 0) -> dict[str, Any]:
    """Wait until an attempt has written down its end; returns that."""
    path = Path(told["directory"], "attempts", str(attempt), "ended.json")
    eventually(path.exists, what=f"{path}, of {output(told)}")
    end: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return end


@pytest.mark.parametrize("launcher", FOR_STEPS)
def test_signals_for_the_ranks_reach_them_and_nothing_else(desk: Desk, launcher: str) -> None:
    """The job goes on with its data, and its summary says which signals came."""
    (desk.directory / "data").mkdir()
    (desk.directory / "data" / "x").write_text("x")
    (desk.directory / "catch.py").write_text(CATCH)
    go = desk.directory / "go"
    told = submitted(
        desk,
        launcher,
        launcher=launcher,
        script=str(desk.directory / "catch.py"),
        args=["{stage.d}/x", str(go)],
        resources={"nodes": 2, "ranks_per_node": 2, "time": "5:00"},
        stage=[{"name": "d", "source": str(desk.directory / "data"), "target": "shm"}],
        environment={"python": PYTHON, "venv": str(VENV)},
    )
    eventually(lambda: output(told).count(":begins") == 4, what=output(told))
    job_id = str(told["job_id"])
    signals = [(name, "") for name in FOR_STEPS[launcher]]
    for name, to in [*signals, ("USR1", "--batch"), ("USR2", "--batch")]:
        word = f":SIG{name}:True"
        expected = output(told).count(word) + 4
        desk.slurm("scancel", f"--signal={name}", *filter(None, [to]), job_id)
        eventually(partial(_has, told, word, expected), what=f"{name} {to}")
    assert ":False" not in output(told)
    log = Path(told["directory"], "attempts", "0", "events")
    for name, to in signals:
        noted = f'"event":"signal","node":"node2","data":{{"name":"SIG{name}"'
        eventually(partial(_holds, log / "node2.jsonl", noted), what=f"{name} {to} on record")
    go.touch()
    assert desk.hpml("wait", told["id"]).returncode == 0
    assert desk.staged() == []
    summary = desk.hpml("show", told["id"]).stdout
    for name in {*FOR_STEPS[launcher], "USR1", "USR2"}:
        times = [*FOR_STEPS[launcher], "USR1", "USR2"].count(name)
        assert f"SIG{name} {times}x, last 20" in summary


def test_every_end_is_called_by_its_name(desk: Desk) -> None:
    """By Slurm's word and the job's own, which is all that is left once Slurm has forgotten."""
    sleep = ["sh", "-c", "trap 'exit 3' TERM; echo begins; sleep 200 & wait"]
    crash = ["sh", "-c", 'echo begins; [ "$RANK" = 0 ] || exit 7; sleep 200']
    killed = ["sh", "-c", 'echo begins; [ "$RANK" = 0 ] || kill -SEGV $$; sleep 200']
    small = {"time": "1:00", "memory": "100M"}
    two = {**small, "ranks_per_node": 2, "time": "5:00"}
    jobs = {
        "limit": submitted(desk, "limit", command=sleep, resources=small),
        "cancelled": submitted(desk, "cancelled", command=sleep, resources=small),
        "batch": submitted(desk, "batch", command=sleep, resources=small),
        "unhandled": submitted(desk, "unhandled", command=sleep, resources=small),
        "crash": submitted(desk, "crash", command=crash, resources=two),
        "killed": submitted(desk, "killed", command=killed, resources=two),
    }

    def begun(name: str) -> str:
        eventually(lambda: "begins" in output(jobs[name]), what=name)
        return str(jobs[name]["job_id"])

    desk.slurm("scancel", begun("cancelled"))
    desk.slurm("scancel", "--signal=HUP", "--batch", begun("batch"))
    desk.slurm("scancel", "--signal=USR1", begun("unhandled"))
    ends = {
        "cancelled": ("CANCELLED", "cancelled"),
        "batch": ("FAILED", "the script got SIGHUP"),
        "unhandled": ("FAILED", "rank 0 ended by SIGUSR1"),
        "crash": ("FAILED", "rank 1 exited with code 7"),
        "killed": ("FAILED", "rank 1 ended by SIGSEGV"),
        "limit": ("TIMEOUT", "time limit"),
    }
    for name, (state, reason) in ends.items():
        end = ended(jobs[name])
        assert (end["state"], end["reason"]) == (state, reason), output(jobs[name])
        desk.hpml("wait", jobs[name]["id"], code=6)
        (status,) = desk.json("status", jobs[name]["id"])
        assert status["state"] == state
        if state == "FAILED":
            assert (status["reason"], status["exit_code"]) == (reason, end["exit_code"])
        record = Path(jobs[name]["submission"], "job.json")
        record.write_text(json.dumps({**json.loads(record.read_text()), "job_id": "4242"}))
        Path(jobs[name]["submission"], "final.json").unlink()
        (forgotten,) = desk.json("status", jobs[name]["id"])
        assert (forgotten["state"], forgotten["exit_code"]) == (state, end["exit_code"])
        assert reason in forgotten["reason"]
    assert ended(jobs["crash"])["exit_code"] == 7


def test_ranks_that_ignore_sigterm_keep_their_data_and_leave_none(desk: Desk) -> None:
    """They end a moment before Slurm's SIGKILL, which the agent would not survive either."""
    (desk.directory / "data").mkdir()
    (desk.directory / "data" / "x").write_text("x")
    stubborn = "trap '' TERM; echo begins; while sleep 0.1; do [ -e \"$0\" ] || echo GONE; done"
    told = submitted(
        desk,
        "stubborn",
        command=["bash", "-c", stubborn, "{stage.d}/x"],
        resources={"time": "5:00", "memory": "100M"},
        stage=[{"name": "d", "source": str(desk.directory / "data"), "target": "shm"}],
    )
    eventually(lambda: "begins" in output(told))
    desk.hpml("cancel", told["id"])
    desk.hpml("wait", told["id"], code=6)
    eventually(lambda: not desk.slurm("squeue", "--noheader", f"--jobs={told['job_id']}"))
    assert desk.staged() == []
    assert "GONE" not in output(told)
    assert ended(told)["reason"] == "cancelled"


def test_a_preempted_and_a_requeued_job_say_so(desk: Desk) -> None:
    """The next attempt begins anew, and each tells its own end."""
    whole = {"nodes": 2, "cpus_per_rank": 4, "time": "5:00"}
    go = desk.directory / "go"
    wait = ["sh", "-c", f"echo begins; until [ -e {go} ]; do sleep 0.1; done"]
    low = {**whole, "partition": "low"}
    told = submitted(desk, "low", command=wait, resources=low)
    eventually(lambda: output(told).count("begins") == 2)
    first = desk.json("run", desk.job("high", command=["true"], resources=whole))
    assert first["state"] == "COMPLETED"
    assert (ended(told)["state"], ended(told)["reason"]) == ("PREEMPTED", "preempted")
    eventually(lambda: output(told).count("begins") == 4)
    desk.slurm("scontrol", "requeue", str(told["job_id"]))
    assert ended(told, 1)["reason"] == "requeued"
    eventually(lambda: output(told).count("begins") == 6)
    go.touch()
    desk.hpml("wait", told["id"])
    assert ended(told, 2)["reason"] == "completed"
