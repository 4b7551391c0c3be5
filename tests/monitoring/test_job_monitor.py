"""What a job's own exporter adds up of its GPUs is what the simulated GPUs did."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from deploy.gpusim.gpusim import Event, Process, State, a100
from hpml_orchestrator.node.monitor import NodeMonitor
from hpml_orchestrator.records.job import Monitor
from hpml_orchestrator.records.run import Attempt
from hpml_orchestrator.runs.reporting.monitor import monitor_lines, monitored_nodes
from tests.patience import eventually

if TYPE_CHECKING:
    from tests.monitoring.gpusim_support import Gpusim

GPUS = {"SLURM_NNODES": "1", "SLURM_JOB_GPUS": f"{a100(0).uuid},{a100(1).uuid}"}
WATTS, BUSY, GIB = 250, 40, 1 << 30


def told(attempt: Path) -> dict[str, Any]:
    """What the exporter has written so far."""
    path = attempt / "nodes" / "n1.monitor.json"
    return json.loads(path.read_text()) if path.exists() else {}


@pytest.fixture
def environment(gpusim: Gpusim) -> dict[str, str]:
    """The variables of an agent whose job has the first two GPUs."""
    kept = {n: v for n, v in gpusim.environment.items() if not n.startswith(("SLURM", "HPML_J"))}
    return {**kept, "SLURM_JOB_ID": "17", "SLURM_CLUSTER_NAME": "sim", **GPUS}


@pytest.fixture
def rank(environment: dict[str, str]) -> Iterator[int]:
    """A process of the job."""
    with subprocess.Popen(["sleep", "600"], env=environment) as process:
        yield process.pid
        process.kill()


def busy_seconds(attempt: Path) -> float:
    """Seconds that GPUs were busy, by the summary so far."""
    return float(sum(gpu["busy_seconds"] for gpu in told(attempt).get("gpus", ())))


def test_gpus_of_the_job_are_summed_up(
    tmp_path: Path, gpusim: Gpusim, environment: dict[str, str], rank: int
) -> None:
    """Two of three GPUs are the job's, by their UUIDs; it uses one; the exporter is killed."""
    busy = a100(0, minor=2, util=BUSY, power=WATTS, processes=(Process(rank, 9 * GIB),))
    others = (a100(1, minor=1, util=0, power=WATTS), a100(2, minor=0, util=99, power=400))
    state = gpusim.write(State(gpus=(busy, *others)))
    attempt = tmp_path / "runs" / "r-1" / "attempts" / "0"
    (attempt / "nodes").mkdir(parents=True)
    monitor = NodeMonitor(Monitor(), attempt, "n1", environment)
    began = time.monotonic()
    monitor.start(None)
    try:
        eventually(lambda: told(attempt).get("gpus"))
        counted = time.monotonic()
        process = monitor._process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        eventually(lambda: told(attempt)["starts"] >= 2)  # on a busy machine it may start again
        before = busy_seconds(attempt)
        eventually(
            lambda: busy_seconds(attempt) > before
        )  # it looks at the GPUs: events count from here
        watched = time.monotonic() - counted
        gpusim.write(state.changed(0, events=(Event(1, 79),)))
        eventually(lambda: any(one.get("xid_errors") for one in told(attempt)["gpus"]))
    finally:
        monitor.stop()
    took = time.monotonic() - began
    used, idle = sorted(told(attempt)["gpus"], key=lambda one: -one["busy_seconds"])
    assert (used["uuid"], idle["uuid"]) == (state.gpus[0].uuid, state.gpus[1].uuid)
    # if a stalled machine makes a gap longer than 2.5 s, the excess counts as idle
    assert 0.7 * BUSY / 100 <= used["utilization_ratio"] <= 1.1 * BUSY / 100
    assert idle["busy_seconds"] == 0
    for one in (used, idle):
        assert one["power_watts"] == pytest.approx(WATTS, rel=0.02)
        # before the first reading, energy is estimated from its power: a reading is shown for five
        # seconds at most
        assert watched * WATTS * 0.99 <= one["energy_joules"] <= (took + 5) * WATTS
    assert used["memory_peak_bytes"] >= 9 * GIB > idle["memory_peak_bytes"]
    assert used["xid_errors"] == {"79": 1}
    (line, *_) = monitor_lines(monitored_nodes(Attempt(attempt)))
    assert re.match(r"2 GPUs (1[4-9]|2[0-2])% busy, 9\.0 GiB of memory at most on one, ", line)
    assert "1 of them never used" in line
    assert "XID 79 (1 x)" in line
