"""Classify the commands of a script: fields, shell lines, copies, and the launch."""

from __future__ import annotations

import os
import re
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hpml_orchestrator.convert.copies import LOCAL, Copies, lost_results
from hpml_orchestrator.convert.launch import Launch
from hpml_orchestrator.convert.launchers import PYTHON, remove_launchers
from hpml_orchestrator.convert.report import OUTPUT, ImportReport, Kind
from hpml_orchestrator.convert.resources import check_devices
from hpml_orchestrator.convert.shell import Command, Part, ShellWord, Statement, parse_script
from hpml_orchestrator.convert.values import Values, has_hole, shown
from hpml_orchestrator.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

PROVIDED = frozenset(
    "MASTER_ADDR MASTER_PORT WORLD_SIZE RANK LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK "
    "SRUN_CPUS_PER_TASK SLURM_CPU_BIND SLURM_EXPORT_ENV".split()
)
"""Variables that hpml sets for the ranks, or that its own srun does not need."""
SET_LATER = frozenset({"OMP_NUM_THREADS", "PYTHONUNBUFFERED"})
"""Variables that hpml sets after `environment.setup`, so only `environment.variables` counts."""

_SOFTWARE = frozenset({"module", "venv", "conda", "cd"})
_PRINTS = frozenset(  # commands that print, test or wait
    "echo set shopt nvidia-smi rocm-smi date hostname wait exit true false pwd ls which "
    "type df du free lscpu printenv uname id whoami sleep [ [[ test uptime cat head tail squeue "
    "sinfo scontrol sacct nproc lspci ibstat ip numastat top ps wc sstat seff".split()
)
_TESTS = frozenset({"[", "[[", "test"})
_COPIES = frozenset("cp rsync mv scp tar unzip".split())
_REMOVES = frozenset("rm rmdir mkdir kill wait sleep exit true printf :".split())
_NOT_PROGRAMS = {"", "printf", *_PRINTS, *_COPIES, *_REMOVES}
_TRAINS = re.compile(r"train|fit|finetune|fine_tune|\brun\b|main|sft|ddp|learn", re.IGNORECASE)
_NOT_STARTED = {"", *"-V --version - -c -mpip -mvenv -mensurepip -mvirtualenv".split()}
_SHELLS = frozenset("bash sh julia Rscript timeout nice stdbuf ionice setsid".split())
_RUNNERS = frozenset("uv poetry conda mamba micromamba apptainer singularity".split())
_NOT_FIELDS = re.compile(  # modules and activations change these, too; or no job file may set them
    r"\w*PATH|ENV|NODE_RANK|_|"
    r"(SLURM|SBATCH|SRUN|HPML|PMI(?!X_MCA)|BASH|PRTE_(?!MCA)|OMPI_(?!MCA|ALLOW))\w*"
)
_CLEANS_UP = re.compile(r"((source|\.|conda|mamba|micromamba) +)?deactivate\b|(module|ml|unset)\b")
_NO_EPILOGUE = "hpml runs nothing after the program"


@dataclass
class Line:
    """A command of the script.

    Attributes:
        kind: `keep` for a shell line, `quiet` for one that only prints or makes a directory, `set`
            for variables, `stage` for a copy to the node, or the field's name.
        value: of the field.
        assigned: variables that it sets; programs inherit them if it is `exported`.
        launch: what it starts; `block` names the loop or condition around it.
        words: of a simple command, expanded.
        directories: its current directory, on the shared file system and on the node's disk.
        statement: the number of its statement, from 1.
        in_setup: whether it becomes a line of `environment.setup`.
    """

    kind: str
    line: int
    source: str
    directories: tuple[str, str]
    statement: int
    value: str = ""
    assigned: dict[str, str] = field(default_factory=dict)
    exported: bool = False
    launch: Launch | None = None
    block: str = ""
    words: tuple[str, ...] = ()
    in_setup: bool = False


