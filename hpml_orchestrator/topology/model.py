"""One node's sockets, NUMA domains, cores, GPUs and network cards, whatever the source.

Standard library only, Python 3.9 or newer: it travels to the nodes. CPU numbers are the kernel's,
PCI addresses are complete and lower case (`0000:c7:00.0`), sizes are in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.topology.cpulist import format_list, parse_list

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_TEXTS = ("name", "address", "uuid", "parent", "kind")


@dataclass(frozen=True)
class Core:
    """One physical core."""

    number: int  # its number in the node, counted from 0 in the order of its lowest CPU
    socket: int  # number of its socket
    domain: int  # number of the NUMA domain that its CPUs are in
    cpus: tuple[int, ...]  # its hardware threads, lowest first
    kind: str = ""  # Intel's `core` (fast) or `atom`, or the kernel's capacity, such as `1024`


@dataclass(frozen=True)
class Domain:
    """One NUMA domain."""

    number: int  # the kernel's number of it
    cpus: tuple[int, ...]  # its CPUs; empty for a domain of memory only, such as a GPU's or CXL
    memory_bytes: int = 0  # its memory; 0 if unknown
    # `(domain, distance)` to every known domain, itself included (10 is local); empty if unknown
    distances: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Gpu:
    """One GPU, or one MIG instance of one."""

    index: int  # its place among the GPUs of the node, in the order of the source
    name: str  # what the source calls it, such as `GPU0`
    # PCI address; empty if unknown. Partitions of a GPU (AMD's TPX and CPX modes) differ in its
    # last digit, as AMD's tools write it
    address: str = ""
    uuid: str = ""  # of the device or the MIG instance; empty if unknown
    parent: str = ""  # UUID (or PCI address) of the GPU that a MIG instance is part of; else empty
    domain: int | None = None  # NUMA domain with CPUs that it is nearest to; None if unknown
    cpus: tuple[int, ...] = ()  # CPUs that are local to it; empty if unknown


@dataclass(frozen=True)
class Nic:
    """One network card (or port) that ranks may talk through."""

    name: str  # such as `mlx5_0`
    address: str = ""  # PCI address; empty if unknown
    domain: int | None = None  # NUMA domain that it is nearest to; None if unknown
    cpus: tuple[int, ...] = ()  # CPUs that are local to it; empty if unknown


@dataclass(frozen=True)
class Topology:
    """A node."""

    source: str  # `sysfs` or `hwloc XML`
    cores: tuple[Core, ...]  # all cores that are online, by number
    domains: tuple[Domain, ...]  # all NUMA domains, by number
    gpus: tuple[Gpu, ...] = ()  # all GPUs, by index
    nics: tuple[Nic, ...] = ()  # all network cards, by name
    # `(GPU's name, NIC's name, level)` with nvidia-smi's level of their PCI connection: PIX, PXB,
    # PHB, NODE, SYS; unknown ones are left out
    links: tuple[tuple[str, str, str], ...] = ()
    warnings: tuple[str, ...] = ()  # what was missing or inferred, one sentence each

    @property
    def cpus(self) -> frozenset[int]:
        """All CPUs."""
        return frozenset(cpu for core in self.cores for cpu in core.cpus)

    @property
    def devices(self) -> tuple[Gpu, ...]:
        """What ranks run on: MIG instances, and GPUs that are not divided into such."""
        divided = {gpu.parent for gpu in self.gpus if gpu.parent}
        return tuple(
            gpu for gpu in self.gpus if not divided & {gpu.uuid, gpu.address} or gpu.parent
        )

    def domain(self, number: int) -> Domain | None:
        """The domain of that number."""
        return next((domain for domain in self.domains if domain.number == number), None)


Part = TypeVar("Part", Core, Domain, Gpu, Nic)


def topology_json(topology: Topology) -> dict[str, object]:
    """Return a topology ready for `json.dumps`; sets of CPUs are lists in the kernel's format."""
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
    """Return the topology that such data hold.

    Raises:
        InputError: they are not what `topology_json` makes.
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
    rows = [{"kind": "", **row} for row in rows]  # earlier versions wrote no kinds of cores
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
