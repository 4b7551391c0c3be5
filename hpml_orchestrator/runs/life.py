"""All attempts of a run: why each ended, what restarts cost, and the progress of the training."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import HpmlError, RecordError, counted
from hpml_orchestrator.records.texts import seconds_text
from hpml_orchestrator.runs.reporting.monitor import numbers
from hpml_orchestrator.scheduler.model import JobState
from hpml_orchestrator.spec.values import parse_time

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hpml_orchestrator.records.events import Event
    from hpml_orchestrator.records.store import Attempt
    from hpml_orchestrator.runs.state import State

__all__ = ["AttemptLife", "Life", "Limits", "life_of", "read_life", "seconds_left"]

_PLANNED = ("time_limit", "requested")
_MINUTE, _HOUR = 60, 3600


@dataclass(frozen=True)
class AttemptLife:
    """One attempt; times are seconds since the epoch, steps count over all attempts.

    None means: not known. The seconds are 0 if nothing was lost.
    """

    number: int  # counted from 0
    why: str = ""  # `time_limit`, `preemption`, `node_failure`, `hang`, `requested`, or empty
    goes_on: bool = False  # whether its record announces another attempt
    stays: str = ""  # why the run does not continue, although the end asked for it
    started: float | None = None
    ended: float | None = None  # of an attempt without a record of its end: its newest event
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
    queue_seconds: float = 0.0  # between the end of the attempt before and its start
    startup_seconds: float = 0.0  # of every attempt but the first, until its first counters
    unsaved_seconds: float = 0.0  # after its last checkpoint, if another attempt follows

    @property
    def lost_seconds(self) -> float:
        """What restarts cost around this attempt."""
        return self.queue_seconds + self.startup_seconds + self.unsaved_seconds

    def __str__(self) -> str:
        parts = []
        if self.began_step is not None and self.step is not None:
            parts.append(f"steps {self.began_step:,} to {self.step:,}")
        elif self.resumed and self.began_step is not None:
            parts.append(f"resumed at step {self.began_step:,}")
        if self.saved_step is not None:
            parts.append(f"saved at {self.saved_step:,}")
        if self.lost_seconds >= 1:
            parts.append(f"{seconds_text(self.lost_seconds)} lost")
        return ", ".join(parts)


@dataclass(frozen=True)
class Limits:
    """What the job allows.

    Attributes:
        seconds: the time limit of an attempt.
        attempts: at most so many; None if the job does not continue by itself.
        continues: the reasons after which it does.
    """

    seconds: float
    attempts: int | None = None
    continues: Sequence[str] = ()


@dataclass(frozen=True)
class Life:
    """A run over all of its attempts. None means: not known.

    Attributes:
        attempts: in order.
        at_most: attempts that the job allows; None if it does not continue by itself.
        elapsed_seconds: from the start of the first attempt to the end, or until now.
        lost_seconds: of these, what restarts cost.
        lost_ratio: their share.
        saving_seconds: spent on checkpoints.
        queued_seconds: since the last attempt ended, if another one follows.
        step, total_steps: progress of the training.
        steps_per_second: of the newest attempt that trained.
        left_seconds: until the time limit of a running attempt.
        needed_seconds: until the last step, at this rate.
        more_attempts: attempts after this one that the rest takes; 0 if it fits into this one.
        save_seconds: mean duration of a checkpoint.
        save_every_seconds: mean time between two checkpoints.
        between_failures_seconds: training time per end without a warning; None without any.
        best_save_every_seconds: interval between checkpoints that loses least (Young/Daly).
    """

    attempts: tuple[AttemptLife, ...]
    at_most: int | None = None
    elapsed_seconds: float = 0.0
    lost_seconds: float = 0.0
    lost_ratio: float | None = None
    saving_seconds: float = 0.0
    queued_seconds: float = 0.0
    step: int | None = None
    total_steps: int | None = None
    steps_per_second: float | None = None
    left_seconds: float | None = None
    needed_seconds: float | None = None
    more_attempts: int | None = None
    save_seconds: float | None = None
    save_every_seconds: float | None = None
    between_failures_seconds: float | None = None
    best_save_every_seconds: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return it for programs."""
        told = asdict(self)
        for row, attempt in zip(told["attempts"], self.attempts, strict=True):
            row["lost_seconds"] = attempt.lost_seconds
        return told

    @property
    def line(self) -> str:
        """Where a run that has not ended is, in one line; empty if there is nothing to say."""
        newest = self.attempts[-1]
        parts = []
        if self.at_most is not None:
            parts.append(f"attempt {newest.number + 1} of at most {self.at_most}")
        elif newest.number:
            parts.append(f"attempt {newest.number + 1}")
        if newest.resumed and newest.began_step is not None:
            parts.append(f"resumed at step {newest.began_step:,}")
        if parts and self.left_seconds is not None:
            parts.append(f"time limit in {_about(self.left_seconds)}")
        return ", ".join(parts)

    @property
    def lines(self) -> list[str]:
        """Lines about a run that has not ended, in addition to its state."""
        lost = ""
        if self.lost_seconds and self.lost_ratio is not None:
            lost = f"{self.lost_ratio:.1%} of the time lost to restarts"
        return [*filter(None, (", ".join(filter(None, (self.line, lost))), self.progress))]

    @property
    def restarts(self) -> str:
        """What restarts and checkpoints cost, in one line; empty without any."""
        parts = []
        unknown = len(self.attempts) > 1 and not any(one.trained_from for one in self.attempts)
        if unknown:
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
        if self.saving_seconds:
            saves = counted(sum(one.saves for one in self.attempts), "checkpoint")
            parts.append(f"{saves} took {_precise(self.saving_seconds)}")
        return "; ".join(parts)

    @property
    def progress(self) -> str:
        """How far the training is, in one line; empty if it does not report its steps."""
        if self.step is None or not self.total_steps:
            return ""
        share = min(1.0, self.step / self.total_steps)
        text = f"step {self.step:,} of {self.total_steps:,} ({share:.0%})"
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
        return (
            f"save about every {_about(best)}, now every {_about(every)}: a checkpoint takes "
            f"{_precise(save)}, and an end without a warning came every "
            f"{_about(self.between_failures_seconds)} of training (Young/Daly)"
        )


