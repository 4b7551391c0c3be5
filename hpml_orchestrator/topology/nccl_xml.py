"""NCCL's and RCCL's topology file (`NCCL_TOPO_DUMP_FILE`) as a `Topology`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Optional

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.topology.build import (
    cores_without_siblings,
    domain_of_cpus,
    free_number,
)
from hpml_orchestrator.topology.cpulist import CPUS_MAX, format_list, parse_list, parse_mask
from hpml_orchestrator.topology.model import Domain, Gpu, Nic, Topology
from hpml_orchestrator.topology.pci import (
    PciPath,
    address_key,
    compute_gpus,
    full_address,
    is_gpu,
    is_nic,
    links,
    nic_rank,
    offered_nics,
    partition_address,
)

if TYPE_CHECKING:
    import xml.etree.ElementTree as ET
    from collections.abc import Iterator, Sequence

__all__ = ["nccl_topology"]

_SOURCE = "NCCL XML"
_BRIDGE, _DISPLAY, _ACCELERATOR = 0x0604, 0x03, 0x12
_AMD_VENDORS = {0x1002, 0x1022}
_UNNUMBERED = CPUS_MAX
_INTERFACE = re.compile(r"eth|en[opsx]|ib[0-9]|bond|wl|$")  # what is no RDMA device's name


def nccl_topology(root: ET.Element) -> Topology:
    """Return the node that a NCCL or RCCL topology file describes.

    Args:
        root: the element `<system>`.

    Raises:
        InputError: it is no such file, or describes several nodes.
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
    gpus: list[tuple[int, Gpu]] = []
    kinds: dict[int, tuple[int, int, bool]] = {}
    nics: list[tuple[tuple[int, bool], Nic]] = []
    paths: dict[str, PciPath] = {}
    for part in parts:
        home, cpus = _near(part, domains)
        for device, above in _pci_devices(part):
            address = full_address(device.get("busid", "")) or device.get("busid", "")
            vendor, kind = _hex(device, "vendor"), _hex(device, "class") >> 8
            own = frozenset(
                one.get("busid", "")
                for one in above
                if _hex(one, "vendor") in _AMD_VENDORS and len(one.findall("pci")) == 1
            )
            # NCCL's tree has one entry per switch, and no host bridges.
            bridges = (f"domain {part.get('numaid')}", *(one.get("busid", "") for one in above))
            paths[address] = PciPath(bridges, own, hops=0, root=True)
            numbers = [_number(one.get("dev", "")) for one in device.findall("gpu")]
            is_one = is_gpu(vendor, kind, _hex(device, "device"))
            if not numbers and (is_one or (not vendor and _is_display(kind))):
                numbers = [_UNNUMBERED]
            for place, index in enumerate(numbers):  # several are partitions of one GPU
                one = partition_address(address, place)
                paths[one] = paths[address]
                kinds[len(gpus)] = (vendor, kind, index != _UNNUMBERED)
                gpus.append((index, Gpu(index, "", one, domain=home, cpus=cpus)))
            names = _nic_names(device)
            if not names and is_nic(kind) and _has_no_card(device):
                names = [""]
            for name in names:
                rank = nic_rank(name, kind, vendor, rdma=not _INTERFACE.match(name))
                nics.append((rank, Nic(name or address, address, home, cpus)))
        for net in part.findall("nic/net"):
            # Without a PCI device NCCL puts a card below the first <cpu>, wherever it is.
            name = net.get("name", "")
            nics.append((nic_rank(name, 0, rdma=not _INTERFACE.match(name)), Nic(name)))
            warnings.append(f"The place of the network card {name} is not told.")
    made = _in_order([gpus[place] for place in compute_gpus(kinds)], warnings)
    cards = offered_nics(nics)
    told_links = links(made, cards, paths)
    # Behind one <cpu> there may be several host bridges: NODE is what is certain.
    weakened = tuple((a, b, "NODE" if level == "PHB" else level) for a, b, level in told_links)
    return Topology(
        _SOURCE, cores, domains, made, cards, weakened, tuple(warnings), sockets_told=False
    )


def _domains(parts: Sequence[ET.Element], warnings: list[str]) -> tuple[Domain, ...]:
    """Return the domains that are told, each CPU in one of them."""
    cpus_of: dict[int, tuple[int, ...]] = {}
    taken: set[int] = set()
    unknown: list[tuple[int, ...]] = []
    for part in parts:
        number = _domain_number(part)
        cpus = _cpus(part)
        if number is None:
            unknown.append(cpus)
            continue
        if number in cpus_of:
            raise ValueError(f"domain {number} is told twice")
        if taken & set(cpus):
            both = format_list(taken & set(cpus))
            warnings.append(f"The CPUs {both} are told for two domains: the first has them.")
        cpus_of[number] = tuple(cpu for cpu in cpus if cpu not in taken)
        taken.update(cpus)
        if not cpus:
            warnings.append(
                f"The file tells no CPUs of domain {number}: what is there runs elsewhere."
            )
    _add_unknown(cpus_of, unknown, warnings)
    if not any(cpus_of.values()):
        warnings.append("The file tells no CPUs.")
    missing = sorted(set(range(max(cpus_of, default=0))) - set(cpus_of))
    if missing:
        warnings.append(
            f"Not told are the NUMA domains {format_list(missing)}: NCCL lists those with devices."
        )
    return tuple(Domain(number, cpus_of[number]) for number in sorted(cpus_of))


