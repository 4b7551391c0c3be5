"""Real programs run on the simulated GPUs: nvitop, nvitop-exporter, and the command gpusim."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from deploy.gpusim.gpusim import Process, Simulator, State, a100, divided, h100
from tests.monitoring.gpusim_support import Gpusim

if TYPE_CHECKING:
    from collections.abc import Iterator

GPUSIM = Path(__file__).parents[2] / "gpusim" / "gpusim"
GIB = 1 << 30

# What nvitop reports about every device and every MIG device, as JSON.
NVITOP = """
import json
from nvitop import Device, libnvml

def told(device):
    found = {k: v for k, v in vars(device.as_snapshot()).items() if k != "real"}
    found["processes"] = {
        pid: [process.type, process.gpu_memory(), process.gpu_sm_utilization()]
        for pid, process in device.processes().items()
    }
    return found

answer = [
    [told(device), [told(mig) for mig in device.mig_devices()]] for device in Device.all()
]
unknown = sorted(map(str, libnvml.UNKNOWN_FUNCTIONS))
print(json.dumps([answer, unknown], default=str))
"""


def nvitop(gpusim: Gpusim) -> tuple[list[Any], list[str]]:
    """Runs nvitop's API in a child: devices with their MIG devices, and functions it missed."""
    done = gpusim.run("-c", NVITOP)
    assert done.returncode == 0, done.stderr
    devices, unknown = json.loads(done.stdout)
    return devices, unknown


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[bytes]]:
    """A process that can be on a GPU."""
    with subprocess.Popen(["sleep", "600"]) as child:
        yield child
        child.kill()


@pytest.fixture
def node(worker: subprocess.Popen[bytes]) -> State:
    """Four GPUs, the last one divided, with one process."""
    process = Process(worker.pid, memory=5 * GIB, sm=80, mem=30)
    first = a100(
        0,
        minor=3,
        util=77,
        mem_util=33,
        power=250,
        temp=61,
        fan=40,
        clock_sm=1400,
        pcie_tx=7 << 20,
        ecc_vol_unc=4,
        mem_base=0,
        processes=(process,),
    )
    inside = Process(worker.pid, memory=2 * GIB, gi=8, ci=0)
    last = divided(a100(3, processes=(inside,)), 1, 2)
    return State(gpus=(first, a100(1, minor=2), h100(2), last))


def test_nvitop_sees_what_the_state_says(
    gpusim: Gpusim,
    node: State,
    worker: subprocess.Popen[bytes],
) -> None:
    """Snapshots of all devices and MIG devices, and no function is missing."""
    gpusim.write(node)
    devices, unknown = nvitop(gpusim)
    assert unknown == []
    assert len(devices) == 4
    assert all("(simulated)" in device["name"] for device, _ in devices)
    first, no_mig = devices[0]
    assert no_mig == []
    expected = {
        "gpu_utilization": 77,
        "memory_utilization": 33,
        "power_usage": 250_000,
        "power_limit": 400_000,
        "temperature": 61,
        "fan_speed": 40,
        "sm_clock": 1400,
        "memory_used": 5 * GIB,
        "memory_total": 80 * GIB,
        "pcie_tx_throughput": 7 << 10,
        "total_volatile_uncorrected_ecc_errors": 4,
        "performance_state": "P0",
        "persistence_mode": "Enabled",
        "compute_mode": "Default",
        "mig_mode": "Disabled",
        "bus_id": "00000000:07:00.0",
    }
    assert {key: first[key] for key in expected} == expected
    assert first["processes"] == {str(worker.pid): ["C", 5 * GIB, 80]}
    assert devices[2][0]["cuda_compute_capability"] == [9, 0]
    parent, instances = devices[3]
    assert parent["mig_mode"] == "Enabled"
    assert [mig["uuid"] for mig in instances] == [mig.uuid for mig in node.gpus[3].mig]
    assert [mig["gpu_instance_id"] for mig in instances] == [7, 8]
    assert [mig["memory_total"] for mig in instances] == [10 * GIB, 20 * GIB]
    assert instances[0]["processes"] == {}
    assert instances[1]["processes"][str(worker.pid)][:2] == ["C", 2 * GIB]


