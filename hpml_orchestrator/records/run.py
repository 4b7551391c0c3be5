"""A run on record: what its attempts wrote down, read by whoever asks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpml_orchestrator.errors import NotFoundError, RecordError
from hpml_orchestrator.records import events
from hpml_orchestrator.records.files import read_json, read_json_lines, read_text

__all__ = ["Attempt", "Run", "task_output"]


def task_output(submission: Path, index: int | str) -> Path:
    """Return the file that the scheduler writes the output of an array's task to.

    Args:
        submission: the submission's directory.
        index: the task's index, or what stands for it.
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
        """The id that the job wrote as its first act; empty when it never started."""
        try:
            return read_text(self.directory / "started" / "job_id").strip()
        except NotFoundError:
            return ""

    @property
    def submitted_id(self) -> str:
        """The id that sbatch gave for it: of the array where the job is a task of one."""
        try:
            return read_text(self.directory / "started" / "array_job_id").strip()
        except NotFoundError:
            return self.job_id

    @property
    def ended(self) -> dict[str, Any] | None:
        """What the script wrote as its last act: `exit_code`, `reason`, `time`; None before."""
        try:
            record: dict[str, Any] = read_json(self.directory / "ended.json")
        except (NotFoundError, RecordError):
            return None
        return record

    def events(self) -> list[events.Event]:
        """Every event of the attempt, by time."""
        return events.read_all(self.directory / "events")

    def markers(self, kind: str) -> list[dict[str, Any]]:
        """What nodes said of themselves, `ready` or `failed`, by node."""
        found = []
        for path in sorted((self.directory / "nodes").glob(f"*.{kind}.json")):
            try:
                found.append(read_json(path))
            except (NotFoundError, RecordError):
                continue
        return found

    def proofs(self) -> list[dict[str, Any]]:
        """What the agents saw of the ranks and judged, by node."""
        found = []
        for path in sorted((self.directory / "binding").glob("*.proof.json")):
            try:
                found.append(read_json(path))
            except (NotFoundError, RecordError):
                continue
        return found

    def plans(self) -> dict[str, str]:
        """The text of each node's plan, by node."""
        found = {}
        for path in sorted((self.directory / "plan").glob("*.txt")):
            try:
                found[path.name[: -len(".txt")]] = read_text(path)
            except (NotFoundError, RecordError):
                continue
        return found

    def bindings(self) -> list[dict[str, Any]]:
        """Where each rank ran, by rank; one that started twice counts as it started last."""
        found: dict[int, dict[str, Any]] = {}
        for path in sorted((self.directory / "binding").glob("*.jsonl")):
            try:
                lines = read_json_lines(path)
            except (NotFoundError, RecordError):
                continue
            for line in lines:
                if isinstance(line, dict) and isinstance(line.get("rank"), int):
                    found[line["rank"]] = line
        return [found[rank] for rank in sorted(found)]


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

    def record(self) -> dict[str, Any]:
        """The plan of this run: `run.json`."""
        record: dict[str, Any] = read_json(self.directory / "run.json")
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
            raise self._unreadable(error) from error

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
            raise self._unreadable(error) from error
        numbers = sorted(int(name) for name in names if name.isdigit())
        return [Attempt(self.directory / "attempts" / str(number)) for number in numbers]

    def _unreadable(self, error: OSError) -> RecordError:
        return RecordError(
            f"run {self.rid}: cannot be read: {error.strerror or error}",
            hint=f"ask its owner for the right to read {self.directory}",
        )
