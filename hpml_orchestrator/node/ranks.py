"""Which rank a process is, in the words of each launcher.

Imports nothing: every rank's start pays for it.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["rank_variables", "tasks_here"]

_LAUNCHERS = (
    # Rank, world size, local rank, local world size, node's number. Most particular first:
    # horovodrun starts its ranks from the batch step, whose SLURM_PROCID is 0 everywhere; Open
    # MPI's daemons are tasks of an srun, whose SLURM_PROCID all ranks of one node inherit; MPICH's
    # and Intel's too, which alone set MPI_LOCALRANKID (Slurm's own PMI sets PMI_RANK as well).
    (
        "HOROVOD_RANK",
        "HOROVOD_SIZE",
        "HOROVOD_LOCAL_RANK",
        "HOROVOD_LOCAL_SIZE",
        "HOROVOD_CROSS_RANK",
    ),
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "",  # its srun starts daemons on all nodes but the first, so SLURM_NODEID is 0 on two
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "SLURM_NODEID"),
)


def rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE and GROUP_RANK, as torchrun sets them.

    Empty where a launcher has set RANK itself, and for a process that no launcher started, such as
    one of the batch script: Slurm sets SLURM_PROCID there, too, but no number of tasks in the step.
    GROUP_RANK is the node's number; where it is not told, ranks are taken to be in blocks.

    >>> rank_variables({"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "4",
    ...     "SLURM_STEP_NUM_NODES": "2"})["LOCAL_WORLD_SIZE"]
    '2'
    """
    if "RANK" in environment:
        return {}
    for names in _LAUNCHERS:
        if all(name in environment for name in names[:4]):
            rank, size, local, here = (environment[name] for name in names[:4])
            node = environment.get(names[4]) or str(_whole(rank, 0) // _whole(here, 1))
            return _variables(rank, local, size, here, node)
    if "SLURM_PROCID" not in environment or "SLURM_STEP_NUM_TASKS" not in environment:
        return {}
    return _variables(
        environment["SLURM_PROCID"],
        environment.get("SLURM_LOCALID", "0"),
        environment["SLURM_STEP_NUM_TASKS"],
        str(tasks_here(environment)),
        environment.get("SLURM_NODEID", "0"),
    )


def tasks_here(environment: Mapping[str, str]) -> int:
    """Return how many tasks of this step run on this node; 1 outside of a step.

    SLURM_STEP_TASKS_PER_NODE tells it for each node in order, such as `4(x2),3`.

    >>> tasks_here({"SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "2"})
    3
    """
    node = _whole(environment.get("SLURM_NODEID", ""), 0)
    for part in environment.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        tasks, _, times = part.partition("(x")
        node -= _whole(times.rstrip(")"), 1)
        if tasks.isdecimal() and node < 0:
            return _whole(tasks, 1)
    total = _whole(environment.get("SLURM_STEP_NUM_TASKS", ""), 1)
    return max(1, total // _whole(environment.get("SLURM_STEP_NUM_NODES", ""), 1))


def _variables(rank: str, local: str, size: str, here: str, node: str) -> dict[str, str]:
    return {
        "RANK": rank,
        "LOCAL_RANK": local,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": here,
        "GROUP_RANK": node,
    }


def _whole(text: str, least: int) -> int:
    """A number that a launcher wrote; the least that it can be where it is none."""
    return max(least, int(text)) if text.isdecimal() else least
