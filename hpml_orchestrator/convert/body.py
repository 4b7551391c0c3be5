"""Sort the commands of a script: what has a field, what stays a shell line, and the launch."""

from __future__ import annotations

import dataclasses
import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpml_orchestrator.convert.copies import LOCAL, Copies
from hpml_orchestrator.convert.launchers import PYTHON, Launch, peel
from hpml_orchestrator.convert.report import OUTPUT, Report
from hpml_orchestrator.convert.shell import ASSIGNMENT, Command, Statement, split_script
from hpml_orchestrator.convert.values import Values, has_hole, shown
from hpml_orchestrator.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PROVIDED", "SET_LATER", "Body", "Line"]

PROVIDED = frozenset(
    "MASTER_ADDR MASTER_PORT WORLD_SIZE RANK LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK "
    "SRUN_CPUS_PER_TASK SLURM_CPU_BIND SLURM_EXPORT_ENV".split()
)
"""Variables that hpml sets for the ranks, or that its own srun needs not."""
SET_LATER = frozenset({"OMP_NUM_THREADS", "PYTHONUNBUFFERED"})
"""Variables that hpml sets after the lines of setup: only `environment.variables` changes them."""

_PRINTS = frozenset(  # commands that print, test or wait
    "echo printf set shopt nvidia-smi rocm-smi date hostname wait exit true false pwd ls which "
    "type df du free lscpu printenv uname id whoami sleep [ [[ test uptime cat head tail squeue "
    "sinfo scontrol sacct nproc lspci ibstat ip numastat top ps wc sstat seff".split()
)
_TESTS = frozenset("[ [[ test !".split())
_COPIES = frozenset("cp rsync mv scp tar".split())
_REMOVES = frozenset("rm rmdir mkdir unzip kill wait sleep exit true printf :".split())
_TRAINS = re.compile(r"train|fit|finetune|fine_tune|\brun\b|main|sft|ddp|learn", re.IGNORECASE)
_NOT_STARTED = {"", *"-V --version - -c -mpip -mvenv -mensurepip -mvirtualenv".split()}
_SHELLS = frozenset("bash sh julia Rscript timeout nice stdbuf ionice setsid".split())
_RUNNERS = frozenset("uv poetry conda mamba micromamba apptainer singularity".split())
_NOT_FIELDS = re.compile(  # modules and activations change these, too; or no job file may set them
    r"\w*PATH|ENV|NODE_RANK|_|"
    r"(SLURM|SBATCH|SRUN|HPML|PMI(?!X_MCA)|BASH|PRTE_(?!MCA)|OMPI_(?!MCA|ALLOW))\w*"
)
_BLOCKS = {
    **dict.fromkeys(("for", "while", "until", "select"), "a loop"),
    **dict.fromkeys(("if", "case", "||"), "a condition"),
    "|": "a pipeline",
    "function": "a function",
    "{": "a group of commands",
    "(": "a subshell",
}


@dataclass
class Line:
    """A command of the script.

    Attributes:
        kind: `keep`, `quiet` (prints or makes a directory), `local` (prints the node's own disk),
            `assign`, `module`, `venv`, `conda`, `cd`, `stage` or `drop`.
        value: of a module, venv, conda or cd line.
        assigned: variables that it sets, and programs see if it is `exported`.
        launch: what it starts.
        block: what a launch is in: a loop, a condition or a function; `&` in the background.
        words: of a simple command, expanded.
        places: directories in which it runs: on the shared file system, and on the node.
        is_field: whether software or a directory becomes a field, not a shell line.
        runs: whether it runs a command.
    """

    kind: str
    line: int
    source: str
    value: str = ""
    assigned: dict[str, str] = field(default_factory=dict)
    exported: bool = False
    launch: Launch | None = None
    block: str = ""
    words: tuple[str, ...] = ()
    places: tuple[str, str] = ("", "")
    is_field: bool = True
    runs: bool = False


