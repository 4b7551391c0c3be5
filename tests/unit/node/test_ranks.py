"""Which rank a process is, whichever launcher started it."""

from __future__ import annotations

import pytest

from hpml_orchestrator.node.bind import rank_variables, tasks_here

STEP = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "2",
}
BATCH = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "8"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "6",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
HOROVOD = {
    "HOROVOD_RANK": "3",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "1",
}
HYDRA = {"PMI_RANK": "7", "PMI_SIZE": "8", "MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": "4"}
NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ""),
        ({"RANK": "3", **STEP, **OPEN_MPI}, ""),
        (STEP, "5 1 8 4 1"),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "5,3"}, "5 1 8 3 1"),
        (BATCH, ""),
        ({**BATCH, **HOROVOD}, "3 1 4 2 1"),
        ({**STEP, **OPEN_MPI}, "6 2 8 4 1"),
        (OPEN_MPI, "6 2 8 4 1"),
        ({**STEP, **HYDRA}, "7 3 8 4 1"),
        ({**STEP, "PMI_RANK": "5", "PMI_SIZE": "8", "PMIX_RANK": "5"}, "5 1 8 4 1"),
        ({"OMPI_COMM_WORLD_RANK": "6"}, ""),
    ],
    ids=(
        "alone torchrun srun uneven batch horovodrun-in-batch mpirun-in-step mpirun-by-ssh hydra "
        "srun-mpi part"
    ).split(),
)
def test_a_rank_gets_what_torchrun_would_give_it(
    environment: dict[str, str], expected: str
) -> None:
    """The nearest launcher counts; the batch script itself is no rank."""
    assert rank_variables(environment) == dict(zip(NAMES, expected.split(), strict=False))


@pytest.mark.parametrize(
    ("told", "node", "tasks"),
    [("4(x2),3", 0, 4), ("4(x2),3", 1, 4), ("4(x2),3", 2, 3), ("1", 0, 1), ("2(x3)", 7, 2)],
)
def test_tasks_of_uneven_nodes_are_counted(told: str, node: int, tasks: int) -> None:
    """Slurm tells them node by node; a node that it does not name has the average."""
    step = {"SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_NUM_NODES": "3"}
    environment = {**step, "SLURM_STEP_TASKS_PER_NODE": told, "SLURM_NODEID": str(node)}
    assert tasks_here(environment) == tasks


def test_nonsense_stops_nobody() -> None:
    """Variables that are no numbers are passed on as they are, and counted as nothing."""
    found = rank_variables({**STEP, "SLURM_PROCID": "x", "SLURM_STEP_NUM_TASKS": "y"})
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_WORLD_SIZE"]) == ("x", "y", "1")
