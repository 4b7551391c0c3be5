"""Choose runs by name, age, state and sweep, and those that a job has to wait for."""

from __future__ import annotations

import fnmatch
import socket
from itertools import islice
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import HpmlError, InputError, NotFoundError, did_you_mean
from hpml_orchestrator.records.ids import MAX_NAME_CHARS, stamp, stamp_of
from hpml_orchestrator.records.run import is_own
from hpml_orchestrator.records.texts import first_few
from hpml_orchestrator.runs.status import UNREADABLE, states
from hpml_orchestrator.scheduler.model import STATE_FLAGS, JobState

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from hpml_orchestrator.records.schema import WaitedRun
    from hpml_orchestrator.records.store import Store
    from hpml_orchestrator.records.submission import Submission
    from hpml_orchestrator.runs.backend import Backends
    from hpml_orchestrator.runs.state import State

_NAMED_TASKS = 3

STATES = (
    *(state.value for state in JobState),
    "SUBMITTING",
    "NOT SUBMITTED",
    "REFUSED",
    UNREADABLE,
)
"""Every state that `hpml list` shows."""


def parse_states(text: str, *, field: str) -> set[str]:
    """Return the states that a list separated by commas names, in upper or lower case.

    Names of Slurm that hpml shows as another state, such as REVOKED, stand for that one.

    Raises:
        InputError: a state is unknown; names the nearest one.
    """
    known = {state.replace(" ", "_"): state for state in STATES}
    known |= {flag: state.value for flag, state in STATE_FLAGS.items()}
    found = set()
    for word in text.split(","):
        name = word.strip().upper().replace(" ", "_").replace("-", "_")
        if name not in known:
            every = ", ".join(state.lower().replace(" ", "_") for state in STATES)
            raise InputError(
                "unknown state",
                field=field,
                value=word,
                hint=did_you_mean(name, known) or f"states: {every}",
            )
        found.add(known[name])
    return found


def run_name(submission: Submission) -> str:
    """Return a run's name, also if its id has only the beginning of the name."""
    shown = submission.sid.rsplit("-", 3)[0]
    if len(shown) < MAX_NAME_CHARS:
        return shown
    try:
        name = str(submission.record()["name"])
    except (HpmlError, KeyError):
        return shown
    return name if name.startswith(shown) else shown


def named(store: Store, pattern: str) -> Iterator[Submission]:
    """Yield the submissions of that name, newest first.

    Args:
        store: where records live.
        pattern: a name, or a pattern such as `digits-*`.
    """
    for submission in store.submissions():
        if fnmatch.fnmatchcase(run_name(submission), pattern):
            yield submission


def select(
    store: Store,
    *,
    name: str = "*",
    since: float | None = None,
    sweep: str = "",
    in_states: Collection[str] = (),
    limit: int | None = None,
    backends: Backends | None = None,
) -> list[State]:
    """Return the states of the runs that meet all conditions, newest first.

    Args:
        store: where records live.
        name: a name, or a pattern such as `digits-*`.
        since: only runs submitted since then, seconds since the epoch.
        sweep: only the runs of the sweep with this id.
        in_states: only runs in one of these states; any state if empty.
        limit: at most this many; all by default.
        backends: the schedulers; the real ones by default.
    """
    chosen = (
        submission
        for submission in named(store, name)
        if (since is None or stamp_of(submission.sid) >= stamp(since))
        and (not sweep or sweep_of(submission) == sweep)
    )
    # Without a condition on states the limit comes first: an old run needs no query to be left out.
    if not in_states:
        return states(store, islice(chosen, limit), backends=backends)
    every = states(store, chosen, backends=backends)
    return [*islice((state for state in every if state.state in in_states), limit)]


def sweep_of(submission: Submission) -> str:
    """Return the id of the sweep that a run belongs to; empty without one."""
    try:
        return str(submission.record().get("sweep", ""))
    except HpmlError:
        return ""


