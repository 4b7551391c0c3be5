"""Sort the commands of a script: what has a field, what stays a shell line, and the launch.

Module loads, activations and `cd` are fields as long as no shell line that may matter comes before
them, exports as long as none comes after them. What stays keeps its order.
"""

from __future__ import annotations

import dataclasses
import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.convert.launchers import PYTHON, Launch, peel
from hpml_orchestrator.convert.report import OUTPUT, Report
from hpml_orchestrator.convert.shell import ASSIGNMENT, Command, Statement, split_script
from hpml_orchestrator.convert.staging import LOCAL, Staging
from hpml_orchestrator.convert.values import PROVIDED, Values, has_hole, is_stable
from hpml_orchestrator.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SET_LATER", "Body", "Line"]

SET_LATER = frozenset({"OMP_NUM_THREADS", "PYTHONUNBUFFERED"})
"""Variables that hpml sets after the lines of setup: only `environment.variables` changes them."""

_PRINTS = frozenset(  # commands that print, test or wait
    "echo printf set shopt nvidia-smi rocm-smi date hostname wait exit true false : pwd ls which "
    "type df du free lscpu printenv uname id whoami sleep [ [[ test uptime cat head tail squeue "
    "sinfo scontrol sacct nproc lspci ibstat ip numastat top ps wc sstat seff".split()
)
_TESTS = frozenset("[ [[ test !".split())
_COPIES = frozenset("cp rsync tar rm unzip mkdir".split())
_TRAINS = re.compile(r"train|fit|finetune|fine_tune|\brun\b|main|sft|ddp|learn", re.IGNORECASE)
_NOT_STARTED = {"", *"-V --version - -c -mpip -mvenv -mensurepip -mvirtualenv".split()}
_PROGRAMS = frozenset("bash sh julia Rscript".split())
_RUNNERS = frozenset("uv poetry conda mamba micromamba apptainer singularity".split())
_NOT_FIELDS = re.compile(  # modules and activations change these, too; or no job file may set them
    r"PATH|LD_LIBRARY_PATH|LIBRARY_PATH|MANPATH|CPATH|MODULEPATH|ENV|IFS|_|"
    r"(SLURM|SBATCH|SRUN|HPML|PMI(?!X_MCA)|BASH|PRTE_(?!MCA)|OMPI_(?!MCA|ALLOW))\w*"
)
_IN_SETUP = "kept in environment.setup: runs once, on the first node, before the ranks"


@dataclass
class Line:
    """A command of the script.

    Attributes:
        kind: `keep`, `quiet` (a shell line that no other depends on), `assign`, `module`, `purge`,
            `venv`, `conda`, `hook`, `cd` or `stage`.
        value: of a module, venv, conda or cd line.
        assigned: variables that it sets, and programs see where it is `exported`.
        launch: what it starts.
        block: what a launch stands in: a loop, a condition or a function; `&` in the background.
    """

    kind: str
    line: int
    source: str
    value: str = ""
    assigned: dict[str, str] = field(default_factory=dict)
    exported: bool = False
    launch: Launch | None = None
    block: str = ""


