"""The GPUs and network cards of /sys and of NVIDIA's /proc/driver/nvidia."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Optional

from hpml_orchestrator.topology.build import (
    distinct_uuids,
    domain_of_cpus,
    name_key,
    nearest_with_cpus,
)
from hpml_orchestrator.topology.cpulist import parse_list, parse_mask
from hpml_orchestrator.topology.model import Domain, Gpu, Nic
from hpml_orchestrator.topology.pci import (
    PciPath,
    address_key,
    compute_gpus,
    full_address,
    is_gpu,
    is_nic,
    nic_rank,
    offered_nics,
    partition_address,
)
from hpml_orchestrator.topology.pci import links as pci_links

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Links = tuple[tuple[str, str, str], ...]

__all__ = ["read_devices", "read_text"]

_NVIDIA = 0x10DE
_AMD_VENDORS = frozenset({0x1002, 0x1022})
_PROPERTY = re.compile(r"^(simd_count|location_id|domain|unique_id) ([0-9]{1,20})$", re.MULTILINE)
_UUID = re.compile(r"GPU-[0-9a-fA-F-]{8,64}")
_LISTED_GPU = re.compile(r"GPU ([0-9]{1,4}): .*\(UUID: (GPU-[0-9a-fA-F-]+)\)")
_LISTED_MIG = re.compile(r"\s+MIG (\S+)\s+Device\s+([0-9]{1,4}): \(UUID: (MIG-[\w./-]+)\)")


@dataclass(frozen=True)
class _Place:
    """Where a device is: its domain and its CPUs, as far as they are told."""

    domain: Optional[int]  # noqa: UP045
    cpus: tuple[int, ...]


def read_devices(
    sys_root: str,
    proc_root: str,
    domains: Sequence[Domain],
    warnings: list[str],
    *,
    gpu_listing: str = "",
) -> tuple[tuple[Gpu, ...], tuple[Nic, ...], Links]:
    """Return GPUs, network cards and links of both.

    GPUs come in the order of their PCI addresses, as drivers count; MIG instances behind them.

    Args:
        sys_root: where sysfs is.
        proc_root: where /proc is.
        domains: the NUMA domains that are there.
        warnings: what is missing is added here.
        gpu_listing: what `nvidia-smi -L` printed.
    """
    machine = _Machine(sys_root, domains)
    gpus = _gpus(machine, proc_root, warnings)
    instances = _mig(gpus, proc_root, gpu_listing, warnings)
    nics = _nics(machine)
    addresses = [one.address for one in gpus] + [one.address for one in nics]
    paths = {address: machine.path(address) for address in addresses}
    known = {address: path for address, path in paths.items() if path}
    everything = (*gpus, *instances)
    return everything, nics, pci_links(everything, nics, known)


class _Machine:
    """The PCI devices of a sysfs."""

    def __init__(self, sys_root: str, domains: Sequence[Domain]) -> None:
        self.root = sys_root
        self.domains = domains
        self.cpus = frozenset(cpu for one in domains for cpu in one.cpus)
        self.bus = os.path.join(sys_root, "bus", "pci", "devices")
        self.addresses = [name for name in _list(self.bus) if full_address(name)]
        self.real = {name: _components(os.path.join(self.bus, name)) for name in self.addresses}
        self.children: dict[str, set[str]] = {}
        for steps in self.real.values():
            for depth, above in enumerate(steps[:-1]):
                self.children.setdefault(above, set()).add(steps[depth + 1])

    def number(self, address: str, name: str) -> int:
        """Return a number of a device in hexadecimal; 0 where it is not told."""
        text = read_text(self.bus, address, name)
        return int(text, 16) if re.fullmatch(r"(0x)?[0-9a-fA-F]{1,8}", text) else 0

    def path(self, address: str) -> Optional[PciPath]:  # noqa: UP045
        """Return where a device hangs; None where /sys has no tree.

        A partition of a GPU, which the kernel does not list, is where function 0 is.
        """
        bridges = (self.real.get(address) or self.real.get(f"{address[:-1]}0", ()))[:-1]
        if not bridges:
            return None
        own = frozenset(
            one
            for one in bridges[1:]
            if self.number(one, "vendor") in _AMD_VENDORS and len(self.children.get(one, ())) == 1
        )
        return PciPath(bridges, own)

    def is_virtual(self, address: str) -> bool:
        """Tell whether a device is a virtual function (SR-IOV) of another."""
        return os.path.lexists(os.path.join(self.bus, address, "physfn"))

    def place(self, address: str) -> _Place:
        """Return where a device is. A `numa_node` of -1 says nothing, and is no domain 0."""
        told = read_text(self.bus, address, "numa_node")
        cpus = _near_cpus(read_text(self.bus, address, "local_cpulist"), parse_list) or _near_cpus(
            read_text(self.bus, address, "local_cpus"), parse_mask
        )
        local = tuple(cpu for cpu in cpus if cpu in self.cpus)
        if re.fullmatch("[0-9]{1,5}", told):
            domain = nearest_with_cpus(int(told), self.domains)
            home = next((one for one in self.domains if one.number == domain), None)
            # The domain of a GPU's own memory has no CPUs: those of the nearest count.
            return _Place(domain, local or (home.cpus if home else ()))
        if set(local) == self.cpus:  # what the kernel says where it does not know
            return _Place(None, ())
        return _Place(domain_of_cpus(local, self.domains), local)


def _near_cpus(text: str, parse: Callable[[str], tuple[int, ...]]) -> tuple[int, ...]:
    try:
        return parse(text)
    except ValueError:
        return ()


def read_text(*parts: str) -> str:
    """Return a small file's text; empty where it is not there or cannot be read.

    Linux 5.15-rc1 ends lists and masks of CPUs with a NUL byte.
    """
    try:
        with open(os.path.join(*parts), encoding="utf-8", errors="replace") as stream:
            return stream.read(1_000_000).strip("\0 \t\r\n")
    except (OSError, ValueError):
        return ""


def _list(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def _components(path: str) -> tuple[str, ...]:
    """Return the PCI part of a device's real path, from the host bridge on."""
    parts = os.path.realpath(path).split(os.sep)
    start = next((i for i, part in enumerate(parts) if re.match("pci[0-9a-f]+:", part)), None)
    if start is None:
        return ()
    return (parts[start], *(part for part in parts[start + 1 :] if full_address(part)))


