"""Compute the facts of a sweep's report from its plan and its rows; nothing is read or written.

Runs are grouped by setting: the scale and the values of the axes. Durations are medians with a
nonparametric 95 % interval, costs are sums, phases arithmetic means, which add up to the mean
total. A speedup is a ratio of medians with a bootstrap interval; speedups are never averaged.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from hpml_orchestrator import __version__
from hpml_orchestrator.records.texts import clock_text
from hpml_orchestrator.spec.sweep import SEARCHES
from hpml_orchestrator.sweeps import claims, models, statistics, wording
from hpml_orchestrator.sweeps.facts import (
    MEASURED,
    PARTS,
    Attempt,
    Costs,
    Figure,
    FittedModel,
    Report,
    Setting,
    Target,
)
from hpml_orchestrator.sweeps.plan import Point, SweepPlan
from hpml_orchestrator.sweeps.rows import Row
from hpml_orchestrator.sweeps.statistics import Estimate, Speedup

__all__ = ["build"]

_ROUNDING_SECONDS = 1e-3  # phases that are shorter come from sums of floats


def build(plan: SweepPlan, rows: Sequence[Row]) -> Report:
    """Return the report of a sweep, of an unfinished one too.

    Args:
        plan: of a search with the points of its batches in `points`, as far as they are known.
        rows: every start of every point; a planned point without a row counts as waiting.
    """
    points = {point.number: point for point in plan.points}
    started = {row.point for row in rows}
    waiting = [Row(number) for number in points if number not in started]
    ordered = sorted([*rows, *waiting], key=lambda row: (row.point, row.start))
    for row in ordered:  # of a search whose batches the caller does not know
        points.setdefault(row.point, Point(row.point, 0, values={"trial": row.point}))
    numbers = _setting_numbers(plan.mode, [points[row.point] for row in ordered])
    attempts = []
    grouped: dict[int, list[tuple[Point, Row]]] = defaultdict(list)
    for row in ordered:
        point, number = points[row.point], numbers[row.point]
        grouped[number].append((point, row))
        label = _label(plan.unit, point)
        attempts.append(Attempt(label, number, point.repeat, point.seed, row))
    figure = _figure(plan, rows)
    settings = [_setting(plan, number, grouped[number], figure) for number in sorted(grouped)]
    runs = {number: _measured(row for _, row in pairs) for number, pairs in grouped.items()}
    mixed = claims.mixed_batches(plan.mode, settings)
    if plan.baseline is not None and not mixed:
        settings = [_compared(setting, settings, runs, plan) for setting in settings]
    report = Report(
        version=1,
        id=plan.id,
        name=plan.name,
        mode=plan.mode,
        unit=plan.unit,
        baseline=plan.baseline,
        search=plan.mode in SEARCHES,
        figure=figure,
        mixed=mixed,
        states=Counter(row.state for row in ordered),
        settings=tuple(settings),
        costs=_costs(ordered),
        attempts=tuple(attempts),
        log_axes=_log_axes(plan),
        provenance=_provenance(plan, rows),
    )
    report = _ranked(report)
    report = replace(report, fits=tuple(_fits(report)), trace=_trace(report))
    report = replace(report, notices=tuple(claims.notices(plan, report)))
    report = replace(report, question=claims.question(report), answer=claims.answer(report))
    return replace(report, checks=claims.checklist(report))


def _label(unit: str, point: Point) -> str:
    values = wording.values_text(point.values)
    if point.scale is None:
        return values or "as the base job"
    return wording.scale_text(point.scale, unit) + (f", {values}" if values else "")


def _setting_numbers(mode: str, points: Iterable[Point]) -> dict[int, int]:
    """Return each point's setting: series in the plan's order, scales ascending.

    Points of equal scale and values are repeats of one setting; not so of `pbt`, where a member
    goes on from a checkpoint.
    """
    keys: dict[int, tuple[Any, ...]] = {}
    for point in points:
        values = tuple((name, repr(value)) for name, value in point.values.items())
        keys[point.number] = (values, point.number if mode == "pbt" else point.scale or 0)
    series: dict[Any, int] = {}
    for values, _ in keys.values():
        series.setdefault(values, len(series))
    ordered = sorted(set(keys.values()), key=lambda key: (series[key[0]], key[1]))
    places = {key: place for place, key in enumerate(ordered)}
    return {number: places[key] for number, key in keys.items()}


def _measured(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.state == MEASURED and row.total_seconds]


def _figure(plan: SweepPlan, rows: Sequence[Row]) -> Figure:
    """Return what ranks settings: of a scaling sweep the time or the rate, else the metric."""
    search = plan.sweep.get("search") or {}
    if plan.mode == "weak":
        if all(_work(row) for row in _measured(rows)):
            name = "samples per second of the total time"
            return Figure("rate", name, "samples/s", maximize=True)
        return Figure("samples_per_second", "steady samples per second", "samples/s", maximize=True)
    if plan.mode != "strong" and any(row.metric is not None for row in rows):
        maximize = search.get("direction", "maximize") == "maximize"
        return Figure("metric", search.get("metric", "metric"), "", maximize=maximize)
    if plan.mode != "strong" and any(row.accuracy is not None for row in rows):
        return Figure("accuracy", "test accuracy", "", maximize=True)
    return Figure("total_seconds", "total time", "s", maximize=False)


def _setting(
    plan: SweepPlan, number: int, pairs: Sequence[tuple[Point, Row]], figure: Figure
) -> Setting:
    point, rows = pairs[0][0], [row for _, row in pairs]
    runs = _measured(rows)
    figures = tuple(_figures(runs, figure))
    energies = [row.energy_kwh for row in rows if row.energy_kwh is not None]
    return Setting(
        number=number,
        label=_label(plan.unit, point),
        series=wording.values_text(point.values) if point.scale is not None else "",
        scale=point.scale,
        values=point.values,
        planned=len({point.number for point, _ in pairs}),
        states=Counter(row.state for row in rows),
        seconds=_estimate(row.total_seconds for row in runs),
        seconds_without_staging=_estimate(
            (row.total_seconds or 0) - row.phases.get("staging", 0) for row in runs
        ),
        samples_per_second=_estimate(row.samples_per_second for row in runs),
        accuracy=_estimate(row.accuracy for row in runs),
        figure=_estimate(figures),
        target=_target(plan, rows),
        batch_global=_distinct(row.batch_global or point.batch_global for point, row in pairs),
        batch_per_rank=_distinct(
            row.batch_per_rank or point.batch_per_rank for point, row in pairs
        ),
        learning_rate=_distinct(row.learning_rate or point.learning_rate for point, row in pairs),
        steps=_distinct(row.steps for row in runs),
        epochs=_distinct(row.epochs for row in runs),
        phases=_mean_phases(runs),
        queue_seconds=_mean(row.phases.get("queue") for row in runs),
        data_wait_ratio=_mean(row.data_wait_ratio for row in runs),
        gpu_active=_mean(row.gpu_active for row in runs),
        gpu_hours=math.fsum(row.gpu_hours for row in rows),
        core_hours=math.fsum(row.core_hours for row in rows),
        energy_kwh=math.fsum(energies) if energies else None,
        oversubscribed=sum(row.oversubscribed for row in runs),
        unverified=sum(row.verified is not True for row in runs),
        runs=len(runs),
        figures=figures,
    )


def _figures(runs: Sequence[Row], figure: Figure) -> list[float]:
    """Return what settings are ranked by, for each run that has it."""
    if figure.source == "rate":
        return [(_work(row) or 0) / (row.total_seconds or 1) for row in runs]
    values = [getattr(row, figure.source) for row in runs]
    return [value for value in values if value is not None]


def _estimate(values: Iterable[float | None]) -> Estimate | None:
    known = [value for value in values if value is not None]
    if len(known) == 1:
        return Estimate(known[0], 1, None)
    return statistics.median_estimate(known) if known else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _distinct(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(sorted({value for value in values if value is not None}))


def _work(row: Row) -> float | None:
    """Return how many samples a run trained with; None where it did not report batch and steps."""
    if row.steps and row.batch_global:
        return row.steps * row.batch_global
    images = row.result.get("train_images")
    return images * row.epochs if images and row.epochs else None


def _target(plan: SweepPlan, rows: Sequence[Row]) -> Target | None:
    """Return the time to accuracy of the runs that had the chance: complete ones and timeouts."""
    tried = [row for row in rows if row.state in {MEASURED, "TIMEOUT"}]
    targets = [row.target_accuracy for row in tried if row.target_accuracy is not None]
    accuracy = plan.sweep.get("target_accuracy") or (targets[0] if targets else None)
    if accuracy is None or not tried:
        return None
    every = next((row.evaluation_every for row in tried if row.evaluation_every), None)
    reached = [row.seconds_to_accuracy is not None for row in tried]
    ended = [row.seconds_to_accuracy or row.training_seconds or _elapsed(row) for row in tried]
    time = statistics.time_to_accuracy(ended, reached)
    low, high = (time.interval.low, time.interval.high) if time.interval else (None, None)
    return Target(
        accuracy=accuracy,
        every_epochs=every,
        runs=time.n,
        reached=time.reached,
        seconds=time.median_seconds,
        low=low,
        high=None if high == math.inf else high,
    )


def _elapsed(row: Row) -> float:
    return row.total_seconds or max(1.0, (row.ended or 0.0) - (row.started or 0.0))


def _parts(row: Row) -> dict[str, float]:
    """Return the seconds of a run by `PARTS`; they add up to its total."""
    phases = row.phases
    inner = {name: phases.get(name, 0.0) for name in ("evaluation", "checkpoint")}
    training = max(0.0, phases.get("training", 0.0) - sum(inner.values()))
    waited = training * (row.data_wait_ratio or 0.0)
    parts = {name: phases.get(name, 0.0) for name in ("staging", "start-up", "warm-up", "end")}
    parts["rendezvous"] = phases.get("launch", 0.0) + phases.get("rendezvous", 0.0)
    parts |= {**inner, "steps": training - waited, "data wait": waited}
    parts["not divided"] = (row.total_seconds or 0.0) - sum(parts.values())
    return {name: seconds for name, seconds in parts.items() if seconds > _ROUNDING_SECONDS}


def _mean_phases(runs: Sequence[Row]) -> dict[str, float]:
    divided = [_parts(row) for row in runs]
    names = [name for name in PARTS if any(name in parts for parts in divided)]
    return {name: fmean(parts.get(name, 0.0) for parts in divided) for name in names}


def _compared(
    setting: Setting, settings: Sequence[Setting], runs: Mapping[int, list[Row]], plan: SweepPlan
) -> Setting:
    """Return the setting with its speedup over the baseline of its series, and what was lost."""
    baseline = next(
        (one for one in settings if (one.series, one.scale) == (setting.series, plan.baseline)),
        None,
    )
    if baseline is None or not (baseline.figures and setting.figures and setting.scale):
        return setting
    if setting.number == baseline.number:
        return replace(setting, speedup=Speedup(1, None, 1, None, 1, setting.runs, setting.runs))
    scale, growth = setting.scale / (plan.baseline or 1), 1.0
    if plan.mode == "strong":
        speedup = statistics.speedup(baseline.figures, setting.figures, scale=scale)
    else:
        speedup = statistics.speedup(setting.figures, baseline.figures, scale=scale)
        works = [_mean(_work(row) for row in runs[one.number]) for one in (baseline, setting)]
        growth = works[1] / works[0] if works[0] and works[1] else math.nan
    lost = {
        name: setting.phases.get(name, 0.0) - baseline.phases.get(name, 0.0) * growth / scale
        for name in PARTS
        if name in {**setting.phases, **baseline.phases} and math.isfinite(growth)
    }
    serial = _serial_fraction(speedup) if scale > 1 else None
    return replace(setting, speedup=speedup, serial_fraction=serial, lost=lost)


def _serial_fraction(speedup: Speedup) -> Estimate:
    """Return Karp and Flatt's serial fraction; it falls as the speedup grows."""
    ends = speedup.interval
    interval = ends and replace(
        ends,
        low=models.karp_flatt(ends.high, speedup.scale),
        high=models.karp_flatt(ends.low, speedup.scale),
    )
    return Estimate(models.karp_flatt(speedup.value, speedup.scale), speedup.n, interval)


