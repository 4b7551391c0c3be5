"""Commands about the cluster and the installation: init, doctor, template, schema."""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from getpass import getuser
from pathlib import Path
from socket import gethostname
from typing import Annotated

import typer

from hpml_orchestrator import assets
from hpml_orchestrator.cli.common import (
    JsonOption,
    chosen_site,
    print_json,
    print_table,
    refuse_empty,
    store_of,
)
from hpml_orchestrator.errors import InputError, NotFoundError
from hpml_orchestrator.runs.templates import eject as eject_template
from hpml_orchestrator.runs.templates import templates
from hpml_orchestrator.scheduler.command import SubprocessRunner
from hpml_orchestrator.site.doctor import examine
from hpml_orchestrator.site.initialise import initialise, profile_path, save
from hpml_orchestrator.site.profile import site_for
from hpml_orchestrator.spec import job_schema, site_schema

__all__ = ["doctor", "group", "init", "schema"]

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
    refuse_empty({"--output": output})
    path = eject_template(name, output, whole=whole, force=force)
    typer.echo(f"wrote {path}")
    here = Path.cwd()
    inside = path.parent.relative_to(here) if path.parent.is_relative_to(here) else path.parent
    typer.echo("to use it, add to hpml.toml, above its first [section]:")
    typer.echo(f"    templates = {json.dumps(str(inside))}")


def init(
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Where to write it; `-` prints it.",
            show_default="hpml.toml",
        ),
    ] = "",
    user: Annotated[
        bool,
        typer.Option("--user", help="Write yours for all projects: ~/.config/hpml/site.toml."),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe",
            help="Probe an idle node of each kind with a short srun: disks, networks, topology.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a site profile of this cluster, to be read and edited."""
    printed = output == "-" and not user
    where = (
        None if printed else profile_path(output, user=user, force=force, environment=os.environ)
    )
    try:
        who = getuser()
    except (OSError, KeyError):  # a user id without a name
        who = str(os.getuid())
    if probe:
        typer.echo("hpml: probing idle nodes, a minute or two at most", err=True)
    profile = initialise(
        SubprocessRunner(),
        os.environ,
        writer=f"{who}@{gethostname()}",
        when=f"{datetime.now(tz=UTC):%Y-%m-%d %H:%M} UTC",
        look=probe,
    )
    written = save(profile, where, force=force) if where else []
    if as_json:
        print_json(
            {
                "file": str(where) if where else None,
                "topology_files": [str(path) for path in written[:-1]],
                **profile.to_json(),
            }
        )
        return
    if where is None:
        sys.stdout.write(profile.text)
        return
    for line in profile.lines():
        typer.echo(line)
    for path in written:
        typer.echo(f"wrote       {path}")
    applies = "" if user or where.name == "hpml.toml" else f"--site {shlex.quote(str(where))} "
    typer.echo(f"next: read it, then hpml {applies}check job.yaml")


def doctor(context: typer.Context, as_json: JsonOption = False) -> None:
    """Check what hpml finds here; the exit status is 1 when something that it needs is missing."""
    findings = examine(store_of(context), site=chosen_site(context))
    if as_json:
        print_json([finding.to_json() for finding in findings])
    else:
        print_table(
            ("CHECK", "RESULT", "FOUND"),
            [(one.check, one.result, one.found) for one in findings],
        )
        for one in findings:
            if one.hint:
                typer.echo(f"hint: {one.check}: {one.hint}", err=True)
    if any(one.result == "missing" for one in findings):
        raise typer.Exit(1)


def schema(
    what: Annotated[str, typer.Argument(help="Which file: job or site.", metavar="WHAT")] = "job",
) -> None:
    """Print the JSON Schema of a job file or of a site profile, for editors."""
    schemas = {"job": job_schema, "site": site_schema}
    if what not in schemas:
        raise InputError("must be job or site", field="WHAT", value=what, hint="hpml schema job")
    print_json(schemas[what]())
