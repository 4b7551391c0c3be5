"""Compute nodes, ranks, CPUs, GPUs and memory of a job file from the header and a launch line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml_orchestrator.convert.header import Allocation
from hpml_orchestrator.spec.values import size_text

if TYPE_CHECKING:
    from hpml_orchestrator.convert.header import Gpus, Request
    from hpml_orchestrator.convert.launch import Launch
    from hpml_orchestrator.convert.report import Report

__all__ = ["Size", "job_size"]

_BY_TASKS = ("srun", "mpirun", "horovodrun")  # start one rank per task of the job


@dataclass(frozen=True)
class Size:
    """What the job file asks for; `gpus`, `ranks` and `memory_mb` are per node."""

    nodes: int
    gpus: Gpus
    ranks: int
    cpus_per_rank: int
    memory_mb: int | None


def job_size(request: Request, given: Allocation, launch: Launch, report: Report) -> Size:
    """Return what a job file must ask for so that the program gets what it gets now."""
    nodes, ranks = _ranks(given, launch, report)
    part_of_tasks = (
        launch.launcher in _BY_TASKS
        and launch.total is not None
        and given.tasks is not None
        and launch.total < given.tasks
    )
    if part_of_tasks:  # as steps that run side by side: the job file asks for this step's share
        cpus = (
            launch.cpus
            or request.numbers.get("cpus-per-task")
            or -(-given.cpus // given.tasks_per_node)
        )
        given = Allocation(nodes, nodes * ranks, ranks, launch.gpus or given.gpus, cpus * ranks)
    else:
        cpus = -(-given.cpus // ranks)
    if given.cpus % ranks:
        launch.changed(
            report,
            f"{given.cpus} CPUs of a node for {ranks} ranks: {cpus} each, {cpus * ranks} in total",
            "write resources.cpus_per_rank",
        )
    return Size(nodes, given.gpus, ranks, cpus, _memory(request, given, report))


def _ranks(given: Allocation, launch: Launch, report: Report) -> tuple[int, int]:
    """Return the numbers of nodes and of ranks on each."""
    nodes = given.nodes
    if launch.launcher == "torchrun":
        _check_nodes(nodes, launch, report)
        return nodes, _per_node(given, launch, report)
    if launch.launcher in _BY_TASKS:
        used = launch.nodes or nodes
        if launch.per_node is None and launch.total is None and given.tasks is None:
            return used, 1
        if isinstance(launch.per_node, int):
            return used, launch.per_node
        total = launch.total or given.tasks or nodes
        used = min(used, total)
        if used < nodes:
            _fewer(used, nodes, launch, report)
        return used, _even(total, used, launch, report)
    if nodes > 1:
        _fewer(1, nodes, launch, report)
    if given.gpu_count > 1:
        launch.changed(
            report,
            f"one process with {given.gpu_count} GPUs becomes one rank, which also finds RANK=0, "
            "WORLD_SIZE=1, LOCAL_RANK=0",
            "if it starts one process per GPU itself (Lightning, accelerate), remove launcher and "
            "ranks_per_node: hpml then starts one rank per GPU",
        )
    return 1, 1


def _check_nodes(nodes: int, launch: Launch, report: Report) -> None:
    if launch.single_node and nodes > 1:
        why = f"torchrun was started on the first of {nodes} nodes; hpml starts it on each"
        launch.changed(report, why, "write resources.nodes: 1 if one is enough")
    elif not launch.single_node and launch.nodes not in (None, nodes):
        why = f"--nnodes is {launch.nodes} and the header's --nodes is {nodes}: {nodes} is used"
        launch.changed(report, why, "write resources.nodes")


def _fewer(used: int, nodes: int, launch: Launch, report: Report) -> None:
    why = f"it runs on {used} of {nodes} nodes: the job file asks for {used}"
    launch.changed(report, why, f"write resources.nodes: {nodes} if ranks should run on all")


def _per_node(given: Allocation, launch: Launch, report: Report) -> int:
    """Return the ranks that one torchrun starts."""
    wanted = launch.per_node
    if isinstance(wanted, int):
        return wanted
    if launch.total is not None:
        return _even(launch.total, given.nodes, launch, report)
    if wanted in (None, "gpu", "auto"):
        return given.gpu_count or (given.cpus if wanted == "auto" else 1)
    if wanted == "cpu":
        return given.cpus
    ranks = given.gpu_count or 1
    why = f"the number of processes per node is known in the job only: {ranks} here"
    launch.changed(report, why, "write resources.ranks_per_node")
    return ranks


def _even(total: int, nodes: int, launch: Launch, report: Report) -> int:
    ranks = -(-total // nodes)
    if total % nodes:
        why = f"{total} ranks on {nodes} nodes: a job file has the same number on each, {ranks}"
        launch.changed(report, why, "write resources.nodes and resources.ranks_per_node")
    return ranks


def _memory(request: Request, given: Allocation, report: Report) -> int | None:
    option = request.option("mem", "mem-per-cpu", "mem-per-gpu")
    numbers = request.numbers
    if option is None or numbers.get("mem"):
        return numbers.get("mem")
    if "mem" in numbers:
        report.lost(
            option.line,
            option.shown,
            "a job file cannot ask for all of a node's memory",
            "write resources.memory, such as 500G (`sinfo -o '%n %m'` shows the nodes' MB)",
        )
        return None
    if "mem-per-cpu" in numbers:
        number, each, unit = given.cpus, numbers["mem-per-cpu"], "CPUs"
    else:
        number, each, unit = given.gpu_count, numbers["mem-per-gpu"], "GPUs"
    report.changed(
        option.line,
        option.shown,
        f"a job file has the memory of a node: {number} {unit} x {size_text(each)} = "
        f"{size_text(number * each)}",
    )
    return number * each or None
