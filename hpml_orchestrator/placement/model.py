"""What a plan is made of: the machine as a job sees it, its GPUs, and each rank's place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import counted
from hpml_orchestrator.topology.model import format_list

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from hpml_orchestrator.topology.model import Core, Gpu, Topology

PLAN_COLUMNS = ("rank", "GPU", "CPUs", "cores", "NUMA", "distance", "memory", "NIC", "threads")


@dataclass(frozen=True)
class RankPlan:
    """Where one rank runs."""

    local_rank: int  # number among the ranks of its node, from 0
    # PCI address of its GPU, or the source's name of it; None without a GPU, or if the GPU is not
    # in the topology
    gpu: str | None = None
    gpu_index: int | None = None  # the GPU's index in the topology
    gpu_uuid: str = ""  # UUID of the GPU or MIG instance; empty if unknown
    cpus: tuple[int, ...] = ()  # CPUs that it may run on, ascending
    cores: tuple[int, ...] = ()  # numbers of the physical cores that those are in, ascending
    numa: tuple[int, ...] = ()  # NUMA domains that those are in, ascending
    memory: int | None = None  # the NUMA domain whose memory to prefer; None for no preference
    nic: str | None = None  # name of its network card; None without one
    threads: int = 1  # OpenMP threads: its cores less its loader workers, at least 1
    loader_workers: int = 0  # processes that load data for it, on its cores
    # The largest NUMA distance from its GPU to one of its cores (10 is local); None without a GPU,
    # or if unknown
    distance: int | None = None

    def cpu_list(self) -> str:
        """Return its CPUs in the kernel's list format."""
        return format_list(self.cpus)


@dataclass(frozen=True)
class Plan:
    """The ranks of one node."""

    ranks: tuple[RankPlan, ...]  # by local rank, from 0 without a gap
    # The policy that it was made with; `none` means that nothing is bound
    policy: str = "gpu-local"
    warnings: tuple[str, ...] = ()  # which rules could not be kept, one sentence each


def plan_json(plan: Plan) -> dict[str, object]:
    """Return a plan as plain data, ready for `json.dumps`; CPUs are in the kernel's list format."""
    return {
        "ranks": [
            {**vars(rank), "cpus": rank.cpu_list(), "gpu_uuid": rank.gpu_uuid or None}
            for rank in plan.ranks
        ],
        "policy": plan.policy,
        "warnings": list(plan.warnings),
    }


def plan_rows(plan: Plan) -> list[tuple[str, ...]]:
    """Return one row per rank, its cells as in `PLAN_COLUMNS`; what is unknown is a dash."""
    rows = []
    for rank in plan.ranks:
        cells = (
            rank.local_rank,
            rank.gpu,
            rank.cpu_list() or None,
            len(rank.cores),
            ",".join(map(str, rank.numa)) or None,
            rank.distance,
            rank.memory,
            rank.nic,
            rank.threads,
        )
        rows.append(tuple("-" if cell is None else str(cell) for cell in cells))
    return rows


# A topology as the planner needs it: the usable cores, and distances between domains.

UNKNOWN_DISTANCE = 256  # the kernel's distances end at 255
_LOCAL, _REMOTE = 10, 20  # assumed for comparisons if distances are unknown


