"""Quantities in a job file: time limits and sizes in Slurm's forms, GPUs as typed lists."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

__all__ = [
    "Gpus",
    "format_time",
    "parse_bytes",
    "parse_gpus",
    "parse_memory",
    "parse_time",
    "parse_time_limit",
    "size_text",
    "whole_mebibytes",
]

_DAY = 86_400
_HOUR = 3_600
_MINUTE = 60
_MAX_SECONDS = 3_650 * _DAY

TIME_FORMS = "minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS"

_UNITS = {"": 1024**2, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}
_MAX_BYTES = 1024**5

# a type or MIG profile with or without a count, or a count alone; a type that begins with a digit,
# such as 2080ti or 3090, needs its count to be told from one
_GPU = re.compile(
    r"(?:([A-Za-z][\w.+-]{0,63}|\d{1,2}g\.[\w.+]{1,60})(?::(\d{1,4}))?"
    r"|(\d[\w.+-]{2,63}):(\d{1,4})|(\d{1,4}))",
    re.ASCII,
)


def parse_time(value: str | int) -> int:
    """Return the seconds of a time limit in one of Slurm's forms: `30` and `30:00` are the same.

    Raises:
        ValueError: it is in none of the forms, zero, or over ten years.

    >>> parse_time("10:00"), parse_time("1-0"), parse_time(90)
    (600, 86400, 5400)
    """
    text = str(value).strip()
    match = re.fullmatch(r"(?:(\d{1,5})-)?(\d{1,8})(?::(\d{1,3}))?(?::(\d{1,3}))?", text, re.ASCII)
    if not match or isinstance(value, bool):
        raise ValueError(f"must be a time limit: {TIME_FORMS}")
    days, first, second, third = match.groups()
    if days is not None:
        seconds = int(days) * _DAY + int(first) * _HOUR
        seconds += int(second or 0) * _MINUTE + int(third or 0)
    elif third is not None:
        seconds = int(first) * _HOUR + int(second) * _MINUTE + int(third)
    elif second is not None:
        seconds = int(first) * _MINUTE + int(second)
    else:
        seconds = int(first) * _MINUTE
    if not 0 < seconds <= _MAX_SECONDS:
        raise ValueError("must be more than zero and at most ten years")
    return seconds


def parse_time_limit(text: str) -> int | None:
    """Return the seconds of Slurm's `--time` or of a limit that Slurm prints; None for no limit.

    Raises:
        ValueError: it is neither a time nor a word for no limit.

    >>> parse_time_limit("1-12"), parse_time_limit("UNLIMITED"), parse_time_limit("0:00")
    (129600, None, None)
    """
    if text.upper() in ("UNLIMITED", "INFINITE", "-1") or not text.strip("0:"):
        return None
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


def parse_bytes(value: str | int) -> int:
    """Return bytes of a size in Slurm's form: a number of MiB, or with K, M, G or T.

    Raises:
        ValueError: it is no such size, zero, or over 1 PiB.

    >>> parse_bytes("8G"), parse_bytes(512)
    (8589934592, 536870912)
    """
    text = str(value).strip()
    match = re.fullmatch(r"(\d{1,15})\s*(?:([KMGT])(?:i?B)?)?", text, re.IGNORECASE | re.ASCII)
    if not match or isinstance(value, bool):
        raise ValueError("must be a size such as 500M, 64G or 1T (a bare number is MiB)")
    size = int(match[1]) * _UNITS[(match[2] or "").upper()]
    if not 0 < size <= _MAX_BYTES:
        raise ValueError("must be more than zero and at most 1024T")
    return size


def parse_memory(text: str) -> int:
    """Return the MiB of Slurm's `--mem` and its like, rounded up; 0 stands for all memory.

    Raises:
        ValueError: it is no size.

    >>> parse_memory("2G"), parse_memory("1K"), parse_memory("0")
    (2048, 1, 0)
    """
    return -(-parse_bytes(text) // 1024**2) if text.strip("0") else 0


def whole_mebibytes(value: Any) -> str:
    """Return a size in whole MiB, as Slurm takes it.

    Raises:
        ValueError: it is no size.

    >>> whole_mebibytes("2G"), whole_mebibytes("1K")
    ('2048M', '1M')
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError("must be a size such as 500M, 64G or 1T (a bare number is MiB)")  # noqa: TRY004
    return f"{-(-parse_bytes(value) // 1024**2)}M"


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


def parse_gpus(value: str | int | list[str | int]) -> Gpus:
    """Return the GPUs of a node from `4`, `a100:4`, `1g.10gb:2`, or a list of such.

    Raises:
        ValueError: an entry is in none of these forms.

    >>> str(parse_gpus("a100:2,v100:1")), parse_gpus(4).count
    ('a100:2,v100:1', 4)
    """
    entries = value if isinstance(value, list) else str(value).split(",")
    kinds: list[tuple[str, int]] = []
    for entry in entries:
        match = _GPU.fullmatch(str(entry))
        if isinstance(entry, bool) or not match:
            raise ValueError(
                "must be a number of GPUs per node, with a type such as a100:4 "
                "or a MIG profile such as 1g.10gb:2"
            )
        kind, number, digits, its_number, alone = match.groups()
        kinds.append((kind or digits or "", int(number or its_number or alone or 1)))
    names = [kind for kind, _ in kinds]
    if len(set(names)) != len(names):
        raise ValueError("names one type of GPU twice")
    if any(number == 0 for _, number in kinds) and len(kinds) > 1:
        raise ValueError("asks for 0 of one type: leave that type out")
    return Gpus(tuple((kind, number) for kind, number in kinds if number))


def size_text(mebibytes: int) -> str:
    """Return an amount of memory as a job file says it.

    >>> size_text(8192), size_text(9000), size_text(2 * 1024**2)
    ('8G', '9000M', '2T')
    """
    for unit, size in (("T", 1024**2), ("G", 1024)):
        if mebibytes and mebibytes % size == 0:
            return f"{mebibytes // size}{unit}"
    return f"{mebibytes}M"
