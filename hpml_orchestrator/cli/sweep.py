"""Commands about sweeps: plan, run, repeat, tick, status, resume, cancel, report, compare."""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
import time
import webbrowser
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

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
from hpml_orchestrator.errors import HpmlError, InputError, JobFailedError, counted
from hpml_orchestrator.records.files import write_text
from hpml_orchestrator.records.texts import first_few, seconds_text
from hpml_orchestrator.runs.backend import cluster_name, open_backend
from hpml_orchestrator.sweeps import plan
from hpml_orchestrator.sweeps.plan import check_extra
from hpml_orchestrator.sweeps.table import SUCCESS_STATES, Table

if TYPE_CHECKING:
    from hpml_orchestrator.records.store import Store
    from hpml_orchestrator.sweeps.facts import SweepFacts
    from hpml_orchestrator.sweeps.plan import SweepPlan
    from hpml_orchestrator.sweeps.rows import PointRow
    from hpml_orchestrator.sweeps.table import SweepProgress

# What the commands about sweeps print: the plan, the progress, a table of its combinations.

_SHOWN_POINTS = 12
_MINUTE = 60
_SHOWN_COMBINATIONS = 24


def progress_line(progress: SweepProgress) -> str:
    """Return the progress of a sweep, in one line."""
    parts = [f"{progress.done} of {progress.total} done", *_states(progress.counts)]
    if progress.gpu_hours:
        parts.append(f"{progress.gpu_hours:.2f} GPU-hours")
    if progress.eta_seconds is not None and not progress.finished:
        parts.append(f"about {seconds_text(progress.eta_seconds)} left")
    return ", ".join(filter(None, [*parts, progress.waits_for, progress.missing_metric]))


def _states(counts: Mapping[str, int]) -> list[str]:
    return [f"{number} {state}" for state, number in counts.items()]


def print_summary(planned: SweepPlan, *, error: bool = False) -> None:
    """Print what a sweep will do and what it may cost, without its points."""
    estimate, searches = planned.estimate, planned.spec.searches
    varied = [planned.unit] * bool(planned.unit) + list(planned.spec.axes)
    points = counted(estimate.points, "trial" if searches else "point")
    excluded = len(planned.points) - sum(map(len, planned.blocks))
    left = f", {excluded} excluded" if excluded else ""
    lines = [
        f"{planned.name}: {planned.mode} sweep over {', '.join(varied)} on {planned.backend}",
        f"points    {points} ({counted(planned.spec.count, 'repeat')} of each){left}",
    ]
    if searches:
        from hpml_orchestrator.sweeps.search import sampler_text  # noqa: PLC0415 - loads Optuna

        lines.append(f"sampler   {sampler_text(planned.spec)}")
    else:
        kept = [point for point in planned.points if not point.excluded]
        labels = [str(point.scale or _values(planned.values_of(point))) for point in kept]
        lines.append(f"order     {planned.spec.order}: {first_few(labels, _SHOWN_POINTS)}")
    gpus = f"{estimate.gpu_hours:.3g} GPU-hours, " if estimate.gpu_hours else ""
    costs = f"{gpus}{estimate.core_hours:.3g} core-hours"
    lines.append(f"cost      at most {costs}, if every run needs its whole time limit")
    lines += [f"note      {note}" for note in planned.notes]
    typer.echo("\n".join(lines), err=error)


def print_plan(planned: SweepPlan, finds: str) -> None:
    """Print what a sweep will do and find, with its points; a terminal shows the first of many."""
    print_summary(planned)
    if finds:
        typer.echo(f"finds     {finds}")
    shown = planned.points[: _SHOWN_COMBINATIONS if sys.stdout.isatty() else None]
    if shown:
        print_table(
            ("POINT", "SCALE", "VALUES", "REPEAT", "SEED", "BATCH", "PER RANK"),
            [
                (
                    str(point.number),
                    str(point.scale or "-"),
                    _values(planned.values_of(point)) or "-",
                    str(point.repeat + 1),
                    str(point.seed) if "seed" in planned.placeholders else "-",
                    str(point.batch_global or "-"),
                    point.excluded or str(point.batch_per_rank or "-"),
                )
                for point in shown
            ],
        )
    if len(shown) < len(planned.points):
        typer.echo(f"… {len(planned.points) - len(shown)} more; --json prints all")


