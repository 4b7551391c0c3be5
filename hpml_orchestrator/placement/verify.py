"""Compares the observed ranks of a node with its plan, and lists the faults.

These functions are pure: they read no clock, no file and no process. Cores of another domain are
right if the plan lends them.

The main process of a rank must be able to use all of the rank's CPUs, all its threads together; a
single thread may be bound to fewer. A process outside of the rank's CPUs is a fault. A process on
only some of them is right (a loader worker bound to one core), unless more busy processes are on
these CPUs than they have cores. If a wrapper has started several programs on different CPUs, it has
divided the rank's CPUs, and each program may be on some of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import counted
from hpml_orchestrator.placement.gpus import gpu_name, local_domains, visible_devices
from hpml_orchestrator.placement.machine import Machine
from hpml_orchestrator.placement.proof import NodeProof, RankProof
from hpml_orchestrator.placement.report import ranks_text
from hpml_orchestrator.topology.cpulist import format_list

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hpml_orchestrator.placement.model import Plan
    from hpml_orchestrator.placement.proof import Process, Seen
    from hpml_orchestrator.topology.model import Topology

_WORK_LOAD = 0.02  # CPUs kept busy, from which a process counts as at work
_FULL_LOAD = 0.9  # of each core, from which processes wait for each other
_SHOWN_CHARS = 60
_NEAR_POLICIES = ("gpu-local", "numa", "socket")


@dataclass(frozen=True)
class NodeContext:
    """The inputs of a node's plan besides its topology."""

    node: str  # Slurm's name of it
    verify: str  # `strict`, `warn` or `off`
    allowed: tuple[int, ...]  # CPUs that the job may use there
    # The job's CUDA_VISIBLE_DEVICES (or ROCR_VISIBLE_DEVICES) there; None if not set
    visible: str | None = None
    hidden: frozenset[str] = frozenset()  # PCI addresses of GPUs that a cgroup hides from the job
    ranks_per_gpu: int = 1  # how many ranks are meant to share a GPU


def judge(
    topology: Topology, plan: Plan, seen: Iterable[Seen], context: NodeContext, *, looks: int = 0
) -> NodeProof:
    """Compare the observed ranks with the plan; return where they run and their faults.

    The policy `none` has no faults. Ranks that were not observed are left out: they may start
    later, so only the job's end shows whether one is missing.
    """
    node = _Node(topology, plan, context)
    ranks = [_Rank(node, rank) for rank in sorted(seen, key=lambda r: (r.local_rank, r.rank))]
    warnings = list(plan.warnings)
    if plan.policy != "none":
        for rank in ranks:
            rank.wrong += _start_faults(node, rank)
            rank.wrong += _cpu_faults(node, rank, warnings)
            rank.wrong += _gpu_faults(node, rank)
            if rank.seen.note:
                warnings.append(f"rank {rank.seen.rank}: {rank.seen.note}")
        _add_shared_gpus(node, ranks)
        _add_shared_cores(node, ranks)
    return NodeProof(
        node=context.node,
        policy=plan.policy,
        verify=context.verify,
        expected=len(plan.ranks),
        ranks=tuple(replace(rank.proof, wrong=tuple(rank.wrong)) for rank in ranks),
        warnings=tuple(dict.fromkeys(warnings)),
        looks=looks,
    )


