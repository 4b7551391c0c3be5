"""Carry a sweep on: collect what ended, decide what is next, submit it.

`tick` does one round and returns. It can be killed anywhere and called from anywhere, by several
processes too: what it decides is on disk before it acts (`batches.py`), so that no point is
submitted twice and none is lost.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
from collections import Counter
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import NotFoundError, SchedulerUnavailable
from hpml_orchestrator.records.files import create_json, read_json, write_json, write_text
from hpml_orchestrator.records.owner import Owner, owner_is_alive, this_owner
from hpml_orchestrator.runs.backend import backends_of
from hpml_orchestrator.runs.cancel import cancel as cancel_runs
from hpml_orchestrator.runs.submit import settle
from hpml_orchestrator.scheduler.recovery import Found, Undecided
from hpml_orchestrator.sweeps import watch
from hpml_orchestrator.sweeps.batches import Batch, Task, create_batch, read_batches, send
from hpml_orchestrator.sweeps.limits import allowance, max_array_size
from hpml_orchestrator.sweeps.plan import directory_of
from hpml_orchestrator.sweeps.progress import Progress, progress_of
from hpml_orchestrator.sweeps.rows import Row, RowLog, SchedulerState, row_of, table, why_stopped
from hpml_orchestrator.sweeps.rows import rows as rows_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from hpml_orchestrator.records.store import Store, Submission
    from hpml_orchestrator.runs.backend import Backends
    from hpml_orchestrator.runs.state import State
    from hpml_orchestrator.sweeps.plan import SweepPlan
    from hpml_orchestrator.sweeps.search import Searcher

__all__ = ["Controller", "Progress", "cancel", "progress", "resume", "tick"]

_LEASE_SECONDS, _RENEW_SECONDS = 90.0, 15.0
"""After how long without a sign of life another process may carry the sweep on; how often the one
that does gives such a sign."""

_FIRST_POINTS = 4
"""A sweep stops if so many points have ended first, and all of them failed."""

_STOP_SECONDS = 60.0
"""A trial that was asked to stop, and has not after so long, is cancelled."""


def tick(store: Store, plan: SweepPlan) -> Progress:
    """Do one round of a sweep's work; who calls it often keeps a `Controller` instead.

    Raises:
        InputError: a job cannot be rendered.
        RecordError: the records cannot be read or written.
    """
    return Controller(store, plan).tick()


class Controller:
    """Carries a sweep on, one `tick` after the other.

    Args:
        store: where records live.
        plan: the sweep's plan, on disk already.
        backends: opens schedulers.
        environment: of the submitting process; `os.environ` when left out.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        store: Store,
        plan: SweepPlan,
        *,
        backends: Backends | None = None,
        environment: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._plan, self._clock = store, plan, clock
        self._directory = directory_of(store, plan.id)
        self._environment = os.environ if environment is None else environment
        self._backends = backends or backends_of(store)
        self._scheduler = self._backends(plan.backend, plan.host)
        self._points = {point.number: point for point in plan.points}
        self._batches: list[Batch] = []
        self._jobs: dict[int, str] = {}  # id of the array by the batch's number
        # What is submitted, or about to be, and not over: batch, array index and task.
        self._out: dict[tuple[int, int], tuple[Batch, int, Task]] = {}
        self._log = RowLog(self._directory / "rows.jsonl")
        self._searcher: Searcher | None = None

    def tick(self) -> Progress:
        """Do one round: nothing waits, so that a round takes seconds.

        Raises:
            InputError: a job cannot be rendered.
            RecordError: the records cannot be read or written.
        """
        host = self._plan.host
        holder = f"its machine, {host}" if host not in ("", socket.gethostname()) else ""
        holder = holder or _take_lease(self._directory, self._clock())
        if holder:
            seen = progress(self._store, self._plan, waits_for=holder)
            return replace(
                seen, next_tick_seconds=watch.pause_seconds(self._plan.backend, seen.total)
            )
        self._read()
        self._settle()
        self._collect()
        self._check_first_points()
        if self._is_cancelled():
            self._cancel()
        else:
            self._stop_early()
            self._submit()
        self._write_state()
        return self._progress()

    def _read(self) -> None:
        """Read what is on disk and not known yet, and begin the round."""
        self._log.read()
        self._state = SchedulerState.read(self._directory)
        self._written = self._state.to_text()
        self._resumed = float(_read(self._directory / "resumed.json").get("time", 0.0))
        self._batches += read_batches(self._directory, self._plan, len(self._batches))
        self._out.clear()
        for batch in self._batches:
            self._add(batch)
        self._may_ask = watch.may_ask(self._plan.backend, self._state.asked, self._clock())
        self._ended: dict[int, Submission] = {}  # tasks by point
        self._undecided: list[str] = []  # why, of each batch that may have a job
        self._waits_for, self._wake_at = "", math.inf
        self._search_is_over = False

    def _write_state(self) -> None:
        text = self._state.to_text()
        if text != self._written:
            write_text(self._directory / "state.json", text)
            self._written = text

    def _is_cancelled(self) -> bool:
        return bool(_read(self._directory / "stopped.json").get("cancel"))

    def _add(self, batch: Batch) -> None:
        for index, task in enumerate(batch.tasks):
            self._points[task.point.number] = task.point
            if task.key not in self._log.rows and batch.number not in self._state.limits.batches:
                self._out[task.key] = batch, index, task

    def _settle(self) -> None:
        """Find the jobs of batches whose submission was interrupted, or submit those."""
        cancelled = self._is_cancelled()
        for batch in self._batches:
            if batch.number in self._jobs or batch.number in self._state.limits.batches:
                continue
            submission = batch.submission(self._store)
            known = submission.job()
            if known is not None:
                self._accept(batch, str(known["job_id"]))
                continue
            begun = submission.directory.is_dir() and submission.refused() is None
            if begun and not self._may_ask:
                self._undecided.append("it is not known yet whether sbatch made a job")
            elif not cancelled:
                self._send(batch)
            elif begun:
                outcome = settle(self._store, submission, self._scheduler, now=self._clock())
                if isinstance(outcome, Found):
                    self._accept(batch, outcome.job_id)
                elif isinstance(outcome, Undecided):
                    self._undecided.append(outcome.reason)
            if begun and self._may_ask:
                self._state.asked = self._clock()

    def _accept(self, batch: Batch, job_id: str) -> None:
        """Keep in mind that a batch has a job, whose tasks are out unless they are over."""
        self._jobs[batch.number] = job_id
        for index, task in enumerate(batch.tasks):
            if task.key in self._out and task.key not in self._state.out:
                self._note(batch, index, job_id=f"{job_id}_{index}", state="PENDING")

    def _note(self, batch: Batch, index: int, **known: Any) -> None:
        """Keep what is known of a task that is not over."""
        key, run = batch.tasks[index].key, f"{batch.sid}.{index}"
        self._state.out[key] = Row(*key, run=run, queued=batch.created, **known)

    def _send(self, batch: Batch) -> None:
        """Submit a batch and record what came of it."""
        limits, out = self._state.limits, len(self._out) - len(batch.tasks)
        try:
            job_id = send(
                self._store,
                self._plan,
                batch,
                self._scheduler,
                environment=self._environment,
                clock=self._clock,
            )
        except SchedulerUnavailable as error:
            self._undecided.append(str(error))
            return
        if job_id is not None:
            self._accept(batch, job_id)
            limits.accepted(out=out)
            return
        reason = str((batch.submission(self._store).refused() or {})["reason"])
        for task in batch.tasks:
            self._out.pop(task.key, None)
        for_limit = limits.refused(batch, reason, out=out, now=self._clock())
        self._write_state()  # before its tasks go out in another batch
        if for_limit:
            return
        if not self._jobs:
            self._stop(f"the scheduler refused the first jobs: {reason}")
        for task in batch.tasks:
            self._log.append(Row(*task.key, state="REFUSED", reason=reason, over=True))

    def _collect(self) -> None:
        """Write the rows of the tasks that are over."""
        for number, indices in self._running().items():
            batch = self._batches[number]
            for index, state in watch.completed(self._store, batch, indices, self._jobs[number]):
                self._keep(batch, index, state)
        asked = [self._batches[number] for number in self._running()]
        if asked and self._may_ask:
            self._state.asked = self._clock()
            answer = watch.query(self._store, asked, backends=self._backends, now=self._clock)
            for batch, index, state in answer:
                if batch.tasks[index].key in self._out:
                    self._keep(batch, index, state)

    def _running(self) -> dict[int, list[int]]:
        """Return the array indices of the tasks that are out, of each batch that has a job."""
        running: dict[int, list[int]] = {}
        for batch, index, _ in self._out.values():
            if batch.number in self._jobs:
                running.setdefault(batch.number, []).append(index)
        return running

    def _keep(self, batch: Batch, index: int, state: State) -> None:
        """Keep the state of a task; the row of one that is over."""
        task = batch.tasks[index]
        if not state.over:
            known = ("job_id", "state", "reason", "started", "nodes")
            self._note(batch, index, **{name: getattr(state, name) for name in known})
            return
        row = row_of(self._plan, self._plan.shapes[batch.shape], task.key, state)
        ended = row.state in ("COMPLETED", "CANCELLED") and self._plan.spec.searches
        if ended and watch.stop_asked_at(state.submission) is not None:
            row = replace(row, state="PRUNED", reason="stopped early by the search")
        self._log.append(row)
        self._ended[task.point.number] = state.submission
        self._state.out.pop(task.key, None)
        del self._out[task.key]

    def _check_first_points(self) -> None:
        """Stop a sweep whose first points all failed, unless it was resumed after such a stop."""
        rows = self._log.rows
        if self._resumed or any(row.state == "COMPLETED" for row in rows.values()):
            return
        active = {point for point, _ in self._out} | {task.point.number for task in self._retries()}
        last = {point: row for (point, _), row in rows.items() if point not in active}
        first = list(last.values())[:_FIRST_POINTS]
        if sum(row.state == "FAILED" for row in first) == _FIRST_POINTS:
            reason = f": {first[-1].reason}" if first[-1].reason else ""
            hint = (
                f"`hpml logs {first[-1].run}` shows why, "
                f"`hpml sweep resume {self._plan.id}` goes on anyway"
            )
            self._stop(f"the first {_FIRST_POINTS} points failed{reason}; {hint}", cancel=True)

    def _open_search(self) -> Searcher:
        if self._searcher is None:
            from hpml_orchestrator.sweeps.search import open_search  # noqa: PLC0415 - loads Optuna

            self._searcher = open_search(self._directory, self._plan)
        return self._searcher

    def _rows(self) -> list[Row]:
        """Return the rows as the search sees them: a retry that is due has one already."""
        due = [*self._out, *(task.key for task in self._retries())]
        found = {**{key: Row(*key) for key in due}, **self._log.rows}
        return [found[key] for key in sorted(found)]

    def _stop_early(self) -> None:
        """Ask the runs to stop that the search gives up; cancel those that do not."""
        search = self._plan.spec.search
        if not self._plan.spec.searches or search.pruner == "none":
            return
        running = {
            task.point.number: (task, replace(batch.submission(self._store), index=index))
            for batch, index, task in self._out.values()
            if batch.number in self._jobs
        }
        # What has just ended counts too: others are compared with it.
        seen = self._ended | {number: run for number, (_, run) in running.items()}
        values = {number: watch.evaluations(run, search.metric) for number, run in seen.items()}
        late = []
        for number in self._open_search().to_stop(self._rows(), values) & running.keys():
            task, run = running[number]
            watch.ask_to_stop(run, self._clock())
            asked_at = watch.stop_asked_at(run)
            if asked_at is not None and self._clock() - asked_at > _STOP_SECONDS:
                late.append(self._state.out[task.key].job_id)
        if late:
            with contextlib.suppress(SchedulerUnavailable):  # the next round tries again
                self._scheduler.cancel(late)

    def _retries(self) -> Iterator[Task]:
        """Yield the next start of each point that the sweep starts again."""
        retry = self._plan.sweep["retry"]
        counts = Counter((row.point, row.state) for row in self._log.rows.values())
        last = {point: row for (point, _), row in sorted(self._log.rows.items())}
        for point, row in last.items():
            allowed = counts[point, row.state] <= retry.get(row.state, 0)
            with_sweep = row.state == "CANCELLED" and (row.queued or 0.0) < self._resumed
            task = Task(self._points[point], row.start + 1)
            if (allowed or with_sweep) and task.key not in self._out:
                yield task

    def _waiting(self) -> list[list[Task]]:
        """Return the tasks to submit next, in order: a list holds what may go out together."""
        groups: dict[tuple[int, int], list[Task]] = {}
        for task in self._retries():
            groups.setdefault((-1, task.point.shape), []).append(task)
        if self._plan.spec.searches:
            free = max(0, (self._plan.spec.parallel or 0) - len(self._out))
            points = self._open_search().propose(self._rows(), free)
            self._search_is_over = not points
            fresh = [(0, point) for point in points]
        else:
            fresh = [
                (block, self._points[number])
                for block, numbers in enumerate(self._plan.blocks)
                for number in numbers
            ]
        for block, point in fresh:
            key = point.number, 0
            if key not in self._out and key not in self._log.rows:
                groups.setdefault((block, point.shape), []).append(Task(point, 0))
        return list(groups.values())

    def _submit(self) -> None:
        """Submit batches until a limit is reached or nothing is left."""
        limits = self._state.limits
        if limits.array == 0:
            limits.array = max_array_size(self._plan.backend, self._environment)
        # One batch in doubt does not hold up the others; more look like a scheduler in trouble.
        doubts = min(1, len(self._undecided))
        while not why_stopped(self._directory) and len(self._undecided) <= doubts:
            groups = self._waiting()
            if not groups:
                return
            allowed = allowance(
                self._plan,
                limits,
                groups=groups,
                out=Counter(batch.number for batch, _, _ in self._out.values()),
                batches=self._batches,
                rows=self._log.rows.values(),
                now=self._clock(),
            )
            if allowed.over:
                self._stop(allowed.reason)
                return
            if not allowed.tasks:
                self._wait(allowed.reason, allowed.seconds)
                return
            batch = create_batch(
                self._directory,
                self._plan,
                len(self._batches),
                groups[0][: allowed.tasks],
                throttle=allowed.throttle,
                now=self._clock(),
            )
            if batch is None:
                self._wait("another process has just submitted for this sweep")
                return
            _take_lease(self._directory, self._clock())
            self._batches.append(batch)
            self._add(batch)
            self._send(batch)

    def _wait(self, reason: str, seconds: float = math.inf) -> None:
        """Note what the sweep waits for, and when to try again at the latest."""
        self._waits_for = reason
        self._wake_at = min(self._wake_at, self._clock() + seconds)

    def _stop(self, reason: str, *, cancel: bool = False) -> None:
        create_json(self._directory / "stopped.json", {"reason": reason, "cancel": cancel})

    def _cancel(self) -> None:
        """Cancel what is out, of a sweep that was cancelled; as often as the scheduler is asked."""
        ids = [self._jobs[number] for number in self._running()]
        try:
            if ids and self._may_ask:
                self._scheduler.cancel(ids)
        except SchedulerUnavailable as error:
            self._wait(str(error))

    def _progress(self) -> Progress:
        stopped, now = why_stopped(self._directory), self._clock()
        tasks = [task.key for batch in self._batches for task in batch.tasks]
        rows = table(self._plan, self._log, self._state.out, tasks, stopped)
        waits_for = self._waits_for or "".join(self._undecided[-1:])
        found = progress_of(self._plan, rows, stopped=stopped, now=now, waits_for=waits_for)
        exhausted = self._search_is_over and not self._out
        finished = (found.finished or exhausted) and not self._undecided
        pause = watch.pause_seconds(self._plan.backend, len(self._out))
        wait = 0.0 if finished else max(0.0, min(self._wake_at - now, pause))
        return replace(found, finished=finished, next_tick_seconds=wait)


