"""Which process may call sbatch next.

Calls are numbered, and no lock is left behind. The first is the file `NAME.started`, the next
`NAME.started.2` and so on, and each is created exclusively: of many processes that want the same
number, one gets it. A process that looked for a job after n calls may only make call n + 1, so of
two that looked at the same time the slower one finds its number taken and has to look again.
A call is never taken back; if its process died, it is a call without a job.
"""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from hpml_orchestrator.errors import NotFoundError, RecordError
from hpml_orchestrator.records.files import create_json, read_json
from hpml_orchestrator.records.owner import Owner, this_owner


@dataclass(frozen=True)
class Start:
    """One process that was about to call sbatch.

    Attributes:
        number: counted from 1.
        time: seconds since the epoch.
        owner: the process; None if its record cannot be understood.
    """

    number: int
    time: float
    owner: Owner | None


def mark_start(first: Path, number: int, *, now: float, key: str) -> bool:
    """Record durably that this process is about to call sbatch: from here a job may exist.

    Args:
        first: path of the first start's record.
        number: of this start.
        now: seconds since the epoch.
        key: what the job is for, for the record.

    Returns:
        False if another process has made that start: sbatch must not be called.

    Raises:
        RecordError: the directory cannot be written.
    """
    return create_json(_path(first, number), {"time": now, **asdict(this_owner(key))})


def newest_start(first: Path) -> Start | None:
    """Return the last start; None if there was none.

    Args:
        first: path of the first start's record.

    Raises:
        RecordError: the directory cannot be read.
    """
    # Listed, not probed one by one: NFS caches "no such file" for a while.
    try:
        names = os.listdir(first.parent)
    except FileNotFoundError:
        return None
    except OSError as error:
        reason = error.strerror or error
        raise RecordError(f"cannot read {first.parent}: {reason}") from error
    pattern = re.compile(re.escape(first.name) + r"(?:\.([0-9]{1,9}))?")
    matches = [pattern.fullmatch(name) for name in names]
    number = max((int(match[1] or 1) for match in matches if match), default=0)
    if not number:
        return None
    path = _path(first, number)
    try:
        time = float(read_json(path)["time"])
    except (NotFoundError, RecordError, KeyError, TypeError, ValueError, OverflowError):
        time = path.stat().st_mtime if path.exists() else 0.0  # damaged
    return Start(number, time, Owner.read(str(path)))


def _path(first: Path, number: int) -> Path:
    return first if number == 1 else first.with_name(f"{first.name}.{number}")
