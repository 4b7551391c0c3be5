"""NCCL's and RCCL's topology file (`NCCL_TOPO_DUMP_FILE`) as a `Topology`."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.topology.build import (
    DeviceLocation,
    Devices,
    cores_without_siblings,
    domain_of_cpus,
    free_number,
    walk,
)
from hpml_orchestrator.topology.cpulist import CPUS_MAX, format_list, parse_list, parse_mask
from hpml_orchestrator.topology.model import Domain, Topology
from hpml_orchestrator.topology.pci import PciPath, full_address, is_gpu, is_nic

if TYPE_CHECKING:
    import xml.etree.ElementTree as ET
    from collections.abc import Sequence

_SOURCE = "NCCL XML"
_BRIDGE, _DISPLAY, _ACCELERATOR = 0x0604, 0x03, 0x12
_AMD_VENDORS = {0x1002, 0x1022}
_INTERFACE = re.compile(r"eth|en[opsx]|ib[0-9]|bond|wl|$")  # what is no RDMA device's name


def nccl_topology(root: ET.Element) -> Topology:
    """Return the node that a NCCL or RCCL topology file describes.

    Raises:
        InputError: the file is not from NCCL, is damaged, or describes several nodes.
    """
    parts = root.findall("cpu")
    if not parts:
        raise InputError("is no NCCL topology: <system> with a <cpu> is missing")
    if len({part.get("host_hash") for part in parts}) > 1:
        raise InputError(
            "describes several nodes", hint="dump it from a job on one node: NCCL_TOPO_DUMP_FILE"
        )
    try:
        return _topology(parts)
    except ValueError as error:
        raise InputError(f"is no NCCL topology that hpml understands: {error}") from None


def _topology(parts: Sequence[ET.Element]) -> Topology:
    warnings: list[str] = []
    domains = _domains(parts, warnings)
    cores, note = cores_without_siblings(domains)
    warnings.append(note)
    devices = Devices()
    numbers = [_number(gpu.get("dev", "")) for part in parts for gpu in part.iter("gpu")]
    pci = [(part, device, above) for part in parts for device, above in walk(part, "pci")]
    in_order = len(set(numbers)) == len(numbers) and not any(
        _is_bare_gpu(device) for _, device, _ in pci
    )
    if not in_order:
        warnings.append("GPUs have no numbers in the file: they are counted by PCI address.")
    for part, device, above in pci:
        if not _is_end(device):
            continue
        place = _place(part, device, above, domains)
        vendor, kind = _hex(device, "vendor"), _hex(device, "class") >> 8
        gpus = device.findall("gpu")
        for partition, gpu in enumerate(gpus):  # several are partitions of one GPU
            number = _number(gpu.get("dev", "")) if in_order else CPUS_MAX
            devices.add_gpu(
                place,
                partition=partition,
                number=number,
                name=f"GPU{number}" if in_order else "",
                vendor=vendor,
                kind=kind,
                named=True,
            )
        if _is_bare_gpu(device):
            devices.add_gpu(place, vendor=vendor, kind=kind)
        for name in _nic_names(device, kind):
            rdma = not _INTERFACE.match(name)
            devices.add_nic(place, name, rdma=rdma, kind=kind, vendor=vendor)
    for net in (net for part in parts for net in part.findall("nic/net")):
        # Without a PCI device NCCL puts a card below the first <cpu>, wherever it is.
        name = net.get("name", "")
        devices.add_nic(DeviceLocation(), name, rdma=not _INTERFACE.match(name))
        warnings.append(f"The place of the network card {name} is unknown.")
    topology = devices.topology(_SOURCE, cores, domains, warnings, sockets_told=False)
    # Behind one <cpu> there may be several host bridges: NODE is what is certain.
    links = ((gpu, nic, level.replace("PHB", "NODE")) for gpu, nic, level in topology.links)
    return replace(topology, links=tuple(links))


def _domains(parts: Sequence[ET.Element], warnings: list[str]) -> tuple[Domain, ...]:
    """Return the domains, each CPU in one of them; those with a numaid of -1 come last."""
    cpus_of: dict[int, set[int]] = {}
    for part in sorted(parts, key=lambda part: _domain_number(part) is None):
        number, cpus = _domain_number(part), set(_cpus(part))
        taken = cpus & set().union(*cpus_of.values())
        if number in cpus_of:
            raise ValueError(f"domain {number} is listed twice")
        if number is None:
            if cpus == taken and cpus_of:
                continue
            number = free_number(cpus_of)
            warnings.append(
                "NCCL knew no NUMA domain (numaid -1): "
                f"the CPUs {format_list(cpus - taken)} count as domain {number}."
            )
        elif taken:
            warnings.append(
                f"The CPUs {format_list(taken)} are listed for two domains: the first has them."
            )
        if not cpus:
            warnings.append(f"The file has no CPUs of domain {number}: its ranks run elsewhere.")
        cpus_of[number] = cpus - taken
    if not any(cpus_of.values()):
        warnings.append("The file has no CPUs.")
    missing = set(range(max(cpus_of, default=0))) - set(cpus_of)
    if missing:
        warnings.append(
            f"The NUMA domains {format_list(missing)} are missing: NCCL lists those with devices."
        )
    return tuple(Domain(number, tuple(sorted(cpus_of[number]))) for number in sorted(cpus_of))


def _place(
    part: ET.Element, device: ET.Element, above: tuple[ET.Element, ...], domains: Sequence[Domain]
) -> DeviceLocation:
    """Return where a device behind a `<cpu>` is; all CPUs of the node say nothing about that."""
    domain, cpus = _domain_number(part), _cpus(part)
    if domain is not None:
        domain = domain if cpus else None
    elif set(cpus) == {cpu for home in domains for cpu in home.cpus}:
        cpus = ()
    else:
        domain = domain_of_cpus(cpus, domains)
    own = frozenset(
        bridge.get("busid", "")
        for bridge in above
        if _hex(bridge, "vendor") in _AMD_VENDORS and len(bridge.findall("pci")) == 1
    )
    # NCCL's tree has one entry per switch, and no host bridges.
    bridges = (f"domain {part.get('numaid')}", *(bridge.get("busid", "") for bridge in above))
    address = device.get("busid", "")
    return DeviceLocation(
        full_address(address) or address, domain, cpus, PciPath(bridges, own, hops=0)
    )


def _cpus(part: ET.Element) -> tuple[int, ...]:
    """Return the CPUs of a domain: NCCL writes a mask, and files by hand may have a list."""
    text = part.get("affinity") or "0"
    return parse_list(text) if "-" in text else parse_mask(text)


def _is_end(device: ET.Element) -> bool:
    """Return whether an entry is a device and no bridge.

    Files by hand give devices the class of the bridge that they copied.
    """
    has_device = any(device.find(tag) is not None for tag in ("gpu", "nic", "net"))
    is_bridge = device.find("pci") is not None or _hex(device, "class") >> 8 == _BRIDGE
    return has_device or not is_bridge


def _is_bare_gpu(device: ET.Element) -> bool:
    """Return whether a device is a GPU that the library has not numbered.

    Old files have no vendors: a display or an accelerator is one.
    """
    vendor, kind = _hex(device, "vendor"), _hex(device, "class") >> 8
    gpu = is_gpu(vendor, kind) if vendor else kind >> 8 in {_DISPLAY, _ACCELERATOR}
    return gpu and device.find("gpu") is None and _is_end(device)


def _nic_names(device: ET.Element, kind: int) -> list[str]:
    """Return the names of a card's ports, empty for a card without a name.

    Files by hand name the card, or leave <nic> out.
    """
    nets = [*device.findall("nic/net"), *device.findall("net")]
    cards = nets or device.findall("nic")
    if not cards and is_nic(kind):
        return [""]
    return [name for card in cards if (name := card.get("name", ""))]


def _domain_number(part: ET.Element) -> int | None:
    text = part.get("numaid", "-1").strip()
    return None if text.startswith("-") else _number(text)


def _number(text: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) >= CPUS_MAX:
        raise ValueError(f"{text[:40]!r} is not the number of a device or domain")
    return int(text)


def _hex(element: ET.Element, name: str) -> int:
    text = element.get(name, "0x0")
    try:
        return int(text[:12], 16)
    except ValueError:
        raise ValueError(f"{name}={text[:40]!r} is not a hexadecimal number") from None
