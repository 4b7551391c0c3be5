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
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import NotFoundError, SchedulerUnavailable
from hpml_orchestrator.records.files import create_json, read_json, write_json
from hpml_orchestrator.records.owner import Owner, owner_is_alive, this_owner
from hpml_orchestrator.runs.backend import backends_of
from hpml_orchestrator.runs.cancel import cancel as cancel_runs
from hpml_orchestrator.runs.submit import settle
from hpml_orchestrator.scheduler.recovery import Found, Undecided
from hpml_orchestrator.sweeps.batches import Batch, Task, create_batch, read_batches, send
from hpml_orchestrator.sweeps.limits import MAX_TASKS, Limits, allowance, max_array_size
from hpml_orchestrator.sweeps.plan import directory_of
from hpml_orchestrator.sweeps.progress import Progress, progress_of
from hpml_orchestrator.sweeps.rows import Row, RowLog, row_of, rows, table, why_stopped
from hpml_orchestrator.sweeps.watch import (
    TaskState,
    TaskStates,
    ask_to_stop,
    completed,
    evaluations,
    pause_seconds,
    query,
    stopped_points,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from hpml_orchestrator.records.store import Store, Submission
    from hpml_orchestrator.runs.backend import Backends
    from hpml_orchestrator.runs.state import State
    from hpml_orchestrator.sweeps.plan import Point, SweepPlan
    from hpml_orchestrator.sweeps.search import Searcher

__all__ = ["Controller", "Progress", "cancel", "progress", "resume", "tick"]

LEASE_SECONDS, RENEW_SECONDS = 90.0, 15.0
"""After how long without a sign of life another process may carry the sweep on; how often the one
that does gives such a sign."""


def tick(
    store: Store,
    plan: SweepPlan,
    *,
    backends: Backends | None = None,
    environment: Mapping[str, str] | None = None,
    clock: Callable[[], float] = time.time,
) -> Progress:
    """Do one round of a sweep's work; who calls it often keeps a `Controller` instead.

    Raises:
        InputError: a job cannot be rendered.
        RecordError: the records cannot be read or written.
    """
    return Controller(store, plan, backends=backends, environment=environment, clock=clock).tick()


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
        self._sweep = plan.spec
        self._directory = directory_of(store, plan.id)
        self._environment = os.environ if environment is None else environment
        self._backends = backends or backends_of(store)
        self._scheduler = self._backends(plan.backend, plan.host)
        self._points = {point.number: point for point in plan.points}
        self._order = [number for block in plan.blocks for number in block]
        self._block = {number: index for index, block in enumerate(plan.blocks) for number in block}
        self._batches: list[Batch] = []
        self._jobs: dict[int, str] = {}  # id of the array by the batch's number
        self._refused: set[int] = set()  # numbers of the batches that have no job and never will
        self._log = RowLog(self._directory / "rows.jsonl")
        self._states = self._written = TaskStates()
        self._limits = Limits()
        self._ended: dict[int, Submission] = {}  # tasks by point, in this round
        self._resumed = 0.0  # when the sweep was last resumed after a cancel
        self._may_ask = True
        self._undecided = ""
        self._waits_for = ""
        self._wake_at = 0.0
        self._searcher: Searcher | None = None
        self._retry: Mapping[str, int] = plan.sweep["retry"]
        self._search_is_over = False

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
            return replace(seen, next_tick_seconds=pause_seconds(self._plan.backend, seen.total))
        self._read()
        self._may_ask = self._states.due(self._plan.backend, self._clock())
        self._ended = {}
        self._waits_for, self._wake_at = "", math.inf
        self._settle()
        self._collect()
        if self._is_cancelled():
            self._cancel()
        else:
            self._stop_early()
            self._submit()
        if self._states != self._written:
            self._states.write(self._directory / "tasks.json")
        return self._progress()

    def _read(self) -> None:
        """Read what is on disk and not known yet."""
        self._add(read_batches(self._directory, self._plan, len(self._batches)))
        self._log.read()
        self._states = TaskStates.read(self._directory / "tasks.json")
        self._written = replace(self._states, tasks=dict(self._states.tasks))
        self._limits = Limits.read(self._directory / "limits.json")
        self._refused.update(self._limits.batches)
        with contextlib.suppress(NotFoundError):
            self._resumed = float(read_json(self._directory / "resumed.json")["time"])

    def _is_cancelled(self) -> bool:
        return (self._directory / "cancelled.json").exists()

    def _add(self, batches: Sequence[Batch]) -> None:
        self._batches += batches
        for batch in batches:
            self._points.update((task.point.number, task.point) for task in batch.tasks)

    def _out(self) -> Iterator[tuple[Batch, int, Task]]:
        """Yield what is submitted, or about to be, and not over."""
        for batch in self._batches:
            if batch.number not in self._refused:
                for index, task in enumerate(batch.tasks):
                    if task.key not in self._log.rows:
                        yield batch, index, task

    # --- what is out -------------------------------------------------------------------------

    def _settle(self) -> None:
        """Find the jobs of batches whose submission was interrupted, or submit those."""
        self._undecided = ""
        cancelled = self._is_cancelled()
        for batch in self._batches:
            if batch.number in self._jobs or batch.number in self._refused:
                continue
            submission = batch.submission(self._store)
            begun = submission.directory.is_dir()
            known = submission.job()
            if known is not None:
                self._accept(batch, str(known["job_id"]))
            elif begun and submission.refused() is None and not self._may_ask:
                self._undecided = "it is not known yet whether sbatch made a job"
            elif not cancelled:
                self._send(batch)
            elif begun:
                outcome = settle(self._store, submission, self._scheduler, now=self._clock())
                if isinstance(outcome, Found):
                    self._accept(batch, outcome.job_id)
                elif isinstance(outcome, Undecided):
                    self._undecided = outcome.reason
            if begun and known is None and self._may_ask:
                self._states.asked = self._clock()

    def _accept(self, batch: Batch, job_id: str) -> None:
        """Keep in mind that a batch has a job, whose tasks are out unless they are over."""
        self._jobs[batch.number] = job_id
        for index, task in enumerate(batch.tasks):
            state = TaskState(
                f"{batch.sid}.{index}", f"{job_id}_{index}", "PENDING", queued=batch.created
            )
            if task.key not in self._log.rows:
                self._states.tasks.setdefault(task.key, state)

    def _send(self, batch: Batch) -> None:
        """Submit a batch and record what came of it."""
        out = sum(other is not batch for other, _, _ in self._out())
        sent = send(
            self._store,
            self._plan,
            batch,
            self._scheduler,
            environment=self._environment,
            clock=self._clock,
        )
        limits = self._limits
        if sent.job_id:
            self._accept(batch, sent.job_id)
            limits.accepted(out=out)
        elif sent.undecided:
            self._undecided = sent.undecided
            return
        else:
            self._refused.add(batch.number)
            size, reason, now = len(batch.tasks), sent.refused, self._clock()
            if not limits.refused(batch.number, size, reason, out=out, now=now):
                self._refuse(batch, reason)
        limits.write(self._directory / "limits.json")

    def _refuse(self, batch: Batch, reason: str) -> None:
        """Give up the points of a batch that the scheduler does not take."""
        if not self._jobs:
            self._stop(f"the scheduler refused the first jobs: {reason}")
        for task in batch.tasks:
            self._log.append(Row(*task.key, state="REFUSED", reason=reason, over=True))

    def _collect(self) -> None:
        """Write the rows of the tasks that are over."""
        left: dict[int, set[int]] = {}
        for batch, index, _ in self._out():
            if batch.number in self._jobs:
                left.setdefault(batch.number, set()).add(index)
        for number, indices in left.items():
            batch = self._batches[number]
            for index, state in completed(self._store, batch, indices, self._jobs[number]):
                self._keep(batch, index, state)
                indices.discard(index)
        asked = [self._batches[number] for number, indices in left.items() if indices]
        if asked and self._may_ask:
            self._states.asked = self._clock()
            for batch, index, state in query(
                self._store, asked, backends=self._backends, now=self._clock
            ):
                if batch.tasks[index].key not in self._log.rows:
                    self._keep(batch, index, state)

    def _keep(self, batch: Batch, index: int, state: State) -> None:
        """Keep the state of a task; the row of one that is over."""
        task = batch.tasks[index]
        if not state.over:
            self._states.tasks[task.key] = TaskState(
                f"{batch.sid}.{index}",
                state.job_id,
                state.state,
                state.reason,
                queued=batch.created,
                started=state.started,
                nodes=state.nodes,
            )
            return
        row = row_of(self._plan, self._plan.shapes[batch.shape], task.key, state)
        ended = row.state in ("COMPLETED", "CANCELLED") and self._sweep.searches
        if ended and task.point.number in stopped_points(self._directory):
            row = replace(row, state="PRUNED", reason="stopped early by the search")
        self._log.append(row)
        self._ended[task.point.number] = state.submission
        self._states.tasks.pop(task.key, None)

    # --- searches ----------------------------------------------------------------------------

    def _open_search(self) -> Searcher:
        if self._searcher is None:
            from hpml_orchestrator.sweeps.search import open_search  # noqa: PLC0415 - loads Optuna

            self._searcher = open_search(self._directory, self._plan)
        return self._searcher

    def _rows(self) -> list[Row]:
        """Return the rows as the search sees them: a retry that is due has one already."""
        found = dict(self._log.rows)
        for task in [*(task for _, _, task in self._out()), *self._retries()]:
            found.setdefault(task.key, Row(*task.key))
        return [found[key] for key in sorted(found)]

    def _stop_early(self) -> None:
        """Ask the runs to stop that the search gives up; cancel those that do not."""
        if not self._sweep.searches or self._sweep.search.pruner == "none":
            return
        running = {
            task.point.number: replace(batch.submission(self._store), index=index)
            for batch, index, task in self._out()
            if batch.number in self._jobs
        }
        metric = self._sweep.search.metric
        # What has just ended counts too: others are compared with it.
        seen = self._ended | running
        values = {number: evaluations(task, metric) for number, task in seen.items()}
        doomed = self._open_search().to_stop(self._rows(), values)
        asked = {number: running[number] for number in doomed & running.keys()}
        late = ask_to_stop(self._directory, asked, now=self._clock())
        if late:
            tasks = self._states.tasks
            ids = [state.job_id for (number, _), state in tasks.items() if number in late]
            with contextlib.suppress(SchedulerUnavailable):  # the next round tries again
                self._scheduler.cancel(ids)

    # --- what is next ------------------------------------------------------------------------

    def _retries(self) -> Iterator[Task]:
        """Yield the next start of each point that the sweep starts again."""
        ends: dict[int, list[Row]] = {}
        for row in self._log.rows.values():
            if row.state != "COMPLETED":
                ends.setdefault(row.point, []).append(row)
        taken = self._taken()
        for number, points_rows in ends.items():
            last = max(points_rows, key=lambda row: row.start)
            task = Task(self._points[number], last.start + 1)
            count = sum(row.state == last.state for row in points_rows)
            allowed = count <= self._retry.get(last.state, 0)
            with_sweep = last.state == "CANCELLED" and (last.queued or 0.0) < self._resumed
            if (allowed or with_sweep) and task.key not in taken:
                yield task

    def _taken(self) -> set[tuple[int, int]]:
        """Return the starts that are in a batch, or over."""
        return {task.key for _, _, task in self._out()} | self._log.rows.keys()

    def _waiting(self, free: int) -> list[list[Task]]:
        """Return the tasks to submit next, in order: a list holds what may go out together."""
        groups: dict[tuple[int, int], list[Task]] = {}
        for task in self._retries():
            groups.setdefault((-1, task.point.shape), []).append(task)
        if self._sweep.searches:
            points: list[Point] = self._open_search().propose(self._rows(), free)
            self._search_is_over = not points
            fresh = [(0, point) for point in points]
        else:
            fresh = [(self._block[number], self._points[number]) for number in self._order]
        taken = self._taken()
        for block, point in fresh:
            if (point.number, 0) not in taken:
                groups.setdefault((block, point.shape), []).append(Task(point, 0))
        return list(groups.values())

    def _submit(self) -> None:
        """Submit batches until a limit is reached or nothing is left."""
        if self._undecided:
            self._wait(self._undecided)
            return
        if self._limits.array == 0:
            self._limits.array = MAX_TASKS
            if self._plan.backend == "slurm":
                self._limits.array = max_array_size(self._environment)
            self._limits.write(self._directory / "limits.json")
        while not why_stopped(self._directory):
            parallel = self._sweep.parallel
            out = list(self._out())
            groups = self._waiting(len(out) if parallel is None else max(0, parallel - len(out)))
            if not groups:
                return
            allowed = allowance(
                self._plan,
                self._sweep,
                self._limits,
                groups=[(group[0].point.shape, len(group)) for group in groups],
                out=Counter(batch.number for batch, _, _ in out),
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
            self._add([batch])
            self._send(batch)
            if self._undecided:
                self._wait(self._undecided)
                return

    def _wait(self, reason: str, seconds: float = math.inf) -> None:
        """Note what the sweep waits for, and when to try again at the latest."""
        self._waits_for = reason
        self._wake_at = min(self._wake_at, self._clock() + seconds)

    def _stop(self, reason: str) -> None:
        create_json(self._directory / "stopped.json", {"reason": reason, "time": self._clock()})

    def _cancel(self) -> None:
        """Cancel what is out, of a sweep that was cancelled."""
        running = sorted({batch.number for batch, _, _ in self._out()} & self._jobs.keys())
        try:
            self._scheduler.cancel([self._jobs[number] for number in running])
        except SchedulerUnavailable as error:
            self._wait(str(error))

    def _progress(self) -> Progress:
        stopped, now = why_stopped(self._directory), self._clock()
        rows = table(self._plan, self._log, self._states, self._batches, stopped)
        found = progress_of(self._plan, rows, stopped=stopped, now=now, waits_for=self._waits_for)
        exhausted = self._search_is_over and not any(self._out())
        finished = (found.finished or exhausted) and not self._undecided
        pause = pause_seconds(self._plan.backend, sum(1 for _ in self._out()))
        wait = 0.0 if finished else max(0.0, min(self._wake_at - now, pause))
        return replace(found, finished=finished, next_tick_seconds=wait)


def _take_lease(directory: Path, now: float) -> str:
    """Take or renew the lease of a sweep; return who else has it, empty where nobody has.

    It only saves work: two controllers at once do no harm.
    """
    path, owner = directory / "controller.json", this_owner(directory.name)
    lease = {**asdict(owner), "renewed": now}
    try:
        record = read_json(path)
    except NotFoundError:
        if create_json(path, lease):
            return ""
        record = read_json(path)
    other, age = Owner.read(str(path)), now - float(record.get("renewed", 0.0))
    if other == owner and 0 <= age < RENEW_SECONDS:
        return ""
    if other not in (None, owner) and owner_is_alive(other) and 0 <= age < LEASE_SECONDS:
        return f"process {other.pid} on {other.hostname}, which carries this sweep on"
    write_json(path, lease)
    return ""


def progress(store: Store, plan: SweepPlan, *, waits_for: str = "") -> Progress:
    """Return how far a sweep is, as of the last tick; nothing is asked or submitted."""
    stopped = why_stopped(directory_of(store, plan.id))
    return progress_of(
        plan, rows(store, plan), stopped=stopped, now=time.time(), waits_for=waits_for
    )


def cancel(store: Store, plan: SweepPlan, *, backends: Backends | None = None) -> list[str]:
    """Cancel a sweep and return what came of each of its submissions that was not over.

    The mark is durable and comes first: nothing is submitted any more, by nobody, until `resume`.

    Raises:
        SchedulerUnavailable: the scheduler gives no answer; ticks go on to cancel.
    """
    directory = directory_of(store, plan.id)
    create_json(directory / "cancelled.json", {"reason": "the sweep was cancelled"})
    submissions = [batch.submission(store) for batch in read_batches(directory, plan)]
    made = [submission for submission in submissions if submission.directory.is_dir()]
    outcomes = cancel_runs(store, made, backends=backends)
    return [f"{outcome['id']}: {outcome['outcome']}" for outcome in outcomes]


def resume(store: Store, plan: SweepPlan, *, now: float | None = None) -> None:
    """Let a sweep go on that was cancelled or has stopped; `tick` then does.

    Points that were cancelled with the sweep are started again.
    """
    directory = directory_of(store, plan.id)
    if (directory / "cancelled.json").exists():
        write_json(directory / "resumed.json", {"time": time.time() if now is None else now})
    for name in ("cancelled.json", "stopped.json"):
        (directory / name).unlink(missing_ok=True)
