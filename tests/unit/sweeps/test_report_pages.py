"""The report as a page, as Markdown and as JSON: complete, well-formed, seen in Chromium."""

from __future__ import annotations

import html
import json
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator import sweep_report
from hpml_orchestrator.records import feed
from hpml_orchestrator.sweeps.pairs import compare_sweeps as compare
from hpml_orchestrator.sweeps.plan import SweepPlan
from hpml_orchestrator.sweeps.plots import draw
from hpml_orchestrator.sweeps.report import build
from hpml_orchestrator.sweeps.reporting import to_html, to_json, to_markdown
from hpml_orchestrator.sweeps.rows import PointRow
from hpml_orchestrator.sweeps.table import Table
from tests.unit.sweeps.conftest import SweepFolder
from tests.unit.sweeps.sweep_rows import completed, grid, scaling, search

WIDTHS = (360, 1200)

SWEEPS: dict[str, Callable[[], Any]] = {
    "one point": lambda: scaling(scales=(1,), repeats=1),
    "8 points": lambda: scaling(scales=(1, 2), repeats=4),
    "weak": lambda: scaling("weak", scales=(1, 2, 4, 8, 16)),
    "never at the target": lambda: scaling(change=lambda row: replace(row, **MISSED)),
    "nothing yet": lambda: (scaling()[0], []),
    "grid": lambda: grid({"--lr": [0.01, 0.1], "--amp": ["off", "bf16"]}),
    "200 trials": lambda: search(200),
    "400 runs": lambda: scaling(repeats=100),
}
MISSED: dict[str, Any] = {"seconds_to_accuracy": None, "evaluation_every": 2.0}


def grid_of_rates() -> tuple[SweepPlan, list[PointRow]]:
    """A grid with an axis over two decades."""
    return grid({"--lr": [0.01, 0.1, 1.0]})


def at_most_two(row: PointRow) -> PointRow:
    """Two nodes are slower than one."""
    times = {1: 1.0, 2: 1 / 0.814, 4: 1.1, 8: 0.6}
    return replace(row, total_seconds=times[row.world_size or 1] * (200 + row.point % 5))


def shown(page: str) -> str:
    """The text of a page with blanks between its parts, without its pictures."""
    text = re.sub(r"<(style|svg).*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", text)).split())


@pytest.mark.parametrize("name", SWEEPS)
def test_a_report_says_the_same_in_every_form(name: str) -> None:
    """Answer, notices, attempts and checks stand in the page, in Markdown and in JSON."""
    report = build(*SWEEPS[name]())
    page, markdown, facts = to_html(report), to_markdown(report), to_json(report)
    assert not re.findall(r'<script|(?:src|href)="(?!#|data:)|url\((?!#)', page)
    for sentence in (
        report.question,
        *report.answer,
        *(notice.text for notice in report.notices),
        *(check.text for check in report.checks),
    ):
        assert sentence in shown(page)
        assert sentence in markdown
    assert len(facts["attempts"]) == len(report.attempts)
    assert page.count("<tr>") > len(report.attempts)
    assert ("<details><summary>All 400 attempts" in page) == (name == "400 runs")
    for table in re.findall(r"(?:^\|.*\n)+", markdown, flags=re.MULTILINE):
        assert len({re.sub(r"\\\|", "", line).count("|") for line in table.splitlines()}) == 1
    json.dumps(facts, allow_nan=False)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("8 points", "Target 0.95, the program's own: the plan does not name it, so it may have"),
        ("8 points", "chosen later; evaluated every epoch: reached by 7 of 8 runs."),
        ("8 points", "| job |"),
        ("8 points", "| sub-1.0 |"),
        ("200 trials", "Trials without a figure, which are not ranked"),
        ("200 trials", "| 0 of 1 | 1 pruned |"),
        ("200 trials", "| 0 of 1 | 1 out of memory |"),
        ("never at the target", "evaluated every 2 epochs: reached by 0 of 24 runs."),
        ("never at the target", "| 0.95 | 0 of 6 | not reached | 2 epochs |"),
        ("grid", "| # | lr | amp | complete runs | test accuracy (median) |"),
        ("one point", "- only scale: 1 node (210 s in all)"),
        ("nothing yet", "- what ran: 24 points waiting\n"),
        ("400 runs", "Of 400 attempts: 400 completed, those that did not complete"),
    ],
)
def test_what_the_page_adds_to_the_facts(name: str, words: str) -> None:
    """Cards, captions and units read as sentences do."""
    assert words in to_markdown(build(*SWEEPS[name]()))