def unfinished(store: Store, pattern: str, *, backends: Backends | None = None) -> list[State]:
    """Return the caller's own runs of a name that can be cancelled, newest first.

    Runs of another cluster, and those whose job the scheduler has forgotten, are left out: the id
    may be another job's.
    """
    mine = [submission for submission in named(store, pattern) if is_own(submission.directory)]
    every = states(store, mine, backends=backends)
    return [state for state in every if state.unfinished and not state.elsewhere]


def one_run(
    submission: Submission, *, field: str, has: str, choose: str = "name one"
) -> Submission:
    """Return a submission that is a single run; of an array of several tasks, one must be named.

    Args:
        submission: what the user named.
        field: the argument or option that names it.
        has: what every task has, such as output.
        choose: how the caller names a task.

    Raises:
        InputError: it is a job array and none of its tasks is named.
    """
    tasks = submission.runs()
    if submission.index is not None or not submission.is_array():
        return submission
    if len(tasks) == 1:
        return submission.at(tasks[0][0])
    names = [f"{submission.sid}.{index}" for index, _ in tasks]
    raise InputError(
        f"is a job array of {len(tasks)} tasks, each with its own {has}",
        field=field,
        value=submission.sid,
        hint=f"{choose}: {first_few(names, _NAMED_TASKS)}",
    )


# `after`: the runs that a job still has to wait for when it is submitted.

_WANTED = {"ok": "completed", "notok": "failed"}


def pending_dependencies(
    store: Store, dependencies: Sequence[str], *, backend: str, backends: Backends | None = None
) -> list[WaitedRun]:
    """Return `run`, `end` and `job_id` of each run that has not ended yet.

    A run that is over is judged here by its record, because Slurm treats a dependency on a job that
    it has forgotten as fulfilled.

    Args:
        store: where records live.
        dependencies: `RUN`, or one after `ok:`, `any:` or `notok:`.
        backend: name of the scheduler that the job is for.
        backends: the schedulers; the real ones by default.

    Raises:
        InputError: the run does not exist, belongs to another scheduler, has no job, or did not end
            as required.
    """
    runs = [_resolve(store, dependency, backend) for dependency in dependencies]
    waiting: list[WaitedRun] = []
    for dependency, state in zip(dependencies, states(store, runs, backends=backends), strict=True):
        end = dependency.rpartition(":")[0] or "ok"
        label = state.submission.label
        if state.elsewhere:
            raise _wrong_dependency(dependency, f"{label} is {state.reason}")
        if state.state == UNREADABLE or not state.job_id:
            raise _wrong_dependency(dependency, f"{label} has no job to wait for: {state.reason}")
        if state.unfinished:
            waiting.append({"run": label, "end": end, "job_id": state.job_id})
            continue
        # Slurm would not refuse it: `afterok` on a job that it has forgotten starts at once,
        # whichever way that job ended.
        as_wanted = state.over and (state.state == "COMPLETED") == (end == "ok")
        if end != "any" and not as_wanted:
            how = f"ended {state.state}" if state.over else "ended in an unknown way"
            wanted = f"the job should start only after it {_WANTED[end]}"
            raise _wrong_dependency(dependency, f"{label} {how}, and {wanted}")
    return waiting


def _resolve(store: Store, dependency: str, backend: str) -> Submission:
    try:
        submission = store.resolve(dependency.rpartition(":")[2])
        record = submission.record()
    except (InputError, NotFoundError) as error:
        raise _wrong_dependency(dependency, str(error), error.hint) from error
    other = str(record["backend"])
    if other == "local" and record["host"] != socket.gethostname():
        other = f"local backend of {record['host']}"
    if other != backend:
        message = f"{submission.label} is a run of the {other}, this job is for {backend}"
        raise _wrong_dependency(dependency, message)
    return submission


def _wrong_dependency(dependency: str, message: str, hint: str = "") -> InputError:
    hint = hint or "`hpml list` shows the runs"
    return InputError(message, field="after", value=dependency, hint=hint)
