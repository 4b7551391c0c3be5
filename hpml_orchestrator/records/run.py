"""A recorded run and its attempts: readers of everything that they wrote."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import HpmlError, NotFoundError, RecordError
from hpml_orchestrator.records.damage import END_FIELDS, field_fault
from hpml_orchestrator.records.events import read, read_all, read_milestones
from hpml_orchestrator.records.files import (
    append_line,
    names_in,
    read_json,
    read_json_lines,
    read_text,
    write_json,
)
from hpml_orchestrator.records.starts import Start, mark_start, newest_start

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpml_orchestrator.records.events import Event
    from hpml_orchestrator.records.schema import (
        BindingRecord,
        EndRecord,
        Marker,
        NextRecord,
        ProofRecord,
        RunRecord,
        SoftwareRecord,
        StopRecord,
    )

PRUNED = "pruned"
"""Reason of a search to stop a trial that it gives up; no run continues after it."""

_OUTPUT_BYTES = 1024**2
SOFTWARE = "software.json"
"""The software of an attempt's ranks: packages, modules and the GPU driver."""


def user_name(uid: int) -> str:
    """Return the name of a user; without one the number."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def owner_name(path: Path) -> str:
    """Return the name of the user that a file belongs to."""
    try:
        return user_name(path.stat().st_uid)
    except OSError:
        return "unknown"


def _unreadable(what: str, path: Path, error: OSError) -> RecordError:
    return RecordError(
        f"{what}: cannot be read: {error.strerror or error}",
        hint=f"ask its owner, {owner_name(path)}, for the right to read {path}",
    )


def _files(directory: Path, ending: str) -> list[Path]:
    return [directory / name for name in names_in(directory) if name.endswith(ending)]


def _records(directory: Path, ending: str) -> list[Any]:
    records = []
    for path in _files(directory, ending):
        with contextlib.suppress(NotFoundError, RecordError):
            records.append(read_json(path))
    return records


def _mappings(path: Path) -> Iterator[Any]:
    return (line for line in read_json_lines(path) if isinstance(line, dict))


def task_output(submission: Path, index: int | str) -> Path:
    """Return the file that the scheduler writes the output of an array's task to.

    Args:
        submission: the submission's directory.
        index: the task's index, or a placeholder of Slurm.
    """
    return submission / "output" / f"{index}.log"


@dataclass(frozen=True)
class Attempt:
    """One start of a run; a requeue makes the next."""

    directory: Path

    @property
    def number(self) -> int:
        """The attempt's number, counted from 0."""
        return int(self.directory.name)

    @property
    def job_id(self) -> str:
        """The id that the job wrote when it started; empty if it never started."""
        return self._claimed("job_id")

    @property
    def submitted_id(self) -> str:
        """The id that sbatch printed: that of the array if the job is a task of one."""
        return self._claimed("array_job_id") or self.job_id

    def _claimed(self, name: str) -> str:
        try:
            return read_text(self.directory / "started" / name).strip()
        except NotFoundError:
            return ""

    @property
    def ended(self) -> EndRecord | None:
        """The script's last record: `exit_code`, `reason`, `time`; None before, or if damaged."""
        record: EndRecord | None = self._record("ended.json")
        return record

    def _record(self, name: str) -> Any:
        """Return a record of a job's end; None without one, and if its fields are not right."""
        try:
            record = read_json(self.directory / name)
        except (NotFoundError, RecordError):
            return None
        return None if field_fault(record, END_FIELDS[name]) else record

    @property
    def restart(self) -> str:
        """How often Slurm had requeued its job before this start, as the job recorded it."""
        return self._claimed("restart")

    @property
    def goes_on(self) -> bool:
        """Whether it ended before the run was done, and the run continues automatically."""
        return self.ended is not None and bool(self.ended.get("goes_on"))

    @property
    def next(self) -> NextRecord | None:
        """The job that follows: `how`, `job_id`, `time`, `exclude`; None if it is not certain."""
        record: NextRecord | None = self._record("next.json")
        return record

    @property
    def software(self) -> SoftwareRecord | None:
        """The software of its ranks, from `node/software.py`; None if it is not recorded."""
        with contextlib.suppress(NotFoundError, RecordError):
            record: SoftwareRecord = read_json(self.directory / SOFTWARE)
            return record
        return None

    def record_next(
        self, how: str, job_id: str, *, exclude: Sequence[str] = (), now: float
    ) -> None:
        """Record the job that follows: a `requeue` of the same one, or a `continuation`."""
        record = {"how": how, "job_id": job_id, "time": now, "exclude": list(exclude)}
        write_json(self.directory / "next.json", record)

    def newest_start(self) -> Start | None:
        """The last recorded call of sbatch for a continuation of it, if any."""
        return newest_start(self.directory / "next.started")

    def mark_start(self, number: int, *, now: float) -> bool:
        """Record that this process is about to call sbatch for a continuation.

        Returns:
            False if another process has made the start of that number.
        """
        return mark_start(self.directory / "next.started", number, now=now, key=self.directory.name)

    @property
    def started(self) -> Event | None:
        """Its script's last event `started`, with the list of nodes; None before."""
        started = None
        with contextlib.suppress(NotFoundError, RecordError):
            for event in read(self.directory / "events" / "batch.jsonl"):
                started = event if event.event == "started" else started
        return started

    @property
    def nodes(self) -> str:
        """The nodes that it ran on, in the scheduler's notation; empty if unknown."""
        started = self.started
        return str(started.data.get("nodes", "")) if started is not None else ""

    @property
    def last_written(self) -> float | None:
        """When its newest event was written, seconds since the epoch; None without any."""
        return max(
            (path.stat().st_mtime for path in _files(self.directory / "events", "")), default=None
        )

    def output_end(self, path: Path | None = None) -> str:
        """Return the end of its output, 1 MiB at most, from `path` if given; empty on errors."""
        try:
            # A requeued job appends to the same file: what earlier attempts wrote comes before.
            began = int(read_json(self.directory / "head.json")["output_bytes"])
            with open(path or Run(self.directory.parents[1]).output, "rb") as stream:
                size = stream.seek(0, os.SEEK_END)
                stream.seek(max(began, size - _OUTPUT_BYTES))
                return stream.read(_OUTPUT_BYTES).decode("utf-8", "replace")
        except (HpmlError, OSError, KeyError, ValueError):
            return ""

    def check_readable(self) -> None:
        """Check that its records are readable.

        Raises:
            RecordError: they may not, as is usual with the runs of others.
        """
        try:
            os.listdir(self.directory)
            os.listdir(self.directory / "events")
        except FileNotFoundError:
            return
        except OSError as error:
            run = self.directory.parents[1].name
            raise _unreadable(f"run {run}, attempt {self.number}", self.directory, error) from error

    def events(self) -> Iterator[Event]:
        """Every event of the attempt: the script's, then each node's, as they were written."""
        return read_all(self.directory / "events")

    def milestones(self) -> Iterator[Event]:
        """The same, with only the first and last counters of each rank per node."""
        return read_milestones(self.directory / "events")

    def stop_requests(self) -> list[StopRecord]:
        """Every request to stop, with `reason`, `time` and `by`, in order."""
        with contextlib.suppress(NotFoundError, RecordError):
            return [line for line in _mappings(self.directory / "stop") if "reason" in line]
        return []

    def stop_request(self) -> StopRecord | None:
        """The first request to stop, which counts; None without one."""
        return next(iter(self.stop_requests()), None)

    def request_stop(self, reason: str, *, by: str, now: float) -> None:
        """Ask the ranks to stop; the first request counts.

        Args:
            reason: `time_limit`, `preemption`, `hang` or `requested`.
            by: the node that asks, or who does.
            now: seconds since the epoch.
        """
        line = json.dumps({"reason": reason, "time": round(now, 6), "by": by})
        append_line(self.directory / "stop", line)

    def markers(self, kind: str) -> list[Marker]:
        """The nodes' own reports, `ready` or `failed`, by node."""
        return _records(self.directory / "nodes", f".{kind}.json")

    def proofs(self) -> list[ProofRecord]:
        """The agents' proofs of the ranks' binding, by node."""
        return _records(self.directory / "binding", ".proof.json")

    def plans(self) -> dict[str, str]:
        """The text of each node's plan, by node."""
        plans = {}
        for path in _files(self.directory / "plan", ".txt"):
            with contextlib.suppress(NotFoundError, RecordError):
                plans[path.name[: -len(".txt")]] = read_text(path)
        return plans

    def bindings(self) -> list[BindingRecord]:
        """Where each rank ran, by rank; the last start of one that started twice."""
        ranks: dict[int, BindingRecord] = {}
        for path in _files(self.directory / "binding", ".jsonl"):
            with contextlib.suppress(NotFoundError, RecordError):
                for line in _mappings(path):
                    if isinstance(line.get("rank"), int):
                        ranks[line["rank"]] = line
        return [ranks[rank] for rank in sorted(ranks)]


