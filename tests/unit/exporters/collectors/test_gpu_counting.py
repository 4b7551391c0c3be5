"""Totals out of readings, and how often a reading is worth its price."""

from __future__ import annotations

import pytest
from hpml_exporters.gpu.counting import Cost, Integral, Wrapping, periods
from hypothesis import given
from hypothesis import strategies as st


def test_a_rate_is_integrated_over_the_time_since_the_last_reading() -> None:
    """Half busy for 2 seconds, then fully for 1: 2 seconds in all."""
    total = Integral(most=2.5)
    assert total.add(1.0, 100.0) == 0, "nothing is known of the time before"
    assert total.add(0.5, 102.0) == 1.0
    assert total.add(1.0, 103.0) == 2.0


def test_a_gap_counts_as_long_as_a_reading_can_stand_for() -> None:
    """Nobody saw what happened in the hour."""
    total = Integral(most=2.5)
    total.add(1.0, 0.0)
    assert total.add(1.0, 3600.0) == 2.5


def test_after_a_pause_the_next_reading_only_begins() -> None:
    """What a GPU did while it was lost is not known."""
    total = Integral(most=10)
    total.add(1.0, 0.0)
    total.add(1.0, 4.0)
    total.pause()
    assert total.add(1.0, 9.0) == 4.0
    assert total.add(1.0, 10.0) == 5.0


def test_a_clock_that_stands_or_goes_back_adds_nothing() -> None:
    """Two readings at one moment, and one from before."""
    total = Integral(most=10)
    total.add(1.0, 5.0)
    total.add(1.0, 5.0)
    assert total.add(1.0, 4.0) == 0
    assert total.add(1.0, 6.0) == 1.0


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 20)), max_size=50))
def test_a_total_never_falls_nor_outruns_time(steps: list[tuple[float, float]]) -> None:
    """Whatever rates and pauses: between 0 and the time that went by."""
    total = Integral(most=2.5)
    now, before, began = 10.0, 0.0, 10.0
    total.add(1.0, now)
    for rate, seconds in steps:
        now += seconds
        after = total.add(rate, now)
        assert before <= after <= now - began + 1e-6
        assert after - before <= 2.5 + 1e-9
        before = after


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=30), st.integers(0, 2**32 - 1))
def test_a_narrow_counter_may_wrap_between_readings(steps: list[int], start: int) -> None:
    """What is added up is what happened, as long as less than 4 GiB went by at a time."""
    counter, true = Wrapping(), start
    counter.add(true % 2**32, 32)
    for step in steps:
        true += step
        total = counter.add(true % 2**32, 32)
    assert total == true - start


def test_a_wide_counter_that_falls_was_reset() -> None:
    """A driver that was loaded again counts from zero."""
    counter = Wrapping()
    counter.add(10**12, 64)
    counter.add(10**12 + 5, 64)
    assert counter.add(7, 64) == 12


def test_a_narrow_counter_in_a_wide_answer_wraps() -> None:
    """Drivers hand the 32 bits of the PCIe counter out as a number of 64."""
    counter = Wrapping()
    counter.add(2**32 - 10, 64)
    assert counter.add(20, 64) == 30


def test_what_fits_the_budget_keeps_its_rhythm() -> None:
    """A fast driver is asked as often as wanted."""
    costs = [Cost(10e-6, 1, 5), Cost(20e-6, 5, 30)]
    assert periods(costs, 100e-6) == [1, 5]


def test_the_dearest_becomes_rarer_first() -> None:
    """A call of a millisecond is made every five seconds and not every second."""
    costs = [Cost(10e-6, 1, 5), Cost(1e-3, 1, 30), Cost(30e-6, 1, 5)]
    assert periods(costs, 300e-6) == [1, 5, 1]
    assert periods(costs, 100e-6) == [1, 25, 1]


def test_nothing_becomes_rarer_than_it_may() -> None:
    """A hopeless budget ends at the bounds."""
    costs = [Cost(1.0, 1, 5), Cost(1.0, 5, 30), Cost(1.0, 300, 300)]
    assert periods(costs, 1e-9) == [5, 30, 300]


@given(
    st.lists(
        st.builds(
            Cost, st.floats(0, 0.1), st.sampled_from([1.0, 5.0]), st.sampled_from([5.0, 30.0])
        ),
        max_size=12,
    ),
    st.floats(1e-6, 1e-1),
)
def test_a_plan_is_within_budget_or_at_its_bounds(costs: list[Cost], budget: float) -> None:
    """There is no third."""
    plan = periods(costs, budget)
    spent = sum(cost.seconds / period for cost, period in zip(costs, plan, strict=True))
    assert all(cost.period <= period <= cost.most for cost, period in zip(costs, plan, strict=True))
    assert spent <= budget or all(
        period == pytest.approx(cost.most) for cost, period in zip(costs, plan, strict=True)
    )
