"""Write a report, or a comparison of two, as HTML, Markdown or JSON.

The HTML is one file: its plots are in it, it needs no scripts and fetches nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jinja2
from pydantic import TypeAdapter

from hpml_orchestrator import __version__, assets
from hpml_orchestrator.records.texts import examples
from hpml_orchestrator.sweeps import claims, plots
from hpml_orchestrator.sweeps.compare import Comparison
from hpml_orchestrator.sweeps.facts import PARTS, Report, Setting, Target
from hpml_orchestrator.sweeps.rows import Row
from hpml_orchestrator.sweeps.statistics import Estimate, Speedup

__all__ = ["json_schema", "to_html", "to_json", "to_markdown"]

_MOST_RANKED = 50
_COLLAPSED_ABOVE = 300


def to_html(document: Report | Comparison) -> str:
    """Return a page that stands alone, for light and dark screens, phones and paper."""
    drawn = plots.draw(document) if isinstance(document, Report) else []
    environment = _environment("html", drawn)
    body = _body(environment, document)
    return environment.get_template("page.html.j2").render(
        title=f"{document.name}: {document.question}",
        body=body,
        footer=f"hpml {__version__}",
    )


def to_markdown(document: Report | Comparison, drawn: Sequence[plots.Plot] = ()) -> str:
    """Return the same facts as Markdown.

    Args:
        document: a report or a comparison.
        drawn: plots to link as `NAME.svg`; the caller writes their files beside the text.
    """
    lines = _body(_environment("md", drawn), document).splitlines()
    kept = [
        line.rstrip()
        for line, before in zip(lines, ["", *lines], strict=False)
        if line.strip() or before.strip()
    ]
    return "\n".join(kept).strip() + "\n"


def to_json(document: Report | Comparison) -> dict[str, Any]:
    """Return all facts as JSON values; `json_schema` describes them."""
    text = TypeAdapter(type(document)).dump_json(document)
    parsed: dict[str, Any] = json.loads(text)
    return parsed


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of what `to_json` returns."""
    schema = TypeAdapter(Report | Comparison).json_schema(mode="serialization")
    dialect = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": dialect, "title": "hpml sweep report or comparison", **schema}


def _environment(form: str, drawn: Sequence[plots.Plot]) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(assets.path("templates/report")),
        autoescape=jinja2.select_autoescape(default=form == "html", default_for_string=False),
        undefined=jinja2.StrictUndefined,
        extensions=["jinja2.ext.do"],
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {
        "format": form,
        "plots": drawn,
        "tidy": _tidy,
        "parts": PARTS,
        "most": _MOST_RANKED,
        "collapse": _COLLAPSED_ABOVE,
    }
    environment.filters |= {
        "cell": lambda value: str(value).replace("|", "\\|").replace("\n", " "),
        "efficiency": _efficiency,
        "estimate": _estimate,
        "exact": claims.exact_text,
        "mark": _mark,
        "number": claims.number,
        "percent": claims.percent,
        "pretty": lambda value: json.dumps(value, indent=2, default=str),
        "remarks": _remarks,
        "scale": claims.scale_text,
        "several": _several,
        "axis": claims.axis_text,
        "value": claims.value_text,
        "states": claims.states_text,
        "target": _target,
    }
    return environment


def _body(environment: jinja2.Environment, document: Report | Comparison) -> str:
    name = "report" if isinstance(document, Report) else "comparison"
    return environment.get_template(f"{name}.j2").render({name: document})


def _tidy(
    head: Sequence[str], rows: Sequence[Sequence[Any]], align: str
) -> tuple[list[str], list[list[Any]], str]:
    """Return a table without the columns that nothing is known for."""
    align = align.ljust(len(head), align[-1])
    kept = [
        column
        for column in range(len(head))
        if column == 0 or any(row[column] not in {"-", ""} for row in rows)
    ]
    cells = [[row[column] for column in kept] for row in rows]
    return [head[column] for column in kept], cells, "".join(align[column] for column in kept)


def _estimate(estimate: Estimate | Speedup | None, factor: float = 1) -> str:
    if estimate is None:
        return "-"
    return claims.number(estimate.value * factor) + claims.interval_text(estimate.interval, factor)


def _efficiency(speedup: Speedup | None) -> str:
    if speedup is None:
        return "-"
    interval = claims.interval_text(speedup.efficiency_interval, 100)
    return claims.number(100 * speedup.efficiency) + interval


def _target(target: Target | None) -> str:
    if target is None or target.seconds is None:
        return "not reached" if target else "-"
    if target.low is None:
        return claims.number(target.seconds)
    high = "open" if target.high is None else claims.number(target.high)
    return f"{claims.number(target.seconds)} [{claims.number(target.low)}, {high}]"


def _several(values: Sequence[float]) -> str:
    return examples([f"{value:g}" for value in values], 4) or "-"


def _mark(setting: Setting) -> str:
    return (" ‡" if setting.oversubscribed else "") + (" †" if setting.unverified else "")


def _remarks(row: Row) -> str:
    remarks = [row.reason] if row.reason else []
    if row.oversubscribed:
        remarks.append("more ranks than cores")
    if row.total_seconds and row.verified is not True:
        remarks.append("binding not verified" + (f": {row.binding}" if row.binding else ""))
    return "; ".join(remarks)
