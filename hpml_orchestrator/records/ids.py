"""Names of submissions and runs: sortable by time, unique across hosts, good as file names.

And the ids of jobs, as Slurm gives them.
"""

from __future__ import annotations

import calendar
import re
import secrets
import time
from typing import TYPE_CHECKING

from hpml_orchestrator.records.texts import clock_text

if TYPE_CHECKING:
    from collections.abc import Iterable

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base 32: no i, l, o, u
_SUFFIX_CHARS = 6
MAX_NAME_CHARS = 40
"""Of a longer job name an id has the beginning."""
_LEAST_PART_CHARS = 4

ID_PATTERN = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._+-]*-\d{8}-\d{6}-[0-9a-z]{6}(\.\d+)?$")
"""`<name>-<yyyymmdd>-<hhmmss in UTC>-<6 characters>`, and `.<index>` for one of several runs."""

_ANSWERS = (
    re.compile(r"(\d+)(?:;(\S+))?", re.ASCII),
    # of a site's wrapper that drops `--parsable`
    re.compile(r"(?:.*\s)?Submitted batch job (\d+)(?: on cluster (\S+))?", re.ASCII),
)
_VALID_ID = re.compile(r"[1-9]\d*(?:[_+]\d+)?", re.ASCII)


def new_id(name: str, *, now: float | None = None) -> str:
    """Return a new id for a job of that name.

    Args:
        name: a job name as the job file allows it; cut after 40 characters.
        now: seconds since the epoch; the clock when left out.
    """
    suffix = "".join(secrets.choice(_ALPHABET) for _ in range(_SUFFIX_CHARS))
    return f"{name[:MAX_NAME_CHARS]}-{stamp(time.time() if now is None else now)}-{suffix}"


def stamp(seconds: float) -> str:
    """Return a time, seconds since the epoch, as ids have it; stamps compare as times do."""
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime(seconds))


def stamp_of(sid: str) -> str:
    """Return the time in an id."""
    return "-".join(sid.rsplit("-", 3)[1:3])


def dated(sid: str) -> str:
    """Return an id with its time as local time, for messages."""
    try:
        moment = calendar.timegm(time.strptime(stamp_of(sid), "%Y%m%d-%H%M%S"))
    except ValueError:  # not an id of hpml
        return sid
    return f"{sid} ({clock_text(moment)})"


def named_by(word: str, ids: Iterable[str], *, exact_name: bool = False) -> list[str]:
    """Return the ids that a word names.

    The id itself, else the runs of a job with that very name, else ids that begin or end with it. A
    part of an id has at least four characters, so that a mistyped word names nothing.

    Args:
        word: what the user typed.
        ids: to choose from, in the order of the result.
        exact_name: for commands that cannot be undone: the name of the job or its id, of which the
            end may be left out behind the date. So `exp-2` never names a run of `exp`.

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
    """Return whether this can be a job's id: `25`, `25_3`, `28+1`."""
    return _VALID_ID.fullmatch(job_id) is not None


def parse_answer(text: str) -> tuple[str, str]:
    r"""Return job id and cluster from sbatch's answer, each empty if missing; a torn line is none.

    >>> parse_answer("4711;Cluster\n"), parse_answer("Submitted batch job 4711\n")
    (('4711', 'cluster'), ('4711', ''))
    >>> parse_answer("47")
    ('', '')
    """
    # Only a complete line counts: sbatch may be killed in the middle of a write, and `47` could be
    # the beginning of `4711`, another user's job. Other lines come from a site's wrapper.
    for line in text.splitlines(keepends=True):
        for pattern in _ANSWERS if line.endswith("\n") else ():
            answer = pattern.fullmatch(line.strip())
            if answer and valid_id(answer[1]):
                return answer[1], (answer[2] or "").lower()
    return "", ""
