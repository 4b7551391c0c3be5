r"""What squeue, sacct and sbatch print, as job statuses; pure functions.

One row of squeue and of sacct has the same twelve columns, in this order:

    raw id, id, state, exit, restarts, submitted, started, ended, nodes, reason, name, directory

separated by the control character US (0x1f), so that a `|` in a job's name does no harm; squeue's
rows end with RS (0x1e) and a newline, so that a newline in a name does none either. The directory
is last and holds whatever is left. sacct has no count of restarts that works with 22.05, so its
column is filled with a field that is always a number, and ignored.

`id` is the array or heterogeneous form: `25_3`, `25_[4-9%2]` for tasks that still wait, `28+1`.
Times are epoch seconds (`SLURM_TIME_FORMAT=%s`) or, where a site's wrapper drops that variable,
ISO 8601 in local time. Exit codes are `3:0` (code:signal) from sacct, and the plain wait status
(768 for code 3) from squeue.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from hpml_orchestrator.records.ids import row_covers_task
from hpml_orchestrator.scheduler.model import JobStatus, parse_state, representative

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

TASK = "%a"
"""Placeholder of a task's index in `--output`."""

UNIT = "\x1f"
RECORD = "\x1e"

# Size 0 is "as long as it is" (the default cuts at 20 bytes); what follows the size is a suffix.
_SQUEUE_FIELDS = (
    "JobID JobArrayID State exit_code RestartCnt SubmitTime StartTime EndTime NodeList Reason "
    "Name WorkDir"
).split()
SQUEUE_FORMAT = f":0{UNIT},".join(_SQUEUE_FIELDS) + f":0{RECORD}"
"""For `squeue --Format`."""

SACCT_FIELDS = (
    "JobIDRaw,JobID,State,ExitCode,AllocCPUS,Submit,Start,End,NodeList,Reason,JobName,WorkDir"
)
"""For `sacct --format`; AllocCPUS only fills the column of restarts."""

_NOTHING = frozenset({"", "(null)", "none", "n/a", "unknown", "none assigned", "null"})
_SIGNAL_MASK = 0x7F
_CODE_SHIFT = 8
_YEAR_SECONDS = 365 * 86400.0


@dataclass(frozen=True)
class QueueEntry:
    """One row: a job, one task of an array, or all tasks of it that still wait.

    Attributes:
        raw_id: the controller's own number of it.
        shown_id: `25`, `25_3`, `25_[4-9%2]` or `28+1`.
        status: everything else, under the shown id.
    """

    raw_id: str
    shown_id: str
    status: JobStatus


def escape_output(path: str) -> str:
    r"""Return a path escaped so that sbatch's `--output` writes to exactly that file.

    A backslash anywhere switches every `%` pattern off and is itself removed (observed with
    22.05; `remove_path_slashes` in Slurm's source, also of the newest): then only backslashes are
    to be doubled. Without one, `%` must be doubled.

    >>> escape_output("/data/100%/out.log")
    '/data/100%%/out.log'
    >>> print(escape_output("/data/a\\b/100%j.log"))
    /data/a\\b/100%j.log
    """
    if "\\" in path:
        return path.replace("\\", "\\\\")
    return path.replace("%", "%%")


def escape_task_output(path: str) -> str:
    """Return, for a path with `%a` in it, an `--output` that gives each task of an array its own.

    Raises:
        ValueError: it has a backslash, which switches `%a` off.

    >>> escape_task_output("/100%/run.%a/out.log")
    '/100%%/run.%a/out.log'
    """
    if "\\" in path:
        raise ValueError(f"{path!r} has a backslash, which keeps sbatch from naming a task's file")
    before, pattern, after = path.rpartition(TASK)
    return escape_output(before) + pattern + escape_output(after)


def parse_time(text: str) -> float | None:
    """Return seconds since the epoch; None for any of Slurm's words for no time.

    >>> parse_time("1795217201")
    1795217201.0
    >>> parse_time("Unknown") is None
    True
    """
    text = text.strip()
    if text.lower() in _NOTHING:
        return None
    if _number(text):
        return float(text) or None
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def parse_exit(text: str) -> tuple[int, int] | None:
    """Return (exit code, signal) of `3:0` or of a plain wait status; None if neither.

    >>> parse_exit("0:15"), parse_exit("768"), parse_exit("9"), parse_exit("")
    ((0, 15), (3, 0), (0, 9), None)
    """
    first, colon, second = text.strip().partition(":")
    if not _number(first) or (colon and not _number(second)):
        return None
    if colon:
        return int(first), int(second)
    status = int(first)
    if status == 1:  # the controller's "failed before it began"; accounting prints it as 1:0
        return 1, 0
    signal = status & _SIGNAL_MASK
    return (0, signal) if signal else (status >> _CODE_SHIFT, 0)


