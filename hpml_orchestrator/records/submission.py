"""The record of one call of sbatch: its script, its job, and the processes that made the call.

A run that continues gets its next job by another sbatch in the same directory: a continuation.
`job.json` has the newest job and the earlier ones; that of one task of an array is in
`job.<index>.json`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import NotFoundError, RecordError
from hpml_orchestrator.records.damage import field_fault
from hpml_orchestrator.records.feed import is_number
from hpml_orchestrator.records.files import names_in, read_json, read_text, write_json
from hpml_orchestrator.records.job import Job
from hpml_orchestrator.records.process import owner_is_alive
from hpml_orchestrator.records.run import Start, mark_start, newest_start

if TYPE_CHECKING:
    from hpml_orchestrator.records.schema import RefusalRecord, ScheduledJob, SubmitRecord

RUN_TABLE = "runs.tsv"
SCRIPT = "job.sh"
STARTED_MARKER = "sbatch.started"
_ROW = re.compile(r"([0-9]{1,9})\t([^\t\n]+)\n")
_TASK_JOB = re.compile(r"job\.([0-9]{1,9})\.json")

Fields = Mapping[str, Callable[[object], bool]]


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


_NONE: Fields = {}
_JOB: Fields = {"job_id": _is_text}
_REQUEST: Fields = {
    "name": _is_text,
    "backend": _is_text,
    "created": is_number,
    "job": lambda value: isinstance(value, dict),
}


@dataclass(frozen=True)
class Submission:
    """One call of sbatch; its records exist before the call.

    Attributes:
        directory: of its records.
        index: the task of its array that this object stands for; None for the whole submission.
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

    def at(self, index: int | None) -> Submission:
        """Return one task of its array, or the whole submission, without reading it again."""
        if index == self.index:
            return self
        other = replace(self, index=index)
        for name in ("_request", "_job"):
            if name in vars(self):
                vars(other)[name] = vars(self)[name]
        return other

    @property
    def script(self) -> Path:
        """The batch script, byte for byte as submitted."""
        return self.directory / SCRIPT

    @property
    def started_by(self) -> str:
        """The command that submitted it for its own use, such as `hpml bench`; else empty."""
        try:
            return str(self.record().get("started_by", ""))
        except RecordError:
            return ""

    def record(self) -> SubmitRecord:
        """The request, `submit.json`, which never changes: it is read once.

        Raises:
            NotFoundError: there is none.
            RecordError: it cannot be read, or is damaged.
        """
        return self._request

    @cached_property
    def _request(self) -> SubmitRecord:
        record: SubmitRecord = _checked(self.directory / "submit.json", _REQUEST)
        return record

    def requested_job(self) -> Job:
        """The job that was submitted, from `submit.json`.

        Raises:
            NotFoundError: there is no record.
            RecordError: it cannot be read, or is damaged.
        """
        return self._job

    @cached_property
    def _job(self) -> Job:
        try:
            return Job.from_json(self.record()["job"])
        except (TypeError, ValueError) as error:
            path = self.directory / "submit.json"
            raise RecordError(f"{path} is damaged: its job cannot be read ({error})") from error

    def job(self) -> ScheduledJob | None:
        """The scheduler's answer, `job.json`; None while it is unknown.

        For one task of an array, this is its continuation if there is one.
        """
        own = None if self.index is None else self._optional(f"job.{self.index}.json", _JOB)
        job: ScheduledJob | None = own or self._optional("job.json", _JOB)
        return job

    def continued(self) -> dict[int, str]:
        """The newest job of each task of the array that was continued separately, by index."""
        jobs = {}
        for match in filter(None, map(_TASK_JOB.fullmatch, names_in(self.directory))):
            task = self.at(int(match[1]))
            with contextlib.suppress(RecordError):
                if job := task.job():
                    jobs[int(match[1])] = f"{job['job_id']}_{match[1]}"
        return jobs

    def refused(self) -> RefusalRecord | None:
        """The scheduler's reason for a refusal, `refused.json`; None without one."""
        record: RefusalRecord | None = self._optional("refused.json", {"reason": _is_text})
        return record

    def _optional(self, name: str, fields: Fields = _NONE) -> Any:
        try:
            return _checked(self.directory / name, fields)
        except NotFoundError:
            return None

    def job_ids(self) -> set[str]:
        """The ids of all jobs of the submission so far, also those of its tasks' continuations."""
        names = [name for name in names_in(self.directory) if _TASK_JOB.fullmatch(name)]
        found: set[str] = set()
        for name in ("job.json", *names):
            record = self._optional(name, _JOB) or {}
            found.update(map(str, [*record.get("earlier", ()), record.get("job_id", "")]))
        return found - {""}

    def has_job(self, job_id: str) -> bool:
        """Whether that is the id of one of its jobs; False if its record cannot be read."""
        try:
            return job_id in self.job_ids()
        except RecordError:
            return False

    def runs(self) -> list[tuple[int, str]]:
        """The array index and run id of its runs, by index; of one task if one is meant.

        Raises:
            NotFoundError: the table does not exist.
            RecordError: it cannot be read, or is damaged.
        """
        path, table = self.directory / RUN_TABLE, []
        text = read_text(path)
        for number, line in enumerate(text.splitlines(keepends=True), 1):
            match = _ROW.fullmatch(line)
            if match is None or match[2] not in (self.sid, f"{self.sid}.{match[1]}"):
                why = "not an array index and its run" if line.endswith("\n") else "it is cut off"
                raise RecordError(f"{path} is damaged from line {number} on: {why}")
            if self.index in (None, int(match[1])):
                table.append((int(match[1]), match[2]))
        if not text:
            raise RecordError(f"{path} is damaged: it is empty")
        return table

    def is_array(self) -> bool:
        """Whether it is a job array, or a task of one; False without a table.

        Raises:
            RecordError: its table cannot be read, or is damaged.
        """
        try:
            return any(rid != self.sid for _, rid in self.runs())
        except NotFoundError:
            return False

    def record_job(self, job_id: str, *, how: str, now: float) -> None:
        """Record the job's id and how it became known."""
        write_json(self.directory / "job.json", {"job_id": job_id, "how": how, "recorded": now})

    def record_continuation(self, job_id: str, *, now: float) -> None:
        """Record the next job of the run; of a task if one is meant."""
        before = self.job()
        if before and before["job_id"] == job_id:
            return
        earlier = [*before.get("earlier", ()), before["job_id"]] if before else []
        record = {"job_id": job_id, "how": "continuation", "earlier": earlier, "recorded": now}
        name = "job.json" if self.index is None else f"job.{self.index}.json"
        write_json(self.directory / name, record)

    def record_refusal(self, reason: str, *, now: float) -> None:
        """Record that the scheduler refused."""
        write_json(self.directory / "refused.json", {"reason": reason, "recorded": now})

    def record_absence(self, starts: int) -> None:
        """Record that these calls of sbatch certainly created no job."""
        write_json(self.directory / "not_submitted.json", {"starts": starts})

    def is_absent(self, starts: int) -> bool:
        """Whether it is recorded that this many calls of sbatch created no job."""
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
        first = self.directory / STARTED_MARKER
        return mark_start(first, number or self.starts() + 1, now=now, key=self.sid)

    def newest_start(self) -> Start | None:
        """The last start; None if there was none.

        Raises:
            RecordError: the directory cannot be read.
        """
        return newest_start(self.directory / STARTED_MARKER)

    def starts(self) -> int:
        """The number of recorded calls of sbatch."""
        newest = self.newest_start()
        return newest.number if newest else 0

    def started_at(self) -> float | None:
        """Time of the last recorded call of sbatch, seconds since the epoch; None without one."""
        newest = self.newest_start()
        return newest.time if newest else None

    def submitter_is_gone(self) -> bool:
        """Whether the process that last recorded a call of sbatch is known to be dead."""
        newest = self.newest_start()
        return bool(newest and newest.owner and not owner_is_alive(newest.owner))


def _checked(path: Path, fields: Fields) -> Any:
    record = read_json(path)
    if why := field_fault(record, fields):
        raise RecordError(f"{path} is damaged: {why}")
    return record
