"""Machines that a virtual node can look like: sockets, domains, cores, GPUs and network cards."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

NVIDIA, AMD, MELLANOX, CRAY = 0x10DE, 0x1002, 0x15B3, 0x17DB
_LOCAL = 10  # the kernel's distance of a domain from itself


@dataclass(frozen=True)
class Device:
    """A PCI device: its address, its domain, and what it is called."""

    name: str
    address: str
    domain: int
    root: str  # bus of the host bridge it hangs below
    vendor: int
    kind: str  # gpu, infiniband or net

    @property
    def pci_class(self) -> int:
        """The PCI class that the kernel reports."""
        if self.kind == "gpu":
            return 0x030200 if self.vendor == NVIDIA else 0x038000
        return 0x020700 if self.kind == "infiniband" else 0x020000

    @property
    def identity(self) -> uuid.UUID:
        """What its UUID is made of: always the same for the same place."""
        return uuid.uuid5(uuid.NAMESPACE_OID, f"devcluster {self.address}")


@dataclass(frozen=True)
class Machine:
    """A node by numbers; domains, and cores in them, are numbered from socket 0 on.

    Attributes:
        name: what `--machine` calls it.
        sockets: how many.
        domains: NUMA domains of each socket.
        cores: cores of each domain.
        threads: hardware threads of each core; thread t of core k is CPU k + t * all cores.
        near: distance between domains of one socket.
        far: distance between sockets.
        memory_mib: memory of all domains together, in MiB.
        gpu_type: Slurm's name of the GPUs.
        gpus: in the order of their addresses, as drivers count them.
        nics: network cards.
        by_turns: whether CPU numbers go round the sockets (0, 2, 4... on socket 0).
    """

    name: str
    sockets: int
    domains: int
    cores: int
    threads: int
    near: int
    far: int
    memory_mib: int
    gpu_type: str = ""
    gpus: tuple[Device, ...] = ()
    nics: tuple[Device, ...] = ()
    by_turns: bool = False

    @property
    def all_domains(self) -> int:
        """Domains of the node."""
        return self.sockets * self.domains

    @property
    def cores_per_socket(self) -> int:
        """Cores of one socket."""
        return self.domains * self.cores

    @property
    def all_cores(self) -> int:
        """Cores of the node."""
        return self.sockets * self.cores_per_socket

    @property
    def cpus(self) -> int:
        """CPUs of the node, as the kernel counts: hardware threads."""
        return self.all_cores * self.threads

    def core_cpus(self, core: int) -> tuple[int, ...]:
        """Gives the CPUs of a core, which is counted socket by socket and domain by domain."""
        first = core
        if self.by_turns:
            socket, within = divmod(core, self.cores_per_socket)
            first = within * self.sockets + socket
        return tuple(first + thread * self.all_cores for thread in range(self.threads))

    def domain_cores(self, domain: int) -> range:
        """Gives the cores of a domain, which is how Slurm counts them in gres.conf as well."""
        return range(domain * self.cores, (domain + 1) * self.cores)

    def domain_cpus(self, domain: int) -> tuple[int, ...]:
        """Gives the CPUs of a domain."""
        return tuple(
            sorted(cpu for core in self.domain_cores(domain) for cpu in self.core_cpus(core))
        )

    def socket_cpus(self, socket: int) -> tuple[int, ...]:
        """Gives the CPUs of a socket."""
        first = socket * self.domains
        domains = range(first, first + self.domains)
        return tuple(sorted(cpu for one in domains for cpu in self.domain_cpus(one)))

    def distances(self, domain: int) -> tuple[int, ...]:
        """Gives a domain's distance to each domain."""
        return tuple(
            _LOCAL
            if other == domain
            else self.near
            if other // self.domains == domain // self.domains
            else self.far
            for other in range(self.all_domains)
        )


def _gpus(vendor: int, *places: tuple[str, int, str]) -> tuple[Device, ...]:
    """Makes GPUs of (bus, domain, bus of the host bridge)."""
    return tuple(
        Device(f"GPU{index}", f"0000:{bus}:00.0", domain, root, vendor, "gpu")
        for index, (bus, domain, root) in enumerate(places)
    )


