"""A plan in the words of Slurm and Open MPI, for allocations of whole nodes.

Each form is given only when it says exactly what the plan says; else the reason why it cannot.
Slurm refuses masks and maps unless the step has the whole node. The Slurm forms were tried with
22.05.8, those of Open MPI with 4.1.4 and 4.1.8. Versions 5.0.7 to 5.0.11 call a socket a package,
and take a rankfile by another option: a script chooses by the version that it finds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml_orchestrator.placement.cpulist import cpu_list

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpml_orchestrator.placement.model import Plan
    from hpml_orchestrator.topology.model import Core, Topology

__all__ = [
    "PARTIAL",
    "Form",
    "forms",
    "openmpi_map_by",
    "openmpi_rankfile",
    "slurm_cores",
    "slurm_ldoms",
    "slurm_masks",
    "slurm_memory",
]

_NOT_BOUND = "the plan binds nothing"
PARTIAL = ("NCCL XML", "nvidia-smi topo -m")  # tell of CPUs next to GPUs, and not of cores
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


def forms(topology: Topology, plan: Plan) -> tuple[Form, ...]:
    """Return all forms of one node's plan; the rankfile is for the host `localhost`."""
    return (
        slurm_masks(plan),
        slurm_ldoms(topology, plan),
        slurm_cores(topology, plan),
        slurm_memory(plan),
        openmpi_rankfile(topology, plan, ["localhost"]),
        openmpi_map_by(topology, plan),
    )


def slurm_masks(plan: Plan) -> Form:
    """Return `--cpu-bind=mask_cpu:…`, one hexadecimal mask of CPUs for each task of a node."""
    if not _bound(plan):
        return Form("mask_cpu", None, _NOT_BOUND)
    masks = (format(sum(1 << cpu for cpu in one.cpus), "x") for one in plan.ranks)
    return Form("mask_cpu", f"--cpu-bind=mask_cpu:{','.join(masks)}")


def slurm_ldoms(topology: Topology, plan: Plan) -> Form:
    """Return `--cpu-bind=map_ldom:…` where each rank has all CPUs of one NUMA domain."""
    if not _bound(plan):
        return Form("map_ldom", None, _NOT_BOUND)
    whole: dict[int, list[int]] = {}
    for core in topology.cores:
        whole.setdefault(core.domain, []).extend(core.cpus)
    for one in plan.ranks:
        if len(one.numa) != 1 or list(one.cpus) != sorted(whole[one.numa[0]]):
            return Form("map_ldom", None, f"rank {one.local_rank} has not exactly one whole domain")
    domains = ",".join(str(one.numa[0]) for one in plan.ranks)
    return Form("map_ldom", f"--cpu-bind=map_ldom:{domains}")


def slurm_cores(topology: Topology, plan: Plan) -> Form:
    """Return `--cpu-bind=cores` with blocks of cores in order, each as large as the others.

    The options hold the number of CPUs per task, without which Slurm gives one core to each.
    """
    cores, reason = _whole_cores(topology, plan)
    if reason:
        return Form("cores", None, reason)
    order = _in_order(topology)
    size = len(cores[0])
    blocks = [order[rank * size : (rank + 1) * size] for rank in range(len(cores))]
    if cores != blocks or len(cores[-1]) < size:
        return Form("cores", None, "the ranks' cores are not equal blocks in order")
    threads = {len(core.cpus) for core in topology.cores}
    if len(threads) > 1:
        return Form("cores", None, "the cores differ in their number of hardware threads")
    sockets = {core.number: core.socket for core in topology.cores}
    if any(len({sockets[core] for core in part}) > 1 for part in cores):
        return Form("cores", None, "a rank has cores of two sockets")
    cpus = size * threads.pop()
    value = f"--cpu-bind=cores --distribution=block:block --cpus-per-task={cpus}"
    return Form("cores", value)


