"""`hpml`: the application, and how its errors are told."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Annotated

import typer

from hpml_orchestrator import __version__
from hpml_orchestrator.cli import (
    check,
    export,
    importing,
    init,
    jobfile,
    man,
    pack,
    prune,
    runs,
    site,
    stage,
    templates,
    topo,
)
from hpml_orchestrator.cli.common import not_written, refuse_gone_directory
from hpml_orchestrator.cli.statuses import EXIT_INTERNAL, EXIT_INTERRUPTED, EXIT_NOT_WRITTEN
from hpml_orchestrator.cli.usage import USAGE_ERROR, asks_for_help, explained
from hpml_orchestrator.errors import HpmlError, InputError

__all__ = ["app", "main"]

_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF, errno.EFBIG)
_ANYWHERE = frozenset(
    {"list", "status", "show", "logs", "wait", "cancel", "prune", "schema", "export", "topo"}
)
"""Commands about records or this node: they do without a current directory."""

app = typer.Typer(
    name="hpml",
    help="Run machine-learning training on Slurm clusters, or on this machine, from one job file.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hpml {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    records: Annotated[
        str,
        typer.Option(
            "--records",
            metavar="DIR",
            help="Where records live.",
            envvar="HPML_HOME",
            show_default="~/.local/state/hpml",
        ),
    ] = "",
    site_profile: Annotated[
        str,
        typer.Option(
            "--site",
            metavar="FILE",
            help="Site profile to use alone, or `none`.",
            envvar="HPML_SITE",
            show_default="the project's hpml.toml over the user's and the system's",
        ),
    ] = "",
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error.", envvar="HPML_DEBUG")
    ] = False,
    _: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_version, is_eager=True),
    ] = False,
) -> None:
    lost = bool(records) and not os.path.isabs(os.path.expanduser(records))
    asks = {"-h", "--help"} & set(sys.argv[1:])
    if (lost or context.invoked_subcommand not in _ANYWHERE) and not asks:
        refuse_gone_directory()
    context.obj = {"records": records, "site": site_profile, "debug": debug}


jobfile.register(app)
importing.register(app)
check.register(app)
runs.register(app)
prune.register(app)
site.register(app)
init.register(app)
templates.register(app)
topo.register(app)
pack.register(app)
stage.register(app)
export.register(app)
man.register(app)


def main() -> None:
    """Entry point: run a command; tell errors in one line with a hint, and exit by their class."""
    debug = "--debug" in sys.argv[1:] or bool(os.environ.get("HPML_DEBUG"))
    _open_streams()
    try:
        try:
            _call()
        finally:
            sys.stdout.flush()
    except HpmlError as error:
        if debug:
            raise
        _tell(error)
        raise SystemExit(error.exit_code) from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    except Exception as error:
        if debug:
            raise
        if isinstance(error, OSError) and error.errno in _CANNOT_WRITE and not error.filename:
            not_written(error)
            raise SystemExit(EXIT_NOT_WRITTEN) from None
        typer.echo(
            f"hpml: internal error: {type(error).__name__}: {error}\n"
            "hint: this is a fault of hpml's; run it again with `hpml --debug …` and report "
            "what it prints",
            err=True,
        )
        raise SystemExit(EXIT_INTERNAL) from None


def _open_streams() -> None:
    """Make the standard streams usable, whatever the caller left of them."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller, as with `>&-`
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Names of files may hold what the terminal's encoding has not: shown as in errors.
        sys.stdout.reconfigure(errors="backslashreplace")


def _call() -> None:
    """Run the command that the command line names; a wrong command line is told here."""
    try:
        status = app(standalone_mode=False)
    except typer.Abort:
        raise SystemExit(EXIT_INTERRUPTED) from None
    except USAGE_ERROR as error:
        if asks_for_help(error):
            typer.echo(error, err=True)
        else:
            _tell(explained(error, sys.argv[1:], typer.main.get_command(app)))
        raise SystemExit(InputError.exit_code) from None
    if isinstance(status, int) and status:
        raise SystemExit(status)


def _tell(error: HpmlError) -> None:
    lines = str(error).splitlines() or [type(error).__name__]
    typer.echo(f"hpml: error: {lines[0]}", err=True)
    for line in lines[1:]:
        typer.echo(f"             {line}", err=True)
    if error.hint:
        typer.echo(f"hint: {error.hint}", err=True)
