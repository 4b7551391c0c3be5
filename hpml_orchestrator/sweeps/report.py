"""Compute the facts of a sweep's report from its plan and its rows; nothing is read or written.

Runs are grouped by setting: the scale and the values of the axes. Durations are medians with a
nonparametric 95 % interval, costs are sums, phases those of the median run, which add up to the
median total. A speedup is a ratio of medians with a bootstrap interval or, if the plan runs repeat
after repeat, the median of the ratios within each; speedups are never averaged.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean

from hpml_orchestrator.jobfile.sweep import SEARCHES
from hpml_orchestrator.records.texts import clock_text
from hpml_orchestrator.runs.reporting.monitor import numbers
from hpml_orchestrator.sweeps import (
    answers,
    doubts,
    notices,
    ranking,
    selection,
    statistics,
    wording,
)
from hpml_orchestrator.sweeps.communication import communication
from hpml_orchestrator.sweeps.facts import (
    CONTINUED,
    MEASURED,
    PARTS,
    TIMED_OUT,
    Costs,
    PointStart,
    Quality,
    RankedFigure,
    Setting,
    SweepFacts,
    is_complete,
)
from hpml_orchestrator.sweeps.pairs import trial_answer
from hpml_orchestrator.sweeps.plan import Point, SweepPlan
from hpml_orchestrator.sweeps.quality import qualities, with_divergence
from hpml_orchestrator.sweeps.ranking import fits_of
from hpml_orchestrator.sweeps.rows import DEFAULT_METRICS, PointRow, is_time_to_target, metric_name
from hpml_orchestrator.sweeps.selection import aim_of, target_of
from hpml_orchestrator.sweeps.statistics import Estimate
from hpml_orchestrator.sweeps.trial import is_stopped
from hpml_orchestrator.version import __version__

_HOURS = ("gpu_hours", "core_hours", "node_hours")
_ROUNDING_SECONDS = 1e-3  # phases that are shorter come from sums of floats


def build(plan: SweepPlan, rows: Sequence[PointRow]) -> SweepFacts:
    """Return the report of a sweep, finished or not.

    Args:
        plan: for a search, with the known points of its batches in `points`.
        rows: every start of every point; a planned point without a row counts as waiting.
    """
    rows = with_divergence(plan, [start for row in rows for start in _starts(row)])
    points = {point.number: point for point in plan.points}
    waiting = [PointRow(number) for number in points.keys() - {row.point for row in rows}]
    ordered = sorted([*rows, *waiting], key=lambda row: (row.point, row.start))
    series: dict[str, int] = {}
    groups: dict[tuple[int, int], list[tuple[Point, PointRow]]] = defaultdict(list)
    for row in ordered:  # a search may have rows of batches that the caller does not know
        point = points.get(row.point) or Point(row.point, 0, values={"trial": row.point})
        place = series.setdefault(repr(point.values), len(series))
        # a member of a population resumes a checkpoint, so it does not repeat another one
        within = point.number if plan.mode == "pbt" else point.scale or 0
        groups[place, within].append((point, row))
    told = [row for row in rows if row.accuracy is not None]
    # Runs that are not complete may have had no test yet.
    told = [row for row in told if is_complete(plan, row)] or told
    named = wording.accuracy_text({row.accuracy_name for row in told})
    figure, aim = _figure(plan, rows, named), aim_of(plan, rows)
    judged = qualities(
        plan,
        {key: [row for _, row in pairs if is_complete(plan, row)] for key, pairs in groups.items()},
    )
    settings: list[Setting] = []
    attempts: list[PointStart] = []
    for number, key in enumerate(sorted(groups)):
        settings.append(_setting(plan, number, groups[key], figure, aim, judged.get(key)))
        attempts += [
            PointStart(
                number, point.repeat, point.seed if "seed" in plan.placeholders else None, row
            )
            for point, row in groups[key]
        ]
    mixed = doubts.mixed_batches(plan.mode, settings)
    if plan.baseline is not None:
        # Doubts come first: a speedup is withheld if its baseline is in doubt. Each pass builds
        # new settings, so the baselines are looked up again.
        for find in (ranking.doubted, *([] if mixed else [ranking.compared])):
            bases = {one.series: one for one in settings if one.scale == plan.baseline}
            settings = [find(one, bases.get(one.series), plan) for one in settings]
    report = SweepFacts(
        version=1,
        id=plan.id,
        name=plan.name,
        mode=plan.mode,
        unit=plan.unit,
        baseline=plan.baseline,
        figure=figure,
        accuracy_name=named,
        mixed=mixed,
        states=Counter(row.state for row in ordered),
        settings=tuple(settings),
        attempts=tuple(sorted(attempts, key=lambda one: (one.row.point, one.row.start))),
        costs=_costs(ordered),
        failed=_costs([row for row in ordered if row.state not in {MEASURED, "PRUNED", CONTINUED}]),
        provenance=_provenance(plan, rows),
        communication=communication([row for row in ordered if is_complete(plan, row)]),
        objectives=plan.spec.search.objectives,
    )
    report = selection.with_front(report) if report.objectives else ranking.ranked(report)
    report = replace(
        report,
        fits=tuple(fits_of(report)),
        notices=tuple(
            notices.notices(
                plan,
                report,
                aim=aim,
                one_after_other=not plan.takes_turns and any(one.planned > 1 for one in settings),
            )
        ),
        question=answers.question(report),
        answer=tuple(trial_answer(plan, report) if plan.trial else answers.answer(report)),
    )
    return replace(report, checks=answers.checklist(report))


def _starts(row: PointRow) -> Iterable[PointRow]:
    """Yield a row for each start that was requeued within this one, then one for the last."""
    ended = row.ended or row.started or 0.0
    # The scheduler accounts for the job as a whole, so its hours are divided by the seconds of
    # each start.
    whole = math.fsum(start["seconds"] for start in row.requeued) + ended - (row.started or ended)
    left = 1.0
    for start in row.requeued:
        share = start["seconds"] / whole if whole > 0 else 0.0
        left -= share
        yield PointRow(
            row.point,
            row.start,
            run=row.run,
            job_id=row.job_id,
            state=CONTINUED if start.get("continued") else "REQUEUED",
            reason=start["reason"],
            over=True,
            started=start["started"],
            ended=start["ended"],
            nodes=start["nodes"],
            code=row.code,
            environment=row.environment,
            allocated=row.allocated,
            **{name: share * getattr(row, name) for name in _HOURS},
        )
    hours = {name: left * getattr(row, name) for name in _HOURS} if row.requeued else {}
    yield replace(row, **hours)


def _figure(plan: SweepPlan, rows: Sequence[PointRow], accuracy_name: str) -> RankedFigure:
    """Return the figure that ranks settings: time or rate in a scaling sweep, else the metric.

    A grid whose file names no metric, and whose runs reported none, is ranked by accuracy. It is
    never ranked by time: its runs share nodes, and disturb each other.
    """
    complete = [row for row in rows if is_complete(plan, row)]
    time = RankedFigure("total_seconds", "total time", "s", maximize=False)
    rate = RankedFigure("samples_per_second", "samples per second", "samples/s", maximize=True)
    if plan.mode == "strong":
        return time
    if plan.trial:
        return rate if any(is_stopped(row) for row in complete) else time
    if plan.mode == "weak":
        if all(_work(row) for row in complete):
            name = "samples per second of the total time"
            return RankedFigure("rate", name, "samples/s", maximize=True)
        return replace(rate, name="steady samples per second")
    search, metrics = plan.spec.search, _known(row.metric for row in complete)
    named = plan.mode in SEARCHES or search.metric_name not in ("", "test_accuracy")
    if complete and not named and not metrics and any(row.accuracy is not None for row in complete):
        return RankedFigure("accuracy", accuracy_name, "", maximize=True)
    name = metric_name(plan, complete) or " or ".join(DEFAULT_METRICS)
    if is_time_to_target(name):
        slowest = max(metrics, default=None)
        return RankedFigure("metric", name, "s", maximize=False, slowest=slowest)
    return RankedFigure("metric", name, "", maximize=search.maximize)


def _setting(
    plan: SweepPlan,
    number: int,
    pairs: Sequence[tuple[Point, PointRow]],
    figure: RankedFigure,
    aim: float | None,
    quality: Quality | None,
) -> Setting:
    point, rows = pairs[0][0], [row for _, row in pairs]
    complete = [(point, row) for point, row in pairs if is_complete(plan, row)]
    runs = [row for _, row in complete]
    last = {row.point: row.state for row in rows if row.state != "EXCLUDED"}
    # A point counts by its last start, but as complete if any of its starts was.
    missing = Counter({**last, **dict.fromkeys((row.point for row in runs), MEASURED)}.values())
    del missing[MEASURED]
    figures = _values(runs, figure)
    samples = {
        "total_seconds": _known(row.total_seconds for row in runs),
        "accuracy": _known(row.accuracy for row in runs),
        "figure": _known(figures),
    }
    diverged = Counter(row.diverged for row in runs if row.diverged)
    lost, is_third = doubts.lost(diverged, missing, len(last))
    timed_out = doubts.timed_out(sum(row.state in TIMED_OUT for row in rows), len(runs))
    estimate, unranked = selection.figure_of(figure, rows, len(runs), samples["figure"])
    values = wording.values_text(plan.values_of(point))
    scale = wording.scale_text(point.scale, plan.unit) if point.scale is not None else ""
    means = {
        "work": _mean(_work(row) for row in runs),
        "steps": _mean(row.steps for row in runs),
        "epochs": _mean(row.epochs for row in runs),
        "epochs_to_target": _mean(row.epochs_to_target for row in runs),
        "queue_seconds": _mean(row.phases.get("queue") for row in runs),
        "data_wait_ratio": _mean(row.data_wait_ratio for row in runs),
        "gpu_active": _mean(row.gpu_active for row in runs),
    }
    return Setting(
        number=number,
        label=", ".join(filter(None, (scale, values))) or "as the base job",
        series=values if scale else "",
        scale=point.scale,
        values=point.values,
        planned=len(last),
        runs=len(runs),
        missing=dict(missing),
        seconds=_estimate(samples["total_seconds"]),
        seconds_without_staging=_estimate(
            (row.total_seconds or 0) - row.phases.get("staging", 0) for row in runs
        ),
        samples_per_second=_estimate(row.samples_per_second for row in runs),
        accuracy=_estimate(samples["accuracy"]),
        quality=quality,
        diverged=diverged,
        figure=estimate,
        unranked=unranked,
        samples=samples,
        blocks={
            point.repeat: value
            for (point, _), value in zip(complete, figures, strict=True)
            if value is not None
        }
        if plan.in_blocks
        else {},
        target=target_of(plan, rows, aim),
        ran=_ran(complete or pairs),
        means={name: mean for name, mean in means.items() if mean is not None},
        phases=_median_phases(runs),
        costs=_costs(rows),
        oversubscribed=sum(row.oversubscribed for row in runs),
        unverified=sum(row.verified is not True for row in runs),
        objectives=selection.objectives(runs, plan.spec.search.objectives),
        doubt="; ".join(filter(None, (timed_out, lost if is_third else ""))),
    )


def _values(runs: Sequence[PointRow], figure: RankedFigure) -> list[float | None]:
    if figure.source == "rate":
        return [(_work(row) or 0) / (row.total_seconds or 1) for row in runs]
    return selection.values(runs, figure)


def _known(values: Iterable[float | None]) -> tuple[float, ...]:
    return tuple(value for value in values if value is not None)


def _estimate(values: Iterable[float | None]) -> Estimate | None:
    known = _known(values)
    return statistics.median_estimate(known) if known else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = _known(values)
    return fmean(known) if known else None


def _work(row: PointRow) -> float | None:
    """Return how many samples a run trained with; None if it did not report batch and steps."""
    if row.steps and row.batch_global:
        return row.steps * row.batch_global
    images = numbers(row.result).get("train_images")
    return images * row.epochs if images and row.epochs else None


def _ran(pairs: Sequence[tuple[Point, PointRow]]) -> dict[str, tuple[float, ...]]:
    """Return the batch sizes, learning rates and lengths of runs: as reported, else as planned."""
    names = ("batch_global", "batch_per_rank", "learning_rate", "steps", "epochs")
    found: dict[str, set[float]] = {name: set() for name in names}
    for point, row in pairs:
        for name in names:
            found[name] |= {*_known([getattr(row, name) or getattr(point, name, None)])}
    return {name: tuple(sorted(values)) for name, values in found.items()}


def _median_phases(runs: Sequence[PointRow]) -> dict[str, float]:
    """Return the seconds of the median run by `PARTS`; the mean of both runs in the middle."""
    ordered = sorted(runs, key=lambda row: row.total_seconds or 0.0)
    middle = [_parts(row) for row in ordered[(len(ordered) - 1) // 2 : len(ordered) // 2 + 1]]
    names = [name for name in PARTS if any(name in parts for parts in middle)]
    return {name: fmean(parts.get(name, 0.0) for parts in middle) for name in names}


def _parts(row: PointRow) -> dict[str, float]:
    """Return the seconds of a run by `PARTS`; they add up to its total."""
    phases = row.phases
    inner = {name: phases.get(name, 0.0) for name in ("evaluation", "checkpoint")}
    # Evaluation and checkpoint lie within the training, and the ratio of data wait refers to the
    # steps. Each second must be counted once, or the parts would exceed the total.
    training = max(0.0, phases.get("training", 0.0) - sum(inner.values()))
    waited = training * (row.data_wait_ratio or 0.0)
    alone = ("staging", "start-up", "preparation", "warm-up", "end")
    parts = {name: phases.get(name, 0.0) for name in alone}
    parts["rendezvous"] = phases.get("launch", 0.0) + phases.get("rendezvous", 0.0)
    parts |= {**inner, "steps": training - waited, "data wait": waited}
    parts["not divided"] = (row.total_seconds or 0.0) - sum(parts.values())
    return {name: seconds for name, seconds in parts.items() if seconds > _ROUNDING_SECONDS}


def _costs(rows: Sequence[PointRow]) -> Costs:
    energies = [row.energy_kwh for row in rows if row.energy_kwh is not None]
    return Costs(
        gpu_hours=math.fsum(row.gpu_hours for row in rows),
        core_hours=math.fsum(row.core_hours for row in rows),
        node_hours=math.fsum(row.node_hours for row in rows),
        energy_kwh=math.fsum(energies) if energies else None,
        energy_attempts=len(energies),
        requested=sum(row.allocated is None and row.node_hours > 0 for row in rows),
    )


def _provenance(plan: SweepPlan, rows: Sequence[PointRow]) -> dict[str, object]:
    """Return where the figures come from; a list has one entry per value that occurred."""
    moments = [moment for row in rows for moment in (row.started, row.ended) if moment]
    sweep = plan.spec
    facts: dict[str, object] = {
        "sweep": plan.id,
        "command": shlex.join(plan.argv),
        "base job": sweep.base,
        "planned": clock_text(plan.created),
        "first start": clock_text(min(moments)) if moments else "",
        "last end": clock_text(max(moments)) if moments else "",
        "scheduler": f"{plan.backend} on {plan.host}" if plan.host else plan.backend,
        "site profile": plan.site,
        "order of the runs": sweep.order,
        "hpml": __version__,
        "notes": list(plan.notes),
        "sweep file": {
            name: value for name, value in plan.sweep.items() if value not in (None, {}, [])
        },
    }
    for name in ("code", "environment", "hardware", "device", "nodes", "binding"):
        facts[name] = sorted({text for row in rows if (text := getattr(row, name))})
    return facts
