"""PCI addresses and classes, and how far apart two devices are."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml_orchestrator.topology.model import Gpu, Nic

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["PciPath", "address_key", "full_address", "is_gpu", "is_nic", "level", "links"]

_ADDRESS = re.compile(
    r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})(?:\.([0-7]))?", re.IGNORECASE
)
_NVIDIA, _AMD, _INTEL = 0x10DE, 0x1002, 0x8086
_GPU_CLASSES = {
    _NVIDIA: {0x0300, 0x0302},
    _AMD: {0x0300, 0x0302, 0x0380, 0x1200},
    _INTEL: {0x0380},
}
_NIC_CLASSES = {0x0200, 0x0207}


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


def is_gpu(vendor: int, device_class: int) -> bool:
    """Tell whether a PCI device of that vendor and class (16 bits) is a GPU that computes.

    A server's graphics chip (ASPEED, Matrox) and an NVSwitch are none.
    """
    return device_class in _GPU_CLASSES.get(vendor, ())


def is_nic(device_class: int) -> bool:
    """Tell whether a PCI class (16 bits) is Ethernet or InfiniBand."""
    return device_class in _NIC_CLASSES


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
