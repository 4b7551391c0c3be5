"""The choice of the best setting by a figure: which runs count, and how much too good it looks.

Sources: Hoefler & Belli, "Scientific benchmarking of parallel computing systems", SC15; Cawley &
Talbot, "On over-fitting in model selection and subsequent selection bias in performance
evaluation", 2010.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean, median, variance

import numpy as np
from scipy import stats

from hpml_orchestrator.diagnosis.templates import number
from hpml_orchestrator.errors import counted
from hpml_orchestrator.records.texts import first_few
from hpml_orchestrator.runs.reporting.monitor import numbers
from hpml_orchestrator.sweeps.facts import MEASURED, RankedFigure, Setting, SweepFacts
from hpml_orchestrator.sweeps.rows import TEST_ACCURACIES, PointRow, is_time_to_target
from hpml_orchestrator.sweeps.statistics import Estimate, median_estimate
from hpml_orchestrator.sweeps.targets import missed, seconds_to_target, until_end

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
