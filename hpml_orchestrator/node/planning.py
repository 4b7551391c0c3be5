"""Where the ranks of this node will run: looked at and planned before the node is ready."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Optional

from hpml_orchestrator.errors import HpmlError
from hpml_orchestrator.node.kernel import prefer_memory
from hpml_orchestrator.node.processes import visible_of
from hpml_orchestrator.placement import planfile
from hpml_orchestrator.placement.cpulist import cpu_list, cpu_numbers
from hpml_orchestrator.placement.model import Plan, RankPlan
from hpml_orchestrator.placement.planner import plan
from hpml_orchestrator.placement.verify import Circumstances
from hpml_orchestrator.placement.visible import chosen_names, visible_devices
from hpml_orchestrator.records.files import write_json, write_text
from hpml_orchestrator.topology.pci import full_address
from hpml_orchestrator.topology.record import topology_json
from hpml_orchestrator.topology.sysfs import read_sysfs

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from pathlib import Path

    from hpml_orchestrator.node.arguments import Wish
    from hpml_orchestrator.topology.model import Topology

__all__ = [
    "Prepared",
    "bind_alone",
    "hidden_gpus",
    "is_bound",
    "list_instances",
    "plan_alone",
    "prepare",
    "publish",
    "unbound",
]

_LISTING_SECONDS = 20.0
_STEP_SECONDS = 0.1


@dataclass(frozen=True)
class Prepared:
    """A node's plan, and what it was made of.

    Attributes:
        plan: the plan.
        topology: the node; None where it could not be read.
        around: what else the ranks are judged by.
    """

    plan: Plan
    topology: Optional[Topology]  # noqa: UP045 - runs on Python 3.9
    around: Circumstances


def prepare(
    wish: Wish,
    environment: Mapping[str, str],
    *,
    node: str,
    allowed: Collection[int],
    sys_root: str = "/sys",
    proc_root: str = "/proc",
    dev_root: str = "/dev",
    opener: Callable[[str, int], int] = os.open,
    listing: Callable[[], str] = lambda: "",
) -> Prepared:
    """Read this node's topology and plan its ranks.

    Args:
        wish: what the script asks for.
        environment: the agent's own variables.
        node: Slurm's name of the node.
        allowed: CPUs that the agent's step may use, which are the job's.
        sys_root: where sysfs is.
        proc_root: where /proc is.
        dev_root: where the device files are.
        opener: opens a device file.
        listing: returns what `nvidia-smi -L` prints; called only where MIG is in use.

    Raises:
        InputError: the kernel tells no CPUs, or none of those that are allowed.
    """
    text = "" if wish.no_gpus else visible_of(dict(environment))
    told = listing() if _has_instances(text, proc_root) else ""
    topology = read_sysfs(sys_root, proc_root, gpu_listing=told)
    minors = _minors(proc_root)
    hidden: frozenset[str] = frozenset()
    if text is None or re.search(r"(^|,)\s*[0-9]+\s*(,|$)", text):  # UUIDs mean one device always
        hidden = hidden_gpus(topology, minors, sys_root, dev_root, opener=opener)
    made = plan(
        topology,
        wish.ranks,
        policy=wish.policy,
        ranks_per_gpu=wish.ranks_per_gpu,
        allowed_cpus=allowed,
        visible_gpus=chosen_names(topology, text, hidden),
        loader_workers=wish.loader_workers,
        smt=not wish.one_thread,
    )
    around = _around(wish, node, allowed, text, hidden)
    doubts = _doubts(topology, around, minors, environment, wish.ranks)
    if doubts:
        made = Plan(made.ranks, made.policy, made.whole, (*made.warnings, *doubts))
    return Prepared(made, topology, around)


def unbound(
    wish: Wish, environment: Mapping[str, str], *, node: str, allowed: Collection[int], why: str
) -> Prepared:
    """Return a plan that binds nothing, for a node that cannot be planned.

    Its ranks share the allowed CPUs, and so does the number of their OpenMP threads.
    """
    threads = max(1, len(allowed) // wish.ranks - wish.loader_workers)
    ranks = tuple(
        RankPlan(local_rank=rank, threads=threads, loader_workers=wish.loader_workers)
        for rank in range(wish.ranks)
    )
    around = _around(wish, node, allowed, visible_of(dict(environment)), frozenset())
    return Prepared(Plan(ranks, "none", whole=False, warnings=(why,)), None, around)


def publish(attempt: Path, wish: Wish, made: Prepared, *, channel: str, parts: str = "") -> None:
    """Write the plan, which hpml-bind reads, and the topology.

    Args:
        attempt: the attempt's directory.
        wish: what the script asks for.
        made: the plan, and what it was made of.
        channel: where the agent listens.
        parts: of which staged data this node has which part, such as `0/4:train,val`.

    Raises:
        RecordError: they cannot be written.
    """
    around = made.around
    if made.topology is not None:
        path = attempt / "nodes" / f"{around.node}.topology.json"
        write_json(path, topology_json(made.topology))
    more = {
        "verify": around.verify,
        "allowed": cpu_list(around.allowed),
        "visible": around.visible or "",
        "omp": "keep" if wish.keep_threads else "set",
        "channel": channel,
        **({"parts": parts} if parts else {}),
    }
    write_text(attempt / "plan" / f"{around.node}.txt", planfile.write(made.plan, more))


def hidden_gpus(
    topology: Topology,
    minors: Mapping[str, int],
    sys_root: str,
    dev_root: str,
    *,
    opener: Callable[[str, int], int] = os.open,
) -> frozenset[str]:
    """Return the PCI addresses of GPUs that a cgroup keeps this process from.

    The kernel refuses to open their device files with EPERM. Any other answer says nothing, and
    the GPU counts as admitted.

    Args:
        topology: the node.
        minors: PCI address to the number of the device file, of NVIDIA's GPUs.
        sys_root: where sysfs is.
        dev_root: where the device files are.
        opener: opens a device file.
    """
    return frozenset(
        gpu.address
        for gpu in topology.gpus
        if not gpu.parent
        and any(_refused(path, opener) for path in _files(gpu.address, minors, sys_root, dev_root))
    )


def list_instances(
    should_stop: Callable[[], bool],
    command: str = "nvidia-smi",
    seconds: float = _LISTING_SECONDS,
) -> str:
    """Return what `nvidia-smi -L` says; empty where it does not work.

    Args:
        should_stop: asked ten times a second whether to give it up.
        command: the program.
        seconds: how long it may take.
    """
    try:
        process = subprocess.Popen(
            [command, "-L"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            errors="replace",
        )
    except OSError:
        return ""
    deadline = time.monotonic() + seconds
    with process:
        while True:
            try:
                out, _ = process.communicate(timeout=_STEP_SECONDS)
            except subprocess.TimeoutExpired:
                if should_stop() or time.monotonic() >= deadline:
                    process.kill()
                    return ""
            else:
                return out if process.returncode == 0 and "MIG " in out else ""


def _around(
    wish: Wish,
    node: str,
    allowed: Collection[int],
    visible: Optional[str],  # noqa: UP045
    hidden: frozenset[str],
) -> Circumstances:
    return Circumstances(
        node=node,
        verify=wish.verify,
        allowed=tuple(sorted(allowed)),
        visible=visible,
        hidden=hidden,
        ranks_per_gpu=wish.ranks_per_gpu,
    )


def _has_instances(text: Optional[str], proc_root: str) -> bool:  # noqa: UP045
    """Whether MIG is in use: nvidia-smi alone knows the names of instances."""
    if text is not None and any(one.strip().startswith("MIG-") for one in text.split(",")):
        return True
    root = os.path.join(proc_root, "driver", "nvidia", "capabilities")
    return any(
        name.startswith("gi")
        for gpu in _names(root)
        if re.fullmatch("gpu[0-9]+", gpu)
        for name in _names(os.path.join(root, gpu, "mig"))
    )


def _names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def _minors(proc_root: str) -> dict[str, int]:
    """Return PCI address to the number in the name of the device file, for NVIDIA's GPUs."""
    root = os.path.join(proc_root, "driver", "nvidia", "gpus")
    found = {}
    for name in _names(root):
        try:
            with open(os.path.join(root, name, "information"), errors="replace") as stream:
                match = re.search(r"^Device Minor:\s*([0-9]{1,5})\s*$", stream.read(), re.MULTILINE)
        except OSError:
            continue
        if match:
            found[full_address(name)] = int(match[1])
    return found


