"""Reads one GPU or MIG instance: chooses its sources once, then reads each at its period."""

from __future__ import annotations

import ctypes
import math
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Protocol

from hpml_exporters.gpu.devices import (
    NOT_SUPPORTED,
    SUCCESS,
    UNSUPPORTED,
    Code,
    GpuDevice,
    Nvml,
    check,
)
from hpml_exporters.gpu.figures import Field, GpmMetric, GpuSeries, NvmlCall, Series, series_on

# GPU performance monitoring (GPM): activity of multiprocessors and memory between two readings.
#
# It needs Hopper or later, but neither root nor DCGM. A sample has the GPU's counters at one
# moment; NVML computes metrics from two samples, so each value is an exact mean.

_HEADER = struct.Struct("<IIQQ")  # version, number of metrics, both samples
_METRIC_SIZE = 40  # sizeof(nvmlGpmMetric_t): id, return code, double, three strings
_METRICS_MAX = 1024  # the driver's struct has room for NVML_GPM_METRIC_MAX (477 in 2026)


class Gpm:
    """The metrics of one GPU or MIG instance."""

    def __init__(self, nvml: Nvml, device: GpuDevice) -> None:
        """Prepare; `open` allocates the samples."""
        self._nvml = nvml
        whole = not device.parent
        self._handle = ctypes.c_void_p(device.handle if whole else device.parent_handle)
        self._where = () if whole else (ctypes.c_uint(device.instance),)
        self._sample = nvml.call("nvmlGpmSampleGet" if whole else "nvmlGpmMigSampleGet")
        self._metrics = nvml.call("nvmlGpmMetricsGet")
        self._samples: list[ctypes.c_void_p] = []
        self._buffer = ctypes.create_string_buffer(_HEADER.size + _METRIC_SIZE * _METRICS_MAX)
        self.choose(())

    def choose(self, numbers: Sequence[int]) -> None:
        """Choose the metrics to read (NVML_GPM_METRIC_...)."""
        self._count, self._taken = len(numbers), False
        for index, number in enumerate(numbers):
            struct.pack_into("<I", self._buffer, _HEADER.size + _METRIC_SIZE * index, number)
        self._layout = struct.Struct("<" + "4xId24x" * len(numbers))

    def open(self) -> bool:
        """Allocate two samples, and return whether the GPU has GPM.

        Raises:
            GpuLostError: it does not answer.
            DriverLostError: nothing does.
        """
        support = (ctypes.c_uint * 2)(1, 0)  # version, whether it is supported
        query = self._nvml.call("nvmlGpmQueryDeviceSupport")
        if not check(query(self._handle, ctypes.byref(support))) or not support[1]:
            return False
        allocate = self._nvml.call("nvmlGpmSampleAlloc")
        for _ in range(2):
            sample = ctypes.c_void_p()
            if allocate(ctypes.byref(sample)) != SUCCESS:
                self.close()
                return False
            self._samples.append(sample)
        return True

    def close(self) -> None:
        """Free the samples."""
        free = self._nvml.call("nvmlGpmSampleFree")
        while self._samples:
            free(self._samples.pop())

    def read(self) -> tuple[Code, Sequence[tuple[Code, float]]]:
        """Take a sample, and return NVML's code, and code and value of each chosen metric.

        The first sample gives no metrics: they need two samples.
        """
        older, newer = self._samples
        code = self._sample(self._handle, *self._where, newer)
        if code != SUCCESS:
            self._taken = False
            return code, ()
        self._samples.reverse()  # the newer sample becomes the older one of the next reading
        taken, self._taken = self._taken, True
        if not taken:
            return SUCCESS, ()
        _HEADER.pack_into(self._buffer, 0, 1, self._count, older.value or 0, newer.value or 0)
        code = self._metrics(self._buffer)
        if code != SUCCESS:
            return code, ()
        flat = self._layout.unpack_from(self._buffer, _HEADER.size)
        return code, list(zip(flat[::2], flat[1::2], strict=True))


