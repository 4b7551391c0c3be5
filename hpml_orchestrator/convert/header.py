"""Read the `#SBATCH` header of a script, and compute what Slurm would give the job."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpml_orchestrator.convert.report import OUTPUT, ImportReport, Kind
from hpml_orchestrator.errors import InputError
from hpml_orchestrator.records.job import SIGNALS
from hpml_orchestrator.records.units import (
    Gpus,
    parse_count,
    parse_gpu_option,
    parse_mebibytes,
    parse_time_limit,
    split_list,
)
from hpml_orchestrator.scheduler.slurm.options import (
    SBATCH,
    HeaderError,
    Option,
    header_words,
    read_options,
)

if TYPE_CHECKING:
    from collections.abc import Callable

MEMORY = ("mem", "mem-per-cpu", "mem-per-gpu")
GPUS = ("gres", "gpus", "gpus-per-node", "gpus-per-task")

_OTHER_SYSTEMS = {"#PBS": "PBS", "#BSUB": "LSF", "#$ -": "Grid Engine", "#COBALT": "Cobalt"}
_MAIL_EVENTS = "begin end fail requeue time_limit_80 time_limit_90".split()
_SIGNAL_SECONDS = 60  # Slurm's default
_REQUEUES_ITSELF = re.compile(r"^[^#\n]*\bscontrol\s+requeue\b", re.MULTILINE)


@dataclass
class Header:
    """What the header requests, by the long names of its options.

    Attributes:
        options: the last option of each name.
        numbers: counts; memory in MiB, 0 for all of it; time limit in seconds, 0 for none.
        gpus: of `--gpus`, `--gpus-per-node` (also `--gres`) and `--gpus-per-task`.
        mail_on: events that Slurm sends mail about.
        extra: options for `resources.extra`.
        signal: of `--signal`, for `checkpoint.signal`; empty for none.
        signal_seconds: how long before the time limit it is sent.
        requeue: the job states after which the script continues, for `checkpoint.requeue`.
    """

    options: dict[str, Option] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    gpus: dict[str, Gpus] = field(default_factory=dict)
    mail_on: list[str] = field(default_factory=list)
    extra: dict[str, Option] = field(default_factory=dict)
    signal: str = ""
    signal_seconds: int = 0
    requeue: list[str] = field(default_factory=list)

    def option(self, *names: str) -> Option | None:
        """Return the first of these options that the script has."""
        return next((self.options[name] for name in names if name in self.options), None)

    def text(self, name: str) -> str:
        """Return the value of an option; empty if the script does not have it."""
        return self.options[name].value if name in self.options else ""


def read_header(script: str, report: ImportReport) -> Header:
    """Return what the header of a script requests; the last option of a name counts.

    Raises:
        InputError: it is not a shell script for Slurm, or sbatch cannot read the header.
    """
    _check_first(script.partition("\n")[0], report)
    try:
        words = list(header_words(script))
        hetjob = next((n for n, one in enumerate(words) if one.text == "hetjob"), len(words))
        options, others = read_options(words[:hetjob], SBATCH)
    except HeaderError as error:
        raise InputError(f"line {error.line}: {error}", hint=error.hint) from None
    # A script may carry the headers of several systems.
    for number, line in enumerate(script.split("\n") if not options else (), start=1):
        for system in (name for mark, name in _OTHER_SYSTEMS.items() if line.startswith(mark)):
            raise InputError(
                f"line {number}: {line[:40]!r} belongs to {system}, and there is no #SBATCH line",
                hint="`hpml import` reads scripts for sbatch; write the #SBATCH lines first",
            )
    for word in others:
        why, todo = "not an option: sbatch refuses it", "remove it, or quote a value with blanks"
        report.lost(word.line, word.text, why, todo)
    for word in words[hetjob : hetjob + 1]:
        why = "hpml has no heterogeneous jobs: the draft asks for the first component only"
        report.lost(word.line, "hetjob", why, "write a job file for each component")
        for other in words[hetjob + 1 :]:
            report.add("dropped", other.line, other.text, why)
    header = Header()
    if _REQUEUES_ITSELF.search(script):
        header.requeue.append("time_limit")
    for option in options:
        apply_option(header, option, report)
    return header


def _check_first(first: str, report: ImportReport) -> None:
    interpreter = [os.path.basename(word) for word in first[2:].split() if word[0] != "-"]
    if not first.startswith("#!") or interpreter[-1:] not in (["bash"], ["sh"], ["dash"]):
        raise InputError(
            f"line 1: {first[:60]}: hpml reads scripts for sh and bash",
            hint="the first line must be #! and a shell, such as #!/bin/bash",
        )
    if flags := [word for word in first.split()[1:] if word[0] == "-" and word != "-S"]:
        why = "hpml's script has `#!/bin/bash`, and the environment that you submit from"
        todo = "for a login shell: call `hpml submit` in one, or source the files in setup"
        report.changed(1, first, why, todo if {"-l", "--login"} & {*flags} else "")


def apply_option(header: Header, option: Option, report: ImportReport) -> None:
    """Add an option to a header; one that Slurm would refuse is noted instead."""
    name, value = option.name, option.value
    for other in MEMORY if name in MEMORY else ():
        # sbatch's three memory options exclude each other, and the last one counts.
        if other != name and (earlier := header.options.pop(other, None)):
            del header.numbers[other]
            why = f"--{name} in line {option.line} replaces it"
            report.add("dropped", earlier.line, earlier.shown, why)
    try:
        if name in _NUMBERS:
            header.numbers[name] = _NUMBERS[name](value)
        elif name in ("gpus", "gpus-per-node", "gpus-per-task"):
            header.gpus[name] = parse_gpu_option(value)
        elif name in _SPECIAL:
            _SPECIAL[name](header, option, report)
        elif name in _NOT_CARRIED:
            kind, why, todo = _NOT_CARRIED[name]
            report.add(kind, option.line, option.shown, why, todo)
        elif name not in _TEXTS:
            _extra(header, option, report)
    except ValueError as error:
        why = f"Slurm refuses it, too: {error}"
        report.lost(option.line, option.shown, why, "correct the value")
        return
    header.options[name] = option


def _extra(header: Header, option: Option, report: ImportReport) -> None:
    text = f"--{option.name}={option.value}" if option.value else f"--{option.name}"
    if option.known and re.fullmatch(
        r"--[a-z][a-z0-9-]*(=[\w.,:@/+=%*()\[\]|&-]+)?", text, re.ASCII
    ):
        header.extra[option.name] = Option(option.name, text, option.shown, option.line, known=True)
    else:
        why = "its value has odd characters" if option.known else "hpml does not know this option"
        report.lost(option.line, option.shown, why, "write it into resources.extra if you need it")


def _nodes(header: Header, option: Option, report: ImportReport) -> None:
    least, _, most = option.value.partition("-")
    nodes = header.numbers["nodes"] = parse_count(least)
    if most and parse_count(most) != nodes:
        why = f"a job file has one number of nodes: {nodes}, the smallest"
        report.changed(option.line, option.shown, why, f"for more: --set resources.nodes={most}")


def _gres(header: Header, option: Option, report: ImportReport) -> None:
    parts = [part for part in split_list(option.value) if part and part.lower() != "none"]
    gpus = [part for part in parts if re.match(r"(gres[:/])?gpu\b", part)]
    if gpus:
        header.gpus["gpus-per-node"] = parse_gpu_option(",".join(gpus))
    # Only GPUs have a field; the rest of `--gres`, such as local disks, stays an option.
    if others := ",".join(part for part in parts if part not in gpus):
        _extra(header, Option("gres", others, option.shown, option.line, known=True), report)


def _mail_type(header: Header, option: Option, report: ImportReport) -> None:
    events = option.value.lower().replace("all", ",".join(_MAIL_EVENTS[:4])).split(",")
    wanted = {*header.mail_on, *events}  # sbatch adds up several --mail-type
    header.mail_on = [event for event in _MAIL_EVENTS if event in wanted]
    if others := set(events) - {*_MAIL_EVENTS, "none"}:
        why = f"resources.mail has no {', '.join(sorted(others)).upper()}"
        report.lost(option.line, option.shown, why, f"events are {', '.join(_MAIL_EVENTS)}")


def _requeue(header: Header, _option: Option, _report: ImportReport) -> None:
    header.requeue += ["preemption", "node_failure"]


def _signal(header: Header, option: Option, report: ImportReport) -> None:
    """Read `[B:|R:]SIGNAL[@SECONDS]`; a signal that `checkpoint` cannot name stays an option."""
    match = re.fullmatch(r"([BR]{1,2}:)?(?:SIG)?([A-Z]+\d?)(?:@(\d{1,5}))?", option.value.upper())
    if match is None or match[2] not in SIGNALS:
        _extra(header, option, report)
        return
    header.signal = match[2]
    header.signal_seconds = _SIGNAL_SECONDS if match[3] is None else int(match[3])
    if match[1] and "B" in match[1]:
        why = "hpml sends the signal to the ranks, not to the script"
        report.changed(option.line, option.shown, why, "handle it in the program: `checkpoint`")


_NUMBERS: dict[str, Callable[[str], int]] = {
    **dict.fromkeys(
        "ntasks ntasks-per-node ntasks-per-gpu cpus-per-task cpus-per-gpu".split(), parse_count
    ),
    **dict.fromkeys(MEMORY, parse_mebibytes),
    "time": lambda text: parse_time_limit(text) or 0,
}
_TEXTS = frozenset(
    "job-name array chdir mail-user export partition account qos constraint exclusive".split()
)
_SPECIAL: dict[str, Callable[[Header, Option, ImportReport], None]] = {
    "nodes": _nodes,
    "gres": _gres,
    "mail-type": _mail_type,
    "requeue": _requeue,
    "signal": _signal,
}
_NOT_CARRIED: dict[str, tuple[Kind, str, str]] = {
    **dict.fromkeys(("output", "error"), ("changed", *OUTPUT)),
    **dict.fromkeys(
        "gpu-bind mem-bind tres-bind distribution hint".split(),
        ("lost", "hpml binds the ranks itself", "set `binding` in the job file"),
    ),
    "dependency": (
        "lost",
        "the id of the other job changes with each submission",
        "name the run that must end first: `hpml submit --after [any:]RUN JOB_FILE`",
    ),
    "clusters": ("lost", "hpml submits to the cluster it runs on", "run it on a login node there"),
    "comment": ("lost", "hpml writes the run's id there", ""),
    "input": ("lost", "ranks read no standard input", "pass the program a file name"),
    **dict.fromkeys(
        "get-user-env export-file gpus-per-socket ntasks-per-tres tres-per-task".split(),
        ("lost", "a job file has no field for it", "use another option, such as --gpus-per-node"),
    ),
    **dict.fromkeys(
        "kill-on-invalid-dep no-requeue open-mode help ignore-pbs immediate parsable quiet "
        "test-only uid gid usage verbose version wait use-min-nodes wrap".split(),
        ("dropped", "not needed in a job file", ""),
    ),
}


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
    """Return the allocation; if Slurm may choose the number of nodes, the fewest."""
    numbers = header.numbers
    per_node, tasks = numbers.get("ntasks-per-node"), numbers.get("ntasks")
    all_gpus, gpus = header.gpus.get("gpus", Gpus(())), header.gpus.get("gpus-per-node", Gpus(()))
    nodes = _node_count(header, per_node, tasks, report)
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
    if not gpus.count and tasks and numbers.get("ntasks-per-gpu"):
        gpus = Gpus((("", -(-tasks_per_node // numbers["ntasks-per-gpu"])),))
    cpus = tasks_per_node * numbers.get("cpus-per-task", 1)
    if "cpus-per-gpu" in numbers and "cpus-per-task" not in numbers:
        cpus = numbers["cpus-per-gpu"] * gpus.count
    return Allocation(nodes, tasks, gpus, cpus or 1)


def _node_count(
    header: Header, per_node: int | None, tasks: int | None, report: ImportReport
) -> int:
    nodes, option = header.numbers.get("nodes"), header.option("ntasks", "gpus")
    gpus = header.gpus["gpus"].count if "gpus" in header.gpus else 0
    each = header.gpus["gpus-per-node"].count if "gpus-per-node" in header.gpus else 0
    for total, part in ((tasks, per_node), (gpus, each)):
        if nodes is None and total and part:
            nodes = -(-total // part)
    if option is not None and nodes is None and (tasks or gpus) > 1:
        why = "without --nodes Slurm may use several nodes; the job file asks for one"
        report.changed(option.line, option.shown, why, "write resources.nodes for more")
    nodes = nodes or 1
    if option is not None and (gpus % nodes or (tasks or 0) % nodes):
        why = f"does not divide by {nodes} nodes, and all nodes of a job file are alike"
        report.lost(option.line, option.shown, why, "the draft rounds up: correct resources")
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
