"""Models of scaling, communication, compute and memory; closed forms and fits.

Seconds, bytes, flop and scales (ranks, GPUs or nodes, counted alike within a fit) throughout. A fit
takes every run rather than medians, so that its intervals know how much the runs scatter, and
predicts nothing beyond twice the largest measured scale. A number that is out of its range raises
InputError, which names the argument.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

import numpy as np
from scipy import optimize, stats

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.sweeps.statistics import CONFIDENCE, Estimate, Interval, positive

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpml_orchestrator.sweeps.statistics import Array

    Curve: TypeAlias = Callable[[Array, Array, Array], Array]  # (parameters, scales, sizes)

__all__ = [
    "Algorithm",
    "Collective",
    "Fit",
    "MemoryEstimate",
    "Mfu",
    "Roofline",
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
    "memory_estimate",
    "usl_peak",
]

Algorithm = Literal["ring", "tree", "pipelined tree", "parameter server"]
Collective = Literal[
    "allreduce", "reduce-scatter", "all-gather", "all-to-all", "broadcast", "reduce"
]


@dataclass(frozen=True)
class Fit:
    """A model fitted to runs by least squares of the relative residuals.

    Attributes:
        formula: what was fitted, with its parameters' names.
        source: where the model comes from.
        parameters: value and 95 % CI (Student's t) of each, by name.
        n: runs.
        r_squared: share of the variance of log values that the model explains.
        residual: typical relative distance of a run from the curve; 0.03 is 3 %.
        largest_scale: the largest that was measured.
    """

    formula: str
    source: str
    parameters: dict[str, Estimate]
    n: int
    r_squared: float
    residual: float
    largest_scale: float
    curve: Curve = field(repr=False, compare=False)

    def predict(self, scale: float, size_bytes: float = 0) -> float:
        """Return the model's value, in seconds or samples/s; `size_bytes` is for allreduce alone.

        Raises InputError below scale 1 and beyond twice the largest measured scale.
        """
        limit = 2 * self.largest_scale
        if not 1 <= scale <= limit:
            message = f"must be between 1 and {limit:g}, twice the largest measured scale"
            raise InputError(message, field="scale", value=scale)
        values = np.array([parameter.value for parameter in self.parameters.values()])
        return float(self.curve(values, np.array([scale]), np.array([size_bytes]))[0])


# --- laws of scaling


def amdahl_speedup(serial_fraction: float, scale: float) -> float:
    """Return 1 / (f + (1-f)/P), the speedup of fixed work of which a fraction f is serial.

    Source: Amdahl 1967, "Validity of the single processor approach".
    """
    _check(serial_fraction, "serial_fraction", 0, 1)
    _check(scale, "scale", 1)
    return 1 / (serial_fraction + (1 - serial_fraction) / scale)


def gustafson_speedup(serial_fraction: float, scale: float) -> float:
    """Return P - f(P-1), the scaled speedup of work that grows with P.

    The fraction f is that of the time on P processors, not of the time on one.

    Source: Gustafson 1988, "Reevaluating Amdahl's law", CACM 31(5).
    """
    _check(serial_fraction, "serial_fraction", 0, 1)
    _check(scale, "scale", 1)
    return scale - serial_fraction * (scale - 1)


def karp_flatt(speedup: float, scale: float) -> float:
    """Return (1/S - 1/P) / (1 - 1/P), the serial fraction that a measured speedup implies.

    Constant over P: serial code limits; growing with P: overhead does (communication, imbalance).
    Negative for a superlinear speedup.

    Source: Karp & Flatt 1990, "Measuring parallel processor performance", CACM 33(5).
    """
    _check(speedup, "speedup", 0, above=True)
    _check(scale, "scale", 1, above=True)
    return (1 / speedup - 1 / scale) / (1 - 1 / scale)


def usl_peak(contention: float, coherency: float) -> float:
    """Return sqrt((1-a)/b), the scale of the highest throughput; infinite for b = 0.

    Source: Gunther 2007, Guerrilla Capacity Planning, chapter 4.
    """
    _check(contention, "contention", 0, 1)
    _check(coherency, "coherency", 0)
    return math.sqrt((1 - contention) / coherency) if coherency else math.inf


def fit_amdahl(scales: Sequence[float], seconds: Sequence[float]) -> Fit:
    """Fit T(P) = T1 (f + (1-f)/P) to the runs of a strong-scaling sweep at 3 or more scales.

    `predict` returns seconds. Source: Amdahl 1967.
    """
    points, times = _runs(3, "scales", scales=scales, seconds=seconds)
    return _fit(
        lambda values, scale, _: values[0] * (values[1] + (1 - values[1]) / scale),
        (points, points),
        times,
        about=("T(P) = T1 (f + (1-f)/P)", "Amdahl 1967"),
        start={"T1": times.max(), "f": 0.1},
        highest=(np.inf, 1),
    )


def fit_gustafson(scales: Sequence[float], rates: Sequence[float]) -> Fit:
    """Fit X(P) = X1 (P - f(P-1)) to the runs of a weak-scaling sweep at 3 or more scales.

    Rates are samples/s of all ranks together; so is what `predict` returns. Source: Gustafson 1988.
    """
    points, measured = _runs(3, "scales", scales=scales, rates=rates)
    return _fit(
        lambda values, scale, _: values[0] * (scale - values[1] * (scale - 1)),
        (points, points),
        measured,
        about=("X(P) = X1 (P - f(P-1))", "Gustafson 1988"),
        start={"X1": np.max(measured / points), "f": 0.1},
        highest=(np.inf, 1),
    )


def fit_usl(scales: Sequence[float], rates: Sequence[float]) -> Fit:
    """Fit the Universal Scalability Law, X(N) = g N / (1 + a(N-1) + b N(N-1)), at 5 or more scales.

    g is the rate of one, a the contention (serialised share) and b the coherency (cost of keeping
    each pair consistent); all at least 0. `predict` returns samples/s; `usl_peak` the best scale.

    Source: Gunther 2007, Guerrilla Capacity Planning.
    """

    def rate(values: Array, scale: Array, _size: Array) -> Array:
        g, a, b = values
        return np.asarray(g * scale / (1 + a * (scale - 1) + b * scale * (scale - 1)))

    points, measured = _runs(5, "scales", scales=scales, rates=rates)
    return _fit(
        rate,
        (points, points),
        measured,
        about=("X(N) = g N / (1 + a(N-1) + b N(N-1))", "Gunther 2007, Guerrilla Capacity Planning"),
        start={"g": np.max(measured / points), "a": 0.05, "b": 0.001},
        highest=(np.inf, 1, np.inf),
    )


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
    messages, transfers = _allreduce_terms(algorithm, np.array([float(ranks)]), servers)
    for name, number in (("size_bytes", size_bytes), ("alpha", alpha), ("beta", beta)):
        _check(number, name, 0)
    return float(messages[0] * alpha + transfers[0] * beta * size_bytes)


def allreduce_crossover(
    first: Algorithm, second: Algorithm, ranks: int, *, alpha: float, beta: float, servers: int = 1
) -> float | None:
    """Return the bytes at which two algorithms take equally long; None if one is never slower.

    Below that size, the one with fewer messages is faster. Source: as `allreduce_seconds`.
    """
    _check(alpha, "alpha", 0, above=True)
    _check(beta, "beta", 0, above=True)
    terms = [_allreduce_terms(name, np.array([float(ranks)]), servers) for name in (first, second)]
    messages, transfers = (float(a[0] - b[0]) for a, b in zip(*terms, strict=True))
    return -messages * alpha / (transfers * beta) if messages * transfers < 0 else None


def fit_allreduce(
    ranks: Sequence[int],
    size_bytes: Sequence[float],
    seconds: Sequence[float],
    algorithm: Algorithm = "ring",
    *,
    servers: int = 1,
) -> Fit:
    """Fit alpha (seconds) and beta (seconds/byte), both at least 0, at 3 or more sizes.

    Residuals are relative, so that small messages count as much as large ones. Links inside and
    between nodes differ: fit each apart. `predict(ranks, size_bytes)` returns seconds.

    Source: as `allreduce_seconds`; Hockney 1994 for alpha and beta.
    """

    def duration(values: Array, scale: Array, size: Array) -> Array:
        messages, transfers = _allreduce_terms(algorithm, scale, servers)
        return np.asarray(messages * values[0] + transfers * values[1] * size)

    points, sizes, times = _runs(
        3, "size_bytes", ranks=ranks, size_bytes=size_bytes, seconds=seconds
    )
    unit = np.array([1.0, 0]), np.array([0, 1.0])
    alpha, beta = (np.min(times / duration(only, points, sizes)) for only in unit)
    return _fit(
        duration,
        (points, sizes),
        times,
        about=(f"T(P, n) of the {algorithm}", "Thakur, Rabenseifner & Gropp 2005"),
        start={"alpha": alpha, "beta": beta},
        highest=(np.inf, np.inf),
    )


def bus_bandwidth_factor(collective: Collective, ranks: int) -> float:
    """Return bus bandwidth / algorithm bandwidth (bytes / seconds); comparable over rank counts.

    Source: nccl-tests, doc/PERFORMANCE.md.
    """
    _check(ranks, "ranks", 2)
    share = (ranks - 1) / ranks
    return {"allreduce": 2 * share, "broadcast": 1.0, "reduce": 1.0}.get(collective, share)


# --- compute


@dataclass(frozen=True)
class Roofline:
    """A device's *measured* peaks: flop/s and memory bytes/s.

    Source: Williams, Waterman & Patterson 2009, "Roofline", CACM 52(4).
    """

    peak_flops: float
    bandwidth: float

    @property
    def ridge(self) -> float:
        """Flop/byte from which on the peak can be reached."""
        return self.peak_flops / self.bandwidth

    def attainable(self, intensity: float) -> float:
        """Return the highest flop/s of code that does `intensity` flop for each byte."""
        _check(intensity, "intensity", 0, above=True)
        return min(self.peak_flops, intensity * self.bandwidth)

    def bound(self, intensity: float) -> Literal["memory", "compute"]:
        """Return what limits code that does `intensity` flop for each byte."""
        return "memory" if self.attainable(intensity) < self.peak_flops else "compute"


@dataclass(frozen=True)
class Mfu:
    """Model flops utilisation of a transformer's training, without attention's flop.

    N `parameters`, tokens/s of all P `gpus` together, dense flop/s of one GPU in the dtype.

    Source: Chowdhery et al. 2022, "PaLM", appendix B; Kaplan et al. 2020 for the 6 N.
    """

    parameters: float
    tokens_per_second: float
    gpus: int
    peak_flops: float
    dtype: str
    formula: ClassVar[str] = "6 N tokens/s / (P peak)"

    def __post_init__(self) -> None:
        for name in ("parameters", "tokens_per_second", "gpus", "peak_flops"):
            _check(getattr(self, name), name, 0, above=True)

    @property
    def value(self) -> float:
        """The share of the peak that is used."""
        return 6 * self.parameters * self.tokens_per_second / (self.gpus * self.peak_flops)

    def __str__(self) -> str:
        terms = f"N = {self.parameters:.4g}, {self.tokens_per_second:.4g} tokens/s, P = {self.gpus}"
        peak = f"peak {self.peak_flops / 1e12:.4g} Tflop/s {self.dtype}"
        return f"{100 * self.value:.1f} % = {self.formula}, {terms}, {peak}"


# --- memory


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that each GPU needs under each way to train, and the first that fits.

    Attributes:
        strategies: bytes on each GPU by name, from the simplest to the most intrusive.
        usable_bytes: of the device, without the reserve.
        advice: the first strategy that fits; None if none does.
    """

    strategies: dict[str, float]
    usable_bytes: float
    advice: str | None
    formula: ClassVar[str] = (
        "18 bytes/parameter (2 weights, 4 gradients, 12 AdamW and master weights) + activations"
    )


def memory_estimate(
    parameters: float,
    activation_bytes: float,
    layers: int,
    device_bytes: float,
    *,
    gpus: int = 1,
    gpus_per_node: int = 1,
    reserve: float = 0.1,
) -> MemoryEstimate:
    """Return which way to train with AdamW in mixed precision fits into the GPUs' memory.

    Checkpointing keeps about 2 sqrt(layers) of the layers' activations, and all ways after it use
    it too. The pipeline gets as many micro-batches as it has stages. `activation_bytes` are those
    of one GPU's micro-batch without checkpointing; `reserve` is the share of `device_bytes` (one
    GPU) that the CUDA context, NCCL and fragmentation take.

    Source: Rajbhandari et al. 2020, "ZeRO"; Chen et al. 2016, "Training deep nets with sublinear
    memory cost"; Hugging Face, "Model training anatomy", for the 18 bytes.
    """
    counts = {"parameters": parameters, "layers": layers, "device_bytes": device_bytes}
    for name, number in {**counts, "gpus": gpus, "gpus_per_node": gpus_per_node}.items():
        _check(number, name, 1)
    _check(activation_bytes, "activation_bytes", 0)
    _check(reserve, "reserve", 0, 1)
    weights, gradients, optimizer = 2 * parameters, 4 * parameters, 12 * parameters
    state = weights + gradients + optimizer
    kept = activation_bytes * min(1, 2 / math.sqrt(layers))
    gathered = weights / layers  # FSDP has the weights of one layer whole at a time
    inside = min(gpus, gpus_per_node)
    strategies = {
        "DDP": state + activation_bytes,
        "DDP with activation checkpointing": state + kept,
        "ZeRO-1": weights + gradients + optimizer / gpus + kept,
        "ZeRO-2": weights + (gradients + optimizer) / gpus + kept,
        "FSDP": state / gpus + gathered + kept,
        "FSDP, tensor parallel inside the node": state / gpus + (gathered + kept) / inside,
        "tensor parallel inside the node, pipeline between nodes": (state + kept) / gpus,
    }
    usable = (1 - reserve) * device_bytes
    advice = next((name for name, need in strategies.items() if need <= usable), None)
    return MemoryEstimate(strategies, usable, advice)


# --- fitting


def _fit(
    curve: Curve,
    inputs: tuple[Array, Array],
    measured: Array,
    *,
    about: tuple[str, str],
    start: dict[str, float],
    highest: tuple[float, ...],
) -> Fit:
    """Fit a curve by least squares of log residuals; parameters lie between 0 and `highest`.

    Run times and rates scatter by a share of themselves, so their logs scatter evenly.
    """
    units = np.array(list(start.values()))  # alpha and beta differ by many orders of magnitude
    logs = np.log(measured)
    solution = optimize.least_squares(
        lambda multiples: np.log(curve(multiples * units, *inputs)) - logs,
        np.ones(len(units)),
        jac="3-point",
        bounds=(0, np.array(highest) / units),
        **dict.fromkeys(("xtol", "ftol", "gtol"), 1e-12),
    )
    values = solution.x * units
    freedom = len(measured) - len(values)
    squares = 2 * float(solution.cost)
    covariance = np.linalg.inv(solution.jac.T @ solution.jac) * squares / freedom
    margins = stats.t.ppf((1 + CONFIDENCE) / 2, freedom) * np.sqrt(np.diag(covariance)) * units
    lows, highs = np.maximum(values - margins, 0), np.minimum(values + margins, highest)
    parameters = {
        name: Estimate(
            float(values[i]),
            len(measured),
            Interval(float(lows[i]), float(highs[i]), CONFIDENCE, "Student's t"),
            "fit",
        )
        for i, name in enumerate(start)
    }
    spread = float(np.sum((logs - logs.mean()) ** 2))
    return Fit(
        *about,
        parameters,
        n=len(measured),
        r_squared=1 - squares / spread if spread else 1.0,
        residual=math.sqrt(squares / freedom),
        largest_scale=float(inputs[0].max()),
        curve=curve,
    )


def _allreduce_terms(algorithm: Algorithm, ranks: Array, servers: int) -> tuple[Array, Array]:
    """Return how many alpha, and how many n beta, an allreduce takes on each number of ranks."""
    _check(float(ranks.min()), "ranks", 2)
    _check(servers, "servers", 1)
    steps, volume = 2 * np.log2(ranks), 2 * (ranks - 1) / ranks
    return {
        "ring": (2 * (ranks - 1), volume),
        "tree": (steps, steps),
        "pipelined tree": (steps, volume),
        "parameter server": (np.full_like(ranks, 2), 2 * ranks / servers),
    }[algorithm]


def _runs(distinct: int, of: str, **columns: Sequence[float]) -> list[Array]:
    """Return a column of numbers for each name, a row a run, after checks.

    `distinct` is how many different values the column called `of` needs.
    """
    arrays = {name: positive(numbers, name) for name, numbers in columns.items()}
    runs = len(arrays[of])
    for name, array in arrays.items():
        if len(array) != runs:
            message = f"needs {runs} entries, as many as {of}"
            raise InputError(message, field=name, value=len(array))
    if (different := len(np.unique(arrays[of]))) < distinct:
        message = f"a fit needs at least {distinct} different values"
        raise InputError(message, field=of, value=different)
    return list(arrays.values())


def _check(
    number: float, name: str, low: float, high: float = math.inf, *, above: bool = False
) -> None:
    """Refuse a number that is not finite, at least (or above) low and at most high."""
    if math.isfinite(number) and low <= number <= high and not (above and number == low):
        return
    expected = f"must be {'above' if above else 'at least'} {low:g}"
    expected += f" and at most {high:g}" if math.isfinite(high) else ""
    raise InputError(expected, field=name, value=number)
