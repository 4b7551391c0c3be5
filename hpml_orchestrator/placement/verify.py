"""The judgement: from a node's plan and what was seen of its ranks to what is wrong, in sentences.

Pure: it reads no clock, no file and no process. What a rank has is taken from what was seen; the
plan says what it should have. Cores of another domain that the plan lends are right.

Of a rank's processes one is its main process, which must be able to use all of the rank's CPUs,
with all of its threads together: a single thread may be held on fewer. Any process outside of the
rank's CPUs is wrong. One on fewer of them is right (a loader worker with a core of its own), unless
more such processes work on the same CPUs than those have cores, and keep these busy. Where a
wrapper has started several programs on different CPUs, it has divided those of the rank, and any
of them may be on fewer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Optional

from hpml_orchestrator.errors import counted
from hpml_orchestrator.placement.cpulist import cpu_list
from hpml_orchestrator.placement.gpus import gpu_name, local_domains
from hpml_orchestrator.placement.machine import Machine
from hpml_orchestrator.placement.proof import NodeProof, RankProof
from hpml_orchestrator.placement.told import ranks_text
from hpml_orchestrator.placement.visible import visible_devices

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hpml_orchestrator.placement.model import Plan, RankPlan
    from hpml_orchestrator.placement.proof import Process, Seen
    from hpml_orchestrator.topology.model import Gpu, Topology

__all__ = ["Circumstances", "judge"]

_WORK_LOAD = 0.02  # CPUs kept busy, from which a process counts as at work
_FULL_LOAD = 0.9  # of each core, from which processes wait for each other
_SHOWN_CHARS = 60
_NEAR_POLICIES = ("gpu-local", "numa", "socket")


@dataclass(frozen=True)
class Circumstances:
    """What a node's ranks were planned with.

    Attributes:
        node: Slurm's name of it.
        verify: `strict`, `warn` or `off`.
        allowed: CPUs that the job may use there.
        visible: the job's CUDA_VISIBLE_DEVICES (or ROCR_VISIBLE_DEVICES) there; None where not set.
        hidden: PCI addresses of GPUs that a cgroup hides from the job.
        ranks_per_gpu: how many ranks are meant to share a GPU.
    """

    node: str
    verify: str
    allowed: tuple[int, ...]
    visible: Optional[str] = None  # noqa: UP045 - runs on Python 3.9
    hidden: frozenset[str] = frozenset()
    ranks_per_gpu: int = 1


def judge(
    topology: Topology, plan: Plan, seen: Iterable[Seen], around: Circumstances, *, looks: int = 0
) -> NodeProof:
    """Say of every rank that was seen where it runs, and what is wrong with that.

    With the policy `none` it is said where they run, and nothing is wrong. Ranks that were not seen
    are left out: whether they should have been is known at the job's end alone.

    Args:
        topology: the node.
        plan: its plan.
        seen: the ranks, one each.
        around: what the plan was made with.
        looks: how often live processes were looked at, for the record.
    """
    ranks = sorted(seen, key=lambda one: (one.local_rank, one.rank))
    node = _Node(topology, plan, around)
    cases = [_Case(node, one) for one in ranks]
    warnings = list(plan.warnings)
    told: list[list[str]] = [[] for _ in cases]
    if plan.policy != "none":
        for case, faults in zip(cases, told):
            faults.extend(_start_faults(node, case))
            faults.extend(_cpu_faults(node, case, warnings))
            faults.extend(_gpu_faults(node, case))
            if case.seen.note:
                warnings.append(f"rank {case.seen.rank}: {case.seen.note}")
        _shared_gpus(node, cases, told)
        _shared_cores(node, cases, told)
    return NodeProof(
        node=around.node,
        policy=plan.policy,
        verify=around.verify,
        expected=len(plan.ranks),
        ranks=tuple(replace(case.proof, wrong=tuple(wrong)) for case, wrong in zip(cases, told)),
        warnings=tuple(dict.fromkeys(warnings)),
        looks=looks,
    )


class _Node:
    """What all ranks of the node are judged by."""

    def __init__(self, topology: Topology, plan: Plan, around: Circumstances) -> None:
        self.topology = topology
        self.plan = plan
        self.around = around
        self.machine = Machine(topology, None, smt=True)
        self.core_of = {cpu: core.number for core in topology.cores for cpu in core.cpus}
        self.devices = visible_devices(topology, around.visible, around.hidden)
        # Of several MIG instances a process sees one alone, whatever its list is.
        known = [one for one in self.devices if one]
        self.divided = bool(known) and all(one.parent for one in known)
        usable = {self.core_of[cpu] for cpu in around.allowed if cpu in self.core_of}
        self.scarce = len(usable) < len(plan.ranks)

    @property
    def ranks_on_a_gpu(self) -> int:
        """How many ranks may have the same device.

        Where nobody gave the job any GPUs, it may not be meant to use them.
        """
        meant = self.around.ranks_per_gpu
        if self.around.visible is None and self.devices:
            return max(meant, -(-len(self.plan.ranks) // len(self.devices)))
        return meant

    def cores(self, cpus: Iterable[int]) -> frozenset[int]:
        """The physical cores that some CPUs are in."""
        return frozenset(self.core_of[cpu] for cpu in cpus if cpu in self.core_of)


class _Case:
    """One rank: what was seen, what was planned, and where that puts it."""

    def __init__(self, node: _Node, seen: Seen) -> None:
        self.seen = seen
        count = len(node.plan.ranks)
        known = 0 <= seen.local_rank < count
        self.plan: Optional[RankPlan] = node.plan.ranks[seen.local_rank] if known else None  # noqa: UP045
        self.own = frozenset(self.plan.cpus if self.plan else ())
        main = frozenset(seen.main.cpus if seen.main else seen.cpus)
        self.strays = [one for one in seen.others if self.own and not self.own >= set(one.cpus)]
        self.cpus = main.union(*(one.cpus for one in self.strays))
        # A job that was given no GPUs has none, whatever its ranks' lists show.
        visible = "" if node.around.visible == "" else seen.visible
        self.devices = visible_devices(node.topology, visible, node.around.hidden)
        self.hides_gpus = 0 < len(self.devices) < len(node.devices) and not node.divided
        self.gpu = self.devices[seen.local_rank % len(self.devices)] if self.devices else None
        self.domains = node.machine.domains_of_cpus(self.cpus)
        self.near = local_domains(node.topology, node.machine, self.gpu) if self.gpu else ()
        self.proof = RankProof(
            rank=seen.rank,
            local_rank=seen.local_rank,
            pid=seen.pid,
            gpu=gpu_name(self.gpu) if self.gpu else None,
            uuid=self.gpu.uuid if self.gpu else "",
            cpus=cpu_list(self.cpus),
            cores=len(node.cores(self.cpus)),
            numa=self.domains,
            memory=seen.memory,
            nic=seen.nic,
            distance=node.machine.farthest(self.near, self.domains),
            threads=seen.threads,
            live=seen.live,
        )

    @property
    def place(self) -> str:
        """Where it runs, such as `CPUs 0-7 (NUMA 0)`."""
        return f"CPUs {self.proof.cpus or 'unknown'} (NUMA {cpu_list(self.domains) or '-'})"


def _start_faults(node: _Node, case: _Case) -> list[str]:
    """What hpml-bind itself found, before the rank began."""
    seen, found = case.seen, []
    if case.plan is None:
        found.append(f"is not in the plan, which has {len(node.plan.ranks)} ranks for this node")
    if seen.error:
        found.append(f"hpml-bind: {seen.error}")
    allowed = set(node.around.allowed)
    if seen.inherited is not None and case.own and set(seen.inherited) not in (allowed, case.own):
        found.append(
            f"was bound twice: it was started on CPUs {cpu_list(seen.inherited)}, neither on all "
            f"of the job's ({cpu_list(allowed)}) nor on its own ({cpu_list(case.own)}): its "
            "launcher binds, too"
        )
    if seen.child_cpus is not None and set(seen.child_cpus) != set(seen.cpus):
        found.append(
            f"a process that it forked may run on CPUs {cpu_list(seen.child_cpus)}, itself on "
            f"{cpu_list(seen.cpus)}"
        )
    return found


def _cpu_faults(node: _Node, case: _Case, warnings: list[str]) -> list[str]:
    """Whether it runs on the CPUs that are its own, all of them and no others."""
    seen, plan = case.seen, case.plan
    if plan is None or not case.own or not case.cpus:
        return []
    main = frozenset(seen.main.cpus if seen.main else seen.cpus)
    needed = 1 + plan.loader_workers
    found = []
    if not case.own >= main:
        return [_elsewhere(node, case)]
    found += [
        f"{_process(one)} runs on CPUs {cpu_list(one.cpus)}, outside of its own "
        f"{cpu_list(case.own)}"
        for one in case.strays[:1]
    ]
    held = seen.main.openmp if seen.main else ""
    first = frozenset(seen.main.first if seen.main else ())
    if held and plan.loader_workers and len(node.cores(first)) < needed:
        found.append(
            f"{held}: OpenMP holds its main thread on CPUs {cpu_list(first)}, and with it the "
            f"{plan.loader_workers} loader workers that it forks"
        )
    elif main < case.own and held:
        warnings.append(
            f"rank {seen.rank}: {held}: OpenMP holds its threads on CPUs {cpu_list(main)} of its "
            f"own {cpu_list(case.own)}, and what it forks on {cpu_list(first)}"
        )
    elif main < case.own and not _divides(case, main):
        who = "" if seen.main is None or seen.main.pid == seen.pid else f"{_process(seen.main)} "
        found.append(f"{who}runs on CPUs {cpu_list(main)} alone, not on its own {plan.cpu_list()}")
    elif len(node.cores(main)) < needed:
        found.append(
            f"has {counted(len(node.cores(main)), 'core')}: itself and "
            f"{counted(plan.loader_workers, 'loader worker')} need {needed}"
        )
    if node.around.verify == "strict" and not found:
        found += _far_faults(node, case)
    return found + _crowds(node, case)


def _divides(case: _Case, main: frozenset[int]) -> bool:
    """Whether the rank has divided its CPUs: a shell, say, that starts a program on each core."""
    if case.seen.main is None or case.seen.main.pid == case.seen.pid:
        return False
    return any(one.cpus and main.isdisjoint(one.cpus) for one in case.seen.others)


def _far_faults(node: _Node, case: _Case) -> list[str]:
    """Whether the job has no CPU near the rank's GPU: a job that wants proof has none then."""
    if node.plan.policy not in _NEAR_POLICIES or case.gpu is None or not case.near:
        return []
    if set(case.domains) & set(case.near):
        return []
    near = f"its GPU {gpu_name(case.gpu)} is next to NUMA {cpu_list(case.near)}"
    ask = "ask for whole nodes (resources.exclusive)"
    return [f"runs on {case.place}, {near}, where the job has no CPU: {ask}"]


