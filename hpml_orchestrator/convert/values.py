"""The values of a script's words, as far as its own lines and its header decide them.

A value is text. A part that only the job knows (a job id, the output of a command) is a *hole*: its
shell source between two NUL characters, which no script contains, in quotes if the script has it
in quotes.
"""

from __future__ import annotations

import ast
import operator
import re
from typing import TYPE_CHECKING

from hpml_orchestrator.convert.shell import ASSIGNMENT, array_words, word_parts
from hpml_orchestrator.spec.text import NODE_DIRECTORIES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = ["HOLE", "Values", "has_hole", "hole_names", "shown"]

HOLE = re.compile("\0([^\0]*)\0")
_STABLE = NODE_DIRECTORIES | frozenset(  # mean the same at any time in the job
    "SLURM_JOB_ID SLURM_JOBID SLURM_ARRAY_JOB_ID SLURM_ARRAY_TASK_ID HOME USER".split()
)
_SIMPLE = re.compile(r"\$(\w+|[@*#?$!-])|\$\{(\w+|[@*#])(?:\[[@*]\])?\}", re.ASCII)
_DEFAULT = re.compile(r"\$\{(\w+):?[-=]([^{}$`\"'\\]*)\}", re.ASCII)
_PATTERN = re.compile(r"[*?]|\[[^]]*\]|(?<!\$)\{[^\s{}]*(?:,|\.\.)[^\s{}]*\}")
_NAME = re.compile(r"(?<![\w$])(?<!\$\{)[A-Za-z_]\w*", re.ASCII)
_LAUNCHER = re.compile(
    r"\b(torchrun|torch\.distributed|accelerate|deepspeed)\b|--(rdzv|master|main_proc|node_rank)"
)
_ACTIVATES = re.compile(r"/(activate|(conda|mamba)\.sh)\b|\b(conda|mamba)\b.*\bhook\b")
_MAX_VALUE = 100_000
_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def has_hole(value: str) -> bool:
    """Whether a part of a value is known in the job only."""
    return "\0" in value


def shown(value: str) -> str:
    """Return a value with its holes as written, for messages."""
    return HOLE.sub(lambda match: match[1].strip('!"'), value)


def hole_names(value: str) -> list[str]:
    """Return the variable that each hole is; empty for any other expansion."""
    holes = [_SIMPLE.fullmatch(source.strip('"')) for source in HOLE.findall(value)]
    return [match[1] or match[2] if match and "[" not in match[0] else "" for match in holes]


