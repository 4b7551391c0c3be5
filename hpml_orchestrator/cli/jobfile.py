"""Commands that submit a job: submit, run, resubmit, requeue."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from hpml_orchestrator.check.submission import prepare_checked, scheduler_messages
from hpml_orchestrator.cli.common import (
    AfterOption,
    BackendOption,
    JobFile,
    JsonOption,
    LocalOption,
    RunWord,
    SetOption,
    appended_arguments,
    chosen_site,
    print_json,
    refuse_with,
    store_of,
)
from hpml_orchestrator.cli.follow import follow
from hpml_orchestrator.cli.process import (
    EXIT_INTERRUPTED,
    Stop,
    notice,
    report_unwritable_output,
)
from hpml_orchestrator.cli.render import backend_name, rendered_job
from hpml_orchestrator.cli.show import print_summary
from hpml_orchestrator.errors import InputError, counted
from hpml_orchestrator.jobfile.load import parse_setting
from hpml_orchestrator.runs.backend import open_backend
from hpml_orchestrator.runs.load import load_job
from hpml_orchestrator.runs.prepare import Rendered, render_job
from hpml_orchestrator.runs.requeue import (
    checkpoint_directory,
    claim_checkpoints,
    job_to_resubmit,
    last_to_save,
    refuse_to_resubmit,
)
from hpml_orchestrator.runs.requeue import requeue as requeue_run
from hpml_orchestrator.runs.select import pending_dependencies
from hpml_orchestrator.runs.status import states
from hpml_orchestrator.runs.submit import resume
from hpml_orchestrator.runs.submit import submit as submit_prepared
from hpml_orchestrator.site.profile import site_for

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hpml_orchestrator.records.store import Store
    from hpml_orchestrator.records.submission import Submission

# Check and submit a rendered job, and report what was submitted.


def submit_rendered(
    store: Store,
    make: Callable[[], Rendered],
    *,
    checked: bool,
    record: Mapping[str, object] | None = None,
) -> tuple[Submission, str]:
    """Check and submit a job; return its submission and job id.

    After Ctrl-C this reports the state of the submission and exits.

    Args:
        store: where records live.
        make: returns the job.
        checked: whether to check the job first.
        record: additional fields of `submit.json`.

    Raises:
        HpmlError: it was not submitted, or that is unknown.
    """
    submission = None
    try:
        submission, scheduler = prepare_checked(
            store, make(), checked=checked, notice=notice, record=record
        )
        # The first Ctrl-C waits for the answer, so that no job exists without being reported. The
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
        # The job exists. After an exit status other than 0 a script would submit it again.
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
    """Return the job's id; for an array, with the number of its tasks."""
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


NoCheckOption = Annotated[bool, typer.Option("--no-check", help="Submit without checking the job.")]


def submit(
    context: typer.Context,
    job_file: JobFile = "",
    settings: SetOption = [],
    after: AfterOption = [],
    backend: BackendOption = "auto",
    local: LocalOption = False,
    resume_run: Annotated[
        str,
        typer.Option(
            "--resume",
            metavar="RUN",
            help="Complete an interrupted submission: find its job, or submit it now.",
        ),
    ] = "",
    no_check: NoCheckOption = False,
    as_json: JsonOption = False,
) -> None:
    """Submit a job and return immediately.

    Words after `--` are appended to `args` of the job file.
    """
    store = store_of(context)
    if resume_run:
        options = {"--set": settings, "--after": after, "--local": local}
        options |= {"arguments after --": appended_arguments(context)}
        refuse_with("--resume", {**options, "--backend": backend != "auto", "JOB_FILE": job_file})
        submission = store.resolve(resume_run, exact_name=True).at(None)
        job_id = _resume(store, submission)
        message = f"{submission.sid} is job {job_text(submission, job_id)}"
    else:
        submission, job_id = _submit(
            context, job_file, settings, backend, after=after, local=local, checked=not no_check
        )
        message = f"submitted {submission.sid} as job {job_text(submission, job_id)}"
    report_submission(store, submission, job_id, message, as_json=as_json)


