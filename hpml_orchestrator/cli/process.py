"""The process of a command: its exit statuses, its streams, its current directory."""

from __future__ import annotations

import contextlib
import os
import signal
import sys

import typer

from hpml_orchestrator.errors import NotFoundError

__all__ = [
    "EXIT_INTERNAL",
    "EXIT_INTERRUPTED",
    "EXIT_NOT_WRITTEN",
    "EXIT_STUCK",
    "EXIT_TERMINATED",
    "notice",
    "refuse_gone_directory",
    "report_unwritable_output",
]

EXIT_INTERNAL = 70
EXIT_NOT_WRITTEN = 74
EXIT_STUCK = 75
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_TERMINATED = 128 + signal.SIGTERM


def notice(text: str) -> None:
    """Print a line of progress on standard error."""
    typer.echo(f"hpml: {text}", err=True)


def refuse_gone_directory() -> None:
    """Refuse to run in a directory that was removed.

    Raises:
        NotFoundError: the current directory does not exist.
    """
    try:
        os.getcwd()
    except OSError:
        raise NotFoundError(
            "the current directory no longer exists", hint="`cd` to another one first"
        ) from None


def report_unwritable_output(error: OSError) -> None:
    """Report on standard error that standard output cannot be written, and discard the rest."""
    with contextlib.suppress(OSError):
        typer.echo(f"hpml: cannot write to standard output: {error.strerror}", err=True)
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
