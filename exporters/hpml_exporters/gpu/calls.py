"""Readings of one GPU: each asks the driver once and leaves numbers under its keys."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Protocol

from hpml_exporters.gpu.counting import Integral, Wrapping
from hpml_exporters.gpu.nvml import SUCCESS, Code, Nvml

__all__ = ["FIELDS", "REASONS", "Call", "Field", "Fields", "Reading", "Reasons", "Violations"]

Values = dict[str, float]
"""Latest numbers of a GPU by key; keys are those of `gpu_families.SERIES`."""

ALL_LINKS = 0xFFFFFFFF
_KIB = 1024.0


class Reading(Protocol):
    """One kind of question to the driver.

    Attributes:
        keys: what it leaves.
        period: seconds between two, as wanted.
        most: seconds between two, at most.
    """

    @property
    def keys(self) -> Sequence[str]: ...  # noqa: D102 - told above
    @property
    def period(self) -> float: ...  # noqa: D102
    @property
    def most(self) -> float: ...  # noqa: D102

    def read(self, values: Values, now: float) -> Code:
        """Ask, leave the numbers, and return NVML's code."""


class Call:
    """A call `f(handle, [selector,] &answer)` that gives one or more unsigned integers."""

    def __init__(
        self,
        function: Callable[..., Code],
        handle: int,
        keys: Sequence[str],
        scale: float,
        period: float,
        selector: int | None = None,
        *,
        wide: bool = False,
    ) -> None:
        """Prepare the arguments once; they are used again at each reading.

        Args:
            function: of the library.
            handle: the GPU's.
            keys: one per integer of the answer.
            scale: from NVML's unit to ours.
            period: seconds between two readings.
            selector: second argument of the call (kind of clock).
            wide: whether the answer has 64 bits.
        """
        self.keys = keys
        self.period = period
        self.most = max(period, 5.0 if period <= 1 else 30.0)
        self._function = function
        self._answer = ((ctypes.c_ulonglong if wide else ctypes.c_uint) * len(keys))()
        middle = () if selector is None else (ctypes.c_uint(selector),)
        self._arguments = (ctypes.c_void_p(handle), *middle, ctypes.byref(self._answer))
        self._scale = scale

    def read(self, values: Values, now: float) -> Code:  # noqa: ARG002 - needs no clock
        """Ask, leave the numbers, and return NVML's code."""
        code = self._function(*self._arguments)
        if code == SUCCESS:
            for key, number in zip(self.keys, self._answer, strict=True):
                values[key] = number * self._scale
        return code


class Memory:
    """Used and total memory.

    The second version of the call does not count what the driver keeps for itself as used.
    """

    keys = ("memory_used", "memory_total")
    period = 1.0
    most = 5.0

    def __init__(self, nvml: Nvml, handle: int) -> None:
        """Take the version that the driver has."""
        second = nvml.has("nvmlDeviceGetMemoryInfo_v2")
        self._function = nvml.call("nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetMemoryInfo")
        # v2: version, total, reserved, free, used; v1: total, free, used
        self._answer = (ctypes.c_ulonglong * (5 if second else 3))()
        if second:
            self._answer[0] = ctypes.sizeof(self._answer) | (2 << 24)
        self._arguments = (ctypes.c_void_p(handle), ctypes.byref(self._answer))
        self._total, self._used = (1, 4) if second else (0, 2)

    def read(self, values: Values, now: float) -> Code:  # noqa: ARG002 - needs no clock
        """Ask, leave the numbers, and return NVML's code."""
        code = self._function(*self._arguments)
        if code == SUCCESS:
            values["memory_used"] = float(self._answer[self._used])
            values["memory_total"] = float(self._answer[self._total])
        return code


class Temperature:
    """Temperature of the core, by the newer call where there is one."""

    keys = ("temperature",)
    period = 5.0
    most = 30.0

    def __init__(self, nvml: Nvml, handle: int) -> None:
        """Take the newer call that works on this GPU."""
        # nvmlTemperature_v1_t: version, sensor (0: the core), degrees
        self._answer = (ctypes.c_int * 3)(ctypes.sizeof(ctypes.c_int * 3) | (1 << 24), 0, 0)
        self._function = nvml.call("nvmlDeviceGetTemperatureV")
        self._arguments: tuple[object, ...] = (ctypes.c_void_p(handle), ctypes.byref(self._answer))
        if self._function(*self._arguments) != SUCCESS:
            self._function = nvml.call("nvmlDeviceGetTemperature")
            self._arguments = (
                ctypes.c_void_p(handle),
                ctypes.c_uint(0),
                ctypes.byref(self._answer, 2 * ctypes.sizeof(ctypes.c_int)),
            )

    def read(self, values: Values, now: float) -> Code:  # noqa: ARG002 - needs no clock
        """Ask, leave the numbers, and return NVML's code."""
        code = self._function(*self._arguments)
        if code == SUCCESS:
            values["temperature"] = float(self._answer[2])
        return code


