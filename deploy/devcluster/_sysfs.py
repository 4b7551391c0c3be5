"""The /sys and /proc/driver of a machine, and how they are laid over the real ones.

What a machine has is written as plain files. All else that the real /sys has in the same folders
is kept: an empty place is made for each, and a node mounts the real thing there (see _nodes).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from _machines import NVIDIA

if TYPE_CHECKING:
    from collections.abc import Iterable

    from _machines import Device, Machine

_BRIDGE_CLASS, _BRIDGE_VENDOR = 0x060400, 0x10B5
_KIB = 1024
_MASK_BITS = 32
# Folders that are laid over those of /sys and /proc, see _nodes.
OVER = {
    "sys/devices": "/sys/devices",
    "sys/class": "/sys/class",
    "sys/bus/pci/devices": "/sys/bus/pci/devices",
    "sys/bus/cpu/devices": "/sys/bus/cpu/devices",  # where some hwlocs look for CPUs and domains
    "sys/bus/node/devices": "/sys/bus/node/devices",
    "proc/driver": "/proc/driver",
}
# Nothing of the real contents of these is shown.
_REPLACED = {"devices/system/cpu", "devices/system/node", "class/infiniband", "class/net"}


def write_tree(machine: Machine, root: Path) -> list[tuple[str, str]]:
    """Writes the folders of a machine; returns what a node has to mount: real path and place."""
    sys_root = root / "sys"
    _write_cpus(machine, sys_root / "devices" / "system" / "cpu")
    _write_domains(machine, sys_root / "devices" / "system" / "node")
    for folder in (sys_root / "bus/pci/devices", sys_root / "class/net", root / "proc/driver"):
        folder.mkdir(parents=True)
    for device in (*machine.gpus, *machine.nics):
        _write_device(machine, sys_root, device)
        if device.kind == "gpu" and device.vendor == NVIDIA:
            _write_driver(root / "proc" / "driver", device)
    _keep_virtual_interfaces(sys_root / "class" / "net")
    binds: list[tuple[str, str]] = []
    for name in ("devices", "class"):
        _keep_real(Path("/sys"), sys_root, name, binds)
    return binds


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n", encoding="ascii")


def cpu_list(cpus: Iterable[int]) -> str:
    """Writes CPUs as the kernel does: `0-15,128-143`."""
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and ranges[-1][1] == cpu - 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def _mask(cpus: Iterable[int], count: int) -> str:
    value = sum(1 << cpu for cpu in cpus)
    words = (count + _MASK_BITS - 1) // _MASK_BITS
    parts = (value >> _MASK_BITS * word & 0xFFFFFFFF for word in reversed(range(words)))
    return ",".join(f"{part:08x}" for part in parts)


def _write_both(folder: Path, name: str, cpus: Iterable[int], count: int) -> None:
    cpus = tuple(cpus)
    _write(folder / name, _mask(cpus, count))
    _write(folder / f"{name}_list", cpu_list(cpus))


def _write_cpus(machine: Machine, root: Path) -> None:
    everything = cpu_list(range(machine.cpus))
    for name in ("online", "possible", "present"):
        _write(root / name, everything)
    _write(root / "offline", "")
    _write(root / "kernel_max", "8191")
    _write(root / "smt" / "active", str(int(machine.threads > 1)))
    for core in range(machine.all_cores):
        socket, within = divmod(core, machine.cores_per_socket)
        cpus = machine.core_cpus(core)
        for cpu in cpus:
            place = root / f"cpu{cpu}" / "topology"
            for name in ("thread_siblings", "core_cpus"):
                _write_both(place, name, cpus, machine.cpus)
            for name in ("core_siblings", "package_cpus", "die_cpus"):
                _write_both(place, name, machine.socket_cpus(socket), machine.cpus)
            _write(place / "physical_package_id", str(socket))
            _write(place / "die_id", "0")
            _write(place / "core_id", str(within))
            if cpu:  # the first one cannot be switched off
                _write(root / f"cpu{cpu}" / "online", "1")
            domain = core // machine.cores
            (root / f"cpu{cpu}" / f"node{domain}").symlink_to(f"../../node/node{domain}")
            _link(root.parents[2] / "bus" / "cpu" / "devices" / f"cpu{cpu}", root / f"cpu{cpu}")


def _write_domains(machine: Machine, root: Path) -> None:
    everything = cpu_list(range(machine.all_domains))
    for name in ("online", "possible", "has_cpu", "has_memory", "has_normal_memory"):
        _write(root / name, everything)
    memory = machine.memory_mib // machine.all_domains * _KIB
    for number in range(machine.all_domains):
        node, cpus = root / f"node{number}", machine.domain_cpus(number)
        _write(node / "cpulist", cpu_list(cpus))
        _write(node / "cpumap", _mask(cpus, machine.cpus))
        _write(node / "distance", " ".join(map(str, machine.distances(number))))
        _write(
            node / "meminfo",
            f"Node {number} MemTotal:       {memory} kB\n"
            f"Node {number} MemFree:        {memory} kB\n"
            f"Node {number} MemUsed:        0 kB",
        )
        for cpu in cpus:
            (node / f"cpu{cpu}").symlink_to(f"../../cpu/cpu{cpu}")
        _link(root.parents[2] / "bus" / "node" / "devices" / node.name, node)


def _bridges(machine: Machine, device: Device) -> tuple[str, ...]:
    """Gives the bridges above a device: what hangs below one host bridge shares a switch there."""
    same = [one for one in (*machine.gpus, *machine.nics) if one.root == device.root]
    bus = int(device.root, 16)
    port = (f"pci0000:{device.root}", f"0000:{device.root}:1e.1")
    if len(same) == 1:
        return port
    slot = same.index(device)
    return (*port, f"0000:{bus + 1:02x}:1e.0", f"0000:{bus + 2:02x}:1f.{slot}")


def _write_device(machine: Machine, sys_root: Path, device: Device) -> None:
    host, *bridges = _bridges(machine, device)
    place = sys_root / "devices" / host
    for bridge in bridges:
        place /= bridge
        _write_pci(sys_root, place, _BRIDGE_CLASS, _BRIDGE_VENDOR)
    place /= device.address
    _write_pci(sys_root, place, device.pci_class, device.vendor)
    _write(place / "numa_node", str(device.domain))
    cpus = machine.domain_cpus(device.domain)
    _write(place / "local_cpulist", cpu_list(cpus))
    _write(place / "local_cpus", _mask(cpus, machine.cpus))
    if device.kind == "gpu":
        if device.vendor != NVIDIA:
            _write(place / "unique_id", device.identity.hex[:16])
        return
    own = place / device.kind / device.name
    own.mkdir(parents=True)
    (own / "device").symlink_to(f"../../../{device.address}")
    _link(sys_root / "class" / device.kind / device.name, own)


def _write_pci(sys_root: Path, place: Path, kind: int, vendor: int) -> None:
    _write(place / "class", f"0x{kind:06x}")
    _write(place / "vendor", f"0x{vendor:04x}")
    _link(sys_root / "bus" / "pci" / "devices" / place.name, place)


def _link(link: Path, target: Path) -> None:
    """Makes a link of sysfs's kind, which holds wherever the tree is mounted."""
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink():
        link.symlink_to(os.path.relpath(target, link.parent))


