"""Decide whether a run continues after an attempt, and start its next job.

The next job is a requeue or a continuation. `decide` is called before the attempt's end is
recorded, `continue_run` after the agents have ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hpml_orchestrator.errors import HpmlError
from hpml_orchestrator.records.files import read_text, write_json
from hpml_orchestrator.records.ids import parse_answer
from hpml_orchestrator.records.job import NodeJob
from hpml_orchestrator.records.run import PRUNED, Attempt, nodes_to_avoid
from hpml_orchestrator.records.submission import Submission

if TYPE_CHECKING:
    from hpml_orchestrator.records.job import Checkpoint

# The state of this job in Slurm: why and when it ends, and the cluster's KillWait.
#
# For a local job the state is in a file written by its supervisor.

_KILL_WAIT_SECONDS = 30.0  # Slurm's default
_QUERY_SECONDS = 5.0
_LOCAL_STATES = {"cancelled": "CANCELLED", "TimeLimit": "TIMEOUT"}
_ENDING = (
    "COMPLETING CANCELLED TIMEOUT PREEMPTED NODE_FAIL FAILED COMPLETED OUT_OF_MEMORY BOOT_FAIL "
    "DEADLINE PENDING REQUEUED REQUEUE_HOLD REQUEUE_FED SPECIAL_EXIT REVOKED STAGE_OUT"
).split()
_FAILURES = ("NodeDown", "NodeFail", "SystemFailure", "JobLaunchFailure")

Run = Callable[[Sequence[str], Mapping[str, str]], str]
"""Runs a command with an environment and returns its output; raises OSError on failure."""


class AllocationState(NamedTuple):
    """The state of a job.

    Attributes:
        state: RUNNING, CANCELLED, TIMEOUT, PREEMPTED, REQUEUED or FAILED; empty if unknown.
        end: end by the time limit, seconds since the epoch; None if unknown or unlimited.
    """

    state: str = ""
    end: float | None = None


def run_command(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Run a command for at most a few seconds and return its output.

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
    """Return the state of the job with these environment variables."""
    if "HPML_LOCAL_STEPS" in environment:
        return _local(environment["HPML_LOCAL_STEPS"])
    job_id, restarts = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_RESTART_COUNT")
    # SLURM_CLUSTERS would query another cluster, where another job may have this id.
    plain = {name: text for name, text in environment.items() if name != "SLURM_CLUSTERS"}
    # The user may have set another time format, even a relative one.
    plain["SLURM_TIME_FORMAT"] = "standard"
    try:
        shown = run(["scontrol", "show", "job", job_id], plain)
        return parse_job(shown, job_id, restarts=int(restarts or 0))
    except (OSError, ValueError):
        return AllocationState()


def parse_job(text: str, job_id: str, *, restarts: int = 0) -> AllocationState:
    """Return the state of a job in the output of `scontrol show job`.

    While a job is being ended, its state is COMPLETING (Slurm 22.05 to 26.05), and the reason is in
    other fields.

    Args:
        text: the output, with all tasks of an array.
        job_id: the job's own id.
        restarts: number of requeues of this job before this attempt.
    """
    for job in re.split(r"\n(?=JobId=)", text.lstrip("\n")):
        if re.match(rf"JobId={re.escape(job_id)}\s", job):
            break
    else:
        return AllocationState()
    # Skip the first line: it contains the job's name, which may be any text.
    fields = dict(
        pair
        for line in job.splitlines()[1:]
        if not re.match(r"\s+(Comment|AdminComment|Command|WorkDir|Std)", line)
        for pair in re.findall(r"(\w+)=(\S*)", line)
    )
    state, reason = fields.get("JobState", ""), fields.get("Reason", "")
    end = _time(fields.get("EndTime", ""))
    if state and state not in _ENDING:  # SIGNALING, RESIZING and others are flags of running jobs
        return AllocationState("RUNNING", end)
    preempted = fields.get("PreemptTime", "None") not in ("None", "Unknown", "")
    # The order matters: a job that was preempted or reached its time limit may also be requeued,
    # but the cause decides whether the run continues.
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
    """Return a local time from Slurm in seconds since the epoch; None for words."""
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
    """Return the cluster's KillWait: seconds from a job's SIGTERM to its SIGKILL."""
    with contextlib.suppress(OSError, ValueError):
        if "HPML_LOCAL_KILL_WAIT" in environment:
            return float(environment["HPML_LOCAL_KILL_WAIT"])
        shown = run(["scontrol", "show", "config"], environment)
        match = re.search(r"^KillWait\s*=\s*(\d+)", shown, re.MULTILINE)
        return float(match[1]) if match else _KILL_WAIT_SECONDS
    return _KILL_WAIT_SECONDS


EXIT_CONTINUED = 75
"""Exit status of a script whose run continues in another job; not 0, as the run is incomplete."""

REASONS = {"TIMEOUT": "time_limit", "PREEMPTED": "preemption", "NODE_FAIL": "node_failure"}
"""Why an attempt ended before the run was complete, by state in Slurm."""

_ASKED = (
    "time_limit",
    "preemption",
    "hang",
    "requested",
)  # except by a search, which prunes a trial
_PATIENCE_SECONDS = 600.0
_AGAIN_SECONDS = 5.0
_COMMAND_SECONDS = 120.0
_WITHOUT_PROGRESS = 3
_UNREACHABLE = re.compile(
    r"[Uu]nable to contact slurm controller|timed out|[Cc]onnection (?:refused|reset)"
    r"|Zero Bytes were transmitted|backup controller|[Tt]emporarily unable to accept job"
)
_UNDER_WAY = re.compile(r"Job is pending execution|already (?:being )?requeued", re.IGNORECASE)


class Decision(NamedTuple):
    """Whether a run continues."""

    goes_on: bool = False  # whether it continues
    why: str = ""  # what ended the attempt early; empty if the run is complete
    stays: str = ""  # why an incomplete run does not continue


def decide(
    options: Checkpoint,
    *,
    state: str,
    exit_code: int,
    asked: str = "",
    stopping: bool = False,
    channel: bool = False,
    progress: Sequence[bool] = (),
) -> Decision:
    """Decide whether a run continues after an attempt.

    Args:
        options: the job's `checkpoint`.
        state: how the attempt ended, as in Slurm.
        exit_code: of the ranks.
        asked: reason of the stop request to the ranks; empty without one.
        stopping: whether a rank reported that it stops on request.
        channel: whether any rank used the channel.
        progress: for each attempt, this one last, whether it made progress.
    """
    # Never continue a job that the user cancelled or a trial that a search pruned.
    if not options.enabled or state == "CANCELLED" or asked == PRUNED:
        return Decision()
    if asked in _ASKED:
        # Without the channel, a signal may have asked the program to stop. Its exit status 0 then
        # means "saved" or "complete", so the run continues; if it is complete, it ends at once.
        signalled = bool(options.signal) or asked == "preemption"
        stopped = stopping if channel else signalled
        done = exit_code == 0 and not stopped and state == "COMPLETED"
        why = "" if done else asked
        if asked == "preemption":  # agents use this for any SIGTERM; Slurm knows the reason
            why = why and REASONS.get(state, why)
    else:
        why = REASONS.get(state, "")
    if not why or why not in (*options.requeue, "requested"):
        return Decision(why=why)
    if len(progress) >= options.attempts:
        return Decision(why=why, stays=f"{options.attempts} attempts are used up")
    # A run that saves nothing new would only waste its remaining attempts.
    if len(progress) >= _WITHOUT_PROGRESS and not any(progress[-_WITHOUT_PROGRESS:]):
        return Decision(
            why=why,
            stays=f"{_WITHOUT_PROGRESS} attempts saved nothing new in the checkpoint directory",
        )
    return Decision(goes_on=True, why=why)


def continue_run(attempt: str, submission: str, code: str) -> int:
    """Start the next attempt if the run continues; print the script's exit status."""
    records = Attempt(Path(attempt))
    status = int(code)
    if records.ended is None and records.stop_request():
        status = status or 1  # its end could not be recorded, so the run is incomplete
    if records.goes_on:
        try:
            stays = _next_job(records, NodeJob.read(Path(submission)))
        except (HpmlError, OSError) as error:
            stays = str(error)
        if stays:
            _say(f"the run cannot continue: {stays}")
            ended = {**(records.ended or {}), "goes_on": False, "stays": stays}
            write_json(records.directory / "ended.json", {**ended, "exit_code": status or 1})
        status = (status or 1) if stays else EXIT_CONTINUED
    sys.stdout.write(f"{status}\n")
    return 0


