"""The planner: from a topology to where each local rank runs.

The GPUs' order is never changed: local rank r has visible device r, and the CPUs follow the GPU.
The planner reads no clock, no environment and no file; equal input gives an equal plan.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import InputError, counted
from hpml_orchestrator.placement.cpulist import cpu_list
from hpml_orchestrator.placement.gpus import Seat, domains_of_idle, gpu_name, seats
from hpml_orchestrator.placement.machine import Machine
from hpml_orchestrator.placement.model import Plan, RankPlan
from hpml_orchestrator.placement.nics import choose_nics
from hpml_orchestrator.placement.share import (
    Group,
    choose_homes,
    chunks,
    lend,
    merge,
    share_group,
    share_short,
)
from hpml_orchestrator.placement.told import ranks_text

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from hpml_orchestrator.topology.model import Topology

__all__ = ["POLICIES", "plan"]

POLICIES = {
    "gpu-local": "cores of the GPU's NUMA domain, then those of the nearest domains without a GPU",
    "numa": "cores of the GPU's NUMA domain alone; without GPUs one rank per domain",
    "socket": "cores of the GPU's socket alone; without GPUs one rank per socket",
    "spread": "equal parts of all cores in order, wherever the GPU is",
    "none": "nothing is bound: every rank may run on all allowed CPUs",
}


def plan(
    topology: Topology,
    ranks: int,
    *,
    policy: str = "gpu-local",
    ranks_per_gpu: int = 1,
    allowed_cpus: Iterable[int] | None = None,
    visible_gpus: Iterable[object] | None = None,
    loader_workers: int = 0,
    smt: bool = True,
) -> Plan:
    """Say for every local rank which cores, memory, GPU and network card are its own.

    No core belongs to two ranks unless there are fewer cores than ranks (and with policy `none`).
    Ranks next to the same domain get equal numbers of cores, give or take one, those of the domain
    first. With `gpu-local` domains without a visible GPU lend their cores to the nearest ranks.
    What cannot be done is done as nearly as can be, and told in the plan's warnings.

    Args:
        topology: the node.
        ranks: how many ranks the node has.
        policy: one of `POLICIES`.
        ranks_per_gpu: how many ranks are meant to share one GPU.
        allowed_cpus: CPUs that the job may use (cgroup or affinity mask); None for all.
        visible_gpus: in the order of CUDA_VISIBLE_DEVICES: indices, UUIDs, PCI addresses or names;
            None for all GPUs.
        loader_workers: processes per rank that load data and need a core each.
        smt: use all hardware threads of a core, or its first allowed one alone.

    Raises:
        InputError: for an unknown policy, numbers below their least, and allowed CPUs of which the
            node has none.
    """
    _check(policy, ranks, ranks_per_gpu, loader_workers)
    allowed = None if allowed_cpus is None else frozenset(allowed_cpus)
    machine = Machine(topology, allowed, smt=smt)
    if topology.cores and not machine.cores:
        raise InputError(
            "none of these CPUs is online on this node",
            field="allowed CPUs",
            value=cpu_list(allowed or ()) or "none",
            hint=f"The node has {cpu_list(topology.cpus)}.",
        )
    warnings: list[str] = []
    chosen = None if visible_gpus is None else tuple(visible_gpus)
    places = seats(topology, machine, ranks, ranks_per_gpu, chosen, warnings)
    idle = domains_of_idle(topology, machine, ranks, chosen) if policy == "gpu-local" else ()
    given = _share(machine, places, policy, warnings, idle)
    by_home = [tuple({machine.domain_of[core]: 0 for core in cores}) for cores in given]
    bound = policy != "none"
    nics = choose_nics(topology, machine, places, by_home) if bound else [None] * ranks
    plans: list[RankPlan] = []
    for seat, cores, nic in zip(places, given, nics):
        threads = len(cores) if bound else len(cores) // ranks
        one = _rank(machine, seat, cores, nic, max(1, threads - loader_workers), loader_workers)
        plans.append(one if bound else replace(one, memory=None))
    _warn_of_few_cores(plans, loader_workers, warnings, bound=bound)
    return Plan(tuple(plans), policy, machine.whole, tuple(warnings))


def _check(policy: str, ranks: int, ranks_per_gpu: int, loader_workers: int) -> None:
    """Refuse what no plan can be made of."""
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
    places: Sequence[Seat],
    policy: str,
    warnings: list[str],
    idle_gpus: Collection[int],
) -> list[list[int]]:
    """Return each rank's cores; domains of GPUs without a rank, and beside them, lend none."""
    if not machine.cores:
        warnings.append("the topology tells of no CPUs: no rank can be bound")
        return [[] for _ in places]
    if policy == "none":
        return [list(machine.cores) for _ in places]
    scarce = len(machine.cores) < len(places)
    if scarce:
        warnings.append(
            f"{len(places)} ranks on {len(machine.cores)} core{'s' * (len(machine.cores) != 1)}: "
            "some share a core with another"
        )
    if policy == "spread":
        return chunks([machine.cores], len(places))
    if not any(seat.near for seat in places):
        _warn_of_unknown(places, warnings)
        return chunks([machine.cores] if scarce else _units(machine, policy), len(places))
    homes = _homes(machine, places, warnings)
    if scarce:
        return share_short(machine, homes)
    groups = _groups(machine, homes, policy, idle_gpus)
    merge(machine, groups)
    if policy == "gpu-local":
        _warn_of_idle(machine, [one for one in groups if not one.homes], warnings)
    given: dict[int, list[int]] = {}
    for group in groups:
        if group.homes:
            given.update(share_group(machine, group))
    _warn_of_crowded(machine, homes, given, warnings)
    return [given[seat.rank] for seat in places]


