"""Models of scaling, communication, compute, data loading and memory; closed forms and fits.

Seconds, bytes, flop and scales (ranks, GPUs or nodes, counted alike within a fit) throughout. A fit
takes every run rather than medians, so that its intervals know how much the runs scatter, and
predicts nothing beyond twice the largest measured scale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import numpy as np
from scipy import optimize, stats

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.sweeps.statistics import CONFIDENCE, Estimate, Interval

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[np.float64]
    Curve: TypeAlias = Callable[[Array, Array], Array]  # (parameters, inputs) -> values

__all__ = [
    "EXTRAPOLATION_LIMIT",
    "Algorithm",
    "Collective",
    "DataStall",
    "Fit",
    "MemoryEstimate",
    "Mfu",
    "Roofline",
    "allreduce_crossover",
    "allreduce_seconds",
    "amdahl_speedup",
    "bus_bandwidth",
    "bus_bandwidth_factor",
    "data_stall",
    "fit_allreduce",
    "fit_amdahl",
    "fit_gustafson",
    "fit_usl",
    "gustafson_speedup",
    "karp_flatt",
    "loader_wait_share",
    "memory_estimate",
    "mfu",
    "usl_peak",
]

Algorithm = Literal["ring", "tree", "pipelined tree", "parameter server"]
Collective = Literal[
    "allreduce", "reduce-scatter", "all-gather", "all-to-all", "broadcast", "reduce"
]

EXTRAPOLATION_LIMIT = 2  # times the largest measured scale
_USL_SCALES = 5
_LAW_SCALES = 3


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
        """Return the model's value (seconds, or samples/s) at a scale; bytes for allreduce alone.

        Raises:
            InputError: the scale is below 1 or beyond twice the largest measured one.
        """
        limit = EXTRAPOLATION_LIMIT * self.largest_scale
        if not 1 <= scale <= limit:
            raise InputError(
                f"must be between 1 and {limit:g}, twice the largest measured scale",
                field="scale",
                value=scale,
                hint="measure a larger scale first",
            )
        values = np.array([parameter.value for parameter in self.parameters.values()])
        return float(self.curve(values, np.array([[scale], [size_bytes]]))[0])


# --- laws of scaling


def amdahl_speedup(serial_fraction: float, scale: float) -> float:
    """Return 1 / (f + (1-f)/P), the speedup of fixed work of which a fraction f is serial.

    Source: Amdahl 1967, "Validity of the single processor approach".

    Raises:
        InputError: the fraction is not within 0 and 1, or the scale below 1.
    """
    _check(serial_fraction, "serial_fraction", 0, 1)
    _check(scale, "scale", 1)
    return 1 / (serial_fraction + (1 - serial_fraction) / scale)


def gustafson_speedup(serial_fraction: float, scale: float) -> float:
    """Return P - f(P-1), the scaled speedup of work that grows with P.

    The fraction f is that of the time on P processors, not of the time on one.

    Source: Gustafson 1988, "Reevaluating Amdahl's law", CACM 31(5).

    Raises:
        InputError: the fraction is not within 0 and 1, or the scale below 1.
    """
    _check(serial_fraction, "serial_fraction", 0, 1)
    _check(scale, "scale", 1)
    return scale - serial_fraction * (scale - 1)


def karp_flatt(speedup: float, scale: float) -> float:
    """Return (1/S - 1/P) / (1 - 1/P), the serial fraction that a measured speedup implies.

    Constant over P: serial code limits; growing with P: overhead does (communication, imbalance).
    Negative for a superlinear speedup.

    Source: Karp & Flatt 1990, "Measuring parallel processor performance", CACM 33(5).

    Raises:
        InputError: the speedup is not positive, or the scale not above 1.
    """
    _check(speedup, "speedup", 0, above=True)
    _check(scale, "scale", 1, above=True)
    return (1 / speedup - 1 / scale) / (1 - 1 / scale)


def usl_peak(contention: float, coherency: float) -> float:
    """Return sqrt((1-a)/b), the scale of the highest throughput; infinite for b = 0.

    Source: Gunther 2007, Guerrilla Capacity Planning, chapter 4.

    Raises:
        InputError: the contention is not within 0 and 1, or the coherency negative.
    """
    _check(contention, "contention", 0, 1)
    _check(coherency, "coherency", 0)
    return math.sqrt((1 - contention) / coherency) if coherency else math.inf


def fit_amdahl(scales: Sequence[float], seconds: Sequence[float]) -> Fit:
    """Fit T(P) = T1 (f + (1-f)/P) to run times of a strong-scaling sweep; predicts seconds.

    Source: Amdahl 1967.

    Raises:
        InputError: fewer than 3 different scales, lists of different length, or a number that is
            not positive and finite.
    """
    inputs, times = _runs(scales, seconds, "seconds", at_least=_LAW_SCALES)
    return _fit(
        lambda values, at: values[0] * (values[1] + (1 - values[1]) / at[0]),
        inputs,
        times,
        formula="T(P) = T1 (f + (1-f)/P)",
        source="Amdahl 1967",
        names=("T1", "f"),
        start=(float(np.max(times)), 0.1),
        high=(np.inf, 1),
    )


def fit_gustafson(scales: Sequence[float], rates: Sequence[float]) -> Fit:
    """Fit X(P) = X1 (P - f(P-1)) to rates of a weak-scaling sweep; predicts samples/s.

    Source: Gustafson 1988.

    Raises:
        InputError: fewer than 3 different scales, lists of different length, or a number that is
            not positive and finite.
    """
    inputs, measured = _runs(scales, rates, "rates", at_least=_LAW_SCALES)
    return _fit(
        lambda values, at: values[0] * (at[0] - values[1] * (at[0] - 1)),
        inputs,
        measured,
        formula="X(P) = X1 (P - f(P-1))",
        source="Gustafson 1988",
        names=("X1", "f"),
        start=(float(np.max(measured / inputs[0])), 0.1),
        high=(np.inf, 1),
    )


def fit_usl(scales: Sequence[float], rates: Sequence[float]) -> Fit:
    """Fit the Universal Scalability Law to rates at 5 or more scales; predicts samples/s.

    X(N) = g N / (1 + a(N-1) + b N(N-1)): g is the rate of one, a the contention (serialised share),
    b the coherency (cost of keeping each pair consistent); all at least 0. See `usl_peak`.

    Source: Gunther 2007, Guerrilla Capacity Planning.

    Raises:
        InputError: fewer than 5 different scales, lists of different length, or a number that is
            not positive and finite.
    """
    inputs, measured = _runs(scales, rates, "rates", at_least=_USL_SCALES)

    def rate(values: Array, at: Array) -> Array:
        g, a, b = values
        n = at[0]
        return np.asarray(g * n / (1 + a * (n - 1) + b * n * (n - 1)))

    return _fit(
        rate,
        inputs,
        measured,
        formula="X(N) = g N / (1 + a(N-1) + b N(N-1))",
        source="Gunther 2007, Guerrilla Capacity Planning",
        names=("g", "a", "b"),
        start=(float(np.max(measured / inputs[0])), 0.05, 0.001),
        high=(np.inf, 1, np.inf),
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

    Args:
        algorithm: "ring", "tree", "pipelined tree" or "parameter server".
        ranks: P.
        size_bytes: n, the bytes that each rank contributes.
        alpha: seconds of latency of a message.
        beta: seconds for each byte, the inverse of the bandwidth.
        servers: s, the shards of the parameter server.

    Source: Thakur, Rabenseifner & Gropp 2005, "Optimization of collective communication operations
    in MPICH"; Ben-Nun & Hoefler 2019, "Demystifying parallel and distributed deep learning".

    Raises:
        InputError: another algorithm, or a number below its range.
    """
    latency, transfer = _allreduce_terms(algorithm, np.array([ranks], dtype=float), servers)
    for name, number in (("size_bytes", size_bytes), ("alpha", alpha), ("beta", beta)):
        _check(number, name, 0)
    return float(latency[0] * alpha + transfer[0] * beta * size_bytes)


