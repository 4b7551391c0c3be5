"""Command `resubmit`: the job of an ended run again, as a new run."""

from __future__ import annotations

import os
from dataclasses import replace

import typer

from hpml_orchestrator.cli.common import (
    JsonOption,
    RunWord,
    SetOption,
    appended_arguments,
    chosen_site,
    store_of,
)
from hpml_orchestrator.cli.jobfile import NoCheckOption
from hpml_orchestrator.cli.process import notice
from hpml_orchestrator.cli.submission import job_text, report_submission, submit_rendered
from hpml_orchestrator.jobfile.load import parse_setting
from hpml_orchestrator.runs.prepare import Rendered, load_job, render_job
from hpml_orchestrator.runs.resubmit import (
    checkpoint_directory,
    job_to_resubmit,
    last_to_save,
    refuse_to_resubmit,
)
from hpml_orchestrator.runs.status import states
from hpml_orchestrator.site.profile import site_for


def resubmit(
    context: typer.Context,
    run: RunWord,
    settings: SetOption = [],
    no_check: NoCheckOption = False,
    as_json: JsonOption = False,
) -> None:
    """Submit the job of an ended run again, with changes.

    The new run has the old one's job as it was recorded, and continues from its checkpoints if the
    job has `checkpoint`. Words after `--` are appended to `args`. Code comes from the working
    directory as it is now, also with `snapshot`, and variables from this shell. To restart a run
    unchanged, with its own copy of the code: hpml requeue.
    """
    store = store_of(context)
    submission = store.resolve(run, exact_name=True)
    (state,) = states(store, [submission])
    refuse_to_resubmit(store, state)
    record = submission.record()
    backend, job_file = str(record["backend"]), str(record["job_file"])

    def render_again() -> Rendered:
        # The recorded job has the profile's defaults already; the script needs the rest of it.
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
