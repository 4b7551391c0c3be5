"""Ids of runs, submissions and jobs, and the indexes of job arrays."""

from __future__ import annotations

import calendar
import functools
import re
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml_orchestrator.records.texts import clock_text

if TYPE_CHECKING:
    from collections.abc import Iterable

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base 32: no i, l, o, u
_SUFFIX_CHARS = 6
MAX_NAME_CHARS = 40
"""Maximum number of characters of the job name in an id."""
_LEAST_PART_CHARS = 4

ID_PATTERN = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._+-]*-\d{8}-\d{6}-[0-9a-z]{6}(\.\d+)?$")
"""`<name>-<yyyymmdd>-<hhmmss in UTC>-<6 characters>`, with `.<index>` for one of several runs."""

_ANSWERS = (
    re.compile(r"(\d+)(?:;(\S+))?", re.ASCII),
    # from a site's wrapper that drops `--parsable`
    re.compile(r"(?:.*\s)?Submitted batch job (\d+)(?: on cluster (\S+))?", re.ASCII),
)
_VALID_ID = re.compile(r"[1-9]\d*(?:[_+]\d+)?", re.ASCII)


def new_id(name: str, *, now: float | None = None) -> str:
    """Return a new id for a job with this name.

    Args:
        name: a valid job name; cut after 40 characters.
        now: seconds since the epoch; default: the current time.
    """
    suffix = "".join(secrets.choice(_ALPHABET) for _ in range(_SUFFIX_CHARS))
    return f"{name[:MAX_NAME_CHARS]}-{stamp(time.time() if now is None else now)}-{suffix}"


def stamp(seconds: float) -> str:
    """Return a time (seconds since the epoch) in the format of ids; stamps sort like times."""
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime(seconds))


def stamp_of(sid: str) -> str:
    """Return the time in an id."""
    return "-".join(sid.rsplit("-", 3)[1:3])


def dated(sid: str) -> str:
    """Return an id with its time in local time, for messages."""
    try:
        moment = calendar.timegm(time.strptime(stamp_of(sid), "%Y%m%d-%H%M%S"))
    except ValueError:  # not an id of hpml
        return sid
    return f"{sid} ({clock_text(moment)})"


def named_by(word: str, ids: Iterable[str], *, exact_name: bool = False) -> list[str]:
    """Return the ids that a word matches.

    The id itself, else runs of the job with exactly this name, else ids that begin or end with it.
    Part of an id needs at least four characters, so that a typo matches nothing.

    Args:
        word: what the user typed.
        ids: candidates, in the order of the result.
        exact_name: for commands that cannot be undone: accept only the job's name or its id, whose
            end may be omitted after the date. So `exp-2` never matches a run of `exp`.

    >>> large = "digits-large-20260102-030405-abcdef"
    >>> named_by("digits", [large]), named_by("digits", [large], exact_name=True)
    (['digits-large-20260102-030405-abcdef'], [])
    """
    known = list(ids)
    if word in known:
        return [word]
    of_name = [one for one in known if one.rsplit("-", 3)[0] == word]
    if of_name:
        return of_name
    if exact_name:
        return [one for one in known if one.startswith(word) and len(word) >= _dated_length(one)]
    if len(word) < _LEAST_PART_CHARS:
        return []
    return [one for one in known if one.startswith(word) or one.endswith(word)]


def _dated_length(sid: str) -> int:
    return len(sid) - len("-hhmmss-") - len(sid.rsplit("-", 1)[1])


def valid_id(job_id: str) -> bool:
    """Return whether a text can be a job id: `25`, `25_3`, `28+1`."""
    return _VALID_ID.fullmatch(job_id) is not None


def parse_answer(text: str) -> tuple[str, str]:
    r"""Return job id and cluster from sbatch's answer, empty if missing; ignore incomplete lines.

    >>> parse_answer("4711;Cluster\n"), parse_answer("Submitted batch job 4711\n")
    (('4711', 'cluster'), ('4711', ''))
    >>> parse_answer("47")
    ('', '')
    """
    # Only complete lines count: sbatch may be killed during a write, and `47` may be the start of
    # `4711`, while 47 is another user's job. A site's wrapper may print other lines.
    for line in text.splitlines(keepends=True):
        for pattern in _ANSWERS if line.endswith("\n") else ():
            answer = pattern.fullmatch(line.strip())
            if answer and valid_id(answer[1]):
                return answer[1], (answer[2] or "").lower()
    return "", ""


# Job arrays: task indices in Slurm's notation, and the number of tasks that may run at once.

_MAX_INDEX = 4_000_000
"""Largest index that any Slurm accepts (MaxArraySize is at most 4,000,001)."""

_MAX_TASKS = 10_000
"""Maximum number of tasks per submission, because each has a directory of records."""

_FORMS = "indices such as 0-9, 1,3,7 or 0-31:4, with %2 behind them for at most two at once"
_PART = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?", re.ASCII)
_NUMBER = re.compile(r"\d{1,9}", re.ASCII)
_PROGRESSION = 3  # a list is shorter for only two indices


