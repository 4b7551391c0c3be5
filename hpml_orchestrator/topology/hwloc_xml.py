"""hwloc's XML (`lstopo machine.xml`), of hwloc 1 to 3, as a `Topology`."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Optional

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.topology.build import (
    adopt_strays,
    cores_of_groups,
    distinct_uuids,
    domain_of_cpus,
    nearest_with_cpus,
)
from hpml_orchestrator.topology.cpulist import CPUS_MAX, format_list, parse_mask
from hpml_orchestrator.topology.model import Core, Domain, Gpu, Nic, Topology
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
    from collections.abc import Iterable, Iterator, Mapping, Sequence

__all__ = ["hwloc_topology"]

_SOURCE = "hwloc XML"
_MEANS_LATENCY = 4
_NAME_CHARS = 20
_IO = frozenset({"Bridge", "PCIDev", "OSDev"})
# The first of these that a device has names it: platform, if any, and the driver's number.
_GPU_NAMES = [re.compile(rf"{word}(?:([0-9]+)d)?([0-9]+)") for word in "nvml rsmi cuda ze".split()]
_GPU_NAMES.append(re.compile(r"opencl([0-9]+)d([0-9]+)"))
_PCI_TYPE = re.compile(r"([0-9a-f]{4}) \[([0-9a-f]{4}):([0-9a-f]{4})\]", re.IGNORECASE)
_WHOLE = re.compile(r"[0-9]{1,20}")
_NOT_MAIN_MEMORY = ("GPUMemory", "MCDRAM", "HBM", "SPM", "NVM", "CXL", "DAX")


def hwloc_topology(root: ET.Element) -> Topology:
    """Return the machine that hwloc exported.

    Args:
        root: the element `<topology>`.

    Raises:
        InputError: it is no such file.
    """
    machine = root.find("object")
    if machine is None:
        raise InputError("is no hwloc XML: <topology> with an <object> is missing")
    try:
        return _Reader(root, machine).topology()
    except ValueError as error:
        raise InputError(f"is no hwloc XML that hpml understands: {error}") from None


class _Reader:
    """One file's objects, each with those above it."""

    def __init__(self, root: ET.Element, machine: ET.Element) -> None:
        self.root = root
        self.machine = machine
        # hwloc 3 counts the kinds of OS devices in powers of two.
        newer = root.get("version", "").startswith("3")
        self.network, self.rdma = ("16", "32") if newer else ("2", "3")
        self.above: dict[ET.Element, tuple[ET.Element, ...]] = {}
        pending: list[tuple[ET.Element, tuple[ET.Element, ...]]] = [(machine, ())]
        self.objects: list[ET.Element] = []
        while pending:
            element, above = pending.pop()
            self.objects.append(element)
            self.above[element] = above
            children = [(child, (*above, element)) for child in element.findall("object")]
            pending.extend(reversed(children))
        self.warnings: list[str] = []

    def topology(self) -> Topology:
        """Return all of it."""
        domains, homes = self._domains()
        cores = self._cores(homes)
        sockets = len({core.socket for core in cores})
        if sockets > 1 and len(domains) == 1:
            self.warnings.append(
                f"There are {sockets} sockets and one NUMA domain: the file may come from hwloc's "
                "x86 backend, which does not know domains."
            )
        gpus, nics, paths = self._devices(domains)
        return Topology(
            source=_SOURCE,
            cores=cores,
            domains=domains,
            gpus=gpus,
            nics=nics,
            links=links(gpus, nics, paths),
            warnings=tuple(self.warnings),
        )

    def _of_type(self, *types: str) -> list[ET.Element]:
        return [one for one in self.objects if one.get("type") in types]

    def _nearest(self, element: ET.Element, *types: str) -> Optional[ET.Element]:  # noqa: UP045
        return next((o for o in reversed(self.above[element]) if o.get("type") in types), None)

    def _domains(self) -> tuple[tuple[Domain, ...], dict[int, int]]:
        """Return the domains, and the domain of each CPU.

        A domain of memory alone (of a GPU, HBM, CXL) has the CPUs that are near it in hwloc's XML.
        A CPU belongs to the smallest domain of main memory that holds it, as in the kernel.
        """
        online = self._online()
        nodes = self._of_type("NUMANode")
        near = {one: frozenset(_mask(one, "cpuset")) & online for one in nodes}
        homes: dict[int, int] = {}
        for one in sorted(nodes, key=lambda o: (_special(o), len(near[o]), _number(o))):
            for cpu in near[one]:
                homes.setdefault(cpu, _number(one))
        if not nodes:
            self.warnings.append("The file tells no NUMA domain: all CPUs count as domain 0.")
            return (Domain(0, tuple(sorted(online))),), dict.fromkeys(online, 0)
        numbers = [_number(one) for one in nodes]
        if len(set(numbers)) < len(numbers):
            raise ValueError("two NUMA domains have one number")
        adopt_strays(homes, online, self.warnings)
        distances = self._distances(nodes)
        domains = [
            Domain(
                number=_number(one),
                cpus=tuple(sorted(cpu for cpu, home in homes.items() if home == _number(one))),
                memory_bytes=_whole(one.get("local_memory", "0")),
                distances=tuple(sorted(distances.get(_number(one), {}).items())),
            )
            for one in sorted(nodes, key=_number)
        ]
        return tuple(domains), homes

    def _online(self) -> frozenset[int]:
        """Return the CPUs that are there, online, and allowed to whoever exported the file."""
        told = frozenset(_cpu(one) for one in self._of_type("PU"))
        online = self.machine.get("online_cpuset")  # hwloc 1 alone
        told = told & frozenset(parse_mask(online)) if online else told
        allowed = frozenset(_mask(self.machine, "allowed_cpuset")) & told
        if not allowed or allowed == told:
            return told
        # `lstopo` leaves these out by itself, but not with --disallowed.
        self.warnings.append(
            f"The CPUs {format_list(told - allowed)} were not allowed to the process that exported "
            "the file: they are left out."
        )
        return allowed

    def _distances(self, nodes: Sequence[ET.Element]) -> Mapping[int, Mapping[int, int]]:
        """Return domain -> domain -> distance."""
        for matrix in self.root.iter("distances2"):
            kind = _whole(matrix.get("kind", "0"))
            if matrix.get("type") != "NUMANode" or not kind & _MEANS_LATENCY:
                continue
            values = [_whole(word) for word in _words(matrix, "u64values")]
            indexes = [_whole(word) for word in _words(matrix, "indexes")]
            if matrix.get("indexing") == "gp":
                by_gp = {_whole(one.get("gp_index", "-1")): _number(one) for one in nodes}
                indexes = [by_gp.get(index, -1) for index in indexes]
            return _square(indexes, values)
        for matrix in self.machine.iter("distances"):  # hwloc 1: relative to a base
            base = float(matrix.get("latency_base", "10"))
            latencies = [float(one.get("value", "0")) for one in matrix.findall("latency")]
            if len(nodes) ** 2 == len(latencies) and all(0 < x < CPUS_MAX for x in latencies):
                numbers = sorted(_number(one) for one in nodes)
                return _square(numbers, [round(value * base) for value in latencies])
        return {}

    def _cores(self, homes: Mapping[int, int]) -> tuple[Core, ...]:
        groups: dict[object, list[int]] = {}
        sockets: dict[int, int] = {}
        packages = self._of_type("Package", "Socket")
        told = {one.get("os_index", "") for one in packages}
        if len(told) == len(packages) and all(map(_WHOLE.fullmatch, told)):
            number_of = {one: _number(one) for one in packages}
        else:  # hwloc itself does not need them
            number_of = {one: place for place, one in enumerate(packages)}
        alone = 0
        online = set(homes)
        for unit in self._of_type("PU"):
            cpu = _cpu(unit)
            core = self._nearest(unit, "Core")
            alone += core is None
            if cpu in online:
                groups.setdefault(unit if core is None else core, []).append(cpu)
                package = self._nearest(unit, "Package", "Socket")
                sockets[cpu] = 0 if package is None else number_of[package]
        if alone:
            self.warnings.append("Cores are not told for all CPUs: such a CPU counts as a core.")
        if not groups:
            raise ValueError("it has no CPUs")
        return cores_of_groups(groups.values(), sockets, homes)

    def _devices(
        self, domains: Sequence[Domain]
    ) -> tuple[tuple[Gpu, ...], tuple[Nic, ...], dict[str, PciPath]]:
        paths: dict[str, PciPath] = {}
        kinds: dict[tuple[int, ...], tuple[int, int, bool]] = {}
        gpus: dict[tuple[int, ...], Gpu] = {}
        nics: list[tuple[tuple[int, bool], Nic]] = []
        bare = {
            one.get("pci_type")
            for one in self._of_type("PCIDev")
            if not _numbered_gpus(list(one.iter("object")))
        }
        for device in self._devices_and_loners():
            address = full_address(device.get("pci_busid", ""))
            below = (one for one in device.iter("object") if one.get("type") == "OSDev")
            inside = [device, *(one for one in below if one is not device)]
            domain, cpus = self._near(device, domains)
            path = PciPath(tuple(self._bridges(device)))
            match = _PCI_TYPE.match(device.get("pci_type", ""))
            kind, vendor, model = (int(part, 16) for part in match.groups()) if match else (0, 0, 0)
            named = _numbered_gpus(inside)
            if device.get("pci_type") in bare:  # OpenCL of ROCm 6 puts all below the first
                named = named[:1]
            if named or is_gpu(vendor, kind, model):
                # Several are partitions of one GPU, as of an MI300A in CPX mode.
                for part, (number, one) in enumerate(named or [(CPUS_MAX, device)]):
                    own = partition_address(address, part)
                    if address:
                        paths[own] = path
                    uuid = _uuid([one] if len(named) > 1 else inside)
                    key = (number, *address_key(own), len(gpus))
                    gpus[key] = Gpu(0, one.get("name", ""), own, uuid, domain=domain, cpus=cpus)
                    kinds[key] = (vendor, kind, bool(named))
                continue
            if address:
                paths[address] = path
            if match and not is_nic(kind):
                continue
            virtual = any("Virtual Function" in text for text in _infos(inside, "PCIDevice"))
            cards = [one for one in inside if one.get("osdev_type") in {self.network, self.rdma}]
            for one in cards or ([device] if kind and address else []):
                name, rdma = one.get("name", ""), one.get("osdev_type") == self.rdma
                rank = nic_rank(name, kind, vendor, rdma=rdma, virtual=virtual)
                nics.append((rank, Nic(name or address, address, domain, cpus)))
        computing = distinct_uuids(gpus[key] for key in sorted(compute_gpus(kinds)))
        made_gpus = tuple(
            replace(gpu, index=i, name=gpu.name or f"GPU{i}") for i, gpu in enumerate(computing)
        )
        self.warnings.extend(
            f"The NUMA domain of {gpu.name} {gpu.address}".rstrip() + " is not told."
            for gpu in made_gpus
            if gpu.domain is None
        )
        return made_gpus, offered_nics(nics), paths

    def _devices_and_loners(self) -> Iterator[ET.Element]:
        """Yield PCI devices, and OS devices of none: of GPUs those of one naming alone."""
        yield from self._of_type("PCIDev")
        loners = [
            one
            for one in self._of_type("OSDev")
            if self._nearest(one, "PCIDev") is None and one.get("name")
        ]
        for pattern in _GPU_NAMES:
            named = [one for one in loners if pattern.fullmatch(one.get("name", ""))]
            if named:
                yield from named
                break
        yield from (one for one in loners if one.get("osdev_type") in {self.network, self.rdma})

    def _bridges(self, device: ET.Element) -> Iterator[str]:
        for one in self.above[device]:
            if one.get("type") == "Bridge":
                yield one.get("pci_busid") or f"host {one.get('bridge_pci')}"

    def _near(
        self, device: ET.Element, domains: Sequence[Domain]
    ) -> tuple[Optional[int], tuple[int, ...]]:  # noqa: UP045
        """Return the domain and the CPUs of the object that a device hangs from.

        A device at the machine itself, where there are several domains, is near none of them.
        """
        home = next(o for o in reversed(self.above[device]) if o.get("type") not in _IO)
        everything = {cpu for one in domains for cpu in one.cpus}
        cpus = tuple(cpu for cpu in _mask(home, "cpuset") if cpu in everything)
        domain = domain_of_cpus(cpus, domains)
        if domain is None and home.get("type") == "NUMANode":
            domain = nearest_with_cpus(_number(home), domains)
        with_cpus = sum(bool(one.cpus) for one in domains)
        return domain, cpus if len(cpus) < len(everything) or with_cpus == 1 else ()


