"""The stop path on a real Slurm: who gets SIGTERM, how long ranks live, and what is left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hpml_on_slurm import MPIRUN_AS_ROOT, PYTHON, Desk, eventually

# A rank that waits for a stop request and then saves for a while.
RANK = """\
import json, os, signal, socket, sys, time
seconds = float(sys.argv[1])
rank = os.environ["RANK"]
channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
channel.bind("")
def tell(event, **data):
    message = {"v": 1, "type": "event", "event": event, "rank": int(rank), "data": data}
    channel.sendto(json.dumps(message).encode(), "\\0" + os.environ["HPML_CHANNEL"])
os.write(1, f"{rank}:begins\\n".encode())
channel.settimeout(0.5)
reason = None
while reason is None:
    try:
        tell("rendezvous")
        reason = json.loads(channel.recv(999))["stop"]
    except OSError:
        pass
os.write(1, f"{rank}:asked:{reason}:\\n".encode())
time.sleep(seconds)
os.write(1, f"{rank}:saved:\\n".encode())
tell("stopping", step=7)
"""


@pytest.fixture
def job(desk: Desk) -> dict[str, Any]:
    """The fields of a job of two nodes with two ranks each, and data in memory."""
    (desk.directory / "rank.py").write_text(RANK)
    (desk.directory / "data").mkdir()
    (desk.directory / "data" / "x").write_text("x")
    data = {"name": "d", "source": str(desk.directory / "data"), "target": "shm"}
    return {
        "script": str(desk.directory / "rank.py"),
        "args": ["3"],
        "resources": {"nodes": 2, "ranks_per_node": 2, "time": "5:00"},
        "stage": [data],
        "environment": {"python": PYTHON},
    }


def start(
    desk: Desk, job: dict[str, Any], launcher: str, *arguments: str, **options: Any
) -> dict[str, str]:
    """Submit a job that saves checkpoints, and wait until its four ranks run."""
    if launcher == "mpirun" and not shutil.which("mpirun"):
        pytest.skip("not installed: mpirun (Debian: openmpi-bin)")
    desk.more = dict(MPIRUN_AS_ROOT)
    directory = desk.directory / "by-hand"
    own = {"enabled": True, "requeue": [], **options}
    file = desk.job(launcher, launcher=launcher, checkpoint=own, **job)
    desk.hpml("render", file, "-o", directory)
    words = ("sbatch", "--parsable", "--output=job.log", *arguments, "job.sh")
    printed = desk.call(*words, cwd=directory).stdout
    submitted = {"job_id": printed.strip(), "directory": str(directory)}
    eventually(lambda: output(submitted).count(":begins") == 4, what="four ranks")
    return submitted


def output(job: dict[str, Any]) -> str:
    """What a job wrote so far."""
    path = Path(job["directory"], "job.log")
    return path.read_text("utf-8") if path.exists() else ""


def is_gone(desk: Desk, job_id: str) -> bool:
    """Whether the controller has no running job of that id."""
    shown = desk.slurm("squeue", "--noheader", f"--jobs={job_id}", "--states=R,CG", "--format=%A")
    return not shown.strip()


LAUNCHERS = ["srun", "torchrun", "mpirun"]
QUICK = [(0, "srun"), (30, "torchrun")]  # the others are in make test-long


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_sigterm_lets_ranks_save(desk: Desk, job: dict[str, Any], launcher: str) -> None:
    """A signal to the steps of a running job is a request: all four ranks save and end."""
    submitted = start(desk, job, launcher)
    desk.slurm("scancel", "--signal=TERM", submitted["job_id"])
    assert_saved(desk, submitted, "preemption")


def assert_saved(desk: Desk, submitted: dict[str, str], reason: str) -> None:
    """All ranks were asked, saved, and ended; nothing is left on the nodes."""
    eventually(lambda: output(submitted).count(":saved:") == 4, what=f"saves: {submitted}")
    text = output(submitted)
    assert text.count(f":asked:{reason}:") == 4, text
    eventually(lambda: not desk.staged(), what="no staged data")
    desk.slurm("scancel", submitted["job_id"])  # it may have been requeued
    eventually(lambda: is_gone(desk, submitted["job_id"]), what="the end")


def test_an_agent_that_is_killed_is_replaced(desk: Desk, job: dict[str, Any]) -> None:
    """The ranks continue, and the next agent asks them to save and removes their data."""
    submitted = start(desk, job, "srun")
    (marker,) = Path(submitted["directory"]).glob("runs/*/attempts/0/nodes/node2.ready.json")
    os.kill(json.loads(marker.read_text())["pid"], signal.SIGKILL)
    log = marker.parents[1] / "events" / "node2.jsonl"
    eventually(lambda: "SIGKILL of the agent of node2" in log.read_text(), what="another agent")
    assert desk.staged()
    desk.slurm("scancel", "--signal=TERM", submitted["job_id"])
    assert_saved(desk, submitted, "preemption")


def test_a_signal_for_the_script_lets_ranks_save(desk: Desk, job: dict[str, Any]) -> None:
    """As sbatch's --signal=B:TERM@120 sends it: no agent gets that one."""
    submitted = start(desk, job, "torchrun")
    desk.slurm("scancel", "--batch", "--signal=TERM", submitted["job_id"])
    assert_saved(desk, submitted, "preemption")


@pytest.mark.parametrize(
    ("grace", "launcher"),
    [
        pytest.param(grace, launcher, marks=[] if (grace, launcher) in QUICK else pytest.mark.slow)
        for grace in (0, 30)
        for launcher in LAUNCHERS
    ],
)
def test_a_preempted_job_saves(desk: Desk, job: dict[str, Any], launcher: str, grace: int) -> None:
    """Within the grace time of its partition, or without one within KillWait, here 5 s."""
    desk.slurm("scontrol", "update", "PartitionName=low", f"GraceTime={grace}")
    job["args"] = ["4" if grace else "0.5"]
    submitted = start(desk, job, launcher, "--partition=low", "--exclusive", "--requeue")
    winner = desk.call("sbatch", "--parsable", "--nodes=2", "--exclusive", "--wrap=true").stdout
    try:
        assert_saved(desk, submitted, "preemption")
    finally:
        desk.slurm("scancel", winner.strip())
        desk.slurm("scontrol", "update", "PartitionName=low", "GraceTime=0")


@pytest.mark.parametrize(
    "launcher", [pytest.param("srun", marks=pytest.mark.slow), "torchrun", "mpirun"]
)
def test_a_cancelled_job_ends_at_once(desk: Desk, job: dict[str, Any], launcher: str) -> None:
    """Its ranks are killed and its data removed at once; KillWait would be a minute."""
    with desk.cluster.configured("KillWait=60"):
        submitted = start(desk, job, launcher)
        began = time.monotonic()
        desk.slurm("scancel", submitted["job_id"])
        eventually(lambda: is_gone(desk, submitted["job_id"]), what="the end")
        assert time.monotonic() - began < 30
    assert ":asked:" not in output(submitted)
    assert not desk.staged()


def test_the_time_limit_is_preceded_by_a_request(desk: Desk, job: dict[str, Any]) -> None:
    """The limit is the one that Slurm has, here a minute in place of the script's five."""
    submitted = start(desk, job, "srun", "--time=1", lead="0:50")
    assert_saved(desk, submitted, "time_limit")
    assert "TIME LIMIT" not in output(submitted)
