"""Sort the commands of a script: fields of the job file, shell lines, and the launch.

Module loads, activations, exports, `cd` and copies to the node have fields. Every other command
before the launch is kept as a shell line; see `setup` for where each of them ends up.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.convert.launch import OUTPUT, PYTHON, Launch
from hpml_orchestrator.convert.peel import peel
from hpml_orchestrator.convert.shell import ASSIGNMENT, Piece, Token, split_script
from hpml_orchestrator.convert.staging import Staging, is_local
from hpml_orchestrator.convert.values import PROVIDED, Values, has_hole, shown, stable
from hpml_orchestrator.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hpml_orchestrator.convert.report import Report

__all__ = ["OWN", "Body", "Line"]

OWN = PROVIDED | {"SRUN_CPUS_PER_TASK", "SLURM_CPU_BIND", "SLURM_EXPORT_ENV"}
"""Variables that a job file need not set, since hpml does."""

_QUIET = frozenset(  # commands that print, test or wait, and read no exported variable that counts
    "echo printf set shopt nvidia-smi rocm-smi date hostname wait exit true false : pwd ls which "
    "type df du free lscpu printenv uname id whoami sleep [ [[ test uptime mkdir cat head tail "
    "squeue sinfo scontrol sacct nproc lspci ibstat ip numastat top ps wc sstat seff".split()
)
_KEYWORDS = frozenset("if then elif else while until do done fi esac ! time { } in".split())
_TEES = frozenset("tee ts cat grep sed awk unbuffer sort tail head".split())
_TRAINS = re.compile(r"train|fit|finetune|fine_tune|\brun\b|main|sft|ddp|learn", re.IGNORECASE)
_LOCAL = re.compile(r"TMPDIR|LOCAL_?SCRATCH|JOBFS|/tmp\b|/dev/shm")
_NOT_STARTED = frozenset("-V --version - -c -mpip -mvenv -mensurepip -mvirtualenv".split())


@dataclass
class Line:
    """A command of the script.

    Attributes:
        kind: `keep`, `quiet`, `assign`, `module`, `purge`, `venv`, `conda`, `hook`, `stage` or
            `launch`.
        directory: where it runs; empty where that is known in the job only.
        value: of a module, venv, conda or mkdir line.
        assigned: variables that it sets.
        exported: whether programs see these.
        launch: what it starts.
        block: keyword of the loop, condition or function that a launch stands in.
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
        lines: those before the launch.
        launch: the launch that the job file carries over.
        in_block: whether it stands in a loop, a condition or a function.
        strict: whether a line that fails ends the script.

    Raises:
        InputError: the script starts no program, or a quote or block is not closed.
    """

    def __init__(self, text: str, values: Values, report: Report) -> None:
        self.values = values
        self.report = report
        self.staging = Staging(values, report)
        self.lines: list[Line] = []
        self.strict = bool(re.match(r"#!.*\s-\w*e", text))
        self.exports_all = False
        self._functions: dict[str, Launch | None] = {}  # what they launch
        for piece in split_script(text):
            self._read(piece)
        chosen, self.launch = self._choose()
        self.in_block = bool(chosen.block)
        position = self.lines.index(chosen)
        self._report_rest(chosen, self.lines[position + 1 :])
        self.lines = [line for line in self.lines[:position] if not self._lost(line)]
        self._settle_copies()

    def add(self, kind: str, piece: Piece, **fields: Any) -> None:
        """Append a line."""
        source = f"{piece.source} &" if piece.background else piece.source
        self.lines.append(Line(kind, piece.line, source, self.values.directory, **fields))

    def keep(self, piece: Piece) -> None:
        """Append a shell line that may set variables."""
        self.add("keep", piece)
        self.values.forget(piece.source)

    def _read(self, piece: Piece) -> None:
        commands = list(_commands(piece.tokens))
        operators = [operator for operator, _ in commands[1:]]
        launches = [self._launch(piece, tokens) for _, tokens in commands]
        position = next((i for i, launch in enumerate(launches) if launch), len(launches))
        before, rest = commands[:position], commands[position + 1 :]
        carried = set(operators[:position]) <= {"&&"} and all(_is_carried(c) for _, c in before)
        called = position < len(commands) and commands[position][1][0].text in self._functions
        simple = not piece.block or bool(re.match(r"[^|&;]*\|\|\s*[{(]", piece.source))
        if piece.block == "function":
            name = _words(piece.tokens)[piece.source.startswith("function ")]
            self._functions[name] = next(filter(None, launches), None)
        if position < len(launches) and simple and carried and not called:
            for _, tokens in before:
                self._read(_part(piece, tokens))
            launch = self._launch(piece, commands[position][1]) or launches[position]
            _report_after(launch, piece, rest)  # type: ignore[arg-type]
            self.add("launch", piece, launch=launch)
        elif position < len(launches):
            self.values.forget(piece.source)
            inner = [launch for launch in launches if launch and piece.block != "function"]
            for launch in inner:
                self.add("launch", piece, launch=launch, block=piece.block or "&&")
        else:
            self._read_other(piece, commands, operators)

    def _read_other(
        self, piece: Piece, commands: list[tuple[str, list[Token]]], operators: list[str]
    ) -> None:
        """Read a piece that launches nothing."""
        carried = set(operators) == {"&&"} and all(_is_carried(tokens) for _, tokens in commands)
        if carried and not piece.block:
            for _, tokens in commands:
                self._read(_part(piece, tokens))
        elif operators[:1] == ["||"] and _is_carried(commands[0][1]):
            self._read(_part(piece, commands[0][1]))  # a failing line ends the job anyway
        elif piece.block or operators or piece.background or not commands:
            self.keep(piece)
        else:
            self._command(piece, commands[0][1])

    def _command(self, piece: Piece, tokens: list[Token]) -> None:
        """Read a simple command that launches nothing."""
        texts = _words(tokens)
        if texts and all(map(ASSIGNMENT.match, texts)):
            assigned = dict(map(self.values.assign, texts))
            exported = self.exports_all or bool(assigned.keys() & self.values.environment.keys())
            self.add("assign", piece, assigned=assigned, exported=exported)
            return
        words = self.values.words(texts) or [""]
        name = os.path.basename(words[0])
        redirects = [token.text for token in tokens if token.kind == "redirect"]
        if name in _HANDLERS:
            _HANDLERS[name](self, piece, words, texts)
        elif self.staging.take(_on_nodes(words, piece), piece.line, piece.source):
            self.add("stage", piece)
        elif name in _QUIET and all(re.search(r"<|&\d$|/dev/", text) for text in redirects):
            paths = [self.staging.path(word) for word in words[1:] if not word.startswith("-")]
            self.add("quiet", piece, value="\n".join(paths) if name == "mkdir" else "")
        else:
            self.keep(piece)

    def _launch(self, piece: Piece, tokens: list[Token]) -> Launch | None:
        """Return what a simple command launches; None for other commands."""
        texts = _words(tokens)
        if texts and texts[0] in self._functions:
            return self._functions[texts[0]]
        variables = {}
        while texts and (match := ASSIGNMENT.match(texts[0])):
            variables[match[1]] = self.values.text(match[3])
            texts.pop(0)
        words = self.values.words(texts)
        if not words or words[0] == "eval":
            return None
        line = piece.line + piece.source.count("\n", 0, tokens[0].start - piece.tokens[0].start)
        source = _part(piece, tokens).source if piece.block else piece.source
        launch = Launch(line, source, words, self.values.directory, variables=variables)
        launch = _inside_shell(peel(launch))
        name = os.path.basename(launch.words[0]) if launch.words else ""
        rest = [word for word in launch.words[1:] if word not in ("-u", "-B", "-O")]
        if launch.launcher == "srun":  # it also starts small commands on the nodes
            helper = name in _QUIET or name in ("cp", "rsync", "tar", "rm", "unzip")
            return None if helper or not name else launch
        if name and (launch.launcher or launch.container or words[0] == "exec"):
            return launch
        option = "".join(rest[:2]) if rest[:1] == ["-m"] else "".join(rest[:1])
        starts = PYTHON.fullmatch(name) and option and option not in _NOT_STARTED
        return launch if starts or launch.words[:2] == ["uv", "run"] else None

    def _choose(self) -> tuple[Line, Launch]:
        """Return the launch to carry over: one that trains before others, then the last."""
        best: tuple[Line, Launch] | None = None
        for line in self.lines:
            if line.launch and (best is None or _rank(line.launch) >= _rank(best[1])):
                best = line, line.launch
        for line in reversed(self.lines if best is None else []):  # any other program
            tokens = split_script(line.source)[0].tokens if line.kind == "keep" else ()
            texts = _words(tokens)
            simple = all(token.kind == "word" or ">" in token.text for token in tokens)
            if texts and simple and texts[0] not in {*_HANDLERS, *self._functions}:
                words = self.values.words(texts)
                launch = peel(Launch(line.line, line.source, words, line.directory))
                if launch.words:
                    return line, launch
        if best is None:
            raise InputError(
                "no line starts a program",
                hint="hpml looks for srun, torchrun, mpirun, python …; write the job file by hand",
            )
        return best

    def _report_rest(self, chosen: Line, rest: list[Line]) -> None:
        """Report the lines after the launch, and what is lost of a block around it."""
        if chosen.block:
            self.report.lost(
                chosen.line,
                chosen.source.split("\n")[0],
                f"`{chosen.block}` is not evaluated: the launch in it is carried over once",
                "check the launch line; for several runs use an array or `--set args.N=VALUE`",
            )
        for line in rest:
            if line.kind != "quiet" and not self._lost(line):
                why = "hpml runs nothing after the program"
                todo = "do it by hand, or in a job of its own with `hpml submit --after`"
                self.report.lost(line.line, line.source, why, todo)
        quiet = [line.source.split()[0] for line in rest if line.kind == "quiet"]
        if quiet:
            text = ", ".join(dict.fromkeys(quiet))
            self.report.add("dropped", rest[0].line, text, "not needed after the program")

    def _lost(self, line: Line) -> bool:
        """Whether a line is another launch; a program of one process before it is kept instead."""
        launch = line.launch
        if launch is None:
            return False
        if not (launch.launcher or launch.container or line.block):
            line.kind = "keep"
            return False
        if launch.source != self.launch.source:
            why = f"a job file runs one program: the one of line {self.launch.line}"
            self.report.lost(launch.line, launch.source, why, "write a job file of its own for it")
        return True

    def _settle_copies(self) -> None:
        """Leave copies to the node to the shell where its lines work on that disk."""
        working = any(line.kind == "keep" and _LOCAL.search(line.source) for line in self.lines)
        if working or has_hole(self.launch.directory):
            self.staging.entries.clear()
            for line in self.lines:
                line.kind = "keep" if line.kind == "stage" else line.kind
        places = [f"{entry.place}/" for entry in self.staging.entries]
        for line in self.lines:
            made = [f"{path}/" for path in line.value.split("\n")]
            if (
                line.value
                and line.kind == "quiet"
                and all(any(place.startswith(path) for place in places) for path in made)
            ):
                line.kind = "stage"
                why = "hpml makes the directories of staged data"
                self.report.add("dropped", line.line, line.source, why)
        self.lines = [line for line in self.lines if line.kind != "stage"]


def _words(tokens: list[Token] | tuple[Token, ...]) -> list[str]:
    return [token.text for token in tokens if token.kind == "word"]


def _commands(tokens: tuple[Token, ...]) -> Iterator[tuple[str, list[Token]]]:
    """Yield the simple commands of a piece, each with the operator before it."""
    operator = ""
    command: list[Token] = []
    for token in tokens:
        if token.kind == "operator":
            if command:
                yield operator, command
            operator, command = token.text, []
        elif command or token.text not in _KEYWORDS:
            command.append(token)
    if command:
        yield operator, command


def _is_carried(tokens: list[Token]) -> bool:
    """Whether a command has fields, or changes nothing: then `&&` behind it can be left out."""
    name = os.path.basename(tokens[0].text)
    return name in _HANDLERS or name in ("echo", "mkdir", "cp", "rsync", "tar")


def _part(piece: Piece, tokens: list[Token]) -> Piece:
    """Return a part of a piece as a piece of its own."""
    offset = piece.tokens[0].start
    end = tokens[-1].start + len(tokens[-1].text) - offset
    return Piece(piece.line, piece.source[tokens[0].start - offset : end], tuple(tokens))


def _report_after(launch: Launch, piece: Piece, rest: list[tuple[str, list[Token]]]) -> None:
    """Report the redirections of a launch, and what follows it on its line."""
    for token in piece.tokens:
        if token.kind == "redirect" and "<" in token.text:
            launch.lost(token.text, "ranks read no standard input", "pass a file name")
        elif token.kind == "redirect" and not re.search(r"/dev/null|&\d$", token.text):
            launch.report.changed(launch.line, token.text, *OUTPUT)
    names = [os.path.basename(tokens[0].text) for _, tokens in rest]
    if rest and {operator for operator, _ in rest} <= {"|", "|&"} and set(names) <= _TEES:
        launch.report.changed(launch.line, f"| {' | '.join(names)}", *OUTPUT)
    elif rest:
        text = piece.source[rest[0][1][0].start - piece.tokens[0].start :]
        launch.lost(f"{rest[0][0]} {text}", "hpml runs nothing after the program")


def _inside_shell(launch: Launch) -> Launch:
    """Return what `bash -c TEXT` starts, where the text only starts one program."""
    words = launch.words
    if not words or os.path.basename(words[0]) not in ("bash", "sh") or len(words) != 3:  # noqa: PLR2004
        return launch
    try:
        *before, last = split_script(shown(words[2])) if re.fullmatch("-[elux]*c", words[1]) else []
    except (InputError, ValueError):
        return launch
    names = [text.partition("=")[0] for piece in before for text in _words(piece.tokens)]
    plain = not last.background and all(token.kind == "word" for token in last.tokens)
    if not set(names) <= OWN | {"export"} or not plain:
        return launch
    values = Values({}, {}, launch.directory)
    inner = peel(launch.also(words=values.words(_words(last.tokens))))
    program = os.path.basename(inner.words[0]) if inner.words else ""
    known = inner.launcher == "torchrun" or PYTHON.fullmatch(program)
    return inner if known and all(map(stable, inner.words)) else launch


def _on_nodes(words: list[str], piece: Piece) -> list[str]:
    """Return the command that srun starts on the nodes, or the words themselves."""
    if os.path.basename(words[0]) != "srun":
        return words
    return peel(Launch(piece.line, piece.source, words, "")).words or words


def _rank(launch: Launch) -> tuple[bool, bool]:
    """Return how much a launch looks like the training of the script."""
    words = launch.words
    if PYTHON.fullmatch(os.path.basename(words[0])):
        words = words[1:3]
    trains = _TRAINS.search(" ".join(os.path.basename(word) for word in words[:2]))
    return bool(trains), bool(launch.launcher)


# Commands with a meaning of their own; `words` are expanded, `texts` as written.


def _module(body: Body, piece: Piece, words: list[str], _: list[str]) -> None:
    rest = [word for word in words[1:] if not word.startswith("--") and word != "-q"]
    verbs = "load add try-load purge unload rm del use unuse swap switch restore save reset"
    looks = "list avail av spider show display help whatis is-loaded".split()
    verb = rest.pop(0) if rest and rest[0] in [*verbs.split(), *looks] else "load"
    plain = not any(has_hole(name) or name.startswith("-") for name in rest)
    if verb in ("load", "add", "try-load") and plain:
        body.add("module", piece, value=" ".join(rest))
    else:
        kind = "quiet" if verb in looks else "keep"
        body.add("purge" if verb in ("purge", "reset") else kind, piece)


def _source(body: Body, piece: Piece, words: list[str], _: list[str]) -> None:
    path = words[1] if len(words) > 1 else ""
    directory = os.path.dirname(os.path.dirname(path))
    if os.path.basename(path) in ("conda.sh", "mamba.sh"):
        body.add("hook", piece)
    elif os.path.basename(path) != "activate" or has_hole(path):
        body.keep(piece)
    elif words[2:] or not directory or re.search(r"(conda|mamba|miniforge)\d*$", directory):
        body.add("conda", piece, value=words[2] if words[2:] else "base")
    else:
        body.add("venv", piece, value=os.path.join(body.values.directory, directory))


def _conda(body: Body, piece: Piece, words: list[str], _: list[str]) -> None:
    name = words[2] if words[2:] else "base"
    if words[1:2] != ["activate"] or has_hole(name):
        body.keep(piece)
        return
    path = os.path.join(body.values.directory, name) if "/" in name else name
    body.add("conda", piece, value=path)


def _eval(body: Body, piece: Piece, _: list[str], texts: list[str]) -> None:
    if re.search(r"(conda|mamba)\b.*hook", " ".join(texts)):
        body.add("hook", piece)
    else:
        body.keep(piece)


def _cd(body: Body, piece: Piece, words: list[str], texts: list[str]) -> None:
    rest = [word for word in words[1:] if word not in ("--", "-P", "-L")]
    target = rest[0] if rest else body.values.environment.get("HOME", "~")
    known = words[0] == "cd" and target != "-" and (not has_hole(target) or is_local(target))
    if re.search(r"\$\{?(0|BASH_SOURCE)", " ".join(texts)):
        why = "$0 is a copy of the script that Slurm makes"
        body.report.lost(piece.line, piece.source, why, "write workdir")
    elif known and (body.values.directory or target.startswith(("/", "\0"))):
        path = os.path.join(body.values.directory, target)
        body.values.directory = target if target.startswith("\0") else os.path.normpath(path)
    else:
        body.keep(piece)
        body.values.directory = ""


def _export(body: Body, piece: Piece, words: list[str], texts: list[str]) -> None:
    options = "".join(text for text in texts[1:] if text.startswith("-"))
    if re.search("[fnpA]", options):
        body.keep(piece)
        return
    assigned: dict[str, str] = {}
    for text in texts[1:]:
        if ASSIGNMENT.match(text):
            assigned |= dict([body.values.assign(text)])
        elif text.isidentifier():
            items = body.values.variables.get(text)
            assigned[text] = items[0] if items else f'\0"${text}"\0'
    body.add("assign", piece, assigned=assigned, exported=words[0] == "export" or "x" in options)


def _set(body: Body, piece: Piece, words: list[str], _: list[str]) -> None:
    body.strict = body.strict or any(re.match(r"-\w*e", word) for word in words[1:])
    if {"-a", "+a", "allexport"} & set(words):
        body.exports_all = not {"+a", "+o"} & set(words)
    body.add("quiet", piece)


def _trap(body: Body, piece: Piece, _: list[str], __: list[str]) -> None:
    why = "traps are hpml's: ranks get the signals"
    body.report.lost(piece.line, piece.source, why, "handle the signal in the program")


_HANDLERS: dict[str, Callable[[Body, Piece, list[str], list[str]], None]] = {
    **dict.fromkeys(("module", "ml"), _module),
    **dict.fromkeys(("source", "."), _source),
    **dict.fromkeys(("conda", "mamba", "micromamba"), _conda),
    **dict.fromkeys(("cd", "pushd", "popd"), _cd),
    **dict.fromkeys(("export", "declare", "typeset", "readonly"), _export),
    "eval": _eval,
    "set": _set,
    "trap": _trap,
}
