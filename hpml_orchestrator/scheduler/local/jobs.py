"""The jobs of one machine on disk, and their supervisors.

    <home>/jobs/<id>/       one submission; it appears complete, by one rename
        job.json            what was submitted; it never changes
        environment         the job's environment, NUL-separated, mode 0600; removed once all of its
                            tasks are over, because it may hold passwords
        bin/srun            the local srun, first on the job's PATH
        bin/scontrol        implements `show hostnames` and `requeue`
        <task>.json         the state of one task, by its position in the array (0 for a single
                            job); a task without a file is pending
        steps-<task>/<n>    one empty file per srun of the task: step ids
        supervisor.log      output of the supervisors, normally empty
    <home>/jobs/next        the next id, so that ids of pruned jobs are not reused
    /tmp/hpml-locks-<uid>/  locks, never on the file system of the records: of this home, of the
                            queue of its waiting jobs, and of each submission's waiting supervisor

A process holds the home's lock while it changes which jobs wait or run; a supervisor writes only
its own job. The tasks of an array are numbered from the array's id upwards, as in Slurm.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import (
    HpmlError,
    NotFoundError,
    RecordError,
    SchedulerUnavailable,
    counted,
)
from hpml_orchestrator.records.files import (
    fsync_dir,
    read_json,
    read_text_or_nothing,
    write_json,
    write_text,
)
from hpml_orchestrator.records.owner import Owner, boot_id, owner_is_alive, this_owner
from hpml_orchestrator.records.run import task_output, user_name
from hpml_orchestrator.scheduler.local.processes import (
    SUPERVISOR_MARK,
    LocalMachine,
    Needs,
    descendants,
    kill_until_gone,
    marked,
    send,
    short_hostname,
)
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

# Isolated mode, so that neither the user's variables nor the working directory change what Python
# imports. The package's parent, a checkout or site-packages, is on sys.path for one import only.
# The fork makes the supervisor a daemon.
_BOOT = (
    "import os, sys; os.fork() and os._exit(0); sys.path.insert(0, sys.argv.pop(1)); "
    "import hpml_orchestrator; del sys.path[0]; "
    "from hpml_orchestrator.scheduler.local.jobs import main; main(*sys.argv[1:])"
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
        output: output file of the script, unless it is an array.
        indices: tasks of the array to run; empty for a single job.
        limit: maximum number of tasks that run at once; None for all.
        after: id of each job to wait for, and how that job must end.
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
        directory: directory of its submission.
        request: what was submitted, `job.json`.
        position: position in the array, 0 for a single job.
        status: contents of its state file.
    """

    directory: Path
    request: LocalRequest = field(repr=False)
    position: int
    status: Status

    @property
    def submission(self) -> int:
        """The id of its submission, which is also its place in the queue."""
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
        """The process that runs it, if alive; one on another machine counts as alive."""
        owner = self.status.supervisor
        return owner if owner and owner_is_alive(owner) else None

    def claim(self, cpus: Sequence[int], gpus: Sequence[str]) -> None:
        """Record that the calling process supervises it and starts it now. Needs the lock."""
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
    """The jobs in one directory, which is created on demand."""

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.abspath(path))
        self._jobs = self.path / "jobs"
        # One queue however HPML_HOME is spelled: a link in the path makes no second one.
        digest = hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()
        self.cluster = f"local-{digest[:6]}"
        self._lock_name = f"local-{digest[:16]}"
        self._requests: dict[int, LocalRequest] = {}
        self._ends: dict[Path, Status] = {}
        self._over: set[int] = set()

    @contextlib.contextmanager
    def lock(self, patience_seconds: float = _LOCK_PATIENCE_SECONDS) -> Iterator[None]:
        """Hold the lock of this home.

        Raises:
            SchedulerUnavailable: another process held it for too long.
        """
        # flock, not a lock file: the kernel releases it however its holder dies.
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
            os.utime(fd)  # cleaners of /tmp remove old files
            yield

    @contextlib.contextmanager
    def opened(self, what: str) -> Iterator[int]:
        """Open one of the lock files, and close it afterwards."""
        # O_NOFOLLOW, because anybody can write to /tmp.
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
            # Another user may have created the directory first, and could then hold our locks or
            # redirect them.
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

        Returns an empty list if there are none, or if their records cannot be read.
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
        """Return a task's state: pending without a file; a final state is read only once."""
        name = f"{position}.json"
        # A directory listing may miss a file that is being renamed into place. A running task also
        # has a directory of steps, and reads only its own file.
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
        """Return the jobs of an id, empty if it was pruned; None if they cannot be read now."""
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
                # A finished job never changes, so its records need not be read on every poll. A job
                # whose records cannot be read does not count as finished: it is read again next
                # time.
                if jobs and not unfinished:
                    self._over.add(number)
                    with contextlib.suppress(OSError):  # already gone, or another user's
                        os.unlink(self._jobs / str(number) / "environment")
        return active

    def settle(self) -> list[LocalJob]:
        """End lost jobs; return the unfinished ones. Needs the lock.

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
        # With the supervisor gone, its children belong to init, so the process tree no longer shows
        # them. Their environment still names the job, even after they left its session.
        left = kill_until_gone(lambda: marked(variables), patience_seconds=_KILL_PATIENCE_SECONDS)
        if left:
            return f"the job's supervisor died; these processes remain: {left}"
        return "the job's supervisor died; its processes were killed"

    def start(self, jobs: Sequence[LocalJob]) -> None:
        """Start a supervisor for each submission with pending tasks and no waiting supervisor."""
        here = [job for job in jobs if job.request.host == short_hostname()]
        for number in {job.submission for job in here if job.state is JobState.PENDING}:
            # The supervisor inherits the lock and holds it while it waits, so either process may
            # die at any point.
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
                        # Almost empty: with its submitter's job variables, the supervisor would
                        # look like a part of that outer job, and ending the outer job would kill
                        # it.
                        env={"PATH": os.defpath, SUPERVISOR_MARK: str(number)},
                        start_new_session=True,
                        pass_fds=[fd],
                    )
                child.wait()  # it forks and exits at once

    def started(self, number: int, fd: int) -> None:
        """Allow another supervisor to wait for the submission's next task."""
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
        # The larger of both: `next` survives a prune of the newest jobs, and the directories
        # survive a lost or torn `next`. Using an id twice would mix up the records of two runs.
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
        # Absolute path of the interpreter, without site-packages: the job may change PATH or
        # activate an environment, and this srun must still start the same way, and fast.
        srun = shlex.join([sys.executable, "-I", "-S", str(self._jobs / f"{number}/bin/srun.py")])
        write_text(building / "bin" / "srun", f'#!/bin/sh\nexec {srun} "$@"\n', mode=0o755)
        write_text(building / "bin" / "scontrol", _SCONTROL, mode=0o755)
        write_json(building / "job.json", asdict(request))
        # Write `next` before the rename: a crash in between only skips some ids.
        write_text(self._jobs / _NEXT, f"{number + max(1, len(request.indices))}\n")
        os.rename(building, self._jobs / str(number))
        fsync_dir(self._jobs)
        return str(number)

    def _remove_unfinished(self) -> None:
        for path in self._jobs.glob(".tmp-*"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                    shutil.rmtree(path)


# The supervisor: waits for its turn, runs one local job, and records how it ended.
#
# It is a daemon in its own session, started with the submission. For an array it takes the next
# task and starts another supervisor for those after it. It is a child subreaper: orphans of the job
# become its children, and it ends them with the job. While the job runs it handles three signals:
# USR1 cancels the job, USR2 requeues it, and TERM ends it as a node failure, for example when the
# machine shuts down.

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_HEARD = {signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM}
_IGNORED = {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGPIPE}
_NEVER = float("inf")
_NEVER_MET = "DependencyNeverSatisfied"
_REQUEUE = (JobState.REQUEUED, "requeued")
_MAX_PAUSE_SECONDS = 3600.0
_PAUSE_SECONDS = 0.1
_LOOK_SECONDS = 0.2
_END_PATIENCE_SECONDS = 10.0
_RECORD_PATIENCE_SECONDS = 600.0
_RECORD_PAUSE_SECONDS = 0.5


def main(home_path: str, number: str, lock: str) -> None:
    """Wait for the next task of a submission, and run it."""
    for ignored in _IGNORED:
        signal.signal(ignored, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)  # inherited blocked from another supervisor
    os.set_inheritable(int(lock), False)
    home = Home(Path(home_path))
    run = _next(home, int(number))
    with contextlib.suppress(HpmlError, OSError):  # the next hpml command starts the others
        home.started(int(number), int(lock))
    if run is not None:
        run.until_over()
        if run.ending and run.ending[0] is JobState.NODE_FAIL:
            return  # the machine shuts down: waiting jobs start after the reboot
        # Under the lock: while another process holds it, a newly recorded end must not look like
        # the death of a supervisor.
        with contextlib.suppress(HpmlError, OSError), home.lock():
            home.start(home.settle())


def _next(home: Home, number: int) -> _Run | None:
    """Wait until a task of a submission may start, and claim it; None if all have started.

    Jobs that could start form a queue, ordered by number: each locks one byte of a file while it
    waits. So the kernel wakes a process when all earlier ones are gone, and removes a killed one
    from the queue.
    """
    with home.opened("line") as line:
        while tasks := home.pending(number):
            reason = _obstacle(home, tasks[0])
            if reason:
                fcntl.lockf(line, fcntl.LOCK_UN, 1, number)  # let others pass
            else:
                os.utime(line)  # cleaners of /tmp remove old files
                fcntl.lockf(line, fcntl.LOCK_EX, 1, number)
                reason = "" if _nobody_before(line, number, fcntl.LOCK_NB) else BEHIND
            if not reason or reason != tasks[0].status.reason:
                try:
                    claimed = _claimed(home, number, reason)
                except (HpmlError, OSError):  # do not lose a job to a briefly full disk
                    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)
                    time.sleep(_RECORD_PAUSE_SECONDS)
                    continue
                if claimed is not None:
                    return _Run(home, claimed)
            if reason == BEHIND:
                _nobody_before(line, number)
            else:
                time.sleep(_LOOK_SECONDS)
    return None


