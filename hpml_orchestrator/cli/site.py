"""Commands about the cluster and the installation: init, doctor, schema."""

from __future__ import annotations

import os
import shlex
import sys
from datetime import UTC, datetime
from socket import gethostname
from typing import Annotated, Literal

import typer

from hpml_orchestrator.cli.common import (
    JsonOption,
    chosen_site,
    print_json,
    print_table,
    store_of,
)
from hpml_orchestrator.cli.process import notice
from hpml_orchestrator.errors import InputError
from hpml_orchestrator.jobfile.schema import job_schema, sweep_schema
from hpml_orchestrator.scheduler.command import SubprocessRunner
from hpml_orchestrator.site.doctor import examine
from hpml_orchestrator.site.initialise import initialise, profile_path, save
from hpml_orchestrator.site.model import site_schema


def init(
    context: typer.Context,
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write the profile there; `-` prints it.",
            show_default="hpml.toml",
        ),
    ] = "",
    user: Annotated[
        bool,
        typer.Option(
            "--user", help="Write your profile for all projects, ~/.config/hpml/site.toml."
        ),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe",
            help="Run a short srun on an idle node of each kind: disks, networks, topology.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Query the cluster and write a site profile.

    Read and edit the profile before you use it. Without Slurm no profile is needed.
    """
    printed = output == "-" and not user
    where = (
        None if printed else profile_path(output, user=user, force=force, environment=os.environ)
    )
    if probe:
        notice("probing idle nodes; this takes up to two minutes")
    profile = initialise(
        SubprocessRunner(),
        os.environ,
        writer=f"{os.environ.get('USER') or os.getuid()}@{gethostname()}",
        when=f"{datetime.now(tz=UTC):%Y-%m-%d %H:%M} UTC",
        look=store_of(context).root if probe else None,
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
    typer.echo(f"next: read and edit it, then run: hpml {applies}check job.yaml")


def doctor(
    context: typer.Context,
    node: Annotated[
        bool, typer.Option("--node", help="Check whether this node is fit for jobs instead.")
    ] = False,
    gpus: Annotated[
        int | None,
        typer.Option(
            "--gpus",
            metavar="N",
            min=0,
            help="With --node: how many GPUs it should have.",
            show_default="those on the PCI bus",
        ),
    ] = None,
    drain: Annotated[
        bool, typer.Option("--drain", help="With --node: drain it in Slurm if it is not fit.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check the installation, Slurm and this machine, or with --node a node's hardware.

    The exit status is 1 if something that hpml needs is missing, with --node if the node is not
    fit for jobs.
    """
    if node:
        from hpml_orchestrator.cli.nodehealth import check_node  # noqa: PLC0415 - for few

        check_node(gpus, drain=drain, as_json=as_json)
        return
    for option, given in {"--gpus": gpus is not None, "--drain": drain}.items():
        if given:
            raise InputError("needs --node", field=option, hint=f"hpml doctor --node {option}")
    findings = examine(store_of(context), site=chosen_site(context))
    if as_json:
        print_json([finding.to_json() for finding in findings])
    else:
        print_table(
            ("CHECK", "RESULT", "FOUND"),
            [(finding.check, finding.result, finding.found) for finding in findings],
        )
        for finding in findings:
            if finding.hint:
                typer.echo(f"hint: {finding.check}: {finding.hint}", err=True)
    if any(finding.result == "missing" for finding in findings):
        raise typer.Exit(1)


def schema(
    what: Annotated[
        Literal["job", "site", "sweep"],
        typer.Argument(metavar="job|site|sweep", help="Job files, site profiles or sweep files."),
    ] = "job",
) -> None:
    """Print the JSON Schema of job files, profiles or sweeps.

    Editors use it to complete and check these files.
    """
    print_json({"job": job_schema, "site": site_schema, "sweep": sweep_schema}[what]())
