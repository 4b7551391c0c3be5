"""Units of values in jobs and in Slurm's output, and constraints on the fields of a job."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MIB = 1024**2
_DAY, _HOUR, _MINUTE = 86_400, 3_600, 60
_MAX_SECONDS = 3_650 * _DAY
_MAX_BYTES = 1024**5
_MAX_COUNT = 9_999_999

_SLURM_FORMS = "minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS"
TIME_FORMS = f"2h, 90m, 1d12h, or {_SLURM_FORMS}"
_SIZE_FORMS = "must be a size such as 500M, 64G or 1T (a bare number is MiB)"
_GPU_FORMS = (
    "must be a number of GPUs per node, with a type such as a100:4 or a MIG profile such as "
    "1g.10gb:2"
)
_NO_LIMIT = frozenset({"unlimited", "infinite", "-1"})

_CLOCK = re.compile(
    r"(?:(\d{1,9})-)?(\d{1,12})(?::(\d{1,9}))?(?::(\d{1,9}))?(\.\d{1,9})?", re.ASCII
)
_SPAN = re.compile(r"(?:\d{1,9}(?:\.\d{1,6})?[smhdw])+", re.ASCII)
_SPAN_SECONDS = {"s": 1, "m": _MINUTE, "h": _HOUR, "d": _DAY, "w": 7 * _DAY}
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}
_WRITTEN_SIZE = re.compile(r"(\d{1,15})\s*(?:([KMGT])(?:i?B)?)?", re.IGNORECASE | re.ASCII)
# sacct adds c to memory per CPU, n to memory per node, ? to estimates
_PRINTED_SIZE = re.compile(
    r"(\d{1,20}(?:\.\d{1,20})?)([KMGTPE]?)(?:i?B)?[cn?]?", re.ASCII | re.IGNORECASE
)
# NO_VAL64 and INFINITE64 are just below 2**64, NO_VAL and INFINITE just below 2**32
_UNSET = 2**63
_UNSET_32 = frozenset({2**32 - 1, 2**32 - 2})

# A type or MIG profile with an optional count, or only a count. A type that begins with a digit,
# such as 2080ti or 3090, needs a count to be distinguishable from one.
_GPU = re.compile(
    r"(?:([A-Za-z][\w.+-]{0,63}|\d{1,2}g\.[\w.+]{1,60})(?::(\d{1,4}))?"
    r"|(\d[\w.+-]{2,63}):(\d{1,4})|(\d{1,4}))",
    re.ASCII,
)


def read_seconds(text: str, *, bare: int = _MINUTE) -> float | None:
    """Return the seconds in a time span; None for no limit and for other text.

    Args:
        text: such as `1-02:03:04`, `03:04` or `04.123`.
        bare: seconds per unit for a number without a colon.

    >>> read_seconds("1-00:00:00"), read_seconds("30:00"), read_seconds("UNLIMITED")
    (86400.0, 1800.0, None)
    >>> read_seconds("00:01.250"), read_seconds("7", bare=1)
    (1.25, 7.0)
    """
    match = _CLOCK.fullmatch(text.strip())
    if not match:
        return None
    days, *fields, fraction = match.groups()
    first, second, third = (int(field or 0) for field in fields)
    if days is not None:
        seconds = int(days) * _DAY + first * _HOUR + second * _MINUTE + third
    elif fields[2] is not None:
        seconds = first * _HOUR + second * _MINUTE + third
    elif fields[1] is not None:
        seconds = first * _MINUTE + second
    # In some places Slurm prints NO_VAL and INFINITE as plain numbers; as minutes they would be
    # 8,000 years.
    elif first in _UNSET_32:
        return None
    else:
        seconds = first * (1 if fraction else bare)
    return seconds + float(fraction or 0)


def read_span(text: str) -> float | None:
    """Return the seconds in a time with units, each at most once; None for other text.

    >>> read_span("90s"), read_span("1d12h"), read_span("1.5h"), read_span("90")
    (90.0, 129600.0, 5400.0, None)
    """
    text = text.strip()
    parts = re.findall(r"([\d.]+)([a-z])", text)
    units = [unit for _, unit in parts]
    if not _SPAN.fullmatch(text) or len({*units}) < len(units):
        return None
    return sum(float(number) * _SPAN_SECONDS[unit] for number, unit in parts)


def parse_time(value: object) -> int:
    """Return the seconds in a time limit: `2h`, or Slurm's formats, in which `30` means `30:00`.

    Raises:
        ValueError: the format is unknown, or the limit is zero or over ten years.

    >>> parse_time("10:00"), parse_time("1-0"), parse_time(90), parse_time("1h30m")
    (600, 86400, 5400, 5400)
    """
    seconds = None
    if not isinstance(value, bool) and isinstance(value, (int, str)):
        text = str(value)
        seconds = read_span(text)
        if seconds is None and "." not in text:
            seconds = read_seconds(text)
    if seconds is None:
        raise ValueError(f"must be a time limit: {TIME_FORMS}")
    if not 0 < seconds <= _MAX_SECONDS:
        raise ValueError("must be more than zero and at most ten years")
    return math.ceil(seconds)


def parse_time_limit(text: str) -> int | None:
    """Return the seconds in `sbatch --time`; None for `UNLIMITED`, `INFINITE`, -1 and 0 (no limit).

    Raises:
        ValueError: the format is unknown.

    >>> parse_time_limit("1-12"), parse_time_limit("90"), parse_time_limit("UNLIMITED")
    (129600, 5400, None)
    """
    if text.strip().lower() in _NO_LIMIT or read_seconds(text) == 0:
        return None
    # `2h` is hpml's own format: sbatch would refuse it, so refuse it in scripts and directives.
    if read_span(text) is not None:
        raise ValueError(f"must be a time limit of sbatch: {_SLURM_FORMS}")
    return parse_time(text)


def format_time(seconds: int) -> str:
    """Return a time limit as Slurm prints it, `[D-]HH:MM:SS`.

    >>> format_time(90061)
    '1-01:01:01'
    """
    days, rest = divmod(seconds, _DAY)
    hours, rest = divmod(rest, _HOUR)
    minutes, rest = divmod(rest, _MINUTE)
    clock = f"{hours:02d}:{minutes:02d}:{rest:02d}"
    return f"{days}-{clock}" if days else clock


def read_bytes(text: str, unit: str = "M") -> int | None:
    """Return the bytes in a size; None for no limit and for other text.

    Args:
        text: such as `62.50G`, `1000Mc` or `16000`.
        unit: of a number without a unit; empty for bytes.

    >>> read_bytes("1.5K"), read_bytes("2"), read_bytes("0", ""), read_bytes("n/a")
    (1536, 2097152, 0, None)
    """
    match = _PRINTED_SIZE.fullmatch(text.strip())
    if not match:
        return None
    value = float(match[1])
    if value >= _UNSET or int(value) in _UNSET_32:
        return None
    return int(value * 1024 ** _POWERS[(match[2] or unit).upper()])


def _written_bytes(value: object) -> int:
    match = None
    if isinstance(value, (int, str)) and not isinstance(value, bool):
        match = _WRITTEN_SIZE.fullmatch(str(value).strip())
    if not match:
        raise ValueError(_SIZE_FORMS)
    return int(match[1]) * int(1024 ** _POWERS[(match[2] or "M").upper()])


def parse_bytes(value: object) -> int:
    """Return the bytes in a size in Slurm's format: MiB, or with K, M, G or T.

    Raises:
        ValueError: it is not a size, zero, or over 1 PiB.

    >>> parse_bytes("8G"), parse_bytes(512)
    (8589934592, 536870912)
    """
    size = _written_bytes(value)
    if not 0 < size <= _MAX_BYTES:
        raise ValueError("must be more than zero and at most 1024T")
    return size


def parse_mebibytes(text: str) -> int:
    """Return the MiB in `sbatch --mem`, rounded up; 0 means all of the node's memory.

    Raises:
        ValueError: it is not a size.

    >>> parse_mebibytes("2G"), parse_mebibytes("512"), parse_mebibytes("1K"), parse_mebibytes("0")
    (2048, 512, 1, 0)
    """
    return -(-_written_bytes(text) // MIB)


def parse_size_mib(value: object) -> int:
    """Return the MiB in a size from a user, rounded up.

    Raises:
        ValueError: it is not a size, zero, or over 1 PiB.

    >>> parse_size_mib("2G"), parse_size_mib("1K"), parse_size_mib(512)
    (2048, 1, 512)
    """
    return -(-parse_bytes(value) // MIB)


def size_text(mebibytes: int) -> str:
    """Return MiB in the largest unit with a whole number.

    >>> size_text(8192), size_text(9000), size_text(2 * 1024**2)
    ('8G', '9000M', '2T')
    """
    for unit, size in (("T", 1024**2), ("G", 1024)):
        if mebibytes and mebibytes % size == 0:
            return f"{mebibytes // size}{unit}"
    return f"{mebibytes}M"


ALL_MEMORY = 0
"""MiB of a job that requests all memory of its nodes, as in `sbatch --mem=0`."""


def parse_node_memory(value: object) -> int:
    """Return the MiB in a user's memory per node; ALL_MEMORY for `all`.

    Raises:
        ValueError: it is not a size, zero, or over 1 PiB.

    >>> parse_node_memory("64G"), parse_node_memory("all")
    (65536, 0)
    """
    try:
        return ALL_MEMORY if value == "all" else parse_size_mib(value)
    except ValueError as error:
        raise ValueError(f"{error}, or `all` of a node's memory") from None


def node_memory_text(mebibytes: int) -> str:
    """Return memory per node as in a job file.

    >>> node_memory_text(65536), node_memory_text(0)
    ('64G', 'all')
    """
    return "all" if mebibytes == ALL_MEMORY else size_text(mebibytes)


def read_count(text: str) -> int | None:
    """Return a count, in which K means 1024; None for no limit and for other text.

    >>> read_count("4K"), read_count("UNLIMITED"), read_count("4294967295")
    (4096, None, None)
    """
    return read_bytes(text, "")


def parse_count(text: str) -> int:
    """Return a number between 1 and 9,999,999.

    Raises:
        ValueError: it is not such a number.
    """
    stripped = text.strip()
    if not re.fullmatch(r"\d{1,20}", stripped, re.ASCII) or not 0 < int(stripped) <= _MAX_COUNT:
        raise ValueError(f"must be a number from 1 to {_MAX_COUNT}")
    return int(stripped)


def split_list(text: str) -> Iterator[str]:
    """Yield the parts between commas outside brackets.

    >>> list(split_list("gpu:2(IDX:0,3),node[1,3]"))
    ['gpu:2(IDX:0,3)', 'node[1,3]']
    """
    depth, begin = 0, 0
    for place, char in enumerate(text):
        if char in "([":
            depth += 1
        elif char in ")]":
            depth = max(depth - 1, 0)
        elif char == "," and not depth:
            yield text[begin:place]
            begin = place + 1
    yield text[begin:]


def read_gres(text: str) -> list[tuple[str, str, int]]:
    """Return (name, type, count) of generic resources, adding up equal types.

    Accept both Slurm's output, `gpu:a100:4(S:0-1)`, and values of `--gres`, `gpu`, `gres/gpu=2`.
    Slurm up to 25.11 prints `(null)` for a missing type.

    >>> read_gres("gpu:a100:4(S:0-1),gpu:2,craynetwork:no_consume:4K")
    [('gpu', 'a100', 4), ('gpu', '', 2), ('craynetwork', '', 4096)]
    >>> read_gres("gres:gpu"), read_gres("gpu:(null):3(IDX:0-2)"), read_gres("(null)")
    ([('gpu', '', 1)], [('gpu', '', 3)], [])
    """
    counts: dict[tuple[str, str], int] = {}
    for part in split_list(text):
        entry = part.replace("(null)", "").partition("(")[0].strip()
        entry = entry.removeprefix("gres/").removeprefix("gres:")
        name, *rest = entry.replace("=", ":").split(":")
        if name.lower() in {"", "null", "none", "n/a"}:
            continue
        rest = [word for word in rest if word != "no_consume"]
        number = read_count(rest[-1]) if rest else None
        kind = ":".join(rest if number is None else rest[:-1])
        counts[name, kind] = counts.get((name, kind), 0) + (1 if number is None else number)
    return [(name, kind, count) for (name, kind), count in counts.items()]


@dataclass(frozen=True)
class Gpus:
    """GPUs of one node as `(type, count)` pairs; an empty type means any."""

    kinds: tuple[tuple[str, int], ...]

    @property
    def count(self) -> int:
        """Number of GPUs of the node."""
        return sum(number for _, number in self.kinds)

    def __str__(self) -> str:
        return ",".join(f"{kind}:{number}" if kind else str(number) for kind, number in self.kinds)


def parse_gpus(value: object) -> Gpus:
    """Return the GPUs of a node in `4`, `a100:4`, `1g.10gb:2`, or a list of these.

    Raises:
        ValueError: an entry has a different form.

    >>> str(parse_gpus("a100:2,v100:1")), parse_gpus(4).count
    ('a100:2,v100:1', 4)
    """
    if isinstance(value, bool) or not isinstance(value, (int, str, list)):
        raise ValueError(_GPU_FORMS)  # noqa: TRY004 - pydantic wants ValueError
    entries = value if isinstance(value, list) else str(value).split(",")
    kinds: dict[str, int] = {}
    for entry in entries:
        match = _GPU.fullmatch(str(entry))
        if isinstance(entry, bool) or not match:
            raise ValueError(_GPU_FORMS)
        kind, number, digits, its_number, alone = match.groups()
        name = kind or digits or ""
        if name in kinds:
            raise ValueError("names one type of GPU twice")
        kinds[name] = int(number or its_number or alone or 1)
    if 0 in kinds.values() and len(kinds) > 1:
        raise ValueError("asks for 0 of one type: leave that type out")
    return Gpus(tuple((kind, number) for kind, number in kinds.items() if number))


def parse_gpu_option(text: str) -> Gpus:
    """Return the GPUs in `--gpus` and similar options, `[TYPE:]NUMBER[,…]`, or in `--gres`.

    Raises:
        ValueError: a part has no number.

    >>> str(parse_gpu_option("a100:2,1")), str(parse_gpu_option("gres:gpu:a100:2,lustre:1"))
    ('a100:2,1', 'a100:2')
    """
    if re.search(r"(^|[,:/])gpu\b", text):
        return Gpus(tuple((kind, count) for name, kind, count in read_gres(text) if name == "gpu"))
    kinds = []
    for part in text.split(","):
        kind, _, number = part.rpartition(":")
        if not re.fullmatch(r"\d{1,5}", number, re.ASCII):
            raise ValueError(f"must be [TYPE:]NUMBER of GPUs, not {part}")
        kinds.append((kind, int(number)))
    return Gpus(tuple(kinds))


# Constraints on the fields of a job: metadata for `Annotated`, and text types with patterns.
#
# On the login node pydantic builds its schemas from them. Nodes use the same classes without
# pydantic: `pydantic_core` is imported only to build a schema.
#
# Scripts quote all values; these patterns are an additional protection. Quoting in `#SBATCH` lines
# differs between Slurm versions, so values there may only contain characters without a special
# meaning for sbatch and shells.

if TYPE_CHECKING:
    Make = Callable[[Any], Any]
    """Convert a value."""

MAX_LIST = 4096
"""Maximum number of entries in a list or mapping."""

MAX_ARGUMENT_BYTES = 131_071
"""Maximum length of an argument or NAME=value on Linux (MAX_ARG_STRLEN - 1)."""

MAX_PATH_BYTES = 4095
_MAX_PORT = 65_535


@dataclass(frozen=True, eq=False)
class Checked:
    """A constraint: a function that checks and may change a value of the right type.

    Attributes:
        check: returns the value, or raises ValueError with a description of valid values.
    """

    check: Make

    def __get_pydantic_core_schema__(self, source: object, handler: Make) -> object:
        from pydantic_core.core_schema import (  # noqa: PLC0415 - not on nodes
            no_info_after_validator_function,
        )

        return no_info_after_validator_function(self.check, handler(source))


@dataclass(frozen=True, eq=False)
class Prepared:
    """A constraint: a function that converts a value before its type is checked.

    Attributes:
        prepare: returns the value, or raises ValueError.
        accepts: JSON Schema of the accepted values; None for that of the type.
        also: JSON Schema of values accepted in addition to those of the type.
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
    """A number that is written as text with a unit.

    Attributes:
        parse: returns the number in text from a user or a record, or raises ValueError.
        written: returns the text of a number.
        accepts: JSON Schema of the accepted text.
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
    """A constraint: an integer in a range, not a text or boolean."""

    low: int
    high: int

    def __get_pydantic_core_schema__(self, source: object, handler: Make) -> object:
        from pydantic_core.core_schema import int_schema  # noqa: PLC0415 - not on nodes

        return int_schema(strict=True, ge=self.low, le=self.high)


@dataclass(frozen=True, eq=False)
class YesOrNo:
    """A constraint: true or false, not a text or number."""

    def __get_pydantic_core_schema__(self, source: object, handler: Make) -> object:
        from pydantic_core.core_schema import bool_schema  # noqa: PLC0415 - not on nodes

        return bool_schema(strict=True)


@dataclass(frozen=True, eq=False)
class Entries:
    """A constraint: the number of entries in a list or mapping."""

    most: int = MAX_LIST
    least: int = 0

    def __get_pydantic_core_schema__(self, source: object, handler: Make) -> object:
        least = {"min_length": self.least} if self.least else {}
        return {**handler(source), "max_length": self.most, **least}


def _unicode(value: str) -> str:
    if "\0" in value:
        raise ValueError("must not hold a NUL character")
    try:  # JSON escapes characters beyond U+FFFF as surrogate pairs, which YAML does not combine
        return value.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError as error:
        raise ValueError("must be valid Unicode text") from error


def at_most(limit: int, advice: str) -> Checked:
    """Accept Unicode text up to a number of bytes."""

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
        pattern: a regular expression for the whole text.
        description: of valid text, for the error message.
        longest: maximum number of characters.
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
    """Convert numbers to text; refuse booleans, because their spelling is lost."""
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
    """Refuse text that a program would parse as an option."""
    if value.startswith("-"):
        raise ValueError("must not begin with a dash")
    return value


# SLURM_ or HPML_ variables in a job file would contradict those that Slurm and hpml set.
_RESERVED_PREFIXES = tuple("SLURM_ SLURMD_ SBATCH_ SRUN_ HPML_ PMI OMPI_ PRTE_ BASH".split())
_RESERVED = frozenset(
    # these are special or read-only in shells
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
# Settings of Open MPI are allowed; PMIX and PRTE are parts of version 5.
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


# GPUs have a field of their own; generic resources may also be file system licences
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
"""Options of sbatch that `extra` must not contain, with the reason."""


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
    return value if isinstance(value, Gpus) else parse_gpus(value)  # default from a site profile


_GPU_SCHEMA = {"anyOf": [_INTEGER, _TEXT, {"type": "array", "items": INTEGER_OR_TEXT}]}
GpuRequest = Annotated[Gpus, Unit(_gpus, lambda gpus: str(gpus) or "0", _GPU_SCHEMA)]
Memory = Annotated[int, Unit(parse_size_mib, size_text, INTEGER_OR_TEXT)]  # MiB
NodeMemory = Annotated[int, Unit(parse_node_memory, node_memory_text, INTEGER_OR_TEXT)]  # MiB
Seconds = Annotated[int, Unit(parse_time, format_time, INTEGER_OR_TEXT)]
