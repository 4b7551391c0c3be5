"""One machine told in several formats gives the same facts that placement goes by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.topology import Topology, read_sysfs
from hpml_orchestrator.topology.recognise import topology_of_text
from tests.unit.topology.machines import hwloc_xml, nccl_xml, nvidia_smi, two_sockets, write_sysfs

MACHINE, LINKS = two_sockets()


def facts(topology: Topology) -> dict[str, Any]:
    """What a plan depends on; GPUs by their number, for names differ."""
    number = {gpu.name: gpu.index for gpu in topology.gpus}
    return {
        "cores": [(core.domain, core.cpus) for core in topology.cores],
        "domains": [(one.number, one.cpus) for one in topology.domains],
        "gpus": [(gpu.domain, gpu.cpus) for gpu in topology.gpus],
        "nics": [(nic.name, nic.domain) for nic in topology.nics],
        "links": sorted((number[gpu], nic, level) for gpu, nic, level in topology.links),
    }


EXPECTED = {
    "cores": [(n // 4, (n, n + 8)) for n in range(8)],
    "domains": [(0, (0, 1, 2, 3, 8, 9, 10, 11)), (1, (4, 5, 6, 7, 12, 13, 14, 15))],
    "gpus": [
        (1, (4, 5, 6, 7, 12, 13, 14, 15)),
        (1, (4, 5, 6, 7, 12, 13, 14, 15)),
        (0, (0, 1, 2, 3, 8, 9, 10, 11)),
    ],
    "nics": [("mlx5_0", 1)],
    "links": [(0, "mlx5_0", "PIX"), (1, "mlx5_0", "NODE"), (2, "mlx5_0", "SYS")],
}


@pytest.mark.parametrize(
    "text",
    [
        hwloc_xml(MACHINE, 3),
        hwloc_xml(MACHINE, 2),
        hwloc_xml(MACHINE, 1),
        nccl_xml(MACHINE),
        nvidia_smi(MACHINE, LINKS),
        nvidia_smi(MACHINE, LINKS, tabs=False),
    ],
    ids=["hwloc-3", "hwloc-2", "hwloc-1", "nccl", "nvidia-smi", "nvidia-smi-spaces"],
)
def test_a_text_gives_the_facts(text: str) -> None:
    """Cores, domains, GPUs, cards and links are those of the machine."""
    assert facts(topology_of_text(text)) == EXPECTED


def test_sysfs_gives_the_facts(tmp_path: Path) -> None:
    """So does the kernel's own description, with sockets, memory, distances and UUIDs besides."""
    got = read_sysfs(*write_sysfs(tmp_path, MACHINE))
    assert facts(got) == EXPECTED
    assert got.warnings == ()
    assert [core.socket for core in got.cores] == [0] * 4 + [1] * 4
    assert [one.memory_bytes for one in got.domains] == [64 * 1024**3] * 2
    assert [one.distances for one in got.domains] == [((0, 10), (1, 21)), ((0, 21), (1, 10))]
    assert [gpu.uuid for gpu in got.gpus] == ["GPU-000000aa", "GPU-000000bb", "GPU-000000cc"]
    assert [gpu.address for gpu in got.gpus] == ["0000:43:00.0", "0000:83:00.0", "0000:c3:00.0"]


@pytest.mark.parametrize("version", [1, 2, 3])
def test_hwloc_tells_what_sysfs_tells(tmp_path: Path, version: int) -> None:
    """Sockets, memory, distances, addresses and UUIDs are the same in both."""
    kernel, hwloc = (
        read_sysfs(*write_sysfs(tmp_path, MACHINE)),
        topology_of_text(hwloc_xml(MACHINE, version)),
    )
    assert hwloc.cores == kernel.cores
    assert hwloc.domains == kernel.domains
    assert [(gpu.address, gpu.uuid) for gpu in hwloc.gpus] == [
        (gpu.address, gpu.uuid) for gpu in kernel.gpus
    ]
    assert hwloc.nics == kernel.nics