def parse_version(text: str) -> tuple[int, ...]:
    """Return the version in a text such as `slurm-wlm 22.05.8` or `26.05.0-0rc1`; () without one.

    >>> parse_version("slurm 24.11.5-1.el9")
    (24, 11, 5)
    """
    match = re.search(r"\d{2}\.\d{1,2}(?:\.\d{1,4})?", text, re.ASCII)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def parse_squeue(text: str) -> list[QueueEntry]:
    """Return the rows of `squeue --Format=SQUEUE_FORMAT`, without other lines."""
    rows = (_row(record.lstrip("\r\n"), restarts=True) for record in text.split(RECORD))
    return [row for row in rows if row]


def parse_sacct(text: str) -> list[QueueEntry]:
    """Return the rows of `sacct --format=SACCT_FIELDS`, without other lines."""
    # A job's name may contain newlines; only an id and a separator begin a row.
    records = re.split(rf"\n(?=\d+{UNIT})", text.removesuffix("\n"))
    rows = (_row(record, restarts=False) for record in records)
    return [row for row in rows if row]


def match(rows: Iterable[QueueEntry], job_ids: Sequence[str]) -> dict[str, JobStatus]:
    """Return the status of each requested id that the rows contain.

    An array's own id gets the `representative` status of its tasks.
    """
    by_id: dict[str, list[QueueEntry]] = {}
    several: dict[str, list[QueueEntry]] = {}
    for row in rows:
        base, _, task = row.shown_id.partition("_")
        # A task of an array has two ids: its own number once it runs, and ARRAY_INDEX. Users and
        # our records use the second, a job's own script sees the first; a row answers to both.
        for key in {row.shown_id, _base(row.shown_id), row.raw_id}:
            by_id.setdefault(key, []).append(row)
        # One row may stand for many tasks that wait. It is matched last, because a task that has
        # begun has its own row, which knows more.
        if not task or task.startswith("["):
            several.setdefault(base, []).append(row)
    statuses = {}
    for job_id in job_ids:
        known = by_id.get(job_id) or [
            row for row in several.get(_base(job_id), ()) if row_covers_task(row.shown_id, job_id)
        ]
        if known:
            statuses[job_id] = representative(job_id, [row.status for row in known])
    return statuses


def _base(job_id: str) -> str:
    return re.split(r"[_+]", job_id, maxsplit=1)[0]


def _row(text: str, *, restarts: bool) -> QueueEntry | None:
    fields = text.split(UNIT, len(_SQUEUE_FIELDS) - 1)
    if len(fields) != len(_SQUEUE_FIELDS) or not _number(fields[0].strip()):
        return None
    shown_id, raw_state, count = fields[1].strip(), fields[2].strip(), fields[4].strip()
    state, nodes = parse_state(raw_state), _text(fields[8])
    code, signal = parse_exit(fields[3]) or (None, 0)
    # Before a job is over, Slurm prints predictions as its exit code, start and end; the end of a
    # running job is that of its time limit. A job that was cancelled while it waited has a start
    # time but no nodes.
    started = parse_time(fields[6]) if nodes and not state.waiting else None
    limit_at = parse_time(fields[7])
    if started and not limit_at:  # squeue prints NONE without a limit; the controller takes a year
        limit_at = started + _YEAR_SECONDS
    # A held job that was requeued still shows its begin time as its start.
    planned = state.waiting and not nodes and not re.search(r"h[eo]ld", fields[9], re.IGNORECASE)
    status = JobStatus(
        job_id=shown_id,
        state=state,
        raw_state=raw_state,
        reason=_text(fields[9]),
        exit_code=code if state.over else None,
        signal=signal if state.over else 0,
        nodes=nodes,
        submitted=parse_time(fields[5]),
        started=started,
        ended=parse_time(fields[7]) if state.over else None,
        limit_at=limit_at if started and restarts and not state.over else None,
        expected_start=parse_time(fields[6]) if planned else None,
        restarts=int(count) if restarts and _number(count) else 0,
        name=fields[10],
        directory=fields[11],
    )
    return QueueEntry(fields[0].strip(), shown_id, status)


def _number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _text(field: str) -> str:
    field = field.strip()
    return "" if field.lower() in _NOTHING else field
