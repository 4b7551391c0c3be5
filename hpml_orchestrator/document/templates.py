"""The page of a document, and the templates and filters that all reports share."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache

import jinja2
from markupsafe import Markup, escape

from hpml_orchestrator import assets
from hpml_orchestrator.document.model import Bar, Bars, Block, Details, Document, Section
from hpml_orchestrator.document.text import columns_of, markdown_cell
from hpml_orchestrator.errors import counted
from hpml_orchestrator.records.texts import (
    clock_text,
    duration_text,
    elapsed_text,
    exact_bytes,
    human_bytes,
    rate_text,
    seconds_text,
    zoned_text,
)
from hpml_orchestrator.version import __version__

_COLOURS = 11  # that style.css has, --c1 to --c11; further names have the same ones, hatched
_MOST_TICKS = 8
_WHOLE = 1000  # from here on figures have no decimals
_TICKS = [
    *(digit * 10.0**power for power in range(-6, 1) for digit in (1, 2, 5)),
    *(10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 43_200, 86_400),
]


def number(value: float | None) -> str:
    """Return a figure with three significant digits.

    >>> number(12345.6), number(0.98765), number(None)
    ('12,346', '0.988', '-')
    """
    if value is None:
        return "-"
    if math.isinf(value):
        return "open"  # the end of an interval where runs never reached their target
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.3g}"  # noqa: PLR2004 - 3 digits


def percent(value: float | None) -> str:
    """Return a share in percent, as findings have it.

    >>> percent(0.8349)
    '83%'
    """
    return "-" if value is None else f"{value:.0%}"


@cache
def sentences(template: str) -> Callable[..., str]:
    """Return a function that words a sentence: a macro of the template, with its arguments."""
    module = environment("md").get_template(template).module

    def word(macro: str, *arguments: object) -> str:
        return str(getattr(module, macro)(*arguments)).strip()

    return word


def drawing(template: str, **figures: object) -> str:
    """Return the SVG of a template."""
    return environment("html").get_template(template).render(figures)


@cache
def environment(form: str) -> jinja2.Environment:
    """Return the environment of the reports' templates, for `html` or `md`."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(assets.path("templates/report")),
        autoescape=jinja2.select_autoescape(default=form == "html", default_for_string=False),
        undefined=jinja2.StrictUndefined,
        extensions=["jinja2.ext.do"],
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {"format": form, "columns": columns_of}
    environment.filters |= {
        "cell": markdown_cell,
        "clock": clock_text,
        "counted": counted,
        "duration": duration_text,
        "elapsed": lambda started: elapsed_text(started, None),
        "exact_bytes": exact_bytes,
        "figure": lambda value: f"{value:,.0f}" if abs(value) >= _WHOLE else f"{value:.3g}",
        "bytes": human_bytes,
        "inline": _inline,
        "kind": lambda block: type(block).__name__,
        "number": number,
        "percent": percent,
        "placed": _placed,
        "rate": rate_text,
        "seconds": seconds_text,
        "yaml": _yaml,
        "zoned": zoned_text,
        "pretty": lambda value: json.dumps(value, indent=2, default=str),
        "sentence": lambda text: text[:1].upper() + text[1:],
        "ticks": _ticks,
    }
    return environment


def page(document: Document) -> str:
    """Return a self-contained page for light and dark screens, phones and paper."""
    names = dict.fromkeys(name for bars in _bars(document.blocks) for name in bars.names)
    return (
        environment("html")
        .get_template("document.html.j2")
        .render(
            document=document,
            title=f"{document.name}: {document.headline}",
            colours={name: number for number, name in enumerate(names, 1)},
            footer=f"hpml {__version__}",
        )
    )


def _bars(blocks: Iterable[Block]) -> Iterator[Bars]:
    for block in blocks:
        if isinstance(block, Bars):
            yield block
        elif isinstance(block, Section | Details):
            yield from _bars(block.blocks)


def _inline(text: str) -> Markup:
    parts = re.split(r"`([^`]+)`|(https?://[^\s\"'<>,]+)", text)
    shown = []
    for plain, code, address in zip(
        parts[::3], [*parts[1::3], ""], [*parts[2::3], ""], strict=True
    ):
        shown.append(escape(plain))
        if code:
            shown.append(Markup("<code>{}</code>").format(code))
        elif address:
            shown.append(Markup('<a href="{}">{}</a>').format(address, address))
    return Markup().join(shown)


def _placed(bar: Bar, longest: float) -> list[dict[str, object]]:
    """Return the pieces of a bar with their places and widths in percent."""
    placed, here = [], 0.0
    for name, seconds in bar.pieces.items():
        width = 100 * seconds / longest
        placed.append(
            {"name": name, "seconds": seconds, "start": round(here, 3), "width": round(width, 3)}
        )
        here += width
    return placed


def _ticks(longest: float) -> list[tuple[float, float]]:
    """Return the ticks of an axis in seconds, with their places in percent."""
    days = 86_400.0 * math.ceil(longest / 86_400 / _MOST_TICKS)
    step = next((one for one in _TICKS if longest / one < _MOST_TICKS), days)
    count = int(longest / step)
    return [(place * step, round(100 * place * step / longest, 3)) for place in range(count + 1)]


def _yaml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_yaml(one) for one in value)}]"
    return str(value)
