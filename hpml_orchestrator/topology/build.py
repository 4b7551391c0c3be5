"""What the readers share: from CPUs, domains and devices that a source tells to a `Topology`."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Optional

from hpml_orchestrator.topology.cpulist import format_list
from hpml_orchestrator.topology.model import Core, Domain

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from hpml_orchestrator.topology.model import Gpu

__all__ = [
    "adopt_strays",
    "cores_of_groups",
    "cores_without_siblings",
    "distinct_uuids",
    "domain_of_cpus",
    "free_number",
    "name_key",
    "nearest_with_cpus",
]

_RUNS_WITH_SIBLINGS = 2


def cores_of_groups(
    groups: Iterable[Sequence[int]], sockets: Mapping[int, int], domains: Mapping[int, int]
) -> tuple[Core, ...]:
    """Return cores, numbered in the order of their lowest CPU.

    Args:
        groups: the CPUs of each core.
        sockets: CPU -> socket; 0 for what is not there.
        domains: CPU -> domain; 0 for what is not there.
    """
    ordered = sorted(tuple(sorted(set(group))) for group in groups if group)
    return tuple(
        Core(number, sockets.get(cpus[0], 0), domains.get(cpus[0], 0), cpus)
        for number, cpus in enumerate(ordered)
    )


def cores_without_siblings(domains: Sequence[Domain]) -> tuple[tuple[Core, ...], str]:
    """Return the cores of a source that tells CPUs of domains and nothing finer, and a warning.

    The CPUs of a domain as two equal runs with a gap between, the same distance apart in every
    domain (`0-23,96-119` and `24-47,120-143`), are first and second hardware threads: Linux numbers
    so on x86. A domain that lacks some CPUs is understood by the whole ones beside it. Any other
    shape proves nothing, and each CPU counts as a core. Interleaved numbers
    (`0,2,4` and `1,3,5`, or `1,3`) look alike with and without second threads. A domain stands for
    a socket.
    """
    homes = {cpu: domain.number for domain in domains for cpu in domain.cpus}
    step = _sibling_step([domain.cpus for domain in domains if domain.cpus])
    groups: list[tuple[int, ...]]
    if step:
        groups = [
            tuple(one for one in (cpu, cpu + step) if homes.get(one) == homes[cpu])
            for cpu in homes
            if cpu < step or cpu - step not in homes
        ]
        note = f"CPUs n and n+{step} were taken as one core, by the shape of the domains"
    else:
        groups = [(cpu,) for cpu in homes]
        note = "each CPU counts as a core"
    cores = cores_of_groups(groups, homes, homes)
    return cores, f"Sockets and hardware threads are not told: each domain is a socket, {note}."


def _sibling_step(sets: Sequence[Sequence[int]]) -> int:
    """Return the distance of sibling CPUs that all sets agree on; 0 where nothing proves one.

    Whole sets prove it. Another may lack CPUs, which are offline or in nobody's reach, if most of
    it are siblings at that distance, and none is one of a CPU in another set.
    """
    steps = set()
    for cpus in sets:
        runs = [part.split("-") for part in format_list(cpus).split(",")]
        if len(runs) == _RUNS_WITH_SIBLINGS:
            (first, last), (second, end) = ((int(run[0]), int(run[-1])) for run in runs)
            if last > first and last - first == end - second:
                steps.add(second - first)
    if len(steps) != 1:
        return 0
    step = steps.pop()
    for cpus in sets:
        first_threads = {cpu for cpu in cpus if cpu < step}
        partners = {cpu - step for cpu in cpus if cpu >= step}
        others = {cpu for other in sets if other is not cpus for cpu in other}
        paired = len(first_threads & partners)
        if max(partners, default=0) >= step or partners & others or 4 * paired < len(cpus):
            return 0
    return step


def domain_of_cpus(cpus: Iterable[int], domains: Sequence[Domain]) -> Optional[int]:  # noqa: UP045
    """Return the one domain that holds all of these CPUs; None where it is none or several."""
    wanted = set(cpus)
    holding = [one.number for one in domains if wanted & set(one.cpus)]
    return holding[0] if len(holding) == 1 else None


def nearest_with_cpus(number: int, domains: Sequence[Domain]) -> Optional[int]:  # noqa: UP045
    """Return a domain itself where it has CPUs, else the nearest that has some.

    None where distances are not told or two domains are equally near: which one is a guess then.
    """
    home = next((one for one in domains if one.number == number), None)
    if home is None:
        return None
    if home.cpus:
        return number
    with_cpus = {one.number for one in domains if one.cpus}
    ranked = sorted((away, other) for other, away in home.distances if other in with_cpus)
    if not ranked or (len(ranked) > 1 and ranked[0][0] == ranked[1][0]):
        return None
    return ranked[0][1]


def adopt_strays(homes: dict[int, int], online: Collection[int], warnings: list[str]) -> None:
    """Add the CPUs that no domain has to the first that has some, and say so.

    Args:
        homes: CPU -> domain; not empty.
        online: all CPUs.
        warnings: gets a sentence where there are such CPUs.
    """
    strays = set(online) - set(homes)
    if strays:
        first = min(homes.values())
        warnings.append(
            f"The NUMA domain of the CPUs {format_list(strays)} is not told: they count as "
            f"domain {first}."
        )
        homes.update(dict.fromkeys(strays, first))


def free_number(used: Collection[int]) -> int:
    """Return the lowest number that no domain has."""
    return next(n for n in range(len(used) + 1) if n not in used)


def distinct_uuids(gpus: Iterable[Gpu]) -> list[Gpu]:
    """Return GPUs without the UUIDs that several have: it tells none of these partitions."""
    found = list(gpus)
    count = Counter(gpu.uuid for gpu in found)
    return [gpu if count[gpu.uuid] == 1 else replace(gpu, uuid="") for gpu in found]


def name_key(name: str) -> tuple[tuple[str, int], ...]:
    """Return what sorts names with numbers as people do: NIC2 before NIC10."""
    parts = re.findall(r"([^0-9]*)([0-9]{0,9})", name)
    return tuple((word, int(digits or "0")) for word, digits in parts)