class Body:
    """The commands of a script, divided.

    Attributes:
        lines: those before the launch, in order.
        launch: the launch that becomes the job's program.
        kept: lines of `environment.setup`, once `divide` was called; so the following.
        modules: lines that load modules.
        active: the line that activates a venv or conda environment.
        variables: exported variables that are fields: value and line.
        workdir: where the lines start.
    """

    def __init__(self, text: str, values: Values, report: Report) -> None:
        self.values = values
        self.report = report
        self.staging = Staging(values)
        self.lines: list[Line] = []
        self.kept: list[Line] = []
        self.modules: list[Line] = []
        self.active: Line | None = None
        self.variables: dict[str, tuple[str, Line]] = {}
        self.workdir = values.directory
        self.exports_all = False
        self.exported = set(values.environment)
        for statement in split_script(text):
            self._read(statement)
        chosen, self.launch = self._choose()
        self._report_rest(chosen)
        del self.lines[self.lines.index(chosen) :]
        if any(line.kind == "keep" and LOCAL.search(line.source) for line in self.lines):
            self.staging.entries.clear()  # shell lines work with the copies
            for line in self.lines:
                line.kind = "keep" if line.kind == "stage" else line.kind

    def add(self, kind: str, part: Command | Statement, **fields: Any) -> None:
        """Append a line."""
        self.lines.append(Line(kind, part.line, part.source, **fields))

    def keep(self, part: Command | Statement, *, function: bool = False) -> None:
        """Append a shell line that may set variables."""
        self.add("keep", part)
        self.values.forget(part.source, function=function)
        if "export" in part.source:
            self.exported |= set(re.findall(r"\w+", part.source))

    def _read(self, statement: Statement) -> None:
        commands, block = statement.commands, statement.block
        launches = [self._launch(command) for command in commands]
        position = next((i for i, launch in enumerate(launches) if launch), None)
        if position is not None:
            launch = max(filter(None, launches), key=_training_score)
            self._read_launch(statement, position, launch)
        elif len(commands) == 1 and not (block or statement.background):
            self._command(dataclasses.replace(commands[0], source=statement.source))
        elif re.match(r"cd [^|&;]*\|\|", statement.source):  # `cd DIRECTORY || exit`
            self._command(commands[0])
        else:
            self.keep(statement, function=block == "function")

    def _read_launch(self, statement: Statement, position: int, launch: Launch) -> None:
        """Read a statement that launches something; the first launch stands at `position`."""
        commands = statement.commands
        before, last, after = commands[:position], commands[position], commands[position + 1 :]
        operators = {command.operator for command in commands[: position + 1]}
        tests = any(command.words[:1] and command.words[0] in _TESTS for command in before)
        handled = (
            after[:1] and after[0].operator == "||" and statement.source.startswith(last.source)
        )
        inside = "" if handled else statement.block
        if operators - {"", "&&"} or tests:
            inside = inside or ("|" if "|" in operators else "||")
        if inside:
            self.keep(statement)
            self.lines[-1].launch, self.lines[-1].block = launch, inside
            return
        for command in before:
            self._command(command)
        launch = self._launch(last) or launch  # with what the commands before it set
        _report_after(launch, last, after)
        self.add("keep", statement, launch=launch, block="&" if statement.background else "")
        self.lines[-1].source = statement.source[statement.source.index(last.source) :]

    def _command(self, command: Command) -> None:
        """Read a simple command that launches nothing."""
        if command.words and all(map(ASSIGNMENT.fullmatch, command.words)):
            assigned = dict(map(self.values.assign, command.words))
            exported = self.exports_all or bool(assigned.keys() & self.exported)
            kind = "quiet" if self.values.sourced and not exported else "assign"
            self.add(kind, command, assigned=assigned, exported=exported)
            return
        words = self.values.words(command.words) or [""]
        name = os.path.basename(words[0])
        if name in _HANDLERS:
            _HANDLERS[name](self, command, words)
        elif self.staging.take(_without_srun(words), command.line, command.source):
            self.add("stage", command)
        elif name in {*_PRINTS, "mkdir"} - {"printf"} and all(
            re.search(r"<|&\d$|/dev/", text) for text in command.redirects
        ):
            self.add("quiet", command)
        else:
            self.keep(command)

    def _launch(self, command: Command) -> Launch | None:
        """Return what a simple command launches; None for other commands."""
        words = list(command.words)
        assigned = []
        while words and (match := ASSIGNMENT.fullmatch(words[0])):
            assigned.append(f"{match[1]}={self.values.text(match[3])}")
            words.pop(0)
        words = self.values.words(words)
        if not words or words[0] in ("eval", "for"):
            return None
        launch = Launch(command.line, command.source, assigned + words, self.values.directory)
        peel(launch)
        name, rest = launch.program, [w for w in launch.words[1:] if w not in ("-u", "-B", "-O")]
        if launch.launcher == "srun":  # it also starts small commands on the nodes
            return None if name in {"", *_PRINTS, *_COPIES} else launch
        if PYTHON.fullmatch(name):
            starts = "".join(rest[: 1 + (rest[:1] == ["-m"])]) not in _NOT_STARTED
        else:
            verb = "".join(rest[:1])
            runs = verb if name in _PROGRAMS else name in _RUNNERS and verb in ("run", "exec")
            starts = bool(runs) or "/" in "".join(launch.words[:1])
        return launch if name and (launch.launcher or starts or words[0] == "exec") else None

    def _choose(self) -> tuple[Line, Launch]:
        """Return the job's program: the launch that looks like the training, else the last."""
        launches = [(line, line.launch) for line in self.lines if line.launch]
        if not launches:
            raise InputError(
                "no line starts a program",
                hint="hpml looks for srun, torchrun, mpirun, python …; write `srun` before yours",
            )
        chosen, launch = max(reversed(launches), key=lambda pair: _training_score(pair[1]))
        where = f"line {launch.line}: {launch.source.partition(chr(10))[0][:60]}"
        if chosen.block not in ("", "&"):
            inside = _BLOCKS[chosen.block]
            raise InputError(
                f"{where}: starts the program in {inside}, which hpml does not evaluate",
                hint="write the launch as a line of its own; for several runs use `--array`",
            )
        for line, other in launches:
            same = line is not chosen and _training_score(other) == _training_score(launch)
            if same and "&" in (line.block, chosen.block):
                raise InputError(
                    f"{where}: runs beside that of line {other.line}; a job file runs one program",
                    hint="use `--array` and one launch, or write a script for each",
                )
        return chosen, launch

    def _report_rest(self, chosen: Line) -> None:
        """Report the lines after the launch."""
        for line in self.lines[self.lines.index(chosen) + 1 :]:
            if line.kind != "quiet":
                why = "hpml runs nothing after the program"
                todo = "have the program write its results to shared storage, such as {run.dir}; "
                todo += "do the rest in a job of its own with `hpml submit --after`"
                self.report.lost(line.line, line.source, why, todo)

    def divide(self, names: set[str]) -> None:
        """Divide the lines between fields and `environment.setup`.

        Args:
            names: variables that the command line itself needs from the shell.
        """
        self._divide_software()
        later = False  # whether a command that may read variables comes later
        for line in reversed(self.lines):
            stays = line.kind in ("keep", "quiet") or bool(names & line.assigned.keys())
            if line.kind == "assign":
                stays = stays or self._stays(line, later=later)
                for name, value in line.assigned.items() if line.exported else ():
                    staged = "{stage." in self.staging.replaced(value)
                    field_of_its_own = name not in PROVIDED and (staged or not stays)
                    if field_of_its_own or name in SET_LATER:
                        self.variables.setdefault(name, (value, line))
            later = later or line.kind == "keep"
            if stays:
                self.kept.insert(0, line)
                names = names | set(re.findall(r"[A-Za-z_]\w*", line.source))
        self.variables = dict(reversed(self.variables.items()))
        self._report_kept()

    def _report_kept(self) -> None:
        if all(re.match(r"set\b", line.source) for line in self.kept):
            self.kept.clear()  # no line is left that it was for
        for line in self.kept:
            todo = "a line that fails ends the job: `|| :` behind it helps" * (line.kind == "keep")
            if line.launch and line.launch.launcher:
                todo = (
                    "hpml neither binds nor records it: better write a job file of its own for it"
                )
            self.report.changed(line.line, line.source, _IN_SETUP, todo)
            match = re.search(rf"\b({'|'.join(SET_LATER)})=", line.source)
            if match and line.kind == "keep":
                why = f"hpml sets {match[1]} after environment.setup"
                todo = f"write environment.variables.{match[1]}"
                self.report.lost(line.line, line.source, why, todo)

    def _divide_software(self) -> None:
        """Keep modules, activations and `cd` behind a shell line as shell lines."""
        blocked = moved = False
        following = [line.kind for line in self.lines[1:]] + [""]
        for line, next_kind in zip(self.lines, following, strict=False):
            free = not blocked and self.active is None
            if any(map(_NOT_FIELDS.fullmatch, line.assigned.keys() - PROVIDED)):
                line.kind = "keep"
            elif line.kind == "cd" and not moved:
                self.workdir = line.value
            elif line.kind == "module" and free:
                self.modules.append(line)
            elif line.kind == "purge" and free:
                self.modules.clear()
                why = "hpml loads modules on top of those that are loaded when you submit"
                todo = "submit from a shell without modules, or write environment.inherit: minimal"
                self.report.changed(line.line, line.source, why, todo)
            elif line.kind in ("venv", "conda") and free:
                self.active = line
            elif line.kind == "hook" and free and next_kind == "conda":
                why, todo = "hpml finds conda through CONDA_EXE or PATH", "have one of them set"
                self.report.changed(line.line, line.source, why, todo)
            elif line.kind in ("module", "purge", "venv", "conda", "hook", "cd"):
                line.kind = "keep"
            blocked = blocked or line.kind == "keep"
            prints = re.match(r"(echo|printf|date|hostname|nvidia-smi|set)\b", line.source)
            runs = line.kind == "assign" and re.search(r"\$\(|`|PWD", line.source)
            moved = moved or (line.kind in ("keep", "quiet") and not prints) or bool(runs)

    def _stays(self, line: Line, *, later: bool) -> bool:
        """Whether an assignment that no kept line needs stays a shell line."""
        names = line.assigned.keys()
        own = names <= PROVIDED
        if own or not line.exported:
            if not own and not all(map(is_stable, line.assigned.values())):
                why = "nothing else uses it, or hpml does itself what it was for"
                self.report.add("dropped", line.line, line.source, why)
            return False
        written = any(re.search(rf"\$\{{?{name}\b", self.launch.source) for name in names)
        runtime = any(map(has_hole, map(self.staging.replaced, line.assigned.values())))
        return later or (runtime and not written and not names <= SET_LATER)


