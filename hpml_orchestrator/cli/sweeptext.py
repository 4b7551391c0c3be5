"""What the commands about sweeps print: the plan, the progress, a table of its combinations."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING

import typer

from hpml_orchestrator.cli.common import print_table
from hpml_orchestrator.errors import counted
from hpml_orchestrator.records.texts import first_few, seconds_text

if TYPE_CHECKING:
    from hpml_orchestrator.sweeps.facts import SweepFacts
    from hpml_orchestrator.sweeps.plan import SweepPlan
    from hpml_orchestrator.sweeps.rows import PointRow
    from hpml_orchestrator.sweeps.table import SweepProgress

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
