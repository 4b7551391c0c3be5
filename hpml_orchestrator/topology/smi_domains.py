"""The NUMA domains behind the affinities that `nvidia-smi topo -m` prints for each GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional

from hpml_orchestrator.topology.build import free_number
from hpml_orchestrator.topology.cpulist import format_list
from hpml_orchestrator.topology.model import Domain

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

__all__ = ["domains_of_affinities"]


def domains_of_affinities(
    cpus: Mapping[str, Sequence[int]],
    numbers: Mapping[str, Sequence[int]],
    warnings: list[str],
    *,
    memories: Collection[int] = (),
) -> tuple[dict[str, Optional[int]], list[Domain]]:  # noqa: UP045
    """Return the domain of each GPU, None where it is not known, and the domains, by number.

    A GPU names one domain, none (N/A), or several: that of its CPUs with those of GPU memory
    (`0,2-17` on a GB200), or all that a virtual machine has (`0-1`). Without one number the CPUs
    decide: those of a domain that is told are that domain, others are one of their own.

    Args:
        cpus: GPU -> CPUs next to it.
        numbers: GPU -> domains that its row names.
        warnings: what was missing or guessed is added here.
        memories: domains of GPU memory, which have no CPUs.
    """
    found: dict[str, Optional[int]] = {}  # noqa: UP045
    cpus_of: dict[int, set[int]] = {}
    for name, named in numbers.items():
        if len(named) == 1 and cpus[name]:
            _add(cpus_of, named[0], cpus[name], warnings)
    for name, named in numbers.items():
        found[name] = named[0] if len(named) == 1 and cpus_of.get(named[0]) else None
    rest = [name for name, named in numbers.items() if len(named) != 1 and cpus[name]]
    told = bool(cpus_of)
    for name in rest:
        found[name] = next((n for n, held in cpus_of.items() if set(cpus[name]) <= held), None)
    taken = {cpu for held in cpus_of.values() for cpu in held}
    rest = [name for name in rest if found[name] is None]
    sets = sorted({tuple(cpus[name]) for name in rest if not taken & set(cpus[name])})
    if sum(map(len, sets)) > len({cpu for one in sets for cpu in one}):
        sets = []  # they overlap
    used = {*cpus_of, *memories}
    named_one = False
    for one in sets:
        names = [name for name in rest if tuple(cpus[name]) == one]
        wanted = [n for n in numbers[names[0]] if n not in used]
        number = wanted[0] if wanted else free_number(used)
        if not wanted and told:
            warnings.append(
                f"The NUMA domain of the CPUs {format_list(one)} has no number: it counts as "
                f"domain {number}."
            )
        elif len(wanted) > 1:
            warnings.append(
                f"{', '.join(names)}: next to the NUMA domains {format_list(numbers[names[0]])}, "
                "whose CPUs count as one domain."
            )
        named_one |= bool(wanted)
        used.add(number)
        cpus_of[number] = set(one)
        found.update(dict.fromkeys(names, number))
    if sets and not told and not named_one:
        warnings.append("NUMA domains have no numbers: they are counted by their lowest CPU.")
    _add_strays(cpus_of, {cpu for name in rest for cpu in cpus[name]}, used, warnings)
    return found, [Domain(n, tuple(sorted(held))) for n, held in sorted(cpus_of.items())]


def _add(
    cpus_of: dict[int, set[int]], number: int, cpus: Sequence[int], warnings: list[str]
) -> None:
    """Add CPUs to a domain, but those that another has already."""
    taken = {cpu for other, held in cpus_of.items() if other != number for cpu in held}
    if taken & set(cpus):
        both = format_list(taken & set(cpus))
        warnings.append(f"The CPUs {both} are told for two domains: the first has them.")
    cpus_of.setdefault(number, set()).update(set(cpus) - taken)


def _add_strays(
    cpus_of: dict[int, set[int]], cpus: set[int], used: set[int], warnings: list[str]
) -> None:
    """Make one domain of the CPUs that are told and are in none."""
    strays = cpus.difference(*cpus_of.values())
    if not strays:
        return
    number = free_number(used)
    if cpus_of:
        warnings.append(
            f"The NUMA domain of the CPUs {format_list(strays)} is not told: they count as "
            f"domain {number}."
        )
    else:
        warnings.append("No NUMA domain is told: all CPUs count as domain 0.")
    cpus_of[number] = strays
