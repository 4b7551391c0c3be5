"""Command `render`, and the job that the options of a command describe."""

from __future__ import annotations

import json
import shlex
import sys
from typing import Annotated

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
)
from hpml_orchestrator.cli.process import notice
from hpml_orchestrator.errors import InputError
from hpml_orchestrator.jobfile.load import parse_setting
from hpml_orchestrator.runs.backend import choose
from hpml_orchestrator.runs.prepare import Rendered, explained, load_job, render_job, write_rendered


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
