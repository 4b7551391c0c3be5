"""How each attempt of a run went: a requeue makes the next one."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import RecordError
from hpml_orchestrator.records.texts import clock_text, seconds_text
from hpml_orchestrator.scheduler.model import JobState

if TYPE_CHECKING:
    from hpml_orchestrator.records.store import Attempt
    from hpml_orchestrator.runs.state import State

__all__ = ["AttemptReport", "attempt_lines", "attempt_reports"]

_SHOWN = 10
_WAITING = [state.value for state in JobState if state.waiting]
_OVER = [state.value for state in JobState if state.over]


@dataclass(frozen=True)
class AttemptReport:
    """How one attempt went.

    Attributes:
        number: counted from 0.
        over: whether it has ended.
        reason: why it ended, or the state of one that has not; empty where it left no record of
            its end, as when its node failed.
        nodes: node list; may be empty.
        started, ended: seconds since the epoch, None where not known.
        last_written: when its newest event was written, where it left no record of its end.
        exit_code: exit status of its script, None where not known.
        error: why its records cannot be read; then nothing else is known.
    """

    number: int
    over: bool = True
    reason: str = ""
    nodes: str = ""
    started: float | None = None
    ended: float | None = None
    last_written: float | None = None
    exit_code: int | None = None
    error: RecordError | None = None

    def to_json(self) -> dict[str, Any]:
        """Return it for programs."""
        return {**asdict(self), "error": str(self.error) if self.error else None}

    def __str__(self) -> str:
        if self.error is not None:
            return f"{self.number}: cannot be read"
        where = f" on {self.nodes}" if self.nodes else ""
        if not self.over:
            since = f" since {clock_text(self.started)}" if self.started else ""
            return f"{self.number}: {self.reason}{since}{where}"
        text = self.reason or "left no record of its end; last event"
        if self.reason == "failed" and self.exit_code is not None:
            text += f" with exit code {self.exit_code}"
        end = self.ended or self.last_written
        after = f" after {seconds_text(max(0, end - self.started))}" if end and self.started else ""
        return f"{self.number}: {text}{after}{where}{f', {clock_text(end)}' if end else ''}"


def attempt_reports(state: State) -> list[AttemptReport]:
    """Return how each attempt of a run went, in order.

    Raises:
        RecordError: the run's directory may not be read.
    """
    attempts = state.run.attempts()
    return [_report(attempt, state, last=attempt is attempts[-1]) for attempt in attempts]


def attempt_lines(reports: list[AttemptReport], state: State) -> list[tuple[str, str]]:
    """Return the summary's lines, name and text, of a run that was or will be requeued."""
    if len(reports) <= 1 and state.state not in _WAITING:
        return []
    lines = [str(report) for report in reports[-_SHOWN:]]
    if len(reports) > _SHOWN:
        lines.insert(0, f"{len(reports)}, of which the last {_SHOWN}:")
    return [("" if number else "attempts", line) for number, line in enumerate(lines)]


def _report(attempt: Attempt, state: State, *, last: bool) -> AttemptReport:
    try:
        attempt.check_readable()
    except RecordError as error:
        return AttemptReport(attempt.number, error=error)
    end, begun = attempt.ended, attempt.started
    known: dict[str, Any] = {}
    if begun is not None:
        known = {"started": begun.time, "nodes": str(begun.data.get("nodes", ""))}
    if end is not None:
        known["reason"] = str(end.get("reason", ""))
        known |= {"ended": float(end["time"]), "exit_code": int(end["exit_code"])}
    elif not last or state.state in _WAITING:
        known["last_written"] = attempt.last_written
    else:
        known["over"] = state.state in _OVER
        known["reason"] = state.state.lower().replace("_", " ")
        known |= {"ended": state.ended, "exit_code": state.exit_code}
    return AttemptReport(attempt.number, **known)