class Utilization:
    """Share of time with a resident kernel, and its integral."""

    keys = ("utilization", "memory_utilization", "busy")
    period = 1.0
    most = 5.0

    def __init__(self, nvml: Nvml, handle: int, busy: Integral) -> None:
        """Prepare the call; the integral outlives it."""
        self._answer = (ctypes.c_uint * 2)()
        self._function = nvml.call("nvmlDeviceGetUtilizationRates")
        self._arguments = (ctypes.c_void_p(handle), ctypes.byref(self._answer))
        self._busy = busy

    def read(self, values: Values, now: float) -> Code:
        """Ask, leave the numbers, and return NVML's code."""
        code = self._function(*self._arguments)
        if code == SUCCESS:
            gpu, memory = self._answer
            values["utilization"] = gpu / 100
            values["memory_utilization"] = memory / 100
            values["busy"] = self._busy.add(gpu / 100, now)
        return code


class Field:
    """One field value: its number, and what becomes of it."""

    def __init__(
        self,
        number: int,
        key: str,
        scale: float = 1.0,
        period: float = 30.0,
        scope: int = 0,
        most: float = 30.0,
        *,
        wraps: bool = False,
    ) -> None:
        """Describe a field.

        Args:
            number: NVML_FI_DEV_…
            key: under which the number is left.
            scale: from NVML's unit to ours.
            period: seconds between two readings.
            scope: which link; ALL_LINKS for the sum.
            most: seconds between two readings, at most.
            wraps: whether the counter may begin again, so that differences are added up.
        """
        self.number, self.key, self.scale, self.period = number, key, scale, period
        self.scope, self.most, self.wraps = scope, most, wraps


FIELDS = (
    Field(186, "power", 1e-3, 1, most=5),  # POWER_INSTANT, mW
    Field(83, "energy", 1e-3, 1, most=5),  # TOTAL_ENERGY_CONSUMPTION, mJ
    # PERF_POLICY_…, ns. The newer CLOCKS_EVENT_REASON_… fields changed their numbers between
    # releases of the driver (251-253, then 269-271), so they cannot be asked for by number.
    Field(74, "throttled_power", 1e-9, 1),
    Field(75, "throttled_thermal", 1e-9, 1),
    Field(76, "throttled_sync_boost", 1e-9, 1),
    Field(77, "throttled_board_limit", 1e-9, 1),
    Field(79, "throttled_reliability", 1e-9, 1),
    Field(138, "nvlink_transmit", _KIB, 1, ALL_LINKS),
    Field(139, "nvlink_receive", _KIB, 1, ALL_LINKS),
    Field(197, "pcie_transmit", 1.0, 1, most=5, wraps=True),
    Field(198, "pcie_receive", 1.0, 1, most=5, wraps=True),
    Field(82, "memory_temperature", period=5),
    Field(3, "ecc_corrected_volatile"),
    Field(4, "ecc_uncorrected_volatile"),
    Field(5, "ecc_corrected_aggregate"),
    Field(6, "ecc_uncorrected_aggregate"),
    Field(94, "pcie_replays"),
    Field(142, "remapped_correctable"),
    Field(143, "remapped_uncorrectable"),
    Field(144, "remapped_pending"),
    Field(145, "remapped_failed"),
)
"""All fields; numbers from nvml.h, units from its comments and from nvmlViolationTime_t."""

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
_NARROW = {1: 32, 5: 32, 6: 16}


