"""Manual pages in roff, for man(1): the same input gives the same bytes, on every machine."""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING

from hpml_orchestrator import __version__
from hpml_orchestrator.cli.manual import Code, Item, Page, Synopsis, manual

if TYPE_CHECKING:
    import typer

    from hpml_orchestrator.cli.manual import Block

__all__ = ["RELEASED", "escaped", "pages"]

RELEASED = ""
"""The date of this version in CHANGELOG.md, as YYYY-MM-DD; empty until it is released."""

_LINE_CHARS = 78
_ESCAPES = {
    "\\": r"\(rs",
    "-": r"\-",
    "'": r"\(aq",
    "`": r"\(ga",
    "^": r"\(ha",
    "~": r"\(ti",
    '"': r"\(dq",
}


def pages(app: typer.Typer, *, date: str = RELEASED) -> dict[str, str]:
    """Return file name and text of every manual page, such as `hpml-submit.1`.

    Args:
        app: the application.
        date: what stands at the foot of each page.
    """
    return {f"{page.title}.1": _page(page, date) for page in manual(app)}


def escaped(text: str) -> str:
    r"""Return plain text so that roff prints it as it is: ASCII, all characters themselves.

    A hyphen becomes a minus, since most of them are in what people copy.

    >>> escaped("--set 'é'")
    '\\-\\-set \\(aq\\[u00E9]\\(aq'
    """
    return "".join(
        _ESCAPES.get(letter) or (letter if letter.isascii() else rf"\[u{ord(letter):04X}]")
        for letter in text
    )


def _page(page: Page, date: str) -> str:
    version = escaped(f"hpml {__version__}")
    head = [
        r".\" Made by `hpml man --output`: do not edit.",
        f'.TH {_quoted(page.title.upper())} 1 "{date}" "{version}" "hpml manual"',
        ".SH NAME",
        *_text(f"{escaped(page.title)} \\- {escaped(page.summary)}"),
    ]
    for section in page.sections:
        head.append(f".SH {_quoted(section.title)}")
        for number, block in enumerate(section.blocks):
            head += _block(block, first=number == 0)
    head.append('.SH "SEE ALSO"')
    *others, last = page.related
    head += [f".BR {escaped(title)} (1)," for title in others]
    head.append(f".BR {escaped(last)} (1)")
    return "\n".join(head) + "\n"


def _quoted(word: str) -> str:
    return f'"{escaped(word)}"'


def _block(block: Block, *, first: bool) -> list[str]:
    if isinstance(block, Item):
        return [".TP", *_text(_marked(block.term, placeholders=True), wrap=False), *_marks(block)]
    if isinstance(block, Synopsis):
        return _text(_marked(block.text, placeholders=True))
    if isinstance(block, Code):
        return [".RS 4", ".EX", *(_guarded(escaped(line)) for line in block.lines), ".EE", ".RE"]
    return [*([] if first else [".PP"]), *_text(_marked(block))]


def _marks(item: Item) -> list[str]:
    return _text(_marked(item.text)) if item.text else []


def _marked(text: str, *, placeholders: bool = False) -> str:
    r"""Set `literal` bold and, where asked, *placeholder* in italics.

    >>> print(_marked("see `a-b`"))
    see \fBa\-b\fP
    """
    pattern = r"`([^`]+)`|\*([^*]+)\*" if placeholders else r"`([^`]+)`|(?!)()"
    made, end = "", 0
    for found in re.finditer(pattern, text):
        made += escaped(text[end : found.start()])
        made += rf"\fB{escaped(found[1])}\fP" if found[1] else rf"\fI{escaped(found[2])}\fP"
        end = found.end()
    return made + escaped(text[end:])


def _text(escaped_text: str, *, wrap: bool = True) -> list[str]:
    lines = [escaped_text]
    if wrap:
        lines = textwrap.wrap(
            escaped_text, _LINE_CHARS, break_long_words=False, break_on_hyphens=False
        )
    return [_guarded(line) for line in lines]


def _guarded(line: str) -> str:
    """Keep a line that begins like a request from being one."""
    return rf"\&{line}" if line.startswith((".", "'")) else line