def _values(values: Mapping[str, object]) -> str:
    texts = {
        name.rstrip("="): f"{value:.6g}"
        if isinstance(value, float)
        else value
        if value is not None
        else "-"
        for name, value in values.items()
    }
    return " ".join(f"{name}={text}" for name, text in texts.items())


def print_front(facts: SweepFacts) -> None:
    """Print the settings that no other dominates in a sweep by several figures."""
    if facts.front:
        front = [facts.settings[number] for number in facts.front]
        figures = [[f"{one.value:.4g}" for one in setting.objectives.values()] for setting in front]
        rows = [(one.label, *texts) for one, texts in zip(front, figures, strict=True)]
        print_table(("NOT DOMINATED", *map(str.upper, facts.objectives)), rows)


def print_sweeps(entries: Sequence[tuple[SweepPlan, SweepProgress]]) -> None:
    """Print a table of sweeps with their progress."""
    rows = [
        (
            planned.id,
            planned.mode,
            f"{progress.done}/{progress.total}",
            progress.waits_for or ", ".join(_states(progress.counts)),
        )
        for planned, progress in entries
    ]
    print_table(("SWEEP", "MODE", "DONE", "STATE"), rows)


def print_status(planned: SweepPlan, progress: SweepProgress, rows: Sequence[PointRow]) -> None:
    """Print a line about the sweep and a table of its combinations."""
    typer.echo(f"{planned.id}: {progress_line(progress)}")
    points = {point.number: point for point in planned.points}
    groups: dict[tuple[int, str], list[PointRow]] = {}
    for row in {row.point: row for row in rows}.values():  # the last start of each point
        point = points.get(row.point)
        label = (row.point, f"trial {row.point}")
        if point is not None:
            scale = f"{planned.unit}={point.scale} " if point.scale else ""
            label = (point.scale or 0, f"{scale}{_values(planned.values_of(point))}".rstrip())
        groups.setdefault(label, []).append(row)
    shown = sorted(groups)[-_SHOWN_COMBINATIONS:]
    if len(shown) < len(groups):
        typer.echo(f"the last {len(shown)} of {len(groups)} combinations; --json prints all")
    header = ("POINTS", "DONE", "STATES", "MEDIAN TIME", "SAMPLES/S", "ACCURACY")
    print_table(header, [(label[1], *_cells(groups[label])) for label in shown])


def _cells(rows: Sequence[PointRow]) -> tuple[str, ...]:
    completed = [row for row in rows if row.state == "COMPLETED"]

    def middle(name: str, text: Callable[[float], str]) -> str:
        values = [value for row in completed if (value := getattr(row, name)) is not None]
        return text(median(values)) if values else "-"

    return (
        f"{len(completed)}/{len(rows)}",
        ", ".join(_states(Counter(row.state for row in rows if row.state != "COMPLETED"))) or "-",
        middle("total_seconds", _duration),
        middle("samples_per_second", "{:.4g}".format),
        middle("accuracy", "{:.4f}".format),
    )


def _duration(seconds: float) -> str:
    """Return a median time; below a minute with three digits, as scales may differ in the last."""
    return f"{seconds:.3g} s" if seconds < _MINUTE else seconds_text(seconds)


_LINE_SECONDS = 60.0
_WATCH_SECONDS = 2.0
_REPORT = "report.html"