class _Node:
    """The facts about the node that the checks of all ranks use."""

    def __init__(self, topology: Topology, plan: Plan, context: NodeContext) -> None:
        self.topology = topology
        self.plan = plan
        self.context = context
        self.machine = Machine(topology, None, smt=True)
        self.core_of = {cpu: core.number for core in topology.cores for cpu in core.cpus}
        self.gpus = visible_devices(topology, context.visible, context.hidden)
        # A CUDA process can use only one MIG instance, whatever its list is.
        known = [gpu for gpu in self.gpus if gpu]
        self.is_divided = bool(known) and all(gpu.parent for gpu in known)
        self.is_scarce = len(self.cores(context.allowed)) < len(plan.ranks)

    @property
    def ranks_per_gpu(self) -> int:
        """How many ranks may share a device; unlimited if the job got no list of GPUs."""
        if self.context.visible is None and self.gpus:
            return max(self.context.ranks_per_gpu, -(-len(self.plan.ranks) // len(self.gpus)))
        return self.context.ranks_per_gpu

    def cores(self, cpus: Iterable[int]) -> frozenset[int]:
        """Return the physical cores that the CPUs belong to."""
        return frozenset(self.core_of[cpu] for cpu in cpus if cpu in self.core_of)


class _Rank:
    """One rank: the observation, the plan, and the CPUs and GPU that it has."""

    def __init__(self, node: _Node, seen: Seen) -> None:
        self.seen = seen
        self.wrong: list[str] = []
        in_plan = 0 <= seen.local_rank < len(node.plan.ranks)
        self.plan = node.plan.ranks[seen.local_rank] if in_plan else None
        self.own = frozenset(self.plan.cpus if self.plan else ())
        self.main = frozenset(seen.main.cpus if seen.main else seen.cpus)
        self.outside = [p for p in seen.others if self.own and not self.own >= set(p.cpus)]
        self.cpus = self.main.union(*(process.cpus for process in self.outside))
        # A job that was given no GPUs has none, whatever its ranks' lists show.
        visible = "" if node.context.visible == "" else seen.visible
        self.gpus = visible_devices(node.topology, visible, node.context.hidden)
        self.hides_gpus = 0 < len(self.gpus) < len(node.gpus) and not node.is_divided
        self.gpu = self.gpus[seen.local_rank % len(self.gpus)] if self.gpus else None
        self.domains = node.machine.domains_of_cpus(self.cpus)
        self.near = local_domains(node.topology, node.machine, self.gpu) if self.gpu else ()
        self.proof = RankProof(
            rank=seen.rank,
            local_rank=seen.local_rank,
            pid=seen.pid,
            gpu=gpu_name(self.gpu) if self.gpu else None,
            uuid=self.gpu.uuid if self.gpu else "",
            cpus=format_list(self.cpus),
            cores=len(node.cores(self.cpus)),
            numa=self.domains,
            memory=seen.memory,
            nic=seen.nic,
            distance=node.machine.farthest(self.near, self.domains),
            threads=seen.threads,
            live=seen.live,
        )
        self.place = (
            f"CPUs {self.proof.cpus or 'unknown'} (NUMA {format_list(self.domains) or '-'})"
        )


def _start_faults(node: _Node, rank: _Rank) -> list[str]:
    seen, faults = rank.seen, []
    if rank.plan is None:
        faults.append(f"is not in the plan, which has {len(node.plan.ranks)} ranks for this node")
    if seen.error:
        faults.append(f"hpml-bind: {seen.error}")
    allowed = set(node.context.allowed)
    if seen.inherited is not None and rank.own and set(seen.inherited) not in (allowed, rank.own):
        faults.append(
            f"was bound twice: it was started on CPUs {format_list(seen.inherited)}, neither on "
            f"all of the job's ({format_list(allowed)}) nor on its own ({format_list(rank.own)}): "
            "its launcher binds, too"
        )
    if seen.child_cpus is not None and set(seen.child_cpus) != set(seen.cpus):
        faults.append(
            f"a process that it forked may run on CPUs {format_list(seen.child_cpus)}, itself on "
            f"{format_list(seen.cpus)}"
        )
    return faults


def _cpu_faults(node: _Node, rank: _Rank, warnings: list[str]) -> list[str]:
    """Return the faults of its CPUs: a rank must run on exactly the CPUs of its plan."""
    seen, plan, main, own = rank.seen, rank.plan, rank.main, rank.own
    if plan is None or not own or not rank.cpus:
        return []
    if not own >= main:
        return [_elsewhere(node, rank)]
    faults = [
        f"{_process(process)} runs on CPUs {format_list(process.cpus)}, outside of the rank's "
        f"{format_list(own)}"
        for process in rank.outside[:1]
    ]
    needed = 1 + plan.loader_workers
    openmp = seen.main.openmp if seen.main else ""
    first = frozenset(seen.main.first if seen.main else ())
    if openmp and plan.loader_workers and len(node.cores(first)) < needed:
        faults.append(
            f"{openmp}: OpenMP holds its main thread on CPUs {format_list(first)}, and with it the "
            f"{plan.loader_workers} loader workers that it forks"
        )
    elif main < own and openmp:
        warnings.append(
            f"rank {seen.rank}: {openmp}: OpenMP holds its threads on CPUs {format_list(main)} of "
            f"its own {format_list(own)}, and what it forks on {format_list(first)}"
        )
    elif main < own and not _divides(rank):
        who = "" if seen.main is None or seen.main.pid == seen.pid else f"{_process(seen.main)} "
        faults.append(
            f"{who}runs on CPUs {format_list(main)} alone, not on its own {plan.cpu_list()}"
        )
    elif len(node.cores(main)) < needed:
        faults.append(
            f"has {counted(len(node.cores(main)), 'core')}: itself and "
            f"{counted(plan.loader_workers, 'loader worker')} need {needed}"
        )
    is_near = node.plan.policy not in _NEAR_POLICIES or set(rank.domains) & set(rank.near)
    if node.context.verify == "strict" and not faults and rank.gpu and rank.near and not is_near:
        faults.append(
            f"runs on {rank.place}, its GPU {gpu_name(rank.gpu)} is next to NUMA "
            f"{format_list(rank.near)}, where the job has no CPU: request whole nodes "
            "(resources.exclusive)"
        )
    return faults + _crowds(node, rank)


def _divides(rank: _Rank) -> bool:
    if rank.seen.main is None or rank.seen.main.pid == rank.seen.pid:
        return False
    return any(other.cpus and rank.main.isdisjoint(other.cpus) for other in rank.seen.others)


def _elsewhere(node: _Node, rank: _Rank) -> str:
    """Return the sentence about a rank that runs on CPUs that it was not assigned."""
    own = f"{format_list(rank.own)}"
    if node.plan.policy in _NEAR_POLICIES and rank.gpu and rank.near and rank.domains and rank.plan:
        planned, seen = rank.plan.distance, rank.proof.distance
        has_own_gpu = gpu_name(rank.gpu) == rank.plan.gpu
        is_farther = planned is not None and seen is not None and seen > planned
        if (has_own_gpu and is_farther) or not set(rank.domains) & set(rank.near):
            return (
                f"runs on {rank.place}, its GPU {gpu_name(rank.gpu)} is next to NUMA "
                f"{format_list(rank.near)}{f', its own CPUs are {own}' if has_own_gpu else ''}"
            )
    return f"runs on {rank.place}, not on its own {own}"


def _crowds(node: _Node, rank: _Rank) -> list[str]:
    working: dict[tuple[int, ...], list[Process]] = {}
    for process in rank.seen.others:
        if set(process.cpus) < rank.own and process.load >= _WORK_LOAD:
            working.setdefault(process.cpus, []).append(process)
    main = rank.seen.main
    why = f" ({main.openmp}: OpenMP holds what it forks there)" if main and main.openmp else ""
    return [
        f"{len(processes)} of its processes, such as {_process(processes[0])}, share CPUs "
        f"{format_list(cpus)}{why}"
        for cpus, processes in working.items()
        if len(processes) > len(node.cores(cpus))
        and sum(process.load for process in processes) >= _FULL_LOAD * len(node.cores(cpus))
    ]


def _gpu_faults(node: _Node, rank: _Rank) -> list[str]:
    """Return the faults of its GPUs: it must see all GPUs of the job and have the planned one."""
    value = "not set" if rank.seen.visible is None else _shown(repr(rank.seen.visible))
    visible = f"(its list of visible devices is {value})"
    if rank.hides_gpus:
        count = f"{len(rank.gpus)} of the job's {len(node.gpus)} GPUs"
        return [f"sees {count} {visible}: the others' memory is out of its reach"]
    faults = []
    if node.gpus and not rank.gpus:
        faults.append(f"sees no GPU {visible}")
    foreign = {gpu.name for gpu in rank.gpus if gpu} - {gpu.name for gpu in node.gpus if gpu}
    if foreign and node.gpus:
        faults.append(f"sees {', '.join(sorted(foreign))}, not the job's {visible}")
    if rank.gpu and rank.plan and rank.plan.gpu:
        planned = (rank.plan.gpu, rank.plan.gpu_uuid)
        if (gpu_name(rank.gpu), rank.gpu.uuid) != planned:
            faults.append(f"has GPU {gpu_name(rank.gpu)}, its own is {rank.plan.gpu} {visible}")
    return faults


def _add_shared_gpus(node: _Node, ranks: Sequence[_Rank]) -> None:
    on_gpu: dict[str, list[_Rank]] = {}
    for rank in ranks:
        if rank.gpu and not rank.hides_gpus:  # hidden GPUs are a fault already
            on_gpu.setdefault(rank.gpu.name, []).append(rank)
    for sharing in on_gpu.values():
        if len(sharing) > node.ranks_per_gpu:
            for rank in sharing:
                others = [other.seen.rank for other in sharing if other is not rank]
                rank.wrong.append(f"shares GPU {rank.proof.gpu} with {ranks_text(others)}")


def _add_shared_cores(node: _Node, ranks: Sequence[_Rank]) -> None:
    """Add a fault to ranks that run on physical cores of other ranks.

    A rank that stays on its cores has no fault if another rank moves there.
    """
    for rank in ranks:
        if node.is_scarce or not rank.own or rank.cpus <= rank.own:
            continue
        cores = node.cores(rank.cpus)
        others = {r.seen.rank for r in ranks if r is not rank and cores & node.cores(r.cpus)}
        if others:
            rank.wrong.append(f"shares physical cores with {ranks_text(sorted(others))}")


def _process(process: Process) -> str:
    return f"its process {process.pid} ({_shown(process.name)})"


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 1]}…"
