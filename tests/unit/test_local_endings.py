"""However a job on this machine ends, its staged data goes and its record says how it ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

HPML = [sys.executable, "-m", "hpml_orchestrator.cli"]


class Machine:
    """This machine as a user of the local backend sees it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.target = root / "target"
        self.target.mkdir()
        self.source = root / "source"
        self.source.mkdir()
        for index in range(50):
            (self.source / f"{index}.bin").write_bytes(os.urandom(100))

    def hpml(self, *arguments: str, code: int = 0) -> Any:
        done = subprocess.run(
            [*HPML, *arguments, "--json"],
            cwd=self.root,
            env={**os.environ, "HPML_HOME": str(self.root / "records")},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == code, done.stderr
        return json.loads(done.stdout)

    def submit(
        self,
        *command: str,
        limit: str = "10:00",
        launcher: str = "srun",
        ranks: int = 1,
        opens: int = 10**6,
    ) -> Any:
        job = {
            "name": "ending",
            "launcher": launcher,
            "command": [*command],
            "resources": {"time": limit, "ranks_per_node": ranks},
            "stage": [{"name": "data", "source": "source", "target": str(self.target)}],
        }
        (self.root / "job.yaml").write_text(json.dumps(job))
        (self.root / "site.toml").write_text(f"[staging]\nopens_per_second = {opens}\n")
        return self.hpml("--site=site.toml", "submit", "--local", "job.yaml")

    def wait_for_rank(self, job: dict[str, str]) -> None:
        deadline = time.monotonic() + 120
        binding = Path(job["directory"], "attempts", "0", "binding")
        while not list(binding.glob("*.jsonl")):
            assert time.monotonic() < deadline, Path(job["directory"], "output.log").read_text()
            time.sleep(0.05)
        assert len(list(self.target.rglob("*.bin"))) == 50


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A scratch directory with data to stage and a place to stage it to."""
    return Machine(tmp_path)


def test_a_cancelled_job_takes_its_data_along(machine: Machine) -> None:
    """After `hpml cancel` the staging target is empty and the state CANCELLED."""
    job = machine.submit("sleep", "600")
    machine.wait_for_rank(job)
    machine.hpml("cancel", job["id"])
    done = machine.hpml("wait", job["id"], code=6)
    assert done["state"] == "CANCELLED"
    assert list(machine.target.iterdir()) == []


def test_a_job_at_its_time_limit_takes_its_data_along(machine: Machine) -> None:
    """At the time limit the ranks end, the staging target is empty, and the state is TIMEOUT."""
    for limit in ("0:04", "0:20", "1:40"):  # a busy machine needs longer until the ranks begin
        job = machine.submit("sh", "-c", "ls {stage.data} | wc -l; sleep 600", limit=limit)
        machine.hpml("wait", job["id"], code=6)
        if "\n50\n" in Path(job["directory"], "output.log").read_text():
            break
    done = machine.hpml("wait", job["id"], code=6)
    assert done["state"] == "TIMEOUT"
    assert list(machine.target.iterdir()) == []


def test_a_failing_job_takes_its_data_along(machine: Machine) -> None:
    """A rank's exit status is the job's; its data is gone all the same."""
    job = machine.submit("sh", "-c", "ls {stage.data} >/dev/null && exit 7")
    done = machine.hpml("wait", job["id"], code=6)
    assert (done["state"], done["exit_code"]) == ("FAILED", 7)
    assert list(machine.target.iterdir()) == []


def test_what_a_killed_job_left_goes_with_the_next(machine: Machine) -> None:
    """Data of a job whose agent was killed outright is removed when the next job stages."""
    job = machine.submit("sleep", "600")
    machine.wait_for_rank(job)
    (marker,) = Path(job["directory"], "attempts", "0", "nodes").glob("*.ready.json")
    os.kill(int(json.loads(marker.read_text())["pid"]), 9)
    machine.hpml("cancel", job["id"])
    machine.hpml("wait", job["id"], code=6)
    assert len(list(machine.target.rglob("*.bin"))) == 50
    following = machine.submit("true")
    assert machine.hpml("wait", following["id"])["state"] == "COMPLETED"
    assert list(machine.target.iterdir()) == []


def test_ranks_do_not_wait_for_an_agent_that_was_killed(machine: Machine) -> None:
    """Killed while it stages: no rank runs, the job fails long before its limit and says why."""
    ranks = min(8, len(os.sched_getaffinity(0)))
    job = machine.submit("sh", "-c", "echo RANK RAN", ranks=ranks, opens=2)
    deadline = time.monotonic() + 60
    while not (found := list(machine.target.rglob(".data.partial-*"))):
        assert time.monotonic() < deadline, Path(job["directory"], "output.log").read_text()
        time.sleep(0.02)
    os.kill(int(found[0].name.split("-")[1]), 9)
    done = machine.hpml("wait", job["id"], code=6)
    assert done["state"] == "FAILED"
    output = Path(done["output"]).read_text("utf-8")
    assert "RANK RAN" not in output
    assert "the node agents ended before all nodes were ready (0 of 1 are)" in output
    following = machine.submit("true")
    assert machine.hpml("wait", following["id"])["state"] == "COMPLETED"
    assert list(machine.target.iterdir()) == []
