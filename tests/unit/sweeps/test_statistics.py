"""Medians, speedups and times to accuracy, against published numbers and by simulation.

HPML_LONG=1 runs more simulations.
"""

from __future__ import annotations

import math
import os
import statistics as standard
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.random import Generator
from scipy import stats

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.sweeps.statistics import (
    Array,
    Estimate,
    Interval,
    distinguishable,
    median_estimate,
    speedup,
    time_to_accuracy,
)

SIMULATIONS = 10_000 if os.environ.get("HPML_LONG") == "1" else 400
# two standard errors of a share near 97 % over that many simulations
MARGIN = 2 * math.sqrt(0.97 * 0.03 / SIMULATIONS)
SECONDS = [10.2, 9.9, 10.0, 11.7, 10.1, 10.4]
HALF_SECONDS = [5.0, 5.3, 5.1, 5.2, 6.9, 5.05]

# seconds of n runs, and their true median
Times = tuple[Callable[[Generator, int], Array], float]
QUIET: Times = (lambda rng, n: rng.lognormal(0, 0.1, n), 1)
NOISY: Times = (lambda rng, n: rng.lognormal(0, 0.5, n), 1)
WILD: Times = (lambda rng, n: rng.lognormal(0, 1, n), 1)
SHIFTED: Times = (lambda rng, n: 1 + rng.exponential(0.3, n), 1 + 0.3 * math.log(2))
STRAGGLERS: Times = (  # one run in ten takes half as long again
    lambda rng, n: rng.lognormal(0, 0.03, n) * np.where(rng.random(n) < 0.1, 1.5, 1),
    # half of the runs are below m where 0.9 Phi(ln(m) / 0.03) = 1/2: no straggler is
    math.exp(0.03 * standard.NormalDist().inv_cdf(5 / 9)),
)
TIMES = {"noisy": NOISY, "wild": WILD, "shifted": SHIFTED, "stragglers": STRAGGLERS}
Simulated = tuple[Callable[[Generator], Interval | None], float]  # of a sweep, and the truth


def value_and_ends(estimate: Estimate) -> tuple[float, float, float]:
    """The value and its interval, which has to be there."""
    assert estimate.interval
    return estimate.value, estimate.interval.low, estimate.interval.high


@pytest.mark.parametrize(
    ("values", "median", "low", "high"),
    [
        ([3, 1, 2, 6, 5, 4], 3.5, 1, 6),
        (range(1, 10), 5, 2, 8),
        (range(1, 18), 9, 5, 13),
        ([-7.0] * 6, -7, -7, -7),
    ],
    ids=["6", "9", "17", "equal"],
)
def test_a_median_has_order_statistics_for_its_interval(
    values: Sequence[float], median: float, low: float, high: float
) -> None:
    """They are those of scipy's exact test of a quantile."""
    assert value_and_ends(median_estimate(values)) == (median, low, high)
    exact = stats.quantile_test(list(values), q=0, p=0.5).confidence_interval(0.95)
    assert (exact.low, exact.high) == (low, high)


@pytest.mark.parametrize("n", range(1, 6))
def test_fewer_than_six_repeats_have_no_interval(n: int) -> None:
    """[min, max] of five covers the median at less than 95 %: no interval rather than a fake."""
    assert median_estimate(SECONDS[:n]).interval is None
    few = speedup(SECONDS, HALF_SECONDS[:n], scale=2)
    assert (few.interval, few.efficiency.interval, few.n) == (None, None, n)
    assert few.distinguishable is None
    assert speedup(SECONDS[:n], HALF_SECONDS).interval is None
    assert time_to_accuracy(SECONDS[:n], [True] * n).interval is None


def medians(times: Times, n: int) -> Simulated:
    return lambda rng: median_estimate(list(times[0](rng, n))).interval, times[1]


def pairs(n: int) -> Simulated:
    """Two points of which each repeat shares the state of the machine."""

    def interval(rng: Generator) -> Interval | None:
        blocks = rng.lognormal(0, 1, n)
        first, second = (list(blocks * NOISY[0](rng, n)) for _ in range(2))
        return speedup(first, second, paired=True).interval

    return interval, 1.0


def ratios(baseline: Times, n_baseline: int, point: Times, n: int) -> Simulated:
    def interval(rng: Generator) -> Interval | None:
        return speedup(list(baseline[0](rng, n_baseline)), list(point[0](rng, n))).interval

    return interval, baseline[1] / point[1]


