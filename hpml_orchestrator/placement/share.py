"""Divides cores among ranks: a home domain per rank, idle domains lend cores, equal parts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from hpml_orchestrator.placement.machine import Machine


@dataclass
class Group:
    """Ranks that share the cores of some domains."""

    domains: list[int]  # the domains whose cores all belong to this group
    homes: dict[int, list[int]]  # domain to the ranks whose GPU is next to it, in order
    lent: list[int] = field(default_factory=list)  # cores of other domains

    @property
    def ranks(self) -> list[int]:
        """Its ranks, in order."""
        return sorted(rank for ranks in self.homes.values() for rank in ranks)

    def cores(self, machine: Machine) -> int:
        """Return how many cores it has."""
        return sum(len(machine.pool[domain]) for domain in self.domains) + len(self.lent)


def even(total: int, parts: int) -> list[int]:
    """Return sizes of equal parts, those that are larger by one first.

    >>> even(7, 3)
    [3, 2, 2]
    """
    size, more = divmod(total, parts)
    return [size + (part < more) for part in range(parts)]


def chunks(units: Sequence[Sequence[int]], ranks: int) -> list[list[int]]:
    """Divide units (sockets, domains or the whole node) among ranks in order, equally if possible.

    With fewer ranks than units each rank gets one unit, spread over all units. No unit gets more
    ranks than it has cores while another one has cores to spare.
    """
    # First spread the ranks evenly over the units, whatever their size. Then, while a unit has more
    # ranks than cores, move one of its ranks to the unit that leaves the most cores per rank.
    # With fewer cores than ranks on the node no move can help, so none is made.
    count = [0] * len(units)
    for rank in range(ranks):
        # With fewer ranks than units this skips units evenly: two ranks on four domains get the
        # first and the third, one per socket where a socket has two.
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
    """Return each rank's home: of its possible domains the one with most cores left per rank."""
    # Greedy, ranks with the fewest possible domains first: the others have alternatives.
    # Ranks with equal possibilities then get their homes in order, so that neighbouring ranks are
    # on the same or neighbouring domains; the number of ranks per domain does not change.
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
    """Give the cores of domains without ranks, except `kept`, to the nearest groups, equally.

    `groups` has the group of each domain with ranks.
    """
    # Lenders with the same nearest groups ("takers") are divided together, those with the fewest
    # takers first, since their cores cannot go elsewhere. The first loop decides how many cores
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
        # Whole domains first: a rank with cores in two domains is better off than one with three.
        for lender in sorted(lenders, key=lambda lender: (-len(machine.pool[lender]), lender)):
            cores = machine.pool[lender]
            while cores:
                to = max(takers, key=lambda taker: (quota[taker], -machine.order[taker]))
                groups[to].lent += cores[: quota[to]]
                quota[to], cores = max(0, quota[to] - len(cores)), cores[quota[to] :]


def merge(machine: Machine, groups: list[Group]) -> None:
    """Join each group that has fewer cores than ranks with the nearest one that has cores to spare.

    The node must have a core for each rank.
    """
    # A join may leave the joined group short, so repeat until none is. This ends: each round
    # removes a group, and the node as a whole has enough cores.
    while True:
        short = next((group for group in groups if group.cores(machine) < len(group.ranks)), None)
        if short is None:
            return
        spare = [group for group in groups if group.cores(machine) > len(group.ranks)]

        def cost(other: Group, short: Group = short) -> tuple[tuple[int, int], float, int]:
            gap = min(machine.gap(a, b) for a in short.homes for b in other.domains)
            # A group without ranks counts as half a rank, so that among equally near groups an
            # idle one is taken first unless it is tiny.
            per_rank = other.cores(machine) / (len(other.ranks) or 0.5)
            return gap, -per_rank, machine.order[other.domains[0]]

        other = min(spare, key=cost)
        groups.remove(short)
        groups.remove(other)
        whole = Group(short.domains + other.domains, {**short.homes, **other.homes})
        whole.lent = short.lent + other.lent
        groups.append(whole)


def share_group(machine: Machine, group: Group) -> dict[int, list[int]]:
    """Divide a group's cores into equal parts, with as many cores as possible from the own domain.

    The group must have a core for each rank. Cores stay in order, so that a rank's are neighbours.
    """
    # 1. `part`: how many cores each rank gets; if they do not divide evenly, the ranks with most
    #    cores in their home domain get one more, because they can take it there.
    # 2. Each rank takes what its own domain offers, up to its part.
    # 3. Ranks that still need cores take the remaining ones, nearest domain first.
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
    """Give one core to each rank if there are fewer cores than ranks, equally many to each core.

    A rank gets a core of its home domain while there is a place left, else the nearest core.
    """
    # Each core has `places` ranks; only `more` cores have one more than that.
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
