"""A plan in parts, so that one node reads the metadata and the others are told.

They travel in messages that prove where they come from (`link.py`): what is in them is what the
first node found and checked.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.faults import shown
from hpml_orchestrator.staging.plan import Entry, HardLink, Plan, Symlink

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["add_part", "plan_parts"]

_ROWS: dict[str, type[Entry | HardLink | Symlink]] = {
    "directories": Entry,
    "files": Entry,
    "hard_links": HardLink,
    "symlinks": Symlink,
}
_ROWS_AT_ONCE = 1000
_MOST_BYTES = 1 << 20


def plan_parts(plan: Plan) -> Iterator[bytes]:
    """Yield a plan in parts of 1 MiB at most.

    Raises:
        StagingError: a name is too long to be told.
    """
    yield from _parts("top", [plan.top])
    for name in _ROWS:
        yield from _parts(name, getattr(plan, name))
    yield from _parts("stamps", plan.stamps)


def _parts(name: str, rows: Sequence[Any]) -> Iterator[bytes]:
    part = json.dumps([name, rows]).encode() if len(rows) <= _ROWS_AT_ONCE else b""
    if part and len(part) <= _MOST_BYTES:
        yield part
    elif len(rows) == 1:
        raise StagingError(f"{shown(rows[0][0])[:200]}…: the name is too long")
    else:
        half = len(rows) // 2
        yield from _parts(name, rows[:half])
        yield from _parts(name, rows[half:])


def add_part(plan: Plan, part: bytes) -> None:
    """Take the next part into a plan that was empty."""
    name, rows = json.loads(part)
    if name == "top":
        plan.top = Entry(*rows[0])
    elif name == "stamps":
        plan.stamps += map(tuple, rows)
    else:
        getattr(plan, name).extend(map(_ROWS[name]._make, rows))
