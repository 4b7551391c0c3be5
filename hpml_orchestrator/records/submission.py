"""One call of sbatch on record: its script, its job, and which process may make the call.

Calls are numbered, and no lock is left behind. The first is the file `sbatch.started`, the next
`sbatch.started.2` and so on, and each is created exclusively: of many processes that want the same
number, one gets it. A process that looked for a job after n calls may only make call n + 1, so of
two that looked at the same time the slower one finds its number taken and has to look again.
A call is never taken back; if its process died, it is a call without a job.
"""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpml_orchestrator.errors import NotFoundError, RecordError
from hpml_orchestrator.records.files import create_json, read_json, read_text, write_json
from hpml_orchestrator.records.owner import Owner, owner_is_alive, this_owner

__all__ = ["RUN_TABLE", "SCRIPT", "STARTED_MARKER", "Start", "Submission"]

RUN_TABLE = "runs.tsv"
SCRIPT = "job.sh"
STARTED_MARKER = "sbatch.started"
_START_NAME = re.compile(re.escape(STARTED_MARKER) + r"(?:\.([0-9]{1,9}))?")


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


@dataclass(frozen=True)
class Submission:
    """One call of sbatch, from before it is made.

    Attributes:
        directory: of its records.
        index: the one task of its array that is meant; None for all of it.
    """

    directory: Path
    index: int | None = None

    @property
    def sid(self) -> str:
        """The submission's id."""
        return self.directory.name

    @property
    def label(self) -> str:
        """Its name on the command line: its id, with `.<index>` if one task is meant."""
        return self.sid if self.index is None else f"{self.sid}.{self.index}"

    @property
    def script(self) -> Path:
        """The batch script, byte for byte as submitted."""
        return self.directory / SCRIPT

    def record(self) -> dict[str, Any]:
        """The request: `submit.json`."""
        record: dict[str, Any] = read_json(self.directory / "submit.json")
        return record

    def job(self) -> dict[str, Any] | None:
        """The scheduler's answer, `job.json`; None while it is not known."""
        return self._optional("job.json")

    def refused(self) -> dict[str, Any] | None:
        """Why the scheduler refused, `refused.json`; None if it did not, or is not known to."""
        return self._optional("refused.json")

    def _optional(self, name: str) -> dict[str, Any] | None:
        try:
            record: dict[str, Any] = read_json(self.directory / name)
        except NotFoundError:
            return None
        return record

    def has_job(self, job_id: str) -> bool:
        """Whether that is the job's id; False if its record cannot be read."""
        try:
            return str((self.job() or {}).get("job_id")) == job_id
        except RecordError:
            return False

    def runs(self) -> list[tuple[int, str]]:
        """The array index and run id of its runs, by index; of one task if one is meant."""
        table = []
        for line in read_text(self.directory / RUN_TABLE).splitlines():
            index, _, rid = line.partition("\t")
            if self.index in (None, int(index)):
                table.append((int(index), rid))
        return table

    def is_array(self) -> bool:
        """Whether it is a job array, or a task of one; False if its table cannot be read."""
        try:
            return any(rid != self.sid for _, rid in self.runs())
        except (NotFoundError, RecordError, ValueError):
            return False

    def record_job(self, job_id: str, *, how: str, now: float) -> None:
        """Record the job's id and how it became known."""
        write_json(self.directory / "job.json", {"job_id": job_id, "how": how, "recorded": now})

    def record_refusal(self, reason: str, *, now: float) -> None:
        """Record that the scheduler refused."""
        write_json(self.directory / "refused.json", {"reason": reason, "recorded": now})

    def record_absence(self, starts: int) -> None:
        """Record that these starts of sbatch made no job, which is certain."""
        write_json(self.directory / "not_submitted.json", {"starts": starts})

    def is_absent(self, starts: int) -> bool:
        """Return whether it is on record that no job came of the starts so far, of that number."""
        return (self._optional("not_submitted.json") or {}).get("starts") == starts

    def mark_started(self, *, now: float, number: int | None = None) -> bool:
        """Record durably that this process is about to call sbatch: from here a job may exist.

        Args:
            now: seconds since the epoch.
            number: of this start: one more than there were before the job was looked for; by
                default the next one.

        Returns:
            False if another process has made that start: sbatch must not be called.

        Raises:
            RecordError: the directory cannot be written.
        """
        number = number or self.starts() + 1
        record = {"time": now, **asdict(this_owner(self.sid))}
        return create_json(self._start_path(number), record)

    def newest_start(self) -> Start | None:
        """The last start; None if there was none.

        Raises:
            RecordError: the directory cannot be read.
        """
        # Listed, not probed one by one: NFS caches "no such file" for a while.
        try:
            names = os.listdir(self.directory)
        except FileNotFoundError:
            return None
        except OSError as error:
            reason = error.strerror or error
            raise RecordError(f"cannot read {self.directory}: {reason}") from error
        matches = [_START_NAME.fullmatch(name) for name in names]
        number = max((int(match[1] or 1) for match in matches if match), default=0)
        if not number:
            return None
        path = self._start_path(number)
        try:
            time = float(read_json(path)["time"])
        except (NotFoundError, RecordError, KeyError, TypeError, ValueError, OverflowError):
            time = path.stat().st_mtime if path.exists() else 0.0  # damaged
        return Start(number, time, Owner.read(str(path)))

    def _start_path(self, number: int) -> Path:
        return self.directory / (STARTED_MARKER if number == 1 else f"{STARTED_MARKER}.{number}")

    def starts(self) -> int:
        """How often a process was about to call sbatch."""
        newest = self.newest_start()
        return newest.number if newest else 0

    def started_at(self) -> float | None:
        """When sbatch was last about to be called, seconds since the epoch; None: never."""
        newest = self.newest_start()
        return newest.time if newest else None

    def submitter_is_gone(self) -> bool:
        """Whether the process that was last about to call sbatch is known to be dead."""
        newest = self.newest_start()
        return bool(newest and newest.owner and not owner_is_alive(newest.owner))
