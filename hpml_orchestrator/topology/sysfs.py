"""Read a node's topology from sysfs, or from a file of any known format."""

from __future__ import annotations

import json
import os
import re
import subprocess
import xml.etree.ElementTree as ET
from dataclasses import replace
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import InputError, NotFoundError
from hpml_orchestrator.topology.build import (
    DeviceLocation,
    Devices,
    assign_unplaced_cpus,
    cores_of_groups,
    domain_of_cpus,
    nearest_with_cpus,
)
from hpml_orchestrator.topology.cpulist import CPUS_MAX, format_list, parse_list, parse_mask
from hpml_orchestrator.topology.hwloc_xml import hwloc_topology
from hpml_orchestrator.topology.model import (
    NVIDIA,
    Core,
    Domain,
    Gpu,
    PciPath,
    Topology,
    full_address,
    is_gpu,
    is_nic,
    topology_of_json,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

_SOURCE = "sysfs"
_KIB = 1024
_LISTING_SECONDS = 20
_AMD_VENDORS = frozenset({0x1002, 0x1022})
_PROPERTY = re.compile(r"^(simd_count|location_id|domain|unique_id) ([0-9]{1,20})$", re.MULTILINE)
_UUID = re.compile(r"^GPU UUID:\s*(GPU-[0-9a-fA-F-]{8,64})$", re.MULTILINE)
_LISTED_GPU = re.compile(r"GPU [0-9]{1,4}: .*\(UUID: (GPU-[0-9a-fA-F-]+)\)")
_LISTED_MIG = re.compile(r"\s+MIG (\S+)\s+Device\s+([0-9]{1,4}): \(UUID: (MIG-[\w./-]+)\)")


def read_sysfs(
    sys_root: str = "/sys",
    proc_root: str = "/proc",
    *,
    gpu_listing: str = "",
) -> Topology:
    """Return the node that a kernel describes, with all online CPUs.

    Args:
        sys_root: mount point of sysfs.
        proc_root: mount point of procfs.
        gpu_listing: output of `nvidia-smi -L`, the only source of the UUIDs of MIG instances.

    Raises:
        InputError: these directories list no CPUs.
    """
    warnings: list[str] = []
    cpu_root = os.path.join(sys_root, "devices", "system", "cpu")
    # CPU numbers may have gaps, and offline CPUs keep their directories. A CPU that cannot be taken
    # offline, often cpu0, has no `online` file.
    online = frozenset(_read_cpus(cpu_root, "online")) or frozenset(
        number
        for number in _numbered(cpu_root, "cpu")
        if _read_text(cpu_root, f"cpu{number}", "online") != "0"
    )
    if not online:
        raise InputError(
            f"{cpu_root}: no CPUs found",
            hint="is /sys mounted? A topology file can be given instead: `hpml topo FILE`",
        )
    domains = _domains(sys_root, proc_root, online, warnings)
    cores = _cores(sys_root, domains, warnings)
    pci = _PciDevices(sys_root, domains)
    devices = Devices()
    _add_gpus(devices, pci, proc_root)
    _add_nics(devices, pci)
    topology = devices.topology(_SOURCE, cores, domains, warnings)
    return _with_mig_instances(topology, gpu_listing) if "MIG " in gpu_listing else topology


def list_gpus() -> str:
    """Return the output of `nvidia-smi -L`; empty if it fails."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "-L"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_LISTING_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _numbered(directory: str, word: str) -> list[int]:
    """Return the numbers of entries such as `cpu0` or `node1`."""
    matches = (re.fullmatch(rf"{word}([0-9]{{1,5}})", name) for name in _list_directory(directory))
    return sorted(int(match[1]) for match in matches if match and int(match[1]) < CPUS_MAX)


def _domains(
    sys_root: str, proc_root: str, online: Collection[int], warnings: list[str]
) -> tuple[Domain, ...]:
    root = os.path.join(sys_root, "devices", "system", "node")
    numbers = _numbered(root, "node")
    homes: dict[int, int] = {}
    for number in numbers:
        for cpu in _read_cpus(root, f"node{number}", "cpulist", mask="cpumap"):
            # `cpulist` may include offline CPUs.
            if cpu in online:
                homes.setdefault(cpu, number)
    if not homes:
        warnings.append("The kernel has no NUMA domains: all CPUs count as domain 0.")
        return (Domain(0, tuple(sorted(online)), _memory(_read_text(proc_root, "meminfo"))),)
    assign_unplaced_cpus(homes, online, warnings)
    return tuple(
        Domain(
            number,
            tuple(sorted(cpu for cpu, home in homes.items() if home == number)),
            _memory(_read_text(root, f"node{number}/meminfo")),
            _distances(_read_text(root, f"node{number}/distance"), numbers),
        )
        for number in numbers
    )


def _memory(meminfo: str) -> int:
    """Return the total memory in a meminfo file in bytes; 0 if missing."""
    match = re.search(r"MemTotal:\s*([0-9]{1,15}) kB", meminfo)
    return int(match[1]) * _KIB if match else 0


def _distances(text: str, numbers: Sequence[int]) -> tuple[tuple[int, int], ...]:
    words = re.findall(r"[0-9]{1,9}", text)
    # Domain numbers may have gaps: the n-th distance is for the n-th directory, not for domain n.
    return tuple(zip(numbers, map(int, words))) if len(words) == len(numbers) else ()


def _cores(sys_root: str, domains: Sequence[Domain], warnings: list[str]) -> tuple[Core, ...]:
    root = os.path.join(sys_root, "devices")
    cpu_root = os.path.join(root, "system", "cpu")
    homes = {cpu: domain.number for domain in domains for cpu in domain.cpus}
    types = [name for name in _list_directory(root) if name.startswith("cpu_")]
    kinds = {cpu: name[4:] for name in types for cpu in _read_cpus(root, name, "cpus")}
    # On Intel's hybrid CPUs the capacity may differ between cores of one kind, so ignore it there.
    kinds = kinds or {cpu: _read_text(cpu_root, f"cpu{cpu}", "cpu_capacity") for cpu in homes}
    groups: list[set[int]] = []
    sockets: dict[int, int] = {}
    unknown: list[int] = []
    seen: set[int] = set()
    for cpu in sorted(homes):
        place = os.path.join(cpu_root, f"cpu{cpu}", "topology")
        socket = _read_text(place, "physical_package_id")
        # -1 on some ARM machines and hypervisors
        sockets[cpu] = int(socket) if re.fullmatch("[0-9]{1,9}", socket) else 0
        siblings = _read_cpus(place, "thread_siblings_list", mask="thread_siblings")
        if not siblings:
            unknown.append(cpu)
        if cpu not in seen:
            # Siblings may include offline CPUs, which have no domain: leave them out.
            core = {cpu, *(other for other in siblings if homes.get(other) == homes[cpu])} - seen
            groups.append(core)
            seen |= core
    if unknown:
        warnings.append(
            f"The hardware threads of the CPUs {format_list(unknown)} are unknown: each counts as "
            "a core."
        )
    return cores_of_groups(groups, sockets, homes, kinds)


def _read_text(*parts: str) -> str:
    """Return a small file's text, up to a NUL byte; empty if it is missing or cannot be read."""
    try:
        with open(os.path.join(*parts), encoding="utf-8", errors="replace") as stream:
            # Linux 5.15-rc1 ends lists of CPUs in a NUL byte.
            return stream.read(1_000_000).partition("\0")[0].strip()
    except OSError:
        return ""


def _read_cpus(*parts: str, mask: str = "") -> tuple[int, ...]:
    try:
        text = _read_text(*parts)
        if not text and mask:
            return parse_mask(_read_text(*parts[:-1], mask))
        return parse_list(text)
    except ValueError:
        return ()


def _list_directory(*parts: str) -> list[str]:
    try:
        return sorted(os.listdir(os.path.join(*parts)))
    except OSError:
        return []


class _PciDevices:
    """The PCI devices of a sysfs."""

    def __init__(self, sys_root: str, domains: Sequence[Domain]) -> None:
        self.root = sys_root
        self.domains = domains
        self.cpus = frozenset(cpu for domain in domains for cpu in domain.cpus)
        self.bus = os.path.join(sys_root, "bus", "pci", "devices")
        self.addresses = [name for name in _list_directory(self.bus) if full_address(name)]
        self.chains = {name: _chain(os.path.join(self.bus, name)) for name in self.addresses}
        self.children: dict[str, set[str]] = {}
        for chain in self.chains.values():
            for depth, below in enumerate(chain[1:]):
                self.children.setdefault(chain[depth], set()).add(below)

    def number(self, address: str, name: str) -> int:
        """Return a number of a device in hexadecimal; 0 if unknown."""
        text = _read_text(self.bus, address, name)
        return int(text, 16) if re.fullmatch(r"(0x)?[0-9a-fA-F]{1,8}", text) else 0

    def kind(self, address: str) -> tuple[int, int]:
        """Return vendor and class (16 bits) of a device."""
        return self.number(address, "vendor"), self.number(address, "class") >> 8

    def _path(self, address: str) -> PciPath:
        bridges = self.chains.get(address, ())[:-1]
        own = frozenset(
            bridge
            for bridge in bridges[1:]
            if self.number(bridge, "vendor") in _AMD_VENDORS
            and len(self.children.get(bridge, ())) == 1
        )
        return PciPath(bridges, own)

    def is_virtual(self, address: str) -> bool:
        """Return whether a device is a virtual function (SR-IOV)."""
        return os.path.lexists(os.path.join(self.bus, address, "physfn"))

    def place(self, address: str) -> DeviceLocation:
        """Return a device's location; a `numa_node` of -1 means unknown, not domain 0."""
        number = _read_text(self.bus, address, "numa_node")
        listed = _read_cpus(self.bus, address, "local_cpulist", mask="local_cpus")
        local = tuple(cpu for cpu in listed if cpu in self.cpus)
        domain: int | None
        if re.fullmatch("[0-9]{1,5}", number):
            domain = nearest_with_cpus(int(number), self.domains)
            # The domain of a GPU's memory has no CPUs: use those of the nearest domain.
            homes = [home for home in self.domains if home.number == domain]
            local = local or (homes[0].cpus if homes else ())
        elif set(local) == self.cpus:  # the kernel lists all CPUs if it does not know
            domain, local = None, ()
        else:
            domain = domain_of_cpus(local, self.domains)
        return DeviceLocation(full_address(address), domain, local, self._path(address))


def _chain(path: str) -> tuple[str, ...]:
    parts = os.path.realpath(path).split(os.sep)
    start = next((i for i, part in enumerate(parts) if re.match("pci[0-9a-f]+:", part)), None)
    if start is None:
        return ()
    return (parts[start], *(part for part in parts[start + 1 :] if full_address(part)))


def _add_gpus(devices: Devices, pci: _PciDevices, proc_root: str) -> None:
    driver = os.path.join(proc_root, "driver", "nvidia", "gpus")
    driven = {full_address(name): name for name in _list_directory(driver) if full_address(name)}
    for address, name in driven.items():
        match = _UUID.search(_read_text(driver, name, "information"))
        uuid = match[1] if match else ""
        devices.add_gpu(pci.place(address), uuid=uuid, vendor=NVIDIA, named=True)
    partitions = _partitions(pci)
    for address in pci.addresses:
        vendor, kind = pci.kind(address)
        # NVIDIA's driver lists its GPUs; the others belong to virtual machines.
        if not is_gpu(vendor, kind) or pci.is_virtual(address) or (driven and vendor == NVIDIA):
            continue
        serial = _read_text(pci.bus, address, "unique_id")  # AMD's, as its tools print it
        uuid = f"GPU-{serial}" if re.fullmatch("[0-9a-f]{1,32}", serial) else ""
        place = pci.place(address)
        for partition, own in partitions.get(place.address, {0: uuid}).items():
            devices.add_gpu(place, partition=partition, uuid=own, vendor=vendor, kind=kind)


def _partitions(pci: _PciDevices) -> dict[str, dict[int, str]]:
    """Return the UUIDs of AMD GPU partitions (modes such as CPX and TPX) by PCI address and number.

    AMD's compute driver lists each partition as a node, but a job cannot read the nodes of
    partitions that its cgroup hides.
    """
    root = os.path.join(pci.root, "devices", "virtual", "kfd", "kfd", "topology", "nodes")
    partitions: dict[str, dict[int, str]] = {}
    for node in _list_directory(root):
        properties = _PROPERTY.findall(_read_text(root, node, "properties"))
        values = {name: int(value) for name, value in properties}
        location = values.get("location_id", 0)
        if not values.get("simd_count") or not location:  # a CPU
            continue
        # The partition number is in the upper bits; before Linux 6.9 in the function.
        slot = f"{values.get('domain', 0):04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 31:02x}"
        number, function = location >> 28, location & 7
        if function and f"{slot}.{function}" not in pci.chains:
            number, function = function, 0
        uuid = f"GPU-{values['unique_id']:016x}" if values.get("unique_id") else ""
        partitions.setdefault(f"{slot}.{function}", {})[number] = uuid
    return {address: numbers for address, numbers in partitions.items() if list(numbers) != [0]}


def _with_mig_instances(topology: Topology, listing: str) -> Topology:
    """Add the MIG instances that `nvidia-smi -L` lists after the GPUs of a node."""
    gpus, links, warnings = list(topology.gpus), list(topology.links), list(topology.warnings)
    parent: Gpu | None = None
    for line in listing.splitlines():
        listed, instance = _LISTED_GPU.match(line), _LISTED_MIG.match(line)
        if listed:
            parent = next((gpu for gpu in topology.gpus if gpu.uuid == listed[1]), None)
            if parent is None:
                warnings.append(f"GPU {listed[1]} of `nvidia-smi -L` is not in /proc.")
        elif instance and parent is not None:
            name, uuid = f"{parent.name} MIG {instance[1]} {instance[2]}", instance[3]
            gpus.append(replace(parent, index=len(gpus), name=name, uuid=uuid, parent=parent.uuid))
            links += [
                (name, nic, level) for gpu, nic, level in topology.links if gpu == parent.name
            ]
    return replace(topology, gpus=tuple(gpus), links=tuple(links), warnings=tuple(warnings))


def _add_nics(devices: Devices, pci: _PciDevices) -> None:
    for group in ("infiniband", "net"):
        root = os.path.join(pci.root, "class", group)
        for name in _list_directory(root):
            chain = _chain(os.path.join(root, name, "device"))
            if not chain[1:]:  # not a PCI device: lo, bridges, virtual interfaces
                continue
            vendor, kind = pci.kind(chain[-1])
            if not kind or is_nic(kind):
                devices.add_nic(
                    pci.place(chain[-1]),
                    name,
                    rdma=group == "infiniband",
                    kind=kind,
                    vendor=vendor,
                    virtual=pci.is_virtual(chain[-1]),
                )


# Files with a topology: the format is recognised by the content.

BYTES_MAX = 64 * 1024 * 1024
# Expat's error codes of truncated XML: no element; unclosed token, character or section.
_CUT_OFF = frozenset({3, 5, 6, 20, 29})
_HINT = (
    "known formats: hwloc's XML (`lstopo machine.xml`), the output of `hpml topo --json`, "
    "a copy of /sys"
)


def read_topology(source: str | os.PathLike[str]) -> Topology:
    """Return the topology in a file or directory.

    A directory is a copy of a node's /sys, or contains copies of /sys and /proc.

    Raises:
        InputError: the format is unknown, or the file is damaged; the message names the file.
        NotFoundError: the file does not exist.
    """
    path = os.fspath(source)
    if os.path.isdir(path):
        return _read_tree(path)
    try:
        with open(path, "rb") as stream:
            data = stream.read(BYTES_MAX + 1)
    except FileNotFoundError:
        raise NotFoundError(f"no such file: {path}", hint=_HINT) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{path}: cannot be read: {reason}") from None
    return topology_of_text(decode(data, name=path), name=path)


def read_topology_field(path: str, *, field: str, origin: object) -> Topology:
    """Return the topology in a file given by a field of a site profile.

    Args:
        path: the file.
        field: such as `node_types.big.topology`.
        origin: the site profile.

    Raises:
        InputError: the file is missing or not a topology; the message names field and profile.
    """
    where = f"in {origin}"
    try:
        topology = read_topology(path)
    except (InputError, NotFoundError) as error:
        raise InputError(
            str(error), field=field, hint=f"{where}; {error.hint}".rstrip("; ")
        ) from None
    if not topology.cores:
        hint = f"{where}; `hpml topo --json` on such a node writes one"
        raise InputError(f"{path}: describes no CPUs", field=field, hint=hint)
    return topology


def decode(data: bytes, *, name: str) -> str:
    """Return the text of a file that was read up to one byte beyond its maximum size.

    Raises:
        InputError: it is too large or not UTF-8.
    """
    if len(data) > BYTES_MAX:
        raise InputError(f"{name}: is larger than {BYTES_MAX // 1024**2} MiB", hint=_HINT)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{name}: is not UTF-8 text", hint=_HINT) from None


def topology_of_text(text: str, *, name: str = "topology") -> Topology:
    """Return the topology that a text describes.

    Raises:
        InputError: the format is unknown or the text is damaged.
    """
    try:
        return _read_by_content(text)
    except InputError as error:
        raise InputError(f"{name}: {error}", hint=error.hint) from None


def _read_by_content(text: str) -> Topology:
    body = text.lstrip("\ufeff \t\r\n")
    if not body:
        raise InputError("is empty", hint=_HINT)
    if body.startswith("{"):
        try:
            return topology_of_json(json.loads(body))
        except ValueError as error:
            raise InputError(f"is not valid JSON: {error}", hint=_HINT) from None
    if body.startswith("<"):
        root = parse_xml(body)
        if root.tag == "topology":
            return hwloc_topology(root)
        raise InputError(f"is XML but not a machine's topology: <{root.tag[:40]}>", hint=_HINT)
    raise InputError("is not a topology in a known format", hint=_HINT)


def parse_xml(text: str) -> ET.Element:
    """Return the root of an XML document of bounded size.

    Raises:
        InputError: the text is not XML, is truncated, or defines entities (these may explode).
    """
    if "<!ENTITY" in text:
        raise InputError(
            "defines XML entities, which no topology file does",
            hint="export it again: `lstopo topology.xml`",
        )
    try:
        return ET.fromstring(text)  # noqa: S314 - bounded, and without entities
    except ET.ParseError as error:
        if error.code in _CUT_OFF:
            raise InputError(
                f"the XML is cut off: it ends at line {error.position[0]} with elements still open",
                hint="copy or export the file again",
            ) from None
        raise InputError(f"is not valid XML: {error}") from None
    except (ValueError, LookupError) as error:  # the declared encoding is unknown to Python
        raise InputError(f"is not valid XML: {error}") from None


def _read_tree(path: str) -> Topology:
    for sys_root, proc_root in (
        (os.path.join(path, "sys"), os.path.join(path, "proc")),
        (path, os.path.join(path, os.pardir, "proc")),
    ):
        if os.path.isdir(os.path.join(sys_root, "devices", "system", "cpu")):
            return read_sysfs(sys_root, proc_root)
    raise InputError(
        f"{path}: is a directory without devices/system/cpu, as a copy of /sys has it", hint=_HINT
    )
