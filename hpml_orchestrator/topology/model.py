"""A node's topology: cores, NUMA domains and devices, and their PCI addresses."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.topology.cpulist import format_list, parse_list

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_TEXTS = ("name", "address", "uuid", "parent", "kind")


def format_names(words: Iterable[str]) -> str:
    """Return names as one text, with consecutive numbers as a range.

    >>> format_names(["GPU0", "GPU1", "GPU2", "mlx5_0"])
    'GPU0-2 mlx5_0'
    """
    runs: list[list[str]] = []  # stem, first number, last number
    for word in words:
        match = re.fullmatch(r"(|.*[^0-9])(0|[1-9][0-9]{0,8})", word)
        stem, number = (match[1], match[2]) if match else (word, "")
        last = runs[-1] if runs else ["", "", ""]
        if number and last[2] and last[0] == stem and int(number) == int(last[2]) + 1:
            last[2] = number
        else:
            runs.append([stem, number, number])
    return " ".join(
        f"{stem}{first}" + (f"-{last}" if last != first else "") for stem, first, last in runs
    )


@dataclass(frozen=True)
class Core:
    """One physical core."""

    number: int  # number on the node, from 0 in the order of the lowest CPU
    socket: int  # number of its socket
    domain: int  # NUMA domain of its CPUs
    cpus: tuple[int, ...]  # its hardware threads, lowest first
    kind: str = ""  # Intel's `core` (fast) or `atom`, or the kernel's capacity, such as `1024`


@dataclass(frozen=True)
class Domain:
    """One NUMA domain."""

    number: int  # the kernel's number
    cpus: tuple[int, ...]  # its CPUs; empty for a domain of memory only, such as a GPU's or CXL
    memory_bytes: int = 0  # its memory; 0 if unknown
    # `(domain, distance)` for every known domain including itself (10 is local); empty if unknown
    distances: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Gpu:
    """One GPU or one MIG instance."""

    index: int  # index among the node's GPUs, in the source's order
    name: str  # the source's name, such as `GPU0`
    # PCI address; empty if unknown. Partitions of a GPU (AMD's TPX and CPX modes) differ in the
    # last digit, as in AMD's tools
    address: str = ""
    uuid: str = ""  # UUID of the device or MIG instance; empty if unknown
    parent: str = ""  # UUID (or PCI address) of a MIG instance's GPU; else empty
    domain: int | None = None  # nearest NUMA domain with CPUs; None if unknown
    cpus: tuple[int, ...] = ()  # CPUs that are local to it; empty if unknown


@dataclass(frozen=True)
class Nic:
    """One network card (or port) that ranks may communicate through."""

    name: str  # such as `mlx5_0`
    address: str = ""  # PCI address; empty if unknown
    domain: int | None = None  # nearest NUMA domain; None if unknown
    cpus: tuple[int, ...] = ()  # CPUs that are local to it; empty if unknown


@dataclass(frozen=True)
class Topology:
    """A node."""

    source: str  # `sysfs` or `hwloc XML`
    cores: tuple[Core, ...]  # all online cores, by number
    domains: tuple[Domain, ...]  # all NUMA domains, by number
    gpus: tuple[Gpu, ...] = ()  # all GPUs, by index
    nics: tuple[Nic, ...] = ()  # all network cards, by name
    # `(GPU name, NIC name, level)`: the PCI connection as in nvidia-smi (PIX, PXB, PHB, NODE, SYS);
    # unknown connections are omitted
    links: tuple[tuple[str, str, str], ...] = ()
    warnings: tuple[str, ...] = ()  # what was missing or inferred, one sentence each

    @property
    def cpus(self) -> frozenset[int]:
        """All CPUs."""
        return frozenset(cpu for core in self.cores for cpu in core.cpus)

    @property
    def devices(self) -> tuple[Gpu, ...]:
        """The devices that ranks use: MIG instances, and GPUs without MIG instances."""
        divided = {gpu.parent for gpu in self.gpus if gpu.parent}
        return tuple(
            gpu for gpu in self.gpus if not divided & {gpu.uuid, gpu.address} or gpu.parent
        )

    def domain(self, number: int) -> Domain | None:
        """The domain with a number."""
        return next((domain for domain in self.domains if domain.number == number), None)


Part = TypeVar("Part", Core, Domain, Gpu, Nic)


def nearest_nics(topology: Topology, gpu: str) -> str:
    """Return the level and names of the network cards nearest to a GPU; SYS is not near."""
    for level in ("PIX", "PXB", "PHB", "NODE"):
        near = [nic for name, nic, distance in topology.links if (name, distance) == (gpu, level)]
        if near:
            return f"{level} {format_names(near)}"
    return ""


def topology_json(topology: Topology) -> dict[str, object]:
    """Return a topology for `json.dumps`, with CPU sets in the kernel's list format."""
    return {
        "source": topology.source,
        "domains": _rows(topology.domains),
        "cores": _rows(topology.cores),
        "gpus": _rows(topology.gpus),
        "nics": _rows(topology.nics),
        "links": [{"gpu": gpu, "nic": nic, "level": level} for gpu, nic, level in topology.links],
        "warnings": list(topology.warnings),
    }


def _rows(parts: Iterable[Core | Domain | Gpu | Nic]) -> list[dict[str, object]]:
    rows = []
    for part in parts:
        row = {field.name: getattr(part, field.name) for field in fields(part)}
        row["cpus"] = format_list(part.cpus)
        if isinstance(part, Domain):
            row["distances"] = {str(other): distance for other, distance in part.distances}
        rows.append(row)
    return rows