def _files(address: str, minors: Mapping[str, int], sys_root: str, dev_root: str) -> list[str]:
    """Return the device files of a GPU."""
    if address in minors:
        return [os.path.join(dev_root, f"nvidia{minors[address]}")]
    nodes = _names(os.path.join(sys_root, "bus", "pci", "devices", address, "drm"))
    return [os.path.join(dev_root, "dri", name) for name in nodes if name.startswith("renderD")]


def _refused(path: str, opener: Callable[[str, int], int]) -> bool:
    try:
        descriptor = opener(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return error.errno == errno.EPERM
    os.close(descriptor)
    return False


def _doubts(
    topology: Topology,
    around: Circumstances,
    minors: Mapping[str, int],
    environment: Mapping[str, str],
    ranks: int,
) -> list[str]:
    """Return sentences about what may be otherwise than it was understood."""
    devices = visible_devices(topology, around.visible, around.hidden)
    found = []
    if ranks > 1 and sum(bool(one and one.parent) for one in devices) > 1:
        found.append(
            "several MIG instances are visible: CUDA shows a process the first of its list alone"
        )
    told = environment.get("SLURM_STEP_GPUS") or ""
    if environment.get("SLURM_NNODES") == "1":
        told = told or environment.get("SLURM_JOB_GPUS") or ""
    try:
        numbers = set(cpu_numbers(told))
    except ValueError:
        return found  # UUIDs, on the local backend
    understood = {minors.get(one.address, -1) for one in devices if one}
    if numbers and minors and understood != numbers:
        meant = f"/dev/nvidia{cpu_list(understood - {-1})}" if understood - {-1} else "none of them"
        found.append(
            f"Slurm gave this step the GPUs {told}; its list of visible devices "
            f"{around.visible or '(not set)'} means {meant} here"
        )
    return found


def bind_alone(*, show: bool, sys_root: str = "/sys", proc_root: str = "/proc") -> None:
    """Plan this node and bind this rank, or say why not.

    Args:
        show: tell in a line where the rank runs.
        sys_root: where sysfs is.
        proc_root: where /proc is.
    """
    try:
        told = _bind(sys_root, proc_root)
    except (HpmlError, OSError, ValueError) as error:
        sys.stderr.write(f"hpml-bind: not bound: {error}\n")
        return
    if show:
        rank = os.environ.get("RANK", "0")
        sys.stderr.write(f"hpml-bind: rank {rank} on {os.uname().nodename}: {told}\n")


def is_bound(
    environment: Mapping[str, str],
    mine: frozenset[int],
    of_parent: frozenset[int],
    online: frozenset[int],
) -> bool:
    """Whether the launcher has given this rank CPUs of its own already.

    Args:
        environment: the rank's variables.
        mine: the CPUs that this process may use.
        of_parent: those of its parent; torchrun's ranks are its children.
        online: all CPUs of the node.

    A rank that is alone on its node shares with nobody. Else what all ranks share is the node, or,
    with torchrun, what torchrun itself may use, or as many CPUs as Slurm says are there for the
    step. A parent says nothing elsewhere: a shell between srun and here has the rank's own CPUs.
    """
    if _whole(environment.get("LOCAL_WORLD_SIZE", "")) == 1 or mine >= online:
        return False
    if "TORCHELASTIC_RUN_ID" in environment:
        return mine != of_parent
    of_step = _whole(environment.get("SLURM_CPUS_ON_NODE", ""), 0)
    return not of_step or len(mine) < of_step


def plan_alone(
    environment: Mapping[str, str],
    mine: frozenset[int],
    *,
    sys_root: str = "/sys",
    proc_root: str = "/proc",
    dev_root: str = "/dev",
    opener: Callable[[str, int], int] = os.open,
) -> Prepared:
    """Plan all ranks of this node, as its agent would.

    Args:
        environment: the rank's variables.
        mine: the CPUs that this process may use.
        sys_root: where sysfs is.
        proc_root: where /proc is.
        dev_root: where the device files are.
        opener: opens a device file.

    Raises:
        InputError: the variables ask for what cannot be.
    """
    from hpml_orchestrator.node.arguments import Wish  # noqa: PLC0415 - not for each rank

    ranks = _whole(environment.get("LOCAL_WORLD_SIZE", ""))
    return prepare(
        Wish(ranks, policy=environment.get("HPML_BINDING") or "gpu-local"),
        environment,
        node=os.uname().nodename,
        allowed=mine,
        sys_root=sys_root,
        proc_root=proc_root,
        dev_root=dev_root,
        opener=opener,
    )


def _bind(sys_root: str, proc_root: str) -> str:
    """Bind this rank; returns where it runs now."""
    mine = frozenset(os.sched_getaffinity(0))
    ranks = _whole(os.environ.get("LOCAL_WORLD_SIZE", ""))
    local_rank = _whole(os.environ.get("LOCAL_RANK", ""), 0)
    if local_rank >= ranks:
        raise ValueError(f"local rank {local_rank} of {ranks}: LOCAL_WORLD_SIZE is wrong")
    made = plan_alone(os.environ, mine, sys_root=sys_root, proc_root=proc_root)
    warnings = "".join(f"; {one}" for one in made.plan.warnings)
    if made.plan.policy == "none":
        return f"CPUs {cpu_list(mine)}, policy none"
    if is_bound(os.environ, mine, _parent(), made.topology.cpus if made.topology else frozenset()):
        return f"CPUs {cpu_list(mine)} as its launcher bound it, not bound a second time"
    return _apply(made.plan.ranks[local_rank]) + warnings


def _apply(mine: RankPlan) -> str:
    """Set what the plan says; returns it in words."""
    if not mine.cpus:
        return "no CPUs are told, not bound"
    os.sched_setaffinity(0, mine.cpus)
    found = os.sched_getaffinity(0)
    if found != set(mine.cpus):
        raise ValueError(f"CPUs {cpu_list(mine.cpus)} wished, {cpu_list(found)} given")
    told = [f"CPUs {cpu_list(found)}"]
    if mine.memory is not None:
        told.append(prefer_memory(mine.memory) or f"memory of NUMA domain {mine.memory}")
    if mine.gpu:
        told.append(f"GPU {mine.gpu}")
    if mine.nic:
        os.environ["HPML_NIC"] = mine.nic
        told.append(f"network card {mine.nic}")
    # Here it is the user's own, or the 1 of torchrun, which looks the same.
    told.append(f"OMP_NUM_THREADS {os.environ.setdefault('OMP_NUM_THREADS', str(mine.threads))}")
    return ", ".join(told)


def _parent() -> frozenset[int]:
    """The CPUs of the process that started this one; none where it may not be asked."""
    try:
        return frozenset(os.sched_getaffinity(os.getppid()))
    except OSError:
        return frozenset()


def _whole(text: str, default: int = 1) -> int:
    return int(text) if text.isdecimal() else default
