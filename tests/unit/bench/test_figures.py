"""From repeats to a verdict: recorded repeats of a virtual machine, disturbed and slowed down."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpml_orchestrator.bench.measure import ANSWER, figure, repeated
from hpml_orchestrator.bench.results import UNCERTAIN, Measurement, Rate, judge

# GFLOP/s of each of two cores and GB/s of both, of repeats of 0.1 s in their order, as measure_cpu
# and measure_memory took them on a virtual machine with two CPUs.
RECORDED: dict[str, list[list[float]]] = json.loads(
    Path(__file__).with_name("repeats.json").read_text()
)
Made = Callable[[Sequence[Sequence[float]]], Rate]


@pytest.fixture
def made(capsys: pytest.CaptureFixture[str]) -> Made:
    """Return the figure that a part prints for its repeats."""

    def make(tracks: Sequence[Sequence[float]]) -> Rate:
        figure("cpu", tracks, "FLOP/s")
        line = capsys.readouterr().out.strip().removeprefix(ANSWER)
        return Rate(**json.loads(line)["figures"]["cpu"])

    return make


def named(figure: Rate, other: Rate) -> list[str]:
    """Return the nodes that are named if one has the figure and its sibling has the other."""
    pair = [
        Measurement(node, "type", "now", 0.0, figures={"cpu": one})
        for node, one in (("tested", figure), ("sibling", other))
    ]
    return [one.node for one in judge(pair, []).outliers]


def disturbed(tracks: Sequence[Sequence[float]], share: float, seed: int) -> list[list[float]]:
    """Return the rates with a share of the repeats up to twice as long, here and there."""
    chance = random.Random(seed)
    return [
        [rate / (1 + chance.random() * (chance.random() < share)) for rate in rates]
        for rates in tracks
    ]


@pytest.mark.parametrize(
    ("kind", "share", "at_least"),
    [(kind, *case) for kind in RECORDED for case in ((0.0, 10), (0.3, 6), (0.5, 5))],
)
def test_a_slow_down_of_a_tenth_is_named(
    kind: str, share: float, at_least: int, made: Made
) -> None:
    """Disturbed repeats move the figure little and accuse nobody; a slower node is found."""
    healthy, found = made(RECORDED[kind]), 0
    assert healthy.spread <= UNCERTAIN
    for seed in range(10):
        tracks = disturbed(RECORDED[kind], share, seed)
        again = made(tracks)
        assert again.value == pytest.approx(healthy.value, rel=0.05)
        assert named(again, healthy) == []
        slow = made([[0.9 * rate for rate in rates] for rates in tracks])
        found += named(slow, healthy) == ["tested"]
    assert found >= at_least


def test_a_disturbance_that_lasts_accuses_nobody(made: Made) -> None:
    """Half of the time everything was half as fast: the spread shows that, and no node is named."""
    healthy = made(RECORDED["memory"])
    tracks = [
        [rate / (1 + (2 * index > len(rates))) for index, rate in enumerate(rates)]
        for rates in RECORDED["memory"]
    ]
    disturbed_figure = made(tracks)
    assert disturbed_figure.spread > UNCERTAIN
    assert named(disturbed_figure, healthy) == []


@pytest.mark.parametrize("call_seconds", [0.0007, 0.004, 0.03, 0.25])
def test_a_cpu_quota_of_nine_tenths_is_named(
    call_seconds: float, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work of any length meets the pauses of a quota, each 10 ms of 100 ms, in its best repeats."""
    now, pauses, chance = 0.0, 0.0, random.Random(7)

    def work() -> None:
        nonlocal now
        left = call_seconds * (1 + 0.01 * chance.random())
        while left > 0:
            into = now % 0.1
            if pauses and into > 0.1 - pauses - 1e-9:
                now += 0.1 - into + 1e-9
                continue
            step = min(left, 0.1 - pauses - into)
            now, left = now + step + 1e-9, left - step

    monkeypatch.setattr(
        "hpml_orchestrator.bench.measure.time", SimpleNamespace(perf_counter=lambda: now)
    )
    healthy = made([repeated(work, 1.0, 8.0)])
    again = made([repeated(work, 1.0, 8.0)])
    pauses = 0.01
    slow = made([repeated(work, 1.0, 8.0)])
    assert again.value == pytest.approx(healthy.value, rel=0.03)
    assert (named(again, healthy), named(slow, healthy)) == ([], ["tested"])
