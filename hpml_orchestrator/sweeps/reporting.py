"""The report of a sweep on record, and of two runs, in every form."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from hpml_orchestrator.check.changes import diagnose_run
from hpml_orchestrator.diagnosis.averaging import Averaging, averaging
from hpml_orchestrator.diagnosis.diagnose import diagnose, share_of_run
from hpml_orchestrator.diagnosis.report import Page
from hpml_orchestrator.diagnosis.thresholds import OVER_ASKED
from hpml_orchestrator.document.templates import percent
from hpml_orchestrator.errors import HpmlError
from hpml_orchestrator.records.texts import printable_lines
from hpml_orchestrator.runs.facts import gather
from hpml_orchestrator.runs.status import state_of
from hpml_orchestrator.sweeps.batches import with_trials
from hpml_orchestrator.sweeps.facts import MEASURED, SweepFacts
from hpml_orchestrator.sweeps.mlperf import results
from hpml_orchestrator.sweeps.pairs import Comparison
from hpml_orchestrator.sweeps.plan import directory_of, read, read_head, sweeps
from hpml_orchestrator.sweeps.power import noise_of, sensitivity
from hpml_orchestrator.sweeps.report import build
from hpml_orchestrator.sweeps.table import Table
from hpml_orchestrator.sweeps.tworuns import compare_runs
from hpml_orchestrator.sweeps.wording import environment
from hpml_orchestrator.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpml_orchestrator.diagnosis.model import Diagnosis
    from hpml_orchestrator.records.store import Store
    from hpml_orchestrator.sweeps.plan import SweepPlan
    from hpml_orchestrator.sweeps.plots import Plot

# Write a report, or a comparison of two, as HTML, Markdown or JSON.
#
# The HTML is one file: its plots are in it, it needs no scripts and fetches nothing.


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
    return printable_lines(re.sub(r"\n{3,}", "\n\n", text).strip()) + "\n"


def to_json(document: SweepFacts | Comparison) -> dict[str, Any]:
    """Return all facts as JSON values; an infinite number becomes null."""
    return dict(json.loads(TypeAdapter(type(document)).dump_json(document)))


def _body(form: str, document: SweepFacts | Comparison, drawn: Sequence[Plot]) -> str:
    sweep = isinstance(document, SweepFacts)
    template = environment(form).get_template("report.j2" if sweep else "pairs.j2")
    return template.render({"report" if sweep else "comparison": document}, plots=drawn)


_LOOKED_AT = 20  # sweeps, for their noise
_UNNAMED = ("steps", "not divided")  # what the time was for, and what is not known
_SMALL_SHARE = 0.05  # of a run; less is not named
_PARTS_OF = {
    "waits-for-data": ("data wait",),
    "slow-staging": ("staging",),
    "slow-start": ("start-up", "rendezvous", "preparation", "warm-up"),
    "slow-saving": ("checkpoint",),
    "slow-evaluation": ("evaluation",),
}
"""The parts of a run that findings are about."""


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


class RunsReport(Page):
    """What differs between two runs; `str` gives the text of `hpml report RUN RUN`."""

    def __init__(self, first: Diagnosis, second: Diagnosis) -> None:
        self.facts = compare_runs(first, second)

    def __str__(self) -> str:
        return to_text(self.facts)

    def markdown(self) -> str:
        """Return the text of `hpml report RUN RUN --markdown`."""
        return to_markdown(self.facts)

    def to_dict(self) -> dict[str, object]:
        """Return the comparison, as `hpml report RUN RUN --json` prints it."""
        return to_json(self.facts)

    def html(self) -> str:
        """Return the page that `hpml report RUN RUN --html` writes."""
        return to_html(self.facts)


def read_report(store: Store, plan: SweepPlan, *, mlperf: bool = False) -> SweepReport:
    """Return the report of a sweep, with the trials that a search has chosen so far.

    Raises:
        InputError: `mlperf` asks for times to a target, and the runs have none.
    """
    facts = build(with_trials(store, plan), Table(store, plan).rows())
    answer = [*facts.answer]
    # What the sweep could find ends the answer, if the answer has it.
    end = len(answer) - (answer[-1:] == [*sensitivity(facts)] != [])
    answer[end:end] = _held_back(store, facts)
    averaged = _averaging(store, plan, facts) if facts.scaling else {}
    times = results(facts) if mlperf else ()
    return SweepReport(replace(facts, answer=tuple(answer), averaging=averaged, mlperf=times))


def earlier_noise(store: Store, planned: SweepPlan) -> tuple[float, str] | None:
    """Return the noise of the newest sweep of the same job and mode, and its id, if known."""
    for name in sweeps(store)[:_LOOKED_AT]:
        with contextlib.suppress(HpmlError):  # a damaged sweep
            directory = directory_of(store, name)
            head = read_head(directory)
            base = dict(head.get("sweep", {})).get("base")
            same = (base, head.get("mode")) == (planned.spec.base, planned.mode)
            if same and not head.get("trial"):
                earlier = read(directory)
                noise = noise_of(build(earlier, Table(store, earlier).rows()))
                if noise is not None:
                    return noise, name
    return None


def _held_back(store: Store, facts: SweepFacts) -> Iterator[str]:
    """Yield what the best setting spent most time on besides its steps, or what slowed these.

    Both are shares of the median run, not of its steps.
    """
    if facts.best is None:
        return
    best = facts.settings[facts.best]
    whole = sum(best.phases.values())
    shares = {
        name: took / (whole or 1.0) for name, took in best.phases.items() if name not in _UNNAMED
    }
    part = max(shares, key=lambda name: shares[name], default="")
    share = shares.get(part, 0.0)
    run = _median_run(facts, best.number)
    kind, text, cost = _first_finding(store, run)
    if text and (cost >= share or share < _SMALL_SHARE or part in _PARTS_OF.get(kind, ())):
        yield f"What held it back: {text} (hpml report {run})."
    elif share >= max(_SMALL_SHARE, best.phases.get("not divided", 0.0) / (whole or 1.0)):
        name = "launch and rendezvous" if part == "rendezvous" else part
        took = f"What held it back: {name}, {percent(share)} of the total time with {best.label}"
        yield f"{took} (median run; hpml report {run})."
        if text:
            yield f"In that run also: {text}."


def _median_run(facts: SweepFacts, setting: int) -> str:
    rows = [one.row for one in facts.attempts if one.setting == setting]
    runs = sorted((row.total_seconds or 0.0, row.run) for row in rows if row.state == MEASURED)
    return runs[len(runs) // 2][1] if runs else ""


def _averaging(store: Store, plan: SweepPlan, facts: SweepFacts) -> dict[int, Averaging]:
    found: dict[int, Averaging] = {}
    for setting in facts.settings:
        # A sweep has a report without the record of one run, too.
        with contextlib.suppress(HpmlError):
            if run := _median_run(facts, setting.number):
                state = state_of(store, store.resolve(run))
                diagnosis = diagnose_run(state, site=plan.site, notice=lambda _: None)
                if averaged := averaging(diagnosis.facts):
                    found[setting.number] = averaged
    return found


def _first_finding(store: Store, run: str) -> tuple[str, str, float]:
    """Return the first finding about a run's speed: its kind, its words and its share of the run.

    A sweep has a report without the record of one run, too.
    """
    with contextlib.suppress(HpmlError):
        facts = gather(state_of(store, store.resolve(run)))
        for one in diagnose(facts).findings:
            if one.kind not in OVER_ASKED:
                cost = share_of_run(facts, one)
                most = f", at most {percent(cost)} of the run's time" if cost else ""
                return one.kind, f"{one.verdict}{most}", cost
    return "", "", 0.0
