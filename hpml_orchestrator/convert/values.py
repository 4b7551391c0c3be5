"""The values of a script's variables and words, as far as they are known before it runs.

A value is text. A part that only the job knows (a job id, the output of a command, a file pattern)
is a *hole*: its shell source between two NUL characters, which no script contains.
"""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

from hpml_orchestrator.convert.shell import ASSIGNMENT, TOKEN, word_parts

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "PROVIDED",
    "Values",
    "has_hole",
    "hole_kinds",
    "hole_sources",
    "is_stable",
    "shell_word",
    "shown",
]

PROVIDED = frozenset(
    "MASTER_ADDR MASTER_PORT WORLD_SIZE RANK LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK "
    "PYTHONUNBUFFERED SRUN_CPUS_PER_TASK SLURM_CPU_BIND SLURM_EXPORT_ENV".split()
)
"""Variables that hpml sets for the ranks, or that its own srun needs not."""

_HOLE = re.compile("\0([^\0]*)\0")
_SIMPLE = re.compile(r"\$(\w+|[@*#?$!-])|\$\{(\w+|[@*#])(?:\[[@*]\])?\}", re.ASCII)
_DEFAULT = re.compile(r"\$\{(\w+):?[-=]([^{}$`\"'\\]*)\}", re.ASCII)
_LOCAL = re.compile(  # with another directory where it is not set
    r"\$\{((?:SLURM_)?TMPDIR|LOCAL_?SCRATCH|LSCRATCH|JOBFS):-[^{}]*(?:\$\{\w+\})?\}", re.ASCII
)
_KINDS = {
    **dict.fromkeys(
        "TMPDIR SLURM_TMPDIR LOCAL_SCRATCH LOCALSCRATCH LSCRATCH JOBFS".split(), "local"
    ),
    **dict.fromkeys("SLURM_JOB_ID SLURM_JOBID SLURM_ARRAY_JOB_ID".split(), "job"),
    "SLURM_ARRAY_TASK_ID": "array",
    **dict.fromkeys(PROVIDED, "provided"),
}
_SESSION = frozenset(  # what the login shell has, and the job has not or has otherwise
    "HOSTNAME HOST RANDOM SECONDS LINENO PPID UID SHLVL OLDPWD _ DISPLAY CUDA_VISIBLE_DEVICES "
    "BASH_SOURCE BASH".split()
)
_PATTERN = re.compile(r"[*?]|\[[^]]*\]|(?<!\$)\{[^\s{}]*(?:,|\.\.)[^\s{}]*\}")
_LAUNCHER = re.compile(  # what only the job knows of such a value is hpml's to choose
    r"\b(torchrun|torch\.distributed|accelerate|deepspeed|mpirun|srun)\b|--(rdzv|master|main_proc)"
)
_MAX_VALUE = 100_000


def has_hole(value: str) -> bool:
    """Whether a part of a value is known in the job only."""
    return "\0" in value


def hole_sources(value: str) -> list[str]:
    """Return the shell source of each hole, without the quotes around it."""
    return [source.strip('"') for source in _HOLE.findall(value)]


def hole_kinds(value: str) -> list[str]:
    """Return the kind of each hole.

    `array` (the task's index), `job` (its id), `local` (the node's own disk), `provided` (set by
    hpml, too), `argument` (`$1`), `runtime` (all else).
    """
    kinds = []
    for source in hole_sources(value):
        match = _SIMPLE.fullmatch(source) or _LOCAL.fullmatch(source)
        name = next(filter(None, match.groups()), "") if match else ""
        argument = name in ("@", "*", "#") or (name.isdigit() and name != "0")
        kinds.append("argument" if argument else _KINDS.get(name, "runtime"))
    return kinds


def is_stable(value: str) -> bool:
    """Whether the holes of a value mean the same at any time in the job."""
    return {"runtime", "argument"}.isdisjoint(hole_kinds(value))


def shown(value: str) -> str:
    """Return a value with its holes as written, for messages."""
    return _HOLE.sub(lambda match: match[1].strip('"'), value)


def shell_word(value: str) -> str:
    """Return a value as one word for a shell, which fills in its holes."""
    parts = _HOLE.split(value)
    quoted = [part if index % 2 else shlex.quote(part) for index, part in enumerate(parts) if part]
    return "".join(quoted) if value else "''"


