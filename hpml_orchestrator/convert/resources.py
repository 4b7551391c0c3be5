"""From what a header asks for and a line starts to nodes, ranks, CPUs, GPUs and memory per node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpml_orchestrator.convert.findings import Report
    from hpml_orchestrator.convert.header import Gpus, Request
    from hpml_orchestrator.convert.launch import Launch

__all__ = ["Allocation", "Size", "allocation", "known_variables", "size"]


@dataclass(frozen=True)
class Allocation:
    """What Slurm gives to the script.

    Attributes:
        tasks: tasks of the job; None where the header does not say.
        gpus: of each node, by type.
        cpus: of each node.
    """

    nodes: int
    tasks: int | None
    tasks_per_node: int
    gpus: Gpus
    cpus: int

    @property
    def gpu_count(self) -> int:
        """GPUs of each node."""
        return sum(number for _, number in self.gpus)


@dataclass(frozen=True)
class Size:
    """What the job file asks for."""

    nodes: int
    gpus: Gpus
    ranks: int
    cpus_per_rank: int
    memory_mb: int | None


def allocation(request: Request, report: Report) -> Allocation:
    """Return what Slurm would give; what it would place freely is put on the fewest nodes."""
    per_node, tasks = request.ntasks_per_node, request.ntasks
    total_gpus = sum(number for _, number in request.gpus or ())
    gpus_per_node = sum(number for _, number in request.gpus_per_node or ())
    nodes = request.nodes
    if nodes is None and tasks and per_node:
        nodes = -(-tasks // per_node)
    if nodes is None and total_gpus and gpus_per_node:
        nodes = -(-total_gpus // gpus_per_node)
    free = nodes is None
    nodes = nodes or 1
    if tasks is None and per_node:
        tasks = nodes * per_node
    if tasks is None and request.ntasks_per_gpu:
        tasks = request.ntasks_per_gpu * (total_gpus or nodes * gpus_per_node)
    tasks_per_node = -(-tasks // nodes) if tasks else 1
    gpus = _gpus(request, nodes, tasks_per_node, report)
    cpus = tasks_per_node * (request.cpus_per_task or 1)
    if request.cpus_per_gpu and not request.cpus_per_task:
        cpus = request.cpus_per_gpu * sum(number for _, number in gpus)
    said = request.said("ntasks", "gpus")
    if free and said is not None and (tasks or total_gpus or 0) > 1:
        report.changed(
            said.line,
            said.shown,
            "without --nodes Slurm may spread it over several nodes: put on one",
            "write resources.nodes for more",
        )
    return Allocation(nodes, tasks, tasks_per_node, gpus, cpus or 1)


def _gpus(request: Request, nodes: int, tasks_per_node: int, report: Report) -> Gpus:
    if request.gpus_per_node is not None:
        return request.gpus_per_node
    if request.gpus is not None:
        if any(number % nodes for _, number in request.gpus):
            option = request.options["gpus"]
            report.changed(
                option.line,
                option.shown,
                f"a job file has the same number of GPUs on each of {nodes} nodes: rounded up",
            )
        return tuple((kind, -(-number // nodes)) for kind, number in request.gpus)
    if request.gpus_per_task is not None:
        return tuple((kind, number * tasks_per_node) for kind, number in request.gpus_per_task)
    return ()


def known_variables(request: Request, given: Allocation) -> dict[str, str]:
    """Return the variables that Slurm will set, as far as the header decides them."""
    known = {
        "SLURM_NNODES": str(given.nodes),
        "SLURM_JOB_NUM_NODES": str(given.nodes),
        "SLURM_CPUS_ON_NODE": str(given.cpus),
    }
    if given.tasks:
        known["SLURM_NTASKS"] = known["SLURM_NPROCS"] = str(given.tasks)
        known["SLURM_NTASKS_PER_NODE"] = str(given.tasks_per_node)
    if request.cpus_per_task:
        known["SLURM_CPUS_PER_TASK"] = str(request.cpus_per_task)
    if given.gpu_count:
        known["SLURM_GPUS_ON_NODE"] = str(given.gpu_count)
        known["SLURM_GPUS"] = str(given.gpu_count * given.nodes)
        known["SLURM_GPUS_PER_NODE"] = str(given.gpu_count)
    return known


def size(request: Request, given: Allocation, launch: Launch, report: Report) -> Size:
    """Return what a job file must ask for so that one launch finds what it finds now."""
    nodes, ranks = _ranks(given, launch, report)
    if _is_share(given, launch):
        each = launch.cpus or request.cpus_per_task or -(-given.cpus // given.tasks_per_node)
        gpus = launch.gpus or given.gpus
        part = Allocation(nodes, nodes * ranks, ranks, gpus, each * ranks)
        return Size(nodes, gpus, ranks, each, _memory(request, part, report))
    cpus = -(-given.cpus // ranks)
    if given.cpus % ranks:
        report.changed(
            launch.line,
            launch.source,
            f"{given.cpus} CPUs of a node for {ranks} ranks: {cpus} each, {cpus * ranks} in sum",
            "write resources.cpus_per_rank",
        )
    return Size(nodes, given.gpus, ranks, cpus, _memory(request, given, report))


_BY_TASKS = ("srun", "mpirun", "horovodrun")  # have a task of the job for each rank


def _is_share(given: Allocation, launch: Launch) -> bool:
    """Whether a line takes a part of the allocation only, as steps that run side by side do."""
    return (
        launch.launcher in _BY_TASKS
        and launch.total is not None
        and given.tasks is not None
        and launch.total < given.tasks
    )


def _ranks(  # noqa: C901 - one branch per launcher
    given: Allocation, launch: Launch, report: Report
) -> tuple[int, int]:
    nodes = given.nodes
    if launch.launcher == "torchrun":
        if launch.nodes is not None and launch.nodes != nodes and not launch.single_node:
            report.changed(
                launch.line,
                launch.source,
                f"it names {launch.nodes} node{'s' * (launch.nodes != 1)} and the header {nodes}: "
                f"{nodes} {'is' if nodes == 1 else 'are'} asked for",
                "write resources.nodes",
            )
        elif launch.single_node and nodes > 1:
            report.changed(
                launch.line,
                launch.source,
                f"torchrun was started on the first of {nodes} nodes; hpml starts it on each",
                "write resources.nodes: 1 if one is enough",
            )
        return nodes, _per_node(given, launch, report)
    if launch.launcher in _BY_TASKS:
        if launch.per_node is None and launch.total is None and given.tasks is None:
            return launch.nodes or nodes, 1
        if isinstance(launch.per_node, int):
            return launch.nodes or nodes, launch.per_node
        total = launch.total or given.tasks or nodes
        used = launch.nodes or nodes
        if used < nodes:
            _fewer(launch, used, nodes, report)
        if total < used:
            _fewer(launch, total, used, report)
            used = total
        return used, _even(total, used, launch, report)
    if nodes > 1:
        _fewer(launch, 1, nodes, report)
    if given.gpu_count > 1:
        report.changed(
            launch.line,
            launch.source,
            f"one process with {given.gpu_count} GPUs: carried as one rank, which also finds "
            "RANK=0, WORLD_SIZE=1, LOCAL_RANK=0",
            "if it starts more processes itself (Lightning, accelerate), have hpml start one per "
            "GPU: remove launcher and ranks_per_node",
        )
    return 1, 1


def _fewer(launch: Launch, used: int, nodes: int, report: Report) -> None:
    report.changed(
        launch.line,
        launch.source,
        f"it runs on {used} of {nodes} nodes: the job file asks for {used}",
        f"write resources.nodes: {nodes} if ranks shall run on all",
    )


def _per_node(given: Allocation, launch: Launch, report: Report) -> int:
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
    report.changed(
        launch.line,
        launch.source,
        f"the number of processes per node is known in the job only: {ranks} here",
        "write resources.ranks_per_node",
    )
    return ranks


def _even(total: int, nodes: int, launch: Launch, report: Report) -> int:
    ranks = -(-total // nodes)
    if total % nodes:
        report.changed(
            launch.line,
            launch.source,
            f"{total} ranks on {nodes} nodes: a job file has the same number on each: {ranks}",
            "write resources.nodes and resources.ranks_per_node",
        )
    return ranks


def _memory(request: Request, given: Allocation, report: Report) -> int | None:
    option = request.said("mem", "mem-per-cpu", "mem-per-gpu")
    if request.memory_mb == 0 and option is not None:
        report.lost(
            option.line,
            option.shown,
            "a job file names the memory of a node, and has no word for all of it",
            "write resources.memory, such as 500G (`sinfo -o '%n %m'` shows the nodes' MB)",
        )
        return None
    if request.memory_mb is not None or option is None:
        return request.memory_mb
    if request.memory_per_cpu_mb is not None:
        number, each, unit = given.cpus, request.memory_per_cpu_mb, "CPUs"
    else:
        number, each, unit = given.gpu_count, request.memory_per_gpu_mb or 0, "GPUs"
    made = number * each
    report.changed(
        option.line,
        option.shown,
        f"a job file has the memory of a node: {number} {unit} of a node x {megabytes(each)} = "
        f"{megabytes(made)}",
    )
    return made or None


def megabytes(number: int) -> str:
    """Return a number of MiB with the largest unit that holds it as a whole number.

    >>> megabytes(2048), megabytes(100)
    ('2G', '100M')
    """
    return f"{number // 1024}G" if number % 1024 == 0 and number else f"{number}M"
