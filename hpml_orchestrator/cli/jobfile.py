"""Commands that take a job file: run, submit, render, check."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from hpml_orchestrator.check.job import invalid_job
from hpml_orchestrator.check.submission import check_rendered
from hpml_orchestrator.cli.common import (
    AfterOption,
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
from hpml_orchestrator.cli.follow import follow
from hpml_orchestrator.cli.process import (
    notice,
)
from hpml_orchestrator.cli.show import print_summary
from hpml_orchestrator.cli.submission import (
    job_text,
    report_submission,
    submit_rendered,
)
from hpml_orchestrator.errors import InputError, SchedulerUnavailable, counted
from hpml_orchestrator.runs.after import pending_dependencies
from hpml_orchestrator.runs.backend import choose, open_backend
from hpml_orchestrator.runs.prepare import explained, render_job, write_rendered
from hpml_orchestrator.runs.resubmit import claim_checkpoints
from hpml_orchestrator.runs.submit import resume
from hpml_orchestrator.site.profile import site_for
from hpml_orchestrator.spec.load import load_job, parse_setting
from hpml_orchestrator.spec.site_find import find_profiles

if TYPE_CHECKING:
    from hpml_orchestrator.check.job import CheckReport
    from hpml_orchestrator.records.store import Store
    from hpml_orchestrator.records.submission import Submission
    from hpml_orchestrator.runs.prepare import Rendered

NoCheckOption = Annotated[bool, typer.Option("--no-check", help="Submit without checking the job.")]


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
        typer.Option("--explain", help="Show where each value comes from instead of the script."),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="With --output: overwrite a job.sh that differs.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Print the batch script of a job.

    Words after `--` are appended to `args` of the job file.

    It is byte for byte the script that `submit` submits. With `--local` no site profile applies
    unless `--site` names one.
    """
    refuse_empty({"--output": output})
    if output:
        refuse_with("--output", {"--explain": explain, "--json": as_json})
    elif force:
        raise InputError(
            "needs --output DIR", field="--force", hint=f"hpml render {job_file} -o DIR --force"
        )
    rendered = _rendered(context, job_file, settings, backend_name(backend, local=local))
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
        print_json({"script": rendered.script, "job": rendered.resolved.job.model_dump()})
    else:
        sys.stdout.buffer.write(rendered.script.encode("utf-8"))


def _as_in_job_file(value: object) -> str:
    if isinstance(value, str) and "\n" not in value:
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


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

    def render_file() -> tuple[Rendered, str]:
        name = backend_name(backend, local=local)
        return _rendered(context, job_file, settings, name, after), name

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
    name = backend_name(backend, local=local)
    try:
        rendered = _rendered(context, job_file, settings, name)
        report = check_rendered(rendered, name, store_of(context), script=rendered.script)
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


def _rendered(
    context: typer.Context,
    job_file: str,
    settings: list[str],
    backend: str,
    after: list[str] | None = None,
) -> Rendered:
    values = [parse_setting(setting) for setting in settings]
    values += [("after", after)] if after else []
    chosen = chosen_site(context)
    site = site_for(job_file, os.environ, chosen=chosen, backend=backend)
    if backend == "local" and not chosen:
        _note_unused_profiles(job_file)
    job = load_job(job_file, values, site, arguments=appended_arguments(context))
    return render_job(job, site=site, here=backend == "local")


def backend_name(backend: str, *, local: bool) -> str:
    """Return `slurm` or `local` for the options `--backend` and `--local`."""
    if local:
        refuse_with("--local", {"--backend": backend not in {"auto", "local"}})
    return choose("local" if local else backend)


def _note_unused_profiles(job_file: str) -> None:
    """Print which site profiles a local job does not use; they describe the cluster."""
    with contextlib.suppress(InputError):  # one that cannot be read is not used either
        profiles = find_profiles(job_file, os.environ)
        if profiles:
            names = ", ".join(map(str, profiles))
            note = f"a local job uses no site profile or templates of yours ({names})"
            notice(f"note: {note}; --site FILE applies one")
