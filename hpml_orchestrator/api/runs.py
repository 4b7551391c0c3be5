"""Jobs, their submission, and recorded runs: state, output, results, events and reports."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hpml_orchestrator.check.changes import diagnose_run
from hpml_orchestrator.check.submission import submit_checked
from hpml_orchestrator.diagnosis.report import Report
from hpml_orchestrator.errors import InputError, SchedulerUnavailable, WaitTimeoutError
from hpml_orchestrator.jobfile.text import parse_since
from hpml_orchestrator.records.job import Job, Json
from hpml_orchestrator.records.store import Store, open_store
from hpml_orchestrator.records.submission import Submission
from hpml_orchestrator.runs.backend import choose, cluster_here
from hpml_orchestrator.runs.cancel import NOT_CANCELLED, cancel
from hpml_orchestrator.runs.follow import read_output, refuse_failed, wait_until_over
from hpml_orchestrator.runs.load import ResolvedJob, load_job
from hpml_orchestrator.runs.prepare import render_job
from hpml_orchestrator.runs.reporting.description import last_result
from hpml_orchestrator.runs.reporting.text import summary_html
from hpml_orchestrator.runs.select import one_run, parse_states, select
from hpml_orchestrator.runs.state import State, state_json
from hpml_orchestrator.runs.status import state_of
from hpml_orchestrator.sweeps.plan import check_extra, resolve

if TYPE_CHECKING:
    from hpml_orchestrator.sweeps.reporting import SweepReport

_log = logging.getLogger("hpml_orchestrator")

_NO_FILE = "make_job(…)"
"""Stands in for the name of a job file."""


def _expect(valid: bool, field: str, value: object, right: str) -> None:
    if not valid:
        raise InputError(f"must be {right}", field=field, value=value)


def _store(records: str | Path | None, *, must_exist: bool = False) -> Store:
    valid = records is None or isinstance(records, str | Path)
    _expect(valid, "records", records, "the path of a directory, or None")
    store = open_store(records, must_exist=must_exist)
    store.cluster = cluster_here
    return store


def _seconds(timeout: float | None) -> float:
    """Return a timeout in seconds, infinite for None; refuse anything else."""
    valid = timeout is None or (isinstance(timeout, int | float) and timeout >= 0)
    _expect(valid, "timeout", timeout, "a number of seconds from 0 on, or None")
    return float("inf") if timeout is None else timeout


def make_job(**fields: object) -> Job:
    """Return a job that is validated like a job file.

    Args:
        fields: fields of a job file; relative paths start at the current directory.

    Raises:
        InputError: fields are wrong; the message names each of them.
    >>> from hpml_orchestrator import make_job
    >>> make_job(name="fit", command=["true"], resources={"nodes": 2, "time": "10m"}).resources.time
    600
    """
    texts = {name: str(one) if isinstance(one, Path) else one for name, one in fields.items()}
    return load_job(Path.cwd() / _NO_FILE, fields=texts).job


def _said(written: Json, defaults: Json) -> Json:
    """Return the fields of a job without empty ones, which a site profile may fill in."""
    return {
        name: _said(value, defaults[name]) if isinstance(value, dict) and value else value
        for name, value in written.items()
        if value not in (None, [], {}) or value != defaults.get(name)
    }


def _load(
    job: Job | str | Path, settings: Mapping[str, object] | None, site: str | Path, *, local: bool
) -> ResolvedJob:
    """Return a job, completed with the fields of the site profile."""
    valid = isinstance(settings or {}, Mapping) and all(
        isinstance(one, str) for one in settings or ()
    )
    _expect(valid, "settings", settings, 'a dictionary such as {"resources.nodes": 4}')
    _expect(isinstance(site, str | Path), "site", site, "the path of a site profile, or `none`")
    _expect(isinstance(local, bool), "local", local, "True or False")
    profile = str(site) or os.environ.get("HPML_SITE", "")
    _expect(isinstance(job, Job | str | Path), "job", job, "a Job, or the path of a job file")
    place = Path.cwd() / _NO_FILE if isinstance(job, Job) else Path(job).expanduser()
    backend = choose("local" if local else "auto", place, profile)
    load = partial(load_job, place, site=profile, backend=backend)
    if not isinstance(job, Job):
        return load([*(settings or {}).items()])
    right = "left out for a Job, which `dataclasses.replace` changes"
    _expect(not settings, "settings", settings, right)
    try:
        fields = _said(job.to_json(), Job.written_defaults())
    except ValueError as error:
        hint = "make_job(…) takes the values of a job file"
        raise InputError(str(error), field="job", hint=hint) from error
    return load(fields=fields)


class Run:
    """A recorded run: a job, a job array or one of its tasks.

    Each method raises a RecordError if the record cannot be read. `logs`, `results`, `events` and
    `report` raise an InputError for a job array: choose one of its `tasks()`.

    Args:
        word: as for `hpml show`: its id, the name of its job, a job id, or `last`; or its record.
        records: directory of the records; default: `HPML_HOME`.

    Attributes:
        id: the run's id; for a task of an array, with its index.

    Raises:
        NotFoundError: no run has that name, or the directory does not exist.
        InputError: the word matches several runs.
    """

    def __init__(
        self, word: str | Submission = "last", *, records: str | Path | None = None
    ) -> None:
        self._store = _store(records, must_exist=True)
        if not isinstance(word, Submission):
            right = "a text: a run's id, the name of its job, a job id or `last`"
            _expect(isinstance(word, str), "word", word, right)
            word = self._store.resolve(word)
        self._submission = word
        self.id = word.label

    def __repr__(self) -> str:
        return f"Run({self.id!r})"

    def _repr_html_(self) -> str:
        return summary_html(state_of(self._store, self._submission))

    def _state_of_one(self, has: str) -> State:
        """Return the state of a single run; `has` names what an array as a whole lacks."""
        choose = "choose one of `tasks()`"
        return state_of(self._store, one_run(self._submission, field="Run", has=has, choose=choose))

    def state(self) -> str:
        """Return its state, such as RUNNING or FAILED; UNKNOWN if the scheduler does not answer."""
        return state_of(self._store, self._submission).state

    def info(self) -> dict[str, object]:
        """Return job id, state, reason, nodes, times (seconds since the epoch) and directories."""
        return state_json(state_of(self._store, self._submission))

    def wait(self, timeout: float | None = None, *, must_complete: bool = True) -> str:
        """Wait until the run has ended, and return its state.

        Args:
            timeout: seconds to wait; None: without limit.
            must_complete: raise an error if it ends in another state than COMPLETED.

        Raises:
            JobFailedError: it did not complete; the error's `run` is the id.
            WaitTimeoutError: it did not end in time; it continues.
        """
        deadline = time.monotonic() + _seconds(timeout)

        def refuse_late(state: State) -> None:
            # A run that ended at the last moment has ended: check the state before the deadline.
            if not state.over and time.monotonic() >= deadline:
                hint = f"it continues; `cancel()` or `hpml cancel {self.id}` cancels it"
                raise WaitTimeoutError(f"{self.id} is {state.state} after {timeout:g} s", hint=hint)

        state = wait_until_over(self._store, self._submission, each=refuse_late)
        if must_complete:
            refuse_failed(state)
        return state.state

    def cancel(self) -> str:
        """Cancel the job, and return what was done; a run that has ended does not change.

        Raises:
            SchedulerUnavailable: it is still being submitted, or the scheduler does not answer.
        """
        outcome = cancel(self._store, [self._submission], notice=_log.info)[0]["outcome"]
        if outcome.startswith(NOT_CANCELLED):
            raise SchedulerUnavailable(f"{self.id}: {outcome}", hint="cancel it again")
        return outcome

    def tasks(self) -> list[Run]:
        """Return the tasks of a job array, by index; for a single job, only the run itself."""
        if not self._submission.is_array():
            return [self]
        tasks = [self._submission.at(index) for index, _ in self._submission.runs()]
        return [Run(task, records=self._store.root) for task in tasks]

    def logs(self, lines: int = 0) -> str:
        """Return the output so far, or its last `lines`; bytes that are not UTF-8 become U+FFFD."""
        _expect(isinstance(lines, int) and lines >= 0, "lines", lines, "a number of lines")
        return read_output(self._state_of_one("output").run, lines)

    def results(self) -> dict[str, object]:
        """Return what the last attempt reported: its `result.json` and the channel's results."""
        return last_result(self._state_of_one("results"))

    def events(self) -> list[dict[str, object]]:
        """Return the events of all attempts, ordered by time.

        Each has `attempt` (from 0), `time` (seconds since the epoch), `event`, `node`, `rank` (or
        None) and the event's data by name.
        """
        rows = []
        for attempt in self._state_of_one("events").run.attempts():
            for event in sorted(attempt.events(), key=lambda event: event.time):
                own = {name: value for name, value in vars(event).items() if name != "data"}
                rows.append({**event.data, "attempt": attempt.number, **own})
        return rows

    def report(self) -> Report:
        """Return why it is slow, and what to change; raises NotFoundError if it has not started."""
        state, site = self._state_of_one("report"), os.environ.get("HPML_SITE", "")
        return Report(diagnose_run(state, site=site, notice=_log.warning))


