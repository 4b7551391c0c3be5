"""Who may call sbatch for a submission: one process for each start, with no lock to leave behind.

Starts are numbered. The first is the file `sbatch.started`, the next `sbatch.started.2` and so on,
and each is made exclusively: of many processes that want the same number, one gets it. Whoever has
looked for a job while there were n starts may only make start n + 1. So two processes that looked
at the same time cannot both go on: the slower one finds the number taken and has to look again.
A start is never taken back. One whose process died is only a start that no job came of.
"""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from hpml_orchestrator.errors import NotFoundError, RecordError
from hpml_orchestrator.records.files import create_json, read_json
from hpml_orchestrator.records.owner import Owner, this_owner

__all__ = ["STARTED_MARKER", "Start", "begin", "newest_start"]

STARTED_MARKER = "sbatch.started"
_NAME = re.compile(re.escape(STARTED_MARKER) + r"(?:\.([0-9]{1,9}))?")


@dataclass(frozen=True)
class Start:
    """One process that was about to call sbatch.

    Attributes:
        number: counted from 1.
        time: seconds since the epoch.
        owner: the process; None where its record cannot be understood.
    """

    number: int
    time: float
    owner: Owner | None


def newest_start(directory: Path) -> Start | None:
    """Return the last start of the submission in that directory; None when there was none.

    Raises:
        RecordError: the directory cannot be read.
    """
    # A list of the names, not a look for each: NFS keeps "no such file" in mind for a while.
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RecordError(f"cannot read {directory}: {error.strerror or error}") from error
    found = [_NAME.fullmatch(name) for name in names]
    numbers = [int(match[1] or 1) for match in found if match]
    if not numbers:
        return None
    path = _path(directory, max(numbers))
    try:
        written = float(read_json(path)["time"])
    except (NotFoundError, RecordError, KeyError, TypeError, ValueError, OverflowError):
        written = _changed(path)  # killed while writing, where a file system has no hard links
    return Start(max(numbers), written, Owner.read(str(path)))


def begin(directory: Path, number: int, *, now: float) -> bool:
    """Say durably that this process is about to call sbatch, if nobody has taken that number.

    Args:
        directory: the submission's.
        number: of the start: one more than there were before the job was looked for.
        now: seconds since the epoch.

    Returns:
        False where another process has it.

    Raises:
        RecordError: the directory cannot be written.
    """
    record = {"time": now, **asdict(this_owner(directory.name))}
    return create_json(_path(directory, number), record)


def _path(directory: Path, number: int) -> Path:
    return directory / (STARTED_MARKER if number == 1 else f"{STARTED_MARKER}.{number}")


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