class Values:
    """Expands the words of a script.

    Args:
        environment: variables of the caller's shell, which sbatch passes on.
        known: variables of Slurm that the header decides; empty for those that will not be set.
        directory: where the script starts.

    Attributes:
        directory: where the script is now; empty if only the job knows.
        variables: of the script; None for a value that only the job knows.
        sourced: whether a file that is not read may have set anything.
        defaults: expansions such as `${NAME:-VALUE}` and the value that was taken for each.
    """

    def __init__(
        self, environment: Mapping[str, str], known: Mapping[str, str], directory: str
    ) -> None:
        self.environment = environment
        self.known = known
        self.directory = directory
        self.variables: dict[str, tuple[str, ...] | None] = {}
        self.sourced = False
        self.defaults: dict[str, str] = {}
        self._functions: set[str] = set()  # variables that functions may set at any time

    def assign(self, source: str) -> tuple[str, str]:
        """Set a variable by the source of an assignment; return its name and value."""
        match = ASSIGNMENT.fullmatch(source)
        assert match is not None  # noqa: S101 - the caller looked
        name, sign, rest = match.groups()
        before = self.variables.get(name) if sign == "+=" else ()
        if rest.startswith("("):
            items = tuple(self.words(array_words(rest)))
        else:
            items = (self.text(rest),)
            if before:
                items = (*before[:-1], before[-1] + items[0])
                before = ()
        value = " ".join(items)
        if not {*hole_names(value)} <= _STABLE - self.variables.keys():
            # hpml chooses what only the job knows of a launcher's options; elsewhere it is refused
            items = tuple(HOLE.sub("\0!\\1\0", item) for item in items)
        stable = "\0!" not in " ".join(items) or _LAUNCHER.search(value) is not None
        keep = stable and before is not None and len(value) < _MAX_VALUE
        keep = keep and name not in self._functions
        self.variables[name] = (*(before or ()), *items) if keep else None
        return name, value if keep else f'\0"${name}"\0'

    def forget(self, source: str, *, function: bool = False) -> None:
        """Treat variables that a command may set as unknown; all of them if it reads a file."""
        names = set(_NAME.findall(source))
        if function:
            self._functions |= names
        reads = re.search(r"(^|[;&|\s])(source|\.|eval)\s|^[$`]", source)
        if reads and not _ACTIVATES.search(source):
            self.sourced = True
            names |= self.variables.keys()
        self.variables |= dict.fromkeys(names)

    def words(self, sources: Iterable[str]) -> list[str]:
        """Return the fields of several words."""
        return [field for source in sources for field in self._fields(source)]

    def _fields(self, source: str) -> list[str]:
        """Return the fields of a word: unquoted variables are split, patterns become holes."""
        parts = list(word_parts(source))
        pattern = "".join("x" if quoted or kind else text for kind, text, quoted in parts)
        if _PATTERN.search(pattern):
            return [f"\0{source}\0"]
        fields: list[str] = []
        current = self._home(source)
        for expansion, text, quoted in parts[1:] if current else parts:
            if not expansion:
                current = (current or "") + text
                continue
            items = self._expand(text, quoted=quoted)
            if not quoted:
                items = [word for item in items for word in re.findall("(?:\0[^\0]*\0|\\S)+", item)]
                if any(_PATTERN.search(HOLE.sub("", item)) for item in items):
                    return [f"\0{source}\0"]
            for position, item in enumerate(items):
                if position:
                    fields.append(current or "")
                    current = None
                current = (current or "") + item
        return fields if current is None else [*fields, current]

    def text(self, source: str) -> str:
        """Return a word as one value, as in an assignment: nothing is split."""
        home = self._home(source)
        value = home or ""
        for expansion, text, _ in list(word_parts(source))[bool(home) :]:
            value += " ".join(self._expand(text, quoted=True)) if expansion else text
        return value

    def now(self, value: str) -> str:
        """Return a path with the variables that sbatch passes on from the caller's shell."""

        def given(match: re.Match[str]) -> str:
            name = hole_names(match[0])[0]
            fixed = name in self.variables or name in NODE_DIRECTORIES or self.sourced
            return match[0] if fixed else self.environment.get(name, match[0])

        return HOLE.sub(given, value)

    def _home(self, source: str) -> str | None:
        home = self.environment.get("HOME", "")
        return home if home and re.match(r"~(/|$)", source) else None

    def _expand(self, source: str, *, quoted: bool) -> list[str]:
        """Return the values of `$NAME`, `${NAME}`, `$(COMMAND)` and other expansions."""
        hole = [f'\0"{source}"\0' if quoted else f"\0{source}\0"]
        if match := _DEFAULT.fullmatch(source):
            name, default = match.groups()
            items = self._lookup(name)
            if items is None and name not in self.variables and not self.sourced:
                given = self.environment.get(name, "") if not name.startswith("SLURM") else ""
                if name in _STABLE:
                    return hole
                if not (name.isdigit() or name.startswith("SLURM")):
                    self.defaults[source] = given or default
                return [given or default]
            return hole if items is None else [*items[:1]] if any(items) else [default]
        if match := _SIMPLE.fullmatch(source):
            items = self._lookup(match[1] or match[2])
            if items is None:
                return hole
            items = items if source.endswith(("[@]}", "[*]}")) else items[:1]
            again = '\0"\\1"\0' if quoted else "\0\\1\0"  # a hole is quoted as it is used
            return [re.sub('\0"?([^"\0]*)"?\0', again, item) for item in items]
        if source.startswith("$((") and source.endswith("))"):
            number = self._arithmetic(source[3:-2])
            return hole if number is None else [str(number)]
        command = " ".join(source[2:-1].split()) if source.startswith("$(") else ""
        if command in ("pwd", "pwd -P") and self.directory:
            return [self.directory]
        return hole

    def _arithmetic(self, source: str) -> int | None:
        """Return the value of sums and products of known numbers; None for all else."""
        text = re.sub(
            r"\$?\{?\b([A-Za-z_]\w*)\}?",
            lambda match: (self._lookup(match[1]) or ("?",))[0],
            source,
        )
        if not re.fullmatch(r"[\d\s+*/%()-]{1,200}", text) or re.search(r"\b0\d|\*\*|//", text):
            return None
        try:
            return _number(ast.parse(text.strip().replace("/", "//"), mode="eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError):
            return None

    def _lookup(self, name: str) -> tuple[str, ...] | None:
        if name in self.variables:
            return self.variables[name]
        if name == "PWD":
            return (self.directory,) if self.directory else None
        return (self.known[name],) if name in self.known else None


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _number(node.left), _number(node.right)
        if min(left, right) >= 0:  # the shell rounds negative numbers another way
            return _OPERATORS[type(node.op)](left, right)
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    raise ValueError("not a sum or product of whole numbers")
