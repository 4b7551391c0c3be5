"""Convert the text of an sbatch script to a job file."""

from __future__ import annotations

import io
import os
import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedSeq
from ruamel.yaml.scalarstring import DoubleQuotedScalarString, LiteralScalarString

from hpml_orchestrator.convert.body import PROVIDED, SET_LATER, Body, check_devices
from hpml_orchestrator.convert.copies import LOCAL
from hpml_orchestrator.convert.header import read_request
from hpml_orchestrator.convert.launchers import LAUNCHERS, PYTHON
from hpml_orchestrator.convert.report import Finding, Report
from hpml_orchestrator.convert.resources import (
    add_srun_options,
    allocation,
    job_size,
    known_variables,
)
from hpml_orchestrator.convert.values import HOLE, LOCAL_NAMES, Values, has_hole, hole_names, shown
from hpml_orchestrator.errors import InputError, NotFoundError
from hpml_orchestrator.spec.job import Job, Resources
from hpml_orchestrator.spec.text import PER_RANK, PLACEHOLDER
from hpml_orchestrator.spec.values import format_time, size_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

__all__ = ["Imported", "Place", "import_script", "read_script"]

_ORDER = (
    "name array launcher mpi script module command args workdir resources environment stage "
    "collect checkpoint"
)
_MAX_BYTES = 256 * 1024  # bounds the time that an import takes
_HOUR = 3600
_PLAIN = ("partition", "account", "qos", "constraint")
_OPTIONS = {  # that fields of resources come from
    "gpus": "gres gpus-per-node gpus gpus-per-task",
    "memory": "mem mem-per-cpu mem-per-gpu",
    **dict.fromkeys(("ranks_per_node", "ranks_per_gpu"), "ntasks-per-node ntasks"),
    "cpus_per_rank": "cpus-per-task",
}
_OTHER_MPI = re.compile(r"(intel-?mpi|impi|mpich|mvapich|cray-mpich)", re.IGNORECASE)
_IN_SETUP = "kept in environment.setup: runs once, on the first node, before the ranks"
_SIZES = re.compile(r"SLURM_(CPUS_PER_TASK|NTASKS|NPROCS|NTASKS_PER_NODE)\b")
_ARGUMENTS = re.compile(r"\$(?:[0-9#]|\{[0-9#][}:])|\b(?:shift|getopts|BASH_SOURCE)\b")
_PLACEHOLDERS = {
    **dict.fromkeys(("SLURM_JOB_ID", "SLURM_JOBID"), "{job.id}"),
    "SLURM_ARRAY_TASK_ID": "{array.index}",
    **{name: f"{{env.{name}}}" for name in (*LOCAL_NAMES, "SLURM_ARRAY_JOB_ID", "HOME", "USER")},
}
_ONE_WORD = "[[ -n ${name} && ${name} != *[[:space:]*?[]* ]]  # {line} has it without quotes"


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
        """Return a path as a job file has it: relative where it lies below, `~` for home."""
        full = os.path.normpath(os.path.join(self.directory, path))
        for root, prefix in ((self.base, ""), (self.environment.get("HOME", ""), "~/")):
            if root not in ("", "/") and full == root:
                return prefix[:1] or "."
            if root not in ("", "/") and full.startswith(f"{root}/"):
                return prefix + full[len(root) + 1 :]
        return full


@dataclass(frozen=True)
class Imported:
    """A job file made of a script: its fields, its YAML text, and the findings by line."""

    job: dict[str, Any]
    text: str
    findings: tuple[Finding, ...]


