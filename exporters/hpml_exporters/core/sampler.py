"""Runs every collector at its own interval, and holds the latest readings.

A scrape takes the latest readings and waits for no collector. A collector that fails, hangs or
reads nothing new loses its series; the others continue.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from prometheus_client.core import Metric

from hpml_exporters.core.collector import (
    Collector,
    CollectorState,
    DriverLostError,
    Family,
    MetricSpec,
    NotHereError,
    Outcome,
    StaleError,
    self_families,
    series_count,
)

_LOG = logging.getLogger(__name__)
_WARNED_AGAIN_SECONDS = 3600.0
_INTERVAL_MIN_SECONDS = 0.01
_SPREAD_SECONDS = 1.0
_TICK_SECONDS = 1.0
_JOIN_SECONDS = 0.7
_SELF_SECONDS = 5.0
"""After which the exporter's own figures are refreshed, even if nothing else changed."""
_ROUNDING = 1e-6
"""Fraction of an interval: 0.3 / 0.1 is below 3 in binary, so a reading would be due again."""


@dataclass(frozen=True)
class CollectorSource:
    """A collector's name and factory; the factory may raise the errors of `sample`."""

    name: str
    make: Callable[[], Collector]


@dataclass(frozen=True)
class Pauses:
    """Seconds before retrying a collector that found nothing or lost its driver.

    Attributes:
        absent: if there is nothing to read here.
        lost: after a lost driver; doubles with each failure up to `lost_max`.
        lost_max: the longest pause.
    """

    absent: float = 60.0
    lost: float = 1.0
    lost_max: float = 60.0


@dataclass(frozen=True)
class Samples:
    """The latest readings of all collectors.

    Attributes:
        families: of all collectors, one per metric; a family may have no series.
        time: when they were collected, seconds since the epoch.
        monotonic: the same by time.monotonic().
    """

    families: tuple[Metric, ...]
    time: float
    monotonic: float


class _Slot:
    """One collector and its state; its thread calls `read`, other threads read the attributes.

    Attributes:
        name: of the collector.
        interval: seconds between two readings; 1 until the collector is created.
        state: result of its readings; replaced, never changed.
        reading: number of the current reading; 0: none.
        thread: the kernel's number of the thread that reads.
    """

    def __init__(
        self, source: CollectorSource, pauses: Pauses, changed: Callable[[], None]
    ) -> None:
        self.name = source.name
        self.interval = 1.0
        self.state = CollectorState()
        self.reading = 0
        self.thread = 0
        self._make = source.make
        self._pauses = pauses
        self._changed = changed
        self._collector: Collector | None = None
        self._lock = threading.Lock()
        self._readings = 0
        self._lost = 0
        self._warned: dict[object, float] = {}

    @property
    def stale_after(self) -> float:
        """Seconds after which a reading is too old to be shown."""
        return max(3 * self.interval, 5.0)

    def read(self) -> float:
        """Read once; returns the pause in seconds before the next reading, 0 for the interval."""
        begun, self.thread = time.monotonic(), threading.get_native_id()
        self._readings += 1
        self.reading = self._readings
        found: Iterable[Metric] = ()
        outcome: Outcome = "failed"
        pause = 0.0
        try:
            if self._collector is None:
                self._collector = self._make()
                self.interval = max(self._collector.interval, _INTERVAL_MIN_SECONDS)
            found = self._collector.sample(begun)
            outcome, self._lost = "good", 0
        except (NotHereError, ModuleNotFoundError) as error:
            outcome, pause = "absent", self._pauses.absent
            if str(error):
                self._warn_once(str(error), f"nothing to read: {error}")
        except StaleError as error:
            found = error.families
            self._warn_once(str(error), f"old figures are shown: {error}")
        except Exception as error:  # noqa: BLE001 - whatever it is, the others continue
            self._warn_of_error(error)
            # After an ordinary failure the collector stays, and its counters with it. A lost driver
            # needs new handles: close everything and start again, after pauses that grow.
            if self._collector is None or isinstance(error, DriverLostError):
                self.close()
                pause = min(self._pauses.lost * 2.0**self._lost, self._pauses.lost_max)
                self._lost = min(self._lost + 1, 32)
        ended = time.monotonic()
        with self._lock:
            # The watchdog may call `mark_stuck` right now. Without the lock it could declare a
            # reading stuck that has just ended, and drop good families.
            self.state = replace(
                self.state,
                outcome=outcome,
                families=found,
                posted=ended,
                duration=ended - begun,
                last_success=time.time() if outcome == "good" else self.state.last_success,
                errors=self.state.errors + (outcome == "failed"),
                stuck=False,
            )
            self.reading = 0
        self._changed()
        return pause

    def shown(self) -> CollectorState:
        """Return the state, with its families built."""
        # Without the lock: a generator may take long, and `read` must not wait for a scrape.
        state = self.state
        try:
            shown = replace(state, families=tuple(state.families))
        except Exception as error:  # noqa: BLE001 - a reading whose families cannot be made
            self._warn_of_error(error)
            shown = replace(state, families=(), outcome="failed", errors=state.errors + 1)
        with self._lock:
            if self.state is state:  # else something newer was read meanwhile
                self.state = shown
        return shown

    def mark_stuck(self, reading: int) -> None:
        """Drop the families: a reading has not ended in time."""
        with self._lock:
            if self.reading == reading:  # else it has ended after all
                count = self.state.stuck_readings + 1
                self.state = replace(
                    self.state, outcome="failed", families=(), stuck_readings=count, stuck=True
                )
        self._changed()

    def hangs_in_kernel(self) -> bool:
        """Return whether its thread sleeps uninterruptibly, which no signal and no exit ends."""
        try:
            with open(f"/proc/self/task/{self.thread}/stat", "rb") as stream:
                return stream.read().rpartition(b")")[2].split()[0] == b"D"
        except (OSError, IndexError):
            return False

    def close(self) -> None:
        """Close the collector, if there is one."""
        collector, self._collector = self._collector, None
        if collector is not None:
            try:
                collector.close()
            except Exception as error:  # noqa: BLE001 - it is given up anyway
                self._warn_of_error(error)

    def _warn_of_error(self, error: Exception) -> None:
        """Log an error at most once an hour per exception class and line of code."""
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        where = (trace.tb_frame.f_code.co_filename, trace.tb_lineno) if trace else ("", 0)
        self._warn_once((type(error), where), f"{type(error).__name__}: {error}")

    def _warn_once(self, kind: object, message: str) -> None:
        since = time.monotonic() - _WARNED_AGAIN_SECONDS
        self._warned = {each: when for each, when in self._warned.items() if when > since}
        if kind not in self._warned:
            self._warned[kind] = time.monotonic()
            _LOG.warning("collector %s: %s", self.name, message)


