"""Sweeps on a real Slurm: controllers killed, limits of the site, a node down, lost answers.

Whatever happens, every point has one task that runs, and one row with its result.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import patience
from tests.cluster.conftest import SlurmCluster, booted
from tests.cluster.hpml_on_slurm import HPML, Desk, eventually
from tests.cluster.user import VENV

CONFIGURATION = """\
MaxArraySize=8
AccountingStorageEnforce=associations,limits,qos
"""
LONG = os.environ.get("HPML_LONG") == "1"
KILLS = 20 if LONG else 3
# Each task reports its start in one write, and leaves its point as the result.
TASK = """\
echo "$1" >> "$2"
sleep "$3"
echo "{\\"test_accuracy\\": 0.$1}" > "$4/result.json"
"""
# A fake that names itself as one: it calls the real sbatch, and loses the first answer.
FAKE_SBATCH = """\
#!/bin/sh
[ -e {seen} ] && exec {sbatch} "$@"
touch {seen}
{sbatch} "$@" > /dev/null
echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation" >&2
echo "this is the tests' fake of sbatch" >&2
exit 1
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    """Two nodes of 4 CPUs; arrays have at most 8 tasks, and limits are enforced."""
    with tempfile.NamedTemporaryFile("w", suffix=".conf") as lines:
        lines.write(CONFIGURATION)
        lines.flush()
        with booted("--nodes", "2", "--cpus", "4", "--slurm-conf", lines.name) as made:
            yield made


@pytest.fixture
def desk(cluster: SlurmCluster, tmp_path: Path) -> Desk:
    """A user's desk in front of that cluster."""
    return Desk(cluster, tmp_path)


def sweep_file(desk: Desk, points: int, seconds: float = 0.2, **fields: Any) -> Path:
    """Write a grid of points whose tasks take this many seconds."""
    desk.job(
        "task",
        command=["bash", "-c", TASK, "task"],
        args=["n=0", str(desk.directory / "started"), str(seconds), "{run.dir}"],
        resources={"time": "2:00", "memory": "50M"},
    )
    sweep = {
        "base": "task.yaml",
        "mode": "grid",
        "axes": {"n=": list(range(points))},
        "repeats": 1,
        "budget": {"submits_per_minute": 600},
    }
    path = desk.directory / "sweep.yaml"
    path.write_text(json.dumps(sweep | fields))
    return path


def started(desk: Desk) -> list[int]:
    """The points whose task has run, once for each time."""
    path = desk.directory / "started"
    lines = path.read_text().split() if path.exists() else []
    return sorted(int(line.removeprefix("n=")) for line in lines)


def arrays(desk: Desk) -> list[int]:
    """The sizes of the arrays that the controller of the cluster took."""
    ids = desk.slurm("sacct", "--allocations", "--noheader", "--format=jobid", "--allusers")
    mine = {
        json.loads(path.read_text())["job_id"]
        for path in desk.records.glob("submissions/*/job.json")
    }
    return sorted(Counter(i.split("_")[0] for i in ids.split() if i.split("_")[0] in mine).values())


def rows(desk: Desk) -> list[dict[str, Any]]:
    """The rows of the newest sweep."""
    found: list[dict[str, Any]] = desk.json("sweep", "status", "last")["rows"]
    return found


def check_all_done(desk: Desk, points: int) -> None:
    """Every point has run once, and has a row that is COMPLETED."""
    assert started(desk) == list(range(points))
    found = rows(desk)
    assert [row["point"] for row in found] == list(range(points))
    assert {row["state"] for row in found} == {"COMPLETED"}


def carries_on(desk: Desk, pid: int) -> bool:
    """Whether that process has the lease of the sweep."""
    leases = desk.records.glob("sweeps/*-*/controller.*.json")
    return any(json.loads(path.read_text())["pid"] == pid for path in leases)


def test_killed_controllers(desk: Desk) -> None:
    """After a SIGKILL at any moment, the next one continues; arrays have the largest size."""
    full = 3 if LONG else 1
    points = 8 * full + 6
    sweep = sweep_file(desk, points)
    moments = random.Random(os.getpid())
    arguments = ["sweep", "run", str(sweep), "--no-check"]
    for _ in range(KILLS):
        desk.hand_over()
        process = subprocess.Popen(
            [*HPML, *arguments],
            env=desk.environment,
            cwd=desk.directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        patience.eventually(partial(carries_on, desk, process.pid), "the controller works")
        time.sleep(moments.uniform(0.0, 0.5))
        process.kill()
        process.wait()
        arguments = ["sweep", "resume", "last"]
    desk.hpml("sweep", "resume", "last")
    check_all_done(desk, points)
    # Slurm's accounting may get the last task a moment after the task has ended.
    wanted = [6, *[8] * full]
    patience.eventually(lambda: arrays(desk) == wanted, f"the arrays have the sizes {wanted}")


def test_a_limit_on_submitted_jobs(desk: Desk) -> None:
    """QOSMaxSubmitJobPerUserLimit: fewer at a time, until all have run."""
    desk.slurm("sacctmgr", "-i", "modify", "qos", "normal", "set", "MaxSubmitJobsPerUser=3")
    try:
        desk.hpml("sweep", "run", sweep_file(desk, 7), "--no-check")
    finally:
        desk.slurm("sacctmgr", "-i", "modify", "qos", "normal", "set", "MaxSubmitJobsPerUser=-1")
    check_all_done(desk, 7)
    batches = [
        json.loads(path.read_text()) for path in desk.records.glob("sweeps/*/batches/*.json")
    ]
    refused = [batch["refusal"] for batch in batches if "refusal" in batch]
    assert not [*desk.records.glob("submissions/*/refused.json")]
    assert refused
    assert all("QOSMaxSubmitJobPerUserLimit" in text for text in refused)


def test_a_lost_answer_of_sbatch(desk: Desk) -> None:
    """Its socket timed out, but the job exists: it is found, not submitted again."""
    fake = desk.directory / "fake" / "sbatch"
    fake.parent.mkdir()
    real = desk.call("sh", "-c", "command -v sbatch").stdout.strip()
    fake.write_text(FAKE_SBATCH.format(seen=desk.directory / "seen", sbatch=real))
    fake.chmod(0o755)
    desk.more = {"PATH": f"{fake.parent}:{VENV}/bin:{os.environ['PATH']}"}
    desk.hpml("sweep", "run", sweep_file(desk, 4), "--no-check")
    assert (desk.directory / "seen").exists()
    check_all_done(desk, 4)
    assert arrays(desk) == [4]


def test_a_node_that_goes_down(desk: Desk) -> None:
    """Its tasks are requeued by Slurm, or started again by the sweep; no point is lost."""
    sweep = sweep_file(desk, 6, 8)
    desk.hpml("sweep", "run", sweep, "--no-check", "--detach")
    eventually(lambda: len(started(desk)) == 6)
    desk.slurm("scontrol", "update", "nodename=node2", "state=down", "reason=test")
    eventually(lambda: "node2" not in desk.slurm("squeue", "--noheader", "--format=%N"))
    desk.slurm("scontrol", "update", "nodename=node2", "state=idle")
    desk.hpml("sweep", "resume", "last")
    last = {row["point"]: row for row in rows(desk)}
    assert {row["state"] for row in last.values()} == {"COMPLETED"}
    assert set(started(desk)) == set(range(6))
    assert len(started(desk)) > 6
