"""Commands `render` and `check`, and the job that a command's options describe."""

from __future__ import annotations

import json
import shlex
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from hpml_orchestrator.cli.common import (
    BackendOption,
    JobFile,
    JsonOption,
    LocalOption,
    SetOption,
    appended_arguments,
    chosen_site,
    print_json,
    refuse_empty,
    refuse_with,
    store_of,
)
from hpml_orchestrator.cli.process import notice
from hpml_orchestrator.errors import InputError, SchedulerUnavailable, counted
from hpml_orchestrator.jobfile.load import parse_setting
from hpml_orchestrator.runs.backend import choose
from hpml_orchestrator.runs.load import load_job
from hpml_orchestrator.runs.prepare import Rendered, explained, render_job, write_rendered

if TYPE_CHECKING:
    from hpml_orchestrator.check.job import CheckReport


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
            help="Write job.sh and the files it needs to DIR, to submit it yourself.",
        ),
    ] = None,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Instead of the script, show where each value comes from."),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="With --output: overwrite a job.sh that differs.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Print the batch script of a job.

    Words after `--` are appended to `args` of the job file.

    The output is byte for byte the script that `submit` submits. With `--local` no site profile
    applies unless `--site` names one.
    """
    refuse_empty({"--output": output})
    if output:
        refuse_with("--output", {"--explain": explain, "--json": as_json})
    elif force:
        raise InputError(
            "needs --output DIR", field="--force", hint=f"hpml render {job_file} -o DIR --force"
        )
    name = backend_name(context, job_file, backend, local=local)
    rendered = rendered_job(context, job_file, settings, name)
    if explain:
        rows = explained(rendered.resolved)
        if as_json:
            print_json([{"field": f, "value": v, "origin": o} for f, v, o in rows])
            return
        for field, value, origin in rows:
            typer.echo(f"{field:<28} {_as_in_job_file(value):<40} {origin}")
    elif output:
        script = write_rendered(rendered, output, force=force)
        directory = shlex.quote(str(script.parent))
        typer.echo(f"wrote {script}; to submit it: cd {directory} && sbatch job.sh")
    elif as_json:
        agent = json.loads(rendered.agent)
        job = rendered.resolved.job.to_json()
        print_json({"script": rendered.script, "agent": agent, "job": job})
    else:
        sys.stdout.buffer.write(rendered.script.encode("utf-8"))


def _as_in_job_file(value: object) -> str:
    if isinstance(value, str) and "\n" not in value:
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def rendered_job(
    context: typer.Context,
    job_file: str,
    settings: list[str],
    backend: str,
    after: list[str] | None = None,
) -> Rendered:
    """Return the job of a job file, its options and the words after `--`, and its script."""
    values = [parse_setting(setting) for setting in settings]
    values += [("after", after)] if after else []
    job = load_job(
        job_file,
        values,
        chosen_site(context),
        backend=backend,
        arguments=appended_arguments(context),
        notice=notice,
    )
    return render_job(job)


def backend_name(context: typer.Context, job_file: str, backend: str, *, local: bool) -> str:
    """Return `slurm` or `local` for a job file and the options `--backend` and `--local`."""
    if local:
        refuse_with("--local", {"--backend": backend not in {"auto", "local"}})
    return choose("local" if local else backend, job_file, chosen_site(context))


# Command `check`: would the cluster accept a job?


def check(
    context: typer.Context,
    job_file: JobFile,
    settings: SetOption = [],
    backend: BackendOption = "auto",
    local: LocalOption = False,
    as_json: JsonOption = False,
) -> None:
    """Check a job against the cluster's limits without submitting it.

    Words after `--` are appended to `args` of the job file.

    Exit status: 0 if the cluster would accept the job, 2 if not, 5 if the cluster did not answer or
    hides its nodes or partitions from you.
    """
    from hpml_orchestrator.check.job import invalid_job  # noqa: PLC0415 - render needs no checks
    from hpml_orchestrator.check.submission import check_rendered  # noqa: PLC0415 - as above

    name = backend_name(context, job_file, backend, local=local)
    try:
        rendered = rendered_job(context, job_file, settings, name)
        report = check_rendered(rendered, store_of(context), script=rendered.script)
    except InputError as fault:
        if not as_json:
            raise
        print_json({"backend": name, **invalid_job(fault).to_json()})
        raise typer.Exit(InputError.exit_code) from fault
    if as_json:
        print_json({"backend": name, **report.to_json()})
    else:
        _print(report, name, rendered.resolved.job.name)
    if report.errors:
        raise typer.Exit(InputError.exit_code)
    if report.not_asked:
        raise typer.Exit(SchedulerUnavailable.exit_code)


def _print(report: CheckReport, backend: str, job: str) -> None:
    for note in report.notes:
        typer.echo(f"note: {note}")
    for finding in report.findings:
        typer.echo(f"{finding.level}: {finding}")
        if finding.hint:
            typer.echo(f"  hint: {finding.hint}")
    where = "this machine" if backend == "local" else "the cluster"
    if report.errors:
        if report.not_asked:
            typer.echo(f"not checked against {where}: {report.not_asked}")
        verdict = f"{counted(len(report.errors), 'error')}, {where} would not run this job"
    elif report.not_asked:
        verdict = f"not checked against {where}: {report.not_asked}"
    else:
        names = report.answer.partitions
        start = f" ({report.start})" * bool(report.start)
        verdict = f"OK, {' or '.join(names) or where} would accept this job{start}"
        if report.not_checked:
            verdict += f"; not checked: {', '.join(report.not_checked)}"
    count = len(report.warnings)
    typer.echo(f"{job}: {verdict}" + (f", {counted(count, 'warning')}" if count else ""))
