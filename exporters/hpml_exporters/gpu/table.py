"""What is read of a GPU: one row per series and source, with how often it is read.

Rows of one series are alternatives, best first; a reader takes the first that its GPU answers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal

from hpml_exporters.core.metric import MetricSpec
from hpml_exporters.gpu import metrics as gpu

Series = tuple[str, tuple[str, ...]]
"""Name of the metric, and values of its labels after `uuid`."""

_ALL_LINKS = (0xFFFFFFFF,)
_LINKS = tuple(range(18))
_LINK_UP = (1, 2)  # active, and asleep until there is traffic; 0: inactive, 3: traffic is disabled


def _percent(number: float) -> float:
    return min(number / 100, 1.0)


def _times(factor: float) -> Callable[[float], float]:
    return lambda number: number * factor


_THOUSANDTHS, _MEGA, _KIBI, _MEBI = _times(1e-3), _times(1e6), _times(1024.0), _times(1024.0**2)


@dataclass(frozen=True)
class Field:
    """A field of nvmlDeviceGetFieldValues.

    Attributes:
        number: NVML_FI_DEV_... of nvml.h.
        convert: from NVML's unit to ours.
        scopes: links whose converted values are added up.
    """

    number: int
    convert: Callable[[float], float | None] = float
    scopes: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class NvmlCall:
    """A call `f(handle, [selector,] &answer)` that gives unsigned integers.

    Attributes:
        names: of the function, newest first.
        convert: from NVML's unit to ours; None where the number means that it is unknown.
        selector: second argument (kind of clock, sensor).
        layout: type of the answer.
        pick: which of its integers is meant.
        version: of a structure whose first integer is its version and size; 0 for others.
        pointers: how many arguments point to an integer each.
    """

    names: tuple[str, ...]
    convert: Callable[[int], float | None] = float
    selector: int | None = None
    layout: type[ctypes.Array[ctypes.c_uint] | ctypes.Array[ctypes.c_ulonglong]] = ctypes.c_uint * 1
    pick: int = 0
    version: int = 0
    pointers: int = 1

    @property
    def question(self) -> object:
        """Key of the rows that one call answers."""
        return (self.names, self.selector)


@dataclass(frozen=True)
class GpmMetric:
    """A metric of nvmlGpmMetricsGet (Hopper and later): its number, and how it is converted."""

    number: int
    convert: Callable[[float], float] = _percent


@dataclass(frozen=True)
class GpuSeries:
    """A series of each GPU and its source.

    Attributes:
        spec: the metric.
        labels: values of its labels after `uuid`.
        source: of the value.
        period: seconds between two readings.
        total: "rate": the value is integrated over time; "wraps": a counter of 32 bits, whose
            differences are added up.
    """

    spec: MetricSpec
    source: Field | NvmlCall | GpmMetric
    period: float = 30.0
    labels: tuple[str, ...] = ()
    total: Literal["", "rate", "wraps"] = ""

    @cached_property
    def series(self) -> Series:
        """Key of the rows that are alternatives."""
        return (self.spec.name, self.labels)


_REASONS = {
    "hw_thermal": 0x40,
    "power_brake": 0x80,
    "hw_slowdown": 0x8,
    "sw_thermal": 0x20,
    "power": 0x4,
    "sync_boost": 0x10,
    "board_limit": 0x200,
    "reliability": 0x400,
}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons, the strongest first: the GPU sets HwSlowdown
together with each of the two before it."""


@cache
def throttle_reason(bits: int) -> str:
    """Return the strongest reason for reduced clocks, empty for none.

    >>> throttle_reason(0x40 | 0x8 | 0x4), throttle_reason(0x8), throttle_reason(0x1)
    ('hw_thermal', 'hw_slowdown', '')
    """
    return next((reason for reason, bit in _REASONS.items() if bits & bit), "")


def _throttled(reason: str) -> GpuSeries:
    names = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")

    def convert(bits: int) -> float:
        return float(throttle_reason(bits) == reason)

    source = NvmlCall(names, convert, layout=ctypes.c_ulonglong * 1)
    return GpuSeries(gpu.THROTTLED, source, 1, (reason,), "rate")


