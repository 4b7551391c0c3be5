"""Write a report as HTML, Markdown or JSON.

The HTML is one file: its plots are in it, it needs no scripts and fetches nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter

from hpml_orchestrator import __version__
from hpml_orchestrator.sweeps import plots
from hpml_orchestrator.sweeps.facts import Report
from hpml_orchestrator.sweeps.wording import environment

__all__ = ["to_html", "to_json", "to_markdown"]


def to_html(report: Report) -> str:
    """Return a page that stands alone, for light and dark screens, phones and paper."""
    page = environment("html").get_template("page.html.j2")
    return page.render(
        title=f"{report.name}: {report.question}",
        body=_body("html", report, plots.draw(report)),
        footer=f"hpml {__version__}",
    )


def to_markdown(report: Report) -> str:
    """Return the same facts as Markdown, without the plots."""
    text = re.sub(r"[ \t]+\n", "\n", _body("md", report, []))
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def to_json(report: Report) -> dict[str, Any]:
    """Return all facts as JSON values; an infinite number is null."""
    facts: dict[str, Any] = json.loads(TypeAdapter(Report).dump_json(report))
    return facts


def _body(form: str, report: Report, drawn: Sequence[plots.Plot]) -> str:
    return environment(form).get_template("report.j2").render(report=report, plots=drawn)
