"""From the `#SBATCH` lines of a script to what it asks for, in one plain record."""

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
from hpml_orchestrator.spec.values import parse_memory, parse_time_limit

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpml_orchestrator.convert.findings import Report

__all__ = ["Gpus", "Request", "apply_option", "count", "parse_gpus", "read_request"]

_OTHERS = {"#PBS": "PBS", "#BSUB": "LSF", "#$ -": "Grid Engine", "#COBALT": "Cobalt"}
_DIRECTIVE = re.compile(r"--[a-z][a-z0-9-]*(=[A-Za-z0-9_.,:@/+=%*()\[\]|&-]+)?")

Gpus = tuple[tuple[str, int], ...]
"""Type and number of GPUs; an empty type means any."""


@dataclass
class Request:
    """What the header asks for; None where it does not say.

    Attributes:
        memory_mb: per node in MiB; 0 is all of it.
        seconds: time limit; 0 is none.
        simple: fields of `resources` whose values are taken as they are.
        extra: options for `resources.extra`.
        options: last option of each name, for messages.
    """

    name: str | None = None
    nodes: int | None = None
    ntasks: int | None = None
    ntasks_per_node: int | None = None
    ntasks_per_gpu: int | None = None
    cpus_per_task: int | None = None
    cpus_per_gpu: int | None = None
    gpus: Gpus | None = None
    gpus_per_node: Gpus | None = None
    gpus_per_task: Gpus | None = None
    memory_mb: int | None = None
    memory_per_cpu_mb: int | None = None
    memory_per_gpu_mb: int | None = None
    seconds: int | None = None
    array: str | None = None
    directory: str | None = None
    exclusive: bool = False
    mail_to: str | None = None
    mail_on: list[str] = field(default_factory=list)
    export: str | None = None
    simple: dict[str, str] = field(default_factory=dict)
    extra: list[str] = field(default_factory=list)
    options: dict[str, Option] = field(default_factory=dict)

    def said(self, *names: str) -> Option | None:
        """Return the option of these names that the script has."""
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
                hint="make one script, and one job file, per component",
            )
        raise InputError(
            f"line {word.line}: {word.text!r} in an #SBATCH line is no option",
            hint="sbatch refuses it, too: remove it, or put quotes around a value with blanks",
        )
    request = Request()
    for option in options:
        try:
            apply_option(request, option, report)
        except ValueError as error:
            raise InputError(
                f"line {option.line}: {option.shown}: {error}",
                hint="correct the #SBATCH line; sbatch refuses it, too",
            ) from None
    _exclude_each_other(request, report)
    return request


def _check_system(script: str) -> None:
    for number, line in enumerate(script.split("\n"), start=1):
        for mark, system in _OTHERS.items():
            if line.startswith(mark):
                raise InputError(
                    f"line {number}: {line[:40]!r} belongs to {system}, and there is no #SBATCH "
                    "line: this is no Slurm script",
                    hint="`hpml import` reads scripts for sbatch; write the #SBATCH lines first",
                )
        if line.strip() and not line.lstrip().startswith("#"):
            return


def _exclude_each_other(request: Request, report: Report) -> None:
    """Of options that exclude each other keep the last, as sbatch does for memory."""
    names = {"mem": "memory_mb", "mem-per-cpu": "memory_per_cpu_mb"}
    names["mem-per-gpu"] = "memory_per_gpu_mb"
    given = [name for name in request.options if name in names]
    for name in given[:-1]:
        option = request.options[name]
        setattr(request, names[name], None)
        report.lost(
            option.line,
            option.shown,
            f"--{given[-1]} stands below it, and Slurm takes one of the two",
        )


