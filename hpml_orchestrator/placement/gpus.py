"""Which GPU each local rank has, and which NUMA domains that GPU is next to.

Visible devices are those of CUDA_VISIBLE_DEVICES or ROCR_VISIBLE_DEVICES. Indices in there count
the GPUs that the process may open, in the order of their PCI addresses (with
CUDA_DEVICE_ORDER=PCI_BUS_ID); the topology also has those that a cgroup hides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import counted
from hpml_orchestrator.topology.pci import full_address

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from hpml_orchestrator.placement.machine import Machine
    from hpml_orchestrator.topology.model import Gpu, Topology

__all__ = [
    "VISIBLE_VARIABLES",
    "RankGpu",
    "chosen_names",
    "domains_of_idle",
    "gpu_name",
    "gpus_of_ranks",
    "local_domains",
    "visible",
    "visible_devices",
]

VISIBLE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables that list the visible devices, the one that counts first."""


@dataclass(frozen=True)
class RankGpu:
    """The GPU of one rank.

    Attributes:
        rank: local rank.
        gpu: its GPU; None without one, and where the topology does not know it.
        near: NUMA domains that the GPU is next to; empty where unknown.
    """

    rank: int
    gpu: Gpu | None = None
    near: tuple[int, ...] = ()


def gpus_of_ranks(
    topology: Topology,
    machine: Machine,
    ranks: int,
    ranks_per_gpu: int,
    chosen: Iterable[object] | None,
    warnings: list[str],
) -> list[RankGpu]:
    """Return the GPU of each rank: the visible device of its number, beginning anew after the last.

    That is what `torch.device("cuda", local_rank % device_count)` does in the rank itself.
    """
    devices = visible(topology, chosen, warnings)
    if not devices:
        return [RankGpu(rank) for rank in range(ranks)]
    if ranks > len(devices) * ranks_per_gpu:
        warnings.append(
            f"{ranks} ranks for {counted(len(devices), 'visible GPU')}: more than "
            f"{ranks_per_gpu} on one GPU"
        )
    near = [() if gpu is None else local_domains(topology, machine, gpu) for gpu in devices]
    places = [rank % len(devices) for rank in range(ranks)]
    return [RankGpu(rank, devices[place], near[place]) for rank, place in enumerate(places)]


def domains_of_idle(
    topology: Topology, machine: Machine, ranks: int, chosen: Iterable[object] | None
) -> set[int]:
    """Return the domains next to visible GPUs that no rank has, and next to none that one has.

    Included are the domains without a GPU that are nearer to these than to any rank's.

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
    ranked = {domain for domains in near[:ranks] for domain in domains}
    idle = {domain for domains in near[ranks:] for domain in domains} - ranked
    beside = [
        domain
        for domain in (machine.pool if idle else ())
        if idle.issuperset(machine.nearest(domain, ranked | idle))
    ]
    return idle.union(beside)


def visible(
    topology: Topology, chosen: Iterable[object] | None, warnings: list[str]
) -> list[Gpu | None]:
    """Return the visible devices in order; None stands for one that the topology does not know.

    Args:
        topology: the node.
        chosen: indices, PCI addresses, UUIDs or names; None for all devices.
        warnings: gets a sentence about what is unknown.
    """
    if chosen is None:
        return list(topology.devices)
    devices: list[Gpu | None] = []
    for entry in chosen:
        devices.append(_find(topology.gpus, str(entry).strip().lower()))
        if devices[-1] is None:
            warnings.append(f"visible GPU {str(entry).strip()!r} is not in the topology")
    return devices


def _find(gpus: Sequence[Gpu], entry: str) -> Gpu | None:
    """Return the GPU that an entry means: index, UUID (or its beginning), PCI address or name."""
    if entry.isdecimal():
        return next((gpu for gpu in gpus if gpu.index == int(entry)), None)
    address = full_address(entry)
    exact = [
        *(gpu for gpu in gpus if entry and gpu.uuid.lower() == entry),
        *(gpu for gpu in gpus if entry and gpu.name.lower() == entry),
        *(gpu for gpu in gpus if address and gpu.address == address),
    ]
    if exact:
        return exact[0]
    begun = [gpu for gpu in gpus if "-" in entry and gpu.uuid.lower().startswith(entry)]
    return begun[0] if len(begun) == 1 else None


def visible_devices(
    topology: Topology, text: str | None, hidden: Collection[str] = ()
) -> list[Gpu | None]:
    """Return the devices of a visible list in its order; None stands for an unknown one.

    Args:
        topology: the node.
        text: the variable's value; None where it is not set: then all that are not hidden.
        hidden: PCI addresses of GPUs that a cgroup hides.
    """
    return visible(topology, chosen_names(topology, text, hidden), [])


def chosen_names(
    topology: Topology, text: str | None, hidden: Collection[str] = ()
) -> list[str] | None:
    """Return the names of visible devices in order, as the planner takes them; None for all.

    As for the driver, the list ends before an entry that can be no device, such as `-1` or
    Slurm's `NoDevFiles`. A device that the topology does not know stays in the list.
    """
    if text is None:
        admitted = [gpu.name for gpu in topology.devices if gpu.address not in hidden]
        return admitted if hidden else None
    admitted = [gpu.name for gpu in topology.gpus if not gpu.parent and gpu.address not in hidden]
    names: list[str] = []
    for entry in (part.strip() for part in text.split(",")):
        if entry.isdecimal():
            index = int(entry)
            names.append(admitted[index] if index < len(admitted) else f"index {index}")
        elif entry.upper().startswith(("GPU-", "MIG-")):
            names.append(entry)
        else:
            break
    return names


def local_domains(topology: Topology, machine: Machine, gpu: Gpu) -> tuple[int, ...]:
    """Return the domains with CPUs that a GPU is next to; several where only CPUs are known.

    Empty where unknown: a GPU that is near to all CPUs of several domains could be anywhere. A MIG
    instance of unknown place is where its parent is, or another instance of it.
    """
    with_cpus = machine.domains_with_cpus
    if len(with_cpus) == 1:
        return with_cpus
    candidates = [gpu]
    if gpu.parent:
        candidates += [one for one in topology.gpus if gpu.parent in (one.uuid, one.address)]
        candidates += [one for one in topology.gpus if one.parent == gpu.parent]
    for candidate in candidates:
        if candidate.domain in with_cpus:
            return (candidate.domain,)
        if candidate.domain is not None and topology.domain(candidate.domain):  # memory alone
            return machine.nearest(candidate.domain, with_cpus)
        domains = machine.domains_of_cpus(candidate.cpus)
        if domains and domains != with_cpus:
            return domains
    return ()


def gpu_name(gpu: Gpu) -> str:
    """Return what to call a GPU: its PCI address, else the source's name of it, else its index."""
    return gpu.address or gpu.name or str(gpu.index)
