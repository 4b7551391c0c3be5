"""Divide the commands of a script: fields, shell lines, copies, and the launch."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hpml_orchestrator.convert.launch import PYTHON, Launch, is_launcher, remove_launchers
from hpml_orchestrator.convert.report import OUTPUT, ImportReport
from hpml_orchestrator.convert.shell import (
    Command,
    Part,
    ShellWord,
    Statement,
    parse_lines,
    parse_script,
)
from hpml_orchestrator.convert.values import Values, has_hole, shown
from hpml_orchestrator.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

PROVIDED = frozenset(
    "MASTER_ADDR MASTER_PORT WORLD_SIZE RANK LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK "
    "SRUN_CPUS_PER_TASK SLURM_CPU_BIND SLURM_EXPORT_ENV".split()
)
"""Variables that hpml sets for the ranks, or that its own srun does not need."""

_PRINTS = frozenset(  # commands that print, test or wait
    "echo set shopt nvidia-smi rocm-smi date hostname wait exit true false pwd ls which "
    "type df du free lscpu printenv uname id whoami sleep [ [[ test uptime cat head tail squeue "
    "sinfo scontrol sacct nproc lspci ibstat ip numastat top ps wc sstat seff".split()
)
_TESTS = frozenset({"[", "[[", "test"})
COPIES = frozenset("cp rsync mv scp tar unzip".split())
REMOVES = frozenset("rm rmdir mkdir kill wait sleep exit true printf :".split())
_NOT_PROGRAMS = {"", "printf", *_PRINTS, *COPIES, *REMOVES}
_ORDINARY = _NOT_PROGRAMS | frozenset(  # what prepares a training, or belongs to the shell
    "source . eval trap export readonly declare typeset local let read alias unset umask ulimit cd "
    "pushd popd module ml conda mamba micromamba git pip pip3 uv make cmake wget curl sed awk grep "
    "sort find xargs touch ln chmod chown chgrp tee break continue return shift getopts sbatch "
    "scancel deactivate ssh mount umount dos2unix envsubst basename dirname expr seq rclone "
    "md5sum gzip gunzip python-config huggingface-cli wandb mysql gsutil aws beegfs-ctl lfs".split()
)
_TRAINS = re.compile(r"train|fit|finetune|fine_tune|\brun\b|main|sft|ddp|learn", re.IGNORECASE)
_NOT_STARTED = {"", *"-V --version - -c -mpip -mvenv -mensurepip -mvirtualenv".split()}
_SHELLS = frozenset(
    "bash sh julia Rscript timeout nice stdbuf ionice setsid nsys ncu kernprof scalene py-spy "
    "viztracer rocprof rocprofv3 numactl taskset".split()
)
_RUNNERS = frozenset("uv poetry conda mamba micromamba apptainer singularity".split())
_NOT_FIELDS = re.compile(  # modules and activations change these, too; or no job file may set them
    r"\w*PATH|ENV|IFS|NODE_RANK|_|"
    r"(SLURM|SBATCH|SRUN|HPML|PMI(?!X_MCA)|BASH|PRTE_(?!MCA)|OMPI_(?!MCA|ALLOW))\w*"
)
NO_EPILOGUE = "hpml runs nothing after the program"


@dataclass
class Line:
    """A statement or command of the script.

    Attributes:
        kind: `comment`; `keep` for a shell line, `quiet` for one that only prints or makes a
            directory, `set` for variables, `copy`, `drop` for one with a note, or the name of the
            field: `module`, `venv`, `conda`, `cd`.
        end: its last line.
        directories: its current directory, on the shared file system and on the node's disk.
        value: of the field.
        assigned: variables that it sets; programs inherit them if it is `exported`.
        launch: what it starts; `block` names the loop or condition around it.
        words: of a simple command, expanded; `results` with all of a directory for `DIRECTORY/*`.
        in_setup: whether it is a line of `environment.setup`.
        is_field: whether all of it is in fields of the draft.
    """

    kind: str
    line: int
    end: int
    source: str
    directories: tuple[str, str]
    value: str = ""
    assigned: dict[str, str] = field(default_factory=dict)
    exported: bool = False
    launch: Launch | None = None
    block: str = ""
    words: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    in_setup: bool = False
    is_field: bool = False


class Body:
    """The commands of a script.

    Args:
        text: the script.
        values: of its variables; those that the launch finds remain.
        report: for notes.

    Attributes:
        before: lines before the launch, in order; `after`: those after it.
        launch: the launch that becomes the job's program.
        line: of that launch.

    Raises:
        InputError: it starts no program, or is not valid bash.
    """

    def __init__(self, text: str, values: Values, report: ImportReport) -> None:
        self.values, self.report = values, report
        self.on_node = ""  # current directory, if that is on the node's disk
        self.exports_all = False
        self.exported = set(values.environment)
        self._lines: list[Line] = []
        self._seen: dict[int, tuple[dict[str, tuple[str, ...] | None], str, bool]] = {}
        for statement in parse_script(text):
            self._end = statement.end
            self._read(statement)
        self.line, self.launch = self._choose()
        place = self._lines.index(self.line)
        self.before, self.after = self._lines[:place], self._lines[place + 1 :]
        # Later lines must not change the variables and the directory of the launch.
        now = (values.variables, values.directory, values.sourced)
        values.variables, values.directory, values.sourced = self._seen.get(id(self.line), now)

    def add(
        self, kind: str, part: Command | Statement, value: str = "", words: tuple[str, ...] = ()
    ) -> Line:
        """Append a line and return it."""
        end = max(self._end if isinstance(part, Statement) else 0, part.line)
        end = max(end, part.line + part.source.count("\n"))
        directories = (self.values.directory, self.on_node)
        self._lines.append(Line(kind, part.line, end, part.source, directories, value, words=words))
        return self._lines[-1]

    def keep(self, part: Command | Statement, words: tuple[str, ...] = (), block: str = "") -> Line:
        """Append a shell line that may set variables."""
        line = self.add("keep", part, words=words)
        line.block = block
        self._see(line)
        self.values.forget(part.source, is_function=block == "a function")
        if re.search(r"\b(cd|pushd|popd)\b", part.source) and not part.source.startswith("("):
            self.values.directory = self.on_node = ""
        if "export" in part.source:
            self.exported |= set(re.findall(r"\w+", part.source))
        return line

    def drop(self, command: Command, why: str, todo: str = "", kind: str = "lost") -> Line:
        """Append a line that only a comment of the draft has."""
        self.report.add(kind, command.line, command.source, why, todo)  # type: ignore[arg-type]
        return self.add("drop", command)

    def _see(self, line: Line) -> None:
        now = self.values
        self._seen[id(line)] = (dict(now.variables), now.directory, now.sourced)

    def _read(self, statement: Statement) -> None:
        commands, source = statement.commands, statement.source
        is_simple = len(commands) == 1 and not (statement.block or statement.background)
        if not commands and not statement.block:
            self.add("comment" if source.startswith("#") else "keep", statement)
        elif any(map(self._launch, commands)):
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
        launch = max(filter(None, launches), key=_score)
        if not launch.launcher and not inside and _reads_or_is_read(command, after):
            inside = "a pipeline"
        if inside:
            self.keep(statement, block=inside).launch = launch
            return
        for one in before:
            self._command(one)
        # Once more, because the commands before it may set variables.
        line = self.add("keep", statement)
        line.launch = self._launch(command) or launch
        line.source = statement.source[statement.source.index(command.source) :]
        self._see(line)
        _read_after(line.launch, command, after)

    def _command(self, command: Command) -> None:
        if not command.words and command.assignments:
            assigned = dict(map(self.values.assign, command.assignments))
            self.assign(command, assigned, exported=self.exports_all)
            return
        words = self.values.words(command.words) or [""]
        name = os.path.basename(words[0])
        plain = all(re.search(r"<|&\d$|/dev/", text) for text in command.redirects)
        bare = self._without_srun(words)
        if name in _HANDLERS:
            _HANDLERS[name](self, command, words)
        elif bare[0] == "mkdir" or (name in _PRINTS and plain):
            self.add("quiet", command, words=bare)
        elif os.path.basename(bare[0]) in COPIES:
            line = self.keep(command, words=bare)
            line.results = self._without_srun(self.values.words(map(_whole, command.words)))
        else:
            self.keep(command, words=bare)

    def _without_srun(self, words: list[str]) -> tuple[str, ...]:
        if words[0] == "srun":
            launch = Launch(0, "", list(words), "")
            remove_launchers(launch)
            words = launch.words or words
        return tuple(map(self.values.at_submission, words))

    def assign(self, command: Command, assigned: dict[str, str], *, exported: bool) -> None:
        """Append a line that sets variables."""
        line = self.add("set", command)
        line.assigned = assigned
        line.exported = exported or bool(assigned.keys() & self.exported)
        if "IFS" in assigned or (
            line.exported and any(map(_NOT_FIELDS.fullmatch, assigned.keys() - PROVIDED))
        ):
            line.kind = "keep"
        elif self.values.sourced and not line.exported:
            line.kind = "quiet"  # the file that was read may have exported it
        if (devices := assigned.pop("CUDA_VISIBLE_DEVICES", None)) is not None:
            self.note_devices(command.line, command.source, devices)
            line.kind = "set"

    def note_devices(self, line: int, source: str, devices: str) -> None:
        """Note a CUDA_VISIBLE_DEVICES: fewer GPUs than the job's are to be done by hand."""
        count = int(self.values.known.get("SLURM_GPUS_ON_NODE") or 0)
        if sorted(devices.split(",")) == sorted(map(str, range(count))):
            self.report.add("dropped", line, source, "the ranks see all GPUs of the job")
        else:
            why = f"the header asks for {count} GPUs, and hpml shows the ranks all of them"
            self.report.lost(line, source, why, "write their number into resources.gpus")

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
        launch.inner = self._inner
        remove_launchers(launch)
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
            starts = starts or (name not in _ORDINARY and _TRAINS.search(name) is not None)
            starts = starts or (bool(launch.words) and is_launcher(launch.words))
        return launch if starts or launch.launcher not in ("", "srun") else None

    def _inner(self, text: str) -> list[list[str]]:
        return [
            self.values.words(command.words)
            for statement in parse_lines(text)
            for command in statement.commands
        ]

    def is_on_node(self, source: str, local: re.Pattern[str]) -> bool:
        """Whether a shell line names the node's own disk, also by a variable of the script."""
        assigned = [item for line in self.before for item in line.assigned.items()]
        names = [rf"\$\{{?{name}\b" for name, value in assigned if local.search(shown(value))]
        return re.search("|".join([local.pattern, *names]), source) is not None

    def _choose(self) -> tuple[Line, Launch]:
        """Return the job's program: the launch that looks like the training, else the last."""
        launches = [(line, line.launch) for line in self._lines if line.launch]
        if not launches:  # a program of any name
            functions = [line.source for line in self._lines if line.block == "a function"]
            defined = set(re.findall(r"^(?:function )?(\w+)", "\n".join(functions), re.MULTILINE))
            for line in self._lines:
                name = os.path.basename("".join(line.words[:1]))
                is_srun = line.source.startswith("srun ")
                if is_srun or (line.kind == "keep" and name and name not in _ORDINARY | defined):
                    words = self._inner(line.source)[0] if is_srun else [*line.words]
                    line.launch = Launch(line.line, line.source, words, line.directories[0])
                    remove_launchers(line.launch)
                    launches.append((line, line.launch))
        if not launches:
            raise InputError(
                "no line starts a program",
                hint="hpml recognizes srun, torchrun, mpirun, python …; write `srun` before yours",
            )
        chosen, launch = max(reversed(launches), key=lambda pair: _score(pair[1]))
        for line, other in launches:
            if line is not chosen and _score(other) == _score(launch):
                line.kind = "drop"
                why = f"a job file starts one program, which is that of line {launch.line}"
                todo = "use `array` and one launch, or write a job file for each"
                self.report.lost(line.line, line.source, why, todo)
        return chosen, launch