def _nics(kind: str, vendor: int, *places: tuple[str, str, int, str]) -> tuple[Device, ...]:
    """Makes network cards of (name, bus, domain, bus of the host bridge)."""
    return tuple(
        Device(name, f"0000:{bus}:00.0", domain, root, vendor, kind)
        for name, bus, domain, root in places
    )


_ALL = (
    # NVIDIA's DGX A100: two EPYC 7742 as four domains each. Of the cards, those for computing.
    Machine(
        name="dgx-a100",
        sockets=2,
        domains=4,
        cores=16,
        threads=2,
        near=12,
        far=32,
        memory_mib=1_000_000,
        gpu_type="a100",
        gpus=_gpus(
            NVIDIA,
            ("07", 3, "00"),
            ("0f", 3, "00"),
            ("47", 1, "40"),
            ("4e", 1, "40"),
            ("87", 7, "80"),
            ("90", 7, "80"),
            ("b7", 5, "b0"),
            ("bd", 5, "b0"),
        ),
        nics=_nics(
            "infiniband",
            MELLANOX,
            ("mlx5_0", "0c", 3, "00"),
            ("mlx5_1", "12", 3, "00"),
            ("mlx5_2", "4b", 1, "40"),
            ("mlx5_3", "54", 1, "40"),
            ("mlx5_6", "8d", 7, "80"),
            ("mlx5_7", "94", 7, "80"),
            ("mlx5_8", "ba", 5, "b0"),
            ("mlx5_9", "cc", 5, "b0"),
        ),
    ),
    # One EPYC 7763 as four domains, whose GPUs are in reversed order; without SMT.
    Machine(
        name="milan-reversed",
        sockets=1,
        domains=4,
        cores=16,
        threads=1,
        near=12,
        far=32,
        memory_mib=256_000,
        gpu_type="a100",
        gpus=_gpus(NVIDIA, ("03", 3, "00"), ("41", 2, "40"), ("82", 1, "80"), ("c1", 0, "c0")),
        nics=_nics(
            "infiniband",
            MELLANOX,
            ("mlx5_0", "21", 3, "20"),
            ("mlx5_1", "61", 2, "60"),
        ),
    ),
    # Two sockets of one domain each, CPU numbers by turns; half of the GPUs at each socket.
    Machine(
        name="intel-2s",
        sockets=2,
        domains=1,
        cores=20,
        threads=2,
        near=10,
        far=21,
        memory_mib=384_000,
        gpu_type="v100",
        gpus=_gpus(NVIDIA, ("1a", 0, "17"), ("1c", 0, "17"), ("88", 1, "85"), ("8a", 1, "85")),
        nics=_nics("infiniband", MELLANOX, ("mlx5_0", "19", 0, "17"), ("mlx5_1", "87", 1, "85")),
        by_turns=True,
    ),
    # One EPYC 7A53 with four MI250X, whose eight halves count as GPUs.
    Machine(
        name="mi250x",
        sockets=1,
        domains=4,
        cores=16,
        threads=2,
        near=12,
        far=32,
        memory_mib=512_000,
        gpu_type="mi250x",
        gpus=_gpus(
            AMD,
            ("c1", 3, "c0"),
            ("c6", 3, "c4"),
            ("c9", 1, "c8"),
            ("ce", 1, "cc"),
            ("d1", 0, "d0"),
            ("d6", 0, "d4"),
            ("d9", 2, "d8"),
            ("de", 2, "dc"),
        ),
        nics=_nics(
            "net",
            CRAY,
            ("hsn0", "c2", 3, "c0"),
            ("hsn1", "ca", 1, "c8"),
            ("hsn2", "d2", 0, "d0"),
            ("hsn3", "da", 2, "d8"),
        ),
    ),
    # Two sockets of twelve cores, no GPU.
    Machine(
        name="cpu-2s",
        sockets=2,
        domains=1,
        cores=12,
        threads=1,
        near=10,
        far=21,
        memory_mib=64_000,
    ),
)
MACHINES = {one.name: one for one in _ALL}