def _claimed(home: Home, number: int, reason: str) -> LocalJob | None:
    """Claim a submission's next task, or record why it waits; raises if that cannot be written."""
    with home.lock(_NEVER):
        tasks = home.pending(number)  # some may have been cancelled
        if reason == _NEVER_MET:
            for job in tasks:
                job.end(JobState.CANCELLED, reason)
        if reason == _NEVER_MET or not tasks:
            return None
        got = reason or _allocation(tasks[0], home.settle())
        if isinstance(got, str):
            tasks[0].wait_for(got)
            return None
        # Block signals before the claim: from then on `cancel` may send one, whose default
        # action would kill this process.
        signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
        tasks[0].claim(*got)
        return tasks[0]


def _nobody_before(line: int, number: int, how: int = 0) -> bool:
    """Wait until a job is first in the queue, or (with LOCK_NB) return whether it is."""
    try:
        fcntl.lockf(line, fcntl.LOCK_SH | how, number, 0)
    except (BlockingIOError, PermissionError):
        return False
    fcntl.lockf(line, fcntl.LOCK_UN, number, 0)
    return True


def _obstacle(home: Home, job: LocalJob) -> str:
    """Return what keeps a job from starting apart from resources; empty for nothing."""
    request = job.request
    met = {_met(home, job_id, end) for job_id, end in request.after}
    if False in met:  # one failed dependency decides, even while others are open
        return _NEVER_MET
    if None in met:
        return "Dependency"
    tasks = home.jobs_of(job.submission) if request.limit else []
    if request.limit and sum(task.has_slots for task in tasks) >= request.limit:
        return f"Priority: the array runs {counted(request.limit, 'task')} at once"
    return ""