def allreduce_crossover(
    first: Algorithm,
    second: Algorithm,
    ranks: int,
    *,
    alpha: float,
    beta: float,
    servers: int = 1,
) -> float | None:
    """Return the size in bytes at which two algorithms take equally long; None if one always wins.

    Below it, the one with fewer messages is faster. Source: as `allreduce_seconds`.

    Raises:
        InputError: another algorithm, or a number below its range.
    """
    _check(alpha, "alpha", 0)
    _check(beta, "beta", 0, above=True)
    at = np.array([ranks], dtype=float)
    latency, transfer = _allreduce_terms(first, at, servers)
    other_latency, other_transfer = _allreduce_terms(second, at, servers)
    messages = float(other_latency[0] - latency[0])
    transfers = float(transfer[0] - other_transfer[0])
    if messages * transfers <= 0:
        return None
    return messages * alpha / (transfers * beta)


def fit_allreduce(
    ranks: Sequence[int],
    size_bytes: Sequence[float],
    seconds: Sequence[float],
    algorithm: Algorithm = "ring",
    *,
    servers: int = 1,
) -> Fit:
    """Fit alpha (seconds) and beta (seconds/byte), both at least 0, to measured allreduces.

    Relative residuals, so that the small messages count as much as the large. Intra-node and
    inter-node links differ: fit each apart. `predict(ranks, size_bytes)` returns seconds.

    Source: as `allreduce_seconds`; Hockney 1994 for alpha and beta.

    Raises:
        InputError: another algorithm, fewer than 3 different sizes, lists of different length, or a
            number that is not positive and finite.
    """
    inputs, times = _runs(ranks, seconds, "seconds", at_least=1)
    _, sizes = _runs(size_bytes, size_bytes, "size_bytes", at_least=_LAW_SCALES)
    if len(sizes) != len(times):
        raise InputError(f"needs {len(times)} entries, one a run", field="size_bytes")
    latency, transfer = _allreduce_terms(algorithm, inputs[0], servers)

    def duration(values: Array, at: Array) -> Array:
        messages, transfers = _allreduce_terms(algorithm, at[0], servers)
        return np.asarray(messages * values[0] + transfers * values[1] * at[1])

    return _fit(
        duration,
        np.vstack([inputs[0], sizes]),
        times,
        formula=f"T(P, n) of the {algorithm}, from alpha and n beta",
        source="Thakur, Rabenseifner & Gropp 2005",
        names=("alpha", "beta"),
        start=(float(np.min(times / latency)), float(np.min(times / (transfer * sizes)))),
        high=(np.inf, np.inf),
    )


