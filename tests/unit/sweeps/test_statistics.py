"""Medians, speedups and times to accuracy, against published numbers and by simulation.

HPML_LONG=1 runs more simulations.
"""

from __future__ import annotations

import math
import os
import statistics as standard
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.sweeps.statistics import (
    data_stall,
    distinguishable,
    imbalance,
    loader_wait_share,
    median_estimate,
    speedup,
    time_to_accuracy,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.random import Generator

    from hpml_orchestrator.sweeps.statistics import Array, Interval

SIMULATIONS = 10_000 if os.environ.get("HPML_LONG") == "1" else 400
# two standard errors of a share near 97 % over that many simulations
MARGIN = 2 * math.sqrt(0.97 * 0.03 / SIMULATIONS)
SECONDS = [10.2, 9.9, 10.0, 11.7, 10.1, 10.4]
HALF_SECONDS = [5.0, 5.3, 5.1, 5.2, 6.9, 5.05]

# seconds of n runs, and their true median
Times = tuple["Callable[[Generator, int], Array]", float]
QUIET: Times = (lambda rng, n: rng.lognormal(0, 0.1, n), 1)
NOISY: Times = (lambda rng, n: rng.lognormal(0, 0.5, n), 1)
WILD: Times = (lambda rng, n: rng.lognormal(0, 1, n), 1)
SHIFTED: Times = (lambda rng, n: 1 + rng.exponential(0.3, n), 1 + 0.3 * math.log(2))
STRAGGLERS: Times = (  # one run in ten takes half as long again
    lambda rng, n: rng.lognormal(0, 0.03, n) * np.where(rng.random(n) < 0.1, 1.5, 1),
    # half of the runs are below m where 0.9 Phi(ln(m) / 0.03) = 1/2: no straggler is
    math.exp(0.03 * standard.NormalDist().inv_cdf(5 / 9)),
)


def share_covered(interval: Callable[[Generator], Interval | None], truth: float) -> float:
    """The share of simulated intervals that hold the truth."""
    rng = np.random.default_rng(14)
    intervals = [interval(rng) for _ in range(SIMULATIONS)]
    return float(
        np.mean([known is not None and known.low <= truth <= known.high for known in intervals])
    )


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
    estimate = median_estimate(values)
    assert (estimate.value, estimate.n) == (median, len(values))
    assert estimate.interval is not None
    assert (estimate.interval.low, estimate.interval.high) == (low, high)
    exact = stats.quantile_test(list(values), q=0, p=0.5).confidence_interval(0.95)
    assert (exact.low, exact.high) == (low, high)


@pytest.mark.parametrize("n", range(1, 6))
def test_fewer_than_six_repeats_have_no_interval(n: int) -> None:
    """[min, max] of five covers the median at less than 95 %: no interval rather than a fake."""
    assert median_estimate(SECONDS[:n]).interval is None
    few = speedup(SECONDS, HALF_SECONDS[:n], scale=2)
    assert (few.interval, few.efficiency_interval, few.n_baseline, few.n) == (None, None, 6, n)
    assert speedup(SECONDS[:n], HALF_SECONDS).interval is None
    assert distinguishable(SECONDS, HALF_SECONDS[:n]) is None
    assert time_to_accuracy(SECONDS[:n], [True] * n).interval is None


@pytest.mark.parametrize("n", [6, 7, 8, 9, 12, 30])
@pytest.mark.parametrize(
    "times", [NOISY, WILD, SHIFTED, STRAGGLERS], ids=["noisy", "wild", "shifted", "stragglers"]
)
def test_intervals_of_medians_cover_the_truth(times: Times, n: int) -> None:
    """In 93-97 % of simulated sweeps, for skewed run times."""
    runs, median = times
    covered = share_covered(lambda rng: median_estimate(list(runs(rng, n))).interval, median)
    assert 0.93 - MARGIN <= covered <= 0.97 + MARGIN


@given(
    st.lists(st.floats(0.1, 1e5), min_size=6, max_size=20),
    st.lists(st.floats(0.1, 1e5), min_size=6, max_size=20),
    st.floats(0.01, 100),
)
def test_a_speedup_is_a_ratio_of_medians(a: list[float], b: list[float], unit: float) -> None:
    """Seconds or minutes, faster or slower: the same interval, or its inverse."""
    one = speedup(a, b, scale=4)
    other = speedup([unit * x for x in b], [unit * x for x in a])
    assert one.value == pytest.approx(standard.median(a) / standard.median(b))
    assert one.efficiency == pytest.approx(one.value / 4)
    assert one.interval is not None
    assert one.efficiency_interval is not None
    assert other.interval is not None
    assert one.efficiency_interval.high == pytest.approx(one.interval.high / 4)
    assert one.value * other.value == pytest.approx(1)
    assert one.interval.low * other.interval.high == pytest.approx(1)
    assert one.interval.high * other.interval.low == pytest.approx(1)
    ratios = [x / y for x in a for y in b]
    assert min(ratios) * (1 - 1e-9) <= one.interval.low <= one.value * (1 + 1e-9)
    assert one.value * (1 - 1e-9) <= one.interval.high <= max(ratios) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("baseline", "n_baseline", "point", "n"),
    [
        (NOISY, 6, NOISY, 6),
        (QUIET, 7, QUIET, 7),
        (NOISY, 7, QUIET, 30),
        (SHIFTED, 8, WILD, 8),
        (STRAGGLERS, 10, STRAGGLERS, 10),
        (QUIET, 30, QUIET, 30),
    ],
    ids=["n6", "n7", "7-of-30", "n8-skewed", "n10-stragglers", "n30"],
)
def test_intervals_of_speedups_cover_the_truth(
    baseline: Times, n_baseline: int, point: Times, n: int
) -> None:
    """In 93-97 % of simulated sweeps, also where the points scatter differently."""

    def interval(rng: Generator) -> Interval | None:
        return speedup(list(baseline[0](rng, n_baseline)), list(point[0](rng, n))).interval

    assert 0.93 - MARGIN <= share_covered(interval, baseline[1] / point[1]) <= 0.97 + MARGIN


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
    assert distinguishable(before, after) is expected


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
        ("1 2 3 9+ 9+ 9+", None, 1, math.inf),
        ("1+ 9+ 9+ 9+ 9+ 9+", None, 1, math.inf),
    ],
    ids=["6-mp", "placebo", "all", "four", "half", "none"],
)
def test_runs_that_missed_the_target_are_censored(
    times: str, median: float | None, low: float, high: float
) -> None:
    """They are counted and move the median up; they are never dropped."""
    seconds = [float(word.rstrip("+")) for word in times.split()]
    reached = ["+" not in word for word in times.split()]
    estimate = time_to_accuracy(seconds, reached)
    assert estimate.median_seconds == median
    assert (estimate.reached, estimate.n) == (sum(reached), len(reached))
    assert estimate.interval is not None
    assert (estimate.interval.low, estimate.interval.high) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize(
    ("n", "limit", "most"),
    [
        (6, lambda _: 1.5, 0.97),
        (8, lambda _: 1.2, 0.97),
        (12, lambda rng: 3 * NOISY[0](rng, 12), 1),
    ],
    ids=["limit-1.5", "limit-1.2", "killed-at-random"],
)
def test_intervals_of_times_to_accuracy_cover_the_truth(
    n: int, limit: Callable[[Generator], Any], most: float
) -> None:
    """In 93-97 % of sweeps with one time limit; in more where jobs are killed at random."""

    def interval(rng: Generator) -> Interval | None:
        times, ended = NOISY[0](rng, n), limit(rng)
        return time_to_accuracy(list(np.minimum(times, ended)), list(times <= ended)).interval

    assert 0.93 - MARGIN <= share_covered(interval, 1) <= most + MARGIN