# Questions: driver calls that each answer several rows.
#
# Arguments are prepared once, so a reading copies and looks up nothing.

Number = float | None
"""A value in our unit; None if it is unknown this time."""

_SIZE = 40  # sizeof(nvmlFieldValue_t)
_TYPES: tuple[Callable[[int], float], ...] = (
    lambda raw: float(struct.unpack("<d", raw.to_bytes(8, "little"))[0]),
    lambda raw: raw & 0xFFFFFFFF,
    lambda raw: raw,
    lambda raw: raw,
    lambda raw: raw - (1 << 64) if raw >> 63 else raw,
    lambda raw: (raw & 0xFFFFFFFF) - (1 << 32 if raw & 0x80000000 else 0),
    lambda raw: raw & 0xFFFF,
)
"""What a value means, by nvmlValueType_t: double, uint, ulong, ulonglong, longlong, int, ushort."""


class Question(Protocol):
    """One driver call.

    Attributes:
        rows: the series that it answers.
        codes: NVML's code for each row, of the last call.
    """

    rows: Sequence[GpuSeries]
    codes: Sequence[Code]

    def ask(self) -> Sequence[Number] | None:
        """Return a number for each row; None if only later calls have numbers.

        Raises:
            GpuLostError: the GPU does not answer.
            DriverLostError: nothing does.
        """


def questions(
    nvml: Nvml, device: GpuDevice, rows: Sequence[GpuSeries], gpm: Gpm | None
) -> Iterator[Question]:
    """Return the fewest calls that answer these rows.

    Args:
        nvml: the library.
        device: the GPU or instance.
        rows: of `figures.series_on`.
        gpm: of this device, if it has GPM.
    """
    fields = [row for row in rows if isinstance(row.source, Field)]
    if fields:
        yield _FieldValues(nvml, device.handle, fields)
    metrics = [row for row in rows if isinstance(row.source, GpmMetric)]
    if metrics:
        yield _GpmMetrics(gpm, metrics)
    calls: dict[object, list[GpuSeries]] = {}
    for row in rows:
        if isinstance(row.source, NvmlCall):
            calls.setdefault(row.source.question, []).append(row)
    for same in calls.values():
        yield _Call(nvml, device.handle, same)


class _Call:
    """A function that answers one or more integers."""

    def __init__(self, nvml: Nvml, handle: int, rows: Sequence[GpuSeries]) -> None:
        self.rows = rows
        self.codes: Sequence[Code] = ()
        sources = [row.source for row in rows if isinstance(row.source, NvmlCall)]
        first = sources[0]
        self._picks = [(source.convert, source.pick) for source in sources]
        self._unknown = [None] * len(rows)
        self._answer = first.layout()
        if first.version:
            self._answer[0] = ctypes.sizeof(self._answer) | (first.version << 24)
        selector = () if first.selector is None else (ctypes.c_uint(first.selector),)
        others = [ctypes.byref(ctypes.c_uint()) for _ in range(first.pointers - 1)]
        self._function = nvml.call(*first.names)
        self._arguments = (
            *(ctypes.c_void_p(handle), *selector),
            *(ctypes.byref(self._answer), *others),
        )

    def ask(self) -> Sequence[Number]:
        code = self._function(*self._arguments)
        self.codes = (code,) * len(self.rows)
        if code != SUCCESS:
            check(code)
            return self._unknown
        answer = self._answer
        return [convert(answer[pick]) for convert, pick in self._picks]


