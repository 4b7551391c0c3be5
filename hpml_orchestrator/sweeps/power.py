"""The smallest difference that a sweep finds: the power of `statistics.distinguishable`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from scipy import stats

from hpml_orchestrator.sweeps.facts import SweepFacts
from hpml_orchestrator.sweeps.plan import SweepPlan
from hpml_orchestrator.sweeps.statistics import (
    CONFIDENCE,
    FEWEST_POOLED,
    MIN_REPEATS,
    UNEQUAL,
    scatter,
    speedup,
)

POWER = 0.8
ASSUMED_NOISE = 0.05
"""Relative scatter of a run where no earlier run shows it."""

_DRAWS = 1000
_LEAST_FREEDOM = 5  # degrees of freedom of a scatter that is worth naming
_WHOLE_PERCENT = 0.1  # from here on whole numbers, else two digits


def smallest_difference(
    runs: int, noise: float, settings: int, *, paired: bool = True
) -> float | None:
    """Return the smallest relative difference of two settings that is found with 80 % power.

    It is the one that the rule of `statistics.distinguishable` finds in 80 % of simulated sweeps,
    as the first of Holm's steps, whose level is the strictest: the t test of the logs must pass
    0.05 / K (K-1) * 2 of K settings, and the 95 % interval of the ratio must exclude 1.

    Args:
        runs: of each of the two.
        noise: relative scatter of a run, without what is common to the runs of a repeat.
        settings: how many there are in the sweep.
        paired: whether runs are compared within each repeat.

    Returns:
        Such as 0.12; None with fewer than 6 runs, of which no difference is found.
    """
    if runs < MIN_REPEATS:
        return None
    return math.expm1(noise * _needed(runs, settings, paired=paired))


@lru_cache
def _needed(runs: int, settings: int, *, paired: bool) -> float:
    """Return the difference of the logs, in units of the noise."""
    draw = np.random.default_rng(0)
    first, second = draw.standard_normal((2, _DRAWS, runs))
    # Tests and intervals move with the logs, so each pair of equal samples shows from which
    # difference on the rule would have found it: no search is needed.
    needed = np.array(
        [
            -math.log(ends.low)
            for one, other in zip(np.exp(first), np.exp(second), strict=True)
            if (ends := speedup(one, other, paired=paired).interval)
        ]
    )
    comparisons = settings * (settings - 1) // 2
    if comparisons > 1:  # with one comparison only the interval decides
        test = (
            stats.ttest_rel(first, second, axis=1)
            if paired
            else stats.ttest_ind(first, second, axis=1, equal_var=False)
        )
        level = (1 - CONFIDENCE) / comparisons
        least = -test.confidence_interval(1 - level).low
        if settings >= FEWEST_POOLED:
            freedom = (settings - 1) * (runs - 1) if paired else settings * (runs - 1)
            spread = np.sqrt(2 / runs * draw.chisquare(freedom, _DRAWS) / freedom)
            means = (second - first).mean(axis=1)
            common = means + stats.t.ppf(1 - level / 2, freedom) * spread
            # Where the variances are equal, that is how often they are pooled.
            least = np.where(draw.random(_DRAWS) < UNEQUAL, least, common)
        needed = np.maximum(needed, least)
    return float(np.quantile(needed, POWER))


def noise_of(report: SweepFacts) -> float | None:
    """Return the relative scatter of a run around its setting, measured; None if too few ran.

    What the runs of a repeat have in common does not count where the sweep compares within repeats.
    """
    settings = [one for one in report.ranked if one.runs > 1]
    repeats = set.intersection(*(set(one.blocks) for one in settings)) if settings else set()
    paired = len(settings) > 1 and len(repeats) > 1
    groups = [
        [one.blocks[repeat] for repeat in sorted(repeats)] if paired else figures
        for one in settings
        if (figures := one.samples["figure"])
    ]
    if not groups or min(map(min, groups)) <= 0:
        return None
    noise, freedom = scatter(groups, blocks=paired)
    return noise if freedom >= _LEAST_FREEDOM else None


def plan_line(plan: SweepPlan, earlier: tuple[float, str] | None) -> str:
    """Return what a planned sweep finds; empty for a search, and without anything to compare.

    `earlier` has the noise of an earlier sweep of the job and its id.
    """
    counts = Counter((one.scale, repr(one.values)) for one in plan.points if not one.excluded)
    if len(counts) < 2:  # noqa: PLR2004 - a comparison needs two
        return ""
    noise, whose = earlier or (ASSUMED_NOISE, "")
    from_where = f"noise as in {whose}" if whose else "noise assumed"
    runs, what = min(counts.values()), "scales" if plan.unit else "settings"
    found = smallest_difference(runs, noise, len(counts), paired=plan.in_blocks)
    if found is None:
        return f"no difference: {_runs(runs)}, and hpml gives intervals from {MIN_REPEATS} runs on"
    # What a grid is ranked by may be a time or an accuracy, whose scatter cannot be assumed.
    return _text(found, what, runs, noise, from_where) if plan.unit or earlier else ""


def sensitivity(report: SweepFacts) -> Iterable[str]:
    """Yield what the sweep could find, from the scatter of its own runs."""
    for found, runs, noise in found_by(report):
        what = "scales" if report.scaling else "settings"
        yield f"This sweep finds {_text(found, what, runs, noise, 'noise measured')}."


def found_by(report: SweepFacts) -> Iterable[tuple[float, int, float]]:
    """Yield the smallest difference, from how many runs each, and their noise; or nothing."""
    settings = [one for one in report.ranked if one.runs >= MIN_REPEATS]
    noise = noise_of(report)
    # A run that missed its target has no time, so its scatter is not that of the others.
    if len(settings) < 2 or not noise or report.figure.slowest:  # noqa: PLR2004
        return
    runs = min(one.runs for one in settings)
    paired = all(len(one.blocks) >= MIN_REPEATS for one in settings)
    found = smallest_difference(runs, noise, len(settings), paired=paired)
    if found is not None:
        yield found, runs, noise


def _text(difference: float, what: str, runs: int, noise: float, from_where: str) -> str:
    size = f"differences of {_percent(difference)}"
    if difference > 1:
        size = f"ratios of {1 + difference:.1f}"
    return (
        f"{size} or more between two {what}, with {_percent(POWER)} power "
        f"({_runs(runs)}, {_percent(noise)} {from_where})"
    )


def _runs(runs: int) -> str:
    return "1 run each" if runs == 1 else f"{runs} runs each"


def _percent(share: float) -> str:
    return f"{100 * share:{'.0f' if share >= _WHOLE_PERCENT else '.2g'}} %"