def _name(command: Command) -> str:
    return os.path.basename(command.words[0].source) if command.words else ""


def _is_tee(command: Command) -> bool:
    return command.operator in ("|", "|&") and _name(command) == "tee"


def _reads_or_is_read(command: Command, after: list[Command]) -> bool:
    reads = any("<" in text and "/dev/null" not in text for text in command.redirects)
    return reads or any(one.operator in ("|", "|&") and not _is_tee(one) for one in after)


def _read_after(launch: Launch, command: Command, rest: list[Command]) -> None:
    for text in command.redirects:
        if "<" in text and "/dev/null" not in text:
            launch.lost(text, "ranks read no standard input", "have the program read a file")
        elif not re.search(r"/dev/null|&\d$", text):
            launch.changed(*OUTPUT, text=text)
    for after in rest:
        text = f"{after.operator} {after.source}"
        if _is_tee(after):
            launch.report.changed(after.line, f"| {after.source}", *OUTPUT)
        elif after.operator in ("|", "|&"):
            why, todo = "another program reads the output", "have the program write a file"
            launch.lost(text, why, todo)
        elif _name(after) in {*_PRINTS, "printf"}:
            launch.report.add("dropped", after.line, text, NO_EPILOGUE)
        else:
            launch.report.lost(after.line, text, NO_EPILOGUE, "write another job for it")