def _gpus(machine: _Machine, proc_root: str, warnings: list[str]) -> list[Gpu]:
    driver = os.path.join(proc_root, "driver", "nvidia", "gpus")
    told = {full_address(name): name for name in _list(driver) if full_address(name)}
    kinds = dict.fromkeys(told, (_NVIDIA, 0, True))
    for address in machine.addresses:
        vendor, kind = machine.number(address, "vendor"), machine.number(address, "class") >> 8
        # NVIDIA's driver lists the cards that it drives; others are given to virtual machines.
        if (
            is_gpu(vendor, kind, machine.number(address, "device"))
            and not machine.is_virtual(address)
            and not (told and vendor == _NVIDIA)
        ):
            kinds[full_address(address)] = (vendor, kind, False)
    found: list[Gpu] = []
    partitions = _partitions(machine)
    for address in sorted(compute_gpus(kinds), key=address_key):
        place = machine.place(address)
        uuid = _uuid(driver, told[address]) if address in told else ""
        if not uuid and machine.number(address, "vendor") != _NVIDIA:
            serial = read_text(machine.bus, address, "unique_id")  # AMD's, as its tools print it
            uuid = f"GPU-{serial}" if re.fullmatch("[0-9a-f]{1,32}", serial) else ""
        for number, own in sorted(partitions.get(address, {0: uuid}).items()):
            index, at = len(found), partition_address(address, number)
            found.append(Gpu(index, f"GPU{index}", at, own, "", place.domain, place.cpus))
            if place.domain is None:
                warnings.append(f"The NUMA domain of GPU{index} {at} is not told.")
    return distinct_uuids(found)


def _partitions(machine: _Machine) -> dict[str, dict[int, str]]:
    """Return PCI address -> partition -> UUID of AMD's GPUs in modes such as CPX and TPX.

    AMD's compute driver lists each partition as a node. It does not let a job read the nodes of
    partitions that its cgroup hides.
    """
    root = os.path.join(machine.root, "devices", "virtual", "kfd", "kfd", "topology", "nodes")
    found: dict[str, dict[int, str]] = {}
    for node in _list(root):
        text = read_text(root, node, "properties")
        told = {name: int(value) for name, value in _PROPERTY.findall(text)}
        place = told.get("location_id", 0)
        if not told.get("simd_count") or not place:  # a processor
            continue
        # The number of the partition is in the upper bits, in Linux before 6.9 in the function.
        slot = f"{told.get('domain', 0):04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}"
        number, function = place >> 28, place & 7
        if function and f"{slot}.{function}" not in machine.real:
            number, function = function, 0
        uuid = f"GPU-{told['unique_id']:016x}" if told.get("unique_id") else ""
        found.setdefault(f"{slot}.{function}", {})[number] = uuid
    return {address: numbers for address, numbers in found.items() if list(numbers) != [0]}


