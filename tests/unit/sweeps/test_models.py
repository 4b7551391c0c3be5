"""Models of scaling, against published numbers.

Fits are tried on data of generators that play the work out, step by step. HPML_LONG=1 repeats
the simulations thirty times as often.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.random import Generator

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.sweeps import statistics
from hpml_orchestrator.sweeps.statistics import Fit

SIMULATIONS = 3_000 if os.environ.get("HPML_LONG") == "1" else 100
MARGIN = 2 * math.sqrt(0.95 * 0.05 / SIMULATIONS)


@pytest.mark.parametrize(
    ("function", "arguments", "expected"),
    [
        (statistics.usl_peak, (0.0277285, 0.0001044), 96.5),  # SPEC SDM 91 in R's package usl
        (statistics.usl_peak, (0.1, 0), math.inf),
        (statistics.karp_flatt, (1 / (0.03 + 0.97 / 12), 12), 0.03),
        (statistics.karp_flatt, (5, 4), -1 / 15),  # superlinear
    ],
)
def test_closed_forms(
    function: Callable[..., object], arguments: tuple[Any, ...], expected: object
) -> None:
    """Published figures and limits."""
    assert function(*arguments) == pytest.approx(expected, rel=1e-3)


def test_karp_flatt() -> None:
    """The two programs of Quinn 2003, section 7.5, on 2 to 8 processors."""
    serial, overhead = [1.82, 2.50, 3.08, 3.57, 4.00, 4.38, 4.71], [1.87, 2.61, 3.23, 3.73, 4.14]
    for processors, speedup in enumerate(serial, start=2):
        assert statistics.karp_flatt(speedup, processors) == pytest.approx(0.1, abs=0.0015)
    fractions = [statistics.karp_flatt(speedup, p) for p, speedup in enumerate(overhead, start=2)]
    assert fractions == pytest.approx([0.070, 0.075, 0.080, 0.085, 0.090], abs=0.0015)


def strong_runs(rng: Generator) -> Fit:
    """12 s of serial work and 960 tasks of 0.1 s each, dealt out to the ranks: f = 1/9."""
    scales = [1, 2, 4, 8, 16] * 6
    seconds = [12 + 0.1 * max(len(range(rank, 960, p)) for rank in range(p)) for p in scales]
    return statistics.fit_amdahl(scales, noisy(seconds, rng))


def weak_runs(rng: Generator) -> Fit:
    """Each rank's batch of 64 takes 0.5 s, of which 0.05 s are work that only one rank does."""
    scales = [1, 2, 4, 8, 16] * 6
    rates = [(64 * 0.1 + sum(64 * 0.9 for _rank in range(p))) / 0.5 for p in scales]
    return statistics.fit_gustafson(scales, noisy(rates, rng))


def contended_runs(rng: Generator) -> Fit:
    """A request takes 10 ms, 0.3 ms more for each other one, and 2 us for each ordered pair."""
    scales = [1, 2, 4, 8, 16, 32, 64] * 6
    milliseconds = [10 + 0.3 * (n - 1) + 0.002 * n * (n - 1) for n in scales]
    rates = [1000 * n / each for n, each in zip(scales, milliseconds, strict=True)]
    return statistics.fit_usl(scales, noisy(rates, rng))


def noisy(values: list[float], rng: Generator) -> list[float]:
    """The values, each off by some 3 %."""
    return [value * math.exp(0.03 * rng.standard_normal()) for value in values]


@pytest.mark.parametrize(
    ("fitted", "truth", "inputs", "predicted"),
    [
        (strong_runs, {"T1": 108, "f": 1 / 9}, (32,), 12 + 3),
        (weak_runs, {"X1": 128, "f": 0.1}, (32,), 64 * (0.1 + 32 * 0.9) / 0.5),
        (contended_runs, {"g": 100, "a": 0.03, "b": 0.0002}, (100,), 1e5 / (10 + 29.7 + 19.8)),
    ],
    ids=["amdahl", "gustafson", "usl"],
)
def test_fits_recover_their_parameters(
    fitted: Callable[[Generator], Fit],
    truth: dict[str, float],
    inputs: tuple[float, ...],
    predicted: float,
) -> None:
    """Their 95 % intervals cover the truth in 93-97 % of simulated sweeps."""
    rng = np.random.default_rng(14)
    fits = [fitted(rng) for _ in range(SIMULATIONS)]
    for name, true in truth.items():
        estimates = [fit.parameters[name] for fit in fits]
        assert np.median([one.value for one in estimates]) == pytest.approx(true, rel=0.03)
        covered = sum(
            one.interval is not None and one.interval.low <= true <= one.interval.high
            for one in estimates
        )
        assert 0.93 - MARGIN <= covered / SIMULATIONS <= 0.97 + MARGIN, name
    assert np.median([fit.residual for fit in fits]) == pytest.approx(0.03, rel=0.1)
    lacks = [fit.lack_of_fit for fit in fits if fit.lack_of_fit is not None]
    if lacks:  # no size of a message was repeated
        share = np.mean([p < 0.05 for p in lacks])
        assert 0.05 - MARGIN - 0.01 <= share <= 0.05 + MARGIN + 0.02
    predictions = [fit.predict(*inputs) for fit in fits]
    assert np.median(predictions) == pytest.approx(predicted, rel=0.03)


