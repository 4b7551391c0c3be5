"""The report's facts and sentences, recomputed from the rows by other means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import fmean, median
from typing import Any

import pytest

from hpml_orchestrator.sweeps.pages import to_json
from hpml_orchestrator.sweeps.plan import SweepPlan
from hpml_orchestrator.sweeps.report import build
from hpml_orchestrator.sweeps.rows import Row
from tests.unit.sweeps.sweep_rows import grid, scaling, search

AT_1, AT_8, FIRST = ("world_size", 1), ("world_size", 8), ("point", 0)
FAILED: dict[str, Any] = {"state": "FAILED", "reason": "exit 1", "total_seconds": None}
LEFT_OUT: dict[str, Any] = FAILED | {"state": "EXCLUDED", "reason": "8 is too many"}


def strong(where: tuple[str, int] | None = None, **fields: Any) -> tuple[SweepPlan, list[Row]]:
    """A strong sweep with the rows changed whose field has that value."""

    def change(row: Row) -> Row:
        chosen = where is None or getattr(row, where[0]) == where[1]
        return replace(row, **fields) if chosen else row

    return scaling(change=change)


def silent(sweep: tuple[SweepPlan, list[Row]]) -> tuple[SweepPlan, list[Row]]:
    """The sweep, where no run reported a figure."""
    return sweep[0], [replace(row, accuracy=None, metric=None) for row in sweep[1]]


def loss_of(sweep: tuple[SweepPlan, list[Row]]) -> tuple[SweepPlan, list[Row]]:
    """The sweep, where no run reported the loss that it minimises."""
    wanted = {"search": {"metric": "loss", "direction": "minimize"}}
    return replace(sweep[0], sweep={**sweep[0].sweep, **wanted}), silent(sweep)[1]


def below_zero(sweep: tuple[SweepPlan, list[Row]]) -> tuple[SweepPlan, list[Row]]:
    """The sweep with an accuracy that has no ratios."""
    return sweep[0], [replace(row, accuracy=-(row.accuracy or 0)) for row in sweep[1]]


def as_fast_as_4(row: Row) -> Row:
    """8 nodes, as slow as 4."""
    return replace(row, total_seconds=70 + row.point / 10) if (row.world_size or 0) > 2 else row


def crowded(row: Row) -> Row:
    """More ranks than cores on all but one node."""
    return replace(row, oversubscribed=row.world_size != 1)


def a_minute_of_staging(row: Row) -> Row:
    """The run with much more staging."""
    phases = {**row.phases, "staging": 60.0}
    return replace(row, phases=phases, total_seconds=(row.total_seconds or 0) + 60)


@pytest.mark.parametrize("mode", ["strong", "weak"])
def test_a_sweep_is_recomputed(mode: str) -> None:
    """Medians, [min, max] of 6, ratios of medians, sums: all from the rows.

    Each run of the weak sweep trains the same epochs, so it is rates that it compares.
    """
    plan, rows = scaling(mode)
    report = to_json(build(plan, rows))
    base: list[float] = []
    for setting in report["settings"]:
        scale, speedup = setting["scale"], setting["speedup"]
        runs = [row for row, point in zip(rows, plan.points, strict=True) if point.scale == scale]
        totals = [row.total_seconds or 0 for row in runs]
        without = [total - row.phases["staging"] for total, row in zip(totals, runs, strict=True)]
        assert setting["seconds"]["value"] == pytest.approx(median(totals))
        assert setting["seconds"]["interval"]["low"] == pytest.approx(min(totals))
        assert setting["seconds"]["interval"]["high"] == pytest.approx(max(totals))
        assert setting["seconds_without_staging"]["value"] == pytest.approx(median(without))
        assert setting["costs"]["gpu_hours"] == pytest.approx(sum(row.gpu_hours for row in runs))
        assert sum(setting["phases"].values()) == pytest.approx(fmean(totals))
        work = [(row.steps or 0) * (row.batch_global or 0) for row in runs]
        each = [done / total for done, total in zip(work, totals, strict=True)]
        each = each if mode == "weak" else [1 / total for total in totals]
        base = base or each
        assert speedup["value"] == pytest.approx(median(each) / median(base), rel=1e-3)
        assert speedup["efficiency"]["value"] == pytest.approx(speedup["value"] / scale)
        if scale > 1:
            share = (1 / speedup["value"] - 1 / scale) / (1 - 1 / scale)
            assert setting["serial_fraction"]["value"] == pytest.approx(share)
        if scale > 1 and mode == "strong":
            ideal = fmean(1 / rate for rate in base) / scale
            assert sum(setting["lost"].values()) == pytest.approx(fmean(totals) - ideal)
    assert report["costs"]["energy_kwh"] == pytest.approx(sum(row.energy_kwh or 0 for row in rows))
    assert report["best"] == report["settings"][-1]["number"]
    assert [one["distinguishable"] for one in report["settings"]] == [True, True, True, False]
    assert report["notices"] == []


@pytest.mark.parametrize(
    ("make", "words"),
    [
        # the question: a search asks for its metric, whatever was measured
        (scaling, "How does digits scale over 1, 2, 4 and 8 nodes with the same global batch"),
        (lambda: strong(AT_8, **LEFT_OUT), "scale over 1, 2 and 4 nodes with"),
        (lambda: loss_of(search()), "Which values of lr and layers give digits the lowest loss?"),
        (lambda: loss_of(grid({"--lr": [1, 2]})), "gives digits the lowest loss?"),
        (lambda: (search()[0], []), "give digits the highest test_accuracy?"),
        (lambda: (grid({"--lr": [1, 2]})[0], []), "Which of 2 combinations of lr gives digits the"),
        (lambda: (grid({"--lr": [1, 2]})[0], []), "the highest test_accuracy?"),
        (lambda: grid({"--lr": [1, 2]}), "gives digits the highest test accuracy?"),
        (lambda: silent(grid({"--lr": [1, 2]})), "gives digits the lowest total time?"),
        # the answer
        (lambda: (scaling()[0], []), "No run is complete yet (24 points waiting)"),
        (lambda: strong(**FAILED), "No run completed (24 attempts: 24 failed)"),
        (lambda: scaling(scales=(1,), repeats=1), "given: only 1 node is complete. 1 node took 2"),
        (lambda: strong(AT_1, **FAILED), "the baseline, 1 node, has no result to compare with."),
        (
            lambda: strong(AT_8, batch_global=256),
            "needs the same global batch, but runs had 256, 512",
        ),
        (lambda: scaling(repeats=5), "8 nodes seem to be the fastest of 4 scales"),
        (lambda: scaling(repeats=5), "no 95 % CI); fewer than 6 runs each cannot tell them apart."),
        (lambda: strong(AT_8, oversubscribed=True), "4 nodes are the fastest of 3 scales: 3.1"),
        (lambda: scaling(change=crowded), "only 1 node is complete without more ranks than CPU"),
        (lambda: strong(oversubscribed=True), "give no answer: all had more ranks than CPU cores."),
        (lambda: scaling(change=a_minute_of_staging), "lost against ideal scaling: staging"),
        (lambda: scaling(change=as_fast_as_4), "4 nodes are the best of 4 scales: 3 ["),
        (lambda: scaling(change=as_fast_as_4), "not distinguishable from 8 nodes."),
        (lambda: grid({"--lr": [0.1]}, repeats=1), "no other setting is complete"),
        (lambda: grid({"--lr": [0.1, 0.09]}), "not distinguishable from it"),
        (lambda: grid({"--lr": [0.1, 0.5]}), ", distinguishable from it"),
        (lambda: below_zero(grid({"--lr": [0.1, 0.5]})), "lr=0.1 with -0.95"),
        (lambda: below_zero(grid({"--lr": [0.1, 0.5]})), ", distinguishable from it"),
        (search, "fewer than 6 runs each cannot tell them apart"),
        (search, "went into 20 attempts: 16 completed, 3 pruned, 1 out of memory."),
        (lambda: loss_of(search()), "The complete runs give no answer: none has a figure."),
        # the notices
        (lambda: strong(AT_8, code="0badc0de"), "Different code: Attempts differ"),
        (lambda: strong(AT_8, code="0badc0de"), "0badc0de: 6 attempts"),
        (lambda: strong(AT_8, hardware="1 x Xeon"), "Different hardware: Attempts differ"),
        (lambda: strong(AT_8, oversubscribed=True), "Oversubscribed runs: 6 of 24 complete runs"),
        (lambda: strong(AT_8, verified=False), "bindings of 6 of 24 complete runs are not"),
        (lambda: strong(code="2f6c1b0+dirty-11"), "24 attempts ran code with uncommitted changes"),
        (lambda: strong(AT_8, learning_rate=0.4), "0.4 instead of 0.1"),
        (lambda: strong(AT_8, learning_rate=0.4), "learning rates from 0.1 to 0.4"),
        (lambda: strong(FIRST, **FAILED), "Not completed: 1 attempt: 1 failed."),
        (lambda: strong(FIRST, **FAILED), "No 95 % CI for 1 setting"),
        (search, "The best of many trials is partly the luckiest"),
        (lambda: strong(AT_8, **LEFT_OUT), "6 points of the plan will not run. 8 is too many: 6"),
        (lambda: strong(FIRST, steps=7), "different numbers of steps (1 node: 7-1171)"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_the_report_says_what_the_data_carry(make: Callable[[], Any], words: str) -> None:
    """Unfinished, failed, mixed, too few, oversubscribed, indistinguishable, left out."""
    report = build(*make())
    notices = [" ".join([f"{one.title}: {one.text}", *one.details]) for one in report.notices]
    said = " ".join([report.question, *report.answer, *notices])
    assert words in said
    assert "None" not in said
    assert "nan" not in said


def test_every_attempt_is_listed_and_paid() -> None:
    """A failed start and its retry are two attempts; one that never started waits."""
    plan, rows = strong(AT_8, **LEFT_OUT)
    retried = [replace(rows[0], **FAILED), replace(rows[0], start=1), *rows[1:-2]]
    report = build(plan, retried)
    assert len(report.attempts) == len(retried) + 2
    assert report.states == {"COMPLETED": 17, "EXCLUDED": 5, "FAILED": 1, "WAITING": 2}
    assert report.costs.gpu_hours == pytest.approx(sum(row.gpu_hours for row in retried))
    assert [one.runs for one in report.settings] == [6, 6, 5, 0]
    assert [one.planned for one in report.settings] == [6, 6, 6, 1]


def test_runs_that_missed_the_target_are_censored() -> None:
    """They count among the runs, and leave the interval open; a timeout counts as missed."""
    late = {"state": "TIMEOUT", "seconds_to_accuracy": None}
    target = build(*strong(("point", 3), **late)).settings[-1].target
    assert target
    assert (target.seconds.n, target.reached, target.accuracy) == (6, 4, 0.95)
    assert target.seconds.interval
    assert target.seconds.value < 100 < target.seconds.interval.high == float("inf")


def test_models_are_fitted_where_the_scales_allow() -> None:
    """Amdahl from three scales, USL from five; both know the serial twentieth, and start-up."""
    assert not build(*scaling(scales=(1, 2))).fits
    assert "fits poorly" in build(*scaling("weak", scales=(1, 2, 4, 8, 16))).fits[0].note
    assert [fit.model for fit in build(*scaling()).fits] == ["Amdahl"]
    amdahl, usl = build(*scaling(scales=(1, 2, 4, 8, 16))).fits
    assert amdahl.parameters["f"].value == pytest.approx(0.1, abs=0.03)
    assert usl.model == "Universal Scalability Law"
    assert "no peak up to 32 nodes" in usl.note
    assert usl.speedups[1] == pytest.approx(1)
    assert max(usl.speedups) == 16


@pytest.mark.parametrize(("direction", "choose"), [("maximize", max), ("minimize", min)])
def test_a_search_ranks_complete_trials(direction: str, choose: Any) -> None:
    """Pruned and failed trials are counted, not ranked."""
    plan, rows = search(40)
    sweep = {**plan.sweep, "search": {"metric": "metric", "direction": direction}}
    report = build(replace(plan, sweep=sweep), rows)
    complete = [row.metric or 0 for row in rows if row.state == "COMPLETED"]
    assert report.ranked[0].number == report.best
    assert report.ranked[0].figure
    assert report.ranked[0].figure.value == choose(complete)
    assert len(report.ranked) == len(complete)


def test_each_series_has_its_own_baseline() -> None:
    """A strong sweep with an axis: speedups compare equal values of it; the fastest is best."""
    plan, rows = scaling(repeats=12)
    rates = [0.1 + 0.1 * (point.repeat % 2) for point in plan.points]
    points = tuple(
        replace(point, values={"--lr": rate}, learning_rate=rate)
        for point, rate in zip(plan.points, rates, strict=True)
    )
    rows = [replace(row, learning_rate=rate) for row, rate in zip(rows, rates, strict=True)]
    report = build(replace(plan, points=points), rows)
    assert list(report.series) == ["lr=0.1", "lr=0.2"]
    for settings in report.series.values():
        assert [setting.runs for setting in settings] == [6, 6, 6, 6]
        assert settings[0].speedup
        assert settings[0].speedup.value == 1
    assert report.notices == ()
    assert report.settings[report.best or 0] is report.ranked[0]
    assert "8 nodes, lr=0.2 are the best of 8 settings: 4.61" in report.answer[0]
    assert "as fast as 1 node, lr=0.2 at" in report.answer[0]
    assert report.answer[0].endswith("not distinguishable from 8 nodes, lr=0.1.")


@pytest.mark.parametrize(
    ("make", "answers"),
    [
        (scaling, "++++++++-+++"),
        (lambda: silent(scaling(target=None)), "--+++++---++"),
        (search, "++++++++-0-0"),
        (lambda: (scaling()[0], []), "--+---+-----"),
    ],
    ids=["strong", "no accuracy", "search", "nothing yet"],
)
def test_the_twelve_ways_are_answered_from_the_data(make: Callable[[], Any], answers: str) -> None:
    """+ ok, - not answered, 0 does not apply."""
    signs = {"ok": "+", "not answered": "-", "does not apply": "0"}
    assert "".join(signs[check.status] for check in build(*make()).checks) == answers
