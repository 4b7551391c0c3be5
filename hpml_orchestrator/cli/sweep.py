"""Commands about sweeps: plan, run, tick, status, resume, cancel, report, compare."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import webbrowser
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpml_orchestrator.cli.common import (
    BackendOption,
    JsonOption,
    LocalOption,
    SetOption,
    completion,
    print_json,
    print_table,
    refuse_with,
    store_of,
)
from hpml_orchestrator.cli.process import EXIT_INTERRUPTED, notice
from hpml_orchestrator.cli.sweepfile import (
    BatchOption,
    GridOption,
    RepeatsOption,
    StrongOption,
    SweepFile,
    WeakOption,
    check_plan,
    extra_needed,
    planned_of,
    sweep_of,
)
from hpml_orchestrator.cli.sweeptext import print_plan, print_status, progress_line
from hpml_orchestrator.errors import InputError, JobFailedError, counted
from hpml_orchestrator.records.files import write_text
from hpml_orchestrator.sweeps import controller, plan
from hpml_orchestrator.sweeps.batches import read_batches
from hpml_orchestrator.sweeps.table import Table

if TYPE_CHECKING:
    from hpml_orchestrator.records.store import Store
    from hpml_orchestrator.sweeps.plan import SweepPlan
    from hpml_orchestrator.sweeps.rows import Row
    from hpml_orchestrator.sweeps.table import Progress

__all__ = ["group"]

_LINE_SECONDS = 60.0


SweepWord = Annotated[
    str,
    typer.Argument(
        metavar="SWEEP",
        help="Sweep id, a unique beginning or end of it, or `last`.",
        autocompletion=completion(plan.sweeps),
    ),
]
NoCheckOption = Annotated[bool, typer.Option("--no-check", help="Submit without checking.")]
DetachOption = Annotated[
    bool, typer.Option("--detach", help="Go on in the background; see hpml sweep status.")
]
MarkdownOption = Annotated[bool, typer.Option("--markdown", help="Print Markdown.")]

group = typer.Typer(no_args_is_help=True)


@group.command("plan", help="Show every point, the order and the cost of a sweep.")
def plan_(
    context: typer.Context,
    file: SweepFile,
    strong: StrongOption = "",
    weak: WeakOption = "",
    grid: GridOption = [],
    repeats: RepeatsOption = None,
    batch: BatchOption = "",
    settings: SetOption = [],
    backend: BackendOption = "auto",
    local: LocalOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show every point, the order and the cost of a sweep.

    Nothing is written or submitted.
    """
    sweep = sweep_of(file, strong, weak, grid, repeats, batch, settings)
    planned = planned_of(context, sweep, backend, local=local)
    if as_json:
        # asdict would copy every value of every point
        points = [vars(point) for point in planned.points]
        print_json({**asdict(replace(planned, points=())), "points": points})
    else:
        print_plan(planned, terminal=sys.stdout.isatty())


@group.command(help="Plan a sweep, check it, run it and write its report.")
def run(
    context: typer.Context,
    file: SweepFile,
    strong: StrongOption = "",
    weak: WeakOption = "",
    grid: GridOption = [],
    repeats: RepeatsOption = None,
    batch: BatchOption = "",
    settings: SetOption = [],
    backend: BackendOption = "auto",
    local: LocalOption = False,
    no_check: NoCheckOption = False,
    detach: DetachOption = False,
    as_json: JsonOption = False,
) -> None:
    """Plan a sweep, check it, run it and write its report.

    Closing it loses nothing: submitted points go on, and `hpml sweep resume last` continues, on
    this login node or another. Exit status 6 if points failed.
    """
    sweep = sweep_of(file, strong, weak, grid, repeats, batch, settings)
    planned = planned_of(context, sweep, backend, local=local)
    store = store_of(context)
    if not no_check:
        check_plan(planned, store)
    directory = plan.write(store, planned)
    print_plan(planned, error=True)
    notice(f"planned {planned.id} in {directory}")
    _go_on(store, planned, detach=detach, as_json=as_json)


@group.command(help="Continue a sweep that was interrupted or cancelled.")
def resume(
    context: typer.Context,
    sweep: SweepWord = "last",
    detach: DetachOption = False,
    as_json: JsonOption = False,
) -> None:
    """Continue a sweep that was interrupted or cancelled.

    No point is run twice.
    """
    store = store_of(context)
    planned = plan.resolve(store, sweep)
    controller.resume(store, planned)
    _go_on(store, planned, detach=detach, as_json=as_json)