def _add_unknown(
    cpus_of: dict[int, tuple[int, ...]], unknown: Sequence[tuple[int, ...]], warnings: list[str]
) -> None:
    """Make domains of the CPUs of each numaid of -1, less those that another domain has."""
    alone = len(cpus_of) + len(unknown) == 1
    for cpus in sorted(unknown):
        rest = tuple(sorted(set(cpus).difference(*cpus_of.values())))
        told = "the domain of the devices there is not told"
        if rest or not cpus_of:
            number = free_number(cpus_of)
            cpus_of[number] = rest
            if rest and not alone:
                told = f"the CPUs {format_list(rest)} count as domain {number}"
        warnings.append(f"NCCL knew no NUMA domain (numaid -1): {told}.")


def _near(part: ET.Element, domains: Sequence[Domain]) -> tuple[Optional[int], tuple[int, ...]]:  # noqa: UP045
    """Return the domain and the CPUs of the devices behind a `<cpu>`.

    All CPUs of the node behind a numaid of -1 tell nothing.
    """
    number, cpus = _domain_number(part), _cpus(part)
    if number is not None:
        return (number if cpus else None), cpus
    if set(cpus) == {cpu for one in domains for cpu in one.cpus}:
        return None, ()
    return domain_of_cpus(cpus, domains), cpus


def _cpus(part: ET.Element) -> tuple[int, ...]:
    """Return the CPUs of a domain: NCCL writes a mask, and files by hand may have a list."""
    text = part.get("affinity") or "0"
    return parse_list(text) if "-" in text else parse_mask(text)


def _pci_devices(part: ET.Element) -> Iterator[tuple[ET.Element, tuple[ET.Element, ...]]]:
    """Yield the devices behind a CPU, in order, each with the bridges above it."""
    pending: list[tuple[ET.Element, tuple[ET.Element, ...]]] = [
        (one, ()) for one in reversed(part.findall("pci"))
    ]
    while pending:
        device, above = pending.pop()
        children = device.findall("pci")
        is_end = not children and _hex(device, "class") >> 8 != _BRIDGE
        # Files by hand give devices the class of the bridge that they copied.
        if is_end or any(device.find(tag) is not None for tag in ("gpu", "nic", "net")):
            yield device, above
        pending.extend((child, (*above, device)) for child in reversed(children))


def _nic_names(device: ET.Element) -> list[str]:
    """Return the names of a card's ports; files by hand name the card, or leave <nic> out."""
    nets = [*device.findall("nic/net"), *device.findall("net")]
    found = [one.get("name", "") for one in nets or device.findall("nic")]
    return [name for name in found if name]


def _has_no_card(device: ET.Element) -> bool:
    """Tell whether a file tells devices alone, and not what NCCL made of them."""
    return device.find("nic") is None and device.find("net") is None


def _in_order(gpus: list[tuple[int, Gpu]], warnings: list[str]) -> tuple[Gpu, ...]:
    """Return the GPUs by the library's numbers; without numbers by address, as drivers count."""
    if any(number == _UNNUMBERED for number, _ in gpus):
        warnings.append("GPUs have no numbers in the file: they are counted by PCI address.")
        gpus = [(_UNNUMBERED, gpu) for _, gpu in gpus]
    numbers = [number for number, _ in gpus if number != _UNNUMBERED]
    if len(set(numbers)) < len(numbers):
        raise ValueError("two GPUs have one number")
    ordered = sorted(gpus, key=lambda pair: (pair[0], _key(pair[1].address)))
    return tuple(
        Gpu(
            index,
            f"GPU{index if number == _UNNUMBERED else number}",
            gpu.address,
            domain=gpu.domain,
            cpus=gpu.cpus,
        )
        for index, (number, gpu) in enumerate(ordered)
    )


def _key(address: str) -> tuple[int, ...]:
    return address_key(address) if full_address(address) else (CPUS_MAX,)


def _is_display(kind: int) -> bool:
    """Tell whether a class is a display or an accelerator: old files tell no vendors."""
    return kind >> 8 in {_DISPLAY, _ACCELERATOR}


def _domain_number(part: ET.Element) -> Optional[int]:  # noqa: UP045
    text = part.get("numaid", "-1").strip()
    return None if text.startswith("-") else _number(text)


def _number(text: str) -> int:
    if not (text.isdecimal() and text.isascii() and len(text) < 10 and int(text) < CPUS_MAX):  # noqa: PLR2004
        raise ValueError(f"{text[:40]!r} is no number of a device or domain")
    return int(text)


def _hex(element: ET.Element, name: str) -> int:
    text = element.get(name, "0x0")
    try:
        return int(text[:12], 16)
    except ValueError:
        raise ValueError(f"{name}={text[:40]!r} is no number in hexadecimal") from None
