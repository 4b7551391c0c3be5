"""Models of scaling: closed forms and fits.

Seconds and scales (ranks, GPUs or nodes, the same within a fit) throughout. A fit takes every run
rather than medians, so that its intervals reflect the scatter of the runs, except for outliers, and
predicts nothing beyond twice the largest measured scale. What cannot be fitted raises InputError,
which names the argument.

In simulated sweeps of 4 or 5 scales and 6, 10 or 20 repeats, with 2 % noise, the intervals cover
the law's parameters in 93-97 %: with independent runs, with a factor of 20 % noise that the runs of
a repeat share, on a machine that slows down by a third, and if one run in ten takes 3 times as
long. The law is that of undisturbed runs; with skewed noise T1 is a geometric mean, not a median.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.sweeps.statistics import (
    CONFIDENCE,
    MIN_REPEATS,
    Array,
    Estimate,
    Interval,
    sample,
    satterthwaite,
)

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
