"""Questions to the driver: each is one call that answers several rows of the table.

Arguments are made once; nothing is copied or looked up at a reading.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from hpml_exporters.gpu.devices import GpuDevice
from hpml_exporters.gpu.gpm import Gpm
from hpml_exporters.gpu.nvml import NO_DATA, NOT_SUPPORTED, SUCCESS, UNSUPPORTED, Code, Nvml, check
from hpml_exporters.gpu.table import Field, GpmMetric, GpuSeries, NvmlCall

Answer = tuple[Code, float | None]
"""NVML's code, and the value in our unit; None if it is unknown this time."""

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
    """

    rows: Sequence[GpuSeries]

    def ask(self) -> Sequence[Answer]:
        """Return an answer for each row.

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
        rows: of the table.
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
        self._sources = [row.source for row in rows if isinstance(row.source, NvmlCall)]
        first = self._sources[0]
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

    def ask(self) -> Sequence[Answer]:
        code = self._function(*self._arguments)
        if not check(code):
            return [(code, None)] * len(self.rows)
        answer = self._answer
        return [(code, source.convert(answer[source.pick])) for source in self._sources]


class _FieldValues:
    """Several fields with one call; each has its own code."""

    def __init__(self, nvml: Nvml, handle: int, rows: Sequence[GpuSeries]) -> None:
        self.rows = rows
        self._sources = [row.source for row in rows if isinstance(row.source, Field)]
        pairs = [(each.number, scope) for each in self._sources for scope in each.scopes]
        # One entry more than asked for: drivers write past the end when asked for NVLink counters
        # (nvitop's libnvml guards against it in the same way).
        self._buffer = ctypes.create_string_buffer(_SIZE * (len(pairs) + 1))
        for index, pair in enumerate(pairs):
            struct.pack_into("<II", self._buffer, _SIZE * index, *pair)
        self._layout = struct.Struct("<" + "24xIIQ" * len(pairs))
        self._function = nvml.call("nvmlDeviceGetFieldValues")
        self._arguments = (ctypes.c_void_p(handle), ctypes.c_int(len(pairs)), self._buffer)

    def ask(self) -> Sequence[Answer]:
        code = self._function(*self._arguments)
        if not check(code):
            return [(code, None)] * len(self.rows)
        flat = self._layout.unpack_from(self._buffer)
        parts = zip(flat[::3], flat[1::3], flat[2::3], strict=True)  # type, code, value
        answers: list[Answer] = []
        for source in self._sources:
            known = [next(parts) for _ in source.scopes]
            good = [_TYPES[kind](raw) for kind, code, raw in known if code == SUCCESS]
            # A link that the GPU does not have is left out. One that has no data now makes the sum
            # unknown: without it the sum would be too low.
            silent = [code for _, code, _ in known if code not in (SUCCESS, *UNSUPPORTED)]
            if silent or not good:
                answers.append(((*silent, known[0][1])[0], None))
            else:
                numbers = [source.convert(number) for number in good]
                total = sum(number for number in numbers if number is not None)
                answers.append((SUCCESS, None if None in numbers else total))
        return answers


class _GpmMetrics:
    """Metrics of the time since the last sample."""

    def __init__(self, gpm: Gpm | None, rows: Sequence[GpuSeries]) -> None:
        self.rows = rows
        self._sources = [row.source for row in rows if isinstance(row.source, GpmMetric)]
        self._gpm = gpm
        if gpm is not None:
            gpm.choose([source.number for source in self._sources])

    def ask(self) -> Sequence[Answer]:
        if self._gpm is None:
            return [(NOT_SUPPORTED, None)] * len(self.rows)
        code, numbers = self._gpm.read()
        check(code)
        if not numbers:
            return [(code, None)] * len(self.rows)
        answers: list[Answer] = []
        for source, (result, number) in zip(self._sources, numbers, strict=True):
            if result != SUCCESS:
                answers.append((result, None))
            elif number >= 0:
                answers.append((SUCCESS, source.convert(number)))
            else:  # NaN and negative numbers have been seen when a GPU wakes up
                answers.append((NO_DATA, None))
        return answers