def bus_bandwidth_factor(collective: Collective, ranks: int) -> float:
    """Return the factor from algorithm bandwidth to bus bandwidth, comparable over rank counts.

    Source: nccl-tests, doc/PERFORMANCE.md.

    Raises:
        InputError: another collective, or fewer than 2 ranks.
    """
    _check(ranks, "ranks", 2)
    _check_choice(collective, "collective", get_args(Collective))
    share = (ranks - 1) / ranks
    return {"allreduce": 2 * share, "broadcast": 1.0, "reduce": 1.0}.get(collective, share)


def bus_bandwidth(collective: Collective, ranks: int, size_bytes: float, seconds: float) -> float:
    """Return bytes/s over the bottleneck link; the total size counts, as in nccl-tests.

    Source: nccl-tests, doc/PERFORMANCE.md.

    Raises:
        InputError: another collective, fewer than 2 ranks, or a number that is not positive.
    """
    _check(size_bytes, "size_bytes", 0, above=True)
    _check(seconds, "seconds", 0, above=True)
    return bus_bandwidth_factor(collective, ranks) * size_bytes / seconds


# --- compute


@dataclass(frozen=True)
class Roofline:
    """A device's *measured* peaks: flop/s and memory bytes/s.

    Source: Williams, Waterman & Patterson 2009, "Roofline", CACM 52(4).

    Raises:
        InputError: a peak is not positive.
    """

    peak_flops: float
    bandwidth: float

    def __post_init__(self) -> None:
        _check(self.peak_flops, "peak_flops", 0, above=True)
        _check(self.bandwidth, "bandwidth", 0, above=True)

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
    """Model flops utilisation with all that has to be printed beside it."""

    value: float
    parameters: float
    tokens_per_second: float
    gpus: int
    peak_flops: float
    dtype: str
    formula: str = "6 N tokens/s / (P peak)"

    def __str__(self) -> str:
        terms = f"N = {self.parameters:.4g}, {self.tokens_per_second:.4g} tokens/s, P = {self.gpus}"
        peak = f"peak {self.peak_flops / 1e12:.4g} Tflop/s {self.dtype}"
        return f"{100 * self.value:.1f} % = {self.formula}, {terms}, {peak}"


