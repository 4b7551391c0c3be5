"""Write a report, or a comparison of two, as HTML, Markdown or JSON.

The HTML is one file: its plots are in it, it needs no scripts and fetches nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from hpml_orchestrator.sweeps.facts import SweepFacts
from hpml_orchestrator.sweeps.pairs import Comparison
from hpml_orchestrator.sweeps.wording import environment
from hpml_orchestrator.version import __version__

if TYPE_CHECKING:
    from hpml_orchestrator.sweeps.plots import Plot


def to_html(document: SweepFacts | Comparison) -> str:
    """Return a self-contained page for light and dark screens, phones and paper."""
    from hpml_orchestrator.sweeps.plots import draw  # noqa: PLC0415 - loads matplotlib

    drawn = draw(document) if isinstance(document, SweepFacts) else []
    page = environment("html").get_template("page.html.j2")
    return page.render(
        title=f"{document.name}: {document.question}",
        body=_body("html", document, drawn),
        footer=f"hpml {__version__}",
    )


def to_markdown(document: SweepFacts | Comparison) -> str:
    """Return the same facts as Markdown, without the plots."""
    return _plain("md", document)


def to_text(document: Comparison) -> str:
    """Return a comparison for a terminal of 100 columns."""
    return _plain("text", document)


def _plain(form: str, document: SweepFacts | Comparison) -> str:
    text = re.sub(r"[ \t]+\n", "\n", _body(form, document, []))
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def to_json(document: SweepFacts | Comparison) -> dict[str, Any]:
    """Return all facts as JSON values; an infinite number becomes null."""
    return dict(json.loads(TypeAdapter(type(document)).dump_json(document)))


def _body(form: str, document: SweepFacts | Comparison, drawn: Sequence[Plot]) -> str:
    sweep = isinstance(document, SweepFacts)
    template = environment(form).get_template("report.j2" if sweep else "pairs.j2")
    return template.render({"report" if sweep else "comparison": document}, plots=drawn)
