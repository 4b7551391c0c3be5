"""Types of fields, each text with the one pattern that it must match, and the base of all models.

Values are shell-quoted wherever they reach a script; these patterns come before that. What ends in
an `#SBATCH` line (which no quoting protects alike in every Slurm version) is held to characters
that neither sbatch nor a shell gives a meaning to.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    StrictInt,
)

from hpml_orchestrator.errors import nearest
from hpml_orchestrator.spec import values
from hpml_orchestrator.spec.address import web_address

MAX_LIST = 4096
"""Most entries of a list or mapping."""

_NOT_DOUBLED = r"\{(?!(?<=\{\{)[\w:.-]+\}\})"
PLACEHOLDER = re.compile(
    _NOT_DOUBLED + r"((?:stage|run|point|local|shm|array|job|checkpoint|env)\.[A-Za-z0-9_]+)\}"
)
"""What arguments and variables refer to data, the run, the job, a task, a point of a sweep and the
job's environment by; with doubled braces it is text."""
BRACES = re.compile(
    _NOT_DOUBLED
    + r"\s*((?:stage|run|point|local|shm|array|job|checkpoint|env)[._][^{}\s'\"]+"
    + r"|[A-Za-z][\w:.-]*)\s*\}",
    re.ASCII,
)
"""A word in braces, which may be a misspelt placeholder."""
FIXED_PLACEHOLDERS = (
    "run.dir",
    "run.id",
    "job.id",
    "array.index",
    "local.dir",
    "shm.dir",
    "checkpoint.dir",
)
"""Those that do not end in a name of the user's."""

_DOUBLED = re.compile(r"\{(\{([A-Za-z][\w:.-]*)\})\}", re.ASCII)
_NAMED = re.compile(
    r"(?:stages?|points?)[._:-]\w+|env[.:].+|(?:stage|run|point|local|shm|array|job|checkpoint)[._]\w*\W.*"
    r"|stage|run|array|local|shm|job",
    re.IGNORECASE,
)
_MISSPELT = 0.8  # similarity; high, so that {epoch}, {index} and other words remain text

MAX_ARGUMENT_BYTES = 131_071
"""Longest single argument or NAME=value that Linux hands to a process (MAX_ARG_STRLEN - 1)."""

MAX_PATH_BYTES = 4095
_MAX_PORT = 65_535

# A job's own SLURM_ or HPML_ variables would contradict those that Slurm and hpml set in the job.
_RESERVED_PREFIXES = tuple("SLURM_ SLURMD_ SBATCH_ SRUN_ HPML_ PMI OMPI_ PRTE_ BASH".split())
_RESERVED = frozenset(
    # a shell gives these a special meaning, or refuses to set them
    "ENV IFS PS4 PROMPT_COMMAND SHELLOPTS UID EUID PPID GROUPS FUNCNAME DIRSTACK GLOBIGNORE "
    "POSIXLY_CORRECT CDPATH LINENO SECONDS RANDOM SRANDOM EPOCHSECONDS EPOCHREALTIME OPTARG OPTIND "
    "OPTERR PIPESTATUS PWD OLDPWD SHLVL TIMEFORMAT HISTCMD COMP_WORDBREAKS MAPFILE REPLY COPROC "
    "_".split()
)
_OF_LAUNCHERS = frozenset(
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK NODE_RANK MASTER_ADDR MASTER_PORT "
    "PET_NODE_RANK HOROVOD_RANK HOROVOD_SIZE HOROVOD_LOCAL_RANK HOROVOD_LOCAL_SIZE "
    "HOROVOD_CROSS_RANK HOROVOD_CROSS_SIZE".split()
)
NODE_DIRECTORIES = frozenset(
    "TMPDIR SLURM_TMPDIR LOCAL_SCRATCH LOCALSCRATCH LSCRATCH JOBFS".split()
)
"""Variables that name a directory on the node's own disk when the job starts."""
PER_RANK = _OF_LAUNCHERS | frozenset(
    "SLURM_PROCID SLURM_LOCALID SLURM_NODEID OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_LOCAL_RANK "
    "PMI_RANK PMIX_RANK".split()
)
"""Variables that only the ranks' own processes find: each rank may have another value."""
# Open MPI's own settings are the user's; PMIX and PRTE are parts of version 5.
_OPEN_MPI_SETTINGS = ("OMPI_MCA_", "PMIX_MCA_", "PRTE_MCA_", "OMPI_ALLOW_RUN_AS_ROOT")


