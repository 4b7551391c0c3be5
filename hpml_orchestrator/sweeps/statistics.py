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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

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


# Models of scaling: closed forms and fits.
#
# Seconds and scales (ranks, GPUs or nodes, the same within a fit) throughout. A fit takes every run
# rather than medians, so that its intervals reflect the scatter of the runs, except for outliers,
# and predicts nothing beyond twice the largest measured scale. What cannot be fitted raises
# InputError, which names the argument.
#
# In simulated sweeps of 4 or 5 scales and 6, 10 or 20 repeats, with 2 % noise, the intervals cover
# the law's parameters in 93-97 %: with independent runs, with a factor of 20 % noise that the runs
# of a repeat share, on a machine that slows down by a third, and if one run in ten takes 3 times as
# long. The law is that of undisturbed runs; with skewed noise T1 is a geometric mean, not a median.

Number: TypeAlias = float | Array
Places: TypeAlias = NDArray[np.intp]

_ROUNDING = 1e-9  # of logs of measured values
_FAR = 5  # times the scatter; 1-2 % of simulated sweeps with normal noise have such a run
_SCATTER = 1.4826  # standard deviation over the median distance, of normal values
_WITH_A_TREND = 3  # fewest repeats
_ROUNDS = 5  # of the medians of settings and repeats, which then change no more
# --- laws of scaling


def karp_flatt(speedup: float, scale: float) -> float:
    """Return (1/S - 1/P) / (1 - 1/P), the serial fraction that a speedup at a scale over 1 implies.

    Constant over P: serial code limits; growing with P: overhead does (communication, imbalance).
    Negative for a superlinear speedup.

    Source: Karp & Flatt 1990, "Measuring parallel processor performance", CACM 33(5).
    """
    return (1 / speedup - 1 / scale) / (1 - 1 / scale)


def usl_peak(contention: float, coherency: float) -> float:
    """Return sqrt((1-a)/b), the scale of the highest throughput; infinite for b = 0.

    Source: Gunther 2007, Guerrilla Capacity Planning, chapter 4.
    """
    return math.sqrt((1 - contention) / coherency) if coherency else math.inf


# --- fits


@dataclass(frozen=True)
class Fit:
    """A model fitted to runs by least squares of the relative residuals."""

    formula: str  # with the parameters' names
    # Each with its 95 % CI if there are 6 repeats. The first one, a time or a rate, is that of the
    # middle of the sweep.
    parameters: dict[str, Estimate]
    n: int  # runs
    outliers: int  # runs among them without weight
    # Typical relative distance of a run from the curve of its repeat; 0.03 is 3 %
    residual: float
    # p-value of the F test whether the curve misses the means by more than runs scatter; None
    # without repeats, or with as many parameters as different inputs.
    lack_of_fit: float | None
    largest_scale: float  # that was measured
    curve: Callable[..., Number] = field(repr=False, compare=False)

    def predict(self, scale: float) -> float:
        """Return the model's value at a measured scale, in seconds or samples/s."""
        values = [parameter.value for parameter in self.parameters.values()]
        return float(self.curve(*values, scale))


def fit_amdahl(
    scales: Sequence[float], seconds: Sequence[float], repeats: Sequence[int] = ()
) -> Fit:
    """Fit T(P) = T1 (f + (1-f)/P) to the runs of a strong-scaling sweep at 3 or more scales.

    Runs of the same repeat, if given, share a factor, which cancels. `predict` returns seconds.

    Source: Amdahl 1967.
    """
    return _fit(
        lambda t1, f, p: t1 * (f + (1 - f) / p),
        "T(P) = T1 (f + (1-f)/P)",
        {"T1": 1, "f": 0.1},
        repeats,
        scales=scales,
        seconds=seconds,
    )


def fit_gustafson(
    scales: Sequence[float], rates: Sequence[float], repeats: Sequence[int] = ()
) -> Fit:
    """Fit X(P) = X1 (P - f(P-1)) to the runs of a weak-scaling sweep at 3 or more scales.

    Rates are samples/s of all ranks together; so is what `predict` returns. Source: Gustafson 1988.
    """
    return _fit(
        lambda x1, f, p: x1 * (p - f * (p - 1)),
        "X(P) = X1 (P - f(P-1))",
        {"X1": 1, "f": 0.1},
        repeats,
        scales=scales,
        rates=rates,
    )


