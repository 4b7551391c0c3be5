"""Faults of one exporter do not affect the others, and each exporter recovers."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from deploy.gpusim.gpusim import XID, Event, Fault, State, a100
from tests.monitoring.prometheus_support import static

if TYPE_CHECKING:
    from tests.monitoring.exporter_support import Answer, StartExporter
    from tests.monitoring.gpusim_support import Gpusim
    from tests.monitoring.prometheus_support import BootPrometheus

EX_TEMPFAIL = 75


def two_gpus() -> State:
    """Two GPUs of 50 and 80 %, 200 and 300 W."""
    return State(
        epoch=time.time(),
        gpus=(a100(0, util=50, power=200), a100(1, util=80, power=300)),
    )


def powers(answer: Answer) -> list[float]:
    """What the GPUs draw."""
    return sorted(answer.of("hpml_gpu_power_watts"))


def test_a_gpu_falls_off_the_bus_and_comes_back(
    exporter: StartExporter, gpusim: Gpusim, prometheus: BootPrometheus
) -> None:
    """Its own series go and the other GPU's stay; it counts as lost, and is found again."""
    state = gpusim.write(two_gpus())
    uuids = [gpu.uuid for gpu in state.gpus]
    here = exporter(gpus=gpusim)
    server = prometheus([static("node", here.address)])
    here.wait_for(lambda answer: powers(answer) == [200.0, 300.0])
    state = gpusim.write(state.changed(0, lost=1, events=(Event(1, 79, XID),)))
    gone = here.wait_for(lambda answer: powers(answer) == [300.0])
    assert gone.of("hpml_gpu_up", uuid=uuids[0]) == [0.0]
    assert gone.of("hpml_gpu_up", uuid=uuids[1]) == [1.0]
    assert gone.of("hpml_gpus", state="lost") == [1.0]
    told = server.wait_for("hpml_gpu_xid_errors_total")
    assert [(one.labels["uuid"], one.labels["xid"], one.value) for one in told] == [
        (uuids[0], "79", 1.0)
    ]
    assert server.query(f'hpml_gpu_up{{uuid="{uuids[0]}"}} == 0')
    gpusim.write(state.changed(0, lost=0))
    # not every driver brings one back without a new start: it is tried again and again
    back = here.wait_for(lambda answer: powers(answer) == [200.0, 300.0])
    assert back.of("hpml_gpus", state="lost") == [0.0]
    assert here.process.poll() is None


def test_the_driver_goes_and_comes_back(exporter: StartExporter, gpusim: Gpusim) -> None:
    """Unloaded and loaded again, with all handles invalid: GPUs are shown again automatically."""
    state = gpusim.write(two_gpus())
    here = exporter(gpus=gpusim)
    here.wait_for(lambda answer: powers(answer) == [200.0, 300.0])
    gpusim.path.unlink()
    here.wait_for(lambda answer: not powers(answer))
    gpusim.write(replace(state, generation=2).changed(0, power=250))
    here.wait_for(lambda answer: powers(answer) == [250.0, 300.0])
    assert here.process.poll() is None


def test_a_driver_call_that_hangs_takes_nothing_else_down(
    exporter: StartExporter, gpusim: Gpusim, prometheus: BootPrometheus
) -> None:
    """GPU series go and the rest stays and is answered; they come back with the call."""
    state = gpusim.write(two_gpus())
    rhythm = ("--job-interval", "1", "--process-interval", "1")
    here = exporter(*rhythm, "--stuck-seconds", "2", "--exit-seconds", "3000", gpus=gpusim)
    server = prometheus([static("node", here.address)])
    server.wait_for("hpml_gpu_power_watts", lambda found: len(found) == 2)
    gpusim.write(replace(state, faults=(Fault("nvmlDeviceGet*", 3000, kind="stuck"),)))
    server.wait_for('hpml_exporter_up{collector="gpu"} == 0')
    assert server.query("hpml_gpu_power_watts") == []
    assert server.value('hpml_exporter_up{collector="jobs"}') == 1
    assert server.value('hpml_exporter_stuck_readings_total{collector="gpu"}') == 1
    assert here.scrape().status == 200
    gpusim.write(state)
    here.wait_for(lambda answer: powers(answer) == [200.0, 300.0])
    assert here.process.poll() is None


def test_a_driver_call_that_hangs_ends_the_process_for_its_supervisor(
    exporter: StartExporter, gpusim: Gpusim
) -> None:
    """After the grace it ends with 75, whatever the thread in the driver does."""
    state = gpusim.write(two_gpus())
    here = exporter("--stuck-seconds", "2", "--exit-seconds", "3", gpus=gpusim)
    here.wait_for(lambda answer: powers(answer) == [200.0, 300.0])
    gpusim.write(replace(state, faults=(Fault("nvmlDeviceGet*", 3000, kind="stuck"),)))
    assert here.process.wait(240) == EX_TEMPFAIL


def test_without_nvml_everything_else_is_shown(
    exporter: StartExporter, prometheus: BootPrometheus
) -> None:
    """No library, no GPU series, no failure: the collector is up and not present."""
    here = exporter()
    server = prometheus([static("node", here.address)])
    server.wait_for('hpml_exporter_collector_present{collector="jobs"} == 1')
    assert server.value('hpml_exporter_up{collector="gpu"}') == 1
    assert server.value('hpml_exporter_collector_present{collector="gpu"}') == 0
    assert server.query('{__name__=~"hpml_gpu_.+"}') == []
    assert [one["health"] for one in server.targets()] == ["up"]
