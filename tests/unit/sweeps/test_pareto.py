"""A sweep by several figures: its front in every form, and its repetition."""

from __future__ import annotations

from typing import Any

import pytest

from hpml_orchestrator.cli.sweep import print_front
from hpml_orchestrator.errors import InputError
from hpml_orchestrator.sweeps.repeat import make_repeat
from hpml_orchestrator.sweeps.report import build
from hpml_orchestrator.sweeps.reporting import to_html, to_markdown
from hpml_orchestrator.sweeps.table import Table
from tests.unit.sweeps.conftest import SweepFolder
from tests.unit.sweeps.sweep_rows import completed

AXES: dict[str, Any] = {
    "--model": ["cnn", "vit"],
    "--heads": {"values": [1, 2, 4], "when": {"--model": "vit"}},
}
FIGURES = {"metric": ["score", "train_seconds"], "direction": ["maximize", "minimize"]}
# by heads: the score, and the seconds that it took; 2 heads are worse than 1 and slower
MEASURED = {None: (0.7, 1.0), 1: (0.8, 2.0), 2: (0.75, 3.0), 4: (0.9, 9.0)}


def test_the_front_has_what_no_other_dominates(
    folder: SweepFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the answer, tables, plot and on the terminal; `repeat` runs it again, whole."""
    plan = folder.plan(axes=AXES, search=FIGURES, repeats=1)
    table = Table(folder.store, plan)
    for point in plan.points:
        score, seconds = MEASURED[point.values.get("--heads")]
        result = {"score": score, "train_seconds": seconds}
        table.end(completed(point, {"training": seconds}, metric=score, result=result))
    report = build(plan, table.rows())
    assert report.best is None
    labels = ["model=vit, heads=4", "model=vit, heads=1", "model=cnn, heads=-"]
    assert [report.settings[number].label for number in report.front] == labels
    assert report.answer[0].startswith("Of 4 combinations, 3 are not dominated (by highest score")
    assert "with new seeds" in report.answer[2]
    markdown = to_markdown(report)
    header = "| combination | not dominated | model | heads | score (highest) | train_seconds (lo"
    rows = markdown.partition(header)[2].splitlines()[2:6]
    cells = [[cell.strip() for cell in row.strip("| ").split("|")][1:6] for row in rows]
    assert cells == [
        ["yes", "vit", "4", "0.9", "9"],
        ["yes", "vit", "1", "0.8", "2"],
        ["yes", "cnn", "-", "0.7", "1"],
        ["-", "vit", "2", "0.75", "3"],
    ]
    page = to_html(report)
    assert "score against train_seconds" in page
    assert "Best so far" not in page
    print_front(report)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[-2:] for line in lines[1:]] == [["0.9", "9"], ["0.8", "2"], ["0.7", "1"]]
    again = make_repeat(folder.store, plan, best=None, repeats=2, now=1.0)
    assert len(again.points) == 6
    assert {point.values.get("--heads") for point in again.points} == {4, 1, None}
    with pytest.raises(InputError, match="a search by several figures has a front"):
        make_repeat(folder.store, plan, best=2, repeats=2, now=1.0)


def test_a_figure_that_no_run_reports_is_named(folder: SweepFolder) -> None:
    """While the sweep runs, and in the answer."""
    plan = folder.plan(axes={"--lr": [0.1, 0.2]}, search=FIGURES, repeats=1)
    table = Table(folder.store, plan)
    for point in plan.points:
        table.end(completed(point, {"training": 1.0}, metric=0.5, result={"score": 0.5}))
    assert "report no train_seconds: they report score" in table.missing_metric()
    answer = build(plan, table.rows()).answer
    assert answer == (
        "No complete run reports all of score, train_seconds: no answer is possible.",
    )