def submit(
    job: Job | str | Path,
    *,
    settings: Mapping[str, object] | None = None,
    site: str | Path = "",
    local: bool = False,
    check: bool = True,
    records: str | Path | None = None,
) -> Run:
    """Submit a job as `hpml submit` does, and return its run once the scheduler has accepted it.

    Args:
        job: the job, or the path of its job file.
        settings: fields of the job file to change, such as `{"resources.nodes": 4}`.
        site: the only site profile to use, or `none`; default: the profiles that `hpml` finds.
        local: whether to run it on this machine; default: on Slurm if `sbatch` is on PATH.
        check: whether to check the job first, as `hpml check` does.
        records: directory of the records; default: `HPML_HOME`.

    Raises:
        InputError: the job is wrong, or the cluster would not run it.
        SchedulerError: the scheduler refused it; no job exists.
        SchedulerUnavailable: the scheduler did not answer, so a job may exist: do not submit it
            again. `list_runs` finds it, `hpml submit --resume` completes its submission.
        RecordError: the records cannot be written.
    """
    _expect(isinstance(check, bool), "check", check, "True or False")
    store = _store(records)
    rendered = render_job(_load(job, settings, site, local=local))
    submission = submit_checked(store, rendered, checked=check, notice=_log.warning)
    return Run(submission, records=store.root)