def censored(n: int, limit: Callable[[Generator], Any]) -> Simulated:
    def interval(rng: Generator) -> Interval | None:
        times, ended = NOISY[0](rng, n), limit(rng)
        return time_to_accuracy(list(np.minimum(times, ended)), list(times <= ended)).interval

    return interval, NOISY[1]


@pytest.mark.parametrize(
    ("simulated", "most"),
    [
        *(
            pytest.param(medians(times, n), 0.97, id=f"median-{name}-{n}")
            for name, times in TIMES.items()
            for n in (6, 7, 8, 9, 12, 30)
        ),
        pytest.param(ratios(NOISY, 6, NOISY, 6), 0.97, id="speedup-6"),
        pytest.param(ratios(QUIET, 7, QUIET, 7), 0.97, id="speedup-7"),
        pytest.param(ratios(NOISY, 7, QUIET, 30), 0.97, id="speedup-7-of-30"),
        pytest.param(ratios(SHIFTED, 8, WILD, 8), 0.97, id="speedup-8-skewed"),
        pytest.param(ratios(STRAGGLERS, 10, STRAGGLERS, 10), 0.97, id="speedup-10-stragglers"),
        pytest.param(ratios(QUIET, 30, QUIET, 30), 0.97, id="speedup-30"),
        *(pytest.param(pairs(n), 0.97, id=f"speedup-in-blocks-{n}") for n in (6, 8, 30)),
        pytest.param(censored(6, lambda _: 1.5), 0.97, id="accuracy-limit-1.5"),
        pytest.param(censored(8, lambda _: 1.2), 0.97, id="accuracy-limit-1.2"),
        # where jobs are killed at random, the interval is wider than it would have to be
        pytest.param(censored(12, lambda rng: 3 * NOISY[0](rng, 12)), 1, id="accuracy-killed"),
    ],
)
def test_intervals_cover_the_truth(simulated: Simulated, most: float) -> None:
    """In 93-97 % of simulated sweeps, for skewed run times that may scatter differently."""
    interval, truth = simulated
    rng = np.random.default_rng(14)
    known = [ends for ends in (interval(rng) for _ in range(SIMULATIONS)) if ends]
    assert len(known) == SIMULATIONS
    covered = sum(ends.low <= truth <= ends.high for ends in known) / SIMULATIONS
    assert 0.93 - MARGIN <= covered <= most + MARGIN


@given(
    st.lists(st.floats(0.1, 1e5), min_size=6, max_size=20),
    st.lists(st.floats(0.1, 1e5), min_size=6, max_size=20),
    st.floats(0.01, 100),
)
def test_a_speedup_is_a_ratio_of_medians(a: list[float], b: list[float], unit: float) -> None:
    """Seconds or minutes, faster or slower: the same interval, or its inverse."""
    one, other = speedup(a, b, scale=4), speedup([unit * x for x in b], [unit * x for x in a])
    value, low, high = value_and_ends(one)
    assert value == pytest.approx(standard.median(a) / standard.median(b))
    assert value_and_ends(one.efficiency) == pytest.approx((value / 4, low / 4, high / 4))
    assert value_and_ends(other) == pytest.approx((1 / value, 1 / high, 1 / low))
    quotients = [x / y for x in a for y in b]
    assert min(quotients) * (1 - 1e-9) <= low <= value * (1 + 1e-9)
    assert value * (1 - 1e-9) <= high <= max(quotients) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (SECONDS, HALF_SECONDS, True),
        (HALF_SECONDS, SECONDS, True),
        (SECONDS, [x + 0.1 for x in SECONDS], False),
        (SECONDS, SECONDS, False),
        # although the medians' intervals, [10, 11.3] and [10.9, 12.2], overlap
        ([10, 10.1, 10.2, 10.3, 10.4, 11.3], [10.9, 11, 11.1, 11.2, 11.3, 12.2], True),
    ],
    ids=["faster", "slower", "noise", "same", "overlap"],
)
def test_points_that_differ_by_less_than_their_noise_are_not_distinguishable(
    before: list[float], after: list[float], expected: bool
) -> None:
    """By the interval of the ratio, whichever side is faster."""
    assert speedup(before, after).distinguishable is expected


def drifting(rng: Generator, settings: int) -> Array:
    """Six repeats of settings that are equal, while the machine becomes slower and faster."""
    return rng.lognormal(0, 0.1, (settings, 6)) * rng.lognormal(0, 0.5, 6)