def read_body(text: str, values: Values, report: ImportReport) -> Body:
    """Return the commands of a script before the launch; what follows it is reported.

    Raises:
        InputError: it starts no program, or a line of it cannot be carried over.
    """
    statements = parse_script(text)
    whole = Body(deepcopy(values), ImportReport())
    for statement in statements:
        whole.read(statement)
    chosen = _choose(whole.lines)
    # Once more up to the launch: later lines must not change variables and directories.
    body = Body(values, report)
    for statement in statements[: chosen.statement]:
        body.read(statement)
    body.launch = body.lines.pop().launch or Launch(chosen.line, chosen.source, [], "")
    body.read_rest(whole.lines[whole.lines.index(chosen) + 1 :])
    return body


class Body:
    """The commands of a script.

    Attributes:
        lines: those before the launch, in order.
        launch: the launch that becomes the job's program.
    """

    launch: Launch

    def __init__(self, values: Values, report: ImportReport) -> None:
        self.values = values
        self.report = report
        self.copies = Copies(values)
        self.lines: list[Line] = []
        self.exports_all = False
        self.exported = set(values.environment)
        self.statements = 0

    def add(
        self, kind: str, part: Command | Statement, value: str = "", words: tuple[str, ...] = ()
    ) -> Line:
        """Append a line and return it."""
        directories = (self.values.directory, self.copies.directory)
        line = Line(kind, part.line, part.source, directories, self.statements, value, words=words)
        self.lines.append(line)
        return self.lines[-1]

    def keep(self, part: Command | Statement, words: tuple[str, ...] = (), block: str = "") -> Line:
        """Append a shell line that may set variables."""
        line = self.add("keep", part, words=words)
        line.block = block
        self.values.forget(part.source, is_function=block == "a function")
        if re.search(r"\b(cd|pushd|popd)\b", part.source) and not part.source.startswith("("):
            self.values.directory = self.copies.directory = ""
        if "export" in part.source:
            self.exported |= set(re.findall(r"\w+", part.source))
        return line

    def read(self, statement: Statement) -> None:
        """Read the next statement."""
        self.statements += 1
        commands, source = statement.commands, statement.source
        is_simple = len(commands) == 1 and not (statement.block or statement.background)
        if any(map(self._launch, commands)):
            self._read_launch(statement)
        elif is_simple or re.match(r"cd [^|&;]*\|\|", source):  # `cd DIRECTORY || exit`
            commands[0].source = source
            self._command(commands[0])
        else:
            self.keep(statement, block=statement.block)

    def _read_launch(self, statement: Statement) -> None:
        launches = list(map(self._launch, statement.commands))
        position = next(place for place, launch in enumerate(launches) if launch)
        before, command, after = (
            statement.commands[:position],
            statement.commands[position],
            statement.commands[position + 1 :],
        )
        operators = {one.operator for one in (*before, command)}
        inside = statement.block
        if operators & {"|", "|&"}:
            inside = inside or "a pipeline"
        elif operators - {"", "&&"} or any(_name(one) in _TESTS for one in before):
            inside = inside or "a condition"
        if inside:
            line = self.keep(statement, block=inside)
            line.launch = max(filter(None, launches), key=_score)
            return
        for one in before:
            self._command(one)
        # Once more, because the commands before it may set variables.
        launch = self._launch(command) or Launch(command.line, command.source, [], "")
        line = self.add("keep", statement)
        line.launch = launch
        line.source = statement.source[statement.source.index(command.source) :]
        _read_after(launch, command, after)

    def _command(self, command: Command) -> None:
        if not command.words and command.assignments:
            assigned = dict(map(self.values.assign, command.assignments))
            self.assign(command, assigned, exported=self.exports_all)
            return
        words = self.values.words(command.words) or [""]
        name = os.path.basename(words[0])
        plain = all(re.search(r"<|&\d$|/dev/", text) for text in command.redirects)
        bare = tuple(_without_srun(words))
        if name in _HANDLERS:
            _HANDLERS[name](self, command, words)
        elif self.copies.take(bare):
            self.add("stage", command, words=bare)
        elif bare[0] == "mkdir" or (name in _PRINTS and plain):
            self.add("quiet", command, words=bare)
        else:
            if os.path.basename(bare[0]) in _COPIES:
                bare = tuple(_without_srun(self.values.words(map(_whole, command.words))))
            self.keep(command, words=bare)

    def assign(self, command: Command, assigned: dict[str, str], *, exported: bool) -> None:
        """Append a line that sets variables."""
        if "IFS" in assigned:
            problem = f"line {command.line}: {command.source}: hpml splits words at blanks only"
            raise InputError(problem, hint="write IFS before the one command that needs it")
        line = self.add("set", command)
        line.assigned = assigned
        line.exported = exported or bool(assigned.keys() & self.exported)
        if line.exported and any(map(_NOT_FIELDS.fullmatch, assigned.keys() - PROVIDED)):
            line.kind = "keep"
        elif self.values.sourced and not line.exported:
            line.kind = "quiet"  # the file that was read may have exported it
        if (devices := assigned.pop("CUDA_VISIBLE_DEVICES", None)) is not None:
            check_devices(self.values, command.line, devices)
            line.kind = "set"
            why = "the ranks see all GPUs of the job"
            self.report.add("dropped", command.line, command.source, why)

    def _launch(self, command: Command) -> Launch | None:
        """Return what a simple command launches; None for other commands."""
        words = self.values.words(command.words)
        if not words or words[0] in ("eval", "trap", "export"):
            return None
        assigned = [f"{one.name}={self.values.text(one.value)}" for one in command.assignments]
        words = [
            self.values.at_submission(word) if word.startswith("--container-") else word
            for word in words
        ]
        launch = Launch(command.line, command.source, assigned + words, self.values.directory)
        try:
            remove_launchers(launch)
        except InputError as error:
            launch.error = error  # raised if this is the job's program
            return launch
        name, rest = launch.program, [w for w in launch.words[1:] if w not in ("-u", "-B", "-O")]
        verb = "".join(rest[:1])
        if launch.launcher == "srun":  # it also starts small commands on the nodes
            starts = name not in _NOT_PROGRAMS
        elif PYTHON.fullmatch(name):
            starts = "".join(rest[: 1 + (rest[:1] == ["-m"])]) not in _NOT_STARTED
        elif name in _SHELLS:
            starts = bool(verb)
        elif name in _RUNNERS:
            starts = verb in ("run", "exec")
        else:
            starts = "/" in "".join(launch.words[:1]) or words[0] == "exec"
        return launch if starts or launch.launcher not in ("", "srun") else None

    def read_rest(self, lines: list[Line]) -> None:
        """Read the lines after the launch: copies of results, and what is lost."""
        directory = self.values.directory
        for line in lines:
            self.values.directory, self.copies.directory = line.directories
            name = os.path.basename("".join(line.words[:1]))
            if name in _COPIES:
                if self.copies.take_back(line.words, line.line, line.source):
                    continue
            elif re.search(rf"\b({'|'.join(_COPIES)})\s", line.source) and (
                line.directories[1] or self.is_on_node(line.source)
            ):
                raise lost_results(line.line, line.source)
            if name in ("rm", "rmdir"):
                why = f"{_NO_EPILOGUE}; it removes what it staged"
                self.report.lost(line.line, line.source, why, "remove the rest in another way")
            elif line.kind != "keep" or name in _REMOVES or _CLEANS_UP.match(line.source):
                self.report.add("dropped", line.line, line.source, _NO_EPILOGUE)
            else:
                todo = "have the program write its results to shared storage, such as {run.dir}; "
                todo += "do the rest in another job with `hpml submit --after`"
                self.report.lost(line.line, line.source, _NO_EPILOGUE, todo)
        self.values.directory, self.copies.directory = directory, ""

    def is_on_node(self, source: str) -> bool:
        """Whether a shell line names the node's own disk, also by a variable of the script."""
        assigned = [item for line in self.lines for item in line.assigned.items()]
        names = [rf"\$\{{?{name}\b" for name, value in assigned if LOCAL.search(shown(value))]
        return re.search("|".join([LOCAL.pattern, *names]), source) is not None

    def divide(self, names: set[str], placed: Callable[[str], str]) -> None:
        """Decide which lines stay shell lines of `environment.setup`, and which become fields.

        hpml loads modules and activates environments before setup. So they are fields only as
        long as no line before them must stay in setup; a `cd` also stays behind a `mkdir`.

        Args:
            names: variables that the launch line needs from the shell.
            placed: returns a value with the placeholders that a job file can have.
        """
        blocked = moved = active = False
        for line in self.lines:
            environment = line.kind in ("venv", "conda")
            if line.kind in _SOFTWARE and (
                blocked or (environment and active) or (line.kind == "cd" and moved)
            ):
                line.kind = "keep"
            active = active or environment
            blocked = blocked or line.kind == "keep" or _is_unknown(line, placed)
            moved = moved or blocked or line.source.startswith("mkdir")
        needed = False  # whether a later command may read exported variables
        for line in reversed(self.lines):
            own = line.assigned.keys() <= PROVIDED
            inherited = line.exported and not own and (needed or _is_unknown(line, placed))
            if line.kind in ("keep", "quiet") or names & line.assigned.keys() or inherited:
                line.in_setup = line.kind not in ("stage", *_SOFTWARE)
                names = names | set(re.findall(r"[A-Za-z_]\w*", line.source))
            needed = needed or line.kind == "keep"
        if all(re.match(r"set\b", line.source) for line in self.lines if line.in_setup):
            for line in self.lines:
                line.in_setup = False  # shell options without a line that they apply to