def _units(machine: Machine, policy: str) -> list[tuple[int, ...]]:
    """The cores in the pieces that ranks without a GPU are handed: sockets, domains or the node."""
    if policy == "numa":
        return list(machine.pool.values())
    if policy == "socket":
        sockets: dict[int, list[int]] = {}
        for core in machine.cores:
            sockets.setdefault(machine.socket_of[core], []).append(core)
        return [tuple(cores) for cores in sockets.values()]
    return [machine.cores]


def _homes(machine: Machine, places: Sequence[Seat], warnings: list[str]) -> list[int]:
    """Return each rank's home domain, in which there are cores."""
    _warn_of_unknown(places, warnings)
    wanted: list[tuple[int, ...]] = []
    for seat in places:
        usable = tuple(one for one in seat.near if one in machine.pool)
        if seat.near and not usable:
            gaps = {one: min(machine.gap(near, one) for near in seat.near) for one in machine.pool}
            least = min(gaps.values())
            usable = tuple(one for one, gap in gaps.items() if gap == least)
        wanted.append(usable or tuple(machine.pool))
    homes = choose_homes(machine, wanted)
    _warn_of_far_homes(places, homes, warnings)
    return homes


def _groups(
    machine: Machine, homes: Sequence[int], policy: str, idle_gpus: Collection[int]
) -> list[Group]:
    """Return the groups of ranks that share cores, and idle ones whose cores nobody has yet."""
    ranks: dict[int, list[int]] = {}
    for rank, home in enumerate(homes):
        ranks.setdefault(home, []).append(rank)
    if policy == "gpu-local":
        groups = {domain: Group([domain], {domain: ranks[domain]}) for domain in sorted(ranks)}
        idle = [one for one in machine.pool if one in idle_gpus and one not in groups]
        lend(machine, groups, idle)
        return [*groups.values(), *(Group([one], {}) for one in idle)]
    pieces: dict[int, list[int]] = {}
    for domain, cores in machine.pool.items():
        key = machine.socket_of[cores[0]] if policy == "socket" else domain
        pieces.setdefault(key, []).append(domain)
    return [
        Group(domains, {one: ranks[one] for one in domains if one in ranks})
        for domains in pieces.values()
    ]


