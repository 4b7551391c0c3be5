"""Asks a driver how it answers, as a program of its own: `gpusim compare` runs it twice.

Prints one JSON object: for each question an error code, or the kind of the value. Needs nothing but
nvidia-ml-py.
"""

from __future__ import annotations

import ctypes
import json
from typing import TYPE_CHECKING, Any

import pynvml as n  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["main"]

_FIELDS = (
    *(1, 2, 3, 4, 5, 6, 29, 30, 31, 38, 52, 59, *range(74, 84), 90, 91, 94, *range(138, 146)),
    *(161, 162, 163, 164, 165, *range(185, 193), 197, 198, 202, 204, 269, 270, 271),
)
_PLAIN = """
Name UUID Serial Index MinorNumber PciInfo VbiosVersion CudaComputeCapability Architecture Brand
NumGpuCores MemoryBusWidth UtilizationRates EncoderUtilization DecoderUtilization JpgUtilization
OfaUtilization MemoryInfo BAR1MemoryInfo PowerUsage FanSpeed TotalEnergyConsumption
PowerManagementLimit EnforcedPowerLimit PowerManagementLimitConstraints EccMode PersistenceMode
CurrentClocksEventReasons CurrentClocksThrottleReasons SupportedClocksEventReasons DisplayMode
PerformanceState ComputeMode DisplayActive DriverModel PcieReplayCounter CurrPcieLinkGeneration
MaxPcieLinkWidth MigMode MaxMigDeviceCount RemappedRows RetiredPagesPendingStatus NumaNodeId
GpuInstanceId Attributes AccountingMode SupportedEventTypes""".split()
_FUTURE = 1 << 62  # microseconds: no sample is newer


_WITH_ARGUMENTS = f"""
Temperature:0 Temperature:1 TemperatureV:0 TemperatureThreshold:1 ClockInfo:1 ClockInfo:9
TotalEccErrors:1:0 ViolationStatus:0 ViolationStatus:7 PcieThroughput:0 CpuAffinity:4
MemoryAffinity:1:0 NvLinkState:0 NvLinkState:17 Samples:1:{_FUTURE} ProcessUtilization:{_FUTURE}
MigDeviceHandleByIndex:0 DeviceHandleFromMigDeviceHandle""".split()


def _raw(name: str, *arguments: Any) -> int:
    code: int = n._nvmlGetFunctionPointer(name)(*arguments)  # noqa: SLF001 - no public way
    return code


def _getter(call: str) -> Callable[[Any], Any]:
    name, *arguments = call.split(":")
    return lambda handle: getattr(n, f"nvmlDeviceGet{name}")(handle, *map(int, arguments))


def _list_without_buffer(name: str, handle: Any) -> list[Any]:
    """How a list of processes is refused when there is no buffer: code, and whether any runs."""
    count = ctypes.c_uint(0)
    return [_raw(name, handle, ctypes.byref(count), None), count.value > 0]


def _gpm(handle: Any) -> list[Any]:
    one, two = n.nvmlGpmSampleAlloc(), n.nvmlGpmSampleAlloc()
    n.nvmlGpmSampleGet(handle, one)
    n.nvmlGpmSampleGet(handle, two)
    query = n.c_nvmlGpmMetricsGet_t()
    query.version, query.sample1, query.sample2 = n.NVML_GPM_METRICS_GET_VERSION, one, two
    ids = (1, 2, 3, 5, 10, 11, 20, 21, 60, 61)
    query.numMetrics = len(ids)
    for metric, number in zip(query.metrics, ids, strict=False):
        metric.metricId = number
    n.nvmlGpmMetricsGet(query)
    return [each.nvmlReturn for each in query.metrics[: len(ids)]]


def _wait(handle: Any) -> Any:
    events = n.nvmlEventSetCreate()
    try:
        n.nvmlDeviceRegisterEvents(handle, n.nvmlEventTypeXidCriticalError, events)
        return n.nvmlEventSetWait_v2(events, 10)
    finally:
        n.nvmlEventSetFree(events)


def _old_memory(handle: Any) -> int:
    memory = n.c_nvmlMemory_v2_t()
    memory.version = 0x01000028
    return _raw("nvmlDeviceGetMemoryInfo_v2", handle, ctypes.byref(memory))


_COMPUTE = "nvmlDeviceGetComputeRunningProcesses"
QUESTIONS: dict[str, Callable[[Any], Any]] = {
    **{f"nvmlDeviceGet{call}": _getter(call) for call in _PLAIN + _WITH_ARGUMENTS},
    "memory, second form": lambda h: n.nvmlDeviceGetMemoryInfo(h, n.nvmlMemory_v2),
    "memory, wrong version": _old_memory,
    "processes without a buffer": lambda h: _list_without_buffer(f"{_COMPUTE}_v3", h),
    "samples": lambda h: n.nvmlDeviceGetSamples(h, 1, 0)[0],
    "MIG handle": lambda h: n.nvmlDeviceIsMigDeviceHandle(h).value,
    "event within 10 ms": _wait,
    "GPM support": lambda h: n.nvmlGpmQueryDeviceSupport(h).isSupportedDevice,
    "GPM metrics": _gpm,
    "GPU 1000": lambda _: n.nvmlDeviceGetHandleByIndex(1000),
    "unknown UUID": lambda _: n.nvmlDeviceGetHandleByUUID("GPU-none"),
    "name in 4 bytes": lambda h: _raw("nvmlDeviceGetName", h, ctypes.create_string_buffer(4), 4),
}


def _kind(value: Any) -> Any:
    """Small whole numbers and lists of them as they are where they are codes, else the type."""
    if isinstance(value, list | tuple):
        return [_kind(each) for each in value[:12]]
    return type(value).__name__


def _answer(ask: Callable[[Any], Any], handle: Any, *, exact: bool) -> Any:
    try:
        value = ask(handle)
    except n.NVMLError as error:
        return f"error {error.value}"
    except AttributeError:
        return "not in this nvidia-ml-py"
    return value if exact else _kind(value)


_EXACT = {
    *("memory, wrong version", "processes without a buffer", "samples", "MIG handle"),
    *("GPM support", "GPM metrics", "name in 4 bytes"),
}


def main() -> None:
    """Asks the first GPU everything."""
    n.nvmlInit()
    handle = n.nvmlDeviceGetHandleByIndex(0)
    answers: dict[str, Any] = {
        name: _answer(ask, handle, exact=name in _EXACT) for name, ask in QUESTIONS.items()
    }
    for field in _FIELDS:
        (value,) = n.nvmlDeviceGetFieldValues(handle, [field])
        good = value.nvmlReturn == n.NVML_SUCCESS
        answers[f"field {field}"] = (
            f"type {value.valueType}" if good else f"error {value.nvmlReturn}"
        )
    print(json.dumps({"name": n.nvmlDeviceGetName(handle), "answers": answers}))


if __name__ == "__main__":
    main()
