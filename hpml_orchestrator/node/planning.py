"""Plan the binding of this node's ranks from its topology and the job's GPUs.

The agent plans for all ranks of its node; without an agent each rank plans, see `bind_alone`.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import HpmlError
from hpml_orchestrator.node.environment import integer
from hpml_orchestrator.node.kernel import prefer_memory, set_cpus
from hpml_orchestrator.node.processes import visible_of
from hpml_orchestrator.placement import planfile
from hpml_orchestrator.placement.model import VISIBLE_VARIABLES, Plan, RankPlan, visible_devices
from hpml_orchestrator.placement.planner import plan
from hpml_orchestrator.placement.verify import NodeContext
from hpml_orchestrator.records.files import write_json, write_text
from hpml_orchestrator.topology.cpulist import format_list, parse_list
from hpml_orchestrator.topology.model import full_address, topology_json
from hpml_orchestrator.topology.sysfs import list_gpus, read_sysfs

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from hpml_orchestrator.records.job import Job
    from hpml_orchestrator.topology.model import Gpu, Topology


@dataclass(frozen=True)
class BindOptions:
    """How to bind the ranks of a node, with or without a job file."""

    ranks: int  # number of ranks on the node
    policy: str = "gpu-local"  # the planner's policy
    verify: str = "warn"  # `strict`, `warn` or `off`
    ranks_per_gpu: int = 1  # number of ranks that share a GPU
    loader_workers: int = 0  # data loader processes per rank
    one_thread: bool = False  # whether ranks use only the first hardware thread of each core
    keep_threads: bool = (
        False  # whether the job file sets OMP_NUM_THREADS, which then has precedence
    )
    no_gpus: bool = (
        False  # whether the job requested no GPUs, so that those of the node are ignored
    )

    @classmethod
    def of(cls, job: Job) -> BindOptions:
        """Return the options of a job."""
        binding, resources, variables = job.binding, job.resources, job.environment.variables
        return cls(
            resources.ranks,
            binding.policy,
            binding.verify,
            resources.ranks_per_gpu,
            binding.loader_workers,
            one_thread=not binding.hardware_threads,
            keep_threads="OMP_NUM_THREADS" in variables,
            no_gpus=not resources.gpu_count and not {*VISIBLE_VARIABLES} & {*variables},
        )


@dataclass(frozen=True)
class NodeRoots:
    """Roots of the node's file systems; tests pass a fixture tree."""

    sys: str = "/sys"  # sysfs
    proc: str = "/proc"  # procfs
    dev: str = "/dev"  # device files
    open: Callable[[str, int], int] = os.open  # opens a device file, like os.open


@dataclass(frozen=True)
class NodePlan:
    """A node's plan, and its inputs."""

    plan: Plan  # the plan
    topology: Topology | None  # the node; None if it could not be read
    context: NodeContext  # the other inputs, needed to verify the ranks
    cpu_model: str = ""  # from the kernel; empty if unknown, as on ARM


def plan_node(
    options: BindOptions,
    environment: Mapping[str, str],
    *,
    node: str,
    allowed: Collection[int],
    roots: NodeRoots = NodeRoots(),
    listing: Callable[[], str] = list_gpus,
) -> NodePlan:
    """Read this node's topology and plan its ranks.

    Args:
        options: the agent's options.
        environment: the agent's variables.
        node: Slurm's name of the node.
        allowed: CPUs of the agent's step, which are those of the job.
        roots: roots of the node's file systems.
        listing: returns the output of `nvidia-smi -L`; called only if MIG instances are visible.

    Raises:
        InputError: the kernel lists no CPUs or none of the allowed ones.
    """
    visible = "" if options.no_gpus else visible_of(environment)
    instances = listing() if visible and "MIG-" in visible else ""  # sysfs does not list them
    topology = read_sysfs(roots.sys, roots.proc, gpu_listing=instances)
    minors = _minors(roots.proc)
    hidden: frozenset[str] = frozenset()
    # Only indices depend on hidden devices. With UUIDs avoid opening devices, which may wake them.
    if visible is None or re.search(r"(^|,)\s*[0-9]+\s*(,|$)", visible):
        hidden = _hidden_gpus(topology, minors, roots)
    unknown: list[str] = []
    devices = visible_devices(topology, visible, hidden, unknown)
    planned = plan(
        topology,
        options.ranks,
        policy=options.policy,
        ranks_per_gpu=options.ranks_per_gpu,
        allowed_cpus=allowed,
        visible_gpus=devices,
        loader_workers=options.loader_workers,
        # `--hint=nomultithread` in Slurm: the job's mask still contains both threads of each core.
        smt=not options.one_thread and environment.get("SLURM_THREADS_PER_CORE") != "1",
    )
    warnings = (
        *unknown,
        *planned.warnings,
        *_warnings(devices, visible, minors, environment, options.ranks),
    )
    context = _context(options, node, allowed, visible, hidden)
    return NodePlan(replace(planned, warnings=warnings), topology, context, _cpu_model(roots.proc))


