"""Compare where ranks run with the plan, and report the binding as records and text."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypedDict

from hpml_orchestrator.errors import counted
from hpml_orchestrator.placement.model import Machine, gpu_name, local_domains, visible_devices
from hpml_orchestrator.topology.cpulist import format_list

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hpml_orchestrator.placement.model import Plan
    from hpml_orchestrator.topology.model import Topology

# Records: the observed ranks of one node, and the proof of their binding.

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Process:
    """One observed process of a rank."""

    pid: int  # process ID
    name: str  # command name in the kernel
    cpus: tuple[int, ...]  # CPUs that any of its threads may use
    first: tuple[int, ...] = ()  # CPUs of its first thread, which forked processes inherit
    load: float = 0.0  # busy CPUs since the last observation; 0 at the first
    # Environment variable that makes OpenMP bind threads, such as `OMP_PROC_BIND=close`; empty if
    # none does
    openmp: str = ""


@dataclass(frozen=True)
class Seen:
    """One rank as observed, independent of the plan."""

    local_rank: int  # number among the ranks of its node
    rank: int  # number among all ranks
    pid: int  # process ID
    # CPUs allowed when hpml-bind started; None if unknown
    inherited: tuple[int, ...] | None = None
    cpus: tuple[int, ...] = ()  # CPUs that hpml-bind read back after setting them
    # CPUs allowed to a child of hpml-bind; None if it forked none
    child_cpus: tuple[int, ...] | None = None
    # The process that does the rank's work, perhaps started by a wrapper; None if no process could
    # be read
    main: Process | None = None
    # Its other processes, such as wrappers and loader workers
    others: tuple[Process, ...] = ()
    # CUDA_VISIBLE_DEVICES (or ROCR_VISIBLE_DEVICES) of its main process; None if not set
    visible: str | None = None
    memory: str = ""  # memory policy, such as `prefer:3`; empty if unknown
    threads: int | None = None  # OMP_NUM_THREADS; None if not set
    nic: str = ""  # its network card; empty without one
    live: bool = False  # whether the live process was read, not only hpml-bind's record
    error: str = ""  # why hpml-bind could not bind the rank; empty if it could
    # Harmless failure, such as a memory policy that a container refuses
    note: str = ""


@dataclass(frozen=True)
class RankProof:
    """Where one rank ran, and the faults of its binding."""

    rank: int  # number among all ranks
    local_rank: int  # number among the ranks of its node
    pid: int = 0  # process ID
    gpu: str | None = None  # PCI address (or name) of the device it uses; None without one
    uuid: str = ""  # UUID of that device; empty if unknown
    cpus: str = ""  # CPUs that it may run on, in the kernel's list format
    cores: int = 0  # number of physical cores of these CPUs
    numa: tuple[int, ...] = ()  # NUMA domains of these CPUs
    memory: str = ""  # memory policy, such as `prefer:3`; empty if unknown
    nic: str = ""  # its network card; empty without one
    # Largest NUMA distance from its device to its CPUs; None if unknown
    distance: int | None = None
    threads: int | None = None  # OMP_NUM_THREADS; None if not set
    live: bool = False  # whether the live process was read
    wrong: tuple[str, ...] = ()  # faults, one sentence each; empty if it runs as planned


@dataclass(frozen=True)
class NodeProof:
    """The proof of one node: where its ranks run."""

    node: str  # name in Slurm
    policy: str  # of the plan
    verify: str  # `strict`, `warn` or `off`
    expected: int  # number of ranks in the plan
    ranks: tuple[RankProof, ...] = ()  # observed ranks, by local rank
    warnings: tuple[str, ...] = ()  # from plan and topology
    looks: int = 0  # number of times that live processes were read
    time: float = 0.0  # last change, seconds since the epoch

    @property
    def right(self) -> bool:
        """Whether no rank has a fault."""
        return not any(rank.wrong for rank in self.ranks)


def proof_json(proof: NodeProof) -> dict[str, object]:
    """Return a proof as plain data for `json.dumps`."""
    return {"schema_version": SCHEMA_VERSION, **asdict(proof)}


def proof_of_json(data: Mapping[str, object]) -> NodeProof:
    """Return the proof in plain data; unknown fields are ignored.

    Raises:
        ValueError: the data are not a proof.
    """
    try:
        ranks = data.get("ranks", [])
        if not isinstance(ranks, (list, tuple)):
            raise TypeError("its ranks are not a list")
        proofs = tuple(RankProof(**_values(RankProof, rank)) for rank in ranks)
        return NodeProof(**_values(NodeProof, {**data, "ranks": proofs}))
    except (TypeError, AttributeError) as error:
        raise ValueError(f"not a proof of a node's binding: {error}") from None


def _values(kind: type[NodeProof | RankProof], data: Mapping[str, object]) -> dict[str, Any]:
    names = {field.name for field in fields(kind)} & set(data)
    values = {name: data[name] for name in names}
    return {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}


# Text: how ranks are bound, and which ranks are not bound as planned.

COLUMNS = ("RANK", "NODE", "GPU", "CPUS", "NUMA", "WRONG")
_ROWS_MAX = 64
_CELL_CHARS = 40
_WARNINGS_MAX = 20


class PlanFigures(TypedDict):
    """The figures of a node's plan that `plan_lines` prints."""

    policy: str
    ranks: int  # number of ranks
    cores: list[int]  # distinct numbers of cores per rank, ascending
    threads: list[int]  # distinct values of OMP_NUM_THREADS; empty if hpml does not set it
    warnings: list[str]


