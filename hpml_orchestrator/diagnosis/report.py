"""The report of a run in every form: text, Markdown, page and dictionary."""

from __future__ import annotations

import html
from abc import ABC, abstractmethod
from dataclasses import asdict
from typing import TYPE_CHECKING

from hpml_orchestrator.diagnosis.wording import markdown, text, to_json

if TYPE_CHECKING:
    from hpml_orchestrator.diagnosis.model import Diagnosis


class Page(ABC):
    """A report with a page, which a notebook displays."""

    @abstractmethod
    def html(self) -> str:
        """Return the page: one HTML file without scripts that fetches nothing."""

    def _repr_html_(self) -> str:
        source = html.escape(self.html(), quote=True)
        return f'<iframe srcdoc="{source}" style="width:100%;height:40em;border:0"></iframe>'


class Report(Page):
    """Why a run is slow, and what to change; `str` gives the text of `hpml report`.

    Attributes:
        headline: what holds the run back most, in one line.
    """

    def __init__(self, diagnosis: Diagnosis) -> None:
        self._diagnosis = diagnosis
        self.headline: str = diagnosis.headline

    @property
    def findings(self) -> list[dict[str, object]]:
        """One dictionary per finding, as in `hpml report --json`."""
        return [asdict(finding) for finding in self._diagnosis.findings]

    def __str__(self) -> str:
        return text(self._diagnosis)

    def markdown(self) -> str:
        """Return the text of `hpml report --markdown`."""
        return markdown(self._diagnosis)

    def to_dict(self) -> dict[str, object]:
        """Return the whole report, with the facts that it is based on."""
        return to_json(self._diagnosis)

    def html(self) -> str:
        """Return the page that `hpml report --html` writes."""
        from hpml_orchestrator.diagnosis.page import page  # noqa: PLC0415 - jinja2 takes long

        return page(self._diagnosis)
