"""`hpml import`: convert an sbatch script to a job file."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from hpml_orchestrator.cli.common import JsonOption, print_json
from hpml_orchestrator.convert.draft import ImportContext, import_script
from hpml_orchestrator.convert.report import report_lines
from hpml_orchestrator.convert.shell import read_script
from hpml_orchestrator.errors import InputError, RecordError
from hpml_orchestrator.records.files import write_users_file


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
                "findings": [note.to_json() for note in made.notes],
            }
        )
        return
    if target is None:
        sys.stdout.buffer.write(made.text.encode("utf-8"))
        sys.stdout.flush()
    for line in report_lines(name, made.notes):
        typer.echo(line, err=True)
    if target is not None:
        typer.echo(f"wrote {output}; `hpml check {output}` judges it", err=True)
