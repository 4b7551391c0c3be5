"""Convert the text of an sbatch script to a job file."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.convert.body import OWN, Body
from hpml_orchestrator.convert.header import allocation, known_variables, read_request
from hpml_orchestrator.convert.launch import PYTHON
from hpml_orchestrator.convert.report import Draft, Finding, Report, write_yaml
from hpml_orchestrator.convert.resources import job_size
from hpml_orchestrator.convert.setup import PATHS, Setup
from hpml_orchestrator.convert.values import Values, has_hole, holes, shell_word, shown
from hpml_orchestrator.errors import InputError
from hpml_orchestrator.spec.values import format_time, size_text

if TYPE_CHECKING:
    from collections.abc import Mapping


__all__ = ["Imported", "Place", "import_script"]

_SHELLS = frozenset("sh bash dash ksh zsh ash".split())
_DEFAULT_TIME = "01:00:00"
_MAX_RANKS_PER_GPU = 100
_OTHER_MPI = re.compile(r"(intel-?mpi|impi|mpich|mvapich|cray-mpich)", re.IGNORECASE)
_OUTPUT_OPTION = re.compile(
    r"(^|[-_])(out|dir|log|save|ckpt|checkpoint|path|run|result|work)", re.IGNORECASE
)


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


def import_script(text: str, *, name: str, place: Place) -> Imported:
    """Return the job file of an sbatch script; nothing of the script is run.

    Args:
        text: the script.
        name: its file name, which names the job where no --job-name does.
        place: where it would be submitted, and where the job file will lie.

    Raises:
        InputError: it is no script for sbatch, no shell script, or starts no program.
    """
    return _Import(text, name, place).run()


class _Import:
    def __init__(self, text: str, name: str, place: Place) -> None:
        self.name, self.place = name, place
        self.report = Report()
        self.draft = Draft()
        _check_interpreter(text, self.report)
        self.request = read_request(text, self.report)
        self.given = allocation(self.request, self.report)
        self.start = os.path.normpath(
            os.path.join(place.directory, self.request.texts.get("chdir", ""))
        )
        self.known = known_variables(self.request, self.given)
        self.known["SLURM_SUBMIT_DIR"] = place.directory
        self.known["SLURM_JOB_NAME"] = self.request.texts.get("job-name") or name
        self.values = Values(place.environment, self.known, self.start)
        self.body = Body(text, self.values, self.report)
        self.launch = self.body.launch
        self.report.merge(self.launch.report)
        self.size = job_size(self.request, self.given, self.launch, self.report)

    def put(self, field: str, value: Any, *options: str) -> None:
        """Set a field that comes from one of these options, else from the launch line."""
        option = self.request.option(*options)
        origin = (option.line, option.shown) if option else (self.launch.line, self.launch.source)
        self.draft.put(field, value, *origin)

    def run(self) -> Imported:
        self._name()
        if "array" in self.request.texts:
            self.put("array", self.request.texts["array"], "array")
        self._launcher()
        self._program()
        self._resources()
        self._environment()
        self._stages()
        job = self.draft.finished(self.report)
        findings = self.report.findings()
        lost = sum(finding.kind == "lost" for finding in findings)
        letters = [letter if letter.isprintable() else "\ufffd" for letter in self.name]
        shown_name = os.path.basename("".join(letters))
        comments = [f"Made from {shown_name} by hpml import; relative paths count from this file."]
        if lost:
            comments.append(f"Not carried over: {lost} line{'s' * (lost > 1)}, see `hpml import`.")
        return Imported(job, write_yaml(job, comments), findings)

    def _name(self) -> None:
        option = self.request.option("job-name")
        wanted = (
            self.request.texts.get("job-name") or os.path.splitext(os.path.basename(self.name))[0]
        )
        made = re.sub(r"[^A-Za-z0-9._+-]+", "-", wanted).lstrip("._+-")[:64] or "job"
        if option and made != wanted:
            why = f"a job's name has letters, digits and . _ + - only: {made}"
            self.report.changed(option.line, option.shown, why)
        self.put("name", made, "job-name")

    def _launcher(self) -> None:
        launch, launcher = self.launch, self.launch.launcher or "srun"
        mpi = launcher == "srun" and launch.mpi
        if launcher == "horovodrun" and self.size.nodes > 1:
            launcher = "mpirun"
            launch.changed(
                self.report,
                "becomes mpirun, since hpml starts horovodrun on one node only: needs Open MPI, "
                "and a Horovod that was built with MPI",
                "look for [X] MPI in `horovodrun --check-build`",
            )
        if launcher in ("mpirun", "horovodrun"):
            other = next((name for name in self._modules() if _OTHER_MPI.search(name)), "")
            why = ""
            if launch.container is not None and launch.container["engine"] == "pyxis":
                why = "pyxis is a part of srun"
            elif launcher == "mpirun" and launch.mpi:
                why = "its options are not those of Open MPI's mpirun, which hpml starts"
            elif launcher == "mpirun" and other:
                why = f"the mpirun of module {other} is not Open MPI's, which hpml starts"
            if why:
                launcher, mpi = "srun", True
                todo = "`srun --mpi=list` shows what there is; `mpi: pmi2` is another"
                launch.changed(self.report, f"becomes srun with `mpi: pmix`, since {why}", todo)
        if launcher != "torchrun":
            self.put("launcher", launcher)
        if mpi:
            self.put("mpi", "pmix")

    def _modules(self) -> list[str]:
        lines = self.body.lines
        return [name for line in lines if line.kind == "module" for name in line.value.split()]

    def _program(self) -> None:
        launch, directory = self.launch, self.launch.directory
        self.workdir = self.start if has_hole(directory) or not directory else directory
        if self.place.path(self.workdir) != ".":
            self.put("workdir", self.place.path(self.workdir))
        words = [word for word in launch.words if not self._is_all_arguments(word)]
        before = ["", *words]
        placed = [self._placed(word, before[index]) for index, word in enumerate(words)]
        self.evaluated = any(map(has_hole, placed)) and not self._spelled_out(placed)
        placed = placed if self.evaluated else [shown(word) for word in placed]
        self._from_shell(placed)
        python = placed[0] if PYTHON.fullmatch(os.path.basename(placed[0])) else ""
        if python and launch.launcher == "torchrun" and launch.python:
            python = launch.python
        if self.evaluated:
            self.words = placed
            self.put("command", ["bash", "-c", 'eval "exec $IMPORTED_COMMAND"'])
        else:
            rest = placed[1:]
            while rest[:1] == ["-u"]:
                rest = rest[1:]
            here = self.workdir == directory
            if python and rest[:1] == ["-m"] and len(rest) > 1:
                self.put("module", rest[1])
                rest = rest[2:]
            elif python and here and rest and not rest[0].startswith("-"):
                self.put("script", rest[0].removeprefix(f"{directory}/"))
                rest = rest[1:]
            else:
                self.put("command", placed)
                python, rest = "" if launch.launcher != "torchrun" else python, []
            if rest:
                self.put("args", rest)
        if python not in ("", "python") and not has_hole(python):
            path = self.place.path(os.path.join(self.workdir, python)) if "/" in python else python
            self.put("environment.python", path if "/" in path or path == python else f"./{path}")

    def _is_all_arguments(self, word: str) -> bool:
        if not re.fullmatch('\0"?\\$(@|\\*|\\{@\\}|\\{@:1\\})"?\0', word):
            return False
        self.report.lost(
            self.launch.line,
            shown(word),
            "`hpml submit` passes no arguments to the program",
            "write what you give after the script's name into args",
        )
        return True

    def _spelled_out(self, words: list[str]) -> bool:
        """Whether no shell can fill in the holes: they stay as written, which is reported."""
        sources = [source for word in words for _, source in holes(word)]
        arguments = any(kind == "argument" for word in words for kind, _ in holes(word))
        if not arguments and not self.body.in_block:
            return False
        self.report.lost(
            self.launch.line,
            ", ".join(dict.fromkeys(source.strip('"') for source in sources)),
            "is known in the job only: the program gets this text literally",
            "write its value into the job file",
        )
        return True

    def _placed(self, value: str, before: str = "") -> str:
        """Return a word with staged data, the job's id and the array's index as placeholders."""
        for placeholder in re.findall(r"\{(?:stage|run|array)\.\w+\}", value):
            why = "hpml reads this as a placeholder of its own"
            self.report.lost(self.launch.line, placeholder, why, "rename the file")
        value = self.body.staging.replaced(value)
        option, equals, path = value.rpartition("=")
        parts = path.split("/")
        job = next((part for part in parts if any(kind == "job" for kind, _ in holes(part))), "")
        # Only a directory named after the job is the run's: not a file, a label or an input path.
        named = re.fullmatch(r"\0[^\0]*\0", job) is not None and not path.startswith("/")
        if named and (len(parts) > 1 or _OUTPUT_OPTION.search(option or before.lstrip("-"))):
            made = "/".join(["{run.dir}", *parts[parts.index(job) + 1 :]])
            why = f"each run has a directory of its own: {made}"
            self.report.changed(self.launch.line, shown(value), why)
            value = f"{option}{equals}{made}"
        return re.sub('\0"?\\$\\{?SLURM_ARRAY_TASK_ID\\}?"?\0', "{array.index}", value)

    def _from_shell(self, words: list[str]) -> None:
        """Report values that were taken from the caller's shell."""
        text, source = " ".join(words), self.launch.source
        for name, value in self.values.from_environment.items():
            if value and value in text and re.search(rf"\$\{{?{name}\b", source):
                why = f"replaced by its value here: {value}"
                self.report.changed(self.launch.line, f"${name}", why)
        for name, value in self.known.items():
            read = re.search(rf"\$\{{?{name}\b", source)
            if read and value.isdigit() and re.search(rf"\b{value}\b", text):
                why = f"written as {value}: change it together with resources"
                self.report.changed(self.launch.line, f"${name}", why)
        for expansion, value in self.values.defaults.items():
            if value and value in text:
                why = f"set neither here nor in the script: {value}"
                self.report.changed(0, expansion, why)

    def _ranks(self) -> None:
        size = self.size
        gpu_count = sum(number for _, number in size.gpus)
        if gpu_count:
            gpus = [f"{kind}:{number}" if kind else number for kind, number in size.gpus]
            names = ("gres", "gpus-per-node", "gpus", "gpus-per-task")
            self.put("resources.gpus", gpus if len(gpus) > 1 else gpus[0], *names)
        each = size.ranks // gpu_count if gpu_count and size.ranks % gpu_count == 0 else 0
        if 1 < each <= _MAX_RANKS_PER_GPU:
            self.put("resources.ranks_per_gpu", each, "ntasks-per-node", "ntasks", "ntasks-per-gpu")
        elif size.ranks != (gpu_count or 1):
            self.put("resources.ranks_per_node", size.ranks, "ntasks-per-node", "ntasks")

    def _resources(self) -> None:
        size, request = self.size, self.request
        if size.nodes != 1:
            self.put("resources.nodes", size.nodes, "nodes")
        self._ranks()
        if size.cpus_per_rank != 1:
            cpus = size.cpus_per_rank
            self.put("resources.cpus_per_rank", cpus, "cpus-per-task", "cpus-per-gpu")
        if size.memory_mb:
            memory = size_text(size.memory_mb)
            self.put("resources.memory", memory, "mem", "mem-per-cpu", "mem-per-gpu")
        self._time()
        for name in ("partition", "account", "qos", "constraint"):
            if name in request.texts:
                self.put(f"resources.{name}", request.texts[name], name)
        if "exclusive" in request.options:
            self.put("resources.exclusive", True, "exclusive")
        if request.mail_on:
            to = request.texts.get("mail-user") or self.place.environment.get("USER", "")
            self.put("resources.mail.to", to, "mail-user", "mail-type")
            if sorted(request.mail_on) != ["end", "fail"]:
                self.put("resources.mail.on", request.mail_on, "mail-type")
        if request.extra:
            first = request.extra[0].partition("=")[0].removeprefix("--")
            self.put("resources.extra", request.extra, first)

    def _time(self) -> None:
        option, seconds = self.request.option("time"), self.request.numbers.get("time")
        if option is None:
            why = f"hpml asks for {_DEFAULT_TIME}, sbatch for the partition's default"
            self.report.changed(0, "no --time", why, "write resources.time")
        elif not seconds:
            why = "a job file needs a time limit"
            self.report.lost(option.line, option.shown, why, "write resources.time")
        elif format_time(seconds) != _DEFAULT_TIME:
            self.put("resources.time", format_time(seconds), "time")

    def _environment(self) -> None:
        launch = self.launch
        words = [*(self.words if self.evaluated else []), *launch.variables.values()]
        sources = " ".join(source for word in words for _, source in holes(word))
        lines = Setup(self.body, set(re.findall(r"[A-Za-z_]\w*", sources)))
        for field, value, line in lines.fields(self.place.path):
            self.draft.put(f"environment.{field}", value, line.line, line.source)
        text = "\n".join([*(line.source for line in lines.kept), sources])
        setup = [*self._export(text), *self._slurm_values(text), *lines.lines(self.workdir)]
        for name, (value, number, text) in lines.variables.items():
            self._variable(name, value, number, text, setup)
        for name, value in launch.variables.items():
            self._variable(name, value, launch.line, f"{name}={shown(value)}", setup)
        if has_hole(launch.directory):
            setup.append(f"cd {shell_word(launch.directory)}")
        if self.evaluated:
            command = " ".join(self._for_setup(word) for word in self.words)
            setup += [f"printf -v IMPORTED_COMMAND '%q ' {command}", "export IMPORTED_COMMAND"]
            launch.changed(
                self.report,
                "needs a shell to fill in its arguments: environment.setup does, once",
            )
        if launch.container is not None:
            container = dict(launch.container)
            if container["engine"] == "apptainer" and "://" not in container["image"]:
                image = os.path.join(self.workdir, container["image"])
                container["image"] = self.place.path(image)
            self.put("environment.container", container)
            if self.workdir != launch.directory:
                why = "the ranks of a container start in workdir"
                self.report.lost(launch.line, launch.source, why, "write workdir")
        if setup:
            first = lines.kept[0] if lines.kept else launch
            self.draft.put("environment.setup", "\n".join(setup) + "\n", first.line, first.source)

    def _slurm_values(self, text: str) -> list[str]:
        """Return lines that give setup the values of the script's own job; reports the others."""
        size = self.size
        now = {
            **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS"), size.nodes * size.ranks),
            "SLURM_NTASKS_PER_NODE": size.ranks,
            "SLURM_CPUS_PER_TASK": size.cpus_per_rank,
            **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), size.nodes),
        }
        for name, value in now.items():
            if re.search(rf"\b{name}\b", text) and self.known.get(name, str(value)) != str(value):
                why = f"{self.known[name]} in the script, {value} in hpml's job"
                self.report.changed(0, f"${name} in environment.setup", why, "write the number")
        if "SLURM_SUBMIT_DIR" not in text:
            return []
        return [f"SLURM_SUBMIT_DIR={shlex.quote(self.place.directory)}"]

    def _for_setup(self, word: str) -> str:
        """Return a word for the shell of setup, with placeholders as variables."""
        word = re.sub(r"\{stage\.(\w+)\}", lambda m: f'\0"$HPML_STAGE_{m[1].upper()}"\0', word)
        word = word.replace("{run.dir}", '\0"$HPML_RUN_DIR"\0')
        return shell_word(word.replace("{array.index}", '\0"$SLURM_ARRAY_TASK_ID"\0'))

    def _export(self, text: str) -> list[str]:
        """Set what `--export` says about the environment; return it as lines that setup needs."""
        option = self.request.option("export")
        lines: list[str] = []
        if option is None:
            return lines
        parts = [part for part in option.value.split(",") if part]
        if not {"ALL", "all"} & set(parts):
            self.put("environment.inherit", "minimal", "export")
        for part in parts:
            name, equals, value = part.partition("=")
            value = value if equals else self.place.environment.get(name, "")
            if value:
                self.put(f"environment.variables.{name}", value, "export")
                lines += [f"export {name}={shlex.quote(value)}"] if name in text else []
            elif name.upper() not in ("ALL", "NONE", "NIL"):
                todo = f"write environment.variables.{name}"
                self.report.lost(option.line, option.shown, f"{name} is not set here", todo)
        return lines

    def _variable(self, name: str, value: str, line: int, text: str, setup: list[str]) -> None:
        """Set a variable of the ranks; in setup where its value is known in the job only."""
        cpus = str(self.size.cpus_per_rank)
        if name in OWN or (name == "OMP_NUM_THREADS" and value == cpus):
            return
        if name == "CUDA_VISIBLE_DEVICES":
            self.report.lost(line, text, "Slurm gives each job its GPUs", "write resources.gpus")
            return
        value = self.body.staging.replaced(value)
        if has_hole(value) and name == "OMP_NUM_THREADS":
            why = f"hpml sets it to {cpus}, the CPUs of a rank"
            self.report.lost(line, text, why, "write environment.variables.OMP_NUM_THREADS")
        elif has_hole(value) or name in PATHS:
            setup.append(f"export {name}={self._for_setup(value)}")
        else:
            if name == "OMP_NUM_THREADS":
                why = f"carried over as it is; without it hpml sets {cpus}, the CPUs of a rank"
                self.report.changed(line, text, why)
            self.draft.put(f"environment.variables.{name}", value, line, text)

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
            first = self.body.staging.entries[0]
            self.draft.put("stage", entries, first.line, first.text)


def _check_interpreter(text: str, report: Report) -> None:
    first = text.split("\n", 1)[0]
    if not first.startswith("#!"):
        raise InputError(
            "line 1: does not begin with #! and the path of a shell: this is no batch script",
            hint="sbatch refuses it, too; write #!/bin/bash as its first line",
        )
    words = first[2:].split()
    names = [os.path.basename(word) for word in words if not word.startswith("-")]
    names = names[1:] if names[:1] == ["env"] else names
    if not names or names[0] not in _SHELLS:
        raise InputError(
            f"line 1: {first[:60]}: hpml reads scripts for sh and bash",
            hint="write a job file with `command: [INTERPRETER, SCRIPT]` by hand",
        )
    if any(re.fullmatch(r"-\w*l\w*|--login", word) for word in words):
        why = "hpml starts no login shell: the environment that you submit from travels"
        report.changed(1, first, why, "source /etc/profile in environment.setup if you need it")
