"""The roofline, the fit of an all-reduce and the imbalance of ranks, against published numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hpml_orchestrator.diagnosis import models
from hpml_orchestrator.diagnosis.model import AllReduce, Facts, GpuFacts, NodeFacts, Peaks
from hpml_orchestrator.errors import InputError
from tests.unit.diagnosis.jobs import complete

V100 = Peaks({"float32": 15.7e12, "float16": 125e12}, 900e9, origin="specification of V100")
PEAKS = Peaks({"bfloat16": 989e12}, 3.35e12, origin="specification of H100 SXM")


def played_out(ranks: int, size: float, alpha: float, beta: float) -> float:
    """Seconds of an all-reduce over a ring, message by message."""
    seconds = 0.0
    for _phase in ("reduce-scatter", "all-gather"):
        for _neighbour in range(ranks - 1):
            seconds += alpha + beta * size / ranks
    return seconds


@pytest.mark.parametrize("scatter", [0.0, 0.03])
def test_a_fit_recovers_latency_and_bandwidth(scatter: float) -> None:
    """Message sizes of nccl-tests on 4 and 8 ranks of one node, each time off by some percent."""
    rng = np.random.default_rng(14)
    shapes = [(ranks, 2.0**k) for ranks in (4, 8) for k in range(10, 31, 2)]
    ranks, sizes = zip(*shapes, strict=True)
    fits = [
        models.fit_allreduce(
            ranks,
            sizes,
            [
                played_out(*shape, 5e-6, 1 / 200e9) * math.exp(scatter * rng.standard_normal())
                for shape in shapes
            ],
        )
        for _ in range(100 if scatter else 1)
    ]
    assert np.median([fit.alpha for fit in fits]) == pytest.approx(5e-6, rel=0.01)
    assert np.median([fit.bandwidth for fit in fits]) == pytest.approx(200e9, rel=0.01)
    assert np.median([fit.residual for fit in fits]) == pytest.approx(scatter, rel=0.1, abs=1e-9)


def test_latency_and_bandwidth_are_never_negative() -> None:
    """Small messages show no bandwidth, and large ones no latency."""
    small = models.fit_allreduce([4] * 4, [8, 64, 512, 1024], [3e-5, 2.9e-5, 3.1e-5, 2.9e-5])
    assert small.alpha == pytest.approx(5e-6, rel=0.03)
    assert small.beta >= 0
    large = models.fit_allreduce([2] * 3, [1e8, 2e8, 4e8], [0.9e-2, 2e-2, 4.1e-2])
    assert large.alpha == 0
    assert large.bandwidth == pytest.approx(1e10, rel=0.05)


def test_averaging_is_predicted_by_the_formulas_of_the_lecture() -> None:
    """8 ranks, 4 MB in 2 buckets: 14, 6 and 2 latencies for each, and once the bytes."""
    link = AllReduce(1e-4, 1e-9, 0.1, ranks=8)
    found = models.predict_averaging(link, 8, 4e6, messages=2)
    assert found["ring"] == pytest.approx(played_out(8, 2e6, 1e-4, 1e-9) * 2)
    assert found["tree"] == pytest.approx(2 * 6e-4 + 2 * 4e-3 * 7 / 8)
    assert found["parameter server"] == pytest.approx(2 * 2e-4 + 2 * 8 * 4e-3)


@pytest.mark.parametrize(
    ("ranks", "factor"), [(2, 1.0), (8, 1.75)], ids=["two ranks", "eight ranks"]
)
def test_bus_bandwidth_follows_nccl_tests(ranks: int, factor: float) -> None:
    """The factors of nccl-tests, doc/PERFORMANCE.md."""
    assert models.bus_bandwidth(ranks, 1e9, 0.5) == pytest.approx(factor * 2e9)


@pytest.mark.parametrize(("seconds", "share"), [([1, 1, 1, 2], 0.6), ([3, 3], 0.0)])
def test_imbalance_is_what_the_slowest_rank_costs(seconds: list[float], share: float) -> None:
    """The share by which the slowest rank is above the mean."""
    assert models.imbalance(seconds) == pytest.approx(share)


def facts(**known: Any) -> Facts:
    """A run on one node with one GPU."""
    gpus = known.pop("gpus", ())
    return Facts(
        run="r", state="COMPLETED", over=True, job=complete(), node_count=1, **known,
        nodes=[NodeFacts("node1", gpus=gpus)],
    )  # fmt: skip


def test_a_roofline_is_that_of_the_paper() -> None:
    """The 125 TFLOP/s and 900 GB/s of a V100 meet at 139 FLOP/byte (NVIDIA's guide)."""
    gpu = GpuFacts("a", dram_active_ratio=0.5)
    roof = models.roofline(facts(achieved_flops=2 * 4.5e12, gpu_count=2, gpus=[gpu], peaks=V100))
    assert roof is not None
    assert roof.ridge == pytest.approx(138.9, rel=1e-3)
    assert roof.intensity == pytest.approx(10)
    assert roof.limit == pytest.approx(9e12)
    assert roof.flops / roof.peak == pytest.approx(0.036)


@pytest.mark.parametrize(
    ("known", "flops", "limit"),
    [
        ({"gpus": [GpuFacts("a", tensor_active_ratio=0.4)], "peaks": PEAKS}, 0.4 * 989e12, 989e12),
        (
            {
                "gpus": [
                    GpuFacts("a", tensor_active_ratio=0.1, dram_active_ratio=0.8),
                    GpuFacts("b", has_process=False, tensor_active_ratio=0, dram_active_ratio=0),
                ],
                "peaks": PEAKS,
            },
            0.1 * 989e12,
            0.1 * 989e12 / 0.8,
        ),
        ({"achieved_flops": 1e11, "peaks": Peaks({"float32": 4e11})}, 1e11, 4e11),
        ({"achieved_flops": 1e11}, None, None),
        ({"achieved_flops": 1e11, "peaks": Peaks(memory_bandwidth=1e9)}, None, None),
        ({"gpus": [GpuFacts("a", tensor_active_ratio=0.0)], "peaks": PEAKS}, None, None),
        ({"gpus": [GpuFacts("a")], "peaks": PEAKS}, None, None),
    ],
    ids=[
        "tensor activity", "only used GPUs count", "CPU", "no peaks", "no FLOP/s peak",
        "tensor cores idle", "nothing measured",
    ],
)  # fmt: skip
def test_a_roofline_uses_what_is_known(
    known: dict[str, Any], flops: float | None, limit: float | None
) -> None:
    """Unknown FLOP/s or peaks give no roofline instead of a wrong one."""
    roof = models.roofline(facts(**known))
    assert (roof and roof.flops) == (flops and pytest.approx(flops))
    assert (roof and roof.limit) == (limit and pytest.approx(limit))


@pytest.mark.parametrize(
    ("function", "arguments", "field"),
    [
        (models.fit_allreduce, ([4, 4, 4], [1, 1, 2], [1, 1, 1]), "size_bytes"),
        (models.fit_allreduce, ([1, 2, 2], [1, 2, 3], [1, 1, 1]), "ranks"),
        (models.fit_allreduce, ([2, 2, 2], [1, 2, 3], [1, 0, 1]), "seconds"),
        (models.bus_bandwidth, (1, 1, 1), "ranks"),
        (models.bus_bandwidth, (2, 1, 0), "seconds"),
        (models.imbalance, ([],), "rank_seconds"),
        (models.imbalance, ([0, 0],), "rank_seconds"),
    ],
)
def test_numbers_out_of_range_are_refused(
    function: Callable[..., object], arguments: tuple[Any, ...], field: str
) -> None:
    """The error names the argument."""
    with pytest.raises(InputError) as error:
        function(*arguments)
    assert error.value.field == field
