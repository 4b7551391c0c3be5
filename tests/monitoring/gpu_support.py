"""A GPU collector in a separate process on simulated GPUs, and its answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from deploy.gpusim.gpusim import Simulator, State, h100

GIB = 1 << 30
UP = "hpml_gpu_up"
_CHILD = Path(__file__).with_name("gpu_child.py")

ALL = h100(
    0,
    minor=5,
    util=40,
    mem_util=20,
    temp=61,
    mem_temp=72,
    power=333,
    power_enforced=650,
    clock_sm=1700,
    clock_mem=2600,
    max_sm=1980,
    max_mem=2619,
    fan=55,
    mem_used=7 * GIB,
    ecc_vol_cor=11,
    ecc_vol_unc=2,
    ecc_agg_cor=31,
    ecc_agg_unc=4,
    remapped_cor=5,
    remapped_unc=6,
    remapped_pending=1,
    remapped_failure=0,
    pcie_replay=9,
    pcie_tx=3_000_000_000,
    pcie_rx=5_000_000_000,
    nvlink_tx=1_000_000_000,
    nvlink_rx=2_000_000_000,
    throttle_sw_power=0.25,
    throttle_sw_thermal=0.5,
    throttle_hw_power_brake=1,
    gpm_sm=44,
    gpm_occupancy=33,
    gpm_tensor=22,
    gpm_dram=11,
    serial="1320000000001",
    pstate=2,
    pcie_gen=3,
    pcie_width=8,
    pcie_max_gen=5,
    enc_util=15,
    dec_util=16,
    retired_sbe=3,
    retired_dbe=2,
    retired_pending=1,
    recovery_action=4,
    nvlink_crc=1,
    nvlink_replay=2,
    nvlink_recovery=3,
)
"""A Hopper GPU on which every number is another."""


class Answer:
    """One sample: numbers by name and labels, with the time in which they were read."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.error = data.get("error", "")
        self.text = data.get("text", "")
        self.began, self.ended = data.get("began", 0.0), data.get("ended", 0.0)
        self.series = [(name, labels, number) for name, labels, number in data.get("series", ())]

    def all(self, name: str, **labels: str) -> list[tuple[dict[str, str], float]]:
        return [
            (have, number)
            for series, have, number in self.series
            if series == name and labels.items() <= have.items()
        ]

    def one(self, name: str, **labels: str) -> float:
        found = self.all(name, **labels)
        assert len(found) == 1, f"{name} {labels}: {found} {self.error} {self.text}"
        return found[0][1]

    def names(self) -> set[str]:
        return {name for name, _, _ in self.series}


class Running:
    """A child process with a collector on a simulated driver."""

    def __init__(
        self, path: Path, environment: dict[str, str], calls: Path, **settings: Any
    ) -> None:
        self.path, self.calls = path, calls
        self.process = subprocess.Popen(
            [sys.executable, str(_CHILD), json.dumps(settings)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def do(self, what: str, **words: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"do": what, **words}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            assert self.process.stderr is not None
            pytest.fail(self.process.stderr.read())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def sample(self, ahead: float = 0.0) -> Answer:
        return Answer(self.do("sample", ahead=ahead))

    def stop(self) -> None:
        self.process.kill()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        self.process.wait()

    def end(self) -> str:
        assert self.process.stdin is not None
        assert self.process.stderr is not None
        self.process.stdin.close()
        said = self.process.stderr.read()
        self.process.wait(240)
        return said


def pci_device(sys: Path, address: str, *, driver: str = "") -> None:
    """Put an NVIDIA GPU into a tree of sysfs."""
    path = sys / "bus/pci/devices" / address
    path.mkdir(parents=True)
    (path / "vendor").write_text("0x10de\n")
    (path / "class").write_text("0x030200\n")
    if driver:
        (sys / "drivers" / driver).mkdir(parents=True)
        (path / "driver").symlink_to(sys / "drivers" / driver)


Start = Callable[..., Running]


@pytest.fixture
def gpu_collector(tmp_path: Path, gpusim_library: Simulator) -> Iterator[Start]:
    """Start a collector on a state of the simulated driver."""
    with ExitStack() as stack:

        def run(
            state: State | None, driver: Simulator = gpusim_library, **settings: Any
        ) -> Running:
            path, calls = tmp_path / "state", tmp_path / "calls"
            if state is not None:
                driver.write(state, path)
            environment = {**os.environ, **driver.environment(path, calls=calls)}
            if settings.pop("driverless", False):
                environment = {**os.environ, **driver.missing()}
            options = {"roots": {"sys": str(tmp_path / "sys")}, **settings.pop("options", {})}
            running = Running(path, environment, calls, options=options, **settings)
            stack.callback(running.stop)
            return running

        yield run
