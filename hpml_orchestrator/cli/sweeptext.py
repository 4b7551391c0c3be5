"""What the commands about sweeps print: the plan, how far it is, a table of its combinations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import typer

from hpml_orchestrator.cli.common import print_table
from hpml_orchestrator.errors import counted
from hpml_orchestrator.records.texts import first_few, seconds_text

if TYPE_CHECKING:
    from hpml_orchestrator.sweeps.plan import Point, SweepPlan
    from hpml_orchestrator.sweeps.rows import Row
    from hpml_orchestrator.sweeps.table import Progress

__all__ = ["print_plan", "print_status", "progress_line"]

_SHOWN_POINTS = 12
_SHOWN_COMBINATIONS = 24


def progress_line(progress: Progress) -> str:
    """Return how far a sweep is, in one line."""
    parts = [f"{progress.done} of {progress.total} done"]
    parts += [f"{number} {state}" for state, number in progress.counts.items() if number]
    if progress.gpu_hours:
        parts.append(f"{progress.gpu_hours:.2f} GPU-hours")
    if progress.eta_seconds is not None and not progress.finished:
        parts.append(f"about {seconds_text(progress.eta_seconds)} left")
    if progress.waits_for:
        parts.append(progress.waits_for)
    return ", ".join(parts)


def print_plan(planned: SweepPlan, *, terminal: bool = False, error: bool = False) -> None:
    """Print what a sweep will do."""

    def say(text: str) -> None:
        typer.echo(text, err=error)

    estimate, count = planned.estimate, planned.spec.count
    varied = [planned.unit] * bool(planned.unit) + list(planned.spec.axes)
    say(f"{planned.name}: {planned.mode} sweep over {', '.join(varied)} on {planned.backend}")
    excluded = len(planned.points) - sum(map(len, planned.blocks))
    points = counted(estimate.points, "trial" if planned.spec.searches else "point")
    left = f", {excluded} excluded" if excluded else ""
    say(f"points    {points} ({counted(count, 'repeat')} of each){left}")
    if not planned.spec.searches:
        say(f"order     {planned.spec.order}: {_order(planned)}")
    costs = f"{estimate.core_hours:.3g} core-hours"
    if estimate.gpu_hours:
        costs = f"{estimate.gpu_hours:.3g} GPU-hours, {costs}"
    say(f"cost      at most {costs}, if every run needs its whole time limit")
    for note in planned.notes:
        say(f"note      {note}")
    if error:
        return
    if planned.points:
        shown = planned.points if not terminal else planned.points[:_SHOWN_COMBINATIONS]
        print_table(
            ("POINT", "SCALE", "VALUES", "REPEAT", "SEED", "BATCH", "PER RANK"),
            [
                (
                    str(point.number),
                    str(point.scale or "-"),
                    _values(point.values) or "-",
                    str(point.repeat + 1),
                    str(point.seed) if "seed" in planned.placeholders else "-",
                    str(point.batch_global or "-"),
                    point.excluded or str(point.batch_per_rank or "-"),
                )
                for point in shown
            ],
        )
        if len(shown) < len(planned.points):
            say(f"… {len(planned.points) - len(shown)} more; --json prints all")


def _order(planned: SweepPlan) -> str:
    """Return the first points in the order of the plan."""
    labels = [
        str(point.scale or _values(point.values)) for point in planned.points if not point.excluded
    ]
    return first_few(labels, _SHOWN_POINTS)


def _values(values: Mapping[str, Any]) -> str:
    texts = {
        name.rstrip("="): f"{value:.6g}" if isinstance(value, float) else value
        for name, value in values.items()
    }
    return " ".join(f"{name}={text}" for name, text in texts.items())


def print_status(planned: SweepPlan, progress: Progress, rows: Sequence[Row]) -> None:
    """Print a line about the sweep and a table of its combinations."""
    typer.echo(f"{planned.id}: {progress_line(progress)}")
    points = {point.number: point for point in planned.points}
    groups: dict[tuple[int, str], list[Row]] = {}
    for row in rows:
        point = points.get(row.point)
        label = (row.point, f"trial {row.point}")
        if point is not None:
            label = (point.scale or 0, _label(planned, point))
        groups.setdefault(label, []).append(row)
    shown = sorted(groups)[-_SHOWN_COMBINATIONS:]
    if len(shown) < len(groups):
        typer.echo(f"the last {len(shown)} of {len(groups)} combinations; --json prints all")
    header = ("POINTS", "DONE", "STATES", "MEDIAN TIME", "SAMPLES/S", "ACCURACY")
    print_table(header, [(label[1], *_group(groups[label])) for label in shown])


def _label(planned: SweepPlan, point: Point) -> str:
    scale = f"{planned.unit}={point.scale}" if point.scale else ""
    return " ".join(filter(None, [scale, _values(point.values)]))


def _group(rows: Sequence[Row]) -> tuple[str, ...]:
    """Return the cells of some rows: how many are done, their other states, their medians."""
    states = Counter(row.state for row in rows)
    done = states.pop("COMPLETED", 0)

    completed = [row for row in rows if row.state == "COMPLETED"]
    seconds = [row.total_seconds for row in completed if row.total_seconds is not None]
    rates = [row.samples_per_second for row in completed if row.samples_per_second is not None]
    accuracies = [row.accuracy for row in completed if row.accuracy is not None]
    return (
        f"{done}/{len({row.point for row in rows})}",
        ", ".join(f"{number} {state}" for state, number in states.items()) or "-",
        seconds_text(median(seconds)) if seconds else "-",
        f"{median(rates):.4g}" if rates else "-",
        f"{median(accuracies):.4f}" if accuracies else "-",
    )
