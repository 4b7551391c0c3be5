"""`after`: the runs that a job still has to wait for when it is submitted."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import InputError, NotFoundError
from hpml_orchestrator.runs.status import UNREADABLE, states

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpml_orchestrator.records.schema import WaitedRun
    from hpml_orchestrator.records.store import Store
    from hpml_orchestrator.records.submission import Submission
    from hpml_orchestrator.runs.backend import Backends

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
        backends: the schedulers; the real ones when left out.

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
