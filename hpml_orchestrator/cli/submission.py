"""Check and submit a job that was rendered, and report what was submitted."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import TYPE_CHECKING

import typer

from hpml_orchestrator.check.submission import prepare_checked, scheduler_messages
from hpml_orchestrator.cli.common import print_json
from hpml_orchestrator.cli.process import (
    EXIT_INTERRUPTED,
    Stop,
    notice,
    report_unwritable_output,
)
from hpml_orchestrator.errors import counted
from hpml_orchestrator.runs.submit import submit as submit_prepared

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hpml_orchestrator.records.store import Store
    from hpml_orchestrator.records.submission import Submission
    from hpml_orchestrator.runs.prepare import Rendered


def submit_rendered(
    store: Store,
    make: Callable[[], Rendered],
    *,
    checked: bool,
    record: Mapping[str, object] | None = None,
) -> tuple[Submission, str]:
    """Check and submit a job; return its submission and its job's id.

    After Ctrl-C this reports the state of the submission and exits.

    Args:
        store: where records live.
        make: returns the job.
        checked: whether to check the job first.
        record: more for `submit.json`.

    Raises:
        HpmlError: it was not submitted, or it is not known whether it was.
    """
    submission = None
    try:
        submission, scheduler = prepare_checked(
            store, make(), checked=checked, notice=notice, record=record
        )
        # The first Ctrl-C waits for the answer, so that no job exists without being reported. A
        # second one does not wait.
        with Stop(signal.SIGINT, message="submitting; press Ctrl-C again to abort") as stop:
            job_id = submit_prepared(submission, scheduler, environment=dict(os.environ))
        if not stop():
            for line in scheduler_messages(submission):
                notice(line)
            return submission, job_id
    except KeyboardInterrupt:
        pass
    notice(_outcome(submission))
    raise typer.Exit(EXIT_INTERRUPTED)


def report_submission(
    store: Store, submission: Submission, job_id: str, message: str, *, as_json: bool
) -> None:
    """Print what was submitted, and how to follow it."""
    try:
        if as_json:
            print_json(_submission_json(store, submission, job_id))
        else:
            typer.echo(message)
        sys.stdout.flush()
    except OSError as error:
        # The job exists. With an exit status other than 0 a script would submit it again.
        report_unwritable_output(error)
        notice(message)
        return
    with contextlib.suppress(OSError):
        sid = submission.sid
        hint = f"hpml logs -f {sid}"
        if submission.is_array():
            hint = f"hpml wait {sid}; one task: hpml logs -f {sid}.{submission.runs()[0][0]}"
        typer.echo(f"to follow it: {hint}", err=True)


def job_text(submission: Submission, job_id: str) -> str:
    """Return the job's id, for an array with the number of its tasks."""
    if not submission.is_array():
        return job_id
    return f"{job_id} ({counted(len(submission.runs()), 'task')})"


def _submission_json(store: Store, submission: Submission, job_id: str) -> dict[str, object]:
    table = submission.runs()
    is_array = submission.is_array()
    return {
        "id": submission.sid,
        "job_id": job_id,
        "submission": str(submission.directory),
        "directory": None if is_array else str(store.runs_dir / table[0][1]),
        "tasks": [
            {"index": index, "run": rid, "directory": str(store.runs_dir / rid)}
            for index, rid in table
            if is_array
        ],
    }


def _outcome(submission: Submission | None) -> str:
    if submission is None:
        return "nothing was submitted"
    sid, job = submission.sid, submission.job()
    if job is not None:
        ends = f"the job continues, `hpml cancel {sid}` cancels it"
        return f"submitted {sid} as job {job['job_id']}; {ends}"
    if not submission.starts():
        return f"nothing was submitted; `hpml submit --resume {sid}` submits it"
    return (
        f"{sid} may have been submitted: `hpml status {sid}` shows its state, "
        f"`hpml submit --resume {sid}` completes it"
    )