def _next_job(records: Attempt, read: NodeJob) -> str:
    """Requeue this job or submit a continuation; return the reason if neither is possible."""
    job_id = job_name(os.environ)
    state = ask(os.environ).state
    if state == "CANCELLED":
        return "the job was cancelled"
    avoid: list[str] = []
    if read.job.checkpoint.avoid_failed_nodes:
        avoid = nodes_to_avoid(records, lambda command: _command(command).stdout, _say)
    refused = "the site forbids requeueing"
    if read.site.can_requeue:
        refused = "" if state == "REQUEUED" else _requeue(job_id)
    if not refused:
        # Record this first: the job may be killed at any moment.
        records.record_next("requeue", job_id, exclude=avoid, now=time.time())
        if avoid:
            exclude = _excluded(job_id, avoid)
            done = _command(["scontrol", "update", f"JobId={job_id}", f"ExcNodeList={exclude}"])
            if done.returncode:
                _say(f"the next attempt may get {exclude} again: {_words(done)}")
        return ""
    _say(f"not requeued ({refused}); the run continues in another job")
    return _continue(records, job_id, avoid)


def job_name(environment: Mapping[str, str]) -> str:
    """Return the id of only this job: SLURM_JOB_ID of an array task may mean the whole array."""
    array = environment.get("SLURM_ARRAY_JOB_ID")
    if array:
        return f"{array}_{environment['SLURM_ARRAY_TASK_ID']}"
    return environment.get("SLURM_JOB_ID", "")