@group.command(help="Do what is due for a sweep, once, and return.")
def tick(context: typer.Context, sweep: SweepWord = "last", as_json: JsonOption = False) -> None:
    """Do what is due for a sweep, once, and return.

    For cron or scrontab: it may be called from anywhere, at any time, by several at once.
    """
    store = store_of(context)
    planned = plan.resolve(store, sweep)
    progress = controller.Controller(store, planned).tick()
    if as_json:
        print_json(asdict(progress))
    else:
        typer.echo(progress_line(progress))


@group.command(help="Show how far a sweep is, and what it cost so far.")
def status(
    context: typer.Context,
    sweep: SweepWord = "",
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Show it again every few seconds.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show how far a sweep is, and what it cost so far.

    Without SWEEP it lists all sweeps.
    """
    store = store_of(context)
    if not sweep:
        _list(store, as_json=as_json)
        return
    planned = plan.resolve(store, sweep)
    while True:
        rows = Table(store, planned).rows()
        progress = Table(store, planned).progress()
        if as_json:
            print_json({**asdict(progress), "rows": [vars(row) for row in rows]})
        else:
            if watch and sys.stdout.isatty():
                typer.echo("\033[2J\033[H", nl=False)
            print_status(planned, progress, rows)
        if not watch or progress.finished:
            return
        time.sleep(max(2.0, min(progress.next_tick_seconds, 30.0)))


@group.command(help="Cancel the unfinished points of a sweep.")
def cancel(context: typer.Context, sweep: SweepWord) -> None:
    """Cancel the unfinished points of a sweep.

    What is done stays; `hpml sweep resume` continues.
    """
    store = store_of(context)
    planned = plan.resolve(store, sweep)
    ended = controller.cancel(store, planned)
    number = counted(len(ended), "submission")
    typer.echo(f"{planned.id}: cancelled {number}; nothing more is submitted")


@group.command(help="Write or print the report of a sweep.")
def report(
    context: typer.Context,
    sweep: SweepWord = "last",
    open_: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="Write the HTML there.")
    ] = "",
    markdown: MarkdownOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write or print the report of a sweep.

    The HTML file holds everything; without --output it is report.html in the sweep's directory.
    """
    if as_json or markdown:
        option = "--json" if as_json else "--markdown"
        refuse_with(
            option, {"--open": open_, "--output": output, "--markdown": as_json and markdown}
        )
    reports = _reports()
    store = store_of(context)
    planned = _with_trials(store, plan.resolve(store, sweep))
    built = reports.build(planned, Table(store, planned).rows())
    if as_json:
        print_json(reports.pages.to_json(built))
    elif markdown:
        typer.echo(reports.pages.to_markdown(built))
    else:
        path = _path(output) if output else _report_path(store, planned)
        write_text(path, reports.pages.to_html(built))
        typer.echo(str(path))
        if open_ and not webbrowser.open(path.as_uri()):
            notice("no browser here; open the file on your own machine")


@group.command(help="Compare two sweeps, such as before and after a change.")
def compare(
    context: typer.Context,
    before: SweepWord,
    after: SweepWord,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="Write HTML there.")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Compare two sweeps, such as before and after a change.

    Prints Markdown, which says which differences can be distinguished from noise.
    """
    reports = _reports()
    store = store_of(context)
    both = [_with_trials(store, plan.resolve(store, word)) for word in (before, after)]
    for name in ("mode", "unit"):
        values = [getattr(planned, name) for planned in both]
        if values[0] != values[1]:
            raise InputError(
                f"is a sweep with {name} {values[1] or 'none'}, and {before} with "
                f"{values[0] or 'none'}",
                field="SWEEP",
                value=after,
                hint="compare two sweeps of one kind, such as before and after a change",
            )
    compared = reports.compare(*(reports.build(one, Table(store, one).rows()) for one in both))
    if as_json:
        print_json(reports.pages.to_json(compared))
    elif output:
        path = _path(output)
        write_text(path, reports.pages.to_html(compared))
        typer.echo(str(path))
    else:
        typer.echo(reports.pages.to_markdown(compared))


def _reports() -> Any:
    """Import what makes the reports: `build`, `compare` and the `pages` of both."""
    with extra_needed():
        from hpml_orchestrator.sweeps import compare, pages, report  # noqa: PLC0415 - matplotlib

        return SimpleNamespace(build=report.build, compare=compare.compare, pages=pages)


def _with_trials(store: Store, planned: SweepPlan) -> SweepPlan:
    """Return the plan with the points that a search has chosen so far, which are in its batches."""
    if not planned.spec.searches:
        return planned
    batches = read_batches(plan.directory_of(store, planned.id), planned)
    points = {task.point.number: task.point for batch in batches for task in batch.tasks}
    return replace(planned, points=tuple(points[number] for number in sorted(points)))


def _report_path(store: Store, planned: SweepPlan) -> Path:
    return plan.directory_of(store, planned.id) / "report.html"


def _path(output: str) -> Path:
    return Path(os.path.abspath(os.path.expanduser(output)))


def _go_on(store: Store, planned: SweepPlan, *, detach: bool, as_json: bool) -> None:
    """Tick until the sweep has ended, and print its report; or let another process do it."""
    if detach:
        log = plan.directory_of(store, planned.id) / "controller.log"
        with log.open("ab") as stream:
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "hpml_orchestrator.cli",
                    "--records",
                    str(store.root),
                    "sweep",
                    "resume",
                    planned.id,
                ],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )
        typer.echo(planned.id)
        notice(f"continues in the background; hpml sweep status {planned.id} shows how far it is")
        return
    try:
        progress = _follow(store, planned)
    except KeyboardInterrupt:
        notice(
            f"submitted points go on; `hpml sweep resume {planned.id}` continues the sweep, "
            f"`hpml sweep cancel {planned.id}` cancels it"
        )
        raise typer.Exit(EXIT_INTERRUPTED) from None
    rows = Table(store, planned).rows()
    planned = _with_trials(store, planned)
    reports = _reports()
    built = reports.build(planned, rows)
    path = _report_path(store, planned)
    write_text(path, reports.pages.to_html(built))
    if as_json:
        print_json(reports.pages.to_json(built))
    else:
        print_status(planned, progress, rows)
        for sentence in built.answer:
            typer.echo(sentence)
        typer.echo(f"report  {path}")
    fine = ("COMPLETED", "PRUNED")
    failed = progress.total - sum(progress.counts.get(state, 0) for state in fine)
    if failed:
        raise JobFailedError(
            f"{counted(failed, 'point')} of {progress.total} did not complete",
            hint=_why(planned, rows),
        )


def _follow(store: Store, planned: SweepPlan) -> Progress:
    """Tick until the sweep has ended; a bar on a terminal, a line a minute elsewhere."""
    bar = None
    if sys.stderr.isatty():
        from hpml_orchestrator.cli.terminal import sweep_bar  # noqa: PLC0415

        bar = sweep_bar()
    shown, due = "", 0.0
    carried = controller.Controller(store, planned)
    try:
        while True:
            progress = carried.tick()
            line = progress_line(progress)
            if bar is not None:
                bar(progress.done, progress.total, line)
            elif line != shown and (time.monotonic() >= due or progress.finished):
                notice(line)
                shown, due = line, time.monotonic() + _LINE_SECONDS
            if progress.finished:
                return progress
            time.sleep(progress.next_tick_seconds)
    finally:
        if bar is not None:
            bar(0, None, "")


def _list(store: Store, *, as_json: bool) -> None:
    """Print all sweeps, newest first."""
    entries = []
    for name in plan.sweeps(store):
        planned = plan.read(plan.directory_of(store, name))
        progress = Table(store, planned).progress()
        entries.append((planned, progress))
    if as_json:
        print_json([{"id": one.id, **asdict(progress)} for one, progress in entries])
    elif not entries:
        typer.echo("no sweeps; start one with `hpml sweep run`", err=True)
    else:
        print_table(
            ("SWEEP", "MODE", "DONE", "STATE"),
            [
                (
                    one.id,
                    one.mode,
                    f"{progress.done}/{progress.total}",
                    progress.waits_for
                    or ", ".join(f"{number} {state}" for state, number in progress.counts.items()),
                )
                for one, progress in entries
            ],
        )


def _why(planned: SweepPlan, rows: Sequence[Row]) -> str:
    """Return where to look for the reason of points that did not complete."""
    failed = [row for row in rows if row.run and row.over and row.state != "COMPLETED"]
    if not failed:
        return f"hpml sweep status {planned.id}"
    last = failed[-1]
    reason = f" ({last.reason})" if last.reason else ""
    return f"hpml logs {last.run} shows the output of one: {last.state}{reason}"
