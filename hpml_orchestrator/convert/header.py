"""Read the `#SBATCH` header of a script, and compute what Slurm would allocate for it."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.scheduler.slurm.options import (
    SBATCH,
    HeaderError,
    Option,
    header_words,
    read_options,
)
from hpml_orchestrator.spec.values import parse_gpus, parse_mebibytes, parse_time_limit

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpml_orchestrator.convert.report import Report

__all__ = ["Allocation", "Gpus", "Request", "allocation", "known_variables", "read_request"]

_OTHER_SYSTEMS = {"#PBS": "PBS", "#BSUB": "LSF", "#$ -": "Grid Engine", "#COBALT": "Cobalt"}
_DIRECTIVE = re.compile(r"--[a-z][a-z0-9-]*(=[A-Za-z0-9_.,:@/+=%*()\[\]|&-]+)?")
_MAIL_EVENTS = "begin end fail requeue time_limit_80 time_limit_90".split()

Gpus = tuple[tuple[str, int], ...]
"""Type and number of GPUs; an empty type means any."""


@dataclass
class Request:
    """What the header asks for, by the long names of its options.

    Attributes:
        numbers: counts; memory in MiB, 0 for all of it; time limit in seconds, 0 for none.
        gpus: of `--gpus`, `--gpus-per-node` (`--gres` too) and `--gpus-per-task`.
        texts: values that are taken as they are.
        mail_on: events to write mail about.
        extra: options for `resources.extra`.
        options: the last option of each name.
    """

    numbers: dict[str, int] = field(default_factory=dict)
    gpus: dict[str, Gpus] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    mail_on: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    options: dict[str, Option] = field(default_factory=dict)

    def option(self, *names: str) -> Option | None:
        """Return the first of these options that the script has."""
        return next((self.options[name] for name in names if name in self.options), None)


def read_request(script: str, report: Report) -> Request:
    """Return what the header of a script asks for; later options win, as for sbatch.

    Raises:
        InputError: it is another system's script, or sbatch would refuse the header.
    """
    try:
        options, others = read_options(list(header_words(script)), SBATCH)
    except HeaderError as error:
        raise InputError(f"line {error.line}: {error}", hint=error.hint) from None
    if not options:
        _check_system(script)
    for word in others:
        if word.text in ("hetjob", "packjob"):
            raise InputError(
                f"line {word.line}: #SBATCH {word.text}: hpml has no heterogeneous jobs",
                hint="write one script, and one job file, per component",
            )
        raise InputError(
            f"line {word.line}: {word.text!r} in an #SBATCH line is not an option",
            hint="remove it, or quote a value with blanks; sbatch refuses it, too",
        )
    request = Request()
    for option in options:
        try:
            _apply(request, option, report)
        except ValueError as error:
            raise InputError(
                f"line {option.line}: {option.shown}: {error}",
                hint="correct the #SBATCH line; sbatch refuses it, too",
            ) from None
    *earlier, last = [name for name in request.options if name in _MEMORY] or [""]
    for name in earlier:
        del request.numbers[name]
        option = request.options[name]
        report.lost(option.line, option.shown, f"--{last} below it replaces it")
    return request


def _check_system(script: str) -> None:
    for number, line in enumerate(script.split("\n"), start=1):
        for mark, system in _OTHER_SYSTEMS.items():
            if line.startswith(mark):
                raise InputError(
                    f"line {number}: {line[:40]!r} belongs to {system}, and there is no #SBATCH "
                    "line: this is not a Slurm script",
                    hint="`hpml import` reads scripts for sbatch; write the #SBATCH lines first",
                )
        if line.strip() and not line.lstrip().startswith("#"):
            return


def _apply(request: Request, option: Option, report: Report) -> None:
    request.options.pop(option.name, None)  # the last one also stands last
    request.options[option.name] = option
    name, value = option.name, option.value
    if not option.known:
        report.lost(
            option.line,
            option.shown,
            "hpml does not know this sbatch option",
            "if your site's sbatch has it, write it into resources.extra",
        )
    elif name in _NUMBERS:
        request.numbers[name] = _NUMBERS[name](value)
    elif name in ("gpus", "gpus-per-node", "gpus-per-task"):
        request.gpus[name] = parse_gpus(value.replace("gpu:", "")).kinds
    elif name in _TEXTS:
        request.texts[name] = value
    elif name in _SPECIAL:
        _SPECIAL[name](request, option, report)
    elif name in _NOT_CARRIED:
        kind, why, todo = _NOT_CARRIED[name]
        report.add(kind, option.line, option.shown, why, todo)  # type: ignore[arg-type]
    else:
        _extra(request, option, report)


def _extra(request: Request, option: Option, report: Report) -> None:
    text = f"--{option.name}={option.value}" if option.value else f"--{option.name}"
    if not _DIRECTIVE.fullmatch(text):
        why = "its value has characters that a job file does not allow"
        report.lost(option.line, option.shown, why, "set it as an SBATCH_… variable if you need it")
        return
    request.extra = [
        other for other in request.extra if other.partition("=")[0] != f"--{option.name}"
    ]
    request.extra.append(text)


def _nodes(request: Request, option: Option, report: Report) -> None:
    least, dash, most = option.value.partition("-")
    nodes = request.numbers["nodes"] = _count(least)
    if dash and _count(most) != nodes:
        report.changed(
            option.line,
            option.shown,
            f"a job file has one number of nodes: {nodes}, the smallest",
            f"for more: --set resources.nodes={_count(most)}",
        )


def _gres(request: Request, option: Option, report: Report) -> None:
    gpus: list[tuple[str, int]] = []
    others: list[str] = []
    for part in option.value.split(","):
        name, *rest = part.removeprefix("gres:").split("(")[0].replace("=", ":").split(":")
        if name.removeprefix("gres/") == "gpu":
            number = int(rest.pop()) if rest and re.fullmatch(r"[0-9]{1,4}", rest[-1]) else 1
            gpus.append((rest[0] if rest else "", number))
        elif part and part.lower() != "none":
            others.append(part)
    if gpus:
        request.gpus["gpus-per-node"] = tuple(gpus)
    if others:
        _extra(request, dataclasses.replace(option, value=",".join(others)), report)


def _exclusive(_: Request, option: Option, report: Report) -> None:
    if option.value:
        why = "hpml asks for whole nodes without further conditions"
        report.changed(option.line, option.shown, why)


def _mail_type(request: Request, option: Option, report: Report) -> None:
    request.mail_on = []
    for event in option.value.lower().split(","):
        if event in ("none", "all"):
            request.mail_on = _MAIL_EVENTS[:4] if event == "all" else []
        elif event in _MAIL_EVENTS:
            request.mail_on.append(event)
        else:
            report.lost(
                option.line,
                option.shown,
                f"resources.mail has no {event.upper()}",
                f"events are {', '.join(_MAIL_EVENTS)}",
            )
    request.mail_on = list(dict.fromkeys(request.mail_on))


def _count(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,7}", text.strip()) or int(text) < 1:
        raise ValueError(f"{text!r} is not a number above zero")
    return int(text)


_MEMORY = ("mem", "mem-per-cpu", "mem-per-gpu")
_NUMBERS: dict[str, Callable[[str], int]] = {
    **dict.fromkeys(
        "ntasks ntasks-per-node ntasks-per-gpu cpus-per-task cpus-per-gpu".split(), _count
    ),
    **dict.fromkeys(_MEMORY, parse_mebibytes),
    "time": lambda text: parse_time_limit(text) or 0,
}
_TEXTS = frozenset("job-name array chdir mail-user export partition account qos constraint".split())
_SPECIAL: dict[str, Callable[[Request, Option, Report], None]] = {
    "nodes": _nodes,
    "gres": _gres,
    "exclusive": _exclusive,
    "mail-type": _mail_type,
}
_OUTPUT = ("changed", "hpml keeps all output in the run's record", "`hpml logs RUN` prints it")
_NOT_CARRIED = {
    "output": _OUTPUT,
    "error": _OUTPUT,
    "dependency": (
        "lost",
        "the id of the other job changes with each submission",
        "name the other run: `hpml submit --after RUN JOB_FILE`",
    ),
    "clusters": ("lost", "hpml submits to the cluster it runs on", "run it on a login node there"),
    "comment": ("lost", "hpml writes the run's id there", ""),
    "requeue": ("lost", "hpml does not support requeue yet", "submit the job again by hand"),
    "input": ("lost", "ranks read no standard input", "pass the program a file name"),
    **dict.fromkeys(
        ("gpu-bind", "mem-bind", "tres-bind", "distribution", "hint"),
        ("lost", "hpml binds the ranks itself", "`binding` in the job file says how"),
    ),
    **dict.fromkeys(
        ("gpus-per-socket", "ntasks-per-tres", "tres-per-task"),
        ("lost", "a job file counts per node", "write resources.gpus and ranks_per_node"),
    ),
    **dict.fromkeys(
        "kill-on-invalid-dep no-requeue open-mode help ignore-pbs immediate parsable quiet "
        "test-only uid gid usage verbose version wait use-min-nodes".split(),
        ("dropped", "not needed in a job file", ""),
    ),
}


@dataclass(frozen=True)
class Allocation:
    """What Slurm gives to the script.

    Attributes:
        tasks: of the job; None where the header does not say.
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
        return _total(self.gpus)


