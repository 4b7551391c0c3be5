"""A sheet of shapes and texts that becomes an SVG file."""

from __future__ import annotations

import html
from dataclasses import dataclass, field

__all__ = ["BOLD", "MIDDLE", "SOFT", "Sheet", "document", "text_width", "wrapped"]

_CHARACTER, _CHARACTER_BOLD = 0.63, 0.73
"""Width of a character in parts of the font's size: generous, for fonts differ."""

BOLD = ' font-weight="bold"'
MIDDLE = ' text-anchor="middle"'
SOFT = ' class="soft"'

_STYLE = """
text{font-family:'DejaVu Sans',Verdana,Arial,sans-serif;fill:#1f2933}
.page{fill:#ffffff;stroke:#cbd2d9}
.socket{fill:#f3f5f7;stroke:#7b8794}
.domain{fill:#ffffff;stroke:#3e6b99}
.apart{stroke-dasharray:5 3}
.core{fill:#dbe9f6;stroke:#8fb3d4}
.gpu{fill:#d9f2e1;stroke:#2f855a}
.nic{fill:#fdebd0;stroke:#b9770e}
.wire{stroke:#7b8794;fill:none}
.soft{fill:#52606d}
.free{fill:#f5f7fa;stroke:#cbd2d9}
.rank{stroke:#52606d;stroke-width:0.6}
.several{fill:#9aa5b1}
.bad{stroke:#c81e1e;stroke-width:2}
.wrong{fill:#c81e1e}
"""


@dataclass
class Sheet:
    """Shapes drawn so far."""

    parts: list[str] = field(default_factory=list)

    def box(
        self,
        kind: str,
        x: float,
        y: float,
        width: float,
        height: float,
        hover: str = "",
        look: str = ' rx="4"',
    ) -> None:
        """Draw a box, with a text for those who point at it."""
        shape = (
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"{look}'
        )
        told = f"><title>{html.escape(_drawable(hover))}</title></rect>" if hover else "/>"
        self.parts.append(shape + told)

    def text(self, x: int, y: int, words: str, *, size: int, room: int, look: str = "") -> None:
        """Draw a line of text, cut to its room."""
        most = max(1, int(room / text_width("x", size, look)))
        shown = words if len(words) <= most else f"{words[: most - 1]}…"
        self.parts.append(
            f'<text x="{x}" y="{y}" font-size="{size}"{look}>{html.escape(_drawable(shown))}</text>'
        )

    def wire(self, *points: tuple[int, int]) -> None:
        """Draw a line through points."""
        path = " ".join(f"{x},{y}" for x, y in points)
        self.parts.append(f'<polyline class="wire" points="{path}"/>')


def text_width(words: str, size: int, look: str = "") -> float:
    """Return how wide a line of text may become, in pixels."""
    return len(words) * size * (_CHARACTER_BOLD if "bold" in look else _CHARACTER)


def wrapped(words: str, size: int, room: int, lines: int) -> list[str]:
    """Return a text in so many lines of some room at most, the last one with all that is left.

    Args:
        words: the text.
        size: of the font, in pixels.
        room: width of a line, in pixels.
        lines: how many there may be.
    """
    import textwrap  # noqa: PLC0415

    found = textwrap.wrap(words, max(1, int(room / (size * _CHARACTER))))
    return [*found[: lines - 1], " ".join(found[lines - 1 :])] if len(found) > lines else found


def document(sheet: Sheet, width: int, height: int, title: str, *, margin: int) -> str:
    """Return the text of an SVG file: a white page with a title, so that it reads anywhere.

    Args:
        sheet: what is on the page.
        width: of the page, in pixels.
        height: of the page, in pixels.
        title: what stands above.
        margin: of the title, in pixels.
    """
    head = Sheet()
    head.box("page", 0, 0, width, height)
    room = width - 2 * margin
    size = 16 if len(title) * 16 * _CHARACTER_BOLD <= room else 12
    head.text(margin, margin + 14, title, size=size, room=room, look=BOLD)
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img">'
    )
    lines = [
        opening,
        f"<title>{html.escape(_drawable(title))}</title>",
        f"<style>{_STYLE}</style>",
        *head.parts,
        *sheet.parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _drawable(words: str) -> str:
    """Return text without the control characters that XML has no place for."""
    return "".join(char if char.isprintable() else "\ufffd" for char in words)