def _choose(lines: list[Line]) -> Line:
    """Return the job's program: the launch that looks like the training, else the last."""
    launches = [(line, line.launch) for line in lines if line.launch]
    if not launches:
        raise InputError(
            "no line starts a program",
            hint="hpml recognizes srun, torchrun, mpirun, python …; write `srun` before yours",
        )
    chosen, launch = max(reversed(launches), key=lambda pair: _score(pair[1]))
    where = f"line {launch.line}: {launch.source.partition(chr(10))[0][:60]}"
    if chosen.block:
        raise InputError(
            f"{where}: starts the program in {chosen.block}, which hpml does not evaluate",
            hint="write the launch on a separate line; for several runs use `--array`",
        )
    if launch.error:
        raise launch.error
    for line, other in launches:
        if line is not chosen and _score(other) == _score(launch):
            raise InputError(
                f"{where}: line {other.line} also starts a program; a job file runs one",
                hint="use `--array` and one launch, or write a script for each",
            )
    return chosen


def _is_unknown(line: Line, placed: Callable[[str], str]) -> bool:
    values = [value for name, value in line.assigned.items() if name not in PROVIDED]
    return any(has_hole(placed(value)) for value in values)


def _name(command: Command) -> str:
    return os.path.basename(command.words[0].source) if command.words else ""


