"""Write a report, or a comparison of two, as HTML, Markdown or JSON.

The HTML is one file: its plots are in it, it needs no scripts and fetches nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter

from hpml_orchestrator import __version__
from hpml_orchestrator.sweeps import plots
from hpml_orchestrator.sweeps.compare import Comparison
from hpml_orchestrator.sweeps.facts import Report
from hpml_orchestrator.sweeps.wording import environment

__all__ = ["json_schema", "to_html", "to_json", "to_markdown"]


def to_html(document: Report | Comparison) -> str:
    """Return a page that stands alone, for light and dark screens, phones and paper."""
    drawn = plots.draw(document) if isinstance(document, Report) else []
    return (
        environment("html")
        .get_template("page.html.j2")
        .render(
            title=f"{document.name}: {document.question}",
            body=_body("html", document, drawn),
            footer=f"hpml {__version__}",
        )
    )


def to_markdown(document: Report | Comparison, drawn: Sequence[plots.Plot] = ()) -> str:
    """Return the same facts as Markdown.

    Args:
        document: a report or a comparison.
        drawn: plots to link as `NAME.svg`; the caller writes their files beside the text.
    """
    lines = _body("md", document, drawn).splitlines()
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


def _body(form: str, document: Report | Comparison, drawn: Sequence[plots.Plot]) -> str:
    name = "report" if isinstance(document, Report) else "comparison"
    return environment(form).get_template(f"{name}.j2").render({name: document}, plots=drawn)
