"""The jobs of one machine on disk, and every decision over them; shared by hpml and supervisors.

    <home>/jobs/<id>/       mode 0700; the number is claimed by renaming a complete directory to it
        job.json            the record; written under the lock, or by the job's live supervisor
        environment         the job's environment, NUL-separated, mode 0600
        bin/srun            the local srun, first on the job's PATH
        steps/<n>           one empty file per srun of the job: step ids
        cancel              somebody asked for the end
        ended               how it ended, as the text of a symbolic link: needs no free block, so
                            that a full disk keeps the end that could not go into job.json
        spawned             when a supervisor was last started for it, and how often
        supervisor.log      what a supervisor had to say, normally nothing
    /tmp/hpml-<uid>/        node-local locks, never on the file system of the records

Whose turn it is says `local_queue`. Only the first few that wait have a supervisor; each that
leaves the queue sees to the next ones. Each task of an array is a job of its own: `local_arrays`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import NotFoundError, RecordError, SchedulerUnavailable
from hpml_orchestrator.records.files import fsync_dir, read_json, write_json, write_text
from hpml_orchestrator.records.owner import boot_id
from hpml_orchestrator.scheduler.local.boot import BOOT_SUPERVISOR, package_parent, srun_script
from hpml_orchestrator.scheduler.local.processes import (
    SUPERVISOR_MARK,
    Identity,
    is_alive,
    kill_until_gone,
    marked,
    processes,
)
from hpml_orchestrator.scheduler.local.processes import descendants as below
from hpml_orchestrator.scheduler.local.queue import Queue, hold
from hpml_orchestrator.scheduler.model import JobState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = ["Home", "Job", "Locks"]

_SUPERVISED = 4
"""How many waiting jobs have a supervisor of their own: a long queue is no crowd of processes."""

_SPAWN_GRACE_SECONDS = 3.0
_LOCK_PATIENCE_SECONDS = 60.0
_LOCK_PAUSE_SECONDS = 0.005
_STALE_SECONDS = 3600.0
_KILL_PATIENCE_SECONDS = 5.0
_INLINE_BYTES = 59  # of a link's text; ext4 and others keep as much in the inode itself

Record = dict[str, Any]


@dataclass
class Job:
    """One job: its directory and what its record says.

    `held`: whether it waits for other jobs; `doomed`: whether one of them did not end as wanted.
    """

    directory: Path
    record: Record = field(repr=False)
    held: bool = False
    doomed: bool = False

    @property
    def job_id(self) -> str:
        """The id, a number as text."""
        return self.directory.name

    @property
    def number(self) -> int:
        """The id as a number: the place in the queue."""
        return int(self.directory.name)

    @property
    def array_id(self) -> int:
        """The id of the array that it is a task of; 0 for a single job."""
        array = self.record.get("array")
        return int(array["id"]) if array else 0

    @property
    def shown_id(self) -> str:
        """The id as people know it: `7`, or `7_3` for a task of an array."""
        return f"{self.array_id}_{self.record['array']['index']}" if self.array_id else self.job_id

    @property
    def state(self) -> JobState:
        """The recorded state."""
        try:
            return JobState(self.record["state"])
        except (KeyError, ValueError):
            return JobState.UNKNOWN

    @property
    def holds_slots(self) -> bool:
        """Whether it has CPUs and GPUs at the moment."""
        return self.state in (JobState.RUNNING, JobState.COMPLETING)

    @property
    def supervisor(self) -> Identity | None:
        """The supervisor, if that very process runs."""
        known = self.record.get("supervisor")
        if not known or known["boot"] != boot_id():
            return None
        who = Identity(known["pid"], known["start"])
        return who if is_alive(who) else None

    @property
    def cancelled(self) -> bool:
        """Whether somebody asked for its end."""
        return (self.directory / "cancel").exists()

    def write(self, **changes: Any) -> None:
        """Change the record on disk and here."""
        self.record = {**self.record, **changes}
        write_json(self.directory / "job.json", self.record)

    def finish(
        self,
        state: JobState,
        *,
        ended: float,
        exit_code: int | None = None,
        number: int = 0,
        reason: str = "",
    ) -> str:
        """Record the end; return what is in the way, or nothing.

        An end that cannot be recorded is noted as well as it can be, on disk and here.
        """
        end = {"state": state, "ended": ended, "exit_code": exit_code, "signal": number}
        note = self.directory / "ended"
        try:
            self.write(**end, reason=reason)
        except RecordError as error:
            cause = getattr(error.__cause__, "strerror", None) or str(error)
            why = f"{reason}; " if reason else ""
            why += f"its end cannot be recorded: {cause}"
            self.record = {**self.record, "reason": why}
            code = "-" if exit_code is None else exit_code
            begin = f"{state} {code} {number} {ended:.2f} "
            for text in (begin + why, begin + reason, (begin + reason)[:_INLINE_BYTES]):
                try:
                    os.symlink(text, note)
                except FileExistsError:
                    break
                except OSError:
                    continue
                break
            return cause
        with contextlib.suppress(OSError):
            note.unlink()
        return ""

    def members(self) -> set[Identity]:
        """Return the processes of the job, looked up without its supervisor's help."""
        table = processes()
        found = marked(self.job_id, self.record["cluster"], table)
        batch = self.record.get("batch")
        if batch and self.record["supervisor"]["boot"] == boot_id():
            who = Identity(batch["pid"], batch["start"])
            if is_alive(who):
                found |= {who, *below(who.pid, table)}
                found |= {p.identity for p in table.values() if p.session == who.pid}
        return found