def command(*words: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs the command gpusim."""
    return subprocess.run(
        [sys.executable, str(GPUSIM), *map(str, words)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        stdin=subprocess.DEVNULL,
        **options,
    )


LOOK = """
import sys, time, os, pynvml as n
n.nvmlInit()
handles = [n.nvmlDeviceGetHandleByIndex(i) for i in range(n.nvmlDeviceGetCount())]
for _ in range(6000):
    pids = [[p.pid for p in n.nvmlDeviceGetComputeRunningProcesses(h)] for h in handles]
    mine = [i for i, found in enumerate(pids) if found == [os.getpid()]]
    if len(mine) == 2:
        break
    time.sleep(0.02)
print(n.nvmlDeviceGetName(handles[0]), len(handles), mine, n.nvmlDeviceGetMigMode(handles[-1])[0])
sys.exit(7)
"""


def test_the_command_shows_busy_gpus(gpusim_library: Simulator) -> None:
    """Its child sees them, is on every second one, and its exit status comes through."""
    words = ("--gpus", "4", "--model", "a100", "--mig", "--", sys.executable, "-c", LOOK)
    done = command("run", *words)
    assert done.returncode == 7, done.stderr
    assert done.stdout.strip() == "NVIDIA A100-SXM4-80GB (simulated) 4 [0, 2] 1"


def test_the_command_says_what_is_wrong(gpusim_library: Simulator) -> None:
    """A program that is not there, and too many GPUs."""
    done = command("run", "--", "no-such-program")
    assert done.returncode == 1
    assert done.stderr == "gpusim: no-such-program: No such file or directory\n"
    done = command("run", "--gpus", "64", "--", "true")
    assert done.returncode == 2
    assert "--gpus takes 1 to 31" in done.stderr


def test_a_signal_ends_the_commands_child(gpusim_library: Simulator, tmp_path: Path) -> None:
    """SIGTERM is passed on to it; the status is that of a shell, and the state file stays."""
    path = tmp_path / "node.txt"
    gpusim_library.write(State(gpus=(h100(0),)), path)
    script = "echo $HPML_GPUSIM; exec sleep 600"
    with subprocess.Popen(
        [sys.executable, str(GPUSIM), "run", "--state", path.name, "--", "sh", "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == f"{path.resolve()}\n"
        child.terminate()
        assert child.wait(timeout=240) == 128 + 15
    assert path.exists()


def test_a_running_node_is_changed(gpusim: Gpusim) -> None:
    """The next call shows activity, processes, an error and a lost GPU; counters continue."""
    path = gpusim.path
    made = command("state", path, "--gpus", "2", "--mig", "--idle", "--node", "n1")
    assert made.returncode == 0, made.stderr

    def change(*words: str) -> None:
        done = command("set", path, *words)
        assert done.returncode == 0, done.stderr

    energy = "nvmlDeviceGetTotalEnergyConsumption(h(0))"
    with gpusim.probe() as ask:
        assert ask("nvmlDeviceGetUUID(h(0))") != h100(0).uuid
        ask("event_set(0, 1)")
        began = time.time()
        change("--gpu", "0", "--xid", "79", "--pid", str(os.getpid()), "util=90", "power=1e6")
        assert ask("nvmlDeviceGetUtilizationRates(h(0)).gpu") == 90
        assert [p["pid"] for p in ask("nvmlDeviceGetComputeRunningProcesses(h(0))")] == [
            os.getpid()
        ]
        assert ask("wait(1000)") == [0, 79]
        change("--gpu", "0", "power=0")
        seen = ask(energy)  # mJ: at most 1 MW since the first change
        assert 1e3 < seen <= (time.time() - began) * 1e9 + 1e6
        assert ask(energy) == seen
        change("--mig", "2", "--gpu", "1", "gpm_tensor=45", "--pid", str(os.getpid()))
        assert ask("gpm(h(1), 0.05, 5, gi=9)")[0] == [pytest.approx(45)]
        assert [p["pid"] for p in ask("nvmlDeviceGetComputeRunningProcesses(m(1, 2))")]
        change("--gpu", "0", "lost=1")
        assert ask("nvmlDeviceGetUtilizationRates(h(0))") == {"error": 15}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["utli=3"], "a GPU has no utli"),
        (["util"], "util: write NAME=CURVE, such as util=90"),
        (["util=lots"], "no number and no curve: lots"),
        (["--gpu", "2", "util=3"], "--gpu 2: there are 2 GPUs, 0 is the first"),
        (["--mig", "0", "util=3"], "--mig 0: there are 0, 0 is the first"),
    ],
)
def test_a_wrong_change_changes_nothing(
    gpusim_library: Simulator, tmp_path: Path, words: list[str], message: str
) -> None:
    """The message names the mistake."""
    path = tmp_path / "node.txt"
    gpusim_library.write(State(gpus=(h100(0), h100(1))), path)
    text = path.read_text()
    done = command("set", path, *words)
    assert (done.returncode, done.stderr) == (1, f"gpusim: {message}\n")
    assert path.read_text() == text
