"""The choice of the best setting by a figure: which runs count, and how much too good it looks.

Sources: Hoefler & Belli, "Scientific benchmarking of parallel computing systems", SC15; Cawley &
Talbot, "On over-fitting in model selection and subsequent selection bias in performance
evaluation", 2010.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from statistics import fmean, median, variance

import numpy as np
from scipy import stats

from hpml_orchestrator.document.templates import number
from hpml_orchestrator.errors import counted
from hpml_orchestrator.records.texts import first_few
from hpml_orchestrator.runs.reporting.monitor import numbers
from hpml_orchestrator.sweeps import statistics
from hpml_orchestrator.sweeps.facts import (
    MEASURED,
    TIMED_OUT,
    RankedFigure,
    Setting,
    SweepFacts,
    Target,
)
from hpml_orchestrator.sweeps.plan import SweepPlan
from hpml_orchestrator.sweeps.rows import TEST_ACCURACIES, PointRow, is_time_to_target, objective
from hpml_orchestrator.sweeps.statistics import Estimate, median_estimate
from hpml_orchestrator.sweeps.wording import attempts_text, axis_text, costs_text, exact_text

# The Pareto front of a sweep by several figures: the settings that no other one dominates.

_MOST_ON_FRONT = 5


def objectives(runs: Sequence[PointRow], names: Iterable[str]) -> dict[str, Estimate]:
    """Return the medians of figures of a setting's complete runs; empty if a run lacks one."""
    found = {name: [objective(row, name) for row in runs] for name in names}
    known = {name: [one for one in values if one is not None] for name, values in found.items()}
    if not runs or any(len(values) < len(runs) for values in known.values()):
        return {}
    return {name: median_estimate(values) for name, values in known.items()}


def with_front(report: SweepFacts) -> SweepFacts:
    """Return the report with its front, ordered by the first figure, the best first."""
    places = {
        one.number: [
            one.objectives[name].value * (-1 if more else 1)
            for name, more in report.objectives.items()
        ]
        for one in report.settings
        if one.objectives
    }
    kept = [
        (place, number)
        for number, place in places.items()
        if not any(
            other != place and all(a <= b for a, b in zip(other, place, strict=True))
            for other in places.values()
        )
    ]
    return replace(report, front=tuple(number for _, number in sorted(kept, key=itemgetter(0))))


def question(report: SweepFacts) -> str:
    """Return what a sweep by several figures asks."""
    axes = dict.fromkeys(axis_text(name) for one in report.settings for name in one.values)
    job = report.name.removesuffix(f"-{report.mode}")
    wanted = " and the ".join(_wanted(report.objectives))
    values = f"values of {' and '.join(axes)}" if axes else "values"
    return f"Which {values} are the best compromises of {job} between the {wanted}?"


def _wanted(figures: Mapping[str, bool]) -> list[str]:
    return [f"{'highest' if more else 'lowest'} {name}" for name, more in figures.items()]


def answer(report: SweepFacts) -> Iterable[str]:
    """Return the front in sentences, and what it does not show."""
    measured = [one for one in report.settings if one.objectives]
    noun = "trial" if report.search else "combination"
    names = " and ".join(_wanted(report.objectives))
    if not measured:
        names = ", ".join(report.objectives)
        yield f"No complete run reports all of {names}: no answer is possible."
        return
    front = [report.settings[number] for number in report.front]
    yield (
        f"Of {counted(len(measured), noun)}, {len(front)} "
        f"{'is' if len(front) == 1 else 'are'} not dominated (by {names}): for each of the others "
        "one of these is at least as good in every figure, and better in one."
    )
    yield f"They are: {first_few([_words(one) for one in front], _MOST_ON_FRONT)}."
    if min(one.runs for one in front) == 1:
        yield (
            "A point of the front is one run: neighbours that differ by less than runs of one "
            "setting scatter may change places, and times of runs side by side scatter most. "
            f"`hpml sweep repeat {report.id}` runs the front again, with new seeds."
        )
    yield f"{costs_text(report.costs)} went into {attempts_text(report.states)}."


def _words(setting: Setting) -> str:
    figures = [f"{name} {exact_text(value)}" for name, value in setting.objectives.items()]
    return f"{setting.label} ({', '.join(figures)})"


# Times to a target accuracy, recorded by the runs or computed from their evaluations.

_LEAST_SECONDS = 1e-3  # times are above zero


