"""The jobs of one machine on disk, and their supervisors.

    <home>/jobs/<id>/       one submission; it appears complete, by one rename
        job.json            what was submitted; it never changes
        environment         the job's environment, NUL-separated, mode 0600; removed once all of its
                            tasks are over, because it may hold passwords
        bin/srun            the local srun, first on the job's PATH
        bin/scontrol        answers `show hostnames` and `requeue`
        <task>.json         the state of one task, by its position in the array (0 for a single
                            job); a task without one is pending
        steps-<task>/<n>    one empty file per srun of the task: step ids
        supervisor.log      output of the supervisors, normally empty
    <home>/jobs/next        the next id, so that the id of a pruned job is not used again
    /tmp/hpml-locks-<uid>/  locks, never on the file system of the records: of this home, of the
                            line of its waiting jobs, and of each submission's waiting supervisor

A process holds the home's lock while it changes which jobs wait or run; a supervisor writes only
its own job. The tasks of an array are numbered from the array's id on, as in Slurm.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import NotFoundError, RecordError, SchedulerUnavailable
from hpml_orchestrator.records.files import (
    fsync_dir,
    read_json,
    read_text_or_nothing,
    write_json,
    write_text,
)
from hpml_orchestrator.records.process import Owner, boot_id, owner_is_alive, this_owner
from hpml_orchestrator.records.run import task_output
from hpml_orchestrator.scheduler.local.processes import (
    SUPERVISOR_MARK,
    kill_until_gone,
    marked,
)
from hpml_orchestrator.scheduler.local.resources import LocalMachine, Needs, short_hostname
from hpml_orchestrator.scheduler.model import JobState

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

_LOCK_PATIENCE_SECONDS = 60.0
_LOCK_PAUSE_SECONDS = 0.005
_STALE_SECONDS = 3600.0
_KILL_PATIENCE_SECONDS = 5.0
_NEXT = "next"
BEHIND = "Priority: an earlier job waits for room"
_SRUN = Path(__file__).with_name("srun.py")

_SCONTROL = """\
#!/bin/sh
# A local job may ask for the names of its nodes, and requeue itself: its supervisor does so.
case "$1 $2" in
  'show hostname' | 'show hostnames') echo "${3-$SLURM_JOB_NODELIST}" | tr , '\\n' && exit ;;
  "requeue $SLURM_JOB_ID" | "requeue ${SLURM_ARRAY_JOB_ID-}_${SLURM_ARRAY_TASK_ID-}")
    kill -USR2 "$HPML_LOCAL_SUPERVISOR_PID"; exit ;;
