"""Commands for dashboards: dashboards build, dashboards check."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer
from hpml_dashboards import JSON

from hpml_orchestrator.errors import HpmlError

__all__ = ["group"]

group = typer.Typer(no_args_is_help=True)


@group.command()
def build(
    output: Annotated[
        str | None,
        typer.Option(
            "--output", metavar="DIR", help="Write into DIR.", show_default="hpml's own files"
        ),
    ] = None,
) -> None:
    """Write Grafana dashboards as JSON, one file each.

    Needs grafana-foundation-sdk: pip install 'hpml-orchestrator[dashboards]'.
    """
    for path in _module("build").write(Path(output) if output else JSON):
        typer.echo(path)


@group.command()
def check(
    directory: Annotated[
        str | None,
        typer.Argument(metavar="[DIR]", help="Directory of built dashboards."),
    ] = None,
) -> None:
    """Check built dashboards: against their code, PromQL, exported metrics and each other.

    Exits with 1 if something is wrong. Works in a clone of hpml's repository.
    """
    findings = _module("check").check(Path(directory) if directory else JSON)
    for finding in findings:
        where = ": ".join(part for part in finding[:2] if part)
        typer.echo(f"{where or 'metrics'}: {finding.message}")
    if findings:
        raise typer.Exit(1)
    typer.echo("all dashboards are as their code says, and every query can be answered")


def _module(name: str) -> Any:
    """Import a module of hpml_dashboards, whose libraries take a second and may be missing."""
    try:
        return importlib.import_module(f"hpml_dashboards.{name}")
    except ModuleNotFoundError as error:
        hint = "pip install 'hpml-orchestrator[dashboards,dev]'"
        raise HpmlError(f"{error.name} is not installed", hint=hint) from None