class Locks:
    """File locks in a directory of this machine that belongs to the user alone."""

    def __init__(self, root: Path = Path("/tmp")) -> None:  # noqa: S108 - checked below
        self.root = root

    @property
    def directory(self) -> Path:
        """The directory, made and checked.

        Raises:
            SchedulerUnavailable: somebody else's directory is in its place.
        """
        path = self.root / f"hpml-locks-{os.geteuid()}"
        try:
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
            found = path.lstat()
        except OSError as error:
            raise SchedulerUnavailable(
                f"cannot make {path}: {error.strerror}",
                hint="it holds the locks of the local backend: is its directory writable?",
            ) from error
        private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
        if not private or found.st_uid != os.geteuid():
            raise SchedulerUnavailable(
                f"{path} is not a directory of this user alone",
                hint="it holds the locks of the local backend: remove it, or have it removed",
            )
        return path

    @contextlib.contextmanager
    def hold(self, name: str, *, remove: bool = False) -> Iterator[None]:
        """Hold the lock of that name; `remove` its file at the end where it is used only once.

        Raises:
            SchedulerUnavailable: it was not free in time.
        """
        until = time.monotonic() + _LOCK_PATIENCE_SECONDS
        while (fd := self._try(name, fcntl.LOCK_EX)) is None:
            if time.monotonic() > until:
                raise SchedulerUnavailable(
                    f"the lock {self.directory / name} was not free "
                    f"for {_LOCK_PATIENCE_SECONDS:g} s",
                    hint="is a process of hpml stopped? fuser names the one that holds it",
                )
            time.sleep(_LOCK_PAUSE_SECONDS)
        try:
            yield
        finally:
            if remove:
                with contextlib.suppress(OSError):
                    os.unlink(self.directory / name)
            os.close(fd)

    def held(self, name: str) -> bool:
        """Return whether some process holds the lock of that name."""
        if not (self.directory / name).exists():
            return False
        fd = self._try(name, fcntl.LOCK_SH)
        if fd is None:
            return True
        os.close(fd)
        return False

    def _try(self, name: str, how: int) -> int | None:
        path = self.directory / name
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, how | fcntl.LOCK_NB)
            os.utime(fd)  # cleaners of /tmp go by age
            mine, there = os.fstat(fd), os.stat(path)
        except (BlockingIOError, FileNotFoundError):
            os.close(fd)
            return None
        if (mine.st_dev, mine.st_ino) != (there.st_dev, there.st_ino):
            os.close(fd)  # removed and made again meanwhile: this one guards nothing
            return None
        return fd


