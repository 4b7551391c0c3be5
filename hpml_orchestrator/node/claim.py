"""The first act of a job: claim the attempt."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from hpml_orchestrator.errors import InputError, NotFoundError
from hpml_orchestrator.records import events
from hpml_orchestrator.records.files import read_json, read_text, write_json, write_text
from hpml_orchestrator.records.run import task_output
from hpml_orchestrator.records.store import RUN_TABLE, Attempt, Run, Submission

__all__ = ["EXIT_DUPLICATE", "claim", "node_name"]

_CLAIM_SECONDS = 30.0
EXIT_DUPLICATE = 75
"""Exit status of a job that found its run claimed by another job."""


def node_name(environment: Mapping[str, str] | None = None) -> str:
    """Return Slurm's name of this node; the host's short name without Slurm."""
    env = os.environ if environment is None else environment
    return env.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]


def claim(submission: str) -> int:
    """Claim this start of the run and print the attempt's directory.

    The run is the one that the submission's table gives for `$SLURM_ARRAY_TASK_ID` (0 without an
    array); a script started by hand, without a table, gets `runs/<job id>` below its directory,
    a task of an array `runs/<array's id>_<index>`.
    Claiming is one `mkdir`, which one of two jobs wins even on NFS.

    Returns:
        0, or 75 when another job has claimed the run: this one is a duplicate and must end.

    Raises:
        InputError: not inside a job.
        NotFoundError: the table has no such index.
    """
    job_id = os.environ.get("SLURM_JOB_ID", "")
    if not job_id:
        raise InputError(
            "not inside a job: SLURM_JOB_ID is not set",
            hint="give the script to sbatch, or run the job file with `hpml run --local`",
        )
    run = Run(_run_directory(Path(submission), job_id))
    number = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    for earlier in run.attempts():
        if _claimant(earlier) not in ("", job_id):
            return _duplicate(earlier, job_id)
    attempt = Attempt(run.directory / "attempts" / str(number))
    for name in ("nodes", "events", "binding", "plan"):
        (attempt.directory / name).mkdir(parents=True, exist_ok=True)
    started = attempt.directory / "started"
    try:
        started.mkdir()
    except FileExistsError:
        if _claimant(attempt) != job_id:
            return _duplicate(attempt, job_id)
        # Same job, same attempt: the script was started again without a requeue. What its nodes
        # said before does not hold any more.
        _forget(attempt)
    array = os.environ.get("SLURM_ARRAY_JOB_ID", "")
    if array:  # before the id that completes the claim: whoever reads that one finds both
        write_text(started / "array_job_id", f"{array}\n")
    write_text(started / "job_id", f"{job_id}\n")
    output = task_output(Path(submission), os.environ.get("SLURM_ARRAY_TASK_ID", ""))
    link = run.directory / "output.log"
    if output.exists() and not os.path.lexists(link):  # of a task: an earlier attempt may have it
        link.symlink_to(os.path.relpath(output, run.directory))
    node = node_name()
    names = [
        name
        for name in dict.fromkeys([node, socket.getfqdn(), socket.gethostname()])
        if name.partition(".")[0] != "localhost"  # every node would find itself
    ]
    write_json(
        attempt.directory / "head.json",
        # the output grows with each attempt: here begins what this one's Slurm and launcher say
        {"node": node, "names": names, "output_bytes": os.fstat(2).st_size},
    )
    log = attempt.directory / "events" / "batch.jsonl"
    queued = Submission(Path(submission)).started_at()
    if number == 0 and queued is not None:
        events.append(log, "queued", node="batch", now=queued)
    events.append(
        log,
        "started",
        node="batch",
        job_id=job_id,
        attempt=number,
        head=node,
        nodes=os.environ.get("SLURM_JOB_NODELIST", ""),
        node_count=int(os.environ.get("SLURM_NNODES") or 1),
    )
    sys.stdout.write(f"{attempt.directory}\n")
    return 0


def _claimant(attempt: Attempt) -> str:
    """Return the id of the job that claimed an attempt; empty when none has, or never will say.

    A winner writes its id right after the mkdir: it is given a moment.
    """
    deadline = time.monotonic() + _CLAIM_SECONDS
    while True:
        job_id = attempt.job_id
        if job_id or not (attempt.directory / "started").is_dir():
            return job_id
        if time.monotonic() >= deadline:
            return ""
        time.sleep(0.1)


def _forget(attempt: Attempt) -> None:
    """Remove the markers of an earlier start of the same attempt."""
    markers = [
        path
        for name in ("nodes", "plan", "binding", "chain")
        for path in (attempt.directory / name).glob("*")
        if path.is_file()
    ]
    for path in (*markers, attempt.directory / "over", attempt.directory / "ended.json"):
        path.unlink(missing_ok=True)


def _run_directory(submission: Path, job_id: str) -> Path:
    index = int(os.environ.get("SLURM_ARRAY_TASK_ID") or 0)
    try:
        table = read_text(submission / RUN_TABLE)
        read_json(submission / "submit.json")
    except NotFoundError:
        array = os.environ.get("SLURM_ARRAY_JOB_ID", "")
        return submission / "runs" / (f"{array}_{index}" if array else job_id)
    for line in table.splitlines():
        number, _, rid = line.partition("\t")
        if number == str(index):
            return submission.parent.parent / "runs" / rid
    raise NotFoundError(f"{submission / RUN_TABLE} has no run of index {index}")


def _duplicate(attempt: Attempt, job_id: str) -> int:
    sys.stderr.write(
        f"hpml: this run belongs to job {attempt.job_id or 'unknown'}; "
        f"job {job_id} is a duplicate and ends here\n"
    )
    return EXIT_DUPLICATE
