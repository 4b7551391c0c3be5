"""Models of scaling, communication and compute; closed forms and fits.

Seconds, bytes, flop and scales (ranks, GPUs or nodes, counted alike within a fit) throughout. A fit
takes every run rather than medians, so that its intervals know how much the runs scatter, and
predicts nothing beyond twice the largest measured scale. A number that is out of its range raises
InputError, which names the argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
from scipy import optimize, stats

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.sweeps.statistics import CONFIDENCE, Array, Estimate, Interval, sample

__all__ = [
    "Algorithm",
    "Collective",
    "Fit",
    "allreduce_crossover",
    "allreduce_seconds",
    "amdahl_speedup",
    "bus_bandwidth_factor",
    "fit_allreduce",
    "fit_amdahl",
    "fit_gustafson",
    "fit_usl",
    "gustafson_speedup",
    "karp_flatt",
    "mfu",
    "roofline_flops",
    "roofline_ridge",
    "usl_peak",
]

Number: TypeAlias = float | Array
Algorithm = Literal["ring", "tree", "pipelined tree", "parameter server"]
Collective = Literal[
    "allreduce", "reduce-scatter", "all-gather", "all-to-all", "broadcast", "reduce"
]

_ROUNDING = 1e-9  # of logs of measured values
_RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("contention", "serial_fraction"), (0, 1)),
    **dict.fromkeys(("alpha", "beta", "size_bytes"), (0, math.inf)),
    "coherency": (0, math.inf),
    "scale": (1, math.inf),
    "ranks": (2, math.inf),
}
"""Lowest and highest value of an argument; the others are above 0."""


# --- laws of scaling


def amdahl_speedup(serial_fraction: float, scale: float) -> float:
    """Return 1 / (f + (1-f)/P), the speedup of fixed work of which a fraction f is serial.

    Source: Amdahl 1967, "Validity of the single processor approach".
    """
    _check(serial_fraction=serial_fraction, scale=scale)
    return 1 / (serial_fraction + (1 - serial_fraction) / scale)


def gustafson_speedup(serial_fraction: float, scale: float) -> float:
    """Return P - f(P-1), the scaled speedup of work that grows with P.

    The fraction f is that of the time on P processors, not of the time on one.

    Source: Gustafson 1988, "Reevaluating Amdahl's law", CACM 31(5).
    """
    _check(serial_fraction=serial_fraction, scale=scale)
    return scale - serial_fraction * (scale - 1)


def karp_flatt(speedup: float, scale: float) -> float:
    """Return (1/S - 1/P) / (1 - 1/P), the serial fraction that a speedup at a scale over 1 implies.

    Constant over P: serial code limits; growing with P: overhead does (communication, imbalance).
    Negative for a superlinear speedup.

    Source: Karp & Flatt 1990, "Measuring parallel processor performance", CACM 33(5).
    """
    _check(speedup=speedup, scale=scale)
    if scale == 1:
        raise InputError("must be above 1", field="scale", value=scale)
    return (1 / speedup - 1 / scale) / (1 - 1 / scale)


def usl_peak(contention: float, coherency: float) -> float:
    """Return sqrt((1-a)/b), the scale of the highest throughput; infinite for b = 0.

    Source: Gunther 2007, Guerrilla Capacity Planning, chapter 4.
    """
    _check(contention=contention, coherency=coherency)
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

    def predict(self, scale: float, *size_bytes: float) -> float:
        """Return the model's value, in seconds or samples/s; allreduce needs its `size_bytes`.

        Raises InputError below scale 1 and beyond twice the largest measured scale.
        """
        limit = 2 * self.largest_scale
        if not 1 <= scale <= limit:
            message = f"must be between 1 and {limit:g}, twice the largest measured scale"
            raise InputError(message, field="scale", value=scale)
        values = [parameter.value for parameter in self.parameters.values()]
        return float(self.curve(*values, scale, *size_bytes))


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


def fit_allreduce(
    ranks: Sequence[int],
    size_bytes: Sequence[float],
    seconds: Sequence[float],
    algorithm: Algorithm = "ring",
    *,
    servers: int = 1,
) -> Fit:
    """Fit alpha (seconds) and beta (seconds/byte) of `allreduce_seconds` at 3 or more sizes.

    Residuals are relative, so that small messages count as much as large ones. Links inside and
    between nodes differ: fit each apart. `predict(ranks, size_bytes)` returns seconds.

    Source: as `allreduce_seconds`; Hockney 1994 for alpha and beta.
    """

    def duration(alpha: float, beta: float, scale: Number, size: Number) -> Number:
        messages, transfers = _allreduce_terms(algorithm, scale, servers)
        return messages * alpha + transfers * beta * size

    return _fit(
        duration,
        f"T(P, n) of the {algorithm}",
        {"alpha": None, "beta": None},
        ranks=ranks,
        size_bytes=size_bytes,
        seconds=seconds,
    )


def _fit(
    curve: Callable[..., Number],
    formula: str,
    starts: dict[str, float | None],
    distinct: int = 3,
    **columns: Sequence[float],
) -> Fit:
    """Fit a curve by least squares of log residuals: run times and rates scatter by a share.

    Args:
        curve: returns what is measured for parameters and inputs.
        formula: that of the curve.
        starts: of the search, by parameter; a share of 0 to 1, or None for a positive factor.
        distinct: how many different values of the last input a fit needs.
        columns: scales, perhaps other inputs, and what was measured; a value a run.
    """
    arrays = [sample(numbers, name, above=0) for name, numbers in columns.items()]
    if len({len(array) for array in arrays}) > 1:
        raise InputError("must have as many values as each other", field=", ".join(columns))
    *inputs, measured = arrays
    if (different := len(np.unique(inputs[-1]))) < distinct:
        message = f"a fit needs at least {distinct} different values"
        raise InputError(message, field=list(columns)[-2], value=different)
    units = np.array(  # parameters differ by many orders of magnitude
        [
            np.min(measured / curve(*alone, *inputs)) if start is None else start
            for alone, start in zip(np.eye(len(starts)), starts.values(), strict=True)
        ]
    )
    highest = np.array([math.inf if start is None else 1 for start in starts.values()])
    logs = np.log(measured)
    multiples, covariance = optimize.curve_fit(
        lambda _, *multiples: np.log(curve(*(units * multiples), *inputs)),
        inputs[0],
        logs,
        p0=np.ones(len(units)),
        bounds=(0, highest / units),
    )
    values, errors = multiples * units, np.sqrt(np.diag(covariance)) * units
    freedom = len(logs) - len(values)
    margins = stats.t.ppf((1 + CONFIDENCE) / 2, freedom) * errors
    bounds = np.maximum(values - margins, 0), np.minimum(values + margins, highest)
    parameters = {
        name: Estimate(value, len(logs), Interval(low, high, "Student's t"))
        for name, value, low, high in zip(
            starts, *np.array([values, *bounds]).tolist(), strict=True
        )
    }
    residuals = np.log(curve(*values, *inputs)) - logs
    return Fit(
        formula,
        parameters,
        n=len(logs),
        residual=float(np.sqrt(np.sum(residuals**2) / freedom)),
        lack_of_fit=_lack_of_fit(np.stack(inputs), logs, residuals, parameters=len(values)),
        largest_scale=float(inputs[0].max()),
        curve=curve,
    )


def _lack_of_fit(
    inputs: Array, measured: Array, residuals: Array, *, parameters: int
) -> float | None:
    """Return the p-value of the F test of lack of fit against the pure error of the repeats.

    Source: Draper & Smith 1998, "Applied regression analysis", chapter 2.
    """
    groups, member = np.unique(inputs, axis=1, return_inverse=True)
    count = groups.shape[1]
    degrees = count - parameters, len(measured) - count
    if min(degrees) < 1:
        return None
    member = member.reshape(-1)
    means = np.bincount(member, measured) / np.bincount(member)
    pure = float(np.sum((measured - means[member]) ** 2))
    lack = max(0.0, float(np.sum(residuals**2)) - pure)
    if pure <= len(measured) * _ROUNDING**2:  # runs without any scatter
        return float(lack <= len(measured) * _ROUNDING**2)
    return float(stats.f.sf(lack / degrees[0] / (pure / degrees[1]), *degrees))


# --- communication


def allreduce_seconds(
    algorithm: Algorithm,
    ranks: int,
    size_bytes: float,
    *,
    alpha: float,
    beta: float,
    servers: int = 1,
) -> float:
    """Return the seconds of an allreduce in the latency-bandwidth model.

    ring: 2(P-1) alpha + 2(P-1)/P n beta; tree (reduce, then broadcast): 2 log2 P (alpha + n beta);
    pipelined tree: 2 log2 P alpha + 2(P-1)/P n beta; parameter server with s shards: 2 alpha +
    2 P/s n beta.

    P is `ranks` and n `size_bytes`, what each rank contributes; alpha is the latency of a message
    in seconds, beta the seconds for each byte (inverse bandwidth), s `servers`.

    Source: Thakur, Rabenseifner & Gropp 2005, "Optimization of collective communication operations
    in MPICH"; Ben-Nun & Hoefler 2019, "Demystifying parallel and distributed deep learning".
    """
    _check(size_bytes=size_bytes, alpha=alpha, beta=beta)
    messages, transfers = _allreduce_terms(algorithm, ranks, servers)
    return float(messages * alpha + transfers * beta * size_bytes)


def allreduce_crossover(
    first: Algorithm, second: Algorithm, ranks: int, *, alpha: float, beta: float, servers: int = 1
) -> float | None:
    """Return the bytes at which two algorithms take equally long; None if one is never slower.

    Below that size, the one with fewer messages is faster. Source: as `allreduce_seconds`.
    """
    _check(alpha=alpha, beta=beta)
    one, other = (_allreduce_terms(name, ranks, servers) for name in (first, second))
    messages, transfers = float(one[0] - other[0]), float(one[1] - other[1])
    return -messages * alpha / (transfers * beta) if messages * transfers < 0 else None


def bus_bandwidth_factor(collective: Collective, ranks: int) -> float:
    """Return bus bandwidth / algorithm bandwidth (bytes / seconds); comparable over rank counts.

    Source: nccl-tests, doc/PERFORMANCE.md.
    """
    _check(ranks=ranks)
    share = (ranks - 1) / ranks
    return {"allreduce": 2 * share, "broadcast": 1.0, "reduce": 1.0}.get(collective, share)


def _allreduce_terms(algorithm: Algorithm, ranks: Number, servers: int) -> tuple[Number, Number]:
    """Return how many alpha, and how many n beta, an allreduce takes on each number of ranks."""
    _check(ranks=float(np.min(ranks)), servers=servers)
    steps, volume = 2 * np.log2(ranks), 2 * (ranks - 1) / ranks
    terms: dict[Algorithm, tuple[Number, Number]] = {
        "ring": (2 * (ranks - 1), volume),
        "tree": (steps, steps),
        "pipelined tree": (steps, volume),
        "parameter server": (2, 2 * ranks / servers),
    }
    return terms[algorithm]


# --- compute


def roofline_ridge(peak_flops: float, bandwidth: float) -> float:
    """Return the flop/byte from which on a device's *measured* peak (flop/s) can be reached.

    `bandwidth` is the measured one of its memory, in bytes/s.

    Source: Williams, Waterman & Patterson 2009, "Roofline", CACM 52(4).
    """
    _check(peak_flops=peak_flops, bandwidth=bandwidth)
    return peak_flops / bandwidth


def roofline_flops(intensity: float, peak_flops: float, bandwidth: float) -> float:
    """Return the highest flop/s of code that does `intensity` flop for each byte.

    Units and source as for `roofline_ridge`: below the ridge memory limits, above it the device.
    """
    _check(intensity=intensity, peak_flops=peak_flops, bandwidth=bandwidth)
    return min(peak_flops, intensity * bandwidth)


def mfu(
    parameters: float, tokens_per_second: float, gpus: int, peak_flops: float, dtype: str
) -> tuple[float, str]:
    """Return model flops utilisation of a transformer's training, and the line that says it.

    It is the share of the peak that is used, without attention's flop. `tokens_per_second` are of
    all GPUs together, `peak_flops` the dense flop/s of one GPU in the dtype.

    Source: Chowdhery et al. 2022, "PaLM", appendix B; Kaplan et al. 2020 for the 6 N.
    """
    _check(gpus=gpus, peak_flops=peak_flops)
    share = 6 * parameters * tokens_per_second / (gpus * peak_flops)
    terms = f"N = {parameters:.4g}, {tokens_per_second:.4g} tokens/s, P = {gpus}"
    peak = f"peak {peak_flops / 1e12:.4g} Tflop/s {dtype}"
    return share, f"{100 * share:.1f} % = 6 N tokens/s / (P peak), {terms}, {peak}"


def _check(**numbers: float) -> None:
    """Refuse a number that is not finite, or not in its range."""
    for name, number in numbers.items():
        low, high = _RANGES.get(name, (math.ulp(0), math.inf))
        if not (math.isfinite(number) and low <= number <= high):
            span = "above 0" if name not in _RANGES else f"at least {low}"
            span += f" and at most {high}" if math.isfinite(high) else ""
            raise InputError(f"must be {span}", field=name, value=number)