class Body:
    """The commands of a script, divided.

    Attributes:
        lines: those before the launch, in order.
        launch: the launch that becomes the job's program.
    """

    def __init__(self, text: str, values: Values, report: Report) -> None:
        self.values = values
        self.report = report
        self.copies = Copies(values)
        self.lines: list[Line] = []
        self.exports_all = False
        self.exported = set(values.environment)
        for statement in split_script(text):
            self._read(statement)
        chosen, self.launch = self._choose()
        place = self.lines.index(chosen)
        self._read_rest(self.lines[place + 1 :])
        del self.lines[place:]

    def add(self, kind: str, part: Command | Statement, **fields: object) -> Line:
        """Append a line and return it."""
        places = (self.values.directory, self.copies.directory)
        line = Line(kind, part.line, part.source, places=places)
        line = dataclasses.replace(line, **fields)  # type: ignore[arg-type]
        self.lines.append(line)
        return line

    def keep(
        self, part: Command | Statement, *, function: bool = False, words: tuple[str, ...] = ()
    ) -> None:
        """Append a shell line that may set variables."""
        self.add("keep", part, words=words, block=getattr(part, "block", ""))
        self.values.forget(part.source, function=function)
        if re.search(r"\b(cd|pushd|popd)\b", part.source) and not part.source.startswith("("):
            self.values.directory = self.copies.directory = ""
        if "export" in part.source:
            self.exported |= set(re.findall(r"\w+", part.source))

    def _read(self, statement: Statement) -> None:
        commands, block = statement.commands, statement.block
        launches = [self._launch(command) for command in commands]
        if any(launches):
            self._read_launch(statement, launches)
        elif len(commands) == 1 and not (block or statement.background):
            self._command(dataclasses.replace(commands[0], source=statement.source))
        elif re.match(r"cd [^|&;]*\|\|", statement.source):  # `cd DIRECTORY || exit`
            self._command(commands[0])
        elif (
            commands
            and all("".join(c.words[:1]) in _PRINTS - {"printf"} for c in commands)
            and not (block or any(">" in text for c in commands for text in c.redirects))
        ):
            self.add("quiet", statement)
        else:
            self.keep(statement, function=block == "function")

    def _read_launch(self, statement: Statement, launches: list[Launch | None]) -> None:
        """Read a statement that launches something."""
        commands = statement.commands
        position = next(place for place, launch in enumerate(launches) if launch)
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
            self.keep(statement, function=inside == "function")
            self.lines[-1].launch = max(filter(None, launches), key=_score)
            self.lines[-1].block = inside
            return
        for command in before:
            self._command(command)
        # Once more, with what the commands before it set.
        launch = self._launch(last) or Launch(last.line, last.source, [], "")
        line = self.add("keep", statement, block="&" * statement.background, launch=launch)
        line.source = statement.source[statement.source.index(last.source) :]
        _read_after(launch, last, after)

    def _command(self, command: Command) -> None:
        """Read a simple command that launches nothing."""
        if command.words and all(map(ASSIGNMENT.fullmatch, command.words)):
            assigned = dict(map(self.values.assign, command.words))
            self.assign(command, assigned, exported=self.exports_all)
            return
        words = self.values.words(command.words) or [""]
        name = os.path.basename(words[0])
        plain = all(re.search(r"<|&\d$|/dev/", text) for text in command.redirects)
        bare = _without_srun(words)
        name = "mkdir" if bare[0] == "mkdir" else name
        if name in _HANDLERS:
            _HANDLERS[name](self, command, words)
        elif self.copies.take(bare):
            self.add("stage", command, words=tuple(bare))
        elif name == "mkdir" or (name in {*_PRINTS} - {"printf"} and plain):
            paths = [word for word in bare[1:] if not word.startswith("-")]
            local = (all if name == "mkdir" else any)(map(self.copies.is_local, paths))
            self.add("local" if local else "quiet", command, words=tuple(bare))
        else:
            if os.path.basename(bare[0]) in _COPIES:  # `cp out/*` brings all of `out`
                whole = [re.sub(r"/[^/$]*[*?][^/$]*$", "/.", word) for word in command.words]
                bare = _without_srun(self.values.words(whole))
            self.keep(command, words=tuple(bare))

    def assign(self, command: Command, assigned: dict[str, str], *, exported: bool) -> None:
        """Append a line that sets variables."""
        if "IFS" in assigned:
            problem = f"line {command.line}: {command.source}: hpml splits words at blanks only"
            raise InputError(problem, hint="write IFS before the one command that needs it")
        exported = exported or bool(assigned.keys() & self.exported)
        paths = any(map(_NOT_FIELDS.fullmatch, assigned.keys() - PROVIDED))
        cuda = assigned.get("CUDA_VISIBLE_DEVICES")
        line = self.add("assign", command, assigned=assigned, exported=exported)
        if paths and exported:
            line.kind = "keep"  # modules and activations change these, too
        elif self.values.sourced and not exported:
            line.kind = "quiet"  # the file that was read may have exported it
        if cuda is not None:
            check_devices(self.values, command.line, cuda)
            line.assigned = {n: v for n, v in assigned.items() if n != "CUDA_VISIBLE_DEVICES"}
            line.kind = "assign" if line.assigned else "drop"

    def _launch(self, command: Command) -> Launch | None:
        """Return what a simple command launches; None for other commands."""
        words = list(command.words)
        settings = []
        while words and (match := ASSIGNMENT.fullmatch(words[0])):
            settings.append(match)
            words.pop(0)
        assigned = [f"{match[1]}={self.values.text(match[3])}" for match in settings if words]
        words = self.values.words(words)
        if not words or words[0] in ("eval", "for", "trap"):
            return None
        launch = Launch(command.line, command.source, assigned + words, self.values.directory)
        try:
            peel(launch)
        except InputError as error:
            launch.error = error  # it counts if this is the job's program
            return launch
        name, rest = launch.program, [w for w in launch.words[1:] if w not in ("-u", "-B", "-O")]
        verb = "".join(rest[:1])
        if launch.launcher == "srun":  # it also starts small commands on the nodes
            starts = name not in {"", *_PRINTS, *_COPIES, *_REMOVES}
        elif PYTHON.fullmatch(name):
            starts = "".join(rest[: 1 + (rest[:1] == ["-m"])]) not in _NOT_STARTED
        elif name in _SHELLS:
            starts = bool(verb)
        elif name in _RUNNERS:
            starts = verb in ("run", "exec")
        else:
            starts = "/" in "".join(launch.words[:1]) or words[0] == "exec"
        return launch if starts or launch.launcher not in ("", "srun") else None

    def _choose(self) -> tuple[Line, Launch]:
        """Return the job's program: the launch that looks like the training, else the last."""
        launches = [(line, line.launch) for line in self.lines if line.launch]
        if not launches:
            raise InputError(
                "no line starts a program",
                hint="hpml looks for srun, torchrun, mpirun, python …; write `srun` before yours",
            )
        chosen, launch = max(reversed(launches), key=lambda pair: _score(pair[1]))
        where = f"line {launch.line}: {launch.source.partition(chr(10))[0][:60]}"
        if chosen.block not in ("", "&"):
            inside = _BLOCKS[chosen.block]
            raise InputError(
                f"{where}: starts the program in {inside}, which hpml does not evaluate",
                hint="write the launch on a separate line; for several runs use `--array`",
            )
        if launch.error:
            raise launch.error
        for line, other in launches:
            if line is not chosen and _score(other) == _score(launch):
                raise InputError(
                    f"{where}: line {other.line} starts a program, too; a job file runs one",
                    hint="use `--array` and one launch, or write a script for each",
                )
        return chosen, launch

    def _read_rest(self, lines: list[Line]) -> None:
        """Read the lines after the launch: copies of results, and what is lost."""
        directory = self.values.directory
        for line in lines:
            self.values.directory, self.copies.directory = line.places
            name = os.path.basename("".join(line.words[:1]))
            moved = any(has_hole(word) or self.copies.is_local(word) for word in line.words[1:])
            if line.words and name in _COPIES and moved:
                self.copies.take_back([*line.words], line.line, line.source)
            elif line.kind == "stage" or (
                re.search(rf"\b({'|'.join(_COPIES)})\s", line.source)
                and (line.places[1] or self.is_on_node(line.source))
            ):
                self.copies.take_back([""], line.line, line.source)  # which is refused
            elif line.kind == "keep" and name not in _REMOVES:
                why = "hpml runs nothing after the program"
                todo = "have the program write its results to shared storage, such as {run.dir}; "
                todo += "do the rest in another job with `hpml submit --after`"
                self.report.lost(line.line, line.source, why, todo)
            elif name in ("rm", "rmdir"):
                why = "hpml runs nothing after the program; it removes what it staged"
                self.report.lost(line.line, line.source, why, "remove the rest in another way")
        self.values.directory = directory

    def is_on_node(self, source: str) -> bool:
        """Whether a shell line names the node's own disk, also by a variable of the script."""
        assigned = [item for line in self.lines for item in line.assigned.items()]
        names = [rf"\$\{{?{name}\b" for name, value in assigned if LOCAL.search(shown(value))]
        return re.search("|".join([LOCAL.pattern, *names]), source) is not None

    def divide(self, names: set[str], placed: Callable[[str], str]) -> list[Line]:
        """Divide the lines between fields and `environment.setup`; return those of setup.

        Args:
            names: variables that the command line itself needs from the shell.
            placed: returns a value with placeholders for what a job file can name.
        """
        kept: set[int] = set()
        later = False  # whether a command that may read variables comes later
        for line in reversed(self.lines):
            runs = line.kind == "keep" or (line.kind in _SOFTWARE and not line.is_field)
            unknown = any(has_hole(placed(value)) for value in line.assigned.values())
            named = bool(names & line.assigned.keys())
            own = line.assigned.keys() <= PROVIDED
            if (
                runs
                or line.kind == "quiet"
                or named
                or (line.kind == "assign" and line.exported and not own and (unknown or later))
            ):
                kept.add(id(line))
                names = names | set(re.findall(r"[A-Za-z_]\w*", line.source))
            later = later or runs
            line.runs = runs or (line.kind == "assign" and unknown)
        blocked = moved = active = False
        for line in self.lines:
            environment = line.kind in ("venv", "conda")
            if line.is_field and line.kind in _SOFTWARE:
                if blocked or (environment and active) or (line.kind == "cd" and moved):
                    line.is_field = False
                    return self.divide(names, placed)  # it stays a shell line, and so do others
                active = active or environment
            if id(line) in kept:
                blocked = blocked or line.runs
                moved = moved or line.runs or line.source.startswith("mkdir")
        setup = [line for line in self.lines if id(line) in kept]
        # Shell options alone are for lines that are not there.
        return [] if all(re.match(r"set\b", line.source) for line in setup) else setup


