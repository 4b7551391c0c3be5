"""The GPUs and network cards of /sys and of NVIDIA's /proc/driver/nvidia."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Optional

from hpml_orchestrator.topology.build import domain_of_cpus, name_key, nearest_with_cpus
from hpml_orchestrator.topology.cpulist import parse_list, parse_mask
from hpml_orchestrator.topology.model import Domain, Gpu, Nic
from hpml_orchestrator.topology.pci import PciPath, address_key, full_address, is_gpu
from hpml_orchestrator.topology.pci import links as pci_links

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Links = tuple[tuple[str, str, str], ...]

__all__ = ["read_devices"]

_NVIDIA = 0x10DE
_VGA = 0x0300
_AMD_VENDORS = frozenset({0x1002, 0x1022})
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
        text = _text(self.bus, address, name)
        return int(text, 16) if re.fullmatch(r"(0x)?[0-9a-fA-F]{1,8}", text) else 0

    def path(self, address: str) -> Optional[PciPath]:  # noqa: UP045
        """Return where a device hangs; None where /sys has no tree."""
        bridges = self.real.get(address, ())[:-1]
        if not bridges:
            return None
        own = frozenset(
            one
            for one in bridges[1:]
            if self.number(one, "vendor") in _AMD_VENDORS and len(self.children.get(one, ())) == 1
        )
        return PciPath(bridges, own)

    def place(self, address: str) -> _Place:
        """Return where a device is. A `numa_node` of -1 says nothing, and is no domain 0."""
        told = _text(self.bus, address, "numa_node")
        cpus = _near_cpus(_text(self.bus, address, "local_cpulist"), parse_list) or _near_cpus(
            _text(self.bus, address, "local_cpus"), parse_mask
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


def _list(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def _text(*parts: str) -> str:
    try:
        with open(os.path.join(*parts), encoding="utf-8", errors="replace") as stream:
            return stream.read(100_000).strip()
    except (OSError, ValueError):
        return ""


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
    found = dict.fromkeys(told)
    kinds = {}
    for address in machine.addresses:
        vendor, kind = machine.number(address, "vendor"), machine.number(address, "class") >> 8
        virtual = os.path.lexists(os.path.join(machine.bus, address, "physfn"))
        # NVIDIA's driver lists the cards that it drives; others are given to virtual machines.
        if is_gpu(vendor, kind) and not virtual and not (told and vendor == _NVIDIA):
            kinds[full_address(address)] = (vendor, kind)
    # Beside NVIDIA's cards, a VGA device of another maker is what the processor draws with.
    nvidia = bool(told) or any(vendor == _NVIDIA for vendor, _ in kinds.values())
    found.update(
        dict.fromkeys(
            address
            for address, (vendor, kind) in kinds.items()
            if not (nvidia and vendor != _NVIDIA and kind == _VGA)
        )
    )
    gpus = []
    for index, address in enumerate(sorted(found, key=address_key)):
        place = machine.place(address)
        uuid = _uuid(driver, told[address]) if address in told else ""
        if not uuid and machine.number(address, "vendor") != _NVIDIA:
            serial = _text(machine.bus, address, "unique_id")  # AMD's, as its tools print it
            uuid = f"GPU-{serial}" if re.fullmatch("[0-9a-f]{1,32}", serial) else ""
        gpus.append(Gpu(index, f"GPU{index}", address, uuid, "", place.domain, place.cpus))
        if place.domain is None:
            warnings.append(f"The NUMA domain of GPU{index} {address} is not told.")
    return gpus


def _uuid(driver: str, name: str) -> str:
    match = re.search(r"^GPU UUID:\s*(\S+)$", _text(driver, name, "information"), re.MULTILINE)
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
        text = _text(root, "gpus", name, "information")
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
    """Return the InfiniBand (and RoCE) devices; without such, the network interfaces on PCI."""
    for group in ("infiniband", "net"):
        root = os.path.join(machine.root, "class", group)
        nics = []
        for name in sorted(_list(root), key=name_key):
            steps = _components(os.path.join(root, name, "device"))
            if len(steps) < 2:  # noqa: PLR2004 - no PCI device: lo, bridges, virtual ones
                continue
            place = machine.place(steps[-1])
            nics.append(Nic(name, full_address(steps[-1]), place.domain, place.cpus))
        if nics:
            return tuple(nics)
    return ()