def _mask(element: ET.Element, name: str) -> tuple[int, ...]:
    return parse_mask(element.get(name) or "0")


def _special(element: ET.Element) -> bool:
    return str(element.get("subtype", "")).startswith(_NOT_MAIN_MEMORY)


def _number(element: ET.Element) -> int:
    return _whole(element.get("os_index", ""))


def _cpu(unit: ET.Element) -> int:
    number = _number(unit)
    if number >= CPUS_MAX:
        raise ValueError(f"os_index {number} of a PU is too large")
    return number


def _whole(text: str) -> int:
    if not _WHOLE.fullmatch(text.strip()):
        raise ValueError(f"{text[:40]!r} is no whole number")
    return int(text)


def _words(matrix: ET.Element, tag: str) -> list[str]:
    return [word for part in matrix.findall(tag) for word in (part.text or "").split()]


def _square(indexes: Sequence[int], values: Sequence[int]) -> dict[int, dict[int, int]]:
    if len(values) != len(indexes) ** 2:
        raise ValueError("a matrix of distances is not square")
    width = len(indexes)
    return {
        one: {other: values[row * width + column] for column, other in enumerate(indexes)}
        for row, one in enumerate(indexes)
    }


def _numbered_gpus(objects: Sequence[ET.Element]) -> list[tuple[int, ET.Element]]:
    """Return what one library and platform calls the GPUs among some objects, by its numbers."""
    for pattern in _GPU_NAMES:
        found = [(pattern.fullmatch(one.get("name", "")[:_NAME_CHARS]), one) for one in objects]
        named = [(match[1], int(match[2]), one) for match, one in found if match]
        if named:
            ordered = sorted(named, key=lambda part: part[1])
            return [(number, one) for platform, number, one in ordered if platform == named[0][0]]
    return []


def _infos(objects: Iterable[ET.Element], *names: str) -> list[str]:
    infos = (info for one in objects for info in one.findall("info"))
    return [one.get("value", "") for one in infos if one.get("name") in names]


def _uuid(objects: Iterable[ET.Element]) -> str:
    value = next(filter(None, _infos(objects, "NVIDIAUUID", "AMDUUID")), "")
    return value if not value or value.startswith("GPU-") else f"GPU-{value}"
