"""Simulated GPUs and drivers that are lost, reloaded or missing."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.gpusim.gpusim import Event, Fault, Simulator, State, a100, divided, h100
from tests.monitoring.gpu_support import ALL, UP, Answer, Start, pci_device


def test_a_lost_gpu_takes_no_other_down_and_comes_back(
    gpu_collector: Start, gpusim_library: Simulator
) -> None:
    """Its values go, `up` is 0, the XID error with the cause remains; later the GPU is back."""
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
    for ahead in range(2, 702):
        running.sample(ahead=ahead)
    tries = running.calls.read_text().split().count("nvmlInitWithFlags")
    # 5 + 10 + 20 + 40 + 80 + 160 = 315, and 300 later the seventh
    assert tries == 7
    gpusim_library.write(state, running.path)
    seen = running.sample(ahead=701 + 301)
    assert [number for _, number in seen.all(UP)] == [1, 1]


def test_a_gpu_that_comes_and_goes_is_no_endless_restart(
    gpu_collector: Start, gpusim_library: Simulator
) -> None:
    """Each attempt finds it and the next reading loses it: attempts still become rare."""
    state = State(gpus=(a100(0), a100(1)))
    lost = state.changed(1, lost=1)
    running = gpu_collector(state)
    running.sample()
    tries = 0
    for ahead in range(1, 400):
        gpusim_library.write(state if ahead % 2 else lost, running.path)
        running.calls.write_text("")
        running.sample(ahead=ahead)
        tries += "nvmlInitWithFlags" in running.calls.read_text()
    assert 3 <= tries <= 9


def test_an_instance_of_a_job_is_lost_with_its_gpu(
    gpu_collector: Start, gpusim_library: Simulator
) -> None:
    """A job has one instance: it is down, the neighbour's is not shown, and it comes back."""
    gpu = divided(h100(0), 3, 3)
    state = State(gpus=(gpu, h100(1)))
    own = gpu.mig[1].uuid
    running = gpu_collector(state, retry=(0.0, 0.0), options={"job": {"jobid": "1", "gpus": [own]}})
    running.do("jobs", jobs=[])
    assert running.sample().one("hpml_gpu_memory_total_bytes") == 40 << 30
    gpusim_library.write(state.changed(0, lost=1), running.path)
    for _ in range(3):
        seen = running.sample()
        assert [(labels["uuid"], number) for labels, number in seen.all(UP)] == [(own, 0)]
        assert seen.one("hpml_job_gpus_allocated", jobid="1") == 1
    gpusim_library.write(state, running.path)
    seen = running.sample()
    assert seen.one("hpml_gpu_memory_total_bytes", uuid=own) == 40 << 30
    assert 0 not in [number for _, number in seen.all(UP)]


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
    """They are lost in turn, during the search for the first; the exporter logs which ones."""
    state = State(gpus=(a100(0), a100(1), a100(2)))
    running = gpu_collector(state, retry=(0.0, 0.0))
    running.sample()
    first = state.changed(0, lost=1)
    for now, up in (
        (first, [0, 1, 1]),
        (first.changed(1, lost=1), [0, 0, 1]),
        *[(replace(state, lost=True), [0, 0, 0])] * 3,
    ):
        gpusim_library.write(now, running.path)
        seen = running.sample()
        shown = {labels["uuid"]: number for labels, number in seen.all(UP)}
        assert [shown[gpu.uuid] for gpu in state.gpus] == up
        assert seen.one("hpml_gpus", state="lost") == up.count(0)
    gpusim_library.write(state, running.path)
    assert [number for _, number in running.sample().all(UP)] == [1, 1, 1]


@pytest.mark.parametrize("named", [True, False])
def test_gpus_that_are_lost_from_the_beginning(
    gpu_collector: Start, gpusim_library: Simulator, tmp_path: Path, *, named: bool
) -> None:
    """They have no UUID yet, but sysfs has their addresses; later they have both."""
    state = State(gpus=(a100(0), a100(1)))
    addresses = [f"0000{gpu.bus_id}".lower() for gpu in state.gpus]
    for gpu in state.gpus if named else ():
        pci_device(tmp_path / "sys", gpu.bus_id.lower())
    running = gpu_collector(state.changed(1, lost=1), retry=(0.0, 0.0))
    seen = running.sample()
    assert (seen.one("hpml_gpus", state="up"), seen.one("hpml_gpus", state="lost")) == (1, 1)
    up = {labels["uuid"]: number for labels, number in seen.all(UP)}
    assert up == {state.gpus[0].uuid: 1, **({addresses[1]: 0} if named else {})}
    gpusim_library.write(state, running.path)
    seen = running.sample()
    up = {labels["uuid"]: number for labels, number in seen.all(UP)}
    assert up == dict.fromkeys([gpu.uuid for gpu in state.gpus], 1)
    assert seen.one("hpml_gpus", state="lost") == 0


def test_looking_for_a_lost_gpu_hides_nothing_of_the_others(
    gpu_collector: Start, gpusim_library: Simulator
) -> None:
    """The driver is reopened for it; GPM, PCIe and instances of healthy GPUs continue."""
    state = State(gpus=(ALL, divided(h100(1, minor=1), 3), a100(2, minor=2)))
    running = gpu_collector(state, retry=(2.0, 2.0))
    for ahead in range(3):
        before = running.sample(ahead=ahead)
    lost = state.gpus[2].uuid
    healthy = {
        (name, *labels.values())
        for name, labels, _ in before.series
        if labels.get("uuid", lost) != lost
    }
    assert ("hpml_gpu_sm_active_ratio", ALL.uuid) in healthy
    gpusim_library.write(state.changed(2, lost=1), running.path)
    for ahead in range(3, 9):
        seen = running.sample(ahead=ahead)
        assert healthy <= {(name, *labels.values()) for name, labels, _ in seen.series}
    name = "hpml_gpu_pcie_bytes_total"
    grown = [one.one(name, uuid=ALL.uuid, direction="transmit") for one in (before, seen)]
    assert grown[1] - grown[0] >= 5.8 * 3e9, "nothing of the time between is missing"


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


