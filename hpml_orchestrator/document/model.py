"""A report as plain data: a headline, sections, sentences, lists, tables, bars and plots.

`text.py` writes a `Document` for a terminal and as Markdown, `templates.py` as an HTML page. In
every text `code` stands between backticks, and addresses become links.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias


@dataclass(frozen=True)
class Paragraph:
    """A paragraph of one or more sentences."""

    text: str
    is_note: bool = False  # an explanation: smaller on a page, left out on a terminal


@dataclass(frozen=True)
class NamedValues:
    """Names with their values; a value may have several lines."""

    pairs: Sequence[tuple[str, str | Sequence[str]]]


@dataclass(frozen=True)
class Items:
    """A list."""

    items: Sequence[str]
    mark: Literal["dash", "good", "unknown"] = "dash"


@dataclass(frozen=True)
class Preformatted:
    """Lines with aligned columns; a terminal cuts them and shows as many as there is room for."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Tiles:
    """The figures to see first: label, figure and note of each; a terminal shows none."""

    tiles: Sequence[tuple[str, str, str]]


@dataclass(frozen=True)
class DataTable:
    """Rows with the same columns; all but the first column disappear if every cell is empty."""

    caption: str
    rows: Sequence[Mapping[str, object]]


@dataclass(frozen=True)
class Bar:
    """The pieces of one bar by name, in the unit of its `Bars`."""

    label: str
    pieces: Mapping[str, float]
    note: str = ""


@dataclass(frozen=True)
class Bars:
    """Bars in seconds on one axis; a name has the same colour in all bars of a page."""

    title: str
    bars: Sequence[Bar]
    note: str = ""
    part_of: str = ""  # the piece of the bar above that these bars show in detail
    gap: tuple[int, str] | None = None  # a line before the bar of this index

    @property
    def names(self) -> list[str]:
        """All pieces, in the order of their first bar."""
        return list(dict.fromkeys(name for bar in self.bars for name in bar.pieces))

    @property
    def longest(self) -> float:
        """Length of the axis in seconds."""
        return max((sum(bar.pieces.values()) for bar in self.bars), default=0.0)


@dataclass(frozen=True)
class Drawing:
    """A drawing as SVG, for pages only."""

    name: str
    title: str
    svg: str
    description: str = ""  # what the drawing shows, for those who do not see it


@dataclass(frozen=True)
class Callout:
    """A warning about the report's data."""

    title: str
    text: str
    details: Sequence[str] = ()
    is_loud: bool = False


@dataclass(frozen=True)
class Judgement:
    """A judgement with a status and its reasons."""

    title: str
    status: str
    aside: str = ""  # such as its cost
    blocks: Sequence[Paragraph | Items | NamedValues] = ()


@dataclass(frozen=True)
class Judgements:
    """Numbered judgements, the most important first."""

    judgements: Sequence[Judgement]
    most: int | None = None  # of them are printed in full on a terminal


@dataclass(frozen=True)
class Details:
    """Blocks that a page shows when the reader opens them; a terminal shows none."""

    summary: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Section:
    """Blocks under a heading."""

    title: str
    blocks: Sequence[Block]
    name: str = ""  # of the field that a terminal prints instead; empty: it prints nothing
    anchor: str = ""


Block: TypeAlias = (
    Paragraph | NamedValues | Items | Preformatted | Tiles | DataTable | Bars | Drawing | Callout
    | Judgements | Details | Section
)  # fmt: skip


@dataclass(frozen=True)
class Document:
    """A report: what it is about, the answer in one line, and the blocks that explain it."""

    name: str
    question: str
    headline: str
    about: str = ""  # what the report is about, in one line: a run, its state, its cost
    blocks: Sequence[Block] = field(default_factory=tuple)