def _uuid(driver: str, name: str) -> str:
    match = re.search(r"^GPU UUID:\s*(\S+)$", read_text(driver, name, "information"), re.MULTILINE)
    return match[1] if match and _UUID.fullmatch(match[1]) else ""


def _mig(gpus: list[Gpu], proc_root: str, gpu_listing: str, warnings: list[str]) -> tuple[Gpu, ...]:
    """Return the MIG instances, by the listing, else by the driver's directory of capabilities."""
    found: list[tuple[Gpu, str, str]] = []
    parent: Optional[Gpu] = None  # noqa: UP045
    # Without any UUID of /proc, the listing's order is that of the addresses.
    listed_gpus = sum(bool(_LISTED_GPU.match(line)) for line in gpu_listing.splitlines())
    by_number = listed_gpus == len(gpus) and not any(one.uuid for one in gpus)
    for line in gpu_listing.splitlines():
        listed, instance = _LISTED_GPU.match(line), _LISTED_MIG.match(line)
        if listed:
            number, uuid = int(listed[1]), listed[2]
            if by_number and number < len(gpus):
                gpus[number] = replace(gpus[number], uuid=uuid)
            parent = next((one for one in gpus if one.uuid == uuid), None)
            if parent is None:
                warnings.append(f"GPU {uuid} of `nvidia-smi -L` is not among those found here.")
        elif instance and parent is not None:
            found.append((parent, f"MIG {instance[1]} {instance[2]}", instance[3]))
    if not gpu_listing:
        found = _mig_of_driver(gpus, proc_root)
        if found:
            warnings.append("The UUIDs of MIG instances are not told: `nvidia-smi -L` has them.")
    return tuple(
        Gpu(
            index=len(gpus) + place,
            name=f"{of.name} {name}",
            address=of.address,
            uuid=uuid,
            parent=of.uuid or of.address,
            domain=of.domain,
            cpus=of.cpus,
        )
        for place, (of, name, uuid) in enumerate(found)
    )


def _mig_of_driver(gpus: Sequence[Gpu], proc_root: str) -> list[tuple[Gpu, str, str]]:
    """Return parent, name and no UUID of each instance that the driver has a directory of."""
    root = os.path.join(proc_root, "driver", "nvidia")
    by_address = {gpu.address: gpu for gpu in gpus}
    minors: dict[str, Gpu] = {}
    for name in _list(os.path.join(root, "gpus")):
        text = read_text(root, "gpus", name, "information")
        match = re.search(r"^Device Minor:\s*([0-9]{1,5})$", text, re.MULTILINE)
        if match and full_address(name) in by_address:
            minors[match[1]] = by_address[full_address(name)]
    found: list[tuple[Gpu, str, str]] = []
    for minor, gpu in minors.items():
        mig = os.path.join(root, "capabilities", f"gpu{minor}", "mig")
        for gi in sorted(_list(mig), key=name_key):
            if not re.fullmatch("gi[0-9]+", gi):
                continue
            found += [
                (gpu, f"MIG {gi}/{ci}", "")
                for ci in sorted(_list(os.path.join(mig, gi)), key=name_key)
                if re.fullmatch("ci[0-9]+", ci)
            ]
    return found


def _nics(machine: _Machine) -> tuple[Nic, ...]:
    """Return the RDMA devices and network interfaces on PCI that ranks talk through."""
    nics = []
    for group in ("infiniband", "net"):
        root = os.path.join(machine.root, "class", group)
        for name in _list(root):
            steps = _components(os.path.join(root, name, "device"))
            if len(steps) < 2:  # noqa: PLR2004 - no PCI device: lo, bridges, virtual ones
                continue
            address = steps[-1]
            kind, vendor = machine.number(address, "class") >> 8, machine.number(address, "vendor")
            if kind and not is_nic(kind):
                continue
            place = machine.place(address)
            virtual, rdma = machine.is_virtual(address), group == "infiniband"
            rank = nic_rank(name, kind, vendor, rdma=rdma, virtual=virtual)
            nics.append((rank, Nic(name, full_address(address), place.domain, place.cpus)))
    return offered_nics(nics)