def unbound(
    options: BindOptions,
    environment: Mapping[str, str],
    *,
    node: str,
    allowed: Collection[int],
    why: str,
) -> NodePlan:
    """Return a plan that binds nothing, for a node without a possible plan.

    Its ranks share the allowed CPUs, which also limits their OpenMP threads.
    """
    workers = options.loader_workers
    threads = max(1, len(allowed) // options.ranks - workers)
    ranks = tuple(
        RankPlan(local_rank=rank, threads=threads, loader_workers=workers)
        for rank in range(options.ranks)
    )
    context = _context(options, node, allowed, visible_of(environment), frozenset())
    return NodePlan(Plan(ranks, "none", (why,)), None, context)


def publish(
    attempt: Path,
    options: BindOptions,
    node_plan: NodePlan,
    *,
    channel: str,
    more: Mapping[str, str] | None = None,
) -> None:
    """Write the plan, which hpml-bind reads, and the topology.

    Raises:
        RecordError: a file cannot be written.
    """
    context = node_plan.context
    if node_plan.topology is not None:
        path = attempt / "nodes" / f"{context.node}.topology.json"
        write_json(path, {**topology_json(node_plan.topology), "cpu_model": node_plan.cpu_model})
    header = {
        "verify": context.verify,
        "allowed": format_list(context.allowed),
        "visible": context.visible or "",
        "omp": "keep" if options.keep_threads else "set",
        "channel": channel,
        **(more or {}),
    }
    write_text(attempt / "plan" / f"{context.node}.txt", planfile.write(node_plan.plan, header))


def bind_alone(*, show: bool) -> None:
    """Plan this node and bind this rank, for `hpml-bind -- COMMAND` in any script.

    Each rank plans the whole node; all get the same plan because their input is equal. The input
    includes the CPUs that the ranks share. If the launcher has already bound this rank, these are
    unknown, so do not bind it again. Errors are printed, and the command runs anyway.
    """
    try:
        binding = _bind_alone()
    except (HpmlError, OSError, ValueError) as error:
        sys.stderr.write(f"hpml-bind: not bound: {error}\n")
        return
    if show:
        rank = os.environ.get("RANK", "0")
        sys.stderr.write(f"hpml-bind: rank {rank} on {os.uname().nodename}: {binding}\n")


def is_bound(
    environment: Mapping[str, str],
    cpus: frozenset[int],
    parent_cpus: frozenset[int],
    online: frozenset[int],
) -> bool:
    """Whether the launcher has already bound this rank.

    Args:
        environment: the rank's variables.
        cpus: CPUs that this process may use.
        parent_cpus: CPUs of its parent, which is torchrun for its ranks.
        online: all CPUs of the node.

    A rank that is alone on its node does not count as bound. Unbound ranks have all CPUs of the
    node, those of torchrun, or as many as Slurm counts for the step. Without torchrun, ignore the
    parent: it may be a shell that srun bound together with this rank.
    """
    if integer(environment, "LOCAL_WORLD_SIZE", 1) == 1 or cpus >= online:
        return False
    if "TORCHELASTIC_RUN_ID" in environment:
        return cpus != parent_cpus
    step_cpus = integer(environment, "SLURM_CPUS_ON_NODE", 0)
    return not step_cpus or len(cpus) < step_cpus


def _bind_alone() -> str:
    """Bind this rank; return its binding as text."""
    cpus = frozenset(os.sched_getaffinity(0))
    local_rank = integer(os.environ, "LOCAL_RANK", 0)
    policy = os.environ.get("HPML_BINDING") or "gpu-local"
    options = BindOptions(integer(os.environ, "LOCAL_WORLD_SIZE", 1), policy=policy)
    node_plan = plan_node(options, os.environ, node=os.uname().nodename, allowed=cpus)
    if local_rank >= len(node_plan.plan.ranks):
        ranks = len(node_plan.plan.ranks)
        raise ValueError(f"local rank {local_rank} of {ranks}: LOCAL_WORLD_SIZE is wrong")
    if node_plan.plan.policy == "none":
        return f"CPUs {format_list(cpus)}, policy none"
    try:
        parent_cpus = frozenset(os.sched_getaffinity(os.getppid()))
    except OSError:
        parent_cpus = frozenset()
    online = node_plan.topology.cpus if node_plan.topology else frozenset()
    if is_bound(os.environ, cpus, parent_cpus, online):
        return f"CPUs {format_list(cpus)} as its launcher bound it, not bound a second time"
    return "; ".join([_apply(node_plan.plan.ranks[local_rank]), *node_plan.plan.warnings])


def _apply(rank: RankPlan) -> str:
    """Apply the plan to this rank; return its binding as text."""
    if not rank.cpus:
        return "not bound, the plan has no CPUs for this rank"
    problem = set_cpus(format_list(rank.cpus))
    if problem:
        raise ValueError(problem)
    binding = [f"CPUs {format_list(rank.cpus)}"]
    if rank.memory is not None:
        binding.append(prefer_memory(rank.memory) or f"memory of NUMA domain {rank.memory}")
    if rank.gpu:
        binding.append(f"GPU {rank.gpu}")
    if rank.nic:
        os.environ["HPML_NIC"] = rank.nic
        binding.append(f"network card {rank.nic}")
    # An existing value is from the user or the default 1 of torchrun; they look the same.
    threads = os.environ.setdefault("OMP_NUM_THREADS", str(rank.threads))
    return ", ".join([*binding, f"OMP_NUM_THREADS {threads}"])


def _context(
    options: BindOptions,
    node: str,
    allowed: Collection[int],
    visible: str | None,
    hidden: frozenset[str],
) -> NodeContext:
    return NodeContext(
        node=node,
        verify=options.verify,
        allowed=tuple(sorted(allowed)),
        visible=visible,
        hidden=hidden,
        ranks_per_gpu=options.ranks_per_gpu,
    )


def _names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def _cpu_model(proc_root: str) -> str:
    """Return the first CPU's model name; empty if the kernel has none."""
    try:
        with open(os.path.join(proc_root, "cpuinfo"), errors="replace") as stream:
            names = (line.partition(":")[2] for line in stream if line.startswith("model name"))
            return " ".join(next(names, "").split())
    except OSError:
        return ""


def _minors(proc_root: str) -> dict[str, int]:
    root = os.path.join(proc_root, "driver", "nvidia", "gpus")
    minors = {}
    for name in _names(root):
        try:
            with open(os.path.join(root, name, "information"), errors="replace") as stream:
                match = re.search(r"^Device Minor:\s*([0-9]{1,5})\s*$", stream.read(), re.MULTILINE)
        except OSError:
            continue
        if match:
            minors[full_address(name)] = int(match[1])
    return minors


def _hidden_gpus(topology: Topology, minors: Mapping[str, int], roots: NodeRoots) -> frozenset[str]:
    """Return the PCI addresses of GPUs that this process's cgroup hides.

    Opening their device files fails with EPERM; with any other result the GPU counts as allowed.
    """
    hidden = set()
    for gpu in topology.gpus:
        if gpu.address in minors:
            paths = [os.path.join(roots.dev, f"nvidia{minors[gpu.address]}")]
        else:
            names = _names(os.path.join(roots.sys, "bus", "pci", "devices", gpu.address, "drm"))
            paths = [os.path.join(roots.dev, "dri", n) for n in names if n.startswith("renderD")]
        if not gpu.parent and any(_is_refused(path, roots) for path in paths):
            hidden.add(gpu.address)
    return frozenset(hidden)


def _is_refused(path: str, roots: NodeRoots) -> bool:
    try:
        descriptor = roots.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return error.errno == errno.EPERM
    os.close(descriptor)
    return False


def _warnings(
    devices: Sequence[Gpu | None],
    visible: str | None,
    minors: Mapping[str, int],
    environment: Mapping[str, str],
    ranks: int,
) -> list[str]:
    warnings = []
    if ranks > 1 and sum(bool(gpu and gpu.parent) for gpu in devices) > 1:
        warnings.append(
            "several MIG instances are visible: a CUDA process can use only the first of its list"
        )
    step = environment.get("SLURM_STEP_GPUS") or ""
    if environment.get("SLURM_NNODES") == "1":  # else SLURM_JOB_GPUS describes the first node
        step = step or environment.get("SLURM_JOB_GPUS") or ""
    try:
        numbers = set(parse_list(step))
    except ValueError:
        return warnings  # UUIDs with the local backend
    known = {minors.get(gpu.address, -1) for gpu in devices if gpu}
    if numbers and minors and known != numbers:
        meant = f"/dev/nvidia{format_list(known - {-1})}" if known - {-1} else "none of them"
        warnings.append(
            f"Slurm allocated the GPUs {step} to this step, but its list of visible devices "
            f"{visible or '(not set)'} means {meant} here"
        )
    return warnings