def fit_usl(scales: Sequence[float], rates: Sequence[float], repeats: Sequence[int] = ()) -> Fit:
    """Fit the Universal Scalability Law, X(N) = g N / (1 + a(N-1) + b N(N-1)), at 5 or more scales.

    g is the rate of one, a the contention (serialised share) and b the coherency (cost of keeping
    each pair consistent), both 0 to 1. `predict` returns samples/s; `usl_peak` the best scale.

    Source: Gunther 2007, Guerrilla Capacity Planning.
    """
    return _fit(
        lambda g, a, b, n: g * n / (1 + a * (n - 1) + b * n * (n - 1)),
        "X(N) = g N / (1 + a(N-1) + b N(N-1))",
        {"g": 1, "a": 0.05, "b": 0.001},
        repeats,
        scales=scales,
        rates=rates,
        distinct=5,
    )


class _Repeats:
    """The repeat of each run; without repeats all runs are one."""

    def __init__(self, places: Places) -> None:
        self.numbers, self._places = np.unique(places, return_inverse=True)
        self._runs = np.bincount(self._places)

    def means(self, values: Array) -> Array:
        return np.asarray(np.bincount(self._places, values) / self._runs)

    def within(self, values: Array) -> Array:
        """Return the values without the mean of their repeat."""
        return values - self.means(values)[self._places]

    @property
    def indicators(self) -> Array:
        return np.eye(len(self.numbers))[self._places]


def _fit(
    curve: Callable[..., Number],
    formula: str,
    starts: dict[str, float],
    repeats: Sequence[int],
    distinct: int = 3,
    **columns: Sequence[float],
) -> Fit:
    """Fit a curve by least squares of log residuals: run times and rates scatter by a share.

    The first parameter is a factor of the curve. Each repeat has its own, so the others are
    estimated within repeats only.
    """
    arrays = [sample(numbers, name, above=0) for name, numbers in columns.items()]
    if len({len(array) for array in arrays}) > 1:
        raise InputError("must have as many values as each other", field=", ".join(columns))
    inputs, measured = arrays
    if (different := len(np.unique(inputs))) < distinct:
        message = f"a fit needs at least {distinct} different values"
        raise InputError(message, field=next(iter(columns)), value=different)
    first, n = np.array([*starts.values()])[1:], len(inputs)
    # Repeats of hardly more than one run say nothing about the shape of the curve.
    apart = n - len(set(repeats)) > len(first) and len(repeats) == n
    places = np.unique(repeats if apart else np.zeros(n), return_inverse=True)[1]
    times = np.log(measured) * (-1 if "rates" in columns else 1)
    far = outliers(times, np.unique(inputs, return_inverse=True)[1], places)
    left = len(inputs[~far]) - len(np.unique(places[~far])) - len(first)
    if left < 1 or len(np.unique(inputs[~far])) < different:
        far[:] = False
    counts = np.unique(inputs, return_counts=True)[1]
    enough = int(np.sum(np.bincount(places) > 1)) if apart else min(counts)
    inputs, logs, blocks = inputs[~far], np.log(measured[~far]), _Repeats(places[~far])

    def rest(shape: Array) -> Array:
        return np.asarray(logs - np.log(curve(1, *shape, inputs)))

    # Outside of these bounds the laws have no meaning: a negative serial share would be a
    # superlinear speedup.
    shape = optimize.least_squares(
        lambda shape: blocks.within(rest(shape)), first, bounds=(0, 1), x_scale=first, xtol=1e-10
    ).x
    residuals = blocks.within(rest(shape))
    freedom = len(logs) - len(blocks.numbers) - len(shape)
    variance = float(residuals @ residuals) / freedom
    slopes = optimize.approx_fprime(shape, rest).reshape(len(logs), -1).T
    within = np.array([blocks.within(slope) for slope in slopes])
    # The covariance comes from the linearised model, so the interval is symmetric. Near a bound it
    # would leave the range of the parameter and is cut there.
    covariance = variance * np.linalg.pinv(within @ within.T)
    margins = stats.t.ppf((1 + CONFIDENCE) / 2, freedom) * np.sqrt(np.diag(covariance))
    # The factor is as uncertain as the repeats scatter, and as the shape is.
    factor, own = _middle(blocks, blocks.means(rest(shape)), (variance / len(logs), freedom))
    mean_slopes = np.array([blocks.means(slope).mean() for slope in slopes])
    shared = float(mean_slopes @ covariance @ mean_slopes)
    both, together = satterthwaite(own, (shared, freedom))
    margin = float(stats.t.ppf((1 + CONFIDENCE) / 2, together)) * math.sqrt(both)
    values = [factor, *shape.tolist()]
    lows = [factor * math.exp(-margin), *np.maximum(shape - margins, 0).tolist()]
    highs = [factor * math.exp(margin), *np.minimum(shape + margins, 1).tolist()]
    parameters = {
        name: Estimate(
            value, n, Interval(low, high, "Student's t") if enough >= MIN_REPEATS else None
        )
        for name, value, low, high in zip(starts, values, lows, highs, strict=True)
    }
    return Fit(
        formula,
        parameters,
        n=n,
        outliers=int(far.sum()),
        residual=math.sqrt(variance),
        lack_of_fit=_lack_of_fit(inputs, logs, residuals, blocks, freedom=freedom),
        largest_scale=float(inputs.max()),
        curve=curve,
    )


