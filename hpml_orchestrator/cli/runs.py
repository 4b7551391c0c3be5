"""Commands about runs: list, status, cancel, prune."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from hpml_orchestrator.cli.common import (
    JsonOption,
    RunWords,
    chosen_site,
    parse_age,
    print_json,
    print_table,
    store_of,
)
from hpml_orchestrator.cli.process import notice
from hpml_orchestrator.errors import HpmlError, InputError, SchedulerUnavailable, counted
from hpml_orchestrator.records.texts import clock_text, elapsed_text, human_bytes
from hpml_orchestrator.runs.cancel import NOT_CANCELLED
from hpml_orchestrator.runs.cancel import cancel as cancel_runs
from hpml_orchestrator.runs.dashboard import job_dashboard, state_json
from hpml_orchestrator.runs.prune import OVER
from hpml_orchestrator.runs.prune import prune as prune_runs
from hpml_orchestrator.runs.status import states

if TYPE_CHECKING:
    from hpml_orchestrator.runs.prune import Pruned
    from hpml_orchestrator.runs.status import State

__all__ = ["cancel", "list_", "prune", "status"]


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
    _print_states(states(store, chosen), site=chosen_site(context), as_json=as_json)


def status(
    context: typer.Context,
    runs: RunWords = [],
    as_json: JsonOption = False,
) -> None:
    """Show the state of unfinished or given runs.

    Without RUN this shows all unfinished runs.
    """
    store, site = store_of(context), chosen_site(context)
    every = states(store, [store.resolve(word) for word in runs] or store.submissions())
    empty = "no unfinished runs; `hpml list` shows all" if every else "no runs"
    shown = [state for state in every if runs or not state.over]
    _print_states(shown, site=site, as_json=as_json, empty=empty)
    links = {state.submission.label: job_dashboard(state, chosen=site) for state in shown}
    rows = [(label, address) for label, address in links.items() if address]
    if rows and not as_json:
        typer.echo("")
        print_table(("RUN", "DASHBOARD"), rows)


def _print_states(shown: list[State], *, site: str, as_json: bool, empty: str = "no runs") -> None:
    if as_json:
        print_json([state_json(state, chosen=site) for state in shown])
    elif not shown:
        typer.echo(empty, err=True)
    else:
        print_table(
            ("RUN", "JOB", "BACKEND", "STATE", "TIME", "NODES", "REASON"),
            [_row(state) for state in shown],
        )


def _row(state: State) -> tuple[str, ...]:
    return (
        state.submission.label,
        state.job_id or "-",
        state.backend,
        state.state,
        elapsed_text(state.started, state.ended),
        state.nodes or "-",
        state.reason or "-",
    )


def cancel(context: typer.Context, runs: RunWords, as_json: JsonOption = False) -> None:
    """Cancel runs or single tasks of a job array.

    Runs that have ended stay as they are. For a run that is still being submitted this waits a few
    seconds; if it has no job by then, it is not cancelled and the exit status is 5.
    """
    store = store_of(context)
    try:
        submissions = [store.resolve(word, exact_name=True) for word in runs]
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
    left = [outcome["id"] for outcome in outcomes if outcome["outcome"].startswith(NOT_CANCELLED)]
    if left:
        raise SchedulerUnavailable(
            f"not cancelled: {', '.join(left)}",
            hint=f"the job may still appear; try again: hpml cancel {' '.join(left)}",
        )


def prune(
    context: typer.Context,
    runs: RunWords = [],
    older_than: Annotated[
        str | None,
        typer.Option(
            "--older-than",
            metavar="AGE",
            help="Only runs that ended at least this long ago, e.g. 12h, 30d or 8w.",
        ),
    ] = None,
    state: Annotated[
        str | None,
        typer.Option(
            "--state",
            metavar="STATES",
            help="Only runs that ended in these states, e.g. FAILED,CANCELLED.",
        ),
    ] = None,
    keep: Annotated[
        int | None,
        typer.Option("--keep", metavar="N", min=0, help="Keep the newest N of the selected runs."),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Remove the runs instead of listing them.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove old runs and their files.

    Removes records, output and run directories with everything the training wrote there, including
    checkpoints; a job array is removed as a whole. Unfinished runs, runs of other users and data
    staged on nodes are kept. Without --yes this only lists what it would remove; without RUN it
    takes all of your runs that the options select.
    """
    if not runs and older_than is None and state is None and keep is None:
        raise InputError(
            "choose runs with RUN, --older-than, --state or --keep",
            hint="hpml prune --older-than 30d",
        )
    store = store_of(context)
    named = [store.resolve(word, exact_name=True) for word in runs]
    task = next((submission for submission in named if submission.index is not None), None)
    if task is not None:
        raise InputError(
            "names one task; only a whole job array can be removed",
            field="RUN",
            value=task.label,
            hint=f"hpml prune {task.sid}",
        )
    done = prune_runs(
        store,
        named,
        older_seconds=None if older_than is None else parse_age(older_than, field="--older-than"),
        in_states=_states(state),
        keep=keep or 0,
        dry_run=not yes,
    )
    if as_json:
        print_json({"dry_run": not yes, **done.to_json()})
    else:
        _print(done, dry_run=not yes)
    if done.interrupted:
        raise KeyboardInterrupt
    sids = {submission.sid for submission in named}
    kept = [sid for sid, _ in done.kept if sid in sids]
    if kept:
        raise InputError("was kept, see above", field="RUN", value=", ".join(kept))


def _states(text: str | None) -> list[str]:
    """Return the final states that `--state` names."""
    by_name = {state.replace(" ", "_"): state for state in OVER}
    words = [] if text is None else text.split(",")
    names = [word.strip().upper().replace(" ", "_") for word in words]
    for word, name in zip(words, names, strict=True):
        if name not in by_name:
            raise InputError(
                "must be final states", field="--state", value=word, hint=", ".join(by_name)
            )
    return [by_name[name] for name in names]


def _print(done: Pruned, *, dry_run: bool) -> None:
    if done.removed:
        rows = [
            (run.id, run.state, clock_text(run.ended) if run.ended else "-", human_bytes(run.bytes))
            for run in done.removed
        ]
        print_table(("RUN", "STATE", "ENDED", "SIZE"), rows)
    for sid, reason in done.kept:
        typer.echo(f"kept: {sid} {reason}")
    number, size = counted(len(done.removed), "run"), human_bytes(done.bytes)
    if not dry_run:
        cut = "interrupted: " if done.interrupted else ""
        typer.echo(f"{cut}removed {number}, {size} freed")
    elif done.removed:
        typer.echo(f"would remove {number} and free {size}; use --yes to remove them")
    else:
        typer.echo("nothing to remove")
