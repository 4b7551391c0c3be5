"""The attempts of a run: how each went and ended, from its own records."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import RecordError
from hpml_orchestrator.records.texts import clock_text, seconds_text
from hpml_orchestrator.runs.reporting.monitor import numbers
from hpml_orchestrator.runs.reporting.timeline import Timeline
from hpml_orchestrator.scheduler.model import parse_state

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpml_orchestrator.records.run import Attempt
    from hpml_orchestrator.records.schema import EndRecord
    from hpml_orchestrator.runs.state import State

_PLANNED = ("time_limit", "requested")
_NO_FAILURE = ("CANCELLED", "COMPLETED")


@dataclass(frozen=True)
class AttemptReport:
    """One attempt; times are seconds since the epoch, steps count over all attempts.

    None means unknown. The seconds are 0 if nothing was lost.
    """

    number: int  # counted from 0
    over: bool = True
    # Why it ended, or its state now; empty if its end was not recorded, as when its node failed:
    # then `ended` is the time of its newest event.
    reason: str = ""
    state: str = ""  # the end in Slurm's words, by its own record
    nodes: str = ""  # node list
    exit_code: int | None = None  # of its script
    error: RecordError | None = None  # why its records cannot be read
    why: str = ""  # `time_limit`, `preemption`, `node_failure`, `hang`, `requested`, or empty
    goes_on: bool = False  # whether its record announces another attempt
    stays: str = ""  # why the run does not continue, although the end asked for it
    ignored: str = ""  # that its program did not react to the request to stop, in a sentence
    started: float | None = None
    ended: float | None = None
    continued: float | None = None  # when its next attempt was queued; only if a user did that
    trained_from: float | None = None  # its first counters
    trained_until: float | None = None  # its last
    began_step: int | None = None
    resumed: bool = False  # whether it began with a checkpoint
    step: int | None = None  # reached
    total_steps: int | None = None
    steps_per_second: float | None = None
    saved_step: int | None = None  # of its last checkpoint
    saved_at: float | None = None
    saves: int = 0
    saving_seconds: float = 0.0  # of the rank that spent most
    stopped: bool = False  # whether its ranks saved and stopped when asked
    paused_seconds: float = 0.0  # before it, until a user continued the run
    queue_seconds: float = 0.0  # between the end of the attempt before and its start
    startup_seconds: float = 0.0  # of every attempt but the first, until its first counters
    unsaved_seconds: float = 0.0  # after its last checkpoint, if another attempt follows

    @property
    def lost_seconds(self) -> float:
        """What restarts cost around this attempt."""
        return self.queue_seconds + self.startup_seconds + self.unsaved_seconds

    @property
    def failed(self) -> bool:
        """Whether it ended without a warning, so that its ranks could not save."""
        planned = self.why in _PLANNED or self.stopped
        return not planned and self.state not in _NO_FAILURE and self.error is None

    def to_json(self) -> dict[str, object]:
        """Return it for programs."""
        shown = asdict(self)
        error = str(self.error) if self.error else None
        return {**shown, "error": error, "lost_seconds": self.lost_seconds}

    def __str__(self) -> str:
        text = self._ending()
        return f"{text}; {steps}" if (steps := self._steps()) else text

    def _ending(self) -> str:
        number = self.number + 1
        if self.error is not None:
            return f"{number}: cannot be read"
        where = f" on {self.nodes}" if self.nodes else ""
        if not self.over:
            began = clock_text(self.started) if self.started else ""
            word = " since" if self.reason == "running" else ", started"
            return f"{number}: {self.reason}{f'{word} {began}' if began else ''}{where}"
        text, end = self.reason, self.ended
        if not text:
            asked = f"asked to stop ({self.why.replace('_', ' ')}), " if self.why else ""
            text = f"{asked}left no record of its end; last event"
        if self.reason == "failed" and self.exit_code is not None:
            text += f" with exit code {self.exit_code}"
        after = f" after {seconds_text(max(0, end - self.started))}" if end and self.started else ""
        return f"{number}: {text}{after}{where}{f', {clock_text(end)}' if end else ''}"

    def _steps(self) -> str:
        parts = []
        if self.began_step is not None and self.step is not None:
            parts.append(f"steps {self.began_step:,} to {self.step:,}")
        elif self.resumed and self.began_step is not None:
            parts.append(f"resumed at step {self.began_step:,}")
        if self.saved_step is not None:
            parts.append(f"saved at {self.saved_step:,}")
        lost = {
            "queue": self.queue_seconds,
            "start-up": self.startup_seconds,
            "unsaved work": self.unsaved_seconds,
        }
        kinds = {name: seconds_text(seconds) for name, seconds in lost.items() if seconds >= 1}
        if self.lost_seconds >= 1:
            named = ", ".join(f"{name} {text}" for name, text in kinds.items())
            if len(kinds) == 1:
                named = next(iter(kinds))
            of_what = f" ({named})" if kinds else ""
            parts.append(f"{seconds_text(self.lost_seconds)} lost{of_what}")
        return ", ".join(parts)


def attempt_reports(state: State, newest: Timeline | None = None) -> list[AttemptReport]:
    """Return how each attempt of a run went, in order.

    Args:
        state: of the run.
        newest: the events of its last attempt, if they were read already.

    Raises:
        RecordError: the run's directory may not be read.
    """
    attempts = state.run.attempts()
    reports = []
    for attempt in attempts:
        is_last = attempt is attempts[-1]
        try:
            attempt.check_readable()
        except RecordError as error:
            reports.append(AttemptReport(attempt.number, error=error))
            continue
        timeline = newest if is_last and newest is not None else Timeline(attempt.milestones())
        reports.append(_report(attempt, timeline, state, is_last=is_last))
    return reports


def _report(attempt: Attempt, timeline: Timeline, state: State, *, is_last: bool) -> AttemptReport:
    begun, end = attempt.started, attempt.ended
    report = AttemptReport(attempt.number, ended=attempt.last_written)
    if end is not None:
        report = replace(
            report,
            reason=str(end.get("reason") or ""),
            state=str(end.get("state") or ""),
            why=str(end.get("why") or ""),
            stays=str(end.get("stays") or ""),
            ignored=str(end.get("ignored") or ""),
            ended=end["time"],
            exit_code=end["exit_code"],
            goes_on=end.get("goes_on") is True,
        )
    # A job that waits again has left its last attempt: the state is that of the next one.
    elif is_last and not state.waits:
        over = parse_state(state.state).over or state.lost
        report = replace(
            report,
            over=over,
            reason="" if state.lost else state.state.lower().replace("_", " "),
            ended=state.ended or (attempt.last_written if over else None),
            exit_code=state.exit_code,
        )
    elif stop := attempt.stop_request():
        report = replace(report, why=stop["reason"])
    if begun is not None:
        report = replace(report, started=begun.time, nodes=str(begun.data.get("nodes", "")))
    following = attempt.next
    # Only a user's requeue is a pause. An announced continuation waits in the queue, and that time
    # counts as lost.
    if following and not report.goes_on:
        report = replace(report, continued=following["time"])
    return _with_training(report, timeline, end or {})


def _with_training(report: AttemptReport, timeline: Timeline, end: EndRecord) -> AttemptReport:
    """Return the report with the steps, the rate and the checkpoints of the attempt."""
    began = total = None
    if (resumed := timeline.last.get("resumed")) is not None:
        began = _whole(resumed.data, "step")
    if (training := timeline.last.get("training")) is not None:
        began = _whole(training.data, "step") or began
        total = _whole(training.data, "total_steps")
    if began is None and (report.number == 0 or training is not None):
        began = 0
    reached, rate = timeline.certain_steps, None
    if timeline.steps:
        counters = timeline.steps[min(timeline.steps)]
        first, last = counters[0], counters[-1]
        before, after = (numbers(one.data).get("steps_total", 0.0) for one in (first, last))
        if began is not None and after:
            reached = [*reached, began + int(after)]
        if after > before and last.time > first.time:
            rate = (after - before) / (last.time - first.time)
    if total and reached:
        reached = [min(total, max(reached))]
    saved, saves = timeline.last.get("checkpoint"), timeline.saves.values()
    saves_of_slowest = max(saves, key=sum, default=[])
    return replace(
        report,
        trained_from=timeline.first.get("step"),
        trained_until=timeline.last["step"].time if "step" in timeline.last else None,
        began_step=began,
        resumed=resumed is not None or bool(began),
        step=max(reached, default=None),
        total_steps=total,
        steps_per_second=rate,
        saved_step=_whole(end, "step") or max(timeline.saved_steps, default=None),
        saved_at=saved.time if saved else None,
        saves=len(saves_of_slowest),
        saving_seconds=math.fsum(saves_of_slowest),
        stopped="stopping" in timeline.first,
    )


def _whole(data: Mapping[str, object], name: str) -> int | None:
    value = numbers(data).get(name)
    return None if value is None else int(value)
