"""The sampler: a thread per collector, a watchdog over them, and the snapshot of what they read."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from hpml_exporters.metric import Family
from hpml_exporters.render import Renderer
from hpml_exporters.selfmetrics import SelfMetrics
from hpml_exporters.slot import Pauses, Slot, Source, State, tell
from hpml_exporters.snapshot import Snapshot

if TYPE_CHECKING:
    from hpml_exporters.web.limits import Counters

__all__ = ["Sampler", "next_due"]

_SPREAD_SECONDS = 1.0
_TICK_SECONDS = 1.0
_JOIN_SECONDS = 0.7
_SELF_SECONDS = 5.0
"""After which a snapshot is made anew for the exporter's own figures, if nothing else changed."""
_ROUNDING = 1e-6
"""Part of an interval: 0.3 / 0.1 is less than 3 in binary, and would be due at once again."""


def next_due(origin: float, interval: float, now: float) -> float:
    """Return the next moment of the grid `origin + k * interval` after now.

    Moments that were missed are left out: who was late does not hurry to catch up.

    >>> next_due(10.0, 5.0, 12.0), next_due(10.0, 5.0, 15.0), next_due(10.0, 5.0, 31.0)
    (15.0, 20.0, 35.0)
    """
    if now < origin:
        return origin
    passed = (now - origin) / interval
    return origin + (math.floor(passed + _ROUNDING) + 1) * interval


class Sampler:
    """Has every collector read at its own rhythm, and puts together what they read.

    A scrape takes the latest readings: it waits for no collector. The snapshot is another one only
    when a collector posted something, got stuck, or what it read became too old.
    """

    def __init__(
        self,
        sources: Iterable[Source],
        *,
        stuck_seconds: float = 10.0,
        exit_seconds: float = 60.0,
        give_up: Callable[[str], None] | None = None,
        pauses: Pauses | None = None,
    ) -> None:
        """Prepare; nothing is read before `start`.

        Args:
            sources: the collectors, in the order of their first readings.
            stuck_seconds: after which a reading that has not ended counts as stuck.
            exit_seconds: after which `give_up` is called because of it, with what to say.
            give_up: ends the process; is called in the watchdog's thread, once.
            pauses: for collectors that are not here.
        """
        self._slots = [Slot(one, pauses=pauses, changed=self._note_change) for one in sources]
        self._stuck_seconds = stuck_seconds
        self._exit_seconds = exit_seconds
        self._give_up = give_up
        self._ended = threading.Event()
        self._last_reading = False
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._changes = 0
        self._shown = -1
        self._expires = math.inf
        self._snapshot: Snapshot | None = None
        self._renderer = Renderer()
        self._self = SelfMetrics()
        self._ticked = math.inf

    def show_server(self, counters: Counters) -> None:
        """Show what the web server counts, too."""
        self._self.server = counters

    def start(self) -> None:
        """Start the threads; the first readings are spread over a second."""
        origin = time.monotonic()
        for number, slot in enumerate(self._slots):
            first = origin + number * _SPREAD_SECONDS / len(self._slots)
            self._begin(slot.name, partial(self._keep_reading, slot, first))
        self._begin("watchdog", self._watch)

    def stop(self, *, last_reading: bool = False) -> None:
        """End the threads and close the collectors; one that is stuck is left behind.

        Args:
            last_reading: have every collector read once more before.
        """
        self._last_reading = last_reading
        self._ended.set()
        deadline = time.monotonic() + _JOIN_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def snapshot(self) -> Snapshot:
        """Return what all collectors read last."""
        with self._lock:
            now = time.monotonic()
            if self._snapshot is None or self._changes != self._shown or now >= self._expires:
                self._shown = self._changes
                self._snapshot = self._composed(now)
            return self._snapshot

    def metrics(self, *, openmetrics: bool, gzip: bool) -> bytes:
        """Return the body of an answer to a scrape."""
        self._self.scrapes += 1
        return self.snapshot().body(openmetrics=openmetrics, gzip=gzip)

    def health(self) -> tuple[bool, str]:
        """Return whether all goes on, and in words what does not."""
        if time.monotonic() - self._ticked > 10 * _TICK_SECONDS:
            return False, "the watchdog does not run"
        stuck = [slot.name for slot in self._slots if slot.state.stuck]
        return not stuck, f"stuck: {', '.join(stuck)}" if stuck else "ok"

    def _begin(self, name: str, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _keep_reading(self, slot: Slot, first: float) -> None:
        """Have a collector read until the end; runs in its thread."""
        due = first
        while not self._ended.wait(max(0.0, due - time.monotonic())):
            pause = slot.read()
            now = time.monotonic()
            due = now + pause if pause else next_due(first, slot.interval, now)
        if self._last_reading:
            slot.read()
        slot.close()

    def _watch(self) -> None:
        """Look for readings that do not end; runs in the watchdog's thread.

        What counts is the time that the watchdog itself was running: after a process was stopped
        or frozen for a while nothing is stuck.
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
                    tell(f"collector {slot.name}: a reading has not ended for {age:.0f} s")
                if age >= self._exit_seconds and self._give_up is not None:
                    give_up, self._give_up = self._give_up, None
                    give_up(f"collector {slot.name}: stuck for {age:.0f} s")

    def _note_change(self) -> None:
        with self._lock:
            self._changes += 1

    def _composed(self, now: float) -> Snapshot:
        families: list[Family] = []
        states: list[tuple[str, State]] = []
        self._expires = now + _SELF_SECONDS
        for slot in self._slots:
            state = slot.state
            if state.outcome == "good":
                expires = state.posted + slot.stale_after
                if now >= expires:
                    state = _aged(state)
                else:
                    self._expires = min(self._expires, expires)
            families += state.families
            states.append((slot.name, state))
        families += self._self.families(states)
        return Snapshot(families, time=time.time(), monotonic=now, renderer=self._renderer)


def _aged(state: State) -> State:
    """Return what is left of a reading that is too old to be shown."""
    return State(
        outcome="failed",
        posted=state.posted,
        duration=state.duration,
        last_success=state.last_success,
        errors=state.errors,
        stuck_readings=state.stuck_readings,
        stuck=state.stuck,
    )
