"""The doctor lists what it found, and how to add what is missing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hpml_orchestrator.records.store import Store
from hpml_orchestrator.scheduler.command import ConfigurationMissing, SubprocessRunner
from hpml_orchestrator.site.doctor import DoctorFinding, examine
from hpml_orchestrator.site.initialise import initialise
from hpml_orchestrator.topology.model import topology_json
from tests.unit.placement.machines import milan

ANSWERS = {
    "sbatch": "echo slurm 24.11.0",
    "srun": "",
    "squeue": "",
    "scancel": "",
    "scontrol": "echo 'Slurmctld(primary) at c is UP'",
    "sacct": "exit 1",
    "nvidia-smi": "printf 'GPU 0: H200\\nGPU 1: H200\\n'",
    "git": "echo git version 2.40",
    "bash": "echo 5.2",
}


def put(directory: Path, *names: str, **more: str) -> None:
    """Put programs that only answer into a directory; these are fakes."""
    directory.mkdir(exist_ok=True)
    for name, code in {**{name: ANSWERS[name] for name in names}, **more}.items():
        (directory / name).write_text(f"#!/bin/sh\n{code}\n")
        (directory / name).chmod(0o755)


def found(store: Store) -> dict[str, DoctorFinding]:
    return {finding.check: finding for finding in examine(store)}


def test_nothing_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without bash nothing runs; git, Slurm and GPUs are done without."""
    monkeypatch.setenv("PATH", str(tmp_path))
    findings = found(Store(tmp_path / "records"))
    assert findings["bash"].result == "missing"
    assert findings["bash"].hint == "install bash 4 or newer"
    for check in ("git", "Slurm", "GPUs of this machine", "mpirun", "horovodrun"):
        assert findings[check].result == "none"


def test_launchers_of_mpi_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Open MPI's mpirun is accepted; another one is reported."""
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    put(tmp_path / "bin", mpirun="echo 'mpirun (Open MPI) 5.0.3'; echo more", horovodrun="")
    findings = found(Store(tmp_path / "records"))
    assert (findings["mpirun"].result, findings["mpirun"].found) == (
        "ok",
        "mpirun (Open MPI) 5.0.3",
    )
    assert findings["horovodrun"].found == f"{tmp_path}/bin/horovodrun"
    put(tmp_path / "bin", mpirun="echo 'Intel(R) MPI Library for Linux* OS, Version 2021.9'")
    other = found(Store(tmp_path / "records"))["mpirun"]
    assert other.result == "none"
    assert "`launcher: mpirun` needs Open MPI's" in other.found


@pytest.mark.parametrize(("controller", "advised"), [("10.0.0.1", True), ("127.0.0.1", False)])
def test_records_on_this_machine_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, controller: str, advised: bool
) -> None:
    """Other nodes may not see them; a cluster of one machine does."""
    (tmp_path / "slurm.conf").write_text(f"SlurmctldHost=c({controller})\n")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    put(tmp_path / "bin", *ANSWERS)
    monkeypatch.setattr("hpml_orchestrator.site.doctor.own_file_system", lambda _path: "ext4")
    records = found(Store(tmp_path / "records"))["records"]
    assert ("local to this machine" in records.found, bool(records.hint)) == (advised, advised)


def test_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's version, its controller, its accounting, and the GPUs are listed."""
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    put(tmp_path / "bin", *ANSWERS)
    findings = found(Store(tmp_path / "records"))
    assert findings["Slurm"].found == "slurm 24.11.0, controller is up"
    assert findings["accounting"].result == "none"
    assert findings["GPUs of this machine"].found == "2"
    put(tmp_path / "bin", sacct="exit 0")
    assert found(Store(tmp_path / "records"))["accounting"].result == "ok"
    put(tmp_path / "bin", sbatch="echo slurm-wlm 21.08.8")
    old = found(Store(tmp_path / "records"))["Slurm"]
    assert (old.result, old.found) == ("missing", "slurm-wlm 21.08.8 is too old")
    assert "22.05" in old.hint
    put(tmp_path / "bin", scontrol="echo is DOWN; exit 1")
    assert found(Store(tmp_path / "records"))["Slurm"].result == "missing"
    (tmp_path / "bin" / "scancel").unlink()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    assert found(Store(tmp_path / "records"))["Slurm"].found == "not on PATH: scancel"


@pytest.mark.parametrize(
    ("smi", "result", "hint"),
    [
        ("Driver Version: 580.1    CUDA Version: 13.0", "ok", ""),
        ("Driver Version: 550.1    CUDA Version: 12.4", "warning", "CUDA 12.8, newer than"),
    ],
)
def test_the_build_of_pytorch(
    smi: str, result: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is that of the `python` on PATH, and has to fit the driver."""
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    for name in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"):
        monkeypatch.delenv(name, raising=False)
    build = {"version": "2.9.0+cu128", "cuda": "12.8", "cudnn": "9.10", "nccl": "2.27"}
    put(
        tmp_path / "bin", **{"nvidia-smi": f"echo '{smi}'", "python": f"echo '{json.dumps(build)}'"}
    )
    finding = found(Store(tmp_path / "records"))["PyTorch"]
    assert finding.found.startswith("2.9.0+cu128, CUDA 12.8, cuDNN 9.10, NCCL 2.27")
    assert (finding.result, hint in finding.hint) == (result, True)


def test_a_topology_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    """Of every node type, with field and file; a profile whose files are good is sound."""
    profile = tmp_path / "site.toml"
    profile.write_text(
        '[node_types.big]\ntopology = "big.json"\n[node_types.old]\ntopology = "old.xml"\n'
    )
    (tmp_path / "old.xml").write_text("<topology")

    def told() -> DoctorFinding:
        findings = examine(Store(tmp_path / "records"), site=str(profile))
        return next(one for one in findings if one.check == "site profile")

    finding = told()
    assert finding.result == "missing"
    assert f"node_types.big.topology: no such file: {tmp_path}/big.json" in finding.found
    assert "node_types.old.topology" in finding.found
    assert f"in {profile}" in finding.hint
    for name in ("big.json", "old.xml"):
        (tmp_path / name).write_text(json.dumps(topology_json(milan())))
    assert (told().result, told().found) == ("ok", str(profile))


def test_a_configuration_that_is_not_there_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm's commands would look for it for a minute each; the variable and the file are named."""
    put(tmp_path / "bin", "sbatch", "srun", "squeue", "scancel", "scontrol", "sacct")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_CONF", f"{tmp_path}/nowhere.conf")
    slurm = found(Store(tmp_path / "records"))["Slurm"]
    assert slurm.result == "missing"
    assert slurm.found == f"SLURM_CONF names {tmp_path}/nowhere.conf, which does not exist"
    runner = SubprocessRunner()
    with pytest.raises(ConfigurationMissing, match="SLURM_CONF names"):
        initialise(runner, dict(os.environ), writer="t", when="today")
    (tmp_path / "nowhere.conf").write_text("")
    assert runner.run(["sbatch"], env=dict(os.environ), timeout=120).stdout == "slurm 24.11.0\n"
