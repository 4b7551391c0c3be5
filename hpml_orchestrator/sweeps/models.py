"""Models of scaling: closed forms and fits.

Seconds and scales (ranks, GPUs or nodes, the same within a fit) throughout. A fit takes every run
rather than medians, so that its intervals reflect the scatter of the runs, and predicts nothing
beyond twice the largest measured scale. What cannot be fitted raises InputError, which names the
argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from scipy import optimize, stats

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.sweeps.statistics import CONFIDENCE, Array, Estimate, Interval, sample

Number: TypeAlias = float | Array

_ROUNDING = 1e-9  # of logs of measured values
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
    parameters: dict[str, Estimate]  # each with its 95 % CI
    n: int  # runs
    residual: float  # typical relative distance of a run from the curve; 0.03 is 3 %
    # p-value of the F test whether the curve misses the means by more than runs scatter; None
    # without repeats, or with as many parameters as different inputs.
    lack_of_fit: float | None
    largest_scale: float  # that was measured
    curve: Callable[..., Number] = field(repr=False, compare=False)

    def predict(self, scale: float) -> float:
        """Return the model's value at a measured scale, in seconds or samples/s."""
        values = [parameter.value for parameter in self.parameters.values()]
        return float(self.curve(*values, scale))


def fit_amdahl(scales: Sequence[float], seconds: Sequence[float]) -> Fit:
    """Fit T(P) = T1 (f + (1-f)/P) to the runs of a strong-scaling sweep at 3 or more scales.

    `predict` returns seconds. Source: Amdahl 1967.
    """
    return _fit(
        lambda t1, f, p: t1 * (f + (1 - f) / p),
        "T(P) = T1 (f + (1-f)/P)",
        {"T1": None, "f": 0.1},
        scales=scales,
        seconds=seconds,
    )


def fit_gustafson(scales: Sequence[float], rates: Sequence[float]) -> Fit:
    """Fit X(P) = X1 (P - f(P-1)) to the runs of a weak-scaling sweep at 3 or more scales.

    Rates are samples/s of all ranks together; so is what `predict` returns. Source: Gustafson 1988.
    """
    return _fit(
        lambda x1, f, p: x1 * (p - f * (p - 1)),
        "X(P) = X1 (P - f(P-1))",
        {"X1": None, "f": 0.1},
        scales=scales,
        rates=rates,
    )


def fit_usl(scales: Sequence[float], rates: Sequence[float]) -> Fit:
    """Fit the Universal Scalability Law, X(N) = g N / (1 + a(N-1) + b N(N-1)), at 5 or more scales.

    g is the rate of one, a the contention (serialised share) and b the coherency (cost of keeping
    each pair consistent), both 0 to 1. `predict` returns samples/s; `usl_peak` the best scale.

    Source: Gunther 2007, Guerrilla Capacity Planning.
    """
    return _fit(
        lambda g, a, b, n: g * n / (1 + a * (n - 1) + b * n * (n - 1)),
        "X(N) = g N / (1 + a(N-1) + b N(N-1))",
        {"g": None, "a": 0.05, "b": 0.001},
        scales=scales,
        rates=rates,
        distinct=5,
    )


def _fit(
    curve: Callable[..., Number],
    formula: str,
    starts: dict[str, float | None],
    distinct: int = 3,
    **columns: Sequence[float],
) -> Fit:
    """Fit a curve by least squares of log residuals: run times and rates scatter by a share."""
    arrays = [sample(numbers, name, above=0) for name, numbers in columns.items()]
    if len({len(array) for array in arrays}) > 1:
        raise InputError("must have as many values as each other", field=", ".join(columns))
    inputs, measured = arrays
    if (different := len(np.unique(inputs))) < distinct:
        message = f"a fit needs at least {distinct} different values"
        raise InputError(message, field=next(iter(columns)), value=different)
    units = np.array(  # parameters differ by many orders of magnitude
        [
            np.min(measured / curve(*alone, inputs)) if start is None else start
            for alone, start in zip(np.eye(len(starts)), starts.values(), strict=True)
        ]
    )
    highest = np.array([math.inf if start is None else 1 for start in starts.values()])
    logs = np.log(measured)
    multiples, covariance = optimize.curve_fit(
        lambda _, *multiples: np.log(curve(*(units * multiples), inputs)),
        inputs,
        logs,
        p0=np.ones(len(units)),
        # Outside of these bounds the laws have no meaning: a negative serial share would be a
        # superlinear speedup.
        bounds=(0, highest / units),
    )
    values, errors = multiples * units, np.sqrt(np.diag(covariance)) * units
    freedom = len(logs) - len(values)
    # The covariance comes from the linearised model, so the interval is symmetric. Near a bound it
    # would leave the range of the parameter and is cut there.
    margins = stats.t.ppf((1 + CONFIDENCE) / 2, freedom) * errors
    bounds = np.maximum(values - margins, 0), np.minimum(values + margins, highest)
    parameters = {
        name: Estimate(value, len(logs), Interval(low, high, "Student's t"))
        for name, value, low, high in zip(
            starts, *np.array([values, *bounds]).tolist(), strict=True
        )
    }
    residuals = np.log(curve(*values, inputs)) - logs
    return Fit(
        formula,
        parameters,
        n=len(logs),
        residual=float(np.sqrt(np.sum(residuals**2) / freedom)),
        lack_of_fit=_lack_of_fit(inputs, logs, residuals, parameters=len(values)),
        largest_scale=float(inputs.max()),
        curve=curve,
    )


def _lack_of_fit(
    inputs: Array, measured: Array, residuals: Array, *, parameters: int
) -> float | None:
    """Return the p-value of the F test of lack of fit against the pure error of the repeats.

    Source: Draper & Smith 1998, "Applied regression analysis", chapter 2.
    """
    groups, member = np.unique(inputs, return_inverse=True)
    count = len(groups)
    degrees = count - parameters, len(measured) - count
    if min(degrees) < 1:
        return None
    means = np.bincount(member, measured) / np.bincount(member)
    # Repeats at one scale show how much runs scatter whatever the law. The residuals' excess over
    # that is what the curve misses.
    pure = float(np.sum((measured - means[member]) ** 2))
    lack = max(0.0, float(np.sum(residuals**2)) - pure)
    if pure <= len(measured) * _ROUNDING**2:  # runs without any scatter
        return float(lack <= len(measured) * _ROUNDING**2)
    return float(stats.f.sf(lack / degrees[0] / (pure / degrees[1]), *degrees))
