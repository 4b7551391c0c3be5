"""Continue a sweep: collect ended runs, choose the next points, submit them.

`tick` does one round and returns. It can be killed at any time and called from several processes:
its decisions are on disk before it acts (`batches.py`), so that no point is submitted twice and
none is lost.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import InputError, SchedulerUnavailable, counted
from hpml_orchestrator.records.files import create_json, write_json
from hpml_orchestrator.records.owner import Owner, owner_is_alive, this_owner
from hpml_orchestrator.records.texts import seconds_text
from hpml_orchestrator.runs.backend import backends_of, elsewhere, not_here
from hpml_orchestrator.runs.cancel import cancel as cancel_runs
from hpml_orchestrator.runs.submit import determine_outcome
from hpml_orchestrator.scheduler.slurm.messages import Undecided
from hpml_orchestrator.sweeps import batches
from hpml_orchestrator.sweeps.batches import Batch, Task, create_batch, read_batches, send
from hpml_orchestrator.sweeps.plan import directory_of
from hpml_orchestrator.sweeps.rows import PointRow, metric_name, row_of
from hpml_orchestrator.sweeps.table import (
    MAX_TASKS,
    TOP_UP,
    SweepProgress,
    Table,
    is_limit,
    max_array_size,
    read_mark,
)
from hpml_orchestrator.sweeps.trial import stopped_reason

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from hpml_orchestrator.records.store import Store
    from hpml_orchestrator.records.submission import Submission
    from hpml_orchestrator.runs.backend import Backends
    from hpml_orchestrator.runs.state import State
    from hpml_orchestrator.scheduler.model import Scheduler
    from hpml_orchestrator.sweeps.plan import SweepPlan
    from hpml_orchestrator.sweeps.search import Searcher

# How much may be submitted now, given the sweep's budget and the scheduler's limits.

_ROUNDING = 1e-9


@dataclass(frozen=True)
class Allowance:
    """How much may be submitted now."""

    tasks: int = 0  # of the first group; 0 for none
    throttle: int | None = None  # how many of them may run at once; None for as many as fit
    reason: str = ""  # why no task may be submitted
    over: bool = False  # whether none ever will be, because the budget is used up


def allowance(
    plan: SweepPlan,
    table: Table,
    batches: Sequence[Batch],
    *,
    groups: Sequence[Sequence[Task]],
    now: float,
) -> Allowance:
    """Return how many tasks of the first group may be submitted, given the active `batches`.

    `groups` are the tasks of each array that could be next, in order.
    """
    sweep, size = plan.spec, len(groups[0])
    # Sites limit how often a user may call sbatch, 10 times a minute for instance; the local
    # backend has no such limit.
    recent = sum(batch.created > now - 60 for batch in batches)
    if plan.backend == "slurm" and recent >= sweep.budget.submits_per_minute:
        most = counted(sweep.budget.submits_per_minute, "submission")
        return Allowance(reason=f"at most {most} per minute")
    if sweep.seconds is not None and now - plan.created > sweep.seconds:
        return Allowance(reason=f"budget: {seconds_text(sweep.seconds)} are over", over=True)
    out = [(batch, len(batch.indices(table.active))) for batch in batches]
    for unit in ("gpu", "core"):
        affordable, reason = _affordable(plan, unit, groups[0][0], out, table.finished.values())
        # Active starts are charged until their time limit. When one ends sooner, the difference
        # becomes free, so only a sweep without active starts has used up its budget.
        if affordable < 1:
            return Allowance(reason=reason, over=not table.active)
        size = min(size, affordable)
    room = table.limits.room(len(table.active), now)
    if not room:
        left = seconds_text(max(0.0, table.limits.retry_at - now))
        when = (
            "the next points follow as soon as one ends" if table.active else f"next try in {left}"
        )
        return Allowance(reason=f"{table.limits.reason}; {when}")
    size = min(size, room)
    if sweep.parallel is None:
        return Allowance(size)
    # A throttled array occupies at most as many slots as its throttle, however many tasks it has.
    free = sweep.parallel - sum(min(count, batch.throttle or count) for batch, count in out)
    if free < 1:
        return Allowance(reason=f"{sweep.parallel} at a time")
    if sweep.searches:
        # A search learns from results. Tasks that only wait in the queue would be chosen too
        # early, so it submits no more than can run, and needs no throttle.
        return Allowance(min(size, free))
    # Slurm throttles each array by itself, so the arrays to come share the free slots among them.
    # None gets less than one, or its tasks would never start.
    return Allowance(size, throttle=min(size, max(1, free // len(groups))))


def _affordable(
    plan: SweepPlan,
    unit: str,
    task: Task,
    out: Sequence[tuple[Batch, int]],
    rows: Collection[PointRow],
) -> tuple[int, str]:
    budget = getattr(plan.spec.budget, f"{unit}_hours")
    # `exclusive` and whole cores allocate more than the job requests
    given = max([1.0, *(row.allocated or 1.0 for row in rows)]) if unit == "core" else 1.0
    hours = [getattr(shape, f"{unit}s") * given * shape.seconds / 3600 for shape in plan.shapes]
    cost = hours[task.point.shape]
    if budget is None or not cost:
        return MAX_TASKS, ""
    spent = sum(getattr(row, f"{unit}_hours") for row in rows)
    # Every active task counts until its time limit. Only so can the sweep not exceed its budget,
    # whatever its runs do.
    promised = sum(hours[batch.shape] * count for batch, count in out)
    reason = (
        f"budget: of {budget:g} {unit}-hours {spent:.3g} are spent and {promised:.3g} promised to "
        f"what is out; the next point may take {cost:.3g}"
    )
    return int((budget - spent - promised) / cost + _ROUNDING), reason


_LEASE_SECONDS = 90.0  # a lease that was not renewed for so long can be taken by another process
_RENEW_SECONDS = 15.0  # how often the lease is renewed
_QUERY_SECONDS = {"slurm": 30.0, "local": 1.0}  # the scheduler is not queried more often
_LOOK_SECONDS = {"slurm": 5.0, "local": 1.0}  # how often the tasks' own records are read
_LOOKS_PER_SECOND = 100
_FIRST_POINTS = 4  # a sweep stops if its first points to end have all failed
_STOP_SECONDS = 60.0  # a trial that does not stop on request within this time is cancelled


class Controller:
    """Runs a sweep, one `tick` at a time.

    `environment` is the submitting process's, by default `os.environ`; `clock` returns seconds
    since the epoch.
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
        self._environment = os.environ if environment is None else environment
        self._backends = backends or backends_of(store)
        self._scheduler = self._backends(plan.backend, plan.host)
        self._table = Table(store, plan)
        self._directory = self._table.directory
        self._points = {point.number: point for point in plan.points}
        self._batches: list[Batch] = []
        self._undecided: list[str] = []  # the reason for each batch that may have a job

    def tick(self) -> SweepProgress:
        """Do one round: nothing waits, so that a round takes seconds.

        Raises:
            InputError: a job cannot be rendered, or the sweep belongs to another cluster.
            RecordError: the records cannot be read or written.
        """
        host = self._plan.host
        holder = f"its machine, {host}" if host not in ("", socket.gethostname()) else ""
        try:
            _check_cluster(self._plan, self._scheduler)
        except SchedulerUnavailable as error:
            holder = str(error)
        holder = holder or _take_lease(self._directory, self._clock())
        # Without the lease the table is still read, so that any process can show the progress.
        self._table.read()
        if holder:
            return self._progress(holder)
        # The order matters. What an earlier process left undecided comes first, then what has
        # ended, then new points: limits and budget count the active tasks, and a search chooses by
        # results.
        self._begin()
        self._settle()
        self._collect()
        self._check_first_points()
        self._check_metric()
        if self._is_cancelled():
            self._cancel()
        else:
            self._stop_early()
            self._submit()
        self._table.save()
        return self._progress(self._waits_for or "".join(self._undecided[-1:]))

    def _begin(self) -> None:
        """Begin a round: read new batches, and the scheduler's answers to the others."""
        self._batches += read_batches(self._directory, self._plan, len(self._batches))
        # The batches say which tasks exist; `state.json` only adds the scheduler's last answer. If
        # it is lost or old, that costs one query, and no task is forgotten.
        known, self._table.active = self._table.active, {}
        for batch in self._batches:
            if not batch.job_id and not batch.refusal:
                batch.read_answer(self._store)
            self._add(batch)
        self._table.active |= {
            key: row for key, row in known.items() if row.job_id and key in self._table.active
        }
        since = self._clock() - self._table.asked
        # A clock that was set back makes `since` negative; then the query is allowed rather than
        # blocked until the clock has caught up.
        self._may_ask = not 0 <= since < _QUERY_SECONDS[self._plan.backend]
        self._ended: dict[int, Submission] = {}  # tasks by point
        self._undecided, self._waits_for = [], ""

    def _add(self, batch: Batch) -> None:
        self._points |= {task.point.number: task.point for task in batch.tasks}
        rows = batch.rows().items()
        self._table.active |= {key: row for key, row in rows if key not in self._table.finished}

    def _is_cancelled(self) -> bool:
        return bool(read_mark(self._directory / "stopped.json").get("cancel"))

    def _settle(self) -> None:
        cancelled = self._is_cancelled()
        for batch in self._batches:
            if batch.refusal:
                self._refuse(batch)
            if batch.job_id or batch.refusal:
                continue
            submission = batch.submission(self._store)
            begun = submission.directory.is_dir()
            if begun and not self._may_ask:
                self._undecided.append("it is not known yet whether sbatch made a job")
                continue
            if begun:
                self._table.asked = self._clock()
                self._table.save()  # so that the successor of a killed controller waits, too
            if not cancelled:
                self._send(batch)
            elif begun:
                # A cancelled sweep submits nothing, but a submission that has begun may have a job,
                # which must be found in order to be cancelled.
                outcome = determine_outcome(
                    self._store, submission, self._scheduler, now=self._clock()
                )
                if isinstance(outcome, Undecided):
                    self._undecided.append(outcome.reason)
                batch.read_answer(self._store)
                self._add(batch)

    def _send(self, batch: Batch) -> None:
        limits, tasks = self._table.limits, len(batch.tasks)
        # The batch's own tasks have been active since it was recorded; the limits need the others.
        out = len(self._table.active) - tasks
        try:
            send(self._store, self._plan, batch, self._scheduler, self._environment, self._clock)
        except SchedulerUnavailable as error:
            self._undecided.append(str(error))
            return
        if batch.job_id:
            limits.accepted(tasks, out=out)
            self._add(batch)
            return
        limits.refused(tasks, batch.refusal, out=out, now=self._clock())
        for task in batch.tasks:
            self._table.active.pop(task.key)
        self._refuse(batch)

    def _refuse(self, batch: Batch) -> None:
        if is_limit(batch.refusal, len(batch.tasks)):
            batches.forget(self._store, self._directory, batch)
            return
        keys = [task.key for task in batch.tasks if task.key not in self._table.finished]
        if not keys:
            return
        # If no batch ever got a job, the request itself is wrong (partition, account), and all
        # others would be refused too. Later refusals concern their own points only.
        if not any(other.job_id for other in self._batches):
            self._stop(f"the scheduler refused the first jobs: {batch.refusal}")
        for key in keys:
            self._table.end(PointRow(*key, state="REFUSED", reason=batch.refusal, over=True))

    def _running(self) -> list[tuple[Batch, list[int]]]:
        found = [
            (batch, batch.indices(self._table.active)) for batch in self._batches if batch.job_id
        ]
        return [(batch, indices) for batch, indices in found if indices]

    def _collect(self) -> None:
        for batch, indices in self._running():
            for index, state in batches.completed(self._store, batch, indices):
                self._keep(batch, index, state)
        # Records come first: a batch whose tasks have all completed needs no query of the
        # scheduler.
        asked = [batch for batch, _ in self._running()]
        if asked and self._may_ask:
            self._table.asked = self._clock()
            answer = batches.query(self._store, asked, self._backends, self._clock)
            for batch, index, state in answer:
                if batch.tasks[index].key in self._table.active:
                    self._keep(batch, index, state)

    def _keep(self, batch: Batch, index: int, state: State) -> None:
        task = batch.tasks[index]
        if not state.over:
            names = ("job_id", "state", "reason", "started", "nodes")
            known = {name: getattr(state, name) for name in names}
            self._table.active[task.key] = replace(self._table.active[task.key], **known)
            return
        metric = metric_name(self._plan, self._table.finished.values())
        row = row_of(self._plan, self._plan.shapes[batch.shape], task.key, state, metric)
        # A run that is asked to stop may exit with status 0 or be cancelled after a minute. So the
        # request, not the state, shows that it was pruned. A failure remains one.
        ended = row.state in ("COMPLETED", "CANCELLED")
        chosen = self._plan.spec.searches or self._plan.trial
        if ended and chosen and batches.stop_asked_at(state.submission) is not None:
            is_whole = self._plan.trial and row.state == "COMPLETED"
            why = stopped_reason(self._plan) if self._plan.trial else "stopped early by the search"
            row = replace(row, state=row.state if is_whole else "PRUNED", reason=why)
        self._table.end(row)
        self._ended[task.point.number] = state.submission

    def _check_first_points(self) -> None:
        """Stop a sweep whose first points all failed, unless it was resumed after such a stop."""
        over = self._table.finished
        if self._table.resumed() or any(row.state == "COMPLETED" for row in over.values()):
            return
        # A failed start that will be retried has not decided its point yet.
        active = {point for point, _ in (*self._table.active, *self._table.retries())}
        last = {point: row for (point, _), row in over.items() if point not in active}
        first = list(last.values())[:_FIRST_POINTS]
        if sum(row.state == "FAILED" for row in first) == _FIRST_POINTS:
            reason = f": {first[-1].reason}" if first[-1].reason else ""
            hint = (
                f"`hpml logs {first[-1].run}` shows why, "
                f"`hpml sweep resume {self._plan.id}` continues anyway"
            )
            self._stop(f"the first {_FIRST_POINTS} points failed{reason}; {hint}", cancel=True)

    def _check_metric(self) -> None:
        """Stop a search that learns nothing: its first trials do not report its metric."""
        completed = sum(row.state == "COMPLETED" for row in self._table.finished.values())
        if completed < _FIRST_POINTS or not self._plan.spec.searches or self._table.resumed():
            return
        if missing := self._table.missing_metric():
            hint = f"`hpml sweep resume {self._plan.id}` continues anyway"
            self._stop(
                f"{missing}; start the search again with another search.metric, {hint}", cancel=True
            )

    @cached_property
    def _search(self) -> Searcher:
        from hpml_orchestrator.sweeps.search import open_search  # noqa: PLC0415 - loads Optuna

        return open_search(self._directory, self._plan)

    def _stop_early(self) -> None:
        """Ask runs to stop whose result is clear; cancel those that do not stop."""
        search, now = self._plan.spec.search, self._clock()
        seconds = self._plan.trial.seconds if self._plan.trial else 0.0
        if not seconds and (not self._plan.spec.searches or search.pruner == "none"):
            return
        running = {
            batch.tasks[index].point.number: batch.submission(self._store, index)
            for batch, indices in self._running()
            for index in indices
        }
        if seconds:
            begun = {number: batches.trained_since(task) for number, task in running.items()}
            chosen = {number for number, time in begun.items() if time and now - time >= seconds}
        else:  # runs that have just ended are included, for comparison
            seen = self._ended | running
            metric = metric_name(self._plan, self._table.finished.values())
            values = {number: batches.evaluations(task, metric) for number, task in seen.items()}
            chosen = self._search.to_stop(self._table.rows(), values) & running.keys()
        asked = {
            running[number].label: batches.ask_to_stop(running[number], now) for number in chosen
        }
        rows = [row for row in self._table.active.values() if row.run in asked]
        late = [row.job_id for row in rows if now - asked[row.run] > _STOP_SECONDS]
        if late:
            with contextlib.suppress(SchedulerUnavailable):  # the next round tries again
                self._scheduler.cancel(late)

    def _waiting(self) -> list[list[Task]]:
        # Retries form a block before all others. Within a block there is one group per shape,
        # because all tasks of an array share a script.
        tasks = [(-1, Task(self._points[point], start)) for point, start in self._table.retries()]
        if self._plan.spec.searches:
            free = max(0, (self._plan.spec.parallel or 0) - len(self._table.active))
            points = self._search.propose(self._table.rows(), free)
            tasks += [(0, Task(point, 0)) for point in points]
        active, finished = self._table.active, self._table.finished
        for block, numbers in enumerate(self._plan.blocks):
            fresh = [n for n in numbers if (n, 0) not in active and (n, 0) not in finished]
            tasks += [(block, Task(self._points[number], 0)) for number in fresh]
        groups: dict[tuple[int, int], list[Task]] = {}
        for block, task in tasks:
            groups.setdefault((block, task.point.shape), []).append(task)
        return list(groups.values())

    def _submit(self) -> None:
        limits = self._table.limits
        if limits.array == 0:
            limits.array = max_array_size(self._plan.backend, self._environment)
        # With one batch in doubt others are still submitted; more mean a scheduler in trouble.
        doubts = min(1, len(self._undecided))
        while not self._table.stopped() and len(self._undecided) <= doubts:
            groups, now = self._waiting(), self._clock()
            if not groups:
                return
            allowed = allowance(self._plan, self._table, self._batches, groups=groups, now=now)
            if allowed.over:
                self._stop(allowed.reason)
            if not allowed.tasks:
                self._waits_for = allowed.reason
                return
            number, tasks = len(self._batches), groups[0][: allowed.tasks]
            batch = create_batch(self._directory, self._plan, number, tasks, allowed.throttle, now)
            if batch is None:
                # The number is taken: another controller decided on the same facts. The next round
                # reads its batch and decides anew.
                self._waits_for = "another process has just submitted for this sweep"
                return
            # One round may call sbatch many times and must not outlive its lease.
            _take_lease(self._directory, self._clock())
            self._batches.append(batch)
            self._add(batch)
            self._send(batch)

    def _stop(self, reason: str, *, cancel: bool = False) -> None:
        create_json(self._directory / "stopped.json", {"reason": reason, "cancel": cancel})

    def _cancel(self) -> None:
        """Cancel the active tasks of a cancelled sweep, not more often than queries are allowed."""
        ids: list[str] = []
        for batch, _ in self._running():
            continued = batch.submission(self._store).continued()
            ids += [batch.job_id, *continued.values()]
        try:
            if ids and self._may_ask:
                self._scheduler.cancel(ids)
        except SchedulerUnavailable as error:
            self._waits_for = str(error)

    def _progress(self, waits_for: str) -> SweepProgress:
        """Return the progress of the sweep; on a cluster the next tick is due after 5 to 30 s."""
        seen, least = self._table.progress(waits_for), _LOOK_SECONDS[self._plan.backend]
        finished = seen.finished and not self._undecided
        # Each round reads files of every active task on the shared file system, so large sweeps
        # look less often.
        pause = max(least, min(len(self._table.active) / _LOOKS_PER_SECOND, 30.0))
        return replace(seen, finished=finished, next_tick_seconds=0.0 if finished else pause)