def _rank(
    machine: Machine,
    seat: Seat,
    cores: Sequence[int],
    nic: str | None,
    threads: int,
    loader_workers: int,
) -> RankPlan:
    """Put one rank's plan together."""
    held: dict[int, int] = {}
    for core in cores:
        held[machine.domain_of[core]] = held.get(machine.domain_of[core], 0) + 1
    far = {one: min((machine.distance(near, one) for near in seat.near), default=0) for one in held}
    memory = min(held, key=lambda one: (far[one], -held[one], one), default=None)
    gpu = seat.gpu
    return RankPlan(
        local_rank=seat.rank,
        gpu=(gpu.address or gpu.name or None) if gpu else None,
        gpu_index=gpu.index if gpu else None,
        gpu_uuid=gpu.uuid if gpu else "",
        cpus=tuple(sorted(cpu for core in cores for cpu in machine.cpus_of[core])),
        cores=tuple(sorted(cores)),
        numa=tuple(sorted(held)),
        memory=None if memory is None else machine.memory_for(memory),
        nic=nic,
        threads=threads,
        loader_workers=loader_workers,
        distance=machine.farthest(seat.near, held),
    )


def _warn_of_unknown(places: Sequence[Seat], warnings: list[str]) -> None:
    """Tell of GPUs whose domain nobody knows."""
    unknown = [seat for seat in places if seat.gpu and not seat.near]
    if unknown:
        names = ", ".join(dict.fromkeys(_name(seat) for seat in unknown))
        warnings.append(
            f"no NUMA domain is known for GPU {names}: {ranks_text([one.rank for one in unknown])} "
            "spread evenly, perhaps far from the GPU"
        )


def _warn_of_far_homes(places: Sequence[Seat], homes: Sequence[int], warnings: list[str]) -> None:
    """Tell of GPUs next to which no CPU is allowed: a sentence for each domain that ranks go to."""
    far: dict[int, list[Seat]] = {}
    for seat, home in zip(places, homes):
        if seat.near and home not in seat.near:
            far.setdefault(home, []).append(seat)
    for home, seats_there in far.items():
        names = ", ".join(dict.fromkeys(_name(seat) for seat in seats_there))
        near = {domain for seat in seats_there for domain in seat.near}
        is_ = "are" if ", " in names else "is"
        runs = "runs" if len(seats_there) == 1 else "run"
        warnings.append(
            f"GPU {names} {is_} next to NUMA {_domains(near)}, where no CPU is allowed: "
            f"{ranks_text([seat.rank for seat in seats_there])} {runs} on {_domains([home])}"
        )


def _warn_of_crowded(
    machine: Machine, homes: Sequence[int], given: dict[int, list[int]], warnings: list[str]
) -> None:
    """Tell of ranks that found no core left in their domain."""
    for domain in sorted(set(homes)):
        ranks = [rank for rank, home in enumerate(homes) if home == domain]
        out = [one for one in ranks if domain not in {machine.domain_of[c] for c in given[one]}]
        if out:
            others = {machine.domain_of[core] for rank in out for core in given[rank]}
            warnings.append(
                f"NUMA {_domains([domain])} has too few allowed cores for {ranks_text(ranks)}: "
                f"{ranks_text(out)} on {_domains(others)}"
            )


def _warn_of_idle(machine: Machine, groups: Sequence[Group], warnings: list[str]) -> None:
    """Tell of cores that stay idle, since the GPUs nearest to them have no rank."""
    domains = [domain for group in groups for domain in group.domains]
    if domains:
        cores = sum(group.cores(machine) for group in groups)
        warnings.append(
            f"no rank has a GPU next to NUMA {_domains(domains)}: {counted(cores, 'core')} there "
            f"{'stays' if cores == 1 else 'stay'} idle, which the policy spread would use"
        )


def _warn_of_few_cores(
    plans: Sequence[RankPlan], loader_workers: int, warnings: list[str], *, bound: bool
) -> None:
    """Tell of ranks whose loader workers have no core of their own."""
    short = [one.local_rank for one in plans if bound and 0 < len(one.cores) < 1 + loader_workers]
    if short and loader_workers:
        warnings.append(
            f"{ranks_text(short)}: fewer cores than 1 and {loader_workers} loader workers need"
        )


def _name(seat: Seat) -> str:
    """What to call a rank's GPU."""
    return gpu_name(seat.gpu) if seat.gpu else "none"


def _domains(numbers: Iterable[int]) -> str:
    """Write domains, such as `domain 3` or `domain 0, 1`."""
    return f"domain {', '.join(str(one) for one in sorted(numbers))}"
