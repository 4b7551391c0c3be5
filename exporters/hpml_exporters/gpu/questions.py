"""Questions to the driver: each is one call that answers several rows.

Arguments are made once; nothing is copied or looked up at a reading.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from hpml_exporters.gpu.devices import GpuDevice
from hpml_exporters.gpu.figures import Field, GpmMetric, GpuSeries, NvmlCall
from hpml_exporters.gpu.gpm import Gpm
from hpml_exporters.gpu.nvml import NOT_SUPPORTED, SUCCESS, UNSUPPORTED, Code, Nvml, check

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
    """One call of the driver.

    Attributes:
        rows: what it answers.
        codes: NVML's code for each row, of the last call.
    """

    rows: Sequence[GpuSeries]
    codes: Sequence[Code]

    def ask(self) -> Sequence[Number] | None:
        """Return a number for each row; None if a later call will have the first ones.

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
        gpm: of this device; None: it has none.
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
        # A link that the GPU does not have is left out. One that has no data now makes the sum
        # unknown: without it the sum would be too low.
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
        # NaN and negative numbers have been seen when a GPU wakes up: they convert to None.
        return [
            convert(number) if result == SUCCESS else None
            for convert, (result, number) in zip(self._converts, results, strict=True)
        ]