def _write_driver(root: Path, gpu: Device) -> None:
    _write(
        root / "nvidia" / "gpus" / gpu.address / "information",
        f"Model: \t\t Virtual\nGPU UUID: \t GPU-{gpu.identity}\n"
        f"Bus Location: \t {gpu.address}\nDevice Minor: \t {gpu.name.removeprefix('GPU')}",
    )


def _keep_virtual_interfaces(folder: Path) -> None:
    """Keeps virtual interfaces such as lo; the real network card is not part of the machine."""
    for link in Path("/sys/class/net").iterdir():
        if link.is_symlink() and "/devices/virtual/" in str(link.readlink()):
            (folder / link.name).symlink_to(link.readlink())


def _keep_real(real: Path, own: Path, name: str, binds: list[tuple[str, str]]) -> None:
    """Makes places for what the real folder has and ours has not."""
    (own / name).mkdir(parents=True, exist_ok=True)
    for entry in sorted((real / name).iterdir()):
        inner = f"{name}/{entry.name}"
        mine = own / inner
        if inner in _REPLACED:
            continue
        if entry.is_symlink():
            if not mine.is_symlink():
                mine.symlink_to(entry.readlink())
        elif not entry.is_dir():
            continue  # a few attributes of folders, which nobody reads
        elif mine.exists():
            _keep_real(real, own, inner, binds)
        else:
            mine.mkdir()
            binds.append((str(entry), str(mine)))