def _ranked(report: Report) -> Report:
    """Return the report with its best setting, and which are not distinguishable from it."""
    ranked = report.ranked
    if not ranked:
        return report
    settings = [
        replace(setting, distinguishable=_distinguishable(ranked[0], setting))
        for setting in report.settings
    ]
    best = ranked[0].number
    if report.scaling:  # the cheapest of those that may be the fastest
        equal = [one for one in settings if one.distinguishable is False and one.scale]
        best = min(equal, key=lambda one: (one.scale, one.number)).number if equal else best
    timed = [setting for setting in settings if setting.seconds]
    fastest = min(timed, key=lambda one: one.seconds.value if one.seconds else 0).number
    return replace(report, settings=tuple(settings), best=best, fastest=fastest)


def _distinguishable(best: Setting, other: Setting) -> bool | None:
    """Return whether the medians of two settings differ; None with fewer than 6 runs of one."""
    intervals = [one.figure.interval if one.figure else None for one in (best, other)]
    if best.number == other.number:
        return False if intervals[0] else None
    if intervals[0] is None or intervals[1] is None:
        return None
    values = best.figures, other.figures
    if not intervals[0].overlaps(intervals[1]):
        return True
    positive = min(*values[0], *values[1]) > 0
    return statistics.distinguishable(*values) if positive else False


