"""Calls that a simulated GPU or driver does not have, and what takes their place."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from deploy.gpusim.gpusim import OLD_DRIVER, Fault, Process, Simulator, State, a100, h100
from tests.monitoring.gpu_support import ALL, GIB, UP, Answer, Start

# Metrics that are missing if a call is not supported, because they have no other source.
GOES = {
    "nvmlDeviceGetUtilizationRates": {
        "utilization_ratio", "memory_utilization_ratio", "busy_seconds_total",
    },
    "nvmlDeviceGetMemoryInfo*": {"memory_used_bytes", "memory_total_bytes"},
    "nvmlGpm*": {
        "sm_active_ratio", "sm_occupancy_ratio", "tensor_active_ratio", "dram_active_ratio",
    },
    "nvmlDeviceGetTemperature*": {"temperature_celsius", "temperature_limit_celsius"},
    "nvmlDeviceGetTemperatureV": set(),
    "nvmlDeviceGetEnforcedPowerLimit": {"power_limit_watts"},
    "nvmlDeviceGetClockInfo": {"clock_hertz"},
    "nvmlDeviceGetPowerUsage": set(),
    "nvmlDeviceGetTotalEnergyConsumption": set(),
    "nvmlDeviceGetCurrentClocks*": {"throttled_seconds_total"},
    "nvmlDeviceGetEncoderUtilization": {"encoder_utilization_ratio"},
    "nvmlDeviceGetComputeRunningProcesses*": {"processes"},
    "nvmlDeviceGet*RunningProcesses*": {"processes"},
    "nvmlDeviceGetMinorNumber": set(),
    "nvmlDeviceGetMigMode": set(),
    "nvmlDeviceGetPciInfo*": set(),
    "nvmlEventSetCreate": set(),
    "nvmlDeviceRegisterEvents": set(),
    "nvmlEventSetWait*": set(),
    "nvmlDeviceGetFieldValues": {  # GPM has the rest
        "memory_temperature_celsius", "ecc_errors_total", "retired_pages_pending",
        "pcie_replays_total", "recovery_action",
        "nvlink_links", "nvlink_links_active", "nvlink_errors_total",
        "remapped_rows", "remapped_rows_pending", "remapped_rows_failed",
    },
    "field:186": set(),
    "field:83": set(),
    "field:82": {"memory_temperature_celsius"},
    "field:3": set(),
    "field:[34]": {"ecc_errors_total"},
    "field:94": {"pcie_replays_total"},
    "field:14[23]": {"remapped_rows"},
    "field:197": set(),
    "field:138": set(),
}  # fmt: skip


def test_each_call_may_be_missing(gpu_collector: Start, gpusim_library: Simulator) -> None:
    """Not supported, no permission, unknown: the others continue, fallbacks work, no error."""
    state = State(gpus=(ALL, a100(1)))
    running = gpu_collector(state)

    def look() -> Answer:
        running.do("renew")
        running.sample()
        time.sleep(0.02)
        return running.sample(ahead=1)

    whole = look().names()
    assert len(whole) > 25
    for function, goes in GOES.items():
        for code in (3, 4, 999):
            gpusim_library.write(replace(state, faults=(Fault(function, code),)), running.path)
            seen = look()
            assert seen.error == "", (function, code, seen.text)
            assert [number for _, number in seen.all(UP)] == [1, 1], (function, code)
            gone = whole - seen.names()
            assert gone == {f"hpml_gpu_{one}" for one in goes}, (function, code)


def test_a_rate_that_gpm_does_not_have_is_counted_otherwise(gpu_collector: Start) -> None:
    """GPM is there, its metrics of PCIe are not: the counters of 32 bits are left."""
    slow = ALL.changed(pcie_tx=3_000_000, pcie_rx=5_000_000)  # they wrap after 14 minutes
    state = State(gpus=(slow,), faults=(Fault("gpm:2[01]", 3),))
    running = gpu_collector(state, look=0.0, options={"gpu_interval": 60.0})
    running.sample()
    for _ in range(3):
        time.sleep(0.2)
        before = running.sample()
    time.sleep(0.4)
    after = running.sample()
    assert after.one("hpml_gpu_sm_active_ratio") == 0.44, "the other GPM metrics continue"
    name = "hpml_gpu_pcie_bytes_total"
    for direction, rate in (("transmit", 3e6), ("receive", 5e6)):
        grown = [one.one(name, direction=direction) for one in (before, after)]
        seconds = [after.began - before.ended, after.ended - before.began]
        assert rate * seconds[0] * 0.99 <= grown[1] - grown[0] <= rate * seconds[1] * 1.01


@pytest.mark.parametrize("code", [4, 999])
def test_a_gpu_that_answers_nothing_but_errors_is_not_up(
    gpu_collector: Start, gpusim_library: Simulator, code: int
) -> None:
    """No permission, or what some drivers say of a GPU that is gone: no old values are shown."""
    state = State(gpus=(a100(0), a100(1)))
    running = gpu_collector(state)
    running.sample()
    silent = state.gpus[0].uuid
    gpusim_library.write(replace(state, faults=(Fault("nvmlDevice*", code, gpu=0),)), running.path)
    for ahead in range(1, 4):
        seen = running.sample(ahead=ahead)
        up = {labels["uuid"]: number for labels, number in seen.all(UP)}
        assert up == {silent: 0, state.gpus[1].uuid: 1}
        assert {name for name, labels, _ in seen.series if labels.get("uuid") == silent} <= {
            *("hpml_gpu_info", "hpml_gpu_processes", UP)
        }
        assert seen.one("hpml_gpus", state="lost") == 1
    gpusim_library.write(state, running.path)
    assert running.sample(ahead=4).one(UP, uuid=silent) == 1


def test_a_field_without_data_rebuilds_nothing(gpu_collector: Start) -> None:
    """It is asked again at its period; GPM's samples and the other readings stay as they are."""
    state = State(gpus=(ALL,), faults=(Fault("field:82", 21),))
    running = gpu_collector(state, look=0.0)
    running.sample()
    running.calls.write_text("")
    for ahead in range(1, 8):
        assert not running.sample(ahead=ahead).all("hpml_gpu_memory_temperature_celsius")
    assert "nvmlGpmSampleAlloc" not in running.calls.read_text()