def run(
    job: Job | str | Path,
    *,
    settings: Mapping[str, object] | None = None,
    site: str | Path = "",
    local: bool = False,
    check: bool = True,
    records: str | Path | None = None,
    timeout: float | None = None,
) -> Run:
    """Submit a job as `submit` does, wait for its end as `Run.wait` does, and return its run.

    Raises:
        JobFailedError: it ended in another state than COMPLETED; the error's `run` is its id.
        WaitTimeoutError: it did not end within `timeout` seconds; it continues.
    """
    _seconds(timeout)  # reject a wrong timeout before a job exists
    submitted = submit(job, settings=settings, site=site, local=local, check=check, records=records)
    submitted.wait(timeout)
    return submitted


def list_runs(
    *,
    state: str = "",
    since: str | datetime | None = None,
    name: str = "*",
    limit: int | None = None,
    records: str | Path | None = None,
) -> list[Run]:
    """Return runs, newest first, filtered as by `hpml list`; a wrong filter is an InputError.

    Args:
        state: only runs in these states, separated by commas, such as `failed,timeout`.
        since: only runs submitted since then: `3d`, a date such as `2026-11-20`, or a datetime.
        name: a name, or a pattern such as `digits-*`.
        limit: maximum number of runs; None for all.
        records: directory of the records, which must exist; default: `HPML_HOME`.
    """
    _expect(isinstance(name, str), "name", name, "a name or a pattern")
    _expect(isinstance(state, str), "state", state, "a text such as `failed,timeout`")
    valid = limit is None or (isinstance(limit, int) and limit >= 0)
    _expect(valid, "limit", limit, "a number of runs, or None")
    store = _store(records, must_exist=True)
    moment = None if since is None else parse_since(since, field="since", now=time.time())
    states = parse_states(state, field="state") if state else ()
    found = select(store, name=name, since=moment, in_states=states, limit=limit)
    return [Run(one.submission, records=store.root) for one in found]


def sweep_report(word: str = "last", *, records: str | Path | None = None) -> SweepReport:
    """Return the report of a sweep; for an unfinished sweep, the results so far.

    Args:
        word: the sweep's id, a unique beginning or end of it, or `last`.
        records: as for `list_runs`.

    Raises:
        InputError: a package of the extra `sweep` is missing, or the word matches several sweeps.
    """
    _expect(isinstance(word, str), "word", word, "a text: a sweep's id or `last`")
    check_extra()
    from hpml_orchestrator.sweeps.reporting import read_report  # noqa: PLC0415 - loads matplotlib

    store = _store(records, must_exist=True)
    return read_report(store, resolve(store, word))