def _requeue(job_id: str) -> str:
    """Requeue this job; return the reason if that is refused.

    After a preemption or a node failure, Slurm may have requeued it already.
    """
    done = _patiently(["scontrol", "requeue", job_id])
    if done.returncode == 0 or _UNDER_WAY.search(done.stderr):
        return ""
    if ask(os.environ).state == "REQUEUED":
        return ""
    return _words(done)


def _continue(records: Attempt, job_id: str, avoid: Sequence[str]) -> str:
    """Submit a continuation; return the reason if that is impossible."""
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    run = records.directory.parents[1]
    sid = run.name.rpartition(".")[0] if task else run.name
    submission = Submission(
        run.parents[1] / "submissions" / sid, None if task is None else int(task)
    )
    if not submission.job_ids():
        return "the script was not submitted by hpml"
    recorded = read_text(submission.directory / "arguments").split("\0")[:-1]
    if recorded[:1] != ["sbatch"]:
        return f"no call of sbatch is recorded in {submission.directory}"
    # `hpml requeue` on a login node may submit the continuation at the same time. The start marker
    # is created exclusively, so only one of them calls sbatch.
    if not records.mark_start(1, now=time.time()):
        return ""  # another hpml process submits it
    exclude = _excluded(job_id, avoid)
    # Slurm refuses to exclude an unknown node. Continuing on a doubtful node is better than not
    # continuing.
    tries = [exclude, ""] if exclude else [""]
    for left_out in tries:
        arguments = continuation_arguments(
            recorded, after=job_id, exclude=left_out, index=submission.index
        )
        # sbatch writes to files: if this process is killed, the job's id is still recorded.
        out, err = records.directory / "sbatch.out", records.directory / "sbatch.err"
        with open(out, "wb") as stdout, open(err, "wb") as stderr:
            done = subprocess.run(
                arguments,
                env=_environment(),
                cwd=submission.directory,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                check=False,
            )
        answer = read_text(out)
        following, cluster = parse_answer(answer)
        if following:
            here = os.environ.get("SLURM_CLUSTER_NAME", "").lower()
            if here and cluster and cluster != here:
                cancel = f"`scancel --clusters={cluster} {following}` cancels it"
                return f"sbatch sent the next job to cluster {cluster}, as {following}; {cancel}"
            submission.record_continuation(following, now=time.time())
            records.record_next("continuation", following, exclude=avoid, now=time.time())
            return ""
        message = read_text(err) + answer
        if not done.returncode or _UNREACHABLE.search(message):
            # A job may still exist; the next query of the run's state finds it.
            _say(f"sbatch gave no usable answer: {_clean(message)}")
            return ""
    return f"sbatch refused: {_clean(message)}"


