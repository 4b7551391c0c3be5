"""What a sceptic injects into a sweep: noise that a repeat shares, a drift, disturbed runs."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from hpml_orchestrator.sweeps.facts import Notice, SweepFacts
from hpml_orchestrator.sweeps.plan import SweepPlan
from hpml_orchestrator.sweeps.report import build
from hpml_orchestrator.sweeps.reporting import to_markdown
from hpml_orchestrator.sweeps.rows import PointRow
from tests.unit.sweeps.sweep_rows import BEGAN, MINUTE, scaling

SEEDS = range(20)
RARE = 3  # of 20 at 5 %, or fewer
FIVE = (1, 2, 4, 8, 16)


def amdahl(nodes: int) -> float:
    """Seconds with a serial fraction of 5 %."""
    return 200 * (0.05 + 0.95 / nodes)


def growing(nodes: int) -> float:
    """Amdahl's law with a cost that grows with the nodes."""
    return amdahl(nodes) * (1 + 0.05 * nodes)


def simulated(
    seed: int,
    law: Callable[[int], float] = amdahl,
    *,
    scales: Sequence[int] = (1, 2, 4, 8),
    repeats: int = 6,
    shared: float = 0.0,
    drift: float = 0.0,
    slow: float = 0.0,
    order: str = "interleaved",
) -> SweepFacts:
    """The report of runs with 2 % noise, whose places within their repeat are random."""
    noise = random.Random(seed)
    plan, rows = scaling(scales=scales, repeats=repeats)
    disturbed = []
    for start in range(0, len(rows), len(scales)):
        factor, places = noise.lognormvariate(0, shared), [*range(start, start + len(scales))]
        noise.shuffle(places)
        for place, row in zip(places, rows[start:], strict=False):
            total = law(row.world_size or 1) * factor * noise.lognormvariate(0, 0.02)
            total *= 1 + drift * place / (len(rows) - 1)
            total *= 3 if noise.random() < slow else 1
            began = BEGAN + MINUTE * place
            phases = {"training": total}
            disturbed.append(replace(row, total_seconds=total, phases=phases, started=began))
    return build(ordered(plan, order), disturbed)


def ordered(plan: SweepPlan, order: str) -> SweepPlan:
    return replace(plan, sweep={**plan.sweep, "order": order})


def notice(report: SweepFacts, title: str) -> Notice | None:
    return next((one for one in report.notices if one.title == title), None)


@pytest.mark.parametrize(
    ("middle", "fields"),
    [
        (1, {}),
        (1, {"shared": 0.2}),
        (1.165, {"drift": 0.33}),
        (1, {"slow": 0.1}),
        (1, {"slow": 0.1, "order": "random"}),
        (1, {"slow": 0.1, "shared": 0.2, "scales": FIVE, "repeats": 10}),
    ],
)
def test_fits_find_the_law_in_disturbed_sweeps(middle: float, fields: dict[str, Any]) -> None:
    """Their intervals hold the truth, and noise that a repeat shares does not widen that of f."""
    fits = [simulated(seed, **fields).fits[0] for seed in SEEDS]
    for name, truth in {"T1": 200 * middle, "f": 0.05}.items():
        ends = [fit.parameters[name].interval for fit in fits]
        assert sum(end is None or not end.low <= truth <= end.high for end in ends) <= RARE
    intervals = [fit.parameters["f"].interval for fit in fits]
    assert all(end and end.high - end.low < 0.03 for end in intervals)
    assert sum("does not fit" in fit.note for fit in fits) <= RARE


def test_a_law_that_does_not_fit_is_found_below_the_noise_of_repeats() -> None:
    """The factors of the repeats are not taken for the scatter of the runs."""
    for seed in SEEDS:
        assert "does not fit" in simulated(seed, growing, scales=FIVE, shared=0.2).fits[0].note


@pytest.mark.parametrize("repeats", [1, 5])
@pytest.mark.parametrize("order", ["interleaved", "random"])
def test_fewer_than_six_repeats_have_no_interval(repeats: int, order: str) -> None:
    """Neither in the data nor on the page."""
    report = simulated(0, repeats=repeats, order=order)
    (fit,) = report.fits
    assert [one.interval for one in fit.parameters.values()] == [None, None]
    assert "no 95 % CI: that takes 6 repeats" in fit.note
    (line,) = [line for line in to_markdown(report).splitlines() if "T1 (f" in line]
    assert "[" not in line.replace("\\", "")


def staged(row: PointRow) -> PointRow:
    """The first run with 8 nodes stages 100 s: its node's cache is cold."""
    if row.point != 3:
        return row
    longer = 100 - row.phases["staging"]
    total = (row.total_seconds or 0) + longer
    return replace(row, total_seconds=total, phases={**row.phases, "staging": 100.0})


def test_an_outlier_is_reported_with_the_phase_that_explains_it() -> None:
    """It stays in the figures, and the fit barely changes."""
    report, steady = build(*scaling(change=staged)), build(*scaling())
    found = notice(report, "Outliers")
    assert found is not None
    assert "1 of 24 complete runs took far longer" in found.text
    assert found.details == (
        "run sub-1.3 (8 nodes) took 3.12 times the median of its setting: staging 100 s of 144 s",
    )
    assert "without weight: 1 of 24 runs" in report.fits[0].note
    pair = [one.fits[0].parameters["f"].value for one in (report, steady)]
    assert pair[0] == pytest.approx(pair[1], rel=0.05)
    assert report.settings[3].runs == 6


def test_at_most_five_outliers_are_listed_and_steady_sweeps_have_none() -> None:
    """Nor has a sweep in which whole repeats are slow."""
    found = notice(simulated(2, slow=0.2, repeats=10), "Outliers")
    assert found is not None
    assert len(found.details) == 6
    assert found.details[-1].endswith(" more")
    for seed in SEEDS:
        assert not notice(simulated(seed), "Outliers")
        assert not notice(simulated(seed, shared=0.5), "Outliers")


@pytest.mark.parametrize(
    ("order", "status", "meaning"),
    [("interleaved", "", "so speedups hold"), ("random", "loud", "may come from the drift")],
)
def test_a_drift_is_reported(order: str, status: str, meaning: str) -> None:
    """A slowdown by a third is found in each sweep, and steady sweeps rarely report one."""
    for seed in SEEDS:
        found = notice(simulated(seed, drift=0.33, slow=0.05, order=order), "Drift")
        assert found is not None
        assert found.status == status
        (percent,) = re.findall(r"The runs became slower by about (\d+)%", found.text)
        assert 20 < int(percent) < 45
        assert meaning in found.text
    shared = 0.2 if order == "interleaved" else 0.0
    steady = [simulated(seed, shared=shared, order=order) for seed in SEEDS]
    assert sum(notice(one, "Drift") is not None for one in steady) <= 1
