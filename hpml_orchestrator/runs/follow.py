"""Follow a run: wait until it is over, and read its output as it grows."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import BindingError, HpmlError, JobFailedError, RecordError
from hpml_orchestrator.runs.backend import backends_of, refuse_elsewhere
from hpml_orchestrator.runs.history import next_step, read_history
from hpml_orchestrator.runs.reporting.summary import binding_of
from hpml_orchestrator.runs.state import State
from hpml_orchestrator.runs.status import state_of
from hpml_orchestrator.scheduler.slurm.client import PollSchedule

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hpml_orchestrator.records.run import Run
    from hpml_orchestrator.records.store import Store
    from hpml_orchestrator.records.submission import Submission
    from hpml_orchestrator.runs.backend import Backends

_BLOCK_BYTES = 1 << 20
_LOST_ANSWERS = 3
_WATCHED_TASKS = 16
_POLL_SECONDS = {"local": 0.2, "slurm": 1.0}
_LOCAL_END_SECONDS = 0.5


def wait_until_over(
    store: Store,
    submission: Submission,
    *,
    sleep: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.time,
    each: Callable[[State], None] = lambda _: None,
    pauses: PollSchedule | None = None,
    backends: Backends | None = None,
) -> State:
    """Return the submission's last state, once it is over.

    The scheduler is queried after 1 s and then less and less often, up to 30 s apart. When the job
    records its own end, the next query follows at once: a local job's record is polled five times a
    second, a Slurm job's, which may be on a shared file system, once a second. The wait ends after
    three answers in a row that do not know the job.

    Raises:
        RecordError: its record cannot be read.
        InputError: it belongs to another cluster.
    """
    pauses = pauses or PollSchedule()
    backends = backends or backends_of(store)
    lost = 0
    end_seen = False  # before the query: a record written since then is new
    while True:
        state = state_of(store, submission, backends=backends, now=now)
        each(state)
        refuse_elsewhere(state)
        lost = lost + 1 if state.lost else 0
        if state.over or lost >= _LOST_ANSWERS:
            return state
        watched = _watched(state)
        # A requeued run has a new attempt without an end, which is watched in turn.
        end_seen = end_seen and _ends_recorded(watched)
        pause = next(pauses)
        if end_seen and state.backend == "local":
            pause = min(pause, _LOCAL_END_SECONDS)
        deadline = now() + pause
        while now() < deadline:
            each(state)
            sleep(min(_POLL_SECONDS[state.backend], max(0.0, deadline - now())))
            # The script's last act is its own record, a moment before the scheduler notices the
            # end. Query at once and often again instead of sitting out a pause of up to 30 s.
            if not end_seen and _ends_recorded(watched):
                end_seen = True
                pauses.reset()
                break


def _watched(state: State) -> list[Run]:
    """Return the runs whose records are polled; of an array only once few tasks are left."""
    runs = [task.run for task in state.tasks if not task.over] if state.tasks else [state.run]
    # Each poll costs a few file operations per task, every second, on a shared file system.
    return runs if len(runs) <= _WATCHED_TASKS else []


def _ends_recorded(runs: list[Run]) -> bool:
    newest = [run.attempts()[-1:] for run in runs]
    return bool(newest) and all(
        attempts and os.path.exists(attempts[0].directory / "ended.json") for attempts in newest
    )


class Tail:
    """Reads what was added to a file since the last call; the file need not exist yet."""

    def __init__(self, path: Path, *, position: int = 0) -> None:
        self._path = path
        self._position = position

    def read(self) -> bytes:
        """Return the new bytes, at most 1 MiB; empty if there are none."""
        try:
            with self._path.open("rb") as stream:
                stream.seek(self._position)
                data = stream.read(_BLOCK_BYTES)
        except FileNotFoundError:
            return b""
        self._position += len(data)
        return data

    def read_to_end(
        self, *, settle_seconds: float = 0.3, sleep: Callable[[float], None] = time.sleep
    ) -> bytes:
        """Return all new bytes, and those that follow shortly after: the last lines may be late."""
        parts = list(iter(self.read, b""))
        sleep(settle_seconds)
        return b"".join([*parts, self.read()])


def start_of_last(path: Path, count: int) -> int:
    """Return the offset at which the last `count` lines of a file begin, reading only its end."""
    with path.open("rb") as stream:
        size = begin = stream.seek(0, 2)
        data = b""
        # From the end in blocks: an output of gigabytes must not be read for its last ten lines.
        while begin > 0 and data.count(b"\n") <= count:
            end, begin = begin, max(0, begin - (1 << 16))
            stream.seek(begin)
            data = stream.read(end - begin) + data
    # Not splitlines(): progress bars end theirs in \r. The last line may have no end yet.
    lines = data.removesuffix(b"\n").split(b"\n")[-count:]
    return size - len(b"\n".join(lines)) - data.endswith(b"\n")


def read_output(run: Run, lines: int = 0) -> str:
    """Return the output of a run so far; bytes that are not UTF-8 become U+FFFD.

    Args:
        run: whose output.
        lines: only this many lines at the end; 0 for all.

    Raises:
        RecordError: its output may not be read.
    """
    if not run.has_output():
        return ""
    with run.output.open("rb") as stream:
        stream.seek(start_of_last(run.output, lines) if lines else 0)
        return stream.read().decode("utf-8", "replace")


def refuse_failed(state: State) -> None:
    """Refuse a run that has ended in another state than COMPLETED.

    Raises:
        JobFailedError: names the state, the exit code and the run.
    """
    if state.state == "COMPLETED":
        return
    code = f", exit code {state.exit_code}" if state.exit_code else ""
    message = f"job {state.job_id or '-'} ended {state.state}{code}"
    if not state.over:
        message = f"it is not known how job {state.job_id or '-'} ended: {state.reason}"
    label = state.submission.label
    if _failed_binding(state):
        raise JobFailedError(
            f"{message}: {BindingError.meaning}", hint=f"hpml show {label}", run=label
        )
    # of an array, the first task that ended like this
    failed = [task for task in state.tasks if task.state == state.state] or [state]
    with_output = [one for one in failed if os.path.exists(one.run.output)]
    hints = [f"hpml logs {one.submission.label}" for one in with_output[:1]]
    with contextlib.suppress(HpmlError):  # another user's record
        hints += filter(None, [next_step(failed[0], read_history(failed[0]))])
    raise JobFailedError(message, hint="; ".join(hints), run=label)


def _failed_binding(state: State) -> bool:
    """Whether a run ended because its ranks were not bound as planned."""
    try:
        return not state.tasks and binding_of(state).fatal
    except RecordError:  # another user's record
        return False
