"""Values of a site profile made from Slurm's, as far as the profile's model accepts them."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from hpml_orchestrator.spec import text, values
from hpml_orchestrator.spec.job import MAX_LIST

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hpml_orchestrator.scheduler.cluster import Gres

__all__ = ["count", "duration", "first_few", "fits", "gpus", "memory", "names", "release"]

_MAX_COUNT = 10_000_000
_MAX_MIB = 1024**3
_MAX_SECONDS = 3_650 * 86_400
_MAX_GPUS = 9999
_SHOWN = 8


@cache
def _adapter(kind: str) -> TypeAdapter[Any]:
    return TypeAdapter(getattr(text, kind))


def fits(kind: str, value: str) -> bool:
    """Whether a text is of a type of `hpml_orchestrator.spec.text`, such as `PlainWord`."""
    try:
        _adapter(kind).validate_python(value)
        value.encode("utf-8")
    except (UnicodeEncodeError, ValidationError):
        return False
    return True


def count(number: int | None) -> int | None:
    """Return a number that a profile accepts, else None."""
    return number if number is not None and 0 <= number <= _MAX_COUNT else None


def memory(mebibytes: int | None) -> str | None:
    """Return an amount of memory, such as `512G`; None for zero and what no node has."""
    if mebibytes is None or not 0 < mebibytes <= _MAX_MIB:
        return None
    return values.size_text(mebibytes)


def duration(seconds: int | None) -> str | None:
    """Return a time limit; `unlimited` for none and for more than ten years, None for zero."""
    if seconds is None or seconds > _MAX_SECONDS:
        return "unlimited"
    return values.format_time(seconds) if seconds > 0 else None


def gpus(listed: Sequence[Gres]) -> tuple[str, bool]:
    """Return GPUs as a job file names them, and whether their types could be kept."""
    totals: dict[str, int] = {}
    for gres in listed:
        totals[gres.kind] = totals.get(gres.kind, 0) + gres.count
    typed = ",".join(f"{kind}:{number}" if kind else str(number) for kind, number in totals.items())
    try:
        return str(values.parse_gpus(typed)), True
    except ValueError:
        return str(min(sum(totals.values()), _MAX_GPUS)), False


def names(listed: Iterable[str], kind: str = "PlainWord") -> tuple[list[str], list[str]]:
    """Return the names that a profile can hold, and the others."""
    good: list[str] = []
    bad: list[str] = []
    for name in listed:
        (good if len(good) < MAX_LIST and fits(kind, name) else bad).append(name)
    return good, bad


def release(version: Sequence[int]) -> str:
    """Return Slurm's version as Slurm writes it.

    >>> release((22, 5, 8))
    '22.05.8'
    """
    return ".".join(
        f"{part:02d}" if index == 1 else str(part) for index, part in enumerate(version)
    )


def first_few(listed: Sequence[str], most: int = _SHOWN) -> str:
    """Return the first few of many names.

    >>> first_few(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more
