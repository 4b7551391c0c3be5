"""What the exporter answers is what promtool and Prometheus' Python library expect."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from deploy.gpusim.gpusim import XID, Event, Process, State, a100, divided, h100
from tests.monitoring.exporter_support import OPENMETRICS, Labels

if TYPE_CHECKING:
    from tests.monitoring.exporter_support import Answer, Exporter, StartExporter
    from tests.monitoring.gpusim_support import Gpusim
    from tests.monitoring.prometheus_support import Promtool

SERIES_OF_A_NODE = 800


def full_state() -> State:
    """Eight GPUs with every feature: GPM, MIG, NVLink, an XID error, a process."""
    busy = h100(0, util=70, power=500, processes=(Process(1),))
    others = [h100(index, util=index * 10, power=100 * index) for index in range(1, 6)]
    return State(epoch=time.time(), gpus=(busy, *others, divided(a100(6), 1, 2, 3), a100(7)))


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
    """Series without a job: jobs of other tests on this machine come and go."""
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