class Fields:
    """Several field values with one call.

    Attributes:
        fields: what is asked for.
        codes: NVML's code for each, of the last reading.
        wide: whether all answers of the last reading had 64 bits.
    """

    def __init__(
        self, nvml: Nvml, handle: int, fields: Sequence[Field], totals: dict[str, Wrapping]
    ) -> None:
        """Lay the request out in memory once.

        Args:
            nvml: the library.
            handle: the GPU's.
            fields: what to ask for.
            totals: sums of counters that wrap, by key; they outlive this object.
        """
        self.keys = tuple(field.key for field in fields)
        self.period = min(field.period for field in fields)
        self.most = min(field.most for field in fields)
        self.fields = tuple(fields)
        self.codes: Sequence[Code] = ()
        self.wide = True
        self._totals = totals
        self._function = nvml.call("nvmlDeviceGetFieldValues")
        # One entry more than asked for: drivers write past the end when asked for NVLink counters
        # (nvitop's libnvml guards against it in the same way).
        self._buffer = ctypes.create_string_buffer(_SIZE * (len(fields) + 1))
        for index, field in enumerate(fields):
            struct.pack_into("<II", self._buffer, _SIZE * index, field.number, field.scope)
        self._layout = struct.Struct("<" + "24xIIQ" * len(fields))
        self._arguments = (ctypes.c_void_p(handle), ctypes.c_int(len(fields)), self._buffer)

    def read(self, values: Values, now: float) -> Code:  # noqa: ARG002 - needs no clock
        """Ask, leave the numbers, and return NVML's code."""
        code = self._function(*self._arguments)
        if code != SUCCESS:
            return code
        flat = self._layout.unpack_from(self._buffer)
        self.codes = flat[1::3]
        self.wide = all(_NARROW.get(kind, 64) == 64 for kind in flat[::3])  # noqa: PLR2004
        for field, kind, result, raw in zip(
            self.fields, flat[::3], self.codes, flat[2::3], strict=True
        ):
            if result != SUCCESS or kind >= len(_TYPES):
                values.pop(field.key, None)
                continue
            number = _TYPES[kind](raw)
            if field.wraps:
                total = self._totals.setdefault(field.key, Wrapping())
                number = total.add(int(number), _NARROW.get(kind, 64))
            values[field.key] = number * field.scale
        return code


class Violations:
    """Throttled time of drivers that have no field values for it."""

    keys = (
        "throttled_power",
        "throttled_thermal",
        "throttled_sync_boost",
        "throttled_board_limit",
        "throttled_reliability",
    )
    period = 5.0
    most = 30.0
    _POLICIES = (0, 1, 2, 3, 5)

    def __init__(self, nvml: Nvml, handle: int) -> None:
        """Prepare the calls."""
        self._function = nvml.call("nvmlDeviceGetViolationStatus")
        self._answer = (ctypes.c_ulonglong * 2)()  # when, ns of violation
        self._handle = ctypes.c_void_p(handle)
        self._reference = ctypes.byref(self._answer)
        self._ask = [
            (key, ctypes.c_uint(policy))
            for key, policy in zip(self.keys, self._POLICIES, strict=True)
        ]

    def read(self, values: Values, now: float) -> Code:  # noqa: ARG002 - needs no clock
        """Ask for all policies and return the best of NVML's codes."""
        codes = []
        for key, policy in self._ask:
            codes.append(self._function(self._handle, policy, self._reference))
            if codes[-1] == SUCCESS:
                values[key] = self._answer[1] * 1e-9
            else:
                values.pop(key, None)
        return min(codes)


REASONS = {
    "throttled_power": 0x4,
    "throttled_thermal": 0x60,
    "throttled_sync_boost": 0x10,
    "throttled_hw_thermal": 0x40,
    "throttled_power_brake": 0x80,
}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons: SwPowerCap; SwThermal and HwThermal; SyncBoost;
HwThermal; HwPowerBrake."""


class Reasons:
    """Throttled time out of what holds the clocks down at this moment."""

    period = 1.0
    most = 30.0

    def __init__(
        self, nvml: Nvml, handle: int, keys: Sequence[str], totals: dict[str, Integral]
    ) -> None:
        """Prepare the call.

        Args:
            nvml: the library.
            handle: the GPU's.
            keys: those that no counter of the driver gives.
            totals: integrals by key; they outlive this object.
        """
        self.keys = tuple(keys)
        self._function = nvml.call(
            "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"
        )
        self._answer = ctypes.c_ulonglong()
        self._arguments = (ctypes.c_void_p(handle), ctypes.byref(self._answer))
        self._totals = [(key, REASONS[key], totals[key]) for key in self.keys]

    def read(self, values: Values, now: float) -> Code:
        """Ask, leave the numbers, and return NVML's code."""
        code = self._function(*self._arguments)
        if code == SUCCESS:
            bits = self._answer.value
            for key, mask, total in self._totals:
                values[key] = total.add(1.0 if bits & mask else 0.0, now)
        return code