class _FieldValues:
    """Several fields with one call; each has its own code."""

    def __init__(self, nvml: Nvml, handle: int, rows: Sequence[GpuSeries]) -> None:
        self.rows = rows
        self.codes: Sequence[Code] = ()
        self._sources = [row.source for row in rows if isinstance(row.source, Field)]
        pairs = [(each.number, scope) for each in self._sources for scope in each.scopes]
        self._single = len(pairs) == len(rows)
        self._converts = [each.convert for each in self._sources]
        # One entry more than asked for: drivers write past the end when asked for NVLink counters
        # (nvitop's libnvml guards against it in the same way).
        self._buffer = ctypes.create_string_buffer(_SIZE * (len(pairs) + 1))
        for index, pair in enumerate(pairs):
            struct.pack_into("<II", self._buffer, _SIZE * index, *pair)
        self._layout = struct.Struct("<" + "24xIIQ" * len(pairs))
        self._function = nvml.call("nvmlDeviceGetFieldValues")
        self._arguments = (ctypes.c_void_p(handle), ctypes.c_int(len(pairs)), self._buffer)

    def ask(self) -> Sequence[Number]:
        code = self._function(*self._arguments)
        if not check(code):
            self.codes = (code,) * len(self.rows)
            return [None] * len(self.rows)
        flat = self._layout.unpack_from(self._buffer)
        if self._single:  # asked every second
            self.codes = flat[1::3]
            return [
                convert(_TYPES[kind](raw)) if code == SUCCESS else None
                for convert, kind, code, raw in zip(
                    self._converts, flat[::3], self.codes, flat[2::3], strict=True
                )
            ]
        parts = zip(flat[::3], flat[1::3], flat[2::3], strict=True)  # type, code, value
        sums = [self._sum(each, [next(parts) for _ in each.scopes]) for each in self._sources]
        self.codes = [code for code, _ in sums]
        return [number for _, number in sums]

    def _sum(self, source: Field, known: Sequence[tuple[int, Code, int]]) -> tuple[Code, Number]:
        good = [_TYPES[kind](raw) for kind, code, raw in known if code == SUCCESS]
        # Leave out links that the GPU does not have. A link without data now makes the sum unknown:
        # it would be too low.
        silent = [code for _, code, _ in known if code not in (SUCCESS, *UNSUPPORTED)]
        if silent or not good:
            return (*silent, known[0][1])[0], None
        converted = [source.convert(number) for number in good]
        total = sum(number for number in converted if number is not None)
        return SUCCESS, None if None in converted else total


class _GpmMetrics:
    """Metrics of the time since the last sample."""

    def __init__(self, gpm: Gpm | None, rows: Sequence[GpuSeries]) -> None:
        self.rows = rows
        self.codes: Sequence[Code] = (NOT_SUPPORTED,) * len(rows)
        self._converts = [row.source.convert for row in rows]
        self._gpm = gpm
        if gpm is not None:
            numbers = [row.source.number for row in rows if isinstance(row.source, GpmMetric)]
            gpm.choose(numbers)

    def ask(self) -> Sequence[Number] | None:
        if self._gpm is None:
            return [None] * len(self.rows)
        code, results = self._gpm.read()
        if not results:
            check(code)
            self.codes = (code,) * len(self.rows)
            return None if code == SUCCESS else [None] * len(self.rows)
        self.codes = [result for result, _ in results]
        # GPUs that wake up have returned NaN and negative numbers: they convert to None.
        return [
            convert(number) if result == SUCCESS else None
            for convert, (result, number) in zip(self._converts, results, strict=True)
        ]


_Target = tuple[Series, Callable[[float, float], float] | None]
_OF_GPU, _OF_INSTANCE = series_on("gpu"), series_on("instance")

# A driver call that stalls for a minute must not look like an idle GPU, but after an hour without
# readings the GPU's use is unknown.
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
class _Turn:
    """A question and when to ask it.

    Attributes:
        question: the call.
        targets: the series of each answer, and what adds it to a total.
        period: seconds between two times; 0: at each reading.
        lead: seconds by which the second reading comes early.
        due: when to ask next, monotonic seconds.
    """

    question: Question
    targets: Sequence[_Target]
    period: float
    lead: float
    due: float = -math.inf

    def begin(self, now: float, slack: float) -> bool:
        """Return whether to ask now, or within the slack; then note the next time."""
        if now < self.due - slack:
            return False
        last = now - self.lead if self.due == -math.inf else self.due
        self.due = max(last + self.period, now)
        return True