def _met(home: Home, job_id: str, end: str) -> bool | None:
    """Return whether a dependency is met; None while that is open."""
    jobs = home.dependency(job_id)
    if jobs is None:
        return None
    states = [job.state for job in jobs]
    if not all(state.over for state in states):
        return None
    completed = all(state is JobState.COMPLETED for state in states)
    # A pruned job has no states. How it ended is unknown, which satisfies only `any`.
    return end == "any" or (bool(states) and completed == (end == "ok"))


def _allocation(job: LocalJob, unfinished: Sequence[LocalJob]) -> tuple[list[int], list[str]] | str:
    """Return the CPUs and GPUs for a job, or why none are available."""
    machine, needs = job.request.machine, job.request.needs
    holders = [other for other in unfinished if other.has_slots]
    taken_cpus = {cpu for holder in holders for cpu in holder.status.cpus}
    taken_gpus = {gpu for holder in holders for gpu in holder.status.gpus}
    cpus = [cpu for cpu in machine.cpus if cpu not in taken_cpus]
    gpus = [gpu for gpu in machine.gpus if gpu not in taken_gpus]
    short = [
        f"{wanted} {kind}s wanted, {free} of {total} free"
        for kind, wanted, free, total in (
            ("CPU", needs.cpus, len(cpus), len(machine.cpus)),
            ("GPU", needs.gpus, len(gpus), len(machine.gpus)),
        )
        if free < wanted
    ]
    if short:
        running = ", ".join(holder.job_id for holder in holders)
        return f"Resources: {'; '.join(short)} (running: {running})"
    return cpus[: needs.cpus], gpus[: needs.gpus]


