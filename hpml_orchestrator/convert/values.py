"""The values of a script's words, as far as its lines and header determine them.

A value is text. A part that only the running job can compute (a job id, the output of a command) is
a *hole*: its shell source between two NUL characters, which no script contains. Quotes around the
source mean that the script quotes it, so that it stays one word.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from hpml_orchestrator.convert.shell import Part
from hpml_orchestrator.jobfile.text import NODE_DIRECTORIES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from hpml_orchestrator.convert.shell import Assignment, ShellWord

HOLE = re.compile("\0([^\0]*)\0")
_STABLE = NODE_DIRECTORIES | frozenset(  # constant while the job runs
    "SLURM_JOB_ID SLURM_JOBID SLURM_ARRAY_JOB_ID SLURM_ARRAY_TASK_ID HOME USER "
    "SCRATCH PSCRATCH WORK PROJECT STORE".split()
)
_SIMPLE = re.compile(r"\$(\w+|[@*#?$!-])|\$\{(\w+|[@*#])(?:\[[@*]\])?\}", re.ASCII)
_DEFAULT = re.compile(r"\$\{(\w+):?[-=]([^{}$`\"'\\]*)\}", re.ASCII)
_FILE_PATTERN = re.compile(r"^~[\w+-]|[*?]|\[[^]]*\]|(?<!\$)\{[^\s{}]*(?:,|\.\.)[^\s{}]*\}")
_NAME = re.compile(r"(?<![\w$])(?<!\$\{)[A-Za-z_]\w*", re.ASCII)
_LAUNCHER = re.compile(
    r"\b(torchrun|torch\.distributed|accelerate|deepspeed)\b|--(rdzv|master|main_proc|node_rank)"
)
_ACTIVATES = re.compile(r"/(activate|(conda|mamba)\.sh)\b|\b(conda|mamba)\b.*\bhook\b")
_MAX_VALUE = 100_000


def has_hole(value: str) -> bool:
    """Whether only the job can compute a part of a value."""
    return "\0" in value


def shown(value: str) -> str:
    """Return a value with its holes as written, for messages."""
    return HOLE.sub(lambda match: match[1].strip('"'), value)


def hole_names(value: str) -> list[str]:
    """Return the variable of each hole; an empty name for any other expansion."""
    holes = [_SIMPLE.fullmatch(source.strip('"')) for source in HOLE.findall(value)]
    return [match[1] or match[2] if match and "[" not in match[0] else "" for match in holes]


class Values:
    """Expands the words of a script.

    Args:
        environment: variables of the caller's shell, which sbatch passes on.
        known: Slurm's variables that the header decides; empty for those that Slurm will not set.
        directory: where the script starts.

    Attributes:
        directory: the current directory of the script; empty if only the job can compute it.
        variables: of the script; None for a value that only the job can compute.
        sourced: whether another file may have set any variable.
    """

    def __init__(
        self, environment: Mapping[str, str], known: Mapping[str, str], directory: str
    ) -> None:
        self.environment = environment
        self.known = known
        self.directory = directory
        self.variables: dict[str, tuple[str, ...] | None] = {}
        self.sourced = False
        self._functions: set[str] = set()  # variables that functions may set at any time

    def assign(self, assignment: Assignment) -> tuple[str, str]:
        """Set a variable; return its name and value."""
        name = assignment.name
        before = self.variables.get(name) if assignment.appends else ()
        if assignment.items is not None:
            items = tuple(self.words(assignment.items))
        else:
            items = (self.text(assignment.value),)
            if before:
                items = (*before[:-1], before[-1] + items[0])
                before = ()
        value = " ".join(items)
        # hpml replaces a launcher's rendezvous options, so their values need not be known.
        stable = {*hole_names(value)} <= _STABLE - self.variables.keys() or _LAUNCHER.search(value)
        known = bool(stable) and before is not None and len(value) < _MAX_VALUE
        known = known and name not in self._functions
        if name in _STABLE:  # not constant after all: values that contain it keep the earlier one
            for other, parts in self.variables.items():
                if name in hole_names(" ".join(parts or ())):
                    self.variables[other] = None
        self.variables[name] = (*(before or ()), *items) if known else None
        return name, value if known else f'\0"${name}"\0'

    def forget(self, source: str, *, is_function: bool = False) -> None:
        """Treat variables that a command may set as unknown; all of them if it reads a file."""
        # Every word that could be a variable's name counts, since nothing is evaluated. Too many
        # unknown values only make the report longer; a wrong known one would change the job.
        names = set(_NAME.findall(source))
        if is_function:
            self._functions |= names
        reads = re.search(r"(^|[;&|\s])(source|\.|eval)\s|^[$`]", source)
        if reads and not _ACTIVATES.search(source):
            self.sourced = True
            names |= self.variables.keys()
        self.variables |= dict.fromkeys(names)

    def words(self, words: Iterable[ShellWord]) -> list[str]:
        """Return the fields that the shell would make of several words."""
        return [value for word in words for value in self._fields(word)]

    def _fields(self, word: ShellWord) -> list[str]:
        """Split unquoted variables at blanks; a word that may be a file pattern is one hole."""
        parts = self._parts(word)
        plain = "".join("x" if part.quoted or part.is_expansion else part.text for part in parts)
        if _FILE_PATTERN.search(plain):
            return [f"\0{word.source}\0"]
        fields: list[str] = []
        current = None
        for part in parts:
            if not part.is_expansion:
                current = (current or "") + part.text
                continue
            items = self._expand(part.text, quoted=part.quoted)
            if not part.quoted:
                # The shell splits an unquoted expansion first and then expands file patterns in
                # the pieces.
                items = [piece for item in items for piece in _split_blanks(item)]
                if any(_FILE_PATTERN.search(HOLE.sub("", item)) for item in items):
                    return [f"\0{word.source}\0"]
            for position, item in enumerate(items):
                if position:
                    fields.append(current or "")
                    current = None
                current = (current or "") + item
        return fields if current is None else [*fields, current]

    def text(self, word: ShellWord) -> str:
        """Return a word as one value, as in an assignment: nothing is split."""
        parts = self._parts(word)
        if any(":~" in part.text and not part.quoted for part in parts):
            return f'\0"{word.source}"\0'  # bash expands these, too
        return "".join(
            " ".join(self._expand(part.text, quoted=True)) if part.is_expansion else part.text
            for part in parts
        )

    def at_submission(self, value: str) -> str:
        """Return a path with the variables that sbatch passes on from the caller's shell."""

        def given(match: re.Match[str]) -> str:
            name = hole_names(match[0])[0]
            fixed = name in self.variables or name in NODE_DIRECTORIES or self.sourced
            fixed = fixed or name.startswith("SLURM")  # of the job that hpml import may run in
            return match[0] if fixed else self.environment.get(name, match[0])

        return HOLE.sub(given, value)

    def _parts(self, word: ShellWord) -> tuple[Part, ...]:
        home = self.environment.get("HOME", "")
        if not (home and re.match(r"~(/|$)", word.source)):
            return word.parts
        rest = Part(word.parts[0].text[1:])
        return (Part(home, quoted=True), rest, *word.parts[1:])

    def _expand(self, source: str, *, quoted: bool) -> list[str]:
        """Return the values of `$NAME`, `${NAME}`, `$(COMMAND)` and other expansions."""
        hole = [f'\0"{source}"\0' if quoted else f"\0{source}\0"]
        if match := _DEFAULT.fullmatch(source):
            items = ("",) if match[1].isdigit() else self._lookup(match[1])
            return hole if items is None else [*items[:1]] if any(items) else [match[2]]
        if match := _SIMPLE.fullmatch(source):
            items = self._lookup(match[1] or match[2])
            if items is None:
                return hole
            items = items if source.endswith(("[@]}", "[*]}", "@")) else items[:1]
            again = '\0"\\1"\0' if quoted else "\0\\1\0"  # quoted as this use of it
            return [re.sub('\0"?([^"\0]*)"?\0', again, item) for item in items]
        if source.startswith("$((") and source.endswith("))"):
            number = self._arithmetic(source[3:-2])
            return hole if number is None else [str(number)]
        command = " ".join(source[2:-1].split()) if source.startswith("$(") else ""
        return [self.directory] if command in ("pwd", "pwd -P") and self.directory else hole

    def _arithmetic(self, source: str) -> int | None:
        """Return the value of a sum of products of known numbers; None for all else."""
        text = re.sub(
            r"\$?\{?\b([A-Za-z_]\w*)\}?",
            lambda match: (self._lookup(match[1]) or ("?",))[0],
            source,
        )
        if not re.fullmatch(r"[\d\s+*]{1,80}", text) or re.search(r"\b0\d", text):
            return None
        try:
            return sum(math.prod(map(int, term.split("*"))) for term in text.split("+"))
        except ValueError:
            return None

    def _lookup(self, name: str) -> tuple[str, ...] | None:
        if name in self.variables:
            return self.variables[name]
        if name == "PWD":
            return (self.directory,) if self.directory else None
        return (self.known[name],) if name in self.known else None


def _split_blanks(value: str) -> list[str]:
    return re.findall("(?:\0[^\0]*\0|\\S)+", value)
