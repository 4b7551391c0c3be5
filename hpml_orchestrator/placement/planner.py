"""The planner: choose cores, memory and network card of each local rank on a node.

The order of GPUs never changes: local rank r uses visible device r, and its CPUs are near it. The
planner is pure (no clock, environment or files): equal input gives equal plans.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import InputError, counted
from hpml_orchestrator.placement.model import (
    UNKNOWN_DISTANCE,
    Machine,
    Plan,
    RankGpu,
    RankPlan,
    domains_of_idle,
    gpu_name,
    gpus_of_ranks,
)
from hpml_orchestrator.placement.verify import ranks_text
from hpml_orchestrator.topology.cpulist import format_list

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from hpml_orchestrator.topology.model import Gpu, Nic, Topology

# Divide cores among ranks: each rank has a home domain, and idle domains lend their cores.


@dataclass
class Group:
    """Ranks that share the cores of some domains."""

    domains: list[int]  # domains whose cores all belong to this group
    homes: dict[int, list[int]]  # by domain, the ranks whose GPU is next to it, in order
    lent: list[int] = field(default_factory=list)  # cores borrowed from other domains

    @property
    def ranks(self) -> list[int]:
        """Its ranks, in order."""
        return sorted(rank for ranks in self.homes.values() for rank in ranks)

    def cores(self, machine: Machine) -> int:
        """Return the number of its cores."""
        return sum(len(machine.pool[domain]) for domain in self.domains) + len(self.lent)


def even(total: int, parts: int) -> list[int]:
    """Return the sizes of nearly equal parts, larger ones first.

    >>> even(7, 3)
    [3, 2, 2]
    """
    size, more = divmod(total, parts)
    return [size + (part < more) for part in range(parts)]


def chunks(units: Sequence[Sequence[int]], ranks: int) -> list[list[int]]:
    """Divide units (sockets, domains or the whole node) among ranks in order, equally if possible.

    If there are fewer ranks than units, each rank gets one unit, and these are spread evenly. No
    unit gets more ranks than cores while another one has spare cores.
    """
    # First spread the ranks evenly over the units, whatever their size. Then, while a unit has more
    # ranks than cores, move one of its ranks to the unit that leaves the most cores per rank.
    # If the node has fewer cores than ranks, moving cannot help.
    count = [0] * len(units)
    for rank in range(ranks):
        # With fewer ranks than units this skips units evenly: two ranks on four domains get the
        # first and third, which is one per socket if each socket has two domains.
        count[rank * len(units) // ranks] += 1
    full = sum(len(unit) for unit in units) < ranks
    while not full and any(held > len(unit) for held, unit in zip(count, units)):
        short = next(n for n, unit in enumerate(units) if count[n] > len(unit))
        spare = [n for n, unit in enumerate(units) if count[n] < len(unit)]
        to = max(spare, key=lambda n: (len(units[n]) / (count[n] + 1), -abs(n - short), -n))
        count[short] -= 1
        count[to] += 1
    parts: list[list[int]] = []
    for held, unit in zip(count, units):
        if held > len(unit):
            parts += [[unit[part * len(unit) // held]] for part in range(held)]
            continue
        begin = 0
        for size in even(len(unit), held) if held else ():
            parts.append(list(unit[begin : begin + size]))
            begin += size
    return parts


def choose_homes(machine: Machine, near: Sequence[Sequence[int]]) -> list[int]:
    """Return each rank's home: the possible domain with the most cores per rank."""
    # Greedy, ranks with the fewest possible domains first: the others have alternatives.
    # Then sort the homes of ranks with the same possible domains: neighbouring ranks get the same
    # or neighbouring domains, and the number of ranks per domain does not change.
    counts = dict.fromkeys(machine.pool, 0)
    homes = [0] * len(near)
    alike: dict[tuple[int, ...], list[int]] = {}
    for rank in sorted(range(len(near)), key=lambda rank: (len(near[rank]), rank)):
        homes[rank] = max(
            near[rank],
            key=lambda home: (len(machine.pool[home]) / (counts[home] + 1), -machine.order[home]),
        )
        counts[homes[rank]] += 1
        alike.setdefault(tuple(near[rank]), []).append(rank)
    for ranks in alike.values():
        ordered = sorted((homes[rank] for rank in ranks), key=machine.order.__getitem__)
        for rank, home in zip(ranks, ordered):
            homes[rank] = home
    return homes