def continuation_arguments(
    recorded: Sequence[str], *, after: str = "", exclude: str = "", index: int | None = None
) -> list[str]:
    """Return the sbatch command for a continuation.

    Args:
        recorded: the command that submitted the run's first job; its dependencies are met.
        after: the job that must end first.
        exclude: nodes to exclude.
        index: of the array task to continue; None without an array.
    """
    *options, script = recorded
    kept = [
        word
        for word in options
        if not word.startswith(("--dependency=", "--kill-on-invalid-dep", "--array="))
    ]
    return [
        *kept,
        *([f"--dependency=afterany:{after}"] if after else []),
        *([f"--exclude={exclude}"] if exclude else []),
        *([f"--array={index}"] if index is not None else []),
        script,
    ]


def _excluded(job_id: str, avoid: Sequence[str]) -> str:
    if not avoid:
        return ""
    shown = _command(["scontrol", "--oneliner", "show", "job", job_id]).stdout
    match = re.search(r"\sExcNodeList=(\S+)", shown)
    before = [match[1]] if match and match[1] != "(null)" else []
    return ",".join([*before, *avoid])


def _environment() -> dict[str, str]:
    # Use the initial variables of the script: modules and environments have changed the current
    # ones, and this job's variables, such as SLURM_MEM_PER_NODE, must not reach the next job.
    with open(f"/proc/{os.getppid()}/environ", "rb") as stream:
        entries = stream.read().split(b"\0")
    pairs = (os.fsdecode(entry).partition("=") for entry in entries if entry)
    return {
        name: value
        for name, _, value in pairs
        if name == "SLURM_CONF" or not name.startswith(("SLURM_", "SLURMD_", "HPML_"))
    }


def _patiently(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    # A restart of the controller takes minutes. Retrying costs little because the job still runs,
    # but giving up would end the run.
    until = time.monotonic() + _PATIENCE_SECONDS
    while True:
        done = _command(command)
        if not (done.returncode and _UNREACHABLE.search(done.stderr)) or time.monotonic() > until:
            return done
        time.sleep(_AGAIN_SECONDS)


def _command(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    environment = {name: text for name, text in os.environ.items() if name != "SLURM_CLUSTERS"}
    try:
        return subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_COMMAND_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"{command[0]} timed out")
    except OSError as error:
        return subprocess.CompletedProcess(command, 127, "", f"{command[0]}: {error.strerror}")


def _words(done: subprocess.CompletedProcess[str]) -> str:
    return _clean(done.stderr) or f"status {done.returncode}"


def _clean(message: str) -> str:
    lines = (re.sub(r"^\w+: (?:error: )?", "", line).strip() for line in message.splitlines())
    return "; ".join(filter(None, lines))


def _say(text: str) -> None:
    sys.stderr.write(f"hpml: {text}\n")
