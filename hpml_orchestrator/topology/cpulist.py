"""Sets of CPUs as the kernel writes them: lists such as `0-3,8` and masks such as `ff,00000000`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["CPUS_MAX", "format_list", "parse_list", "parse_mask"]

CPUS_MAX = 65_536
"""CPU numbers are below this; the kernel's own limit is 8192. Guards against `0-4000000000`."""

_WORD_DIGITS = 8
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def parse_list(text: str) -> tuple[int, ...]:
    """Return the numbers of a list in the kernel's format, in order.

    Raises:
        ValueError: it is no such list, or a number is too large.

    >>> parse_list("0-2,8")
    (0, 1, 2, 8)
    """
    found: set[int] = set()
    for part in text.strip().split(","):
        match = _RANGE.fullmatch(part.strip())
        if not match:
            if not text.strip():
                return ()
            raise ValueError(f"no list of CPUs: {text.strip()[:60]!r}")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < CPUS_MAX:
            raise ValueError(f"no range of CPUs: {part.strip()!r}")
        found.update(range(first, last + 1))
    return tuple(sorted(found))


def parse_mask(text: str) -> tuple[int, ...]:
    """Return the numbers of a mask: words of 32 bits in hexadecimal, the highest first, by comma.

    An empty word is 0 and `0x` may precede each, as hwloc writes them.

    Raises:
        ValueError: it is no such mask, or a number is too large.

    >>> parse_mask("1,00000003"), parse_mask("0x00000003,,0x1")
    ((0, 1, 32), (0, 64, 65))
    """
    words = text.strip().split(",")
    value = 0
    if len(words) * 32 > CPUS_MAX:
        raise ValueError("the mask of CPUs is too long")
    for word in words:
        digits = word.strip().lower()
        digits = digits.removeprefix("0x")
        if not re.fullmatch(r"[0-9a-f]*", digits):
            raise ValueError(f"no mask of CPUs: {text.strip()[:60]!r}")
        # A mask of one word may be longer than 32 bits; several are 32 bits each.
        if len(digits) > (CPUS_MAX // 4 if len(words) == 1 else _WORD_DIGITS):
            raise ValueError(f"no mask of CPUs: {text.strip()[:60]!r}")
        value = (value << 32) | int(digits or "0", 16)
    bits = bin(value)[:1:-1]
    return tuple(number for number, bit in enumerate(bits) if bit == "1")


def format_list(cpus: Iterable[int]) -> str:
    """Return numbers as a list in the kernel's format.

    >>> format_list([8, 2, 1, 0])
    '0-2,8'
    """
    ranges: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if ranges and ranges[-1][1] == cpu - 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
