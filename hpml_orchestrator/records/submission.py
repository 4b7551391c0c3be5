"""The records of a submission: script, jobs, and the processes that called sbatch.

A run may continue in another job, the continuation, which is submitted from the same directory.
`job.json` contains the newest job and the earlier ones; for the continuation of an array task it is
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
from hpml_orchestrator.records.owner import owner_is_alive
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
    """A submission; its records exist before sbatch is called.

    Attributes:
        directory: of the records.
        index: the array task that this object represents; None for the whole submission.
    """

    directory: Path
    index: int | None = None

    @property
    def sid(self) -> str:
        """The submission's id."""
        return self.directory.name

    @property
    def label(self) -> str:
        """Its name on the command line: the id, with `.<index>` for an array task."""
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
        """The batch script as submitted."""
        return self.directory / SCRIPT

    @property
    def started_by(self) -> str:
        """The command that submitted it internally, such as `hpml bench`; else empty."""
        try:
            return str(self.record().get("started_by", ""))
        except RecordError:
            return ""

    def record(self) -> SubmitRecord:
        """The request, `submit.json`, which never changes: it is read once.

        Raises:
            NotFoundError: it does not exist.
            RecordError: it is unreadable or damaged.
        """
        return self._request

    @cached_property
    def _request(self) -> SubmitRecord:
        record: SubmitRecord = _checked(self.directory / "submit.json", _REQUEST)
        return record

    def requested_job(self) -> Job:
        """The job that was submitted, from `submit.json`.

        Raises:
            NotFoundError: the record does not exist.
            RecordError: it is unreadable or damaged.
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

        For an array task this is its continuation, if there is one.
        """
        own = None if self.index is None else self._optional(f"job.{self.index}.json", _JOB)
        job: ScheduledJob | None = own or self._optional("job.json", _JOB)
        return job

    def continued(self) -> dict[int, str]:
        """The newest job of each array task with a continuation of its own, by index."""
        jobs = {}
        for match in filter(None, map(_TASK_JOB.fullmatch, names_in(self.directory))):
            task = self.at(int(match[1]))
            with contextlib.suppress(RecordError):
                if job := task.job():
                    jobs[int(match[1])] = f"{job['job_id']}_{match[1]}"
        return jobs

    def refused(self) -> RefusalRecord | None:
        """The scheduler's refusal, `refused.json`; None without one."""
        record: RefusalRecord | None = self._optional("refused.json", {"reason": _is_text})
        return record

    def _optional(self, name: str, fields: Fields = _NONE) -> Any:
        try:
            return _checked(self.directory / name, fields)
        except NotFoundError:
            return None

    def job_ids(self) -> set[str]:
        """The ids of all its jobs so far, including continuations of tasks."""
        names = [name for name in names_in(self.directory) if _TASK_JOB.fullmatch(name)]
        found: set[str] = set()
        for name in ("job.json", *names):
            record = self._optional(name, _JOB) or {}
            found.update(map(str, [*record.get("earlier", ()), record.get("job_id", "")]))
        return found - {""}

    def has_job(self, job_id: str) -> bool:
        """Whether it has a job with this id; False if its record cannot be read."""
        try:
            return job_id in self.job_ids()
        except RecordError:
            return False

    def runs(self) -> list[tuple[int, str]]:
        """Its runs as array index and run id, sorted by index; only one for an array task.

        Raises:
            NotFoundError: the table of runs does not exist.
            RecordError: it is unreadable or damaged.
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
        """Whether it is a job array or an array task; False without a table of runs.

        Raises:
            RecordError: the table is unreadable or damaged.
        """
        try:
            return any(rid != self.sid for _, rid in self.runs())
        except NotFoundError:
            return False

    def record_job(self, job_id: str, *, how: str, now: float) -> None:
        """Record the job's id and how it was found."""
        write_json(self.directory / "job.json", {"job_id": job_id, "how": how, "recorded": now})

    def record_continuation(self, job_id: str, *, now: float) -> None:
        """Record the next job of the run or array task."""
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
        """Record that this number of calls of sbatch certainly created no job."""
        write_json(self.directory / "not_submitted.json", {"starts": starts})

    def is_absent(self, starts: int) -> bool:
        """Whether `record_absence` was called for this number of calls of sbatch."""
        return (self._optional("not_submitted.json") or {}).get("starts") == starts

    def mark_started(self, *, now: float, number: int | None = None) -> bool:
        """Record durably that this process is about to call sbatch: from here a job may exist.

        Args:
            now: seconds since the epoch.
            number: of this call: one more than the number of calls before searching for a job;
                default: the next one.

        Returns:
            False if another process has made that start: sbatch must not be called.

        Raises:
            RecordError: the directory cannot be written.
        """
        first = self.directory / STARTED_MARKER
        return mark_start(first, number or self.starts() + 1, now=now, key=self.sid)

    def newest_start(self) -> Start | None:
        """The last start marker; None without any.

        Raises:
            RecordError: the directory is unreadable.
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