_SOFTWARE = ("module", "venv", "conda", "cd")


def check_devices(values: Values, line: int, devices: str) -> None:
    """Check that CUDA_VISIBLE_DEVICES names all GPUs of the job: then Slurm sets the same.

    Raises:
        InputError: it names others.
    """
    count = int(values.known.get("SLURM_GPUS_ON_NODE") or 0)
    if devices != ",".join(map(str, range(count))):
        problem = (
            f"line {line}: CUDA_VISIBLE_DEVICES={shown(devices)}: the header asks for {count} "
        )
        hint = "remove the line; write --gpus-per-node for the number of GPUs"
        raise InputError(f"{problem}GPUs, and hpml shows the ranks all of them", hint=hint)


def _read_after(launch: Launch, command: Command, rest: tuple[Command, ...]) -> None:
    """Report the redirections of a launch, and what follows it on its line."""
    for text in command.redirects:
        if "<" in text and "/dev/null" not in text:
            why, hint = "ranks read no standard input", "have the program read a file"
            launch.error = launch.error or launch.refused(text, why, hint)
        elif not re.search(r"/dev/null|&\d$", text):
            launch.report.changed(launch.line, text, *OUTPUT)
    for after in rest:
        name = os.path.basename("".join(after.words[:1]))
        text = f"{after.operator} {after.source}"
        if after.operator in ("|", "|&") and name == "tee":
            launch.report.changed(after.line, f"| {after.source}", *OUTPUT)
        elif after.operator in ("|", "|&"):
            why, hint = "another program reads the output", "have the program write a file"
            launch.error = launch.error or launch.refused(text, why, hint)
        elif name in _COPIES:
            launch.error = launch.error or launch.refused(
                text, "hpml runs nothing after the program", "write the copy on a separate line"
            )
        elif name not in _PRINTS:
            launch.report.lost(after.line, text, "hpml runs nothing after the program")