class Machine:
    """The usable part of a node.

    Args:
        topology: the node.
        allowed: the CPUs that may be used; None for all.
        smt: whether all hardware threads of a core are used, or only its first usable one.

    Attributes:
        pool: NUMA domain to its usable cores, by socket and number, those of different kinds in
            turns; none is empty.
        order: NUMA domain to its number in `pool`.
        cpus_of: core to its usable CPUs.
        domain_of: core to its NUMA domain.
        socket_of: core to its socket.
        home_of: CPU to its domain, for all CPUs that are online.
    """

    def __init__(self, topology: Topology, allowed: Iterable[int] | None, *, smt: bool) -> None:
        usable = topology.cpus if allowed is None else topology.cpus.intersection(allowed)
        self.cpus_of: dict[int, tuple[int, ...]] = {}
        self.domain_of: dict[int, int] = {}
        self.socket_of: dict[int, int] = {}
        self.home_of: dict[int, int] = {}
        self._sockets: dict[int, set[int]] = {}
        pool: dict[int, list[int]] = {}
        for core in topology.cores:
            self.home_of.update(dict.fromkeys(core.cpus, core.domain))
            self._sockets.setdefault(core.domain, set()).add(core.socket)
        for core in _mixed([core for core in topology.cores if usable.intersection(core.cpus)]):
            # Not always the core's first thread: a job's mask may hold only the second one.
            cpus = tuple(cpu for cpu in core.cpus if cpu in usable)
            self.cpus_of[core.number] = cpus if smt else cpus[:1]
            self.domain_of[core.number] = core.domain
            self.socket_of[core.number] = core.socket
            pool.setdefault(core.domain, []).append(core.number)
        self.pool = {domain: tuple(cores) for domain, cores in pool.items()}
        self.order = {domain: number for number, domain in enumerate(self.pool)}
        self._distances = {domain.number: dict(domain.distances) for domain in topology.domains}
        self._memory = {domain.number: domain.memory_bytes for domain in topology.domains}

    @property
    def cores(self) -> tuple[int, ...]:
        """All usable cores, by socket, domain and number."""
        return tuple(self.cpus_of)

    @property
    def domains_with_cpus(self) -> tuple[int, ...]:
        """All domains that have CPUs, usable or not."""
        return tuple(sorted(self._sockets))

    def distance(self, domain: int, other: int) -> int:
        """Return the distance between two domains; if unknown, 10 within and 20 between domains.

        For comparisons only; `farthest` has the distances to display.
        """
        default = _LOCAL if domain == other else _REMOTE
        return self._distances.get(domain, {}).get(other, default)

    def farthest(self, near: Collection[int], domains: Iterable[int]) -> int | None:
        """Return the largest distance of some domains, each from the nearest of `near`.

        None if the distance of one of them is unknown.
        """
        rows = [self._distances.get(domain, {}) for domain in near]
        away = [[row[other] for row in rows if other in row] for other in domains]
        return max(map(min, away), default=None) if all(away) else None

    def gap(self, domain: int, other: int) -> tuple[int, int]:
        """Return the distance, and 1 if no socket is shared: for sources without distances."""
        sockets, others = self._sockets.get(domain, set()), self._sockets.get(other, set())
        return self.distance(domain, other), int(sockets.isdisjoint(others))

    def nearest(self, domain: int, among: Iterable[int]) -> tuple[int, ...]:
        """Return the domains in `among` that are nearest to `domain`; several if they tie."""
        gaps = {other: self.gap(domain, other) for other in among}
        least = min(gaps.values(), default=None)
        return tuple(other for other, gap in gaps.items() if gap == least)

    def domains_of_cpus(self, cpus: Iterable[int]) -> tuple[int, ...]:
        """Return the domains of the CPUs."""
        return tuple(sorted({self.home_of[cpu] for cpu in cpus if cpu in self.home_of}))

    def memory_for(self, domain: int) -> int:
        """Return the domain to take memory from: itself, unless it has none and others do."""
        others = [other for other in self._sockets if other != domain and self._memory.get(other)]
        if self._memory.get(domain) or not others:
            return domain
        # The number breaks ties, so that equal nodes get equal plans.
        return min(others, key=lambda other: (self.gap(domain, other), other))


def _mixed(cores: Collection[Core]) -> list[Core]:
    """Return cores by socket, domain and number, those of different kinds in turns.

    However many equal parts the list is cut into, each has its share of every kind.
    """
    like: dict[tuple[int, int, str], list[Core]] = {}
    for core in sorted(cores, key=lambda core: core.number):
        like.setdefault((core.socket, core.domain, core.kind), []).append(core)
    places = [
        (socket, domain, (at + 0.5) / len(some), core.number, core)
        for (socket, domain, _), some in like.items()
        for at, core in enumerate(some)
    ]
    return [place[-1] for place in sorted(places)]


# The GPU of each local rank, and the NUMA domains next to it.
#
# Visible devices are those of CUDA_VISIBLE_DEVICES or ROCR_VISIBLE_DEVICES. Indices in there count
# the GPUs that the process may open, in the order of their PCI addresses (with
# CUDA_DEVICE_ORDER=PCI_BUS_ID); the topology also has those that a cgroup hides.