def apply_option(request: Request, option: Option, report: Report) -> None:
    """Put one option into a request.

    Raises:
        ValueError: its value is none that sbatch would take.
    """
    request.options.pop(option.name, None)  # the last one also stands last
    request.options[option.name] = option
    name, value = option.name, option.value
    if not option.known:
        report.lost(
            option.line,
            option.shown,
            "no sbatch option that hpml knows",
            "if your site's sbatch has it, write it into resources.extra",
        )
    elif name in _FIELDS:
        attribute, read = _FIELDS[name]
        setattr(request, attribute, read(value))
    elif name in _SIMPLE:
        request.simple[name] = value
    elif name in _SPECIAL:
        _SPECIAL[name](request, option, report)
    elif name in _LOST:
        kind, why, todo = _LOST[name]
        report.add(kind, option.line, option.shown, why, todo)  # type: ignore[arg-type]
    else:
        _extra(request, option, report)


def _extra(request: Request, option: Option, report: Report) -> None:
    text = f"--{option.name}={option.value}" if option.value else f"--{option.name}"
    if not _DIRECTIVE.fullmatch(text):
        report.lost(
            option.line,
            option.shown,
            "its value has characters that hpml lets into no script",
            "set it in your environment, as in SBATCH_… variables, if you need it",
        )
        return
    request.extra = [one for one in request.extra if one.partition("=")[0] != f"--{option.name}"]
    request.extra.append(text)


def _nodes(request: Request, option: Option, report: Report) -> None:
    least, dash, most = option.value.partition("-")
    if not dash and re.search(r"[,:]", option.value):
        raise ValueError("is no number of nodes, as it is a list")
    request.nodes = count(least)
    if dash and count(most) != request.nodes:
        report.changed(
            option.line,
            option.shown,
            f"a job file has one number of nodes: {request.nodes}, the least",
            f"for more: --set resources.nodes={count(most)}",
        )


def _gres(request: Request, option: Option, report: Report) -> None:
    gpus: list[tuple[str, int]] = []
    others: list[str] = []
    for part in option.value.split(","):
        name, *rest = part.removeprefix("gres:").split("(")[0].replace("=", ":").split(":")
        if name.removeprefix("gres/") != "gpu":
            others.append(part)
            continue
        number = int(rest.pop()) if rest and re.fullmatch(r"\d{1,4}", rest[-1], re.ASCII) else 1
        gpus.append((rest[0] if rest else "", number))
    if gpus:
        request.gpus_per_node = tuple(gpus)
    others = [one for one in others if one and one.lower() != "none"]
    if others:
        _extra(request, dataclasses.replace(option, value=",".join(others)), report)


def _exclusive(request: Request, option: Option, report: Report) -> None:
    request.exclusive = True
    if option.value:
        report.changed(
            option.line,
            option.shown,
            "hpml asks for whole nodes, whoever is on the others",
            "for nodes shared with your own jobs leave resources.exclusive out",
        )


_MAIL = {
    **{name.upper(): (name,) for name in ("begin", "end", "fail", "requeue")},
    "TIME_LIMIT_80": ("time_limit_80",),
    "TIME_LIMIT_90": ("time_limit_90",),
    "ALL": ("begin", "end", "fail", "requeue"),
}


def _mail_type(request: Request, option: Option, report: Report) -> None:
    request.mail_on = []
    for event in option.value.upper().split(","):
        if event == "NONE":
            request.mail_on = []
        elif event in _MAIL:
            request.mail_on += [one for one in _MAIL[event] if one not in request.mail_on]
        else:
            report.lost(
                option.line,
                option.shown,
                f"resources.mail has no {event}",
                "there are begin, end, fail, requeue, time_limit_80 and time_limit_90",
            )


def count(text: str) -> int:
    """Return a number above zero.

    Raises:
        ValueError: it is none, or over a million.
    """
    if not re.fullmatch(r"\d{1,7}", text.strip(), re.ASCII) or int(text) < 1:
        raise ValueError(f"{text!r} is no number above zero")
    return int(text)


def parse_gpus(text: str) -> Gpus:
    """Return types and numbers of `[type:]number[,...]`.

    Raises:
        ValueError: it is no such list.
    """
    found = []
    for part in text.split(","):
        kind, _, number = part.rpartition(":")
        if not re.fullmatch(r"\d{1,5}", number, re.ASCII):
            raise ValueError(f"{part!r} is no number of GPUs")
        found.append((kind.removeprefix("gpu:"), int(number)))
    return tuple(found)


