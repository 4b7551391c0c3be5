"""The viewer in a real browser: every dashboard on a real Prometheus that has known data."""

from __future__ import annotations

import json
import math
import operator
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from hpml_dashboards import JSON
from hpml_dashboards.serve import PrometheusServer as Source
from hpml_dashboards.serve import ViewerServer

from tests.monitoring.backfill_support import END, SECONDS, backfill, openmetrics, panels, resolved
from tests.monitoring.prometheus_support import Prometheus, booted_prometheus

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.monitoring.browser_support import Browser

FEATURES = Path(__file__).with_name("viewer-features.json")
DASHBOARDS = [*sorted(JSON.glob("*.json")), FEATURES]
STEP = 15
RANGE = f"from={(END - SECONDS) * 1000}&to={END * 1000}"

READY = """(() => { const panels = [...document.querySelectorAll('[data-panel]')];
    return panels.length && panels.every(panel => panel.dataset.state); })()"""
UNFOLD = "document.querySelectorAll('.row-title [aria-expanded=false]').forEach(one => one.click())"
SEEN = """[...document.querySelectorAll('[data-panel]')].map(panel => ({
    id: Number(panel.dataset.panel), state: panel.dataset.state, text: panel.innerText,
    lines: [...panel.querySelectorAll('[aria-label="Last values"] li')].map(one => one.textContent),
}))"""
NAMELESS = """[...document.querySelectorAll('button, a[href], input')].filter(one => !(
    one.getAttribute('aria-label') || one.innerText?.trim() || one.title || one.labels?.length
    || document.getElementById(one.getAttribute('aria-labelledby')))).map(one => one.outerHTML)"""

SECONDS_OF = {"s": 1, "min": 60, "mins": 60, "hour": 3600, "hours": 3600, "day": 86400}
THOUSANDS = {"K": 1e3, "Mil": 1e6, "Bil": 1e9, "Tri": 1e12, "%": 0.01}
REDUCERS: dict[str, Callable[[list[float]], float]] = {"mean": fmean, "max": max, "min": min}
PREFIXES = {"n": -9, "µ": -6, "m": -3, "k": 3, "K": 3, "M": 6, "G": 9, "T": 12, "P": 15}


class Shown(NamedTuple):
    """A number on the page, and its largest difference from the number behind it."""

    value: float
    tolerance: float

    def is_of(self, value: float) -> bool:
        """Whether it shows this value; a mean depends a little on the step, so on the width."""
        return abs(self.value - value) <= self.tolerance * 1.01 + abs(value) * 0.01