def missed(row: PointRow, figure: str) -> bool:
    """Return whether a figure is the time to a target that a run did not reach."""
    # A program reports the figure as null, or at least its target.
    tried = figure in row.result or row.target_accuracy is not None
    over = row.state in TIMED_OUT or (row.state == MEASURED and tried)
    return is_time_to_target(figure) and row.metric is None and over


def seconds_to_target(rows: Iterable[PointRow], figure: str) -> tuple[Estimate | None, list[bool]]:
    """Return the median of a figure that is the time to a target, and which runs reached it.

    Runs that missed it are censored. There is no median if a complete run does not report it.
    """
    tried = [row for row in rows if row.state == MEASURED or missed(row, figure)]
    reached = [row.metric is not None for row in tried]
    if not tried or not all(row.metric is not None or missed(row, figure) for row in tried):
        return None, reached
    times = [max(_LEAST_SECONDS, row.metric or until_end(row)) for row in tried]
    return statistics.time_to_accuracy(times, reached), reached


def aim_of(plan: SweepPlan, rows: Sequence[PointRow]) -> float | None:
    """Return the accuracy that reported times refer to; None if the runs have no such times.

    That is the sweep file's, else the one for which the program measured its times.
    """
    wanted = plan.spec.target_accuracy
    told = {row.target_accuracy for row in rows if row.target_accuracy is not None}
    if wanted is not None and (wanted in told or any(row.evaluations for row in rows)):
        return wanted
    return told.pop() if len(told) == 1 else None


def target_of(plan: SweepPlan, rows: Sequence[PointRow], aim: float | None) -> Target | None:
    """Return the time to accuracy of all runs that could reach it: complete ones and timeouts."""
    tried = [row for row in rows if _has_tried(row)]
    if aim is None:
        return None
    known = [row for row in tried if _is_timed(row, aim)]
    if not known:
        return None
    ended, reached = zip(*times_to(rows, aim), strict=True)
    first = min((row.queued or row.started or plan.created for row in rows), default=plan.created)
    return Target(
        accuracy=aim,
        beforehand=plan.spec.target_accuracy == aim and plan.created <= first,
        every_epochs=next((row.evaluation_every for row in known if row.evaluation_every), None),
        reached=sum(reached),
        unknown=len(tried) - len(known),
        seconds=statistics.time_to_accuracy(ended, reached),
    )


def until_end(row: PointRow) -> float:
    """Return how long a run trained, or took: a lower bound of a time that it did not reach."""
    took = max(1.0, (row.ended or 0.0) - (row.started or 0.0))
    return row.training_seconds or row.total_seconds or took


def times_to(rows: Sequence[PointRow], aim: float) -> list[tuple[float, bool]]:
    """Return the seconds until each run reached an accuracy, or ended without, and whether it did.

    Only complete runs and timeouts of which this is known are included.
    """
    known = [row for row in rows if _has_tried(row) and _is_timed(row, aim)]
    times = [(row, _seconds_to(row, aim)) for row in known]
    return [(time or until_end(row), time is not None) for row, time in times]


def _has_tried(row: PointRow) -> bool:
    return row.state == MEASURED or row.state in TIMED_OUT


def _is_timed(row: PointRow, aim: float) -> bool:
    """Return whether it is known when a run reached an accuracy, or that it did not.

    A run that was killed at its time limit and reported nothing counts as not reaching it.
    """
    # Leaving such runs out would drop the slowest ones and make the median time too short.
    silent = row.state in TIMED_OUT and row.target_accuracy is None
    return row.target_accuracy == aim or bool(row.evaluations) or silent


def _seconds_to(row: PointRow, aim: float) -> float | None:
    if row.target_accuracy == aim:
        return row.seconds_to_accuracy
    times = (seconds for seconds, accuracy in row.evaluations if accuracy >= aim)
    return next((max(seconds, _LEAST_SECONDS) for seconds in times), None)


_MOST_NAMES = 3
_VALIDATION, _TEST = "validation_", ("test_", "eval_", "evaluation_")
_DRAWS = 10_000


def values(runs: Sequence[PointRow], figure: RankedFigure) -> list[float | None]:
    """Return the figure of each complete run.

    A run that missed its target counts as at least as slow as the slowest that reached it.
    """
    found = [getattr(row, figure.source) for row in runs]
    if figure.slowest is None:
        return found
    return [
        max(until_end(row), figure.slowest) if missed(row, figure.name) else value
        for row, value in zip(runs, found, strict=True)
    ]


