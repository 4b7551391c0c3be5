"""Compute nodes, ranks, CPUs, GPUs and memory of a job file from the header and a launch line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml_orchestrator.convert.report import ALL_GPUS, HIDES_GPUS
from hpml_orchestrator.spec.values import Gpus, size_text

if TYPE_CHECKING:
    from hpml_orchestrator.convert.header import Request
    from hpml_orchestrator.convert.launchers import Launch
    from hpml_orchestrator.convert.report import Report

__all__ = ["Allocation", "Size", "allocation", "job_size", "known_variables"]


@dataclass(frozen=True)
class Allocation:
    """What Slurm gives to the script: `gpus` and `cpus` of each node.

    `tasks` are those of the job, None where the header does not say.
    """

    nodes: int
    tasks: int | None
    gpus: Gpus
    cpus: int

    @property
    def tasks_per_node(self) -> int:
        """Tasks of each node, rounded up; 1 where the header does not say."""
        return -(-self.tasks // self.nodes) if self.tasks else 1


def allocation(request: Request, report: Report) -> Allocation:
    """Return the allocation; where Slurm may choose the number of nodes, the fewest."""
    numbers = request.numbers
    per_node, tasks = numbers.get("ntasks-per-node"), numbers.get("ntasks")
    all_gpus, gpus = request.gpus.get("gpus", Gpus(())), request.gpus.get("gpus-per-node", Gpus(()))
    nodes = numbers.get("nodes")
    if nodes is None and tasks and per_node:
        nodes = -(-tasks // per_node)
    if nodes is None and all_gpus.count and gpus.count:
        nodes = -(-all_gpus.count // gpus.count)
    option = request.option("ntasks", "gpus")
    if nodes is None and option is not None and (tasks or all_gpus.count) > 1:
        why = "without --nodes Slurm may use several nodes; the job file asks for one"
        report.changed(option.line, option.shown, why, "write resources.nodes for more")
    nodes = nodes or 1
    if not gpus.count:
        gpus = Gpus(tuple((kind, -(-number // nodes)) for kind, number in all_gpus.kinds))
    if tasks is None and per_node:
        tasks = nodes * per_node
    if tasks is None and "ntasks-per-gpu" in numbers:
        tasks = numbers["ntasks-per-gpu"] * nodes * gpus.count or None
    tasks_per_node = -(-tasks // nodes) if tasks else 1
    if not gpus.count and "gpus-per-task" in request.gpus:
        each = request.gpus["gpus-per-task"].kinds
        gpus = Gpus(tuple((kind, number * tasks_per_node) for kind, number in each))
    if not gpus.count and tasks and "ntasks-per-gpu" in numbers:
        gpus = Gpus((("", -(-tasks_per_node // numbers["ntasks-per-gpu"])),))
    cpus = tasks_per_node * numbers.get("cpus-per-task", 1)
    if "cpus-per-gpu" in numbers and "cpus-per-task" not in numbers:
        cpus = numbers["cpus-per-gpu"] * gpus.count
    return Allocation(nodes, tasks, gpus, cpus or 1)


def known_variables(request: Request, given: Allocation) -> dict[str, str]:
    """Return the variables that Slurm will set, as far as the header decides them."""
    known: dict[str, int | None] = {
        **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), given.nodes),
        "SLURM_CPUS_ON_NODE": given.cpus,
        "SLURM_CPUS_PER_TASK": request.numbers.get("cpus-per-task"),
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS"), given.tasks),
        "SLURM_NTASKS_PER_NODE": given.tasks_per_node if given.tasks else None,
        **dict.fromkeys(("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"), given.gpus.count),
        "SLURM_GPUS": given.gpus.count * given.nodes,
    }
    return {name: str(number) for name, number in known.items() if number}


@dataclass(frozen=True)
class Size:
    """What the job file asks for; `ranks`, `gpus` and `memory_mb` are per node."""

    nodes: int
    ranks: int
    cpus_per_rank: int
    gpus: Gpus
    memory_mb: int | None


def job_size(request: Request, given: Allocation, launch: Launch, report: Report) -> Size:
    """Return what a job file must ask for so that the program gets what it gets now."""
    nodes, per_node, total = given.nodes, launch.size("per_node"), launch.size("total")
    exact = True
    if launch.launcher == "torchrun":
        exact = launch.size("nodes") in (None, nodes)
        if total is None and per_node is None:
            wanted, per_node = launch.sizes.get("per_node", ""), given.gpus.count or 1
            exact = exact and wanted in ("gpu", "auto", "cpu")
            if wanted == "cpu" or (wanted == "auto" and not given.gpus.count):
                per_node = given.cpus
    elif launch.launcher:
        nodes = launch.size("nodes") or nodes
        total = total or given.tasks or nodes
        nodes = min(nodes, total)
    else:
        nodes = per_node = 1
    ranks = per_node or -(-(total or 1) // nodes)
    exact = exact and nodes == given.nodes and (per_node is not None or ranks * nodes == total)
    if launch.launcher in ("", "torchrun") or ranks >= given.tasks_per_node:
        cpus = -(-given.cpus // ranks)
        exact = exact and cpus * ranks == given.cpus
    else:  # one of several steps: its share
        cpus = launch.size("cpus") or -(-given.cpus // given.tasks_per_node)
    if not exact:
        launch.changed(
            f"the header gives {given.nodes} nodes with {given.cpus} CPUs; the job file asks for "
            f"{nodes} with {ranks} ranks of {cpus} CPUs on each",
            "check nodes, ranks_per_node and cpus_per_rank in resources",
        )
    if not launch.launcher and given.gpus.count > 1:
        launch.changed(
            f"one process with {given.gpus.count} GPUs becomes one rank, which also finds RANK=0, "
            "WORLD_SIZE=1, LOCAL_RANK=0",
            "if it starts one process per GPU itself (Lightning, accelerate), remove launcher and "
            "ranks_per_node: hpml then starts one rank per GPU",
        )
    hides = request.option(*HIDES_GPUS)
    if hides and given.gpus.count > 1 and launch.launcher != "torchrun":
        report.changed(hides.line, hides.shown, *ALL_GPUS)
    return Size(nodes, ranks, cpus, given.gpus, _memory(request, given, report))


def _memory(request: Request, given: Allocation, report: Report) -> int | None:
    """Return the memory of a node in MiB; None where the header does not say."""
    option, numbers = request.option("mem", "mem-per-cpu", "mem-per-gpu"), request.numbers
    if option is None or numbers.get("mem"):
        return numbers.get("mem")
    if option.name == "mem":
        why = "a job file cannot ask for all of a node's memory"
        todo = "write resources.memory, such as 500G (`sinfo -o '%n %m'` shows the nodes' MB)"
        report.lost(option.line, option.shown, why, todo)
        return None
    by_cpu, each = option.name == "mem-per-cpu", numbers[option.name]
    count = given.cpus if by_cpu else given.gpus.count
    why = f"{count} {'CPUs' if by_cpu else 'GPUs'} x {size_text(each)} = {size_text(count * each)}"
    report.changed(option.line, option.shown, f"a job file has the memory of a node: {why}")
    return count * each or None
