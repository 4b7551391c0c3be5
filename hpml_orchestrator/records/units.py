"""Times, sizes, counts and GPUs in Slurm's forms: the one place that reads and writes them.

`parse_*` reads what a user wrote and raises ValueError, whose text describes the right form.
`read_*` reads what Slurm printed, and returns None for anything else.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

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
# sacct marks memory per CPU with c, per node with n, and an estimate with ?
_PRINTED_SIZE = re.compile(
    r"(\d{1,20}(?:\.\d{1,20})?)([KMGTPE]?)(?:i?B)?[cn?]?", re.ASCII | re.IGNORECASE
)
# NO_VAL64 and INFINITE64 lie just below 2**64, NO_VAL and INFINITE just below 2**32
_UNSET = 2**63
_UNSET_32 = frozenset({2**32 - 1, 2**32 - 2})

# A type or MIG profile with or without a count, or a count alone. A type that begins with a digit,
# such as 2080ti or 3090, needs a count, or it could not be told from one.
_GPU = re.compile(
    r"(?:([A-Za-z][\w.+-]{0,63}|\d{1,2}g\.[\w.+]{1,60})(?::(\d{1,4}))?"
    r"|(\d[\w.+-]{2,63}):(\d{1,4})|(\d{1,4}))",
    re.ASCII,
)


def read_seconds(text: str, *, bare: int = _MINUTE) -> float | None:
    """Return the seconds of a time span; None for no limit and for anything else.

    Args:
        text: such as `1-02:03:04`, `03:04` or `04.123`.
        bare: seconds per unit of a number without a colon.

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
    # Slurm prints NO_VAL and INFINITE as plain numbers in some places. As minutes they would be
    # 8,000 years.
    elif first in _UNSET_32:
        return None
    else:
        seconds = first * (1 if fraction else bare)
    return seconds + float(fraction or 0)


def read_span(text: str) -> float | None:
    """Return the seconds of a time with units, each used once; None for any other form.

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
    """Return the seconds of a time limit, `2h` or in one of Slurm's forms: `30` is `30:00`.

    Raises:
        ValueError: it is in none of the forms, zero, or over ten years.

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
    """Return the seconds of `sbatch --time`; None for no limit: `UNLIMITED`, `INFINITE`, -1 or 0.

    Raises:
        ValueError: it is in none of the forms.

    >>> parse_time_limit("1-12"), parse_time_limit("90"), parse_time_limit("UNLIMITED")
    (129600, 5400, None)
    """
    if text.strip().lower() in _NO_LIMIT or read_seconds(text) == 0:
        return None
    # `2h` is hpml's own form. sbatch would refuse it, so an imported script or a directive must not
    # pass with it.
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
    """Return the bytes of a size; None for no limit and for anything else.

    Args:
        text: such as `62.50G`, `1000Mc` or `16000`.
        unit: that of a bare number, empty for bytes.

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
    """Return bytes of a size in Slurm's form: a number of MiB, or with K, M, G or T.

    Raises:
        ValueError: it is not such a size, zero, or over 1 PiB.

    >>> parse_bytes("8G"), parse_bytes(512)
    (8589934592, 536870912)
    """
    size = _written_bytes(value)
    if not 0 < size <= _MAX_BYTES:
        raise ValueError("must be more than zero and at most 1024T")
    return size


def parse_mebibytes(text: str) -> int:
    """Return whole MiB of `sbatch --mem`, rounded up; 0 means all of the node's memory.

    Raises:
        ValueError: it is not a size.

    >>> parse_mebibytes("2G"), parse_mebibytes("512"), parse_mebibytes("1K"), parse_mebibytes("0")
    (2048, 512, 1, 0)
    """
    return -(-_written_bytes(text) // MIB)


def parse_size_mib(value: object) -> int:
    """Return whole MiB of a size that a user wrote, rounded up.

    Raises:
        ValueError: it is not a size, zero, or over 1 PiB.

    >>> parse_size_mib("2G"), parse_size_mib("1K"), parse_size_mib(512)
    (2048, 1, 512)
    """
    return -(-parse_bytes(value) // MIB)


def size_text(mebibytes: int) -> str:
    """Return MiB in the largest unit that is exact.

    >>> size_text(8192), size_text(9000), size_text(2 * 1024**2)
    ('8G', '9000M', '2T')
    """
    for unit, size in (("T", 1024**2), ("G", 1024)):
        if mebibytes and mebibytes % size == 0:
            return f"{mebibytes // size}{unit}"
    return f"{mebibytes}M"


ALL_MEMORY = 0
"""MiB of a job that takes all memory of its nodes, as `sbatch --mem=0`."""


def parse_node_memory(value: object) -> int:
    """Return MiB of a node's memory that a user wrote; ALL_MEMORY for `all`.

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
    """Return a node's memory as a job file has it.

    >>> node_memory_text(65536), node_memory_text(0)
    ('64G', 'all')
    """
    return "all" if mebibytes == ALL_MEMORY else size_text(mebibytes)


def read_count(text: str) -> int | None:
    """Return a number; None for no limit and for anything else; K is 1024.

    >>> read_count("4K"), read_count("UNLIMITED"), read_count("4294967295")
    (4096, None, None)
    """
    return read_bytes(text, "")


def parse_count(text: str) -> int:
    """Return a number above zero and below ten million.

    Raises:
        ValueError: it is none.
    """
    stripped = text.strip()
    if not re.fullmatch(r"\d{1,20}", stripped, re.ASCII) or not 0 < int(stripped) <= _MAX_COUNT:
        raise ValueError(f"must be a number from 1 to {_MAX_COUNT}")
    return int(stripped)


def split_list(text: str) -> Iterator[str]:
    """Yield the parts between commas that are in no brackets.

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
    """Return (name, type, count) of generic resources; a type that is named twice is added up.

    Both what Slurm prints, `gpu:a100:4(S:0-1)`, and what `--gres` takes, `gpu`, `gres/gpu=2`. Slurm
    up to 25.11 prints `(null)` for an absent type.

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
    """GPUs of one node: `(type, count)` pairs, an empty type meaning any."""

    kinds: tuple[tuple[str, int], ...]

    @property
    def count(self) -> int:
        """All GPUs of the node."""
        return sum(number for _, number in self.kinds)

    def __str__(self) -> str:
        return ",".join(f"{kind}:{number}" if kind else str(number) for kind, number in self.kinds)


def parse_gpus(value: object) -> Gpus:
    """Return the GPUs of a node from `4`, `a100:4`, `1g.10gb:2`, or a list of such.

    Raises:
        ValueError: an entry is in none of these forms.

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
    """Return the GPUs of `--gpus` and its kin, `[TYPE:]NUMBER[,…]`, or of the gpu part of `--gres`.

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
