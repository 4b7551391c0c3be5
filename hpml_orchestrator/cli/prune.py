"""Command `hpml prune`: remove old records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hpml_orchestrator.cli.common import (
    JsonOption,
    complete_run,
    print_json,
    print_table,
    store_of,
)

if TYPE_CHECKING:
    from hpml_orchestrator.runs.prune import Pruned

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add this group's command to the application."""
    app.command()(prune)


def prune(
    context: typer.Context,
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="[RUN…]",
            help="Run ids, unique parts of them, job ids, or `last`; all of yours without.",
            autocompletion=complete_run,
        ),
    ] = [],  # noqa: B006 - typer copies it
    older_than: Annotated[
        str | None,
        typer.Option(
            "--older-than",
            metavar="AGE",
            help="Only runs that ended so long ago, such as 12h, 30d or 8w.",
            show_default=False,
        ),
    ] = None,
    state: Annotated[
        str | None,
        typer.Option(
            "--state",
            metavar="STATES",
            help="Only runs that ended so, such as FAILED,CANCELLED.",
            show_default=False,
        ),
    ] = None,
    keep: Annotated[
        int | None,
        typer.Option(
            "--keep",
            metavar="N",
            min=0,
            help="Of all runs that are chosen, keep the newest N.",
            show_default=False,
        ),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Remove them; else only say what would go.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove old runs: their records, output and run directories; a dry run without --yes.

    All that a training wrote to its run directory goes too, checkpoints among it. Runs that are not
    known to be over stay, and so do those of others. An array goes with all of its tasks. What is
    staged on nodes is not touched.
    """
    from hpml_orchestrator.cli.ages import parse_age  # noqa: PLC0415
    from hpml_orchestrator.errors import InputError  # noqa: PLC0415
    from hpml_orchestrator.runs.prune import prune as prune_runs  # noqa: PLC0415

    if not runs and older_than is None and state is None and keep is None:
        raise InputError(
            "must be given: RUN, --older-than, --state or --keep",
            field="what to remove",
            hint="hpml prune --older-than 30d",
        )
    store = store_of(context)
    named = [store.resolve(word) for word in runs]
    task = next((one for one in named if one.index is not None), None)
    if task is not None:
        raise InputError(
            "names one task, and an array goes as a whole",
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
        _tell(done, dry_run=not yes)
    if done.interrupted:
        raise KeyboardInterrupt
    left = [sid for sid, _ in done.kept if sid in {one.sid for one in named}]
    if left:
        raise InputError("stays, as told above", field="RUN", value=", ".join(left))


def _states(text: str | None) -> list[str]:
    from hpml_orchestrator.errors import InputError  # noqa: PLC0415
    from hpml_orchestrator.runs.prune import OVER  # noqa: PLC0415

    if text is None:
        return []
    found = []
    for word in text.split(","):
        name = word.strip().upper()
        match = [one for one in OVER if one.replace(" ", "_") == name.replace(" ", "_")]
        if not match:
            raise InputError(
                "must be states of runs that are over",
                field="--state",
                value=word,
                hint=", ".join(one.replace(" ", "_") for one in OVER),
            )
        found += match
    return found


def _tell(done: Pruned, *, dry_run: bool) -> None:
    from hpml_orchestrator.errors import counted  # noqa: PLC0415
    from hpml_orchestrator.records.texts import clock_text, human_bytes  # noqa: PLC0415

    if done.removed:
        rows = [
            (
                one.id,
                one.state,
                clock_text(one.ended) if one.ended else "-",
                human_bytes(one.bytes),
            )
            for one in done.removed
        ]
        print_table(("RUN", "STATE", "ENDED", "SIZE"), rows)
    for sid, reason in done.kept:
        typer.echo(f"stays: {sid} {reason}")
    number, size = counted(len(done.removed), "run"), human_bytes(done.bytes)
    if not dry_run:
        cut = "interrupted: " if done.interrupted else ""
        typer.echo(f"{cut}removed {number}, {size} freed")
    elif done.removed:
        typer.echo(f"would remove {number} and free {size}; --yes removes them")
    else:
        typer.echo("nothing to remove")
