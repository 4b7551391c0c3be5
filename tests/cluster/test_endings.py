"""Signals and job ends on a real Slurm: signals that do no harm, and the reported reasons."""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hpml_on_slurm import MPIRUN_AS_ROOT, PYTHON, Desk, eventually
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
def data(desk: Desk) -> dict[str, str]:
    """An entry of a job's `stage`: one file, in memory."""
    (desk.directory / "data").mkdir()
    (desk.directory / "data" / "x").write_text("x")
    return {"name": "d", "source": str(desk.directory / "data"), "target": "shm"}


def output(job: dict[str, Any]) -> str:
    path = Path(job["directory"], "output.log")
    return path.read_text("utf-8") if path.exists() else ""


def says(job: dict[str, Any], word: str, count: int = 1) -> None:
    """Wait until a job's output has a word so often."""
    eventually(lambda: output(job).count(word) == count, what=f"{count} times {word}")


def _holds(path: Path, text: str) -> bool:
    return text in path.read_text("utf-8")


def ended(job: dict[str, Any], attempt: int = 0) -> Any:
    """Wait until an attempt has written down its end; returns that."""
    path = Path(job["directory"], "attempts", str(attempt), "ended.json")
    eventually(path.exists, what=f"{path}, of {output(job)}")
    return json.loads(path.read_text("utf-8"))


@pytest.mark.parametrize("launcher", FOR_STEPS)
def test_signals_for_the_ranks_reach_them_and_nothing_else(
    desk: Desk, data: dict[str, str], launcher: str
) -> None:
    """The job continues with its data, and its summary lists the signals."""
    (desk.directory / "catch.py").write_text(CATCH)
    go = desk.directory / "go"
    desk.more = dict(MPIRUN_AS_ROOT)
    job = desk.submit(
        launcher,
        launcher=launcher,
        script=str(desk.directory / "catch.py"),
        args=["{stage.d}/x", str(go)],
        resources={"nodes": 2, "ranks_per_node": 2, "time": "5:00"},
        stage=[data],
        environment={"python": PYTHON, "venv": str(VENV)},
    )
    says(job, ":begins", 4)
    signals = FOR_STEPS[launcher]
    for name, to in [
        *((name, []) for name in signals),
        ("USR1", ["--batch"]),
        ("USR2", ["--batch"]),
    ]:
        word = f":SIG{name}:True"
        count = output(job).count(word) + 4
        desk.slurm("scancel", f"--signal={name}", *to, job["job_id"])
        says(job, word, count)
    assert ":False" not in output(job)
    log = Path(job["directory"], "attempts", "0", "events", "node2.jsonl")
    for name in signals:
        noted = f'"event":"signal","node":"node2","data":{{"name":"SIG{name}"'
        eventually(partial(_holds, log, noted), what=f"{name} on record")
    go.touch()
    desk.hpml("wait", job["id"])
    assert desk.staged() == []
    summary = desk.hpml("show", job["id"]).stdout
    for name, count in Counter([*signals, "USR1", "USR2"]).items():
        assert f"SIG{name} {count}x, last 20" in summary


