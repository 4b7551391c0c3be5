"""Compute the facts of a sweep's report from its plan and its rows; nothing is read or written.

Runs are grouped by setting: the scale and the values of the axes. Durations are medians with a
nonparametric 95 % interval, costs are sums, phases arithmetic means, which add up to the mean
total. A speedup is a ratio of medians with a bootstrap interval; speedups are never averaged.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from hpml_orchestrator import __version__
from hpml_orchestrator.records.texts import clock_text
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
_SCALES_OF_A_LAW = 3  # fewest that Amdahl's or Gustafson's law is fitted to
_SCALES_OF_USL = 5


def build(plan: SweepPlan, rows: Sequence[Row]) -> Report:
    """Return the report of a sweep, of an unfinished one too.

    Args:
        plan: of a search with the points of its batches in `points`, as far as they are known.
        rows: every start of every point; a planned point without a row counts as waiting.
    """
    points = {point.number: point for point in plan.points}
    waiting = [Row(number) for number in points.keys() - {row.point for row in rows}]
    ordered = sorted([*rows, *waiting], key=lambda row: (row.point, row.start))
    series: dict[str, int] = {}
    grouped: dict[tuple[int, int], list[tuple[Point, Row]]] = defaultdict(list)
    for row in ordered:  # a search may have rows of batches that the caller does not know
        point = points.get(row.point) or Point(row.point, 0, values={"trial": row.point})
        place = series.setdefault(repr(point.values), len(series))
        # a member of a population goes on from a checkpoint, so it repeats no other
        within = point.number if plan.mode == "pbt" else point.scale or 0
        grouped[place, within].append((point, row))
    groups = [grouped[key] for key in sorted(grouped)]
    attempts = [
        Attempt(_label(plan.unit, point), number, point.repeat, point.seed, row)
        for number, pairs in enumerate(groups)
        for point, row in pairs
    ]
    figure = _figure(plan, rows)
    settings = [_setting(plan, number, pairs, figure) for number, pairs in enumerate(groups)]
    mixed = claims.mixed_batches(plan.mode, settings)
    if plan.baseline is not None and not mixed:
        settings = [_compared(setting, settings, groups, plan) for setting in settings]
    report = Report(
        version=1,
        id=plan.id,
        name=plan.name,
        mode=plan.mode,
        unit=plan.unit,
        baseline=plan.baseline,
        figure=figure,
        mixed=mixed,
        states=Counter(row.state for row in ordered),
        settings=tuple(settings),
        attempts=tuple(sorted(attempts, key=lambda one: (one.row.point, one.row.start))),
        costs=_costs(ordered),
        failed=_costs([row for row in ordered if row.state not in {MEASURED, "PRUNED"}]),
        provenance=_provenance(plan, rows),
    )
    report = _ranked(report)
    report = replace(
        report,
        fits=tuple(_fits(report)),
        notices=tuple(claims.notices(plan, report)),
        question=claims.question(report),
        answer=tuple(claims.answer(report)),
    )
    return replace(report, checks=claims.checklist(report))


def _label(unit: str, point: Point) -> str:
    values = wording.values_text(point.values)
    if point.scale is None:
        return values or "as the base job"
    return wording.scale_text(point.scale, unit) + (f", {values}" if values else "")


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
    return Setting(
        number=number,
        label=_label(plan.unit, point),
        series=wording.values_text(point.values) if point.scale is not None else "",
        scale=point.scale,
        values=point.values,
        planned=len({point.number for point, _ in pairs}),
        runs=len(runs),
        seconds=_estimate(row.total_seconds for row in runs),
        seconds_without_staging=_estimate(
            (row.total_seconds or 0) - row.phases.get("staging", 0) for row in runs
        ),
        samples_per_second=_estimate(row.samples_per_second for row in runs),
        accuracy=_estimate(row.accuracy for row in runs),
        figure=_estimate(figures),
        figures=figures,
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
        costs=_costs(rows),
        oversubscribed=sum(row.oversubscribed for row in runs),
        unverified=sum(row.verified is not True for row in runs),
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
    ended = [
        row.seconds_to_accuracy
        or row.training_seconds
        or row.total_seconds
        or max(1.0, (row.ended or 0.0) - (row.started or 0.0))
        for row in tried
    ]
    time = statistics.time_to_accuracy(
        ended, [row.seconds_to_accuracy is not None for row in tried]
    )
    low, high = (time.interval.low, time.interval.high) if time.interval else (None, None)
    return Target(
        accuracy=accuracy,
        every_epochs=next((row.evaluation_every for row in tried if row.evaluation_every), None),
        runs=time.n,
        reached=time.reached,
        seconds=time.median_seconds,
        low=low,
        high=None if high == math.inf else high,
    )


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
    setting: Setting,
    settings: Sequence[Setting],
    groups: Sequence[Sequence[tuple[Point, Row]]],
    plan: SweepPlan,
) -> Setting:
    """Return the setting with its speedup over the baseline of its series, and what was lost."""
    for baseline in settings:
        if (baseline.series, baseline.scale) == (setting.series, plan.baseline):
            break
    else:
        return setting
    if not (baseline.figures and setting.figures and setting.scale and plan.baseline):
        return setting
    if setting is baseline:
        return replace(
            setting,
            speedup=Speedup(1, None, 1, None, 1, setting.runs, setting.runs),
            efficiency=Estimate(100, setting.runs, None),
        )
    scale, growth = setting.scale / plan.baseline, 1.0
    if plan.mode == "strong":
        speedup = statistics.speedup(baseline.figures, setting.figures, scale=scale)
    else:
        speedup = statistics.speedup(setting.figures, baseline.figures, scale=scale)
        before, after = (
            _mean(_work(row) for row in _measured(row for _, row in groups[one.number]))
            for one in (baseline, setting)
        )
        growth = after / before if before and after else math.nan
    lost = {
        name: setting.phases.get(name, 0.0) - baseline.phases.get(name, 0.0) * growth / scale
        for name in PARTS
        if name in {**setting.phases, **baseline.phases} and math.isfinite(growth)
    }
    share = speedup.efficiency_interval
    return replace(
        setting,
        speedup=speedup,
        efficiency=Estimate(100 * speedup.efficiency, speedup.n, share and share.scaled(100)),
        serial_fraction=_serial_fraction(speedup) if scale > 1 else None,
        lost=lost,
    )


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
    if not report.ranked:
        return report
    top = report.ranked[0]
    settings = {
        one.number: replace(one, distinguishable=_differ(top, one)) for one in report.ranked
    }
    best = top.number
    if report.scaling:  # the cheapest of those that may be the fastest
        equal = [one for one in settings.values() if one.distinguishable is False]
        best = min(equal, key=lambda one: (one.scale or 0, one.number)).number if equal else best
    ordered = tuple(settings.get(one.number, one) for one in report.settings)
    return replace(report, settings=ordered, best=best)


def _differ(best: Setting, other: Setting) -> bool | None:
    """Return whether the medians of two settings differ; None with fewer than 6 runs of one."""
    ends = [one.figure.interval if one.figure else None for one in (best, other)]
    if ends[0] is None or ends[1] is None:
        return None
    if min(*best.figures, *other.figures) > 0:
        return statistics.distinguishable(best.figures, other.figures)
    return not ends[0].overlaps(ends[1])


def _fits(report: Report) -> Iterable[FittedModel]:
    """Fit the laws of scaling to each series with speedups at three scales or more, USL at five."""
    strong = report.mode == "strong"
    for series, settings in report.series.items():
        compared = [
            (one.scale, one.figures)
            for one in settings
            if one.speedup and one.scale and not one.oversubscribed
        ]
        if len(compared) < _SCALES_OF_A_LAW or not report.baseline:
            continue
        scales = [scale for scale, _ in compared]
        unit = min(scales)
        units = [scale / unit for scale, figures in compared for _ in figures]
        values = [value for _, figures in compared for value in figures]
        law = models.fit_amdahl if strong else models.fit_gustafson
        found = [("Amdahl" if strong else "Gustafson", law(units, values))]
        notes = [
            f"P counts in units of {wording.scale_text(unit, report.unit)}" if unit > 1 else ""
        ]
        if len(compared) >= _SCALES_OF_USL:
            rates = [1 / value for value in values] if strong else values
            usl = models.fit_usl(units, rates)
            found.append(("Universal Scalability Law", usl))
            peak = unit * models.usl_peak(usl.parameters["a"].value, usl.parameters["b"].value)
            limit = 2 * max(scales)
            notes.append(
                f"highest throughput at about {peak:.0f} {report.unit}"
                if peak <= limit
                else f"no peak up to {limit} {report.unit}, twice the largest measured scale"
            )
        for (name, fit), note in zip(found, notes, strict=True):
            base = fit.predict(report.baseline / unit)
            power = -1 if name == "Amdahl" else 1  # Amdahl's law gives seconds, the others rates
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


def _costs(rows: Sequence[Row]) -> Costs:
    energies = [row.energy_kwh for row in rows if row.energy_kwh is not None]
    return Costs(
        attempts=sum(row.started is not None or row.total_seconds is not None for row in rows),
        gpu_hours=math.fsum(row.gpu_hours for row in rows),
        core_hours=math.fsum(row.core_hours for row in rows),
        node_hours=math.fsum(row.node_hours for row in rows),
        energy_kwh=math.fsum(energies) if energies else None,
        energy_attempts=len(energies),
    )


def _provenance(plan: SweepPlan, rows: Sequence[Row]) -> dict[str, Any]:
    """Return where the figures come from; a list has one entry per value that occurred."""
    moments = [moment for row in rows for moment in (row.started, row.ended) if moment]
    sweep = plan.sweep
    facts: dict[str, Any] = {
        "sweep": plan.id,
        "command": shlex.join(plan.argv),
        "base job": sweep.get("base", ""),
        "planned": clock_text(plan.created),
        "first start": clock_text(min(moments)) if moments else "",
        "last end": clock_text(max(moments)) if moments else "",
        "scheduler": f"{plan.backend} on {plan.host}" if plan.host else plan.backend,
        "site profile": plan.site,
        "order of the runs": sweep.get("order", ""),
        "hpml": __version__,
        "notes": list(plan.notes),
        "sweep file": {name: value for name, value in sweep.items() if value not in (None, {}, [])},
    }
    for name in ("code", "environment", "hardware", "device", "nodes", "binding"):
        facts[name] = sorted({text for row in rows if (text := getattr(row, name))})
    return facts