def _elsewhere(node: _Node, case: _Case) -> str:
    """The sentence of a rank that runs on CPUs that are not its own."""
    assert case.plan is not None  # noqa: S101 - whoever calls has seen to it
    planned, seen = case.plan.distance, case.proof.distance
    if node.plan.policy in _NEAR_POLICIES and case.gpu and case.near and case.domains:
        same = gpu_name(case.gpu) == case.plan.gpu
        farther = planned is not None and seen is not None and seen > planned
        if (same and farther) or not set(case.domains) & set(case.near):
            own = f", its own CPUs are {case.plan.cpu_list()}" if same else ""
            return (
                f"runs on {case.place}, its GPU {gpu_name(case.gpu)} is next to NUMA "
                f"{cpu_list(case.near)}{own}"
            )
    return f"runs on {case.place}, not on its own {case.plan.cpu_list()}"


def _crowds(node: _Node, case: _Case) -> list[str]:
    """Processes at work on so few of the rank's CPUs that they are in each other's way."""
    held: dict[tuple[int, ...], list[Process]] = {}
    for one in case.seen.others:
        if set(one.cpus) < case.own and one.load >= _WORK_LOAD:
            held.setdefault(one.cpus, []).append(one)
    main = case.seen.main
    why = f" ({main.openmp}: OpenMP holds what it forks there)" if main and main.openmp else ""
    return [
        f"{len(those)} of its processes, such as {_process(those[0])}, share CPUs {cpu_list(cpus)}"
        f"{why}"
        for cpus, those in held.items()
        if len(those) > len(node.cores(cpus))
        and sum(one.load for one in those) >= _FULL_LOAD * len(node.cores(cpus))
    ]