def test_python_has_the_report_of_a_sweep_on_record(folder: SweepFolder) -> None:
    """Also before it is complete; a notebook displays the page in a frame."""
    plan = folder.plan(axes={"--lr": [0.1]}, repeats=2)
    folder.controller(plan).tick()
    folder.report(next(iter(folder.slurm.jobs)), test_accuracy=0.5)
    folder.controller(plan).tick()
    report = sweep_report(records=folder.store.root)
    assert report.to_dict()["states"] == report.facts.states
    assert report.facts.states["COMPLETED"] == 1
    assert all(sentence in str(report) for sentence in report.answer)
    assert str(report) == report.markdown()
    framed = report._repr_html_().partition('srcdoc="')[2].partition('"')[0]
    assert html.unescape(framed) == report.html()
    assert report.html().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("phases", "words"),
    [
        (
            {"start-up": 38.0, "training": 60.0, "end": 2.0},
            "What held it back: start-up, 38% of the total time with lr=0.1 (median run; hpml",
        ),
        ({"start-up": 1.0, "training": 97.0, "end": 2.0}, ""),
    ],
)
def test_what_held_it_back_is_a_share_of_the_run(
    folder: SweepFolder, phases: dict[str, float], words: str
) -> None:
    """Waiting for data in 23 % of the steps is less of the run than a start of 38 %."""
    plan = folder.plan(axes={"--lr": [0.1]}, repeats=3)
    table = Table(folder.store, plan)
    for point in plan.points:
        more = {"start-up": 900.0} if point.number == 2 else {}  # one slow run is no median
        wait = 0.15 if words else 0.03
        table.end(completed(point, {**phases, **more}, data_wait_ratio=wait))
    held = sweep_report(records=folder.store.root).answer[-1]
    assert held.startswith("What held it back") == bool(words)
    assert words in held


def test_a_finding_about_the_steps_has_its_share_of_the_run(folder: SweepFolder) -> None:
    """Steps that wait for data 23 % of their time, in a run of which the start took 38 %."""
    plan = folder.plan(axes={"--lr": [0.1]}, repeats=1)
    folder.controller(plan).tick()
    ((job_id, _),) = folder.slurm.jobs.items()
    attempt, now = folder.attempt(job_id), folder.slurm.clock.now
    log = attempt / "events/n1.jsonl"
    feed.append(attempt / "events/batch.jsonl", "started", node="batch", now=now, cpus=2)
    for name, moment in (("staging", 38), ("ready", 38), ("warm-up", 38)):
        feed.append(log, name, node="n1", rank=0, now=now + moment)
    for moment, steps in ((40, 0), (100, 200)):
        told = {"step_seconds_total": 0.3 * steps, "data_wait_seconds_total": 0.07 * steps}
        feed.append(log, "step", node="n1", rank=0, now=now + moment, steps_total=steps, **told)
    folder.slurm.clock.sleep(100)
    folder.report(job_id, test_accuracy=0.5)
    (attempt / "started/job_id").write_text(f"{job_id}\n")
    folder.controller(plan).tick()
    *_, first, second = sweep_report(records=folder.store.root).answer
    assert first.startswith("What held it back: start-up, 38% of the total time with lr=0.1")
    assert second == (
        "In that run also: waits for data: 23% of each step, at most 14% of the run's time."
    )


def test_hostile_names_stay_text() -> None:
    """Names and reasons come from users and programs: neither the page nor a table breaks."""
    plan, rows = grid({"--x": ["<script>alert(1)</script>", "a|b"]}, repeats=1)
    rows = [replace(rows[0], reason="exit <b>1</b> | end", nodes="n|1"), *rows[1:]]
    report = build(replace(plan, name="<i>&"), rows)
    assert not re.findall(r"<(?:script|i|b>1)", to_html(report))
    assert r"a\|b" in to_markdown(report)


def to_target(row: PointRow) -> PointRow:
    """Ranked by the time to the target, which every third run misses."""
    seconds = None if row.point % 3 == 2 else 50.0 + row.point
    return replace(row, target_accuracy=0.95, seconds_to_accuracy=seconds, metric=seconds)


def test_the_column_of_the_attempts_has_one_figure() -> None:
    """A run that missed the target has no seconds; its accuracy is another figure."""
    plan, rows = grid({"--lr": [0.01, 0.1, 1.0]}, repeats=2)
    metric = {"metric": "seconds_to_accuracy", "direction": "minimize"}
    plan = replace(plan, sweep={**plan.sweep, "search": metric})
    rows = [*map(to_target, rows[:-1]), replace(rows[-1], state="FAILED", metric=None)]
    table = to_markdown(build(plan, rows)).partition("## All attempts")[2].partition("\n#")[0]
    lines = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")]
    place = lines[0].index("seconds_to_accuracy")
    assert [line[place] for line in lines[1:]][-6:] == "50,51,not reached,53,54,-".split(",")