SweepFile = Annotated[
    str,
    typer.Argument(
        metavar="FILE", help="Sweep file, or with --strong, --weak or --grid a job file."
    ),
]
StrongOption = Annotated[
    str,
    typer.Option(
        "--strong",
        metavar="UNIT=N,N,…",
        help="Strong scaling over nodes, ranks or gpus: the global batch stays the same.",
    ),
]
WeakOption = Annotated[
    str,
    typer.Option(
        "--weak", metavar="UNIT=N,N,…", help="Weak scaling: the batch of each rank stays the same."
    ),
]
GridOption = Annotated[
    list[str],
    typer.Option(
        "--grid",
        metavar="NAME=V,V,…",
        help="All values of an argument (lr=0.1,0.2) or a field of the job "
        "(resources.cpus_per_rank=1,2); may be repeated.",
    ),
]
RepeatsOption = Annotated[
    int | None,
    typer.Option(
        "--repeats",
        min=1,
        help="Runs of each combination.",
        show_default="6, or 1 in a grid without random seeds",
    ),
]
BatchOption = Annotated[
    str,
    typer.Option(
        "--batch",
        metavar="ARGUMENT[:global]",
        help="The argument that is the batch size of a rank, or of all ranks with :global.",
    ),
]
SweepWord = Annotated[
    str,
    typer.Argument(
        metavar="SWEEP",
        help="Sweep id, a unique beginning or end of it, or `last`.",
        autocompletion=completion(plan.sweeps),
    ),
]
TopUpOption = Annotated[
    bool,
    typer.Option(
        "--top-up",
        help="FILE is an ended sweep: run its points without a complete run again.",
    ),
]
NoCheckOption = Annotated[bool, typer.Option("--no-check", help="Submit without checking.")]
DetachOption = Annotated[
    bool, typer.Option("--detach", help="Go on in the background; see hpml sweep status.")
]
MarkdownOption = Annotated[bool, typer.Option("--markdown", help="Print Markdown.")]

MllogOption = Annotated[
    str, typer.Option("--mllog", metavar="DIR", help="Write each run's MLLOG lines below DIR.")
]

group = typer.Typer(no_args_is_help=True)


@group.command("plan")
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
    check_extra()
    options = (strong, weak, grid, repeats, batch, settings)
    planned = _load("cli.sweepfile").plan_sweep(context, file, options, backend, local=local)
    if as_json:
        print_json({**planned.head(), "points": [vars(point) for point in planned.points]})
    else:
        earlier = None
        with contextlib.suppress(HpmlError):  # there are no records before the first run
            earlier = _load("sweeps.reporting").earlier_noise(store_of(context), planned)
        print_plan(planned, _load("sweeps.power").plan_line(planned, earlier))


@group.command()
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
    top_up: TopUpOption = False,
    no_check: NoCheckOption = False,
    detach: DetachOption = False,
    as_json: JsonOption = False,
) -> None:
    """Plan a sweep, check it, run it and write its report.

    Closing it loses nothing: submitted points continue, and `hpml sweep resume last` continues, on
    this login node or another. Exit status 6 if points failed.
    """
    check_extra()
    options, store = (strong, weak, grid, repeats, batch, settings), store_of(context)
    if top_up:
        names = ("--strong", "--weak", "--grid", "--repeats", "--batch", "--set")
        refuse_with("--top-up", dict(zip(names, options, strict=True)))
        refuse_with("--top-up", {"--backend": backend != "auto", "--local": local})
        planned = plan.resolve(store, file)
        missing = _load("sweeps.controller").top_up(store, planned)
        if not missing:
            typer.echo(f"{planned.id}: every point has a complete run; nothing is missing")
            return
        notice(f"{counted(missing, 'point')} of {planned.id} without a complete run start again")
        drive_sweep(store, planned, detach=detach, as_json=as_json)
        return
    planned = _load("cli.sweepfile").plan_sweep(context, file, options, backend, local=local)
    _start(store, planned, no_check=no_check, detach=detach, as_json=as_json)


def _start(
    store: Store, planned: SweepPlan, *, no_check: bool, detach: bool, as_json: bool
) -> None:
    """Check a planned sweep, write its plan and run it."""
    if not no_check:
        _load("cli.sweepfile").check_plan(planned, store)
    cluster = cluster_name(open_backend(planned.backend, store))
    directory = plan.write(store, replace(planned, cluster=cluster))
    print_summary(planned, error=True)
    notice(f"planned {planned.id} in {directory}")
    drive_sweep(store, planned, detach=detach, as_json=as_json)


