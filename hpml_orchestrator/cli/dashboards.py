"""Commands about dashboards: dashboards show."""

from __future__ import annotations

import contextlib
import os
import sys
import webbrowser
from typing import Annotated

import typer
from hpml_dashboards.serve import (
    DEFAULT_URL,
    Prometheus,
    PrometheusError,
    ViewerServer,
    read_credentials,
)
from hpml_exporters.options import is_loopback
from hpml_exporters.web.address import split

from hpml_orchestrator.errors import HpmlError, InputError

__all__ = ["group"]

group = typer.Typer(no_args_is_help=True)


@group.callback()
def _group() -> None:
    """Show the dashboards of a Prometheus in the browser, or push them to Grafana."""


@group.command()
def show(
    prometheus: Annotated[
        str,
        typer.Option("--prometheus", metavar="URL", envvar="PROMETHEUS_URL", help="Prometheus."),
    ] = DEFAULT_URL,
    prometheus_auth: Annotated[
        str,
        typer.Option(
            "--prometheus-auth",
            metavar="FILE",
            help="File of mode 600 with user:password or a token for Prometheus.",
        ),
    ] = "",
    listen: Annotated[
        str,
        typer.Option("--listen", metavar="127.0.0.1:PORT", help="Port; default: a free one."),
    ] = "127.0.0.1:0",
    no_open: Annotated[
        bool, typer.Option("--no-open", help="Print the address without opening a browser.")
    ] = False,
) -> None:
    """Show the dashboards of a running Prometheus in the browser, without Grafana.

    The address has a token: nobody else on this machine can use it. From another machine, connect
    with `ssh -L PORT:127.0.0.1:PORT`. Ctrl-C ends it.
    """
    host, port = split(listen)
    if not is_loopback(host):
        hint = f"use an SSH tunnel to reach it from elsewhere: ssh -L {port or 'PORT'}:127.0.0.1:…"
        raise InputError("must be 127.0.0.1:PORT", field="--listen", value=listen, hint=hint)
    authorization = read_credentials(prometheus_auth) if prometheus_auth else ""
    source = Prometheus(prometheus, authorization)
    try:
        if not source.has_metrics():
            typer.echo(
                f"hpml: note: {source.url} has no metrics of hpml yet\n"
                "hint: start `hpml export node` and add it to Prometheus, see docs/monitoring.md",
                err=True,
            )
    except PrometheusError as error:
        raise HpmlError(str(error), hint="--prometheus URL names another Prometheus") from None
    with ViewerServer(source, port) as server, contextlib.suppress(KeyboardInterrupt):
        typer.echo(server.address)
        sys.stdout.flush()
        if not no_open and (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
            webbrowser.open(server.address)
        server.serve_forever()
