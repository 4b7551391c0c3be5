"""PCI addresses and classes, and the distance between two devices."""

from __future__ import annotations

import re
from dataclasses import dataclass

_ADDRESS = re.compile(
    r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})(?:\.([0-7]))?", re.IGNORECASE
)
NVIDIA, _AMD, _INTEL = 0x10DE, 0x1002, 0x8086
VGA = 0x0300
_GPU_CLASSES = {
    NVIDIA: {VGA, 0x0302},
    _AMD: {VGA, 0x0302, 0x0380, 0x1200},
    _INTEL: {0x0380},
}
_NETWORK, _SERIAL_INFINIBAND = 0x02, 0x0C06
_FABRIC_CLASSES = {0x0207, 0x0208, _SERIAL_INFINIBAND}  # InfiniBand, Omni-Path, old InfiniBand
_FABRIC_NAMES = re.compile(r"(hfi1|opa|efa|rdmap|cxi|hsn|bxi)\w*")
_CRAY = 0x17DB  # Slingshot
_LAST_FUNCTION = 7


@dataclass(frozen=True)
class PciPath:
    """What is between a device and its host.

    Attributes:
        bridges: from the host bridge on; empty if unknown.
        own: those of `bridges` that are part of the device's own package.
    """

    bridges: tuple[str, ...] = ()
    own: frozenset[str] = frozenset()


def full_address(text: str) -> str:
    """Return an address complete and in lower case; empty if the text is not one.

    >>> full_address("C7:00.0"), full_address("00000000:C7:00.0"), full_address("card0")
    ('0000:c7:00.0', '0000:c7:00.0', '')
    """
    match = _ADDRESS.fullmatch(text.strip())
    if not match:
        return ""
    domain, bus, device, function = (int(part or "0", 16) for part in match.groups())
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function:x}"


def address_key(address: str) -> tuple[int, ...]:
    """Return a sort key that orders addresses as numbers, across PCI domains too."""
    return tuple(int(part, 16) for part in re.split("[:.]", full_address(address)) if part)


def partition_address(address: str, number: int) -> str:
    """Return the address of a partition of a GPU, with its number as the PCI function.

    AMD's tools and HIP name the partitions of an MI300 in TPX or CPX mode like this; to the kernel
    they are one PCI device.

    >>> partition_address("0001:02:00.0", 5)
    '0001:02:00.5'
    """
    if not number or not full_address(address):
        return address
    return f"{address[:-1]}{min(int(address[-1]) + number, _LAST_FUNCTION)}"


def is_gpu(vendor: int, device_class: int) -> bool:
    """Return whether a PCI device of that vendor and class (16 bits) is a GPU for computing.

    A server's graphics chip (ASPEED, Matrox) and an NVSwitch are not.
    """
    return device_class in _GPU_CLASSES.get(vendor, ())


def is_nic(device_class: int) -> bool:
    """Return whether a PCI class (16 bits) is a network card's, of Ethernet or of a fabric."""
    return device_class >> 8 == _NETWORK or device_class == _SERIAL_INFINIBAND


def nic_rank(name: str, device_class: int, vendor: int, *, rdma: bool) -> int:
    """Return how good a network card is; ranks get those of the best rank.

    0 is a card of the fabric (InfiniBand, Omni-Path, Slingshot, EFA), 1 another RDMA device (RoCE),
    2 a network interface on a card of the fabric (IPoIB), 3 Ethernet, 4 a card without a name.
    What is unknown is empty or 0. `rdma` means that the name is an RDMA device's.
    """
    fabric = device_class in _FABRIC_CLASSES
    if not name:
        return 4
    if _FABRIC_NAMES.fullmatch(name) or vendor == _CRAY or (fabric and rdma):
        return 0
    if rdma:
        return 1
    return 2 if fabric or name.startswith("ib") else 3


def level(path: PciPath, other: PciPath, *, same_domain: bool) -> str:
    """Return the distance between two devices as in `nvidia-smi`: PIX, PXB, PHB, NODE or SYS.

    PIX is one switch between them, PXB several, PHB the host bridge, NODE two host bridges of one
    NUMA domain, SYS two domains.
    """
    shared = 0
    for mine, theirs in zip(path.bridges, other.bridges):
        if mine != theirs:
            break
        shared += 1
    if shared == 0:
        return "NODE" if same_domain else "SYS"
    if shared == 1:
        return "PHB"
    below = [sum(bridge not in way.own for bridge in way.bridges[shared:]) for way in (path, other)]
    return "PIX" if max(below) <= 1 else "PXB"  # both ports of a switch are listed