def intended_placeholder(word: str, known: Iterable[str] = ()) -> str | None:
    """Return the placeholder that a word in braces was probably meant to be.

    Args:
        word: what is between the braces.
        known: placeholders with names of the user's, such as `stage.digits`.

    Returns:
        None for a word that resembles no placeholder; empty if no known one is similar.

    >>> intended_placeholder("run_dir"), intended_placeholder("stage:set", ["stage.set"])
    ('run.dir', 'stage.set')
    >>> intended_placeholder("epoch"), intended_placeholder("node.name")
    (None, '')
    """
    plain = {re.sub(r"\W|_", "", name): name for name in (*FIXED_PLACEHOLDERS, *known)}
    meant = plain.get(nearest(re.sub(r"\W|_", "", word), plain, at_least=_MISSPELT), "")
    is_like_one = meant or _NAMED.fullmatch(word) or re.fullmatch(r"\w+\.\w+", word)
    return meant if is_like_one else None


def unescaped(text: str) -> str:
    """Return text with single braces in place of doubled ones, which escape a placeholder.

    >>> unescaped("{{run.dir}} {{epoch}} {'a': {'b': 1}}")
    "{run.dir} {{epoch}} {'a': {'b': 1}}"
    """
    return _DOUBLED.sub(
        lambda match: match[0] if intended_placeholder(match[2]) is None else match[1], text
    )


def _unicode(value: str) -> str:
    if "\0" in value:
        raise ValueError("must not hold a NUL character")
    try:  # JSON escapes characters beyond U+FFFF as surrogate pairs, which YAML does not join
        return value.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError as error:
        raise ValueError("must be valid Unicode text") from error


def _at_most(limit: int, advice: str) -> AfterValidator:
    """Accept Unicode text of at most that many bytes."""

    def check(value: str) -> str:
        value = _unicode(value)
        size = len(value.encode())
        if size > limit:
            raise ValueError(f"is {size} bytes long; {advice}")
        return value

    return AfterValidator(check)


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


def _not_reserved(value: str) -> str:
    reserved = value in _RESERVED | _OF_LAUNCHERS or value.upper().startswith(_RESERVED_PREFIXES)
    if reserved and not value.startswith(_OPEN_MPI_SETTINGS):
        raise ValueError("is set by the shell, Slurm, the launcher or hpml; choose another name")
    return value


def _port(value: str) -> str:
    if int(value.rpartition(":")[2]) > _MAX_PORT:
        raise ValueError(f"must have a port of at most {_MAX_PORT}")
    return value


def _web_address(value: str) -> str:
    if web_address(value) is None:
        raise ValueError("must have a host, an IPv6 address in brackets, and a port up to 65535")
    return value


def _matching(pattern: str, description: str, longest: int = 256) -> AfterValidator:
    compiled = re.compile(pattern)

    def check(value: str) -> str:
        if len(value) > longest:
            raise ValueError(f"is {len(value)} characters long; at most {longest} are allowed")
        if not compiled.fullmatch(value):
            raise ValueError(f"must be {description}")
        return value

    return AfterValidator(check)


_VALUE = r"[A-Za-z0-9_.,:@/+=%*()\[\]|&-]"
_LONG_OPTION = r"--[a-z][a-z0-9-]*"
_JOB_NAME = r"[A-Za-z0-9][A-Za-z0-9._+-]*"
_NAME_FORM = "letters, digits and . _ + - and begin with a letter or digit"
_AFTER_FORM = "a run as `hpml list` names it, or one behind ok:, any: or notok:"
_OPTION_FORM = "one long sbatch option such as --reservation=course, without blanks or quotes"
_PATH_FORM = "an absolute path, or a variable and a path below it, such as $LOCAL_SCRATCH/data"
_TOO_LONG = (
    f"Linux passes at most {MAX_ARGUMENT_BYTES} in one argument: put it into a file and pass the "
    "file's path"
)