class _Run:
    """One job, from its first process to its last."""

    def __init__(self, home: Home, job: LocalJob) -> None:
        self.home = home
        self.job = job
        self.shell: subprocess.Popen[bytes]
        self.status: int | None = None
        self.ending: tuple[JobState, str] | None = None
        self.kill_at = _NEVER  # monotonic: suspended time does not count

    def until_over(self) -> None:
        """Run the job and record its end."""
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0)
        try:
            self._start()
        except (OSError, subprocess.SubprocessError) as error:
            self._keep(JobState.FAILED, f"cannot start: {error}", 1)
            return
        limit_at = time.monotonic() + self.job.request.needs.seconds
        while self.status is None:
            deadline = limit_at if self.ending is None else self.kill_at
            self._hear(deadline - time.monotonic())
            if self.ending is None and time.monotonic() >= limit_at:
                self.ending = (JobState.TIMEOUT, "TimeLimit")
            if self.status is None and self.ending is not None:
                self._end(*self.ending)
        # A script that requeues itself and ends at once sends both signals together.
        self._hear(0.0)
        left = self._end_leftovers()
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(0), 0, 0, 0)
        if self.ending == _REQUEUE and not left:
            with self.home.lock(_NEVER):  # `cancel` holds it while choosing a process
                self._hear(0.0)
                if self.ending == _REQUEUE:
                    self._keep(*_REQUEUE)
                    return
        code, number = (self.status, 0) if self.status >= 0 else (0, -self.status)
        state, reason = self.ending or (JobState.COMPLETED, "")
        if self.ending is None and number:
            state, reason = JobState.FAILED, f"RaisedSignal:{number}({signal.strsignal(number)})"
        elif self.ending is None and code:
            state, reason = JobState.FAILED, "NonZeroExitCode"
        if left:
            reason = f"{reason or 'ended'}; these processes remain: {left}"
            # Processes that survive SIGKILL still hold GPUs or memory: the next attempt would
            # compete with them.
            state = JobState.NODE_FAIL if state is JobState.REQUEUED else state
        self._keep(state, reason, code, number)

    def _hear(self, seconds: float) -> None:
        """Wait for a signal, reap ended processes, and note how the job is to end."""
        heard, pause = set(), min(max(seconds, 0.0), _MAX_PAUSE_SECONDS)
        while received := signal.sigtimedwait(_HEARD, pause):
            heard.add(received.si_signo)
            pause = 0.0
        with contextlib.suppress(ChildProcessError):  # orphans of the job are also children
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self.shell.pid:
                    self.status = os.waitstatus_to_exitcode(ended[1])
        state = self.ending[0] if self.ending else None
        runs = state is None and self.status is None
        # The script that asked for the requeue may have ended since. A time limit does not override
        # the request; a cancellation does.
        if signal.SIGUSR2 in heard and state in (None, JobState.TIMEOUT):
            self.ending = _REQUEUE
        elif signal.SIGTERM in heard and runs:
            self.ending = (JobState.NODE_FAIL, "the job's supervisor received a signal to stop")
        if signal.SIGUSR1 in heard and (runs or state is JobState.REQUEUED):
            self.ending = (JobState.CANCELLED, "cancelled")

    def _start(self) -> None:
        request, directory = self.job.request, self.job.directory
        steps = directory / f"steps-{self.job.position}"
        steps.mkdir(exist_ok=True)
        entries = (directory / "environment").read_bytes().split(b"\0")
        pairs = (os.fsdecode(entry).partition("=") for entry in entries if entry)
        environment = {name: value for name, _, value in pairs}
        environment.setdefault("TMPDIR", tempfile.gettempdir())
        environment |= _variables(self.job, self.home.cluster)
        environment["PATH"] = f"{directory / 'bin'}:{environment.get('PATH', os.defpath)}"
        environment["HPML_LOCAL_STEPS"] = str(steps)
        environment["HPML_LOCAL_SUPERVISOR_PID"] = str(supervisor := os.getpid())
        environment["HPML_LOCAL_KILL_WAIT"] = f"{request.kill_wait_seconds:g}"

        def prepare() -> None:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
            # The parent may have died before prctl took effect, and then no death signal comes.
            if os.getppid() != supervisor:
                os._exit(1)
            for number in _IGNORED:  # ignored signals would stay ignored
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, self.job.status.cpus)

        script = os.path.join(request.directory, "job.sh")
        os.stat(script)
        with open(self.job.output, "ab", 0) as output:
            self.shell = subprocess.Popen(
                ["bash", script],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=request.directory,
                env=environment,
                umask=request.umask,
                start_new_session=True,
                preexec_fn=prepare,  # noqa: PLW1509 - there are no threads
            )

    def _end(self, state: JobState, reason: str) -> None:
        """Start to end the job, or kill it if it is late; write the reason to its output."""
        if self.kill_at < _NEVER:
            if time.monotonic() >= self.kill_at:
                self._send(signal.SIGKILL)
                time.sleep(_PAUSE_SECONDS)
            return
        # The wording of slurmstepd.
        why = {
            JobState.TIMEOUT: " DUE TO TIME LIMIT",
            JobState.NODE_FAIL: " DUE TO NODE FAILURE",
            JobState.REQUEUED: " DUE TO JOB REQUEUE",
        }
        line = (
            f"hpml: *** JOB {self.job.number} ON {os.uname().nodename} CANCELLED AT "
            f"{time.strftime('%Y-%m-%dT%H:%M:%S')}{why.get(state, '')} ***\n"
        )
        with contextlib.suppress(OSError), open(self.job.output, "a", encoding="utf-8") as output:
            output.write(line)
        self._terminate(reason)

    def _terminate(self, reason: str) -> None:
        self.kill_at = time.monotonic() + self.job.request.kill_wait_seconds
        with contextlib.suppress(RecordError):
            self.job.save(replace(self.job.status, state=JobState.COMPLETING, reason=reason))
        # SIGCONT first, as slurmstepd does: a stopped process handles SIGTERM only after it
        # continues.
        self._send(signal.SIGCONT)
        self._send(signal.SIGTERM)

    def _send(self, number: int) -> None:
        # Oldest first: otherwise a script would continue with its next command.
        for who in sorted(descendants(os.getpid()), key=lambda who: (who.start, who.pid)):
            send(who, number)

    def _end_leftovers(self) -> list[int]:
        """End what the script left behind, starting with SIGTERM; return the pids that survive."""
        if descendants(os.getpid()) and self.kill_at == _NEVER:
            self._terminate("")
        while time.monotonic() < self.kill_at and descendants(os.getpid()):
            self._hear(_PAUSE_SECONDS)
        return kill_until_gone(
            lambda: descendants(os.getpid()),
            patience_seconds=_END_PATIENCE_SECONDS,
            reap=lambda: self._hear(0.0),
        )

    def _keep(self, state: JobState, reason: str, code: int = 0, number: int = 0) -> None:
        """Record the end; on a full disk, retry until there is room."""
        status = Status(restarts=self.job.status.restarts + 1)
        if state is not JobState.REQUEUED:
            status = replace(
                self.job.status,
                state=state,
                ended=time.time(),
                exit_code=code,
                signal=number,
                reason=reason,
            )
        until = time.monotonic() + _RECORD_PATIENCE_SECONDS
        while True:
            try:
                return self.job.save(status)
            except RecordError as error:
                # The end exists nowhere else. After an exit, the next query would call the job
                # lost, so retry for ten minutes unless the machine shuts down.
                late = time.monotonic() > until
                if late or signal.sigtimedwait({signal.SIGTERM}, _RECORD_PAUSE_SECONDS):
                    sys.exit(f"the end of job {self.job.job_id} ({state}) is not recorded: {error}")


