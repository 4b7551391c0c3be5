"""Totals while calls fail at random: none falls, none outruns what the simulated GPU did."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest

from deploy.gpusim.gpusim import Fault, Simulator, State, a100, divided, h100
from tests.monitoring.gpu_support import ALL, Answer, Start

FUNCTIONS = (
    *("field:186", "field:83", "field:13[89]", "field:197", "gpm:20", "gpm:*"),
    *("nvmlGpmSampleGet", "nvmlGpmMetricsGet", "nvmlGpmQueryDeviceSupport"),
    *("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetFieldValues", "nvmlDeviceGetPowerUsage"),
    *("nvmlDeviceGetTotalEnergyConsumption"),
    *("nvmlDeviceGetCurrentClocks*", "nvmlDeviceGetMemoryInfo*", "nvmlDeviceGetUUID"),
    *("nvmlDeviceGetHandle", "nvmlDeviceGetMigMode", "nvmlInit*", "nvmlDeviceGetCount*"),
)
CODES = (1, 2, 3, 4, 6, 9, 15, 16, 18, 21, 27, 999)
STEPS = 200
Series = dict[tuple[str, ...], float]


def totals(seen: Answer) -> Series:
    return {
        (name, *labels.values()): number
        for name, labels, number in seen.series
        if name.endswith("_total")
    }


@pytest.mark.parametrize("seed", [7, 11])
def test_totals_whatever_fails(gpu_collector: Start, gpusim_library: Simulator, seed: int) -> None:
    """Sources take each other's place; Prometheus takes a fall for a reset and adds all of it."""
    chance = random.Random(seed)
    state = State(gpus=(ALL, a100(1, minor=1, power=200, util=50), divided(h100(2), 1, 2, 3)))
    options = {"gpu_interval": 0.05}
    running = gpu_collector(state, look=0.0, retry=(0.0, 0.0), options=options)
    running.do("jobs", jobs=[])
    first: dict[tuple[str, ...], tuple[float, float]] = {}
    last: Series = {}
    ended = 0.0
    for step in range(STEPS):
        if step % 3 == 0:
            faults = [
                Fault(chance.choice(FUNCTIONS), chance.choice(CODES), gpu=chance.choice((0, 1, 2)))
                for _ in range(chance.choice((0, 0, 1, 2)))
            ]
            now = state.changed(chance.randrange(3), lost=1) if chance.random() < 0.1 else state
            gpusim_library.write(replace(now, faults=tuple(faults)), running.path)
        seen = running.sample()
        if seen.error == "DriverLostError":
            running.do("close")
            running.do("make")
        assert seen.error in {"", "DriverLostError", "NotHereError"}, seen.text
        for key, number in totals(seen).items():
            assert number >= last.get(key, 0.0), (step, key, last.get(key), number)
            first.setdefault(key, (number, seen.began))
            last[key], ended = number, seen.ended
        time.sleep(0.02)
    gpu = state.gpus[0]
    for name, label, rate in (
        ("pcie_bytes", "transmit", 3e9),
        ("pcie_bytes", "receive", 5e9),
        ("nvlink_bytes", "transmit", 18e9),
        ("energy_joules", "", 333.0),
        ("throttled_seconds", "power_brake", 1.0),
        ("busy_seconds", "", 0.4),
    ):
        key = (f"hpml_gpu_{name}_total", gpu.uuid, *([label] if label else []))
        grown, since = last[key] - first[key][0], first[key][1]
        assert 0 < grown <= rate * (ended - since) * 1.02, key