def _read(path: Path) -> Mapping[str, Any]:
    """Read a record; empty where there is none."""
    try:
        record: Mapping[str, Any] = read_json(path)
    except NotFoundError:
        return {}
    return record


def _take_lease(directory: Path, now: float) -> str:
    """Take or renew the lease of a sweep; return who else has it, empty where nobody has.

    The newest `controller.<n>.json` is the lease. It is made exclusively, so that of several who
    find it free one takes it: batches would be safe with two controllers, a search is not.
    """
    owner = this_owner(directory.name)
    record = {**asdict(owner), "renewed": now}
    leases = {int(path.name.split(".")[1]): path for path in directory.glob("controller.*.json")}
    number = max(leases, default=0)
    if leases:
        newest = leases.pop(number)
        other, age = Owner.read(str(newest)), abs(now - _read(newest).get("renewed", 0.0))
        if other == owner:
            if age >= _RENEW_SECONDS:
                write_json(newest, record)
            return ""
        if other and owner_is_alive(other) and age < _LEASE_SECONDS:
            return f"process {other.pid} on {other.hostname}, which carries this sweep on"
    if not create_json(directory / f"controller.{number + 1}.json", record):
        return "another process, which is taking this sweep over"
    for earlier in leases.values():
        earlier.unlink(missing_ok=True)
    return ""


