"""The report of a run: why it is slow, and what to change; the command and the API share it."""

from __future__ import annotations

import html
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.diagnosis.diagnose import diagnose
from hpml_orchestrator.diagnosis.profile import DIRECTORY, ProfileError, read_profile
from hpml_orchestrator.diagnosis.wording import text, to_json
from hpml_orchestrator.errors import NotFoundError
from hpml_orchestrator.runs.facts import gather
from hpml_orchestrator.runs.prometheus import Prometheus, PrometheusError
from hpml_orchestrator.site.profile import site_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpml_orchestrator.diagnosis.model import Diagnosis, Facts, Peaks
    from hpml_orchestrator.records.store import Store
    from hpml_orchestrator.runs.state import State
    from hpml_orchestrator.spec.site import ResolvedSite

__all__ = ["Report", "diagnose_run"]


class Report:
    """Why a run is slow, and what to change; `str` gives the text of `hpml report`.

    Attributes:
        headline: what holds the run back most, in one line.
        findings: one dictionary per finding, as in `hpml report --json`.
    """

    def __init__(self, diagnosis: Diagnosis) -> None:
        self._diagnosis = diagnosis
        self.headline: str = diagnosis.headline
        self.findings: list[dict[str, Any]] = self.to_dict()["findings"]

    def __str__(self) -> str:
        return text(self._diagnosis)

    def to_dict(self) -> dict[str, Any]:
        """Return the whole report, with the facts that it is based on."""
        return to_json(self._diagnosis)

    def html(self) -> str:
        """Return the page that `hpml report --html` writes."""
        from hpml_orchestrator.diagnosis.page import page  # noqa: PLC0415 - jinja2 takes long

        return page(self._diagnosis)

    def _repr_html_(self) -> str:
        """Return the page in a frame, which keeps its style out of the notebook."""
        source = html.escape(self.html(), quote=True)
        return f'<iframe srcdoc="{source}" style="width:100%;height:40em;border:0"></iframe>'


def diagnose_run(
    store: Store,
    state: State,
    *,
    site: str,
    notice: Callable[[str], None],
    prometheus: Prometheus | None = None,
) -> Diagnosis:
    """Return the diagnosis of a run, with what `hpml bench` measured.

    Args:
        store: where records live.
        state: of the run.
        site: the value of `--site` or `HPML_SITE`.
        notice: takes each line to show, such as a warning.
        prometheus: asked for what the record lacks.

    Raises:
        NotFoundError: it has not started.
        RecordError: its records cannot be read.
    """
    label = state.submission.label
    if state.run.newest() is None:
        ended = "it never started" if state.over else f"it is {state.state} and has not started"
        because = f": {state.reason}" if state.reason else ""
        message = f"{label}: nothing to report, {ended}{because}"
        raise NotFoundError(message, hint=f"hpml show {label}")
    if not state.over:
        notice(f"{label} is {state.text}: this is what is known so far")
    try:
        facts = gather(state, prometheus=prometheus)
    except PrometheusError as error:
        notice(f"warning: {error}; figures are from records")
        facts = gather(state)
    from hpml_orchestrator.check.changes import with_limits  # noqa: PLC0415 - loads all of staging

    profile = site_for("job.yaml", os.environ, chosen=site)
    facts = with_limits(facts, state, profile.site if profile else None)
    try:
        traced = read_profile(state.run.directory / DIRECTORY)
    except ProfileError as error:
        notice(f"warning: {error}")
        traced = None
    return diagnose(replace(facts, peaks=_peaks(store, facts, profile), profile=traced))


def _peaks(store: Store, facts: Facts, site: ResolvedSite | None) -> Peaks | None:
    """Return what the nodes of a run can do, as far as it was measured or is specified."""
    from hpml_orchestrator.bench.results import directories_of, peaks_for  # noqa: PLC0415

    named = [*(node.node for node in facts.nodes), *(rank.node for rank in facts.ranks)]
    nodes = list(dict.fromkeys(filter(None, named)))
    names = [gpu.name for node in facts.nodes for gpu in node.gpus]
    places = directories_of(store.root, site.sources if site else [])
    return peaks_for(
        nodes, names[0] if names else "", directories=places, site=site.site if site else None
    )