@pytest.mark.parametrize(
    ("state", "active"), [(0, 0), (1, 18), (2, 18), (3, 0)], ids=["down", "up", "asleep", "blocked"]
)
def test_links_are_counted_by_their_state(gpu_collector: Start, state: int, active: int) -> None:
    """A sleeping link works when it is used; one whose traffic is disabled does not."""
    seen = gpu_collector(State(gpus=(h100(0, nvlink_state=state),))).sample()
    assert seen.one("hpml_gpu_nvlink_links_active") == active


def test_a_link_without_data_lowers_no_sum(gpu_collector: Start, gpusim_library: Simulator) -> None:
    """The number of active links is unknown then; 17 of 18 would be a broken one."""
    name, state = "hpml_gpu_nvlink_links_active", State(gpus=(h100(0),))
    running = gpu_collector(state)
    assert running.sample().one(name) == 18
    silent = replace(state, faults=(Fault("field:165:17", 21),))
    gpusim_library.write(silent, running.path)
    assert [running.sample(ahead=ahead).all(name) for ahead in range(60)][-1] == []
    gpusim_library.write(state, running.path)
    assert [running.sample(ahead=60 + ahead) for ahead in range(60)][-1].one(name) == 18


def test_errors_of_links_on_hopper_and_blackwell(gpu_collector: Start) -> None:
    """Where the driver has no sums over all links, those of each link are added up."""
    hopper = h100(0, nvlink_crc=1, nvlink_replay=2, nvlink_recovery=3)
    newer: dict[str, Any] = {"nvlink_crc": None, "nvlink_replay": None, "nvlink_recovery": None}
    blackwell = h100(1, **newer, nvlink_field206=4, nvlink_field214=5, nvlink_field215=6)
    older = tuple(Fault(f"field:{field}", 3) for field in (38, 52, 59))
    seen = gpu_collector(State(gpus=(hopper, blackwell), faults=older)).sample()
    errors = {
        (labels["uuid"] == hopper.uuid, labels["type"]): number
        for labels, number in seen.all("hpml_gpu_nvlink_errors_total")
    }
    assert errors == {
        (True, "crc"): 18,
        (True, "replay"): 36,
        (True, "recovery"): 54,
        (False, "malformed"): 72,
        (False, "recovery_failed"): 90,
        (False, "recovery"): 108,
    }


def test_activity_that_is_not_a_number_is_not_shown(
    gpu_collector: Start, gpusim_library: Simulator
) -> None:
    """As GPM answers while a GPU wakes up: the last value would look like a measured one."""
    name, state = "hpml_gpu_sm_active_ratio", State(gpus=(h100(0, gpm_sm=50),))
    running = gpu_collector(state)
    running.sample()
    assert running.sample(ahead=1).one(name) == 0.5
    gpusim_library.write(replace(state, gpus=(h100(0, gpm_sm="nan"),)), running.path)
    assert not running.sample(ahead=2).all(name)


