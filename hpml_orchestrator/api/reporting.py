"""Why a run is slow, and what to change; the command `report` and the API share it."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from hpml_orchestrator.bench.results import peaks_of_run
from hpml_orchestrator.check.changes import facts_for_report
from hpml_orchestrator.diagnosis.diagnose import diagnose
from hpml_orchestrator.site.profile import site_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpml_orchestrator.diagnosis.model import Diagnosis
    from hpml_orchestrator.records.store import Store
    from hpml_orchestrator.runs.prometheus import Prometheus
    from hpml_orchestrator.runs.state import State

__all__ = ["diagnose_run"]


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
    profile = site_for("job.yaml", os.environ, chosen=site)
    found = profile.site if profile else None
    facts = facts_for_report(state, found, notice=notice, prometheus=prometheus)
    return diagnose(replace(facts, peaks=peaks_of_run(facts, records=store.root, site=profile)))