_BLOCKS = {
    **dict.fromkeys(("for", "while", "until", "select"), "a loop"),
    **dict.fromkeys(("if", "case", "||"), "a condition"),
    "|": "a pipeline",
    "function": "a function",
    "{": "a group of commands",
    "(": "a subshell",
}


def _report_after(launch: Launch, command: Command, rest: tuple[Command, ...]) -> None:
    """Report the redirections of a launch, and what follows it on its line."""
    for text in command.redirects:
        if "<" in text:
            launch.lost(text, "ranks read no standard input", "pass a file name")
        elif not re.search(r"/dev/null|&\d$", text):
            launch.report.changed(launch.line, text, *OUTPUT)
    for after in rest:
        name = os.path.basename("".join(after.words[:1]))
        if after.operator in ("|", "|&") and name == "tee":
            launch.report.changed(after.line, f"| {after.source}", *OUTPUT)
        elif name not in _PRINTS:
            text = f"{after.operator} {after.source}"
            launch.report.lost(after.line, text, "hpml runs nothing after the program")


def _without_srun(words: list[str]) -> list[str]:
    """Return the command that srun starts on the nodes, or the words themselves."""
    launch = Launch(0, "", words, "")
    if words[0] == "srun":
        peel(launch)
    return launch.words or words


def _training_score(launch: Launch) -> tuple[bool, ...]:
    """Return how much a launch looks like the training of the script."""
    words = launch.words
    named = [*words[:3], *(word for word in words if word.endswith(".py"))]
    trains = _TRAINS.search(" ".join(os.path.basename(word) for word in named))
    return bool(trains), bool(launch.launcher), bool(PYTHON.fullmatch(launch.program))