def _without_srun(words: list[str]) -> list[str]:
    """Return the command that srun starts on the nodes, or the words themselves."""
    if words[0] != "srun":
        return words
    launch = Launch(0, "", list(words), "")
    peel(launch)
    return launch.words or words


def _score(launch: Launch) -> tuple[bool, ...]:
    """Return how much a launch looks like the training of the script."""
    words = launch.words
    named = [*words[:3], *(word for word in words if word.endswith(".py"))]
    trains = _TRAINS.search(" ".join(os.path.basename(word) for word in named))
    return bool(trains), bool(launch.launcher), bool(PYTHON.fullmatch(launch.program))


# Handlers of single commands; `words` are expanded.


def _module(body: Body, command: Command, words: list[str]) -> None:
    rest = [word for word in words[1:] if not word.startswith("--") and word != "-q"]
    looks = "list avail av spider show display help whatis is-loaded".split()
    changes = "purge unload rm del use unuse swap switch restore save reset".split()
    verb = rest.pop(0) if rest and rest[0] in [*looks, *changes, "load", "add"] else "load"
    plain = all(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_./+@:=~-]*", name) for name in rest)
    loaded = body.values.environment.get("LOADEDMODULES") or any(
        line.kind not in ("assign", "quiet", "local") for line in body.lines
    )
    if verb in ("load", "add") and plain:
        body.add("module", command, value=" ".join(rest))
    elif verb == "purge" and not loaded:
        why = "no module is loaded in the environment that you submit from"
        body.report.add("dropped", command.line, command.source, why)
    elif verb in looks:
        body.add("quiet", command)
    else:
        body.keep(command)