esac
echo "scontrol: error: a local job has: show hostnames; requeue $SLURM_JOB_ID (itself)" >&2
exit 1
"""

# Python in isolated mode, so that neither the user's variables nor the working directory change
# what it imports. The package's parent, a checkout or site-packages, is on sys.path for one import
# only. The fork makes the supervisor a daemon.
_BOOT = (
    "import os, sys; os.fork() and os._exit(0); sys.path.insert(0, sys.argv.pop(1)); "
    "import hpml_orchestrator; del sys.path[0]; "
    "from hpml_orchestrator.scheduler.local.supervisor import main; main(*sys.argv[1:])"
)
_PACKAGE_PARENT = str(Path(__file__).resolve().parents[3])


@dataclass(frozen=True)
class Status:
    """The state of one task, `<task>.json`; times are seconds since the epoch."""

    state: JobState = JobState.PENDING
    cpus: Sequence[int] = ()
    gpus: Sequence[str] = ()
    supervisor: Owner | None = None
    started: float | None = None
    ended: float | None = None
    exit_code: int | None = None
    signal: int = 0
    reason: str = ""
    restarts: int = 0

    @staticmethod
    def read(path: Path) -> Status:
        """Read a state file."""
        known = _fields(Status, read_json(path))
        supervisor = Owner.parse(known.pop("supervisor", None) or {})
        return Status(JobState(known.pop("state")), supervisor=supervisor, **known)


_PENDING = Status()


@dataclass(frozen=True)
class LocalRequest:
    """What was submitted, `job.json`.

    Attributes:
        output: of the script, unless it is an array.
        indices: of the array's tasks to run; empty for a single job.
        limit: maximum number of tasks that run at once; None: all.
        after: id of each job to wait for, and how it must end.
        submitted: seconds since the epoch.
    """

    name: str
    directory: str
    output: str
    host: str
    indices: Sequence[int]
    limit: int | None
    needs: Needs
    machine: LocalMachine
    kill_wait_seconds: float
    umask: int
    after: Sequence[tuple[str, str]]
    submitted: float

    @staticmethod
    def read(path: Path) -> LocalRequest:
        """Read a request; raises TypeError or KeyError if a field is missing."""
        known = _fields(LocalRequest, read_json(path))
        needs, machine = Needs(**known.pop("needs")), LocalMachine(**known.pop("machine"))
        return LocalRequest(needs=needs, machine=machine, **known)


def _fields(cls: type, record: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: record[field.name] for field in fields(cls) if field.name in record}


@dataclass
class LocalJob:
    """One job, or one task of a job array.

    Attributes:
        directory: of its submission.
        request: what was submitted, `job.json`.
        position: its place in the array, 0 for a single job.
        status: its state file.
    """

    directory: Path
    request: LocalRequest = field(repr=False)
    position: int
    status: Status

    @property
    def submission(self) -> int:
        """The id of its submission: the place in the line."""
        return int(self.directory.name)

    @property
    def number(self) -> int:
        """The job's own number, its SLURM_JOB_ID."""
        return self.submission + self.position

    @property
    def index(self) -> int | None:
        """The index in the array; None for a single job."""
        indices = self.request.indices
        return indices[self.position] if indices else None

    @property
    def job_id(self) -> str:
        """The id that users see: `7`, or `7_3` for a task of an array."""
        name = self.directory.name
        return name if self.index is None else f"{name}_{self.index}"

    @property
    def output(self) -> str:
        """Path of the output file."""
        if self.index is None:
            return self.request.output
        return str(task_output(Path(self.request.directory), self.index))

    @property
    def state(self) -> JobState:
        """The recorded state."""
        return self.status.state

    @property
    def has_slots(self) -> bool:
        """Whether CPUs and GPUs are allocated to it."""
        return self.state in (JobState.RUNNING, JobState.COMPLETING)

    @property
    def supervisor(self) -> Owner | None:
        """The process that runs it, if that still lives; one of another machine does."""
        owner = self.status.supervisor
        return owner if owner and owner_is_alive(owner) else None

    def claim(self, cpus: Sequence[int], gpus: Sequence[str]) -> None:
        """Record that the calling process is its supervisor and starts it now. Needs the lock."""
        self.save(
            replace(
                self.status,
                state=JobState.RUNNING,
                cpus=cpus,
                gpus=gpus,
                supervisor=this_owner(self.job_id),
                started=time.time(),
                reason="",
            )
        )

    def wait_for(self, reason: str) -> None:
        """Record why it waits."""
        if reason != self.status.reason:
            with contextlib.suppress(RecordError):
                self.save(replace(self.status, reason=reason))

    def end(self, state: JobState, reason: str) -> None:
        """Record the end of a job that nobody runs; raises as `save`."""
        self.save(replace(self.status, state=state, ended=time.time(), reason=reason))

    def save(self, status: Status) -> None:
        """Change the state, here and on disk.

        Raises:
            RecordError: it cannot be written; the state in memory is changed nevertheless.
        """
        self.status = status
        write_json(self.directory / f"{self.position}.json", asdict(status))


