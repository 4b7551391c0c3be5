"""Read the XML of hwloc 1 to 3 (`lstopo machine.xml`) as a `Topology`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.topology.build import (
    DeviceLocation,
    Devices,
    assign_unplaced_cpus,
    cores_of_groups,
    domain_of_cpus,
    nearest_with_cpus,
    walk,
)
from hpml_orchestrator.topology.cpulist import CPUS_MAX, parse_mask
from hpml_orchestrator.topology.model import (
    Core,
    Domain,
    PciPath,
    Topology,
    full_address,
    is_gpu,
    is_nic,
)

if TYPE_CHECKING:
    import xml.etree.ElementTree as ET
    from collections.abc import Iterable, Mapping, Sequence

_SOURCE = "hwloc XML"
_MEANS_LATENCY = 4
_NAME_CHARS = 20
_IO = frozenset({"Bridge", "PCIDev", "OSDev"})
# Libraries that name GPUs; the first one that names a device wins.
_GPU_NAMES = [re.compile(rf"{library}([0-9]+)") for library in ("nvml", "rsmi", "cuda", "ze")]
_PCI_TYPE = re.compile(r"([0-9a-f]{4}) \[([0-9a-f]{4}):[0-9a-f]{4}\]", re.IGNORECASE)
_INTEGER = re.compile(r"[0-9]{1,20}")
_NOT_MAIN_MEMORY = ("GPUMemory", "MCDRAM", "HBM", "SPM", "NVM", "CXL", "DAX")


def hwloc_topology(root: ET.Element) -> Topology:
    """Return the node that hwloc exported.

    Raises:
        InputError: the file is not from hwloc, or is damaged.
    """
    machine = root.find("object")
    if machine is None:
        raise InputError("is not an hwloc XML file: <topology> with an <object> is missing")
    try:
        return _Reader(root, machine).topology()
    except ValueError as error:
        raise InputError(f"is not an hwloc XML file that hpml can read: {error}") from None


class _Reader:
    """The objects of one file, each with its ancestors."""

    def __init__(self, root: ET.Element, machine: ET.Element) -> None:
        self.root = root
        self.machine = machine
        # hwloc 3 encodes the types of OS devices as powers of two.
        newer = root.get("version", "").startswith("3")
        self.network, self.rdma = ("16", "32") if newer else ("2", "3")
        self.above = dict(walk(root, "object"))
        self.warnings: list[str] = []

    def topology(self) -> Topology:
        """Return the whole node."""
        domains, homes = self._domains()
        cores = self._cores(homes)
        sockets = len({core.socket for core in cores})
        if sockets > 1 and len(domains) == 1:
            self.warnings.append(
                f"There are {sockets} sockets and one NUMA domain: the file may come from hwloc's "
                "x86 backend, which does not know domains."
            )
        return self._devices(domains).topology(_SOURCE, cores, domains, self.warnings)

    def _of_type(self, *types: str) -> list[ET.Element]:
        return [element for element in self.above if element.get("type") in types]

    def _nearest(self, element: ET.Element, *types: str) -> ET.Element | None:
        above = reversed(self.above[element])
        return next((parent for parent in above if parent.get("type") in types), None)

    def _domains(self) -> tuple[tuple[Domain, ...], dict[int, int]]:
        """Return the domains and a mapping from CPU to domain.

        In hwloc's XML a domain without CPUs (memory of a GPU, HBM, CXL) lists the CPUs near it.
        As in the kernel, a CPU belongs to the smallest domain of main memory that contains it.
        """
        online = frozenset(_cpu(unit) for unit in self._of_type("PU"))
        if not online:
            raise ValueError("it has no CPUs")
        nodes = {_number(node): node for node in self._of_type("NUMANode")}
        if not nodes:
            self.warnings.append("The file has no NUMA domains: all CPUs count as domain 0.")
            return (Domain(0, tuple(sorted(online))),), dict.fromkeys(online, 0)
        near = {number: online & set(_mask(node, "cpuset")) for number, node in nodes.items()}
        homes: dict[int, int] = {}
        for number in sorted(nodes, key=lambda n: (_is_special(nodes[n]), len(near[n]), n)):
            for cpu in near[number]:
                homes.setdefault(cpu, number)
        assign_unplaced_cpus(homes or dict.fromkeys(online, min(nodes)), online, self.warnings)
        distances = self._distances(sorted(nodes))
        domains = tuple(
            Domain(
                number=number,
                cpus=tuple(sorted(cpu for cpu, home in homes.items() if home == number)),
                memory_bytes=_integer(nodes[number].get("local_memory", "0")),
                distances=tuple(sorted(distances.get(number, {}).items())),
            )
            for number in sorted(nodes)
        )
        return domains, homes

    def _distances(self, numbers: Sequence[int]) -> Mapping[int, Mapping[int, int]]:
        for matrix in self.root.iter("distances2"):
            is_latency = _integer(matrix.get("kind", "0")) & _MEANS_LATENCY
            if matrix.get("type") == "NUMANode" and is_latency:
                indexes = [_integer(word) for word in _words(matrix, "indexes")]
                return _square(indexes, [_integer(word) for word in _words(matrix, "u64values")])
        for matrix in self.machine.iter("distances"):  # hwloc 1: values are relative to a base
            base = float(matrix.get("latency_base", "10"))
            latencies = [float(cell.get("value", "0")) for cell in matrix.findall("latency")]
            if len(numbers) ** 2 == len(latencies) and all(0 < x < CPUS_MAX for x in latencies):
                return _square(numbers, [round(latency * base) for latency in latencies])
        return {}

    def _cores(self, homes: Mapping[int, int]) -> tuple[Core, ...]:
        packages = self._of_type("Package", "Socket")
        numbers = [package.get("os_index", "") for package in packages]
        if len(set(numbers)) < len(packages) or not all(map(_INTEGER.fullmatch, numbers)):
            numbers = [str(place) for place in range(len(packages))]  # hwloc may omit the numbers
        socket_of = {package: int(number) for package, number in zip(packages, numbers)}
        groups: dict[ET.Element, list[int]] = {}
        sockets: dict[int, int] = {}
        for unit in self._of_type("PU"):
            cpu = _cpu(unit)
            if cpu in homes:
                core = self._nearest(unit, "Core")
                groups.setdefault(unit if core is None else core, []).append(cpu)
                package = self._nearest(unit, "Package", "Socket")
                sockets[cpu] = 0 if package is None else socket_of[package]
        if any(group.get("type") == "PU" for group in groups):
            self.warnings.append("Some CPUs belong to no core: each of them counts as a core.")
        kinds = {
            cpu: value.lower().removeprefix("intel")
            for kind in self.root.iter("cpukind")
            for value in (_infos([kind], "CoreType") or _infos([kind], "LinuxCapacity"))[:1]
            for cpu in _mask(kind, "cpuset")
        }
        return cores_of_groups(groups.values(), sockets, homes, kinds)

    def _devices(self, domains: Sequence[Domain]) -> Devices:
        devices = Devices()
        for device in self._of_type("PCIDev"):
            place = self._place(device, domains)
            match = _PCI_TYPE.match(device.get("pci_type", ""))
            kind, vendor = (int(part, 16) for part in match.groups()) if match else (0, 0)
            inside = [part for part in device.iter("object") if part.get("type") == "OSDev"]
            named = _named_gpus(inside)
            # Several devices at one address are partitions of a GPU, such as an MI300A in CPX mode.
            for partition, (number, gpu) in enumerate(named):
                devices.add_gpu(
                    place,
                    partition=partition,
                    number=number,
                    name=gpu.get("name", ""),
                    uuid=_uuid([gpu] if len(named) > 1 else [device, *inside]),
                    vendor=vendor,
                    kind=kind,
                    named=True,
                )
            if named or is_gpu(vendor, kind):
                if not named:
                    uuid = _uuid([device, *inside])
                    devices.add_gpu(place, uuid=uuid, vendor=vendor, kind=kind)
                continue
            if match and not is_nic(kind):
                continue
            models = _infos([device, *inside], "PCIDevice")
            virtual = any("Virtual Function" in name for name in models)
            cards = {
                part.get("name", ""): part.get("osdev_type") == self.rdma
                for part in inside
                if part.get("osdev_type") in {self.network, self.rdma}
            }
            for name, rdma in (cards or ({"": False} if kind else {})).items():
                devices.add_nic(place, name, rdma=rdma, kind=kind, vendor=vendor, virtual=virtual)
        return devices

    def _place(self, device: ET.Element, domains: Sequence[Domain]) -> DeviceLocation:
        """Return the location of a device: that of the object it is attached to.

        A device attached to the machine itself is near no domain if there are several. A group or
        a memory-only domain has no CPUs: use the nearest domain with CPUs, else the object above.
        """
        above = self.above[device]
        bridges = tuple(
            bridge.get("pci_busid") or f"host {bridge.get('bridge_pci')}"
            for bridge in above
            if bridge.get("type") == "Bridge"
        )
        everything = {cpu for domain in domains for cpu in domain.cpus}
        homes = [o for o in reversed(above) if o.get("type") not in _IO] or [self.machine]
        for home in homes:
            cpus = tuple(cpu for cpu in _mask(home, "cpuset") if cpu in everything)
            domain = domain_of_cpus(cpus, domains)
            if domain is None and home.get("type") == "NUMANode":
                domain = nearest_with_cpus(_number(home), domains)
            elif not cpus:
                near = {nearest_with_cpus(node, domains) for node in _mask(home, "nodeset")}
                domain = near.pop() if len(near) == 1 else None
            if domain is not None and not cpus:
                cpus = next(one.cpus for one in domains if one.number == domain)
            if cpus:
                break
        if len(cpus) == len(everything) and sum(bool(home.cpus) for home in domains) > 1:
            cpus = ()
        address = full_address(device.get("pci_busid", ""))
        return DeviceLocation(address, domain, cpus, PciPath(bridges))


def _mask(element: ET.Element, name: str) -> tuple[int, ...]:
    return parse_mask(element.get(name) or "0")


def _is_special(node: ET.Element) -> bool:
    return str(node.get("subtype", "")).startswith(_NOT_MAIN_MEMORY)


def _number(element: ET.Element) -> int:
    return _integer(element.get("os_index", ""))


def _cpu(unit: ET.Element) -> int:
    number = _number(unit)
    if number >= CPUS_MAX:
        raise ValueError(f"os_index {number} of a PU is too large")
    return number


def _integer(text: str) -> int:
    if not _INTEGER.fullmatch(text.strip()):
        raise ValueError(f"{text[:40]!r} is not a whole number")
    return int(text)


def _words(matrix: ET.Element, tag: str) -> list[str]:
    return [word for part in matrix.findall(tag) for word in (part.text or "").split()]


def _square(indexes: Sequence[int], values: Sequence[int]) -> dict[int, dict[int, int]]:
    if len(values) != len(indexes) ** 2:
        raise ValueError("a matrix of distances is not square")
    rows = iter(values)
    return {index: {other: next(rows) for other in indexes} for index in indexes}


def _named_gpus(parts: Sequence[ET.Element]) -> list[tuple[int, ET.Element]]:
    for pattern in _GPU_NAMES:
        matches = [(pattern.fullmatch(part.get("name", "")[:_NAME_CHARS]), part) for part in parts]
        named = [(int(match[1]), part) for match, part in matches if match]
        if named:
            return sorted(named, key=lambda entry: entry[0])
    return []


def _infos(objects: Iterable[ET.Element], *names: str) -> list[str]:
    infos = (info for element in objects for info in element.findall("info"))
    return [info.get("value", "") for info in infos if info.get("name") in names]


def _uuid(objects: Iterable[ET.Element]) -> str:
    value = next(filter(None, _infos(objects, "NVIDIAUUID", "AMDUUID")), "")
    return value if not value or value.startswith("GPU-") else f"GPU-{value}"
