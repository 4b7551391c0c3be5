"""PCI addresses and classes, and how far apart two devices are."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from hpml_orchestrator.topology.build import name_key
from hpml_orchestrator.topology.model import Gpu, Nic

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_Key = TypeVar("_Key")

__all__ = [
    "PciPath",
    "address_key",
    "compute_gpus",
    "full_address",
    "is_gpu",
    "is_nic",
    "level",
    "links",
    "nic_rank",
    "offered_nics",
    "partition_address",
]

_ADDRESS = re.compile(
    r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})(?:\.([0-7]))?", re.IGNORECASE
)
_NVIDIA, _AMD, _INTEL = 0x10DE, 0x1002, 0x8086
_GPU_CLASSES = {
    _NVIDIA: {0x0300, 0x0302},
    _AMD: {0x0300, 0x0302, 0x0380, 0x1200},
    _INTEL: {0x0380},
}
_VGA = 0x0300
_OLD_ATI = range(0x4000, 0x6000)  # Rage XL, ES1000 and others of before 2008, on server boards
_NETWORK, _SERIAL_INFINIBAND = 0x02, 0x0C06
_FABRIC_CLASSES = {0x0207, 0x0208, _SERIAL_INFINIBAND}  # InfiniBand, Omni-Path, old InfiniBand
_FABRIC_NAMES = re.compile(r"(hfi1|opa|efa|rdmap|cxi|hsn|bxi)\w*")
_CRAY = 0x17DB  # Slingshot
_LAST_FUNCTION = 7


@dataclass(frozen=True)
class PciPath:
    """Where a device hangs.

    Attributes:
        bridges: what lies between the CPU and the device, from the host bridge on.
        own: those of `bridges` that are part of the device's own package.
        hops: how many bridges below the common one still make a single switch: 1 where both ports
            of a switch are told, 0 where a switch is one entry.
        root: whether `bridges` begins with the host bridge.
    """

    bridges: tuple[str, ...]
    own: frozenset[str] = frozenset()
    hops: int = 1
    root: bool = True


def full_address(text: str) -> str:
    """Return an address complete and in lower case; empty where the text is none.

    >>> full_address("C7:00.0"), full_address("00000000:C7:00.0"), full_address("card0")
    ('0000:c7:00.0', '0000:c7:00.0', '')
    """
    match = _ADDRESS.fullmatch(text.strip())
    if not match:
        return ""
    domain, bus, device, function = (int(part or "0", 16) for part in match.groups())
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function:x}"


def address_key(address: str) -> tuple[int, ...]:
    """Return what sorts addresses as numbers, those of several PCI domains too."""
    return tuple(int(part, 16) for part in re.split("[:.]", address) if part)


def partition_address(address: str, number: int) -> str:
    """Return the address of a partition of a GPU, its number in the place of the PCI function.

    So do AMD's tools and HIP name the partitions of an MI300 in TPX or CPX mode, which the kernel
    shows as one PCI device.

    >>> partition_address("0001:02:00.0", 5)
    '0001:02:00.5'
    """
    if not full_address(address):
        return address
    return f"{address[:-1]}{min(int(address[-1]) + number, _LAST_FUNCTION)}"


def is_gpu(vendor: int, device_class: int, device: int = 0) -> bool:
    """Tell whether a PCI device of that vendor, class (16 bits) and id is a GPU that computes.

    A server's graphics chip (ASPEED, Matrox, ATI) and an NVSwitch are none.
    """
    if vendor == _AMD and device_class == _VGA and device in _OLD_ATI:
        return False
    return device_class in _GPU_CLASSES.get(vendor, ())


def compute_gpus(found: Mapping[_Key, tuple[int, int, bool]]) -> list[_Key]:
    """Return those GPUs that compute: a VGA device beside them only draws the screen.

    NVIDIA's VGA devices are cards that compute, too; others count where there is nothing else.

    Args:
        found: GPU -> vendor (0 where not told), class (16 bits), whether a compute library or
            driver names it.
    """
    sure = [
        key
        for key, (vendor, kind, named) in found.items()
        if named or kind != _VGA or vendor == _NVIDIA
    ]
    return sure or list(found)


def is_nic(device_class: int) -> bool:
    """Tell whether a PCI class (16 bits) is a network card's, of Ethernet or of a fabric."""
    return device_class >> 8 == _NETWORK or device_class == _SERIAL_INFINIBAND


def nic_rank(
    name: str, device_class: int, vendor: int = 0, *, rdma: bool, virtual: bool = False
) -> tuple[int, bool]:
    """Return what `offered_nics` chooses network cards by.

    0 is a card of the fabric (InfiniBand, Omni-Path, Slingshot, EFA), 1 another RDMA device (RoCE),
    2 a network interface on a card of the fabric (IPoIB), 3 Ethernet, 4 a card without a name.

    Args:
        name: the device's or interface's; empty where the source tells none.
        device_class: of PCI (16 bits); 0 where it is not told.
        vendor: of PCI; 0 where it is not told.
        rdma: whether the name is an RDMA device's.
        virtual: whether it is a virtual function (SR-IOV).
    """
    fabric = device_class in _FABRIC_CLASSES
    if _FABRIC_NAMES.fullmatch(name) or vendor == _CRAY or (fabric and rdma):
        rank = 0
    elif rdma:
        rank = 1
    elif fabric or name.startswith("ib"):
        rank = 2
    else:
        rank = 3
    return (rank if name else 4), virtual


def offered_nics(ranked: Iterable[tuple[tuple[int, bool], Nic]]) -> tuple[Nic, ...]:
    """Return the network cards that ranks talk through: those of the best rank, by name."""
    best: dict[str, tuple[tuple[int, bool], Nic]] = {}
    for rank, nic in ranked:
        if nic.name not in best or rank < best[nic.name][0]:
            best[nic.name] = (rank, nic)
    least = min((rank for rank, _ in best.values()), default=None)
    return tuple(best[name][1] for name in sorted(best, key=name_key) if best[name][0] == least)


def level(one: PciPath, other: PciPath, *, same_domain: bool) -> str:
    """Return how far apart two devices are: PIX, PXB, PHB, NODE or SYS, as `nvidia-smi` has it.

    PIX is one switch between them, PXB several, PHB the host bridge, NODE two host bridges of one
    NUMA domain, SYS two domains.
    """
    shared = 0
    for mine, theirs in zip(one.bridges, other.bridges):
        if mine != theirs:
            break
        shared += 1
    if shared == 0 or not (one.bridges and other.bridges):
        return "NODE" if same_domain else "SYS"
    if shared == 1 and one.root:
        return "PHB"
    below = [
        sum(bridge not in path.own for bridge in path.bridges[shared:]) for path in (one, other)
    ]
    return "PIX" if max(below) <= one.hops else "PXB"


def links(
    gpus: Sequence[Gpu], nics: Sequence[Nic], paths: Mapping[str, PciPath]
) -> tuple[tuple[str, str, str], ...]:
    """Return the links of each GPU with each card, of which is told enough.

    Args:
        gpus: the GPUs.
        nics: the network cards.
        paths: PCI address -> where that device hangs.
    """
    found = []
    for gpu in gpus:
        for nic in nics:
            one, other = paths.get(gpu.address), paths.get(nic.address)
            known = gpu.domain is not None and nic.domain is not None
            if one and other:
                told = level(one, other, same_domain=gpu.domain == nic.domain)
                if told in {"NODE", "SYS"} and not known:
                    continue
            elif known and gpu.domain != nic.domain:
                told = "SYS"
            else:
                continue
            found.append((gpu.name, nic.name, told))
    return tuple(found)
