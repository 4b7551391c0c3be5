"""Slurm's JSON in its three dialects, read value by value.

    22.05   numbers and words are plain, what is not set is null: `"job_state": "RUNNING"`
    24.11+  `{"set": true, "infinite": false, "number": 7}`, and words in lists: `["RUNNING"]`
    26.05   as before, with some objects moved and more flags

Nothing here asks for a version: each value is recognised by its form, and what has none of the
forms is as good as absent.
"""

from __future__ import annotations

import json
import math
from typing import Any

from hpml_orchestrator.errors import SchedulerUnavailable
from hpml_orchestrator.scheduler.model import JobState
from hpml_orchestrator.scheduler.slurm_parse import parse_exit
from hpml_orchestrator.scheduler.slurm_states import COMPACT, LONG, parse_state
from hpml_orchestrator.scheduler.slurm_values import parse_count, plain

__all__ = [
    "at",
    "exit_of",
    "job_id_of",
    "listed",
    "load",
    "number",
    "state_word",
    "text",
    "time_of",
    "tres_of",
    "whole",
    "words",
]

_BASE_STATES = frozenset(
    "PENDING RUNNING SUSPENDED COMPLETED CANCELLED FAILED TIMEOUT NODE_FAIL PREEMPTED BOOT_FAIL "
    "DEADLINE OUT_OF_MEMORY".split()
)
_SHOWN_CHARS = 60


def load(said: str, *keys: str) -> list[Any]:
    """Return the list under the first of the keys that is there.

    Raises:
        SchedulerUnavailable: it is no JSON, or holds errors in place of an answer.
    """
    try:
        document = json.loads(said)
    except (ValueError, RecursionError) as error:
        shown = " ".join(said.split())[:_SHOWN_CHARS]
        raise SchedulerUnavailable(
            f"Slurm printed no JSON: {shown or 'nothing'}",
            hint="versions before 22.05, and some builds, have no JSON",
        ) from error
    for key in keys:
        found = at(document, key)
        if isinstance(found, (list, dict)):
            return found if isinstance(found, list) else [found]
    problems = [
        text(at(one, "description")) or text(at(one, "error"))
        for one in listed(at(document, "errors"))
    ]
    said_so = "; ".join(problem for problem in problems if problem)
    raise SchedulerUnavailable(
        f"Slurm's JSON holds no {keys[0] if keys else 'answer'}{': ' if said_so else ''}{said_so}"
    )


def at(value: Any, *path: str) -> Any:
    """Return what lies at a path of keys, None where nothing does."""
    for key in path:
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value


def listed(value: Any) -> list[Any]:
    """Return a list; an empty one for all that is none."""
    return value if isinstance(value, list) else []


def number(value: Any) -> float | None:
    """Return a number of any dialect; None for no limit and for what is not set.

    >>> number({"set": True, "infinite": False, "number": 7}), number(7), number("7")
    (7, 7, 7)
    >>> number({"set": False, "infinite": True, "number": 0}), number(None), number(4294967294)
    (None, None, None)
    """
    if isinstance(value, dict):
        if not value.get("set") or value.get("infinite"):
            return None
        value = value.get("number")
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return parse_count(str(value)) if value >= 0 else None
    if isinstance(value, float):
        return value if math.isfinite(value) and value >= 0 else None
    return parse_count(value) if isinstance(value, str) else None


def whole(value: Any) -> int | None:
    """Return `number` without a fraction."""
    found = number(value)
    return None if found is None else int(found)


def time_of(value: Any) -> float | None:
    """Return seconds since the epoch; 0 stands for no time."""
    found = number(value)
    return float(found) if found else None


def text(value: Any) -> str:
    """Return a text, empty for all that is none and for Slurm's words for nothing."""
    return plain(value) if isinstance(value, str) else ""


def words(value: Any) -> tuple[str, ...]:
    """Return the words of a list, or of a text with commas.

    >>> words(["numa", "gpu"]), words("numa,gpu"), words(None)
    (('numa', 'gpu'), ('numa', 'gpu'), ())
    """
    parts = value if isinstance(value, list) else text(value).split(",")
    return tuple(word for part in parts if isinstance(part, str) and (word := part.strip()))


def state_word(value: Any) -> str:
    """Return the word that squeue would show: a flag in place of the base state.

    >>> state_word(["RUNNING", "COMPLETING"]), state_word("RUNNING"), state_word([])
    ('COMPLETING', 'RUNNING', '')
    """
    found = [word.upper() for word in words(value)]
    flags = [
        word
        for word in found
        if COMPACT.get(word, word) in LONG
        and word not in _BASE_STATES
        and parse_state(word) is not JobState.UNKNOWN
    ]
    return (flags or found or [""])[0]


def exit_of(value: Any, state: JobState) -> tuple[int, int] | None:
    """Return (exit code, signal) of any dialect; None where it is not known.

    sacct of 22.05 says "SUCCESS" and 0 of jobs that failed with any code: that is not known.
    """
    if not isinstance(value, dict):
        return parse_exit(str(value)) if isinstance(value, int) else None
    code = whole(value.get("return_code"))
    signal = whole(at(value, "signal", "id")) or whole(at(value, "signal", "signal_id")) or 0
    if code is None and not signal:
        return None
    if not code and not signal and state is JobState.FAILED:
        return None
    return code or 0, signal


def job_id_of(
    raw: int | None,
    array: int | None,
    task: int | None,
    tasks: str = "",
    het: int | None = None,
    offset: int | None = None,
) -> str:
    """Return the id that users see.

    >>> job_id_of(9, 3, 0), job_id_of(3, 3, None, "2-3%2"), job_id_of(29, 0, None, "", 28, 1)
    ('3_0', '3_[2-3%2]', '28+1')
    """
    if array and tasks:
        return f"{array}_[{tasks}]"
    if array and task is not None:
        return f"{array}_{task}"
    if het:
        return f"{het}+{offset or 0}"
    return "" if raw is None else str(raw)


def tres_of(value: Any) -> dict[str, int]:
    """Return counts by kind of a list of `{"type", "name", "count"}`, as they are counted there.

    >>> tres_of([{"type": "gres", "name": "gpu:a100", "id": 1002, "count": 2}])
    {'gres/gpu:a100': 2}
    """
    found: dict[str, int] = {}
    for one in listed(value):
        kind, name, count = text(at(one, "type")), text(at(one, "name")), whole(at(one, "count"))
        if kind and count is not None:
            found[f"{kind}/{name}" if name else kind] = count
    return found