def test_every_end_is_called_by_its_name(desk: Desk) -> None:
    """From Slurm, and from the job's own record, which remains after Slurm deleted the job."""
    sleep = ["sh", "-c", "trap 'exit 3' TERM; echo begins; sleep 200 & wait"]
    crash = ["sh", "-c", 'echo begins; [ "$RANK" = 0 ] || exit 7; sleep 200']
    killed = ["sh", "-c", 'echo begins; [ "$RANK" = 0 ] || kill -SEGV $$; sleep 200']
    small = {"time": "5:00", "memory": "100M"}
    two = {**small, "ranks_per_node": 2}
    limits = {"limit": "1:00", "cancelled": "5:00", "batch": "5:00"}
    jobs = {
        name: desk.submit(name, command=sleep, resources={**small, "time": limit})
        for name, limit in limits.items()
    }
    # One process: of a shell and its child the child may die first, and `wait` then returns 0.
    alone = ["sh", "-c", "echo begins; exec sleep 200"]
    jobs["unhandled"] = desk.submit("unhandled", command=alone, resources=small)
    jobs["crash"] = desk.submit("crash", command=crash, resources=two)
    jobs["killed"] = desk.submit("killed", command=killed, resources=two)

    def begun(name: str) -> str:
        says(jobs[name], "begins")
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
        job = jobs[name]
        end = ended(job)
        assert (end["state"], end["reason"]) == (state, reason), output(job)
        status = desk.json("wait", job["id"], code=6)
        assert status["state"] == state
        if state == "FAILED":
            assert (status["reason"], status["exit_code"]) == (reason, end["exit_code"])
        if state == "TIMEOUT":
            advice = "00:01:00 requested; raise it with --set resources.time=…"
            assert status["reason"] == f"time limit: {advice}"
        record = Path(job["submission"], "job.json")
        record.write_text(json.dumps({**json.loads(record.read_text()), "job_id": "4242"}))
        Path(job["submission"], "final.json").unlink()
        (forgotten,) = desk.json("status", job["id"])
        assert (forgotten["state"], forgotten["exit_code"]) == (state, end["exit_code"])
        assert reason in forgotten["reason"]
    assert ended(jobs["crash"])["exit_code"] == 7


def test_ranks_that_ignore_sigterm_keep_their_data_and_leave_none(
    desk: Desk, data: dict[str, str]
) -> None:
    """They end a moment before Slurm's SIGKILL, which the agent would not survive either."""
    stubborn = "trap '' TERM; echo begins; while sleep 0.1; do [ -e \"$0\" ] || echo GONE; done"
    command = ["bash", "-c", stubborn, "{stage.d}/x"]
    small = {"time": "5:00", "memory": "100M"}
    job = desk.submit("stubborn", command=command, resources=small, stage=[data])
    says(job, "begins")
    desk.hpml("cancel", job["id"])
    desk.hpml("wait", job["id"], code=6)
    eventually(lambda: not desk.slurm("squeue", "--noheader", f"--jobs={job['job_id']}"))
    assert desk.staged() == []
    assert "GONE" not in output(job)
    assert ended(job)["reason"] == "cancelled"


def test_a_preempted_and_a_requeued_job_say_so(desk: Desk) -> None:
    """The next attempt starts again, and each records how it ended."""
    whole = {"nodes": 2, "cpus_per_rank": 4, "time": "5:00"}
    go = desk.directory / "go"
    wait = ["sh", "-c", f"echo begins; until [ -e {go} ]; do sleep 0.1; done"]
    job = desk.submit("low", command=wait, resources={**whole, "partition": "low"})
    says(job, "begins", 2)
    assert desk.run("high", command=["true"], resources=whole)["state"] == "COMPLETED"
    assert (ended(job)["state"], ended(job)["reason"]) == ("PREEMPTED", "preempted")
    says(job, "begins", 4)
    record = Path(job["directory"], "attempts", "0", "ended.json")  # as if it had been killed
    record.unlink()
    desk.hpml("status", job["id"])
    assert (ended(job)["state"], ended(job)["reason"]) == ("PREEMPTED", "preempted")
    desk.slurm("scontrol", "requeue", job["job_id"])
    assert ended(job, 1)["reason"] == "requeued"
    says(job, "begins", 6)
    go.touch()
    assert desk.json("wait", job["id"])["attempts"] == 3
    assert ended(job, 2)["reason"] == "completed"
    shown = desk.hpml("show", job["id"]).stdout
    assert re.search(r"^attempts {3}1: preempted after \d+ s on node", shown, re.MULTILINE), shown
    assert re.search(r"^ {11}3: completed after \d+ s on node", shown, re.MULTILINE), shown


WAITS = (
    "import os, sys, time; path = os.environ['HPML_RUN_DIR'] + '/tried';"
    "sys.exit(0) if os.path.exists(path) else open(path, 'w').close(); time.sleep(600)"
)


