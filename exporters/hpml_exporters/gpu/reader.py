"""Reads one GPU or MIG instance: its sources are chosen once, then asked at their own periods."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

from hpml_exporters.gpu.devices import GpuDevice
from hpml_exporters.gpu.figures import GpmMetric, GpuSeries, Series, series_on
from hpml_exporters.gpu.gpm import Gpm
from hpml_exporters.gpu.nvml import SUCCESS, UNSUPPORTED, Nvml
from hpml_exporters.gpu.questions import Question, questions

_Target = tuple[Series, Callable[[float, float], float] | None]
_OF_GPU, _OF_INSTANCE = series_on("gpu"), series_on("instance")

# A driver call that stalls for a minute must not look like an idle GPU, while nobody knows what a
# GPU did during an hour without readings.
_GAP_SECONDS = 120.0
_GAP_INTERVALS = 2.5


@dataclass
class _Total:
    """A rate integrated over time, or a counter of 32 bits whose differences are added up."""

    total: float = 0.0
    last: float | None = None

    def integrate(self, rate: float, now: float, most: float) -> float:
        """Add the rate times the seconds since the last reading, `most` seconds at most."""
        if self.last is not None and now > self.last:
            self.total += rate * min(now - self.last, most)
        self.last = now if self.last is None else max(now, self.last)
        return self.total

    def unwrap(self, count: float, _: float) -> float:
        """Add the growth since the last reading; drivers return counters of 32 bits as 64."""
        if self.last is not None:
            # Below 2**32 a fall is the counter wrapping around. A larger counter does not wrap:
            # there a fall is a reset, after which all of the new count is growth.
            wrapped = count < self.last < 2**32
            self.total += count - self.last + (2**32 if wrapped else 0)
            if count < self.last and not wrapped:  # it was reset
                self.total += self.last
        self.last = count
        return self.total


@dataclass
class History:
    """What is known of one UUID; it outlives handles, readers and the driver.

    Attributes:
        interval: seconds between two readings.
        values: the latest numbers.
        chosen: the source of each series that has ever answered: another would make totals jump.
        totals: of series that are added up here.
    """

    interval: float
    values: dict[Series, float] = field(default_factory=dict)
    chosen: dict[Series, GpuSeries] = field(default_factory=dict)
    totals: dict[Series, _Total] = field(default_factory=dict)

    @cached_property
    def gap(self) -> float:
        """The longest time without a reading that a rate is still integrated over, in seconds."""
        return max(_GAP_SECONDS, _GAP_INTERVALS * self.interval)

    def pause(self) -> None:
        """Hide all values, and count nothing until the next reading."""
        self.values.clear()
        for total in self.totals.values():
            total.last = None

    def adder(self, row: GpuSeries) -> Callable[[float, float], float] | None:
        """Return what adds a number, read at a time, to the total of a source that has one."""
        kind = row.source.total
        if not kind:
            return None
        total = self.totals.setdefault(row.key, _Total())
        if kind == "rate":
            return partial(total.integrate, most=self.gap)
        return total.unwrap


class Reader:
    """Reads one GPU.

    Attributes:
        device: which.
        history: its values and totals.
        up: whether anything answered at the last reading.
        plan: the questions, each with the readings between two times that it is asked, and which
            of them.
    """

    def __init__(self, nvml: Nvml, device: GpuDevice, history: History) -> None:
        """Ask every source once, and keep for each series the best that answers.

        Raises:
            GpuLostError: the GPU does not answer.
            DriverLostError: nothing does.
        """
        self.device, self.history = device, history
        self.up = True
        self._tick = 0
        self._gpm: Gpm | None = Gpm(nvml, device)
        if not self._gpm.open():
            self._gpm = None
        rows = _OF_INSTANCE if device.parent else _OF_GPU
        codes: dict[int, int] = {}
        # Probe every source once. What this GPU does not support is never asked again.
        for question in questions(nvml, device, rows, self._gpm):
            if question.ask() is None:
                question.ask()  # the first sample had nothing to compare with
            for row, code in zip(question.rows, question.codes, strict=True):
                # Two samples this close together leave some metrics undetermined for now.
                early = isinstance(row.source, GpmMetric) and code not in UNSUPPORTED
                codes[id(row)] = SUCCESS if early else code
        wanted = self._choose(rows, codes)
        self._silent = [row for row in wanted if row.key not in history.chosen]
        # Rows with long periods are due at different readings on each GPU, so that no single
        # reading has to ask all of them.
        phase = zlib.crc32(device.uuid.encode())
        self.plan: list[tuple[int, int, Question]] = []
        self._targets: list[Sequence[_Target]] = []
        for period in sorted({row.figure.period for row in wanted}):
            # What is wanted every second is wanted at each reading.
            every = max(1, round(period / history.interval)) if period > 1 else 1
            same = [row for row in wanted if row.figure.period == period]
            for index, question in enumerate(questions(nvml, device, same, self._gpm)):
                self.plan.append((every, (index + phase) % every, question))
                self._targets.append([(row.key, history.adder(row)) for row in question.rows])

    def read(self, now: float) -> None:
        """Ask what is due.

        Args:
            now: seconds, monotonic.

        Raises:
            GpuLostError: the GPU no longer answers.
            DriverLostError: nothing does.
        """
        asked = answered = False
        values, tick = self.history.values, self._tick
        for (every, offset, question), targets in zip(self.plan, self._targets, strict=True):
            # The first reading asks everything: no series may appear only minutes later.
            if (tick + offset) % every and tick:
                continue
            asked = True
            numbers = question.ask()
            answered = answered or SUCCESS in question.codes
            if numbers is None:  # GPM's first sample succeeds without a value
                continue
            for (key, add), number in zip(targets, numbers, strict=True):
                if number is None:  # what cannot be read now is absent, never stale
                    values.pop(key, None)
                else:
                    values[key] = number if add is None else add(number, now)
        self._tick += 1
        if self._silent:
            self._note_choice()
        if asked:
            self.up = answered
        if not self.up:  # every answer is an error, as NO_PERMISSION or UNKNOWN
            self.history.pause()

    def _note_choice(self) -> None:
        """Note the sources that have answered for the first time."""
        history = self.history
        history.chosen.update((row.key, row) for row in self._silent if row.key in history.values)
        self._silent = [row for row in self._silent if row.key not in history.chosen]

    def close(self) -> None:
        """Release what the driver holds for this reader."""
        if self._gpm is not None:
            self._gpm.close()

    def _choose(self, rows: Sequence[GpuSeries], codes: dict[int, int]) -> list[GpuSeries]:
        """Return one source per series; what fails for now is asked again at its period."""
        best: dict[Series, GpuSeries] = {}
        for row in rows:
            code = codes[id(row)]
            before = best.get(row.key)
            better = before is None or codes[id(before)] != SUCCESS
            if (code == SUCCESS and better) or (code not in UNSUPPORTED and before is None):
                best[row.key] = row
        return list({**best, **self.history.chosen}.values())