@dataclass
class History:
    """Values and totals of one UUID; they outlive handles, readers and the driver.

    Attributes:
        interval: seconds between two readings.
        values: the latest numbers.
        chosen: the source of each series that has answered: another would make totals jump.
        totals: of integrated and unwrapped series.
    """

    interval: float
    values: dict[Series, float] = field(default_factory=dict)
    chosen: dict[Series, GpuSeries] = field(default_factory=dict)
    totals: dict[Series, _Total] = field(default_factory=dict)

    @cached_property
    def gap(self) -> float:
        """The longest time without a reading over which rates are integrated, in seconds."""
        return max(_GAP_SECONDS, _GAP_INTERVALS * self.interval)

    def pause(self) -> None:
        """Hide all values, and count nothing until the next reading."""
        self.values.clear()
        for total in self.totals.values():
            total.last = None

    def adder(self, row: GpuSeries) -> Callable[[float, float], float] | None:
        """Return a function that adds a number to the source's total, if it has one."""
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
        device: the GPU or instance.
        history: its values and totals.
        up: whether anything answered at the last reading.
        plan: the questions with their periods.
    """

    def __init__(self, nvml: Nvml, device: GpuDevice, history: History) -> None:
        """Probe every source once, and choose the best for each series.

        Raises:
            GpuLostError: the GPU does not answer.
            DriverLostError: nothing does.
        """
        self.device, self.history = device, history
        self.up = True
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
        # Rows with long periods are due at different readings on each GPU, so that no reading has
        # to read all of them.
        phase = zlib.crc32(device.uuid.encode())
        self.plan: list[_Turn] = []
        for period in sorted({row.figure.period for row in wanted}):
            # Rows with a period of a second, or shorter than the interval, are read each time.
            seconds = period if period > max(1, history.interval) else 0
            same = [row for row in wanted if row.figure.period == period]
            for index, question in enumerate(questions(nvml, device, same, self._gpm)):
                targets = [(row.key, history.adder(row)) for row in question.rows]
                lead = (index + phase) % seconds if seconds else 0
                self.plan.append(_Turn(question, targets, seconds, lead))

    def read(self, now: float) -> None:
        """Read all rows that are due.

        Args:
            now: seconds, monotonic.

        Raises:
            GpuLostError: the GPU no longer answers.
            DriverLostError: nothing does.
        """
        asked = answered = False
        values, slack = self.history.values, self.history.interval / 2
        for turn in self.plan:
            # The first reading reads all: no series may appear only minutes later.
            if not turn.begin(now, slack):
                continue
            asked = True
            numbers = turn.question.ask()
            answered = answered or SUCCESS in turn.question.codes
            if numbers is None:  # GPM's first sample succeeds without a value
                continue
            for (key, add), number in zip(turn.targets, numbers, strict=True):
                if number is None:  # an unknown value is absent, never stale
                    values.pop(key, None)
                else:
                    values[key] = number if add is None else add(number, now)
        if self._silent:
            self._note_choice()
        if asked:
            self.up = answered
        if not self.up:  # every answer is an error, as NO_PERMISSION or UNKNOWN
            self.history.pause()

    def _note_choice(self) -> None:
        """Record the sources that have answered for the first time."""
        history = self.history
        history.chosen.update((row.key, row) for row in self._silent if row.key in history.values)
        self._silent = [row for row in self._silent if row.key not in history.chosen]

    def close(self) -> None:
        """Release the driver's resources of this reader."""
        if self._gpm is not None:
            self._gpm.close()

    def _choose(self, rows: Sequence[GpuSeries], codes: dict[int, int]) -> list[GpuSeries]:
        """Return one source per series; one that fails now is tried again at its period."""
        best: dict[Series, GpuSeries] = {}
        for row in rows:
            code = codes[id(row)]
            before = best.get(row.key)
            better = before is None or codes[id(before)] != SUCCESS
            if (code == SUCCESS and better) or (code not in UNSUPPORTED and before is None):
                best[row.key] = row
        return list({**best, **self.history.chosen}.values())