@pytest.mark.parametrize(
    ("make", "plot", "words"),
    [
        (scaling, "speedup", ["speedup over 1 node (logarithmic)", "nodes (logarithmic)"]),
        (scaling, "speedup", ["1", "1.25", "1.5", "2", "3", "4", "8"]),
        (lambda: scaling(change=at_most_two), "speedup", ["0.8", "1", "1.25", "1.5", "2"]),
        (lambda: scaling(scales=(1, 2), change=at_most_two), "speedup", ["0.8", "0.9", "1.1"]),
        (scaling, "speedup", ["single runs", "median, 95 % CI", "ideal"]),
        (scaling, "accuracy", ["single runs", "median, 95 % CI"]),
        (scaling, "target", ["single runs", "median, 95 % CI", "end of a run that missed it"]),
        (scaling, "target", ["median, 95 % CI (arrow: open)"]),
        (lambda: grid({"--lr": [0.01, 0.1, 1.0]}), "axes", ["lr (logarithmic)", "0.01", "0.1"]),
        (lambda: grid({"--lr": [0.01, 0.1]}), "axes", ["single runs", "median of all runs with"]),
        (lambda: grid({"--lr": [0, 0.001, 0.1]}), "axes", ["lr", "0", "0.001", "0.1"]),
        (lambda: grid({"--batch-size": [32, 64]}), "axes", ["batch-size", "32", "64"]),
        (search, "axes", ["lr (logarithmic)", "layers", "single runs"]),
        (search, "trace", ["single runs", "best so far"]),
    ],
)
def test_a_plot_says_what_it_draws(make: Callable[[], Any], plot: str, words: list[str]) -> None:
    """Its axes say that they are logarithmic, ticks can be read, all marks are in the legend."""
    (drawn,) = (one for one in draw(build(*make())) if one.name == plot)
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", drawn.svg)
    for word in words:
        assert any(text == word or (" " in word and text.startswith(word)) for text in texts)


@pytest.mark.parametrize(("make", "plot"), [(scaling, "target"), (grid_of_rates, "axes")])
def test_single_runs_are_drawn_beside_medians(make: Callable[[], Any], plot: str) -> None:
    """One more run is one more mark."""
    marks = []
    for left_out in (0, 1):
        plan, rows = make()
        (drawn,) = (one for one in draw(build(plan, rows[left_out:])) if one.name == plot)
        marks.append(drawn.svg.count("<use "))
    assert marks[0] == marks[1] + 1


def test_plots_stay_small() -> None:
    """Ten times the runs are not ten times the picture: they become one, in the page."""
    few, many = (draw(build(*scaling(repeats=repeats))) for repeats in (6, 400))
    assert [plot.name for plot in many] == [plot.name for plot in few]
    assert sum(len(plot.svg) for plot in many) < 300_000
    identities = re.findall(r' id="([^"]+)"', "".join(plot.svg for plot in few))
    assert len(identities) == len(set(identities))


def test_without_a_package_the_user_is_told_what_to_install() -> None:
    """One line with the command, not a traceback."""
    program = "import sys; sys.modules['matplotlib'] = None; sys.argv[1:] = 'sweep compare a b'"
    program += ".split(); from hpml_orchestrator.cli.__main__ import run; run()"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode not in {0, 70}
    assert "matplotlib" in done.stderr
    assert "pip install 'PATH[sweep]'" in done.stderr
    assert "Traceback" not in done.stderr


def faster_at_8(row: Any) -> Any:
    """Half the time on 8 nodes, with another commit."""
    seconds = row.total_seconds / 2 if row.world_size == 8 else row.total_seconds
    return replace(row, total_seconds=seconds, code="9f9f9f9")


def worse_at_8(row: Any) -> Any:
    """Half the time on 8 nodes, at which the program does not learn."""
    faster = faster_at_8(row)
    return replace(faster, accuracy=0.1) if row.world_size == 8 else faster


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        ({}, {"change": faster_at_8}, "the second is faster in 1, slower in 0, and not dist"),
        ({"change": faster_at_8}, {}, "the second is faster in 0, slower in 1, and not dist"),
        ({}, {}, "not distinguishable in 4."),
        ({}, {"repeats": 3}, "4 cannot be judged with fewer than 6 runs on a side."),
        ({}, {"scales": (3, 5)}, "No setting is complete in both sweeps"),
        ({}, {"change": worse_at_8}, "not distinguishable in 3; 1 cannot be compared."),
        ({"change": worse_at_8}, {}, "not distinguishable in 3; 1 cannot be compared."),
    ],
    ids=["faster", "slower", "the same", "few runs", "other scales", "worse", "was worse"],
)
def test_a_comparison_says_what_is_distinguishable(
    before: dict[str, Any], after: dict[str, Any], sentence: str
) -> None:
    """In all three forms; different code and scales are named."""
    reports = [build(*scaling(**fields)) for fields in (before, after)]
    comparison = compare(*reports)
    assert sentence in comparison.answer[0]
    assert sentence in shown(to_html(comparison))
    assert sentence in to_markdown(comparison)
    json.dumps(to_json(comparison), allow_nan=False)
    differs = bool({"change", "scales"} & {**before, **after}.keys())
    assert ("Different conditions" in [one.title for one in comparison.notices]) == differs
    assert all(pair.before or pair.after for pair in comparison.pairs)
    assert ("scales" in after) == any(not pair.before for pair in comparison.pairs)


