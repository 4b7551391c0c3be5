"""The address of a run's Job dashboard, in the Grafana or viewer that the site profile names."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from hpml_orchestrator.errors import HpmlError
from hpml_orchestrator.records.files import read_json
from hpml_orchestrator.site.profile import find_profiles

if TYPE_CHECKING:
    from hpml_orchestrator.records.run import Attempt
    from hpml_orchestrator.runs.state import State
    from hpml_orchestrator.site.model import Site


def cluster_job(attempt: Attempt) -> tuple[str, str]:
    """Return cluster and job id of an attempt, as metrics have them in their labels.

    For a task of an array it is the task's own job id. Unknown values are empty: a run of the local
    backend, such as local-3fa9c1-7, belongs to the cluster of its node, which is not known here.
    """
    try:
        cluster = str(read_json(attempt.directory / "head.json").get("cluster", ""))
    except HpmlError:
        cluster = ""
    if cluster.startswith("local-"):
        return "", f"{cluster}-{attempt.job_id}"
    return cluster, attempt.job_id


def job_dashboard(state: State, *, chosen: str = "") -> str | None:
    """Return the address of a run's Job dashboard, over the time that its last attempt ran.

    None before the run has started, for an array as a whole, and without an address in the site
    profile. The profile is the one that is chosen, else those of the run's submission.

    Args:
        state: of the run.
        chosen: the value of `--site` or `HPML_SITE`.
    """
    return _address(state, _site_of(state, chosen)) if state.started else None


def state_json(state: State, *, chosen: str = "") -> dict[str, object]:
    """Return a state for programs, with the address of its dashboard and of each task's."""
    site = _site_of(state, chosen) if state.started else None
    tasks = [
        {**row, "dashboard": _address(task, site)}
        for row, task in zip(state.tasks_to_json(), state.tasks, strict=True)
    ]
    return {**state.to_json(), "tasks": tasks, "dashboard": _address(state, site)}


def _site_of(state: State, chosen: str) -> Site | None:
    try:
        if chosen:
            return _site(tuple(map(str, find_profiles(None, {}, chosen=chosen))))
        return _site(tuple(state.submission.record().get("site", ())))
    except HpmlError:  # `hpml check` reports what is wrong with a profile
        return None


@cache
def _site(paths: tuple[str, ...]) -> Site | None:
    if not paths:
        return None
    from hpml_orchestrator.site.model import load_site  # noqa: PLC0415 - few have one

    return load_site([*map(Path, paths)]).site


def _address(state: State, site: Site | None) -> str | None:
    if site is None or site.monitoring.dashboards is None:
        return None
    if not state.started or state.tasks or state.waits:
        return None
    try:
        attempt = state.run.newest()
    except HpmlError:  # another user's
        return None
    if attempt is None or not attempt.job_id:
        return None
    cluster, job_id = cluster_job(attempt)
    parameters = {
        "var-cluster": cluster or site.cluster or "",
        "var-jobid": job_id,
        "from": math.floor(state.started * 1000),
        "to": math.ceil(state.ended * 1000) if state.ended else "now",
    }
    query = urlencode({name: value for name, value in parameters.items() if value != ""})
    return f"{site.monitoring.dashboards.rstrip('/')}/d/hpml-job?{query}"
