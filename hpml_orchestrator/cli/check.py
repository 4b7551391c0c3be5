"""`hpml check`: whether a job would be taken, before it is submitted."""

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

if TYPE_CHECKING:
    from hpml_orchestrator.check.job import Report
    from hpml_orchestrator.records.store import Store
    from hpml_orchestrator.runs.prepare import Rendered

__all__ = ["NoCheckOption", "before_submission", "check"]

_EXIT_WRONG = 2
_EXIT_NOT_ASKED = 5
_PATIENCE_SECONDS = 5.0  # with a cluster that does not answer while a submission waits

NoCheckOption = Annotated[
    bool,
    typer.Option("--no-check", help="Submit without asking first whether the job will be taken."),
]


def check(
    context: typer.Context,
    job_file: JobFile,
    settings: SetOption = [],
    backend: BackendOption = "auto",
    local: LocalOption = False,
    as_json: JsonOption = False,
) -> None:
    """Say whether a job would be taken, and what would do where not; nothing is submitted.

    The exit status is 0 when nothing keeps the job from running, 2 when something does, and 5 when
    the cluster could not be asked or hides its nodes or partitions from you.
    """
    from hpml_orchestrator.check.job import check_job  # noqa: PLC0415

    name = backend_name(backend, local=local)
    rendered = rendered_of(context, job_file, settings, name)
    report = check_job(
        rendered.resolved.job,
        backend=name,
        records=store_of(context).root,
        environment=dict(os.environ),
        script=rendered.script,
        site=rendered.site,
        topologies=rendered.topologies,
        targets=rendered.targets,
    )
    if as_json:
        print_json({"backend": name, **report.to_json()})
    else:
        _tell(report, name, rendered.resolved.job.name)
    if report.errors:
        raise typer.Exit(_EXIT_WRONG)
    if report.not_asked:
        raise typer.Exit(_EXIT_NOT_ASKED)


def before_submission(rendered: Rendered, name: str, store: Store) -> None:
    """Check a job that is about to be submitted; warnings go to standard error.

    Raises:
        InputError: it would not run; names everything that is wrong with it.
    """
    from hpml_orchestrator.check.job import check_job, refusal  # noqa: PLC0415

    report = check_job(
        rendered.resolved.job,
        backend=name,
        records=store.root,
        environment=dict(os.environ),
        script=rendered.script,
        site=rendered.site,
        topologies=rendered.topologies,
        targets=rendered.targets,
        cluster_seconds=_PATIENCE_SECONDS,
        walk_seconds=1.0,
    )
    # Whether records can be written is seen a moment later, and said in the words of that error.
    errors = [one for one in report.errors if one.code != "records.unwritable"]
    if errors:
        raise refusal(errors)
    for finding in report.warnings:
        if finding.code == "stage.partly":
            continue
        hint = f"; {finding.hint}" if finding.hint else ""
        typer.echo(f"hpml: warning: {finding}{hint}", err=True)
    if report.not_asked:
        typer.echo(f"hpml: warning: not checked against the cluster: {report.not_asked}", err=True)


def _tell(report: Report, backend: str, job: str) -> None:
    for note in report.notes:
        typer.echo(f"note: {note}")
    for finding in report.findings:
        typer.echo(f"{finding.level}: {finding}")
        if finding.hint:
            typer.echo(f"  hint: {finding.hint}")
    where = "this machine" if backend == "local" else "the cluster"
    if report.errors:
        count = len(report.errors)
        words = f"{where} would not run {job}: {count} error{'s' * (count > 1)}"
        if report.not_asked:
            typer.echo(f"not checked against {where}: {report.not_asked}")
    elif report.not_asked:
        words = f"{job} was not checked against {where}: {report.not_asked}"
    else:
        words = f"{where} would take {job}: no errors"
    count = len(report.warnings)
    typer.echo(words + (f", {count} warning{'s' * (count > 1)}" if count else ""))