def plan_figures(plan: Plan, *, sets_threads: bool) -> PlanFigures:
    """Return the figures of a node's plan that `plan_lines` prints, as plain data."""
    return {
        "policy": plan.policy,
        "ranks": len(plan.ranks),
        "cores": sorted({len(rank.cores) for rank in plan.ranks}),
        "threads": sorted({rank.threads for rank in plan.ranks}) if sets_threads else [],
        "warnings": list(plan.warnings),
    }


def plan_lines(figures: Sequence[tuple[str, PlanFigures]]) -> list[str]:
    """Return one line about the binding of all ranks, followed by the nodes' warnings."""
    lines = []
    bound = [plan for _, plan in figures if plan["policy"] != "none"]
    if bound:
        cores = [count for plan in bound for count in plan["cores"]]
        threads = [count for plan in bound for count in plan["threads"]]
        policies = ", ".join(dict.fromkeys(plan["policy"] for plan in bound))
        ranks = sum(plan["ranks"] for plan in bound)
        lines.append(f"{counted(ranks, 'rank')} bound ({policies}), {_each(cores, threads)}")
    warnings = by_sentence((node, plan["warnings"]) for node, plan in figures)
    lines += [f"warning: {warning}" for warning in warnings[:_WARNINGS_MAX]]
    if len(warnings) > _WARNINGS_MAX:
        lines.append(f"… and {len(warnings) - _WARNINGS_MAX} more warnings: `hpml show` has them")
    return lines


def by_sentence(warnings: Iterable[tuple[str, Iterable[str]]]) -> list[str]:
    """Return each sentence once, prefixed with its first node and the number of other nodes.

    >>> by_sentence([("n1", ["odd", "far"]), ("n2", ["far"])])
    ['n1: odd', 'n1 and 1 more: far']
    """
    nodes: dict[str, list[str]] = {}
    for node, sentences in warnings:
        for sentence in dict.fromkeys(sentences):
            nodes.setdefault(sentence, []).append(node)
    lines = []
    for sentence, where in nodes.items():
        more = f" and {len(where) - 1} more" if len(where) > 1 else ""
        lines.append(f"{where[0]}{more}: {sentence}")
    return lines


def ranks_text(numbers: Sequence[int]) -> str:
    """Return ranks as text, such as `rank 3` or `ranks 0-2`."""
    return f"rank{'s' if len(numbers) > 1 else ''} {format_list(numbers)}"


def node_line(proof: NodeProof) -> str:
    """Return the line about a node with wrongly bound ranks."""
    count = counted(len(proof.ranks), "rank")
    if len(proof.ranks) != proof.expected:
        count = f"{len(proof.ranks)} of {proof.expected} ranks"
    wrong = sum(bool(rank.wrong) for rank in proof.ranks)
    threads = [rank.threads or 0 for rank in proof.ranks]
    each = _each([rank.cores for rank in proof.ranks], threads if all(threads) else [])
    return f"{proof.node}: {count} bound ({proof.policy}), {each}, {wrong} wrong"