def _check_cluster(plan: SweepPlan, scheduler: Scheduler) -> None:
    where = elsewhere(plan.cluster, scheduler)
    if where:
        raise not_here(where, field="SWEEP", value=plan.id)


def _take_lease(directory: Path, now: float) -> str:
    """Take or renew the lease of a sweep; return the process that has it, empty if it is ours.

    The newest `controller.<n>.json` is the lease. It is created exclusively, so that only one
    process gets a free lease: batches are safe with two controllers, but a search is not.
    """
    owner = this_owner(directory.name)
    record = {**asdict(owner), "renewed": now}
    leases = {int(path.name.split(".")[1]): path for path in directory.glob("controller.*.json")}
    number = max(leases, default=0)
    if leases:
        newest = leases.pop(number)
        # Clocks of two hosts may differ, so the age has no sign: a lease from the future expires
        # too. A holder on another host counts as alive; only the age of its lease can end it.
        other, age = Owner.read(str(newest)), abs(now - read_mark(newest).get("renewed", 0.0))
        if other == owner:
            if age >= _RENEW_SECONDS:
                write_json(newest, record)
            return ""
        if other and owner_is_alive(other) and age < _LEASE_SECONDS:
            return f"process {other.pid} on {other.hostname} is already running this sweep"
    if not create_json(directory / f"controller.{number + 1}.json", record):
        return "another process is taking this sweep over"
    for earlier in leases.values():
        earlier.unlink(missing_ok=True)
    return ""


