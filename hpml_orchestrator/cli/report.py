"""Command `report`: why a run is slow, and what to change."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from hpml_orchestrator.cli.common import (
    JsonOption,
    PrometheusAuthOption,
    RunWords,
    chosen_site,
    one_run,
    print_json,
    refuse_empty,
    refuse_with,
    store_of,
)
from hpml_orchestrator.cli.process import notice
from hpml_orchestrator.diagnosis.diagnose import diagnose
from hpml_orchestrator.diagnosis.wording import markdown, text, to_json
from hpml_orchestrator.errors import InputError, NotFoundError, RecordError
from hpml_orchestrator.runs.facts import gather
from hpml_orchestrator.runs.prometheus import Prometheus
from hpml_orchestrator.runs.status import UNREADABLE, states
from hpml_orchestrator.site.profile import prometheus_of_site
from hpml_orchestrator.spec.address import read_credentials

if TYPE_CHECKING:
    from hpml_orchestrator.diagnosis.model import Diagnosis
    from hpml_orchestrator.records.store import Store
    from hpml_orchestrator.runs.state import State

__all__ = ["report"]

_COMPARED = 2


def report(
    context: typer.Context,
    runs: RunWords = [],
    as_json: JsonOption = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    html: Annotated[
        str | None, typer.Option("--html", metavar="FILE", help="Write a page to this file.")
    ] = None,
    prometheus: Annotated[
        str,
        typer.Option(
            "--prometheus",
            metavar="URL",
            help="Prometheus for what the record lacks; `none` reads records only.",
            envvar="PROMETHEUS_URL",
            show_default="the site profile's",
        ),
    ] = "",
    prometheus_auth: PrometheusAuthOption = "",
) -> None:
    """Report why a run is slow, and what to change in its job file.

    One RUN gives a report, by default of the last run; two are compared. Of a job array, name one
    task: RUN.INDEX. A run that has not ended is reported as far as it is known.
    """
    refuse_empty({"--html": html})
    if as_json:
        refuse_with("--json", {"--markdown": as_markdown, "--html": html})
    if as_markdown:
        refuse_with("--markdown", {"--html": html})
    if len(runs) > _COMPARED:
        raise InputError("one run is reported, two are compared", field="RUN", value=" ".join(runs))
    store = store_of(context)
    url = prometheus or prometheus_of_site(os.environ, chosen=chosen_site(context)) or "none"
    server = None if url == "none" else Prometheus(url, read_credentials(prometheus_auth))
    diagnoses = [_diagnosed(store, word, server) for word in runs or ["last"]]
    if len(diagnoses) == _COMPARED:
        raise InputError("comparing two runs is not there yet", field="RUN")
    diagnosis = diagnoses[0]
    if html is not None:
        raise InputError("pages are not there yet", field="--html", value=html)
    if as_json:
        print_json(to_json(diagnosis))
    else:
        typer.echo(markdown(diagnosis).rstrip("\n") if as_markdown else text(diagnosis))


def _diagnosed(store: Store, word: str, server: Prometheus | None) -> Diagnosis:
    """Return the diagnosis of the run that a word names.

    Raises:
        NotFoundError: it has not started.
        RecordError: its records cannot be read.
    """
    submission = one_run(store.resolve(word), field="RUN", has="report")
    state = states(store, [submission])[0]
    if state.state == UNREADABLE:
        raise RecordError(state.reason)
    _refuse_unstarted(state)
    if not state.over:
        why = f" ({state.reason})" if state.reason else ""
        notice(f"{state.submission.label} is {state.state}{why}: this is what is known so far")
    return diagnose(gather(state, prometheus=server))


def _refuse_unstarted(state: State) -> None:
    if state.run.newest() is not None:
        return
    label, why = state.submission.label, f": {state.reason}" if state.reason else ""
    ended = "it never started" if state.over else f"it is {state.state} and has not started"
    raise NotFoundError(f"{label}: nothing to report, {ended}{why}", hint=f"hpml show {label}")