def _about(seconds: float) -> str:
    """Return a duration as people say it: 52 min, not 52:13."""
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
    try:
        limit = parse_time(state.submission.record()["job"]["resources"]["time"])
    except (HpmlError, LookupError, TypeError, ValueError):
        return None
    return max(0.0, limit - max(0.0, now - state.started))


def read_life(state: State, *, now: float | None = None) -> Life | None:
    """Return a run over all of its attempts; None before the first, and for an array as a whole.

    Args:
        state: of the run.
        now: seconds since the epoch; the clock when left out.

    Raises:
        RecordError: its records may not be read.
    """
    now = time.time() if now is None else now
    attempts = [] if state.tasks else state.run.attempts()
    if not attempts:
        return None
    attempts[-1].check_readable()
    observed = [_observed(attempt) for attempt in attempts]
    # A requeued job runs for a moment before its script claims the next attempt.
    runs = state.state == JobState.RUNNING and attempts[-1].ended is None
    left = seconds_left(state, now) if runs else None
    waits = state.waits or (observed[-1].goes_on and left is None)
    return life_of(
        observed,
        limits=_limits_of(state),
        left_seconds=left,
        waits=waits and not state.over,
        now=now,
    )


def _limits_of(state: State) -> Limits:
    try:
        job = state.submission.record()["job"]
        limit, own = float(parse_time(job["resources"]["time"])), job.get("checkpoint") or {}
        if not own.get("enabled") or not own["requeue"]:
            return Limits(limit)
        return Limits(limit, int(own["attempts"]), tuple(map(str, own["requeue"])))
    except (HpmlError, AttributeError, LookupError, TypeError, ValueError):
        return Limits(math.inf)


