"""Where the ranks of this node will run: read its topology, see which GPUs are the job's, plan.

The agent plans for all ranks of its node; without an agent each rank does, see `bind_alone`.
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
from hpml_orchestrator.node.kernel import prefer_memory, set_cpus
from hpml_orchestrator.node.options import BindOptions
from hpml_orchestrator.node.processes import visible_of
from hpml_orchestrator.placement import planfile
from hpml_orchestrator.placement.gpus import visible_devices
from hpml_orchestrator.placement.model import Plan, RankPlan
from hpml_orchestrator.placement.planner import plan
from hpml_orchestrator.placement.verify import Circumstances
from hpml_orchestrator.records.files import write_json, write_text
from hpml_orchestrator.topology.cpulist import format_list, parse_list
from hpml_orchestrator.topology.model import topology_json
from hpml_orchestrator.topology.nvidia_smi import list_gpus
from hpml_orchestrator.topology.pci import full_address
from hpml_orchestrator.topology.sysfs import read_sysfs

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from hpml_orchestrator.topology.model import Gpu, Topology

__all__ = [
    "Prepared",
    "Roots",
    "bind_alone",
    "is_bound",
    "prepare",
    "publish",
    "unbound",
]


@dataclass(frozen=True)
class Roots:
    """Where the node's files are; tests give a tree of their own.

    Attributes:
        sys: sysfs.
        proc: procfs.
        dev: device files.
        open: opens a device file, as os.open.
    """

    sys: str = "/sys"
    proc: str = "/proc"
    dev: str = "/dev"
    open: Callable[[str, int], int] = os.open


@dataclass(frozen=True)
class Prepared:
    """A node's plan, and what it was made of.

    Attributes:
        plan: the plan.
        topology: the node; None where it could not be read.
        around: what else the ranks are judged by.
        cpu_model: as the kernel names it; empty if it does not, as on ARM.
    """

    plan: Plan
    topology: Topology | None
    around: Circumstances
    cpu_model: str = ""


def prepare(
    options: BindOptions,
    environment: Mapping[str, str],
    *,
    node: str,
    allowed: Collection[int],
    roots: Roots = Roots(),
    listing: Callable[[], str] = list_gpus,
) -> Prepared:
    """Read this node's topology and plan its ranks.

    Args:
        options: what the script asks for.
        environment: the agent's own variables.
        node: Slurm's name of the node.
        allowed: CPUs that the agent's step may use, which are the job's.
        roots: where the node's files are.
        listing: returns what `nvidia-smi -L` prints; called only where MIG instances are visible.

    Raises:
        InputError: the kernel lists no CPUs, or none of those that are allowed.
    """
    visible = "" if options.no_gpus else visible_of(environment)
    instances = listing() if visible and "MIG-" in visible else ""  # which sysfs does not have
    topology = read_sysfs(roots.sys, roots.proc, gpu_listing=instances)
    minors = _minors(roots.proc)
    hidden: frozenset[str] = frozenset()
    # UUIDs name one device whatever is hidden, and opening a device may wake it.
    if visible is None or re.search(r"(^|,)\s*[0-9]+\s*(,|$)", visible):
        hidden = _hidden_gpus(topology, minors, roots)
    unknown: list[str] = []
    devices = visible_devices(topology, visible, hidden, unknown)
    made = plan(
        topology,
        options.ranks,
        policy=options.policy,
        ranks_per_gpu=options.ranks_per_gpu,
        allowed_cpus=allowed,
        visible_gpus=devices,
        loader_workers=options.loader_workers,
        smt=not options.one_thread,
    )
    warnings = (
        *unknown,
        *made.warnings,
        *_warnings(devices, visible, minors, environment, options.ranks),
    )
    around = _circumstances(options, node, allowed, visible, hidden)
    return Prepared(replace(made, warnings=warnings), topology, around, _cpu_model(roots.proc))


def unbound(
    options: BindOptions,
    environment: Mapping[str, str],
    *,
    node: str,
    allowed: Collection[int],
    why: str,
) -> Prepared:
    """Return a plan that binds nothing, for a node that cannot be planned.

    Its ranks share the allowed CPUs, and so does the number of their OpenMP threads.
    """
    workers = options.loader_workers
    threads = max(1, len(allowed) // options.ranks - workers)
    ranks = tuple(
        RankPlan(local_rank=rank, threads=threads, loader_workers=workers)
        for rank in range(options.ranks)
    )
    around = _circumstances(options, node, allowed, visible_of(environment), frozenset())
    return Prepared(Plan(ranks, "none", (why,)), None, around)


def publish(
    attempt: Path,
    options: BindOptions,
    made: Prepared,
    *,
    channel: str,
    more: Mapping[str, str] | None = None,
) -> None:
    """Write the plan, which hpml-bind reads, and the topology.

    Args:
        attempt: the attempt's directory.
        options: what the script asks for.
        made: the plan, and what it was made of.
        channel: where the agent listens.
        more: further values for hpml-bind.

    Raises:
        RecordError: they cannot be written.
    """
    around = made.around
    if made.topology is not None:
        path = attempt / "nodes" / f"{around.node}.topology.json"
        write_json(path, {**topology_json(made.topology), "cpu_model": made.cpu_model})
    header = {
        "verify": around.verify,
        "allowed": format_list(around.allowed),
        "visible": around.visible or "",
        "omp": "keep" if options.keep_threads else "set",
        "channel": channel,
        **(more or {}),
    }
    write_text(attempt / "plan" / f"{around.node}.txt", planfile.write(made.plan, header))


def bind_alone(*, show: bool) -> None:
    """Plan this node and bind this rank, for `hpml-bind -- COMMAND` in any script.

    Each rank plans the node for itself; equal input gives an equal plan, so the ranks agree. That
    needs the CPUs that all of them share. Where the launcher has bound this rank already, the
    others' CPUs are unknown, and nothing is bound a second time. No error stops the command.

    Args:
        show: print a line about where the rank runs.
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
    """Whether the launcher has given this rank CPUs of its own already.

    Args:
        environment: the rank's variables.
        cpus: the CPUs that this process may use.
        parent_cpus: those of its parent; torchrun's ranks are its children.
        online: all CPUs of the node.

    A rank that is alone on its node shares with nobody. Else what all ranks share is the node, or,
    with torchrun, what torchrun itself may use, or as many CPUs as Slurm counts for the step. A
    parent says nothing elsewhere: a shell between srun and here has the rank's own CPUs.
    """
    if _number(environment, "LOCAL_WORLD_SIZE", 1) == 1 or cpus >= online:
        return False
    if "TORCHELASTIC_RUN_ID" in environment:
        return cpus != parent_cpus
    step_cpus = _number(environment, "SLURM_CPUS_ON_NODE", 0)
    return not step_cpus or len(cpus) < step_cpus


