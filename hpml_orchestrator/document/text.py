"""A document as text for a terminal, and as Markdown."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from hpml_orchestrator.document.model import (
    Bars,
    Block,
    Callout,
    DataTable,
    Details,
    Document,
    Items,
    Judgement,
    Judgements,
    NamedValues,
    Paragraph,
    Preformatted,
    Section,
    Tiles,
)
from hpml_orchestrator.records.texts import duration_text, printable, printable_lines

_INDENT = 10  # of the values of named fields
_MARGIN = 3  # of a judgement, for its number
_LEAST_LISTED = 3  # lines of a listing, even without room
_NUMERIC = re.compile(
    r"-?[\d.,]+(e[+-]?\d+)?( ?%| of \d+( \(.*\))?| / \d+| \[.*\])?|not reached.*|-|"
)


def terminal(document: Document, *, width: int = 100, lines: int = 40) -> str:
    """Return a document as text for a terminal.

    Judgements and preformatted lines are left out until the text fits; the rest is cut at the end.

    Args:
        document: to print.
        width: columns.
        lines: the most that are printed.
    """
    printed = field_lines("run", document.about, width) if document.about else []
    printed += field_lines("verdict", document.headline, width)
    blocks = list(_flat(document.blocks))
    fixed = {
        place: list(_terminal_lines(name, block, width))
        for place, (name, block) in enumerate(blocks)
        if not isinstance(block, Judgements | Preformatted)
    }
    room = lines - len(printed) - sum(map(len, fixed.values()))
    room -= _LEAST_LISTED * sum(isinstance(block, Preformatted) for _, block in blocks)
    for place, (_, block) in enumerate(blocks):
        if isinstance(block, Judgements):
            shown = _judgements(block, width, room)
            room -= len(shown)
        elif isinstance(block, Preformatted):
            room += _LEAST_LISTED
            shown = [" " * _INDENT + line for line in block.lines[: max(_LEAST_LISTED, room)]]
            room -= len(shown)
        else:
            shown = fixed[place]
        printed += shown
    return "\n".join(printable(line)[:width] for line in printed[:lines])


def _flat(blocks: Sequence[Block]) -> Iterator[tuple[str, Block]]:
    """Yield the blocks that a terminal shows, with the names of their sections."""
    for block in blocks:
        if not isinstance(block, Section):
            yield "", block
        elif block.name:
            name = block.name
            for inner in block.blocks:
                yield name, inner
                name = ""


def _terminal_lines(name: str, block: Block, width: int) -> Iterator[str]:
    if isinstance(block, Paragraph) and not block.is_note:
        yield from field_lines(name, block.text, width) if name else _wrap(block.text, width)
    elif isinstance(block, Items):
        yield from field_lines(name, "; ".join(block.items), width)
    elif isinstance(block, NamedValues):
        for label, value in block.pairs:
            yield from field_lines(label, value, width)


def field_lines(
    name: str, value: str | Sequence[str], width: int = 100, *, margin: int = 0
) -> list[str]:
    """Return a named value, indented by `margin` and wrapped at `width` columns."""
    lines = [value] if isinstance(value, str) else value
    wrapped = [part for line in lines for part in _wrap(line, width - _INDENT - margin)]
    return [
        f"{' ' * margin}{'' if number else name:<{_INDENT}}{line}"
        for number, line in enumerate(wrapped)
    ]


def _wrap(text: str, width: int) -> list[str]:
    # A hyphen may be part of a run's id or of an option, so lines are not broken there.
    return textwrap.wrap(text, width, break_on_hyphens=False) or [""]


def _judgements(block: Judgements, width: int, room: int) -> list[str]:
    """Return as many as there is room for, at least one, and the titles of the others."""
    lines = [""]
    for place, one in enumerate(block.judgements):
        wanted = [*_judgement(place + 1, one, width), ""]
        others = [other.title for other in block.judgements[place + 1 :]]
        also = field_lines("also", "; ".join(others), width) if others else []
        is_full = place and len(lines) + len(wanted) + len(also) > room
        if is_full or place == block.most:
            return lines + field_lines("also", "; ".join([one.title, *others]), width)
        lines += wanted
    return lines


def _judgement(number: int, one: Judgement, width: int) -> list[str]:
    inner = width - _MARGIN
    first, *rest = _wrap(f"{one.title} ({one.status})", inner)
    lines = [f"{number:<{_MARGIN}}{first}", *(f"{'':{_MARGIN}}{line}" for line in rest)]
    if one.aside and len(lines[-1]) + len(one.aside) + 2 <= width:
        lines[-1] += f"{one.aside:>{width - len(lines[-1])}}"
    elif one.aside:
        lines.append(f"{'':{_MARGIN}}{one.aside}")
    for block in one.blocks:
        if isinstance(block, NamedValues):
            for name, value in block.pairs:
                lines += field_lines(name, value, width, margin=_MARGIN)
        else:
            texts = [block.text] if isinstance(block, Paragraph) else block.items
            lines += [f"{'':{_MARGIN}}{part}" for text in texts for part in _wrap(text, inner)]
    return lines


def markdown(document: Document) -> str:
    """Return a document as Markdown, complete but for its plots."""
    parts = [f"# {document.name}", document.about or document.question, f"**{document.headline}**"]
    parts += [part for block in document.blocks for part in _markdown(block)]
    text = "\n\n".join(filter(None, parts))
    return printable_lines(text) + "\n"


def _markdown(block: Block) -> Iterator[str]:
    match block:
        case Paragraph():
            yield block.text
        case Preformatted():
            yield "\n".join(f"    {line}" for line in block.lines)
        case DataTable():
            yield f"{block.caption}."
            yield _markdown_table(block.rows)
        case Bars():
            yield f"{block.title} {block.note}".rstrip() + ":"
            yield _markdown_table(_figures(block))
        case Callout():
            yield f"> **{block.title}.** {' '.join([block.text, '; '.join(block.details)]).strip()}"
        case Judgements():
            yield from _markdown_judgements(block)
        case Section() | Details():
            yield f"## {block.title}" if isinstance(block, Section) else f"{block.summary}:"
            yield from (part for inner in block.blocks for part in _markdown(inner))
        case NamedValues() | Items() | Tiles():
            yield "\n".join(f"- {line}" for line in _bullets(block))


def _markdown_judgements(block: Judgements) -> Iterator[str]:
    for number, one in enumerate(block.judgements, 1):
        aside = f", {one.aside}" if one.aside else ""
        yield f"## {number}. {one.title} ({one.status}{aside})"
        yield "\n".join(f"- {line}" for inner in one.blocks for line in _bullets(inner))


def _bullets(block: Paragraph | NamedValues | Items | Tiles) -> list[str]:
    match block:
        case Paragraph():
            return [block.text]
        case Items():
            return [*block.items]
        case Tiles():
            return [
                f"{label}: {value}{note and f' ({note})'}" for label, value, note in block.tiles
            ]
        case NamedValues():
            return [
                f"{name}: {value if isinstance(value, str) else '; '.join(value)}"
                for name, value in block.pairs
            ]


def _figures(bars: Bars) -> list[dict[str, str]]:
    """Return a row of a table for each bar."""
    return [
        {"": bar.label, **{name: duration_cell(bar.pieces.get(name)) for name in bars.names}}
        for bar in bars.bars
    ]


def duration_cell(seconds: float | None) -> str:
    """Return a duration for a table; `-` if it is unknown."""
    return "-" if seconds is None else duration_text(seconds)


def markdown_cell(value: object) -> str:
    """Return a value for a table in Markdown."""
    return str(value).replace("|", "\\|").replace("\n", " ")


def _markdown_table(rows: Sequence[Mapping[str, object]]) -> str:
    columns = columns_of(rows)
    lines = [list(columns), ["---:" if numeric else "---" for numeric in columns.values()]]
    lines += [[str(row[name]) for name in columns] for row in rows]
    return "\n".join(f"| {' | '.join(map(markdown_cell, line))} |" for line in lines)


def columns_of(rows: Sequence[Mapping[str, object]]) -> dict[str, bool]:
    """Return the columns of a table that are not empty, and whether each has only figures."""
    columns = {}
    for place, name in enumerate(rows[0] if rows else ()):
        cells = [str(row[name]) for row in rows]
        if place == 0 or set(cells) - {"-", ""}:
            columns[name] = all(map(_NUMERIC.fullmatch, cells))
    return columns
