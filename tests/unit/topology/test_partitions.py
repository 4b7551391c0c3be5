"""GPUs in partitions (AMD's TPX and CPX modes): each is read, and ranks are planned on all of them.

The machine is a node of El Capitan as lstopo shows it in https://github.com/llnl/mpibind/issues/45:
four MI300A with 24 cores of two threads and one PCI device each, which has three GPUs in TPX mode
and six in CPX mode. The files are written by hand in the documented formats.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpml_orchestrator.placement.planner import plan
from hpml_orchestrator.topology.cpulist import format_list
from hpml_orchestrator.topology.model import Topology, topology_json
from hpml_orchestrator.topology.sysfs import read_sysfs, topology_of_text
from tests.unit.topology.machines import AMD, Device, Machine, hwloc_mask, write, write_sysfs

CORES = [(n // 24, n // 24, (n, n + 96)) for n in range(96)]
SOCKETS = range(4)
MI300A = Machine(
    CORES,
    {n: [10 if n == m else 32 for m in SOCKETS] for n in SOCKETS},
    [
        Device(
            "gpu", f"GPU{n}", f"000{n}:02:00.0", (f"pci000{n}:00", f"000{n}:00:01.1"), n, "", AMD
        )
        for n in SOCKETS
    ],
)


def hwloc(parts: int, name: str) -> Topology:
    """Lstopo's export; with Slingshot's interfaces, and UUIDs that all partitions share."""
    lines = ['<topology version="2.0"><object type="Machine">']
    for socket in SOCKETS:
        cpus = MI300A.cpus(socket)
        place = f'os_index="{socket}" cpuset="{hwloc_mask(cpus, 6)}"'
        lines.append(f'<object type="Package" {place}><object type="NUMANode" {place}/>')
        for _, home, both in CORES:
            if home == socket:
                units = "".join(f'<object type="PU" os_index="{cpu}"/>' for cpu in both)
                lines.append(f'<object type="Core">{units}</object>')
        lines.append(f'<object type="Bridge" bridge_type="0-1" bridge_pci="000{socket}:[00-02]">')
        lines.append(f'<object type="PCIDev" pci_busid="000{socket}:01:00.0" ')
        lines.append('pci_type="0200 [17db:0501] [17db:0000] 02">')
        lines.append(f'<object type="OSDev" name="hsi{socket}" osdev_type="2"/></object>')
        lines.append(f'<object type="PCIDev" pci_busid="000{socket}:02:00.0" ')
        lines.append('pci_type="1200 [1002:74a0] [1002:74a0] 00">')
        for number in range(socket * parts, (socket + 1) * parts):
            lines.append(f'<object type="OSDev" name="{name.format(number)}" osdev_type="5">')
            lines.append(f'<info name="AMDUUID" value="{socket}f"/></object>')
        lines.append("</object></object></object>")
    return topology_of_text("".join([*lines, "</object></topology>"]))


def sysfs(parts: int, root: Path, shift: int) -> Topology:
    """KFD's nodes: processors first; Linux before 6.9 has the partition in the PCI function."""
    roots = write_sysfs(root, MI300A)
    nodes = root / "sys/devices/virtual/kfd/kfd/topology/nodes"
    for number in range(4 + 4 * parts):
        socket, part = divmod(number - 4, parts)
        told = f"simd_count 0\nlocation_id 0\ndomain 0\nunique_id {7 + number}"
        if number >= 4:
            place = 0x200 | part << shift
            told = f"cpu_cores_count 0\nsimd_count 152\nlocation_id {place}\ndomain {socket}\n"
            told += f"drm_render_minor {128 + number}\nunique_id {7 + number}"
        write(nodes / str(number) / "properties", told)
    return read_sysfs(*roots)


@pytest.mark.parametrize("parts", [3, 6], ids=["TPX", "CPX"])
@pytest.mark.parametrize("source", ["rsmi{}", "kfd", "kfd before 6.9"])
def test_ranks_are_planned_on_all_partitions(source: str, parts: int, tmp_path: Path) -> None:
    """Each partition has a separate address, is on its GPU's domain, and gets cores there."""
    if source.startswith("kfd"):
        got = sysfs(parts, tmp_path, 0 if "before" in source else 28)
    else:
        got = hwloc(parts, source)
        assert [(nic.name, nic.domain) for nic in got.nics] == [(f"hsi{n}", n) for n in SOCKETS]
    assert [gpu.address for gpu in got.gpus] == [
        f"000{socket}:02:00.{part}" for socket in SOCKETS for part in range(parts)
    ]
    assert [gpu.domain for gpu in got.gpus] == [n // parts for n in range(4 * parts)]
    uuids = [gpu.uuid for gpu in got.gpus]
    assert (len(set(uuids)) == len(uuids)) if source.startswith("kfd") else not any(uuids)
    made = plan(got, 4 * parts)
    size = 24 // parts
    assert [one.cpu_list() for one in made.ranks] == [
        format_list([*range(n * size, (n + 1) * size), *range(96 + n * size, 96 + (n + 1) * size)])
        for n in range(4 * parts)
    ]
    assert [one.gpu for one in made.ranks] == [gpu.address for gpu in got.gpus]
    assert topology_of_text(json.dumps(topology_json(got))) == got