@group.command()
def repeat(
    context: typer.Context,
    sweep: SweepWord,
    best: Annotated[
        int | None,
        typer.Option("--best", min=1, help="How many of the best.", show_default="3, or the front"),
    ] = None,
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, help="Runs of each; 6 give a 95 % interval.")
    ] = 6,
    no_check: NoCheckOption = False,
    detach: DetachOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run the best settings of a search or grid again, as a new sweep.

    Its seeds are new, so the figures are not those that the settings were chosen by. Exit status 6
    if points failed.
    """
    check_extra()
    store = store_of(context)
    planned = plan.resolve(store, sweep)
    made = _load("sweeps.repeat").make_repeat(
        store,
        planned,
        best=best,
        repeats=repeats,
        argv=sys.argv,
        now=time.time(),
    )
    _start(store, made, no_check=no_check, detach=detach, as_json=as_json)


@group.command()
def resume(
    context: typer.Context,
    sweep: SweepWord = "last",
    detach: DetachOption = False,
    as_json: JsonOption = False,
) -> None:
    """Continue a sweep that was interrupted or cancelled.

    No point is run twice.
    """
    check_extra()
    store = store_of(context)
    planned = plan.resolve(store, sweep)
    _load("sweeps.controller").resume(store, planned)
    drive_sweep(store, planned, detach=detach, as_json=as_json)


@group.command()
def tick(context: typer.Context, sweep: SweepWord = "last", as_json: JsonOption = False) -> None:
    """Do what is due for a sweep, once, and return.

    For cron or scrontab: it may be called from anywhere, at any time, by several at once.
    """
    check_extra()
    store = store_of(context)
    progress = _load("sweeps.controller").Controller(store, plan.resolve(store, sweep)).tick()
    if as_json:
        print_json(asdict(progress))
    else:
        typer.echo(progress_line(progress))


@group.command()
def status(
    context: typer.Context,
    sweep: SweepWord = "",
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Show it again every few seconds.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the progress of a sweep, and what it cost so far.

    Without SWEEP it is `hpml sweep list`.
    """
    if not sweep:
        list_(context, as_json)
        return
    store = store_of(context)
    planned = plan.resolve(store, sweep)
    while True:
        table = Table(store, planned)
        progress, rows = table.progress(), table.rows()
        if as_json:
            print_json({**asdict(progress), "rows": [vars(row) for row in rows]})
        else:
            if watch and sys.stdout.isatty():
                typer.echo("\033[2J\033[H", nl=False)
            print_status(planned, progress, rows)
        if not watch or progress.finished:
            return
        time.sleep(_WATCH_SECONDS)


@group.command("list")
def list_(context: typer.Context, as_json: JsonOption = False) -> None:
    """List all sweeps, newest first."""
    store = store_of(context)
    plans = [plan.read(plan.directory_of(store, name)) for name in plan.sweeps(store)]
    entries = [(planned, Table(store, planned).progress()) for planned in plans]
    if as_json:
        print_json([{"id": planned.id, **asdict(progress)} for planned, progress in entries])
    elif not entries:
        typer.echo("no sweeps; start one with `hpml sweep run`", err=True)
    else:
        print_sweeps(entries)


@group.command()
def cancel(context: typer.Context, sweep: SweepWord) -> None:
    """Cancel the unfinished points of a sweep.

    What is done stays; `hpml sweep resume` continues.
    """
    store = store_of(context)
    planned = plan.resolve(store, sweep, exact_name=True)
    if Table(store, planned).progress().finished:
        typer.echo(f"{planned.id}: has ended; there is nothing to cancel")
        return
    ended = _load("sweeps.controller").cancel(store, planned)
    number = counted(len(ended), "submission")
    typer.echo(f"{planned.id}: cancelled {number}; nothing more is submitted")


@group.command()
def report(
    context: typer.Context,
    sweep: SweepWord = "last",
    open_: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="Write the HTML there.")
    ] = "",
    markdown: MarkdownOption = False,
    as_json: JsonOption = False,
    mlperf: Annotated[bool, typer.Option("--mlperf", help="Add times by MLPerf's rule.")] = False,
    mllog: MllogOption = "",
) -> None:
    """Write or print the report of a sweep.

    The HTML file holds everything; without --output it is report.html in the sweep's directory.
    """
    if as_json or markdown:
        option = "--json" if as_json else "--markdown"
        others = {"--open": open_, "--output": output, "--markdown": as_json and markdown}
        refuse_with(option, others)
    check_extra()
    store = store_of(context)
    planned = plan.resolve(store, sweep)
    shown = _load("sweeps.reporting").read_report(store, planned, mlperf=mlperf)
    if mllog:
        logs = (store, shown.facts, planned.spec.target_accuracy, _path(mllog))
        notice(f"wrote {counted(_load('sweeps.mlperf').write_logs(*logs), 'log')} below {mllog}")
    if as_json:
        print_json(shown.to_dict())
    elif markdown:
        typer.echo(shown.markdown())
    else:
        path = _path(output) if output else plan.directory_of(store, planned.id) / _REPORT
        write_text(path, shown.html())
        typer.echo(str(path))
        if open_ and not webbrowser.open(path.as_uri()):
            notice("no browser here; open the file on your own machine")


