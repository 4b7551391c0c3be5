"""The Slurm backend: runs sbatch, squeue, sacct and scancel of version 22.05 and later."""

from __future__ import annotations

import contextlib
import os
import random
import re
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import SchedulerError, SchedulerUnavailable
from hpml_orchestrator.records.files import read_text_or_nothing
from hpml_orchestrator.records.ids import parse_answer, valid_id
from hpml_orchestrator.records.texts import clock_text, first_few
from hpml_orchestrator.records.units import format_time
from hpml_orchestrator.scheduler.command import Clock, CommandMissing, SubprocessRunner
from hpml_orchestrator.scheduler.model import BEFORE_REQUEUE, JobState, JobStatus
from hpml_orchestrator.scheduler.slurm.messages import (
    NODES_DOWN,
    NOT_CONFIGURED,
    NOT_CONFIGURED_HINT,
    clean,
    denied,
    hint_for,
    no_such_job,
    not_configured,
    on_other_cluster,
    transport_fault,
)
from hpml_orchestrator.scheduler.slurm.records import (
    SACCT_FIELDS,
    SQUEUE_FORMAT,
    TASK,
    UNIT,
    QueueEntry,
    escape_output,
    escape_task_output,
    match,
    parse_config,
    parse_records,
    parse_sacct,
    parse_squeue,
    parse_time,
    parse_version,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hpml_orchestrator.scheduler.command import Completed, Runner
    from hpml_orchestrator.scheduler.model import SubmitRequest

# Run Slurm's commands: their environment, their timeouts, and what a failure means.

_SLURM_CONF = "/etc/slurm/slurm.conf"
_LOOPBACK = re.compile(
    r"^\s*(?:SlurmctldHost\s*=\s*[^\s(]+\(127\.|SlurmctldHost\s*=\s*localhost\b)",
    re.IGNORECASE | re.MULTILINE,
)
_VERSION_TIMEOUT_SECONDS = 15.0
READ_TIMEOUT_SECONDS = 60.0  # Slurm's is 10 s (MessageTimeout); some commands wait twice
SILENT_HINT = "the controller does not answer; try again in a moment (`scontrol ping`)"

_ACCOUNTING_HINT = "accounting (slurmdbd) does not answer; try again in a moment"
_SILENT_HINTS = {"sacct": _ACCOUNTING_HINT, "sacctmgr": _ACCOUNTING_HINT}
_READ_HINT = "the controller may be busy or restarting: try again in a minute"
# These variables change a command's output: a site's SQUEUE_PARTITION must not hide a job.
_FOREIGN_PREFIXES = ("SQUEUE_", "SACCT_", "SCANCEL_", "SCONTROL_", "SINFO_", "SDIAG_")
# SLURM_CLUSTERS would send queries to a cluster other than the one that sbatch submits to.
_FOREIGN = frozenset({"SLURM_CLUSTERS", "SLURM_JSON", "SLURM_YAML", "SLURM_DEBUG_FLAGS"})


def reading_environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment for a command that reads: epoch times, full lists, English messages.

    Args:
        env: base environment; default: that of this process.
    """
    base = os.environ if env is None else env
    kept = {
        name: value
        for name, value in base.items()
        if not name.startswith(_FOREIGN_PREFIXES) and name not in _FOREIGN
    }
    # SLURM_TIME_FORMAT gives epoch seconds, which do not depend on time zone or daylight saving.
    # SLURM_BITSTR_LEN=0 keeps squeue from cutting an array's task list at 64 characters.
    return kept | {"LC_ALL": "C", "SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0"}


def is_one_machine(environment: Mapping[str, str]) -> bool:
    """Return whether the cluster consists of this machine: its controller listens on loopback."""
    try:
        path = Path(environment.get("SLURM_CONF", _SLURM_CONF))
        return _LOOPBACK.search(path.read_text("utf-8", errors="replace")) is not None
    except OSError:
        return False


def ask(
    run: Runner,
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    timeout: float = READ_TIMEOUT_SECONDS,
) -> Completed:
    """Run a Slurm command once; see `reading_environment` for `env`.

    Raises:
        CommandMissing: the command does not exist.
        SchedulerUnavailable: it timed out; names the silent service.
    """
    try:
        return run.run(argv, env=reading_environment(env), timeout=timeout)
    except CommandMissing:
        raise
    except SchedulerUnavailable as error:
        hint = error.hint or _SILENT_HINTS.get(argv[0], SILENT_HINT)
        raise SchedulerUnavailable(error.message, hint=hint) from error


def name_nodes(statuses: dict[str, JobStatus], run: Runner) -> None:
    """Append the cluster's down or drained nodes, with reasons, to the statuses of waiting jobs."""
    waiting = [key for key, one in statuses.items() if one.reason.startswith(NODES_DOWN)]
    if not waiting:
        return
    argv = ["sinfo", "--all", "--noheader", "--list-reasons", "--format=%N (%E)"]
    with contextlib.suppress(SchedulerUnavailable):
        if nodes := first_few(ask(run, argv).stdout.splitlines(), none=""):
            for key in waiting:
                reason = f"{statuses[key].reason}; out of service: {nodes}"
                statuses[key] = replace(statuses[key], reason=reason)


def slurm_error(command: str, done: Completed) -> SchedulerUnavailable:
    """Return the error for a command that gave no usable answer."""
    if not_configured(done.stderr):
        return SchedulerUnavailable(NOT_CONFIGURED, hint=NOT_CONFIGURED_HINT)
    message = clean(done.stderr) or f"ended with status {done.returncode}"
    if transport_fault(done.stderr):
        hint = _SILENT_HINTS.get(command, SILENT_HINT)
    else:
        hint = hint_for(done.stderr) or _READ_HINT
    return SchedulerUnavailable(f"{command}: {message}", hint=hint)


def slurm_version(run: Runner) -> tuple[int, ...]:
    """Return the version that sbatch prints, such as `(22, 5, 8)`.

    Raises:
        CommandMissing: sbatch does not exist.
        SchedulerUnavailable: it prints no version.
    """
    done = ask(run, ["sbatch", "--version"], timeout=_VERSION_TIMEOUT_SECONDS)
    if done.returncode != 0:
        raise slurm_error("sbatch", done)
    version = parse_version(done.stdout)
    if not version:
        raise SchedulerUnavailable(f"sbatch printed no version: {done.stdout.strip()[:60] or '?'}")
    return version


QUICK_SECONDS = 3.0  # only faster failures are retried: timeouts tend to recur
SUBMIT_TIMEOUT_SECONDS = 300.0
_MIN_INTERVAL_SECONDS = 1.0  # more frequent queries get the cached answer
_JITTER = 0.2
_IDS_LENGTH_BYTES = 32_768  # far below ARG_MAX, and below the kernel's 128 KiB for one argument
# Accounting uses the controller's clock: start the search earlier, in case it runs behind ours.
_CLOCK_SKEW_SECONDS = 600.0
_EARLIEST = 1_000_000_000
_STARTS_SECONDS = 600.0

_RESUME_HINT = "a job may exist: `hpml submit --resume ID` finds it, and never submits twice"
_ACCOUNTING_OFF = "accounting storage is disabled"


class PollSchedule:
    """Delays between polls in seconds: short at first, later 30 s, with jitter.

    >>> schedule = PollSchedule(jitter=0)
    >>> [next(schedule) for _ in range(9)]
    [1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 20.0, 30.0, 30.0]
    >>> schedule.reset()
    >>> next(schedule)
    1.0
    """

    DELAYS_SECONDS = (1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 20.0, 30.0)

    def __init__(self, *, jitter: float = _JITTER) -> None:
        self._jitter = jitter
        self._index = 0

    def __next__(self) -> float:
        delay = self.DELAYS_SECONDS[min(self._index, len(self.DELAYS_SECONDS) - 1)]
        self._index += 1
        return delay * (1 + random.uniform(-self._jitter, self._jitter))

    def reset(self) -> None:
        """Return to short delays, for example after a change of state."""
        self._index = 0


@dataclass(frozen=True)
class _Answer:
    job_ids: frozenset[str]
    at: float
    statuses: dict[str, JobStatus]


class SlurmScheduler:
    """The `Scheduler` of a Slurm cluster.

    Args:
        run: starts commands.
        clock: for rate limits and retries.
        proc_root: where to look for a live sbatch.
        rng: for jitter.
    """

    name = "slurm"

    def __init__(
        self,
        run: Runner | None = None,
        *,
        clock: Clock = time,
        proc_root: str = "/proc",
        rng: random.Random | None = None,
    ) -> None:
        self._runner = run or SubprocessRunner()
        self._clock = clock
        self._proc_root = proc_root
        self._rng = rng or random.Random()
        self._last: _Answer | None = None
        self._over: dict[str, JobStatus] = {}
        self._accounting = True  # until sacct reports otherwise
        self._may_requeue: dict[str, bool] = {}  # by the id of a job or array
        self._next_starts: dict[str, float] = {}
        self._cluster: str | None = None

    def cluster(self) -> str:
        """Return the controller's ClusterName; asks only once.

        Raises:
            SchedulerUnavailable: no usable answer.
        """
        if self._cluster is None:
            done = self._read_command(["scontrol", "show", "config"])
            if done.returncode != 0:
                raise slurm_error("scontrol", done)
            self._cluster = parse_config(done.stdout)["ClusterName"].lower()
        return self._cluster

    def arguments(self, request: SubmitRequest) -> list[str]:
        """Return the sbatch command; no value in it passes through a shell.

        Raises:
            SchedulerError: the path of an array's output contains a backslash, so it cannot be set.
        """
        output = escape_output(str(request.output))
        if request.array:
            try:
                output = escape_task_output(str(request.task_output(TASK)))
            except ValueError as error:
                raise SchedulerError(
                    str(error), hint="keep the records elsewhere: --records DIR, or $HPML_HOME"
                ) from error
        after = ",".join(f"after{other.end}:{other.job_id}" for other in request.after)
        return [
            "sbatch",
            "--parsable",
            f"--chdir={request.directory}",
            f"--output={output}",
            *([f"--job-name={request.job_name}"] if request.job_name else []),
            *([f"--comment={request.comment}"] if request.comment else []),
            *([f"--dependency={after}", "--kill-on-invalid-dep=yes"] if after else []),
            *([f"--exclude={','.join(request.exclude)}"] if request.exclude else []),
            *([f"--array={request.only}"] if request.only is not None else []),
            "--export=ALL",
            # By default, Slurm truncates the output of a requeued job, and with it the messages of
            # the failed attempt.
            "--open-mode=append",
            str(request.directory / "job.sh"),
        ]

    def submit(self, request: SubmitRequest, arguments: Sequence[str] = ()) -> str:
        """Submit `job.sh` of the request's directory and return the job's id.

        sbatch runs once and is never killed. If its answer is uncertain, `messages.recover`
        determines what happened.

        Raises:
            SchedulerError: refused, and no job exists; or sent to another cluster.
            SchedulerUnavailable: no usable answer; a job may exist.
            NotFoundError: the directory does not exist.
        """
        out, err = request.answer("sbatch.out"), request.answer("sbatch.err")
        # The cached answer predates this job: a query right after the submission must not report
        # the job as missing.
        self._last = None
        try:
            returncode = self._runner.run_detached(
                arguments or self.arguments(request),
                env=request.environment,
                timeout=SUBMIT_TIMEOUT_SECONDS,
                cwd=request.directory,
                stdout=out,
                stderr=err,
            )
        except CommandMissing:
            raise
        except SchedulerUnavailable as error:
            raise SchedulerUnavailable(error.message, hint=_RESUME_HINT) from error
        # The output counts more than the exit status: sbatch may be killed after the controller has
        # answered, and an id on disk proves that the job exists.
        stdout, stderr = read_text_or_nothing(out), read_text_or_nothing(err)
        job_id, cluster = parse_answer(stdout)
        if cluster and cluster != self.cluster():
            message, hint = on_other_cluster(job_id, cluster, self.cluster())
            raise SchedulerError(message, hint=hint)
        if job_id:
            return job_id
        message = clean(stderr + stdout) or "no message"
        if returncode < 0:
            raise SchedulerUnavailable(
                f"sbatch was killed by signal {-returncode}: {message}", hint=_RESUME_HINT
            )
        # Report a refusal only if sbatch itself printed one. A lost answer, a wrapper's message or
        # a silent failure may hide a job that exists, and a caller that trusts a false refusal
        # would submit it again.
        if returncode == 0 or transport_fault(stderr) or "sbatch: " not in stderr:
            raise SchedulerUnavailable(
                f"sbatch gave no usable answer (status {returncode}): {message}", hint=_RESUME_HINT
            )
        if not_configured(stderr):
            raise SchedulerError(NOT_CONFIGURED, hint=NOT_CONFIGURED_HINT)
        raise SchedulerError(f"Slurm refused the job: {message}", hint=hint_for(stderr))

    def query(self, job_ids: Sequence[str]) -> dict[str, JobStatus]:
        """Return the status of each known job; unknown ids are left out.

        squeue comes first; sacct, if available, covers jobs that have left the queue. Once the
        queue
        has shown that a job is over, it stays over, although accounting lags behind. A job that has
        left the queue is UNKNOWN while accounting does not answer or still reports it as alive.

        Raises:
            SchedulerUnavailable: the controller gave no usable answer.
        """
        # One malformed id makes squeue refuse the whole list, which would hide all other states.
        asked = [job_id for job_id in dict.fromkeys(job_ids) if valid_id(job_id)]
        if not asked:
            return {}
        last, now = self._last, self._clock.monotonic()
        if last and now - last.at < _MIN_INTERVAL_SECONDS and last.job_ids.issuperset(asked):
            return {key: last.statuses[key] for key in asked if key in last.statuses}
        rows: list[QueueEntry] = []
        # Request whole arrays, even if only some tasks are wanted: ten thousand task ids would need
        # many calls, and squeue returns an array's rows for one id.
        for chunk in _chunks(_whole(asked)):
            rows += self._squeue_jobs(chunk)
        statuses = match(rows, asked)
        # Accounting lags behind the queue: right after the end it had 200 of 401 jobs. So remember
        # which jobs the queue has shown as over, and do not ask accounting about them.
        for job_id in asked:
            if job_id not in statuses and job_id in self._over:
                statuses[job_id] = self._over[job_id]
        statuses |= self._vanished([job_id for job_id in asked if job_id not in statuses])
        name_nodes(statuses, self._runner)
        # Slurm shows NODE_FAIL or PREEMPTED for a moment before it requeues the job. Only the job's
        # Requeue flag distinguishes that moment from the end.
        for job_id, status in statuses.items():
            if status.state in BEFORE_REQUEUE:
                statuses[job_id] = replace(status, may_requeue=self._requeues(job_id))
        self._over |= {key: status for key, status in statuses.items() if status.state.over}
        self._last = _Answer(frozenset(asked), self._clock.monotonic(), statuses)
        return {key: statuses[key] for key in asked if key in statuses}

    def starts(self, job_id: str) -> list[JobStatus]:
        """Return how each start of a job ended, from accounting; empty if it does not answer."""
        now = self._clock.monotonic()  # called often while following a job, mostly in vain
        if valid_id(job_id) and now >= self._next_starts.get(job_id, 0.0):
            self._next_starts[job_id] = now + _STARTS_SECONDS
            with contextlib.suppress(SchedulerUnavailable):
                rows = self._sacct(["--duplicates", f"--jobs={job_id}"])
                return [row.status for row in rows if job_id in (row.raw_id, row.shown_id)]
        return []

    def find(
        self,
        directory: Path,
        *,
        name: str,  # noqa: ARG002 - see below
        since: float,
    ) -> list[str]:
        """Return the ids of this user's jobs whose working directory is `directory`, oldest first.

        An empty list is a reliable answer: the controller, and accounting if there is any, answered
        and have no such job. The name is ignored: the directory identifies the job, even if
        somebody
        edited the name in the script.

        Raises:
            SchedulerUnavailable: no usable answer, which is not the same as no job.
        """
        # Compare directories here rather than in Slurm: neither squeue nor sacct can filter by
        # them. The job's comment is no substitute: sacct has it only if the site sets
        # AccountingStoreFlags=job_comment.
        job_ids = _ids_in(self._squeue(["--me"]), directory)
        if not job_ids:
            # Accounting dates a job that was cancelled before its begin time in the future, and
            # sacct shows it only with a later `--endtime`. It rejects a start in the 1970s.
            start = max(int(min(since, self._clock.time()) - _CLOCK_SKEW_SECONDS), _EARLIEST)
            window = [f"--starttime=uts{start}", "--endtime=now+365days"]
            job_ids = _ids_in(self._sacct([f"--user={os.getuid()}", *window]), directory)
        return sorted(job_ids, key=int)

    def submitting(self, directory: Path) -> bool:
        """Return whether an sbatch of this user still runs in that directory on this machine."""
        # /proc/PID/cwd has no symbolic links, but the path of the records may contain some, for
        # example a home that links to a project file system.
        wanted = os.path.realpath(directory)
        try:
            pids = [entry for entry in os.listdir(self._proc_root) if entry.isdigit()]
        except OSError:
            return False
        return any(self._is_sbatch_in(os.path.join(self._proc_root, pid), wanted) for pid in pids)

    def cancel(self, job_ids: Sequence[str]) -> None:
        """Cancel jobs in one call; finished or unknown ones are ignored.

        Raises:
            SchedulerError: Slurm refused, for example because the job belongs to another user.
            SchedulerUnavailable: no usable answer.
        """
        self._last = None
        for chunk in _chunks([job_id for job_id in dict.fromkeys(job_ids) if valid_id(job_id)]):
            done = self._run(["scancel", *chunk])
            # scancel fails if any of its jobs has already ended, but cancels the others. A job that
            # ended between the query and this call is not an error.
            if done.returncode == 0 or no_such_job(done.stderr):
                continue
            message = clean(done.stderr)
            if not_configured(done.stderr):
                raise slurm_error("scancel", done)
            if transport_fault(done.stderr) or done.returncode < 0:
                raise SchedulerUnavailable(
                    f"scancel gave no usable answer: {message or f'status {done.returncode}'}",
                    hint=SILENT_HINT,
                )
            hint = hint_for(done.stderr) or "`hpml status` shows the state of the job"
            if denied(done.stderr):
                hint = "another user's job can be cancelled only by its owner or a Slurm operator"
            raise SchedulerError(f"Slurm did not cancel: {message}", hint=hint)

    def _requeues(self, job_id: str) -> bool:
        """Return whether Slurm may requeue a job, True if unknown; asks once per job or array."""
        (whole,) = _whole([job_id])
        if whole not in self._may_requeue:
            try:
                done = self._run(["scontrol", "--oneliner", "show", "job", whole])
            except SchedulerUnavailable:
                return True
            # A job that scontrol no longer lists counts as requeueable: waiting too long is
            # harmless, but declaring it over would end a run that continues.
            self._may_requeue[whole] = " Requeue=0 " not in done.stdout
        return self._may_requeue[whole]

    def _vanished(self, job_ids: Sequence[str]) -> dict[str, JobStatus]:
        rows: list[QueueEntry] = []
        try:
            for chunk in _chunks(_whole(job_ids)):
                rows += self._sacct([f"--jobs={','.join(chunk)}"])
        except SchedulerUnavailable as error:
            reason = f"gone from the queue, and accounting gives no answer: {error}"
            return {key: JobStatus(key, JobState.UNKNOWN, reason=reason) for key in job_ids}
        # Accounting lags: its row for an array's pending tasks may still include a cancelled one,
        # and a task cancelled while pending leaves no record of its own. The queue was asked first
        # and takes precedence.
        asked = set(job_ids)
        rows = [
            row
            for row in rows
            if row.status.state.over or asked & {row.shown_id, row.shown_id.partition("_")[0]}
        ]
        statuses = match(rows, job_ids)
        for job_id, status in statuses.items():
            if not status.state.over:
                reason = f"not in the queue; accounting still reports {status.raw_state}"
                statuses[job_id] = replace(status, state=JobState.UNKNOWN, reason=reason)
        return statuses

    def _squeue_jobs(self, job_ids: Sequence[str]) -> list[QueueEntry]:
        # squeue reads "28+1" as 28. A single unknown id is an error, one among others is not; other
        # versions may differ, but the list of all own jobs always works.
        asked = ",".join(dict.fromkeys(job_id.partition("+")[0] for job_id in job_ids))
        try:
            if "," in asked:
                return self._squeue([f"--jobs={asked}"])
            # For one id squeue asks the federation first, and so waits twice as long for a
            # controller that does not answer; only a job that moved to a sibling cluster needs
            # that.
            rows = self._squeue(["--local", f"--jobs={asked}"])
            if any("REVOKED" in row.status.raw_state for row in rows):
                rows = self._squeue([f"--jobs={asked}"])
        except _NoSuchJobError:
            return [] if len(job_ids) == 1 else self._squeue(["--me"])
        return rows

    def _squeue(self, which: Sequence[str]) -> list[QueueEntry]:
        # --all and --states=all, so that a job in a hidden partition, or one that has just ended,
        # does not seem to have vanished.
        argv = ["squeue", *which, "--all", "--states=all", "--noheader"]
        done = self._read_command([*argv, f"--Format={SQUEUE_FORMAT}"])
        if done.returncode == 0:
            return parse_squeue(done.stdout)
        if no_such_job(done.stderr):
            raise _NoSuchJobError(clean(done.stderr))
        raise slurm_error("squeue", done)

    def _sacct(self, which: Sequence[str]) -> list[QueueEntry]:
        """Return accounting's rows; empty on a cluster without accounting."""
        if not self._accounting:
            return []
        argv = ["sacct", "--allocations", "--parsable2", "--noheader", f"--delimiter={UNIT}"]
        try:
            done = self._read_command([*argv, f"--format={SACCT_FIELDS}", *which])
        except CommandMissing:
            self._accounting = False
            return []
        if done.returncode == 0:
            return parse_sacct(done.stdout)
        # A cluster without accounting reports that with an error status. Unlike a slurmdbd that is
        # down, this is an answer, and it holds for the life of this process.
        if _ACCOUNTING_OFF in done.stderr + done.stdout:
            self._accounting = False
            return []
        raise slurm_error("sacct", done)

    def _read_command(self, argv: Sequence[str]) -> Completed:
        """Run a command that changes nothing, with up to two retries while Slurm is busy.

        Only fast failures are retried: after one timeout another is likely, and the user is
        waiting.
        """
        delay = 1.0
        for tries_left in (2, 1, 0):
            began = self._clock.monotonic()
            failure: SchedulerUnavailable | None = None
            try:
                done = self._run(argv)
                if done.returncode <= 0 or not transport_fault(done.stderr):
                    return done
            except CommandMissing:
                raise
            except SchedulerUnavailable as error:
                failure = error
            if not tries_left or self._clock.monotonic() - began > QUICK_SECONDS:
                break
            self._clock.sleep(delay * (1 + self._rng.uniform(-_JITTER, _JITTER)))
            delay *= 2
        if failure is not None:
            raise failure
        return done

    def _run(self, argv: Sequence[str]) -> Completed:
        return ask(self._runner, argv)

    def _is_sbatch_in(self, process: str, directory: str) -> bool:
        try:
            if os.stat(process).st_uid != os.getuid():
                return False
            with open(os.path.join(process, "comm"), encoding="utf-8", errors="replace") as stream:
                if stream.read().strip() != "sbatch":
                    return False
            return os.readlink(os.path.join(process, "cwd")) == directory
        except OSError:  # it has just ended, or is a zombie
            return False


class _NoSuchJobError(SchedulerError):
    """The controller answered that none of the jobs exist."""


def _ids_in(rows: Sequence[QueueEntry], directory: Path) -> set[str]:
    wanted = {str(directory), os.path.realpath(directory)}
    return {
        row.shown_id.split("_")[0].split("+")[0] for row in rows if row.status.directory in wanted
    }


def _whole(job_ids: Sequence[str]) -> list[str]:
    """Replace ids of array tasks by the array's id: one id covers ten thousand tasks."""
    return list(dict.fromkeys(job_id.partition("_")[0] for job_id in job_ids))


def _chunks(job_ids: Sequence[str]) -> Iterator[list[str]]:
    chunk: list[str] = []
    length = 0
    for job_id in job_ids:
        if chunk and length + len(job_id) + 1 > _IDS_LENGTH_BYTES:
            yield chunk
            chunk, length = [], 0
        chunk.append(job_id)
        length += len(job_id) + 1
    if chunk:
        yield chunk


# Ask Slurm when it would start a job: `sbatch --test-only`, which submits nothing.
#
# It considers the queue, reservations, plugins and limits on submissions, but not `--hold`,
# `--dependency` and limits on running jobs.

NOW = "can start now"
_START = re.compile(r"^sbatch: Job \d+ to start at (\S+)", re.MULTILINE)
# Printed while nodes are down or drained: sbatch itself accepts such a job, which then waits.
_TAKEN = re.compile(r"not available|busy|unavailable", re.IGNORECASE)
_NOW_SECONDS = 60.0  # possible difference between the controller's clock and ours


def start_of(script: str, run: Runner, env: Mapping[str, str]) -> tuple[str, str]:
    """Return when Slurm would start a script's job, in words, and sbatch's messages if it refuses.

    Both are empty if Slurm does not report a start. Each call uses up one or two job ids.

    Raises:
        SchedulerUnavailable: a command does not exist or timed out.
    """
    with tempfile.NamedTemporaryFile("w", prefix="hpml-check-", suffix=".sh") as file:
        file.write(script)
        file.flush()

        def test(*options: str) -> tuple[float | None, str]:
            done = ask(run, ["sbatch", "--test-only", *options, file.name], env=env)
            answer = _START.search(done.stderr)
            unclear = transport_fault(done.stderr) or _TAKEN.search(done.stderr)
            refused = done.returncode > 0 and not unclear
            return parse_time(answer[1]) if answer else None, done.stderr * refused

        start, refusal = test()
        now = time.time()
        if start is None:
            return "", refusal
        if start <= now + _NOW_SECONDS:
            return NOW, ""
        done = ask(run, ["scontrol", "--all", "show", "reservation"], env=env)
        for record in parse_records(done.stdout):
            begin, end = parse_time(record["StartTime"]), parse_time(record["EndTime"])
            if begin is None or end is None or abs(start - end) > _NOW_SECONDS:
                continue
            text = f"waits for the end of {record['ReservationName']}, {clock_text(end)}"
            minutes = int(begin - now) // 60
            if minutes > 0 and (test(f"--time={minutes}")[0] or start) <= now + _NOW_SECONDS:
                text += f"; with at most {format_time(minutes * 60)} it can start now"
            return text, ""
        return f"expected start {clock_text(start)}", ""
