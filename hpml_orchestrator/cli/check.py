"""`hpml check`: whether the cluster would accept a job, before it is submitted."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from hpml_orchestrator.cli.common import (
    BackendOption,
    JobFile,
    JsonOption,
    LocalOption,
    SetOption,
    print_json,
    store_of,
)
from hpml_orchestrator.cli.loading import backend_name, rendered_of
from hpml_orchestrator.errors import InputError, counted

if TYPE_CHECKING:
    from hpml_orchestrator.check.job import Report
    from hpml_orchestrator.check.rules import Verdict
    from hpml_orchestrator.records.store import Store
    from hpml_orchestrator.runs.prepare import Rendered

__all__ = ["NoCheckOption", "before_submission", "check"]

_EXIT_WRONG = 2
_EXIT_NOT_ASKED = 5
_CLUSTER_SECONDS = 5.0  # while a submission waits

NoCheckOption = Annotated[
    bool,
    typer.Option("--no-check", help="Submit without checking the job first."),
]


def check(
    context: typer.Context,
    job_file: JobFile,
    settings: SetOption = [],
    backend: BackendOption = "auto",
    local: LocalOption = False,
    as_json: JsonOption = False,
) -> None:
    """Check a job against the cluster's limits without submitting it.

    Exit status: 0 if the cluster would run the job, 2 if not, 5 if the cluster could not be asked
    or hides its nodes or partitions from you.
    """
    from hpml_orchestrator.check.job import check_job, invalid_job  # noqa: PLC0415

    name = backend_name(backend, local=local)
    try:
        rendered = rendered_of(context, job_file, settings, name)
    except InputError as fault:
        if not as_json:
            raise
        print_json({"backend": name, **invalid_job(fault).to_json()})
        raise typer.Exit(_EXIT_WRONG) from fault
    report = check_job(
        rendered.resolved.job,
        backend=name,
        records=store_of(context).root,
        environment=dict(os.environ),
        site=rendered.site,
        topologies=rendered.topologies,
        targets=rendered.targets,
    )
    if as_json:
        print_json({"backend": name, **report.to_json()})
    else:
        _print(report, name, rendered.resolved.job.name)
    if report.errors:
        raise typer.Exit(_EXIT_WRONG)
    if report.not_asked:
        raise typer.Exit(_EXIT_NOT_ASKED)


def before_submission(rendered: Rendered, name: str, store: Store) -> None:
    """Check a job that is about to be submitted; warnings go to standard error.

    Raises:
        InputError: the cluster would not run it; names everything that is wrong with it.
    """
    from hpml_orchestrator.check.job import check_job, refusal  # noqa: PLC0415

    report = check_job(
        rendered.resolved.job,
        backend=name,
        records=store.root,
        environment=dict(os.environ),
        site=rendered.site,
        topologies=rendered.topologies,
        targets=rendered.targets,
        cluster_seconds=_CLUSTER_SECONDS,
        walk_seconds=1.0,
    )
    # The submission itself reports a moment later that records cannot be written.
    errors = [finding for finding in report.errors if finding.code != "records.unwritable"]
    if errors:
        raise refusal(errors)
    for finding in report.warnings:
        if finding.code == "stage.partly":
            continue
        hint = f"; {finding.hint}" if finding.hint else ""
        typer.echo(f"hpml: warning: {finding}{hint}", err=True)
    if report.not_asked:
        typer.echo(f"hpml: warning: not checked against the cluster: {report.not_asked}", err=True)


def _print(report: Report, backend: str, job: str) -> None:
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
        names = report.verdict.partitions
        verdict = f"OK, {' or '.join(names) or where} would accept this job{_start(report.verdict)}"
    count = len(report.warnings)
    typer.echo(f"{job}: {verdict}" + (f", {counted(count, 'warning')}" if count else ""))


def _start(verdict: Verdict) -> str:
    """Return how many nodes are idle, where that is known."""
    if not verdict.partitions or verdict.idle_nodes is None:
        return ""
    idle = f"{counted(verdict.idle_nodes, 'node')} idle"
    if verdict.idle_nodes >= verdict.nodes:
        return f" (can start now, {idle})"
    return f" ({idle} of the {verdict.nodes} it needs)"