@dataclass
class _Observer:
    """What an attempt's events say, gathered in one pass."""

    first_step: float | None = None
    last_step: float | None = None
    counters: dict[int, tuple[Event, Event]] = field(default_factory=dict)  # first, last
    resumed: Event | None = None
    training: Event | None = None
    saved: Event | None = None
    steps: list[int] = field(default_factory=list)  # that were reached for certain
    saved_steps: list[int] = field(default_factory=list)
    saves: dict[int | None, list[float]] = field(default_factory=dict)
    stopped: bool = False

    def add(self, event: Event) -> None:
        """Take in one event."""
        name, step = event.event, _whole(event.data, "step")
        if name == "step":
            self.first_step = min(event.time, self.first_step or event.time)
            self.last_step = max(event.time, self.last_step or event.time)
            if event.rank is not None:
                first, last = self.counters.get(event.rank, (event, event))
                self.counters[event.rank] = (
                    min(first, event, key=lambda one: one.time),
                    max(event, last, key=lambda one: one.time),
                )
        elif name == "resumed":
            self.resumed = _later(self.resumed, event)
        elif name == "training":
            self.training = _later(self.training, event)
        elif name == "checkpoint":
            self.saved = _later(self.saved, event)
            seconds = numbers(event.data).get("seconds", 0.0)
            self.saves.setdefault(event.rank, []).append(max(0.0, seconds))
            self.saved_steps += [] if step is None else [step]
        elif name == "stopping":
            self.stopped = True
        if name in ("checkpoint", "stopping", "resumed") and step is not None:
            self.steps.append(step)


def _later(known: Event | None, event: Event) -> Event:
    return event if known is None or event.time >= known.time else known


def _whole(data: Mapping[str, Any], name: str) -> int | None:
    value = numbers(data).get(name)
    return None if value is None else int(value)


def _observed(attempt: Attempt) -> AttemptLife:
    """Return what the records of one attempt say; only its number if they may not be read."""
    try:
        attempt.check_readable()
    except RecordError:
        return AttemptLife(attempt.number)
    seen = _Observer()
    for event in attempt.milestones():
        seen.add(event)
    begun, end = attempt.started, attempt.ended or {}
    ended = numbers(end).get("time", attempt.last_written)
    began = total = None
    if seen.resumed is not None:
        began = _whole(seen.resumed.data, "step")
    if seen.training is not None:
        began = _whole(seen.training.data, "step") or began
        total = _whole(seen.training.data, "total_steps")
    if began is None and (attempt.number == 0 or seen.training is not None):
        began = 0
    reached, rate = seen.steps, None
    if seen.counters:
        first, last = seen.counters[min(seen.counters)]
        before, after = (numbers(one.data).get("steps_total", 0.0) for one in (first, last))
        if began is not None and after:
            reached = [*reached, began + int(after)]
        if after > before and last.time > first.time:
            rate = (after - before) / (last.time - first.time)
    if total and reached:
        reached = [min(total, max(reached))]
    saves = max(seen.saves.values(), key=sum, default=[])
    goes_on = end.get("goes_on") is True
    return AttemptLife(
        attempt.number,
        why=str(end.get("why") or ""),
        goes_on=goes_on,
        stays=str(end.get("stays") or ""),
        started=begun.time if begun else None,
        ended=ended,
        continued=None if goes_on else numbers(attempt.next or {}).get("time"),
        trained_from=seen.first_step,
        trained_until=seen.last_step,
        began_step=began,
        resumed=seen.resumed is not None or bool(began),
        step=max(reached, default=None),
        total_steps=total,
        steps_per_second=rate,
        saved_step=_whole(end, "step")
        if "step" in numbers(end)
        else max(seen.saved_steps, default=None),
        saved_at=seen.saved.time if seen.saved else None,
        saves=len(saves),
        saving_seconds=math.fsum(saves),
        stopped=seen.stopped,
    )


