"""The planner: decides from a node's topology where each local rank runs.

The GPUs' order is never changed: local rank r has visible device r, and the CPUs follow the GPU.
The planner reads no clock, no environment and no file; equal input gives an equal plan.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import InputError, counted
from hpml_orchestrator.placement.gpus import RankGpu, domains_of_idle, gpu_name, gpus_of_ranks
from hpml_orchestrator.placement.machine import UNKNOWN_DISTANCE, Machine
from hpml_orchestrator.placement.model import Plan, RankPlan
from hpml_orchestrator.placement.report import ranks_text
from hpml_orchestrator.placement.share import (
    Group,
    choose_homes,
    chunks,
    lend,
    merge,
    share_group,
    share_short,
)
from hpml_orchestrator.topology.cpulist import format_list

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from hpml_orchestrator.topology.model import Gpu, Nic, Topology

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

    No core belongs to two ranks unless there are fewer cores than ranks (and with policy `none`).
    Ranks next to the same domain get equal numbers of cores, give or take one, those of the domain
    first. With `gpu-local` domains without a visible GPU lend their cores to the nearest ranks.
    If a rule cannot be kept, the nearest possible plan is made, with a warning in it.

    Args:
        topology: the node.
        ranks: how many ranks the node has.
        policy: one of `POLICIES`.
        ranks_per_gpu: how many ranks are meant to share one GPU.
        allowed_cpus: CPUs that the job may use (cgroup or affinity mask); None for all.
        visible_gpus: in the order of CUDA_VISIBLE_DEVICES, None for one that the topology does not
            know; None for all GPUs.
        loader_workers: processes per rank that load data and need a core each.
        smt: use all hardware threads of a core, or only its first allowed one.

    Raises:
        InputError: for an unknown policy, numbers below their minimum, and allowed CPUs of which
            the node has none.
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
    """Return each rank's cores; `idle_domains`, near to GPUs without a rank, lend none."""
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
    # Without any known place of a GPU, equal parts in order of sockets are the best guess:
    # neighbouring ranks stay on neighbouring cores.
    if not any(gpu.near for gpu in gpus):
        return chunks([machine.cores] if scarce else _units(machine, policy), len(gpus))
    # Which domain each rank belongs to is decided first, then how the cores of a domain, or of
    # several, are divided: a rank next to its GPU with few cores is faster than one with many
    # cores that reaches its GPU across sockets.
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
    """Return the cores in the pieces for ranks without a GPU: sockets, domains or the node."""
    if policy == "numa":
        return list(machine.pool.values())
    if policy == "socket":
        sockets: dict[int, list[int]] = {}
        for core in machine.cores:
            sockets.setdefault(machine.socket_of[core], []).append(core)
        return list(sockets.values())
    return [machine.cores]


def _homes(machine: Machine, gpus: Sequence[RankGpu]) -> list[int]:
    """Return each rank's home: a domain with usable cores, nearest to its GPU."""
    wanted: list[tuple[int, ...]] = []
    for gpu in gpus:
        usable = tuple(domain for domain in gpu.near if domain in machine.pool)
        # The job's mask may leave out the GPU's own domain. Then the nearest domain with usable
        # cores is home, and the plan warns of it.
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
        # Domains without a GPU have nobody whose home they are, as on EPYC nodes in NPS4: their
        # cores go to the nearest ranks. Domains next to an idle GPU lend nothing, because another
        # job may come for that GPU.
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

    # Memory comes from one domain: the one next to the GPU, through which transfers to it go;
    # among equals that with most of the rank's cores.
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
        # Loader workers need cores of their own: with OpenMP threads on all of them, both would
        # wait for each other.
        threads=max(1, threads - loader_workers),
        loader_workers=loader_workers,
        distance=machine.farthest(owned.near, counts),
    )


def _choose_nics(
    topology: Topology, machine: Machine, gpus: Sequence[RankGpu], homes: Sequence[tuple[int, ...]]
) -> list[str | None]:
    """Return the name of each rank's network card: the nearest; equals are used equally often."""
    if not topology.nics:
        return [None] * len(gpus)
    links = {(gpu, nic): _LEVELS.get(level, 4) for gpu, nic, level in topology.links}
    names = {name: gpu.name for gpu in topology.gpus for name in (gpu.uuid, gpu.address)}
    places = {nic.name: _nic_domains(machine, nic) for nic in topology.nics}

    def cost(gpu: Gpu | None, near: tuple[int, ...], nic: str) -> tuple[int, tuple[int, int]]:
        gaps = [machine.gap(domain, other) for domain in near for other in places[nic]]
        level = None
        if gpu:  # a MIG instance has its parent's link
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
    # Greedy, ranks with the least choice first: whoever may take any card must not take the only
    # one of another rank. Among its nearest each rank takes the card with fewest ranks so far.
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
    # A card next to all CPUs is one whose place the kernel does not know.
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
