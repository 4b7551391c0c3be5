"""What the GPU collector reads from simulated GPUs, compared with their state file."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from deploy.gpusim.gpusim import Simulator, Square, State, a100, integral, value
from tests.monitoring.gpu_support import ALL, GIB, UP, Start

# A reading counts for at most 2.5 intervals, and on a stalled machine the tenths of a second
# between two readings here become longer gaps. So the collector's interval is set to a minute,
# and the tests read more often.
NO_GAP_SECONDS = 60.0


def test_gauges_are_what_the_state_says(gpu_collector: Start) -> None:
    """Every gauge of a Hopper GPU, in base units."""
    running = gpu_collector(State(gpus=(ALL,)))
    running.sample()
    time.sleep(0.2)
    seen = running.sample()
    expected = {
        (UP, ""): 1,
        ("hpml_gpu_utilization_ratio", ""): 0.40,
        ("hpml_gpu_memory_utilization_ratio", ""): 0.20,
        ("hpml_gpu_memory_used_bytes", ""): 7 * GIB,
        ("hpml_gpu_memory_total_bytes", ""): 80 * GIB,
        ("hpml_gpu_sm_active_ratio", ""): 0.44,
        ("hpml_gpu_sm_occupancy_ratio", ""): 0.33,
        ("hpml_gpu_tensor_active_ratio", ""): 0.22,
        ("hpml_gpu_dram_active_ratio", ""): 0.11,
        ("hpml_gpu_power_watts", ""): 333,
        ("hpml_gpu_power_limit_watts", ""): 650,
        ("hpml_gpu_temperature_celsius", ""): 61,
        ("hpml_gpu_memory_temperature_celsius", ""): 72,
        ("hpml_gpu_clock_hertz", "sm"): 1.7e9,
        ("hpml_gpu_clock_hertz", "memory"): 2.6e9,
        ("hpml_gpu_ecc_errors_total", "corrected"): 11,
        ("hpml_gpu_ecc_errors_total", "uncorrected"): 2,
        ("hpml_gpu_remapped_rows", "correctable"): 5,
        ("hpml_gpu_remapped_rows", "uncorrectable"): 6,
        ("hpml_gpu_remapped_rows_pending", ""): 1,
        ("hpml_gpu_remapped_rows_failed", ""): 0,
        ("hpml_gpu_pcie_replays_total", ""): 9,
        ("hpml_gpu_pcie_link_width", ""): 8,
        ("hpml_gpu_pcie_link_width_max", ""): 16,
        ("hpml_gpu_encoder_utilization_ratio", ""): 0.15,
        ("hpml_gpu_decoder_utilization_ratio", ""): 0.16,
        ("hpml_gpu_retired_pages_pending", ""): 1,
        ("hpml_gpu_recovery_action", ""): 4,
        ("hpml_gpu_temperature_limit_celsius", "core"): 92,
        ("hpml_gpu_temperature_limit_celsius", "memory"): 105,
        ("hpml_gpu_nvlink_links", ""): 18,
        ("hpml_gpu_nvlink_links_active", ""): 18,
        ("hpml_gpu_nvlink_errors_total", "crc"): 18 * 1,
        ("hpml_gpu_nvlink_errors_total", "replay"): 18 * 2,
        ("hpml_gpu_nvlink_errors_total", "recovery"): 18 * 3,
    }
    have = {
        (name, " ".join(value for key, value in labels.items() if key != "uuid")): number
        for name, labels, number in seen.series
        if labels.get("uuid") == ALL.uuid and name != "hpml_gpu_info"
    }
    assert {key: have.get(key) for key in expected} == pytest.approx(expected, rel=1e-3)
    assert [labels for labels, _ in seen.all("hpml_gpu_info")] == [
        {
            "uuid": ALL.uuid,
            "index": "0",
            "name": ALL.name,
            "pci_bus_id": f"0000{ALL.bus_id}".lower(),
            "minor": "5",
            "serial": ALL.serial,
            "mig": "",
            "parent": "",
            "gpu_instance": "",
        }
    ]
    assert seen.one("hpml_gpu_driver_info", version="550.90.07") == 1
    assert (seen.one("hpml_gpus", state="up"), seen.one("hpml_gpus", state="lost")) == (1, 0)


def test_counters_grow_as_their_rates_say(gpu_collector: Start) -> None:
    """Energy, throttled time, PCIe and NVLink between two readings: rate times time."""
    running = gpu_collector(State(gpus=(ALL,)), options={"gpu_interval": NO_GAP_SECONDS})
    running.sample()
    first = running.sample()
    for _ in range(5):
        time.sleep(0.2)
        last = running.sample()
    rates = {
        ("hpml_gpu_energy_joules_total", ""): 333,
        ("hpml_gpu_throttled_seconds_total", "power_brake"): 1,
        ("hpml_gpu_throttled_seconds_total", "sw_thermal"): 0,
        ("hpml_gpu_pcie_bytes_total", "transmit"): 3e9,
        ("hpml_gpu_pcie_bytes_total", "receive"): 5e9,
        ("hpml_gpu_nvlink_bytes_total", "transmit"): 18 * 1e9,
        ("hpml_gpu_nvlink_bytes_total", "receive"): 18 * 2e9,
        ("hpml_gpu_busy_seconds_total", ""): 0.40,
    }
    for (name, which), rate in rates.items():
        label = "reason" if "throttled" in name else "direction"
        labels = {label: which} if which else {}
        grown = last.one(name, **labels) - first.one(name, **labels)
        # each reading was somewhere between the two times that the child noted
        least, most = last.began - first.ended, last.ended - first.began
        assert 0.99 * rate * least - 0.01 <= grown <= 1.01 * rate * most + 0.01, (name, which)


def test_pcie_counters_that_wrap_are_added_up(
    gpu_collector: Start, gpusim_library: Simulator
) -> None:
    """Before Hopper there is a counter of 32 bits: four times around in these readings.

    It wraps after 715 s. Between two readings the state's clock advances by 300 s.
    """
    state = State(gpus=(a100(0, pcie_tx=6_000_000, pcie_rx=1_000_000),), epoch=time.time())
    running = gpu_collector(state, options={"gpu_interval": NO_GAP_SECONDS})
    first = running.sample()
    turns, step = 10, 300
    for turn in range(1, turns + 1):
        gpusim_library.write(replace(state, epoch=state.epoch - turn * step), running.path)
        last = running.sample()
    for direction, rate in (("transmit", 6e6), ("receive", 1e6)):
        name = "hpml_gpu_pcie_bytes_total"
        grown = last.one(name, direction=direction) - first.one(name, direction=direction)
        least, most = last.began - first.ended, last.ended - first.began
        assert rate * (turns * step + least) <= grown + 1 <= rate * (turns * step + most) + 2


def test_busy_time_is_the_integral_of_utilization(
    gpu_collector: Start, gpusim_library: Simulator
) -> None:
    """A GPU that works in bursts: what aliases as a gauge is right as a total.

    It is read once per simulated minute, regardless of the time that the test takes; each state is
    a snapshot of the curve at that moment.
    """
    bursts = Square(1800, 0, 100, 0, 0.5)
    state = State(gpus=(a100(0, util=0),))
    running = gpu_collector(state, options={"gpu_interval": 60.0})
    name = "hpml_gpu_busy_seconds_total"
    began = running.sample().one(name)
    minutes = 120
    for minute in range(1, minutes + 1):
        gpusim_library.write(state.changed(0, util=value(bursts, minute * 60)), running.path)
        last = running.sample(ahead=minute * 60)
    seconds = integral(bursts, minutes * 60) / 100
    assert seconds == minutes * 60 / 2
    assert last.one(name) - began == pytest.approx(seconds, rel=0.05)


@pytest.mark.parametrize(("gap", "added"), [(60, 60), (3600, 120)])
def test_a_gap_is_filled_for_two_minutes(gpu_collector: Start, gap: int, added: int) -> None:
    """A call that stalls for a minute must not look idle; after an hour the use is unknown."""
    running = gpu_collector(State(gpus=(a100(0, util=100),)))
    running.sample()
    second = running.sample(ahead=1)
    after = running.sample(ahead=1 + gap)
    name = "hpml_gpu_busy_seconds_total"
    more = after.ended - second.began
    assert added <= after.one(name) - second.one(name) + 0.01 <= added + more + 0.01


def test_throttled_time_has_one_reason_at_a_time(gpu_collector: Start) -> None:
    """The strongest of those at once, so that their sum is the time in which clocks were down."""
    cases = {
        "hw_slowdown": {"throttle_hw_slowdown": 1, "throttle_sw_power": 1},
        "hw_thermal": {"throttle_hw_slowdown": 1, "throttle_hw_thermal": 1},
        "sw_thermal": {"throttle_sw_thermal": 1, "throttle_sw_power": 1},
        "power": {"throttle_sw_power": 1, "throttle_idle": 1},
    }
    gpus = [a100(index, "", **settings) for index, settings in enumerate(cases.values())]
    running = gpu_collector(State(gpus=tuple(gpus)), options={"gpu_interval": 10.0})
    running.sample()
    seen = running.sample(ahead=10)
    for gpu, reason in zip(gpus, cases, strict=True):
        counted = seen.all("hpml_gpu_throttled_seconds_total", uuid=gpu.uuid)
        assert [labels["reason"] for labels, number in counted if number] == [reason]


def test_slow_figures_keep_their_periods_when_readings_are_rare(
    gpu_collector: Start, gpusim_library: Simulator
) -> None:
    """At the slowest pace, a reading every 16 s, no throttled time is lost and no limit is old."""
    state = State(gpus=(a100(0, throttle_hw_slowdown=1, power_enforced=400),))
    running = gpu_collector(state)
    running.sample()
    for number in range(1, 21):
        seen = running.sample(ahead=16 * number)
    throttled = seen.one("hpml_gpu_throttled_seconds_total", reason="hw_slowdown")
    assert throttled == pytest.approx(320, abs=17)
    gpusim_library.write(state.changed(0, power_enforced=300), running.path)
    for number in (21, 22):
        seen = running.sample(ahead=16 * number)
    assert seen.one("hpml_gpu_power_limit_watts") == 300
