"""Which scale is named, which is recommended, and what is said of the others."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from hpml_orchestrator.sweeps.facts import SweepFacts
from hpml_orchestrator.sweeps.plan import SweepPlan
from hpml_orchestrator.sweeps.report import build
from hpml_orchestrator.sweeps.reporting import to_json, to_markdown
from hpml_orchestrator.sweeps.rows import PointRow
from tests.unit.sweeps.sweep_rows import scaling

NOISE = 0.05
SWEEPS = 40


def cold_cache(row: PointRow) -> PointRow:
    """The first run at 8 nodes stages for 100 s more."""
    if row.point != 3:
        return row
    phases = {**row.phases, "staging": row.phases["staging"] + 100}
    return replace(row, phases=phases, total_seconds=(row.total_seconds or 0) + 100)


def timed(
    seconds: Sequence[float], noise: Sequence[float], *, seed: int = 1, block: float = 0.0
) -> tuple[SweepPlan, list[PointRow]]:
    """Six runs at each of 1, 2, 4, ... nodes, with these medians and this noise."""
    draw = random.Random(seed)
    plan, rows = scaling(scales=[2**place for place in range(len(seconds))])
    times = []
    for _ in range(6):
        common = draw.lognormvariate(0, block)
        times += [
            common * one * draw.lognormvariate(0, scatter)
            for one, scatter in zip(seconds, noise, strict=True)
        ]
    return plan, [
        replace(row, total_seconds=time, phases={"training": time})
        for row, time in zip(rows, times, strict=True)
    ]


def equal(count: int, seed: int, **fields: float) -> tuple[SweepPlan, list[PointRow]]:
    """Scales that take equally long."""
    return timed([100.0] * count, [NOISE] * count, seed=seed, **fields)


def without(point: int) -> Callable[[PointRow], PointRow]:
    """The change that lets this point crash."""
    return lambda row: (
        replace(row, state="FAILED", total_seconds=None) if row.point == point else row
    )


def claims(report: SweepFacts) -> bool:
    """Whether the answer says that scales are faster or slower than the baseline."""
    first, said = report.answer[0], " ".join(report.answer)
    words = ("slower than 1 node (speedup", "means slower", "Shown to be faster", "1 node is the")
    named = "the fastest of" in first and "undecided against 1 node" not in first
    return named or any(one in said for one in words)


def against_baseline(report: SweepFacts) -> set[str]:
    """What the facts say of the scales and the baseline."""
    return {one.against_baseline for one in report.settings}


def verdicts(report: SweepFacts) -> set[str]:
    """What the table and the JSON form say of the scales."""
    return {one.against_best for one in report.settings} | against_baseline(report)


def test_one_disturbed_run_does_not_recommend_a_slow_scale() -> None:
    """Five of six runs at 8 nodes take 42-45 s, and all at 2 nodes more than 110 s."""
    report = build(*scaling(change=cold_cache))
    assert report.best == report.recommended == 3
    assert report.answer[0].startswith("8 nodes are the fastest of 4 scales by the medians: 4.67 [")
    assert "; undecided against 2 nodes and 4 nodes, as differences under 94 %" in report.answer[0]
    assert "Recommended" not in " ".join(report.answer)
    page = to_markdown(report)
    assert "scale with the best median, undecided" in page
    assert "not distinguishable" not in page


def test_of_two_scales_that_are_as_fast_the_smaller_is_recommended() -> None:
    """4 nodes take 0.8 % longer than 8: within the margin of 5 %, as its interval shows."""
    report = build(*timed([400, 200, 101, 100.2], [0.004] * 4))
    assert (report.best, report.recommended) == (3, 2)
    (sentence,) = [one for one in report.answer if one.startswith("Recommended")]
    assert sentence == (
        "Recommended: 4 nodes, the smallest scale shown to be within 5 % of the fastest "
        "(0.992 [0.987, 1] times as fast as 8 nodes)."
    )
    assert to_json(report)["recommended"] == 2
    assert "smallest scale within 5 % of the fastest" in to_markdown(report)
    noisy = build(*timed([400, 200, 101, 100.2], [0.05] * 4))
    assert noisy.recommended == noisy.best


@pytest.mark.parametrize("block", [0.0, 0.2])
@pytest.mark.parametrize("count", [2, 5])
def test_of_equal_scales_words_table_and_json_claim_the_same(count: int, block: float) -> None:
    """Single intervals exclude 1 in some of these sweeps; corrected, at most 5 % claim anything."""
    wrong = singles = 0
    for seed in range(SWEEPS):
        report = build(*equal(count, seed, block=block))
        claimed = bool(verdicts(report) & {"faster", "slower"})
        of_the_baseline = bool(against_baseline(report) & {"faster", "slower"})
        assert claims(report) == of_the_baseline, report.answer
        wrong += claimed
        singles += any(one.speedup and one.speedup.distinguishable for one in report.settings)
        if not claimed:
            assert report.answer[0].startswith("No scale is shown to be faster than 1 node")
            assert not {"faster", "slower"} & {*to_markdown(report).split(" | ")}
    assert wrong <= 0.05 * SWEEPS + 2
    assert singles or count == 2


def test_a_single_interval_without_1_is_not_called_slower() -> None:
    """Of 5 equal scales, where the interval of one has no 1 in it by chance."""
    chosen = [
        report
        for report in (build(*equal(5, seed)) for seed in range(SWEEPS))
        if any(
            one.speedup and one.speedup.distinguishable and one.against_baseline == "undecided"
            for one in report.settings
        )
    ]
    assert chosen
    for report in chosen:
        assert "slower" not in report.answer[0]
        assert "undecided for " in report.answer[0]
        assert {one["against_baseline"] for one in to_json(report)["settings"]} == {
            "",
            "undecided",
        }


@pytest.mark.parametrize("noisy", [0, 2])
def test_one_noisy_scale_neither_claims_nor_hides_differences(noisy: int) -> None:
    """With ten times the noise, variances are not pooled: the other scales keep their verdicts."""
    noise = [NOISE / 5] * 5
    noise[noisy] = NOISE * 2
    wrong = 0
    for seed in range(SWEEPS):
        wrong += bool(verdicts(build(*timed([100] * 5, noise, seed=seed))) & {"faster", "slower"})
    assert wrong <= 0.05 * SWEEPS + 2
    report = build(*timed([100, 100, 100, 80, 60], noise))
    assert report.settings[4].against_best == ""
    assert report.settings[3].against_best == "slower"
    assert report.settings[1].against_best == "slower"


@pytest.mark.parametrize(("point", "scale"), [(0, 0), (1, 1), (2, 2), (3, 3)])
def test_a_crash_leaves_the_other_scales_their_intervals(point: int, scale: int) -> None:
    """One run of 24 is lost: only comparisons with its scale are unknown; it can be repeated."""
    report = build(*scaling(change=without(point)))
    others = [one for place, one in enumerate(report.settings) if place != scale]
    assert all(one.seconds and one.seconds.interval for one in others)
    top = report.settings[3]
    for one in others:
        if scale and one.scale != 1:
            assert one.speedup
            assert one.speedup.interval
            assert one.against_baseline == "faster"
        if scale != 3 and one is not top:
            assert one.against_best == "slower"
    assert report.best == report.recommended == 3
    words = f"as hpml gives no interval below 6 runs: `hpml sweep run {report.id} --top-up`."
    assert report.answer[0].endswith(words)
    assert ("seem to be" in report.answer[0]) == (scale in {0, 3})


def test_five_scales_are_listed_and_the_others_counted() -> None:
    """In a sentence about the fastest, and in one where no scale is faster."""
    report = build(*timed([100.0] * 9, [0.01] * 9))
    assert (
        "undecided for 2 nodes, 4 nodes, 8 nodes, 16 nodes, 32 nodes and 3 more (speedup "
        in report.answer[0]
    )
    assert "64 nodes" not in report.answer[0]
    gain = build(*timed([200.0] + [100.0] * 8, [0.01] * 9))
    assert "by the medians" in gain.answer[0]
    assert " and 2 more, as differences under " in gain.answer[0]


def test_the_quotient_of_the_medians_stands_beside_a_speedup_within_repeats() -> None:
    """Where the machine drifts, they differ: a reader who divides the medians finds his number."""
    base = [100.0, 100, 100, 200, 200, 200]
    plan, rows = scaling(scales=(1, 2))
    ratios = [1.9, 1.95, 2.0, 1.6, 1.5, 1.55]
    times = [time for one, ratio in zip(base, ratios, strict=True) for time in (one, one / ratio)]
    report = build(
        plan, [replace(row, total_seconds=time) for row, time in zip(rows, times, strict=True)]
    )
    assert "1.74 [1.5, 2] times as fast as 1 node" in report.answer[0]
    assert "95 % CI; the quotient of the two medians is 1.69)" in report.answer[0]
    assert "1.74 [1.5, 2] (of the medians: 1.69)" in to_markdown(report)
