"""Binding without an agent: `hpml-bind -- COMMAND` in anybody's own script.

The node is read and planned by each rank for itself; equal input gives an equal plan, so the ranks
agree without asking each other. That needs one thing: the CPUs that all of them share out. Where
the launcher has bound this rank already, nobody can tell the others' CPUs, and nothing is bound a
second time. Nothing here stops the command.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping

from hpml_orchestrator.errors import HpmlError
from hpml_orchestrator.node.kernel import prefer_memory
from hpml_orchestrator.topology.cpulist import format_list

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hpml_orchestrator.node.planning import Prepared
    from hpml_orchestrator.placement.model import RankPlan

__all__ = ["bind_alone", "is_bound", "plan_alone"]


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
    from hpml_orchestrator.node.planning import prepare  # noqa: PLC0415

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
        return f"CPUs {format_list(mine)}, policy none"
    if is_bound(os.environ, mine, _parent(), made.topology.cpus if made.topology else frozenset()):
        return f"CPUs {format_list(mine)} as its launcher bound it, not bound a second time"
    return _apply(made.plan.ranks[local_rank]) + warnings


def _apply(mine: RankPlan) -> str:
    """Set what the plan says; returns it in words."""
    if not mine.cpus:
        return "no CPUs are told, not bound"
    os.sched_setaffinity(0, mine.cpus)
    found = os.sched_getaffinity(0)
    if found != set(mine.cpus):
        raise ValueError(f"CPUs {format_list(mine.cpus)} wished, {format_list(found)} given")
    told = [f"CPUs {format_list(found)}"]
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
