"""Binding on a real GPU: the device of the record is the one that CUDA gives the rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# The rank's device according to CUDA, and its location according to the kernel.
RANK = """\
import json, os, sys, time
import torch
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
device = torch.cuda.get_device_properties(torch.cuda.current_device())
address = f"{device.pci_domain_id:04x}:{device.pci_bus_id:02x}:{device.pci_device_id:02x}.0"
with open(f"/sys/bus/pci/devices/{address}/local_cpulist") as stream:
    near = stream.read().strip()
record = {"uuid": str(device.uuid), "address": address, "near": near,
          "cpus": sorted(os.sched_getaffinity(0))}
with open(sys.argv[1], "w") as stream:
    json.dump(record, stream)
proof = f"{os.environ['HPML_ATTEMPT_DIR']}/binding/{os.environ['SLURMD_NODENAME']}.proof.json"
while not os.path.exists(proof) or '"live": true' not in open(proof).read():  # by the first look
    time.sleep(0.1)
"""


@pytest.fixture(scope="module", autouse=True)
def _needs_a_gpu() -> None:
    torch = pytest.importorskip("torch", reason="HARDWARE: no torch here")
    if not torch.cuda.is_available():
        pytest.skip("HARDWARE: no CUDA device; no record of a real one was made")


def test_the_record_of_a_rank_names_its_real_device(tmp_path: Path) -> None:
    """`hpml run` on this machine: UUID, PCI address and CPUs of the proof against CUDA and /sys."""
    (tmp_path / "rank.py").write_text(RANK)
    seen = tmp_path / "seen.json"
    job = {
        "name": "gpu-binding",
        "launcher": "srun",
        "command": [sys.executable, str(tmp_path / "rank.py"), str(seen)],
        "resources": {"gpus": 1, "cpus_per_rank": 2, "time": "5"},
        "binding": {"verify": "strict"},
    }
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    hpml = [sys.executable, "-m", "hpml_orchestrator.cli"]
    done = subprocess.run(
        [*hpml, "--records", str(tmp_path / "records"), "run", "--local", "job.yaml", "--json"],
        cwd=tmp_path,
        env={**os.environ, "XDG_CONFIG_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    reported: dict[str, Any] = json.loads(seen.read_text())
    (path,) = (tmp_path / "records").glob("runs/*/attempts/0/binding/*.proof.json")
    (rank,) = json.loads(path.read_text())["ranks"]
    assert rank["wrong"] == []
    assert rank["live"] is True
    assert rank["gpu"] == reported["address"]
    assert rank["uuid"].removeprefix("GPU-") == reported["uuid"].removeprefix("GPU-")
    print(json.dumps({"seen": reported, "proof": rank}))  # for the closing note, with -s
