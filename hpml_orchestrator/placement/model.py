"""A plan and its inputs: the usable part of a node, the GPU of each rank, and its cores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import counted
from hpml_orchestrator.topology.cpulist import format_list

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from hpml_orchestrator.topology.model import Core, Gpu, Topology

PLAN_COLUMNS = ("rank", "GPU", "CPUs", "cores", "NUMA", "distance", "memory", "NIC", "threads")


@dataclass(frozen=True)
class RankPlan:
    """Where one rank runs."""

    local_rank: int  # number among the ranks of its node, from 0
    # PCI address (or name) of its GPU; None without a GPU or if the topology does not have it
    gpu: str | None = None
    gpu_index: int | None = None  # the GPU's index in the topology
    gpu_uuid: str = ""  # UUID of the GPU or MIG instance; empty if unknown
    cpus: tuple[int, ...] = ()  # CPUs that it may run on, ascending
    cores: tuple[int, ...] = ()  # physical cores of these CPUs, ascending
    numa: tuple[int, ...] = ()  # NUMA domains of these CPUs, ascending
    memory: int | None = None  # preferred NUMA domain for memory; None for no preference
    nic: str | None = None  # name of its network card; None without one
    threads: int = 1  # OpenMP threads: cores minus loader workers, at least 1
    loader_workers: int = 0  # data loader processes on its cores
    # Largest NUMA distance from its GPU to its cores (10: local); None without a GPU or if unknown
    distance: int | None = None

    def cpu_list(self) -> str:
        """Return its CPUs in the kernel's list format."""
        return format_list(self.cpus)


@dataclass(frozen=True)
class Plan:
    """The ranks of one node."""

    ranks: tuple[RankPlan, ...]  # by local rank, from 0 without gaps
    # Policy of the plan; with `none` nothing is bound
    policy: str = "gpu-local"
    warnings: tuple[str, ...] = ()  # rules that could not be kept, one sentence each


def plan_json(plan: Plan) -> dict[str, object]:
    """Return a plan for `json.dumps`, with CPUs in the kernel's list format."""
    return {
        "ranks": [
            {**vars(rank), "cpus": rank.cpu_list(), "gpu_uuid": rank.gpu_uuid or None}
            for rank in plan.ranks
        ],
        "policy": plan.policy,
        "warnings": list(plan.warnings),
    }


def plan_rows(plan: Plan) -> list[tuple[str, ...]]:
    """Return one row per rank with the columns of `PLAN_COLUMNS`; unknown values are dashes."""
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


# The usable part of a node: cores, and distances between domains.

UNKNOWN_DISTANCE = 256  # the kernel's distances are at most 255
_LOCAL, _REMOTE = 10, 20  # assumed for comparisons if distances are unknown


class Machine:
    """The usable part of a node.

    Args:
        topology: the node.
        allowed: usable CPUs; None for all.
        smt: whether to use all hardware threads of a core or only its first usable one.

    Attributes:
        pool: usable cores by NUMA domain, in order of socket and number with kinds of cores mixed;
            only domains with usable cores.
        order: index in `pool` by NUMA domain.
        cpus_of: usable CPUs by core.
        domain_of: NUMA domain by core.
        socket_of: socket by core.
        home_of: NUMA domain by CPU, for all online CPUs.
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
            # May lack the core's first thread: a job's mask may contain only the second one.
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
        """All domains with CPUs, usable or not."""
        return tuple(sorted(self._sockets))

    def distance(self, domain: int, other: int) -> int:
        """Return the distance between two domains; if unknown, 10 within and 20 between domains.

        For comparisons only; `farthest` returns distances to display.
        """
        default = _LOCAL if domain == other else _REMOTE
        return self._distances.get(domain, {}).get(other, default)

    def farthest(self, near: Collection[int], domains: Iterable[int]) -> int | None:
        """Return the largest of the domains' distances to their nearest domain in `near`.

        None if any of these distances is unknown.
        """
        rows = [self._distances.get(domain, {}) for domain in near]
        away = [[row[other] for row in rows if other in row] for other in domains]
        return max(map(min, away), default=None) if all(away) else None

    def gap(self, domain: int, other: int) -> tuple[int, int]:
        """Return the distance, and 1 if the domains share no socket (if distances are unknown)."""
        sockets, others = self._sockets.get(domain, set()), self._sockets.get(other, set())
        return self.distance(domain, other), int(sockets.isdisjoint(others))

    def nearest(self, domain: int, among: Iterable[int]) -> tuple[int, ...]:
        """Return the domains in `among` nearest to `domain`; several if equally near."""
        gaps = {other: self.gap(domain, other) for other in among}
        least = min(gaps.values(), default=None)
        return tuple(other for other, gap in gaps.items() if gap == least)

    def domains_of_cpus(self, cpus: Iterable[int]) -> tuple[int, ...]:
        """Return the domains of the CPUs."""
        return tuple(sorted({self.home_of[cpu] for cpu in cpus if cpu in self.home_of}))

    def memory_for(self, domain: int) -> int:
        """Return the domain to allocate memory from: itself, unless only others have memory."""
        others = [other for other in self._sockets if other != domain and self._memory.get(other)]
        if self._memory.get(domain) or not others:
            return domain
        # Break ties by number, so that equal nodes get equal plans.
        return min(others, key=lambda other: (self.gap(domain, other), other))


def _mixed(cores: Collection[Core]) -> list[Core]:
    """Return cores by socket, domain and number, with kinds of cores evenly mixed.

    If the list is cut into equal parts, each gets its share of every kind.
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
# CUDA_VISIBLE_DEVICES or ROCR_VISIBLE_DEVICES lists the visible devices. Its indices count only the
# GPUs that the process may open, ordered by PCI address (with CUDA_DEVICE_ORDER=PCI_BUS_ID); the
# topology also contains GPUs that a cgroup hides.