def read_script(path: Path) -> str:
    """Return the text of a script.

    Raises:
        NotFoundError: there is no such file.
        InputError: it cannot be read, or is no text that sbatch would take.
    """
    hint = "name the script that you give to sbatch"
    if not path.exists():
        raise NotFoundError(f"no such script: {path}", hint=hint)
    if not path.is_file():
        raise InputError(f"{path} is not a regular file", hint=hint)
    try:
        with path.open("rb") as stream:
            raw = stream.read(_MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", hint=hint) from error
    if not raw.strip() or len(raw) > _MAX_BYTES:
        problem = f"is larger than {_MAX_BYTES // 1024} KiB" if raw else "is empty"
        raise InputError(f"{path} {problem}", hint=hint)
    if b"\0" in raw:
        raise InputError(f"{path} holds a NUL byte: it is a binary file", hint=hint)
    if b"\r\n" in raw:
        line = raw.count(b"\n", 0, raw.index(b"\r\n")) + 1
        raise InputError(
            f"{path} has DOS line ends (line {line}), which sbatch refuses, too",
            hint="`sed -i 's/\\r$//' FILE` removes them",
        )
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{path} is not UTF-8 text (line {line})",
            hint="`iconv -f latin1 -t utf-8` converts the text of older editors",
        ) from None


def import_script(text: str, *, name: str, place: Place) -> Imported:
    """Return the job file of an sbatch script; nothing of the script is run.

    Args:
        text: the script.
        name: its file name, which names the job where no --job-name does.
        place: where it would be submitted, and where the job file will lie.

    Raises:
        InputError: it is no script for sbatch, no shell script, starts no program, or starts one
            that no job file can start the same way.
    """
    return _Import(text, name, place).run()