VISIBLE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables that list the visible devices, the one that counts first."""


@dataclass(frozen=True)
class RankGpu:
    """The GPU of one rank."""

    rank: int  # local rank
    gpu: Gpu | None = None  # its GPU; None without one, or if it is not in the topology
    near: tuple[int, ...] = ()  # NUMA domains that the GPU is next to; empty if unknown


def gpus_of_ranks(
    topology: Topology,
    machine: Machine,
    ranks: int,
    ranks_per_gpu: int,
    devices: Sequence[Gpu | None],
    warnings: list[str],
) -> list[RankGpu]:
    """Return the GPU of each rank: the visible device of its number, modulo their count.

    That is what `torch.device("cuda", local_rank % device_count)` does in the rank itself.
    """
    if not devices:
        return [RankGpu(rank) for rank in range(ranks)]
    # Too many ranks are a warning rather than an error: the ranks themselves would share the GPUs
    # in the same way.
    if ranks > len(devices) * ranks_per_gpu:
        warnings.append(
            f"{ranks} ranks for {counted(len(devices), 'visible GPU')}: more than "
            f"{ranks_per_gpu} on one GPU"
        )
    near = [() if gpu is None else local_domains(topology, machine, gpu) for gpu in devices]
    places = [rank % len(devices) for rank in range(ranks)]
    return [RankGpu(rank, devices[place], near[place]) for rank, place in enumerate(places)]


def domains_of_idle(
    topology: Topology, machine: Machine, ranks: int, devices: Sequence[Gpu | None]
) -> set[int]:
    """Return the domains whose visible GPUs all lack a rank.

    Domains without a GPU are included if they are nearer to these than to the GPU of any rank.
    """
    near = [() if gpu is None else local_domains(topology, machine, gpu) for gpu in devices]
    ranked = {domain for domains in near[:ranks] for domain in domains}
    idle = {domain for domains in near[ranks:] for domain in domains} - ranked
    without_gpu = [
        domain
        for domain in (machine.pool if idle else ())
        if idle.issuperset(machine.nearest(domain, ranked | idle))
    ]
    return idle.union(without_gpu)


def visible_devices(
    topology: Topology,
    text: str | None,
    hidden: Collection[str] = (),
    warnings: list[str] | None = None,
) -> list[Gpu | None]:
    """Return the devices of a visible list in its order; None for an unknown device.

    As in the driver, the list ends before an entry that cannot be a device, such as `-1` or
    Slurm's `NoDevFiles`.

    Args:
        topology: the node.
        text: the variable's value; None if it is not set: then every GPU that is not hidden.
        hidden: PCI addresses of GPUs that a cgroup hides.
        warnings: gets a sentence about each unknown device.
    """
    if text is None:
        return [gpu for gpu in topology.devices if gpu.address not in hidden]
    # An index counts whole GPUs only; the driver accepts MIG instances by UUID alone.
    admitted = [gpu for gpu in topology.gpus if not gpu.parent and gpu.address not in hidden]
    devices: list[Gpu | None] = []
    for entry in (part.strip() for part in text.split(",")):
        if entry.isdecimal():
            name = f"index {int(entry)}"
            device = admitted[int(entry)] if int(entry) < len(admitted) else None
        elif entry.upper().startswith(("GPU-", "MIG-")):
            name, device = entry, _by_uuid(topology.gpus, entry.lower())
        else:
            break
        if device is None and warnings is not None:
            warnings.append(f"visible GPU {name!r} is not in the topology")
        devices.append(device)
    return devices


def _by_uuid(gpus: Sequence[Gpu], uuid: str) -> Gpu | None:
    # The driver accepts the beginning of a UUID if only one device has it.
    begun = [gpu for gpu in gpus if gpu.uuid.lower().startswith(uuid)]
    exact = [gpu for gpu in begun if gpu.uuid.lower() == uuid]
    return exact[0] if exact else begun[0] if len(begun) == 1 else None


def local_domains(topology: Topology, machine: Machine, gpu: Gpu) -> tuple[int, ...]:
    """Return the domains with CPUs that a GPU is next to; several if only its CPUs are known.

    Empty if unknown: a GPU that is near to all CPUs of several domains could be anywhere. A MIG
    instance without a known domain has that of its parent, or of another instance of the parent.
    """
    with_cpus = machine.domains_with_cpus
    if len(with_cpus) == 1:
        return with_cpus
    candidates = [gpu]
    if gpu.parent:
        candidates += [
            other for other in topology.gpus if gpu.parent in (other.uuid, other.address)
        ]
        candidates += [other for other in topology.gpus if other.parent == gpu.parent]
    for candidate in candidates:
        if candidate.domain in with_cpus:
            return (candidate.domain,)
        if candidate.domain is not None and topology.domain(candidate.domain):  # memory alone
            return machine.nearest(candidate.domain, with_cpus)
        domains = machine.domains_of_cpus(candidate.cpus)
        # A list of all CPUs is what the kernel shows for an unknown place, so it says nothing.
        if domains and domains != with_cpus:
            return domains
    return ()


def gpu_name(gpu: Gpu) -> str:
    """Return a GPU's name for messages: PCI address, else the source's name, else its index."""
    return gpu.address or gpu.name or str(gpu.index)