@pytest.mark.parametrize(
    ("function", "arguments", "expected"),
    [
        (imbalance, ([1, 1, 1, 2],), 0.6),
        (imbalance, ([3, 3],), 0),
        (data_stall, (100, 110, 160), (10, 50)),
        (loader_wait_share, ([0.1, 0.3], [1, 1]), 0.2),
    ],
)
def test_lost_time(
    function: Callable[..., object], arguments: tuple[Any, ...], expected: object
) -> None:
    """Against closed forms."""
    assert function(*arguments) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("function", "arguments", "field"),
    [
        (median_estimate, ([],), "values"),
        (median_estimate, ([1, math.nan],), "values"),
        (speedup, ([0.0, 1], [1]), "baseline_seconds"),
        (speedup, ([1], [math.inf]), "seconds"),
        (lambda: speedup([1], [1], scale=0), (), "scale"),
        (distinguishable, ([1], []), "seconds"),
        (time_to_accuracy, ([1, 2], [True]), "reached"),
        (time_to_accuracy, ([-1], [True]), "seconds"),
        (imbalance, ([],), "rank_seconds"),
        (data_stall, (1, 0, 2), "seconds"),
        (loader_wait_share, ([2], [1]), "wait_seconds"),
    ],
)
def test_bad_samples_are_refused(
    function: Callable[..., object], arguments: tuple[Any, ...], field: str
) -> None:
    """The error names the argument."""
    with pytest.raises(InputError) as error:
        function(*arguments)
    assert error.value.field == field
