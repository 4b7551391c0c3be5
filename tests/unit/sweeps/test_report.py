"""The report's facts and sentences, recomputed from the rows by other means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import fmean, median
from typing import Any

import pytest

from hpml_orchestrator.sweeps.facts import Report, Setting
from hpml_orchestrator.sweeps.report import build
from hpml_orchestrator.sweeps.rows import Row
from tests.unit.sweeps import sweep_rows

LARGEST = 8


def at(report: Report, scale: int) -> Setting:
    return next(setting for setting in report.settings if setting.scale == scale)


def by_scale(plan: Any, rows: list[Row]) -> dict[int, list[Row]]:
    """Rows by the scale of their point, found without the report."""
    scales = {point.number: point.scale for point in plan.points}
    return {scale: [row for row in rows if scales[row.point] == scale] for scale in scales.values()}


def changed(**fields: Any) -> Callable[[Row], Row]:
    return lambda row: replace(row, **fields)


def at_largest(**fields: Any) -> Callable[[Row], Row]:
    return lambda row: replace(row, **fields) if row.world_size == LARGEST else row


def failed(row: Row) -> Row:
    return replace(row, state="FAILED", reason="exit 1", total_seconds=None, phases={})


def notice(report: Report, title: str) -> str:
    """The text of a notice with its details; empty without one."""
    return next(
        (" ".join([one.text, *one.details]) for one in report.notices if one.title == title), ""
    )


def test_a_strong_sweep_is_recomputed() -> None:
    """Medians, [min, max] of 6, ratios of medians, sums: all from the rows."""
    plan, rows = sweep_rows.scaling()
    report = build(plan, rows)
    runs = by_scale(plan, rows)
    base = median(row.total_seconds or 0 for row in runs[1])
    for scale, group in runs.items():
        totals = [row.total_seconds or 0 for row in group]
        setting = at(report, scale)
        assert setting.seconds
        assert setting.seconds.interval
        assert setting.speedup
        assert setting.seconds.value == pytest.approx(median(totals))
        assert setting.seconds.interval.low == pytest.approx(min(totals))
        assert setting.seconds.interval.high == pytest.approx(max(totals))
        assert setting.speedup.value == pytest.approx(base / median(totals), rel=1e-3)
        assert setting.speedup.efficiency == pytest.approx(setting.speedup.value / scale)
        assert setting.costs.gpu_hours == pytest.approx(sum(row.gpu_hours for row in group))
        assert sum(setting.phases.values()) == pytest.approx(fmean(totals))
        staging = [row.phases["staging"] for row in group]
        without = [total - part for total, part in zip(totals, staging, strict=True)]
        assert setting.seconds_without_staging
        assert setting.seconds_without_staging.value == pytest.approx(median(without))
        if scale > 1:
            mean_of_base = fmean(row.total_seconds or 0 for row in runs[1])
            assert sum(setting.lost.values()) == pytest.approx(fmean(totals) - mean_of_base / scale)
            share = (1 / setting.speedup.value - 1 / scale) / (1 - 1 / scale)
            assert setting.serial_fraction
            assert setting.serial_fraction.value == pytest.approx(share)
    assert report.costs.energy_kwh == pytest.approx(sum(row.energy_kwh or 0 for row in rows))
    assert report.best == at(report, LARGEST).number
    assert [one.distinguishable for one in report.settings] == [True, True, True, False]
    assert "4.63" in report.answer[0]
    assert "8 nodes are the fastest of 4 scales" in report.answer[0]


def test_a_weak_sweep_compares_samples_per_total_second() -> None:
    """Each run trains the same epochs, so the ratio of rates is not the ratio of times by scale."""
    plan, rows = sweep_rows.scaling("weak")
    report = build(plan, rows)
    rates = {
        scale: median(
            (row.steps or 0) * (row.batch_global or 0) / (row.total_seconds or 1) for row in group
        )
        for scale, group in by_scale(plan, rows).items()
    }
    speedups = {one.scale: one.speedup.value for one in report.settings if one.speedup}
    assert speedups == pytest.approx({scale: rates[scale] / rates[1] for scale in rates}, rel=1e-3)
    assert report.fits[0].model == "Gustafson"
    assert "times the throughput of 1 node" in report.answer[0]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: (sweep_rows.scaling()[0], []), "No run is complete yet (24 waiting)"),
        (lambda: sweep_rows.scaling(change=failed), "No run completed (24 failed)"),
        (lambda: sweep_rows.scaling(scales=(1,), repeats=1), "Only 1 node is complete"),
        (
            lambda: sweep_rows.scaling(
                change=lambda row: failed(row) if row.world_size == 1 else row
            ),
            "No speedups are given: the baseline, 1 node, has no result to compare with.",
        ),
        (
            lambda: sweep_rows.scaling(change=at_largest(batch_global=256)),
            "strong scaling needs the same global batch everywhere, but runs had 256, 512",
        ),
        (lambda: sweep_rows.scaling(repeats=5), "8 nodes seem to be the fastest"),
        (lambda: sweep_rows.scaling(repeats=5), "no 95 % CI"),
        (
            lambda: sweep_rows.scaling(change=at_largest(oversubscribed=True)),
            "4 nodes are the fastest of 3 scales",
        ),
        (
            lambda: sweep_rows.scaling(
                change=lambda row: replace(row, oversubscribed=row.world_size != 1)
            ),
            "The data do not show how digits-strong scales: only 1 node",
        ),
        (
            lambda: sweep_rows.scaling(change=changed(oversubscribed=True)),
            "The complete runs give no answer: all had more ranks than CPU cores.",
        ),
        (
            lambda: sweep_rows.scaling(
                change=lambda row: replace(
                    row,
                    phases={**row.phases, "staging": 60.0},
                    total_seconds=(row.total_seconds or 0) + 60,
                )
            ),
            "lost against ideal scaling: staging",
        ),
        (lambda: sweep_rows.grid({"--lr": [0.1]}, repeats=1), "no other setting is complete"),
        (lambda: sweep_rows.grid({"--lr": [0.1, 0.09]}), "not distinguishable from it"),
        (lambda: sweep_rows.grid({"--lr": [0.1, 0.5]}), ", distinguishable from it"),
        (sweep_rows.search, "whether they differ cannot be said with fewer than 6 runs"),
        (
            sweep_rows.search,
            "20 trials counted (16 completed, 3 pruned, 1 out of memory)",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_the_answer_says_what_the_data_carry(make: Callable[[], Any], sentence: str) -> None:
    """Unfinished, failed, mixed, too few, oversubscribed, indistinguishable."""
    answer = " ".join(build(*make()).answer)
    assert sentence in answer
    assert "None" not in answer
    assert "nan" not in answer


@pytest.mark.parametrize(
    ("title", "change", "text"),
    [
        ("Different code", at_largest(code="0badc0de"), "0badc0de: 6 attempts"),
        ("Different environment", at_largest(environment="sha256:other"), "sha256:other"),
        ("Different hardware", at_largest(hardware="1 x Xeon"), "1 x Xeon: 6 attempts"),
        ("Oversubscribed runs", at_largest(oversubscribed=True), "6 of 24 complete runs"),
        ("Binding not verified", at_largest(verified=False), "6 of 24 complete runs"),
        ("Uncommitted changes", changed(code="2f6c1b0+dirty-11"), "24 attempts"),
        ("Learning rate", at_largest(learning_rate=0.4), "0.4 instead of 0.1"),
        (
            "Not completed",
            lambda row: failed(row) if row.point < 3 else row,
            "Of 24 attempts: 3 failed",
        ),
        ("Few repeats", lambda row: failed(row) if row.point < 1 else row, "down to 5"),
        (
            "Different steps",
            lambda row: replace(row, steps=7) if row.point == 3 else row,
            "8 nodes: 7-1171",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_what_restricts_the_figures_is_named(
    title: str, change: Callable[[Row], Row], text: str
) -> None:
    """Each deviation has its notice, and a clean sweep has none."""
    assert build(*sweep_rows.scaling()).notices == ()
    assert text in notice(build(*sweep_rows.scaling(change=change)), title)


def test_every_attempt_is_listed_and_paid() -> None:
    """A failed start and its retry are two attempts; one that never started waits."""
    plan, rows = sweep_rows.scaling()
    retried = [failed(rows[0]), replace(rows[0], start=1), *rows[1:-1]]
    report = build(plan, retried)
    assert len(report.attempts) == len(retried) + 1
    assert report.states == {"COMPLETED": 23, "FAILED": 1, "WAITING": 1}
    assert report.costs.gpu_hours == pytest.approx(sum(row.gpu_hours for row in retried))
    assert report.failed.gpu_hours == pytest.approx(rows[0].gpu_hours)
    assert at(report, 1).runs == 6


def test_runs_that_missed_the_target_are_censored() -> None:
    """They count among the runs, and leave the interval open; a timeout counts as missed."""
    plan, rows = sweep_rows.scaling(
        change=lambda row: (
            replace(row, state="TIMEOUT", seconds_to_accuracy=None) if row.point == 3 else row
        )
    )
    target = at(build(plan, rows), LARGEST).target
    assert target
    assert (target.runs, target.reached, target.accuracy) == (6, 4, 0.95)
    assert target.seconds
    assert target.high is None


def test_the_cheapest_of_equal_scales_is_best() -> None:
    """Where 8 nodes are not distinguishable from 4, 4 are recommended."""
    plan, rows = sweep_rows.scaling()
    totals = {
        row.point + 1: (row.total_seconds or 1) * 0.999 for row in rows if row.world_size == 4
    }
    equal = [replace(row, total_seconds=totals.get(row.point, row.total_seconds)) for row in rows]
    report = build(plan, equal)
    assert report.settings[report.best or 0].scale == 4
    assert "not distinguishable, but larger: 8 nodes" in " ".join(report.answer)


def test_models_are_fitted_where_the_scales_allow() -> None:
    """Amdahl from three scales, USL from five; both know the serial twentieth, and start-up."""
    assert not build(*sweep_rows.scaling(scales=(1, 2))).fits
    assert [fit.model for fit in build(*sweep_rows.scaling()).fits] == ["Amdahl"]
    amdahl, usl = build(*sweep_rows.scaling(scales=(1, 2, 4, 8, 16))).fits
    assert amdahl.parameters["f"].value == pytest.approx(0.1, abs=0.03)
    assert usl.model == "Universal Scalability Law"
    assert usl.speedups[0] == pytest.approx(1)
    assert max(usl.scales) == 16


def test_a_search_ranks_complete_trials() -> None:
    """Pruned and failed trials are counted, not ranked."""
    plan, rows = sweep_rows.search(40)
    report = build(plan, rows)
    complete = {row.point: row.metric or 0 for row in rows if row.state == "COMPLETED"}
    assert report.ranked[0].number == report.best
    assert report.ranked[0].figure
    assert report.ranked[0].figure.value == max(complete.values())
    assert len(report.ranked) == len(complete)
    lowest = {**plan.sweep, "search": {"metric": "loss", "direction": "minimize"}}
    best = build(replace(plan, sweep=lowest), rows).ranked[0].figure
    assert best
    assert best.value == min(complete.values())


def test_each_series_has_its_own_baseline() -> None:
    """A strong sweep with an axis: speedups compare equal values of it."""
    plan, rows = sweep_rows.scaling(repeats=12)
    points = tuple(replace(point, values={"--amp": point.repeat % 2 == 0}) for point in plan.points)
    report = build(replace(plan, points=points), rows)
    assert list(report.series) == ["amp=True", "amp=False"]
    for settings in report.series.values():
        assert [setting.runs for setting in settings] == [6, 6, 6, 6]
        assert settings[0].speedup
        assert settings[0].speedup.value == 1


@pytest.mark.parametrize(
    ("make", "answers"),
    [
        (sweep_rows.scaling, "++++++++-+++"),
        (lambda: sweep_rows.scaling(target=None, change=changed(accuracy=None)), "--+++++---++"),
        (sweep_rows.search, "++++++++-0-0"),
        (lambda: (sweep_rows.scaling()[0], []), "--+---+-----"),
    ],
    ids=["strong", "no accuracy", "search", "nothing yet"],
)
def test_the_twelve_ways_are_answered_from_the_data(make: Callable[[], Any], answers: str) -> None:
    """+ ok, - not answered, 0 does not apply."""
    signs = {"ok": "+", "not answered": "-", "does not apply": "0"}
    checks = build(*make()).checks
    assert "".join(signs[check.status] for check in checks) == answers
