"""Medians, speedups and times to accuracy with 95 % confidence intervals.

Every interval covers the true value in 93-97 % of simulated sweeps of 6 to 30 repeats with skewed
run times (tests/unit/sweeps/test_statistics.py); with fewer than 6 repeats there is none. There is
no mean of speedups here on purpose: a ratio of medians is computed from the runs, never averaged.
Values that are missing, not finite or not positive raise InputError, which names the argument.

Sources: Hoefler & Belli, "Scientific benchmarking of parallel computing systems", SC15;
Hettmansperger & Sheather, "Confidence intervals based on interpolated order statistics", 1986;
Hutson, "Calculating nonparametric confidence intervals for quantiles using fractional order
statistics", 1999; Kaplan & Meier 1958; Schenker & Gentleman, "On judging the significance of
differences by examining the overlap between confidence intervals", 2001; Holm, "A simple
sequentially rejective multiple test procedure", 1979.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from hpml_orchestrator.errors import InputError

Array: TypeAlias = NDArray[np.float64]
CONFIDENCE = 0.95
MIN_REPEATS = 6  # of 5 values, even [min, max] covers the median at 93.75 % only
_TOO_WIDE = 0.97  # an interval that covers more than this is narrowed by interpolation
_HALF = 0.5 + 1e-9  # survival is a product of fractions, so it is one half up to rounding
_SAME = 1e-12  # relative; runs that differ by less are equal
FEWEST_POOLED = 4  # with three in blocks, a noisy one does not stand out from the others
UNEQUAL = 0.2  # p-value of Bartlett's test below which variances are not pooled
_GRID = 200  # quantiles of each sample's median: 40,000 ratios


@dataclass(frozen=True)
class Interval:
    """A 95 % confidence interval, in the unit of its estimate."""

    low: float
    high: float  # infinite if runs that never ended allow no bound
    method: str  # how it was computed, in words for a report


@dataclass(frozen=True)
class Estimate:
    """A value computed from n runs; `interval` is None if n is too small for a 95 % CI."""

    value: float
    n: int
    interval: Interval | None


@dataclass(frozen=True)
class Speedup(Estimate):
    """How many times faster than the baseline: median(baseline seconds) / median(seconds).

    `n` are the runs of the side that has fewer.
    """

    scale: float  # how many times the baseline's resources were used
    efficiency: Estimate  # value / scale: the share of the ideal

    @property
    def distinguishable(self) -> bool | None:
        """Whether the CI excludes 1, so that the two differ; None with fewer than 6 repeats of one.

        The overlap of the two medians' CIs would miss many true differences: for equally noisy
        points it tests at a level of 0.6 % instead of 5 %.

        Source: Schenker & Gentleman.
        """
        ends = self.interval
        return None if ends is None else not ends.low <= 1 <= ends.high


def median_estimate(values: Sequence[float]) -> Estimate:
    """Return the median with its nonparametric 95 % CI, in the unit of the values.

    The interval is the narrowest symmetric pair of order statistics that covers the median with at
    least 95 %: [min, max] of 6 covers 96.9 %. A pair that covers more than 97 % is narrowed to 95 %
    by interpolation with the next pair inside.

    Source: Hoefler & Belli, rule 5; Hettmansperger & Sheather.
    """
    ordered = np.sort(sample(values, "values"))
    return Estimate(float(np.median(ordered)), len(ordered), _order_interval(ordered, ordered))


def speedup(
    baseline_seconds: Sequence[float],
    seconds: Sequence[float],
    *,
    scale: float = 1.0,
    paired: bool = False,
) -> Speedup:
    """Return the ratio of the median run times, its efficiency and their 95 % CI.

    `scale` is how many times the baseline's GPUs (nodes, ranks) this point used. For weak scaling,
    pass rates the other way round: those of the point, then those of the baseline.

    The CI is that of a smoothed bootstrap: the median of each side varies as the middle order
    statistic of n draws from its runs, interpolated in log seconds, and the CI holds the central
    95 % of the ratios. It is computed on a grid, so the same runs always give the same CI, and
    the CI of the inverse ratio is the inverse. (Simulated percentile bootstraps cover 89 % where
    an odd number of noisy runs is compared with steady ones, basic bootstraps 73-94 %.)

    With `paired`, values at the same place were measured in succession, as a block: then the
    result is the median of their ratios, with the CI of `median_estimate`. A drift of the machine
    from block to block cancels. Choose it by the plan, not by the result.

    Source: Hoefler & Belli, rules 1 and 4; Hutson.
    """
    baseline = sample(baseline_seconds, "baseline_seconds", above=0)
    point = sample(seconds, "seconds", above=0)
    sample([scale], "scale", above=0)
    interval, share = None, None
    n = min(len(baseline), len(point))
    if paired:
        if len(baseline) != len(point):
            message = f"needs {len(baseline)} values, one for each of the baseline"
            raise InputError(message, field="seconds", value=list(seconds))
        # Logs make the result symmetric: swapping the sides inverts the median and both ends, also
        # where they are interpolated.
        logs = median_estimate((np.log(baseline) - np.log(point)).tolist())
        value, ends = math.exp(logs.value), logs.interval
        if ends is not None:
            method = f"{ends.method}, of the ratios within each repeat"
            interval = Interval(math.exp(ends.low), math.exp(ends.high), method)
    else:
        value = float(np.median(baseline) / np.median(point))
        if n >= MIN_REPEATS:
            ratios = log_medians(baseline)[:, None] - log_medians(point)
            tail = (1 - CONFIDENCE) / 2
            low, high = np.exp(np.quantile(ratios, [tail, 1 - tail])).tolist()
            interval = Interval(low, high, "smoothed bootstrap")
    if interval is not None:
        share = Interval(interval.low / scale, interval.high / scale, interval.method)
    return Speedup(value, n, interval, scale, Estimate(value / scale, n, share))


def distinguishable(
    pairs: Sequence[tuple[Sequence[float], Sequence[float]]],
    *,
    comparisons: int,
    paired: bool | Sequence[bool] = False,
    pooled: tuple[float, float] | None = None,
) -> list[bool | None]:
    """Return for each pair of samples whether they differ; None with fewer than 6 runs of one.

    Many comparisons find a difference by chance: of 20 equal settings, 56 % of the sweeps would
    call one of them different from the best. So p-values of Student's t test of the logs (Welch's
    form, or of the differences within pairs) are corrected by Holm's method, and a difference also
    needs a CI of the ratio without 1. With one comparison only the CI decides.

    Args:
        pairs: samples, which have no ratios where a value is not positive.
        comparisons: how many pairs might have been asked for: of K settings of which the best is
            compared with the others, K (K-1) / 2, because the data choose the best. (With K-1,
            12-16 % of simulated sweeps of 20 equal settings call one different from the best.)
        paired: as in `speedup`, for all pairs or for each.
        pooled: of `pooled_variance`; None to estimate the variance from each pair alone.

    Source: Holm; Hoefler & Belli, rules 7 and 8.
    """
    tested = [
        place for place, pair in enumerate(pairs) if min(len(one) for one in pair) >= MIN_REPEATS
    ]
    within = [paired] * len(pairs) if isinstance(paired, bool) else paired
    values = {place: _p_value(*pairs[place], within[place], pooled) for place in tested}
    found: list[bool | None] = [False if place in values else None for place in range(len(pairs))]
    for earlier, place in enumerate(sorted(tested, key=values.__getitem__)):
        # Holm tests the smallest p-value at the strictest level and stops at the first failure: a
        # larger p-value does not count, even if it passes its own, looser level. The tests need not
        # be independent, and these share the best setting.
        left = max(1, comparisons - earlier)
        if left > 1 and values[place] * left > 1 - CONFIDENCE:
            break
        if min(min(one) for one in pairs[place]) > 0:
            found[place] = speedup(*pairs[place], paired=within[place]).distinguishable
        else:
            found[place] = values[place] <= 1 - CONFIDENCE
    return found


def pooled_variance(
    samples: Sequence[Sequence[float]], *, blocks: bool
) -> tuple[float, float] | None:
    """Return the variance of the runs' logs within the samples, and its degrees of freedom.

    A variance from all settings makes `distinguishable` find more: of 5 settings of 6 runs with 5 %
    noise, one that is 10 % faster in 44 % of simulated sweeps instead of 26 %. Return None where
    that is not safe: for few samples, values that are not positive, or unequal variances.

    With `blocks`, values at the same place were measured in succession; what a block adds to all of
    them is taken out.

    Source: Fisher, "Statistical methods for research workers", 1925; Bartlett, "Properties of
    sufficiency and statistical tests", 1937.
    """
    if len(samples) < FEWEST_POOLED or min(map(min, samples)) <= 0:
        return None
    rests, freedom = _residuals(samples, blocks=blocks)
    if min(np.abs(values).max() for values in rests) <= _SAME:
        return None
    if stats.bartlett(*rests).pvalue < UNEQUAL:
        return None
    return sum(float(values @ values) for values in rests) / freedom, float(freedom)


def scatter(samples: Sequence[Sequence[float]], *, blocks: bool) -> tuple[float, int]:
    """Return the relative scatter of the runs within the samples, and its degrees of freedom.

    `blocks` as in `pooled_variance`, which is the square of it where that is safe to test with.
    """
    rests, freedom = _residuals(samples, blocks=blocks)
    squares = sum(float(values @ values) for values in rests)
    return math.sqrt(squares / freedom) if freedom > 0 else math.nan, freedom


def _residuals(samples: Sequence[Sequence[float]], *, blocks: bool) -> tuple[list[Array], int]:
    """Return the logs without the means of their samples and blocks, and what is left free."""
    logs = [np.log(sample(values, "samples", above=0)) for values in samples]
    rests = [values - values.mean() for values in logs]
    freedom = sum(len(values) - 1 for values in rests)
    if blocks:
        rests = [*(np.array(rests) - np.mean(rests, axis=0))]
        freedom -= len(rests[0]) - 1
    return rests, freedom


def _p_value(
    first: Sequence[float],
    second: Sequence[float],
    paired: bool,
    pooled: tuple[float, float] | None,
) -> float:
    """Return the p-value of a t test of the logs, or of the values if one is not positive."""
    one, other = sample(first, "first"), sample(second, "second")
    # Run times scatter by a share of their length and are skewed; their logs are closer to normal,
    # which the t test assumes.
    if min(one.min(), other.min()) > 0:
        one, other = np.log(one), np.log(other)
    samples = [one - other] if paired else [one, other]
    difference = float(samples[0].mean() - (0.0 if paired else other.mean()))
    # Of one sample of differences this is the t test for pairs.
    variance, freedom = satterthwaite(*map(mean_variance, samples))
    if pooled:
        variance, freedom = pooled[0] * (1 / len(one) + 1 / len(other)), pooled[1]
    # Runs without any scatter would divide by zero. They are equal, or differ for certain.
    if variance <= (_SAME * max(np.abs(one).max(), np.abs(other).max())) ** 2:  # equal runs
        return float(abs(difference) <= _SAME * float(np.abs(one).max()))
    return float(2 * stats.t.sf(abs(difference) / math.sqrt(variance), freedom))


def mean_variance(values: Array) -> tuple[float, float]:
    """Return the variance of the mean of values, and its degrees of freedom."""
    return float(values.var(ddof=1)) / len(values), len(values) - 1


def satterthwaite(*parts: tuple[float, float]) -> tuple[float, float]:
    """Return the sum of variances, and its degrees of freedom; `parts` have both of each.

    Source: Satterthwaite, "An approximate distribution of estimates of variance components", 1946.
    """
    whole = sum(variance for variance, _ in parts)
    if not whole:
        return 0.0, sum(freedom for _, freedom in parts)
    return whole, 1 / sum((variance / whole) ** 2 / freedom for variance, freedom in parts)


def time_to_accuracy(seconds: Sequence[float], reached: Sequence[bool]) -> Estimate:
    """Return the median time to the target accuracy; runs that missed it count as censored.

    It is infinite unless more than half of the runs reached the target. The CI consists of order
    statistics. For its low end a censored run counts with the time at which it ended, for its high
    end as never: it holds whatever the censored runs would have become, and equals that of
    `median_estimate` where all runs reached the target.

    Args:
        seconds: until the target was reached, or until the run ended without.
        reached: for each run, whether the target was reached.

    Source: Kaplan & Meier.
    """
    times = sample(seconds, "seconds", above=0)
    if len(reached) != len(times):
        raise InputError(f"needs {len(times)} entries, one a run", field="reached", value=reached)
    events = np.asarray(reached, dtype=bool)
    # Kaplan-Meier: the median is where the estimated share of runs that have not reached the target
    # falls to one half; runs that ended without it leave the estimate at their end (censored).
    survival = stats.ecdf(stats.CensoredData(times[events], right=times[~events])).sf
    # a survival of exactly one half lasts from the first of these times to the second
    until = [survival.quantiles[survival.probabilities <= half] for half in (_HALF, 1 - _HALF)]
    median = float(np.mean([until[0][0], until[1][0]])) if len(until[1]) else math.inf
    interval = _order_interval(np.sort(times), np.sort(np.where(events, times, math.inf)))
    return Estimate(median, len(times), interval)


def sample(values: Sequence[float], field: str, *, above: float = -math.inf) -> Array:
    """Return the values as an array.

    Raises InputError, which names the field, for no value at all, and for one that is not finite or
    not above the limit.
    """
    array = np.asarray(values, dtype=np.float64)
    if not array.size:
        raise InputError("needs at least one value", field=field)
    if not np.isfinite(array).all() or array.min() <= above:
        expected = "finite numbers" if above == -math.inf else f"finite numbers above {above:g}"
        raise InputError(f"must be {expected}", field=field, value=list(values))
    return array


def _order_interval(lows: Array, highs: Array) -> Interval | None:
    """Return the CI of the median from sorted values; `highs` has infinity for censored ones."""
    n = len(lows)
    if n < MIN_REPEATS:
        return None
    position, method = _order_position(n)
    low = np.interp(position, range(n), lows)
    high = np.interp(n - 1 - position, range(n), highs)
    return Interval(float(low), float(high), method)


@lru_cache(maxsize=256)
def _order_position(n: int) -> tuple[float, str]:
    """Return the position of the CI's low end among n sorted values, from 0, and its method.

    The k-th smallest and largest cover the median with probability 1 - 2 P(Binomial(n, 1/2) < k).
    """
    # Take the narrowest pair that covers at least 95 %. For small n the steps between pairs are
    # large; if this pair covers much more, interpolate towards the next one inside (Hettmansperger
    # & Sheather): `surplus` is the share of the step that can be given up.
    covers = 1 - 2 * stats.binom.cdf(np.arange(n // 2 + 1) - 1, n, 0.5)
    k = int(np.flatnonzero(covers >= CONFIDENCE)[-1])
    if covers[k] <= _TOO_WIDE:
        method = f"order statistics {k} and {n + 1 - k}, which cover {covers[k]:.1%}"
        return k - 1, method
    surplus = (covers[k] - CONFIDENCE) / (covers[k] - covers[k + 1])
    weight = (n - k) * surplus / (k + (n - 2 * k) * surplus)
    return float(k - 1 + weight), "interpolated order statistics"


@lru_cache(maxsize=256)
def _median_positions(n: int) -> Array:
    """Return equally probable positions of the median among n sorted values, 0 to n - 1.

    The median of n draws has the quantile Beta((n+1)/2, (n+1)/2), and sorted value i the quantile
    (i + 1/2) / n (Hazen).
    """
    probabilities = (np.arange(_GRID) + 0.5) / _GRID
    quantiles = stats.beta.ppf(probabilities, (n + 1) / 2, (n + 1) / 2)
    return np.asarray(quantiles * n - 0.5)


def log_medians(values: Array) -> Array:
    """Return the logs of equally probable medians of samples like this one."""
    return np.interp(_median_positions(len(values)), range(len(values)), np.log(np.sort(values)))
