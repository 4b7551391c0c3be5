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

from hpml_orchestrator.convert.body import SET_LATER, Body
from hpml_orchestrator.convert.header import read_request
from hpml_orchestrator.convert.launchers import PYTHON
from hpml_orchestrator.convert.report import Finding, Report
from hpml_orchestrator.convert.resources import allocation, job_size, known_variables
from hpml_orchestrator.convert.values import (
    Values,
    has_hole,
    hole_kinds,
    hole_sources,
    shell_word,
    shown,
)
from hpml_orchestrator.errors import InputError, NotFoundError
from hpml_orchestrator.spec.job import Job, Resources
from hpml_orchestrator.spec.text import PLACEHOLDER
from hpml_orchestrator.spec.values import format_time, size_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

__all__ = ["Imported", "Place", "import_script", "read_script"]

_ORDER = (
    "name array launcher mpi script module command args workdir resources environment stage "
    "checkpoint"
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
        self.request = read_request(text, self.report)
        given = allocation(self.request, self.report)
        known = known_variables(self.request, given)
        known["SLURM_SUBMIT_DIR"] = place.directory
        known["SLURM_JOB_NAME"] = self.request.text("job-name") or name
        start = os.path.normpath(os.path.join(place.directory, self.request.text("chdir")))
        self.values = Values(place.environment, known, start)
        self.body = Body(text, self.values, self.report)
        self.launch = self.body.launch
        self.size = job_size(self.request, given, self.launch, self.report)
        self.words = [self._placed(word) for word in self._arguments()]
        self.evaluated = any(map(has_hole, self.words))
        holes = map(hole_sources, [*self.words, *self.launch.variables.values()])
        self.body.divide({name for hole in holes for name in re.findall(r"\w+", " ".join(hole))})

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
        self._stages()
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

    def _launcher(self) -> None:
        """Set the launcher: Open MPI's mpirun or srun with PMIx instead of any other mpirun."""
        launch, launcher = self.launch, self.launch.launcher or "srun"
        pmix = launch.mpi and launcher == "srun"
        modules = [name for line in self.body.modules for name in line.value.split()]
        others = [name for name in modules if _OTHER_MPI.search(name)]
        if launcher == "mpirun" and (launch.mpi or others):
            why = f"module {others[0]}" if others else "its options"
            todo = "check that `mpi: pmix` fits"
            launch.changed(f"{why}: not Open MPI's mpirun; srun starts the ranks", todo)
            launcher, pmix = "srun", True
        if launcher != "torchrun":
            self.put("launcher", launcher)
        if pmix:
            self.put("mpi", "pmix")

    def _arguments(self) -> Iterator[str]:
        """Yield the words of the program without `"$@"`, which is empty in a job."""
        where = f"line {self.launch.line}"
        for word in self.launch.words:
            if match := PLACEHOLDER.search(word):
                problem = f"{where}: {match[0]} is a placeholder of hpml's own"
                raise InputError(problem, hint="rename the file")
            kinds = hole_kinds(word)
            if kinds == ["argument"] and shown(word) in ("$@", "${@}", "$*", "${*}"):
                why = "`hpml submit` passes no arguments to the program"
                self.launch.lost(word, why, "write them into args")
            elif "argument" in kinds:
                problem = f"{where}: {shown(word)}: `hpml submit` passes the script no arguments"
                raise InputError(problem, hint="give it a value in the script: ${1:-VALUE}")
            else:
                yield word

    def _placed(self, word: str) -> str:
        """Return a word with staged data, the job's id and the array's index as placeholders."""
        value = self.body.staging.replaced(word)
        # A relative directory that is named after the job is the run's.
        job = re.fullmatch("((?:[^=/]*=)?)((?:[^/\0]+/)*)\0[^\0]*\0(/.*)?", value)
        leads = hole_kinds(value)[:1] == ["job"] and not self._uses_job_directory()
        if job and leads and (job[2] or job[3]):
            value = f"{job[1]}{{run.dir}}{job[3] or ''}"
            why = f"each run has a directory of its own: {value}"
            self.report.changed(self.launch.line, shown(word), why)
        if "array" in hole_kinds(value):
            if self.request.text("array"):
                return re.sub('\0"?\\$\\{?SLURM_ARRAY_TASK_ID\\}?"?\0', "{array.index}", value)
            why = "the script has no --array: the index is empty"
            self.launch.lost("$SLURM_ARRAY_TASK_ID", why, "write array, such as 0-9")
        return value

    def _uses_job_directory(self) -> bool:
        """Return whether a line of setup, but for mkdir, works on what is named after the job."""
        names = {"SLURM_JOB_ID", "SLURM_JOBID"}
        for line in self.body.lines:
            if names & set(re.findall(r"\w+", line.source)):
                if line.kind == "keep" and not re.match(r"mkdir\b", line.source):
                    return True
                names |= line.assigned.keys()
        return False

    def _program(self) -> None:
        launch, words, workdir = self.launch, self.words, self.body.workdir
        if not words:
            raise InputError(f"line {launch.line}: {launch.source}: starts no program")
        python = words[0] if PYTHON.fullmatch(launch.program) else ""
        rest = words[2:] if words[1:2] == ["-u"] else words[1:]
        if self.evaluated:
            self.put("command", ["bash", "-c", 'eval "exec $IMPORTED_COMMAND"'])
            why = "environment.setup fills in its arguments, once, with a shell"
            launch.changed(why, "write them out if you know them")
            rest = []
        elif python and rest[:1] == ["-m"] and len(rest) > 1:
            self.put("module", rest[1])
            rest = rest[2:]
        elif python and rest and rest[0][:1] not in ("-", "{") and launch.directory:
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

    def _environment(self) -> None:
        launch, body = self.launch, self.body
        if body.modules:
            modules = [name for line in body.modules for name in line.value.split()]
            self.put("environment.modules", modules)
        if active := body.active:
            path = self.place.path(active.value) if "/" in active.value else active.value
            self.put(f"environment.{active.kind}", path)
        if body.workdir != self.place.base:
            self.put("workdir", self.place.path(body.workdir), "chdir")
        if lines := self._setup():
            self.put("environment.setup", "\n".join(lines) + "\n")
        if launch.container:
            self.put("environment.container", launch.container)
            if launch.directory != body.workdir:
                why = "the ranks of a container start in workdir"
                launch.lost(launch.source, why, "write workdir")

    def _setup(self) -> list[str]:
        """Set the variables of the ranks; return the lines of `environment.setup`."""
        launch, body = self.launch, self.body
        lines = [line.source for line in body.kept]
        if any("SLURM_SUBMIT_DIR" in line for line in lines):
            lines.insert(0, f"SLURM_SUBMIT_DIR={shlex.quote(self.place.directory)}")
        self._export(lines)
        for name, (value, line) in body.variables.items():
            self._variable(name, value, line.line, line.source, lines)
        for name, value in launch.variables.items():
            self._variable(name, value, launch.line, f"{name}={shown(value)}", lines)
        if self.evaluated:
            words = " ".join(map(self._for_setup, self.words))
            lines += [f"printf -v IMPORTED_COMMAND '%q ' {words}", "export IMPORTED_COMMAND"]
        return lines

    def _for_setup(self, word: str) -> str:
        """Return a word for the shell of setup, with placeholders as variables."""
        word = re.sub(r"\{stage\.(\w+)\}", lambda m: f'\0"$HPML_STAGE_{m[1].upper()}"\0', word)
        word = word.replace("{run.dir}", '\0"$HPML_RUN_DIR"\0')
        return shell_word(word.replace("{array.index}", '\0"$SLURM_ARRAY_TASK_ID"\0'))

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

    def _variable(self, name: str, value: str, line: int, text: str, lines: list[str]) -> None:
        """Set a variable of the ranks; in setup where its value is known in the job only."""
        default = {"OMP_NUM_THREADS": str(self.size.cpus_per_rank), "PYTHONUNBUFFERED": "1"}
        value = self.body.staging.replaced(value)
        if name == "CUDA_VISIBLE_DEVICES":
            self.report.lost(line, text, "Slurm gives each job its GPUs", "write resources.gpus")
        elif name in SET_LATER and value == default[name]:
            self.report.add("dropped", line, text, f"hpml sets {name} itself")
        elif has_hole(value) and name in SET_LATER:
            why = f"hpml sets it to {default[name]} after environment.setup"
            self.report.lost(line, text, why, f"write environment.variables.{name}")
        elif has_hole(value) and re.search(rf"\$\{{?{name}\b", self.launch.source):
            return  # a part of the command line, carried over with it
        elif has_hole(value) or name.endswith("PATH"):
            lines.append(f"export {name}={self._for_setup(value)}")
        else:
            if re.search(r"_KEY|TOKEN|SECRET|PASSWORD", name):
                why = "the value can be read in the job file and in the records of its runs"
                todo = "remove it there, and export it before `hpml submit` instead"
                self.report.changed(line, f"{name}=…", why, todo)
            self.put(f"environment.variables.{name}", value, origin=f"line {line}: {text}")

    def _stages(self) -> None:
        entries = []
        for staged in self.body.staging.entries:
            entry = {"name": staged.name, "source": self.place.path(staged.source)}
            if staged.kind != "auto":
                entry["kind"] = staged.kind
            if staged.target != "local":
                entry["target"] = staged.target
            entries.append(entry)
            if not staged.used:
                why = "is staged to each node, but no argument names it"
                todo = f"pass {{stage.{staged.name}}}, or read HPML_STAGE_{staged.name.upper()}"
                self.report.changed(staged.line, staged.text, why, todo)
        if entries:
            self.put("stage", entries)


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