def mfu(
    parameters: float, tokens_per_second: float, gpus: int, peak_flops: float, dtype: str
) -> Mfu:
    """Return the share of the peak that a transformer's training uses, without attention's flop.

    Args:
        parameters: N, of the model.
        tokens_per_second: of all GPUs together.
        gpus: P.
        peak_flops: dense flop/s of one GPU in that dtype.
        dtype: such as "bf16".

    Source: Chowdhery et al. 2022, "PaLM", appendix B; Kaplan et al. 2020 for the 6 N.

    Raises:
        InputError: a number is not positive.
    """
    numbers = {"parameters": parameters, "tokens_per_second": tokens_per_second, "gpus": gpus}
    for name, number in {**numbers, "peak_flops": peak_flops}.items():
        _check(number, name, 0, above=True)
    value = 6 * parameters * tokens_per_second / (gpus * peak_flops)
    return Mfu(value, parameters, tokens_per_second, gpus, peak_flops, dtype)


# --- data loading


@dataclass(frozen=True)
class DataStall:
    """Seconds of a run lost to data; slightly negative where the runs scatter more than they lose.

    Attributes:
        prep_seconds: lost to decoding and augmentation.
        fetch_seconds: lost to reading from storage.
        prep_share: of the run with real data.
        fetch_share: of the run with real data.
    """

    prep_seconds: float
    fetch_seconds: float
    prep_share: float
    fetch_share: float


def data_stall(synthetic_seconds: float, warm_seconds: float, real_seconds: float) -> DataStall:
    """Return what preparing and fetching data cost, from three runs of the same steps.

    Args:
        synthetic_seconds: A, with data made on the device.
        warm_seconds: B, with a small subset that is in the page cache; B - A is preparation.
        real_seconds: C, with the real data; C - B is fetching.

    Source: Mohan et al. 2021, "Analyzing and mitigating data stalls in DNN training", VLDB 14(5).

    Raises:
        InputError: a time is not positive.
    """
    for name, seconds in (
        ("synthetic_seconds", synthetic_seconds),
        ("warm_seconds", warm_seconds),
        ("real_seconds", real_seconds),
    ):
        _check(seconds, name, 0, above=True)
    prep, fetch = warm_seconds - synthetic_seconds, real_seconds - warm_seconds
    return DataStall(prep, fetch, prep / real_seconds, fetch / real_seconds)


def loader_wait_share(wait_seconds: Sequence[float], step_seconds: Sequence[float]) -> float:
    """Return the share of the steps' time that was spent in next(loader), 0 to 1.

    Args:
        wait_seconds: in next(loader), for each step.
        step_seconds: of the whole step, waiting included.

    Source: Mohan et al. 2021.

    Raises:
        InputError: no steps, lists of different length, or more waiting than time.
    """
    if not wait_seconds or len(wait_seconds) != len(step_seconds):
        message = f"needs {len(step_seconds)} entries, one a step"
        raise InputError(message, field="wait_seconds", value=len(wait_seconds))
    total = math.fsum(step_seconds)
    _check(total, "step_seconds", 0, above=True)
    share = math.fsum(wait_seconds) / total
    _check(share, "wait_seconds / step_seconds", 0, 1)
    return share