def progress(
    store: Store, plan: SweepPlan, rows: Iterable[Row] | None = None, *, waits_for: str = ""
) -> Progress:
    """Return how far a sweep is, as of the last tick; nothing is asked or submitted.

    The rows are read where they are left out.
    """
    stopped, found = why_stopped(directory_of(store, plan.id)), rows or rows_of(store, plan)
    return progress_of(plan, found, stopped=stopped, now=time.time(), waits_for=waits_for)


def cancel(store: Store, plan: SweepPlan, *, backends: Backends | None = None) -> list[str]:
    """Cancel a sweep and return what came of each of its submissions that was not over.

    The mark is durable and comes first: nothing is submitted any more, by nobody, until `resume`.

    Raises:
        SchedulerUnavailable: the scheduler gives no answer; ticks go on to cancel.
    """
    directory = directory_of(store, plan.id)
    write_json(directory / "stopped.json", {"reason": "the sweep was cancelled", "cancel": True})
    submissions = [batch.submission(store) for batch in read_batches(directory, plan)]
    made = [submission for submission in submissions if submission.directory.is_dir()]
    outcomes = cancel_runs(store, made, backends=backends)
    return [f"{outcome['id']}: {outcome['outcome']}" for outcome in outcomes]


def resume(store: Store, plan: SweepPlan, *, now: float | None = None) -> None:
    """Let a sweep go on that was cancelled or has stopped; `tick` then does.

    Points that were cancelled with the sweep are started again.
    """
    directory = directory_of(store, plan.id)
    if why_stopped(directory):
        write_json(directory / "resumed.json", {"time": time.time() if now is None else now})
        (directory / "stopped.json").unlink(missing_ok=True)