def life_of(
    attempts: Sequence[AttemptLife],
    *,
    limits: Limits,
    left_seconds: float | None = None,
    waits: bool = False,
    now: float,
) -> Life:
    """Return a run over all of its attempts, of what their records say.

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
    known: list[AttemptLife] = []
    for place, one in enumerate(attempts):
        is_last = place == len(attempts) - 1
        runs = is_last and left_seconds is not None
        end = now if runs else one.ended
        lost: dict[str, Any] = {}
        if place:
            before = attempts[place - 1]  # a run that waited for its user was not in the queue
            lost["queue_seconds"] = _between(before.continued or before.ended, one.started)
            if trains:
                lost["startup_seconds"] = _between(one.started, one.trained_from or end)
        if trains and (waits or not is_last):
            began = one.trained_from or (end if place else one.started)
            lost["unsaved_seconds"] = _between(max(one.saved_at or 0.0, began or 0.0), end)
        known.append(replace(one, ended=None if runs else one.ended, **lost))
    queued = _between(known[-1].ended, now) if waits else 0.0
    lost_seconds = math.fsum(one.lost_seconds for one in known) + queued
    is_over = left_seconds is None and not waits
    elapsed = _between(known[0].started, known[-1].ended if is_over else now)
    life = Life(
        tuple(known),
        at_most=limits.attempts,
        elapsed_seconds=elapsed,
        lost_seconds=lost_seconds,
        lost_ratio=min(1.0, lost_seconds / elapsed) if elapsed else None,
        saving_seconds=math.fsum(one.saving_seconds for one in known),
        queued_seconds=queued,
        step=_newest(one.step for one in known),
        total_steps=_newest(one.total_steps for one in known),
        steps_per_second=_newest(one.steps_per_second for one in known),
        left_seconds=left_seconds,
    )
    return replace(life, **_forecast(life, limits), **_young_daly(known, waits=waits))


def _between(begin: float | None, end: float | None) -> float:
    return max(0.0, end - begin) if begin and end else 0.0


def _newest(values: Iterable[Any]) -> Any:
    return next((value for value in reversed([*values]) if value is not None), None)


def _forecast(life: Life, limits: Limits) -> dict[str, Any]:
    """Return how long the rest takes, and how many attempts after the one that runs."""
    left, rate = life.left_seconds, life.steps_per_second
    if left is None or not rate or life.step is None or not life.total_steps:
        return {}
    needed = max(0, life.total_steps - life.step) / rate
    if needed <= left:
        return {"needed_seconds": needed, "more_attempts": 0}
    startups = [
        _between(one.started, one.trained_from) for one in life.attempts if one.trained_from
    ]
    useful = limits.seconds - math.fsum(startups) / max(1, len(startups))
    if "time_limit" not in limits.continues or useful <= 0 or not math.isfinite(useful):
        return {"needed_seconds": needed}
    return {"needed_seconds": needed, "more_attempts": math.ceil((needed - left) / useful)}


def _young_daly(attempts: Sequence[AttemptLife], *, waits: bool) -> dict[str, Any]:
    """Return sqrt(2 * duration of a checkpoint * time between failures), and what it is made of.

    A failure is an end that gave the ranks no chance to save; the time limit is none.
    """
    followed = attempts if waits else attempts[:-1]
    failures = sum(one.why not in _PLANNED and not one.stopped for one in followed)
    trained = math.fsum(_between(one.trained_from, one.trained_until) for one in attempts)
    saves = sum(one.saves for one in attempts)
    if not saves or not trained:
        return {}
    save = math.fsum(one.saving_seconds for one in attempts) / saves
    known = {"save_seconds": save, "save_every_seconds": trained / saves}
    if not failures or not save:
        return known
    between = trained / failures
    return {
        **known,
        "between_failures_seconds": between,
        "best_save_every_seconds": math.sqrt(2 * save * between),
    }