class Home:
    """The jobs under one directory; see the module for what lies there."""

    def __init__(self, path: Path, locks: Locks) -> None:
        self.path = Path(os.path.abspath(path))
        self.jobs = self.path / "jobs"
        self.locks = locks
        digest = hashlib.sha256(os.fsencode(self.path)).hexdigest()
        self.cluster = f"local-{digest[:6]}"
        self._lock_name = f"local-{digest[:16]}.lock"
        self._over: dict[int, None] = {}
        self._half_written: set[int] = set()
        self.unrecorded: dict[str, Job] = {}
        """Jobs that `heal` found to be over, which it could not write down."""

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the lock of this home: whoever changes which jobs wait or run holds it."""
        with self.locks.hold(self._lock_name):
            yield

    def numbers(self) -> list[int]:
        """Return all job numbers in order."""
        try:
            return sorted(int(name) for name in os.listdir(self.jobs) if name.isdecimal())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise SchedulerUnavailable(
                f"cannot read {self.jobs}: {error.strerror}",
                hint="set HPML_HOME (or --records DIR) to the directory of your records",
            ) from error

    def load(self, job_id: str | int) -> Job | None:
        """Return a job, None where there is none or its record cannot be read."""
        if not str(job_id).isdecimal():
            return None
        directory = self.jobs / str(job_id)
        try:
            job = Job(directory, read_json(directory / "job.json"))
        except (NotFoundError, RecordError):
            return None
        if self._is_half_written(job):
            self._half_written.add(job.number)
            return None
        if not job.state.over:
            job.record |= _noted_end(directory)
        return job

    def _is_half_written(self, job: Job) -> bool:
        """Whether it is a task of an array whose submission has not come to its end, or died."""
        first = job.array_id
        return (
            first not in (0, job.number)
            and job.state is JobState.PENDING
            and not (self.jobs / str(first)).exists()
            and not (job.directory / "spawned").exists()
        )

    def active(self) -> list[Job]:
        """Return the jobs that are not over, in order."""
        found = []
        for number in self.numbers():
            if number in self._over:
                continue
            job = self.load(number)
            if job is not None and not job.state.over:
                found.append(job)
            elif job is not None:
                self._over[number] = None
        hold(self, found)
        return found

    def next_number(self) -> int:
        """Return the number that the next job gets. Needs the lock."""
        return max(self.numbers(), default=0) + 1

    def publish(
        self, record: Record, environment: Mapping[str, str], *, number: int | None = None
    ) -> Job:
        """Write a new job completely and claim a number for it. Needs the lock.

        Args:
            record: its record.
            environment: its environment.
            number: that very number, of an array's task; the next one when left out.
        """
        self.jobs.mkdir(parents=True, exist_ok=True)
        self._remove_stale()
        building = Path(tempfile.mkdtemp(prefix=".tmp-", dir=self.jobs))
        (building / "steps").mkdir()
        fixed = number is not None
        number = self.next_number() if number is None else number
        body = b"".join(
            os.fsencode(name) + b"=" + os.fsencode(value) + b"\0"
            for name, value in environment.items()
        )
        write_text(building / "environment", body, mode=0o600)
        (building / "bin").mkdir()
        write_text(building / "bin" / "srun", srun_script(), mode=0o755)
        while True:
            target = self.jobs / str(number)
            write_json(building / "job.json", {**record, "job_id": str(number)})
            try:
                os.rename(building, target)  # fails on a number in use: its directory is not empty
            except OSError:
                if target.exists() and not fixed:
                    number += 1
                    continue
                raise
            fsync_dir(self.jobs)
            return Job(target, read_json(target / "job.json"))

    def heal(self) -> list[Job]:
        """End what lost its supervisor, start missing supervisors, return what is not over.

        Needs the lock.
        """
        self._half_written.clear()
        jobs = self.active()
        for number in self._half_written:  # its submission died: whoever submits holds the lock
            shutil.rmtree(self.jobs / str(number), ignore_errors=True)
        before = None
        while len(jobs) != before:  # an end may be what others wait for
            before = len(jobs)
            for job in jobs:
                if job.holds_slots and job.supervisor is None:
                    self._fail(job)
                elif job.state is JobState.PENDING and job.cancelled:
                    self._finish(job, JobState.CANCELLED, "cancelled")
                elif job.doomed:
                    self._finish(job, JobState.CANCELLED, "DependencyNeverSatisfied")
            jobs = [job for job in jobs if not job.state.over]
            hold(self, jobs)
        for job in Queue(jobs).line[:_SUPERVISED]:
            if job.supervisor is None:
                self._spawn(job)
        return jobs

    def needs_healing(self) -> bool:
        """Return whether `heal` has anything to do; needs no lock."""
        jobs = self.active()
        waiting = [job for job in jobs if not job.holds_slots]
        watched = [job for job in jobs if job.holds_slots] + Queue(jobs).line[:_SUPERVISED]
        return any(job.supervisor is None for job in watched) or any(
            job.cancelled or job.doomed for job in waiting
        )

    def _fail(self, job: Job) -> None:
        if job.record["supervisor"]["boot"] != boot_id():
            reason = "the machine was restarted while the job ran"
        else:
            reason = "the job's supervisor died; its processes were ended"
            left = kill_until_gone(job.members, patience_seconds=_KILL_PATIENCE_SECONDS)
            if left:
                reason = f"the job's supervisor died; processes that stay: {left}"
        self._finish(job, JobState.NODE_FAIL, reason)

    def _finish(self, job: Job, state: JobState, reason: str) -> None:
        known = self.unrecorded.pop(job.job_id, None)
        ended = known.record["ended"] if known else time.time()
        if job.finish(state, ended=ended, reason=reason):
            self.unrecorded[job.job_id] = job

    def _spawn(self, job: Job) -> None:
        path = job.directory / "spawned"
        now, count = time.time(), 0
        try:
            last, count = json.loads(path.read_text("ascii"))
            if 0 <= now - last < _SPAWN_GRACE_SECONDS * max(1, count):
                return  # it may be on its way
        except (OSError, ValueError, TypeError):
            pass
        path.write_text(json.dumps([now, count + 1]), "ascii")
        argv = [sys.executable, "-I", "-X", "utf8", "-c", BOOT_SUPERVISOR, package_parent()]
        argv += [str(self.path), str(self.locks.root), job.job_id]
        mark = os.fsdecode(SUPERVISOR_MARK) + f"{self.cluster}.{job.job_id}"
        name, _, value = mark.partition("=")
        with open(job.directory / "supervisor.log", "ab") as log:
            child = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env={"PATH": os.defpath, name: value},
                start_new_session=True,
            )
        child.wait()  # it forks at once and leaves: nobody has to wait for the supervisor itself

    def _remove_stale(self) -> None:
        for name in os.listdir(self.jobs):
            path = self.jobs / name
            if name.startswith(".tmp-"):
                with contextlib.suppress(OSError):
                    if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                        shutil.rmtree(path)


def _noted_end(directory: Path) -> Record:
    """Return what `Job.finish` could note of an end in spite of a full disk."""
    try:
        state, code, number, ended, reason = os.readlink(directory / "ended").split(" ", 4)
        return {
            "state": JobState(state),
            "exit_code": None if code == "-" else int(code),
            "signal": int(number),
            "ended": float(ended),
            "reason": reason,
        }
    except (OSError, ValueError):
        return {}


def plain(value: Any) -> Any:
    """Return a dataclass as plain values for a record."""
    return asdict(value)


def poke(job: Job, send: Callable[[Identity, int], bool], number: int) -> None:
    """Have a job's supervisor look at the state of things now."""
    who = job.supervisor
    if who is not None:
        send(who, number)
