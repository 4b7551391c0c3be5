"""What the GPU collector costs: calls, series, memory."""

from __future__ import annotations

import json
import time
from dataclasses import replace

from deploy.gpusim.gpusim import Fault, Process, State, a100, divided, h100
from tests.monitoring.gpu_support import ALL, Start


def test_series_per_gpu_and_per_job(gpu_collector: Start) -> None:
    """The budget of a node with 8 GPUs and 20 jobs is 800 series and 25 per job."""
    gpus = tuple(
        replace(
            ALL, **{**vars(h100(index)), "fan": 1, "processes": (Process(100 + index, ghost=True),)}
        )
        for index in range(8)
    )
    running = gpu_collector(State(gpus=gpus))
    running.do(
        "jobs",
        jobs=[
            {"jobid": str(index), "gpus": [str(index % 8)], "pids": [100 + index % 8]}
            for index in range(20)
        ],
    )
    running.sample()
    time.sleep(0.1)
    seen = running.sample()
    per_gpu = [labels for name, labels, _ in seen.series if "jobid" not in labels]
    per_job = [labels for name, labels, _ in seen.series if "jobid" in labels]
    assert len({json.dumps([name, labels]) for name, labels, _ in seen.series}) == len(seen.series)
    assert len(per_gpu) <= 8 * 60 + 3
    assert len(per_job) <= 20 * 6


def test_the_hot_path_makes_few_calls_and_no_slow_one(gpu_collector: Start) -> None:
    """Names, layouts and limits are asked for rarely, the calls that take 20 ms never."""
    running = gpu_collector(State(gpus=tuple(h100(index) for index in range(8))))
    running.do("jobs", jobs=[])
    running.sample()
    running.calls.write_text("")
    answer = running.do("repeat", times=20)
    made = running.calls.read_text().split()
    print(f"8 GPUs: {answer['cpu'] * 1e3:.3f} ms of CPU and {len(made) / 20:.1f} calls per sample")
    never = {"nvmlDeviceGetPcieThroughput", "nvmlDeviceGetName", "nvmlDeviceGetUUID", "nvmlInit"}
    assert not never & set(made)
    assert len(made) / 20 <= 8 * 9
    assert made.count("nvmlDeviceGetUtilizationRates") <= 8 * 20
    assert made.count("nvmlDeviceGetMaxClockInfo") == 0
    assert made.count("nvmlDeviceGetEnforcedPowerLimit") <= 8


def test_handles_are_got_once(gpu_collector: Start) -> None:
    """Real drivers take milliseconds for one; looking again every half minute needs none."""
    running = gpu_collector(State(gpus=(a100(0), divided(h100(1), 1, 2))), look=0.0)
    running.sample()
    running.calls.write_text("")
    running.do("repeat", times=20)
    made = running.calls.read_text()
    assert "nvmlDeviceGetHandleBy" not in made
    assert made.split().count("nvmlDeviceGetMigMode") >= 20


def test_readings_over_the_budget_become_rarer(gpu_collector: Start) -> None:
    """A driver that takes 300 ms for a call is asked at every second tick, after ten readings."""
    slow = Fault("nvmlDeviceGetUtilizationRates", 0.3, kind="stuck")
    running = gpu_collector(State(gpus=(a100(0),), faults=(slow,)))
    running.sample()
    running.calls.write_text("")
    running.do("repeat", times=20)
    made = running.calls.read_text().split()
    assert made.count("nvmlDeviceGetUtilizationRates") <= 16


def test_nvitops_terminal_program_is_never_loaded(gpu_collector: Start) -> None:
    """Its licence is another (GPL-3.0) than that of its API (Apache-2.0)."""
    running = gpu_collector(State(gpus=(a100(0),)))
    running.sample()
    loaded = running.do("modules")["modules"]
    assert "nvitop.api" in loaded
    assert not [one for one in loaded if one.startswith(("nvitop.tui", "nvitop.cli"))]
    assert not {"torch", "pydantic", "typer", "rich"} & set(loaded)
