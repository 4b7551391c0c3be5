"""Costs and crossover bandwidths of methods, from results whose answer is known."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from hpml_orchestrator.sweeps.communication import Communication, communication
from hpml_orchestrator.sweeps.rows import PointRow
from hpml_orchestrator.sweeps.wording import crossover_text


def result(method: str, mbit: float | None, seconds: float | None, **more: Any) -> PointRow:
    """One run: what communication.py reports."""
    told = {
        "method": method,
        "bandwidth_mbit": mbit,
        "seconds_to_accuracy": seconds,
        "steps_to_accuracy": 72 if seconds else None,
        "train_seconds": seconds or 99.0,
        "bytes_sent": 1e6,
        "comm_seconds": 0.5,
        "world_size": 2,
        "target_accuracy": 0.95,
    }
    return PointRow(0, state="COMPLETED", result={**told, **more})


def model(method: str, mbit: float, noise: float = 0.0) -> float:
    """Seconds to the target: all send 100 Mbit, topk a tenth, for which it computes 2 s longer."""
    compute, sent = {"allreduce": (1.0, 100.0), "topk": (3.0, 10.0), "bad": (9.0, 100.0)}[method]
    return (compute + sent / mbit) * (1 + noise)


def sweep(
    *methods: str, noise: tuple[float, ...] = (0,), mbits: tuple[float, ...]
) -> list[PointRow]:
    return [
        result(method, mbit, model(method, mbit, one))
        for method in methods
        for mbit in mbits
        for one in noise
    ]


def found(rows: list[PointRow]) -> Communication:
    answer = communication(rows)
    assert answer is not None
    return answer


NOISE = (-0.05, -0.03, -0.01, 0.01, 0.03, 0.05)


def test_a_crossover_is_found_between_the_bandwidths_around_it() -> None:
    """1 + 100/b = 3 + 10/b at 45 Mbit/s; the interval holds it."""
    rows = sweep("allreduce", "topk", noise=NOISE, mbits=(10, 30, 60, 100))
    (crossover,) = found(rows).crossovers
    assert crossover.mbit == pytest.approx(45, rel=0.03)
    assert crossover.interval is not None
    assert 40 < crossover.interval.low < 45 < crossover.interval.high < 50
    assert crossover.method == "topk"
    assert crossover.text == f"sooner below {crossover.mbit:.3g} Mbit/s"
    assert crossover_text(crossover).startswith(f"{crossover.mbit:.1f} [")


@pytest.mark.parametrize(
    ("noise", "text", "shown"),
    [
        ((0,), "unknown: 1 run of each", "-"),
        ((0, 0), "not sure, from 2 runs of each: sooner below 45.6 Mbit/s", "45.6"),
        ((0,) * 5, "not sure, from 5 runs of each: sooner below 45.6 Mbit/s", "45.6"),
        ((0,) * 6, "sooner below 45.6 Mbit/s", "45.6"),
    ],
)
def test_few_runs_decide_nothing(noise: tuple[float, ...], text: str, shown: str) -> None:
    """From one run of each there is no crossover, from fewer than six no interval."""
    (crossover,) = found(
        sweep("allreduce", "topk", noise=noise, mbits=(10, 30, 60, 100))
    ).crossovers
    assert crossover.text == text
    assert crossover_text(crossover) == shown
    assert (crossover.interval is None) == (len(noise) < 6)
    one_more = [result("topk", 10, 4.1), *sweep("allreduce", "topk", mbits=(10, 100))]
    assert found(one_more).crossovers[0].text == "unknown: 1 run of some"


def test_what_is_predicted_and_measured_stands_beside_what_is_reported() -> None:
    """The medians of the runs that report them; a method without them has none."""
    told = [{"predicted_seconds": 0.1 * n, "interface_bytes": 1.1e6 + n} for n in (1, 2, 3)]
    rows = [result("stale", 10, 2, **one) for one in told] + sweep("allreduce", mbits=(10,))
    base, stale = found(rows).costs
    assert (base.predicted, base.interface_bytes) == (None, None)
    assert stale.predicted == pytest.approx(0.2)
    assert stale.interface_bytes == 1.1e6 + 2


def test_seeds_that_are_hard_for_all_methods_do_not_widen_the_interval() -> None:
    """Runs of a seed are compared with each other, in whatever order they ended."""
    hard = dict(enumerate((0.5, 0.7, 0.9, 1.2, 1.6, 2.0)))

    def seconds(method: str, mbit: int, seed: int) -> float:
        noise = NOISE[(seed + len(method) + mbit // 10) % 6]
        return model(method, mbit, noise) * hard[seed]

    rows = [
        result(method, mbit, seconds(method, mbit, seed), seed=seed)
        for method in ("allreduce", "topk")
        for mbit in (10, 30, 60, 100)
        for seed in (hard if method == "topk" else reversed(hard))
    ]
    (paired,) = found(rows).crossovers
    without = [replace(row, result={**row.result, "seed": None}) for row in rows]
    other = [replace(row, result={**row.result, "seed": 7}) for row in rows[:1]] + rows[1:]
    assert paired.interval is not None
    assert paired.interval.method == "bootstrap, paired by seed"
    assert 30 < paired.interval.low < 45 < paired.interval.high < 60
    for unpaired in (without, other):
        (crossover,) = found(unpaired).crossovers
        assert crossover.mbit == paired.mbit
        assert crossover.interval is not None
        assert crossover.interval.method == "smoothed bootstrap"
        assert crossover.interval.high > 2 * paired.interval.high
        assert crossover.interval.low < paired.interval.low / 2


@pytest.mark.parametrize(
    ("mbits", "text", "shown"),
    [
        ((1, 10), "sooner at every measured bandwidth, up to 10 Mbit/s", "-"),
        ((100, 1000), "not sooner at any measured bandwidth, down to 100 Mbit/s", "-"),
        ((10,), "unknown: it needs two bandwidths at which all runs reach the target", "-"),
    ],
)
def test_nothing_is_extrapolated(mbits: tuple[float, ...], text: str, shown: str) -> None:
    """A crossover outside of what was measured is not given."""
    (crossover,) = found(sweep("allreduce", "topk", noise=NOISE, mbits=mbits)).crossovers
    assert (crossover.mbit, crossover.text, crossover_text(crossover)) == (None, text, shown)


def test_an_uncertain_crossover_has_an_open_interval() -> None:
    """With noise that reaches beyond the lowest bandwidth, the interval does so, too."""
    loud = (-0.5, -0.3, -0.1, 0.1, 0.3, 0.5)
    rows = sweep("allreduce", "topk", noise=loud, mbits=(40, 60))
    (crossover,) = found(rows).crossovers
    assert crossover.interval is not None
    assert crossover.interval.low == 0
    assert math.isinf(crossover.interval.high)
    assert crossover_text(crossover).endswith("[below all, above all]")


def test_runs_that_miss_the_target_are_counted_and_cross_nowhere() -> None:
    """A bandwidth with such a run is not used; the table has how many reached it."""
    rows = sweep("allreduce", "topk", noise=(0, 0), mbits=(10, 30, 100))
    rows.append(result("topk", 10, None))
    told = found(rows)
    at = {(one.method, one.mbit): one for one in told.costs}
    assert (at["topk", 10].reached, at["topk", 10].runs) == (2, 3)
    assert at["topk", 10].seconds.n == 3
    (crossover,) = told.crossovers
    assert crossover.mbit is not None
    assert 30 < crossover.mbit < 100
    never = found([*sweep("allreduce", mbits=(10,)), result("topk", 10, None)])
    (cost,) = [one for one in never.costs if one.method == "topk"]
    assert math.isinf(cost.seconds.value)
    assert cost.steps is None


def test_orders_that_are_not_steady_are_said() -> None:
    """A method that wins at 10 and at 100, but not between, has no single crossover."""
    rows = sweep("allreduce", noise=(0, 0), mbits=(10, 30, 100))
    rows += 2 * [result("topk", 10, 5), result("topk", 30, 9), result("topk", 100, 1)]
    (crossover,) = found(rows).crossovers
    assert "measure more bandwidths" in crossover.text


def test_without_shaped_links_there_are_costs_only() -> None:
    """On a real network the methods are compared as they are, the baseline first."""
    rows = [result("topk", None, 2), result("allreduce", None, 1)]
    told = found(rows)
    assert [one.method for one in told.costs] == ["allreduce", "topk"]
    assert told.crossovers == ()


def test_numbers_of_ranks_are_compared_by_themselves() -> None:
    """Four ranks have their own crossover."""
    rows = sweep("allreduce", "topk", noise=(0, 0), mbits=(10, 100))
    rows += 2 * [result("topk", mbit, 9, world_size=4) for mbit in (10, 100)]
    rows += 2 * [result("allreduce", mbit, 99 / mbit, world_size=4) for mbit in (10, 100)]
    crossovers = {one.ranks: one.mbit for one in found(rows).crossovers}
    assert crossovers[2] == pytest.approx(45, rel=0.2)
    assert crossovers[4] == pytest.approx(11, rel=0.01)


def test_other_sweeps_have_no_such_section() -> None:
    """Without these figures, with one method, or with two targets, there is nothing to compare."""
    assert communication([]) is None
    assert communication([PointRow(0, state="COMPLETED", result={"method": "adam"})]) is None
    assert communication(sweep("allreduce", mbits=(10, 100))) is None
    rows = sweep("allreduce", "topk", mbits=(10,))
    assert communication([*rows, result("topk", 10, 3, target_accuracy=0.9)]) is None
    assert communication([*rows[:1], result("topk", 10, 3, bytes_sent="many")]) is None