EQUAL: dict[str, tuple[Callable[[Generator, int], Array], bool]] = {
    "noisy": (lambda rng, k: rng.lognormal(0, 0.1, (k, 6)), False),
    "shifted": (lambda rng, k: 1 + rng.exponential(0.3, (k, 6)), False),
    "unequal scatter": (
        lambda rng, k: np.exp(np.linspace(0.02, 0.4, k)[:, None] * rng.standard_normal((k, 6))),
        False,
    ),
    "in blocks": (drifting, True),
}


@pytest.mark.parametrize("settings", [2, 4, 20])
@pytest.mark.parametrize("name", EQUAL)
def test_equal_settings_are_called_different_in_5_percent_of_sweeps(
    name: str, settings: int
) -> None:
    """The best of all, which the data choose, is compared with all others."""
    draw, paired = EQUAL[name]
    rng, sweeps, wrong = np.random.default_rng(8), 200, 0
    for _ in range(sweeps):
        times = draw(rng, settings).tolist()
        best = times.pop(int(np.argmin(np.median(times, axis=1))))
        pairs = [(best, other) for other in times]
        comparisons = settings * (settings - 1) // 2
        found = distinguishable(pairs, comparisons=comparisons, paired=paired)
        wrong += any(found)
    assert wrong / sweeps <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / sweeps)


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([(SECONDS, HALF_SECONDS), (SECONDS, SECONDS)], [True, False]),
        ([(SECONDS, HALF_SECONDS[:5]), (SECONDS, HALF_SECONDS)], [None, True]),
        ([([0.9] * 6, [0.8] * 6), ([0.9] * 6, [0.9] * 6)], [True, False]),
        ([([-1.0, -2.0] * 3, [5.0, 6.0] * 3), ([0.0] * 6, [0.0] * 6)], [True, False]),
    ],
    ids=["seconds", "few", "no scatter", "no ratios"],
)
def test_large_differences_remain_after_the_correction(
    pairs: list[tuple[list[float], list[float]]], expected: list[bool | None]
) -> None:
    """Of 190 comparisons; too few runs have no answer, and equal runs do not differ."""
    assert distinguishable(pairs, comparisons=190) == expected


def test_a_drift_does_not_hide_a_difference_within_repeats() -> None:
    """The machine becomes three times as slow; each repeat is 10 % faster on two nodes."""
    before = [10.0, 13.0, 16.0, 19.0, 24.0, 30.0]
    gains = (1.1, 1.12, 1.09, 1.1, 1.11, 1.08)
    after = [one / ratio for one, ratio in zip(before, gains, strict=True)]
    assert speedup(before, after).distinguishable is False
    found = speedup(before, after, scale=2, paired=True)
    assert value_and_ends(found) == pytest.approx((1.1, 1.08, 1.12))
    assert value_and_ends(found.efficiency) == pytest.approx((0.55, 0.54, 0.56))
    assert value_and_ends(speedup(after, before, paired=True)) == pytest.approx(
        (1 / 1.1, 1 / 1.12, 1 / 1.08)
    )
    with pytest.raises(InputError, match="needs 6 values") as error:
        speedup(before, after[:5], paired=True)
    assert error.value.field == "seconds"


# Freireich et al. 1963, as in every textbook of survival analysis
SIX_MP = "6 6 6 7 10 13 16 22 23 6+ 9+ 10+ 11+ 17+ 19+ 20+ 25+ 32+ 32+ 34+ 35+"
PLACEBO = "1 1 2 2 3 4 4 5 5 8 8 8 8 11 11 12 12 15 17 22 23"


@pytest.mark.parametrize(
    ("times", "median", "low", "high"),
    [
        (SIX_MP, 23, 9.6735, math.inf),
        (PLACEBO, 8, 4, 11.3265),
        ("1 2 3 4 5 6", 3.5, 1, 6),
        ("1 2 3 4 9+ 9+", 3.5, 1, math.inf),
        ("1 2 3 9+ 9+ 9+", math.inf, 1, math.inf),
        ("1+ 9+ 9+ 9+ 9+ 9+", math.inf, 1, math.inf),
    ],
    ids=["6-mp", "placebo", "all", "four", "half", "none"],
)
def test_runs_that_missed_the_target_are_censored(
    times: str, median: float, low: float, high: float
) -> None:
    """They are counted and move the median up; they are never dropped."""
    seconds = [float(word.rstrip("+")) for word in times.split()]
    reached = ["+" not in word for word in times.split()]
    estimate = time_to_accuracy(seconds, reached)
    assert value_and_ends(estimate) == pytest.approx((median, low, high), abs=1e-4)
    assert estimate.n == len(reached)