# Commands with a meaning of their own; `words` are expanded.


def _module(body: Body, command: Command, words: list[str]) -> None:
    rest = [word for word in words[1:] if not word.startswith("--") and word != "-q"]
    looks = "list avail av spider show display help whatis is-loaded".split()
    changes = "purge unload rm del use unuse swap switch restore save reset".split()
    verb = rest.pop(0) if rest and rest[0] in [*looks, *changes, "load", "add"] else "load"
    plain = all(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_./+@:=~-]*", name) for name in rest)
    if verb in ("load", "add") and plain:
        body.add("module", command, value=" ".join(rest))
    else:
        kind = "quiet" if verb in looks else "purge" if verb == "purge" else "keep"
        body.add(kind, command)


def _source(body: Body, command: Command, words: list[str]) -> None:
    path, environment = "".join(words[1:2]), "".join(words[2:3])
    directory, script = os.path.dirname(os.path.dirname(path)), os.path.basename(path)
    if script in ("conda.sh", "mamba.sh"):
        body.add("hook" if "CONDA_EXE" in body.values.environment else "keep", command)
    elif script != "activate" or has_hole(path + environment) or not body.values.directory:
        body.keep(command)
    elif environment or not directory or re.search(r"(conda|mamba|miniforge)\d*$", directory):
        body.add("conda", command, value=environment or "base")
    else:
        body.add("venv", command, value=os.path.join(body.values.directory, directory))


