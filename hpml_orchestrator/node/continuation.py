"""Whether a run continues after an attempt, and in which job: a requeue or a continuation.

`decide` is called before the attempt's end is recorded, `continue_run` after the agents have ended.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hpml_orchestrator.errors import HpmlError
from hpml_orchestrator.node import jobstate
from hpml_orchestrator.records.files import read_text, write_json
from hpml_orchestrator.records.ids import parse_answer
from hpml_orchestrator.records.job import NodeJob
from hpml_orchestrator.records.run import PRUNED, Attempt, nodes_to_avoid
from hpml_orchestrator.records.submission import Submission

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpml_orchestrator.records.job import Checkpoint

EXIT_CONTINUED = 75
"""Exit status of a script whose run continues in another job: not 0, since the run is not done."""

REASONS = {"TIMEOUT": "time_limit", "PREEMPTED": "preemption", "NODE_FAIL": "node_failure"}
"""Why an attempt ended before the run was done, by Slurm's state."""

_ASKED = ("time_limit", "preemption", "hang", "requested")  # not a search, which gives a point up
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
    why: str = ""  # what ended the attempt before the run was done; empty if the run is done
    stays: str = ""  # why an unfinished run does not continue


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
        state: how the attempt ended, in Slurm's word.
        exit_code: of the ranks.
        asked: the reason for which the ranks were asked to stop; empty if they were not.
        stopping: whether a rank reported that it stops on request.
        channel: whether any rank used the channel.
        progress: for each attempt so far, this one last: whether it made progress.
    """
    # Never continue against the user's will: neither a cancelled job nor a trial that a search has
    # given up.
    if not options.enabled or state == "CANCELLED" or asked == PRUNED:
        return Decision()
    if asked in _ASKED:
        # Without the channel only a signal can have asked the program to stop. After one, its 0 may
        # mean "saved" as well as "done", so the run continues; if it is done, it ends at once.
        signalled = bool(options.signal) or asked == "preemption"
        stopped = stopping if channel else signalled
        done = exit_code == 0 and not stopped and state == "COMPLETED"
        why = "" if done else asked
        if asked == "preemption":  # agents use this for any SIGTERM; Slurm has the reason
            why = why and REASONS.get(state, why)
    else:
        why = REASONS.get(state, "")
    if not why or why not in (*options.requeue, "requested"):
        return Decision(why=why)
    if len(progress) >= options.attempts:
        return Decision(why=why, stays=f"{options.attempts} attempts are used up")
    # A run that saves nothing new would start over until its attempts are used up, and waste the
    # hours of all of them.
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
        status = status or 1  # its end could not be recorded: the run is not done
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
    """Requeue this job, or submit a continuation; return why neither is possible, or nothing."""
    job_id = job_name(os.environ)
    state = jobstate.ask(os.environ).state
    if state == "CANCELLED":
        return "the job was cancelled"
    avoid: list[str] = []
    if read.job.checkpoint.avoid_failed_nodes:
        avoid = nodes_to_avoid(records, lambda command: _command(command).stdout, _say)
    refused = "the site forbids requeueing"
    if read.site.can_requeue:
        refused = "" if state == "REQUEUED" else _requeue(job_id)
    if not refused:
        # Recorded first: the job may be killed at any moment now.
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
    """Return the id of this job alone: SLURM_JOB_ID of an array's task may mean the whole array."""
    array = environment.get("SLURM_ARRAY_JOB_ID")
    if array:
        return f"{array}_{environment['SLURM_ARRAY_TASK_ID']}"
    return environment.get("SLURM_JOB_ID", "")


def _requeue(job_id: str) -> str:
    """Requeue this job; return why that is refused, or nothing.

    Slurm may have done so already, after a preemption or the failure of a node.
    """
    done = _patiently(["scontrol", "requeue", job_id])
    if done.returncode == 0 or _UNDER_WAY.search(done.stderr):
        return ""
    if jobstate.ask(os.environ).state == "REQUEUED":
        return ""
    return _words(done)


def _continue(records: Attempt, job_id: str, avoid: Sequence[str]) -> str:
    """Submit a continuation; return why that is impossible, or nothing."""
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
    # `hpml requeue` on a login node may submit the continuation at the same time. The mark is
    # created exclusively, so only one of them calls sbatch.
    if not records.mark_start(1, now=time.time()):
        return ""  # another hpml is submitting it, or has done so
    exclude = _excluded(job_id, avoid)
    # Slurm refuses to exclude a node that it no longer knows. Continuing on a doubtful node is
    # better than not continuing.
    tries = [exclude, ""] if exclude else [""]
    for left_out in tries:
        arguments = continuation_arguments(
            recorded, after=job_id, exclude=left_out, index=submission.index
        )
        # sbatch answers into files: if this process is killed meanwhile, the job's id is still on
        # record.
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
            # A job may exist nevertheless; the next query of the run's state finds it.
            _say(f"sbatch gave no usable answer: {_clean(message)}")
            return ""
    return f"sbatch refused: {_clean(message)}"


def continuation_arguments(
    recorded: Sequence[str], *, after: str = "", exclude: str = "", index: int | None = None
) -> list[str]:
    """Return the call of sbatch for a continuation.

    Args:
        recorded: the call that submitted the run's first job; its dependencies are met.
        after: the job that must end before.
        exclude: nodes that it must not get.
        index: of the task to continue; None for a job that is not an array.
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
    # The variables that the script started with. Its own are changed by modules and environments by
    # now, and those of this job, such as SLURM_MEM_PER_NODE, must not reach the next one.
    with open(f"/proc/{os.getppid()}/environ", "rb") as stream:
        entries = stream.read().split(b"\0")
    pairs = (os.fsdecode(entry).partition("=") for entry in entries if entry)
    return {
        name: value
        for name, _, value in pairs
        if name == "SLURM_CONF" or not name.startswith(("SLURM_", "SLURMD_", "HPML_"))
    }


def _patiently(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    # A controller that restarts is away for minutes. The job still runs, so asking again costs
    # little, and giving up would end the run.
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