def lend(machine: Machine, groups: dict[int, Group], kept: Collection[int] = ()) -> None:
    """Divide the cores of domains without ranks, except `kept`, equally among the nearest groups.

    `groups` contains the group of each domain with ranks.
    """
    # Divide lenders with the same nearest groups ("takers") together, those with the fewest takers
    # first, because their cores cannot go elsewhere. The first loop decides how many cores
    # each taker gets: one at a time to the taker with the fewest cores per rank. The second loop
    # decides which cores.
    alike: dict[tuple[int, ...], list[int]] = {}
    for idle in machine.pool:
        if idle not in groups and idle not in kept:
            alike.setdefault(machine.nearest(idle, groups), []).append(idle)
    holds = {domain: group.cores(machine) for domain, group in groups.items()}
    heads = {domain: len(group.ranks) for domain, group in groups.items()}
    for takers, lenders in sorted(alike.items(), key=lambda pair: (len(pair[0]), pair[0])):
        quota = dict.fromkeys(takers, 0)
        for _ in range(sum(len(machine.pool[lender]) for lender in lenders)):
            to = min(takers, key=lambda taker: (holds[taker] / heads[taker], machine.order[taker]))
            holds[to] += 1
            quota[to] += 1
        # Whole domains first: cores in two domains are better than in three.
        for lender in sorted(lenders, key=lambda lender: (-len(machine.pool[lender]), lender)):
            cores = machine.pool[lender]
            while cores:
                to = max(takers, key=lambda taker: (quota[taker], -machine.order[taker]))
                groups[to].lent += cores[: quota[to]]
                quota[to], cores = max(0, quota[to] - len(cores)), cores[quota[to] :]


def merge(machine: Machine, groups: list[Group]) -> None:
    """Join each group with fewer cores than ranks to the nearest group with spare cores.

    The node must have a core for each rank.
    """
    # The joined group may still be short, so repeat. This terminates: each round removes a group,
    # and the node as a whole has enough cores.
    while True:
        short = next((group for group in groups if group.cores(machine) < len(group.ranks)), None)
        if short is None:
            return
        spare = [group for group in groups if group.cores(machine) > len(group.ranks)]

        def cost(other: Group, short: Group = short) -> tuple[tuple[int, int], float, int]:
            gap = min(machine.gap(a, b) for a in short.homes for b in other.domains)
            # Count a group without ranks as half a rank: of equally near groups, an idle one comes
            # first unless it is tiny.
            per_rank = other.cores(machine) / (len(other.ranks) or 0.5)
            return gap, -per_rank, machine.order[other.domains[0]]

        other = min(spare, key=cost)
        groups.remove(short)
        groups.remove(other)
        whole = Group(short.domains + other.domains, {**short.homes, **other.homes})
        whole.lent = short.lent + other.lent
        groups.append(whole)


def share_group(machine: Machine, group: Group) -> dict[int, list[int]]:
    """Divide a group's cores equally, with as many as possible from each rank's own domain.

    The group must have a core for each rank. Each rank gets neighbouring cores.
    """
    # 1. `part` is the number of cores of each rank. If they do not divide evenly, the ranks with
    #    the most cores in their home domain get one more, because they can take it there.
    # 2. Each rank takes cores of its own domain, up to its part.
    # 3. Ranks that need more take the remaining cores, nearest domain first.
    local: dict[int, int] = {}
    for domain, ranks in group.homes.items():
        local.update(zip(ranks, even(len(machine.pool[domain]), len(ranks))))
    size, more = divmod(group.cores(machine), len(local))
    part = {}
    for place, rank in enumerate(sorted(local, key=lambda rank: (-local[rank], rank))):
        part[rank] = size + (place < more)
    given: dict[int, list[int]] = {}
    left: dict[int, list[int]] = {}
    for domain in group.domains:
        begin = 0
        for rank in group.homes.get(domain, ()):
            end = begin + min(local[rank], part[rank])
            given[rank] = list(machine.pool[domain][begin:end])
            begin = end
        left[domain] = list(machine.pool[domain][begin:])
    for core in group.lent:
        left.setdefault(machine.domain_of[core], []).append(core)
    for domain, ranks in group.homes.items():
        near = sorted(left, key=lambda other: (machine.gap(domain, other), machine.order[other]))
        for rank in ranks:
            for other in near:
                need = part[rank] - len(given[rank])
                given[rank] += left[other][:need]
                left[other] = left[other][need:]
    return given


