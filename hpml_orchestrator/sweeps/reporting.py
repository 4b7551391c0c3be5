"""The report of a sweep on record, in every form."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

from hpml_orchestrator.diagnosis.diagnose import diagnose
from hpml_orchestrator.diagnosis.report import Page
from hpml_orchestrator.errors import HpmlError
from hpml_orchestrator.runs.facts import gather
from hpml_orchestrator.runs.status import state_of
from hpml_orchestrator.sweeps.batches import with_trials
from hpml_orchestrator.sweeps.pages import to_html, to_json, to_markdown
from hpml_orchestrator.sweeps.report import build
from hpml_orchestrator.sweeps.table import Table

if TYPE_CHECKING:
    from hpml_orchestrator.records.store import Store
    from hpml_orchestrator.sweeps.facts import SweepFacts
    from hpml_orchestrator.sweeps.plan import SweepPlan


class SweepReport(Page):
    """What a sweep measured; `str` gives the text of `hpml sweep report --markdown`.

    Attributes:
        facts: every figure of the report.
        answer: its result, in sentences.
    """

    def __init__(self, facts: SweepFacts) -> None:
        self.facts = facts
        self.answer = facts.answer

    def __str__(self) -> str:
        return to_markdown(self.facts)

    def markdown(self) -> str:
        """Return the text of `hpml sweep report --markdown`."""
        return to_markdown(self.facts)

    def to_dict(self) -> dict[str, object]:
        """Return the whole report, as `hpml sweep report --json` prints it."""
        return to_json(self.facts)

    def html(self) -> str:
        """Return the page that `hpml sweep report` writes."""
        return to_html(self.facts)


def read_report(store: Store, plan: SweepPlan) -> SweepReport:
    """Return the report of a sweep, with the trials that a search has chosen so far."""
    facts = build(with_trials(store, plan), Table(store, plan).rows())
    held = _held_back(store, facts)
    return SweepReport(replace(facts, answer=(*facts.answer, held)) if held else facts)


def _held_back(store: Store, facts: SweepFacts) -> str:
    """Return what held back the median run of the best setting; empty if nothing was found."""
    runs = sorted(
        (one.row for one in facts.attempts if one.setting == facts.best and one.row.total_seconds),
        key=lambda row: row.total_seconds or 0.0,
    )
    if not runs:
        return ""
    run = runs[len(runs) // 2].run
    with contextlib.suppress(HpmlError):  # a sweep has a report without the record of one run, too
        found = diagnose(gather(state_of(store, store.resolve(run))))
        if found.findings:
            return f"What held it back: {found.headline} (hpml report {run})."
    return ""