def _bind_alone() -> str:
    """Bind this rank; returns where it runs now."""
    cpus = frozenset(os.sched_getaffinity(0))
    local_rank = _number(os.environ, "LOCAL_RANK", 0)
    policy = os.environ.get("HPML_BINDING") or "gpu-local"
    options = BindOptions(_number(os.environ, "LOCAL_WORLD_SIZE", 1), policy=policy)
    made = prepare(options, os.environ, node=os.uname().nodename, allowed=cpus)
    if local_rank >= len(made.plan.ranks):
        ranks = len(made.plan.ranks)
        raise ValueError(f"local rank {local_rank} of {ranks}: LOCAL_WORLD_SIZE is wrong")
    if made.plan.policy == "none":
        return f"CPUs {format_list(cpus)}, policy none"
    try:
        parent_cpus = frozenset(os.sched_getaffinity(os.getppid()))
    except OSError:
        parent_cpus = frozenset()
    online = made.topology.cpus if made.topology else frozenset()
    if is_bound(os.environ, cpus, parent_cpus, online):
        return f"CPUs {format_list(cpus)} as its launcher bound it, not bound a second time"
    return "; ".join([_apply(made.plan.ranks[local_rank]), *made.plan.warnings])


def _apply(rank: RankPlan) -> str:
    """Set what the plan says of a rank; returns it in words.

    Raises:
        ValueError: its CPUs cannot be set.
    """
    if not rank.cpus:
        return "the plan has no CPUs for it, not bound"
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
    # One that is set is the user's own, or the 1 of torchrun, which looks the same.
    threads = os.environ.setdefault("OMP_NUM_THREADS", str(rank.threads))
    return ", ".join([*binding, f"OMP_NUM_THREADS {threads}"])


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else default


def _circumstances(
    options: BindOptions,
    node: str,
    allowed: Collection[int],
    visible: str | None,
    hidden: frozenset[str],
) -> Circumstances:
    return Circumstances(
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
    """Return the first CPU's model name; empty if the kernel gives none."""
    try:
        with open(os.path.join(proc_root, "cpuinfo"), errors="replace") as stream:
            names = (line.partition(":")[2] for line in stream if line.startswith("model name"))
            return " ".join(next(names, "").split())
    except OSError:
        return ""


def _minors(proc_root: str) -> dict[str, int]:
    """Return PCI address to the number in the name of the device file, for NVIDIA's GPUs."""
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


def _hidden_gpus(topology: Topology, minors: Mapping[str, int], roots: Roots) -> frozenset[str]:
    """Return the PCI addresses of GPUs that a cgroup keeps this process from.

    The kernel refuses to open their device files with EPERM. After any other answer the GPU counts
    as allowed.
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


def _is_refused(path: str, roots: Roots) -> bool:
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
    """Return what may be otherwise than it was understood."""
    warnings = []
    if ranks > 1 and sum(bool(gpu and gpu.parent) for gpu in devices) > 1:
        warnings.append(
            "several MIG instances are visible: CUDA shows a process the first of its list alone"
        )
    step = environment.get("SLURM_STEP_GPUS") or ""
    if environment.get("SLURM_NNODES") == "1":  # else SLURM_JOB_GPUS is that of the first node
        step = step or environment.get("SLURM_JOB_GPUS") or ""
    try:
        numbers = set(parse_list(step))
    except ValueError:
        return warnings  # UUIDs, on the local backend
    known = {minors.get(gpu.address, -1) for gpu in devices if gpu}
    if numbers and minors and known != numbers:
        meant = f"/dev/nvidia{format_list(known - {-1})}" if known - {-1} else "none of them"
        warnings.append(
            f"Slurm gave this step the GPUs {step}; its list of visible devices "
            f"{visible or '(not set)'} means {meant} here"
        )
    return warnings
