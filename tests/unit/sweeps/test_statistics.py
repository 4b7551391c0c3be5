"""Medians, speedups and times to accuracy, against published numbers and by simulation.

HPML_LONG=1 runs more simulations.
"""

from __future__ import annotations

import math
import os
import statistics as standard
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.sweeps.statistics import (
    arithmetic_mean,
    data_stall,
    distinguishable,
    harmonic_mean,
    imbalance,
    loader_wait_share,
    median_estimate,
    robust_variation,
    speedup,
    time_to_accuracy,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.random import Generator
    from numpy.typing import NDArray

    from hpml_orchestrator.sweeps.statistics import Interval

    Array: TypeAlias = NDArray[np.float64]

SIMULATIONS = 10_000 if os.environ.get("HPML_LONG") == "1" else 800
# two standard errors of a share near 97 % over that many simulations
MARGIN = 2 * math.sqrt(0.97 * 0.03 / SIMULATIONS)
SECONDS = [10.2, 9.9, 10.0, 11.7, 10.1, 10.4]
HALF_SECONDS = [5.0, 5.3, 5.1, 5.2, 6.9, 5.05]


def lognormal(rng: Generator, sigma: float, n: int) -> Array:
    return np.exp(sigma * rng.standard_normal(n))


def shifted_exponential(rng: Generator, scale: float, n: int) -> Array:
    return 1 + scale * rng.exponential(size=n)


def stragglers(rng: Generator, sigma: float, n: int) -> Array:
    """One run in ten takes half as long again."""
    return lognormal(rng, sigma, n) * np.where(rng.random(n) < 0.1, 1.5, 1)


TIMES: dict[str, tuple[Callable[[Generator, float, int], Array], float, float]] = {
    "quiet": (lognormal, 0.1, 1.0),
    "noisy": (lognormal, 0.5, 1.0),
    "wild": (lognormal, 1.0, 1.0),
    "shifted": (shifted_exponential, 0.3, 1 + 0.3 * math.log(2)),
    # half of the runs are below m where 0.9 Phi(ln(m) / 0.03) = 1/2: no straggler is
    "stragglers": (stragglers, 0.03, math.exp(0.03 * standard.NormalDist().inv_cdf(5 / 9))),
}


def runs(kind: str, rng: Generator, n: int) -> list[float]:
    """Run times of n repeats."""
    generate, spread, _ = TIMES[kind]
    return list(generate(rng, spread, n))


def share_covered(intervals: Iterable[Interval | None], truth: float) -> float:
    """The share of intervals that hold the truth."""
    known = [interval for interval in intervals if interval is not None]
    assert len(known) == SIMULATIONS
    return sum(interval.low <= truth <= interval.high for interval in known) / SIMULATIONS


# --- medians


@pytest.mark.parametrize(
    ("values", "median", "low", "high"),
    [
        ([3, 1, 2, 6, 5, 4], 3.5, 1, 6),
        (range(1, 10), 5, 2, 8),
        (range(1, 18), 9, 5, 13),
        ([7.0] * 6, 7, 7, 7),
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


def test_an_estimate_prints_what_a_report_needs() -> None:
    """Median, n, interval and how it was computed; or that there is no interval."""
    assert str(median_estimate([1, 2, 3, 4, 5, 6])) == (
        "3.5 (median of 6, 95 % CI [1, 6] (order statistics 1 and 6, which cover 96.9 %))"
    )
    assert str(median_estimate([1, 2, 3, 4, 5])) == "3 (median of 5, no 95 % CI)"
    assert "ratio of medians of 6 and 2, no 95 % CI" in str(speedup(SECONDS, [1, 2]))
    assert (
        str(time_to_accuracy([8, 9], [True, False])) == "not reached (1 of 2 reached, no 95 % CI)"
    )


@pytest.mark.parametrize("n", range(1, 6))
def test_fewer_than_six_repeats_have_no_interval(n: int) -> None:
    """[min, max] of five covers the median at less than 95 %: no interval rather than a fake."""
    assert median_estimate(SECONDS[:n]).interval is None
    few = speedup(SECONDS, HALF_SECONDS[:n], scale=2)
    assert (few.interval, few.efficiency_interval) == (None, None)
    assert speedup(SECONDS[:n], HALF_SECONDS).interval is None
    assert distinguishable(SECONDS, HALF_SECONDS[:n]) is None
    assert time_to_accuracy(SECONDS[:n], [True] * n).interval is None


@pytest.mark.parametrize("n", [6, 7, 8, 9, 12, 30])
@pytest.mark.parametrize("kind", TIMES)
def test_intervals_of_medians_cover_the_truth(kind: str, n: int) -> None:
    """In 93-97 % of simulated sweeps, for skewed run times."""
    rng = np.random.default_rng(n)
    intervals = [median_estimate(runs(kind, rng, n)).interval for _ in range(SIMULATIONS)]
    covered = share_covered(intervals, TIMES[kind][2])
    assert 0.93 - MARGIN <= covered <= 0.97 + MARGIN


# --- speedups


def test_a_speedup_is_a_ratio_of_medians() -> None:
    """With its efficiency beside it; under weak scaling the work grows too."""
    strong = speedup(SECONDS, HALF_SECONDS, scale=4)
    ratio = standard.median(SECONDS) / standard.median(HALF_SECONDS)
    assert strong.value == pytest.approx(ratio)
    assert strong.efficiency == pytest.approx(ratio / 4)
    assert strong.interval is not None
    assert strong.efficiency_interval is not None
    assert strong.interval.low < ratio < strong.interval.high
    assert strong.efficiency_interval.high == pytest.approx(strong.interval.high / 4)
    weak = speedup(SECONDS, SECONDS, scale=4, work=4)
    assert (weak.value, weak.efficiency) == pytest.approx((4, 1))
    assert weak.interval is not None
    assert weak.interval.low < 4 < weak.interval.high
    assert asdict(strong) == asdict(speedup(SECONDS, HALF_SECONDS, scale=4)), "the same each time"


@given(
    st.lists(st.floats(0.1, 1e5), min_size=6, max_size=20),
    st.lists(st.floats(0.1, 1e5), min_size=6, max_size=20),
    st.floats(0.01, 100),
)
def test_a_speedup_has_no_preferred_unit_or_side(
    a: list[float], b: list[float], unit: float
) -> None:
    """Seconds or minutes, faster or slower: the same interval, or its inverse."""
    one = speedup(a, b)
    other = speedup([unit * x for x in b], [unit * x for x in a])
    assert one.interval is not None
    assert other.interval is not None
    assert one.value * other.value == pytest.approx(1)
    assert one.interval.low * other.interval.high == pytest.approx(1)
    assert one.interval.high * other.interval.low == pytest.approx(1)
    ratios = [x / y for x in a for y in b]
    assert min(ratios) * (1 - 1e-9) <= one.interval.low <= one.value * (1 + 1e-9)
    assert one.value * (1 - 1e-9) <= one.interval.high <= max(ratios) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("baseline", "n_baseline", "kind", "n"),
    [
        ("noisy", 6, "noisy", 6),
        ("quiet", 7, "quiet", 7),
        ("noisy", 7, "quiet", 30),
        ("shifted", 8, "wild", 8),
        ("stragglers", 10, "stragglers", 10),
        ("quiet", 30, "quiet", 30),
    ],
    ids=["n6", "n7", "7-of-30", "n8-skewed", "n10-stragglers", "n30"],
)
def test_intervals_of_speedups_cover_the_truth(
    baseline: str, n_baseline: int, kind: str, n: int
) -> None:
    """In 93-97 % of simulated sweeps, also where the points scatter differently."""
    rng = np.random.default_rng(100 * n_baseline + n)
    intervals = [
        speedup(runs(baseline, rng, n_baseline), runs(kind, rng, n)).interval
        for _ in range(SIMULATIONS)
    ]
    covered = share_covered(intervals, TIMES[baseline][2] / TIMES[kind][2])
    assert 0.93 - MARGIN <= covered <= 0.97 + MARGIN


def test_points_that_differ_by_less_than_their_noise_are_not_distinguishable() -> None:
    """By the interval of the ratio, whichever side is faster."""
    assert distinguishable(SECONDS, HALF_SECONDS) is True
    assert distinguishable(HALF_SECONDS, SECONDS) is True
    assert distinguishable(SECONDS, [x + 0.1 for x in SECONDS]) is False
    assert distinguishable(SECONDS, SECONDS) is False


def test_a_difference_is_seen_although_the_intervals_overlap() -> None:
    """Comparing two intervals by eye misses true differences."""
    before = [10.0, 10.1, 10.2, 10.3, 10.4, 11.3]
    after = [x + 0.9 for x in before]
    intervals = [median_estimate(x).interval for x in (before, after)]
    assert intervals[0] is not None
    assert intervals[1] is not None
    assert intervals[0].overlaps(intervals[1])
    assert distinguishable(before, after) is True


# --- time to accuracy

SIX_MP = "6 6 6 7 10 13 16 22 23 6+ 9+ 10+ 11+ 17+ 19+ 20+ 25+ 32+ 32+ 34+ 35+"
PLACEBO = "1 1 2 2 3 4 4 5 5 8 8 8 8 11 11 12 12 15 17 22 23"


@pytest.mark.parametrize(
    ("times", "median", "reached"),
    [
        (SIX_MP, 23, 9),  # Freireich et al. 1963, as in every textbook of survival analysis
        (PLACEBO, 8, 21),
        ("1 2 3 4 5 6", 3.5, 6),
        ("1 2 3 4 9+ 9+", 3.5, 4),
        ("1 2 3 9+ 9+ 9+", None, 3),
        ("9+ 9+", None, 0),
        ("2 1+", 2, 1),
    ],
    ids=["6-mp", "placebo", "all", "four", "half", "none", "early"],
)
def test_runs_that_missed_the_target_are_censored(
    times: str, median: float | None, reached: int
) -> None:
    """They are counted and move the median up; they are never dropped."""
    words = times.split()
    seconds = [float(word.rstrip("+")) for word in words]
    estimate = time_to_accuracy(seconds, ["+" not in word for word in words])
    assert (estimate.median_seconds, estimate.reached) == (median, reached)
    assert estimate.n == len(words)


def test_the_interval_of_a_censored_median_may_be_open() -> None:
    """Without censored runs it is that of the median; with some it has no upper bound."""
    all_reached = time_to_accuracy(SECONDS, [True] * 6)
    assert all_reached.interval == median_estimate(SECONDS).interval
    one_missed = time_to_accuracy(SECONDS, [second < 11 for second in SECONDS])
    assert one_missed.interval is not None
    assert (one_missed.interval.low, one_missed.interval.high) == (9.9, math.inf)


@pytest.mark.parametrize(("n", "limit"), [(6, 1.5), (8, 1.2)])
def test_intervals_of_times_to_accuracy_cover_the_truth(n: int, limit: float) -> None:
    """In 93-97 % of sweeps where all runs end at one time limit."""
    rng = np.random.default_rng(n)
    intervals = []
    for _ in range(SIMULATIONS):
        times = np.array(runs("noisy", rng, n))
        ended = np.minimum(times, limit)
        intervals.append(time_to_accuracy(list(ended), list(times <= limit)).interval)
    assert 0.93 - MARGIN <= share_covered(intervals, 1) <= 0.97 + MARGIN


def test_runs_that_break_off_early_make_the_interval_wider_not_wrong() -> None:
    """Jobs killed at random times."""
    rng = np.random.default_rng(3)
    intervals = []
    for _ in range(SIMULATIONS):
        times, limits = np.array(runs("noisy", rng, 12)), 3 * np.array(runs("noisy", rng, 12))
        ended = np.minimum(times, limits)
        intervals.append(time_to_accuracy(list(ended), list(times <= limits)).interval)
    assert share_covered(intervals, 1) >= 0.95 - MARGIN


# --- means, scatter, lost time


@pytest.mark.parametrize(
    ("function", "arguments", "expected"),
    [
        (arithmetic_mean, ([10, 20, 60],), 30),
        (harmonic_mean, ([40, 60],), 48),  # the same way there at 40 km/h and back at 60
        (robust_variation, ([9, 10, 11, 500, 10],), 1.4826 / 10),
        (imbalance, ([1, 1, 1, 2],), 0.6),
        (imbalance, ([3, 3],), 0),
        (data_stall, (100, 110, 160), (10, 50)),
        (loader_wait_share, ([0.1, 0.3], [1, 1]), 0.2),
    ],
)
def test_figures_of_a_sample(
    function: Callable[..., object], arguments: tuple[Any, ...], expected: object
) -> None:
    """Against closed forms."""
    assert function(*arguments) == pytest.approx(expected, rel=1e-4)


def test_the_robust_variation_is_the_usual_one_for_normal_data() -> None:
    """Standard deviation / mean."""
    values = list(np.random.default_rng(0).normal(10, 0.5, 20_000))
    assert robust_variation(values) == pytest.approx(0.05, rel=0.03)
    assert robust_variation([5]) is None


@pytest.mark.parametrize(
    ("function", "arguments", "field"),
    [
        (median_estimate, ([],), "values"),
        (median_estimate, ([1, math.nan],), "values"),
        (speedup, ([0.0, 1], [1]), "baseline_seconds"),
        (speedup, ([1], [math.inf]), "seconds"),
        (distinguishable, ([1], []), "seconds"),
        (time_to_accuracy, ([1, 2], [True]), "reached"),
        (time_to_accuracy, ([-1], [True]), "seconds"),
        (arithmetic_mean, ([],), "costs"),
        (harmonic_mean, ([0],), "rates"),
        (robust_variation, ([-1, 1],), "values"),
        (imbalance, ([],), "rank_seconds"),
        (data_stall, (1, 0, 2), "seconds"),
        (loader_wait_share, ([1], [1, 2]), "wait_seconds"),
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


@pytest.mark.parametrize("factor", ["scale", "work"])
def test_a_speedup_needs_positive_factors(factor: str) -> None:
    """Nothing is divided by zero GPUs."""
    with pytest.raises(InputError, match=factor):
        speedup(SECONDS, SECONDS, **{factor: 0})