@dataclass(frozen=True)
class ArraySpec:
    """The tasks of an array.

    Attributes:
        indices: sorted, without duplicates.
        limit: number of tasks that may run at once; None for no limit.

    >>> str(ArraySpec((0, 1, 2, 7), 2)), str(ArraySpec((0, 4, 8)))
    ('0-2,7%2', '0-8:4')
    """

    indices: tuple[int, ...]
    limit: int | None = None

    @property
    def max_index(self) -> int:
        """The largest index; a cluster's MaxArraySize must be greater."""
        return self.indices[-1]

    def __str__(self) -> str:
        """Return Slurm's notation; equal for equal tasks."""
        limit = "" if self.limit is None else f"%{self.limit}"
        first, last = self.indices[0], self.indices[-1]
        step = self.indices[1] - first if len(self.indices) >= _PROGRESSION else 1
        if step > 1 and self.indices == tuple(range(first, last + 1, step)):
            return f"{first}-{last}:{step}{limit}"
        spans: list[list[int]] = []
        for index in self.indices:
            if spans and index == spans[-1][-1] + 1:
                spans[-1] = [spans[-1][0], index]
            else:
                spans.append([index])
        return ",".join("-".join(map(str, span)) for span in spans) + limit


def parse_array(value: object) -> ArraySpec:
    """Return the tasks in `0-9%2`, `1,3,7`, `0-31:4`, a combination, a number or a list of numbers.

    Raises:
        ValueError: the form is unknown, an index is too large, or there are too many tasks.

    >>> parse_array("0-31:8,3%2")
    ArraySpec(indices=(0, 3, 8, 16, 24), limit=2)
    >>> parse_array([7, 1]), str(parse_array("0-2,3"))
    (ArraySpec(indices=(1, 7), limit=None), '0-3')
    """
    if isinstance(value, list):
        if not value:
            raise ValueError("must name at least one index; leave the field out for a single job")
        if any(isinstance(index, bool) or not isinstance(index, int) for index in value):
            raise ValueError(f"must be a list of whole numbers such as [1, 3, 7], or {_FORMS}")
        text = ",".join(map(_written, value))
    elif isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(f"must be {_FORMS}")  # noqa: TRY004 - pydantic wants ValueError
    else:
        text = _written(value)
    body, percent, limit = text.strip().partition("%")
    if percent and (not _NUMBER.fullmatch(limit) or int(limit) < 1):
        raise ValueError("must have a number above zero behind the %: how many tasks run at once")
    indices: set[int] = set()
    # Check lengths before expanding a range: `0-4000000` must fail before it fills the memory.
    for span in [_span(part.strip()) for part in body.split(",")]:
        if span[-1] > _MAX_INDEX:
            raise ValueError(f"must have indices up to {_MAX_INDEX}, which is the most Slurm takes")
        if len(span) <= _MAX_TASKS:
            indices.update(span)
        if max(len(span), len(indices)) > _MAX_TASKS:
            raise ValueError(
                f"must have at most {_MAX_TASKS} tasks, since each has a directory of records; "
                "submit the rest as another job, or let each task do more"
            )
    return ArraySpec(tuple(sorted(indices)), int(limit) if percent else None)


def row_covers_task(shown_id: str, job_id: str) -> bool:
    """Return whether the id in one of Slurm's rows includes a task of an array.

    `25_[2,4-9:2%3]` includes 25_6. Slurm truncates long lists: `25_[2,4,...%3]` (accounting),
    `25_[2,4,` (squeue without SLURM_BITSTR_LEN=0), or only `25`. Such an id includes every task
    that may have been truncated.

    >>> row_covers_task("25_[2,4-9:2%3]", "25_6"), row_covers_task("25_[2,4-9:2%3]", "25_5")
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
    # Long lists are ascending and truncated at the end, so a task above the last shown index may be
    # in the row, but not a smaller one that is missing.
    named, last_before_cut = _named(tasks)
    return int(task) in named or (last_before_cut is not None and int(task) > last_before_cut)


@functools.lru_cache(maxsize=64)
def _named(tasks: str) -> tuple[frozenset[int], int | None]:
    """Return the tasks in `[…]` and, if the list is truncated, the last one, else None."""
    parts = tasks.removeprefix("[").partition("%")[0].removesuffix("]").split(",")
    cut = not tasks.endswith("]")
    if cut:
        parts.pop()  # the last number may be truncated
    indices: set[int] = set()
    for part in parts:
        try:
            span = _span(part)
        except ValueError:
            cut = True
        else:
            indices.update(range(span.start, min(span.stop, _MAX_INDEX + 1), span.step))
    return frozenset(indices), max(indices, default=-1) if cut else None


def _written(value: int | str) -> str:
    """Return a number as the job file spells it: YAML would read 1_3 as 13."""
    return str(getattr(value, "written", value))


def _span(part: str) -> range:
    match = _PART.fullmatch(part)
    if match is None:
        raise ValueError(f"must be {_FORMS}")
    first, last, step = match.groups()
    if last is not None and int(last) < int(first):
        raise ValueError(f"must have the smaller index first, not {part}")
    if step is not None and int(step) < 1:
        raise ValueError(f"must have a step above zero, not {part}")
    return range(int(first), int(last or first) + 1, int(step or 1))