# --- memory

_WEIGHT_BYTES, _GRADIENT_BYTES, _OPTIMIZER_BYTES = 2, 4, 12
_STATE_BYTES = _WEIGHT_BYTES + _GRADIENT_BYTES + _OPTIMIZER_BYTES


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that each GPU needs under each way to train, and the first that fits.

    Attributes:
        strategies: (name, bytes on each GPU), from the least to the most intrusive.
        usable_bytes: of the device, without the reserve.
        advice: name of the first strategy that fits; None if none does.
        formula: what the figures follow from.
    """

    strategies: tuple[tuple[str, float], ...]
    usable_bytes: float
    advice: str | None
    formula: str = "18 bytes/parameter (2 weights, 4 gradients, 12 AdamW and master) + activations"


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
    """Return which way to train fits into the GPUs' memory: AdamW in mixed precision.

    Checkpointing keeps about 2 sqrt(layers) of the layers' activations; gradient accumulation
    shrinks them too. Parallel ways come with it. Tensor parallelism divides by the GPUs of a
    node, and pipeline parallelism divides the layers' state between nodes.

    Args:
        parameters: of the model.
        activation_bytes: of one GPU's micro-batch without checkpointing.
        layers: of the model.
        device_bytes: memory of one GPU.
        gpus: of the job.
        gpus_per_node: of each node.
        reserve: share of the memory for the CUDA context, NCCL and fragmentation.

    Source: Rajbhandari et al. 2020, "ZeRO"; Chen et al. 2016, "Training deep nets with sublinear
    memory cost"; Hugging Face, "Model training anatomy", for the 18 bytes.

    Raises:
        InputError: a number is out of range.
    """
    for name, number, low in (
        ("parameters", parameters, 1),
        ("activation_bytes", activation_bytes, 0),
        ("layers", layers, 1),
        ("device_bytes", device_bytes, 1),
        ("gpus", gpus, 1),
        ("gpus_per_node", gpus_per_node, 1),
    ):
        _check(number, name, low)
    _check(reserve, "reserve", 0, 1)
    state = _STATE_BYTES * parameters
    kept = activation_bytes * min(1, 2 / math.sqrt(layers))
    weights, gradients, optimizer = (
        share * parameters for share in (_WEIGHT_BYTES, _GRADIENT_BYTES, _OPTIMIZER_BYTES)
    )
    inside = min(gpus, gpus_per_node)
    # FSDP gathers one layer's weights at a time
    sharded = state / gpus + weights / layers
    strategies = (
        ("DDP", state + activation_bytes),
        ("DDP with activation checkpointing or gradient accumulation", state + kept),
        ("ZeRO-1", weights + gradients + optimizer / gpus + kept),
        ("ZeRO-2", weights + (gradients + optimizer) / gpus + kept),
        ("FSDP (ZeRO-3)", sharded + kept),
        ("FSDP with tensor parallelism inside the node", state / gpus + kept / inside),
    )
    usable = (1 - reserve) * device_bytes
    advice = next((name for name, need in strategies if need <= usable), None)
    return MemoryEstimate(strategies, usable, advice)


# --- fitting


def _fit(
    curve: Curve,
    inputs: Array,
    measured: Array,
    *,
    formula: str,
    source: str,
    names: tuple[str, ...],
    start: tuple[float, ...],
    high: tuple[float, ...],
) -> Fit:
    """Fit a curve by least squares of log residuals; parameters are at least 0.

    Run times and rates scatter by a share of themselves, so their logs scatter evenly.
    """
    units = np.array(start)  # parameters of very different size, such as alpha and beta
    logs = np.log(measured)

    def residuals(scaled: Array) -> Array:
        return np.asarray(np.log(curve(scaled * units, inputs)) - logs)

    bounds = (np.zeros(len(units)), np.array(high) / units)
    solution = optimize.least_squares(
        residuals,
        np.minimum(1, 0.9 * bounds[1]),
        bounds=bounds,
        jac="3-point",
        xtol=1e-12,
        ftol=1e-12,
        gtol=1e-12,
    )
    values = solution.x * units
    freedom = len(measured) - len(values)
    squares = 2 * solution.cost
    information = solution.jac.T @ solution.jac
    deviation: list[float] | None = None
    if freedom > 0 and np.linalg.matrix_rank(information) == len(values):
        covariance = np.linalg.inv(information) * squares / freedom
        deviation = list(np.sqrt(np.diag(covariance)) * units)
    quantile = float(stats.t.ppf((1 + CONFIDENCE) / 2, max(freedom, 1)))
    parameters = {}
    for i, name in enumerate(names):
        interval = None
        if deviation is not None:
            margin = quantile * deviation[i]
            low, top = max(0, values[i] - margin), min(high[i], values[i] + margin)
            interval = Interval(float(low), float(top), CONFIDENCE, "Student's t")
        parameters[name] = Estimate(float(values[i]), len(measured), interval, "fit")
    total = float(np.sum((logs - logs.mean()) ** 2))
    return Fit(
        formula=formula,
        source=source,
        parameters=parameters,
        n=len(measured),
        r_squared=1 - squares / total if total else 1.0,
        residual=math.sqrt(squares / max(freedom, 1)),
        largest_scale=float(inputs[0].max()),
        curve=curve,
    )


def _allreduce_terms(algorithm: str, ranks: Array, servers: int) -> tuple[Array, Array]:
    """Return how often alpha, and how often n beta, an allreduce takes on each number of ranks."""
    _check_choice(algorithm, "algorithm", get_args(Algorithm))
    _check(float(ranks.min()), "ranks", 2)
    _check(servers, "servers", 1)
    steps = 2 * np.log2(ranks)
    optimal = 2 * (ranks - 1) / ranks
    if algorithm == "ring":
        return 2 * (ranks - 1), optimal
    if algorithm == "tree":
        return steps, steps
    if algorithm == "pipelined tree":
        return steps, optimal
    return np.full_like(ranks, 2), 2 * ranks / servers


def _runs(
    scales: Sequence[float], measured: Sequence[float], name: str, *, at_least: int
) -> tuple[Array, Array]:
    """Return scales (1 x runs) and measured values of all runs."""
    arrays = {"scales": scales, name: measured}
    at, values = (np.asarray(numbers, dtype=np.float64) for numbers in arrays.values())
    if len(at) != len(values):
        message = f"needs {len(at)} entries, one a run"
        raise InputError(message, field=name, value=len(values))
    for key, numbers in (("scales", at), (name, values)):
        if not (np.isfinite(numbers) & (numbers > 0)).all():
            raise InputError("must be finite and above 0", field=key, value=list(numbers))
    distinct = len(np.unique(at))
    if distinct < at_least:
        message = f"a fit needs at least {at_least} different values"
        raise InputError(message, field="scales", value=distinct)
    return at[None, :], values


def _check(
    number: float, name: str, low: float, high: float = math.inf, *, above: bool = False
) -> None:
    """Refuse a number that is out of range: at least (or above) low, at most high, and finite."""
    if math.isfinite(number) and low <= number <= high and not (above and number == low):
        return
    expected = f"must be {'above' if above else 'at least'} {low:g}"
    expected += f" and at most {high:g}" if math.isfinite(high) else ""
    raise InputError(expected, field=name, value=number)


def _check_choice(choice: str, name: str, choices: tuple[str, ...]) -> None:
    """Refuse a word that is none of the choices."""
    if choice not in choices:
        raise InputError(f"must be one of {', '.join(choices)}", field=name, value=choice)