class _Import:
    def __init__(self, text: str, name: str, place: Place) -> None:
        self.name, self.place = name, place
        self.report = Report()
        self.fields: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.text = text
        self.request = read_request(text, self.report)
        self.known = known_variables(self.request, allocation(self.request, Report()))
        self.known["SLURM_SUBMIT_DIR"] = place.directory
        self.known["SLURM_JOB_NAME"] = self.request.text("job-name") or name
        start = os.path.normpath(os.path.join(place.directory, self.request.text("chdir")))
        self.values = Values(place.environment, self.known, start)
        self.body = Body(text, self.values, self.report)
        self.launch = self.body.launch
        add_srun_options(self.request, self.launch, self.report)
        given = allocation(self.request, self.report)
        self.size = job_size(self.request, given, self.launch, self.report)
        self.exports: dict[str, str] = {}  # lines at its end: what the command line needs
        self._copies()
        self.words = [self._argument(word) for word in self._arguments()]

    def put(self, field: str, value: Any, *options: str, origin: str = "") -> None:
        """Set a field by its dotted name; it comes from an option, a line or the launch."""
        option = self.request.option(*options)
        where = f"line {option.line}: {option.shown}" if option else origin
        self.origins[field] = where or f"line {self.launch.line}: {self.launch.source}"
        *parents, last = field.split(".")
        mapping = self.fields
        for parent in parents:
            mapping = mapping.setdefault(parent, {})
        mapping[last] = value

    def run(self) -> Imported:
        """Return the job file and the findings."""
        name = self.request.text("job-name") or os.path.splitext(os.path.basename(self.name))[0]
        name = re.sub(r"[^A-Za-z0-9._+-]+", "-", name).lstrip("._+-")[:64] or "job"
        self.put("name", name, "job-name")
        if array := self.request.text("array"):
            self.put("array", array, "array")
        self._launcher()
        self._program()
        self._resources()
        self._environment()
        self._checkpoint()
        self._data()
        self.report.entries |= self.launch.report.entries
        job = self._checked()
        findings = self.report.findings()
        lost = sum(finding.kind == "lost" for finding in findings)
        shown_name = "".join(c if c.isprintable() else "\ufffd" for c in self.name)
        comments = [f"Made from {shown_name} by hpml import; relative paths count from this file."]
        if lost:
            comments.append(f"Not carried over: {lost} line{'s' * (lost > 1)}, see `hpml import`.")
        return Imported(job, _yaml(job, comments), findings)

    def _checked(self) -> dict[str, Any]:
        """Return the fields in order.

        Raises:
            InputError: a value is none that a job file may hold.
        """
        fields = {name: self.fields[name] for name in _ORDER.split() if name in self.fields}
        try:
            Job.model_validate(fields)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            field = ".".join(str(part) for part in problem["loc"] if part != "[key]")
            origins = [text for name, text in self.origins.items() if f"{field}.".startswith(name)]
            message = str(problem["msg"]).removeprefix("Value error, ")
            raise InputError(
                f"{origins[-1] if origins else 'the job'}: {field} {message}",
                hint="change the script, or write the job file by hand",
            ) from None
        return fields

    def _copies(self) -> None:
        """Decide which copies become `stage` and `collect`, and which lines stay in setup."""
        body, copies = self.body, self.body.copies
        values = [*self.launch.words, *self.launch.variables.values()]
        used = {name for word in values for name in re.findall(r"\w+", "".join(HOLE.findall(word)))}
        if re.search(r"\$|`", "".join(values)):  # a program for a shell names variables, too
            used |= {name for word in values for name in re.findall(r"\$\{?(\w+)", word)}
        values += [
            value for line in body.lines for value in line.assigned.values() if line.exported
        ]
        declined = copies.decline_unless_used(values)
        setup = body.divide(set(used), self._placed)
        works = [line.source for line in setup if line.kind not in ("quiet", "local")]
        if not declined and any(map(LOCAL.search, works)):
            copies.staged.clear()  # shell lines work with the copies
        copies.check_results(values, works)
        for line in body.lines:
            if line.kind == "stage" and not copies.staged:
                line.kind = "keep"
            elif line.kind == "local" and not (copies.staged or copies.results):
                line.kind = "quiet"
        self.setup = body.divide(set(used), self._placed)

    def _placed(self, value: str) -> str:
        """Return a value with placeholders for what is the same at any time in the job."""

        def placeholder(match: re.Match[str]) -> str:
            name = hole_names(match[0])[0]
            if name in self.values.variables or name not in _PLACEHOLDERS:
                return match[0]
            if name == "SLURM_ARRAY_TASK_ID" and not self.request.text("array"):
                why = "the script has no --array"
                raise self.launch.refused(f"${name}", why, "write it, such as #SBATCH --array=0-9")
            return _PLACEHOLDERS[name]

        if match := PLACEHOLDER.search(HOLE.sub("", value)):
            why = "is a placeholder of hpml's own"
            raise self.launch.refused(match[0], why, "rename the file")
        return HOLE.sub(placeholder, self.body.copies.replaced(value))

    def _arguments(self) -> Iterator[str]:
        """Yield the words of the program without `"$@"`, which is empty in a job."""
        starters = {"srun", "sbatch", *LAUNCHERS}
        nested = [w for w in self.launch.words[:1] if w in ("timeout", "nice", "stdbuf", "time")]
        if self.launch.error:
            raise self.launch.error
        if nested and starters & {"srun", "mpirun", "mpiexec"} & {*self.launch.words}:
            why = f"{nested[0]} starts the launcher, which hpml starts itself"
            raise self.launch.refused(self.launch.source, why, f"remove {nested[0]}")
        for word in self.launch.words:
            if shown(word) in ("$@", "${@}", "$*", "${*}"):
                why = "`hpml submit` passes no arguments to the program"
                self.launch.lost(word, why, "write them into args")
            else:
                yield word

    def _argument(self, word: str) -> str:
        """Return a word with placeholders; what the shell has to find out is exported by setup.

        Raises:
            InputError: it may be several words, or is a pattern for file names.
        """
        return HOLE.sub(lambda match: self._expansion(match[1]), self._placed(word))

    def _expansion(self, source: str) -> str:
        """Return the placeholder of an expansion."""
        quoted, text = source.startswith('"'), source.strip('!"')
        name = hole_names(f"\0{text}\0")[0]
        where = f"line {self.launch.line}"
        hint = "write it out, or have the program find it out"
        if name.isdigit() or name in ("#", "@", "*") or re.match(r"\$\{[0-9@*#]", text):
            why = "`hpml submit` passes the script no arguments"
            hint = "give it a value in the script: ${1:-VALUE}"
            raise self.launch.refused(text, why, hint)
        if (
            source[0] == "!"
            or not re.match(r"\$[\w{(]|\$'|`", text)
            or re.search(r"\[[@*]\]|\$[?!]", text)
        ):
            raise self.launch.refused(text, "only the job knows which words it becomes", hint)
        if _SIZES.fullmatch(name):
            why = "the header does not decide it, and hpml's job has a value of its own"
            raise self.launch.refused(text, why, "write the number")
        if name in PER_RANK:
            why = "it is not the same in all ranks"
            raise self.launch.refused(text, why, f"read {name} in the program")
        own = name in self.values.variables
        if not quoted and name and re.search(rf"\b{name}\+?=[\"'](?!\$\()[^\"'(]*\s", self.text):
            why = "only the job knows how many words it becomes"
            raise self.launch.refused(text, why, "assign it on one line, before any condition")
        if not re.fullmatch(r"[A-Za-z_]\w*", name) or name in ("RANDOM", "SECONDS", "LINENO", "_"):
            name, own = self._export_as_new(source), False
        elif own and name not in self.body.exported:
            self.exports[name] = f"export {name}"
        given = self.place.environment.get(name, "")
        plain = not own and not self.values.sourced and given and not re.search(r"[\s*?[]", given)
        number = text.startswith(("$((", "$'")) or name.startswith("SLURM") or plain
        if not (quoted or number):
            self.exports[f"{name} "] = _ONE_WORD.format(name=name, line=where)
        return f"{{env.{name}}}"

    def _export_as_new(self, source: str) -> str:
        """Have setup export the value of an expansion; return the variable's name."""
        for name, line in self.exports.items():
            if line == f"export {name}={source}" and name.startswith("ARG_"):
                return name
        names = (f"ARG_{number}" for number in range(1, 1000))
        name = next(n for n in names if n not in self.exports and n not in self.text)
        self.exports[name] = f"export {name}={source}"
        return name

    def _launcher(self) -> None:
        """Set the launcher, and srun's `--mpi` as written."""
        launch, launcher = self.launch, self.launch.launcher or "srun"
        modules = [n for li in self.body.lines if li.kind == "module" for n in li.value.split()]
        others = [name for name in modules if _OTHER_MPI.search(name)]
        if launcher == "mpirun" and others:
            why = f"the module {others[0]} has another MPI, and hpml starts Open MPI's mpirun only"
            hint = "write `srun --mpi=pmi2` or `srun --mpi=pmix` in its place"
            raise launch.refused(launch.source, why, hint)
        if launcher != "torchrun":
            self.put("launcher", launcher)
        if launcher == "srun" and launch.mpi not in ("", "none"):
            self.put("mpi", launch.mpi)
        several = self.size.ranks * self.size.nodes > 1 and not PYTHON.fullmatch(launch.program)
        if launch.launcher == "srun" and several and not launch.mpi:
            why = "srun without --mpi takes the cluster's default, hpml takes none"
            launch.changed(why, "a program that uses MPI needs `mpi: pmix` or `mpi: pmi2`")

    def _program(self) -> None:
        launch, words, workdir = self.launch, self.words, self.workdir
        if not words:
            raise InputError(f"line {launch.line}: {launch.source}: starts no program")
        python = words[0] if PYTHON.fullmatch(launch.program) else ""
        rest = words[2:] if words[1:2] == ["-u"] else words[1:]
        if python and rest[:1] == ["-m"] and len(rest) > 1:
            self.put("module", rest[1])
            rest = rest[2:]
        elif (
            python
            and rest
            and rest[0][:1] not in ("-", "{", "")
            and "{" not in rest[0]
            and launch.directory
        ):
            path = os.path.normpath(os.path.join(launch.directory, rest.pop(0)))
            inside = path.startswith(f"{workdir}/")
            self.put("script", os.path.relpath(path, workdir) if inside else path)
        else:
            self.put("command", words)
            python, rest = launch.python if launch.launcher == "torchrun" else "", []
        if rest:
            self.put("args", rest)
        if python not in ("", "python") and not has_hole(python):
            path = self.place.path(os.path.join(launch.directory, python))
            named = path if "/" in path else f"./{path}"
            self.put("environment.python", named if "/" in python else python)

    def _resources(self) -> None:
        size, request = self.size, self.request
        gpus, kinds = size.gpus.count, str(size.gpus) or "0"
        shared = size.ranks // gpus if gpus and size.ranks % gpus == 0 else 1
        default = gpus * shared or 1
        seconds, time = request.numbers.get("time"), request.option("time")
        if time is None:
            why = "hpml asks for an hour, sbatch for the partition's default"
            self.report.changed(0, "no --time", why, "write resources.time")
        elif not seconds:
            why = "a job file needs a time limit"
            self.report.lost(time.line, time.shown, why, "write resources.time")
        values = {
            "nodes": size.nodes,
            "gpus": int(kinds) if kinds.isdigit() else kinds,
            "ranks_per_gpu": shared,
            "ranks_per_node": None if size.ranks == default else size.ranks,
            "cpus_per_rank": size.cpus_per_rank,
            "memory": size_text(size.memory_mb) if size.memory_mb else None,
            "time": format_time(seconds or _HOUR),
            **{name: request.text(name) or None for name in _PLAIN},
            "exclusive": "exclusive" in request.options,
            "extra": list(request.extra.values()),
        }
        for field, value in values.items():
            if str(value) != str(Resources.model_fields[field].default):
                self.put(f"resources.{field}", value, *_OPTIONS.get(field, field).split())
        if request.mail_on:
            to = request.text("mail-user") or self.place.environment.get("USER", "")
            self.put("resources.mail", {"to": to, "on": request.mail_on}, "mail-user", "mail-type")

    def _checkpoint(self) -> None:
        request = self.request
        if request.signal:
            self.put("checkpoint.signal", request.signal, "signal")
            if request.signal_seconds:
                self.put("checkpoint.lead", f"{request.signal_seconds}s", "signal")
        if request.signal or "requeue" in request.options:
            ends = list(dict.fromkeys(request.requeue))
            self.put("checkpoint.requeue", ends, "requeue", "signal")

    @property
    def workdir(self) -> str:
        """The directory in which the lines of setup start; the last `cd` that is a field."""
        places = [line.value for line in self.body.lines if line.kind == "cd" and line.is_field]
        start = os.path.join(self.place.directory, self.request.text("chdir"))
        return places[-1] if places else os.path.normpath(start)

    def _environment(self) -> None:
        launch, lines = self.launch, self.body.lines
        fields = [line for line in lines if line.is_field]
        if modules := [n for line in fields if line.kind == "module" for n in line.value.split()]:
            self.put("environment.modules", modules)
        for line in fields:
            if line.kind in ("venv", "conda"):
                path = self.place.path(line.value) if "/" in line.value else line.value
                self.put(
                    f"environment.{line.kind}", path, origin=f"line {line.line}: {line.source}"
                )
            elif line.kind == "hook":
                why, todo = "hpml finds conda through CONDA_EXE or PATH", "have one of them set"
                self.report.changed(line.line, line.source, why, todo)
        if self.workdir != self.place.base:
            self.put("workdir", self.place.path(self.workdir), "chdir")
        if text := self._setup():
            self.put("environment.setup", "\n".join(text) + "\n")
        if launch.container:
            self.put("environment.container", launch.container)
            if launch.directory != self.workdir:
                why = "the ranks of a container start in workdir"
                launch.lost(launch.source, why, "write workdir")

    def _setup(self) -> list[str]:
        """Set the variables of the ranks; return the lines of `environment.setup`."""
        launch, kept = self.launch, {id(line) for line in self.setup}
        self._check_setup()
        lines = [line.source for line in self.setup]
        if any("SLURM_SUBMIT_DIR" in line for line in lines):
            lines.insert(0, f"SLURM_SUBMIT_DIR={shlex.quote(self.place.directory)}")
        self._export(lines)
        for line in self.body.lines:
            for name, value in line.assigned.items() if line.exported else ():
                if id(line) not in kept or name in SET_LATER:
                    self._variable(name, value, line.line, line.source)
            if line.kind == "keep" and (
                match := re.search(rf"\b({'|'.join(SET_LATER)})=", line.source)
            ):
                default = self.size.cpus_per_rank if match[1] == "OMP_NUM_THREADS" else 1
                name = self._export_as_new(f'"${{{match[1]}:-{default}}}"')
                self.put(f"environment.variables.{match[1]}", f"{{env.{name}}}")
        for name, value in launch.variables.items():
            self._variable(name, value, launch.line, f"{name}={shown(value)}")
        if launch.directory and launch.directory != self.body.values.directory:
            lines.append(f"cd {shlex.quote(launch.directory)}")
        return lines + list(self.exports.values())

    def _check_setup(self) -> None:
        """Report the lines of setup and what is left out.

        Raises:
            InputError: a line needs arguments of the script, or a size that hpml's job has not.
        """
        kept = {id(line) for line in self.setup}
        for line in self.body.lines:
            values = {name: self._placed(value) for name, value in line.assigned.items()}
            known = not any(map(has_hole, values.values()))
            if not known and id(line) not in kept:
                why = "nothing else uses it, or hpml does itself what it was for"
                self.report.add("dropped", line.line, line.source, why)
            if known and values and _SIZES.search(line.source):
                words = (f"{name}={self._shell_word(value)}" for name, value in values.items())
                line.source = "export " * line.exported + " ".join(words)
        for line in self.setup:
            if line.kind != "quiet" and line.block != "function":
                self._check_shell(line.line, line.source)
            todo = "a line that fails ends the job: `|| :` behind it helps" * (
                line.kind != "assign"
            )
            if line.launch and line.launch.launcher:
                todo = "hpml does not bind it: better write a job file of its own for it"
            self.report.changed(line.line, line.source, _IN_SETUP, todo)
        for source in self.exports.values():
            self._check_shell(self.launch.line, source)

    def _check_shell(self, line: int, source: str) -> None:
        """Refuse a line of setup that does not find there what the script gives it."""
        where = f"line {line}: {source.partition(chr(10))[0]}: "
        if _ARGUMENTS.search(re.sub(r"'[^']*'", "", source)):  # quoted text may be of awk
            problem = "needs the name or the arguments of the script, which hpml's job has not"
            raise InputError(where + problem, hint="write the values into it, as ${1:-VALUE}")
        size = self.size
        own = {
            "SLURM_CPUS_PER_TASK": size.cpus_per_rank,
            **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS"), size.nodes * size.ranks),
            "SLURM_NTASKS_PER_NODE": size.ranks,
        }
        for name, value in own.items():
            given = self.known.get(name, "")
            if re.search(rf"\b{name}\b", source) and given != str(value):
                problem = (
                    f"{name} is {given or 'not set'} in the script's job and {value} in hpml's"
                )
                raise InputError(where + problem, hint=f"write the number in place of ${name}")

    def _export(self, lines: list[str]) -> None:
        """Set what the header's `--export` says about the environment, also for setup's lines."""
        option = self.request.option("export")
        parts = [part for part in option.value.split(",") if part] if option else []
        if option and not {"ALL", "all"} & set(parts):
            self.put("environment.inherit", "minimal", "export")
        for part in parts:
            name, equals, value = part.partition("=")
            value = value if equals else self.place.environment.get(name, "")
            if value:
                self.put(f"environment.variables.{name}", value, "export")
                if any(name in line for line in lines):
                    lines.insert(0, f"export {name}={shlex.quote(value)}")

    def _variable(self, name: str, value: str, line: int, text: str) -> None:
        """Set a variable of the ranks; in setup if its value is known in the job only."""
        default = {"OMP_NUM_THREADS": str(self.size.cpus_per_rank), "PYTHONUNBUFFERED": "1"}
        value = self._placed(value)
        if name == "CUDA_VISIBLE_DEVICES":
            check_devices(self.values, line, value)
        elif name in PROVIDED:
            return
        elif name in SET_LATER and value == default[name]:
            self.report.add("dropped", line, text, f"hpml sets {name} itself")
        elif has_hole(value) and name not in SET_LATER:
            self.exports[name] = f"export {name}={self._shell_word(value)}"
        else:
            if re.search(r"_KEY|TOKEN|SECRET|PASSWORD", name):
                why = "the value can be read in the job file and in the records of its runs"
                todo = "remove it there, and export it before `hpml submit` instead"
                self.report.changed(line, f"{name}=…", why, todo)
            value = HOLE.sub(lambda match: f"{{env.{self._export_as_new(match[1])}}}", value)
            self.put(f"environment.variables.{name}", value, origin=f"line {line}: {text}")

    @staticmethod
    def _shell_word(value: str) -> str:
        """Return a value as one word for a shell, which fills in its holes and placeholders."""
        value = re.sub(r"\{stage\.(\w+)\}", lambda m: f'\0"$HPML_STAGE_{m[1].upper()}"\0', value)
        value = value.replace("{job.id}", '\0"$SLURM_JOB_ID"\0')
        value = value.replace("{array.index}", '\0"$SLURM_ARRAY_TASK_ID"\0')
        value = re.sub(r"\{env\.(\w+)\}", r'\0"$\1"\0', value)
        parts = HOLE.split(value)
        return "".join(p if i % 2 else shlex.quote(p) for i, p in enumerate(parts) if p)

    def _data(self) -> None:
        """Set what is staged and collected."""
        copies = self.body.copies
        entries = []
        for staged in copies.staged:
            entry = {"name": staged.name, "source": self.place.path(staged.source)}
            entry |= {"kind": staged.kind} if staged.kind != "auto" else {}
            entry |= {"target": staged.target} if staged.target != "local" else {}
            entries.append(entry)
        if entries:
            self.put("stage", entries)
        results: list[dict[str, str]] = []
        for (source, target), result in zip(copies.collected(), copies.results, strict=True):
            entry = {"source": source, "target": self.place.path(target)}
            where = f"{entry['target']}/RUN/NODE/{os.path.basename(source).strip('{}')}"
            why = f"each node's results come back to {where}"
            self.report.changed(result.line, result.text, why)
            if entry not in results:
                results.append(entry)
        if results:
            self.put("collect", results)


def _yaml(job: dict[str, Any], comments: list[str]) -> str:
    """Return the text of a job file: shell lines as a block, lists of words on one line."""
    yaml = YAML()
    yaml.width = 96
    yaml.allow_unicode = True
    yaml.indent(mapping=2, sequence=4, offset=2)
    stream = io.StringIO()
    yaml.dump(_styled(job), stream)
    return "".join(f"# {comment}\n" for comment in comments) + stream.getvalue()


def _styled(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _styled(item) for name, item in value.items()}
    if isinstance(value, list):
        styled = CommentedSeq(_styled(item) for item in value)
        if not any(isinstance(item, dict) for item in value):
            styled.fa.set_flow_style()
        return styled
    if not isinstance(value, str):
        return value
    if not all(row.isprintable() for row in value.split("\n")):
        return DoubleQuotedScalarString(value)  # escaped: YAML folds some of them as line ends
    if "\n" in value and value[0] not in " \n":
        return LiteralScalarString(value)
    return value
