"""Commands about the whole cluster: export slurm, targets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from hpml_exporters.options import is_loopback
from hpml_exporters.slurm.commands import Commands
from hpml_exporters.slurm.options import SlurmOptions
from hpml_exporters.slurm.targets import TargetServer
from hpml_exporters.slurm.targets import targets as targets_of
from hpml_exporters.web.address import listen_on, split

from hpml_orchestrator.cli.process import become_exporter
from hpml_orchestrator.errors import InputError
from hpml_orchestrator.records.files import write_text

__all__ = ["slurm", "targets"]

_PORT_MAX = 65535


def slurm(
    listen: Annotated[
        str, typer.Option("--listen", metavar="ADDRESS:PORT", help="Address to listen on.")
    ] = "127.0.0.1:9446",
    web_config: Annotated[
        str,
        typer.Option("--web-config", metavar="FILE", help="TLS and passwords, as of export node."),
    ] = "",
    source: Annotated[
        str,
        typer.Option("--source", help="auto, pyslurm, commands or openmetrics (Slurm 25.11+)."),
    ] = "auto",
    url: Annotated[
        str, typer.Option("--url", help="The controller, for --source openmetrics.")
    ] = "http://127.0.0.1:6817",
    interval: Annotated[
        float,
        typer.Option("--interval", metavar="SECONDS", help="Between two refreshes, 30 at least."),
    ] = 30.0,
    users: Annotated[
        bool, typer.Option("--users", help="Show jobs and fairshare by user.")
    ] = False,
    accounts: Annotated[bool, typer.Option("--accounts", help="Show jobs by account.")] = False,
    address_file: Annotated[
        str,
        typer.Option("--address-file", metavar="FILE", help="Write the address to FILE."),
    ] = "",
) -> None:
    """Export the cluster's queue, nodes and resources as Slurm shows them.

    Slurm is asked in the background; a scrape returns the last answer.
    """
    options = SlurmOptions(
        listen=listen,
        web_config=os.path.abspath(web_config) if web_config else "",
        address_file=os.path.abspath(address_file) if address_file else "",
        source=source,
        url=url,
        interval=interval,
        users=users,
        accounts=accounts,
    )
    split(listen)
    if not web_config:
        _warn(listen, "metrics of the cluster", "use --web-config FILE")
    become_exporter("hpml_exporters.slurm", options.to_json())


def targets(
    port: Annotated[int, typer.Option("--port", help="Port of the node exporters.")] = 9445,
    only_up: Annotated[
        bool,
        typer.Option("--only-up", help="Leave out nodes that are down, drained or powered down."),
    ] = False,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="Write a file for file_sd.")
    ] = "",
    serve: Annotated[
        str,
        typer.Option("--serve", metavar="ADDRESS:PORT", help="Serve /targets for http_sd."),
    ] = "",
) -> None:
    """List the cluster's node exporters as JSON for Prometheus' file_sd or http_sd."""
    if not 0 < port <= _PORT_MAX:
        raise InputError(f"must be 1 to {_PORT_MAX}", field="--port", value=port)
    if output and serve:
        raise InputError("--output and --serve exclude each other")
    if serve:
        with TargetServer(listen_on(serve), Commands(), port, only_up=only_up) as server:
            _warn(serve, "the list of nodes", "listen on 127.0.0.1, behind an authenticating proxy")
            host = serve.rpartition(":")[0]
            typer.echo(f"http://{host}:{server.server_port}/targets", err=True)
            server.serve_forever()
    text = targets_of(Commands().nodes(), port, only_up=only_up)
    if output:
        write_text(Path(output), text)
    else:
        typer.echo(text, nl=False)


def _warn(listen: str, content: str, remedy: str) -> None:
    """Warn of an address that other machines reach without a password."""
    if not is_loopback(split(listen)[0]):
        typer.echo(
            f"hpml: warning: anyone who can reach {listen} can read {content}, without a password\n"
            f"hint: {remedy}, see docs/slurm-exporter.md",
            err=True,
        )
