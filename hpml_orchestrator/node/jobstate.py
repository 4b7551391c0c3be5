"""The state of this job: why it is being ended, when it ends, and the cluster's KillWait.

A local job has no `scontrol`: its state is in the file that its supervisor writes.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

_KILL_WAIT_SECONDS = 30.0  # Slurm's default
_QUERY_SECONDS = 5.0
_LOCAL_STATES = {"cancelled": "CANCELLED", "TimeLimit": "TIMEOUT"}
_ENDING = (
    "COMPLETING CANCELLED TIMEOUT PREEMPTED NODE_FAIL FAILED COMPLETED OUT_OF_MEMORY BOOT_FAIL "
    "DEADLINE PENDING REQUEUED REQUEUE_HOLD REQUEUE_FED SPECIAL_EXIT REVOKED STAGE_OUT"
).split()
_FAILURES = ("NodeDown", "NodeFail", "SystemFailure", "JobLaunchFailure")

Run = Callable[[Sequence[str], Mapping[str, str]], str]
"""Runs a command with an environment and returns its output; OSError if that fails."""


class AllocationState(NamedTuple):
    """The state of a job.

    Attributes:
        state: RUNNING, CANCELLED, TIMEOUT, PREEMPTED, REQUEUED or FAILED; empty without an answer.
        end: when the time limit ends it, in seconds since the epoch; None if unknown or unlimited.
    """

    state: str = ""
    end: float | None = None


def run_command(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Run a command for a few seconds at most and return its output.

    Raises:
        OSError: it cannot be run, failed, or took too long.
    """
    try:
        done = subprocess.run(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_QUERY_SECONDS,
            check=True,
        )
    except subprocess.SubprocessError as error:
        raise OSError(str(error)) from error
    return done.stdout


def ask(environment: Mapping[str, str], run: Run = run_command) -> AllocationState:
    """Return the state of the job that these variables belong to."""
    if "HPML_LOCAL_STEPS" in environment:
        return _local(environment["HPML_LOCAL_STEPS"])
    job_id, restarts = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_RESTART_COUNT")
    # SLURM_CLUSTERS would ask another cluster, where the id may be another job's.
    plain = {name: text for name, text in environment.items() if name != "SLURM_CLUSTERS"}
    # A user may have set another format, even a relative one.
    plain["SLURM_TIME_FORMAT"] = "standard"
    try:
        shown = run(["scontrol", "show", "job", job_id], plain)
        return parse_job(shown, job_id, restarts=int(restarts or 0))
    except (OSError, ValueError):
        return AllocationState()


def parse_job(text: str, job_id: str, *, restarts: int = 0) -> AllocationState:
    """Return the state of a job in the output of `scontrol show job`.

    While a job is being ended its state is COMPLETING, whatever the reason (22.05 to 26.05); the
    reason is in other fields.

    Args:
        text: the output; of an array it has all tasks.
        job_id: the job's own id.
        restarts: how often this job had been requeued when this start of it began.
    """
    for job in re.split(r"\n(?=JobId=)", text.lstrip("\n")):
        if re.match(rf"JobId={re.escape(job_id)}\s", job):
            break
    else:
        return AllocationState()
    # The first line is left out: it has the job's name, which may contain anything.
    fields = dict(
        pair
        for line in job.splitlines()[1:]
        if not re.match(r"\s+(Comment|AdminComment|Command|WorkDir|Std)", line)
        for pair in re.findall(r"(\w+)=(\S*)", line)
    )
    state, reason = fields.get("JobState", ""), fields.get("Reason", "")
    end = _time(fields.get("EndTime", ""))
    if state and state not in _ENDING:  # SIGNALING, RESIZING and others are flags of a running job
        return AllocationState("RUNNING", end)
    preempted = fields.get("PreemptTime", "None") not in ("None", "Unknown", "")
    # The order matters: a job that is preempted or at its time limit may be requeued as well, and
    # whether the run continues depends on what ended it.
    if reason == "TimeLimit" or state == "TIMEOUT":
        state = "TIMEOUT"
    elif preempted or state == "PREEMPTED":
        state = "PREEMPTED"
    elif int(fields.get("Restarts", "0")) > restarts or state == "PENDING":
        state = "REQUEUED"
    elif state in ("COMPLETING", "CANCELLED") and reason not in _FAILURES:
        state = "CANCELLED"
    elif state:
        state = "FAILED"
    return AllocationState(state, None)


def _time(text: str) -> float | None:
    """Return a local time of Slurm in seconds since the epoch; None for words."""
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None


def _local(steps: str) -> AllocationState:
    directory, _, position = steps.rpartition("/steps-")
    try:
        with open(f"{directory}/{position}.json", encoding="utf-8") as stream:
            status = json.load(stream)
        if status["state"] != "COMPLETING":
            return AllocationState("RUNNING")
        return AllocationState(_LOCAL_STATES.get(status["reason"], "FAILED"))
    except (OSError, ValueError, KeyError, TypeError):
        return AllocationState()


def kill_wait(environment: Mapping[str, str], run: Run = run_command) -> float:
    """Return the seconds from a job's SIGTERM to its SIGKILL, as the cluster is configured."""
    with contextlib.suppress(OSError, ValueError):
        if "HPML_LOCAL_KILL_WAIT" in environment:
            return float(environment["HPML_LOCAL_KILL_WAIT"])
        shown = run(["scontrol", "show", "config"], environment)
        match = re.search(r"^KillWait\s*=\s*(\d+)", shown, re.MULTILINE)
        return float(match[1]) if match else _KILL_WAIT_SECONDS
    return _KILL_WAIT_SECONDS