def _fits(report: Report) -> Iterable[FittedModel]:
    """Fit the laws of scaling to each series with speedups at three scales or more, USL at five."""
    laws: list[tuple[str, Callable[..., models.Fit], int]] = [
        ("Amdahl", models.fit_amdahl, 3)
        if report.mode == "strong"
        else ("Gustafson", models.fit_gustafson, 3),
        ("Universal Scalability Law", models.fit_usl, 5),
    ]
    for series, settings in report.series.items():
        compared = [one for one in settings if one.speedup and one.scale]
        for name, fit_law, at_least in laws:
            if len(compared) < at_least:
                continue
            scales = [one.scale or 1 for one in compared]
            unit = min(scales)
            inverted = report.mode == "strong" and fit_law is models.fit_usl
            runs = [(one.scale or 1, value) for one in compared for value in one.figures]
            fit = fit_law(
                [scale / unit for scale, _ in runs],
                [1 / value if inverted else value for _, value in runs],
            )
            power = -1 if fit_law is models.fit_amdahl else 1
            base = fit.predict((report.baseline or unit) / unit)
            note = (
                f"P counts in units of {wording.scale_text(unit, report.unit)}" if unit > 1 else ""
            )
            if fit_law is models.fit_usl:
                peak = unit * models.usl_peak(fit.parameters["a"].value, fit.parameters["b"].value)
                limit = 2 * max(scales)
                note = (
                    f"highest throughput at about {peak:.0f} {report.unit}"
                    if peak <= limit
                    else f"no peak up to {limit} {report.unit}, twice the largest measured scale"
                )
            yield FittedModel(
                model=name,
                formula=fit.formula,
                series=series,
                parameters=fit.parameters,
                runs=fit.n,
                residual=fit.residual,
                scales=tuple(scales),
                speedups=tuple((fit.predict(scale / unit) / base) ** power for scale in scales),
                note=note,
            )


