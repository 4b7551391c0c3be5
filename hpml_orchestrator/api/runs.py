"""Runs on record: their state, output, results, events and report."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.api.reporting import diagnose_run
from hpml_orchestrator.diagnosis.report import Report
from hpml_orchestrator.errors import (
    InputError,
    NotFoundError,
    SchedulerUnavailable,
    WaitTimeoutError,
)
from hpml_orchestrator.records.store import Submission, open_store
from hpml_orchestrator.runs.cancel import NOT_CANCELLED
from hpml_orchestrator.runs.cancel import cancel as cancel_runs
from hpml_orchestrator.runs.dashboard import state_json
from hpml_orchestrator.runs.follow import read_output, refuse_failed, wait_until_over
from hpml_orchestrator.runs.life import read_life
from hpml_orchestrator.runs.reporting.description import describe
from hpml_orchestrator.runs.reporting.summary import summarise
from hpml_orchestrator.runs.reporting.text import summary_html
from hpml_orchestrator.runs.select import one_run, parse_states, select
from hpml_orchestrator.runs.status import state_of
from hpml_orchestrator.spec.ages import parse_since

if TYPE_CHECKING:
    from datetime import datetime

    from hpml_orchestrator.runs.state import State

__all__ = ["Report", "Run", "expect", "expect_seconds", "list_runs"]

_log = logging.getLogger("hpml_orchestrator")


def expect(valid: bool, field: str, value: object, right: str) -> None:
    """Refuse an argument that is not valid.

    Raises:
        InputError: names the argument, its value and what would be right.
    """
    if not valid:
        raise InputError(f"must be {right}", field=field, value=value)


def expect_seconds(timeout: float | None) -> None:
    """Refuse a timeout that is not a number of seconds."""
    valid = timeout is None or (isinstance(timeout, int | float) and timeout >= 0)
    expect(valid, "timeout", timeout, "a number of seconds from 0 on, or None")


class Run:
    """A run on record: a job, a job array or one of its tasks.

    Args:
        word: what names it for `hpml show`: its id, the name of its job, a job id, or `last`; or
            its record.
        records: directory of the records; default: `HPML_HOME`.

    Attributes:
        id: the run's id; of a task of an array with its index.

    Raises:
        NotFoundError: no run has that name.
        InputError: the word names several runs.
    """

    def __init__(
        self, word: str | Submission = "last", *, records: str | Path | None = None
    ) -> None:
        self._store = open_store(records)
        if not isinstance(word, Submission):
            right = "a text: a run's id, the name of its job, a job id or `last`"
            expect(isinstance(word, str), "word", word, right)
            word = self._store.resolve(word)
        self._submission = word
        self.id = self._submission.label

    def __repr__(self) -> str:
        return f"Run({self.id!r})"

    def _repr_html_(self) -> str:
        """Return the lines of `hpml show` as a table; a notebook displays it."""
        state = self._state()
        return summary_html(state, None if state.tasks else read_life(state))

    def _state(self, has: str = "") -> State:
        """Return the state; `has`: names what only a task has."""
        submission = self._submission
        if has:
            submission = one_run(submission, field="Run", has=has, choose="choose one of `tasks()`")
        return state_of(self._store, submission)

    def state(self) -> str:
        """Return its state now, such as PENDING, RUNNING, COMPLETED or FAILED.

        The state is UNKNOWN if the scheduler does not answer.

        Raises:
            RecordError: its record cannot be read; the same holds for the other methods.
        """
        return self._state().state

    def info(self) -> dict[str, Any]:
        """Return job id, state, reason, nodes, times (seconds since the epoch) and directories."""
        return state_json(self._state())

    def wait(self, timeout: float | None = None, *, must_complete: bool = True) -> str:
        """Wait until the run has ended, and return its state.

        Args:
            timeout: seconds to wait; None: without limit.
            must_complete: whether to raise an error if it ends in another state than COMPLETED.

        Raises:
            JobFailedError: it did not complete; the error's `run` is the id.
            WaitTimeoutError: it has not ended in time; it continues.
        """
        expect_seconds(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout

        def refuse_late(state: State) -> None:
            if deadline is not None and not state.over and time.monotonic() >= deadline:
                hint = f"it continues; `cancel()` or `hpml cancel {self.id}` cancels it"
                raise WaitTimeoutError(f"{self.id} is {state.state} after {timeout:g} s", hint=hint)

        state = wait_until_over(self._store, self._submission, each=refuse_late)
        if must_complete:
            refuse_failed(state)
        return state.state

    def cancel(self) -> str:
        """Cancel the job, and return what was done; a run that has ended stays as it is.

        Raises:
            SchedulerUnavailable: it was not cancelled, because it is still being submitted, or the
                scheduler does not answer.
        """
        outcomes = cancel_runs(self._store, [self._submission], notice=_log.info)
        outcome = outcomes[0]["outcome"]
        if outcome.startswith(NOT_CANCELLED):
            raise SchedulerUnavailable(f"{self.id}: {outcome}", hint="cancel it again")
        return outcome

    def tasks(self) -> list[Run]:
        """Return the tasks of a job array, by index; for a single job only the run itself."""
        if self._submission.index is not None or not self._submission.is_array():
            return [self]
        tasks = [replace(self._submission, index=index) for index, _ in self._submission.runs()]
        return [Run(task, records=self._store.root) for task in tasks]

    def logs(self, lines: int = 0) -> str:
        """Return the output so far; bytes that are not UTF-8 become U+FFFD.

        Args:
            lines: only that many lines at the end; 0: all.

        Raises:
            InputError: it is a job array; choose one of `tasks()`.
        """
        expect(isinstance(lines, int) and lines >= 0, "lines", lines, "a number of lines")
        return read_output(self._state("output").run, lines)

    def results(self) -> dict[str, Any]:
        """Return what the training reported: its `result.json` and the results of the channel.

        Raises:
            InputError: it is a job array; choose one of `tasks()`.
        """
        state = self._state("results")
        return describe(state, summarise(state)).result

    def events(self) -> list[dict[str, Any]]:
        """Return the events of all attempts, in the order of their time.

        Each has `attempt` (from 0), `time` (seconds since the epoch), `event`, `node`, `rank` (None
        if the event is not about a rank) and the data of the event by name.

        Raises:
            InputError: it is a job array; choose one of `tasks()`.
        """
        rows = []
        for attempt in self._state("events").run.attempts():
            for event in sorted(attempt.events(), key=lambda event: event.time):
                own = {name: value for name, value in vars(event).items() if name != "data"}
                rows.append({**event.data, "attempt": attempt.number, **own})
        return rows

    def report(self) -> Report:
        """Return why it is slow, and what to change, from its records.

        Raises:
            NotFoundError: it has not started.
            InputError: it is a job array; choose one of `tasks()`.
        """
        state, site = self._state("report"), os.environ.get("HPML_SITE", "")
        return Report(diagnose_run(self._store, state, site=site, notice=_log.warning))


def list_runs(
    *,
    state: str = "",
    since: str | datetime | None = None,
    name: str = "*",
    limit: int | None = None,
    records: str | Path | None = None,
) -> list[Run]:
    """Return runs, newest first, filtered as by `hpml list`.

    Args:
        state: only runs in these states, separated by commas, such as `failed,timeout`.
        since: only runs submitted since then: an age such as `3d`, a date such as `2026-11-20`, or
            a datetime.
        name: a name, or a pattern such as `digits-*`.
        limit: number of runs; None: all.
        records: directory of the records; default: `HPML_HOME`.

    Raises:
        InputError: a filter is wrong.
        NotFoundError: the directory of the records does not exist.
    """
    store = open_store(records)
    if records is not None and not store.root.is_dir():
        hint = "the first run with these records creates it"
        raise NotFoundError(f"no such directory of records: {store.root}", hint=hint)
    expect(isinstance(name, str), "name", name, "a name or a pattern")
    expect(isinstance(state, str), "state", state, "a text such as `failed,timeout`")
    valid = limit is None or (isinstance(limit, int) and limit >= 0)
    expect(valid, "limit", limit, "a number of runs, or None")
    found = select(
        store,
        name=name,
        since=None if since is None else parse_since(since, field="since", now=time.time()),
        in_states=parse_states(state, field="state") if state else (),
        limit=limit,
    )
    return [Run(one.submission, records=store.root) for one in found]