def slurm_memory(plan: Plan) -> Form:
    """Return `--mem-bind=prefer,map_mem:…`: preferred, since strict binding kills under cpusets."""
    if not _bound(plan):
        return Form("mem-bind", None, _NOT_BOUND)
    none = [one.local_rank for one in plan.ranks if one.memory is None]
    if none:
        return Form("mem-bind", None, f"no memory is preferred for rank {cpu_list(none)}")
    domains = ",".join(str(one.memory) for one in plan.ranks)
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
        f"rank {node * len(cores) + rank}={host} slot={cpu_list(logical[core] for core in part)}\n"
        for node, host in enumerate(hosts)
        for rank, part in enumerate(cores)
    ]
    return Form("rankfile", "".join(lines))


def openmpi_map_by(topology: Topology, plan: Plan) -> Form:
    """Return `--map-by ppr:…` where every socket or every NUMA domain has equally many ranks."""
    cores, reason = _whole_cores(topology, plan)
    if reason:
        return Form("map-by", None, reason)
    by_number = {core.number: core for core in topology.cores}
    kinds: list[tuple[str, Callable[[Core], int]]] = [("socket", lambda core: core.socket)]
    if all(one.cpus for one in topology.domains):  # Open MPI would count those without CPUs
        kinds.append(("numa", lambda core: core.domain))
    size = len(cores[0])
    divided = ""
    for kind, key in kinds:
        objects: dict[int, list[int]] = {}
        for number in _in_order(topology):
            objects.setdefault(key(by_number[number]), []).append(number)
        if cores == list(objects.values()):
            return Form("map-by", f"--map-by ppr:1:{kind} --bind-to {kind}")
        per = len(cores) // len(objects)
        parts = [
            held[rank * size : (rank + 1) * size]
            for held in objects.values()
            for rank in range(per)
        ]
        if cores == parts and {len(part) for part in parts} == {size}:
            divided = divided or f"--map-by ppr:{per}:{kind}:pe={size} --bind-to core"
    if divided:
        return Form("map-by", divided)
    return Form("map-by", None, "the ranks are not equal parts, in order, of sockets or domains")


def _bound(plan: Plan) -> bool:
    """Whether the plan binds every rank."""
    return plan.policy != "none" and all(one.cpus for one in plan.ranks)


def _in_order(topology: Topology) -> list[int]:
    """Cores as hwloc and Slurm count them: by socket, domain and core, each by its lowest CPU."""
    socket: dict[int, int] = {}
    domain: dict[tuple[int, int], int] = {}
    for core in topology.cores:
        first = core.cpus[0]
        socket[core.socket] = min(first, socket.get(core.socket, first))
        key = core.socket, core.domain
        domain[key] = min(first, domain.get(key, first))
    ordered = sorted(
        topology.cores,
        key=lambda one: (socket[one.socket], domain[one.socket, one.domain], one.cpus[0]),
    )
    return [core.number for core in ordered]


def _whole_cores(topology: Topology, plan: Plan) -> tuple[list[list[int]], str]:
    """Return each rank's cores in order, or the reason why whole cores do not say the plan."""
    if not _bound(plan):
        return [], _NOT_BOUND
    if topology.source in PARTIAL:
        return [], f"{topology.source} does not tell of all cores, so that they cannot be counted"
    if not plan.whole:
        return [], _NOT_WHOLE
    threads = {core.number: core.cpus for core in topology.cores}
    order = {core: place for place, core in enumerate(_in_order(topology))}
    found: list[list[int]] = []
    for one in plan.ranks:
        if list(one.cpus) != sorted(cpu for core in one.cores for cpu in threads[core]):
            return [], f"rank {one.local_rank} does not have all hardware threads of its cores"
        found.append(sorted(one.cores, key=order.__getitem__))
    if len({core for part in found for core in part}) < sum(len(part) for part in found):
        return [], "ranks share a core"
    return found, ""
