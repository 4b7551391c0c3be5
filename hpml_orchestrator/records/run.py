"""Runs and their attempts: read their records, and decide how a run proceeds."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pwd
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hpml_orchestrator.errors import HpmlError, NotFoundError, RecordError
from hpml_orchestrator.records.damage import END_FIELDS, field_fault
from hpml_orchestrator.records.feed import is_number, read, read_all, read_milestones
from hpml_orchestrator.records.files import (
    append_line,
    create_json,
    names_in,
    read_json,
    read_json_lines,
    read_text,
    write_json,
)
from hpml_orchestrator.records.owner import Owner, this_owner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hpml_orchestrator.records.feed import Event
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

# Start markers: which process may call sbatch next, without a lock that a dead process could keep.
#
# Calls are numbered: the first is the file `NAME.started`, the next `NAME.started.2`, and so on.
# Files are created exclusively, so only one process gets a number. A process that found no job
# after n calls may only make call n + 1: if two search at the same time, the slower one finds its
# number taken and must search again. Markers are never removed; if a process dies, its marker
# remains as a call without a job.


@dataclass(frozen=True)
class Start:
    """The start marker of one call of sbatch.

    Attributes:
        number: counted from 1.
        time: seconds since the epoch.
        owner: the calling process; None if its record is invalid.
    """

    number: int
    time: float
    owner: Owner | None


def mark_start(first: Path, number: int, *, now: float, key: str) -> bool:
    """Record durably that this process is about to call sbatch: from here a job may exist.

    Args:
        first: path of the first start's record.
        number: of this call.
        now: seconds since the epoch.
        key: purpose of the job, for the record.

    Returns:
        False if another process has made that start: sbatch must not be called.

    Raises:
        RecordError: the directory cannot be written.
    """
    # Durable before sbatch runs: after a crash of this machine, only the marker shows that a job
    # may exist.
    return create_json(_path(first, number), {"time": now, **asdict(this_owner(key))})


def newest_start(first: Path) -> Start | None:
    """Return the last start; None if there was none.

    Args:
        first: path of the first start's record.

    Raises:
        RecordError: the directory cannot be read.
    """
    # List the directory instead of probing names: NFS caches missing names for a while.
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


PRUNED = "pruned"
"""Reason for stopping a trial that a search prunes; the run does not continue."""

_OUTPUT_BYTES = 1024**2
SOFTWARE = "software.json"
"""File with the software of an attempt's ranks: packages, modules and GPU driver."""