def _read_after(launch: Launch, command: Command, rest: list[Command]) -> None:
    for text in command.redirects:
        if "<" in text and "/dev/null" not in text:
            why, hint = "ranks read no standard input", "have the program read a file"
            launch.error = launch.error or launch.refused(text, why, hint)
        elif not re.search(r"/dev/null|&\d$", text):
            launch.report.changed(launch.line, text, *OUTPUT)
    for after in rest:
        name, text = _name(after), f"{after.operator} {after.source}"
        if after.operator in ("|", "|&") and name == "tee":
            launch.report.changed(after.line, f"| {after.source}", *OUTPUT)
        elif after.operator in ("|", "|&"):
            why, hint = "another program reads the output", "have the program write a file"
            launch.error = launch.error or launch.refused(text, why, hint)
        elif name in _COPIES:
            hint = "write the copy on a separate line"
            launch.error = launch.error or launch.refused(text, _NO_EPILOGUE, hint)
        else:
            kind: Kind = "dropped" if name in {*_PRINTS, "printf"} else "lost"
            launch.report.add(kind, after.line, text, _NO_EPILOGUE)


def _whole(word: ShellWord) -> ShellWord:
    last = word.parts[-1]
    if last.is_expansion or last.quoted or not last.text.endswith("/*"):
        return word
    return replace(word, parts=(*word.parts[:-1], Part(f"{last.text[:-1]}.")))


def _without_srun(words: list[str]) -> list[str]:
    if words[0] != "srun":
        return words
    launch = Launch(0, "", list(words), "")
    remove_launchers(launch)
    return launch.words or words


def _score(launch: Launch) -> tuple[bool, ...]:
    words = launch.words
    named = [*words[:3], *(word for word in words if word.endswith(".py"))]
    trains = _TRAINS.search(" ".join(os.path.basename(word) for word in named))
    return bool(trains), bool(launch.launcher), bool(PYTHON.fullmatch(launch.program))


# Handlers of single commands; `words` are expanded.