def figure_of(
    figure: RankedFigure, rows: Sequence[PointRow], runs: int, known: Sequence[float]
) -> tuple[Estimate | None, str]:
    """Return the figure by which a setting is ranked, or why it is not ranked.

    Args:
        figure: what settings are ranked by.
        rows: all starts of the setting.
        runs: how many of its runs are complete.
        known: the figures of those that report it.
    """
    chosen = figure.source in ("metric", "accuracy")
    if chosen and is_time_to_target(figure.name):
        time, reached = seconds_to_target(rows, figure.name)
        if time is not None and math.isinf(time.value):
            return None, f"{sum(reached)} of {counted(len(reached), 'run')} reached the target"
        if time is not None:
            return time, ""
    if chosen and 0 < len(known) < runs:
        return None, f"{len(known)} of {counted(runs, 'complete run')} report {figure.name}"
    return (median_estimate(known) if known else None), ""


def caveats(report: SweepFacts, best: Setting) -> Iterable[str]:
    """Return sentences on the figure of the best setting, and on the settings without rank."""
    ranked, noun = len(report.ranked), "trials" if report.search else "combinations"
    if ranked > 1:
        text = (
            f"This is the best of {ranked} {noun}, chosen by this figure, so the figure is too "
            "good on average"
        )
        longest = report.figure.slowest or math.inf  # runs that missed their target took longer
        samples = [one.samples["figure"] for one in report.ranked]
        known = [variance(one) for one in samples if len(one) > 1 and max(one) <= longest]
        scatter = math.sqrt(fmean(known)) if known and best.runs > 1 else None
        if scatter:
            excess = scatter * expected_excess(ranked, best.runs)
            yield (
                f"{text}: by about {number(excess)} if all {noun} are equally good (runs of one "
                f"scatter by {number(scatter)}), by less if they differ."
            )
        elif scatter == 0:
            yield f"{text}. Its repeats are equal: without a random seed they show no chance."
        else:
            yield f"{text}. Repeat the best with new seeds to know its figure."
    name, tested = _tested(report)
    if tested:
        of = f" (median of {counted(len(tested), 'run')})" if len(tested) > 1 else ""
        what = "search" if report.search else "grid"
        text = f"On data that the {what} did not choose by, its {name} is"
        yield f"{text} {median(tested):.4g}{of}."
    if any(one.unranked for one in report.settings):
        yield unranked(report)


def unranked(report: SweepFacts) -> str:
    """Return the settings without rank, and why they have none, in a sentence."""
    reasons = [f"{one.label} ({one.unranked})" for one in report.settings if one.unranked]
    return f"Not ranked: {first_few(reasons, _MOST_NAMES)}."


def expected_excess(settings: int, runs: int) -> float:
    """Return by how many standard deviations of a run the best of equal settings is too good.

    It is the expected maximum of the medians of as many samples of normal values.

    >>> round(expected_excess(20, 6), 2), expected_excess(1, 1)
    (0.87, 0.0)
    """
    grid = np.arange(-9, 9, 0.005) + 0.0025
    below = stats.norm.cdf(grid) ** settings
    maximum = float(np.where(grid > 0, 1 - below, -below).sum()) * 0.005
    draws = np.random.default_rng(0).standard_normal((_DRAWS, runs))
    return round(maximum * float(np.median(draws, axis=1).std()), 3)


def unseen(report: SweepFacts) -> tuple[bool, str]:
    """Return whether a search has left data to test its choice on, and what it chose by."""
    name = report.figure.name
    measured = is_time_to_target(name) or name == "samples_per_second"
    if not report.search or report.best is None or measured:
        return True, ""
    tested, _ = _tested(report)
    if name.startswith(_VALIDATION) and tested:
        return True, f"The search chose by {name}; {tested} is of data that it has not seen."
    if name.startswith(_VALIDATION):
        return False, f"The search chose by {name}, and its choice reports no test figure."
    if name.startswith(_TEST):
        return False, (
            f"The search chose by {name}, so it has seen the test data: choose by a validation "
            "figure, or run the choice on other data."
        )
    return False, f"It is not known whether {name}, by which the search chose, is of test data."


def _tested(report: SweepFacts) -> tuple[str, list[float]]:
    """Return the test figure of a setting that was chosen by a validation figure, of each run."""
    if report.best is None or not report.figure.name.startswith(_VALIDATION):
        return "", []
    kind = report.figure.name.removeprefix(_VALIDATION)
    names = dict.fromkeys([f"test_{kind}", *(TEST_ACCURACIES if kind == "accuracy" else ())])
    rows = [one.row for one in report.attempts if one.setting == report.best]
    results = [numbers(row.result) for row in rows if row.state == MEASURED]
    for name in names:
        if found := [result[name] for result in results if name in result]:
            return name, found
    return "", []