def numbers(text: str) -> list[Shown]:
    """The numbers of a text in base units: "84.3%" is 0.843, "2 GiB" is 2147483648."""
    found = []
    for number, suffix in re.findall(r"(-?\d[\d,]*(?:\.\d+)?)\s*([^\s\d]*)", text):
        scale: float = SECONDS_OF.get(suffix) or THOUSANDS.get(suffix) or 1
        if prefixed := re.match(r"([nµmkKMGTP])(i?)(?:B|W|Hz|J|s$|s/)", suffix):
            power = PREFIXES[prefixed[1]]
            scale = 1024 ** (power // 3) if prefixed[2] else 10.0**power
        decimals = len(number.partition(".")[2])
        found.append(Shown(float(number.replace(",", "")) * scale, 0.5 * 10**-decimals * scale))
    return found


@pytest.fixture(scope="module")
def prometheus_with_data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus with the series that the dashboards query."""
    folder = tmp_path_factory.mktemp("prometheus")
    backfill(folder, openmetrics(json.loads(path.read_text()) for path in DASHBOARDS))
    with booted_prometheus(folder, []) as booted:
        yield booted


@pytest.fixture(scope="module")
def viewer(
    prometheus_with_data: Prometheus, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ViewerServer]:
    """The server of the viewer, with all dashboards."""
    folder = tmp_path_factory.mktemp("dashboards")
    for path in DASHBOARDS:
        shutil.copy(path, folder)
    with ViewerServer(Source(prometheus_with_data.url), dashboards=folder) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def go(viewer: ViewerServer, browser: Browser) -> Any:
    """Opens a dashboard in a window of a width, tall enough for all of it, rows unfolded."""

    def open_dashboard(uid: str, query: str = "", width: int = 1400) -> list[dict[str, Any]]:
        address = viewer.address.replace("/?", f"/d/{uid}?{RANGE}&{query}&")
        browser.resize(width, 30_000)
        browser.open(address, READY)
        browser.evaluate(UNFOLD)
        browser.wait(READY)
        panels: list[dict[str, Any]] = browser.evaluate(SEEN)
        return panels

    return open_dashboard


def answers(prometheus: Prometheus, panel: dict[str, Any]) -> list[tuple[str, list[float]]]:
    """(refId, values) of a panel's targets, asked for and reduced here."""
    found = []
    calculations = panel.get("options", {}).get("reduceOptions", {}).get("calcs", ["lastNotNull"])
    reduce = REDUCERS.get(calculations[0], operator.itemgetter(-1))
    for target in panel.get("targets", []):
        expression = resolved(target["expr"], STEP)
        if target["instant"]:
            data = prometheus.api("query", query=expression, time=str(END))
            series = [one["value"][1] for one in data["result"]]
        else:
            lines = prometheus.query_range(expression, END - SECONDS, END, STEP)
            series = [reduce([v for _, v in one.points if not math.isnan(v)]) for one in lines]
        found.append((target["refId"], [float(value) for value in series]))
    return found


def shown_targets(panel: dict[str, Any]) -> set[str]:
    """The refIds whose numbers a table shows as numbers."""
    dates = {
        override["matcher"]["options"]
        for override in panel["fieldConfig"]["overrides"]
        if any(str(one["value"]).startswith("dateTime") for one in override["properties"])
    }
    renamed = {
        column.rpartition("#")[2]
        for one in panel.get("transformations", [])
        for column, name in one["options"].get("renameByName", {}).items()
        if column.startswith("Value #") and name not in dates
    }
    return renamed if len(panel["targets"]) > 1 else set()


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_panel_shows_what_prometheus_answers(
    path: Path, go: Any, browser: Browser, prometheus_with_data: Prometheus
) -> None:
    """No error on the console; formatted values equal those of an independent query."""
    dashboard = json.loads(path.read_text())
    choice = "var-cluster=main&var-jobid=1201&var-node=gpu01&var-user=ada&var-sweep=scaling"
    seen = go(dashboard["uid"], choice)
    assert [one for one in browser.problems if "(Unprocessable Entity)" not in one] == []
    expected = {panel["id"]: panel for panel in panels(dashboard)}
    assert {one["id"] for one in seen} == set(expected)
    for one in seen:
        panel, name = expected[one["id"]], f"{dashboard['uid']}: {one['text']}"
        if panel.get("repeat") or panel["type"] == "text" or "Broken" in panel["title"]:
            continue
        results = answers(prometheus_with_data, panel)
        has_data = any(values for _, values in results)
        if panel["type"] in ("timeseries", "table"):
            assert one["state"] == ("drawn" if has_data else "empty"), name
        if panel["type"] == "timeseries":
            lines = [numbers(line.rpartition(": ")[2]) for line in one["lines"]]
            values = [value for _, series in results for value in series]
            assert len(lines) == len(values), name
            for line, value in zip(lines, values, strict=True):
                assert line[0].is_of(value), (name, value)
        elif not panel["fieldConfig"]["defaults"].get("mappings"):
            tables = shown_targets(panel) if panel["type"] == "table" else None
            on_page = numbers(one["text"])
            for ref, series in results:
                for value in series if tables is None or ref in tables else []:
                    assert any(shown.is_of(value) for shown in on_page), (name, value)


def test_rows_fold_and_panels_repeat(go: Any, browser: Browser) -> None:
    """A row and a panel appear once per value of their variable; the keyboard folds a row."""
    seen = go("viewer-features", "var-kind=a&var-kind=c")
    assert [one["text"].splitlines()[0] for one in seen if one["id"] == 20] == ["Of a", "Of c"]
    titles = "[...document.querySelectorAll('.row-title')].map(one => one.innerText.trim())"
    assert browser.evaluate(titles)[:2] == ["Kind a", "Kind c"]
    browser.evaluate("document.querySelector('.row-title button').focus()")
    browser.press("Enter", 13, "\r")
    assert browser.wait("document.querySelector('.row-title button').ariaExpanded == 'false'")
    assert browser.evaluate("document.querySelectorAll('[data-panel=\"10\"]').length") == 1


def test_a_panel_says_why_it_is_empty(go: Any) -> None:
    """The panel shows Prometheus' message about a wrong query, and also that data is missing."""
    texts = {one["id"]: (one["state"], one["text"]) for one in go("viewer-features")}
    assert texts[3][0] == "error"
    assert "many-to-many matching not allowed" in texts[3][1]
    assert texts[4][0] == "empty"
    assert "Nothing here" in texts[4][1]


def test_links_keep_time_range_and_variables(go: Any, browser: Browser) -> None:
    """A cell of a table leads to another dashboard, and Back leads back."""
    go("viewer-features")
    browser.evaluate("document.querySelector('[role=gridcell] a[href]').click()")
    address = browser.wait("location.pathname == '/d/target' && location.search")
    assert address == f"?var-jobid=1201&{RANGE}&var-cluster=main"
    browser.wait("document.querySelector('h1').innerText == 'Features' || history.back()")
    links = "[...document.querySelectorAll('header a')].map(one => one.getAttribute('href'))"
    kept = "var-datasource=prometheus&var-cluster=main&var-kind=$__all"
    assert browser.wait(links)[0] == f"/d/target?{RANGE}&{kept}"


@pytest.mark.parametrize(
    ("zone", "query", "shown"),
    [
        ("Asia/Kolkata", "", "2026-01-01 05:30:00"),
        ("Asia/Kolkata", "timezone=utc", "2026-01-01 00:00:00"),
        ("", "timezone=America/New_York", "2025-12-31 19:00:00"),
    ],
)
def test_times_are_those_of_the_user(
    zone: str, query: str, shown: str, go: Any, browser: Browser
) -> None:
    """In the browser's time zone, or the one that the address names."""
    browser.live_in(zone)
    go("viewer-features", query)
    browser.live_in("")
    picker = "document.querySelector('[data-testid*=TimePicker][aria-label]').ariaLabel"
    assert shown in browser.evaluate(picker)


def test_the_theme_is_that_of_the_desktop_until_one_is_chosen(go: Any, browser: Browser) -> None:
    """After a switch every figure has the colour that a fresh load in that theme gives it."""
    chosen = "document.querySelector('header button[aria-label^=Switch]')"
    figure = """getComputedStyle([...document.querySelectorAll('[data-panel="2"] *')].find(
        one => !one.children.length && one.textContent.includes('iB'))).color"""
    shown, switched = {}, {}
    go("viewer-features")
    for scheme, other in (("light", "dark"), ("dark", "light")):
        browser.evaluate("localStorage.clear()")
        browser.prefer(scheme)
        go("viewer-features")
        assert browser.evaluate(f"{chosen}.ariaLabel") == f"Switch to {other} theme"
        shown[scheme] = browser.evaluate(figure)
        browser.evaluate(f"{chosen}.click()")
        browser.wait(f"{figure} != '{shown[scheme]}'")
        switched[other] = browser.evaluate(figure)
        go("viewer-features")
        assert browser.evaluate(f"{chosen}.ariaLabel") == f"Switch to {scheme} theme"
    browser.evaluate("localStorage.clear()")
    browser.prefer("")
    assert switched == shown
    assert shown["light"] != shown["dark"]


def test_a_hidden_variable_is_never_stale(go: Any, browser: Browser) -> None:
    """The user of another job, brought along by a link, gives way to this job's."""
    go("hpml-job", "var-cluster=main&var-jobid=1201&var-user=nobody")
    links = "[...document.querySelectorAll('header a')].map(one => one.getAttribute('href'))"
    assert all("var-user=ada" in link for link in browser.evaluate(links))


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400])
def test_it_fits_and_everything_has_a_name(
    width: int, theme: str, go: Any, browser: Browser
) -> None:
    """Nothing is wider than the window, and every control has a label for screen readers."""
    go("viewer-features", f"theme={theme}", width)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(NAMELESS) == []
