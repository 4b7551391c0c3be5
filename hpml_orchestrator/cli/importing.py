"""`hpml import`: convert an sbatch script to a job file."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpml_orchestrator.cli.common import JsonOption, print_json
from hpml_orchestrator.convert.files import read_script
from hpml_orchestrator.convert.importer import ImportContext, import_script
from hpml_orchestrator.errors import InputError, RecordError
from hpml_orchestrator.records.files import write_users_file
from hpml_orchestrator.script.archive import check_setup
from hpml_orchestrator.script.render import Capabilities, render

if TYPE_CHECKING:
    from hpml_orchestrator.convert.report import ImportNote


def import_(
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="The sbatch script.", show_default=False)
    ],
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="JOB_FILE",
            help="Write the job file there instead of to stdout.",
            show_default=False,
        ),
    ] = "",
    force: Annotated[
        bool, typer.Option("--force", help="With --output: replace an existing file.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Convert an sbatch script to a job file; warnings go to stderr.

    The script is only read, never run.
    """
    directory = os.getcwd()
    target = None if output in ("", "-") else Path(os.path.abspath(output))
    if target is not None and target.suffix.lower() == ".toml":
        raise InputError("is written as YAML", field="--output", value=output, hint="job.yaml")
    if target is not None and not force and os.path.lexists(target):
        raise InputError(
            "already exists", field="--output", value=output, hint="--force replaces it"
        )
    base = str(target.parent) if target else directory
    context = ImportContext(directory=directory, base=base, environment=dict(os.environ))
    name = os.path.basename(script)
    made = import_script(read_script(Path(script)), name=name, context=context)
    check_setup(made.job.environment.setup or "", "the script")
    render(made.job, Capabilities())  # what cannot be rendered is refused before anybody sees it
    if target is not None:
        try:
            write_users_file(target, made.text)
        except RecordError as error:
            raise InputError(str(error), hint="name another file with --output") from error
    if as_json:
        print_json(
            {
                "output": str(target) if target else None,
                "job": made.job.to_json(),
                "text": made.text,
                "findings": [finding.to_json() for finding in made.findings],
            }
        )
        return
    if target is None:
        sys.stdout.buffer.write(made.text.encode("utf-8"))
        sys.stdout.flush()
    _print_findings(name, made.findings)
    if target is not None:
        typer.echo(f"wrote {output}; `hpml render {output}` prints its batch script", err=True)


_KINDS = {"lost": "not carried over", "changed": "changed", "dropped": "not needed"}


def _print_findings(name: str, findings: tuple[ImportNote, ...]) -> None:
    """Print the findings, grouped by reason."""
    groups: dict[tuple[str, str, str], list[ImportNote]] = {}
    for finding in findings:
        groups.setdefault((finding.kind, finding.why, finding.todo), []).append(finding)
    hints = set()
    for (kind, why, todo), group in groups.items():
        for finding in group:
            where = f"{name}:{finding.line}" if finding.line else name
            typer.echo(f"{where}: {_KINDS[kind]}: {finding.text}", err=True)
        typer.echo(f"    {why}", err=True)
        if todo and todo not in hints:
            typer.echo(f"    -> {todo}", err=True)
        hints.add(todo)
