"""Sources other than the commands: a relay of Slurm's OpenMetrics, and pyslurm."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from hpml_exporters.slurm.native import Native
from hpml_exporters.slurm.openmetrics import Relay
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from hpml_orchestrator.errors import SchedulerUnavailable

DATA = Path(__file__).parent / "data"
PAGE = (DATA / "26.05.5" / "openmetrics.txt").read_text("utf-8")


class FakeController(BaseHTTPRequestHandler):
    """A captured page for jobs, nothing on the others."""

    def do_GET(self) -> None:
        """Answer."""
        self.send_response(200)
        self.end_headers()
        self.wfile.write(PAGE.encode() if self.path == "/metrics/jobs" else b"")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as http.server's
        """Say nothing."""


class Collected:
    """Families, for a registry."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        """Return them."""
        return self._families


def samples(text: str) -> list[tuple[str, dict[str, str], float]]:
    """All series of an exposition, sorted."""
    families = text_string_to_metric_families(text)
    found = [(one.name, one.labels, one.value) for family in families for one in family.samples]
    return sorted(found, key=str)


@pytest.fixture
def controller() -> Iterator[str]:
    """The URL of a fake controller."""
    with ThreadingHTTPServer(("127.0.0.1", 0), FakeController) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_slurms_own_metrics_are_relayed_unchanged(controller: str) -> None:
    """Every series of a page of 26.05.5 arrives with its name, labels and value."""
    registry = CollectorRegistry()
    registry.register(Collected(Relay(controller).read()))
    shown = samples(generate_latest(registry).decode())
    assert len(shown) > 100
    assert shown == samples(PAGE)


def test_a_controller_that_is_away() -> None:
    """It is an error of the scheduler's, so the last figures are kept."""
    with pytest.raises(SchedulerUnavailable, match="/metrics/jobs"):
        Relay("http://127.0.0.1:9").read()


def test_pyslurm_is_used_where_it_can_be_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A fake module returns what the real one returned; statistics have pyslurm's names."""
    captured = json.loads((DATA / "25.11.7/pyslurm-25.11.2.json").read_text("utf-8"))
    objects = {
        kind: {number: SimpleNamespace(**one) for number, one in enumerate(captured[kind])}
        for kind in ("jobs", "nodes")
    }
    numbers = SimpleNamespace(schedule_cycle_counter=61, jobs_submitted=11)
    statistics = SimpleNamespace(load=lambda: numbers)
    fake = SimpleNamespace(
        Jobs=SimpleNamespace(load=lambda: objects["jobs"]),
        Nodes=SimpleNamespace(load=lambda: objects["nodes"]),
        slurmctld=SimpleNamespace(Statistics=statistics),
    )
    monkeypatch.setitem(sys.modules, "pyslurm", fake)
    (tmp_path / "slurm.conf").touch()
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    monkeypatch.setenv("PATH", "")
    view = Native().read()
    assert len(list(view.jobs)) == len(captured["jobs"])
    assert view.statistics["schedule_cycle_counter"] == 61
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "none.conf"))
    with pytest.raises(SchedulerUnavailable):
        Native()
