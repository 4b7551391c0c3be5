"""Models of performance: the roofline, the time of an all-reduce, the imbalance of ranks.

Seconds, bytes, FLOP and ranks throughout. Numbers out of range raise InputError, which names the
argument.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from hpml_orchestrator.diagnosis.model import AllReduce, Facts
from hpml_orchestrator.errors import InputError

_TENSOR_DTYPES = ("bfloat16", "float16", "tf32")
_MIN_SIZES = 3


# --- the roofline


@dataclass(frozen=True)
class Roofline:
    """Achieved and possible rates of one device: a GPU, or a node without GPUs.

    Source: Williams, Waterman & Patterson 2009, "Roofline", CACM 52(4).
    """

    flops: float  # FLOP/s that were achieved
    source: str  # of that figure, in words
    peaks: Mapping[str, float]  # FLOP/s by dtype
    bandwidth: float | None  # bytes/s of the device's memory
    bytes_per_second: float | None  # that the run moved
    origin: str  # of the peaks
    device: str = "device"  # or `node`

    @property
    def intensity(self) -> float | None:
        """FLOP for each byte that is moved."""
        return self.flops / self.bytes_per_second if self.bytes_per_second else None

    @property
    def peak(self) -> float:
        """The highest peak of all dtypes."""
        return max(self.peaks.values())

    @property
    def ridge(self) -> float | None:
        """FLOP per byte from which on the compute units, not the memory, set the limit."""
        return self.peak / self.bandwidth if self.bandwidth else None

    @property
    def limit(self) -> float:
        """The highest FLOP/s of code with this intensity."""
        if self.intensity is None or self.bandwidth is None:
            return self.peak
        return min(self.peak, self.intensity * self.bandwidth)


def roofline(facts: Facts) -> Roofline | None:
    """Return the roofline of a run, or None if its FLOP/s or the peaks are unknown.

    FLOP/s come from the training if it reports them (MFU, or FLOP per token or sample), otherwise
    from the activity of the tensor cores: the share of the peak that they were busy for is at least
    what they computed.
    """
    peaks = facts.peaks
    if peaks is None or not peaks.flops:
        return None
    gpus = [gpu for node in facts.nodes for gpu in node.gpus if gpu.has_process is not False]
    active = [gpu.tensor_active_ratio for gpu in gpus if gpu.tensor_active_ratio is not None]
    dtype = next((name for name in _TENSOR_DTYPES if name in peaks.flops), "")
    if facts.achieved_flops:
        devices = facts.gpu_count or facts.node_count or 1
        flops, source = facts.achieved_flops / devices, "reported by the training"
    elif active and fmean(active) > 0 and dtype:
        flops = fmean(active) * peaks.flops[dtype]
        source = f"at most: activity of the tensor cores x peak of {dtype}"
    else:
        return None
    moved = [gpu.dram_active_ratio for gpu in gpus if gpu.dram_active_ratio is not None]
    traffic = fmean(moved) * peaks.memory_bandwidth if moved and peaks.memory_bandwidth else None
    device = "device" if facts.gpu_count or gpus else "node"
    memory = peaks.memory_bandwidth
    return Roofline(flops, source, peaks.flops, memory, traffic, peaks.origin, device)


# --- communication


def fit_allreduce(
    ranks: Sequence[int], size_bytes: Sequence[float], seconds: Sequence[float]
) -> AllReduce:
    """Fit alpha and beta to measurements at 3 or more sizes, by least squares.

    Residuals are relative, so that small messages count as much as large ones. Links inside a node
    and between nodes differ: fit them separately.
    """
    rows = list(zip(ranks, size_bytes, seconds, strict=True))
    for _, size, second in rows:
        for field, value in (("size_bytes", size), ("seconds", second)):
            if not 0 < value < math.inf:
                raise InputError("must be above 0", field=field, value=value)
    if (different := len(set(size_bytes))) < _MIN_SIZES:
        message = f"a fit needs at least {_MIN_SIZES} different values"
        raise InputError(message, field="size_bytes", value=different)
    # The model is linear in alpha and beta. Divided by the measured seconds, each row has to be 1.
    terms = [(*_ring_terms(count), size, second) for count, size, second in rows]
    u = [messages / second for messages, _, _, second in terms]
    v = [volume * size / second for _, volume, size, second in terms]
    uu, vv = sum(x * x for x in u), sum(y * y for y in v)
    uv = sum(x * y for x, y in zip(u, v, strict=True))
    determinant = uu * vv - uv * uv
    alpha = (vv * sum(u) - uv * sum(v)) / determinant
    beta = (uu * sum(v) - uv * sum(u)) / determinant
    # Both are costs and cannot be negative. With noisy figures the unconstrained optimum may be;
    # then the best point lies on the border, where one of them is 0.
    if alpha < 0:  # no latency can be seen
        alpha, beta = 0.0, sum(v) / vv
    elif beta < 0:
        alpha, beta = sum(u) / uu, 0.0
    squares = sum((alpha * x + beta * y - 1) ** 2 for x, y in zip(u, v, strict=True))
    residual = math.sqrt(squares / (len(rows) - 2))
    return AllReduce(alpha, beta, residual, max(ranks))


def predict_averaging(
    link: AllReduce, ranks: int, size_bytes: float, messages: int = 1
) -> dict[str, float]:
    """Return the seconds to average gradients over ranks, by algorithm.

    For P ranks and m bytes, the latency L of a message and the time G of a byte:

    - ring: 2 (P-1) L + 2 m G (P-1)/P
    - tree (recursive halving and doubling): 2 L log2(P) + 2 m G (P-1)/P
    - parameter server, a single one: 2 L + 2 P m G

    Source: Ben-Nun & Hoefler 2019, "Demystifying Parallel and Distributed Deep Learning", ACM
    Computing Surveys 52(4), sections 2.4 and 7; Thakur, Rabenseifner & Gropp 2005.

    Args:
        link: latency and bandwidth.
        ranks: that average, at least 2.
        size_bytes: of the gradients of one rank.
        messages: buckets that they are sent in; each has the latency once more.
    """
    steps, parts = _ring_terms(ranks)
    once = parts * size_bytes * link.beta
    return {
        "ring": messages * steps * link.alpha + once,
        "tree": messages * 2 * math.ceil(math.log2(ranks)) * link.alpha + once,
        "parameter server": messages * 2 * link.alpha + 2 * ranks * size_bytes * link.beta,
    }


def bus_bandwidth(ranks: int, size_bytes: float, seconds: float) -> float:
    """Return the bus bandwidth of an all-reduce in bytes/s, comparable over numbers of ranks.

    Source: nccl-tests, doc/PERFORMANCE.md.
    """
    if not 0 < seconds < math.inf:
        raise InputError("must be above 0", field="seconds", value=seconds)
    return _ring_terms(ranks)[1] * size_bytes / seconds


def _ring_terms(ranks: int) -> tuple[int, float]:
    """Return how many messages a rank sends in sequence, and how often it sends all bytes."""
    if ranks <= 1:
        raise InputError("must be at least 2", field="ranks", value=ranks)
    return 2 * (ranks - 1), 2 * (ranks - 1) / ranks


# --- imbalance


def imbalance(rank_seconds: Sequence[float]) -> float:
    """Return max / mean - 1 of the ranks' times before a collective: the share lost to waiting.

    0.25 means that the slowest rank takes 25 % longer than the average one.

    Source: DeRose, Homer & Johnson, "Detecting application load imbalance on high end massively
    parallel systems", Euro-Par 2007.
    """
    if not rank_seconds or min(rank_seconds) < 0 or not 0 < max(rank_seconds) < math.inf:
        raise InputError("must be at least 0, and one above 0", field="rank_seconds")
    return max(rank_seconds) / fmean(rank_seconds) - 1
