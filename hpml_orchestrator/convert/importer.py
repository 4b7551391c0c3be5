"""From the text of an sbatch script to a job file, and to what is to be said about it."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.convert.body import Walk
from hpml_orchestrator.convert.document import write
from hpml_orchestrator.convert.draft import Draft
from hpml_orchestrator.convert.environment import put_environment
from hpml_orchestrator.convert.findings import Finding, Report
from hpml_orchestrator.convert.header import Request, read_request
from hpml_orchestrator.convert.launch import Launch
from hpml_orchestrator.convert.lexer import ShellError
from hpml_orchestrator.convert.parser import parse
from hpml_orchestrator.convert.program import Placer, program
from hpml_orchestrator.convert.resources import (
    Size,
    allocation,
    known_variables,
    megabytes,
    size,
)
from hpml_orchestrator.convert.starter import starter
from hpml_orchestrator.convert.values import Expander
from hpml_orchestrator.errors import InputError
from hpml_orchestrator.spec.values import format_time

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Imported", "Place", "import_script"]

_SHELLS = frozenset("sh bash dash ksh zsh ash".split())
_DEFAULT_TIME = "01:00:00"
_MAX_OTHERS = 20
_MOST_SHARE = 100  # ranks that a job file lets share a GPU


@dataclass(frozen=True)
class Place:
    """Where an import happens.

    Attributes:
        directory: absolute; where sbatch would be called, and so where the script starts.
        base: absolute; the directory of the job file, which its relative paths count from.
        environment: of the caller: sbatch passes it on to the script.
    """

    directory: str
    base: str
    environment: Mapping[str, str]

    def path(self, path: str) -> str:
        """Return a path as a job file has it: relative to it where it lies below, `~` for home."""
        full = os.path.normpath(os.path.join(self.directory, path))
        for root, shown in ((self.base, ""), (self.environment.get("HOME", ""), "~/")):
            if root and root != "/" and full == root:
                return "." if not shown else "~"
            if root and root != "/" and full.startswith(f"{root}/"):
                return shown + full[len(root) + 1 :]
        return full


@dataclass(frozen=True)
class Imported:
    """A job file made of a script.

    Attributes:
        job: its fields as plain data.
        text: as YAML.
        findings: what was not carried as it stands, by line.
    """

    job: dict[str, Any]
    text: str
    findings: tuple[Finding, ...]


def import_script(text: str, *, name: str, place: Place) -> Imported:
    """Return the job file of an sbatch script; nothing of the script is run.

    Args:
        text: the script.
        name: its file name, which names the job where no --job-name does.
        place: where it would be submitted, and where the job file will lie.

    Raises:
        InputError: it is no script for sbatch, no shell script, or starts no program.
    """
    report = Report()
    _check_interpreter(text)
    request = read_request(text, report)
    given = allocation(request, report)
    start = os.path.normpath(os.path.join(place.directory, request.directory or ""))
    known = known_variables(request, given)
    known |= {"SLURM_SUBMIT_DIR": place.directory, "SLURM_JOB_NAME": request.name or name}
    expander = Expander(place.environment, known, start)
    walk = Walk(expander, report)
    try:
        walk.script(parse(text))
    except ShellError as error:
        raise InputError(
            f"line {error.line}: {error}",
            hint=f"`bash -n {shlex.quote(name)}` says what bash thinks of the script",
        ) from None
    launch = _choose(walk.found.launches, report)
    report.merge(launch.notes)
    draft = Draft()
    _put_name(draft, request, name, report)
    if request.array is not None:
        draft.put("array", request.array, request.options["array"].line, f"array: {request.array}")
    wanted = size(request, given, launch, report)
    _put_program(draft, launch, walk, place, start, wanted.nodes, report)
    _put_resources(draft, request, wanted, launch, place, report)
    put_environment(draft, launch, walk, request, wanted, place, report)
    _put_stages(draft, walk, place, report)
    _say_rest(walk, report)
    job = draft.finished(report)
    findings = report.findings()
    return Imported(job, write(job, _notes(name, findings)), findings)


def _check_interpreter(text: str) -> None:
    first = text.split("\n", 1)[0]
    if not first.startswith("#!"):
        raise InputError(
            "line 1: does not begin with #! and the path of a shell: this is no batch script",
            hint="sbatch refuses it, too; write #!/bin/bash as its first line",
        )
    words = first[2:].split()
    names = [os.path.basename(word) for word in words if not word.startswith("-")]
    if names[:1] == ["env"]:
        names = names[1:]
    if not names or names[0] not in _SHELLS:
        raise InputError(
            f"line 1: {first[:60]}: hpml reads scripts for sh and bash",
            hint="write a job file with `command: [INTERPRETER, SCRIPT]` by hand",
        )


def _choose(launches: list[Launch], report: Report) -> Launch:
    """Return the launch that is carried: one that trains before others, then the last."""
    if not launches:
        raise InputError(
            "no line starts a program",
            hint="what should run: srun, torchrun, mpirun, python …? A job file needs one",
        )
    best = max(
        range(len(launches)),
        key=lambda index: (launches[index].trains, bool(launches[index].launcher), index),
    )
    chosen = launches[best]
    rounds = [chosen]
    if chosen.looped:
        rounds = [
            one
            for one in launches
            if (one.looped, one.line, one.source) == (chosen.looped, chosen.line, chosen.source)
        ]
        chosen = rounds[0]
    kept = {id(one) for one in rounds}
    for other in [one for one in launches if id(one) not in kept][:_MAX_OTHERS]:
        report.lost(
            other.line,
            other.source,
            f"one job file runs one program: that of line {chosen.line} is carried",
            "make a job file of its own for it",
        )
    if len(rounds) > 1:
        report.lost(
            chosen.line,
            chosen.source,
            f"a loop starts it {len(rounds)} times; one job file runs one program: the first "
            "is carried",
            "submit the others as jobs of their own, with --set args.N=VALUE",
        )
    return chosen


def _put_name(draft: Draft, request: Request, file: str, report: Report) -> None:
    stem = os.path.splitext(os.path.basename(file))[0]
    said = request.said("job-name")
    wanted = request.name or stem
    made = re.sub(r"[^A-Za-z0-9._+-]+", "-", wanted).lstrip("._+-")[:64] or "job"
    line, shown = (said.line, said.shown) if said else (0, "no --job-name")
    if said and made != wanted:
        report.changed(line, shown, f"a job's name has letters, digits and . _ + - only: {made}")
    draft.put("name", made, line, shown)


def _put_program(
    draft: Draft,
    launch: Launch,
    walk: Walk,
    place: Place,
    start: str,
    nodes: int,
    report: Report,
) -> None:
    line, text = launch.line, launch.source
    launcher, mpi = starter(launch, nodes, report)
    if launcher != "torchrun":
        draft.put("launcher", launcher, line, text)
    if mpi != "none":
        draft.put("mpi", mpi, line, f"mpi: {mpi}")
    directory = launch.directory
    if "\0" in directory or launch.on_node:
        report.lost(
            line,
            f"cd {walk.expander.source(directory)}",
            "hpml runs in a directory that all nodes see",
            "give the program the paths of staged data as {stage.NAME}",
        )
        directory = start
    if place.path(directory) != ".":
        draft.put("workdir", place.path(directory), line, text)
    placer = Placer(walk.expander, walk.staging, report)
    made = program(launch, placer)
    script = made.script
    if script is not None and script.startswith(f"{directory}/"):
        script = script.removeprefix(f"{directory}/")
    for field, value in (
        ("script", script),
        ("module", made.module),
        ("command", made.command),
        ("args", made.args or None),
    ):
        if value is not None:
            draft.put(field, value, line, text)
    python = made.python
    if python is not None:
        if "/" in python:
            python = place.path(os.path.join(directory, python))
            python = python if "/" in python else f"./{python}"
        draft.put("environment.python", python, line, text)
    _say_taken(walk, launch, made.args, report)


def _say_taken(walk: Walk, launch: Launch, args: list[str], report: Report) -> None:
    text = " ".join(args)
    for name, (value, origin) in walk.expander.taken.items():
        if not value or value not in text or not re.search(rf"\$\{{?{name}\b", launch.source):
            continue
        if origin == "environment":
            report.changed(
                launch.line, f"${name}", f"a job file takes text as it stands: {value}, as set here"
            )
        elif origin == "header":
            report.changed(launch.line, f"${name}", f"written as {value}: change it with resources")
    for name, (value, origin) in walk.expander.taken.items():
        if origin == "default" and value and value in text and "\0" not in value:
            report.changed(
                0,
                f"${{{name}:-{value}}}",
                f"{name} is set neither here nor in the script: {value}",
                "--set args.N=… gives another for one submission",
            )


def _put_resources(  # noqa: C901 - one branch per field
    draft: Draft, request: Request, wanted: Size, launch: Launch, place: Place, report: Report
) -> None:
    def put(field: str, value: Any, *options: str) -> None:
        option = request.said(*options)
        line, text = (option.line, option.shown) if option else (launch.line, launch.source)
        draft.put(f"resources.{field}", value, line, text)

    gpu_count = sum(number for _, number in wanted.gpus)
    if wanted.nodes != 1:
        put("nodes", wanted.nodes, "nodes")
    if gpu_count:
        shown = [f"{kind}:{number}" if kind else str(number) for kind, number in wanted.gpus]
        gpus: Any = shown if len(shown) > 1 else shown[0]
        if isinstance(gpus, str) and gpus.isdigit():
            gpus = int(gpus)
        put("gpus", gpus, "gres", "gpus-per-node", "gpus", "gpus-per-task")
    if gpu_count and wanted.ranks % gpu_count == 0 and 1 < wanted.ranks // gpu_count <= _MOST_SHARE:
        put(
            "ranks_per_gpu",
            wanted.ranks // gpu_count,
            "ntasks-per-node",
            "ntasks",
            "ntasks-per-gpu",
        )
    elif wanted.ranks != (gpu_count or 1):
        put("ranks_per_node", wanted.ranks, "ntasks-per-node", "ntasks")
    if wanted.cpus_per_rank != 1:
        put("cpus_per_rank", wanted.cpus_per_rank, "cpus-per-task", "cpus-per-gpu")
    if wanted.memory_mb:
        put("memory", megabytes(wanted.memory_mb), "mem", "mem-per-cpu", "mem-per-gpu")
    _put_time(put, request, report)
    for name, value in request.simple.items():
        put(name, value, name)
    if request.exclusive:
        put("exclusive", True, "exclusive")
    _put_mail(put, request, place, report)
    if request.extra:
        first = request.extra[0].partition("=")[0].removeprefix("--")
        put("extra", request.extra, first)


def _put_time(put: Any, request: Request, report: Report) -> None:
    option = request.said("time")
    if option is None:
        report.changed(
            0,
            "no --time",
            f"hpml asks for {_DEFAULT_TIME}, sbatch for the partition's own default",
            "write resources.time",
        )
    elif not request.seconds:
        report.lost(
            option.line, option.shown, "a job file needs a time limit", "write resources.time"
        )
    elif format_time(request.seconds) != _DEFAULT_TIME:
        put("time", format_time(request.seconds), "time")


def _put_mail(put: Any, request: Request, place: Place, report: Report) -> None:
    user, kinds = request.said("mail-user"), request.said("mail-type")
    if kinds is None and user is not None:
        report.changed(
            user.line,
            user.shown,
            "without --mail-type Slurm writes no mail, and hpml asks for none",
            "write resources.mail",
        )
    if not request.mail_on or kinds is None:
        return
    to = request.mail_to or place.environment.get("USER", "")
    mail: dict[str, Any] = {"to": to}
    if sorted(request.mail_on) != ["end", "fail"]:
        mail["on"] = request.mail_on
    put("mail", mail, "mail-user", "mail-type")


def _put_stages(draft: Draft, walk: Walk, place: Place, report: Report) -> None:
    entries = []
    for one in walk.staging.entries:
        entry = {"name": one.name, "source": place.path(one.source)}
        if one.kind != "auto":
            entry["kind"] = one.kind
        if one.target != "local":
            entry["target"] = one.target
        entries.append(entry)
        if not one.used:
            report.changed(
                one.line,
                one.source,
                "is brought to each node, but no argument names it",
                f"give the program {{stage.{one.name}}}, or have it read "
                f"HPML_STAGE_{one.name.upper()}",
            )
    if entries:
        draft.put("stage", entries, walk.staging.entries[0].line, walk.staging.entries[0].source)


def _say_rest(walk: Walk, report: Report) -> None:
    quiet = sorted(walk.found.quiet, key=walk.found.quiet.__getitem__)
    if quiet:
        report.add(
            "dropped",
            min(walk.found.quiet.values()),
            ", ".join(quiet),
            "print, test, wait or clean up: a job file needs none of it",
        )
    for path, line in walk.found.directories:
        report.changed(
            line,
            f"mkdir {walk.expander.source(path)}",
            "hpml makes no directories but the run's own, {run.dir}",
            "make it once by hand if the program does not",
        )


def _notes(name: str, findings: tuple[Finding, ...]) -> list[str]:
    shown = "".join(letter if letter.isprintable() else "�" for letter in os.path.basename(name))
    lost = sum(one.kind == "lost" for one in findings)
    notes = [f"Made from {shown} by hpml import; relative paths count from this file."]
    if lost:
        notes.append(
            f"{lost} thing{'s' * (lost > 1)} in it could not be carried over: "
            "hpml import says which, and what to do."
        )
    return notes