def _middle(
    blocks: _Repeats, levels: Array, alone: tuple[float, int]
) -> tuple[float, tuple[float, int]]:
    """Return the factor in the middle of the sweep, the variance of its log and its freedom.

    `levels` are the logs of the repeats' factors. A linear drift from repeat to repeat does not
    count as scatter. `alone` are variance and degrees of freedom for less than three repeats.
    """
    middle = float(levels.mean())
    if (count := len(levels)) < _WITH_A_TREND:
        return math.exp(middle), alone
    places = blocks.numbers - blocks.numbers.mean()
    trend = places * (places @ levels) / (places @ places)
    # The mean log of factors that grow linearly is below the log of their middle, by about this.
    bend = float(trend @ trend) / count / 2
    left, freedom = levels - middle - trend, count - 2
    return math.exp(middle + bend), (float(left @ left) / freedom / count, freedom)


def _lack_of_fit(
    inputs: Array, logs: Array, residuals: Array, blocks: _Repeats, *, freedom: int
) -> float | None:
    """Return the p-value of the F test of lack of fit against the pure error of the repeats.

    Source: Draper & Smith 1998, "Applied regression analysis", chapter 2.
    """
    # Repeats at one scale show how much runs scatter whatever the law, once each scale and each
    # repeat has its own factor. The residuals' excess over that is what the curve misses.
    groups, member = np.unique(inputs, return_inverse=True)
    design = np.column_stack([np.eye(len(groups))[member], blocks.indicators])
    factors, _, rank, _ = np.linalg.lstsq(design, logs)
    degrees = freedom - (len(logs) - rank), len(logs) - rank
    if min(degrees) < 1:
        return None
    pure = float(np.sum((logs - design @ factors) ** 2))
    lack = max(0.0, float(residuals @ residuals) - pure)
    if pure <= len(logs) * _ROUNDING**2:  # runs without any scatter
        return float(lack <= len(logs) * _ROUNDING**2)
    return float(stats.f.sf(lack / degrees[0] / (pure / degrees[1]), *degrees))


def outliers(logs: Array, settings: Places, repeats: Places) -> NDArray[np.bool_]:
    """Return which runs lie far outside of the scatter, given the logs of their seconds.

    Each setting and each repeat has its own factor, so a repeat in which all runs are slow has no
    outliers. Both are medians, the lower ones of an even number: disturbances only slow runs down,
    so of two groups of runs the fast one is the undisturbed one.
    """
    typical, shared = np.zeros(settings.max() + 1), np.zeros(repeats.max() + 1)
    for _ in range(_ROUNDS):
        for one in range(len(typical)):
            own = settings == one
            typical[one] = _lower_median(logs[own] - shared[repeats[own]])
        for one in range(len(shared) if len(shared) > 1 else 0):
            own = repeats == one
            # If half of a repeat is slow, the 0 decides that the repeat as a whole is not.
            shared[one] = _lower_median(np.append(logs[own] - typical[settings[own]], 0))
    distances = np.abs(logs - typical[settings] - shared[repeats])
    # A median passes through one of its values, whose distance is 0 however much runs scatter.
    fitted = len(typical) + len(shared) - 1
    if len(logs) <= fitted:
        return np.zeros(len(logs), dtype=bool)
    scatter = _SCATTER * float(np.median(np.sort(distances)[fitted:]))
    return np.asarray(distances > _FAR * max(scatter, _ROUNDING))


def _lower_median(values: Array) -> float:
    return float(np.sort(values)[(len(values) - 1) // 2])
