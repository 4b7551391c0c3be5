"""`hpml import`: convert an sbatch script to a job file."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from hpml_orchestrator.cli.common import JsonOption, print_json

if TYPE_CHECKING:
    from pathlib import Path

    from hpml_orchestrator.convert import Finding

__all__ = ["import_"]


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

    The script is only read: nothing in it is run.
    """
    from pathlib import Path  # noqa: PLC0415

    from hpml_orchestrator.convert import Place, import_script, read_script  # noqa: PLC0415
    from hpml_orchestrator.errors import InputError  # noqa: PLC0415

    directory = os.getcwd()
    target = Path(os.path.abspath(output)) if output else None
    if target is not None and target.suffix.lower() == ".toml":
        raise InputError("is written as YAML", field="--output", value=output, hint="job.yaml")
    if target is not None and not force and os.path.lexists(target):
        raise InputError(
            "exists already", field="--output", value=output, hint="--force replaces it"
        )
    base = str(target.parent) if target else directory
    place = Place(directory=directory, base=base, environment=dict(os.environ))
    made = import_script(read_script(Path(script)), name=os.path.basename(script), place=place)
    _check(made.text)
    if target is not None:
        _write(target, made.text, force=force)
    if as_json:
        print_json(
            {
                "output": str(target) if target else None,
                "job": made.job,
                "text": made.text,
                "findings": [finding.to_json() for finding in made.findings],
            }
        )
        return
    if target is None:
        sys.stdout.buffer.write(made.text.encode("utf-8"))
        sys.stdout.flush()
    _print_findings(os.path.basename(script), made.findings)
    if target is not None:
        typer.echo(f"wrote {output}; `hpml render {output}` prints its batch script", err=True)


def _check(text: str) -> None:
    """Load and render the job file as `hpml render` would, before anybody sees it."""
    import tempfile  # noqa: PLC0415

    from hpml_orchestrator.script import Capabilities, render  # noqa: PLC0415
    from hpml_orchestrator.script.user_template import check_setup  # noqa: PLC0415
    from hpml_orchestrator.spec import load_job  # noqa: PLC0415

    with tempfile.TemporaryDirectory(prefix="hpml-import-") as scratch:
        path = os.path.join(scratch, "job.yaml")
        with open(path, "w", encoding="utf-8") as stream:
            stream.write(text)
        job = load_job(path).job
    check_setup(job.environment.setup or "", "the script")
    render(job, Capabilities())


def _write(target: Path, text: str, *, force: bool) -> None:
    from hpml_orchestrator.errors import InputError  # noqa: PLC0415

    scratch = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with contextlib.ExitStack() as ending:
            with open(scratch, "x", encoding="utf-8") as stream:
                ending.callback(scratch.unlink, missing_ok=True)
                stream.write(text)
            if force:
                os.replace(scratch, target)
            else:
                os.link(scratch, target)  # fails where something came in between
    except OSError as error:
        raise InputError(
            f"cannot write {target}: {error.strerror}", hint="name another file with --output"
        ) from error


_KINDS = {"lost": "not carried over", "changed": "changed", "dropped": "not needed"}


def _print_findings(name: str, findings: tuple[Finding, ...]) -> None:
    for finding in findings:
        where = f"{name}:{finding.line}" if finding.line else name
        typer.echo(f"{where}: {_KINDS[finding.kind]}: {finding.text}", err=True)
        typer.echo(f"    {finding.why}", err=True)
        if finding.todo:
            typer.echo(f"    -> {finding.todo}", err=True)
