"""Machines as plain data, and in the formats of the kernel and hwloc."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

GPU_CLASS, NIC_CLASS, BRIDGE_CLASS = 0x030200, 0x020700, 0x060400
NVIDIA, AMD, MELLANOX, PLX = 0x10DE, 0x1002, 0x15B3, 0x10B5


@dataclass(frozen=True)
class Device:
    """A PCI device: its kind (`gpu` or `nic`), and the bridges above it from the host bridge on."""

    kind: str
    name: str
    address: str
    bridges: tuple[str, ...]
    domain: int
    uuid: str = ""
    vendor: int = NVIDIA

    @property
    def pci_class(self) -> int:
        return GPU_CLASS if self.kind == "gpu" else NIC_CLASS


@dataclass(frozen=True)
class Machine:
    """Cores as (socket, domain, CPUs), distances by domain, devices; 64 GiB in each domain."""

    cores: Sequence[tuple[int, int, tuple[int, ...]]]
    distances: dict[int, list[int]]
    devices: Sequence[Device] = ()
    memory_kib: int = 64 * 1024**2
    kinds: dict[str, Sequence[int]] = field(default_factory=dict)  # `core`, `atom` or a capacity

    def cpus(self, domain: int) -> list[int]:
        return sorted(cpu for _, home, cpus in self.cores for cpu in cpus if home == domain)

    @property
    def gpus(self) -> list[Device]:
        return [one for one in self.devices if one.kind == "gpu"]

    @property
    def nics(self) -> list[Device]:
        return [one for one in self.devices if one.kind == "nic"]


def mask(cpus: Sequence[int], words: int = 4) -> str:
    """A mask in words of 32 bits, the highest first, as the kernel writes it."""
    value = sum(1 << cpu for cpu in cpus)
    return ",".join(f"{value >> 32 * n & 0xFFFFFFFF:08x}" for n in reversed(range(words)))


def numbers(cpus: Sequence[int]) -> str:
    """A list without ranges: legal, and not what the code under test writes."""
    return ",".join(str(cpu) for cpu in cpus)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def write_sysfs(root: Path, machine: Machine) -> tuple[str, str]:
    """Write /sys and /proc below a directory; return both."""
    sys_root, proc_root = root / "sys", root / "proc"
    cpu_root = sys_root / "devices/system/cpu"
    everything = sorted(cpu for _, _, cpus in machine.cores for cpu in cpus)
    write(cpu_root / "online", numbers(everything))
    for socket, _, cpus in machine.cores:
        for cpu in cpus:
            write(cpu_root / f"cpu{cpu}/topology/thread_siblings_list", numbers(cpus))
            write(cpu_root / f"cpu{cpu}/topology/core_cpus_list", numbers(cpus))
            write(cpu_root / f"cpu{cpu}/topology/physical_package_id", str(socket))
    for number, row in machine.distances.items():
        node = sys_root / f"devices/system/node/node{number}"
        write(node / "cpulist", numbers(machine.cpus(number)))
        write(node / "distance", " ".join(map(str, row)))
        write(node / "meminfo", f"Node {number} MemTotal:       {machine.memory_kib} kB")
    for kind, alike in machine.kinds.items():
        for cpu in alike if kind.isdecimal() else ():
            write(cpu_root / f"cpu{cpu}/cpu_capacity", kind)
        if not kind.isdecimal():
            write(sys_root / f"devices/cpu_{kind}/cpus", numbers(alike))
    (sys_root / "bus/pci/devices").mkdir(parents=True)
    for device in machine.devices:
        place = sys_root / "devices"
        for bridge in device.bridges:
            place /= bridge
            if not bridge.startswith("pci"):
                pci(sys_root, place, BRIDGE_CLASS, PLX)
        place /= device.address
        pci(sys_root, place, device.pci_class, device.vendor)
        write(place / "numa_node", str(device.domain))
        write(place / "local_cpulist", numbers(machine.cpus(device.domain)))
        write(place / "local_cpus", mask(machine.cpus(device.domain)))
        if device.kind == "nic":
            link = sys_root / "class/infiniband" / device.name
            link.mkdir(parents=True)
            (link / "device").symlink_to(place)
        elif device.vendor == NVIDIA:
            write(
                proc_root / f"driver/nvidia/gpus/{device.address}/information",
                f"Model: \t\t NVIDIA A100\nIRQ:   \t\t 1\nGPU UUID: \t {device.uuid}\n"
                f"Bus Location: \t {device.address}\nDevice Minor: \t {device.name[3:]}",
            )
    return str(sys_root), str(proc_root)


def pci(sys_root: Path, place: Path, kind: int, vendor: int) -> None:
    write(place / "class", f"0x{kind:06x}")
    write(place / "vendor", f"0x{vendor:04x}")
    link = sys_root / "bus/pci/devices" / place.name
    if not link.is_symlink():
        link.symlink_to(place)


def hwloc_xml(machine: Machine, version: int = 3) -> str:
    """What lstopo of hwloc 2 and 3 exports: domains hang from sockets."""
    lines = ['<?xml version="1.0" encoding="UTF-8"?>', '<!DOCTYPE topology SYSTEM "hwloc2.dtd">']
    lines.append(f'<topology version="{version}.0">')
    everything = [cpu for _, _, cpus in machine.cores for cpu in cpus]
    lines.append(f'<object type="Machine" os_index="0" cpuset="{hwloc_mask(everything)}">')
    rows = [str(value) for row in machine.distances.values() for value in row]
    for number in machine.distances:
        home = [(socket, cpus) for socket, domain, cpus in machine.cores if domain == number]
        cpuset = hwloc_mask(machine.cpus(number))
        node = (
            f'<object type="NUMANode" os_index="{number}" cpuset="{cpuset}" '
            f'local_memory="{machine.memory_kib * 1024}"'
        )
        socket = home[0][0] if home else 0
        if not home:
            lines.append(f'{node} subtype="GPUMemory"/>')
            continue
        lines += [f'<object type="Package" os_index="{socket}" cpuset="{cpuset}">', f"{node}/>"]
        for index, (_, cpus) in enumerate(home):
            core = f'<object type="Core" os_index="{index}" cpuset="{hwloc_mask(cpus)}">'
            units = [
                f'<object type="PU" os_index="{cpu}" cpuset="{hwloc_mask([cpu])}"/>' for cpu in cpus
            ]
            lines += [core, *units, "</object>"]
        for device in machine.devices:
            if device.domain == number:
                lines += hwloc_device(device, rdma=32 if version > 2 else 3)
        lines.append("</object>")
    indexes = " ".join(map(str, machine.distances))
    lines += [
        "</object>",
        f'<distances2 type="NUMANode" nbobjs="{len(machine.distances)}" kind="5" indexing="os">',
        f'<indexes length="{len(indexes)}">{indexes} </indexes>',
        *(f'<u64values length="3">{value} </u64values>' for value in rows),
        "</distances2>",
        *(hwloc_kind(kind, cpus) for kind, cpus in machine.kinds.items()),
        "</topology>",
    ]
    return "\n".join([*lines, ""])


def hwloc_mask(cpus: Sequence[int], words: int = 4) -> str:
    return ",".join(f"0x{word}" for word in mask(cpus, words).split(","))


def hwloc_kind(kind: str, cpus: Sequence[int]) -> str:
    """As on a laptop of 2026, where the kernel gives both kinds capacity 1024."""
    infos = {"FrequencyMaxMHz": "3800", "LinuxCapacity": kind if kind.isdecimal() else "1024"}
    infos |= {} if kind.isdecimal() else {"CoreType": f"Intel{kind.title()}"}
    rows = "".join(f'<info name="{name}" value="{value}"/>' for name, value in infos.items())
    return f'<cpukind cpuset="{hwloc_mask(cpus)}" forced_efficiency="0">{rows}</cpukind>'


def hwloc_device(device: Device, rdma: int) -> list[str]:
    kind, vendor = device.pci_class >> 8, device.vendor
    domain, bus = device.bridges[0].removeprefix("pci").split(":")
    lines = [f'<object type="Bridge" bridge_type="0-1" bridge_pci="{domain}:[{bus}-ff]">']
    lines += [
        f'<object type="Bridge" bridge_type="1-1" pci_busid="{bridge}">'
        for bridge in device.bridges[1:]
    ]
    lines.append(
        f'<object type="PCIDev" pci_busid="{device.address}" '
        f'pci_type="{kind:04x} [{vendor:04x}:1db8] [0000:0000] a1 00">'
    )
    if device.kind == "gpu":
        lines += [
            f'<object type="OSDev" name="nvml{device.name[3:]}" osdev_type="12">',
            f'<info name="NVIDIAUUID" value="{device.uuid}"/></object>',
        ]
    else:
        lines.append(f'<object type="OSDev" name="{device.name}" osdev_type="{rdma}"/>')
    return [*lines, *["</object>"] * (len(device.bridges) + 1)]


def two_sockets() -> Machine:
    """Two domains of 4 cores with 2 threads, a card behind the switch of GPU 0.

    GPU 0 and 1 are on domain 1, GPU 2 on domain 0: the order is reversed and the load uneven.
    """
    cores = [(n // 4, n // 4, (n, n + 8)) for n in range(8)]
    left = ("pci0000:40", "0000:40:01.1", "0000:41:00.0")
    devices = [
        Device("gpu", "GPU0", "0000:43:00.0", (*left, "0000:42:00.0"), 1, "GPU-000000aa"),
        Device("gpu", "GPU1", "0000:83:00.0", ("pci0000:80", "0000:80:01.1"), 1, "GPU-000000bb"),
        Device("gpu", "GPU2", "0000:c3:00.0", ("pci0000:c0", "0000:c0:01.1"), 0, "GPU-000000cc"),
        Device("nic", "mlx5_0", "0000:44:00.0", (*left, "0000:42:04.0"), 1, vendor=MELLANOX),
    ]
    return Machine(cores, {0: [10, 21], 1: [21, 10]}, devices)