@group.command()
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

    Prints Markdown that marks which differences can be distinguished from noise.
    """
    check_extra()
    store, reports = store_of(context), _load("sweeps.reporting")
    both = [plan.resolve(store, word) for word in (before, after)]
    kinds = [f"a {planned.mode} sweep {planned.unit}".rstrip() for planned in both]
    if kinds[0] != kinds[1]:
        hint = "compare two sweeps of one kind, such as before and after a change"
        message = f"is {kinds[1]}, and {before} is {kinds[0]}"
        raise InputError(message, field="SWEEP", value=after, hint=hint)
    facts = [reports.read_report(store, one).facts for one in both]
    compared = _load("sweeps.pairs").compare_sweeps(*facts)
    if as_json:
        print_json(reports.to_json(compared))
    elif output:
        path = _path(output)
        write_text(path, reports.to_html(compared))
        typer.echo(str(path))
    else:
        typer.echo(reports.to_markdown(compared))


def _load(module: str) -> ModuleType:
    return importlib.import_module(f"hpml_orchestrator.{module}")


def _path(output: str) -> Path:
    return Path(os.path.abspath(os.path.expanduser(output)))


def drive_sweep(store: Store, planned: SweepPlan, *, detach: bool, as_json: bool) -> None:
    """Tick until the sweep has ended and print its report, or let another process do so."""
    if detach:
        hpml = [sys.executable, "-m", "hpml_orchestrator.cli", "--records", str(store.root)]
        with (plan.directory_of(store, planned.id) / "controller.log").open("ab") as log:
            subprocess.Popen(
                [*hpml, "sweep", "resume", planned.id],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Its own session, so that closing the terminal does not end the sweep.
                start_new_session=True,
            )
        typer.echo(planned.id)
        notice(f"continues in the background; hpml sweep status {planned.id} shows its progress")
        return
    try:
        progress = _follow(store, planned)
    except KeyboardInterrupt:
        notice(
            f"submitted points continue; `hpml sweep resume {planned.id}` continues the sweep, "
            f"`hpml sweep cancel {planned.id}` cancels it"
        )
        raise typer.Exit(EXIT_INTERRUPTED) from None
    table = Table(store, planned)
    rows = table.rows()
    shown = _load("sweeps.reporting").read_report(store, planned)
    path = plan.directory_of(store, planned.id) / _REPORT
    write_text(path, shown.html())
    if as_json:
        print_json(shown.to_dict())
    else:
        print_status(planned, progress, rows)
        print_front(shown.facts)
        for sentence in shown.answer:
            typer.echo(sentence)
        typer.echo(f"report  {path}")
    if progress.failed:
        lost = [row for row in rows if row.run and row.over and row.state not in SUCCESS_STATES]
        # A run that was cancelled with the sweep has nothing to show.
        lost.sort(key=lambda row: row.state == "CANCELLED")
        shows = f"`hpml logs {lost[0].run}` shows the output of one" if lost else ""
        if not table.stopped():  # else it is said why, and what to do
            shows += (
                f"{', ' * bool(lost)}`hpml sweep run {planned.id} --top-up` runs what is missing"
            )
        number = counted(progress.failed, "point")
        raise JobFailedError(f"{number} of {progress.total} did not complete", hint=shows)


def _follow(store: Store, planned: SweepPlan) -> SweepProgress:
    """Tick until the sweep has ended; a bar on a terminal, a line a minute elsewhere."""
    bar, shown, due = None, "", 0.0
    if sys.stderr.isatty():
        from hpml_orchestrator.cli.terminal import sweep_bar  # noqa: PLC0415 - rich takes long

        bar = sweep_bar()
    carried = _load("sweeps.controller").Controller(store, planned)
    try:
        while True:
            progress: SweepProgress = carried.tick()
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
