"""The pages of `hpml report` in Chromium: on a phone and on a desk, in light and dark."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hpml_orchestrator.diagnosis.report import Report
from tests.monitoring.browser_support import Browser
from tests.unit.diagnosis import page_examples as examples

PAGES: dict[str, Callable[[], str]] = {
    "run": lambda: Report(examples.gpu_run()).html(),
    "crowd": lambda: Report(examples.crowd()).html(),
    "unknown": lambda: Report(examples.unknowing()).html(),
}
CONTRAST = """(() => {
    const light = color => {
        const [r, g, b] = color.match(/[\\d.]+/g).map(value => value / 255)
            .map(value => value <= .04045 ? value / 12.92 : ((value + .055) / 1.055) ** 2.4);
        return .2126 * r + .7152 * g + .0722 * b;
    };
    const page = light(getComputedStyle(document.body).backgroundColor);
    const ratios = [...document.querySelectorAll("main p, main li, main td, main th, main em")]
        .map(one => light(getComputedStyle(one).color))
        .map(text => (Math.max(text, page) + .05) / (Math.min(text, page) + .05));
    return Math.min(...ratios);
})()"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_the_window_and_can_be_read(
    name: str, scheme: str, browser: Browser, tmp_path: Path
) -> None:
    """Nothing is wider than a phone, every picture is drawn, no error, and contrast is AA."""
    path = tmp_path / "report.html"
    path.write_text(PAGES[name](), encoding="utf-8")
    browser.prefer(scheme)
    for width in (360, 1200):
        browser.resize(width, 900)
        browser.open(path.as_uri(), "document.readyState == 'complete'")
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        sizes = "[...document.querySelectorAll('svg')].filter(one => !one.closest('details'))"
        sizes += ".map(one => one.getBoundingClientRect()).map(one => [one.width, one.height])"
        for drawn, height in browser.evaluate(sizes):
            assert 0 < drawn <= width
            assert height > 0
        assert browser.evaluate(CONTRAST) >= 4.5
        assert browser.problems == []
    browser.prefer("")


def test_the_keyboard_reaches_the_results(browser: Browser, tmp_path: Path) -> None:
    """The first key leads past the header, the next ones to what can be opened or scrolled."""
    path = tmp_path / "report.html"
    path.write_text(Report(examples.gpu_run()).html(), encoding="utf-8")
    browser.resize(360, 900)
    browser.open(path.as_uri(), "document.readyState == 'complete'")
    reached = []
    for _ in range(3):
        browser.press("Tab", 9)
        reached.append(
            browser.evaluate("document.activeElement.className || document.activeElement.tagName")
        )
    assert reached == ["skip", "SUMMARY", "scroll"]
