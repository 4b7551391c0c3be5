"""Commands that end or remove runs: cancel and prune."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from hpml_orchestrator.cli.common import (
    JsonOption,
    NameOption,
    RunWords,
    print_json,
    print_table,
    refuse_empty,
    refuse_with,
    store_of,
)
from hpml_orchestrator.cli.process import notice
from hpml_orchestrator.errors import (
    HpmlError,
    InputError,
    NotFoundError,
    RecordError,
    SchedulerUnavailable,
    counted,
    did_you_mean,
)
from hpml_orchestrator.jobfile.text import parse_age
from hpml_orchestrator.records.texts import clock_text, human_bytes
from hpml_orchestrator.runs.cancel import BEING_SUBMITTED, NOT_CANCELLED
from hpml_orchestrator.runs.cancel import cancel as cancel_runs
from hpml_orchestrator.runs.prune import OVER
from hpml_orchestrator.runs.prune import prune as prune_runs
from hpml_orchestrator.runs.select import named, run_name, sweep_of, unfinished
from hpml_orchestrator.runs.status import UNREADABLE

if TYPE_CHECKING:
    from hpml_orchestrator.records.store import Store
    from hpml_orchestrator.records.submission import Submission
    from hpml_orchestrator.runs.prune import Pruned
    from hpml_orchestrator.runs.state import State


def cancel(
    context: typer.Context,
    runs: RunWords = [],
    everything: Annotated[
        bool, typer.Option("--all", "-a", help="Cancel all of your unfinished runs.")
    ] = False,
    name: NameOption = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="With --all or --name: do not ask.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Cancel runs or single tasks of a job array.

    Runs that have ended stay as they are. For a run that is still being submitted this waits a few
    seconds; if it has no job by then, it is not cancelled and the exit status is 5. --all and
    --name take your own runs only, and ask first on a terminal.
    """
    refuse_empty({"--name": name})
    if everything:
        refuse_with("--all", {"RUN": runs, "--name": name})
    elif name is not None:
        refuse_with("--name", {"RUN": runs})
    elif not runs:
        raise InputError("choose runs with RUN, --name or --all", hint="hpml cancel last")
    store = store_of(context)
    unreadable: list[State] = []
    if runs:
        submissions = _resolved(store, runs)
    else:
        found = _unfinished(store, "*" if name is None else name)
        unreadable = [state for state in found if state.state == UNREADABLE]
        found = [state for state in found if state not in unreadable]
        if not found and not as_json:
            typer.echo("no unfinished runs", err=True)
        _confirm(found, yes=yes)
        submissions = [state.submission for state in found]
    outcomes = cancel_runs(store, submissions, notice=notice)
    if as_json:
        print_json(outcomes)
    else:
        for outcome in outcomes:
            typer.echo(f"{outcome['id']}: {outcome['outcome']}")
    if unreadable:
        raise RecordError("\n".join(f"not cancelled: {state.reason}" for state in unreadable))
    _report_left(outcomes)


def _report_left(outcomes: list[dict[str, str]]) -> None:
    left = {one["id"]: one["outcome"] for one in outcomes if NOT_CANCELLED in one["outcome"]}
    again = [run for run, outcome in left.items() if BEING_SUBMITTED in outcome]
    if left:
        hint = f"the job may still appear; try again: hpml cancel {' '.join(again)}"
        raise SchedulerUnavailable(f"not cancelled: {', '.join(left)}", hint=hint if again else "")


def _resolved(store: Store, runs: list[str]) -> list[Submission]:
    try:
        return [store.resolve(word, exact_name=True) for word in runs]
    except HpmlError as error:
        if len(runs) > 1:
            error.hint = f"nothing was cancelled; {error.hint}"
        raise


def _unfinished(store: Store, pattern: str) -> list[State]:
    if pattern != "*" and not any(True for _ in named(store, pattern)):
        names = {*map(run_name, store.submissions())}
        hint = did_you_mean(pattern, names) or "`hpml list` shows all runs"
        raise NotFoundError(f"no run is named {pattern!r}", hint=hint)
    return unfinished(store, pattern)


def _confirm(found: list[State], *, yes: bool) -> None:
    if found and not yes and sys.stdin.isatty():
        for state in found:
            typer.echo(f"{state.submission.label}  {state.state}", err=True)
        if not typer.confirm(f"Cancel {counted(len(found), 'run')}?", err=True):
            typer.echo("nothing was cancelled", err=True)
            raise typer.Exit(1)
    for sweep in dict.fromkeys(filter(None, (sweep_of(state.submission) for state in found))):
        notice(f"warning: {sweep} may submit more runs; to stop it: hpml sweep cancel {sweep}")


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
        print_table(("RUN", "STATE", "ENDED", "SIZE"), rows, optional=("ENDED", "SIZE"))
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