def test_a_job_whose_node_fails_starts_again(desk: Desk, data: dict[str, str]) -> None:
    """Slurm starts the job again; the first attempt records why it ended."""
    command = [PYTHON, "-c", WAITS]
    job = desk.submit("victim", command=command, resources={"time": "5:00"}, stage=[data])
    eventually(Path(job["directory"], "tried").exists)
    node = desk.slurm("squeue", "-h", "-o", "%N", f"--jobs={job['job_id']}").strip()
    desk.slurm("scontrol", "update", f"nodename={node}", "state=down", "reason=power")
    try:
        done = desk.json("wait", job["id"])
    finally:
        # a node may have come back by itself
        desk.cluster.run("scontrol", "update", f"nodename={node}", "state=resume", check=False)
    assert (done["state"], done["attempts"]) == ("COMPLETED", 2)
    first, second = desk.json("show", job["id"])["history"]
    assert (first["nodes"], second["reason"]) == (node, "completed")
    assert first["reason"] == f"node {node} failed"


HUNGRY = """\
import os, sys, time
if os.environ.get("RANK", "1") == "1":
    full = bytearray(b"1" * (400 << 20))
time.sleep(100)
"""


def test_a_job_that_is_out_of_memory_says_where_and_what_to_do(desk: Desk) -> None:
    """In a step, whose first rank is innocent, and in the script, which leaves no record."""
    (desk.directory / "hungry.py").write_text(HUNGRY)
    command = [PYTHON, str(desk.directory / "hungry.py")]
    resources = {"nodes": 2, "time": "5:00", "memory": "150M"}
    setup = {"setup": " ".join(command)}
    with desk.cluster.configured("JobAcctGatherParams=OverMemoryKill"):
        jobs = {
            "node2": desk.submit("step", command=command, resources=resources),
            "node": desk.submit(
                "batch", command=["true"], environment=setup, resources={**resources, "nodes": 1}
            ),
        }
        for node, job in jobs.items():
            status = desk.json("wait", job["id"], code=6)
            assert (status["state"], status["exit_code"]) == ("FAILED", 137)
            figures = r"\d+\.\d MiB of at most 150\.0 MiB: 150M per node requested; raise it"
            advice = f"with `hpml resubmit {job['id']} --set resources.memory=…`"
            reason = rf"out of memory on {node}\d?, {figures} {advice}"
            assert re.fullmatch(reason, status["reason"]), status["reason"]


def test_records_that_the_nodes_do_not_see(desk: Desk) -> None:
    """Each node has its own /tmp: Slurm finds no directory to run in, and the end says why."""
    records = Path(desk.call("mktemp", "--directory", "--tmpdir=/tmp").stdout.strip())
    desk.more["HPML_HOME"] = str(records)
    try:
        job = desk.run("unseen", command=["true"], resources={"time": "5:00"}, code=6)
        shown = desk.hpml("show", job["id"]).stdout
    finally:
        desk.call("rm", "-r", records)
    assert job["state"] == "FAILED"
    assert job["reason"].startswith("nothing of this job reached its record")
    assert f"do the nodes see {records}? Set HPML_HOME" in shown
    assert "exit code 0" not in shown


def test_without_accounting_ends_are_told_apart(bare: Desk) -> None:
    """Completed and failed jobs are known without sacct."""
    good = bare.run("good", command=["true"])
    bad = bare.run("bad", command=["sh", "-c", "exit 3"], code=6)
    assert (good["state"], good["exit_code"]) == ("COMPLETED", 0)
    assert (bad["state"], bad["exit_code"]) == ("FAILED", 3)
    checks = {check["check"]: check["result"] for check in bare.json("doctor")}
    assert (checks["Slurm"], checks["accounting"]) == ("ok", "none")
    # the job's own record is used once the controller has deleted the job
    record = Path(bad["submission"], "job.json")
    record.write_text(json.dumps({**json.loads(record.read_text()), "job_id": "4242"}))
    Path(bad["submission"], "final.json").unlink()
    (state,) = bare.json("status", bad["id"])
    assert (state["state"], state["exit_code"], state["nodes"]) == ("FAILED", 3, "node1")
    assert state["reason"] == "rank 0 exited with code 3"
    assert "(slurm, cluster devcluster) on node1, 1 rank" in bare.hpml("show", bad["id"]).stdout
    assert "\tnode1\t" in bare.hpml("list").stdout
