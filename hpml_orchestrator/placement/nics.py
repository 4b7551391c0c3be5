"""Which network card each rank talks through: the nearest, and among equals each as often."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpml_orchestrator.placement.machine import UNKNOWN_DISTANCE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpml_orchestrator.placement.gpus import Seat
    from hpml_orchestrator.placement.machine import Machine
    from hpml_orchestrator.topology.model import Gpu, Nic, Topology

__all__ = ["choose_nics"]

_LEVELS = {"PIX": 0, "PXB": 1, "PHB": 2, "NODE": 3, "SYS": 4}  # nvidia-smi's words, nearest first


def choose_nics(
    topology: Topology, machine: Machine, seats: Sequence[Seat], homes: Sequence[Sequence[int]]
) -> list[str | None]:
    """Return the name of each rank's network card, all None on a node without one.

    Args:
        topology: the node.
        machine: the same, for its distances.
        seats: each rank's GPU, whose place decides.
        homes: each rank's domains, which decide where there is no GPU.
    """
    if not topology.nics:
        return [None] * len(seats)
    links = {(gpu, nic): _LEVELS.get(level, 4) for gpu, nic, level in topology.links}
    names = {one.lower(): gpu.name for gpu in topology.gpus for one in (gpu.uuid, gpu.address)}
    where = {nic.name: _nic_domains(machine, nic) for nic in topology.nics}
    known: dict[tuple[str | None, tuple[int, ...]], list[str]] = {}
    equals: list[list[str]] = []
    for seat, home in zip(seats, homes):
        near = seat.near if seat.gpu else tuple(home)
        key = (seat.gpu.name if seat.gpu else None, near)
        if key not in known:
            costs = {
                nic.name: _cost(machine, _link(links, names, seat.gpu, nic), near, where[nic.name])
                for nic in topology.nics
            }
            least = min(costs.values())
            known[key] = [name for name, cost in costs.items() if cost == least]
        equals.append(known[key])
    load = {nic.name: 0 for nic in topology.nics}
    chosen: list[str | None] = [None] * len(seats)
    for rank in sorted(range(len(seats)), key=lambda one: (len(equals[one]), one)):
        name = min(equals[rank], key=load.__getitem__)
        load[name] += 1
        chosen[rank] = name
    return chosen


def _nic_domains(machine: Machine, nic: Nic) -> tuple[int, ...]:
    """The domains that a card is next to; empty where it is not known."""
    if nic.domain is not None:
        return (nic.domain,)
    found = machine.domains_of_cpus(nic.cpus)
    return () if found == machine.domains_with_cpus else found


def _link(
    links: dict[tuple[str, str], int], names: dict[str, str], gpu: Gpu | None, nic: Nic
) -> int | None:
    """The level between a GPU and a card, as told; a MIG instance has its parent's."""
    if gpu is None:
        return None
    told = links.get((gpu.name, nic.name))
    if told is None and gpu.parent:
        return links.get((names.get(gpu.parent.lower(), ""), nic.name))
    return told


def _cost(
    machine: Machine, level: int | None, near: tuple[int, ...], where: tuple[int, ...]
) -> tuple[int, tuple[int, int]]:
    """How far a card is: by level, then by NUMA distance."""
    gap = min(
        (machine.gap(one, other) for one in near for other in where), default=(UNKNOWN_DISTANCE, 1)
    )
    if level is None:
        level = _LEVELS["NODE"] if set(near) & set(where) else _LEVELS["SYS"]
    return level, gap