@pytest.mark.parametrize(
    ("setting", "impossible", "names"),
    [
        ("util", 250, ("utilization_ratio",)),
        ("util", 4294967295, ("utilization_ratio",)),
        ("temp", 4294967295, ("temperature_celsius",)),
        ("mem_temp", 65535, ("memory_temperature_celsius",)),
        ("power", 4000000, ("power_watts",)),
        ("clock_sm", 4294967295, ("clock_hertz",)),
        ("gpm_sm", 40000, ("sm_active_ratio",)),
        ("ecc_vol_unc", 4294967295, ("ecc_errors_total",)),
        ("pcie_replay", 4294967295, ("pcie_replays_total",)),
        ("nvlink_state", 255, ("nvlink_links_active",)),
        ("recovery_action", 4294967295, ("recovery_action",)),
    ],
)
def test_what_no_gpu_can_do_is_unknown(
    gpu_collector: Start,
    gpusim_library: Simulator,
    setting: str,
    impossible: float,
    names: tuple[str, ...],
) -> None:
    """Neither shown nor added to a total, for that reading only: the next one is shown again."""
    state = State(gpus=(ALL,), faults=(Fault("field:83", 3), Fault("nvmlDeviceGetTotalE*", 3)))
    running = gpu_collector(state, options={"gpu_interval": 300.0})  # every figure at each reading
    running.sample()
    before = running.sample(ahead=10)
    gpusim_library.write(state.changed(0, **{setting: impossible}), running.path)
    seen = running.sample(ahead=20)
    gpusim_library.write(state, running.path)
    running.sample(ahead=29)  # GPM compares with the sample before
    after = running.sample(ahead=30)
    for name in names:
        whole = before.all(f"hpml_gpu_{name}")
        assert len(seen.all(f"hpml_gpu_{name}")) == len(whole) - 1, "the other series stay"
        assert sorted(after.all(f"hpml_gpu_{name}"), key=str) == sorted(whole, key=str)
    for name, rate in (("energy_joules_total", 333), ("busy_seconds_total", 0.4)):
        grown = after.one(f"hpml_gpu_{name}") - before.one(f"hpml_gpu_{name}")
        assert grown <= rate * (20 + after.ended - before.began)


@pytest.mark.parametrize("code", [3, 4, 15, 999])
def test_processes_that_cannot_be_read_are_not_zero(
    gpu_collector: Start, gpusim_library: Simulator, code: int
) -> None:
    """Neither for the GPU nor for its job; they return once the driver reports them again."""
    gpus = (a100(0, processes=(Process(5, GIB, ghost=True),)), a100(1))
    state = State(gpus=gpus)
    running = gpu_collector(state, options={"process_interval": 10})
    running.do("jobs", jobs=[{"jobid": "1", "gpus": [gpus[0].uuid], "pids": [5]}])
    names = {"hpml_gpu_processes", "hpml_job_gpu_processes", "hpml_job_gpu_memory_used_bytes"}

    def shown(ahead: float) -> set[str]:
        seen = running.sample(ahead=ahead)
        assert seen.one("hpml_job_gpus_allocated", jobid="1") == 1
        used = {"used"} if seen.all("hpml_job_gpus_used", jobid="1") else set()
        of_gpu = {name for name in names if seen.all(name, uuid=gpus[0].uuid)}
        assert seen.one("hpml_gpu_processes", uuid=gpus[1].uuid, owner="job") == 0
        return of_gpu | used

    assert shown(0) == names | {"used"}
    fault = Fault("nvmlDeviceGet*RunningProcesses*", code, gpu=0)
    gpusim_library.write(replace(state, faults=(fault,)), running.path)
    assert shown(11) == set()
    gpusim_library.write(state, running.path)
    assert shown(22) == names | {"used"}


def test_an_old_driver(gpu_collector: Start) -> None:
    """Symbols of the last five years are missing in the library."""
    gpu = a100(0, util=70, processes=(Process(5, GIB, ghost=True),), throttle_hw_power_brake=1)
    options = {"gpu_interval": 10.0}  # every figure of every ten seconds at each reading
    old = Simulator(without=OLD_DRIVER)
    running = gpu_collector(State(gpus=(gpu,)), driver=old, options=options)
    running.do("jobs", jobs=[])
    first = running.sample()
    seen = running.sample(ahead=10)
    assert seen.one("hpml_gpu_utilization_ratio") == 0.7
    assert seen.one("hpml_gpu_temperature_celsius") == 35
    assert seen.one("hpml_gpu_memory_total_bytes") == 80 * GIB
    throttled = seen.one("hpml_gpu_throttled_seconds_total", reason="power_brake")
    assert 10 <= throttled <= 10 + seen.ended - first.began
    assert seen.one("hpml_gpu_processes", owner="none") == 1
    running.do("close")
    assert running.end() == "", "nvitop warns about each missing function"


@pytest.mark.parametrize("interval", [0.2, 5.0])
def test_energy_from_power_is_whole_at_any_interval(gpu_collector: Start, interval: float) -> None:
    """A reading covers the whole time since the previous one, however rare readings are."""
    faults = (Fault("field:83", 3), Fault("nvmlDeviceGetTotalEnergyConsumption", 3))
    state = State(gpus=(a100(0, power=200),), faults=faults)
    running = gpu_collector(state, options={"gpu_interval": interval})
    first = running.sample()
    last = [running.sample(ahead=number * interval) for number in range(1, 11)][-1]
    energy = [one.one("hpml_gpu_energy_joules_total") for one in (first, last)]
    told = 200 * 10 * interval
    assert told <= energy[1] - energy[0] <= told + 200 * (last.ended - first.began)