@pytest.mark.parametrize("scatter", [0.03, 0.003, 0.0])
def test_a_curve_that_misses_the_scales_by_more_than_their_scatter_lacks_fit(
    scatter: float,
) -> None:
    """A cost that grows with the ranks is 10 % of the time: it shows if runs scatter by less."""
    rng = np.random.default_rng(3)
    scales = [1, 2, 4, 8] * 6
    seconds = [100 / p + 1 * p for p in scales]
    off = [second * math.exp(scatter * rng.standard_normal()) for second in seconds]
    fit = statistics.fit_amdahl(scales, off)
    assert fit.residual < 0.1  # which was the limit of a good fit
    assert fit.lack_of_fit is not None
    assert fit.lack_of_fit < 0.01
    exact = statistics.fit_amdahl(scales, [12 + 88 / p for p in scales])
    assert exact.lack_of_fit == 1
    assert statistics.fit_amdahl(scales[:4], off[:4]).lack_of_fit is None


def test_usl_of_published_data() -> None:
    """Two data sets of R's package usl: one exact, one measured (SPEC SDM 91)."""
    exact = statistics.fit_usl([1, 2, 4, 6, 8, 10], [1, 1.8868, 3.0769, 3.5294, 3.5398, 3.3557])
    assert [p.value for p in exact.parameters.values()] == pytest.approx([1, 0.02, 0.02], rel=1e-3)
    loads = [1, 18, 36, 72, 108, 144, 216]
    measured = statistics.fit_usl(loads, [64.9, 995.9, 1652.4, 1853.2, 1828.9, 1775.0, 1702.2])
    # usl minimises absolute residuals, so its figures (0.01704689 and 7.892498e-05) do not coincide
    values = [measured.parameters[name].value for name in ("a", "b")]
    assert values == pytest.approx([0.0135, 0.000115], rel=0.01)
    assert measured.residual < 0.1
    peak = statistics.usl_peak(measured.parameters["a"].value, measured.parameters["b"].value)
    assert peak == pytest.approx(96.5, rel=0.05)


def test_parameters_stay_in_their_range() -> None:
    """Superlinear rates have no negative contention, and constant times are all serial."""
    superlinear = statistics.fit_usl([1, 2, 4, 8, 16] * 6, [100, 210, 430, 890, 1800] * 6)
    values = [parameter.value for parameter in superlinear.parameters.values()]
    assert values[1:] == pytest.approx([0, 0], abs=1e-4)
    assert all(p.interval and p.interval.low >= 0 for p in superlinear.parameters.values())
    serial = statistics.fit_amdahl([1, 2, 4, 8] * 6, [100, 101, 99, 100] * 6).parameters["f"]
    assert serial.value == pytest.approx(1, abs=0.03)
    assert serial.interval is not None
    assert serial.interval.high == 1


@pytest.mark.parametrize(
    ("function", "arguments", "field"),
    [
        (statistics.fit_amdahl, ([1, 2, 2], [3, 2, 2]), "scales"),
        (statistics.fit_amdahl, ([1, 2, 4], [3, 2]), "scales, seconds"),
        (statistics.fit_gustafson, ([1, 2, 4], [3, math.nan, 2]), "rates"),
        (statistics.fit_usl, ([1, 2, 3, 4] * 2, [1, 2, 3, 4] * 2), "scales"),
        (statistics.median_estimate, ([],), "values"),
        (statistics.median_estimate, ([1, math.nan],), "values"),
        (statistics.speedup, ([0.0, 1], [1]), "baseline_seconds"),
        (statistics.speedup, ([1], [math.inf]), "seconds"),
        (statistics.speedup, ([1], []), "seconds"),
        (lambda: statistics.speedup([1], [1], scale=0), (), "scale"),
        (statistics.time_to_accuracy, ([1, 2], [True]), "reached"),
        (statistics.time_to_accuracy, ([-1], [True]), "seconds"),
    ],
)
def test_numbers_out_of_range_are_refused(
    function: Callable[..., object], arguments: tuple[Any, ...], field: str
) -> None:
    """The error names the argument."""
    with pytest.raises(InputError) as error:
        function(*arguments)
    assert error.value.field == field
