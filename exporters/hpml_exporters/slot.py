"""One collector's place: makes it, has it read, and holds what it read last and how that went."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from hpml_exporters.collector import Collector, DriverLostError, NotHereError
from hpml_exporters.metric import Family, Histogram

__all__ = ["Pauses", "Slot", "Source", "State", "checked", "tell"]

Outcome = Literal["new", "good", "absent", "failed"]
_TOLD_AGAIN_SECONDS = 3600.0
_SHOWN_CHARS = 300
_INTERVAL_MIN_SECONDS = 0.01


@dataclass(frozen=True)
class Source:
    """A collector before it is made.

    Attributes:
        name: of the collector.
        make: makes it; may raise what `Collector.sample` may.
    """

    name: str
    make: Callable[[], Collector]


@dataclass(frozen=True)
class Pauses:
    """How long a collector that has nothing to read, or lost its driver, is left alone.

    Attributes:
        absent: seconds until one that is not here is asked again.
        lost: seconds until a lost driver is tried again; doubles with each failure.
        lost_max: at most that many.
    """

    absent: float = 60.0
    lost: float = 1.0
    lost_max: float = 60.0


@dataclass(frozen=True)
class State:
    """What a slot holds at one moment.

    Attributes:
        outcome: of the last reading.
        families: what it read; empty unless the outcome is good.
        posted: when it ended, by time.monotonic().
        duration: how long it took, seconds.
        last_success: when the last good one ended, seconds since the epoch; 0: never.
        errors: readings that failed.
        stuck_readings: readings that did not end in time.
        stuck: one of these goes on.
    """

    outcome: Outcome = "new"
    families: tuple[Family, ...] = ()
    posted: float = 0.0
    duration: float = 0.0
    last_success: float = 0.0
    errors: int = 0
    stuck_readings: int = 0
    stuck: bool = False


class Slot:
    """Holds one collector; its thread calls `read`, the others look at `state` and `reading`.

    Attributes:
        name: of the collector.
        interval: seconds between two readings; 1 until the collector is made and says.
        state: what is known; replaced as a whole.
        reading: number of the reading that goes on; 0: none does.
    """

    def __init__(
        self, source: Source, *, pauses: Pauses | None = None, changed: Callable[[], None]
    ) -> None:
        self.name = source.name
        self.interval = 1.0
        self.state = State()
        self.reading = 0
        self._source = source
        self._pauses = pauses or Pauses()
        self._changed = changed
        self._collector: Collector | None = None
        self._lock = threading.Lock()
        self._readings = 0
        self._lost = 0
        self._told: dict[tuple[str, str, int], float] = {}
        self._absence = ""

    @property
    def stale_after(self) -> float:
        """Seconds after which what was read is too old to be shown."""
        return max(3 * self.interval, 5.0)

    def read(self) -> float:
        """Read once; returns how many seconds to stay away, 0 for the usual interval."""
        begun = time.monotonic()
        self._readings += 1
        self.reading = self._readings
        families: tuple[Family, ...] = ()
        outcome: Outcome = "failed"
        pause = 0.0
        try:
            if self._collector is None:
                self._collector = self._source.make()
                self.interval = max(self._collector.interval, _INTERVAL_MIN_SECONDS)
            families = checked(self._collector.sample(begun))
            outcome, self._lost = "good", 0
        except NotHereError as error:
            outcome, pause = "absent", self._pauses.absent
            self._tell_absence(str(error))
        except ModuleNotFoundError as error:
            outcome, pause = "absent", self._pauses.absent
            self._tell_once(error)
        except DriverLostError as error:
            pause = self._lose(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, the others go on
            if self._collector is None:
                pause = self._lose(error)
            else:
                self._tell_once(error)
        self._post(outcome, families, begun)
        return pause

    def mark_stuck(self, reading: int) -> None:
        """Drop what is shown: a reading has not ended in time."""
        with self._lock:
            if self.reading != reading:
                return  # it has ended after all
            before = self.state
            self.state = State(
                outcome="failed",
                posted=before.posted,
                duration=before.duration,
                last_success=before.last_success,
                errors=before.errors,
                stuck_readings=before.stuck_readings + 1,
                stuck=True,
            )
        self._changed()

    def close(self) -> None:
        """Close the collector, if there is one."""
        collector, self._collector = self._collector, None
        if collector is not None:
            try:
                collector.close()
            except Exception as error:  # noqa: BLE001 - it is given up anyway
                self._tell_once(error)

    def _lose(self, error: Exception) -> float:
        """Give the collector up; returns seconds until it is made anew."""
        self._tell_once(error)
        self.close()
        pause = min(self._pauses.lost * 2.0**self._lost, self._pauses.lost_max)
        self._lost = min(self._lost + 1, 32)
        return pause

    def _post(self, outcome: Outcome, families: tuple[Family, ...], begun: float) -> None:
        ended = time.monotonic()
        with self._lock:
            before = self.state
            self.state = State(
                outcome=outcome,
                families=families,
                posted=ended,
                duration=ended - begun,
                last_success=time.time() if outcome == "good" else before.last_success,
                errors=before.errors + (outcome == "failed"),
                stuck_readings=before.stuck_readings,
            )
            self.reading = 0
        self._changed()

    def _tell_absence(self, why: str) -> None:
        """Say why there is nothing to read, once: who misses the GPUs looks for a reason."""
        if why and why != self._absence:
            self._absence = why
            tell(f"collector {self.name}: nothing to read: {why}")

    def _tell_once(self, error: Exception) -> None:
        """Say what happened, each kind of it once an hour: a kind is a class at a line of code."""
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        where = (trace.tb_frame.f_code.co_filename, trace.tb_lineno) if trace else ("", 0)
        kind, now = (type(error).__name__, *where), time.monotonic()
        if now - self._told.get(kind, -_TOLD_AGAIN_SECONDS) >= _TOLD_AGAIN_SECONDS:
            self._told[kind] = now
            tell(f"collector {self.name}: {type(error).__name__}: {error}")


def checked(families: Sequence[Family]) -> tuple[Family, ...]:
    """Return the families, which can be rendered.

    Raises:
        TypeError: a label or a value is of another type than its metric wants.
        ValueError: a sample has not the labels of its metric.
    """
    for family in families:
        spec, wanted = family.spec, len(family.spec.labels)
        kinds = (Histogram,) if spec.type == "histogram" else (int, float)
        for labels, value in family.samples:
            if len(labels) != wanted:
                raise ValueError(f"{spec.name}: {len(labels)} labels where {wanted} are wanted")
            if not isinstance(value, kinds):
                raise TypeError(f"{spec.name}: a value of type {type(value).__name__}")
            for label in labels:
                if not isinstance(label, str):
                    raise TypeError(f"{spec.name}: a label of type {type(label).__name__}")
    return tuple(families)


def tell(message: str) -> None:
    """Print one line on standard error."""
    line = " ".join(message.split())[:_SHOWN_CHARS]
    try:
        sys.stderr.write(f"hpml: {line}\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        pass  # nobody listens; that is no reason to stop reading