def _memory(spec: MetricSpec, second: int, first: int) -> Sequence[GpuSeries]:
    """Version 2 does not count what the driver keeps for itself as used."""
    # version 2: version, total, reserved, free, used; version 1: total, free, used
    newer = NvmlCall(
        ("nvmlDeviceGetMemoryInfo_v2",), layout=ctypes.c_ulonglong * 5, pick=second, version=2
    )
    older = NvmlCall(("nvmlDeviceGetMemoryInfo",), layout=ctypes.c_ulonglong * 3, pick=first)
    return (GpuSeries(spec, newer, 1), GpuSeries(spec, older, 1))


def _utilization(pick: int) -> NvmlCall:
    return NvmlCall(
        ("nvmlDeviceGetUtilizationRates",), _percent, layout=ctypes.c_uint * 2, pick=pick
    )


def _call(name: str, convert: Callable[[int], float | None] = float, **more: int) -> NvmlCall:
    return NvmlCall((name,), convert, **more)  # type: ignore[arg-type]


_MEMORY = (*_memory(gpu.MEMORY_USED, 4, 2), *_memory(gpu.MEMORY_TOTAL, 1, 0))
# NVML's utilization only says that some kernel was resident: a spinning NCCL kernel reads 100 %.
# GPM's SM activity shows how much of the GPU works.
_ACTIVITY = (
    GpuSeries(gpu.SM_ACTIVE, GpmMetric(2), 1),
    GpuSeries(gpu.SM_OCCUPANCY, GpmMetric(3), 1),
    GpuSeries(gpu.TENSOR_ACTIVE, GpmMetric(5), 1),
    GpuSeries(gpu.DRAM_ACTIVE, GpmMetric(10), 1),
)
_POWER = (Field(186, _THOUSANDTHS), _call("nvmlDeviceGetPowerUsage", _THOUSANDTHS))  # mW


INSTANCE: Sequence[GpuSeries] = (
    *_MEMORY,
    *_ACTIVITY,
    GpuSeries(gpu.UTILIZATION, GpmMetric(1), 1),
    GpuSeries(gpu.BUSY, GpmMetric(1), 1, total="rate"),
)
"""Of an instance of a split GPU."""

