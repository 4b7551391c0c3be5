"""The GPU collector on a real GPU, against nvidia-smi; prints what it costs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHILD = Path(__file__).parents[1] / "monitoring" / "gpu_child.py"
QUERY = (
    "uuid,name,memory.total,memory.used,power.draw,temperature.gpu,clocks.sm,clocks.max.sm,"
    "utilization.gpu,compute_cap,ecc.mode.current"
)
WORK = """\
import sys, time
import torch
a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
print("working", flush=True)
until = time.time() + float(sys.argv[1])
while time.time() < until:
    for _ in range(20):
        a @ a
    torch.cuda.synchronize()
"""


def _smi() -> list[dict[str, str]]:
    if shutil.which("nvidia-smi") is None:
        pytest.skip("HARDWARE: no nvidia-smi, so no real GPU was read")
    done = subprocess.run(
        ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        pytest.skip(f"HARDWARE: nvidia-smi: {done.stdout.strip()}")
    rows = [line.split(", ") for line in done.stdout.splitlines()]
    return [dict(zip(QUERY.split(","), row, strict=True)) for row in rows]


class Collector:
    """A process with the collector on the real driver."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(CHILD), "{}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def do(self, what: str, **words: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": what, **words}) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def sample(self) -> dict[tuple[str, str, str], float]:
        """Numbers by name, UUID and the other labels."""
        answer = self.do("sample")
        assert "error" not in answer, answer
        return {
            (
                name.removeprefix("hpml_gpu_"),
                labels.get("uuid", ""),
                " ".join(value for key, value in labels.items() if key != "uuid"),
            ): number
            for name, labels, number in answer["series"]
        }

    def stop(self) -> None:
        self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._process.wait()


@pytest.fixture
def collector() -> Iterator[Collector]:
    """The collector, which has read twice."""
    _smi()
    running = Collector()
    running.do("jobs", jobs=[])
    running.sample()
    time.sleep(1)
    yield running
    running.stop()


def test_numbers_agree_with_nvidia_smi(collector: Collector) -> None:
    """Constant values are equal; changing values are close."""
    for row in _smi():
        uuid, seen = row["uuid"], collector.sample()
        assert seen["up", uuid, ""] == 1
        mib = 1 << 20
        assert seen["memory_total_bytes", uuid, ""] == pytest.approx(
            float(row["memory.total"]) * mib, rel=0.01
        )
        assert seen["memory_used_bytes", uuid, ""] == pytest.approx(
            float(row["memory.used"]) * mib, abs=2048 * mib
        )
        assert seen["clock_max_hertz", uuid, "sm"] == float(row["clocks.max.sm"]) * 1e6
        assert seen["temperature_celsius", uuid, ""] == pytest.approx(
            float(row["temperature.gpu"]), abs=8
        )
        assert 0 <= seen["utilization_ratio", uuid, ""] <= 1
        if row["power.draw"].replace(".", "").isdigit():
            assert seen["power_watts", uuid, ""] == pytest.approx(
                float(row["power.draw"]), rel=0.5, abs=40
            )
        if row["ecc.mode.current"] == "Enabled":
            assert ("ecc_errors_total", uuid, "uncorrected") in seen
        if float(row["compute_cap"]) >= 9:
            for name in ("sm_active", "sm_occupancy", "tensor_active", "dram_active"):
                assert 0 <= seen[f"{name}_ratio", uuid, ""] <= 1, "GPM is there on Hopper"


def test_work_is_seen(collector: Collector, tmp_path: Path) -> None:
    """Matrix products: busy, energy, power, memory and (on Hopper) tensor cores say so."""
    torch = pytest.importorskip("torch", reason="HARDWARE: no torch to make work with")
    if not torch.cuda.is_available():
        pytest.skip("HARDWARE: torch finds no CUDA device")
    (tmp_path / "work.py").write_text(WORK)
    uuid = _smi()[0]["uuid"]
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "work.py"), "12"], stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "working\n"
        time.sleep(1.5)
        first = collector.sample()
        for _ in range(6):
            time.sleep(1)
            last = collector.sample()
        worker.kill()

    def grown(name: str) -> float:
        return last[name, uuid, ""] - first[name, uuid, ""]

    assert grown("busy_seconds_total") == pytest.approx(6, abs=1.5)
    assert last["utilization_ratio", uuid, ""] > 0.8
    assert last["memory_used_bytes", uuid, ""] > 200 << 20
    if ("energy_joules_total", uuid, "") in last:
        mean = grown("energy_joules_total") / 6
        assert mean == pytest.approx(last["power_watts", uuid, ""], rel=0.4)
    if ("tensor_active_ratio", uuid, "") in last:
        assert last["sm_active_ratio", uuid, ""] > 0.5
        assert last["tensor_active_ratio", uuid, ""] > 0.2


def test_cost_on_this_driver_is_printed(collector: Collector) -> None:
    """CPU per reading of all GPUs, as this driver has it."""
    answer = collector.do("repeat", times=20, pause=0.2)
    gpus = len(_smi())
    print(f"\n{gpus} GPU(s): {answer['cpu'] * 1e3:.2f} ms of CPU per second at 1 Hz")
    assert answer["cpu"] < 1