def _gpu_faults(node: _Node, case: _Case) -> list[str]:
    """Whether it sees all GPUs of the job on this node, and has the one that is its own."""
    seen, found = case.seen, []
    given = {one.name for one in node.devices if one}
    shown = {one.name for one in case.devices if one}
    value = "not set" if seen.visible is None else _shown(repr(seen.visible))
    told = f"(its list of visible devices is {value})"
    if node.devices and not case.devices:
        found.append(f"sees no GPU {told}")
    elif case.hides_gpus:
        found.append(
            f"sees {len(case.devices)} of the job's {len(node.devices)} GPUs {told}: the others' "
            "memory is out of its reach"
        )
        return found
    if shown - given and node.devices:
        found.append(f"sees {', '.join(sorted(shown - given))}, not the job's {told}")
    plan = case.plan
    if case.gpu and plan and plan.gpu and _key(case.gpu) != (plan.gpu, plan.gpu_uuid):
        found.append(f"has GPU {gpu_name(case.gpu)}, its own is {plan.gpu} {told}")
    return found


def _shared_gpus(node: _Node, cases: Sequence[_Case], told: Sequence[list[str]]) -> None:
    """Add to the faults of ranks that have one GPU together, more of them than are meant to."""
    on_gpu: dict[str, list[int]] = {}
    for place, case in enumerate(cases):
        if case.gpu and not case.hides_gpus:  # else it was said, and sharing follows from it
            on_gpu.setdefault(case.gpu.name, []).append(place)
    for places in on_gpu.values():
        if len(places) > node.ranks_on_a_gpu:
            for place in places:
                others = [cases[one].seen.rank for one in places if one != place]
                told[place].append(f"shares GPU {cases[place].proof.gpu} with {ranks_text(others)}")


def _shared_cores(node: _Node, cases: Sequence[_Case], told: Sequence[list[str]]) -> None:
    """Add to the faults of ranks that have come to physical cores of others.

    A rank on its own cores is not to blame for another that came there.
    """
    on_core: dict[int, list[int]] = {}
    for place, case in enumerate(cases):
        for core in node.cores(case.cpus):
            on_core.setdefault(core, []).append(place)
    for place, case in enumerate(cases):
        if node.scarce or not case.own or case.cpus <= case.own:
            continue
        met = {
            cases[other].seen.rank
            for core in node.cores(case.cpus)
            for other in on_core[core]
            if other != place
        }
        if met:
            told[place].append(f"shares physical cores with {ranks_text(sorted(met))}")


def _key(gpu: Gpu) -> tuple[str, str]:
    return (gpu_name(gpu), gpu.uuid)


def _process(one: Process) -> str:
    return f"its process {one.pid} ({_shown(one.name)})"


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 1]}…"