class Values:
    """Expands the words of a script.

    Args:
        environment: variables of the caller's shell, which sbatch passes on.
        known: variables that Slurm will set, as far as the header decides them.
        directory: where the script starts.

    Attributes:
        directory: where the script is now; empty where only the job knows.
        variables: of the script; None for a value that only the job knows.
        sourced: whether a file that is not read may have set anything.
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

    def assign(self, source: str) -> tuple[str, str]:
        """Set a variable by the source of an assignment; return its name and value."""
        match = ASSIGNMENT.fullmatch(source)
        assert match is not None  # noqa: S101 - the caller looked
        name, operator, rest = match.groups()
        opaque = f'\0"${name}"\0'
        before = self.variables.get(name) if operator == "+=" else ()
        if rest.startswith("("):
            items = self.words(
                [word["word"] for word in TOKEN.finditer(rest[1:-1]) if word["word"]]
            )
            known = before is not None and self._is_kept(name, " ".join(items))
            self.variables[name] = (*(before or ()), *items) if known else None
            return name, " ".join(items) if known else opaque
        value = self.text(rest)
        if operator == "+=":
            value = "".join(before) + value if before else opaque
        keep = self._is_kept(name, value)
        self.variables[name] = (value,) if keep else None
        return name, value if keep else opaque

    def _is_kept(self, name: str, value: str) -> bool:
        """Whether a variable's value can stand where its name stands: `$(date)` is run once."""
        stable = is_stable(value) or _LAUNCHER.search(value) is not None
        return stable and len(value) < _MAX_VALUE and name not in self._functions

    def forget(self, source: str, *, function: bool = False) -> None:
        """Treat variables that a command may set as unknown; all of them where it reads a file."""
        names = set(re.findall(r"(?<![\w$])(?<!\$\{)[A-Za-z_]\w*", source))
        if function:
            self._functions |= names
        if re.search(r"(^|[;&|\s])(source|\.|eval)\s", source):
            self.sourced = True
            names |= self.variables.keys()
        self.variables |= dict.fromkeys(names)

    def words(self, sources: list[str] | tuple[str, ...]) -> list[str]:
        """Return the fields of several words."""
        return [field for source in sources for field in self._fields(source)]

    def _fields(self, source: str) -> list[str]:
        """Return the fields of a word: unquoted variables are split, patterns become holes."""
        parts = list(word_parts(source))
        pattern = "".join("x" if quoted or kind else text for kind, text, quoted in parts)
        if _PATTERN.search(pattern):
            return [f"\0{source}\0"]
        fields: list[str] = []
        current: str | None = None
        for index, (expansion, text, quoted) in enumerate(parts):
            if not expansion:
                current = (current or "") + (text if quoted or index else self._tilde(text))
                continue
            items = self._expand(text, quoted=quoted)
            if not quoted:
                items = [word for item in items for word in re.findall("(?:\0[^\0]*\0|\\S)+", item)]
                if any(_PATTERN.search(_HOLE.sub("", item)) for item in items):
                    return [f"\0{source}\0"]
            for position, item in enumerate(items):
                if position:
                    fields.append(current or "")
                    current = None
                current = (current or "") + item
        return fields if current is None else [*fields, current]

    def text(self, source: str) -> str:
        """Return a word as one value, as in an assignment: nothing is split."""
        values = []
        for index, (expansion, text, quoted) in enumerate(word_parts(source)):
            if expansion:
                values.append(" ".join(self._expand(text, quoted=True)))
            else:
                values.append(text if quoted or index else self._tilde(text))
        return "".join(values)

    def _tilde(self, text: str) -> str:
        home = self.environment.get("HOME", "")
        return home + text[1:] if home and re.match(r"~(/|$)", text) else text

    def _expand(self, source: str, *, quoted: bool) -> list[str]:
        """Return the values of `$NAME`, `${NAME}`, `$(COMMAND)` and their like."""
        hole = [f'\0"{source}"\0' if quoted else f"\0{source}\0"]
        if match := _DEFAULT.fullmatch(source):
            name, default = match.groups()
            items = self._lookup(name)
            if items is None and not (name in {**self.variables, **_KINDS} or self.sourced):
                return [default]
            return list(items[:1]) if items and items[0] else [default] if items else hole
        if match := _SIMPLE.fullmatch(source):
            items = self._lookup(match[1] or match[2])
            if items is None:
                return hole
            items = items if source.endswith(("[@]}", "[*]}")) else items[:1]
            again = '\0"\\1"\0' if quoted else "\0\\1\0"  # a hole is quoted as it is used
            return [re.sub('\0"?([^"\0]*)"?\0', again, item) for item in items]
        command = " ".join(source[2:-1].split()) if source.startswith("$(") else ""
        if command in ("pwd", "pwd -P") and self.directory:
            return [self.directory]
        if match := re.fullmatch(r"(?:which|command -v) ([\w.+-]+)", command):
            return [match[1]]  # looked up again where the program starts
        return hole

    def _lookup(self, name: str) -> tuple[str, ...] | None:
        if name in self.variables:
            return self.variables[name]
        if name == "PWD":
            return (self.directory,) if self.directory else None
        if name in PROVIDED or name in _KINDS or name in _SESSION or not name.isidentifier():
            return None
        slurm = name.startswith(("SLURM", "SBATCH_"))
        values = self.known if slurm else {} if self.sourced else self.environment
        return (values[name],) if name in values else None