def _module(body: Body, command: Command, words: list[str]) -> None:
    rest = [word for word in words[1:] if not word.startswith("--") and word != "-q"]
    named = words[0] == "module" or rest[:1] in (["load"], ["add"])  # `ml NAME` loads, too
    verb = rest.pop(0) if rest and named else "load"
    is_plain = all(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_./+@:=~-]*", name) for name in rest)
    if verb in ("load", "add") and rest and is_plain:
        body.add("module", command, " ".join(rest))
    else:
        body.keep(command)


def _source(body: Body, command: Command, words: list[str]) -> None:
    path, environment = body.values.at_submission("".join(words[1:2])), "".join(words[2:3])
    directory, script = os.path.dirname(os.path.dirname(path)), os.path.basename(path)
    conda = environment or re.search(r"(conda|mamba|miniforge)\d*$", directory)
    known = directory and not has_hole(path) and body.values.directory
    # `source activate NAME` is conda's old command, found on PATH; it has the same names and paths.
    if path == "activate" and environment and len(words) == len(("source", path, environment)):
        _conda(body, command, ["conda", "activate", environment])
        return
    if script == "activate" and known and not conda:
        body.add("venv", command, os.path.join(body.values.directory, directory))
    else:
        body.keep(command)


def _conda(body: Body, command: Command, words: list[str]) -> None:
    name = body.values.at_submission(words[2]) if words[2:] else "base"
    if words[:2] == ["conda", "activate"] and not has_hole(name) and not name.startswith("-"):
        path = os.path.join(body.values.directory, name) if "/" in name else name
        body.add("conda", command, path)
    else:
        body.keep(command)


def _cd(body: Body, command: Command, words: list[str]) -> None:
    rest = [word for word in words[1:] if word not in ("--", "-P", "-L")]
    target = body.values.at_submission(rest[0] if rest else '\0"$HOME"\0')
    base, copies = body.values.directory, body.copies
    if words[0] == "cd" and target != "-" and not has_hole(target) and (base or target[:1] == "/"):
        body.values.directory = os.path.normpath(os.path.join(base, target))
        copies.directory = ""
        body.add("cd", command, body.values.directory)
    else:
        body.keep(command)
        if words[0] == "cd" and copies.is_local(target):
            copies.directory = copies.path(target)


def _export(body: Body, command: Command, words: list[str]) -> None:
    if any(not word.isidentifier() for word in words):  # an option such as `export -p`
        body.keep(command)
        return
    assigned = dict(map(body.values.assign, command.assignments))
    for name in words[1:]:
        items = body.values.variables.get(name)
        assigned[name] = items[0] if items else f'\0"${name}"\0'
    exports = words[0] == "export"
    if exports:
        body.exported |= assigned.keys()
    body.assign(command, assigned, exported=exports)


def _set(body: Body, command: Command, words: list[str]) -> None:
    if {"-a", "+a", "allexport"} & set(words):
        body.exports_all = not {"+a", "+o"} & set(words)
    if "--" in words:
        problem = f"line {command.line}: {command.source}: sets the arguments of the script"
        raise InputError(problem, hint="write them into the line of the program")
    body.add("quiet", command)


def _trap(body: Body, command: Command, words: list[str]) -> None:
    ends = {"EXIT", "0"} & set(words)
    if ends and not re.fullmatch(r"['\"]?(rm|kill|echo)\b[^;&|]*", "".join(words[1:2])):
        problem = f"line {command.line}: {command.source}: {_NO_EPILOGUE}"
        hint = "write what it does on lines after the launch; hpml removes what it staged"
        raise InputError(problem, hint=hint)
    why, todo = "hpml sets its own traps; ranks get the signals", "handle the signal in the program"
    body.report.lost(command.line, command.source, why, todo)
    body.add("trap", command)


_HANDLERS: dict[str, Callable[[Body, Command, list[str]], None]] = {
    **dict.fromkeys(("module", "ml"), _module),
    **dict.fromkeys(("source", "."), _source),
    **dict.fromkeys(("conda", "mamba", "micromamba"), _conda),
    **dict.fromkeys(("cd", "pushd", "popd"), _cd),
    **dict.fromkeys(("export", "readonly"), _export),
    "set": _set,
    "trap": _trap,
}
