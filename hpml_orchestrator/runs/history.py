"""All attempts of a run: how each went, what restarts cost, and the progress of the training."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from hpml_orchestrator.errors import HpmlError, RecordError, counted
from hpml_orchestrator.records.feed import read_recent
from hpml_orchestrator.records.texts import clock_text, seconds_text
from hpml_orchestrator.runs.reporting.monitor import last_report, numbers
from hpml_orchestrator.runs.reporting.timeline import Timeline
from hpml_orchestrator.scheduler.model import JobState, parse_state

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hpml_orchestrator.records.run import Attempt
    from hpml_orchestrator.records.schema import EndRecord
    from hpml_orchestrator.runs.reporting.summary import Summary
    from hpml_orchestrator.runs.state import State

# The attempts of a run: how each went and ended, from its own records.

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
        newest: the events of its last attempt, if already read.

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


T = TypeVar("T")

_MINUTE, _HOUR = 60, 3600
_ADVICE_SECONDS = 300.0  # least training time for advice about the saving interval
_ADVICE_FACTOR = 1.5  # no advice for an interval that is closer than this to the best one


@dataclass(frozen=True)
class RunLimits:
    """What the job allows."""

    seconds: float  # the time limit of an attempt
    attempts: int | None = None  # at most; None if the job does not continue by itself
    continues: Sequence[str] = ()  # the reasons after which it does
    hang_seconds: float = 0.0  # without a report, after which an attempt is ended; 0 for never


@dataclass(frozen=True)
class RunHistory:
    """A run over all of its attempts. None means unknown."""

    attempts: tuple[AttemptReport, ...]  # in order
    at_most: int | None = None  # attempts; None if the job does not continue by itself
    elapsed_seconds: float = 0.0  # from the first start to the end, or now, without pauses
    paused_seconds: float = 0.0  # the run had ended, until a user continued it
    lost_seconds: float = 0.0  # of the elapsed ones, what restarts cost
    lost_ratio: float | None = None  # their share
    saving_seconds: float = 0.0  # spent on checkpoints
    queued_seconds: float = 0.0  # since the last attempt ended, if another one follows
    step: int | None = None  # reached; before the newest attempt trains, what it can resume from
    total_steps: int | None = None
    steps_per_second: float | None = None  # of the newest attempt that trained
    left_seconds: float | None = None  # until the time limit of a running attempt
    silent_seconds: float | None = None  # since a running attempt's last report, if too long
    silence: str = ""  # the same in words
    hang_seconds: float = 0.0  # of silence, after which an attempt is ended; 0 for never
    needed_seconds: float | None = None  # until the last step, at this rate
    more_attempts: int | None = None  # that the rest takes; 0 if it fits into this one
    save_seconds: float | None = None  # mean duration of a checkpoint
    save_every_seconds: float | None = None  # mean time of training between two
    between_failures_seconds: float | None = None  # of training, between ends without a warning
    best_save_every_seconds: float | None = None  # by Young and Daly

    def to_json(self) -> dict[str, object]:
        """Return it for programs."""
        rows = [attempt.to_json() for attempt in self.attempts]
        return {**asdict(replace(self, attempts=())), "attempts": rows}

    @property
    def line(self) -> str:
        """The attempt, the step that it resumed at and the time left, in one line; may be empty."""
        place, left = self.place, self.left_seconds
        return f"{place}, time limit in {_about(left)}" if place and left is not None else place

    @property
    def place(self) -> str:
        """The same without the time left: it stays constant while an attempt runs."""
        newest = self.attempts[-1]
        parts = []
        if self.at_most is not None:
            parts.append(f"attempt {newest.number + 1} of at most {self.at_most}")
        elif newest.number:
            parts.append(f"attempt {newest.number + 1}")
        if newest.resumed and newest.began_step is not None:
            parts.append(f"resumed at step {newest.began_step:,}")
        return ", ".join(parts)

    @property
    def lines(self) -> list[str]:
        """Lines about a run that has not ended, in addition to its state."""
        lost = ""
        if self.lost_seconds and self.lost_ratio is not None and not self._trained_unseen:
            lost = f"{self.lost_ratio:.1%} of the time lost to restarts"
        return [*filter(None, (", ".join(filter(None, (self.line, lost))), self.progress))]

    @property
    def _trained_unseen(self) -> bool:
        return len(self.attempts) > 1 and not any(one.trained_from for one in self.attempts)

    @property
    def restarts(self) -> str:
        """The cost of restarts and checkpoints in one line; empty if there were none."""
        parts = []
        if self._trained_unseen:
            parts.append("time lost to restarts is unknown: the program reports no steps")
        elif self.lost_seconds and self.lost_ratio is not None:
            sums = {
                "unsaved work": sum(one.unsaved_seconds for one in self.attempts),
                "queue": sum(one.queue_seconds for one in self.attempts) + self.queued_seconds,
                "start-up": sum(one.startup_seconds for one in self.attempts),
            }
            of_what = ", ".join(f"{name} {seconds_text(value)}" for name, value in sums.items())
            parts.append(
                f"{self.lost_ratio:.1%} of the time lost to restarts: "
                f"{seconds_text(self.lost_seconds)} of {seconds_text(self.elapsed_seconds)} "
                f"({of_what})"
            )
        if self.paused_seconds >= 1:
            pause = seconds_text(self.paused_seconds)
            parts.append(f"not counted: {pause} until it was continued by hand")
        if self.saving_seconds:
            saves = counted(sum(one.saves for one in self.attempts), "checkpoint")
            parts.append(f"{saves} took {_precise(self.saving_seconds)}")
        return "; ".join(parts)

    @property
    def progress(self) -> str:
        """How far the training is, in one line; empty if it does not report its steps."""
        if self.step is None or not self.total_steps:
            return self.silence
        share = min(1.0, self.step / self.total_steps)
        text = f"step {self.step:,} of {self.total_steps:,} ({share:.0%})"
        if self.silence:
            return f"{text}, {self.silence}"
        if self.left_seconds is None or not self.steps_per_second:
            return text
        text += f", {self.steps_per_second:.3g} steps/s, time limit in {_about(self.left_seconds)}"
        if self.needed_seconds is None or self.needed_seconds <= self.left_seconds:
            return text
        text += "; will not finish before the time limit at this rate: "
        if self.more_attempts is None:
            return f"{text}it needs {_about(self.needed_seconds)}"
        text += f"about {counted(self.more_attempts, 'more attempt')}"
        allowed = (self.at_most or 0) - len(self.attempts)
        return f"{text}, and {allowed} are allowed" if self.more_attempts > allowed else text

    @property
    def advice(self) -> str:
        """How often to save, in one sentence; empty without an end that came without a warning."""
        best, every = self.best_save_every_seconds, self.save_every_seconds
        save = self.save_seconds
        if best is None or every is None or save is None or self.between_failures_seconds is None:
            return ""
        if max(best / every, every / best) < _ADVICE_FACTOR:
            return ""
        return (
            f"save about every {_about(best)}, now every {_about(every)}: a checkpoint takes "
            f"{_precise(save)}, and an end without a warning came every "
            f"{_about(self.between_failures_seconds)} of training (Young/Daly)"
        )


def _about(seconds: float) -> str:
    """Return a duration rounded to one unit: 52 min, not 52:13."""
    if seconds < 2 * _MINUTE:
        return f"{seconds:.0f} s"
    if seconds < 2 * _HOUR:
        return f"{seconds / _MINUTE:.0f} min"
    return f"{seconds / _HOUR:.1f} h"


def _precise(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds:.2g} s"
    return f"{seconds:.1f} s" if seconds < _MINUTE else seconds_text(seconds)


def seconds_left(state: State, now: float) -> float | None:
    """Return the seconds until the time limit of a running job; None if it does not run.

    Args:
        state: of the run.
        now: seconds since the epoch.
    """
    if not state.started or state.over:
        return None
    if state.limit_at:  # the limit may have been changed after the submission
        return max(0.0, state.limit_at - now)
    try:
        limit = state.submission.requested_job().resources.time
    except HpmlError:
        return None
    return max(0.0, limit - max(0.0, now - state.started))


def read_history(
    state: State, summary: Summary | None = None, *, now: float | None = None
) -> RunHistory | None:
    """Return a run over all of its attempts; None before the first, and for an array as a whole.

    Args:
        state: of the run.
        summary: of its last attempt, if already read.
        now: seconds since the epoch; the current time by default.

    Raises:
        RecordError: the run's directory may not be read; a closed attempt has its `error`.
    """
    now = time.time() if now is None else now
    newest = summary.timeline if summary is not None else None
    reports = [] if state.tasks else attempt_reports(state, newest)
    if not reports:
        return None
    # A requeued job runs for a moment before its script claims the next attempt.
    runs = state.state == JobState.RUNNING and not reports[-1].over
    left = seconds_left(state, now) if runs else None
    waits = state.waits or (reports[-1].goes_on and left is None)
    waits = waits and not state.over
    history = history_of(reports, limits=_limits_of(state), left_seconds=left, waits=waits, now=now)
    silent, silence = silence_of(state, now)
    return replace(history, silent_seconds=silent, silence=silence)


def silence_of(state: State, now: float) -> tuple[float | None, str]:
    """Return for how many seconds a running job has reported nothing, and a sentence about it.

    None and an empty text if that is not too long; `now` is in seconds since the epoch.
    """
    with contextlib.suppress(HpmlError):  # another user's
        attempt = state.run.newest() if state.state == JobState.RUNNING else None
        if attempt is None or attempt.ended:
            return None, ""
        heard, due = last_report(read_recent(attempt.directory / "events")) or (now, now)
        if now > due:
            own = state.submission.requested_job().checkpoint
            hang = own.hang if own.enabled else 0
            ends = f" (hang ends it at {seconds_text(hang)})" if hang else ""
            return now - heard, f"no step for {seconds_text(now - heard)}{ends}"
    return None, ""


def next_step(state: State, history: RunHistory | None) -> str:
    """Return which command continues a run that is over, and from where; empty if none does."""
    saved = max((one.saved_step or 0 for one in history.attempts), default=0) if history else 0
    if history is None or not saved or not state.over or state.state == JobState.COMPLETED:
        return ""
    command = f"hpml requeue {state.submission.label}"
    if JobState.OUT_OF_MEMORY in (
        state.state,
        history.attempts[-1].state,
    ):  # not into the same limit
        command = f"hpml resubmit {state.submission.label} --set resources.memory=…"
    return f"{command} continues from step {saved:,}"


def _limits_of(state: State) -> RunLimits:
    try:
        job = state.submission.requested_job()
    except HpmlError:
        return RunLimits(math.inf)
    own, seconds = job.checkpoint, job.resources.time
    if not own.enabled:
        return RunLimits(seconds)
    return RunLimits(seconds, own.attempts if own.requeue else None, own.requeue, own.hang)


def history_of(
    attempts: Sequence[AttemptReport],
    *,
    limits: RunLimits,
    left_seconds: float | None = None,
    waits: bool = False,
    now: float,
) -> RunHistory:
    """Return a run over all of its attempts, from their records.

    Time is lost from an attempt's last checkpoint, or its first counters if it wrote none, until
    the next attempt trains: that work is done again, and the queue and the start-up come twice.

    Args:
        attempts: in order; at least one.
        limits: what the job allows.
        left_seconds: until the time limit; None if no attempt runs.
        waits: whether the run waits for its next attempt.
        now: seconds since the epoch.
    """
    trains = any(one.trained_from is not None for one in attempts)
    known: list[AttemptReport] = []
    for place, one in enumerate(attempts):
        is_last = place == len(attempts) - 1
        runs = is_last and left_seconds is not None
        end = now if runs else one.ended
        report = replace(one, ended=None if runs else one.ended)
        # The first attempt's queue and start-up are not lost: every run pays for them once.
        if place:
            before = attempts[place - 1]
            report = replace(
                report,
                paused_seconds=_between(before.ended, before.continued),
                queue_seconds=_between(before.continued or before.ended, one.started),
                startup_seconds=_between(one.started, one.trained_from or end) if trains else 0.0,
            )
        if trains and (waits or not is_last) and not _is_saved(one):
            began = one.trained_from or (end if place else one.started)
            unsaved = _between(max(one.saved_at or 0.0, began or 0.0), end)
            report = replace(report, unsaved_seconds=unsaved)
        known.append(report)
    queued = _between(known[-1].ended, now) if waits else 0.0
    lost_seconds = math.fsum(one.lost_seconds for one in known) + queued
    has_ended = left_seconds is None and not waits and known[-1].over
    paused = math.fsum(one.paused_seconds for one in known)
    elapsed = _between(known[0].started, known[-1].ended if has_ended else now)
    elapsed = max(0.0, elapsed - paused)
    history = RunHistory(
        tuple(known),
        at_most=limits.attempts,
        elapsed_seconds=elapsed,
        paused_seconds=paused,
        lost_seconds=lost_seconds,
        lost_ratio=min(1.0, lost_seconds / elapsed) if elapsed else None,
        saving_seconds=math.fsum(one.saving_seconds for one in known),
        queued_seconds=queued,
        step=_step(known),
        total_steps=_newest(one.total_steps for one in known),
        steps_per_second=_newest(one.steps_per_second for one in known),
        left_seconds=left_seconds,
        hang_seconds=limits.hang_seconds,
    )
    return _with_save_interval(_with_forecast(history, limits), waits=waits)


def _between(begin: float | None, end: float | None) -> float:
    return max(0.0, end - begin) if begin and end else 0.0


def _is_saved(attempt: AttemptReport) -> bool:
    """Whether nothing was trained after the last checkpoint; a hang after it costs time, too."""
    saved, step = attempt.saved_step, attempt.step
    return saved is not None and step is not None and saved >= step and attempt.why != "hang"


def _step(attempts: Sequence[AttemptReport]) -> int | None:
    """Return the step that a run has reached: steps that were not saved do not count."""
    *earlier, newest = attempts
    if newest.step is not None:
        return newest.step
    # An attempt that has not trained yet resumes from a checkpoint; steps after that are lost.
    saved = [one.saved_step for one in earlier if one.saved_step is not None]
    return saved[-1] if saved else _newest(one.step for one in earlier)


def _newest(values: Iterable[T | None]) -> T | None:
    return next((value for value in reversed([*values]) if value is not None), None)


def _with_forecast(history: RunHistory, limits: RunLimits) -> RunHistory:
    left, rate = history.left_seconds, history.steps_per_second
    if left is None or not rate or history.step is None or not history.total_steps:
        return history
    needed = max(0, history.total_steps - history.step) / rate
    if needed <= left:
        return replace(history, needed_seconds=needed, more_attempts=0)
    startups = [
        _between(one.started, one.trained_from) for one in history.attempts if one.trained_from
    ]
    # Each further attempt spends part of its limit on start-up before it trains.
    useful = limits.seconds - math.fsum(startups) / max(1, len(startups))
    if "time_limit" not in limits.continues or useful <= 0 or not math.isfinite(useful):
        return replace(history, needed_seconds=needed)
    more = math.ceil((needed - left) / useful)
    return replace(history, needed_seconds=needed, more_attempts=more)


def _with_save_interval(history: RunHistory, *, waits: bool) -> RunHistory:
    """Add the interval sqrt(2 * duration of a checkpoint * time between failures) and its parts.

    A failure is an end that gave the ranks no chance to save. Neither the time limit is one, nor a
    cancellation by the user.
    """
    attempts = history.attempts
    followed = attempts if waits else attempts[:-1]
    failures = sum(one.failed for one in followed)
    trained = math.fsum(_between(one.trained_from, one.trained_until) for one in attempts)
    saves = sum(one.saves for one in attempts)
    if not saves or not trained:
        return history
    save = math.fsum(one.saving_seconds for one in attempts) / saves
    history = replace(history, save_seconds=save, save_every_seconds=trained / saves)
    # One failure in a few minutes says nothing about the time between failures.
    if not failures or not save or trained < _ADVICE_SECONDS:
        return history
    between = trained / failures
    best = math.sqrt(2 * save * between)
    return replace(history, between_failures_seconds=between, best_save_every_seconds=best)
