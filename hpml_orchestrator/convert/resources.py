"""Compute nodes, ranks, CPUs, GPUs and memory of a job file from the header and a launch line."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml_orchestrator.convert.binding import ranks_per_domain
from hpml_orchestrator.convert.header import apply_option
from hpml_orchestrator.convert.report import ALL_GPUS, HIDES_GPUS
from hpml_orchestrator.convert.values import has_hole, shown
from hpml_orchestrator.errors import InputError, counted
from hpml_orchestrator.records.units import ALL_MEMORY, Gpus, size_text

if TYPE_CHECKING:
    from hpml_orchestrator.convert.header import Header
    from hpml_orchestrator.convert.launch import Launch
    from hpml_orchestrator.convert.report import ImportReport
    from hpml_orchestrator.convert.values import Values

_GPUS = ("gres", "gpus", "gpus-per-node", "gpus-per-task")
_RANKS = ("nodes", "ntasks", "ntasks-per-node")  # job_size reads those of srun
_SHARES = (*_GPUS, "cpus-per-task", "cpus-per-gpu", "ntasks-per-gpu")
_MEMORY = ("mem", "mem-per-cpu", "mem-per-gpu")


@dataclass(frozen=True)
class Allocation:
    """What Slurm gives to the script: `gpus` and `cpus` of each node.

    `tasks` are those of the job, None if the header does not say.
    """

    nodes: int
    tasks: int | None
    gpus: Gpus
    cpus: int


def allocation(header: Header, report: ImportReport) -> Allocation:
    """Return the allocation; if Slurm may choose the number of nodes, the fewest.

    Raises:
        InputError: its nodes would not be equal, as those of a job file are.
    """
    numbers = header.numbers
    per_node, tasks = numbers.get("ntasks-per-node"), numbers.get("ntasks")
    all_gpus, gpus = header.gpus.get("gpus", Gpus(())), header.gpus.get("gpus-per-node", Gpus(()))
    nodes = _nodes(header, per_node, tasks, report)
    if not gpus.count:
        gpus = Gpus(tuple((kind, -(-number // nodes)) for kind, number in all_gpus.kinds))
    if tasks is None and per_node:
        tasks = nodes * per_node
    if tasks is None and "ntasks-per-gpu" in numbers:
        tasks = numbers["ntasks-per-gpu"] * nodes * gpus.count or None
    tasks_per_node = -(-tasks // nodes) if tasks else 1
    if not gpus.count and "gpus-per-task" in header.gpus:
        each = header.gpus["gpus-per-task"].kinds
        gpus = Gpus(tuple((kind, number * tasks_per_node) for kind, number in each))
    if not gpus.count and tasks and "ntasks-per-gpu" in numbers:
        gpus = Gpus((("", -(-tasks_per_node // numbers["ntasks-per-gpu"])),))
    cpus = tasks_per_node * numbers.get("cpus-per-task", 1)
    if "cpus-per-gpu" in numbers and "cpus-per-task" not in numbers:
        cpus = numbers["cpus-per-gpu"] * gpus.count
    return Allocation(nodes, tasks, gpus, cpus or 1)


def _nodes(header: Header, per_node: int | None, tasks: int | None, report: ImportReport) -> int:
    """Return the number of nodes; all of them are alike."""
    nodes, option = header.numbers.get("nodes"), header.option("ntasks", "gpus")
    gpus = header.gpus["gpus"].count if "gpus" in header.gpus else 0
    each = header.gpus["gpus-per-node"].count if "gpus-per-node" in header.gpus else 0
    for total, part in ((tasks, per_node), (gpus, each)):
        if nodes is None and total and part:
            nodes = -(-total // part)
    if nodes is None and option is not None and (tasks or gpus) > 1:
        why = "without --nodes Slurm may use several nodes; the job file asks for one"
        report.changed(option.line, option.shown, why, "write resources.nodes for more")
    nodes = nodes or 1
    # Slurm could give the nodes different numbers of tasks or GPUs; a job file has one number for
    # all.
    if option is not None and (gpus % nodes or (tasks or 0) % nodes):
        why = f"does not divide by {nodes} nodes, and all nodes of a job file are alike"
        raise InputError(
            f"line {option.line}: {option.shown}: {why}", hint="ask for a multiple of the nodes"
        )
    return nodes


def known_variables(header: Header, given: Allocation) -> dict[str, str]:
    """Return the variables that the header decides; empty for those that Slurm does not set."""
    numbers, options = header.numbers, header.options
    total = header.gpus.get("gpus")
    known: dict[str, int | None] = {
        **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), given.nodes),
        "SLURM_CPUS_ON_NODE": given.cpus,
        "SLURM_CPUS_PER_TASK": numbers.get("cpus-per-task"),
        "SLURM_NTASKS_PER_NODE": numbers.get("ntasks-per-node"),
        "SLURM_GPUS_ON_NODE": given.gpus.count,
        "SLURM_GPUS_PER_NODE": given.gpus.count if "gpus-per-node" in options else None,
        "SLURM_GPUS": total.count if total else None,
    }
    if given.tasks:
        known |= dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS"), given.tasks)
    return {name: str(number or "") for name, number in known.items()}


def check_devices(values: Values, line: int, devices: str) -> None:
    """Check that CUDA_VISIBLE_DEVICES names all GPUs of the job: then Slurm sets the same.

    Raises:
        InputError: it names others.
    """
    count = int(values.known.get("SLURM_GPUS_ON_NODE") or 0)
    if devices != ",".join(map(str, range(count))):
        problem = f"line {line}: CUDA_VISIBLE_DEVICES={shown(devices)}: the header asks for {count}"
        hint = "remove the line; write --gpus-per-node for the number of GPUs"
        raise InputError(f"{problem} GPUs, and hpml shows the ranks all of them", hint=hint)


def add_srun_options(header: Header, launch: Launch, report: ImportReport) -> None:
    """Add the resources that the srun of a launch requests and the header does not.

    Raises:
        InputError: it requests GPUs or CPUs in another way than the header.
    """
    for option in launch.options:
        name, value, family = option.name, option.value, [option.name]
        for group in (_GPUS, _MEMORY):
            family = [*group] if name in group else family
        if (name, value) == ("mem", "0"):
            continue  # all of the job's memory
        if has_hole(value):
            raise launch.refused(option.shown, "a job file needs this value", "write it out")
        # The header wins: srun runs inside of its allocation and cannot get more. Only what the
        # header leaves open is taken from srun.
        earlier = header.option(*family)
        if earlier is None or (name == "gres" and "gpu" not in value):
            try:
                apply_option(header, option, report)
            except ValueError as error:
                problem = f"line {option.line}: srun {option.shown}: {error}"
                raise InputError(problem, hint="correct the option") from None
        elif (name, value) == (earlier.name, earlier.value) or name in _RANKS:
            continue
        elif name in _SHARES:
            why = f"the header has {earlier.shown}: a job file gives the ranks all of the job"
            raise launch.refused(f"srun {option.shown}", why, "write the same in the header")
        else:
            why = f"the header has {earlier.shown}, which counts in the job file"
            launch.lost(f"srun {option.shown}", why)


@dataclass(frozen=True)
class ScriptSize:
    """What the job file asks for; `ranks`, `gpus` and `memory_mb` are per node.

    `question` is for a comment of the job file, if only the user can know the number of nodes.
    """

    nodes: int
    ranks: int
    cpus_per_rank: int
    gpus: Gpus
    memory_mb: int | None
    question: str = ""


def job_size(header: Header, given: Allocation, launch: Launch, report: ImportReport) -> ScriptSize:
    """Return what a job file must ask for so that the program gets what it gets now.

    Raises:
        InputError: the launch does not use the nodes of the header alike.
    """
    question, started, nodes = "", _started_nodes(given, launch), given.nodes
    is_local = launch.launcher in ("", "torchrun", "horovodrun") and launch.outer is None
    if started < nodes and is_local:
        question = _ask_nodes(header, nodes, started, launch, report)
        nodes = started
        given = dataclasses.replace(given, nodes=started)
    ranks = _ranks(header, given, launch)
    if started != nodes:
        why = f"starts the program on {started} of the header's {nodes} nodes"
        raise launch.refused(
            launch.source, why, f"write the launch for {nodes}, or --nodes={started}"
        )
    if launch.outer is not None:
        outer = dataclasses.replace(launch, sizes=launch.outer)
        per_node = (outer.size("per_node") or 0) * nodes
        started = outer.size("total") or per_node or given.tasks or nodes
        if started != (nodes if launch.launcher == "torchrun" else 1):
            why = f"srun starts the launcher {started} times on {nodes} nodes"
            raise launch.refused(launch.source, why, "write `srun --ntasks-per-node=1`")
    cpus = -(-given.cpus // ranks)
    if cpus * ranks != given.cpus:
        launch.changed(
            f"{ranks} ranks share {counted(given.cpus, 'CPU')} per node by the header; "
            f"the job file asks for {cpus} each",
            "change resources.cpus_per_rank",
        )
    if not launch.launcher and given.gpus.count > 1:
        launch.changed(
            f"one process with {given.gpus.count} GPUs becomes one rank, which also finds RANK=0, "
            "WORLD_SIZE=1, LOCAL_RANK=0",
            "if it starts one process per GPU itself (Lightning, accelerate), remove launcher and "
            "ranks_per_node: hpml then starts one rank per GPU",
        )
    hides = header.option(*HIDES_GPUS)
    if hides and given.gpus.count > 1 and launch.launcher != "torchrun":
        report.changed(hides.line, hides.shown, *ALL_GPUS)
    memory = _memory(header, given, report)
    return ScriptSize(nodes, ranks, cpus, given.gpus, memory, question)


def _ask_nodes(
    header: Header, nodes: int, started: int, launch: Launch, report: ImportReport
) -> str:
    """Report that the program leaves nodes of the header idle, and return the question."""
    option = header.option("nodes", "ntasks", "gpus")
    line, text = (option.line, option.shown) if option else (launch.line, launch.source)
    why = f"the program starts on {started} of the header's {nodes} nodes; the others would be idle"
    todo = f"is it distributed? Then write resources.nodes: {nodes}, and launcher: torchrun "
    todo += "(PyTorch), srun or mpirun"
    report.lost(line, text, why, todo)
    return f"Question: {why}.\n{todo[0].upper()}{todo[1:]}."


def _started_nodes(given: Allocation, launch: Launch) -> int:
    if launch.launcher in ("", "horovodrun"):
        return 1
    default = 1 if launch.launcher == "torchrun" else given.nodes
    return launch.size("nodes") or default


def _ranks(header: Header, given: Allocation, launch: Launch) -> int:
    if not launch.launcher:
        return 1
    word = launch.sizes.get("per_node", "")
    if launch.launcher == "torchrun" and word in ("gpu", "auto", "cpu"):
        if word == "gpu" and not given.gpus.count:
            why = "starts a rank for each GPU, and the header asks for none"
            raise launch.refused(
                launch.source, why, "write --gpus-per-node, or the number of ranks"
            )
        return given.cpus if word == "cpu" else given.gpus.count or given.cpus
    per_node, total = launch.size("per_node"), launch.size("total")
    if total is None and per_node is None:
        tasks = given.tasks // given.nodes if given.tasks else None
        per_node = ranks_per_domain(launch, header, tasks)
    placed = per_node or "per_domain" in launch.sizes
    if total is None:
        total = per_node * given.nodes if per_node else given.tasks or given.nodes
    if launch.launcher == "mpirun" and given.nodes > 1 and total != given.tasks and not placed:
        why = f"mpirun fills one node after the other; the header has {given.tasks or 1} tasks"
        raise launch.refused(launch.source, why, "write --ntasks-per-node, or mpirun -npernode")
    if total % given.nodes or (per_node and per_node * given.nodes != total):
        why = f"{total} ranks on {given.nodes} nodes are not as many on each"
        raise launch.refused(launch.source, why, "start as many on each node")
    return total // given.nodes


def _memory(header: Header, given: Allocation, report: ImportReport) -> int | None:
    """Return the memory of a node in MiB; None if the header does not say."""
    option, numbers = header.option(*_MEMORY), header.numbers
    if option is None or numbers.get("mem"):
        return numbers.get("mem")
    if option.name == "mem":
        return ALL_MEMORY
    if option.name == "mem-per-cpu":
        return None  # a field of its own
    count, each = given.gpus.count, numbers[option.name]
    why = f"{count} GPUs x {size_text(each)} = {size_text(count * each)}"
    report.changed(option.line, option.shown, f"a job file has the memory of a node: {why}")
    return count * each or None