def wrong_rows(proof: NodeProof) -> list[tuple[str, ...]]:
    """Return one row per fault with the columns of `COLUMNS`; only the first row names the rank."""
    rows: list[tuple[str, ...]] = []
    for rank in proof.ranks:
        cpus = rank.cpus if len(rank.cpus) <= _CELL_CHARS else f"{rank.cpus[: _CELL_CHARS - 1]}…"
        numa = format_list(rank.numa)
        cells = (str(rank.rank), proof.node, rank.gpu or "-", cpus or "-", numa or "-")
        for place, sentence in enumerate(rank.wrong):
            rows.append((*(cells if place == 0 else ("",) * len(cells)), sentence))
    return rows


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the lines of the table of faults."""
    shown = [COLUMNS, *rows[:_ROWS_MAX]]
    widths = [max(map(len, column)) for column in list(zip(*shown))[:-1]]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[-1]])
        for row in shown
    ]
    if len(rows) > _ROWS_MAX:
        lines.append(f"… and {len(rows) - _ROWS_MAX} more")
    return lines


def _each(cores: Sequence[int], threads: Sequence[int]) -> str:
    return (
        " and ".join(
            _span(counts, noun) for counts, noun in ((cores, "core"), (threads, "thread")) if counts
        )
        + " each"
    )


def _span(counts: Sequence[int], noun: str) -> str:
    least, most = min(counts), max(counts)
    return counted(most, noun) if least == most else f"{least}-{most} {noun}s"


# Verification: compare observed ranks with the plan.

_WORK_LOAD = 0.02  # busy CPUs from which a process counts as working
_FULL_LOAD = 0.9  # busy share of each core from which processes compete
_SHOWN_CHARS = 60
_NEAR_POLICIES = ("gpu-local", "numa", "socket")


@dataclass(frozen=True)
class NodeContext:
    """The inputs of a node's plan besides its topology."""

    node: str  # name in Slurm
    verify: str  # `strict`, `warn` or `off`
    allowed: tuple[int, ...]  # CPUs that the job may use on the node
    # The job's CUDA_VISIBLE_DEVICES (or ROCR_VISIBLE_DEVICES) on the node; None if not set
    visible: str | None = None
    hidden: frozenset[str] = frozenset()  # PCI addresses of GPUs that a cgroup hides from the job
    ranks_per_gpu: int = 1  # number of ranks intended to share a GPU


def judge(
    topology: Topology, plan: Plan, seen: Iterable[Seen], context: NodeContext, *, looks: int = 0
) -> NodeProof:
    """Compare the observed ranks with the plan; return where they run and their faults.

    With the policy `none` there are no faults. Ranks that were not observed are omitted: they may
    start later, so only the end of the job shows whether one is missing.
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
    """Facts about the node that all checks use."""

    def __init__(self, topology: Topology, plan: Plan, context: NodeContext) -> None:
        self.topology = topology
        self.plan = plan
        self.context = context
        self.machine = Machine(topology, None, smt=True)
        self.core_of = {cpu: core.number for core in topology.cores for cpu in core.cpus}
        self.gpus = visible_devices(topology, context.visible, context.hidden)
        # A CUDA process can use only one MIG instance, even if its list has several.
        known = [gpu for gpu in self.gpus if gpu]
        self.is_divided = bool(known) and all(gpu.parent for gpu in known)
        self.is_scarce = len(self.cores(context.allowed)) < len(plan.ranks)

    @property
    def ranks_per_gpu(self) -> int:
        """Number of ranks that may share a device; unlimited if the job got no list of GPUs."""
        if self.context.visible is None and self.gpus:
            return max(self.context.ranks_per_gpu, -(-len(self.plan.ranks) // len(self.gpus)))
        return self.context.ranks_per_gpu

    def cores(self, cpus: Iterable[int]) -> frozenset[int]:
        """Return the physical cores of the CPUs."""
        return frozenset(self.core_of[cpu] for cpu in cpus if cpu in self.core_of)


class _Rank:
    """One rank: observation, plan, and its actual CPUs and GPU."""

    def __init__(self, node: _Node, seen: Seen) -> None:
        self.seen = seen
        self.wrong: list[str] = []
        in_plan = 0 <= seen.local_rank < len(node.plan.ranks)
        self.plan = node.plan.ranks[seen.local_rank] if in_plan else None
        self.own = frozenset(self.plan.cpus if self.plan else ())
        self.main = frozenset(seen.main.cpus if seen.main else seen.cpus)
        self.outside = [p for p in seen.others if self.own and not self.own >= set(p.cpus)]
        self.cpus = self.main.union(*(process.cpus for process in self.outside))
        # A job without GPUs has none, even if its ranks' lists name some.
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
    """Return the faults of its CPUs: a rank must run on exactly its planned CPUs."""
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
    """Return the fault of a rank that runs on CPUs not assigned to it."""
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
    """Return the faults of its GPUs: it must see all of the job's and use the planned one."""
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
        if rank.gpu and not rank.hides_gpus:  # hidden GPUs are reported already
            on_gpu.setdefault(rank.gpu.name, []).append(rank)
    for sharing in on_gpu.values():
        if len(sharing) > node.ranks_per_gpu:
            for rank in sharing:
                others = [other.seen.rank for other in sharing if other is not rank]
                rank.wrong.append(f"shares GPU {rank.proof.gpu} with {ranks_text(others)}")


def _add_shared_cores(node: _Node, ranks: Sequence[_Rank]) -> None:
    """Add a fault to each rank that runs on physical cores of other ranks.

    A rank on its own cores has no fault if another rank moves there.
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
