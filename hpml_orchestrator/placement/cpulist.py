"""The kernel's list format of CPU numbers, such as `0-7,64-71`.

Imports nothing: hpml-bind reads its CPUs through it.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["cpu_list", "cpu_numbers"]


def cpu_list(cpus: Iterable[int]) -> str:
    """Write CPU numbers as the kernel does: ascending, runs of neighbours as `first-last`.

    >>> cpu_list([9, 0, 1, 2, 64, 65])
    '0-2,9,64-65'
    >>> cpu_list([])
    ''
    """
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def cpu_numbers(text: str) -> tuple[int, ...]:
    """Read the kernel's list format; the numbers come back ascending, each once.

    Raises:
        ValueError: when a part is neither a number nor `first-last`.

    >>> cpu_numbers("0-2,9")
    (0, 1, 2, 9)
    """
    found: set[int] = set()
    for part in text.strip().split(",") if text.strip() else ():
        first, dash, last = part.strip().partition("-")
        if not (first.isdecimal() and (last.isdecimal() or not dash)):
            raise ValueError(f"not a list of CPU numbers: {text!r}")
        begin, end = int(first), int(last or first)
        if end < begin:
            raise ValueError(f"a range that runs backwards: {part!r}")
        found.update(range(begin, end + 1))
    return tuple(sorted(found))
