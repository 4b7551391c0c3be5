"""Commands about the state of runs: list, status, cancel."""

from __future__ import annotations

import time
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from hpml_orchestrator.cli.common import (
    JsonOption,
    RunWords,
    complete_run,
    print_json,
    print_table,
    store_of,
)
from hpml_orchestrator.cli.process import notice
from hpml_orchestrator.errors import HpmlError, SchedulerUnavailable
from hpml_orchestrator.records.texts import seconds_text
from hpml_orchestrator.runs.cancel import NOT_CANCELLED
from hpml_orchestrator.runs.cancel import cancel as cancel_runs
from hpml_orchestrator.runs.status import states

if TYPE_CHECKING:
    from hpml_orchestrator.runs.status import State

__all__ = ["cancel", "list_", "status"]


def list_(
    context: typer.Context,
    number: Annotated[
        int, typer.Option("--number", "-n", min=1, help="How many runs to list.")
    ] = 20,
    everything: Annotated[bool, typer.Option("--all", "-a", help="List all runs.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List runs, newest first."""
    store = store_of(context)
    chosen = list(islice(store.submissions(), None if everything else number))
    _print_states(states(store, chosen), as_json=as_json)


def status(
    context: typer.Context,
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN", help="Runs; default: all unfinished.", autocompletion=complete_run
        ),
    ] = [],
    as_json: JsonOption = False,
) -> None:
    """Show the state of unfinished or given runs."""
    store = store_of(context)
    if runs:
        _print_states(states(store, [store.resolve(word) for word in runs]), as_json=as_json)
        return
    every = states(store, store.submissions())
    empty = "no unfinished runs; `hpml list` shows all" if every else "no runs"
    _print_states([state for state in every if not state.over], as_json=as_json, empty=empty)


def _print_states(shown: list[State], *, as_json: bool, empty: str = "no runs") -> None:
    if as_json:
        print_json([state.to_json() for state in shown])
    elif not shown:
        typer.echo(empty, err=True)
    else:
        print_table(
            ("RUN", "JOB", "BACKEND", "STATE", "TIME", "NODES", "REASON"),
            [_row(state) for state in shown],
        )


def _row(state: State) -> tuple[str, ...]:
    ran = (state.ended or time.time()) - state.started if state.started else None
    return (
        state.submission.label,
        state.job_id or "-",
        state.backend,
        state.state,
        "-" if ran is None else seconds_text(max(0, ran)),
        state.nodes or "-",
        state.reason or "-",
    )


def cancel(context: typer.Context, runs: RunWords, as_json: JsonOption = False) -> None:
    """Cancel runs or single tasks of a job array.

    Runs that have ended are left alone. For a run that is being submitted this waits a few seconds;
    the exit status is 5 if it still has no job then: it may get one, and was not cancelled.
    """
    store = store_of(context)
    try:
        submissions = [store.resolve(word) for word in runs]
    except HpmlError as error:
        if len(runs) > 1:
            error.hint = f"nothing was cancelled; {error.hint}"
        raise
    outcomes = cancel_runs(store, submissions, notice=notice)
    if as_json:
        print_json(outcomes)
    else:
        for outcome in outcomes:
            typer.echo(f"{outcome['id']}: {outcome['outcome']}")
    left = [one["id"] for one in outcomes if one["outcome"].startswith(NOT_CANCELLED)]
    if left:
        raise SchedulerUnavailable(
            f"not cancelled: {', '.join(left)}",
            hint=f"its job may still appear; try again: hpml cancel {' '.join(left)}",
        )
