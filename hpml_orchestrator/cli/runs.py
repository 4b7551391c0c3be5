"""Commands about runs: list and status."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Annotated

import typer

from hpml_orchestrator.cli.common import (
    JsonOption,
    NameOption,
    RunWords,
    chosen_site,
    completion,
    print_json,
    print_table,
    refuse_empty,
    store_of,
)
from hpml_orchestrator.errors import RecordError
from hpml_orchestrator.jobfile.text import parse_since
from hpml_orchestrator.records.store import ids_in
from hpml_orchestrator.records.texts import elapsed_text
from hpml_orchestrator.runs.select import STATES, parse_states, select
from hpml_orchestrator.runs.state import job_dashboard, state_json
from hpml_orchestrator.runs.status import states

if TYPE_CHECKING:
    from hpml_orchestrator.records.store import Store
    from hpml_orchestrator.runs.history import RunHistory
    from hpml_orchestrator.runs.state import State


def list_(
    context: typer.Context,
    number: Annotated[
        int,
        typer.Option("--number", "-n", "--limit", min=1, help="List only the newest N runs."),
    ] = 20,
    everything: Annotated[bool, typer.Option("--all", "-a", help="List all runs.")] = False,
    state: Annotated[
        list[str],
        typer.Option(
            "--state",
            metavar="STATES",
            help="Only runs in these states, e.g. failed,timeout; may be repeated.",
            autocompletion=lambda incomplete: [
                name
                for name in (state.lower().replace(" ", "_") for state in STATES)
                if name.startswith(incomplete.lower())
            ],
        ),
    ] = [],
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            metavar="AGE|DATE",
            help="Only runs submitted since then, e.g. 2h, 3d or 2026-11-20.",
        ),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            "--sweep",
            metavar="SWEEP",
            help="Only runs of this sweep: its id, or `last`.",
            autocompletion=completion(lambda store: ids_in(store.root / "sweeps")),
        ),
    ] = None,
    name: NameOption = None,
    as_json: JsonOption = False,
) -> None:
    """List runs, newest first.

    Options that select runs can be combined. They apply before --number.
    """
    refuse_empty({"--since": since, "--sweep": sweep, "--name": name})
    store = store_of(context)
    shown = select(
        store,
        name=name or "*",
        since=_since(since) if since else None,
        sweep=_sweep(store, sweep) if sweep else "",
        in_states={one for text in state for one in parse_states(text, field="--state")},
        limit=None if everything else number,
    )
    selects = state or since or sweep or name
    empty = "no runs match" if selects and any(True for _ in store.submissions()) else "no runs"
    _print_states(shown, site=chosen_site(context), as_json=as_json, empty=empty)


def _since(text: str) -> float:
    return parse_since(text, field="--since", now=time.time())


def _sweep(store: Store, word: str) -> str:
    from hpml_orchestrator.sweeps.plan import resolve  # noqa: PLC0415 - needs pydantic

    return resolve(store, word).id


def status(
    context: typer.Context,
    runs: RunWords = [],
    as_json: JsonOption = False,
) -> None:
    """Show the state of unfinished or given runs.

    Without RUN this shows all unfinished runs. Below the table it shows attempt, progress and time
    left of the runs that report them.
    """
    store, site = store_of(context), chosen_site(context)
    every = states(
        store, [store.resolve(word, newest=True) for word in runs] or store.submissions()
    )
    empty = "no unfinished runs; `hpml list` shows all" if every else "no runs"
    shown = [state for state in every if runs or not state.over]
    histories = [_history(state) for state in shown]
    if as_json:
        print_json(
            [
                {**state_json(state, chosen=site), "life": history.to_json() if history else None}
                for state, history in zip(shown, histories, strict=True)
            ]
        )
        return
    _print_states(shown, site=site, as_json=False, empty=empty)
    lines = [
        (state.submission.label, line)
        for state, history in zip(shown, histories, strict=True)
        for line in (history.lines if history else ())
    ]
    if lines:
        typer.echo("")
        print_table(("RUN", "TRAINING"), lines)
    links = {state.submission.label: job_dashboard(state, chosen=site) for state in shown}
    rows = [(label, address) for label, address in links.items() if address]
    if rows:
        typer.echo("")
        print_table(("RUN", "DASHBOARD"), rows)


def _history(state: State) -> RunHistory | None:
    if state.over:
        return None
    from hpml_orchestrator.runs.history import read_history  # noqa: PLC0415 - of unfinished runs only

    with contextlib.suppress(RecordError):  # another user's
        return read_history(state)
    return None


def _print_states(shown: list[State], *, site: str, as_json: bool, empty: str = "no runs") -> None:
    if as_json:
        print_json([state_json(state, chosen=site) for state in shown])
    elif not shown:
        typer.echo(empty, err=True)
    else:
        print_table(
            ("RUN", "JOB", "BACKEND", "STATE", "TIME", "NODES", "REASON"),
            [_row(state) for state in shown],
            optional=("BACKEND", "NODES", "TIME", "JOB", "REASON"),
        )


def _row(state: State) -> tuple[str, ...]:
    return (
        state.submission.label,
        state.job_id or "-",
        state.backend,
        state.state,
        elapsed_text(state.started, state.ended),
        state.nodes or "-",
        state.why or "-",
    )
