"""The report as a page, as Markdown and as JSON: complete, well-formed, seen in Chromium."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from hpml_orchestrator import assets
from hpml_orchestrator.sweeps.compare import Comparison, compare
from hpml_orchestrator.sweeps.pages import json_schema, to_html, to_json, to_markdown
from hpml_orchestrator.sweeps.plots import draw
from hpml_orchestrator.sweeps.report import build
from tests.unit.sweeps import sweep_rows

WIDTHS = (360, 1200)
VOID = {"meta", "link", "br", "path", "use", "image", "rect", "circle", "line", "polyline"}

SWEEPS: dict[str, Callable[[], Any]] = {
    "one point": lambda: sweep_rows.scaling(scales=(1,), repeats=1),
    "8 points": lambda: sweep_rows.scaling(scales=(1, 2), repeats=4),
    "weak": lambda: sweep_rows.scaling("weak", scales=(1, 2, 4, 8, 16)),
    "nothing yet": lambda: (sweep_rows.scaling()[0], []),
    "grid": lambda: sweep_rows.grid({"--lr": [0.01, 0.1], "--amp": ["off", "bf16"]}),
    "200 trials": lambda: sweep_rows.search(200),
    "400 runs": lambda: sweep_rows.scaling(repeats=100),
}


class Page(HTMLParser):
    """Reads a page: its tags are closed in order, and what it refers to is collected."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.tags: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        self.references += [
            value or "" for name, value in attrs if name in {"src", "href", "xlink:href"}
        ]

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def shown(page: str) -> str:
    """The text of a page with blanks between its parts, without its pictures."""
    text = re.sub(r"<(style|svg).*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", text)).split())


@pytest.mark.parametrize("name", SWEEPS)
def test_a_report_says_the_same_in_every_form(name: str) -> None:
    """Answer, notices, attempts and checks stand in the page, in Markdown and in JSON."""
    report = build(*SWEEPS[name]())
    page, markdown, facts = to_html(report), to_markdown(report), to_json(report)
    parsed = Page(page)
    assert "script" not in parsed.tags
    assert all(value.startswith(("#", "data:")) for value in parsed.references)
    assert "url(http" not in page
    for sentence in (
        report.question,
        *report.answer,
        *(notice.text for notice in report.notices),
        *(check.answer for check in report.checks),
    ):
        assert sentence in shown(page)
        assert sentence in markdown
    assert len(facts["attempts"]) == len(report.attempts)
    assert page.count("<tr>") > len(report.attempts)
    assert ("<details><summary>400 attempts" in page) == (name == "400 runs")
    for table in re.findall(r"(?:^\|.*\n)+", markdown, flags=re.MULTILINE):
        assert len({re.sub(r"\\\|", "", line).count("|") for line in table.splitlines()}) == 1
    jsonschema.validate(facts, json_schema())


def test_the_schema_in_the_repository_is_current() -> None:
    """It is what `json_schema` returns; a report of another version would fail it."""
    file = assets.path("templates/report/report.schema.json")
    schema = json.loads(file.read_text("utf-8"))
    assert schema == json_schema()
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"version": 1}, schema)


def test_hostile_names_stay_text() -> None:
    """Names and reasons come from users and programs: neither the page nor a table breaks."""
    plan, rows = sweep_rows.grid({"--x": ["<script>alert(1)</script>", "a|b"]}, repeats=1)
    rows = [replace(rows[0], reason="exit <b>1</b> | end", nodes="n|1"), *rows[1:]]
    report = build(replace(plan, name="<i>&"), rows)
    parsed = Page(to_html(report))
    assert not {"script", "i"} & set(parsed.tags)
    assert r"a\|b" in to_markdown(report)


def test_plots_stay_small() -> None:
    """Ten times the runs are not ten times the picture: they become one, in the page."""
    few, many = (draw(build(*sweep_rows.scaling(repeats=repeats))) for repeats in (6, 400))
    assert [plot.name for plot in many] == [plot.name for plot in few]
    assert sum(len(plot.svg) for plot in many) < 300_000
    identities = re.findall(r' id="([^"]+)"', "".join(plot.svg for plot in few))
    assert len(identities) == len(set(identities))


@pytest.mark.parametrize("package", ["matplotlib", "numpy", "scipy"])
def test_without_a_package_the_user_is_told_what_to_install(package: str) -> None:
    """One line with the command, not a traceback."""
    program = f"""import sys
sys.modules["{package}"] = None
sys.argv = ["hpml", "sweep", "compare", "before", "after"]
from hpml_orchestrator.cli.__main__ import run
run()
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode not in {0, 70}
    assert package in done.stderr
    assert "pip install 'hpml-orchestrator[sweep]'" in done.stderr
    assert "Traceback" not in done.stderr


def faster_at_8(row: Any) -> Any:
    """Half the time on 8 nodes, with another commit."""
    seconds = row.total_seconds / 2 if row.world_size == 8 else row.total_seconds
    return replace(row, total_seconds=seconds, code="9f9f9f9")


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        ({}, {"change": faster_at_8}, "the second is faster in 1, slower in 0, and not dist"),
        ({"change": faster_at_8}, {}, "the second is faster in 0, slower in 1, and not dist"),
        ({}, {}, "not distinguishable in 4."),
        ({}, {"repeats": 3}, "4 cannot be judged with fewer than 6 runs on a side."),
        ({}, {"scales": (3, 5)}, "No setting is complete in both sweeps"),
    ],
    ids=["faster", "slower", "the same", "few runs", "other scales"],
)
def test_a_comparison_says_what_is_distinguishable(
    before: dict[str, Any], after: dict[str, Any], sentence: str
) -> None:
    """In all three forms; different code is named."""
    reports = [build(*sweep_rows.scaling(**fields)) for fields in (before, after)]
    comparison: Comparison = compare(*reports)
    assert sentence in comparison.answer[0]
    assert sentence in shown(to_html(comparison))
    assert sentence in to_markdown(comparison)
    jsonschema.validate(to_json(comparison), json_schema())
    Page(to_html(comparison))
    changed_code = "change" in {**before, **after}
    assert ("Different conditions" in [one.title for one in comparison.notices]) == changed_code
    assert bool(comparison.only_after) == ("scales" in after)


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