def share_short(machine: Machine, homes: Sequence[int]) -> list[list[int]]:
    """Give each rank one core if there are fewer cores than ranks, spreading ranks evenly.

    A rank gets a core of its home domain while one has room, else the nearest core.
    """
    # Each core gets `places` ranks, and `more` of the cores one more.
    places, more = divmod(len(homes), len(machine.cores))
    load = dict.fromkeys(machine.cores, 0)
    shared: list[list[int]] = []
    for home in homes:
        core = min(
            (core for core in load if load[core] < places + (more > 0)),
            key=lambda core: (machine.gap(home, machine.domain_of[core]), load[core], core),
        )
        more -= load[core] == places
        load[core] += 1
        shared.append([core])
    return shared


POLICIES = {
    "gpu-local": "cores of the GPU's NUMA domain, then those of the nearest domains without a GPU",
    "numa": "only cores of the GPU's NUMA domain; without GPUs one rank per domain",
    "socket": "only cores of the GPU's socket; without GPUs one rank per socket",
    "spread": "equal parts of all cores in order, wherever the GPU is",
    "none": "nothing is bound: every rank may run on all allowed CPUs",
}
_LEVELS = {"PIX": 0, "PXB": 1, "PHB": 2, "NODE": 3, "SYS": 4}  # nvidia-smi's terms, nearest first


