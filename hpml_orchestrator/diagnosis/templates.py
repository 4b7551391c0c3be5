"""The templates of reports, with the filters that all reports share."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence

import jinja2
from markupsafe import Markup, escape

from hpml_orchestrator import assets

_NUMERIC = re.compile(
    r"-?[\d.,]+(e[+-]?\d+)?( ?%| of \d+( \(.*\))?| / \d+| \[.*\])?|not reached.*|-|"
)


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
    environment.globals |= {"format": form, "columns": _columns}
    environment.filters |= {
        "cell": lambda value: str(value).replace("|", "\\|").replace("\n", " "),
        "code": _with_code,
        "number": number,
        "percent": percent,
        "pretty": lambda value: json.dumps(value, indent=2, default=str),
    }
    return environment


def _with_code(text: str) -> Markup:
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))  # noqa: S704


def _columns(rows: Sequence[Mapping[str, object]]) -> dict[str, bool]:
    columns = {}
    for place, name in enumerate(rows[0] if rows else ()):
        cells = [str(row[name]) for row in rows]
        if place == 0 or set(cells) - {"-", ""}:
            columns[name] = all(map(_NUMERIC.fullmatch, cells))
    return columns
