"""Options that the commands about data share: how many workers, sizes, links that lead out."""

from __future__ import annotations

from typing import Any

import typer

__all__ = ["count_option", "outside_links_option", "parse_size"]

_MOST = 1024


def count_option(name: str, text: str, default: str = "one for each CPU", *, least: int = 1) -> Any:
    """Return an option for a number of processes or threads.

    Args:
        name: of the option.
        text: what so many of are wanted for, a sentence.
        default: what happens without it.
        least: that may be given.
    """
    return typer.Option(name, metavar="N", min=least, max=_MOST, help=text, show_default=default)


def outside_links_option(verb: str) -> Any:
    """Return the option that lets links out of a tree pass, which are refused without it."""
    text = f"{verb} symbolic links that leave the tree, as they are."
    return typer.Option("--outside-links", help=text)


def parse_size(option: str, text: str) -> int:
    """Return the bytes that an option such as `16K` or `1G` says.

    Raises:
        InputError: it is no size; names the option.
    """
    from hpml_orchestrator.errors import InputError  # noqa: PLC0415
    from hpml_orchestrator.spec.values import parse_bytes  # noqa: PLC0415

    try:
        return parse_bytes(text)
    except ValueError as error:
        raise InputError(str(error), field=option, value=text) from None
