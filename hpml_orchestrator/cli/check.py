"""Command `check`: would the cluster accept a job?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from hpml_orchestrator.check.job import invalid_job
from hpml_orchestrator.check.submission import check_rendered
from hpml_orchestrator.cli.common import (
    BackendOption,
    JobFile,
    JsonOption,
    LocalOption,
    SetOption,
    print_json,
    store_of,
)
from hpml_orchestrator.cli.render import backend_name, rendered_job
from hpml_orchestrator.errors import InputError, SchedulerUnavailable, counted

if TYPE_CHECKING:
    from hpml_orchestrator.check.job import CheckReport


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
