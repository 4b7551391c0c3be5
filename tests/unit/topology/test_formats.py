"""The same machine in several formats has the same topology; real machines are read right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpml_orchestrator.topology.cpulist import format_list
from hpml_orchestrator.topology.model import Topology, topology_json, topology_of_json
from hpml_orchestrator.topology.sysfs import read_sysfs, read_topology, topology_of_text
from tests.unit.topology.machines import Machine, hwloc_xml, two_sockets, write_sysfs
from tests.unit.topology.real_machines import DATA, MACHINES

MACHINE = two_sockets()
FIRST, SECOND = (0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)


def check(topology: Topology) -> None:
    """Compare with the machine; GPUs by their number, for names differ."""
    number = {gpu.name: gpu.index for gpu in topology.gpus}
    assert [(core.domain, core.cpus) for core in topology.cores] == [
        (n // 4, (n, n + 8)) for n in range(8)
    ]
    assert [(one.number, one.cpus) for one in topology.domains] == [(0, FIRST), (1, SECOND)]
    assert [(gpu.domain, gpu.cpus) for gpu in topology.gpus] == [
        (1, SECOND),
        (1, SECOND),
        (0, FIRST),
    ]
    assert [(nic.name, nic.domain) for nic in topology.nics] == [("mlx5_0", 1)]
    assert sorted((number[gpu], nic, level) for gpu, nic, level in topology.links) == [
        (0, "mlx5_0", "PIX"),
        (1, "mlx5_0", "NODE"),
        (2, "mlx5_0", "SYS"),
    ]


@pytest.mark.parametrize("version", [2, 3])
def test_all_formats_agree(version: int, tmp_path: Path) -> None:
    """Versions of hwloc with one another and with sysfs."""
    got = topology_of_text(hwloc_xml(MACHINE, version))
    kernel = read_sysfs(*write_sysfs(tmp_path, MACHINE))
    check(got)
    check(kernel)
    assert kernel.warnings == ()
    assert [core.socket for core in kernel.cores] == [0] * 4 + [1] * 4
    assert [one.memory_bytes for one in kernel.domains] == [64 * 1024**3] * 2
    assert [one.distances for one in kernel.domains] == [((0, 10), (1, 21)), ((0, 21), (1, 10))]
    assert [gpu.uuid for gpu in kernel.gpus] == ["GPU-000000aa", "GPU-000000bb", "GPU-000000cc"]
    assert [gpu.address for gpu in kernel.gpus] == [gpu.address for gpu in MACHINE.gpus]
    assert (got.cores, got.domains, got.nics) == (kernel.cores, kernel.domains, kernel.nics)
    assert [(gpu.address, gpu.uuid) for gpu in got.gpus] == [
        (gpu.address, gpu.uuid) for gpu in kernel.gpus
    ]


@pytest.mark.parametrize("names", [("core", "atom"), ("1024", "512")])
def test_kinds_of_cores(names: tuple[str, str], tmp_path: Path) -> None:
    """Intel's two kinds and ARM's capacities, from hwloc, the kernel and our own JSON."""
    fast, slow = range(8), range(8, 14)
    cores = [(0, 0, (n, n + 1)) for n in fast[::2]] + [(0, 0, (n,)) for n in slow]
    machine = Machine(cores, {0: [10]}, kinds=dict(zip(names, (fast, slow), strict=True)))
    for got in (
        topology_of_text(hwloc_xml(machine)),
        kernel := read_sysfs(*write_sysfs(tmp_path, machine)),
        topology_of_json(json.loads(json.dumps(topology_json(kernel)))),
    ):
        assert [core.kind for core in got.cores] == [names[0]] * 4 + [names[1]] * 6


@pytest.mark.parametrize("version", [1, 2])
def test_exports_of_lstopo(version: int) -> None:
    """Three cores of two threads in each domain; hwloc 1 hangs cores into domains, hwloc 2 not."""
    got = read_topology(Path(__file__).parent / "lstopo" / f"four-domains-v{version}.xml")
    assert [format_list(one.cpus) for one in got.domains] == ["0-5", "6-11", "12-17", "18-23"]
    assert [core.cpus for core in got.cores] == [(n, n + 1) for n in range(0, 24, 2)]
    assert [(core.socket, core.domain) for core in got.cores] == [
        (n // 6, n // 3) for n in range(12)
    ]
    assert {one.memory_bytes for one in got.domains} == {1024**3}
    assert got.warnings == ()


@pytest.mark.parametrize("name", MACHINES)
def test_a_real_machine(name: str) -> None:
    """Domains with their CPUs, cores, and GPUs on their domains."""
    wanted, got = MACHINES[name], read_topology(DATA / name)
    assert {one.number: format_list(one.cpus) for one in got.domains} == wanted.domains
    assert len(got.cores) == wanted.cores
    assert len({core.socket for core in got.cores}) == wanted.sockets
    assert [(gpu.index, gpu.domain) for gpu in got.gpus] == list(enumerate(wanted.gpus))
    if wanted.gpus:
        assert (got.gpus[0].name, got.gpus[0].address) == wanted.first
    assert all(format_list(gpu.cpus) == wanted.domains[gpu.domain or 0] for gpu in got.gpus)
    cpus = [cpu for core in got.cores for cpu in core.cpus]
    assert sorted(cpus) == sorted(cpu for one in got.domains for cpu in one.cpus)
    assert [core.number for core in got.cores] == list(range(len(got.cores)))
    assert [core.cpus[0] for core in got.cores] == sorted(core.cpus[0] for core in got.cores)


def test_memory_distances_and_uuids() -> None:
    """In bytes, the kernel's, and NVML's; NVSwitches of a DGX-2 are no GPUs."""
    power = read_topology(DATA / "hwloc/power8gpudistances.xml")
    assert [one.memory_bytes for one in power.domains] == [68556816384, 68450713600]
    assert [dict(one.distances) for one in power.domains] == [{0: 10, 1: 40}, {0: 40, 1: 10}]
    dgx = read_topology(DATA / "hwloc/nvidiaDGX2.xml")
    assert dgx.gpus[0].uuid == "GPU-d3977428-7a30-086b-2e20-5c1eeed647c6"
    assert dgx.gpus[15].address == "0000:e7:00.0"
    assert len({gpu.uuid for gpu in dgx.gpus}) == 16