def user_name(uid: int) -> str:
    """Return the name of a user, or the number if there is no name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def owner_name(path: Path) -> str:
    """Return the name of the owner of a file."""
    try:
        return user_name(path.stat().st_uid)
    except OSError:
        return "unknown"


def is_own(path: Path) -> bool:
    """Return whether a file or directory is there and belongs to this user."""
    with contextlib.suppress(OSError):
        return path.lstat().st_uid == os.getuid()
    return False


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
    """Return the output file of an array task.

    Args:
        submission: the submission's directory.
        index: the task's index, or Slurm's placeholder for it.
    """
    return submission / "output" / f"{index}.log"


@dataclass(frozen=True)
class Attempt:
    """One start of a run; a requeue or continuation starts the next one."""

    directory: Path

    @property
    def number(self) -> int:
        """The attempt's number, counted from 0."""
        return int(self.directory.name)

    @property
    def job_id(self) -> str:
        """The id of the job, recorded when it started; empty before."""
        return self._claimed("job_id")

    @property
    def submitted_id(self) -> str:
        """The id that sbatch printed; for a task of an array, the id of the array."""
        return self._claimed("array_job_id") or self.job_id

    def _claimed(self, name: str) -> str:
        try:
            return read_text(self.directory / "started" / name).strip()
        except NotFoundError:
            return ""

    @property
    def ended(self) -> EndRecord | None:
        """The script's last record: `exit_code`, `reason`, `time`; None if missing or damaged."""
        record: EndRecord | None = self._record("ended.json")
        return record

    def _record(self, name: str) -> Any:
        """Return a record of a job's end; None if it is missing or invalid."""
        try:
            record = read_json(self.directory / name)
        except (NotFoundError, RecordError):
            return None
        return None if field_fault(record, END_FIELDS[name]) else record

    @property
    def restart(self) -> str:
        """Number of times that Slurm had requeued the job before this attempt."""
        return self._claimed("restart")

    @property
    def goes_on(self) -> bool:
        """Whether it ended before the run was complete, and the run continues automatically."""
        return self.ended is not None and bool(self.ended.get("goes_on"))

    @property
    def next(self) -> NextRecord | None:
        """The next job: `how`, `job_id`, `time`, `exclude`; None if unknown."""
        record: NextRecord | None = self._record("next.json")
        return record

    @property
    def software(self) -> SoftwareRecord | None:
        """The software of its ranks, from `node/software.py`; None if not recorded."""
        with contextlib.suppress(NotFoundError, RecordError):
            record: SoftwareRecord = read_json(self.directory / SOFTWARE)
            return record
        return None

    def record_next(
        self, how: str, job_id: str, *, exclude: Sequence[str] = (), now: float
    ) -> None:
        """Record the next job: a `requeue` of the same one or a `continuation`."""
        record = {"how": how, "job_id": job_id, "time": now, "exclude": list(exclude)}
        write_json(self.directory / "next.json", record)

    def newest_start(self) -> Start | None:
        """The last recorded call of sbatch for its continuation, if any."""
        return newest_start(self.directory / "next.started")

    def mark_start(self, number: int, *, now: float) -> bool:
        """Record that this process is about to call sbatch for a continuation.

        Returns:
            False if another process already has this number.
        """
        return mark_start(self.directory / "next.started", number, now=now, key=self.directory.name)

    @property
    def started(self) -> Event | None:
        """The script's last event `started`, with the list of nodes; None if it has not started."""
        started = None
        with contextlib.suppress(NotFoundError, RecordError):
            for event in read(self.directory / "events" / "batch.jsonl"):
                started = event if event.event == "started" else started
        return started

    @property
    def nodes(self) -> str:
        """Its nodes in the scheduler's notation; empty if unknown."""
        started = self.started
        return str(started.data.get("nodes", "")) if started is not None else ""

    @property
    def last_written(self) -> float | None:
        """Time of its newest event, seconds since the epoch; None without events."""
        return max(
            (path.stat().st_mtime for path in _files(self.directory / "events", "")), default=None
        )

    def output_end(self, path: Path | None = None) -> str:
        """Return the end of its output, at most 1 MiB, from `path` if given; empty on errors."""
        try:
            # A requeued job appends to the output of earlier attempts.
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
            RecordError: they are not readable, as is usual for runs of other users.
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
        """All its events: the script's, then each node's, in order of writing."""
        return read_all(self.directory / "events")

    def milestones(self) -> Iterator[Event]:
        """Its events, with only the first and last `step` of each rank per node."""
        return read_milestones(self.directory / "events")

    def stop_requests(self) -> list[StopRecord]:
        """All stop requests in order, with `reason`, `time` and `by`."""
        with contextlib.suppress(NotFoundError, RecordError):
            return [line for line in _mappings(self.directory / "stop") if "reason" in line]
        return []

    def stop_request(self) -> StopRecord | None:
        """The first stop request, which is the effective one; None without any."""
        return next(iter(self.stop_requests()), None)

    def request_stop(self, reason: str, *, by: str, now: float) -> None:
        """Ask the ranks to stop; only the first request has an effect.

        Args:
            reason: `time_limit`, `preemption`, `hang` or `requested`.
            by: the node or person that asks.
            now: seconds since the epoch.
        """
        line = json.dumps({"reason": reason, "time": round(now, 6), "by": by})
        append_line(self.directory / "stop", line)

    def markers(self, kind: str) -> list[Marker]:
        """The reports `ready` or `failed` of nodes, by node."""
        return _records(self.directory / "nodes", f".{kind}.json")

    def proofs(self) -> list[ProofRecord]:
        """The agents' proofs of binding, by node."""
        return _records(self.directory / "binding", ".proof.json")

    def plans(self) -> dict[str, str]:
        """The text of each node's plan, by node."""
        plans = {}
        for path in _files(self.directory / "plan", ".txt"):
            with contextlib.suppress(NotFoundError, RecordError):
                plans[path.name[: -len(".txt")]] = read_text(path)
        return plans

    def bindings(self) -> list[BindingRecord]:
        """The binding of each rank, by rank; for a restarted rank, the last one."""
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
        """The file with standard output and error of the script, for all attempts.

        For an array task it is in the submission, and the task links to it when it starts.
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
        """Whether it has written output.

        Raises:
            RecordError: its output is not readable, as is usual for runs of other users.
        """
        try:
            with self.output.open("rb"):
                return True
        except FileNotFoundError:
            return False
        except OSError as error:
            raise _unreadable(f"run {self.rid}", self.directory, error) from error

    def attempts(self) -> list[Attempt]:
        """All attempts so far, in order.

        Raises:
            RecordError: its directory is not readable, as is usual for runs of other users.
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
            RecordError: it is not readable.
        """
        attempts = self.attempts()
        if not attempts:
            return None
        attempts[-1].check_readable()
        return attempts[-1]


# Continuing a run: the progress of its attempts, time for saving, and nodes to avoid.

NO_STACKS = "no stacks: it wrote none in time"
"""Text in a node's file of stacks about a rank that does not react."""

