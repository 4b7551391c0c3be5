"""Command `man`: show the manual page of a command, or install all pages."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpml_orchestrator import assets
from hpml_orchestrator.errors import InputError, NotFoundError, did_you_mean

if TYPE_CHECKING:
    from typer.core import TyperGroup


def man(
    context: typer.Context,
    words: Annotated[
        list[str], typer.Argument(metavar="COMMAND", help="Default: hpml itself.")
    ] = [],
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="Install all pages in DIR/man1; DIR must be on your MANPATH.",
        ),
    ] = "",
) -> None:
    """Show the manual page of a command.

    Without man(1), or if the output is not a terminal, this prints the command's help.
    """
    if output:
        if words:
            raise InputError("takes no command", field="--output", value=" ".join(words))
        _install(output)
        return
    # `man hpml-submit` is the name of the page
    names = " ".join(words).replace("-", " ").removeprefix("hpml").split()
    command, child = _find(context.find_root(), names)
    page = _page("-".join(["hpml", *names]))
    if page and sys.stdout.isatty() and shutil.which("man"):
        subprocess.run(["man", "-l", page], check=False)
    else:
        typer.echo(command.get_help(child))


def _find(context: Any, names: list[str]) -> tuple[Any, Any]:
    command: Any = context.command
    for name in names:
        group: TyperGroup | None = command if hasattr(command, "commands") else None
        if group is None or name not in group.commands:
            raise InputError(
                "no such command",
                field="COMMAND",
                value=" ".join(names),
                hint=did_you_mean(name, group.commands if group else ()) or "hpml --help",
            )
        command = group.resolve_command(context, [name])[1]
        context = typer.Context(command, parent=context, info_name=name)
    return command, context


def _page(title: str) -> Path | None:
    try:
        return assets.path(f"docs/man/man1/{title}.1")
    except NotFoundError:
        return None


def _install(directory: str) -> None:
    target = Path(directory).expanduser() / "man1"
    pages = sorted(assets.path("docs/man/man1").glob("*.1"))
    try:
        target.mkdir(parents=True, exist_ok=True)
        for page in pages:
            shutil.copyfile(page, target / page.name)
    except OSError as error:
        raise InputError(
            f"cannot be written: {error.strerror or error}", field="--output", value=directory
        ) from error
    typer.echo(f"wrote {len(pages)} pages to {target}")