def test_xid_errors_outlive_the_exporter_until_the_driver_is_loaded_again(
    gpu_collector: Start, gpusim_library: Simulator, tmp_path: Path
) -> None:
    """A GPU that had one may still need a reset; a loaded driver begins anew."""
    run, module = tmp_path / "run", tmp_path / "sys/module/nvidia"
    run.mkdir()
    module.mkdir(parents=True)
    roots = {"sys": str(tmp_path / "sys"), "run": str(run)}
    state = State(gpus=(a100(0), a100(1)))
    running = gpu_collector(state, options={"roots": roots})
    running.sample()
    gpusim_library.write(state.changed(1, events=(Event(1, 79),)), running.path)
    first = running.sample().all("hpml_gpu_xid_last_timestamp_seconds")
    gpusim_library.write(state, running.path)
    running.do("renew")
    seen = running.sample()
    assert seen.all("hpml_gpu_xid_last_timestamp_seconds") == first
    assert seen.one("hpml_gpu_xid_errors_total", uuid=state.gpus[1].uuid, xid="79") == 1
    module.rename(tmp_path / "old")  # so that its number is not given again
    module.mkdir()
    running.do("renew")
    assert running.sample().all("hpml_gpu_xid_errors_total") == []
    (run / "xids.json").write_text('{"driver": 1, "xids": [[')
    running.do("renew")
    assert running.sample().error == ""


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
    for second in range(1, 6):  # temperatures are read every five seconds
        seen = running.sample(ahead=second)
    assert seen.one("hpml_gpu_memory_temperature_celsius") == 66
    assert seen.one("hpml_gpu_utilization_ratio") == 0.12


def test_what_was_counted_outlives_the_driver(
    gpu_collector: Start, gpusim_library: Simulator
) -> None:
    """Counted since the exporter started, as in their help, with the XID error that led to it."""
    state = State(gpus=(a100(0, util=100),))
    running = gpu_collector(state)
    running.sample()
    gpusim_library.write(state.changed(0, events=(Event(1, 119),)), running.path)
    before = running.sample(ahead=1)
    gpusim_library.write(replace(state, generation=2), running.path)
    assert running.sample(ahead=2).error == "DriverLostError"
    running.do("close")
    running.do("make")
    after = running.sample(ahead=600)
    for name in ("hpml_gpu_xid_errors_total", "hpml_gpu_xid_last_timestamp_seconds"):
        assert after.one(name, xid="119") == before.one(name, xid="119")
    busy = "hpml_gpu_busy_seconds_total"
    assert after.one(busy) == before.one(busy) >= 1


def test_a_driver_that_goes_and_comes(gpu_collector: Start, gpusim_library: Simulator) -> None:
    """Unloaded under a working exporter it is a failure until it is loaded again."""
    state = State(gpus=(a100(0, util=30),))
    running = gpu_collector(state)
    running.sample()
    running.path.unlink()
    assert running.sample().error == "DriverLostError"
    for _ in range(2):
        running.do("close")
        running.do("make")
        seen = running.sample()
        assert (seen.error, "GPUs were read before" in seen.text) == ("DriverLostError", True)
    gpusim_library.write(replace(state, generation=2), running.path)
    running.do("make")
    assert running.sample().one("hpml_gpu_utilization_ratio") == 0.3


def test_a_new_driver_is_read_with_its_own_library(
    gpu_collector: Start, gpusim_library: Simulator, tmp_path: Path
) -> None:
    """After an upgrade the library in memory is the old one (code 18): the new file is loaded."""
    shutil.copytree(gpusim_library.cache, tmp_path / "cache")
    own = replace(gpusim_library, cache=tmp_path / "cache")
    library = own.build() / "libnvidia-ml.so.1"
    state = State(gpus=(a100(0, util=30),))
    running = gpu_collector(replace(state, faults=(Fault("nvmlInit*", 18),)), driver=own)
    assert running.sample().error == "DriverLostError", "a fault that somebody has to see"
    shutil.copy(library, tmp_path / "new")
    (tmp_path / "new").replace(library)
    own.write(state, running.path)
    running.do("make")
    assert running.sample().one("hpml_gpu_utilization_ratio") == 0.3
    assert running.do("libraries")["libraries"] == [str(library)]


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


@pytest.mark.parametrize("why", ["driverless", "unloaded", "no gpu"])
def test_a_gpu_without_a_driver_is_a_failure(
    gpu_collector: Start, tmp_path: Path, why: str
) -> None:
    """The kernel sees the hardware: `up` has to be 0, unless it was given to a virtual machine."""
    pci_device(tmp_path / "sys", "0000:3b:00.0", driver="vfio-pci")

    def start(**settings: object) -> Answer:
        state = State(gpus=()) if why == "no gpu" else None
        return gpu_collector(state, driverless=why == "driverless", **settings).sample()

    assert start().error == "NotHereError"
    pci_device(tmp_path / "sys", "0000:af:00.0")
    seen = start()
    assert (seen.error, "00000000:af:00.0" in seen.text) == ("DriverLostError", True)
    in_job = {"job": {"jobid": "1", "gpus": []}}
    assert start(options={**in_job, "roots": {"sys": str(tmp_path / "sys")}}).error == (
        "NotHereError"
    )
