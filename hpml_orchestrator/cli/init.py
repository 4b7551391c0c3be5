"""Command that writes a site profile: init."""

from __future__ import annotations

import os
import shlex
import sys
from typing import Annotated

import typer

from hpml_orchestrator.cli.common import JsonOption, print_json

__all__ = ["init"]


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
    from datetime import UTC, datetime  # noqa: PLC0415
    from getpass import getuser  # noqa: PLC0415
    from socket import gethostname  # noqa: PLC0415

    from hpml_orchestrator.scheduler.command import SubprocessRunner  # noqa: PLC0415
    from hpml_orchestrator.site.initialise import initialise, profile_path, save  # noqa: PLC0415

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