class Sampler:
    """The collectors of an exporter, each in a separate thread.

    It is a custom collector of prometheus_client: `registry.register(sampler)`.
    """

    def __init__(
        self,
        sources: Iterable[CollectorSource],
        *,
        specs: Sequence[MetricSpec] = (),
        constant: Sequence[Metric] = (),
        stuck_seconds: float = 10.0,
        exit_seconds: float = 60.0,
        give_up: Callable[[str], None] | None = None,
        pauses: Pauses | None = None,
    ) -> None:
        """Prepare; nothing is read before `start`.

        Args:
            sources: the collectors, in the order of their first readings.
            specs: all metrics that they can show.
            constant: families that never change.
            stuck_seconds: after which a reading that has not ended counts as stuck.
            exit_seconds: after which a stuck reading calls `give_up` with the reason, except while
                its thread is in uninterruptible sleep, which no exit would end.
            give_up: ends the process; called once, in the watchdog's thread.
            pauses: before retrying a collector that has nothing to read.
        """
        pauses = pauses or Pauses()
        self._slots = [_Slot(one, pauses, self._note_change) for one in sources]
        self._specs, self._constant = specs, tuple(constant)
        self._stuck_seconds = stuck_seconds
        self._exit_seconds = exit_seconds
        self._give_up = give_up
        self._ended = threading.Event()
        self._last_reading = False
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._changes, self._shown = 0, -1
        self._expires = math.inf
        self._snapshot: Samples | None = None
        self._ticked = math.inf

    def start(self) -> None:
        """Start the threads; the first readings are spread over a second."""
        origin = time.monotonic()
        for number, slot in enumerate(self._slots):
            # Each collector keeps its offset for good (see `next_due`), so their readings never
            # fall together on one moment.
            first = origin + number * _SPREAD_SECONDS / len(self._slots)
            self._begin(slot.name, partial(self._keep_reading, slot, first))
        self._begin("watchdog", self._watch)

    def read_once(self) -> None:
        """Read every collector once in this thread, without a server."""
        for slot in self._slots:
            slot.read()

    def stop(self, *, last_reading: bool = False) -> None:
        """End the threads and close the collectors; a stuck one is left behind.

        Args:
            last_reading: first read every collector once more.
        """
        self._last_reading = last_reading
        self._ended.set()
        deadline = time.monotonic() + _JOIN_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def collect(self) -> Iterable[Metric]:
        """Return the families of all collectors, with the collectors' own health."""
        return [family for family in self.snapshot().families if series_count(family)]

    def describe(self) -> Iterable[Metric]:
        """Return all families, without series."""
        return [spec.family() for spec in self._specs]

    def snapshot(self) -> Samples:
        """Return the latest readings of all collectors; a new object only if something changed."""
        with self._lock:
            now = time.monotonic()
            if self._snapshot is None or self._changes != self._shown or now >= self._expires:
                self._shown = self._changes
                self._snapshot = self._composed(now)
            return self._snapshot

    def health(self) -> tuple[bool, str]:
        """Return whether the exporter works, and a description of failing collectors.

        A failed reading does not make the exporter unhealthy: a restart would not help.
        """
        if time.monotonic() - self._ticked > 10 * _TICK_SECONDS:
            return False, "the watchdog does not run"
        stuck = [slot.name for slot in self._slots if slot.state.stuck]
        if stuck:
            return False, f"stuck: {', '.join(stuck)}"
        failed = [slot.name for slot in self._slots if slot.state.outcome == "failed"]
        return True, f"failed: {', '.join(failed)}" if failed else "ok"

    def _begin(self, name: str, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _keep_reading(self, slot: _Slot, first: float) -> None:
        due = first
        while not self._ended.wait(max(0.0, due - time.monotonic())):
            pause = slot.read()
            now = time.monotonic()
            # From the grid, not `now + interval`, which would drift by the duration of each
            # reading.
            due = now + pause if pause else next_due(first, slot.interval, now)
        # A job shorter than an interval would otherwise leave no figures.
        if self._last_reading:
            slot.read()
        slot.close()

    def _watch(self) -> None:
        """Find readings that do not end; runs in the watchdog's thread.

        Count only time in which the watchdog ran: a process that was stopped or frozen has no stuck
        reading.
        """
        tick = min(_TICK_SECONDS, self._stuck_seconds / 4)
        ages = dict.fromkeys(self._slots, (0, 0.0))
        self._ticked = time.monotonic()
        while not self._ended.wait(tick):
            now = time.monotonic()
            passed, self._ticked = min(now - self._ticked, 2 * tick), now
            for slot in self._slots:
                reading, (before, age) = slot.reading, ages[slot]
                age = age + passed if reading and reading == before else 0.0
                ages[slot] = reading, age
                if age >= self._stuck_seconds and not slot.state.stuck:
                    slot.mark_stuck(reading)
                    stuck = "collector %s: a reading has not ended for %.0f s"
                    _LOG.error(stuck, slot.name, age)
                # An exit does not end a thread in state D: the process would stay and serve
                # nothing. Keep serving the other collectors instead.
                if age >= self._exit_seconds and self._give_up and not slot.hangs_in_kernel():
                    give_up, self._give_up = self._give_up, None
                    give_up(f"collector {slot.name}: stuck for {age:.0f} s")

    def _note_change(self) -> None:
        with self._lock:
            self._changes += 1

    def _composed(self, now: float) -> Samples:
        states: list[tuple[str, CollectorState]] = []
        self._expires = now + _SELF_SECONDS
        for slot in self._slots:
            state = slot.shown()
            if state.families:
                # A collector that hangs reports no change. So the snapshot expires with its oldest
                # families; otherwise the last figures would be shown for ever.
                expires = state.posted + slot.stale_after
                if now >= expires:
                    state = replace(state, outcome="failed", families=())
                else:
                    self._expires = min(self._expires, expires)
            states.append((slot.name, state))
        found = [family for _, state in states for family in state.families]
        return Samples(
            tuple(_merged([*found, *self_families(states), *self._constant])), time.time(), now
        )


def _merged(families: Iterable[Metric]) -> Iterable[Metric]:
    """Return one family for each metric; of equal series the first counts."""
    by_name: dict[str, list[Metric]] = {}
    for family in families:
        by_name.setdefault(family.name, []).append(family)
    # Prometheus refuses a family that occurs twice.
    for first, *more in by_name.values():
        if more and isinstance(first, Family):
            yield first.joined(one for one in more if isinstance(one, Family))
        else:
            yield first


def next_due(origin: float, interval: float, now: float) -> float:
    """Return the next moment of the grid `origin + k * interval` after now.

    Skip missed moments: a late collector does not catch up.

    >>> next_due(10.0, 5.0, 12.0), next_due(10.0, 5.0, 15.0), next_due(10.0, 5.0, 31.0)
    (15.0, 20.0, 35.0)
    """
    if now < origin:
        return origin
    passed = (now - origin) / interval
    return origin + (math.floor(passed + _ROUNDING) + 1) * interval
