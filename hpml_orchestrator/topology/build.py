"""Build cores, domains and devices from a source's data; all readers use this."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hpml_orchestrator.topology.cpulist import CPUS_MAX, format_list
from hpml_orchestrator.topology.model import (
    NVIDIA,
    VGA,
    Core,
    Domain,
    Gpu,
    Nic,
    PciPath,
    Topology,
    address_key,
    level,
    nic_rank,
    partition_address,
)

if TYPE_CHECKING:
    import xml.etree.ElementTree as ET
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence


def cores_of_groups(
    groups: Iterable[Iterable[int]],
    sockets: Mapping[int, int],
    domains: Mapping[int, int],
    kinds: Mapping[int, str],
) -> tuple[Core, ...]:
    """Return cores, numbered in the order of their lowest CPU; all mappings are keyed by CPU."""
    # `core_id` is unique only within a socket and may have gaps, so cores are numbered anew.
    ordered = sorted(tuple(sorted(group)) for group in groups)
    return tuple(
        Core(number, sockets[cpus[0]], domains[cpus[0]], cpus, kinds.get(cpus[0], ""))
        for number, cpus in enumerate(ordered)
    )


def domain_of_cpus(cpus: Iterable[int], domains: Sequence[Domain]) -> int | None:
    """Return the domain that contains all of these CPUs; None if no single domain does."""
    wanted = set(cpus)
    holding = [domain.number for domain in domains if wanted & set(domain.cpus)]
    return holding[0] if len(holding) == 1 else None


def nearest_with_cpus(number: int, domains: Sequence[Domain]) -> int | None:
    """Return the domain itself if it has CPUs, else the nearest domain with CPUs.

    None if distances are unknown or two domains are equally near.
    """
    home = next((domain for domain in domains if domain.number == number), None)
    if home is None or home.cpus:
        return None if home is None else number
    with_cpus = {domain.number for domain in domains if domain.cpus}
    ranked = sorted((away, other) for other, away in home.distances if other in with_cpus)
    # Do not guess between equals: with an unknown domain the planner spreads the ranks, but a
    # wrong guess could bind all of them far from their GPU.
    if not ranked or (len(ranked) > 1 and ranked[0][0] == ranked[1][0]):
        return None
    return ranked[0][1]


def assign_unplaced_cpus(
    homes: dict[int, int], online: Collection[int], warnings: list[str]
) -> None:
    """Assign online CPUs without a domain to the first domain that has CPUs, with a warning.

    `homes` maps CPU to domain and must not be empty.
    """
    unplaced = set(online) - set(homes)
    if unplaced:
        first = min(homes.values())
        warnings.append(
            f"The NUMA domain of the CPUs {format_list(unplaced)} is unknown: they count as "
            f"domain {first}."
        )
        homes.update(dict.fromkeys(unplaced, first))


def _name_key(name: str) -> tuple[tuple[str, int], ...]:
    """Return a natural sort key for names with numbers: NIC2 before NIC10."""
    parts = re.findall(r"([^0-9]*)([0-9]{0,9})", name)
    return tuple((word, int(digits or "0")) for word, digits in parts)


def walk(root: ET.Element, tag: str) -> Iterator[tuple[ET.Element, tuple[ET.Element, ...]]]:
    """Yield all elements with a tag below a root, each with its ancestors that have the tag."""
    pending: list[tuple[ET.Element, tuple[ET.Element, ...]]] = [
        (child, ()) for child in reversed(root.findall(tag))
    ]
    while pending:
        element, above = pending.pop()
        yield element, above
        pending.extend((child, (*above, element)) for child in reversed(element.findall(tag)))


@dataclass(frozen=True)
class DeviceLocation:
    """Where a device is."""

    address: str = ""  # PCI address; empty if unknown
    domain: int | None = None  # NUMA domain; None if unknown
    cpus: tuple[int, ...] = ()  # CPUs near it; empty if unknown
    path: PciPath = field(default_factory=PciPath)  # the bridges above it


@dataclass
class Devices:
    """The GPUs and network cards of a node, collected in any order."""

    _paths: dict[str, PciPath] = field(default_factory=dict)
    _gpus: list[tuple[int, Gpu, bool]] = field(default_factory=list)
    _nics: dict[str, tuple[tuple[int, bool], Nic]] = field(default_factory=dict)

    def add_gpu(
        self,
        place: DeviceLocation,
        *,
        partition: int = 0,  # number of the partition on this device
        number: int = CPUS_MAX,  # number in the source's library, such as NVML
        name: str = "",  # as the source calls it
        uuid: str = "",
        vendor: int = 0,  # PCI vendor ID; 0 if unknown
        kind: int = 0,  # PCI class (16 bits)
        named: bool = False,  # whether a compute library or driver lists it
    ) -> None:
        """Add a GPU or a partition of one."""
        address = partition_address(place.address, partition)
        self._paths[address] = place.path
        gpu = Gpu(0, name, address, uuid, domain=place.domain, cpus=place.cpus)
        # A VGA device next to other GPUs only drives the display, unless it is from NVIDIA.
        self._gpus.append((number, gpu, named or kind != VGA or vendor == NVIDIA))

    def add_nic(
        self,
        place: DeviceLocation,
        name: str,
        *,
        rdma: bool,
        kind: int = 0,
        vendor: int = 0,
        virtual: bool = False,
    ) -> None:
        """Add a network device; `virtual` for a virtual function (SR-IOV) of another."""
        if place.address:
            self._paths.setdefault(place.address, place.path)
        rank = (nic_rank(name, kind, vendor, rdma=rdma), virtual)
        nic = Nic(name or place.address, place.address, place.domain, place.cpus)
        if nic.name not in self._nics or rank < self._nics[nic.name][0]:
            self._nics[nic.name] = (rank, nic)

    def topology(
        self,
        source: str,
        cores: tuple[Core, ...],
        domains: tuple[Domain, ...],
        warnings: list[str],
    ) -> Topology:
        """Return the node with these devices; each GPU whose domain is unknown adds a warning."""
        gpus, nics = self._computing_gpus(), self._offered_nics()
        warnings += [
            f"The NUMA domain of {gpu.name} {gpu.address}".rstrip() + " is unknown."
            for gpu in gpus
            if gpu.domain is None
        ]
        links = tuple(
            (gpu.name, nic.name, distance)
            for gpu in gpus
            for nic in nics
            if (distance := self._level(gpu, nic))
        )
        return Topology(source, cores, domains, gpus, nics, links, tuple(warnings))

    def _computing_gpus(self) -> tuple[Gpu, ...]:
        # Without any known compute GPU, keep all: a workstation's only card may be a VGA device.
        computing = [entry for entry in self._gpus if entry[2]] or self._gpus
        ordered = sorted(computing, key=lambda entry: (entry[0], address_key(entry[1].address)))
        # A UUID shared by several partitions identifies none of them.
        count = Counter(gpu.uuid for _, gpu, _ in ordered)
        return tuple(
            replace(
                gpu,
                index=index,
                name=gpu.name or f"GPU{index}",
                uuid=gpu.uuid if count[gpu.uuid] == 1 else "",
            )
            for index, (_, gpu, _) in enumerate(ordered)
        )

    def _offered_nics(self) -> tuple[Nic, ...]:
        """Return the network cards of the best rank: ranks communicate through these."""
        best = min((rank for rank, _ in self._nics.values()), default=None)
        names = sorted(self._nics, key=_name_key)
        return tuple(self._nics[name][1] for name in names if self._nics[name][0] == best)

    def _level(self, gpu: Gpu, nic: Nic) -> str:
        """Return the PCI level between a GPU and a card, such as PIX; empty if unknown."""
        path, other = self._paths.get(gpu.address), self._paths.get(nic.address)
        known = gpu.domain is not None and nic.domain is not None
        same = gpu.domain == nic.domain
        if path and other and path.bridges and other.bridges:
            distance = level(path, other, same_domain=same)
            # PIX, PXB and PHB depend only on the bridges, NODE and SYS also on the domains.
            return distance if known or distance not in {"NODE", "SYS"} else ""
        return "SYS" if known and not same else ""
