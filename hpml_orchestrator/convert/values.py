"""What words of a script stand for, as far as that is known before it runs.

A value is text. What is known only in the job (a job id, the output of a command, a file pattern)
stands in it as a hole: a number between two NUL characters, which no script holds. A hole knows how
it was written, so that a value with holes can be given back to a shell.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hpml_orchestrator.convert.lexer import Lexer, ShellError
from hpml_orchestrator.convert.syntax import Dynamic, Parameter, Part, Word
from hpml_orchestrator.convert.syntax import Literal as Plain

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["PROVIDED", "Expander", "Hole", "HoleKind", "Variable", "has_hole"]

HoleKind = Literal["array", "job", "local", "argument", "runtime"]

PROVIDED = frozenset(
    "MASTER_ADDR MASTER_PORT WORLD_SIZE RANK LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK "
    "PYTHONUNBUFFERED".split()
)
"""Variables that hpml gives to the ranks itself."""

_LOCAL = frozenset(
    "TMPDIR SLURM_TMPDIR LOCAL_SCRATCH LOCALSCRATCH LSCRATCH SLURM_LOCALTMP JOBFS TMP_LOCAL".split()
)
_JOB = frozenset("SLURM_JOB_ID SLURM_JOBID SLURM_ARRAY_JOB_ID".split())
_SESSION = frozenset(
    # what the login shell has and the job has not, or has otherwise
    "HOSTNAME HOST RANDOM SECONDS LINENO PPID UID SHLVL OLDPWD _ DISPLAY CUDA_VISIBLE_DEVICES "
    "PBS_JOBID BASH_SOURCE BASH".split()
)
_NAMES = re.compile(r"\$\{?[#!]?([A-Za-z_]\w*)")
_HOLE = re.compile("\0(\\d+)\0")
_MAX_BRACES = 1000
_MAX_VALUE = 200_000
_MAX_HOLES = 1000
_MAX_DEPTH = 10


def has_hole(value: str) -> bool:
    """Whether some of a value is known in the job only."""
    return "\0" in value


@dataclass(frozen=True)
class Hole:
    """A part of a value that is known in the job only.

    Attributes:
        kind: `array`: the task's index; `job`: the job's id; `local`: the node's own disk;
            `argument`: what is given behind the script's name; `runtime`: all else.
        source: as written.
        quoted: whether it stood in double quotes.
        names: variables that it needs.
        directory: where a command in it would have run.
    """

    kind: HoleKind
    source: str
    quoted: bool
    names: frozenset[str] = frozenset()
    directory: str = ""


@dataclass(frozen=True)
class Variable:
    """A variable of the script.

    Attributes:
        items: its value; a plain variable has one, a list any number; None where a command of the
            script set it in a way that cannot be followed.
        definition: shell text that sets it again, for what is left to the shell.
        line: where it was set.
        is_list: whether it is an array of the shell.
    """

    items: tuple[str, ...] | None
    definition: str
    line: int
    is_list: bool = False


class Expander:
    """Expands words.

    Args:
        environment: variables that the job would get from the caller's shell.
        known: variables that Slurm will set, with the values that follow from the header.
        directory: the directory that the script starts in.
    """

    def __init__(
        self, environment: Mapping[str, str], known: Mapping[str, str], directory: str
    ) -> None:
        self.environment = environment
        self.known = dict(known)
        self.directory = directory
        self.variables: dict[str, Variable] = {}
        self.positional: tuple[str, ...] | None = None
        self.holes: list[Hole] = []
        self.taken: dict[str, tuple[str, str]] = {}  # name -> value, where from
        self.literal_ranks = False  # whether variables of the launcher are read, not left
        self._depth = 0

    def hole(
        self,
        kind: HoleKind,
        source: str,
        *,
        quoted: bool,
        names: Iterable[str] = (),
        directory: str = "",
    ) -> str:
        """Return a new hole as a value."""
        place = directory or self.directory
        self.holes.append(Hole(kind, source, quoted, frozenset(names), place))
        return f"\0{len(self.holes) - 1}\0"

    def holes_of(self, value: str) -> list[Hole]:
        """Return the holes of a value, in order."""
        return [self.holes[int(number)] for number in _HOLE.findall(value)]

    def pieces(self, value: str) -> list[str | Hole]:
        """Return a value as texts and holes."""
        parts = _HOLE.split(value)
        return [
            self.holes[int(part)] if index % 2 else part
            for index, part in enumerate(parts)
            if index % 2 or part
        ]

    def source(self, value: str) -> str:
        """Return a value with its holes as they were written, for messages."""
        return _HOLE.sub(lambda match: self.holes[int(match[1])].source, value)

    def shell(self, value: str) -> str:
        """Return a value as one word for a shell."""
        if not value:
            return "''"
        texts = []
        for piece in self.pieces(value):
            if isinstance(piece, str):
                texts.append(shlex.quote(piece))
            else:
                texts.append(f'"{piece.source}"' if piece.quoted else piece.source)
        return "".join(texts)

    def needed(self, values: Iterable[str]) -> list[str]:
        """Return the definitions, in order, of what the holes of values need."""
        names: set[str] = set()
        pending = [name for value in values for hole in self.holes_of(value) for name in hole.names]
        while pending:
            name = pending.pop()
            if name in names or name in PROVIDED or name not in self.variables:
                continue
            names.add(name)
            found = self.variables[name]
            pending += _NAMES.findall(found.definition)
        ordered = sorted(names, key=lambda name: self.variables[name].line)
        return list(dict.fromkeys(self.variables[name].definition for name in ordered))

    def assign(
        self, name: str, items: tuple[str, ...], line: int, *, is_list: bool = False
    ) -> None:
        """Set a variable."""
        holes = sum(one.count("\0") for one in items)
        if sum(map(len, items)) > _MAX_VALUE or holes > _MAX_HOLES:
            raise ShellError(line, f"the value of {name} is too long")
        if is_list:
            definition = f"{name}=({' '.join(self.shell(item) for item in items)})"
        else:
            definition = f"{name}={self.shell(items[0])}"
        self.variables[name] = Variable(items, definition, line, is_list)

    def words(self, words: Iterable[Word]) -> list[str]:
        """Return the fields of several words."""
        return [field for word in words for field in self.fields(word)]

    def fields(self, word: Word) -> list[str]:
        """Return the fields of a word: variables split at blanks, braces made to several."""
        if word.literal is not None and not any(
            isinstance(part, Plain) and part.quoted for part in word.parts
        ):
            several = braces(word.literal)
            if len(several) > 1:
                return [self._tilde(one) for one in several]
        fields: list[str] = []
        current: str | None = None
        for index, part in enumerate(word.parts):
            pieces = self._part(part, first=index == 0, pattern=True)
            if not _quoted(part) and not isinstance(part, Plain):
                pieces = _split(pieces)
            if not pieces:
                continue
            current = pieces[0] if current is None else current + pieces[0]
            for piece in pieces[1:]:
                fields.append(current)
                current = piece
        if current is not None:
            fields.append(current)
        return fields

    def text(self, word: Word) -> str:
        """Return a word as one value, as in an assignment: nothing is split."""
        texts = []
        for index, part in enumerate(word.parts):
            texts.append(" ".join(self._part(part, first=index == 0, pattern=False)))
        return "".join(texts)

    def _part(self, part: Part, *, first: bool, pattern: bool) -> list[str]:
        if isinstance(part, Plain):
            if part.quoted:
                return [part.text]
            text = self._tilde(part.text) if first else part.text
            if pattern and re.search(r"[*?]", text):
                return [self.hole("runtime", text, quoted=False)]
            return [text]
        if isinstance(part, Parameter):
            return self._parameter(part)
        return [self._dynamic(part)]

    def _tilde(self, text: str) -> str:
        home = self.environment.get("HOME")
        if home and (text == "~" or text.startswith("~/")):
            return home + text[1:]
        return text

    def _parameter(  # noqa: C901, PLR0912 - one branch per operator
        self, part: Parameter
    ) -> list[str]:
        found = self._lookup(part.name, part)
        if found is not None:
            found = tuple(self._requoted(one, quoted=part.quoted) for one in found)
        if part.operator in ("", "[@]", "[*]"):
            if found is not None:
                return list(found if part.operator or part.name in ("@", "*") else found[:1])
            return [self._runtime(part)]
        if part.operator == ":" and part.name == "@" and self.positional is not None:
            if part.argument.isdigit() and part.argument != "0":
                return list(self.positional[int(part.argument) - 1 :])
            return [self._runtime(part)]
        if part.operator in (":-", "-", ":=", "="):
            if found is not None and (found[:1] != ("",) or ":" not in part.operator):
                return list(found[:1])
            if part.name in self.variables and self.variables[part.name].items is None:
                return [self._runtime(part)]
            default = self._inner(part.argument)
            self.taken[part.name] = (default, "default")
            return [default]
        if part.operator in (":+", "+"):
            if found is None or found[:1] == ("",):
                return [""]
            return [self._inner(part.argument)]
        if part.operator == "[" and part.argument.endswith("]"):
            variable = self.variables.get(part.name)
            index = self._inner(part.argument[:-1])
            if variable is not None and variable.items is not None and re.fullmatch(r"\d+", index):
                return list(variable.items[int(index) :][:1])
        if part.operator == "#" and found is not None and part.argument in ("[@]", "[*]"):
            return [str(len(found))]
        return [self._runtime(part)]

    def _requoted(self, value: str, *, quoted: bool) -> str:
        """Return a value whose holes are quoted as the variable is where it is used."""
        if not has_hole(value):
            return value

        def again(match: re.Match[str]) -> str:
            hole = self.holes[int(match[1])]
            if hole.quoted == quoted:
                return match[0]
            return self.hole(
                hole.kind,
                hole.source,
                quoted=quoted,
                names=hole.names,
                directory=hole.directory,
            )

        return _HOLE.sub(again, value)

    def _runtime(self, part: Parameter) -> str:
        names = {part.name, *_NAMES.findall(part.argument)}
        if part.operator == "[":
            names |= set(re.findall(r"[A-Za-z_]\w*", part.argument))
        return self.hole("runtime", part.source, quoted=part.quoted, names=names)

    def _inner(self, text: str) -> str:
        """Return the value of a word inside of an expansion."""
        self._depth += 1
        try:
            if self._depth > _MAX_DEPTH:
                return self.hole("runtime", text, quoted=False, names=_NAMES.findall(text))
            lexer = Lexer(f'"{text}"' if '"' not in text else text)
            word = lexer.word()
            return self.text(word) if word is not None else ""
        except ShellError:
            return text
        finally:
            self._depth -= 1

    def _lookup(  # noqa: C901, PLR0912 - one branch per kind of name
        self, name: str, part: Parameter
    ) -> tuple[str, ...] | None:
        """Return what a variable is known to be; a hole counts as known where it has a kind."""
        if name in ("@", "*") or name.isdigit():
            if self.positional is None or name == "0":
                return (self.hole("argument", part.source, quoted=part.quoted),)
            if name.isdigit():
                return self.positional[int(name) - 1 :][:1] or ("",)
            return self.positional
        if name in PROVIDED and not self.literal_ranks:
            return None
        if name in self.variables:
            return self.variables[name].items
        if name in self.known:
            self.taken[name] = (self.known[name], "header")
            return (self.known[name],)
        if name == "SLURM_ARRAY_TASK_ID":
            return (self.hole("array", part.source, quoted=part.quoted),)
        if name in _JOB:
            return (self.hole("job", part.source, quoted=part.quoted),)
        if name in _LOCAL:
            return (self.hole("local", part.source, quoted=part.quoted),)
        if name == "PWD":
            return (self.directory,)
        if name.startswith(("SLURM", "SBATCH_")) or name in _SESSION or not name.isidentifier():
            return None
        if name in self.environment:
            if name not in ("HOME", "USER", "LOGNAME"):
                self.taken[name] = (self.environment[name], "environment")
            return (self.environment[name],)
        return None

    def _dynamic(self, part: Dynamic) -> str:
        names = _NAMES.findall(part.text)
        if part.kind == "arithmetic":
            names = re.findall(r"[A-Za-z_]\w*", part.text)
            value = self._arithmetic(part.text)
            if value is not None:
                return value
        elif part.kind == "command":
            value = self._command(part.text)
            if value is not None:
                return value
        return self.hole("runtime", part.source, quoted=part.quoted, names=names)

    def _command(self, text: str) -> str | None:
        """Return what a few commands are known to print."""
        words = text.split()
        joined = " ".join(words)
        if joined in ("pwd", "pwd -P"):
            return self.directory
        if joined in ("whoami", "id -un"):
            return self.environment.get("USER")
        found = re.fullmatch(r"(?:which|command -v|type -p) ([\w.+-]+)", joined)
        if found is not None:
            return found[1]  # it is looked up again where the program starts
        if words[:1] == ["nproc"]:
            return self.known.get("SLURM_CPUS_ON_NODE")
        if re.fullmatch(r"nvidia-smi (-L|--list-gpus) \| wc -l", joined):
            return self.known.get("SLURM_GPUS_ON_NODE")
        if re.fullmatch(r"scontrol show hostnames? \S+ \| wc -l", joined):
            return self.known.get("SLURM_NNODES")
        return None

    def _arithmetic(self, text: str) -> str | None:
        def value(match: re.Match[str]) -> str:
            part = Parameter(match[1], match[0])
            found = self._lookup(match[1], part)
            return found[0] if found else match[0]

        text = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", value, text)
        if not re.fullmatch(r"[\d\s()+*/%-]{1,200}", text) or "**" in text:
            return None
        try:
            return str(_evaluate(ast.parse(text.strip().replace("/", "//"), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return None


_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _evaluate(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        made: int = _OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
        if abs(made) < 1 << 63:
            return made
    raise ValueError("no computation with whole numbers")


def _quoted(part: Part) -> bool:
    return part.quoted


def _split(pieces: list[str]) -> list[str]:
    """Split values at blanks, as a shell does outside of quotes."""
    return [field for piece in pieces for field in piece.split()]


def braces(text: str) -> list[str]:
    """Return what braces make of a text: `a{1,2}` is `a1` and `a2`, `{1..3}` three numbers.

    >>> braces("--lr={0.1,0.2}"), braces("{1..3}"), braces("{a}")
    (['--lr=0.1', '--lr=0.2'], ['1', '2', '3'], ['{a}'])
    """
    match = re.search(r"\{([^{}\s,]*(?:,[^{}\s,]*)+|-?\d{1,6}\.\.-?\d{1,6})\}", text)
    if match is None or text[: match.start()].endswith("$"):
        return [text]
    if "," in match[1]:
        choices = match[1].split(",")
    else:
        first, last = (int(number) for number in match[1].split(".."))
        step = 1 if last >= first else -1
        choices = [str(number) for number in range(first, last + step, step)][:_MAX_BRACES]
    tails = braces(text[match.end() :])
    made = [f"{text[: match.start()]}{choice}{tail}" for choice in choices for tail in tails]
    return made[:_MAX_BRACES]
