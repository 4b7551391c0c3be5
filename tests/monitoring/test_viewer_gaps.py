"""What the viewer says where nothing is measured; array jobs, and small windows."""

from __future__ import annotations

import json
import re
import threading
from typing import TYPE_CHECKING, Any

import pytest
from hpml_dashboards import JSON
from hpml_dashboards.serve import PrometheusServer as Source
from hpml_dashboards.serve import ViewerServer

from tests.monitoring.backfill_support import backfill, openmetrics
from tests.monitoring.prometheus_support import booted_prometheus
from tests.monitoring.test_viewer import RANGE, READY, SEEN, UNFOLD

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.monitoring.browser_support import Browser

FOLDED = "[...document.querySelectorAll('.row-title')].map(one => one.innerText.trim())"
WHOLE = """[...document.querySelectorAll('.uplot')].map(one =>
    one.getBoundingClientRect().right
    - one.querySelector('.u-over').getBoundingClientRect().right)"""
TOPS = """[...document.querySelectorAll('[data-panel]')].slice(0, 4).map(one =>
    one.getBoundingClientRect().top)"""
MORE = "[...document.querySelectorAll('.table')].map(one => one.hasAttribute('data-more'))"
# One name of a file system, so that its bar stands alone; jobs 1201 and 1202 are of an array.
CHANGES = {
    r"^(hpml_filesystem_\w+\{)": r'\1mountpoint="/local",',
    r'name="(digits|imagenet)"': r'name="\1",array="1193_2"',
}
CPU_JOB = re.compile(
    r"hpml:job_(info|exporter|cpus|memory)|hpml_job_(info|cpu|memory)|hpml_node_info"
)


@pytest.fixture(scope="module")
def lines() -> list[str]:
    """Data for all dashboards, as of a cluster with an array of jobs."""
    dashboards = [json.loads(path.read_text()) for path in sorted(JSON.glob("*.json"))]
    text = openmetrics(dashboards)
    for pattern, replacement in CHANGES.items():
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    return text.split("\n")


@pytest.fixture(scope="module", params=["all", "no slurm", "cpu job"])
def address(
    request: pytest.FixtureRequest, lines: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str]]:
    """What there is, and the address of the viewer."""
    keep = {
        "all": lambda _: True,
        "no slurm": lambda line: not line.startswith(("hpml_slurm", "ALERTS", "hpml:alerts")),
        "cpu job": lambda line: not line or line[0] == "#" or CPU_JOB.match(line),
    }[request.param]
    folder = tmp_path_factory.mktemp("prometheus")
    backfill(folder, "\n".join(filter(keep, lines)))
    with booted_prometheus(folder, []) as booted, ViewerServer(Source(booted.url)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield request.param, server.address
        server.shutdown()


def opened(browser: Browser, address: str, uid: str, width: int = 1400) -> dict[str, str]:
    """Open a dashboard; returns the texts of its panels by title, once no query is under way."""
    choice = "var-cluster=main&var-jobid=1201&var-node=gpu01&var-user=ada"
    browser.resize(width, 30_000)
    browser.open(address.replace("/?", f"/d/{uid}?{RANGE}&{choice}&"), READY)
    panels: list[dict[str, Any]] = browser.evaluate(SEEN)
    return {title: rest for title, _, rest in (one["text"].partition("\n") for one in panels)}


@pytest.mark.parametrize("address", ["no slurm"], indirect=True)
def test_a_cluster_without_a_slurm_exporter(address: tuple[str, str], browser: Browser) -> None:
    """Nobody asked Slurm: the panels say so and name the remedy, and the row of Slurm folds."""
    shown = opened(browser, address[1], "hpml-cluster")
    for title in ("Nodes that need somebody", "Pending by reason", "Jobs ended", "Queue"):
        assert "Not measured: start hpml export slurm" in shown[title], title
    for title in ("Jobs running", "Jobs pending", "Nodes down"):
        assert "not measured" in shown[title], title
    for title in ("Hardware faults", "Other alerts"):
        assert "Not measured: load hpml-alerts.yml in Prometheus" in shown[title], title
    assert browser.wait(f"{FOLDED}.includes('Slurm (7 panels, nothing measured)')")
    browser.evaluate(UNFOLD)
    browser.wait(READY)
    assert browser.evaluate(FOLDED) == ["Nodes and queue", "Slurm"], "it stays as somebody left it"
    shown = opened(browser, address[1], "hpml-user")
    assert "not measured" in shown["Jobs pending"]


@pytest.mark.parametrize("address", ["cpu job"], indirect=True)
def test_a_job_without_gpus(address: tuple[str, str], browser: Browser) -> None:
    """Nothing was measured that could hold it back, so it is not said that nothing was found."""
    shown = opened(browser, address[1], "hpml-job")
    assert shown["What holds it back"].strip().startswith("Not measured: no GPUs known")
    assert browser.wait(f"{FOLDED}.includes('GPU memory and power (6 panels, nothing measured)')")


@pytest.mark.parametrize("address", ["all"], indirect=True)
def test_what_is_measured_in_every_window(address: tuple[str, str], browser: Browser) -> None:
    """Axes have whole labels, tables of arrays their last column, a single bar its name."""
    for uid in ("hpml-cluster", "hpml-user", "hpml-node", "hpml-job"):
        shown = opened(browser, address[1], uid)
        assert min(browser.evaluate(WHOLE)) >= 16, "half of a label of a time axis"
        assert not any(browser.evaluate(MORE)), (uid, "a table is wider than its panel")
        if uid == "hpml-node":
            assert "/local" in shown["Local file systems"]
    opened(browser, address[1], "hpml-cluster", width=500)
    first, second, third, fourth = browser.evaluate(TOPS)
    assert first == second < third == fourth, "two figures in a row"
    assert any(browser.evaluate(MORE)), "a table that scrolls has a mark at its edge"