def run(
    context: typer.Context,
    job_file: JobFile,
    settings: SetOption = [],
    after: AfterOption = [],
    backend: BackendOption = "auto",
    local: LocalOption = False,
    no_check: NoCheckOption = False,
    as_json: JsonOption = False,
) -> None:
    """Submit a job, follow it and print a summary.

    Words after `--` are appended to `args` of the job file.

    For a job array this shows the states of the tasks, not their output. Ctrl-C stops following;
    the job continues. The exit status is 0 if the job completed, otherwise 6.
    """
    store = store_of(context)
    submission, job_id = _submit(
        context, job_file, settings, backend, after=after, local=local, checked=not no_check
    )
    notice(f"submitted {submission.sid} as job {job_text(submission, job_id)}")
    state = follow(
        store,
        submission,
        out=sys.stderr if as_json else sys.stdout,
        output=not submission.is_array(),
        end_line=True,
        summary=not as_json,
    )
    print_summary(state, site=chosen_site(context), as_json=as_json)


def _submit(
    context: typer.Context,
    job_file: str,
    settings: list[str],
    backend: str,
    *,
    after: list[str],
    local: bool,
    checked: bool,
) -> tuple[Submission, str]:
    if not job_file:
        raise InputError("must be given", field="JOB_FILE", hint="hpml submit job.yaml")

    def render_file() -> Rendered:
        name = backend_name(context, job_file, backend, local=local)
        return rendered_job(context, job_file, settings, name, after)

    return submit_rendered(store_of(context), render_file, checked=checked)


def _resume(store: Store, submission: Submission) -> str:
    record = submission.record()
    backend = str(record["backend"])
    return resume(
        store,
        submission,
        open_backend(backend, store, host=str(record["host"])),
        environment=dict(os.environ),
        notice=notice,
        after=lambda words: pending_dependencies(store, words, backend=backend),
        claim=lambda: claim_checkpoints(store, submission),
    )


# Command `resubmit`: submit the job of an ended run again, as a new run.


def resubmit(
    context: typer.Context,
    run: RunWord,
    settings: SetOption = [],
    no_check: NoCheckOption = False,
    as_json: JsonOption = False,
) -> None:
    """Submit the job of an ended run again, with changes.

    The new run has the old one's job as recorded, and continues from its checkpoints if the job has
    `checkpoint`. Words after `--` are appended to `args`. Code comes from the current state of the
    working directory, even with `snapshot`, and variables from this shell. To restart a run
    unchanged, with its own copy of the code: hpml requeue.
    """
    store = store_of(context)
    submission = store.resolve(run, exact_name=True)
    (state,) = states(store, [submission])
    refuse_to_resubmit(store, state)
    record = submission.record()
    backend, job_file = str(record["backend"]), str(record["job_file"])

    def render_again() -> Rendered:
        # The recorded job already has the profile's defaults; the script needs the rest of the
        # profile.
        job = load_job(
            job_file,
            [parse_setting(setting) for setting in settings],
            backend=backend,
            fields=job_to_resubmit(state).to_json(),
            arguments=appended_arguments(context),
        )
        site = site_for(job_file, os.environ, chosen=chosen_site(context), backend=backend)
        return render_job(replace(job, site=site))

    made, job_id = submit_rendered(
        store, render_again, checked=not no_check, record={"continues": submission.sid}
    )
    directory = checkpoint_directory(submission)
    if directory and made.requested_job().checkpoint.directory == directory:
        last = last_to_save(store, directory, before=made)
        also = f"; {last.sid} saved last" if last and last.sid != submission.sid else ""
        notice(f"continues from the checkpoints of {submission.sid} in {directory}{also}")
    message = f"submitted {made.sid} as job {job_text(made, job_id)}"
    report_submission(store, made, job_id, message, as_json=as_json)


# Command `requeue`.


def requeue(
    context: typer.Context,
    run: RunWord,
    as_json: JsonOption = False,
) -> None:
    """Save and requeue a run; continue an ended one.

    Asks the ranks of a running run to save and stop, and then requeues its job; that needs
    `checkpoint` in the job file. For a run that ended before it was finished, this submits another
    job that continues it. The tasks of a job array continue one by one.
    """
    store = store_of(context)
    submission = store.resolve(run, exact_name=True)
    done = requeue_run(store, submission, environment=os.environ, notice=notice)
    if as_json:
        print_json(done)
    else:
        typer.echo(f"{done['id']}: {done['outcome']}")
