"""Which GPU each local rank has, and which NUMA domains that GPU is next to."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hpml_orchestrator.placement.machine import Machine
    from hpml_orchestrator.topology.model import Gpu, Topology

__all__ = ["Seat", "domains_of_idle", "gpu_name", "local_domains", "seats", "visible"]

_ADDRESS_PARTS = 3  # domain, bus, device.function


class Seat:
    """What one rank has been given before its cores are chosen.

    Attributes:
        rank: local rank.
        gpu: its GPU; None without one, and where the topology does not know it.
        near: NUMA domains that the GPU is next to; empty where that is not known.
    """

    def __init__(self, rank: int, gpu: Gpu | None, near: tuple[int, ...]) -> None:
        self.rank = rank
        self.gpu = gpu
        self.near = near


def seats(
    topology: Topology,
    machine: Machine,
    ranks: int,
    ranks_per_gpu: int,
    chosen: Iterable[object] | None,
    warnings: list[str],
) -> list[Seat]:
    """Give rank r the visible device r, beginning anew after the last: the order is never changed.

    That is what `torch.device("cuda", local_rank % device_count)` does in the rank itself, so plan
    and rank agree on the device.
    """
    devices = visible(topology, chosen, warnings)
    if not devices:
        return [Seat(rank, None, ()) for rank in range(ranks)]
    if ranks > len(devices) * ranks_per_gpu:
        warnings.append(
            f"{ranks} ranks for {len(devices)} visible GPU{'s' * (len(devices) != 1)}: more than "
            f"{ranks_per_gpu} on one GPU"
        )
    near = [() if one is None else local_domains(topology, machine, one) for one in devices]
    return [
        Seat(rank, devices[rank % len(devices)], near[rank % len(devices)]) for rank in range(ranks)
    ]


def domains_of_idle(
    topology: Topology, machine: Machine, ranks: int, chosen: Iterable[object] | None
) -> set[int]:
    """Return the domains next to visible GPUs that no rank has, and next to none that one has.

    With them go the domains without a GPU to which these are nearer than any that a rank is at.

    Args:
        topology: the node.
        machine: the same, for its distances.
        ranks: how many ranks there are.
        chosen: the visible GPUs, as in `visible`.
    """
    near = [
        () if gpu is None else local_domains(topology, machine, gpu)
        for gpu in visible(topology, chosen, [])
    ]
    ranked = {domain for one in near[:ranks] for domain in one}
    idle = {domain for one in near[ranks:] for domain in one} - ranked
    beside = machine.pool if idle else ()
    return idle.union(one for one in beside if idle.issuperset(machine.nearest(one, ranked | idle)))


def visible(
    topology: Topology, chosen: Iterable[object] | None, warnings: list[str]
) -> list[Gpu | None]:
    """Return the visible devices in order; None stands for one that the topology does not know.

    Args:
        topology: the node.
        chosen: indices, PCI addresses, UUIDs or names; None for all GPUs, of which those that are
            cut into MIG instances do not count: their instances do.
        warnings: gets a sentence about what is not known.
    """
    if chosen is None:
        parents = {gpu.parent.lower() for gpu in topology.gpus if gpu.parent}
        return [gpu for gpu in topology.gpus if not parents & _names(gpu)]
    found: list[Gpu | None] = []
    for entry in chosen:
        gpu = _find(topology.gpus, str(entry).strip())
        if gpu is None:
            warnings.append(f"visible GPU {str(entry).strip()!r} is not in the topology")
        found.append(gpu)
    return found


def local_domains(topology: Topology, machine: Machine, gpu: Gpu) -> tuple[int, ...]:
    """Return the domains with CPUs that a GPU is next to; several where only CPUs are told.

    Empty where it is not known: a GPU that is near to all CPUs of several domains tells nothing.
    A MIG instance that tells nothing itself is where its parent is, or another instance of it.
    """
    with_cpus = machine.domains_with_cpus
    if len(with_cpus) == 1:
        return with_cpus
    candidates = [gpu]
    if gpu.parent:
        parent = gpu.parent.lower()
        candidates += [one for one in topology.gpus if parent in _names(one)]
        candidates += [one for one in topology.gpus if one.parent.lower() == parent]
    for one in candidates:
        if one.domain is not None:
            if one.domain in with_cpus:
                return (one.domain,)
            if topology.domain(one.domain) is not None:  # memory alone
                return machine.nearest(one.domain, with_cpus)
        told = machine.domains_of_cpus(one.cpus)
        if told and told != with_cpus:
            return told
    return ()


def gpu_name(gpu: Gpu) -> str:
    """Return what to call a GPU: its PCI address, else the source's name of it, else its index."""
    return gpu.address or gpu.name or str(gpu.index)


def _names(gpu: Gpu) -> set[str]:
    """What a MIG instance may call its parent, in lower case."""
    return {one.lower() for one in (gpu.uuid, gpu.address, gpu.name) if one and not gpu.parent}


def _find(gpus: Sequence[Gpu], entry: str) -> Gpu | None:
    """The GPU that an entry means: index, UUID (or the beginning of one), PCI address or name."""
    if entry.isdecimal():
        return next((gpu for gpu in gpus if gpu.index == int(entry)), None)
    low = entry.lower()
    if not low:
        return None
    for key in ("uuid", "name"):
        for gpu in gpus:
            if getattr(gpu, key).lower() == low:
                return gpu
    address = _address(low)
    at = [gpu for gpu in gpus if address and _address(gpu.address.lower()) == address]
    if at:
        return at[0]
    begun = [gpu for gpu in gpus if gpu.uuid.lower().startswith(low)] if "-" in low else []
    return begun[0] if len(begun) == 1 else None


def _address(text: str) -> tuple[int, ...]:
    """A PCI address as numbers, since nvidia-smi writes 8 digits of domain; empty for no address.

    >>> _address("00000000:c7:00.0") == _address("0000:c7:00.0") == _address("c7:00.0")
    True
    """
    parts = text.replace(".", ":").split(":")
    if len(parts) == _ADDRESS_PARTS:
        parts.insert(0, "0")
    try:
        return tuple(int(part, 16) for part in parts) if len(parts) > _ADDRESS_PARTS else ()
    except ValueError:
        return ()
