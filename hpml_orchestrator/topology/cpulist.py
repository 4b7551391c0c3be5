"""CPU sets in the kernel's formats: lists such as `0-3,8` and masks such as `ff,00000000`.

A separate module without imports, because hpml-bind loads it once per rank.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

CPUS_MAX = 65_536
"""Exclusive limit of CPU numbers (the kernel's is 8192); rejects ranges such as `0-4000000000`."""

_WORD_DIGITS = 8  # a word of a mask has 32 bits
_NUMBER_DIGITS = 9
_SHOWN = 60


def parse_list(text: str) -> tuple[int, ...]:
    """Return the numbers of a list in the kernel's format, ascending, each once.

    Raises:
        ValueError: the text is not such a list, or a number is too large.

    >>> parse_list("0-2,8"), parse_list("")
    ((0, 1, 2, 8), ())
    """
    numbers: set[int] = set()
    for part in text.strip().split(",") if text.strip() else ():
        first, dash, last = part.strip().partition("-")
        if not _is_number(first) or (dash and not _is_number(last)):
            raise ValueError(f"not a list of CPUs: {text.strip()[:_SHOWN]!r}")
        begin, end = int(first), int(last or first)
        if not begin <= end < CPUS_MAX:
            raise ValueError(f"not a range of CPUs: {part.strip()!r}")
        numbers.update(range(begin, end + 1))
    return tuple(sorted(numbers))


def parse_mask(text: str) -> tuple[int, ...]:
    """Return the numbers in a mask: 32-bit hexadecimal words, highest first, separated by commas.

    As hwloc writes it, a word may be empty (0) or start with `0x`.

    Raises:
        ValueError: the text is not such a mask, or a number is too large.

    >>> parse_mask("1,00000003"), parse_mask("0x00000003,,0x1")
    ((0, 1, 32), (0, 64, 65))
    """
    words = [word.strip().lower().removeprefix("0x") for word in text.strip().split(",")]
    # A single word may be longer than 32 bits; of several words each has 32 bits.
    longest = CPUS_MAX // 4 if len(words) == 1 else _WORD_DIGITS
    value = 0
    for word in words:
        if len(word) > longest or word.strip("0123456789abcdef") or len(words) * 32 > CPUS_MAX:
            raise ValueError(f"not a mask of CPUs: {text.strip()[:_SHOWN]!r}")
        value = (value << 32) | int(word or "0", 16)
    return tuple(number for number, bit in enumerate(bin(value)[:1:-1]) if bit == "1")


def format_list(numbers: Iterable[int]) -> str:
    """Return numbers as a list in the kernel's format.

    >>> format_list([8, 2, 1, 0])
    '0-2,8'
    """
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _NUMBER_DIGITS