_UNUSABLE = re.compile(r"down|drain|fail|error|unknown|future|inval|maint|\S*\*", re.IGNORECASE)
_FIRST_LEAD_SECONDS = 300.0  # before a save was measured
_LEAD_MARGIN_SECONDS = 15.0
_LEAST_LEAD_SECONDS = 10.0
_LIMIT_PART = 4
_DEPTH = 3
_LOOK_SECONDS = 10.0  # limit for directories with many files
_CLOCK_SLACK_SECONDS = 2.0  # allowed difference to the clock of a file server


class TrainingProgress(NamedTuple):
    """The progress reported by an attempt's ranks; None if not reported."""

    step: int | None = None  # of the last checkpoint
    stopping: bool = False  # whether a rank stopped on request
    channel: bool = False  # whether any rank reported anything
    slowest_save: float | None = None  # seconds
    slowest_step: float | None = None  # seconds
    saved_at: float | None = None  # time of the last reported checkpoint, since the epoch


def progress_of(attempt: Attempt) -> TrainingProgress:
    """Read the progress of an attempt."""
    steps: list[int] = []
    saves: list[float] = []
    durations: list[float] = []
    saved: list[float] = []
    stopping = channel = False
    for event in attempt.milestones():
        channel = channel or event.rank is not None
        stopping = stopping or event.event == "stopping"
        if event.event == "checkpoint":
            saved.append(event.time)
            if (step := _number(event.data.get("step"))) is not None:
                steps.append(int(step))
            saves += filter(None, [_number(event.data.get("seconds"))])
        elif event.event == "step":
            count = _number(event.data.get("steps_total"))
            seconds = _number(event.data.get("step_seconds_total"))
            if count and seconds:
                durations.append(seconds / count)
    return TrainingProgress(
        max(steps, default=None),
        stopping,
        channel,
        max(saves, default=None),
        max(durations, default=None),
        max(saved, default=None),
    )