def topology_of_json(data: object) -> Topology:
    """Return the topology in the output of `topology_json`.

    Raises:
        InputError: the data do not describe a topology.
    """
    try:
        return _checked(_parsed(data))
    except KeyError as error:
        reason = f"the field {error.args[0]!r} is missing"
    except ValueError as error:
        reason = str(error)
    except (TypeError, AttributeError) as error:
        reason = f"a value is of the wrong type: {error}"
    raise InputError(
        f"is not a topology from `hpml topo --json`: {reason}",
        hint="hpml topo --json > node.json",
    )


def _parsed(data: object) -> Topology:
    if not isinstance(data, dict):
        raise TypeError(f"not an object but {data!r:.40}")
    if not isinstance(data["warnings"], list):
        raise TypeError("warnings must be a list")
    return Topology(
        source=str(data["source"]),
        cores=_parts(Core, data["cores"]),
        domains=_parts(Domain, data["domains"]),
        gpus=_parts(Gpu, data["gpus"]),
        nics=_parts(Nic, data["nics"]),
        links=tuple((str(row["gpu"]), str(row["nic"]), str(row["level"])) for row in data["links"]),
        warnings=tuple(str(warning) for warning in data["warnings"]),
    )


def _parts(kind: type[Part], rows: Iterable[Mapping[str, object]]) -> tuple[Part, ...]:
    names = [field.name for field in fields(kind)]
    rows = [{"kind": "", **row} for row in rows]  # earlier versions did not write the cores' kind
    return tuple(kind(**{name: _value(name, row[name]) for name in names}) for row in rows)


def _value(name: str, value: Any) -> Any:
    if name == "cpus":
        return parse_list(value)
    if name == "distances":
        return tuple((int(other), _value(name[:-1], away)) for other, away in value.items())
    if value is None and name == "domain":
        return None
    if not isinstance(value, str if name in _TEXTS else int):
        raise TypeError(f"{name}={value!r:.40}")
    if isinstance(value, int) and value < 0:
        raise ValueError(f"{name} is negative: {value}")
    return value


def _checked(topology: Topology) -> Topology:
    domains = {domain.number: set(domain.cpus) for domain in topology.domains}
    seen: set[int] = set()
    for core in topology.cores:
        cpus = set(core.cpus)
        if not cpus or cpus & seen or not cpus <= domains.get(core.domain, set()):
            raise ValueError(f"core {core.number} does not fit its domain and the other cores")
        seen |= cpus
    for what, numbers in (
        ("domain", [domain.number for domain in topology.domains]),
        ("core", [core.number for core in topology.cores]),
        ("GPU", [gpu.index for gpu in topology.gpus]),
    ):
        if len(set(numbers)) < len(numbers):
            raise ValueError(f"two {what}s have the same number")
    homes = {device.domain for device in topology.gpus} | {nic.domain for nic in topology.nics}
    for home in homes - {None, *domains}:
        raise ValueError(f"a device is next to domain {home}, which is missing")
    return topology


# PCI addresses, device classes, and the distance between two devices.

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
    """The PCI bridges between a device and the host.

    Attributes:
        bridges: starting at the host bridge; empty if unknown.
        own: the `bridges` inside the device's own package.
    """

    bridges: tuple[str, ...] = ()
    own: frozenset[str] = frozenset()


def full_address(text: str) -> str:
    """Return the full PCI address in lower case; empty if the text is not an address.

    >>> full_address("C7:00.0"), full_address("00000000:C7:00.0"), full_address("card0")
    ('0000:c7:00.0', '0000:c7:00.0', '')
    """
    match = _ADDRESS.fullmatch(text.strip())
    if not match:
        return ""
    domain, bus, device, function = (int(part or "0", 16) for part in match.groups())
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function:x}"


def address_key(address: str) -> tuple[int, ...]:
    """Return a key that sorts PCI addresses numerically."""
    return tuple(int(part, 16) for part in re.split("[:.]", full_address(address)) if part)


def partition_address(address: str, number: int) -> str:
    """Return the address of a GPU partition, with its number as the PCI function.

    AMD's tools and HIP use this form for the partitions of an MI300 in TPX or CPX mode, which are a
    single PCI device to the kernel.

    >>> partition_address("0001:02:00.0", 5)
    '0001:02:00.5'
    """
    if not number or not full_address(address):
        return address
    return f"{address[:-1]}{min(int(address[-1]) + number, _LAST_FUNCTION)}"


def is_gpu(vendor: int, device_class: int) -> bool:
    """Return whether a PCI device with this vendor and class (16 bits) is a compute GPU.

    A server's graphics chip (ASPEED, Matrox) and an NVSwitch are not.
    """
    return device_class in _GPU_CLASSES.get(vendor, ())


def is_nic(device_class: int) -> bool:
    """Return whether a PCI class (16 bits) is that of a network card (Ethernet or fabric)."""
    return device_class >> 8 == _NETWORK or device_class == _SERIAL_INFINIBAND


def nic_rank(name: str, device_class: int, vendor: int, *, rdma: bool) -> int:
    """Return the preference of a network card; ranks use only cards with the lowest value.

    0: fabric card (InfiniBand, Omni-Path, Slingshot, EFA); 1: other RDMA device (RoCE); 2: network
    interface on a fabric card (IPoIB); 3: Ethernet; 4: card without a name. Unknown arguments are
    empty or 0. `rdma` means that the name is that of an RDMA device.
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

    PIX: connected by one switch; PXB: several switches; PHB: the host bridge; NODE: two host
    bridges of one NUMA domain; SYS: different domains.
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
    return "PIX" if max(below) <= 1 else "PXB"  # a switch has two bridges, and one is shared
