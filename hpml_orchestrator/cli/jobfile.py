"""Commands that take a job file: render, submit, run."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpml_orchestrator.cli.check import NoCheckOption, before_submission
from hpml_orchestrator.cli.common import (
    AfterOption,
    BackendOption,
    JobFile,
    JsonOption,
    LocalOption,
    SetOption,
    print_json,
    refuse_empty,
    refuse_with,
    store_of,
)
from hpml_orchestrator.cli.follow import follow
from hpml_orchestrator.cli.loading import backend_name, rendered_of
from hpml_orchestrator.cli.process import EXIT_INTERRUPTED, notice, report_unwritable_output
from hpml_orchestrator.cli.show import print_summary
from hpml_orchestrator.errors import InputError, counted
from hpml_orchestrator.runs.after import outstanding
from hpml_orchestrator.runs.backend import open_backend
from hpml_orchestrator.runs.prepare import explained, prepare, write_rendered
from hpml_orchestrator.runs.submit import resume
from hpml_orchestrator.runs.submit import submit as submit_prepared
from hpml_orchestrator.script.static_form import describe, static_form

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from hpml_orchestrator.records.store import Store, Submission

__all__ = ["render", "run", "submit"]


def render(
    context: typer.Context,
    job_file: JobFile,
    settings: SetOption = [],
    backend: BackendOption = "auto",
    local: LocalOption = False,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="Write job.sh and all files it needs to DIR, to submit by hand.",
        ),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show where each value comes from instead.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="With --output: overwrite a job.sh that differs.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Print the batch script of a job.

    It is byte for byte what `submit` submits. The site profile applies to jobs of the cluster, not
    with `--local`.
    """
    refuse_empty({"--output": output})
    if output:
        refuse_with("--output", {"--explain": explain, "--json": as_json})
    elif force:
        raise InputError(
            "needs --output DIR", field="--force", hint=f"hpml render {job_file} -o DIR --force"
        )
    rendered = rendered_of(context, job_file, settings, backend_name(backend, local=local))
    if explain:
        rows = explained(rendered.resolved)
        if as_json:
            print_json([{"field": f, "value": v, "origin": o} for f, v, o in rows])
            return
        for field, value, origin in rows:
            typer.echo(f"{field:<28} {_as_in_job_file(value):<40} {origin}")
        form = static_form(rendered.resolved.job, rendered.site, rendered.topologies)
        notice(f"binding: {describe(form)}")
    elif output:
        script = write_rendered(rendered, output, force=force)
        directory = shlex.quote(str(script.parent))
        typer.echo(f"wrote {script}; to submit it: cd {directory} && sbatch job.sh")
    elif as_json:
        print_json({"script": rendered.script, "job": rendered.resolved.job.model_dump()})
    else:
        sys.stdout.buffer.write(rendered.script.encode("utf-8"))


def _as_in_job_file(value: Any) -> str:
    """Return a value on one line as a job file may have it: null and true, not as in Python."""
    if isinstance(value, str) and "\n" not in value:
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def submit(
    context: typer.Context,
    job_file: Annotated[
        str, typer.Argument(metavar="JOB_FILE", help="Job file, YAML 1.2 or TOML.")
    ] = "",
    settings: SetOption = [],
    after: AfterOption = [],
    backend: BackendOption = "auto",
    local: LocalOption = False,
    resume_run: Annotated[
        str,
        typer.Option(
            "--resume",
            metavar="RUN",
            help="Complete an interrupted submission: find its job, or submit it.",
        ),
    ] = "",
    no_check: NoCheckOption = False,
    as_json: JsonOption = False,
) -> None:
    """Submit a job and return immediately."""
    store = store_of(context)
    if resume_run:
        options = {"--set": settings, "--after": after, "--local": local}
        refuse_with("--resume", {**options, "--backend": backend != "auto", "JOB_FILE": job_file})
        submission = replace(store.resolve(resume_run), index=None)
        job_id = _resume(store, submission)
        message = f"{submission.sid} is job {_job_text(submission, job_id)}"
    else:
        submission, job_id = _submit(
            context, job_file, settings, backend, after=after, local=local, checked=not no_check
        )
        message = f"submitted {submission.sid} as job {_job_text(submission, job_id)}"
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

    For a job array this prints the states of the tasks, not their output. Ctrl-C stops following;
    the job continues. The exit status is 0 if the job completed, else 6.
    """
    store = store_of(context)
    submission, job_id = _submit(
        context, job_file, settings, backend, after=after, local=local, checked=not no_check
    )
    notice(f"submitted {submission.sid} as job {_job_text(submission, job_id)}")
    state = follow(
        store,
        submission,
        out=sys.stderr if as_json else sys.stdout,
        output=not submission.is_array(),
        end_line=True,
        summary=not as_json,
    )
    print_summary(state, as_json=as_json)


def _job_text(submission: Submission, job_id: str) -> str:
    """Return the job's id, for an array with the number of its tasks."""
    if not submission.is_array():
        return job_id
    return f"{job_id} ({counted(len(submission.runs()), 'task')})"


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
    name = backend_name(backend, local=local)
    rendered = rendered_of(context, job_file, settings, name, after)
    store = store_of(context)
    dependencies = outstanding(store, rendered.resolved.job.after, backend=name)
    if checked:
        before_submission(rendered, name, store)
    scheduler = open_backend(name, store)
    environment = dict(os.environ)
    with _interrupt_held() as interrupt:
        submission = prepare(
            store,
            rendered,
            backend=name,
            argv=sys.argv,
            environment=environment,
            after=dependencies,
            notice=notice,
        )
        interrupt.sid = submission.sid
        job_id = submit_prepared(submission, scheduler, environment=environment)
    if interrupt.pressed:
        notice(
            f"submitted {submission.sid} as job {job_id}; the job continues, "
            f"`hpml cancel {submission.sid}` cancels it"
        )
        raise typer.Exit(EXIT_INTERRUPTED)
    return submission, job_id


def _resume(store: Store, submission: Submission) -> str:
    record = submission.record()
    backend = str(record["backend"])
    return resume(
        store,
        submission,
        open_backend(backend, store, host=str(record["host"])),
        environment=dict(os.environ),
        notice=notice,
        after=lambda words: outstanding(store, words, backend=backend),
    )


class _Interrupt:
    """Whether Ctrl-C was pressed while a submission was on its way."""

    def __init__(self) -> None:
        self.pressed = False
        self.sid = ""

    def on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True
        typer.echo("\nhpml: submitting; press Ctrl-C again to abort", err=True)


@contextlib.contextmanager
def _interrupt_held() -> Iterator[_Interrupt]:
    """Hold Ctrl-C back during a submission, which takes a moment: no job exists unreported.

    After the block the caller looks at `pressed`. A second Ctrl-C ends the command at once and says
    how to find out what became of the submission.
    """
    interrupt = _Interrupt()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield interrupt  # started with & by a script: Ctrl-C is meant for another command
        return
    previous = signal.signal(signal.SIGINT, interrupt.on_signal)
    try:
        yield interrupt
    except KeyboardInterrupt:
        sid = interrupt.sid
        notice(
            f"{sid} may have been submitted: `hpml status {sid}` shows its state, "
            f"`hpml submit --resume {sid}` completes it"
            if sid
            else "nothing was submitted"
        )
        raise typer.Exit(EXIT_INTERRUPTED) from None
    finally:
        signal.signal(signal.SIGINT, previous)