def _total(gpus: Gpus | None) -> int:
    return sum(number for _, number in gpus or ())


def allocation(request: Request, report: Report) -> Allocation:
    """Return the allocation; where Slurm may choose the number of nodes, the fewest."""
    numbers = request.numbers
    per_node, tasks = numbers.get("ntasks-per-node"), numbers.get("ntasks")
    total_gpus = _total(request.gpus.get("gpus"))
    gpus_per_node = _total(request.gpus.get("gpus-per-node"))
    nodes = numbers.get("nodes")
    if nodes is None and tasks and per_node:
        nodes = -(-tasks // per_node)
    if nodes is None and total_gpus and gpus_per_node:
        nodes = -(-total_gpus // gpus_per_node)
    option = request.option("ntasks", "gpus")
    if nodes is None and option is not None and (tasks or total_gpus or 0) > 1:
        why = "without --nodes Slurm may use several nodes; the job file asks for one"
        report.changed(option.line, option.shown, why, "write resources.nodes for more")
    nodes = nodes or 1
    if tasks is None and per_node:
        tasks = nodes * per_node
    if tasks is None and "ntasks-per-gpu" in numbers:
        tasks = numbers["ntasks-per-gpu"] * (total_gpus or nodes * gpus_per_node)
    tasks_per_node = -(-tasks // nodes) if tasks else 1
    gpus = request.gpus.get("gpus-per-node", ())
    if not gpus and "gpus" in request.gpus:
        gpus = tuple((kind, -(-number // nodes)) for kind, number in request.gpus["gpus"])
        if any(number % nodes for _, number in request.gpus["gpus"]):
            option = request.options["gpus"]
            why = f"a job file has the same number of GPUs on each of {nodes} nodes: rounded up"
            report.changed(option.line, option.shown, why)
    elif not gpus:
        each = request.gpus.get("gpus-per-task", ())
        gpus = tuple((kind, number * tasks_per_node) for kind, number in each)
    cpus = tasks_per_node * numbers.get("cpus-per-task", 1)
    if "cpus-per-gpu" in numbers and "cpus-per-task" not in numbers:
        cpus = numbers["cpus-per-gpu"] * _total(gpus)
    return Allocation(nodes, tasks, tasks_per_node, gpus, cpus or 1)


def known_variables(request: Request, given: Allocation) -> dict[str, str]:
    """Return the variables that Slurm will set, as far as the header decides them."""
    known: dict[str, int | None] = {
        **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), given.nodes),
        "SLURM_CPUS_ON_NODE": given.cpus,
        "SLURM_CPUS_PER_TASK": request.numbers.get("cpus-per-task"),
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS"), given.tasks),
        "SLURM_NTASKS_PER_NODE": given.tasks_per_node if given.tasks else None,
        **dict.fromkeys(("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"), given.gpu_count),
        "SLURM_GPUS": given.gpu_count * given.nodes,
    }
    return {name: str(number) for name, number in known.items() if number}
