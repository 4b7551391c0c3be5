"""The difference that a sweep finds: the power of the real rule at the figure that is printed."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from hpml_orchestrator.sweeps.power import smallest_difference
from hpml_orchestrator.sweeps.report import build
from hpml_orchestrator.sweeps.statistics import distinguishable, pooled_variance
from tests.unit.sweeps.sweep_rows import grid, scaling

NOISE, SWEEPS = 0.05, 600


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("settings", [2, 5, 20])
@pytest.mark.parametrize("runs", [6, 10, 20])
def test_four_of_five_sweeps_find_it(runs: int, settings: int, *, paired: bool) -> None:
    """Simulated with the rule itself, with a common factor per repeat where runs are paired."""
    difference = smallest_difference(runs, NOISE, settings, paired=paired)
    assert difference is not None
    draw = np.random.default_rng(runs * settings)
    found = 0
    for _ in range(SWEEPS):
        logs = draw.normal(0, NOISE, (settings, runs)) + draw.normal(0, 0.2 * paired, runs)
        logs[0] += math.log1p(difference)
        samples = np.exp(logs).tolist()
        answer = distinguishable(
            [(samples[0], samples[1])],
            comparisons=settings * (settings - 1) // 2,
            paired=paired,
            pooled=pooled_variance(samples, blocks=paired),
        )
        found += answer == [True]
    assert 0.75 <= found / SWEEPS <= 0.85


def test_a_sweep_of_few_runs_finds_nothing() -> None:
    """There is no interval with fewer than six."""
    assert smallest_difference(5, NOISE, 2) is None
    assert smallest_difference(6, NOISE, 2) == pytest.approx(0.13, abs=0.01)


def test_a_report_says_what_the_sweep_finds() -> None:
    """By the scatter of its own runs: 2 % in both sweeps, whatever else differs."""
    for (plan, rows), what in ((scaling(), "scales"), (grid({"--lr": [0.1, 0.3]}), "settings")):
        answer = build(plan, rows).answer[-1]
        pattern = (
            rf"This sweep finds differences of (\S+) % or more between two {what}, "
            r"with 80 % power \(6 runs each, (\S+) % noise measured\)\."
        )
        match = re.fullmatch(pattern, answer)
        assert match, answer
        difference, noise = map(float, match.groups())
        assert 0.05 < noise < 3
        assert difference > noise
    plan, rows = scaling(repeats=5)
    assert not any("This sweep finds" in sentence for sentence in build(plan, rows).answer)
