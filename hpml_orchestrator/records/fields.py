"""What a value of a job may be: metadata in `Annotated`, and texts with their patterns.

On the login node pydantic builds its schemas from it. Nodes read the same classes without pydantic:
`pydantic_core` is imported only where a schema is built.

Values are shell-quoted wherever they reach a script; these patterns come before that. What ends in
an `#SBATCH` line (which no quoting protects alike in every Slurm version) is held to characters
that neither sbatch nor a shell gives a meaning to.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from hpml_orchestrator.records.units import (
    Gpus,
    format_time,
    node_memory_text,
    parse_gpus,
    parse_node_memory,
    parse_size_mib,
    parse_time,
    size_text,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Make = Callable[[Any], Any]
    """Takes a value, and returns what becomes of it."""

MAX_LIST = 4096
"""Most entries of a list or mapping."""

MAX_ARGUMENT_BYTES = 131_071
"""Longest single argument or NAME=value that Linux hands to a process (MAX_ARG_STRLEN - 1)."""

MAX_PATH_BYTES = 4095
_MAX_PORT = 65_535


@dataclass(frozen=True, eq=False)
class Checked:
    """A value that a function checks, and may change, after its type is right.

    Attributes:
        check: returns the value, or raises ValueError, whose text says what would be right.
    """

    check: Make

    def __get_pydantic_core_schema__(self, source: object, handler: Make) -> object:
        from pydantic_core.core_schema import (  # noqa: PLC0415 - not on nodes
            no_info_after_validator_function,
        )

        return no_info_after_validator_function(self.check, handler(source))


@dataclass(frozen=True, eq=False)
class Prepared:
    """A value that a function brings into the form of its type.

    Attributes:
        prepare: returns the value, or raises ValueError.
        accepts: what can be written, as a JSON Schema; None for only what the type has.
        also: what can be written besides what the type has.
    """

    prepare: Make
    accepts: Mapping[str, object] | None = None
    also: Mapping[str, object] | None = None

    def __get_pydantic_core_schema__(self, source: object, handler: Make) -> object:
        from pydantic_core.core_schema import (  # noqa: PLC0415 - not on nodes
            no_info_before_validator_function,
        )

        return no_info_before_validator_function(self.prepare, handler(source))

    def __get_pydantic_json_schema__(self, schema: object, handler: Make) -> object:
        if self.accepts is not None:
            return {**self.accepts}
        own = handler(schema)
        return {"anyOf": [self.also, own]} if self.also is not None else own


@dataclass(frozen=True, eq=False)
class Unit:
    """A value in a unit, written as a text.

    Attributes:
        parse: returns the value of what a user wrote or a record has, or raises ValueError.
        written: returns the text of a value.
        accepts: what can be written, as a JSON Schema.
    """

    parse: Make
    written: Make
    accepts: Mapping[str, object]

    def __get_pydantic_core_schema__(self, source: object, handler: Make) -> object:
        from pydantic_core import core_schema  # noqa: PLC0415 - not on nodes

        written = core_schema.plain_serializer_function_ser_schema(self.written)
        return core_schema.no_info_plain_validator_function(self.parse, serialization=written)

    def __get_pydantic_json_schema__(self, schema: object, handler: Make) -> object:
        return {**self.accepts}


@dataclass(frozen=True, eq=False)
class Between:
    """A whole number in a range; no text, and no boolean."""

    low: int
    high: int

    def __get_pydantic_core_schema__(self, source: object, handler: Make) -> object:
        from pydantic_core.core_schema import int_schema  # noqa: PLC0415 - not on nodes

        return int_schema(strict=True, ge=self.low, le=self.high)


@dataclass(frozen=True, eq=False)
class YesOrNo:
    """True or false; no text, and no number."""

    def __get_pydantic_core_schema__(self, source: object, handler: Make) -> object:
        from pydantic_core.core_schema import bool_schema  # noqa: PLC0415 - not on nodes

        return bool_schema(strict=True)


@dataclass(frozen=True, eq=False)
class Entries:
    """A list or mapping with so many entries."""

    most: int = MAX_LIST
    least: int = 0

    def __get_pydantic_core_schema__(self, source: object, handler: Make) -> object:
        least = {"min_length": self.least} if self.least else {}
        return {**handler(source), "max_length": self.most, **least}


def _unicode(value: str) -> str:
    if "\0" in value:
        raise ValueError("must not hold a NUL character")
    try:  # JSON escapes characters beyond U+FFFF as surrogate pairs, which YAML does not join
        return value.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError as error:
        raise ValueError("must be valid Unicode text") from error


def at_most(limit: int, advice: str) -> Checked:
    """Accept Unicode text of at most that many bytes."""

    def check(value: str) -> str:
        value = _unicode(value)
        size = len(value.encode())
        if size > limit:
            raise ValueError(f"is {size} bytes long; {advice}")
        return value

    return Checked(check)


def matching(pattern: str, description: str, longest: int = 256) -> Checked:
    """Accept text that matches a pattern.

    Args:
        pattern: a regular expression for all of the text.
        description: what the text must be, for the message.
        longest: number of characters.
    """
    compiled = re.compile(pattern)

    def check(value: str) -> str:
        if len(value) > longest:
            raise ValueError(f"is {len(value)} characters long; at most {longest} are allowed")
        if not compiled.fullmatch(value):
            raise ValueError(f"must be {description}")
        return value

    return Checked(check)


def _as_written(value: object) -> object:
    """Return numbers as they are written; booleans would lose their spelling."""
    if isinstance(value, bool):
        raise ValueError("is a boolean: put it in quotes, as the program should receive it")  # noqa: TRY004
    if isinstance(value, (int, float)):
        return getattr(value, "written", None) or str(value)
    return value


def _shell_lines(value: str) -> str:
    value = value.replace("\r\n", "\n")
    match = re.search(r"[\x01-\x08\x0b-\x1f\x7f]", value)
    if match:
        line = value.count("\n", 0, match.start()) + 1
        raise ValueError(
            f"line {line}: must not hold the control character {match[0]!r}; in the shell "
            f"it is $'\\x{ord(match[0]):02x}'"
        )
    return value


def _not_empty(value: str) -> str:
    if not value:
        raise ValueError("must not be empty")
    return value


def no_dash(value: str) -> str:
    """Refuse a text that a program would take as an option."""
    if value.startswith("-"):
        raise ValueError("must not begin with a dash")
    return value


# A job's own SLURM_ or HPML_ variables would contradict those that Slurm and hpml set in the job.
_RESERVED_PREFIXES = tuple("SLURM_ SLURMD_ SBATCH_ SRUN_ HPML_ PMI OMPI_ PRTE_ BASH".split())
_RESERVED = frozenset(
    # a shell gives these a special meaning, or refuses to set them
    "ENV IFS PS4 PROMPT_COMMAND SHELLOPTS UID EUID PPID GROUPS FUNCNAME DIRSTACK GLOBIGNORE "
    "POSIXLY_CORRECT CDPATH LINENO SECONDS RANDOM SRANDOM EPOCHSECONDS EPOCHREALTIME OPTARG OPTIND "
    "OPTERR PIPESTATUS PWD OLDPWD SHLVL TIMEFORMAT HISTCMD COMP_WORDBREAKS MAPFILE REPLY COPROC "
    "_".split()
)
OF_LAUNCHERS = frozenset(
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK NODE_RANK MASTER_ADDR MASTER_PORT "
    "PET_NODE_RANK HOROVOD_RANK HOROVOD_SIZE HOROVOD_LOCAL_RANK HOROVOD_LOCAL_SIZE "
    "HOROVOD_CROSS_RANK HOROVOD_CROSS_SIZE".split()
)
"""Variables that a launcher sets for its ranks."""
# Open MPI's own settings are the user's; PMIX and PRTE are parts of version 5.
_OPEN_MPI_SETTINGS = ("OMPI_MCA_", "PMIX_MCA_", "PRTE_MCA_", "OMPI_ALLOW_RUN_AS_ROOT")


def _not_reserved(value: str) -> str:
    reserved = value in _RESERVED | OF_LAUNCHERS or value.upper().startswith(_RESERVED_PREFIXES)
    if reserved and not value.startswith(_OPEN_MPI_SETTINGS):
        raise ValueError("is set by the shell, Slurm, the launcher or hpml; choose another name")
    return value


def _port(value: str) -> str:
    if int(value.rpartition(":")[2]) > _MAX_PORT:
        raise ValueError(f"must have a port of at most {_MAX_PORT}")
    return value


# GPUs have their own field; licences of a file system are also generic resources
_GRES_WITHOUT_GPUS = re.compile(r"--gres=(?!(gres[:/])?gpu\b)[^,]+(,(?!(gres[:/])?gpu\b)[^,]+)*")

_FIELD_OF = {
    "name": "job-name",
    "workdir": "chdir",
    "environment": "export",
    "array": "array",
    "after": "dependency kill-on-invalid-dep",
    "command": "wrap",
    "checkpoint.requeue": "requeue no-requeue",
    "resources.nodes": "nodes",
    "resources.ranks_per_node": "ntasks ntasks-per-node",
    "resources.cpus_per_rank": "cpus-per-task",
    "resources.gpus": "gpus gpus-per-node gpus-per-task gres",
    "resources.memory": "mem mem-per-gpu",
    "resources.memory_per_cpu": "mem-per-cpu",
    "resources.mail.on": "mail-type",
    "resources.mail.to": "mail-user",
    **{
        f"resources.{name}": name
        for name in ("time", "partition", "account", "qos", "constraint", "exclusive")
    },
}
_REASONS = {
    "is set by hpml: leave it out": "comment open-mode output parsable",
    "is not supported: a job goes to the cluster of this login node": "cluster clusters",
    "is not supported: leave it out": "error export-file get-user-env help input test-only usage "
    "version wait",
    **{f"has its own field: {field}": names for field, names in _FIELD_OF.items()},
}
_NOT_EXTRA = {name: reason for reason, names in _REASONS.items() for name in names.split()}
"""Options of sbatch that `extra` may not have, and why."""


def _extra(options: tuple[str, ...]) -> tuple[str, ...]:
    for option in options:
        name = option.removeprefix("--").partition("=")[0]
        reason = _NOT_EXTRA.get(name)
        if reason and not _GRES_WITHOUT_GPUS.fullmatch(option):
            raise ValueError(f"--{name} {reason}")
    return options


SBATCH_VALUE = r"[A-Za-z0-9_.,:@/+=%*()\[\]|&-]"
LONG_OPTION = r"--[a-z][a-z0-9-]*"
JOB_NAME = r"[A-Za-z0-9][A-Za-z0-9._+-]*"
_NAME_FORM = "letters, digits and . _ + - and begin with a letter or digit"
_AFTER_FORM = "a run as `hpml list` names it, or one behind ok:, any: or notok:"
_OPTION_FORM = "one long sbatch option such as --reservation=course, without blanks or quotes"
_TOO_LONG = (
    f"Linux passes at most {MAX_ARGUMENT_BYTES} in one argument: put it into a file and pass the "
    "file's path"
)
_TEXT, _INTEGER = {"type": "string"}, {"type": "integer"}
INTEGER_OR_TEXT = {"anyOf": [_INTEGER, _TEXT]}

Flag = Annotated[bool, YesOrNo()]
Count = Annotated[int, Between(0, 10_000_000)]
PositiveInt = Annotated[int, Between(1, 1_000_000_000)]

Argument = Annotated[
    str,
    Prepared(_as_written, accepts={"anyOf": [_TEXT, {"type": "number"}]}),
    at_most(MAX_ARGUMENT_BYTES, _TOO_LONG),
]
PathText = Annotated[
    str,
    at_most(MAX_PATH_BYTES, f"a path has at most {MAX_PATH_BYTES}"),
    Checked(_not_empty),
]
ShellLines = Annotated[
    str,
    at_most(MAX_ARGUMENT_BYTES, "put so much into a file, and `source` that"),
    Checked(_shell_lines),
]
After = Annotated[
    str,
    Prepared(_as_written, accepts=INTEGER_OR_TEXT),
    matching(rf"((ok|any|notok):)?{JOB_NAME}", _AFTER_FORM),
]
JobName = Annotated[str, matching(JOB_NAME, _NAME_FORM, 64)]
StageName = Annotated[
    str,
    matching(r"[a-z][a-z0-9_]*", "lower-case letters, digits and _ and begin with a letter", 31),
]
PlainWord = Annotated[
    str,
    matching(r"[A-Za-z0-9_][A-Za-z0-9_.,:@/+=-]*", "letters, digits and . , : @ / + = _ - only"),
]
Constraint = Annotated[
    str,
    matching(
        r"[A-Za-z0-9_\[(][A-Za-z0-9_.,:|&*()\[\]=-]*",
        "feature names joined with & | , * ( ) [ ] and no blanks",
    ),
]
Address = Annotated[
    str, matching(r"[A-Za-z0-9_.+-]+(@[A-Za-z0-9.-]+)?", "a user name or a mail address")
]
ListenAddress = Annotated[
    str,
    matching(
        r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]*):([0-9]{1,5})",
        "ADDRESS:PORT, such as 127.0.0.1:0; port 0 takes a free one",
    ),
    Checked(_port),
]
ModuleName = Annotated[
    str, matching(r"[A-Za-z0-9_][A-Za-z0-9_./+@:=~-]*", "a module's name such as cuda/12.4")
]
Directive = Annotated[str, matching(rf"{LONG_OPTION}(={SBATCH_VALUE}+)?", _OPTION_FORM, 512)]
MoreOptions = Annotated[tuple[Directive, ...], Entries(), Checked(_extra)]
VariableName = Annotated[
    str,
    matching(r"[A-Za-z_][A-Za-z0-9_]*", "a variable's name: letters, digits and _"),
    Checked(_not_reserved),
]


def _gpus(value: object) -> Gpus:
    return value if isinstance(value, Gpus) else parse_gpus(value)  # a default of a profile


_GPU_FORMS = {"anyOf": [_INTEGER, _TEXT, {"type": "array", "items": INTEGER_OR_TEXT}]}
GpuRequest = Annotated[Gpus, Unit(_gpus, lambda gpus: str(gpus) or "0", _GPU_FORMS)]
Memory = Annotated[int, Unit(parse_size_mib, size_text, INTEGER_OR_TEXT)]  # MiB
NodeMemory = Annotated[int, Unit(parse_node_memory, node_memory_text, INTEGER_OR_TEXT)]  # MiB
Seconds = Annotated[int, Unit(parse_time, format_time, INTEGER_OR_TEXT)]
