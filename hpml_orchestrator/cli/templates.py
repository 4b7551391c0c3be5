"""`hpml template list` and `hpml template eject`: templates of batch scripts."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from hpml_orchestrator import assets
from hpml_orchestrator.cli.common import JsonOption, chosen_site, print_json, print_table
from hpml_orchestrator.errors import NotFoundError

__all__ = ["group"]

group = typer.Typer(
    help="List the templates of batch scripts, or start one of your own.", no_args_is_help=True
)


def _choices() -> str:
    """Return the names of hpml's own templates, the base first."""
    try:
        files = list(assets.path("templates/sbatch").glob("*.sh.j2"))
    except NotFoundError:  # reported by the command itself: others work without templates
        return "one of `hpml template list`"
    names = sorted(
        (one.name.removesuffix(".sh.j2") for one in files), key=lambda name: (name != "base", name)
    )
    return f"{', '.join(names[:-1])} or {names[-1]}"


@group.command("list")
def list_(context: typer.Context, as_json: JsonOption = False) -> None:
    """List the templates in use: yours, named in the site profile, and hpml's own."""
    from hpml_orchestrator.runs.templates import templates  # noqa: PLC0415
    from hpml_orchestrator.site.profile import site_for  # noqa: PLC0415

    chosen = chosen_site(context)
    site = site_for(Path.cwd() / "job.yaml", os.environ, chosen=chosen)
    found = templates(site.site.templates if site else None)
    if as_json:
        print_json([asdict(template) for template in found])
        return
    print_table(
        ("TEMPLATE", "FOR", "FROM", "BLOCKS"),
        [
            (template.name, template.purpose, template.origin, " ".join(template.blocks) or "-")
            for template in found
        ],
    )


@group.command("eject")
def eject(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"Which: {_choices()}.")],
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="DIR", help="Directory of your templates.")
    ] = "templates",
    whole: Annotated[
        bool, typer.Option("--whole", help="Copy all of hpml's template instead of extending it.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Write a template of your own that extends hpml's, with its blocks explained."""
    from hpml_orchestrator.cli.common import refuse_empty  # noqa: PLC0415
    from hpml_orchestrator.runs import templates  # noqa: PLC0415

    refuse_empty({"--output": output})
    path = templates.eject(name, output, whole=whole, force=force)
    typer.echo(f"wrote {path}")
    here = Path.cwd()
    inside = path.parent.relative_to(here) if path.parent.is_relative_to(here) else path.parent
    typer.echo("to use it, add to hpml.toml, above its first [section]:")
    typer.echo(f"    templates = {json.dumps(str(inside))}")