class Home:
    """The jobs below one directory, which is made on demand."""

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.abspath(path))
        self._jobs = self.path / "jobs"
        digest = hashlib.sha256(os.fsencode(self.path)).hexdigest()
        self.cluster = f"local-{digest[:6]}"
        self._lock_name = f"local-{digest[:16]}"
        self._requests: dict[int, LocalRequest] = {}
        self._ends: dict[Path, Status] = {}
        self._over: set[int] = set()

    @contextlib.contextmanager
    def lock(self, patience_seconds: float = _LOCK_PATIENCE_SECONDS) -> Iterator[None]:
        """Hold the lock of this home.

        Raises:
            SchedulerUnavailable: it was not free in time.
        """
        # flock, not a lock file: the kernel releases it when the holder dies, whichever way.
        with self.opened("lock") as fd:
            until = time.monotonic() + patience_seconds
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= until:
                        raise SchedulerUnavailable(
                            f"the lock of {self.path} was not free for {patience_seconds:g} s",
                            hint="is an hpml process stopped? `fuser` shows which one holds "
                            f"{self._lock_path('lock')}",
                        ) from None
                time.sleep(_LOCK_PAUSE_SECONDS)
            os.utime(fd)  # cleaners of /tmp go by age
            yield

    @contextlib.contextmanager
    def opened(self, what: str) -> Iterator[int]:
        """Open one of the files for locks, and close it in the end."""
        # O_NOFOLLOW, because /tmp is open to everybody.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self._lock_path(what), flags, 0o600)
        try:
            yield fd
        finally:
            os.close(fd)

    def _lock_path(self, what: str) -> Path:
        path = Path(f"/tmp/hpml-locks-{os.geteuid()}")  # noqa: S108 - checked below
        with contextlib.suppress(OSError):
            path.mkdir(mode=0o700, exist_ok=True)
            status = path.lstat()
            # Somebody else may have made the directory first. With their permissions they could
            # hold our locks, or point them elsewhere.
            private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
            if private and status.st_uid == os.geteuid():
                return path / f"{self._lock_name}.{what}"
        raise SchedulerUnavailable(
            f"{path} is not a directory of this user alone",
            hint="the local backend keeps its locks there: remove it, or have it removed",
        )

    def numbers(self) -> list[int]:
        """Return the ids of all submissions in order.

        Raises:
            SchedulerUnavailable: the directory cannot be read.
        """
        try:
            return sorted(int(name) for name in os.listdir(self._jobs) if name.isdecimal())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise SchedulerUnavailable(
                f"cannot read {self._jobs}: {error.strerror}",
                hint="set HPML_HOME to the directory of your records",
            ) from error

    def jobs_of(self, number: int) -> list[LocalJob]:
        """Return the jobs of a submission: all tasks of an array.

        The list is empty without jobs, or if their records cannot be read.
        """
        try:
            return self._read(number)
        except (NotFoundError, RecordError, KeyError, OSError, TypeError, ValueError):
            return []

    def _read(self, number: int, index: int | None = None) -> list[LocalJob]:
        directory = self._jobs / str(number)
        if number not in self._requests:
            self._requests[number] = LocalRequest.read(directory / "job.json")
        request = self._requests[number]
        indices = list(request.indices)
        positions = range(len(indices) or 1)
        if index is not None:
            positions = range(indices.index(index), indices.index(index) + 1)
        names = set(os.listdir(directory))
        return [
            LocalJob(directory, request, position, self._status(directory, position, names))
            for position in positions
        ]

    def _status(self, directory: Path, position: int, names: Collection[str]) -> Status:
        """Return a task's state: pending without a file, read once if it is over."""
        name = f"{position}.json"
        # A file that is renamed to its name while the directory is read may be missing from it.
        # One that runs has the directory of its steps, too, and reads only its own file.
        if name not in names and f"steps-{position}" not in names:
            return _PENDING
        path = directory / name
        if path not in self._ends:
            status = Status.read(path)
            if not status.state.over:
                return status
            self._ends[path] = status
        return self._ends[path]

    def pending(self, number: int) -> list[LocalJob]:
        """Return the jobs of a submission that wait, in order."""
        return [job for job in self.jobs_of(number) if job.state is JobState.PENDING]

    def find(self, job_id: str) -> list[LocalJob]:
        """Return the jobs of an id: `7` means all tasks of an array, `7_3` one of them."""
        return self.dependency(job_id) or []

    def dependency(self, job_id: str) -> list[LocalJob] | None:
        """Return the jobs of an id, none if it was pruned; None if that cannot be read now."""
        number, _, index = job_id.partition("_")
        if not number.isdecimal() or (index and not index.isdecimal()):
            return []
        try:
            return self._read(int(number), int(index) if index else None)
        except (NotFoundError, FileNotFoundError, ValueError):
            return []
        except (RecordError, KeyError, OSError, TypeError):
            return None

    def active(self) -> list[LocalJob]:
        """Return the jobs that are not over, in order."""
        active: list[LocalJob] = []
        for number in self.numbers():
            if number not in self._over:
                jobs = self.jobs_of(number)
                unfinished = [job for job in jobs if not job.state.over]
                active += unfinished
                # A job that is over never changes again, so its records need not be read on every
                # poll. One whose records cannot be read is not over: it is read again next time.
                if jobs and not unfinished:
                    self._over.add(number)
                    with contextlib.suppress(OSError):  # gone already, or another user's
                        os.unlink(self._jobs / str(number) / "environment")
        return active

    def settle(self) -> list[LocalJob]:
        """End jobs that are lost; return the unfinished ones. Needs the lock.

        What cannot be written to disk now is retried by the next call.
        """
        jobs = self.active()
        for job in jobs:
            if job.has_slots and job.supervisor is None:
                why = self._clean_up(job)
                with contextlib.suppress(RecordError):
                    job.end(JobState.NODE_FAIL, why)
        return jobs

    def _clean_up(self, job: LocalJob) -> str:
        if job.status.supervisor is None or job.status.supervisor.boot_id != boot_id():
            return "the machine was restarted while the job ran"
        variables = [f"SLURM_JOB_ID={job.number}", f"SLURM_CLUSTER_NAME={self.cluster}"]
        # With the supervisor gone, descent leads nowhere: its children belong to init now. Their
        # environment still names the job, even that of a process that left its session.
        left = kill_until_gone(lambda: marked(variables), patience_seconds=_KILL_PATIENCE_SECONDS)
        if left:
            return f"the job's supervisor died; these processes remain: {left}"
        return "the job's supervisor died; its processes were killed"

    def start(self, jobs: Sequence[LocalJob]) -> None:
        """Start a supervisor for each submission with pending tasks that has none waiting."""
        here = [job for job in jobs if job.request.host == short_hostname()]
        for number in {job.submission for job in here if job.state is JobState.PENDING}:
            # The supervisor inherits the lock, and holds it as long as it waits. So this process
            # may die at any point, and so may that one.
            with self.opened(str(number)) as fd, contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                argv = [sys.executable, "-I", "-X", "utf8", "-c", _BOOT, _PACKAGE_PARENT]
                argv += [str(self.path), str(number), str(fd)]
                with open(self._jobs / str(number) / "supervisor.log", "ab") as log:
                    child = subprocess.Popen(
                        argv,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        cwd="/",
                        # An almost empty environment: the supervisor must not be found by its
                        # submitter's job variables, since whoever ends that outer job would kill
                        # this one too.
                        env={"PATH": os.defpath, SUPERVISOR_MARK: str(number)},
                        start_new_session=True,
                        pass_fds=[fd],
                    )
                child.wait()  # it forks at once and leaves

    def started(self, number: int, fd: int) -> None:
        """Let another supervisor wait for the next task of a submission."""
        with contextlib.suppress(OSError):
            os.unlink(self._lock_path(str(number)))
        os.close(fd)
        self.start(self.jobs_of(number))

    def publish(self, request: LocalRequest, environment: Mapping[str, str]) -> str:
        """Write a new submission and return its id. Needs the lock.

        Raises:
            RecordError, OSError: it cannot be written; no job exists.
        """
        self._jobs.mkdir(parents=True, exist_ok=True)
        self._remove_unfinished()
        last = max(self.numbers(), default=0)
        recorded = read_text_or_nothing(self._jobs / _NEXT).strip()
        # The largest of both counts: `next` survives a prune of the newest jobs, and the
        # directories survive a lost or torn `next`. An id that is used twice would mix up two runs'
        # records.
        number = max(
            last + max(1, len(self.jobs_of(last))), int(recorded) if recorded.isdecimal() else 1
        )
        building = Path(tempfile.mkdtemp(prefix=".tmp-", dir=self._jobs))
        entries = (
            os.fsencode(name) + b"=" + os.fsencode(value) for name, value in environment.items()
        )
        write_text(building / "environment", b"\0".join(entries), mode=0o600)
        (building / "bin").mkdir()
        shutil.copyfile(_SRUN, building / "bin" / "srun.py")
        # The absolute interpreter without site-packages: the job may change PATH or activate an
        # environment, and this srun must start the same, and fast.
        srun = shlex.join([sys.executable, "-I", "-S", str(self._jobs / f"{number}/bin/srun.py")])
        write_text(building / "bin" / "srun", f'#!/bin/sh\nexec {srun} "$@"\n', mode=0o755)
        write_text(building / "bin" / "scontrol", _SCONTROL, mode=0o755)
        write_json(building / "job.json", asdict(request))
        # Written before the rename: dying in between only skips some ids.
        write_text(self._jobs / _NEXT, f"{number + max(1, len(request.indices))}\n")
        os.rename(building, self._jobs / str(number))
        fsync_dir(self._jobs)
        return str(number)

    def _remove_unfinished(self) -> None:
        for path in self._jobs.glob(".tmp-*"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                    shutil.rmtree(path)
