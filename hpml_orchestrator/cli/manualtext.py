"""The manual as plain text for a screen, and as Markdown for `docs/commands.md`."""

from __future__ import annotations

import re
import sys
import textwrap
from typing import TYPE_CHECKING

from hpml_orchestrator.cli.manual import Code, Item, Synopsis, manual

if TYPE_CHECKING:
    import typer

    from hpml_orchestrator.cli.manual import Block, Page, Section

__all__ = ["markdown", "plain"]

_INDENT = " " * 7
_DEEPER = " " * 14
_SHARED = ("EXIT STATUS", "ENVIRONMENT", "FILES")
"""Sections that are the same on every page, or stand with the options as well."""


def plain(page: Page, *, width: int = 80) -> str:
    """Return a page as plain text, no line longer than `width` where words allow it."""
    lines = ["NAME", *_filled(f"{page.title} - {page.summary}", _INDENT, width), ""]
    for section in page.sections:
        lines.append(section.title)
        for block in section.blocks:
            lines += [*_plain_block(block, width), ""]
    named = ", ".join(f"{title}(1)" for title in page.related)
    lines += ["SEE ALSO", *_filled(named, _INDENT, width)]
    return "\n".join(lines) + "\n"


def _plain_block(block: Block, width: int) -> list[str]:
    if isinstance(block, Code):
        return [f"{_DEEPER}{line}" for line in block.lines]
    if isinstance(block, Item):
        term, text = _unmarked(block.term), _filled(block.text, _DEEPER, width)
        if text and len(term) < len(_DEEPER) - len(_INDENT):  # room for both, as man(1) does it
            return [f"{_INDENT}{term}".ljust(len(_DEEPER)) + text[0].lstrip(), *text[1:]]
        return [f"{_INDENT}{term}", *text]
    if isinstance(block, Synopsis):
        return _filled(_unmarked(block.text), _INDENT, width)
    return _filled(block, _INDENT, width)


def _filled(text: str, indent: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _unmarked(text: str) -> str:
    return re.sub(r"[`*]", "", text)


def markdown(app: typer.Typer) -> str:
    """Return the command reference: all pages in one document, what they share said once."""
    first, *others = manual(app)
    lines = [
        "# Commands",
        "",
        "Made from the same source as `hpml --help` and the manual pages: `hpml man` shows",
        "them in a terminal, and `man hpml` does where they are installed.",
        "",
        *_markdown_page(first, shared=True),
    ]
    for page in others:
        lines += _markdown_page(page, shared=False)
    return "\n".join(lines).rstrip("\n") + "\n"


def _markdown_page(page: Page, *, shared: bool) -> list[str]:
    lines = [f"## {page.command}", ""]
    for section in page.sections:
        if shared or section.title not in _SHARED:
            lines += _markdown_section(section)
    return lines


def _markdown_section(section: Section) -> list[str]:
    lines = []
    if section.title not in ("SYNOPSIS", "DESCRIPTION"):
        lines += [f"{section.title.capitalize()}:", ""]
    items = [block for block in section.blocks if isinstance(block, Item)]
    for block in section.blocks:
        if isinstance(block, Item):
            lines.append(f"- {block.term}: {block.text}" if block.text else f"- {block.term}")
        elif isinstance(block, Code):
            lines += ["```sh", *block.lines, "```", ""]
        elif isinstance(block, Synopsis):
            lines += ["```text", _unmarked(block.text), "```", ""]
        else:
            lines += [block, ""]
    return [*lines, ""] if items else lines


def _main() -> None:
    from hpml_orchestrator.cli.main import app  # noqa: PLC0415 - which imports this room

    sys.stdout.write(markdown(app))


if __name__ == "__main__":
    _main()