def _source(body: Body, command: Command, words: list[str]) -> None:
    path, environment = body.values.now("".join(words[1:2])), "".join(words[2:3])
    directory, script = os.path.dirname(os.path.dirname(path)), os.path.basename(path)
    conda = environment or re.search(r"(conda|mamba|miniforge)\d*$", directory)
    known = directory and not has_hole(path) and body.values.directory
    if script != "activate" or conda or not known:
        body.keep(command)
    else:
        body.add("venv", command, value=os.path.join(body.values.directory, directory))


def _conda(body: Body, command: Command, words: list[str]) -> None:
    name = body.values.now(words[2]) if words[2:] else "base"
    if words[:2] != ["conda", "activate"] or has_hole(name) or name.startswith("-"):
        body.keep(command)
        return
    path = os.path.join(body.values.directory, name) if "/" in name else name
    body.add("conda", command, value=path)


def _cd(body: Body, command: Command, words: list[str]) -> None:
    rest = [word for word in words[1:] if word not in ("--", "-P", "-L")]
    target = body.values.now(rest[0] if rest else '\0"$HOME"\0')
    base, copies = body.values.directory, body.copies
    if words[0] == "cd" and target != "-" and not has_hole(target) and (base or target[:1] == "/"):
        body.values.directory = os.path.normpath(os.path.join(base, target))
        copies.directory = ""
        body.add("cd", command, value=body.values.directory)
    else:
        body.keep(command)
        if words[0] == "cd" and copies.is_local(target):
            copies.directory = copies.path(target)


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
    body.assign(command, assigned, exported=words[0] == "export")


def _set(body: Body, command: Command, words: list[str]) -> None:
    if {"-a", "+a", "allexport"} & set(words):
        body.exports_all = not {"+a", "+o"} & set(words)
    body.add("quiet", command)


def _trap(body: Body, command: Command, words: list[str]) -> None:
    ends = {"EXIT", "0"} & set(words)
    if ends and not re.fullmatch(r"['\"]?(rm|kill|echo)\b[^;&|]*", "".join(words[1:2])):
        problem = f"line {command.line}: {command.source}: hpml runs nothing after the program"
        hint = "write what it does on lines behind the launch; hpml removes what it staged"
        raise InputError(problem, hint=hint)
    why, todo = "traps are hpml's: ranks get the signals", "handle the signal in the program"
    body.report.lost(command.line, command.source, why, todo)


_HANDLERS: dict[str, Callable[[Body, Command, list[str]], None]] = {
    **dict.fromkeys(("module", "ml"), _module),
    **dict.fromkeys(("source", "."), _source),
    **dict.fromkeys(("conda", "mamba", "micromamba"), _conda),
    **dict.fromkeys(("cd", "pushd", "popd"), _cd),
    **dict.fromkeys(("export", "readonly"), _export),
    "set": _set,
    "trap": _trap,
}
