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

__all__ = ["PROVIDED", "Values", "has_hole", "holes", "shell_word", "shown", "stable"]

PROVIDED = frozenset(
    "MASTER_ADDR MASTER_PORT WORLD_SIZE RANK LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK "
    "PYTHONUNBUFFERED".split()
)
"""Variables that hpml sets for the ranks itself."""

_HOLE = re.compile("\0([^\0]*)\0")
_SIMPLE = re.compile(r"\$(\w+|[@*#?$!-])|\$\{(\w+|[@*])(?:\[[@*]\])?\}", re.ASCII)
_DEFAULT = re.compile(r"\$\{([A-Za-z_]\w*):?[-=]([^{}$`\"'\\]*)\}", re.ASCII)
_LOCAL_NAMES = "TMPDIR SLURM_TMPDIR LOCAL_SCRATCH LOCALSCRATCH LSCRATCH JOBFS".split()
_JOB_NAMES = "SLURM_JOB_ID SLURM_JOBID SLURM_ARRAY_JOB_ID".split()
_KINDS = {
    **dict.fromkeys(_LOCAL_NAMES, "local"),
    **dict.fromkeys(_JOB_NAMES, "job"),
    "SLURM_ARRAY_TASK_ID": "array",
}
_SESSION = frozenset(  # what the login shell has, and the job has not or has otherwise
    "HOSTNAME HOST RANDOM SECONDS LINENO PPID UID SHLVL OLDPWD _ DISPLAY CUDA_VISIBLE_DEVICES "
    "BASH_SOURCE BASH".split()
)
_PATTERN = re.compile(r"[*?]|\[[^]]*\]|(?<!\$)\{[^\s{}]*(?:,|\.\.)[^\s{}]*\}")
_LAUNCHER = re.compile(r"\b(torchrun|torch\.distributed|accelerate|deepspeed|mpirun|srun)\b")
_MAX_VALUE = 100_000


def has_hole(value: str) -> bool:
    """Whether a part of a value is known in the job only."""
    return "\0" in value


def holes(value: str) -> list[tuple[str, str]]:
    """Return kind and source of the holes of a value.

    Kinds: `array`, `job`, `local` (the node's own disk), `argument` (`$1`), `runtime`.
    """
    found = []
    for source in _HOLE.findall(value):
        match = _SIMPLE.fullmatch(source.strip('"'))
        name = (match[1] or match[2]) if match else ""
        if match is None:
            default = re.fullmatch(r'"?\$\{(\w+):-[^{}]*(\$\{?\w+\}?|/tmp)?\}"?', source)
            name = default[1] if default and _KINDS.get(default[1]) == "local" else ""
        argument = name.isdigit() or name in ("@", "*")
        found.append(("argument" if argument else _KINDS.get(name, "runtime"), source))
    return found


def stable(value: str) -> bool:
    """Whether the holes of a value mean the same at any time in the job."""
    return all(kind in ("array", "job", "local") for kind, _ in holes(value))


def shown(value: str) -> str:
    """Return a value with its holes as written, for messages."""
    return _HOLE.sub(lambda match: match[1].strip('"'), value)


def shell_word(value: str) -> str:
    """Return a value as one word for a shell, which fills in its holes."""
    parts = _HOLE.split(value)
    quoted = [part if index % 2 else shlex.quote(part) for index, part in enumerate(parts) if part]
    return "".join(quoted) if value else "''"


