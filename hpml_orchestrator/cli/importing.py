"""Commands that bring in what users have already: import."""

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

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add this group's commands to the application."""
    app.command("import")(import_)


def import_(
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="Script for sbatch.", show_default=False)
    ],
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="JOB_FILE",
            help="Write the job file there.",
            show_default=False,
        ),
    ] = "",
    force: Annotated[
        bool, typer.Option("--force", help="With --output: replace a file that is there.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Print the job file of a script for sbatch, and say on standard error what it lacks.

    The script is read, and nothing of it is run.
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
            "is there already", field="--output", value=output, hint="--force replaces it"
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
                "findings": [one.to_json() for one in made.findings],
            }
        )
        return
    if target is None:
        sys.stdout.buffer.write(made.text.encode("utf-8"))
        sys.stdout.flush()
    _tell(os.path.basename(script), made.findings)
    if target is not None:
        typer.echo(f"wrote {output}; to look at its script: hpml render {output}", err=True)


def _check(text: str) -> None:
    """Load the job file as `hpml submit` would, before anybody sees it."""
    import tempfile  # noqa: PLC0415

    from hpml_orchestrator.spec import load_job  # noqa: PLC0415

    with tempfile.TemporaryDirectory(prefix="hpml-import-") as scratch:
        path = os.path.join(scratch, "job.yaml")
        with open(path, "w", encoding="utf-8") as stream:
            stream.write(text)
        load_job(path)


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


_WORDS = {
    "lost": "not carried over",
    "changed": "carried otherwise",
    "dropped": "not needed",
}


def _tell(name: str, findings: tuple[Finding, ...]) -> None:
    for one in findings:
        where = f"{name}:{one.line}" if one.line else name
        typer.echo(f"{where}: {_WORDS[one.kind]}: {one.text}", err=True)
        typer.echo(f"    {one.why}", err=True)
        if one.todo:
            typer.echo(f"    -> {one.todo}", err=True)
