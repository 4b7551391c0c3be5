"""`hpml report --apply` and `--try`: write the changed job file, try it against the original."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hpml_orchestrator.check.job import refusal
from hpml_orchestrator.check.submission import check_rendered
from hpml_orchestrator.cli.common import chosen_site, store_of
from hpml_orchestrator.cli.process import notice
from hpml_orchestrator.cli.sweep import drive_sweep
from hpml_orchestrator.cli.sweepfile import check_plan
from hpml_orchestrator.diagnosis.apply import choose_changes
from hpml_orchestrator.errors import InputError
from hpml_orchestrator.runs.applied import record_applied
from hpml_orchestrator.runs.apply import changed_file, write_changed
from hpml_orchestrator.runs.backend import cluster_name, open_backend
from hpml_orchestrator.runs.prepare import render_job
from hpml_orchestrator.site.profile import site_for
from hpml_orchestrator.sweeps import plan
from hpml_orchestrator.sweeps.trial import make_trial, summary_lines

if TYPE_CHECKING:
    from hpml_orchestrator.diagnosis.model import Diagnosis
    from hpml_orchestrator.records.submission import Submission

_MINUTES = 2.0


def apply_changes(
    context: typer.Context, submission: Submission, diagnosis: Diagnosis, file: str, *, force: bool
) -> None:
    """Write the job file of a run with the changes of its diagnosis, and print what changed."""
    target = Path(os.path.abspath(os.path.expanduser(file)))

    def refused(message: str, hint: str) -> InputError:
        return InputError(message, field="--apply", value=file, hint=hint)

    if target.suffix.lower() == ".toml":
        raise refused("is written as YAML", "--apply tuned.yaml")
    if not force and os.path.lexists(target):
        raise refused("already exists", "--force replaces it")
    store, chosen = store_of(context), choose_changes(diagnosis)
    backend = str(submission.record()["backend"])
    site = site_for(target, os.environ, chosen=chosen_site(context), backend=backend)
    changed = changed_file(submission, chosen, target, site)
    rendered = render_job(replace(changed.resolved, backend=backend))
    report = check_rendered(rendered, store, walk_seconds=1.0)
    if report.errors:
        raise refusal(report.errors)
    write_changed(changed)
    record_applied(store, submission.label, chosen, changed.resolved.job)
    typer.echo("\n".join(changed.diff))
    for one in chosen.made:
        accuracy = "; it can alter the accuracy" if one.change.touches_accuracy else ""
        typer.echo(f"changed   {one.reason}{accuracy}")
    for advice in chosen.left:
        typer.echo(f"to do     {advice}")
    for note in changed.notes:
        notice(f"note: {note}")
    for warning in report.warnings:
        notice(f"warning: {warning}")
    typer.echo(f"wrote {file}; to run it: hpml run {file}", err=True)


def try_changes(
    context: typer.Context,
    submission: Submission,
    diagnosis: Diagnosis,
    *,
    repeats: int | None,
    minutes: float | None,
    yes: bool,
    as_json: bool,
) -> None:
    """Run a job and the changed one in turn, and print what the changes bring."""
    plan.check_extra()
    store, chosen = store_of(context), choose_changes(diagnosis)
    planned = make_trial(
        submission,
        diagnosis.facts,
        chosen,
        repeats=repeats,
        minutes=_MINUTES if minutes is None else minutes,
        chosen_site=chosen_site(context),
        argv=sys.argv,
        now=time.time(),
    )
    check_plan(planned, store)
    for line in summary_lines(planned):
        typer.echo(line, err=True)
    if not yes and sys.stdin.isatty() and not typer.confirm("Start these runs?", err=True):
        typer.echo("nothing was started", err=True)
        raise typer.Exit(1)
    scheduler = open_backend(planned.backend, store)
    planned = replace(planned, cluster=cluster_name(scheduler))
    notice(f"planned {planned.id} in {plan.write(store, planned)}")
    drive_sweep(store, planned, detach=False, as_json=as_json)
