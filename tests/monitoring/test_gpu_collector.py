"""What the GPU collector reads of simulated GPUs; right is what their state file says."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from deploy.gpusim.gpusim import Simulator, Square, State, a100, integral, value
from tests.monitoring.gpu_support import ALL, GIB, UP, Start

# A reading stands for at most 2.5 intervals, and a machine that stands still makes longer gaps of
# the tenths of a second between two readings here. The collector is told that it reads once a
# minute, and asked more often.
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
        ("hpml_gpu_fan_speed_ratio", ""): 0.55,
        ("hpml_gpu_clock_hertz", "sm"): 1.7e9,
        ("hpml_gpu_clock_hertz", "memory"): 2.6e9,
        ("hpml_gpu_clock_max_hertz", "sm"): 1.98e9,
        ("hpml_gpu_clock_max_hertz", "memory"): 2.619e9,
        ("hpml_gpu_ecc_errors_total", "corrected volatile"): 11,
        ("hpml_gpu_ecc_errors_total", "uncorrected volatile"): 2,
        ("hpml_gpu_ecc_errors_total", "corrected aggregate"): 31,
        ("hpml_gpu_ecc_errors_total", "uncorrected aggregate"): 4,
        ("hpml_gpu_remapped_rows", "correctable"): 5,
        ("hpml_gpu_remapped_rows", "uncorrectable"): 6,
        ("hpml_gpu_remapped_rows_pending", ""): 1,
        ("hpml_gpu_remapped_rows_failed", ""): 0,
        ("hpml_gpu_pcie_replays_total", ""): 9,
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
            "name": ALL.name,
            "pci_bus_id": f"0000{ALL.bus_id}".lower(),
            "minor": "5",
            "mig": "",
        }
    ]
    assert (seen.one("hpml_gpus", state="up"), seen.one("hpml_gpus", state="lost")) == (1, 0)


def test_counters_grow_as_their_rates_say(gpu_collector: Start) -> None:
    """Energy, throttled time, PCIe and NVLink between two readings: rate times time."""
    running = gpu_collector(State(gpus=(ALL,)), options={"gpu_interval": NO_GAP_SECONDS})
    first = running.sample()
    for _ in range(5):
        time.sleep(0.2)
        last = running.sample()
    rates = {
        ("hpml_gpu_energy_joules_total", ""): 333,
        ("hpml_gpu_throttled_seconds_total", "power"): 0.25,
        ("hpml_gpu_throttled_seconds_total", "thermal"): 0.5,
        ("hpml_gpu_throttled_seconds_total", "sync_boost"): 0,
        ("hpml_gpu_throttled_seconds_total", "power_brake"): 1,
        ("hpml_gpu_throttled_seconds_total", "hw_thermal"): 0,
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

    It wraps after 715 s. Between two readings the state's time goes on by 300.
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

    It is read once a minute, of which the seconds of this test are no part; each state is a still
    of the curve at that moment.
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


def test_a_gap_adds_only_what_one_reading_can_stand_for(gpu_collector: Start) -> None:
    """A sampler that slept for an hour does not make an hour of busy GPU."""
    running = gpu_collector(State(gpus=(a100(0, util=100),)))
    first = running.sample()
    second = running.sample(ahead=1)
    before = second.one("hpml_gpu_busy_seconds_total")
    after = running.sample(ahead=3600).one("hpml_gpu_busy_seconds_total")
    assert 1 <= before <= 1 + second.ended - first.began
    assert after - before == pytest.approx(2.5, abs=0.01)


def test_utilization_follows_a_curve(gpu_collector: Start) -> None:
    """The gauge is the curve's value at a moment of the reading."""
    gpu = a100(0, util=Square(0.4, 10, 90))
    assert gpu.util is not None
    state = State(gpus=(gpu,))
    running = gpu_collector(state)
    ratios: list[float] = []
    while len(ratios) < 10:
        seen = running.sample()
        at = [value(gpu.util, moment - state.epoch) / 100 for moment in (seen.began, seen.ended)]
        # within one half of the period: else the curve may have been at both values meanwhile
        if at[0] == at[1] and seen.ended - seen.began < 0.2:
            ratios.append(seen.one("hpml_gpu_utilization_ratio"))
            assert ratios[-1] == at[0]
        time.sleep(0.07)