def _whole(word: ShellWord) -> ShellWord:
    last = word.parts[-1]
    if last.is_expansion or last.quoted or not last.text.endswith("/*"):
        return word
    return replace(word, parts=(*word.parts[:-1], Part(f"{last.text[:-1]}.")))


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
    elif script == "activate" and known and not conda:
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
    base = body.values.directory
    if words[0] == "cd" and target != "-" and not has_hole(target) and (base or target[:1] == "/"):
        body.values.directory = os.path.normpath(os.path.join(base, target))
        body.on_node = ""
        body.add("cd", command, body.values.directory)
    else:
        before = body.on_node
        body.keep(command)
        # of use only if it turns out to be on the node's disk
        body.on_node = os.path.join(before, target) if words[0] == "cd" else ""


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
        body.values.variables["@"] = tuple(words[words.index("--") + 1 :])
        body.drop(command, "hpml's job has no arguments", "see `args` of the draft", "changed")
    else:
        body.add("quiet", command)


def _trap(body: Body, command: Command, _words: list[str]) -> None:
    todo = "handle the signal in the program; hpml removes what it staged"
    body.drop(command, "hpml sets its own traps; ranks get the signals", todo)


_HANDLERS: dict[str, Callable[[Body, Command, list[str]], None]] = {
    **dict.fromkeys(("module", "ml"), _module),
    **dict.fromkeys(("source", "."), _source),
    **dict.fromkeys(("conda", "mamba", "micromamba"), _conda),
    **dict.fromkeys(("cd", "pushd", "popd"), _cd),
    **dict.fromkeys(("export", "readonly"), _export),
    "set": _set,
    "trap": _trap,
}