Argument = Annotated[
    str,
    BeforeValidator(_as_written, json_schema_input_type=str | float),
    _at_most(MAX_ARGUMENT_BYTES, _TOO_LONG),
]
PathText = Annotated[
    str,
    _at_most(MAX_PATH_BYTES, f"a path has at most {MAX_PATH_BYTES}"),
    AfterValidator(_not_empty),
]
ShellLines = Annotated[
    str,
    _at_most(MAX_ARGUMENT_BYTES, "put so much into a file, and `source` that"),
    AfterValidator(_shell_lines),
]
After = Annotated[
    str,
    BeforeValidator(_as_written, json_schema_input_type=str | int),
    _matching(rf"((ok|any|notok):)?{_JOB_NAME}", _AFTER_FORM),
]
JobName = Annotated[str, _matching(_JOB_NAME, _NAME_FORM, 64)]
StageName = Annotated[
    str,
    _matching(r"[a-z][a-z0-9_]*", "lower-case letters, digits and _ and begin with a letter", 31),
]
PlainWord = Annotated[
    str,
    _matching(r"[A-Za-z0-9_][A-Za-z0-9_.,:@/+=-]*", "letters, digits and . , : @ / + = _ - only"),
]
Constraint = Annotated[
    str,
    _matching(
        r"[A-Za-z0-9_\[(][A-Za-z0-9_.,:|&*()\[\]=-]*",
        "feature names joined with & | , * ( ) [ ] and no blanks",
    ),
]
Address = Annotated[
    str, _matching(r"[A-Za-z0-9_.+-]+(@[A-Za-z0-9.-]+)?", "a user name or a mail address")
]
ListenAddress = Annotated[
    str,
    _matching(
        r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]*):([0-9]{1,5})",
        "ADDRESS:PORT, such as 127.0.0.1:0; port 0 takes a free one",
    ),
    AfterValidator(_port),
]
ModuleName = Annotated[
    str, _matching(r"[A-Za-z0-9_][A-Za-z0-9_./+@:=~-]*", "a module's name such as cuda/12.4")
]
Directive = Annotated[str, _matching(rf"{_LONG_OPTION}(={_VALUE}+)?", _OPTION_FORM, 512)]
DirectiveValue = Annotated[
    str, _matching(rf"{_VALUE}*", "the value of an sbatch option, without blanks or quotes", 512)
]
Renamed = Annotated[
    str,
    _matching(
        rf"{_LONG_OPTION}(={_VALUE}*(\{{(value|item)\}})?{_VALUE}*)?",
        "one long sbatch option such as --gres=gpu:{value}",
        512,
    ),
]
OptionName = Annotated[
    str, _matching(r"[a-z][a-z0-9-]*", "a long sbatch option's name without dashes, such as mem")
]
Line = Annotated[str, _matching(r"[^\x00-\x1f\x7f]+", "one line of text", 1024)]
InterfaceName = Annotated[
    str, _matching(r"[A-Za-z0-9][A-Za-z0-9_.@-]*", "a network interface such as ib0", 64)
]
NodePath = Annotated[
    str,
    _matching(r"(/|\$[A-Za-z_][A-Za-z0-9_]*(/|$))[^\x00-\x1f\x7f]*", _PATH_FORM, MAX_PATH_BYTES),
]
WebAddress = Annotated[
    str,
    _matching(
        r"https?://[A-Za-z0-9.:\[\]-]+(/[A-Za-z0-9._~%/-]*)?",
        "an http or https address without user, password or query, such as "
        "https://grafana.example.org",
        512,
    ),
    AfterValidator(_web_address),
]
VariableName = Annotated[
    str,
    _matching(r"[A-Za-z_][A-Za-z0-9_]*", "a variable's name: letters, digits and _"),
    AfterValidator(_not_reserved),
]

Count = Annotated[StrictInt, Field(ge=0, le=10_000_000)]
PositiveInt = Annotated[StrictInt, Field(ge=1, le=1_000_000_000)]
GpuText = Annotated[
    str,
    BeforeValidator(
        lambda value: str(values.parse_gpus(value)) or "0",
        json_schema_input_type=int | str | list[int | str],
    ),
]
Memory = Annotated[
    int,  # MiB; the record has it as Slurm takes it, such as 2048M
    BeforeValidator(values.parse_size_mib, json_schema_input_type=int | str),
    PlainSerializer(lambda mebibytes: f"{mebibytes}M"),
]
TimeText = Annotated[
    str,
    BeforeValidator(
        lambda value: values.format_time(values.parse_time(value)),
        json_schema_input_type=int | str,
    ),
]


class Model(BaseModel):
    """Base of all models: unknown fields are refused, and nothing changes after validation.

    The docstring below a field is its description in the JSON Schema (`schema.py`).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)
