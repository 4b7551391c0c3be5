"""One node's sockets, NUMA domains, cores, GPUs and network cards, whatever the source.

Standard library only, Python 3.9 or newer: it travels to the nodes. CPU numbers are the kernel's,
PCI addresses are complete and lower case (`0000:c7:00.0`), sizes are in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Core", "Domain", "Gpu", "Nic", "Topology"]


@dataclass(frozen=True)
class Core:
    """One physical core.

    Attributes:
        number: its number in the node, counted from 0 in the order of its lowest CPU.
        socket: number of its socket.
        domain: number of the NUMA domain that its CPUs are in.
        cpus: its hardware threads, lowest first.
    """

    number: int
    socket: int
    domain: int
    cpus: tuple[int, ...]


@dataclass(frozen=True)
class Domain:
    """One NUMA domain.

    Attributes:
        number: the kernel's number of it.
        cpus: its CPUs; empty for memory alone, such as that of a GPU or CXL.
        memory_bytes: its memory; 0 where unknown.
        distances: `(domain, distance)` to every known domain, itself included (10 is local); empty
            where unknown.
    """

    number: int
    cpus: tuple[int, ...]
    memory_bytes: int = 0
    distances: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Gpu:
    """One GPU, or one MIG instance of one.

    Attributes:
        index: its place among the GPUs of the node, in the order of the source.
        name: what the source calls it, such as `GPU0`.
        address: PCI address; empty where unknown. Partitions of a GPU (AMD's TPX and CPX
            modes) differ in its last digit, as AMD's tools write it.
        uuid: of the device or the MIG instance; empty where unknown.
        parent: UUID (or PCI address) of the GPU that a MIG instance is part of; else empty.
        domain: NUMA domain with CPUs that it is nearest to; None where unknown.
        cpus: CPUs that are local to it; empty where unknown.
    """

    index: int
    name: str
    address: str = ""
    uuid: str = ""
    parent: str = ""
    domain: int | None = None
    cpus: tuple[int, ...] = ()


@dataclass(frozen=True)
class Nic:
    """One network card (or port) that ranks may talk through.

    Attributes:
        name: such as `mlx5_0`.
        address: PCI address; empty where unknown.
        domain: NUMA domain that it is nearest to; None where unknown.
        cpus: CPUs that are local to it; empty where unknown.
    """

    name: str
    address: str = ""
    domain: int | None = None
    cpus: tuple[int, ...] = ()


@dataclass(frozen=True)
class Topology:
    """A node.

    Attributes:
        source: `sysfs`, `hwloc XML`, `NCCL XML` or `nvidia-smi topo -m`.
        cores: all cores that are online, by number.
        domains: all NUMA domains, by number.
        gpus: all GPUs, by index.
        nics: all network cards, by name.
        links: `(GPU's name, NIC's name, level)`, where level is how far apart they are on PCI, in
            nvidia-smi's terms: PIX, PXB, PHB, NODE, SYS; unknown ones are left out.
        warnings: what was missing or inferred, one sentence each.
        sockets_told: whether the source has sockets; else each domain counts as one.
    """

    source: str
    cores: tuple[Core, ...]
    domains: tuple[Domain, ...]
    gpus: tuple[Gpu, ...] = ()
    nics: tuple[Nic, ...] = ()
    links: tuple[tuple[str, str, str], ...] = ()
    warnings: tuple[str, ...] = ()
    sockets_told: bool = True

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
