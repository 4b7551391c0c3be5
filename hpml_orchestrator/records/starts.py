"""Decides which process may call sbatch next, without a lock that a dead process could leave.

Calls are numbered. The first is the file `NAME.started`, the next `NAME.started.2` and so on. Each
is created exclusively, so only one of many processes gets a number. A process that found no job
after n calls may only make call n + 1: of two that searched at the same time, the slower one finds
its number taken and has to search again. A call is never withdrawn; if its process dies, it stays
as a call without a job.
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
    # Durable before sbatch runs: after a crash of this machine, the mark is what tells the next
    # process that a job may exist.
    return create_json(_path(first, number), {"time": now, **asdict(this_owner(key))})


def newest_start(first: Path) -> Start | None:
    """Return the last start; None if there was none.

    Args:
        first: path of the first start's record.

    Raises:
        RecordError: the directory cannot be read.
    """
    # List the directory instead of probing names: NFS caches for a while that a file is missing.
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