_FIELDS: dict[str, tuple[str, Callable[[str], object]]] = {
    "job-name": ("name", str),
    "ntasks": ("ntasks", count),
    "ntasks-per-node": ("ntasks_per_node", count),
    "ntasks-per-gpu": ("ntasks_per_gpu", count),
    "cpus-per-task": ("cpus_per_task", count),
    "cpus-per-gpu": ("cpus_per_gpu", count),
    "gpus": ("gpus", parse_gpus),
    "gpus-per-node": ("gpus_per_node", parse_gpus),
    "gpus-per-task": ("gpus_per_task", parse_gpus),
    "mem": ("memory_mb", parse_memory),
    "mem-per-cpu": ("memory_per_cpu_mb", parse_memory),
    "mem-per-gpu": ("memory_per_gpu_mb", parse_memory),
    "time": ("seconds", lambda text: parse_time_limit(text) or 0),
    "array": ("array", str),
    "chdir": ("directory", str),
    "mail-user": ("mail_to", str),
    "export": ("export", str),
}
_SIMPLE = frozenset({"partition", "account", "qos", "constraint"})
_SPECIAL: dict[str, Callable[[Request, Option, Report], None]] = {
    "nodes": _nodes,
    "gres": _gres,
    "exclusive": _exclusive,
    "mail-type": _mail_type,
}
_OUTPUT = (
    "changed",
    "hpml keeps all output in the run's record",
    "`hpml logs RUN` prints it, `hpml logs -f RUN` follows it",
)
_CALL = ("dropped", "belongs to the call of sbatch, not to the job", "")
_BINDING = ("lost", "where ranks run on a node is hpml's to say", "")
_LOST = {
    "output": _OUTPUT,
    "error": _OUTPUT,
    "input": ("lost", "ranks read no standard input", "give the program a file's name"),
    "open-mode": ("dropped", "hpml always appends", ""),
    "dependency": (
        "lost",
        "the id of the other job changes with each submission",
        "name the other run: `hpml submit --after RUN JOB_FILE`",
    ),
    "kill-on-invalid-dep": ("dropped", "comes with `after`", ""),
    "requeue": ("lost", "hpml has no requeue yet", "submit the job again by hand"),
    "no-requeue": ("dropped", "hpml asks for no requeue", ""),
    "signal": (
        "lost",
        "hpml sends no signal before the time limit yet",
        "write checkpoints at an interval of your own",
    ),
    "comment": ("lost", "hpml writes the run's id there", ""),
    "use-min-nodes": ("dropped", "a job file has one number of nodes", ""),
    "clusters": (
        "lost",
        "hpml speaks with the cluster that it is called on",
        "call it on a login node of that cluster, or set SLURM_CONF",
    ),
    "wrap": ("lost", "sbatch takes it on the command line only", ""),
    "export-file": (
        "lost",
        "hpml reads no file of variables",
        "write them into environment.variables",
    ),
    "get-user-env": (
        "changed",
        "hpml takes the environment of `hpml submit`",
        "environment.inherit: minimal gives ranks only what a login has",
    ),
    "container": (
        "lost",
        "hpml starts containers through apptainer or pyxis, not through Slurm's OCI runtime",
        "write environment.container",
    ),
    "gpus-per-socket": ("lost", "a job file counts GPUs per node", "write resources.gpus"),
    "ntasks-per-tres": ("lost", "a job file counts ranks per node", "write ranks_per_node"),
    "tres-per-task": ("lost", "a job file counts GPUs per node", "write resources.gpus"),
    **dict.fromkeys(("gpu-bind", "mem-bind", "tres-bind", "distribution", "hint"), _BINDING),
    **dict.fromkeys(
        "help ignore-pbs immediate parsable quiet test-only uid gid usage verbose version wait "
        "autocomplete disable-stdout-job-summary".split(),
        _CALL,
    ),
}
