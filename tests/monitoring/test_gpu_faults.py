"""Simulated GPUs and drivers that are lost, stuck, reloaded or missing."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from deploy.gpusim.gpusim import Event, Fault, Simulator, State, a100
from tests.monitoring.gpu_support import UP, Start


def test_a_lost_gpu_takes_no_other_down_and_comes_back(
    gpu_collector: Start, gpusim_library: Simulator
) -> None:
    """Its numbers go, `up` says 0, the XID error that tells why stays; later it is there again."""
    state = State(gpus=(a100(0, util=100), a100(1, util=50), a100(2, util=25)))
    running = gpu_collector(state, retry=(0.0, 0.0), options={"gpu_interval": 0.1})
    running.do("jobs", jobs=[{"jobid": "1", "gpus": ["0", "1"], "pids": []}])
    lost = state.gpus[1].uuid
    for _ in range(4):
        running.sample()
        time.sleep(0.1)
    before = running.sample()
    broken = state.changed(1, events=(Event(1, 79),))
    gpusim_library.write(broken, running.path)
    assert running.sample().one("hpml_gpu_xid_errors_total", uuid=lost, xid="79") == 1
    gpusim_library.write(broken.changed(1, lost=1), running.path)
    for _ in range(3):
        seen = running.sample()
        assert seen.error == ""
        assert {labels["uuid"]: number for labels, number in seen.all(UP)} == {
            state.gpus[0].uuid: 1,
            lost: 0,
            state.gpus[2].uuid: 1,
        }
        assert (seen.one("hpml_gpus", state="up"), seen.one("hpml_gpus", state="lost")) == (2, 1)
        assert not seen.all("hpml_gpu_utilization_ratio", uuid=lost)
        assert not seen.all("hpml_gpu_busy_seconds_total", uuid=lost)
        assert seen.one("hpml_gpu_info", uuid=lost) == 1
        assert seen.one("hpml_gpu_xid_errors_total", uuid=lost, xid="79") == 1
        assert seen.one("hpml_job_gpus_allocated", jobid="1") == 2, "allocated still"
        assert seen.one("hpml_gpu_utilization_ratio", uuid=state.gpus[2].uuid) == 0.25
        time.sleep(0.1)
    gpusim_library.write(state, running.path)
    seen = running.sample()
    assert [number for _, number in seen.all(UP)] == [1, 1, 1]
    assert seen.one("hpml_gpu_utilization_ratio", uuid=lost) == 0.5
    busy = "hpml_gpu_busy_seconds_total"
    for gpu in state.gpus:
        assert seen.one(busy, uuid=gpu.uuid) >= before.one(busy, uuid=gpu.uuid) > 0, "no reset"


def test_a_lost_gpu_is_looked_for_ever_more_rarely(
    gpu_collector: Start, gpusim_library: Simulator
) -> None:
    """Looking means to give the driver back for a moment: after 5 s, 10, 20 and so on to 300."""
    state = State(gpus=(a100(0), a100(1)))
    running = gpu_collector(state)
    running.sample()
    gpusim_library.write(state.changed(1, lost=1), running.path)
    running.sample()
    running.calls.write_text("")
    for ahead in range(2, 1802):
        running.sample(ahead=ahead)
    tries = running.calls.read_text().split().count("nvmlInitWithFlags")
    # 5 + 10 + 20 + 40 + 80 + 160 = 315, and then every 300 of the 1800 seconds
    assert 9 <= tries <= 12
    gpusim_library.write(state, running.path)
    seen = running.sample(ahead=1801 + 301)
    assert [number for _, number in seen.all(UP)] == [1, 1]


def test_a_gpu_without_a_handle_takes_no_other_down(gpu_collector: Start) -> None:
    """No power cable (code 8): counted as lost; no permission (4): none of our business."""
    for code, lost in ((8, 1), (4, 0)):
        fault = Fault("nvmlDeviceGetHandle", code, gpu=1)
        running = gpu_collector(State(gpus=(a100(0), a100(1), a100(2)), faults=(fault,)))
        seen = running.sample()
        assert seen.error == ""
        assert len(seen.all(UP)) == 2
        assert seen.one("hpml_gpus", state="lost") == lost


def test_all_gpus_lost_and_back(gpu_collector: Start, gpusim_library: Simulator) -> None:
    """Even then the exporter says which ones they were."""
    state = State(gpus=(a100(0), a100(1)))
    running = gpu_collector(state, retry=(0.0, 0.0))
    running.sample()
    gpusim_library.write(replace(state, lost=True), running.path)
    for _ in range(3):
        assert [number for _, number in running.sample().all(UP)] == [0, 0]
    gpusim_library.write(state, running.path)
    assert [number for _, number in running.sample().all(UP)] == [1, 1]


def test_gpus_that_are_lost_from_the_beginning_are_counted(gpu_collector: Start) -> None:
    """They have no name yet, but they are not nothing."""
    running = gpu_collector(State(gpus=(a100(0), a100(1, lost=1))))
    seen = running.sample()
    assert (seen.one("hpml_gpus", state="up"), seen.one("hpml_gpus", state="lost")) == (1, 1)


def test_xid_errors_are_counted_with_their_time(
    gpu_collector: Start, gpusim_library: Simulator
) -> None:
    """`time() - last < 300` is what alerts ask; the first one is seen too."""
    state = State(gpus=(a100(0), a100(1)))
    running = gpu_collector(state)
    assert not running.sample().all("hpml_gpu_xid_errors_total")
    events = (Event(1, 48), Event(2, 63), Event(3, 48))
    gpusim_library.write(state.changed(1, events=events), running.path)
    began = time.time()
    seen = running.sample()
    uuid = state.gpus[1].uuid
    assert {
        (labels["uuid"], labels["xid"]): number
        for labels, number in seen.all("hpml_gpu_xid_errors_total")
    } == {(uuid, "48"): 2, (uuid, "63"): 1}
    last = seen.one("hpml_gpu_xid_last_timestamp_seconds", xid="48")
    assert began <= last <= time.time()
    later = running.sample()
    assert later.one("hpml_gpu_xid_errors_total", xid="48") == 2
    assert later.one("hpml_gpu_xid_last_timestamp_seconds", xid="48") == last


def test_what_fails_in_the_beginning_is_tried_again(
    gpu_collector: Start, gpusim_library: Simulator
) -> None:
    """No data yet is not the same as not supported."""
    state = State(gpus=(a100(0, mem_temp=66, util=12),))
    early = (Fault("field:82", 21), Fault("nvmlDeviceGetUtilizationRates", 27))
    running = gpu_collector(replace(state, faults=early), look=0.0)
    seen = running.sample()
    assert not seen.all("hpml_gpu_memory_temperature_celsius")
    assert not seen.all("hpml_gpu_utilization_ratio")
    gpusim_library.write(state, running.path)
    seen = running.sample()
    assert seen.one("hpml_gpu_memory_temperature_celsius") == 66
    assert seen.one("hpml_gpu_utilization_ratio") == 0.12


def test_a_driver_that_was_loaded_again(gpu_collector: Start, gpusim_library: Simulator) -> None:
    """The collector says so and, made anew, works."""
    state = State(gpus=(a100(0, util=30),))
    running = gpu_collector(state)
    running.sample()
    gpusim_library.write(replace(state, generation=2), running.path)
    assert running.sample().error == "DriverLostError"
    running.do("close")
    running.do("make")
    assert running.sample().one("hpml_gpu_utilization_ratio") == 0.3


def test_a_driver_that_goes_and_comes(gpu_collector: Start, gpusim_library: Simulator) -> None:
    """Unloaded: lost, then not here; loaded: as if nothing had been."""
    state = State(gpus=(a100(0, util=30),))
    running = gpu_collector(state)
    running.sample()
    running.path.unlink()
    assert running.sample().error == "DriverLostError"
    for _ in range(2):
        running.do("close")
        running.do("make")
        assert running.sample().error == "NotHereError"
    gpusim_library.write(replace(state, generation=2), running.path)
    running.do("make")
    assert running.sample().one("hpml_gpu_utilization_ratio") == 0.3


@pytest.mark.parametrize("why", ["driverless", "unloaded", "no nvitop", "no gpu"])
def test_nothing_to_read_is_no_failure(gpu_collector: Start, why: str) -> None:
    """No library, no driver, no nvitop or no GPU: one sentence, and nothing on stderr."""
    running = {
        "driverless": lambda: gpu_collector(None, driverless=True),
        "unloaded": lambda: gpu_collector(None),
        "no nvitop": lambda: gpu_collector(State(gpus=(a100(0),)), hide="nvitop"),
        "no gpu": lambda: gpu_collector(State(gpus=())),
    }[why]()
    seen = running.sample()
    assert seen.error == "NotHereError", seen.text
    assert seen.text
    running.do("close")
    if why == "driverless":
        loaded = set(running.do("modules")["modules"])
        assert not loaded & {"nvitop", "pynvml", "psutil"}, "heavy, and for nothing"
    assert running.end() == ""


def test_closing_does_not_wait_for_a_stuck_driver(
    gpu_collector: Start, gpusim_library: Simulator
) -> None:
    """A call that hangs for a minute; the collector is given up at once and cleans up later."""
    state = State(gpus=(a100(0),))
    running = gpu_collector(state)
    running.sample()
    stuck = Fault("nvmlDeviceGetUtilizationRates", 60, kind="stuck")
    gpusim_library.write(replace(state, faults=(stuck,)), running.path)
    answer = running.do("stuck", wait=0.5)
    assert answer["hung"]
    assert answer["seconds"] < 5
    gpusim_library.write(state, running.path)
    assert running.do("ended", within=20)["ended"]
    running.do("make")
    assert running.sample().one(UP) == 1


def test_ending_does_not_wait_for_a_stuck_shutdown(
    gpu_collector: Start, gpusim_library: Simulator
) -> None:
    """Giving back is a call of the driver too."""
    state = State(gpus=(a100(0),))
    running = gpu_collector(state)
    running.sample()
    stuck = Fault("nvmlShutdown", 60, kind="stuck")
    gpusim_library.write(replace(state, faults=(stuck,)), running.path)
    assert running.do("close")["seconds"] < 5