VISIBLE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables that list the visible devices, in order of precedence."""


@dataclass(frozen=True)
class RankGpu:
    """The GPU of one rank."""

    rank: int  # local rank
    gpu: Gpu | None = None  # its GPU; None without one or if the topology does not have it
    near: tuple[int, ...] = ()  # NUMA domains next to the GPU; empty if unknown


def gpus_of_ranks(
    topology: Topology,
    machine: Machine,
    ranks: int,
    ranks_per_gpu: int,
    devices: Sequence[Gpu | None],
    warnings: list[str],
) -> list[RankGpu]:
    """Return the GPU of each rank: visible device `local_rank % device_count`.

    A training that uses `torch.device("cuda", local_rank % device_count)` gets the same one.
    """
    if not devices:
        return [RankGpu(rank) for rank in range(ranks)]
    # Too many ranks cause a warning, not an error: without hpml they would share GPUs in the same
    # way.
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
    """Return the domains whose visible GPUs have no rank.

    Include domains without a GPU that are nearer to these than to the GPU of any rank.
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
    """Return the devices in a list of visible devices; None for an unknown one.

    As in the driver, the list ends at the first invalid entry, such as `-1` or Slurm's
    `NoDevFiles`.

    Args:
        topology: the node.
        text: the variable's value; None (not set) means every GPU that is not hidden.
        hidden: PCI addresses of GPUs that a cgroup hides.
        warnings: a sentence about each unknown device is appended here.
    """
    if text is None:
        return [gpu for gpu in topology.devices if gpu.address not in hidden]
    # Indices count only whole GPUs; the driver accepts MIG instances only by UUID.
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
    # The driver accepts a unique prefix of a UUID.
    begun = [gpu for gpu in gpus if gpu.uuid.lower().startswith(uuid)]
    exact = [gpu for gpu in begun if gpu.uuid.lower() == uuid]
    return exact[0] if exact else begun[0] if len(begun) == 1 else None


def local_domains(topology: Topology, machine: Machine, gpu: Gpu) -> tuple[int, ...]:
    """Return the domains with CPUs next to a GPU; several if only its local CPUs are known.

    Empty if unknown, as for a GPU whose local CPUs are all CPUs of several domains. A MIG instance
    whose domain is unknown has that of its parent or of another instance of the parent.
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
        if candidate.domain is not None and topology.domain(candidate.domain):  # has only memory
            return machine.nearest(candidate.domain, with_cpus)
        domains = machine.domains_of_cpus(candidate.cpus)
        # The kernel lists all CPUs if the location is unknown.
        if domains and domains != with_cpus:
            return domains
    return ()


def gpu_name(gpu: Gpu) -> str:
    """Return a GPU's name for messages: PCI address, else name, else index."""
    return gpu.address or gpu.name or str(gpu.index)
