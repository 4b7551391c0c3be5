"""Check and submit a job that was rendered, and report what was submitted."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import typer

from hpml_orchestrator.check.job import check_job, refusal
from hpml_orchestrator.cli.common import print_json
from hpml_orchestrator.cli.process import (
    EXIT_INTERRUPTED,
    Stop,
    notice,
    report_unwritable_output,
)
from hpml_orchestrator.errors import counted
from hpml_orchestrator.records.files import read_text_or_nothing
from hpml_orchestrator.records.texts import printable
from hpml_orchestrator.runs.after import outstanding
from hpml_orchestrator.runs.backend import cluster_name, open_backend
from hpml_orchestrator.runs.prepare import prepare
from hpml_orchestrator.runs.resubmit import refuse_shared_checkpoints
from hpml_orchestrator.runs.submit import submit as submit_prepared
from hpml_orchestrator.site.profile import topologies_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hpml_orchestrator.check.job import CheckReport
    from hpml_orchestrator.records.store import Store, Submission
    from hpml_orchestrator.runs.prepare import Rendered

__all__ = ["check_rendered", "job_text", "report_submission", "submit_rendered"]

_CLUSTER_SECONDS = 5.0  # while a submission waits


def submit_rendered(
    store: Store,
    make: Callable[[], tuple[Rendered, str]],
    *,
    checked: bool,
    record: Mapping[str, Any] | None = None,
) -> tuple[Submission, str]:
    """Check and submit a job; return its submission and its job's id.

    After Ctrl-C this reports the state of the submission and exits.

    Args:
        store: where records live.
        make: returns the job and the name of its scheduler.
        checked: whether to check the job first.
        record: more for `submit.json`.

    Raises:
        HpmlError: it was not submitted, or it is not known whether it was.
    """
    submission = None
    try:
        rendered, name = make()
        refuse_shared_checkpoints(store, rendered.resolved.job)
        dependencies = outstanding(store, rendered.resolved.job.after, backend=name)
        if checked:
            _check_before_submission(rendered, name, store)
        scheduler = open_backend(name, store)
        environment = dict(os.environ)
        submission = prepare(
            store,
            rendered,
            backend=name,
            cluster=cluster_name(scheduler),
            argv=sys.argv,
            environment=environment,
            after=dependencies,
            notice=notice,
            record=record,
        )
        # Ctrl-C waits for the answer, so that no job exists unreported; a second one does not.
        with Stop(signal.SIGINT, message="submitting; press Ctrl-C again to abort") as stop:
            job_id = submit_prepared(submission, scheduler, environment=environment)
        if not stop():
            _print_messages(submission)
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
        # The job exists: with a status other than 0 a script would submit it again.
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


def _submission_json(store: Store, submission: Submission, job_id: str) -> dict[str, Any]:
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
    """Describe the outcome of a submission that Ctrl-C interrupted, by its records."""
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


def _print_messages(submission: Submission) -> None:
    """Print what sbatch reported of a job that it accepted, such as a site's message to users."""
    for line in read_text_or_nothing(submission.directory / "sbatch.err").splitlines():
        text = printable(line).strip()
        if text:
            notice(f"{'' if text.startswith('sbatch: ') else 'sbatch: '}{text}")


def _check_before_submission(rendered: Rendered, name: str, store: Store) -> None:
    """Check a job that is about to be submitted; warnings go to standard error.

    Raises:
        InputError: the cluster would not run it; names everything that is wrong with it.
    """
    report = check_rendered(
        rendered,
        name,
        store,
        cluster_seconds=_CLUSTER_SECONDS,
        walk_seconds=1.0,
        dependencies=False,
    )
    # The submission itself reports a moment later that records cannot be written.
    errors = [finding for finding in report.errors if finding.code != "records.unwritable"]
    if errors:
        raise refusal(errors)
    for finding in report.warnings:
        if finding.code != "stage.partly":
            hint = f"; {finding.hint}" if finding.hint else ""
            notice(f"warning: {finding}{hint}")
    if report.not_asked:
        notice(f"warning: not checked against the cluster: {report.not_asked}")


def check_rendered(rendered: Rendered, name: str, store: Store, **limits: Any) -> CheckReport:
    """Check a job that was rendered for the scheduler of that name; `limits` are `check_job`'s."""
    job = rendered.resolved.job
    return check_job(
        job,
        backend=name,
        records=store.root,
        environment=dict(os.environ),
        site=rendered.site,
        topologies={} if name == "local" else topologies_of(job, rendered.site),
        targets=rendered.targets,
        **limits,
    )
