"""The state of a job that is being ended, as `scontrol show job` printed it.

The outputs are those of Slurm 22.05.8 on a cluster of two nodes; the jobs' names were meant to
mislead.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from hpml_orchestrator.node.continuation import AllocationState, ask, kill_wait

DATA = Path(__file__).parents[2] / "data" / "slurm-ending-jobs"


class Scontrol:
    """Answers with a text, and remembers what it was asked."""

    def __init__(self, text: str | None) -> None:
        self.text = text
        self.command: list[str] = []
        self.environment: dict[str, str] = {}

    def __call__(self, command: Sequence[str], environment: Mapping[str, str]) -> str:
        """Return the text; OSError without one."""
        self.command, self.environment = list(command), dict(environment)
        if self.text is None:
            raise OSError("no answer")
        return self.text


def at(text: str) -> float:
    """A time of the outputs in seconds since the epoch."""
    return time.mktime(time.strptime(f"2026-11-24T{text}", "%Y-%m-%dT%H:%M:%S"))


@pytest.mark.parametrize(
    ("name", "job_id", "restarts", "state"),
    [
        ("running", "5", "", AllocationState("RUNNING")),
        ("grace", "5", "", AllocationState("RUNNING")),  # preempted, and its grace time is not over
        ("array", "3", "", AllocationState("RUNNING", at("10:26:58") + 365 * 86400)),
        ("array-cancelled", "3", "", AllocationState("CANCELLED")),
        (
            "array-cancelled",
            "2",
            "",
            AllocationState("CANCELLED"),
        ),  # the array's number is a task's, too
        ("requeued", "4", "", AllocationState("REQUEUED")),
        ("requeued", "4", "1", AllocationState("CANCELLED")),  # of an earlier start
        ("timelimit", "7", "", AllocationState("TIMEOUT")),
        ("nodedown", "8", "", AllocationState("FAILED")),
        ("running", "55", "", AllocationState()),
        ("array", "", "", AllocationState()),
    ],
)
def test_the_state_of_a_job(name: str, job_id: str, restarts: str, state: AllocationState) -> None:
    """COMPLETING hides why a job ends, so other fields decide; of an array the own task counts."""
    scontrol = Scontrol((DATA / f"{name}.txt").read_text("utf-8"))
    environment = {"SLURM_JOB_ID": job_id, "SLURM_RESTART_COUNT": restarts, "SLURM_CLUSTERS": "b"}
    assert ask(environment, scontrol) == state
    assert scontrol.command == ["scontrol", "show", "job", job_id]
    assert "SLURM_CLUSTERS" not in scontrol.environment  # not another cluster's job of that id


@pytest.mark.parametrize("flag", ["SIGNALING", "RESIZING", "CONFIGURING", "SUSPENDED"])
def test_a_flag_does_not_end_a_job(flag: str) -> None:
    """A flag is shown in place of the state: such a job still runs."""
    text = (DATA / "grace.txt").read_text("utf-8").replace("JobState=RUNNING", f"JobState={flag}")
    assert ask({"SLURM_JOB_ID": "5"}, Scontrol(text)).state == "RUNNING"


def test_no_answer_is_no_state() -> None:
    """Nor is an answer that is not understood."""
    for text in (None, "", "slurm_load_jobs error: Invalid job id specified\n"):
        assert ask({"SLURM_JOB_ID": "7"}, Scontrol(text)) == AllocationState()


@pytest.mark.parametrize(
    ("status", "state"),
    [
        ('{"state": "RUNNING", "reason": ""}', "RUNNING"),
        ('{"state": "COMPLETING", "reason": "cancelled"}', "CANCELLED"),
        ('{"state": "COMPLETING", "reason": "TimeLimit"}', "TIMEOUT"),
        ('{"state": "COMPLETING", "reason": "the supervisor ends"}', "FAILED"),
        ("{}", ""),
        ("{", ""),
    ],
)
def test_a_local_job_has_its_state_in_a_file(tmp_path: Path, status: str, state: str) -> None:
    """Its supervisor writes it before it sends a signal."""
    (tmp_path / "3.json").write_text(status)
    environment = {"HPML_LOCAL_STEPS": f"{tmp_path}/steps-3", "SLURM_JOB_ID": "7"}
    assert ask(environment, Scontrol(None)).state == state


@pytest.mark.parametrize(
    ("environment", "shown", "seconds"),
    [
        ({}, "KillOnBadExit           = 0\nKillWait                = 8 sec\n", 8),
        ({}, "", 30),
        ({}, None, 30),
        ({"HPML_LOCAL_KILL_WAIT": "2.5"}, None, 2.5),
        ({"HPML_LOCAL_KILL_WAIT": "x"}, None, 30),
    ],
)
def test_kill_wait(environment: dict[str, str], shown: str | None, seconds: float) -> None:
    """It is the cluster's; Slurm's default if that is unknown."""
    assert kill_wait(environment, Scontrol(shown)) == seconds