GPU: Sequence[GpuSeries] = (
    GpuSeries(gpu.UTILIZATION, _utilization(0), 1),
    GpuSeries(gpu.BUSY, _utilization(0), 1, total="rate"),
    GpuSeries(gpu.MEMORY_UTILIZATION, _utilization(1), 1),
    *_MEMORY,
    *_ACTIVITY,
    *(GpuSeries(gpu.POWER, source, 1) for source in _POWER),
    GpuSeries(gpu.POWER_LIMIT, _call("nvmlDeviceGetEnforcedPowerLimit", _THOUSANDTHS)),
    GpuSeries(gpu.ENERGY, Field(83, _THOUSANDTHS), 1),  # mJ
    GpuSeries(
        gpu.ENERGY,
        NvmlCall(
            ("nvmlDeviceGetTotalEnergyConsumption",), _THOUSANDTHS, layout=ctypes.c_ulonglong * 1
        ),
        1,
    ),
    *(GpuSeries(gpu.ENERGY, source, 1, total="rate") for source in _POWER),
    # nvmlTemperature_v1_t: version, sensor (0: the core), degrees
    GpuSeries(
        gpu.TEMPERATURE,
        NvmlCall(("nvmlDeviceGetTemperatureV",), layout=ctypes.c_uint * 3, pick=2, version=1),
        5,
    ),
    GpuSeries(gpu.TEMPERATURE, _call("nvmlDeviceGetTemperature", selector=0), 5),
    GpuSeries(gpu.MEMORY_TEMPERATURE, Field(82), 5),
    *(
        GpuSeries(
            gpu.TEMPERATURE_LIMIT,
            _call("nvmlDeviceGetTemperatureThreshold", selector=kind),
            300,
            (sensor,),
        )
        for kind, sensor in ((1, "core"), (2, "memory"))
    ),
    GpuSeries(gpu.CLOCK, _call("nvmlDeviceGetClockInfo", _MEGA, selector=1), 5, ("sm",)),
    GpuSeries(gpu.CLOCK, _call("nvmlDeviceGetClockInfo", _MEGA, selector=2), 5, ("memory",)),
    *(_throttled(reason) for reason in _REASONS),
    GpuSeries(gpu.ENCODER, _call("nvmlDeviceGetEncoderUtilization", _percent, pointers=2), 5),
    GpuSeries(gpu.DECODER, _call("nvmlDeviceGetDecoderUtilization", _percent, pointers=2), 5),
    GpuSeries(gpu.ECC_ERRORS, Field(3), labels=("corrected",)),
    GpuSeries(gpu.ECC_ERRORS, Field(4), labels=("uncorrected",)),
    GpuSeries(gpu.REMAPPED_ROWS, Field(142), labels=("correctable",)),
    GpuSeries(gpu.REMAPPED_ROWS, Field(143), labels=("uncorrectable",)),
    GpuSeries(gpu.REMAPPED_PENDING, Field(144)),
    GpuSeries(gpu.REMAPPED_FAILED, Field(145)),
    GpuSeries(gpu.RETIRED_PENDING, Field(31)),
    # Not nvmlDeviceGetPcieThroughput: its two calls block for some 40 ms per GPU.
    GpuSeries(gpu.PCIE, GpmMetric(20, _MEBI), 1, ("transmit",), "rate"),
    GpuSeries(gpu.PCIE, Field(197), 1, ("transmit",), "wraps"),
    GpuSeries(gpu.PCIE, GpmMetric(21, _MEBI), 1, ("receive",), "rate"),
    GpuSeries(gpu.PCIE, Field(198), 1, ("receive",), "wraps"),
    GpuSeries(gpu.PCIE_REPLAYS, Field(94)),
    GpuSeries(gpu.PCIE_WIDTH, _call("nvmlDeviceGetCurrPcieLinkWidth")),
    GpuSeries(gpu.PCIE_WIDTH_MAX, _call("nvmlDeviceGetMaxPcieLinkWidth"), 300),
    GpuSeries(gpu.NVLINK, Field(138, _KIBI, _ALL_LINKS), 1, ("transmit",)),
    GpuSeries(gpu.NVLINK, GpmMetric(61, _MEBI), 1, ("transmit",), "rate"),
    GpuSeries(gpu.NVLINK, Field(139, _KIBI, _ALL_LINKS), 1, ("receive",)),
    GpuSeries(gpu.NVLINK, GpmMetric(60, _MEBI), 1, ("receive",), "rate"),
    GpuSeries(gpu.NVLINK_LINKS, Field(91), 300),
    GpuSeries(gpu.NVLINK_ACTIVE, Field(165, lambda state: float(state in _LINK_UP), _LINKS)),
    *(
        GpuSeries(gpu.NVLINK_ERRORS, source, labels=(error,))
        for error, sources in {
            # of all links, then of each link on Hopper, then on Blackwell
            "crc": (Field(38), Field(163, scopes=_LINKS)),
            "replay": (Field(52), Field(161, scopes=_LINKS)),
            "recovery": (Field(59), Field(162, scopes=_LINKS), Field(215, scopes=_LINKS)),
            "recovery_failed": (Field(214, scopes=_LINKS),),
            "malformed": (Field(206, scopes=_LINKS),),
            "overrun": (Field(207, scopes=_LINKS),),
            "receive": (Field(208, scopes=_LINKS),),
            "receive_remote": (Field(209, scopes=_LINKS),),
            "receive_general": (Field(210, scopes=_LINKS),),
            "integrity": (Field(211, scopes=_LINKS),),
            "discarded": (Field(212, scopes=_LINKS),),
            "effective": (Field(219, scopes=_LINKS),),
            "symbol": (Field(221, scopes=_LINKS),),
        }.items()
        for source in sources
    ),
)
"""Of a GPU. The fields of clock event reasons are not used: they overlap, and their numbers changed
between releases of the driver (251-253, then 269-271)."""
