"""A plan as options of Slurm and Open MPI, for allocations of whole nodes.

Each form is given only when it says exactly what the plan says; else the reason why it cannot.
Slurm refuses masks and maps unless the step has the whole node. The Slurm forms were tried with
22.05.8, those of Open MPI with 4.1.4 and 4.1.8. Versions 5.0.7 to 5.0.11 call a socket a package,
and take a rankfile by another option: a script chooses by the version that it finds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml_orchestrator.topology.cpulist import format_list

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpml_orchestrator.placement.model import Plan
    from hpml_orchestrator.topology.model import Topology

__all__ = [
    "PARTIAL",
    "Form",
    "openmpi_map_by",
    "openmpi_rankfile",
    "slurm_cores",
    "slurm_ldoms",
    "slurm_masks",
    "slurm_memory",
]

PARTIAL = ("NCCL XML", "nvidia-smi topo -m")  # have CPUs next to GPUs, and no cores
_NOT_BOUND = "the plan binds nothing"
_NOT_WHOLE = (
    "not all CPUs of the node are the job's, and the launcher may count only those that are"
)


@dataclass(frozen=True)
class Form:
    """One way to write a plan.

    Attributes:
        name: which.
        value: options of srun or mpirun, or the text of a rankfile; None when it cannot say the
            plan exactly.
        reason: why not; empty when it can.
    """

    name: str
    value: str | None
    reason: str = ""


def slurm_masks(plan: Plan) -> Form:
    """Return `--cpu-bind=mask_cpu:…`, one hexadecimal mask of CPUs for each task of a node."""
    if not _is_bound(plan):
        return Form("mask_cpu", None, _NOT_BOUND)
    masks = (format(sum(1 << cpu for cpu in rank.cpus), "x") for rank in plan.ranks)
    return Form("mask_cpu", f"--cpu-bind=mask_cpu:{','.join(masks)}")


def slurm_ldoms(topology: Topology, plan: Plan) -> Form:
    """Return `--cpu-bind=map_ldom:…` where each rank has all CPUs of one NUMA domain."""
    if not _is_bound(plan):
        return Form("map_ldom", None, _NOT_BOUND)
    cpus_of = {domain.number: domain.cpus for domain in topology.domains}
    for rank in plan.ranks:
        if len(rank.numa) != 1 or rank.cpus != cpus_of[rank.numa[0]]:
            reason = f"rank {rank.local_rank} has not exactly one whole domain"
            return Form("map_ldom", None, reason)
    domains = ",".join(str(rank.numa[0]) for rank in plan.ranks)
    return Form("map_ldom", f"--cpu-bind=map_ldom:{domains}")


def slurm_cores(topology: Topology, plan: Plan) -> Form:
    """Return `--cpu-bind=cores` with blocks of cores in order, each as large as the others.

    The options hold the number of CPUs per task, without which Slurm gives one core to each.
    """
    cores, reason = _whole_cores(topology, plan)
    if reason:
        return Form("cores", None, reason)
    size = len(cores[0])
    if cores != _blocks(_in_order(topology), size, len(cores)) or len(cores[-1]) < size:
        return Form("cores", None, "the ranks' cores are not equal blocks in order")
    threads = {len(core.cpus) for core in topology.cores}
    if len(threads) > 1:
        return Form("cores", None, "the cores differ in their number of hardware threads")
    socket_of = {core.number: core.socket for core in topology.cores}
    if any(len({socket_of[core] for core in mine}) > 1 for mine in cores):
        return Form("cores", None, "a rank has cores of two sockets")
    cpus = size * threads.pop()
    value = f"--cpu-bind=cores --distribution=block:block --cpus-per-task={cpus}"
    return Form("cores", value)


def slurm_memory(plan: Plan) -> Form:
    """Return `--mem-bind=prefer,map_mem:…`: preferred, since strict binding kills under cpusets."""
    if not _is_bound(plan):
        return Form("mem-bind", None, _NOT_BOUND)
    none = [rank.local_rank for rank in plan.ranks if rank.memory is None]
    if none:
        return Form("mem-bind", None, f"no memory is preferred for rank {format_list(none)}")
    domains = ",".join(str(rank.memory) for rank in plan.ranks)
    return Form("mem-bind", f"--mem-bind=prefer,map_mem:{domains}")


def openmpi_rankfile(topology: Topology, plan: Plan, hosts: Sequence[str]) -> Form:
    """Return the text of a rankfile, ranks in blocks over hosts that all look like the topology.

    Its slots are cores, counted in hwloc's logical order, which is not that of the CPU numbers
    where those alternate between sockets.
    """
    cores, reason = _whole_cores(topology, plan)
    if reason:
        return Form("rankfile", None, reason)
    logical = {core: place for place, core in enumerate(_in_order(topology))}
    lines = [
        f"rank {node * len(cores) + rank}={host} "
        f"slot={format_list(logical[core] for core in mine)}\n"
        for node, host in enumerate(hosts)
        for rank, mine in enumerate(cores)
    ]
    return Form("rankfile", "".join(lines))


def openmpi_map_by(topology: Topology, plan: Plan) -> Form:
    """Return `--map-by ppr:…` where every socket or every NUMA domain has equally many ranks."""
    cores, reason = _whole_cores(topology, plan)
    if reason:
        return Form("map-by", None, reason)
    keys = {"socket": {core.number: core.socket for core in topology.cores}}
    if all(domain.cpus for domain in topology.domains):  # Open MPI would count those without CPUs
        keys["numa"] = {core.number: core.domain for core in topology.cores}
    size = len(cores[0])
    divided = ""
    for kind, key_of in keys.items():
        objects: dict[int, list[int]] = {}
        for core in _in_order(topology):
            objects.setdefault(key_of[core], []).append(core)
        if cores == list(objects.values()):
            return Form("map-by", f"--map-by ppr:1:{kind} --bind-to {kind}")
        per = len(cores) // len(objects)
        parts = [part for held in objects.values() for part in _blocks(held, size, per)]
        if not divided and cores == parts and {len(part) for part in parts} == {size}:
            divided = f"--map-by ppr:{per}:{kind}:pe={size} --bind-to core"
    if divided:
        return Form("map-by", divided)
    return Form("map-by", None, "the ranks are not equal parts, in order, of sockets or domains")


def _is_bound(plan: Plan) -> bool:
    """Return whether the plan binds every rank."""
    return plan.policy != "none" and all(rank.cpus for rank in plan.ranks)


def _blocks(cores: Sequence[int], size: int, count: int) -> list[list[int]]:
    return [list(cores[part * size : (part + 1) * size]) for part in range(count)]


def _in_order(topology: Topology) -> list[int]:
    """Return cores as hwloc and Slurm count them: by socket, domain and core, by lowest CPU."""
    socket: dict[int, int] = {}
    domain: dict[tuple[int, int], int] = {}
    for core in sorted(topology.cores, key=lambda core: core.cpus[0]):
        socket.setdefault(core.socket, core.cpus[0])
        domain.setdefault((core.socket, core.domain), core.cpus[0])
    ordered = sorted(
        topology.cores,
        key=lambda core: (socket[core.socket], domain[core.socket, core.domain], core.cpus[0]),
    )
    return [core.number for core in ordered]


def _whole_cores(topology: Topology, plan: Plan) -> tuple[list[list[int]], str]:
    """Return each rank's cores in order, or the reason why whole cores do not say the plan."""
    if not _is_bound(plan):
        return [], _NOT_BOUND
    if topology.source in PARTIAL:
        return [], f"{topology.source} does not have all cores, so that they cannot be counted"
    if not plan.whole:
        return [], _NOT_WHOLE
    threads = {core.number: core.cpus for core in topology.cores}
    order = {core: place for place, core in enumerate(_in_order(topology))}
    cores: list[list[int]] = []
    for rank in plan.ranks:
        if list(rank.cpus) != sorted(cpu for core in rank.cores for cpu in threads[core]):
            return [], f"rank {rank.local_rank} does not have all hardware threads of its cores"
        cores.append(sorted(rank.cores, key=order.__getitem__))
    if len({core for mine in cores for core in mine}) < sum(map(len, cores)):
        return [], "ranks share a core"
    return cores, ""