def _variables(job: LocalJob, cluster: str) -> dict[str, str]:
    """Return the variables of a one-node Slurm job, for a job with allocated CPUs and GPUs."""
    request, needs, status = job.request, job.request.needs, job.status
    started = int(status.started or 0)
    host = short_hostname()
    values: dict[str, object] = {
        **dict.fromkeys(("SLURM_JOB_ID", "SLURM_JOBID"), job.number),
        **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), 1),
        **dict.fromkeys(("SLURM_NODELIST", "SLURM_JOB_NODELIST", "SLURMD_NODENAME"), host),
        **dict.fromkeys(("SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_GTIDS"), 0),
        **dict.fromkeys(("SLURM_CPUS_ON_NODE", "SLURM_JOB_CPUS_PER_NODE"), len(status.cpus)),
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS"), needs.tasks),
        **dict.fromkeys(("SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"), needs.tasks),
        "SLURM_CPUS_PER_TASK": needs.cpus_per_task,
        "SLURM_MEM_PER_NODE": needs.memory_mb,
        "SLURM_JOB_NAME": request.name,
        "SLURM_CLUSTER_NAME": cluster,
        "SLURM_SUBMIT_DIR": request.directory,
        "SLURM_SUBMIT_HOST": request.host,
        "SLURM_JOB_PARTITION": "local",
        "SLURM_JOB_UID": os.getuid(),
        "SLURM_JOB_GID": os.getgid(),
        "SLURM_JOB_USER": user_name(os.getuid()),
        "SLURM_JOB_START_TIME": started,
        "SLURM_JOB_END_TIME": started + needs.seconds,
        "SLURM_RESTART_COUNT": status.restarts or None,
    }
    if gpus := status.gpus:
        values |= dict.fromkeys(("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"), len(gpus))
        values |= dict.fromkeys(("SLURM_JOB_GPUS", "CUDA_VISIBLE_DEVICES"), ",".join(gpus))
    if indices := request.indices:
        values |= {
            "SLURM_ARRAY_JOB_ID": job.directory.name,
            "SLURM_ARRAY_TASK_ID": job.index,
            "SLURM_ARRAY_TASK_COUNT": len(indices),
            "SLURM_ARRAY_TASK_MIN": indices[0],
            "SLURM_ARRAY_TASK_MAX": indices[-1],
            "SLURM_ARRAY_TASK_STEP": indices[1] - indices[0] if len(indices) > 1 else 1,
        }
    return {name: str(value) for name, value in values.items() if value is not None}
