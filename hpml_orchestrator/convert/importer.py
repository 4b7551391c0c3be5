"""Convert the text of an sbatch script to a job file."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass
from getpass import getuser
from pathlib import Path
from typing import TYPE_CHECKING

from hpml_orchestrator.convert.arguments import SIZES, Placeholders, shell_word
from hpml_orchestrator.convert.binding import OPENMP, OPENMP_REASON
from hpml_orchestrator.convert.body import PROVIDED, SET_LATER, Line, read_body
from hpml_orchestrator.convert.header import read_header
from hpml_orchestrator.convert.launchers import PYTHON
from hpml_orchestrator.convert.report import ImportNote, ImportReport
from hpml_orchestrator.convert.resources import (
    add_srun_options,
    allocation,
    check_devices,
    job_size,
    known_variables,
)
from hpml_orchestrator.convert.values import HOLE, Values, has_hole, shown
from hpml_orchestrator.errors import InputError, counted
from hpml_orchestrator.jobfile.load import merge
from hpml_orchestrator.jobfile.rules import resolved_job
from hpml_orchestrator.jobfile.write import job_text
from hpml_orchestrator.records.job import Job, Json, Resources
from hpml_orchestrator.records.units import format_time, node_memory_text, size_text

if TYPE_CHECKING:
    from collections.abc import Mapping

_ORDER = (
    "name array launcher mpi script module command args workdir resources binding environment "
    "stage collect checkpoint"
)
_OPTIONS = {  # that fields of resources come from
    "nodes": "nodes ntasks gpus",
    "gpus": "gres gpus-per-node gpus gpus-per-task",
    "memory": "mem mem-per-gpu",
    "memory_per_cpu": "mem-per-cpu",
    **dict.fromkeys(("ranks_per_node", "ranks_per_gpu"), "ntasks-per-node ntasks"),
    "cpus_per_rank": "cpus-per-task cpus-per-gpu",
    "extra": "signal",  # the only option there that a job may not have
}
_OTHER_MPI = re.compile(r"(intel-?mpi|impi|mpich|mvapich|cray-mpich)", re.IGNORECASE)
_IN_SETUP = "kept in environment.setup: runs once, on the first node, before the ranks"
_STARTS = re.compile(
    r"(^|[\s;&|])(srun|mpirun|mpiexec|sbatch|torchrun|accelerate launch|deepspeed)\s|torch\.distrib"
)
_ARGUMENTS = re.compile(r"\$(?:[0-9#]|\{[0-9#][}:])|\b(?:shift|getopts|BASH_SOURCE)\b")
_LATER = re.compile(rf"\b({'|'.join(SET_LATER)})=")
_OWN_DIRECTORY = re.compile(r"/\{array\.index\}(/|$)")
_SECRET = re.compile(r"_KEY|TOKEN|SECRET|PASSWORD")


@dataclass(frozen=True)
class ImportContext:
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
        """Return a path for the job file: relative below its directory, `~` for home."""
        full = os.path.normpath(os.path.join(self.directory, path))
        for root, prefix in ((self.base, ""), (self.environment.get("HOME", ""), "~/")):
            if root not in ("", "/") and full == root:
                return prefix[:1] or "."
            if root not in ("", "/") and full.startswith(f"{root}/"):
                return prefix + full[len(root) + 1 :]
        return full


@dataclass(frozen=True)
class Imported:
    """A job file made from a script: its job with absolute paths, its text, findings by line."""

    job: Job
    text: str
    findings: tuple[ImportNote, ...]


def import_script(text: str, *, name: str, context: ImportContext) -> Imported:
    """Return the job file of an sbatch script; nothing of the script is run.

    Args:
        text: the script.
        name: its file name, which names the job if the script has no --job-name.
        context: directories of the submission and of the job file.

    Raises:
        InputError: it is not a shell script for sbatch, starts no program, or starts one in a way
            that a job file cannot.
    """
    if "\0" in text:
        raise InputError("a NUL character: not a text file", hint="name the script for sbatch")
    return _Import(text, name, context).run()


class _Import:
    def __init__(self, text: str, name: str, context: ImportContext) -> None:
        self.name, self.context = name, context
        self.report = ImportReport()
        self.fields: Json = {}
        self.origins: dict[str, str] = {}  # of fields: the line of the script, for errors
        self.header = read_header(text, self.report)
        # Slurm sets the script's variables from the header alone. Options of srun join the header
        # only after the body has been read, so the allocation is computed twice, and reported
        # once.
        self.known = known_variables(self.header, allocation(self.header, ImportReport()))
        self.known["SLURM_SUBMIT_DIR"] = context.directory
        self.known["SLURM_JOB_NAME"] = self.header.text("job-name") or name
        start = os.path.normpath(os.path.join(context.directory, self.header.text("chdir")))
        self.body = read_body(text, Values(context.environment, self.known, start), self.report)
        self.launch = self.body.launch
        add_srun_options(self.header, self.launch, self.report)
        given = allocation(self.header, self.report)
        self.size = job_size(self.header, given, self.launch, self.report)
        self.arguments = Placeholders(text, self.body, is_array="array" in self.header.options)
        self._divide_lines()
        places = [line.value for line in self.body.lines if line.kind == "cd"]
        self.workdir = places[-1] if places else start

    def put(self, field: str, value: object, *options: str, origin: str = "") -> None:
        """Set a field by its dotted name; it comes from an option, a line or the launch."""
        option = self.header.option(*options)
        where = f"line {option.line}: {option.shown}" if option else origin
        self.origins[field] = where or f"line {self.launch.line}: {self.launch.source}"
        *parents, last = field.split(".")
        mapping = self.fields
        for parent in parents:
            mapping = mapping.setdefault(parent, {})
        mapping[last] = value

    def run(self) -> Imported:
        """Return the job file and the findings."""
        name = self.header.text("job-name") or os.path.splitext(os.path.basename(self.name))[0]
        name = re.sub(r"[^A-Za-z0-9._+-]+", "-", name).lstrip("._+-")[:64] or "job"
        self.put("name", name, "job-name")
        if array := self.header.text("array"):
            self.put("array", array, "array")
        self._put_launcher()
        self._put_program()
        self._put_resources()
        self._put_environment()
        self._put_checkpoint()
        self._put_data()
        self.report.entries |= self.launch.report.entries
        fields = {name: self.fields[name] for name in _ORDER.split() if name in self.fields}
        job = self._job(fields)
        findings = self.report.findings()
        lost = sum(finding.kind == "lost" for finding in findings)
        shown_name = "".join(c if c.isprintable() else "\ufffd" for c in self.name)
        comments = [f"Made from {shown_name} by hpml import; relative paths count from this file."]
        if lost:
            comments.append(f"Not carried over: {counted(lost, 'line')}, see `hpml import`.")
        if self.size.question:
            comments += self.size.question.split("\n")
        return Imported(job, job_text(fields, comments), findings)

    def _job(self, fields: Json) -> Job:
        try:
            return resolved_job(merge(fields).fields, Path(self.context.base), (), "")
        except InputError as error:
            problem, field = error.problems[0], error.problems[0].field
            origins = [text for name, text in self.origins.items() if f"{field}.".startswith(name)]
            raise InputError(
                f"{origins[-1] if origins else 'the job'}: {field} {problem.message}",
                hint="change the script, or write the job file by hand",
            ) from None

    def _divide_lines(self) -> None:
        """Decide which copies become `stage` and `collect`, and which lines stay in setup."""
        body, copies = self.body, self.body.copies
        values = [*self.launch.words, *self.launch.variables.values()]
        used = set(re.findall(r"\w+", " ".join(" ".join(HOLE.findall(word)) for word in values)))
        # A program such as `bash -c '… $NAME'` also reads variables of setup.
        used |= set(re.findall(r"\$\{?(\w+)", " ".join(values)))
        exported = [v for li in body.lines if li.exported for v in li.assigned.values()]
        values += exported
        copies.decline_unless_used(values)
        works_there = any(
            line.kind in ("keep", "venv") and body.is_on_node(line.source) for line in body.lines
        )
        if works_there:
            copies.staged.clear()
        copied = not copies.staged and any(line.kind == "stage" for line in body.lines)
        copies.move_results(values, shell_works_there=works_there or copied)
        for line in body.lines:
            if line.kind == "stage" and not copies.staged:
                line.kind = "keep"
            elif line.kind == "quiet" and copies.staged and body.is_on_node(line.source):
                line.kind = "quiet" if line.source.startswith("mkdir") else "dropped"
        body.divide(used, self.arguments.placed)

    def _put_launcher(self) -> None:
        launch, launcher = self.launch, self.launch.launcher or "srun"
        modules = [n for li in self.body.lines if li.kind == "module" for n in li.value.split()]
        others = [name for name in modules if _OTHER_MPI.search(name)]
        if launcher == "mpirun" and others:
            why = f"the module {others[0]} has another MPI, and hpml starts Open MPI's mpirun only"
            hint = "write `srun --mpi=pmi2` or `srun --mpi=pmix` in its place"
            raise launch.refused(launch.source, why, hint)
        self.put("launcher", launcher)
        if launcher == "srun" and launch.mpi:
            self.put("mpi", launch.mpi)
        several = self.size.ranks * self.size.nodes > 1 and not PYTHON.fullmatch(launch.program)
        if launch.launcher == "srun" and several and not launch.mpi:
            why = "srun without --mpi takes the cluster's default, hpml takes none"
            launch.changed(why, "a program that uses MPI needs `mpi: pmix` or `mpi: pmi2`")

    def _words(self) -> list[str]:
        """Return the words of the program with placeholders, without `"$@"`."""
        launch, words = self.launch, []
        rest = " ".join(map(shown, launch.words[1:]))
        if not PYTHON.fullmatch(launch.program) and _STARTS.search(rest):
            why = f"{launch.program} starts the launcher, which hpml starts itself"
            raise launch.refused(launch.source, why, "begin the command with the launcher")
        for word in launch.words:
            if has_hole(word) and shown(word) in ("$@", "${@}", "$*", "${*}"):
                why = "`hpml submit` passes no arguments to the program"
                launch.lost(word, why, "write them into args")
            else:
                words.append(self.arguments.filled(word))
        if not words:
            raise InputError(f"line {launch.line}: {launch.source}: starts no program")
        return words

    def _put_program(self) -> None:
        launch, words = self.launch, self._words()
        python = words[0] if PYTHON.fullmatch(launch.program) else ""
        rest = words[2:] if words[1:2] == ["-u"] else words[1:]
        first = "".join(rest[:1])
        if python and first == "-m" and len(rest) > 1:
            self.put("module", rest[1])
            rest = rest[2:]
        elif python and first and first[0] != "-" and "{" not in first and launch.directory:
            path = os.path.normpath(os.path.join(launch.directory, rest.pop(0)))
            inside = path.startswith(f"{self.workdir}/")
            self.put("script", os.path.relpath(path, self.workdir) if inside else path)
        else:
            self.put("command", words)
            python, rest = launch.python if launch.launcher == "torchrun" else "", []
        if rest:
            self.put("args", rest)
        for word in rest:
            if _OWN_DIRECTORY.search(word):
                why = "hpml also makes a directory for each task, which `hpml show` names"
                launch.changed(why, f"write {{run.dir}} for {word} if the program writes there")
        if python not in ("", "python") and not has_hole(python):
            path = self.context.path(os.path.join(launch.directory, python))
            named = path if "/" in path else f"./{path}"
            self.put("environment.python", named if "/" in python else python)

    def _put_resources(self) -> None:
        size, header, sizes = self.size, self.header, self.launch.sizes
        gpus, kinds = size.gpus.count, str(size.gpus) or "0" * bool(header.gpus)
        shared = size.ranks // gpus if gpus and size.ranks % gpus == 0 else 1
        states_ranks = header.option("ntasks-per-node", "ntasks") or any(
            word.isdecimal() for name, word in sizes.items() if name != "nodes"
        )
        default = 0 if states_ranks and shared == 1 else gpus * shared or 1
        seconds, time = header.numbers.get("time"), header.option("time")
        per_cpu = header.numbers.get("mem-per-cpu")
        if time is None:
            why = "hpml asks for an hour, sbatch for the partition's default"
            self.report.changed(0, "no --time", why, "write resources.time")
        elif not seconds:
            why = "a job file needs a time limit: the job gets one hour"
            self.report.lost(time.line, time.shown, why, "write resources.time")
        values = {
            "nodes": size.nodes,
            "gpus": int(kinds) if kinds.isdigit() else kinds or None,
            "ranks_per_gpu": shared if shared > 1 else None,
            "ranks_per_node": size.ranks if size.ranks != default else None,
            "cpus_per_rank": size.cpus_per_rank,
            "memory": None if size.memory_mb is None else node_memory_text(size.memory_mb),
            "memory_per_cpu": size_text(per_cpu) if per_cpu else None,
            "time": format_time(seconds) if seconds else None,
            **{n: header.text(n) or None for n in ("partition", "account", "qos", "constraint")},
            "exclusive": "exclusive" in header.options or None,
            "extra": [*header.extra.values()] or None,
        }
        defaults = Resources.written_defaults()
        for field, value in values.items():
            options = _OPTIONS.get(field, field).split()
            # also where the script states hpml's default: a site profile may have another
            if value is not None and (value != defaults[field] or header.option(*options)):
                self.put(f"resources.{field}", value, *options)
        if header.mail_on:
            to = header.text("mail-user") or self.context.environment.get("USER") or getuser()
            self.put("resources.mail", {"to": to, "on": header.mail_on}, "mail-user", "mail-type")
        if self.launch.binding:
            self.put("binding", self.launch.binding)

    def _put_checkpoint(self) -> None:
        header = self.header
        if header.signal:
            self.put("checkpoint.signal", header.signal, "signal")
            if header.signal_seconds:
                self.put("checkpoint.lead", f"{header.signal_seconds}s", "signal")
        if header.signal or "requeue" in header.options:
            ends = list(dict.fromkeys(header.requeue))
            self.put("checkpoint.requeue", ends, "requeue", "signal")

    def _put_environment(self) -> None:
        launch, lines = self.launch, self.body.lines
        if modules := [name for li in lines if li.kind == "module" for name in li.value.split()]:
            self.put("environment.modules", modules)
        for line in lines:
            if line.kind in ("venv", "conda"):
                path = self.context.path(line.value) if "/" in line.value else line.value
                origin = f"line {line.line}: {line.source}"
                self.put(f"environment.{line.kind}", path, origin=origin)
        if self.workdir != self.context.base:
            self.put("workdir", self.context.path(self.workdir), "chdir")
        if text := self._setup():
            self.put("environment.setup", "\n".join(text) + "\n")
        if launch.container:
            self.put("environment.container", launch.container)
            if launch.directory != self.workdir:
                why = "the ranks of a container start in workdir"
                launch.lost(launch.source, why, "write workdir")

    def _setup(self) -> list[str]:
        """Set the variables of the ranks; return the lines of `environment.setup`."""
        launch, lines = self.launch, []
        for line in self.body.lines:
            self._read_line(line)
            if line.in_setup:
                if line.kind != "quiet" and line.block != "a function":
                    self._check_line(line.line, line.source)
                todo = "a line that fails ends the job: `|| :` behind it helps"
                if line.launch and line.launch.launcher:
                    todo = "hpml does not bind it: better write another job file for it"
                self.report.changed(line.line, line.source, _IN_SETUP, todo)
                lines.append(line.source)
        self._put_export(lines)
        for name, value in launch.variables.items():
            self._put_variable(name, value, launch.line, f"{name}={shown(value)}")
        if launch.directory and launch.directory != self.body.values.directory:
            lines.append(f"cd {shlex.quote(launch.directory)}")
        for source in self.arguments.exports.values():
            self._check_line(launch.line, source)
            lines.append(source)
        for name in ("SLURM_SUBMIT_DIR", "SLURM_JOB_NAME"):  # hpml's job has others
            if any(name in line for line in lines):
                lines.insert(0, f"{name}={shlex.quote(self.known[name])}")
        return lines

    def _read_line(self, line: Line) -> None:
        openmp = OPENMP & line.assigned.keys() if self.launch.binding != "none" else ()
        for name in openmp:
            self.report.add("dropped", line.line, line.source, OPENMP_REASON)
            del line.assigned[name]
        if openmp and not line.assigned:
            line.in_setup = False
            return
        placed = {name: self.arguments.placed(value) for name, value in line.assigned.items()}
        is_known = not any(map(has_hole, placed.values()))
        is_rewritten = openmp or SIZES.search(line.source) or _ARGUMENTS.search(line.source)
        if placed and is_known and is_rewritten:
            # Setup does not know the paths of staged data: there the script's own stay.
            there = {k: line.assigned[k] if "{stage." in v else v for k, v in placed.items()}
            words = (f"{name}={shell_word(value)}" for name, value in there.items())
            line.source = "export " * line.exported + " ".join(words)
        if line.kind == "keep" and (match := _LATER.search(line.source)):
            raise _computed_later(line.line, line.source, match[1])
        for name, value in line.assigned.items() if line.exported else ():
            if not line.in_setup or name in SET_LATER:
                self._put_variable(name, value, line.line, line.source)
        provided = not line.exported and line.assigned.keys() & PROVIDED
        if not line.in_setup and (line.kind == "dropped" or provided or not is_known):
            why = "nothing else uses it, or hpml does itself what it was for"
            self.report.add("dropped", line.line, line.source, why)

    def _check_line(self, line: int, source: str) -> None:
        """Refuse a line that would find other values in `environment.setup` than in the script."""
        where = f"line {line}: {source.partition(chr(10))[0]}: "
        if re.match(r"(?!.*\|\|).*\bread\b.* -d ''", source):
            problem = "`read -d ''` ends with status 1, which ends hpml's job"
            raise InputError(where + problem, hint="write `|| :` behind it, before the <<")
        if _ARGUMENTS.search(re.sub(r"'[^']*'", "", source)):  # quoted text may be a program of awk
            problem = "needs the name or the arguments of the script, which hpml's job has not"
            raise InputError(where + problem, hint="write the values into it, as ${1:-VALUE}")
        size = self.size
        own = {
            "SLURM_CPUS_PER_TASK": size.cpus_per_rank,
            **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS"), size.nodes * size.ranks),
            "SLURM_NTASKS_PER_NODE": size.ranks,
            **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), size.nodes),
        }
        for name, value in own.items():
            given = self.known.get(name, "")
            if re.search(rf"\b{name}\b", source) and given != str(value):
                problem = f"{name} is {given or 'not set'} in the script's job, {value} in hpml's"
                raise InputError(where + problem, hint=f"write the number in place of ${name}")

    def _put_export(self, lines: list[str]) -> None:
        """Set the environment that the header's `--export` asks for, also for setup's lines."""
        option = self.header.option("export")
        parts = [part for part in option.value.split(",") if part] if option else []
        if option:
            inherit = "all" if {"ALL", "all"} & set(parts) else "minimal"
            self.put("environment.inherit", inherit, "export")
        for part in parts:
            name, equals, value = part.partition("=")
            value = value if equals else self.context.environment.get(name, "")
            if value and (name not in OPENMP or self.launch.binding == "none"):
                self.put(f"environment.variables.{name}", value, "export")
                if any(name in line for line in lines):
                    lines.insert(0, f"export {name}={shlex.quote(value)}")

    def _put_variable(self, name: str, value: str, line: int, text: str) -> None:
        """Set a variable of the ranks; in setup if only the job can compute its value.

        The paths of staged data are not known there yet.
        """
        default = {"OMP_NUM_THREADS": str(self.size.cpus_per_rank), "PYTHONUNBUFFERED": "1"}
        placed = self.arguments.placed(value)
        splits = re.search('\0(?!")[^\0]', placed)  # without quotes it may become several words
        if name == "CUDA_VISIBLE_DEVICES":
            check_devices(self.body.values, line, placed)
        elif name in OPENMP and self.launch.binding != "none":
            self.report.add("dropped", line, text, OPENMP_REASON)
        elif name in PROVIDED or placed == default.get(name):
            self.report.add("dropped", line, text, f"hpml sets {name} itself")
        elif has_hole(placed) and name in SET_LATER:
            raise _computed_later(line, text, name)
        elif has_hole(placed) and not splits and "{stage." not in placed:
            self.arguments.exports[name] = f"export {name}={shell_word(placed)}"
        else:
            if _SECRET.search(name):
                why = "the value can be read in the job file and in the records of its runs"
                todo = "remove it there, and export it before `hpml submit` instead"
                self.report.changed(line, f"{name}=…", why, todo)
            origin = f"line {line}: {text}"
            self.put(f"environment.variables.{name}", self.arguments.filled(value), origin=origin)

    def _put_data(self) -> None:
        copies, results = self.body.copies, []
        if copies.staged:
            self.put("stage", [one.entry(self.context.path(one.source)) for one in copies.staged])
        for result in copies.results:
            entry = {
                "source": copies.collected(result.place),
                "target": self.context.path(result.target),
            }
            where = f"{entry['target']}/RUN/NODE/{os.path.basename(entry['source'])}"
            why = f"on each node, all of {shown(result.place)} is copied back to {where}"
            if "dir}" in entry["source"]:
                why = f"the program writes to {entry['source']}, which is copied back to {where}"
            self.report.changed(result.line, result.text, why)
            if entry not in results:
                results.append(entry)
        if results:
            self.put("collect", results)


def _computed_later(line: int, text: str, name: str) -> InputError:
    problem = f"line {line}: {text}: hpml sets {name} again after environment.setup"
    return InputError(problem, hint="export a number, on a separate line")
