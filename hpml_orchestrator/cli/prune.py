"""Command `prune`: remove old runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hpml_orchestrator.cli.common import (
    JsonOption,
    complete_run,
    parse_age,
    print_json,
    print_table,
    store_of,
)
from hpml_orchestrator.errors import InputError, counted
from hpml_orchestrator.records.texts import clock_text, human_bytes
from hpml_orchestrator.runs.prune import OVER
from hpml_orchestrator.runs.prune import prune as prune_runs

if TYPE_CHECKING:
    from hpml_orchestrator.runs.prune import Pruned

__all__ = ["prune"]


def prune(
    context: typer.Context,
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN",
            help="Run ids, unique parts of them, job ids or `last`; default: all of yours.",
            autocompletion=complete_run,
        ),
    ] = [],
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
        bool, typer.Option("--yes", "-y", help="Remove them; default: only list them.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove old runs and their files.

    This removes records, output and run directories, with all that the training wrote there,
    checkpoints included; a job array goes as a whole. Unfinished runs, other users' runs and data
    staged on nodes are kept. Without --yes nothing is removed.
    """
    if not runs and older_than is None and state is None and keep is None:
        raise InputError(
            "say which runs: RUN, --older-than, --state or --keep",
            hint="hpml prune --older-than 30d",
        )
    store = store_of(context)
    named = [store.resolve(word) for word in runs]
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
