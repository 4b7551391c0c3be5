"""Read the commands of a script: what becomes a field, what stays a shell line, what is launched.

Module loads, activations, exports, `cd` and copies to the node become fields of the job file. Every
other command before the launch goes into `environment.setup` as it stands; from the first of those
on, module loads and activations stay there too, so that their order is the script's.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.convert.launchers import PYTHON, Launch, peel
from hpml_orchestrator.convert.shell import ASSIGNMENT, Piece, Token, split_script
from hpml_orchestrator.convert.staging import Staging, is_local
from hpml_orchestrator.convert.values import PROVIDED, Values, has_hole, shell_word, shown, stable
from hpml_orchestrator.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hpml_orchestrator.convert.report import Report

__all__ = ["OWN", "PATHS", "Body", "Line"]

PATHS = frozenset("PATH LD_LIBRARY_PATH LIBRARY_PATH MANPATH CPATH MODULEPATH".split())
OWN = PROVIDED | {"SRUN_CPUS_PER_TASK", "SLURM_CPU_BIND", "SLURM_EXPORT_ENV"}
"""Variables that the job file does not set, since hpml does."""

_QUIET = frozenset(  # commands that print, test or wait: later exports need not stay behind them
    "echo printf set shopt nvidia-smi rocm-smi date hostname wait exit true false : pwd ls which "
    "type df du free lscpu printenv uname id whoami sleep [ [[ test uptime mkdir cat head tail "
    "squeue sinfo scontrol sacct nproc lspci ibstat ip numastat top ps wc sstat seff".split()
)
_KEYWORDS = frozenset("if then elif else while until do done fi esac ! time { } in".split())
_TEES = frozenset("tee ts cat grep sed awk unbuffer sort tail head".split())
_TRAINS = re.compile(r"train|fit|finetune|fine_tune|\brun\b|main|sft|ddp|learn", re.IGNORECASE)
_LOCAL = re.compile(r"TMPDIR|LOCAL_?SCRATCH|JOBFS|/tmp\b|/dev/shm")
_NO_MODULES = ("pip", "venv", "ensurepip", "virtualenv")
_IN_SETUP = "kept in environment.setup: runs once, on the first node, before the ranks"


@dataclass
class Line:
    """A command before the launch.

    Attributes:
        kind: `keep`, `quiet`, `assign`, `module`, `purge`, `venv`, `conda`, `hook`, `stage` or
            `launch`.
        directory: where it runs; empty where that is known in the job only.
        value: of a module, venv or conda line.
        assigned: variables that it sets.
        exported: whether programs see these.
    """

    kind: str
    line: int
    source: str
    directory: str
    value: str = ""
    assigned: dict[str, str] = field(default_factory=dict)
    exported: bool = False
    launch: Launch | None = None
    block: str = ""


class Body:
    """The commands of a script.

    Attributes:
        launch: the launch that the job file carries over.
        in_block: whether it stands in a loop, a condition or a function.
        kept: the lines of `environment.setup`.

    Raises:
        InputError: the script starts no program, or a quote or block is not closed.
    """

    def __init__(self, text: str, values: Values, report: Report) -> None:
        self.values = values
        self.report = report
        self.staging = Staging(values, report)
        self.lines: list[Line] = []
        self.kept: list[Line] = []
        self._carried: list[Line] = []
        self._fatal = bool(re.match(r"#!.*\s-\w*e", text))  # whether failing lines end the script
        self._exports_all = False
        self._functions: dict[str, Launch] = {}  # that launch something
        self._defined: set[str] = set()  # all functions
        for piece in split_script(text):
            self._read(piece)
        chosen = self._choose()
        self.launch = chosen.launch or Launch(0, "", [], "")
        self.in_block = bool(chosen.block)
        position = self.lines.index(chosen)
        self._report_rest(chosen, self.lines[position + 1 :])
        self.lines = [line for line in self.lines[:position] if self._stays(line, chosen)]
        self._stage()

    def _add(self, kind: str, piece: Piece, **fields: Any) -> None:
        source = f"{piece.source} &" if piece.background else piece.source
        directory = fields.pop("directory", self.values.directory)
        self.lines.append(Line(kind, piece.line, source, directory, **fields))

    def _keep(self, piece: Piece, kind: str = "keep") -> None:
        self._add(kind, piece)
        if kind == "keep":
            self.values.forget(piece.source)

    def _read(self, piece: Piece) -> None:
        commands = list(_commands(piece.tokens))
        launches = [self._launch(piece, tokens) for _, tokens in commands]
        position = next((i for i, launch in enumerate(launches) if launch is not None), -1)
        operators = [operator for operator, _ in commands]
        if piece.block == "function":
            self._defined.add(_function_name(piece))
        if position >= 0:
            simple = not piece.block or re.match(r"[^|&;]*\|\|\s*[{(]", piece.source)
            called = commands[position][1][0].text in self._functions
            before = commands[:position]
            prepared = set(operators[1 : position + 1]) <= {"&&"} and all(
                self._carrier(tokens) for _, tokens in before
            )
            if called or not simple or not prepared:
                self._block(piece, [launch for launch in launches if launch is not None])
                return
            for _, tokens in before:
                self._read(_part(piece, tokens))
            launch = self._launch(piece, commands[position][1])
            assert launch is not None
            self._after(launch, piece, commands[position + 1 :])
            self._add("launch", piece, launch=launch)
        elif (
            operators[1:]
            and not piece.block
            and set(operators[1:]) == {"&&"}
            and all(self._carrier(tokens) for _, tokens in commands)
        ):
            for _, tokens in commands:
                self._read(_part(piece, tokens))
        elif operators[1:2] == ["||"] and self._carrier(commands[0][1]):
            self._read(_part(piece, commands[0][1]))  # a failing line ends the job anyway
        elif piece.block or operators[1:] or piece.background or not commands:
            self._keep(piece)
        else:
            self._command(piece, commands[0][1])

    def _carrier(self, tokens: list[Token]) -> bool:
        name = os.path.basename(tokens[0].text) if tokens else ""
        return name in _HANDLERS or name in ("echo", "mkdir", "cp", "rsync", "tar")

    def _command(self, piece: Piece, tokens: list[Token]) -> None:
        """Read a simple command that launches nothing."""
        texts = [token.text for token in tokens if token.kind == "word"]
        if texts and all(map(ASSIGNMENT.match, texts)):
            assigned = {_name(text): self.values.assign(text) for text in texts}
            self._add("assign", piece, assigned=assigned, exported=self._exports_all)
            return
        words = self.values.words(texts) or [""]
        name = os.path.basename(words[0])
        if name in _HANDLERS:
            _HANDLERS[name](self, piece, words, texts)
        elif self.staging.take(words, piece.line, piece.source):
            self._add("stage", piece)
        else:
            writes = any(
                ">" in t.text and "/dev/" not in t.text and "&" not in t.text
                for t in tokens
                if t.kind == "redirect"
            )
            self._keep(piece, "quiet" if name in _QUIET and not writes else "keep")

    def _launch(self, piece: Piece, tokens: list[Token]) -> Launch | None:
        """Return what a simple command launches; None for other commands."""
        texts = [token.text for token in tokens if token.kind == "word"]
        if texts and texts[0] in self._functions:
            return self._functions[texts[0]].also(directory=self.values.directory)
        variables = {}
        while texts and (match := ASSIGNMENT.match(texts[0])):
            variables[match[1]] = self.values.text(match[3])
            texts.pop(0)
        words = self.values.words(texts)
        if not words or words[0] == "eval":
            return None
        source, offset = piece.source, tokens[0].start - piece.tokens[0].start
        line = piece.line + source.count("\n", 0, offset)
        source = _part(piece, tokens).source if piece.block else source
        launch = Launch(line, source, words, self.values.directory, variables=variables)
        launch = _inside_shell(peel(launch))
        if not launch.words:
            return None
        name = os.path.basename(launch.words[0])
        if launch.launcher == "srun":
            small = name in _QUIET or self._is_copy(launch.words)
            return None if small else launch
        if launch.launcher or launch.container or words[0] == "exec":
            return launch
        rest = [word for word in launch.words[1:] if word not in ("-u", "-B", "-O")]
        if launch.words[:2] == ["uv", "run"]:
            return launch
        if not PYTHON.fullmatch(name) or not rest or rest[0] in ("-V", "--version", "-", "-c"):
            return None
        return None if rest[0] == "-m" and rest[1:2] and rest[1] in _NO_MODULES else launch

    def _is_copy(self, words: list[str]) -> bool:
        return os.path.basename(words[0]) in ("cp", "rsync", "tar", "rm", "unzip")

    def _block(self, piece: Piece, launches: list[Launch]) -> None:
        """Keep the launches of a compound command as candidates; nothing else of it is carried."""
        self.values.forget(piece.source)
        if piece.block == "function":
            self._functions[_function_name(piece)] = launches[0]
            return
        for launch in launches:
            self._add("launch", piece, launch=launch, block=piece.block or "&&")

    def _after(self, launch: Launch, piece: Piece, rest: list[tuple[str, list[Token]]]) -> None:
        """Report the redirections of a launch, and what follows it on its line."""
        for token in piece.tokens:
            if token.kind == "redirect" and "<" in token.text:
                launch.lost(token.text, "ranks read no standard input", "pass a file name")
            elif token.kind == "redirect" and not re.search(r"/dev/null|&\d$", token.text):
                launch.report.changed(launch.line, token.text, *_OUTPUT)
        tees = [os.path.basename(tokens[0].text) for _, tokens in rest if tokens]
        if rest and {operator for operator, _ in rest} <= {"|", "|&"} and set(tees) <= _TEES:
            launch.report.changed(launch.line, f"| {' | '.join(tees)}", *_OUTPUT)
        elif rest:
            start = rest[0][1][0].start if rest[0][1] else piece.tokens[-1].start
            text = piece.source[start - piece.tokens[0].start :]
            launch.lost(f"{rest[0][0]} {text}", "hpml runs nothing after the program")

    def _choose(self) -> Line:
        """Return the launch to carry over: one that trains before others, then the last."""
        launches = [line for line in self.lines if line.launch is not None]
        if not launches:
            for line in reversed(self.lines):
                tokens = split_script(line.source)[0].tokens if line.kind == "keep" else ()
                texts = [token.text for token in tokens if token.kind == "word"]
                simple = all(token.kind == "word" or ">" in token.text for token in tokens)
                if texts and simple and texts[0] not in {*_HANDLERS, *self._defined}:
                    words = self.values.words(texts)
                    launch = peel(Launch(line.line, line.source, words, line.directory))
                    if launch.words:
                        line.launch, line.kind = launch, "launch"
                        return line
            raise InputError(
                "no line starts a program",
                hint="hpml looks for srun, torchrun, mpirun, python …; write the job file by hand",
            )
        return max(reversed(launches), key=_rank)

    def _report_rest(self, chosen: Line, rest: list[Line]) -> None:
        for line in rest:
            if line.launch is not None:
                self._lost_launch(line, chosen)
            elif line.kind != "quiet":
                why = "hpml runs nothing after the program"
                todo = "do it by hand, or in a job of its own with `--after`"
                self.report.lost(line.line, line.source, why, todo)
        quiet = [line.source.split()[0] for line in rest if line.kind == "quiet"]
        if quiet:
            why = "not needed after the program"
            self.report.add("dropped", rest[0].line, ", ".join(dict.fromkeys(quiet)), why)
        if chosen.block:
            self.report.lost(
                chosen.line,
                chosen.source.split("\n")[0],
                f"hpml import does not evaluate `{chosen.block}`: the launch in it is carried over once",
                "check the launch line; for several runs use an array or `--set args.N=VALUE`",
            )

    def _lost_launch(self, line: Line, chosen: Line) -> None:
        assert line.launch is not None and chosen.launch is not None  # noqa: PT018
        if line.launch.source != chosen.launch.source:
            why = f"a job file runs one program: the one of line {chosen.launch.line}"
            todo = "write a job file of its own for it"
            self.report.lost(line.launch.line, line.launch.source, why, todo)

    def _stays(self, line: Line, chosen: Line) -> bool:
        """Whether a line before the launch is still of use; programs of one process are."""
        if line.launch is None:
            return True
        if line.launch.launcher or line.launch.container or line.block:
            self._lost_launch(line, chosen)
            return False
        line.kind = "keep"
        return True

    def _stage(self) -> None:
        """Leave copies to the node to the shell where its lines work on that disk."""
        at_work = [
            line for line in self.lines if line.kind == "keep" and _LOCAL.search(line.source)
        ]
        if at_work or has_hole(self.launch.directory):
            self.staging.entries.clear()
            for line in self.lines:
                line.kind = "keep" if line.kind == "stage" else line.kind
        self.lines = [line for line in self.lines if line.kind != "stage"]

    @property
    def modules(self) -> list[str]:
        """Names of the modules that the script loads."""
        return [name for line in self.lines if line.kind == "module" for name in line.value.split()]

    def arrange(self, names: set[str]) -> None:
        """Decide which lines stay shell lines.

        Args:
            names: variables that the command line itself needs in setup.
        """
        blocked = False
        for line in self.lines:
            if line.kind in ("module", "purge", "venv", "conda", "hook"):
                line.kind = "keep" if blocked else line.kind
            elif line.kind == "assign" and PATHS & line.assigned.keys():
                line.kind = "keep"
            blocked = blocked or line.kind == "keep"
        conda_stays = any(
            re.search(r"\bconda\b.*activate", line.source)
            for line in self.lines
            if line.kind == "keep"
        )
        later = False
        for line in reversed(self.lines):
            if line.kind == "hook" and conda_stays:
                line.kind = "keep"
            stays = line.kind in ("keep", "quiet")
            if line.kind == "assign":
                own = line.assigned.keys() <= OWN
                unknown = not all(map(stable, line.assigned.values()))
                composed = any(f"${name}" in self.launch.source for name in line.assigned)
                if (
                    composed
                    and any(map(has_hole, line.assigned.values()))
                    and not later
                    and not names & line.assigned.keys()
                ):
                    continue  # a part of the command line, carried over with it
                stays = bool(names & line.assigned.keys())
                stays = stays or (line.exported and not own and (later or unknown))
                if not own and line.exported and (not stays or "OMP_NUM_THREADS" in line.assigned):
                    self._carried.insert(0, line)
                if not stays and not line.exported and unknown:
                    why = "not needed: only for what hpml does itself, or used nowhere"
                    self.report.add("dropped", line.line, line.source, why)
            later = later or line.kind == "keep"
            if stays:
                self.kept.insert(0, line)
                names = names | set(re.findall(r"[A-Za-z_]\w*", line.source))
        self._report_kept()

    def _report_kept(self) -> None:
        if all(line.source.startswith("set ") for line in self.kept):
            for line in self.kept:
                self.report.add("dropped", line.line, line.source, "no shell lines are left")
            self.kept.clear()
        todo = "" if self._fatal else "a line that fails ends the job: append `|| :` if it may"
        for line in self.kept:
            if line.kind != "quiet":
                self.report.changed(line.line, line.source, _IN_SETUP, todo)
                todo = ""
        quiet = [line for line in self.kept if line.kind == "quiet"]
        if quiet:
            text = ", ".join(dict.fromkeys(line.source.split()[0] for line in quiet))
            self.report.changed(quiet[0].line, text, _IN_SETUP)

    def fields(self, path: Callable[[str], str]) -> Iterator[tuple[str, Any, int, str]]:
        """Yield modules, venv and conda of `environment`: field, value, line and text."""
        modules: list[str] = []
        active: Line | None = None
        for line in self.lines:
            if line.kind == "module":
                modules += line.value.split()
            elif line.kind == "purge":
                modules.clear()
                why = "hpml loads modules on top of those that are loaded when you submit"
                todo = "submit from a shell without modules, or write environment.inherit: minimal"
                self.report.changed(line.line, line.source, why, todo)
            elif line.kind in ("venv", "conda"):
                active = line
            elif line.kind == "hook":
                why = "hpml finds conda through CONDA_EXE or the path"
                todo = "`export CONDA_EXE=…/bin/conda` before `hpml submit` if it finds none"
                self.report.changed(line.line, line.source, why, todo)
        if modules:
            first = next(line for line in self.lines if line.kind == "module")
            yield "modules", modules, first.line, first.source
        if active is not None:
            value = path(active.value) if "/" in active.value else active.value
            yield active.kind, value, active.line, active.source

    def exports(self) -> dict[str, tuple[str, int, str]]:
        """Return the exported variables that are fields: value, line and text."""
        return {
            name: (value, line.line, line.source)
            for line in self._carried
            for name, value in line.assigned.items()
        }

    def setup(self, workdir: str) -> list[str]:
        """Return the shell lines; `cd` is added where the script was in another directory."""
        lines: list[str] = []
        current = workdir
        for line in self.kept:
            if line.directory and line.directory != current:
                lines.append(f"cd {shell_word(line.directory)}")
                current = line.directory
            lines.append(line.source)
            if re.match(r"(cd|pushd|popd)\b", line.source):
                current = ""
        if current != workdir and self.launch.directory == workdir:
            lines.append(f"cd {shell_word(workdir)}")
        return lines

    # Commands with a meaning of their own; `words` are expanded, `texts` as written.

    def _module(self, piece: Piece, words: list[str], _: list[str]) -> None:
        rest = [word for word in words[1:] if not word.startswith("--") and word != "-q"]
        verbs = "load add try-load purge unload rm del use unuse swap switch restore save reset"
        looks = "list avail av spider show display help whatis is-loaded"
        verb = rest.pop(0) if rest and rest[0] in f"{verbs} {looks}".split() else "load"
        plain = not any(has_hole(name) or name.startswith("-") for name in rest)
        if verb in ("load", "add", "try-load") and plain:
            self._add("module", piece, value=" ".join(rest))
        elif verb in looks.split():
            self._keep(piece, "quiet")
        else:
            self._add("purge" if verb in ("purge", "reset") else "keep", piece)

    def _source(self, piece: Piece, words: list[str], _: list[str]) -> None:
        path = words[1] if len(words) > 1 else ""
        directory = os.path.dirname(os.path.dirname(path))
        name = os.path.basename(path)
        if name in ("conda.sh", "mamba.sh"):
            self._add("hook", piece)
        elif name != "activate" or has_hole(path):
            self._keep(piece)
        elif len(words) > 2:  # noqa: PLR2004 - source activate NAME
            self._add("conda", piece, value=words[2])
        elif not directory or re.search(r"(conda|mamba|miniforge)\d*$", directory):
            self._add("conda", piece, value="base")
        else:
            self._add("venv", piece, value=os.path.join(self.values.directory, directory))

    def _conda(self, piece: Piece, words: list[str], _: list[str]) -> None:
        name = words[2] if len(words) > 2 else "base"  # noqa: PLR2004 - conda activate NAME
        if words[1:2] != ["activate"] or has_hole(name):
            self._keep(piece)
            return
        path = os.path.join(self.values.directory, name) if "/" in name else name
        self._add("conda", piece, value=path)

    def _eval(self, piece: Piece, _: list[str], texts: list[str]) -> None:
        if re.search(r"(conda|mamba)\b.*hook", " ".join(texts)):
            self._add("hook", piece)
        else:
            self._keep(piece)

    def _cd(self, piece: Piece, words: list[str], texts: list[str]) -> None:
        rest = [word for word in words[1:] if word not in ("--", "-P", "-L")]
        target = rest[0] if rest else self.values.environment.get("HOME", "~")
        if re.search(r"\$\{?(0|BASH_SOURCE)", " ".join(texts)):
            why = "$0 is a copy of the script that Slurm makes"
            self.report.lost(piece.line, piece.source, why, "write workdir")
        elif words[0] != "cd" or target == "-" or (has_hole(target) and not is_local(target)):
            self._keep(piece)
            self.values.directory = ""
        elif self.values.directory or target.startswith(("/", "\0")):
            self.values.directory = os.path.normpath(os.path.join(self.values.directory, target))
            if target.startswith("\0"):
                self.values.directory = target
        else:
            self._keep(piece)

    def _export(self, piece: Piece, words: list[str], texts: list[str]) -> None:
        options = [text for text in texts[1:] if text.startswith("-")]
        exported = words[0] == "export" or any("x" in option for option in options)
        if any(re.search("[fnpA]", option) for option in options):
            self._keep(piece)
            return
        assigned = {}
        for text in texts[1:]:
            if ASSIGNMENT.match(text):
                assigned[_name(text)] = self.values.assign(text)
            elif text.isidentifier():
                items = self.values.variables.get(text)
                assigned[text] = items[0] if items else f'\0"${text}"\0'
        self._add("assign", piece, assigned=assigned, exported=exported)

    def _set(self, piece: Piece, words: list[str], _: list[str]) -> None:
        self._fatal = self._fatal or any(re.match(r"-\w*e", word) for word in words[1:])
        if {"-a", "allexport"} & set(words):
            self._exports_all = "+o" not in words
        self._keep(piece, "quiet")

    def _trap(self, piece: Piece, _: list[str], __: list[str]) -> None:
        why = "traps are hpml's: ranks get the signals"
        self.report.lost(piece.line, piece.source, why, "handle the signal in the program")


_OUTPUT = ("hpml keeps all output in the run's record", "`hpml logs RUN` prints it")
_HANDLERS: dict[str, Callable[[Body, Piece, list[str], list[str]], None]] = {
    "module": Body._module,
    "ml": Body._module,
    "source": Body._source,
    ".": Body._source,
    "conda": Body._conda,
    "mamba": Body._conda,
    "micromamba": Body._conda,
    "eval": Body._eval,
    "cd": Body._cd,
    "pushd": Body._cd,
    "popd": Body._cd,
    "export": Body._export,
    "declare": Body._export,
    "typeset": Body._export,
    "readonly": Body._export,
    "set": Body._set,
    "trap": Body._trap,
}


def _function_name(piece: Piece) -> str:
    words = [token.text for token in piece.tokens if token.text != "function"]
    return words[0]


def _name(assignment: str) -> str:
    match = ASSIGNMENT.match(assignment)
    assert match is not None
    return match[1]


def _commands(tokens: tuple[Token, ...]) -> Iterator[tuple[str, list[Token]]]:
    """Yield the simple commands of a piece, each with the operator before it."""
    operator, command = "", []
    for token in tokens:
        if token.kind == "operator":
            if command:
                yield operator, command
            operator, command = token.text, []
        elif command or token.text not in _KEYWORDS:
            command.append(token)
    if command:
        yield operator, command


def _part(piece: Piece, tokens: list[Token]) -> Piece:
    """Return a part of a piece as a piece of its own."""
    offset = piece.tokens[0].start
    last = tokens[-1]
    end = last.start + len(last.text) - offset
    source = piece.source[tokens[0].start - offset : end]
    return Piece(piece.line, source, tuple(tokens))


def _inside_shell(launch: Launch) -> Launch:
    """Return what `bash -c TEXT` starts, where the text only starts one program."""
    words = launch.words
    shell = len(words) == 3 and os.path.basename(words[0]) in ("bash", "sh")  # noqa: PLR2004
    if not shell or not re.fullmatch(r"-[elux]*c", words[1]):
        return launch
    try:
        *before, last = split_script(shown(words[2]))
    except (InputError, ValueError):
        return launch
    values = Values({}, {}, launch.directory)
    ours = all(
        token.text == "export" or _name_or_none(token.text) in OWN
        for piece in before
        for token in piece.tokens
    )
    if not ours or last.background or any(token.kind != "word" for token in last.tokens):
        return launch
    inner = peel(launch.also(words=values.words([token.text for token in last.tokens])))
    program = os.path.basename(inner.words[0]) if inner.words else ""
    known = inner.launcher == "torchrun" or PYTHON.fullmatch(program)
    return inner if known and all(map(stable, inner.words)) else launch


def _name_or_none(text: str) -> str | None:
    match = ASSIGNMENT.match(text)
    return match[1] if match else None


def _rank(line: Line) -> tuple[bool, bool]:
    """Return how much a launch looks like the training of the script."""
    assert line.launch is not None
    words = line.launch.words
    if words and PYTHON.fullmatch(os.path.basename(words[0])):
        words = words[1:3]
    trains = _TRAINS.search(" ".join(os.path.basename(word) for word in words[:2]))
    return bool(trains), bool(line.launch.launcher)
