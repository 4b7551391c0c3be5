"""Command `man`: show the manual of a command, or write all pages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hpml_orchestrator.cli.manual import Page

__all__ = ["register"]

_WIDTH = 80
_WIDEST = 100


def register(app: typer.Typer) -> None:
    """Add this group's commands to the application."""

    @app.command()
    def man(
        words: Annotated[
            list[str],
            typer.Argument(metavar="[COMMAND…]", help="Command to read about; hpml without."),
        ] = [],  # noqa: B006 - typer copies it
        output: Annotated[
            str,
            typer.Option(
                "--output",
                "-o",
                metavar="DIR",
                help="Write all pages below DIR/man1 instead, where man(1) finds them once DIR is "
                "on its MANPATH. SOURCE_DATE_EPOCH sets their date.",
            ),
        ] = "",
    ) -> None:
        """Show the manual of hpml, or of one of its commands.

        On a terminal man(1) shows it, where it is installed; elsewhere it is printed as plain text.
        """
        if output:
            _write(app, output, words)
        else:
            _show(app, words)


def _write(app: typer.Typer, directory: str, words: list[str]) -> None:
    from hpml_orchestrator.cli.manpages import pages  # noqa: PLC0415
    from hpml_orchestrator.errors import InputError  # noqa: PLC0415

    if words:
        raise InputError(
            "writes all pages and takes no command",
            field="--output",
            value=" ".join(words),
            hint=f"hpml man --output {directory}",
        )
    made = pages(app, date=_date())
    target = os.path.join(os.path.abspath(os.path.expanduser(directory)), "man1")
    try:
        os.makedirs(target, exist_ok=True)
        for name, text in made.items():
            with open(os.path.join(target, name), "w", encoding="ascii") as stream:
                stream.write(text)
    except OSError as error:
        raise InputError(
            f"cannot be written: {error.strerror or error}",
            field="--output",
            value=directory,
            hint="name a directory that you may write to",
        ) from error
    typer.echo(f"wrote {len(made)} pages to {target}")


def _date() -> str:
    """Return the date of the pages: reproducible builds set it by SOURCE_DATE_EPOCH."""
    from datetime import UTC, datetime  # noqa: PLC0415

    from hpml_orchestrator.cli.manpages import RELEASED  # noqa: PLC0415
    from hpml_orchestrator.errors import InputError  # noqa: PLC0415

    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    if not epoch:
        return RELEASED
    try:
        return datetime.fromtimestamp(int(epoch), UTC).date().isoformat()
    except (ValueError, OverflowError, OSError):
        raise InputError(
            "must be seconds since 1970", field="SOURCE_DATE_EPOCH", value=epoch, hint="unset it"
        ) from None


def _show(app: typer.Typer, words: list[str]) -> None:
    from hpml_orchestrator.cli.manpages import pages  # noqa: PLC0415
    from hpml_orchestrator.cli.manual import manual  # noqa: PLC0415
    from hpml_orchestrator.cli.manualtext import plain  # noqa: PLC0415

    page = _find(manual(app), words)
    if sys.stdout.isatty():
        if _shown_by_man(pages(app)[f"{page.title}.1"], page.title):
            return
        width = min(shutil.get_terminal_size().columns, _WIDEST)
    else:
        width = _WIDTH
    typer.echo(plain(page, width=width), nl=False)


def _find(known: list[Page], words: list[str]) -> Page:
    from hpml_orchestrator.errors import InputError, did_you_mean  # noqa: PLC0415

    named = {page.command.removeprefix("hpml").strip(): page for page in known}
    # `man hpml-submit` is how man itself names it
    wanted = " ".join(words).removeprefix("hpml").strip(" -")
    if wanted in named:
        return named[wanted]
    raise InputError(
        "there is no such command",
        field="COMMAND",
        value=wanted,
        hint=did_you_mean(wanted, named) or "hpml man",
    )


def _shown_by_man(text: str, title: str) -> bool:
    """Show a page through man(1); return whether that was possible."""
    if shutil.which("man") is None:
        return False
    with tempfile.TemporaryDirectory(prefix="hpml-man-") as directory:
        path = os.path.join(directory, f"{title}.1")
        with open(path, "w", encoding="utf-8") as stream:
            stream.write(text)
        return subprocess.run(["man", "-l", path], check=False).returncode == 0
