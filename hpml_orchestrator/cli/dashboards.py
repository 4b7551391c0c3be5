"""Commands for dashboards: dashboards build, push, show."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import webbrowser
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer
from hpml_dashboards import JSON
from hpml_dashboards.serve import (
    DEFAULT_URL,
    PrometheusServer,
    PrometheusServerError,
    ViewerServer,
)
from hpml_exporters.web.config import split

from hpml_orchestrator.cli.common import PrometheusAuthOption, chosen_site
from hpml_orchestrator.cli.process import notice
from hpml_orchestrator.errors import HpmlError, InputError, extra_hint
from hpml_orchestrator.jobfile.text import LOCAL_NAMES, read_credentials, web_address
from hpml_orchestrator.site.profile import prometheus_of_site

group = typer.Typer(no_args_is_help=True)


@group.callback()
def _group() -> None:
    """Show the dashboards of a Prometheus in the browser, or push them to Grafana."""


@group.command()
def build(
    output: Annotated[
        str | None,
        typer.Option(
            "--output", metavar="DIR", help="Write into DIR.", show_default="hpml's own files"
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace files in DIR that were changed.")
    ] = False,
) -> None:
    """Write Grafana dashboards as JSON, one file each.

    Needs grafana-foundation-sdk, which hpml's extra `dashboards` installs.
    """
    module = _module("build")
    try:
        for path in module.write(Path(output or JSON), overwrite=overwrite or not output):
            typer.echo(path)
    except OSError as error:
        message = f"cannot be written: {error.strerror}"
        raise InputError(message, field="--output", value=output) from None


@group.command()
def push(
    url: Annotated[str, typer.Option("--url", metavar="URL", help="Address of the Grafana.")],
    token_file: Annotated[
        str,
        typer.Option(
            "--token-file",
            metavar="FILE",
            help="File of mode 600 with a service account's token; default: $GRAFANA_TOKEN.",
        ),
    ] = "",
    folder: Annotated[
        str, typer.Option("--folder", metavar="TITLE", help="Folder in Grafana.")
    ] = "hpml",
    prometheus: Annotated[
        str,
        typer.Option(
            "--prometheus",
            metavar="URL",
            help="Create a data source for this Prometheus; use the address that Grafana uses.",
        ),
    ] = "",
    datasource: Annotated[
        str,
        typer.Option(
            "--datasource",
            metavar="UID",
            help="Data source of the alert rules; default: the only or default Prometheus.",
        ),
    ] = "",
    no_alerts: Annotated[bool, typer.Option("--no-alerts", help="Push no alert rules.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Also replace what was changed in Grafana.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would change.")
    ] = False,
) -> None:
    """Put dashboards and alert rules into a Grafana.

    A push can be repeated. It keeps and lists what was changed in Grafana; the exit status is then
    1, as after failures.
    """
    module = _module("push")
    address = web_address(url)
    if address and address.scheme == "http" and address.hostname not in LOCAL_NAMES:
        notice("warning: --url is http: the token crosses the network unencrypted")
    options = module.Push(
        url=url,
        token=module.read_token(token_file),
        folder=folder,
        prometheus=prometheus,
        datasource=datasource,
        alerts=not no_alerts,
        overwrite=overwrite,
        dry_run=dry_run,
    )
    left = 0
    for outcome in module.push(options):
        reason = f": {outcome.reason}" if outcome.reason else ""
        typer.echo(f"{outcome.action:<9}  {outcome.kind} {outcome.name}{reason}")
        if dry_run and outcome.diff:
            typer.echo(outcome.diff)
        left += outcome.action in {"kept", "failed"}
    if left:
        raise HpmlError(
            f"{left} {'things were' if left > 1 else 'thing was'} not pushed",
            hint="--overwrite replaces what a person changed; --dry-run shows the difference",
        )


@group.command()
def show(
    context: typer.Context,
    prometheus: Annotated[
        str,
        typer.Option(
            "--prometheus",
            metavar="URL",
            envvar="PROMETHEUS_URL",
            help=f"Prometheus; default: the site profile's, else {DEFAULT_URL}.",
        ),
    ] = "",
    prometheus_auth: PrometheusAuthOption = "",
    listen: Annotated[
        str,
        typer.Option("--listen", metavar="PORT", help="Port of 127.0.0.1; default: a free one."),
    ] = "127.0.0.1:0",
    no_open: Annotated[
        bool, typer.Option("--no-open", help="Print the address without opening a browser.")
    ] = False,
) -> None:
    """Show the dashboards of a running Prometheus in the browser, without Grafana.

    The address contains a token, so nobody else on this machine can use it. From another machine,
    connect with `ssh -L PORT:127.0.0.1:PORT`. Ctrl-C ends it.
    """
    own = listen.removeprefix(":")
    try:
        host, port = split(f"127.0.0.1:{own}" if own.isdecimal() else listen)
    except InputError:
        host, port = "", 0
    if host not in LOCAL_NAMES:
        hint = "--listen 8080; to reach it from elsewhere: ssh -L 8080:127.0.0.1:8080 THIS_MACHINE"
        message = "must be a port: the server listens on this machine only"
        raise InputError(message, field="--listen", value=listen, hint=hint)
    authorization = read_credentials(prometheus_auth)
    named = "" if prometheus == "none" else prometheus  # $PROMETHEUS_URL may be `none`
    url = named or prometheus_of_site(os.environ, chosen=chosen_site(context)) or DEFAULT_URL
    source = PrometheusServer(url, authorization)
    try:
        if not source.has_metrics():
            typer.echo(
                f"hpml: note: {source.url} has no metrics of hpml yet\n"
                "hint: start `hpml export node` and add it to Prometheus, see docs/monitoring.md",
                err=True,
            )
    except PrometheusServerError as error:
        raise HpmlError(
            str(error), hint="see that it runs, or name another: --prometheus URL"
        ) from None
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also in the background of a script
    with ViewerServer(source, port) as server, contextlib.suppress(KeyboardInterrupt):
        typer.echo(server.address)
        sys.stdout.flush()
        if not no_open and (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
            webbrowser.open(server.address)
        server.serve_forever()


def _module(name: str) -> ModuleType:
    """Import a module of hpml_dashboards, whose libraries take a second and may be missing."""
    try:
        return importlib.import_module(f"hpml_dashboards.{name}")
    except ModuleNotFoundError as error:
        raise HpmlError(f"{error.name} is not installed", hint=extra_hint("dashboards")) from None