class Values:
    """Expands words.

    Args:
        environment: variables of the caller's shell, which sbatch passes on.
        known: variables that Slurm will set, as far as the header decides them.
        directory: where the script starts.

    Attributes:
        directory: where the script is; may have holes; empty once that is unknown.
        variables: of the script; None for a value that only the job knows.
        from_environment: variables of the caller's shell that were used, with their values.
        defaults: `${NAME:-VALUE}` that were replaced by VALUE.
    """

    def __init__(
        self, environment: Mapping[str, str], known: Mapping[str, str], directory: str
    ) -> None:
        self.environment = environment
        self.known = known
        self.directory = directory
        self.variables: dict[str, tuple[str, ...] | None] = {}
        self.from_environment: dict[str, str] = {}
        self.defaults: dict[str, str] = {}
        self.sourced = False  # whether a file that is not read may have set anything

    def assign(self, source: str) -> tuple[str, str]:
        """Set a variable by the source of an assignment; return its name and value."""
        name, operator, rest = ASSIGNMENT.fullmatch(source).groups()  # type: ignore[union-attr]
        opaque = f'\0"${name}"\0'
        if rest.startswith("("):
            words = [match["word"] for match in TOKEN.finditer(rest[1:-1]) if match["word"]]
            items = self.words(words)
            before = self.variables.get(name, ()) if operator == "+=" else ()
            known = before is not None and not any(map(has_hole, items))
            self.variables[name] = (*(before or ()), *items) if known else None
            return name, " ".join(items) if known else opaque
        value = self.text(rest)
        if operator == "+=":
            before = self.variables.get(name)
            value = before[0] + value if before is not None and len(before) == 1 else opaque
        keep = (stable(value) or _LAUNCHER.search(value)) and len(value) < _MAX_VALUE
        self.variables[name] = (value,) if keep else None
        return name, value if keep else opaque

    def forget(self, source: str) -> None:
        """Treat variables that a command may set as unknown; all of them where it reads a file."""
        if re.search(r"(^|[;&|\s])(source|\.|eval)\s", source):
            self.variables = dict.fromkeys(self.variables)
            self.sourced = True
        bare = set(re.findall(r"(?<![\w$])(?<!\$\{)[A-Za-z_]\w*", source))
        if not re.search(r"=|\b(read|for|select|mapfile|readarray|getopts|let|printf)\b", source):
            bare &= self.variables.keys()
        self.variables |= dict.fromkeys(bare)

    def words(self, sources: list[str]) -> list[str]:
        """Return the fields of several words."""
        return [field for source in sources for field in self.fields(source)]

    def fields(self, source: str) -> list[str]:
        """Return the fields of a word: unquoted variables are split, patterns become holes."""
        parts = list(word_parts(source))
        pattern = "".join("x" if quoted or kind else text for kind, text, quoted in parts)
        if _PATTERN.search(pattern):
            return [f"\0{source}\0"]
        fields: list[str] = []
        current: str | None = None
        for index, (expansion, text, quoted) in enumerate(parts):
            if not expansion:
                value = self._tilde(text) if not quoted and index == 0 else text
                current = (current or "") + value
                continue
            items = self._expand(text, quoted=quoted)
            if not quoted:
                items = [word for item in items for word in re.findall("(?:\0[^\0]*\0|\\S)+", item)]
                if any(_PATTERN.search(_HOLE.sub("", item)) for item in items):
                    return [f"\0{source}\0"]
            for position, item in enumerate(items):
                if position:
                    fields.append(current or "")
                    current = item
                else:
                    current = (current or "") + item
        if current is not None:
            fields.append(current)
        return fields

    def text(self, source: str) -> str:
        """Return a word as one value, as in an assignment: nothing is split."""
        values = []
        for index, (expansion, text, quoted) in enumerate(word_parts(source)):
            if expansion:
                values.append(" ".join(self._expand(text, quoted=True)))
            else:
                values.append(self._tilde(text) if not quoted and index == 0 else text)
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
            unset = name not in {**self.variables, **_KINDS} and not self.sourced
            if items is None and unset:
                self.defaults[source] = default
                return [default]
            return list(items[:1]) if items and items[0] else [default] if items else hole
        if match := _SIMPLE.fullmatch(source):
            name = match[1] or match[2]
            items = self._lookup(name)
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
        counted = {
            "nproc": "SLURM_CPUS_ON_NODE",
            "nvidia-smi -L | wc -l": "SLURM_GPUS_ON_NODE",
        }.get(command)
        return [self.known[counted]] if counted and counted in self.known else hole

    def _lookup(self, name: str) -> tuple[str, ...] | None:
        if name in self.variables:
            return self.variables[name]
        if name == "PWD":
            return (self.directory,) if self.directory else None
        if name in PROVIDED or name in _KINDS or name in _SESSION or not name.isidentifier():
            return None
        if name.startswith(("SLURM", "SBATCH_")):
            return (self.known[name],) if name in self.known else None
        if name in self.environment and not self.sourced:
            if name not in ("HOME", "USER", "LOGNAME"):
                self.from_environment[name] = self.environment[name]
            return (self.environment[name],)
        return None