def _trace(report: Report) -> tuple[tuple[int, float], ...]:
    """Return the best figure so far, at each trial that improved it."""
    if not report.search:
        return ()
    better = max if report.figure.maximize else min
    trace: list[tuple[int, float]] = []
    for attempt in report.attempts:
        value = attempt.row.metric
        if value is None or attempt.row.state != MEASURED:
            continue
        if not trace or better(value, trace[-1][1]) != trace[-1][1]:
            trace.append((attempt.row.point, value))
    return tuple(trace)


def _costs(rows: Sequence[Row]) -> Costs:
    failed = [row for row in rows if row.state not in {MEASURED, "PRUNED"}]
    energies = [row.energy_kwh for row in rows if row.energy_kwh is not None]
    return Costs(
        attempts=sum(row.started is not None or row.total_seconds is not None for row in rows),
        gpu_hours=math.fsum(row.gpu_hours for row in rows),
        core_hours=math.fsum(row.core_hours for row in rows),
        node_hours=math.fsum(row.node_hours for row in rows),
        gpu_hours_failed=math.fsum(row.gpu_hours for row in failed),
        core_hours_failed=math.fsum(row.core_hours for row in failed),
        energy_kwh=math.fsum(energies) if energies else None,
        energy_attempts=len(energies),
    )


def _log_axes(plan: SweepPlan) -> tuple[str, ...]:
    """Return the axes that are searched in the logarithm."""
    axes = plan.sweep.get("axes") or {}
    return tuple(name for name, axis in axes.items() if isinstance(axis, dict) and axis.get("log"))


def _provenance(plan: SweepPlan, rows: Sequence[Row]) -> dict[str, Any]:
    """Return where the figures come from; a list has one entry per value that occurred."""
    moments = [moment for row in rows for moment in (row.started, row.ended) if moment]
    sweep = plan.sweep
    return {
        "sweep": plan.id,
        "base job": sweep.get("base", ""),
        "planned": clock_text(plan.created),
        "first start": clock_text(min(moments)) if moments else "",
        "last end": clock_text(max(moments)) if moments else "",
        "scheduler": f"{plan.backend} on {plan.host}" if plan.host else plan.backend,
        "site profile": list(plan.site),
        "order of the runs": sweep.get("order", ""),
        "code": _values(row.code for row in rows),
        "environment": _values(row.environment for row in rows),
        "hardware": _values(row.hardware for row in rows),
        "device": _values(row.device for row in rows),
        "nodes": _values(row.nodes for row in rows),
        "binding": _values(row.binding for row in rows),
        "hpml": __version__,
        "command": f"hpml sweep report {plan.id}",
        "notes": list(plan.notes),
        "sweep file": {name: value for name, value in sweep.items() if value not in (None, {}, [])},
    }


def _values(texts: Iterable[str]) -> list[str]:
    return sorted({text for text in texts if text})
