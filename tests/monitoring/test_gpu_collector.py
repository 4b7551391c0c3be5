"""What the GPU collector reads of simulated GPUs; right is what their state file says."""

from __future__ import annotations

import time

import pytest

from deploy.gpusim.gpusim import Square, State, a100, integral, value
from tests.monitoring.gpu_support import ALL, GIB, UP, Start


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
    running = gpu_collector(State(gpus=(ALL,)), options={"gpu_interval": 0.2})
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


def test_pcie_counters_that_wrap_are_added_up(gpu_collector: Start) -> None:
    """Before Hopper there is a counter of 32 bits: several times around in these readings."""
    gpu = a100(0, pcie_tx=6_000_000_000, pcie_rx=1_000_000_000)
    running = gpu_collector(State(gpus=(gpu,)), options={"gpu_interval": 0.2})
    first = running.sample()
    for _ in range(10):
        time.sleep(0.2)
        last = running.sample()
    for direction, rate in (("transmit", 6e9), ("receive", 1e9)):
        name = "hpml_gpu_pcie_bytes_total"
        grown = last.one(name, direction=direction) - first.one(name, direction=direction)
        assert rate * (last.began - first.ended) <= grown <= rate * (last.ended - first.began)


def test_busy_time_is_the_integral_of_utilization(gpu_collector: Start) -> None:
    """A GPU that works in bursts: what aliases as a gauge is right as a total."""
    gpu = a100(0, util=Square(0.6, 0, 100, 0, 0.5))
    state = State(gpus=(gpu,))
    running = gpu_collector(state, options={"gpu_interval": 0.02})
    first = running.sample()
    until = time.time() + 2.4
    while time.time() < until:
        time.sleep(0.02)
        last = running.sample()
    name = "hpml_gpu_busy_seconds_total"
    assert gpu.util is not None
    truth = integral(gpu.util, last.ended - state.epoch) - integral(
        gpu.util, first.ended - state.epoch
    )
    seconds = truth / 100
    assert seconds > 0.8
    assert last.one(name) - first.one(name) == pytest.approx(seconds, abs=0.25)


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
    for _ in range(10):
        seen = running.sample()
        at = [value(gpu.util, moment - state.epoch) / 100 for moment in (seen.began, seen.ended)]
        if at[0] == at[1]:
            assert seen.one("hpml_gpu_utilization_ratio") == at[0]
        time.sleep(0.07)
