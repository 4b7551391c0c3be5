"""Commands that take a job file: render, submit, run."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
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
    backend_name,
    not_written,
    print_json,
    rendered_of,
    store_of,
)

if TYPE_CHECKING:
    from hpml_orchestrator.records.store import Store, Submission

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add this group's commands to the application."""
    app.command()(render)
    app.command()(submit)
    app.command()(run)


def render(
    context: typer.Context,
    job_file: JobFile,
    settings: SetOption = [],  # noqa: B006 - typer copies it
    backend: BackendOption = "auto",
    local: LocalOption = False,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="Write job.sh and all that it needs there, to be given to sbatch by hand.",
        ),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say where each value came from instead.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="With --output: replace a job.sh that differs.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Print the batch script of a job, to the byte as `submit` would submit it.

    The site profile counts for jobs of the cluster; with `--local` there is none.
    """
    from hpml_orchestrator.cli.conflicts import refuse_empty, refuse_with  # noqa: PLC0415
    from hpml_orchestrator.errors import InputError  # noqa: PLC0415
    from hpml_orchestrator.runs.show import explained, write_rendered  # noqa: PLC0415
    from hpml_orchestrator.script.static_form import describe, static_form  # noqa: PLC0415

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
            typer.echo(f"{field:<28} {_in_job_file(value):<40} {origin}")
        form = static_form(rendered.resolved.job, rendered.site, rendered.topologies)
        typer.echo(f"hpml: binding: {describe(form)}", err=True)
        return
    if output:
        script = write_rendered(rendered, output, force=force)
        place = shlex.quote(str(script.parent))
        typer.echo(f"wrote {script}; to submit it by hand: cd {place} && sbatch job.sh")
        return
    if as_json:
        print_json({"script": rendered.script, "job": rendered.resolved.job.model_dump()})
        return
    sys.stdout.buffer.write(rendered.script.encode("utf-8"))
    sys.stdout.flush()


def _in_job_file(value: Any) -> str:
    """Return a value as a job file may have it, on one line: null and true, not as Python does."""
    if isinstance(value, str) and "\n" not in value:
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def submit(
    context: typer.Context,
    job_file: Annotated[
        str, typer.Argument(metavar="[JOB_FILE]", help="Job file, YAML 1.2 or TOML.")
    ] = "",
    settings: SetOption = [],  # noqa: B006
    after: AfterOption = [],  # noqa: B006
    backend: BackendOption = "auto",
    local: LocalOption = False,
    resume: Annotated[
        str,
        typer.Option(
            "--resume",
            metavar="RUN",
            help="Complete a submission that was cut off: find its job, or submit it.",
        ),
    ] = "",
    no_check: NoCheckOption = False,
    as_json: JsonOption = False,
) -> None:
    """Submit a job and return at once."""
    store = store_of(context)
    if resume:
        from hpml_orchestrator.cli.conflicts import refuse_with  # noqa: PLC0415
        from hpml_orchestrator.errors import InputError  # noqa: PLC0415

        given = {
            "--set": settings,
            "--after": after,
            "--local": local,
            "--backend": backend != "auto",
        }
        refuse_with("--resume", given)
        if job_file:
            raise InputError(
                "takes no job file: the submission has its own",
                field="--resume",
                value=job_file,
                hint=f"hpml submit --resume {resume}",
            )
        submission = replace(store.resolve(resume), index=None)
        job_id = _resume(store, submission)
    else:
        submission, job_id = _submit(
            context, job_file, settings, backend, after=after, local=local, checked=not no_check
        )
    words = ("{} is job {}" if resume else "submitted {} as job {}").format(
        submission.sid, _shown(submission, job_id)
    )
    table = submission.runs()
    is_array = submission.is_array()
    try:
        if as_json:
            print_json(
                {
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
            )
        else:
            typer.echo(words)
        sys.stdout.flush()
    except OSError as error:
        # The job exists: a status other than 0 would have a script submit it again.
        not_written(error)
        typer.echo(f"hpml: {words}", err=True)
        return
    with contextlib.suppress(OSError):
        if is_array:
            first = f"{submission.sid}.{table[0][0]}"
            typer.echo(
                f"to follow it: hpml wait {submission.sid}; one task: hpml logs -f {first}",
                err=True,
            )
        else:
            typer.echo(f"to follow it: hpml logs -f {submission.sid}", err=True)


def run(
    context: typer.Context,
    job_file: JobFile,
    settings: SetOption = [],  # noqa: B006
    after: AfterOption = [],  # noqa: B006
    backend: BackendOption = "auto",
    local: LocalOption = False,
    no_check: NoCheckOption = False,
    as_json: JsonOption = False,
) -> None:
    """Submit a job, follow its output, and end with a summary.

    Of a job array the states are followed, not its tasks' output. Ctrl-C stops following; the job
    goes on. The exit status is 0 when the job completed, else 6.
    """
    from hpml_orchestrator.cli.follow import finish, follow  # noqa: PLC0415

    store = store_of(context)
    submission, job_id = _submit(
        context, job_file, settings, backend, after=after, local=local, checked=not no_check
    )
    typer.echo(f"hpml: submitted {submission.sid} as job {_shown(submission, job_id)}", err=True)
    state = follow(
        store,
        submission,
        out=sys.stderr if as_json else sys.stdout,
        output=not submission.is_array(),
        end_line=True,
        summary=not as_json,
    )
    finish(state, as_json=as_json)


def _shown(submission: Submission, job_id: str) -> str:
    """Return the job's id, of an array with the number of its tasks."""
    if not submission.is_array():
        return job_id
    count = len(submission.runs())
    return f"{job_id} ({count} task{'s' * (count != 1)})"


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
    from hpml_orchestrator.cli.interrupt import EXIT_INTERRUPTED, held  # noqa: PLC0415
    from hpml_orchestrator.errors import InputError  # noqa: PLC0415
    from hpml_orchestrator.runs.after import outstanding  # noqa: PLC0415
    from hpml_orchestrator.runs.backend import open_backend  # noqa: PLC0415
    from hpml_orchestrator.runs.submit import prepare  # noqa: PLC0415
    from hpml_orchestrator.runs.submit import submit as submit_prepared  # noqa: PLC0415

    if not job_file:
        raise InputError("must be given", field="JOB_FILE", hint="hpml submit job.yaml")
    name = backend_name(backend, local=local)
    rendered = rendered_of(context, job_file, settings, name, after)
    store = store_of(context)
    waits = outstanding(store, rendered.resolved.job.after, backend=name)
    if checked:
        before_submission(rendered, name, store)
    scheduler = open_backend(name, store)
    environment = dict(os.environ)
    with held() as interrupt:
        submission = prepare(
            store,
            rendered,
            backend=name,
            argv=sys.argv,
            environment=environment,
            after=waits,
            notice=lambda text: typer.echo(f"hpml: {text}", err=True),
        )
        interrupt.sid = submission.sid
        job_id = submit_prepared(submission, scheduler, environment=environment)
    if interrupt.pressed:
        typer.echo(
            f"hpml: submitted {submission.sid} as job {job_id}; the job goes on: "
            f"`hpml cancel {submission.sid}` ends it",
            err=True,
        )
        raise typer.Exit(EXIT_INTERRUPTED)
    return submission, job_id


def _resume(store: Store, submission: Submission) -> str:
    from hpml_orchestrator.runs.after import outstanding  # noqa: PLC0415
    from hpml_orchestrator.runs.backend import open_backend  # noqa: PLC0415
    from hpml_orchestrator.runs.submit import resume  # noqa: PLC0415

    record = submission.record()
    scheduler = open_backend(str(record["backend"]), store, host=str(record["host"]))
    return resume(
        store,
        submission,
        scheduler,
        environment=dict(os.environ),
        notice=lambda text: typer.echo(f"hpml: {text}", err=True),
        after=lambda words: outstanding(store, words, backend=str(record["backend"])),
    )