def plan(
    topology: Topology,
    ranks: int,
    *,
    policy: str = "gpu-local",
    ranks_per_gpu: int = 1,
    allowed_cpus: Iterable[int] | None = None,
    visible_gpus: Sequence[Gpu | None] | None = None,
    loader_workers: int = 0,
    smt: bool = True,
) -> Plan:
    """Return which cores, memory, GPU and network card each local rank gets.

    Ranks share cores only if there are fewer cores than ranks, or with policy `none`. Ranks next to
    the same domain get equal numbers of cores (plus or minus one), those of the domain first. With
    `gpu-local`, domains without a visible GPU lend their cores to the nearest ranks. If a rule
    cannot be kept, the plan comes as close as possible and contains a warning.

    Args:
        topology: the node.
        ranks: number of ranks on the node.
        policy: one of `POLICIES`.
        ranks_per_gpu: number of ranks intended to share a GPU.
        allowed_cpus: CPUs that the job may use (cgroup or affinity mask); None for all.
        visible_gpus: devices in the order of CUDA_VISIBLE_DEVICES, with None for each device that
            the topology does not have; None for all GPUs.
        loader_workers: data loader processes per rank, each of which needs a core.
        smt: whether to use all hardware threads of a core or only its first allowed one.

    Raises:
        InputError: the policy is unknown, a number is too small, or the node has none of the
            allowed CPUs.
    """
    _check(policy, ranks, ranks_per_gpu, loader_workers)
    allowed = None if allowed_cpus is None else frozenset(allowed_cpus)
    machine = Machine(topology, allowed, smt=smt)
    if topology.cores and not machine.cores:
        raise InputError(
            "none of these CPUs is online on this node",
            field="allowed CPUs",
            value=format_list(allowed or ()) or "none",
            hint=f"The node has {format_list(topology.cpus)}.",
        )
    warnings: list[str] = []
    devices = topology.devices if visible_gpus is None else visible_gpus
    gpus = gpus_of_ranks(topology, machine, ranks, ranks_per_gpu, devices, warnings)
    idle = domains_of_idle(topology, machine, ranks, devices) if policy == "gpu-local" else ()
    cores = _share(machine, gpus, policy, warnings, idle)
    if policy == "none":
        plans = [
            replace(_rank(machine, gpu, mine, len(mine) // ranks, loader_workers), memory=None)
            for gpu, mine in zip(gpus, cores)
        ]
        return Plan(tuple(plans), policy, tuple(warnings))
    plans = [_rank(machine, gpu, mine, len(mine), loader_workers) for gpu, mine in zip(gpus, cores)]
    homes = [tuple({machine.domain_of[core]: 0 for core in mine}) for mine in cores]
    nics = _choose_nics(topology, machine, gpus, homes)
    plans = [replace(rank, nic=nic) for rank, nic in zip(plans, nics)]
    short = [rank.local_rank for rank in plans if 0 < len(rank.cores) < 1 + loader_workers]
    if short and loader_workers:
        warnings.append(
            f"{ranks_text(short)}: fewer cores than 1 and {loader_workers} loader workers need"
        )
    return Plan(tuple(plans), policy, tuple(warnings))


def _check(policy: str, ranks: int, ranks_per_gpu: int, loader_workers: int) -> None:
    if policy not in POLICIES:
        raise InputError(f"must be one of {', '.join(POLICIES)}", field="policy", value=policy)
    for name, value, least in (
        ("ranks", ranks, 1),
        ("ranks per GPU", ranks_per_gpu, 1),
        ("loader workers", loader_workers, 0),
    ):
        if value < least:
            raise InputError(f"must be {least} or more", field=name, value=value)


def _share(
    machine: Machine,
    gpus: Sequence[RankGpu],
    policy: str,
    warnings: list[str],
    idle_domains: Collection[int],
) -> list[list[int]]:
    """Return each rank's cores; `idle_domains` (near GPUs without a rank) lend none."""
    if not machine.cores:
        warnings.append("the topology has no CPUs: no rank can be bound")
        return [[] for _ in gpus]
    if policy == "none":
        return [list(machine.cores) for _ in gpus]
    scarce = len(machine.cores) < len(gpus)
    if scarce:
        warnings.append(
            f"{len(gpus)} ranks on {counted(len(machine.cores), 'core')}: some share a core with "
            "another"
        )
    if policy == "spread":
        return chunks([machine.cores], len(gpus))
    _warn_of_unknown(gpus, warnings)
    # If no GPU's location is known, divide the cores equally in order of sockets: neighbouring
    # ranks get neighbouring cores.
    if not any(gpu.near for gpu in gpus):
        return chunks([machine.cores] if scarce else _units(machine, policy), len(gpus))
    # First choose the domain of each rank, then divide the cores of domains: a rank with few cores
    # near its GPU is faster than one with many cores on the other socket.
    homes = _homes(machine, gpus)
    _warn_of_far_homes(gpus, homes, warnings)
    if scarce:
        return share_short(machine, homes)
    groups = _groups(machine, homes, policy, idle_domains)
    merge(machine, groups)
    cores: dict[int, list[int]] = {}
    for group in groups:
        if group.homes:
            cores.update(share_group(machine, group))
    if policy == "gpu-local":
        _warn_of_idle(machine, [group for group in groups if not group.homes], warnings)
    _warn_of_crowded(machine, homes, cores, warnings)
    return [cores[gpu.rank] for gpu in gpus]


def _units(machine: Machine, policy: str) -> list[Sequence[int]]:
    """Return the cores by unit of division for ranks without a GPU: socket, domain or node."""
    if policy == "numa":
        return list(machine.pool.values())
    if policy == "socket":
        sockets: dict[int, list[int]] = {}
        for core in machine.cores:
            sockets.setdefault(machine.socket_of[core], []).append(core)
        return list(sockets.values())
    return [machine.cores]


def _homes(machine: Machine, gpus: Sequence[RankGpu]) -> list[int]:
    """Return each rank's home: the domain nearest to its GPU that has usable cores."""
    wanted: list[tuple[int, ...]] = []
    for gpu in gpus:
        usable = tuple(domain for domain in gpu.near if domain in machine.pool)
        # If the job's mask excludes the GPU's own domain, the nearest domain with usable cores is
        # home, and the plan contains a warning.
        if gpu.near and not usable:
            gaps = {
                home: min(machine.gap(near, home) for near in gpu.near) for home in machine.pool
            }
            least = min(gaps.values())
            usable = tuple(home for home, gap in gaps.items() if gap == least)
        wanted.append(usable or tuple(machine.pool))
    return choose_homes(machine, wanted)


def _groups(
    machine: Machine, homes: Sequence[int], policy: str, idle_domains: Collection[int]
) -> list[Group]:
    ranks: dict[int, list[int]] = {}
    for rank, home in enumerate(homes):
        ranks.setdefault(home, []).append(rank)
    if policy == "gpu-local":
        # Some domains have no GPU, as on EPYC nodes in NPS4: their cores go to the nearest ranks.
        # Domains next to an idle GPU keep their cores, because another job may get that GPU.
        groups = {domain: Group([domain], {domain: ranks[domain]}) for domain in sorted(ranks)}
        idle = [domain for domain in machine.pool if domain in idle_domains and domain not in ranks]
        lend(machine, groups, idle)
        return [*groups.values(), *(Group([domain], {}) for domain in idle)]
    pieces: dict[int, list[int]] = {}
    for domain, cores in machine.pool.items():
        key = machine.socket_of[cores[0]] if policy == "socket" else domain
        pieces.setdefault(key, []).append(domain)
    return [
        Group(domains, {domain: ranks[domain] for domain in domains if domain in ranks})
        for domains in pieces.values()
    ]


def _rank(
    machine: Machine, owned: RankGpu, cores: Sequence[int], threads: int, loader_workers: int
) -> RankPlan:
    counts: dict[int, int] = {}
    for core in cores:
        counts[machine.domain_of[core]] = counts.get(machine.domain_of[core], 0) + 1

    # Memory comes from a single domain: the one nearest to the GPU, for fast transfers; of equals,
    # the one with the most cores of the rank.
    def cost(domain: int) -> tuple[int, int, int]:
        away = min((machine.distance(near, domain) for near in owned.near), default=0)
        return away, -counts[domain], domain

    gpu = owned.gpu
    return RankPlan(
        local_rank=owned.rank,
        gpu=(gpu.address or gpu.name or None) if gpu else None,
        gpu_index=gpu.index if gpu else None,
        gpu_uuid=gpu.uuid if gpu else "",
        cpus=tuple(sorted(cpu for core in cores for cpu in machine.cpus_of[core])),
        cores=tuple(sorted(cores)),
        numa=tuple(sorted(counts)),
        memory=machine.memory_for(min(counts, key=cost)) if counts else None,
        # Loader workers need their own cores: OpenMP threads on all cores would compete with them.
        threads=max(1, threads - loader_workers),
        loader_workers=loader_workers,
        distance=machine.farthest(owned.near, counts),
    )


def _choose_nics(
    topology: Topology, machine: Machine, gpus: Sequence[RankGpu], homes: Sequence[tuple[int, ...]]
) -> list[str | None]:
    """Return the name of each rank's nearest network card, balanced over equally near cards."""
    if not topology.nics:
        return [None] * len(gpus)
    links = {(gpu, nic): _LEVELS.get(level, 4) for gpu, nic, level in topology.links}
    names = {name: gpu.name for gpu in topology.gpus for name in (gpu.uuid, gpu.address)}
    places = {nic.name: _nic_domains(machine, nic) for nic in topology.nics}

    def cost(gpu: Gpu | None, near: tuple[int, ...], nic: str) -> tuple[int, tuple[int, int]]:
        gaps = [machine.gap(domain, other) for domain in near for other in places[nic]]
        level = None
        if gpu:  # a MIG instance uses its parent's link
            level = links.get((gpu.name, nic), links.get((names.get(gpu.parent, ""), nic)))
        if level is None:
            level = _LEVELS["NODE"] if set(near) & set(places[nic]) else _LEVELS["SYS"]
        return level, min(gaps, default=(UNKNOWN_DISTANCE, 1))

    nearest: dict[tuple[str | None, tuple[int, ...]], list[str]] = {}
    equals: list[list[str]] = []
    for owned, home in zip(gpus, homes):
        gpu, near = owned.gpu, owned.near if owned.gpu else home
        key = (gpu.name if gpu else None, near)
        if key not in nearest:
            costs = {nic: cost(gpu, near, nic) for nic in places}
            nearest[key] = [nic for nic in costs if costs[nic] == min(costs.values())]
        equals.append(nearest[key])
    # Greedy, ranks with the fewest nearest cards first: a rank with a choice must not take the only
    # card of another. Each rank takes the nearest card with the fewest ranks so far.
    load = dict.fromkeys(places, 0)
    chosen: list[str | None] = [None] * len(gpus)
    for rank in sorted(range(len(gpus)), key=lambda rank: (len(equals[rank]), rank)):
        nic = min(equals[rank], key=load.__getitem__)
        load[nic] += 1
        chosen[rank] = nic
    return chosen


def _nic_domains(machine: Machine, nic: Nic) -> tuple[int, ...]:
    if nic.domain is not None:
        return (nic.domain,)
    domains = machine.domains_of_cpus(nic.cpus)
    # The kernel lists all CPUs if it does not know the card's location.
    return () if domains == machine.domains_with_cpus else domains


def _warn_of_unknown(gpus: Sequence[RankGpu], warnings: list[str]) -> None:
    unknown = [gpu for gpu in gpus if gpu.gpu and not gpu.near]
    if unknown:
        warnings.append(
            f"no NUMA domain is known for GPU {_names(unknown)}: "
            f"{ranks_text([gpu.rank for gpu in unknown])} spread evenly, perhaps far from the GPU"
        )


def _warn_of_far_homes(gpus: Sequence[RankGpu], homes: Sequence[int], warnings: list[str]) -> None:
    far: dict[int, list[RankGpu]] = {}
    for gpu, home in zip(gpus, homes):
        if gpu.near and home not in gpu.near:
            far.setdefault(home, []).append(gpu)
    for home, moved in far.items():
        near = {domain for gpu in moved for domain in gpu.near}
        warnings.append(
            f"no CPU is allowed in NUMA {_domains(near)}, next to GPU {_names(moved)}: "
            f"{ranks_text([gpu.rank for gpu in moved])} on {_domains([home])}"
        )


def _warn_of_crowded(
    machine: Machine, homes: Sequence[int], cores: dict[int, list[int]], warnings: list[str]
) -> None:
    domains_of = {rank: {machine.domain_of[core] for core in mine} for rank, mine in cores.items()}
    for domain in sorted(set(homes)):
        ranks = [rank for rank, home in enumerate(homes) if home == domain]
        out = [rank for rank in ranks if domain not in domains_of[rank]]
        if out:
            others = set().union(*(domains_of[rank] for rank in out))
            warnings.append(
                f"NUMA {_domains([domain])} has too few allowed cores for {ranks_text(ranks)}: "
                f"{ranks_text(out)} on {_domains(others)}"
            )


def _warn_of_idle(machine: Machine, groups: Sequence[Group], warnings: list[str]) -> None:
    domains = [domain for group in groups for domain in group.domains]
    if domains:
        cores = sum(group.cores(machine) for group in groups)
        warnings.append(
            f"no rank has a GPU next to NUMA {_domains(domains)}: {counted(cores, 'core')} there "
            f"{'stays' if cores == 1 else 'stay'} idle; policy spread would use them"
        )


def _names(gpus: Iterable[RankGpu]) -> str:
    return ", ".join(dict.fromkeys(gpu_name(owned.gpu) for owned in gpus if owned.gpu))


def _domains(numbers: Iterable[int]) -> str:
    """Return domains as text, such as `domain 3` or `domain 0, 1`."""
    return f"domain {', '.join(str(number) for number in sorted(numbers))}"
