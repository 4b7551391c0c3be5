"""What the exporter answers is what Prometheus, promtool and Prometheus' Python library expect."""

from __future__ import annotations

import http.client
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest

from deploy.gpusim.gpusim import XID, Event, Process, State, a100, divided, h100
from tests.monitoring.exporter_support import OPENMETRICS, Labels
from tests.monitoring.prometheus_support import static

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.monitoring.exporter_support import Answer, Exporter, StartExporter
    from tests.monitoring.gpusim_support import Gpusim
    from tests.monitoring.prometheus_support import BootPrometheus, Promtool

SERIES_OF_A_NODE = 800


def full_state() -> State:
    """Eight GPUs with all that they can have: GPM, MIG, NVLink, an XID error, a process."""
    busy = h100(0, util=70, power=500, processes=(Process(1),))
    others = [h100(index, util=index * 10, power=100 * index) for index in range(1, 6)]
    return State(epoch=time.time(), gpus=(busy, *others, divided(a100(6), 1, 2, 3), a100(7)))


@contextmanager
def asking_for_text(exporter: Exporter) -> Iterator[str]:
    """A proxy that takes the header Accept away; gives its address.

    Prometheus 2.42 has no setting for it, and always asks for OpenMetrics first.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            connection = http.client.HTTPConnection(exporter.address, timeout=60)
            connection.request("GET", self.path)
            response = connection.getresponse()
            body = response.read()
            connection.close()
            self.send_response(response.status)
            self.send_header("Content-Type", response.headers["Content-Type"])
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def full(exporter: StartExporter, gpusim: Gpusim) -> Exporter:
    """An exporter whose collectors have all read: GPM compared two samples, an XID was seen."""
    state = gpusim.write(full_state())
    here = exporter(gpus=gpusim)
    here.wait_for(lambda answer: answer.of("hpml_gpu_sm_active_ratio"))
    gpusim.write(state.changed(0, events=(Event(1, 48, XID),)))
    here.wait_for(
        lambda answer: (
            answer.of("hpml_gpu_xid_errors_total")
            and len(answer.of("hpml_exporter_up")) == len(answer.of("hpml_exporter_series"))
        )
    )
    return here


def of_the_node(answer: Answer) -> dict[tuple[str, Labels], float]:
    """What stands there of no job: those of other tests on this machine come and go."""
    return {key: value for key, value in answer.values().items() if "jobid" not in dict(key[1])}


def test_promtool_finds_nothing_in_a_live_scrape(full: Exporter, promtool: Promtool) -> None:
    """Names, help and types keep the rules of Prometheus, and a node has at most 800 series."""
    answer = full.scrape()
    checked = promtool("check", "metrics", text=answer.text.encode())
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
    assert answer.kind.startswith("text/plain; version=0.0.4")
    assert 200 < len(of_the_node(answer)) <= SERIES_OF_A_NODE


def test_openmetrics_says_the_same_as_text(full: Exporter) -> None:
    """The strict parser of OpenMetrics reads it, and finds the samples that are in the text."""
    answer = full.scrape(accept=OPENMETRICS)
    assert answer.kind.startswith("application/openmetrics-text; version=1.0.0")
    assert answer.text.endswith("# EOF\n")
    plain = of_the_node(full.scrape())
    strict = of_the_node(answer)
    assert set(plain) == set(strict)
    assert len(strict) > 200
    name = ("hpml_gpu_memory_total_bytes", (("uuid", full_state().gpus[0].uuid),))
    assert plain[name] == strict[name] == 80 * 2**30


def test_prometheus_takes_both_formats(full: Exporter, prometheus: BootPrometheus) -> None:
    """By itself it asks for OpenMetrics; in text, series, types and values are the same."""
    with asking_for_text(full) as address:
        server = prometheus([static("openmetrics", full.address), static("text", address)])
        server.wait_for("count(up == 1) == 2")
        server.wait_for("count(hpml_gpu_up) == 2 * 8")
        count = "count by (job) ({__name__=~'hpml_.*', jobid=''})"
        counts = {one.labels["job"]: one.value for one in server.query(count)}
        assert counts["openmetrics"] == counts["text"] > 200
        limit = "hpml_gpu_power_limit_watts"
        differ = f'{limit}{{job="text"}} != on (uuid) {limit}{{job="openmetrics"}}'
        assert len(server.query(differ.replace("!=", "=="))) > 0
        assert server.query(differ) == []
        types = {
            job: {
                (one["metric"], one["type"])
                for one in server.api("targets/metadata", match_target=f'{{job="{job}"}}')
            }
            for job in ("openmetrics", "text")
        }
        assert not server.was_refused("text", "5m")
        assert not server.was_refused("openmetrics", "5m")
    # OpenMetrics names a counter's family without _total, and has a type for identities
    assert ("hpml_gpu_energy_joules", "counter") in types["openmetrics"]
    assert ("hpml_gpu", "info") in types["openmetrics"]
    assert ("hpml_gpu_energy_joules_total", "counter") in types["text"]
    assert ("hpml_gpu_info", "gauge") in types["text"]