def _conda(body: Body, command: Command, words: list[str]) -> None:
    name = words[2] if words[2:] else "base"
    if words[1:2] != ["activate"] or has_hole(name) or name.startswith("-"):
        body.keep(command)
        return
    path = os.path.join(body.values.directory, name) if "/" in name else name
    body.add("conda", command, value=path)


def _eval(body: Body, command: Command, _: list[str]) -> None:
    if re.search(r"(conda|mamba)\b.*hook", command.source):
        body.add("hook", command)
    else:
        body.keep(command)


def _cd(body: Body, command: Command, words: list[str]) -> None:
    rest = [word for word in words[1:] if word not in ("--", "-P", "-L")]
    target = rest[0] if rest else body.values.environment.get("HOME", "-")
    base = body.values.directory
    if words[0] == "cd" and target != "-" and not has_hole(target) and (base or target[:1] == "/"):
        body.values.directory = os.path.normpath(os.path.join(base, target))
        body.add("cd", command, value=body.values.directory)
    else:
        body.keep(command)
        body.values.directory = ""


def _export(body: Body, command: Command, words: list[str]) -> None:
    assigned: dict[str, str] = {}
    for word in command.words[1:]:
        if ASSIGNMENT.match(word):
            assigned |= dict([body.values.assign(word)])
        elif word.isidentifier():
            items = body.values.variables.get(word)
            assigned[word] = items[0] if items else f'\0"${word}"\0'
        else:  # an option
            body.keep(command)
            return
    if words[0] == "export":
        body.exported |= assigned.keys()
    body.add("assign", command, assigned=assigned, exported=words[0] == "export")


def _set(body: Body, command: Command, words: list[str]) -> None:
    if {"-a", "+a", "allexport"} & set(words):
        body.exports_all = not {"+a", "+o"} & set(words)
    body.add("quiet", command)


def _trap(body: Body, command: Command, _: list[str]) -> None:
    why, todo = "traps are hpml's: ranks get the signals", "handle the signal in the program"
    body.report.lost(command.line, command.source, why, todo)


_HANDLERS: dict[str, Callable[[Body, Command, list[str]], None]] = {
    **dict.fromkeys(("module", "ml"), _module),
    **dict.fromkeys(("source", "."), _source),
    **dict.fromkeys(("conda", "mamba", "micromamba"), _conda),
    **dict.fromkeys(("cd", "pushd", "popd"), _cd),
    **dict.fromkeys(("export", "readonly"), _export),
    "eval": _eval,
    "set": _set,
    "trap": _trap,
}