def cancel(
    store: Store, plan: SweepPlan, *, backends: Backends | None = None
) -> list[dict[str, str]]:
    """Cancel a sweep; return the outcome for each of its submissions, as `runs.cancel` does.

    First a durable mark is written, so that no process submits anything until `resume`.

    Raises:
        InputError: it belongs to another cluster.
        SchedulerUnavailable: the scheduler does not answer; later ticks cancel the rest.
    """
    backends = backends or backends_of(store)
    _check_cluster(plan, backends(plan.backend, plan.host))
    directory = directory_of(store, plan.id)
    write_json(directory / "stopped.json", {"reason": "the sweep was cancelled", "cancel": True})
    submissions = [batch.submission(store) for batch in read_batches(directory, plan)]
    made = [submission for submission in submissions if submission.directory.is_dir()]
    return cancel_runs(store, made, backends=backends)


def resume(
    store: Store, plan: SweepPlan, *, now: float | None = None, backends: Backends | None = None
) -> None:
    """Allow a cancelled or stopped sweep to continue at the next `tick`.

    Points that were cancelled with the sweep are started again.

    Raises:
        InputError: it belongs to another cluster.
        SchedulerUnavailable: the scheduler gives no answer.
    """
    _check_cluster(plan, (backends or backends_of(store))(plan.backend, plan.host))
    directory = directory_of(store, plan.id)
    if read_mark(directory / "stopped.json"):
        # `resumed.json` comes first: after a kill between the two the sweep is still stopped, and
        # `resume` can be repeated. In the other order the cancelled points would never start again.
        write_json(directory / "resumed.json", {"time": time.time() if now is None else now})
        (directory / "stopped.json").unlink(missing_ok=True)


def top_up(store: Store, plan: SweepPlan, *, backends: Backends | None = None) -> int:
    """Let the points of an ended sweep that have no complete run run again, at the next `tick`.

    Points that never started are started. Returns how many points will run; 0 if all are complete.

    Raises:
        InputError: the sweep has not ended, or belongs to another cluster.
        SchedulerUnavailable: the scheduler gives no answer.
    """
    table = Table(store, plan)
    seen = table.progress()
    if not seen.finished:
        raise InputError(
            "has not ended yet",
            field="SWEEP",
            value=plan.id,
            hint=f"`hpml sweep status {plan.id}` shows its progress, "
            f"`hpml sweep resume {plan.id}` continues it",
        )
    # a stop left them out, so the progress does not count them
    waiting = [
        one for one in plan.points if not one.excluded and (one.number, 0) not in table.finished
    ]
    missing = seen.failed + len(waiting)
    if missing:
        starts = [[point, start + 1] for point, start in table.incomplete().items()]
        write_json(table.directory / TOP_UP, {"starts": starts})
        resume(store, plan, backends=backends)
    return missing