@dataclass(frozen=True)
class Run:
    """One planned execution."""

    directory: Path

    @property
    def rid(self) -> str:
        """The run's id."""
        return self.directory.name

    @property
    def output(self) -> Path:
        """The file of the script's standard output and error, all attempts in a row.

        An array's task has it in its submission, and makes a link to it when it starts.
        """
        path = self.directory / "output.log"
        sid, _, index = self.rid.rpartition(".")
        if index.isdigit() and not os.path.lexists(path):
            return task_output(self.directory.parents[1] / "submissions" / sid, index)
        return path

    def record(self) -> RunRecord:
        """The plan of this run: `run.json`."""
        record: RunRecord = read_json(self.directory / "run.json")
        return record

    def has_output(self) -> bool:
        """Whether it has written any output yet.

        Raises:
            RecordError: its output may not be read, as is usual with the runs of others.
        """
        try:
            with self.output.open("rb"):
                return True
        except FileNotFoundError:
            return False
        except OSError as error:
            raise _unreadable(f"run {self.rid}", self.directory, error) from error

    def attempts(self) -> list[Attempt]:
        """Every attempt so far, in order.

        Raises:
            RecordError: its directory may not be read, as is usual with the runs of others.
        """
        try:
            names = os.listdir(self.directory / "attempts")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _unreadable(f"run {self.rid}", self.directory, error) from error
        numbers = sorted(int(name) for name in names if name.isdigit())
        return [Attempt(self.directory / "attempts" / str(number)) for number in numbers]

    def newest(self) -> Attempt | None:
        """The last attempt; None before the first.

        Raises:
            RecordError: it may not be read.
        """
        attempts = self.attempts()
        if not attempts:
            return None
        attempts[-1].check_readable()
        return attempts[-1]