def lead_seconds(
    configured: float | None,
    limit: float | None,
    *,
    save: float | None = None,
    step: float | None = None,
) -> float:
    """Return how many seconds before the time limit ranks are asked to stop.

    Args:
        configured: the job file's `lead`; None for automatic: the sum of the slowest save, the
            slowest step (ranks stop between steps) and a margin.
        limit: the job's time limit in seconds; None if unknown.
        save: slowest save of the run so far, in seconds.
        step: slowest step of the run so far, in seconds.
    """
    if configured is not None:
        return configured
    lead = _FIRST_LEAD_SECONDS if save is None else save + (step or 0.0) + _LEAD_MARGIN_SECONDS
    # A short job must not stop right after its start.
    most = math.inf if limit is None else limit / _LIMIT_PART
    return max(_LEAST_LEAD_SECONDS, min(lead, most))


def end_margin(lead: float) -> float:
    """Return how many seconds before the time limit the remaining ranks are ended.

    The script needs this time to requeue the job while it is still running.
    """
    return max(5.0, min(30.0, lead / 4))


def nodes_to_avoid(
    attempt: Attempt, ask: Callable[[list[str]], str], say: Callable[[str], None]
) -> list[str]:
    """Return the names of nodes to exclude from the next attempt.

    Slurm accepts an exclusion that leaves too few nodes, and the job then waits forever. So exclude
    nodes only if the partition has enough others that can start jobs. `ask` returns the output of a
    Slurm command (empty if it fails); `say` prints a notice.
    """
    suspects = _suspects(attempt)
    if not suspects:
        return []
    begun = attempt.started.data if attempt.started else {}
    where = [f"--partition={begun['partition']}"] if begun.get("partition") else []
    listed = ask(["sinfo", "--noheader", "--Node", *where, "--format=%N %T"])
    pairs = (line.partition(" ") for line in listed.splitlines())
    usable = {name for name, _, state in pairs if not _UNUSABLE.match(state.strip())}
    for earlier in attempt.directory.parent.glob("*/next.json"):  # the job may still exclude these
        usable.difference_update((Attempt(earlier.parent).next or {}).get("exclude", ()))
    if len(usable - suspects) >= int(_number(begun.get("node_count")) or 1):
        return sorted(suspects)
    names = ",".join(sorted(suspects))
    say(f"the next attempt may get {names} again: its partition has too few other usable nodes")
    return []


def _suspects(attempt: Attempt) -> set[str]:
    """Return nodes whose agent failed or whose ranks caused a hang."""
    names = {str(marker["node"]) for marker in attempt.markers("failed") if marker.get("node")}
    if (attempt.stop_request() or {}).get("reason") != "hang":
        return names
    reached: dict[str, dict[int, float]] = {}
    for event in attempt.milestones():
        steps = _number(event.data.get("steps_total")) if event.event == "step" else None
        if steps is not None and event.rank is not None:
            reached.setdefault(event.node, {})[event.rank] = steps
    # Hanging ranks are behind: the others made progress until they had to wait.
    slowest = {node: min(ranks.values()) for node, ranks in reached.items()}
    most = max(slowest.values(), default=0.0)
    behind = {node for node, steps in slowest.items() if steps < most}
    if not behind:
        # If all are at the same step, the hanging rank is the one that cannot write its stacks:
        # ranks that wait in a collective can.
        files = [*attempt.directory.glob("stacks/*.txt")]
        silent = {one.stem for one in files if NO_STACKS in one.read_text("utf-8", "replace")}
        behind = silent if len(silent) < len(files) else set()
    return names | behind


def written_since(directory: str, since: float) -> bool:
    """Return whether a directory tree contains a file newer than a time; search at most 10 s."""
    until = time.monotonic() + _LOOK_SECONDS
    # A complete walk on a shared file system could exceed the job's remaining time.
    depth = directory.rstrip("/").count("/") + _DEPTH
    for path, folders, files in os.walk(directory):
        if path.count("/") >= depth:
            folders.clear()
        for name in files:
            with contextlib.suppress(OSError):
                if Path(path, name).stat().st_mtime >= since - _CLOCK_SLACK_SECONDS:
                    return True
        if time.monotonic() > until:
            return False
    return False


def _number(value: object) -> float | None:
    return float(value) if is_number(value) else None
