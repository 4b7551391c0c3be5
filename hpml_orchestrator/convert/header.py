"""Read the `#SBATCH` header of a script."""

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

_OTHER_SYSTEMS = {"#PBS": "PBS", "#BSUB": "LSF", "#$ -": "Grid Engine", "#COBALT": "Cobalt"}
_MAIL_EVENTS = "begin end fail requeue time_limit_80 time_limit_90".split()
_SIGNAL_SECONDS = 60  # Slurm's default
_REQUEUES_ITSELF = re.compile(r"^[^#\n]*\bscontrol\s+requeue\b", re.MULTILINE)
_MEMORY = ("mem", "mem-per-cpu", "mem-per-gpu")


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
    extra: dict[str, str] = field(default_factory=dict)
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
        InputError: it is not a shell script for Slurm, or sbatch would refuse the header.
    """
    first, *lines = script.split("\n")
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
    try:
        options, others = read_options(list(header_words(script)), SBATCH)
    except HeaderError as error:
        raise InputError(f"line {error.line}: {error}", hint=error.hint) from None
    # A script may carry the headers of several systems; only one without any `#SBATCH` line is
    # refused.
    for number, line in enumerate(lines if not options else (), start=2):
        for system in (name for mark, name in _OTHER_SYSTEMS.items() if line.startswith(mark)):
            raise InputError(
                f"line {number}: {line[:40]!r} belongs to {system}, and there is no #SBATCH line",
                hint="`hpml import` reads scripts for sbatch; write the #SBATCH lines first",
            )
    for word in others:
        known = {"hetjob": "hpml has no heterogeneous jobs: write a script per component"}
        raise InputError(
            f"line {word.line}: {word.text!r} in an #SBATCH line is not an option",
            hint=known.get(word.text, "remove it, or quote a value with blanks"),
        )
    header = Header()
    if _REQUEUES_ITSELF.search(script):
        header.requeue.append("time_limit")
    for option in options:
        try:
            apply_option(header, option, report)
        except ValueError as error:
            raise InputError(
                f"line {option.line}: {option.shown}: {error}",
                hint="correct the line; Slurm also refuses it",
            ) from None
    return header


def apply_option(header: Header, option: Option, report: ImportReport) -> None:
    """Add an option to a header.

    Raises:
        ValueError: Slurm would refuse its value.
    """
    name, value = option.name, option.value
    for other in _MEMORY if name in _MEMORY else ():
        # sbatch's three memory options exclude each other, and the last one counts.
        if other != name and (earlier := header.options.pop(other, None)):
            del header.numbers[other]
            why = f"--{name} in line {option.line} replaces it"
            report.lost(earlier.line, earlier.shown, why)
    header.options[name] = option
    if name in _NUMBERS:
        header.numbers[name] = _NUMBERS[name](value)
    elif name in ("gpus", "gpus-per-node", "gpus-per-task"):
        header.gpus[name] = parse_gpu_option(value)
    elif name in _SPECIAL:
        _SPECIAL[name](header, option, report)
    elif name in _NOT_CARRIED:
        kind, why, todo = _NOT_CARRIED[name]
        if value == "singleton":
            why = "a job file names the runs that a job waits for"
            todo = "`hpml submit --after any:RUN JOB_FILE`, or `checkpoint` if the runs continue"
            todo += " one another"
        report.add(kind, option.line, option.shown, why, todo)
    elif name not in _TEXTS:
        _extra(header, option, report)


def _extra(header: Header, option: Option, report: ImportReport) -> None:
    text = f"--{option.name}={option.value}" if option.value else f"--{option.name}"
    if option.known and re.fullmatch(
        r"--[a-z][a-z0-9-]*(=[\w.,:@/+=%*()\[\]|&-]+)?", text, re.ASCII
    ):
        header.extra[option.name] = text
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
    # Only GPUs have a field in the job file; the rest of `--gres`, such as local disks, stays an
    # option.
    gpus = [part for part in parts if re.match(r"(gres[:/])?gpu\b", part)]
    if gpus:
        header.gpus["gpus-per-node"] = parse_gpu_option(",".join(gpus))
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
    **dict.fromkeys(_MEMORY, parse_mebibytes),
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
        "name the other run: `hpml submit --after RUN JOB_FILE`",
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