def another_day(
    noise: random.Random, factor: float, seconds: float = 7 * 86400.0
) -> dict[str, Any]:
    """The same program, so much slower, so many seconds later."""

    def change(row: PointRow) -> PointRow:
        took = factor * (10 + 190 / (row.world_size or 1)) * noise.lognormvariate(0, 0.02)
        started = (row.started or 0) + seconds
        return replace(row, total_seconds=took, started=started, ended=started + took)

    return {"scales": (1, 2), "change": change, "target": None}


def verdicts(first: dict[str, Any], second: dict[str, Any]) -> tuple[set[str], str]:
    """What a comparison says of two sweeps: the verdicts, and the answer."""
    compared = compare(build(*scaling(**first)), build(*scaling(**second)))
    return {pair.verdict for pair in compared.pairs}, " ".join(compared.answer)


def test_a_day_is_not_taken_for_a_change() -> None:
    """The same program on two days, which vary by 3 to 10 %: 40 pairs of sweeps."""
    wrong = unknown = 0
    for seed in range(40):
        noise = random.Random(seed)
        days = [noise.lognormvariate(0, noise.uniform(0.03, 0.1)) for _ in range(2)]
        said, answer = verdicts(another_day(noise, days[0], 0), another_day(noise, days[1]))
        wrong += bool(said & {"faster", "slower"})
        unknown += "not known: different days" in said
        assert "ran on different days (2026-09-21 and 2026-09-28), and a program is" in answer
        assert "a speedup between 0.75 and 1.33 is not called a change" in answer
    assert wrong <= 2
    assert unknown > 20


@pytest.mark.parametrize(
    ("factor", "later", "verdict", "words"),
    [
        (0.9, 60, "faster", "The largest change is at"),
        (0.9, 7 * 86400, "not known: different days", "times as fast; it may come from when the"),
        (0.9, 7 * 86400, "not known: different days", "; in 2 the difference may come from when"),
        (0.9, 3600, "not known: different times", "ran at different times of 2026-09-21, and"),
        (0.5, 7 * 86400, "faster", "The largest change is at"),
        (2.0, 7 * 86400, "slower", "The largest change is at"),
        (1.0, 7 * 86400, "not distinguishable", "ran on different days"),
    ],
)
def test_only_sweeps_at_the_same_time_show_a_small_change(
    factor: float, later: float, verdict: str, words: str
) -> None:
    """A change that no day explains is one, whenever the sweeps ran."""
    noise = random.Random(1)
    said, answer = verdicts(another_day(noise, 1, 0), another_day(noise, factor, later))
    assert said == {verdict}
    assert words in answer


def test_chromium_shows_it_on_a_phone_and_on_a_desk(tmp_path: Path) -> None:
    """At 1, 8 and 200 points nothing is wider than the window, and every plot is drawn."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("needs chromium: apt-get install chromium")
    reports = [build(*SWEEPS[name]()) for name in ("one point", "8 points", "200 trials")]
    frames = ""
    for place, report in enumerate(reports):
        (tmp_path / f"{place}.html").write_text(to_html(report), encoding="utf-8")
        frames += "".join(
            f'<iframe src="{place}.html" width="{width}" height="900"></iframe>' for width in WIDTHS
        )
    measure = """<script>addEventListener("load", () => {
        const seen = [...document.querySelectorAll("iframe")].map(({contentDocument: page}) => ({
            width: page.documentElement.scrollWidth,
            answer: page.querySelector("h1").innerText,
            plots: [...page.querySelectorAll("svg")].map(svg => svg.clientWidth),
        }));
        document.body.textContent = JSON.stringify(seen);
    })</script>"""
    start = tmp_path / "start.html"
    start.write_text(f"<!doctype html><meta charset=utf-8><body>{frames}{measure}", "utf-8")
    command = [chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += ["--disable-dev-shm-usage"]  # a container may have little of it
    command += ["--allow-file-access-from-files", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--dump-dom", start.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    body = re.search(r"<body>(.*)</body>", done.stdout, flags=re.DOTALL)
    assert body
    seen = json.loads(html.unescape(body[1]))
    expected = [(report, width) for report in reports for width in WIDTHS]
    for page, (report, width) in zip(seen, expected, strict=True):
        assert page["width"] <= width
        assert page["answer"] == report.answer[0]
        assert len(page["plots"]) == len(draw(report))
        assert all(0 < plot <= width for plot in page["plots"])
