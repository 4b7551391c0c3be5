"""Commands that submit a job file: run, submit."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from hpml_orchestrator.cli.common import (
    AfterOption,
    BackendOption,
    JobFile,
    JsonOption,
    LocalOption,
    SetOption,
    appended_arguments,
    chosen_site,
    refuse_with,
    store_of,
)
from hpml_orchestrator.cli.follow import follow
from hpml_orchestrator.cli.process import (
    notice,
)
from hpml_orchestrator.cli.render import backend_name, rendered_job
from hpml_orchestrator.cli.show import print_summary
from hpml_orchestrator.cli.submission import (
    job_text,
    report_submission,
    submit_rendered,
)
from hpml_orchestrator.errors import InputError
from hpml_orchestrator.runs.after import pending_dependencies
from hpml_orchestrator.runs.backend import open_backend
from hpml_orchestrator.runs.resubmit import claim_checkpoints
from hpml_orchestrator.runs.submit import resume

if TYPE_CHECKING:
    from hpml_orchestrator.records.store import Store
    from hpml_orchestrator.records.submission import Submission
    from hpml_orchestrator.runs.prepare import Rendered

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
        submission = replace(store.resolve(resume_run, exact_name=True), index=None)
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
