"""The GPU of each local rank, and the NUMA domains next to it.

Visible devices are those of CUDA_VISIBLE_DEVICES or ROCR_VISIBLE_DEVICES. Indices in there count
the GPUs that the process may open, in the order of their PCI addresses (with
CUDA_DEVICE_ORDER=PCI_BUS_ID); the topology also has those that a cgroup hides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import counted

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from hpml_orchestrator.placement.machine import Machine
    from hpml_orchestrator.topology.model import Gpu, Topology

VISIBLE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables that list the visible devices, the one that counts first."""


@dataclass(frozen=True)
class RankGpu:
    """The GPU of one rank."""

    rank: int  # local rank
    gpu: Gpu | None = None  # its GPU; None without one, or if it is not in the topology
    near: tuple[int, ...] = ()  # NUMA domains that the GPU is next to; empty if unknown


def gpus_of_ranks(
    topology: Topology,
    machine: Machine,
    ranks: int,
    ranks_per_gpu: int,
    devices: Sequence[Gpu | None],
    warnings: list[str],
) -> list[RankGpu]:
    """Return the GPU of each rank: the visible device of its number, modulo their count.

    That is what `torch.device("cuda", local_rank % device_count)` does in the rank itself.
    """
    if not devices:
        return [RankGpu(rank) for rank in range(ranks)]
    # Too many ranks are a warning rather than an error: the ranks themselves would share the GPUs
    # in the same way.
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
    """Return the domains whose visible GPUs all lack a rank.

    Domains without a GPU are included if they are nearer to these than to the GPU of any rank.
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
    """Return the devices of a visible list in its order; None for an unknown device.

    As in the driver, the list ends before an entry that cannot be a device, such as `-1` or
    Slurm's `NoDevFiles`.

    Args:
        topology: the node.
        text: the variable's value; None if it is not set: then every GPU that is not hidden.
        hidden: PCI addresses of GPUs that a cgroup hides.
        warnings: gets a sentence about each unknown device.
    """
    if text is None:
        return [gpu for gpu in topology.devices if gpu.address not in hidden]
    # An index counts whole GPUs only; the driver accepts MIG instances by UUID alone.
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
    # The driver accepts the beginning of a UUID if only one device has it.
    begun = [gpu for gpu in gpus if gpu.uuid.lower().startswith(uuid)]
    exact = [gpu for gpu in begun if gpu.uuid.lower() == uuid]
    return exact[0] if exact else begun[0] if len(begun) == 1 else None


def local_domains(topology: Topology, machine: Machine, gpu: Gpu) -> tuple[int, ...]:
    """Return the domains with CPUs that a GPU is next to; several if only its CPUs are known.

    Empty if unknown: a GPU that is near to all CPUs of several domains could be anywhere. A MIG
    instance without a known domain has that of its parent, or of another instance of the parent.
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
        if candidate.domain is not None and topology.domain(candidate.domain):  # memory alone
            return machine.nearest(candidate.domain, with_cpus)
        domains = machine.domains_of_cpus(candidate.cpus)
        # A list of all CPUs is what the kernel shows for an unknown place, so it says nothing.
        if domains and domains != with_cpus:
            return domains
    return ()


def gpu_name(gpu: Gpu) -> str:
    """Return a GPU's name for messages: PCI address, else the source's name, else its index."""
    return gpu.address or gpu.name or str(gpu.index)
