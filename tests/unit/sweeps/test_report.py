"""The report's facts and sentences, recomputed from the rows by other means."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean, median
from typing import Any

import pytest

from hpml_orchestrator.sweeps.plan import SweepPlan
from hpml_orchestrator.sweeps.report import build
from hpml_orchestrator.sweeps.reporting import to_json, to_markdown
from hpml_orchestrator.sweeps.rows import PointRow
from tests.unit.sweeps.sweep_rows import grid, scaling, search

AT_1, AT_8, FIRST = ("world_size", 1), ("world_size", 8), ("point", 0)
FAILED: dict[str, Any] = {"state": "FAILED", "reason": "exit 1", "total_seconds": None}
OUT_OF_MEMORY: dict[str, Any] = FAILED | {"state": "OUT_OF_MEMORY", "reason": ""}
EVICTED: dict[str, Any] = {"state": "PREEMPTED"}
LEFT_OUT: dict[str, Any] = FAILED | {"state": "EXCLUDED", "reason": "8 is too many"}


def strong(where: tuple[str, int] | None = None, **fields: Any) -> tuple[SweepPlan, list[PointRow]]:
    """A strong sweep with the rows changed whose field has that value."""

    def change(row: PointRow) -> PointRow:
        chosen = where is None or getattr(row, where[0]) == where[1]
        return replace(row, **fields) if chosen else row

    return scaling(change=change)


def silent(
    sweep: tuple[SweepPlan, list[PointRow]], **result: float
) -> tuple[SweepPlan, list[PointRow]]:
    """The sweep, where no run reported a figure but these."""
    return sweep[0], [replace(row, accuracy=None, metric=None, result=result) for row in sweep[1]]


def with_fields(plan: SweepPlan, **fields: object) -> SweepPlan:
    """The plan, with other fields in its sweep file."""
    return replace(plan, sweep={**plan.sweep, **fields})


def loss_of(sweep: tuple[SweepPlan, list[PointRow]]) -> tuple[SweepPlan, list[PointRow]]:
    """The sweep, where no run reported the loss that it minimises."""
    search = {"metric": "loss", "direction": "minimize"}
    return with_fields(sweep[0], search=search), silent(sweep)[1]


def below_zero(sweep: tuple[SweepPlan, list[PointRow]]) -> tuple[SweepPlan, list[PointRow]]:
    """The sweep with an accuracy that has no ratios."""
    return sweep[0], [replace(row, accuracy=-(row.accuracy or 0)) for row in sweep[1]]


def aimed(
    sweep: tuple[SweepPlan, list[PointRow]], accuracy: float
) -> tuple[SweepPlan, list[PointRow]]:
    """The sweep, whose file names a target accuracy."""
    return with_fields(sweep[0], target_accuracy=accuracy), sweep[1]


def seconds_at_2(*seconds: float, repeats: int = 6) -> tuple[SweepPlan, list[PointRow]]:
    """1 node takes 100 s, give or take 1 s, and 2 nodes take these seconds, repeat by repeat."""
    plan, rows = scaling(scales=(1, 2), repeats=repeats)
    times = [100 + (row.point * 3 % 5 - 2) / 2 for row in rows]
    times[1::2] = seconds
    return plan, [
        replace(row, total_seconds=time, phases={"training": time})
        for row, time in zip(rows, times, strict=True)
    ]


def half_the_work(row: PointRow) -> PointRow:
    """On 8 nodes the runs stop after half of the steps."""
    half = replace(row, steps=(row.steps or 0) // 2, epochs=5)
    return half if row.world_size == 8 else row


def slow_ones_time_out(row: PointRow) -> PointRow:
    """On 8 nodes three of six runs reach their time limit."""
    lost = row.world_size == 8 and row.point % 8 == 3
    return replace(row, state="TIMEOUT", total_seconds=None) if lost else row


def two_do_not_learn(row: PointRow) -> PointRow:
    """On 8 nodes one run in three does not learn, which a median hides."""
    lost = row.world_size == 8 and row.point in (3, 15)
    return replace(row, accuracy=0.1) if lost else row


def half_at_8(**fields: Any) -> tuple[SweepPlan, list[PointRow]]:
    """A strong sweep with every second run on 8 nodes changed."""
    plan, rows = scaling()
    return plan, [replace(row, **fields) if row.point % 8 == 3 else row for row in rows]


def qualities(
    repeats: int, usual: dict[str, float], at_8: dict[str, float], *, scatter: float, seed: int = 0
) -> tuple[SweepPlan, list[PointRow]]:
    """A strong sweep whose runs report this figure, give or take a scatter."""
    noise = random.Random(seed)

    def change(row: PointRow) -> PointRow:
        ((name, mean),) = (at_8 if row.world_size == 8 else usual).items()
        value = noise.gauss(mean, scatter)
        if name == "accuracy":
            return replace(row, accuracy=value)
        metric = None if name == "test_loss" else value
        return replace(row, accuracy=None, metric=metric, result={name: value})

    plan, rows = scaling(repeats=repeats, change=change)
    (name,) = usual
    return with_fields(plan, search={"metric": name}) if "like" in name else plan, rows


def requeued_once(row: PointRow) -> PointRow:
    """The first point was requeued after 60 s, and its second start took as long as that."""
    if row.point:
        return row
    start = {"started": 0.0, "ended": 60.0, "nodes": "n9", "reason": "SIGTERM", "seconds": 60.0}
    times: dict[str, Any] = {"started": 100.0, "ended": 160.0, "attempts": 2}
    return replace(row, requeued=[start], core_hours=4.0, gpu_hours=2.0, **times)


def as_fast_as_4(row: PointRow) -> PointRow:
    """8 nodes, as slow as 4."""
    slow = 70 + row.point * 7 % 11 / 10
    return replace(row, total_seconds=slow) if (row.world_size or 0) > 2 else row


def crowded(row: PointRow) -> PointRow:
    """More ranks than cores on all but one node."""
    return replace(row, oversubscribed=row.world_size != 1)


def a_minute_of_staging(row: PointRow) -> PointRow:
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
        assert sum(setting["phases"].values()) == pytest.approx(median(totals))
        work = [(row.steps or 0) * (row.batch_global or 0) for row in runs]
        each = [done / total for done, total in zip(work, totals, strict=True)]
        each = each if mode == "weak" else [1 / total for total in totals]
        base = base or each
        ratios = [new / old for new, old in zip(each, base, strict=True)]  # of each repeat
        middle = sorted(ratios)[2:4]
        assert speedup["value"] == pytest.approx(math.sqrt(middle[0] * middle[1]))
        if scale > 1:
            assert speedup["interval"]["low"] == pytest.approx(min(ratios))
            assert speedup["interval"]["high"] == pytest.approx(max(ratios))
        assert speedup["efficiency"]["value"] == pytest.approx(speedup["value"] / scale)
        if scale > 1:
            share = (1 / speedup["value"] - 1 / scale) / (1 - 1 / scale)
            assert setting["serial_fraction"]["value"] == pytest.approx(share)
        if scale > 1 and mode == "strong":
            ideal = median(1 / rate for rate in base) / scale
            assert sum(setting["lost"].values()) == pytest.approx(median(totals) - ideal)
    assert report["costs"]["energy_kwh"] == pytest.approx(sum(row.energy_kwh or 0 for row in rows))
    assert report["best"] == report["settings"][-1]["number"]
    assert [one["against_best"] for one in report["settings"]] == ["slower"] * 3 + [""]
    assert [one["against_baseline"] for one in report["settings"]] == [""] + ["faster"] * 3
    assert [one["title"] for one in report["notices"]] == ["Target missed"]


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
        (lambda: (grid({"--lr": [1, 2]})[0], []), "highest validation_accuracy or test_accuracy?"),
        (lambda: grid({"--lr": [1, 2]}), "gives digits the highest test accuracy?"),
        (
            lambda: silent(grid({"--lr": [1, 2]})),
            "the highest validation_accuracy or test_accuracy?",
        ),
        # the answer
        (lambda: (scaling()[0], []), "No run is complete yet (24 points waiting)"),
        (lambda: strong(**FAILED), "No run completed (24 attempts: 24 failed)"),
        (lambda: scaling(scales=(1,), repeats=1), "given: only 1 node is complete. 1 node took 2"),
        (
            lambda: strong(AT_1, **FAILED),
            "the baseline, 1 node, has no result that can be compared.",
        ),
        (
            lambda: strong(AT_8, batch_global=256),
            "needs the same global batch, but runs had 256, 512",
        ),
        (lambda: scaling(repeats=5), "8 nodes seem to be the fastest of 4 scales"),
        (lambda: scaling(repeats=5), "4 nodes, as hpml gives no interval below 6 runs."),
        (lambda: strong(AT_8, oversubscribed=True), "4 nodes are the fastest of 3 scales: 3.1"),
        (lambda: scaling(change=crowded), "only 1 node is complete without more ranks than CPU"),
        (lambda: strong(oversubscribed=True), "give no answer: all had more ranks than CPU cores."),
        (
            lambda: scaling(change=a_minute_of_staging),
            "against ideal scaling from 1 node: staging",
        ),
        (lambda: scaling(change=as_fast_as_4), "nodes are the fastest of 4 scales by the medians"),
        (lambda: scaling(change=as_fast_as_4), "nodes, as differences under "),
        # speedups that compare something else are withheld, with the reason
        (lambda: strong(AT_8, accuracy=0.1), "4 nodes are the fastest of 3 comparable scales: 3.1"),
        (
            lambda: strong(AT_8, accuracy=0.1),
            "8 nodes are not compared: the mean test accuracy is not shown to be within 0.01 of",
        ),
        (lambda: strong(AT_8, accuracy=0.1), "of that of 1 node: 0.1 against 0.9609 (95 % CI of"),
        (lambda: scaling(change=two_do_not_learn), "0.672 against 0.9609 (95 % CI of the diff"),
        (
            lambda: scaling("weak", change=two_do_not_learn),
            "; but the mean test accuracy is not shown to be within 0.01 of that of 1 node: 0.67",
        ),
        # the quality is shown to hold, or it is not
        (
            lambda: qualities(8, {"accuracy": 96.0}, {"accuracy": 95.7}, scatter=0.2),
            "with 1 node, not worse by more than 1 point.",
        ),
        (
            lambda: qualities(8, {"accuracy": 96.0}, {"accuracy": 93.0}, scatter=0.2),
            "8 nodes are not compared: the mean test accuracy is not shown to be within 1 point of",
        ),
        (
            lambda: qualities(8, {"test_loss": 5.0}, {"test_loss": 5.2}, scatter=0.01),
            "4 nodes are the fastest of 3 comparable scales",
        ),
        (
            lambda: qualities(8, {"test_loss": 5.0}, {"test_loss": 5.2}, scatter=0.01),
            "8 nodes are not compared: the mean test loss is not shown to be within 1 % of that of",
        ),
        (
            lambda: qualities(8, {"test_loss": 5.0}, {"test_loss": 4.0}, scatter=0.01),
            "with 1 node, not worse by more than 1 %.",
        ),
        (
            lambda: qualities(8, {"log_likelihood": -5.0}, {"log_likelihood": -5.2}, scatter=0.01),
            "8 nodes are not compared: the mean log_likelihood is not shown to be within 1 % of",
        ),
        (
            lambda: qualities(3, {"accuracy": 0.953}, {"accuracy": 0.912}, scatter=0.001),
            "within 0.01 of that of 1 node: 0.9",
        ),
        (
            lambda: qualities(3, {"accuracy": 0.953}, {"accuracy": 0.952}, scatter=0),
            "0.953 with 1 node, not shown to be within 0.01 (3 runs each).",
        ),
        (
            lambda: qualities(6, {"accuracy": 0.953}, {"accuracy": 0.953}, scatter=0),
            "0.953] with 1 node, not worse by more than 0.01.",
        ),
        # runs that were lost
        (
            lambda: strong(AT_8, accuracy=math.nan),
            "8 nodes are not compared: 6 of 6 runs diverged (test_accuracy is NaN).",
        ),
        (lambda: strong(accuracy=math.nan), "give no answer: no scale can be compared."),
        (
            lambda: strong(("point", 3), result={"test_loss": "NaN"}),
            "Runs that diverged or failed: These settings are compared by the runs that completed",
        ),
        (
            lambda: strong(("point", 3), result={"test_loss": "NaN"}),
            "8 nodes: 1 of 6 runs diverged (test_loss is NaN)",
        ),
        (lambda: half_at_8(**FAILED), "8 nodes are not compared: 3 of 6 runs failed."),
        (lambda: half_at_8(**OUT_OF_MEMORY), "4 nodes are the fastest of 3 comparable scales"),
        (lambda: half_at_8(**OUT_OF_MEMORY), "are not compared: 3 of 6 runs ran out of memory."),
        (lambda: half_at_8(**OUT_OF_MEMORY | EVICTED), "8 nodes seem to be the fastest of 4"),
        (
            lambda: strong(("point", 3), **OUT_OF_MEMORY | EVICTED),
            "8 nodes seem to be the fastest of 4 scales",
        ),
        (
            lambda: scaling(change=half_the_work),
            "4 nodes are the fastest of 3 comparable scales: 3.1",
        ),
        (lambda: scaling(change=half_the_work), "trained with 50% of the samples of 1 node."),
        (lambda: strong(AT_8, batch_global=None, steps=9), "1% of the steps of 1 node."),
        (
            lambda: scaling(change=slow_ones_time_out),
            "4 nodes are the fastest of 3 comparable scales: 3.1",
        ),
        (lambda: scaling(change=slow_ones_time_out), "3 of 6 runs reached the time limit."),
        (lambda: strong(AT_1, state="TIMEOUT"), "the baseline, 1 node, has no result that can be"),
        (lambda: strong(FIRST, state="TIMEOUT"), "1 of 6 runs reached the time limit."),
        (lambda: strong(("point", 3), **FAILED), "(median of 5 runs of 6 planned, no 95 % CI)"),
        (scaling, "Test accuracy: 0.9609 [0.9497, 0.9619] with 8 nodes and 0.9609 ["),
        (lambda: silent(scaling()), "report no accuracy or loss, so it is not known whether all"),
        (lambda: strong(accuracy_name="accuracy"), '"accuracy" as the program reports it: 0.96'),
        (lambda: strong(steps=None, epochs=None, result={}), "that all scales do the same work is"),
        # no scale is faster than the baseline
        (
            lambda: seconds_at_2(50, 150, 40, 101, 30, 99),
            "No scale is shown to be faster than 1 node, with ",
        ),
        (
            lambda: seconds_at_2(50, 150, 40, 101, 30, 99),
            "undecided for 2 nodes (speedup 1.41 [0.663, 3.37]), as ratios under 3.0 may be missed",
        ),
        (
            lambda: seconds_at_2(199, 200, 201, 199, 200, 201),
            "1 node is the fastest, with 99.8 [99, 101] s in all (median of 6 runs, 95 % CI): 2",
        ),
        (
            lambda: seconds_at_2(199, 200, 201, 199, 200, 201),
            "2 nodes are slower than 1 node (speedup 0.498 [0.493, 0.505])",
        ),
        (scaling, "; the serial fraction (Karp-Flatt) is "),
        (
            lambda: seconds_at_2(99, 150, repeats=2),
            "No scale is shown to be faster than 1 node, with 99.2 s in all (median of 2 runs",
        ),
        (
            lambda: seconds_at_2(99, 150, repeats=2),
            "2 nodes are not known to differ (speedup 0.797), as hpml gives no interval below 6",
        ),
        (lambda: grid({"--lr": [0.1]}, repeats=1), "no other setting is complete"),
        (lambda: grid({"--lr": [0.1, 0.09]}), "; whether they differ is undecided."),
        (lambda: grid({"--lr": [0.1, 0.5]}), ", and they differ by more than noise explains"),
        (lambda: below_zero(grid({"--lr": [0.1, 0.5]})), "lr=0.1 with -0.95"),
        (lambda: below_zero(grid({"--lr": [0.1, 0.5]})), ", and they differ by more than noise"),
        (search, "; whether they differ is unknown, as hpml gives no interval below 6 runs."),
        (search, "went into 20 attempts: 16 completed, 3 pruned, 1 out of memory."),
        (lambda: loss_of(search()), "The complete runs give no answer: none has a figure."),
        (
            lambda: silent(grid({"--lr": [1, 2]})),
            "give no answer: none has a figure. They report no",
        ),
        (
            lambda: silent(grid({"--lr": [1, 2]})),
            "call hpml_channel's result(validation_accuracy=…)",
        ),
        (lambda: silent(grid({"--lr": [1, 2]}), f1=0.5), "They report f1, but not validation_acc"),
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
        (search, "This is the best of 16 trials, chosen by this figure, so the figure is too good"),
        (search, "good on average. Repeat the best with new seeds to know its figure."),
        (lambda: strong(AT_8, **LEFT_OUT), "6 points of the plan will not run. 8 is too many: 6"),
        (
            lambda: (with_fields(scaling()[0], order="written"), []),
            "Order of the runs: The plan submits all runs of one setting before",
        ),
        (
            lambda: aimed(scaling(), 0.5),
            "target accuracy is 0.5, but no run reported evaluations, a",
        ),
        (lambda: aimed(scaling(), 0.5), "measured its times to 0.95: the times below are to 0.95."),
        (lambda: aimed(scaling(target=None), 0.5), "no time to it is known."),
        (lambda: strong(AT_8, target_accuracy=0.9), "to different accuracies (0.9, 0.95): none is"),
        (
            lambda: aimed(strong(evaluations=[[2.0, 0.4], [5.0, 0.7]]), 0.5),
            "The program measured its times to 0.95; those to the sweep file's 0.5 are computed",
        ),
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


def test_the_time_to_the_target_is_that_to_the_target() -> None:
    """The sweep file's target counts if there are times to it, whatever the program's is."""
    scales = [(0.95, 0.95), (0.5, 0.5), (0.5, 0.95)]
    evaluations: list[Any] = [[[2.0, 0.4], [5.0, 0.7]], ()]
    found = []
    for (wanted, _), recorded in zip(scales, [(), *evaluations], strict=True):
        report = build(*aimed(strong(evaluations=recorded), wanted))
        targets = {
            (one.target.accuracy, one.target.beforehand, one.target.seconds.value < 6)
            for one in report.settings
            if one.target
        }
        found += [*targets]
    assert found == [(0.95, True, False), (0.5, True, True), (0.95, False, False)]
    late = replace(scaling()[0], created=scaling()[0].created + 1)
    target = build(*aimed((late, scaling()[1]), 0.95)).settings[0].target
    assert target
    assert not target.beforehand


def test_of_many_equal_settings_none_is_called_different() -> None:
    """20 settings of 6 runs from one distribution, 20 sweeps; some differ by every single test."""
    different = 0
    for seed in range(20):
        noise = random.Random(seed)
        plan, rows = grid({"--x": list(range(20))})
        rows = [replace(row, accuracy=0.9 + 0.01 * noise.random()) for row in rows]
        report = build(plan, rows)
        different += any(one.against_best == "worse" for one in report.settings)
        assert report.ranked[0].against_best == ""
    assert different <= 1


@pytest.mark.parametrize(
    ("loss", "scatter", "least", "most"), [(0.02, 0.02, 0, 3), (0.0, 0.003, 36, 40)]
)
def test_an_accuracy_has_to_be_shown_to_hold(
    loss: float, scatter: float, least: int, most: int
) -> None:
    """Of 40 sweeps few pass that lose two points under noise, and most of the good ones."""
    passed = 0
    for seed in range(40):
        at_8 = {"accuracy": 0.96 - loss}
        report = build(*qualities(6, {"accuracy": 0.96}, at_8, scatter=scatter, seed=seed))
        passed += report.settings[-1].speedup is not None
    assert least <= passed <= most


def test_null_is_a_lost_figure_if_other_runs_have_it() -> None:
    """Rows of earlier versions have no more; null in all runs means that nobody measured it."""
    for of_others, diverged in ((0.9, {"test_accuracy is null": 1}), (None, {})):

        def change(row: PointRow, usual: float | None = of_others) -> PointRow:
            return replace(row, result={"test_accuracy": None if row.point == 3 else usual})

        assert build(*scaling(change=change)).settings[-1].diverged == diverged


def test_the_size_of_the_test_set_stands_beside_an_accuracy() -> None:
    """It limits what an accuracy can say, however many repeats there are."""

    def change(row: PointRow) -> PointRow:
        size = {1: {"test_images": 355}, 2: {"eval_samples": 50}}.get(row.world_size or 0, {})
        return replace(row, accuracy=96.0, result={**row.result, **size})

    one, two, none, _ = build(*scaling(change=change)).settings
    assert one.quality
    assert one.quality.test_set == "355 images: one error is 0.28 %; binomial 95 % [93.5, 97.6]"
    assert two.quality
    assert two.quality.test_set.startswith("50 samples: one error is 2 %")
    assert none.quality
    assert none.quality.test_set == ""
    assert "| shown | 355 images: one" not in to_markdown(build(*scaling(change=change)))
    assert "| - | 355 images: one error is" in to_markdown(build(*scaling(change=change)))


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


def test_a_requeued_start_is_an_attempt_with_a_cost() -> None:
    """It is counted and listed, and its hours are among those of what did not complete."""
    report = build(*scaling(change=requeued_once))
    assert report.states == {"COMPLETED": 24, "REQUEUED": 1}
    first, second = [one.row for one in report.attempts if one.row.point == 0]
    assert (first.state, first.nodes, first.reason) == ("REQUEUED", "n9", "SIGTERM")
    assert (second.state, second.core_hours, first.core_hours) == ("COMPLETED", 2.0, 2.0)
    assert (report.failed.core_hours, report.failed.gpu_hours) == (2.0, 1.0)
    assert [one.runs for one in report.settings] == [6, 6, 6, 6]
    (missing,) = [one for one in report.notices if one.title == "Not completed"]
    assert missing.text == "1 attempt: 1 requeued."


def test_a_start_that_was_continued_is_no_failure() -> None:
    """Its hours are paid, and not among those of what did not complete."""

    def continued_once(row: PointRow) -> PointRow:
        row = requeued_once(row)
        return replace(row, requeued=[{**start, "continued": True} for start in row.requeued])

    report = build(*scaling(change=continued_once))
    assert report.states == {"COMPLETED": 24, "CONTINUED": 1}
    assert report.failed.core_hours == 0
    assert report.costs.core_hours == build(*scaling(change=requeued_once)).costs.core_hours
    assert "Not completed" not in [one.title for one in report.notices]


def test_hours_say_whether_they_are_those_of_the_request() -> None:
    """Of attempts whose allocation is recorded they are not."""
    plan, rows = strong(FIRST, allocated=None)
    assert build(plan, rows).costs.requested == 1
    assert "of 1 attempt what was requested" in to_markdown(build(plan, rows))
    assert "requested" not in to_markdown(build(*scaling()))


def test_seeds_are_those_that_the_program_was_given() -> None:
    """The plan has a seed for each repeat, which counts if an argument takes it."""
    plan, rows = scaling(repeats=2)
    for placeholders, seeds in (({}, {None}), ({"seed": "seed"}, {1, 2})):
        report = build(replace(plan, placeholders=placeholders), rows)
        assert {one.seed for one in report.attempts} == seeds


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
    assert "does not fit" in build(*scaling("weak", scales=(1, 2, 4, 8, 16))).fits[0].note
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
    search_by = {"metric": "metric", "direction": direction}
    report = build(with_fields(plan, search=search_by), rows)
    complete = [row.metric or 0 for row in rows if row.state == "COMPLETED"]
    assert report.ranked[0].number == report.best
    assert report.ranked[0].figure
    assert report.ranked[0].figure.value == choose(complete)
    assert len(report.ranked) == len(complete)


def by_time(*runs: tuple[float | None, ...]) -> tuple[SweepPlan, list[PointRow]]:
    """A grid by the time to a target; each setting has six runs, None trained for 60 s in vain."""
    plan, rows = grid({"--x": list(range(len(runs)))})
    times = [runs[point.values["--x"]][point.repeat] for point in plan.points]
    return with_fields(plan, search={"metric": "seconds_to_accuracy"}), [
        replace(
            row,
            metric=time,
            result={"seconds_to_accuracy": time},
            training_seconds=time or 60.0,
            seconds_to_accuracy=time,
            target_accuracy=0.95,
        )
        for row, time in zip(rows, times, strict=True)
    ]


LUCKY = (4.7, None, None, None, None, None)
RELIABLE = (10.0, 9.8, 10.1, 10.2, 9.9, 10.0)


def test_a_lucky_run_of_six_is_not_the_best() -> None:
    """Runs that miss the target are censored: a median needs more than half of the runs."""
    plan, rows = by_time(LUCKY, RELIABLE, (9.0, 9.1, 8.9, 9.0, None, 9.1))
    report = build(plan, rows)
    assert [one.label for one in report.ranked] == ["x=2", "x=1"]
    said = " ".join(report.answer)
    assert "The best seconds_to_accuracy is 9.05 [8.9, ∞] s, with x=2" in said
    assert "next is x=1 with 10 [9.8, 10.2] s; whether they differ is undecided." in said
    assert "if all combinations are equally good (runs of one scatter by 0.141), by less" in said
    assert "Not ranked: x=0 (1 of 6 runs reached the target)." in said
    assert "1 of 6 runs reached the target |" in to_markdown(report)
    # a run that was killed at its time limit missed the target too
    rows = [
        replace(row, state="TIMEOUT", total_seconds=None) if row.metric is None else row
        for row in rows
    ]
    assert build(plan, rows).answer[0].startswith("The best seconds_to_accuracy is 9.05 [8.9,")


def test_no_setting_is_best_if_none_reached_the_target() -> None:
    """The answer says how many runs of each did."""
    said = " ".join(build(*by_time(LUCKY, LUCKY)).answer)
    assert (
        "no answer: none has a figure. Not ranked: x=0 (1 of 6 runs reached the target) and x"
        in said
    )


def test_a_setting_without_the_figure_of_some_runs_has_no_rank() -> None:
    """Two of six runs that report no figure may be those that diverged."""
    plan, rows = grid({"--lr": [0.1, 0.5]})
    rows = [replace(row, metric=row.accuracy, metric_name="f1") for row in rows]
    lost = [row.point for row in rows if plan.points[row.point].values["--lr"] == 0.1][:2]
    rows = [replace(row, metric=None) if row.point in lost else row for row in rows]
    report = build(with_fields(plan, search={"metric": "f1"}), rows)
    said = " ".join(report.answer)
    assert [one.label for one in report.ranked] == ["lr=0.5"]
    assert "no other setting is ranked. Not ranked: lr=0.1 (4 of 6 complete runs report f1)" in said


def test_the_best_of_equal_settings_is_too_good() -> None:
    """By 0.87 times the scatter of a run, for the medians of six runs of 20 settings."""
    noise, found = random.Random(3), []
    for _ in range(40):
        plan, rows = grid({"--x": list(range(20))})
        rows = [replace(row, accuracy=noise.gauss(0.5, 0.01)) for row in rows]
        report = build(plan, rows)
        found.append(report.ranked[0].figure.value - 0.5 if report.ranked[0].figure else 0)
    assert fmean(found) == pytest.approx(0.0087, rel=0.12)
    (said,) = [text for text in report.answer if "the best of 20 combinations, chosen" in text]
    numbers = re.search(r"by about ([0-9.]+) if all combinations .* scatter by ([0-9.]+)\)", said)
    excess, scatter = map(float, numbers.groups() if numbers else ())
    assert excess / scatter == pytest.approx(0.87, abs=0.01)


def choosing(*figures: str) -> tuple[SweepPlan, list[PointRow]]:
    """A search whose file names no metric; the first figure chooses, and all are reported."""
    plan, rows = search()
    return with_fields(plan, search={}), [
        replace(row, metric_name=figures[0], result=dict.fromkeys(figures, row.metric))
        for row in rows
    ]


@pytest.mark.parametrize(
    ("figures", "status", "words"),
    [
        (("test_accuracy",), "not answered", "so it has seen the test data: choose by a valid"),
        (("validation_accuracy",), "not answered", "its choice reports no test figure"),
        (("validation_accuracy", "test_accuracy"), "ok", "test_accuracy is of data that it has"),
        (("score",), "not answered", "not known whether score, by which the search chose, is of"),
        (("samples_per_second",), "ok", "are not known to it."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_search_by_a_test_figure_has_no_unseen_data(
    figures: tuple[str, ...], status: str, words: str
) -> None:
    """The test figure of the choice stands beside the validation figure that chose it."""
    report = build(*choosing(*figures))
    (check,) = [one for one in report.checks if one.title == "Hide the runs that tuning took"]
    assert (check.status, words in check.text) == (status, True)
    assert f"The best {figures[0]} is 0.9502" in report.answer[0]
    beside = "On data that the search did not choose by, its test_accuracy is 0.9502."
    assert (beside in report.answer) == (len(figures) == 2)


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
    assert [one.title for one in report.notices] == ["Target missed"]
    assert report.settings[report.best or 0] is report.ranked[0]
    assert "8 nodes, lr=0.2 are the fastest of 8 settings by the medians: 4.69" in report.answer[0]
    assert "as fast as 1 node, lr=0.2 at" in report.answer[0]
    assert "; undecided against 8 nodes, lr=0.1, as differences under 6 % may" in report.answer[0]


@pytest.mark.parametrize(
    ("make", "answers"),
    [
        (scaling, "++++++++--+-"),
        (lambda: aimed(scaling(), 0.95), "++++++++-++-"),
        (lambda: strong(AT_8, accuracy=0.1), "-+++++++--+-"),
        (lambda: strong(AT_8, accuracy=math.nan), "--+++++---+-"),
        (lambda: qualities(3, {"accuracy": 0.9}, {"accuracy": 0.9}, scatter=0), "-+++++++--+-"),
        (lambda: qualities(6, {"test_loss": 5}, {"test_loss": 5}, scatter=0), "++++++++--+-"),
        (lambda: strong(accuracy_name="accuracy"), "+-+++++---+-"),
        (lambda: strong(FIRST, hardware=""), "+++-++++--+-"),
        (lambda: silent(scaling(target=None)), "--+++++---+-"),
        (search, "++-+++++-0-0"),
        (lambda: (scaling()[0], []), "------------"),
    ],
    ids=[
        "strong",
        "target in the plan",
        "accuracy lost",
        "diverged",
        "three repeats",
        "a test loss",
        "no test accuracy",
        "hardware of one unknown",
        "no accuracy",
        "search",
        "nothing yet",
    ],
)
def test_the_twelve_ways_are_answered_from_the_data(make: Callable[[], Any], answers: str) -> None:
    """+ ok, - not answered, 0 does not apply."""
    signs = {"ok": "+", "not answered": "-", "does not apply": "0"}
    assert "".join(signs[check.status] for check in build(*make()).checks) == answers


def test_what_is_lost_is_what_the_median_run_lost() -> None:
    """A run of 600 s among six of 44 s moves no median: neither the phases nor what is lost."""

    def one_waits(row: PointRow) -> PointRow:
        slow = {**row.phases, "staging": 600.0}
        return replace(row, phases=slow, total_seconds=640.0) if row.point == 3 else row

    report = build(*scaling(change=one_waits))
    for one in report.settings:
        assert one.seconds
        assert sum(one.phases.values()) == pytest.approx(one.seconds.value)
        assert sum(one.lost.values()) < one.seconds.value
    assert report.settings[-1].phases["staging"] < 5
    assert "Seconds of the median run by phase" in to_markdown(report)


@pytest.mark.parametrize("seconds", [(199, 200, 201, 199, 200, 201), (50, 150, 101, 101, 101, 99)])
def test_a_serial_fraction_above_1_is_not_in_the_answer(seconds: tuple[float, ...]) -> None:
    """Neither one of 118 % nor one whose interval reaches there; the table still has it."""
    report = build(*seconds_at_2(*seconds))
    assert "serial fraction" not in " ".join(report.answer)
    assert "serial fraction, %" in to_markdown(report)


ON_9 = "All 6 runs at 2 nodes ran on node9, which no other scale used: a difference may come from"


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ({2: "node[3,9]"}, f"{ON_9} the node."),
        ({1: "node9"}, "All 6 runs at 1 node ran on node9, which no other scale used"),
        ({1: "node9", 2: "node[6,10]"}, "1 node ran on node9 and 6 runs at 2 nodes ran on node10"),
        ({}, ""),  # as Slurm places them: larger runs include the nodes of the smaller ones
        ({1: "node8", 2: "node[7-8]"}, ""),
        ({8: "node[9-16]"}, "All 6 runs at 8 nodes ran on node[9-16], which no other scale used"),
        ({2: "n|1"}, ""),
        # each run elsewhere, as on a large cluster
        ({1: "a{}", 2: "b{}[1-2]", 4: "c{}[1-4]", 8: "d{}[1-8]"}, ""),
    ],
)
def test_a_scale_with_nodes_of_its_own(nodes: dict[int, str], words: str) -> None:
    """The scale and the node are confounded, and neither speedup nor hardware check is sure."""

    def moved(row: PointRow) -> PointRow:
        text = nodes.get(row.world_size or 0, row.nodes)
        return replace(row, nodes=text.format(row.point + 20))

    report = build(*scaling(change=moved))
    found = [one for one in report.notices if one.title == "A scale on separate nodes"]
    assert [one.status for one in found] == ["loud"] * bool(words)
    assert words in " ".join(one.text for one in found)
    assert (report.checks[3].status == "ok") == (not words)


def test_more_than_ideal_is_said_with_the_usual_reasons() -> None:
    """Superlinear speedup beyond the noise is first of all a reason to look at the baseline."""
    report = build(*seconds_at_2(39, 40, 41, 40, 39, 40))
    (found,) = [one for one in report.notices if one.title == "Efficiency above 100 %"]
    assert found.text.startswith("More than ideal: 2 nodes (125 [")
    assert "or the baseline's runs were slow" in found.text
    assert "Efficiency above 100 %" not in [one.title for one in build(*scaling()).notices]


def test_runs_whose_cpus_others_took_do_not_show_the_speed_of_a_scale() -> None:
    """A loud notice, a column, and no ok for what was timed."""
    plan, rows = scaling(repeats=3)
    shares = [0.46, 0.2, 0.01, None]
    rows = [replace(row, cpu_contention=shares[row.point % 4]) for row in rows]
    report = build(plan, rows)
    (found,) = [one for one in report.notices if one.title == "CPU contention"]
    assert found.status == "loud"
    assert found.text == (
        "In 6 of 12 complete runs other processes had the CPUs of a rank for up to 46% of its "
        "training: times of these runs do not show how fast the settings are. For 3 runs this was "
        "not measured."
    )
    assert found.details == ("1 node: 3 runs", "2 nodes: 3 runs")
    assert report.checks[4].status == "not answered"
    text = to_markdown(report)
    assert "| CPUs taken by others |" in text
    assert text.count("| 46% |") == 3


@pytest.mark.parametrize(
    ("make", "number", "words"),
    [
        (lambda: strong(FIRST, node_hours=0.0), 3, "the cost of 1 of 24 that ran is not recorded"),
        (lambda: strong(AT_8, nodes="node[21-28]"), 4, "8 nodes ran on node[21-28], which no"),
        (lambda: scaling("weak", change=rates_alone), 5, "ranked by steady samples per second, wh"),
        (lambda: strong(AT_8, cpu_contention=0.3), 5, "In 6 of 24 complete runs other processes"),
        (
            lambda: strong(AT_8, data_reused=True),
            6,
            "In 6 of 24 complete runs data was on the node already, from an earlier run.",
        ),
        (
            lambda: strong(data_reused=None),
            6,
            "24 of 24 complete runs recorded no staging",
        ),
        (lambda: by("tflops"), 7, "Settings are ranked by tflops, which counts operations"),
        (lambda: by("seconds_to_accuracy"), 5, "ranked by seconds_to_accuracy, which leaves out"),
    ],
)
def test_no_check_is_a_constant(make: Callable[[], Any], number: int, words: str) -> None:
    """Checks 3 to 7 are ok in `scaling()`; here is a sweep that each of them does not pass."""
    check = build(*make()).checks[number - 1]
    assert words in check.text
    assert check.status == "not answered"
    assert build(*scaling()).checks[number - 1].status == "ok"


def rates_alone(row: PointRow) -> PointRow:
    """A run that reports how many samples it trains per second, but not how many in all."""
    return replace(row, steps=None, epochs=None)


def by(metric: str) -> tuple[SweepPlan, list[PointRow]]:
    """A search by this figure."""
    return with_fields(search()[0], search={"metric": metric}), search()[1]
