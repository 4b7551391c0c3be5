"""Slurm's expressions for tasks of a job array: `2,4-9:2%3`, whole or cut short."""

from __future__ import annotations

import functools
import re

__all__ = ["MAX_INDEX", "covers", "parse_tasks"]

MAX_INDEX = 4_000_000

_SPAN = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?", re.ASCII)


def parse_tasks(text: str) -> tuple[tuple[int, ...], int | None]:
    """Return the indices, sorted, and how many may run at once (None: as many as fit).

    Raises:
        ValueError: it is no such expression.

    >>> parse_tasks("0-8:4,1%2")
    ((0, 1, 4, 8), 2)
    """
    body, percent, most = text.partition("%")
    if percent and not (most.isascii() and most.isdigit() and int(most)):
        raise ValueError(f"{text!r} has no number above zero behind its %")
    found: set[int] = set()
    for part in body.split(","):
        span = _span(part)
        if span is None:
            raise ValueError(f"{text!r} is no list of tasks: 0-9, 1,3,7, 0-31:4, ...")
        found.update(span)
    return tuple(sorted(found)), int(most) if percent else None


def covers(shown_id: str, job_id: str) -> bool:
    """Return whether the id of a row that stands for several tasks stands for this one too.

    `25_[2,4-9:2%3]` stands for 25_6. Slurm cuts long lists short, as `25_[2,4,...%3]` (accounting
    keeps no more), as `25_[2,4,` (squeue without SLURM_BITSTR_LEN=0), or as plain `25`: then it
    stands for all that may have been cut off.

    >>> covers("25_[2,4-9:2%3]", "25_6"), covers("25_[2,4-9:2%3]", "25_5")
    (True, False)
    """
    base, _, tasks = shown_id.partition("_")
    asked, _, task = job_id.partition("_")
    if base != asked or not (task.isascii() and task.isdigit()):
        return False
    if not tasks:
        return True
    if not tasks.startswith("["):
        return False
    named, cut_behind = _named(tasks)
    return int(task) in named or (cut_behind is not None and int(task) > cut_behind)


@functools.lru_cache(maxsize=64)
def _named(tasks: str) -> tuple[frozenset[int], int | None]:
    """Return the tasks that `[…]` names, and behind which one it was cut off, if it was."""
    parts = tasks.removeprefix("[").partition("%")[0].removesuffix("]").split(",")
    cut = not tasks.endswith("]")
    if cut:
        parts.pop()  # its last number may have been cut in two
    found: set[int] = set()
    for part in parts:
        span = _span(part)
        if span is None:
            cut = True
        else:
            found.update(span)
    return frozenset(found), max(found, default=-1) if cut else None


def _span(part: str) -> range | None:
    match = _SPAN.fullmatch(part)
    if match is None:
        return None
    first, last, step = match.groups()
    # Nobody's typing error may fill the memory: no Slurm has larger indices.
    stop = min(int(last or first), MAX_INDEX)
    return range(int(first), stop + 1, int(step or 1) or 1)
