"""A child process that calls NVML for tests: one expression a line in, its value as JSON out.

LD_LIBRARY_PATH must contain the library before a process starts, hence a separate process.
A call that NVML refuses gives {"error": CODE}.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import sys
import threading
import time
from typing import Any

import pynvml  # type: ignore[import-untyped]
from pynvml import (
    NVMLError,
    _nvmlGetFunctionPointer,
    nvmlDeviceGetHandleByIndex,
    nvmlDeviceGetMigDeviceHandleByIndex,
)

NO_LINK = 0xFFFFFFFF


def h(index: int) -> Any:
    """The handle of a GPU."""
    return nvmlDeviceGetHandleByIndex(index)


def m(index: int, mig: int) -> Any:
    """The handle of a MIG device."""
    return nvmlDeviceGetMigDeviceHandleByIndex(h(index), mig)


def raw(name: str, *arguments: Any) -> int:
    """What a function returns, without a binding's help."""
    code: int = _nvmlGetFunctionPointer(name)(*arguments)
    return code


def fields(handle: Any, *ids: Any) -> list[Any]:
    """Field values, None for those that are refused."""
    found = []
    for each in pynvml.nvmlDeviceGetFieldValues(handle, list(ids)):
        kinds = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal"}
        refused = each.nvmlReturn != 0
        found.append(None if refused else getattr(each.value, kinds[each.valueType]))
    return found


def gpm(handle: Any, seconds: float, *ids: int, gi: int | None = None) -> list[Any]:
    """GPM metrics over a time: the values (or codes) and when the samples were taken."""
    samples = [pynvml.nvmlGpmSampleAlloc() for _ in range(2)]
    times = []
    for number, sample in enumerate(samples):
        if number:
            time.sleep(seconds)
        begun = time.time()
        if gi is None:
            pynvml.nvmlGpmSampleGet(handle, sample)
        else:
            pynvml.nvmlGpmMigSampleGet(handle, gi, sample)
        times.append([begun, time.time()])
    query = pynvml.c_nvmlGpmMetricsGet_t()
    query.version, query.numMetrics = pynvml.NVML_GPM_METRICS_GET_VERSION, len(ids)
    query.sample1, query.sample2 = samples
    for metric, number in zip(query.metrics, ids, strict=False):
        metric.metricId = number
    pynvml.nvmlGpmMetricsGet(query)
    values = [
        each.value if each.nvmlReturn == 0 else {"error": each.nvmlReturn}
        for each in query.metrics[: len(ids)]
    ]
    for sample in samples:
        pynvml.nvmlGpmSampleFree(sample)
    return [values, times]


def crowd(threads: int, seconds: float, least: int = 100) -> dict[str, int]:
    """Many threads ask at once, for a time and a number of calls: how many were right, or not."""
    counts = {"right": 0, "wrong": 0}
    lock = threading.Lock()
    end = time.time() + seconds

    def ask() -> None:
        while time.time() < end or sum(counts.values()) < least:
            good = False
            with contextlib.suppress(pynvml.NVMLError):
                handle = h(0)
                memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
                # the list may grow between its two calls, the one for the size and the real one
                with contextlib.suppress(pynvml.NVMLError_InsufficientSize):
                    pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
                # every state that is written has the same used and free memory
                good = memory.used + memory.free == memory.total and memory.used == 3 << 30
            with lock:
                counts["right" if good else "wrong"] += 1

    workers = [threading.Thread(target=ask) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return counts


def timed(call: Any) -> list[Any]:
    """The value of a call without arguments, and the times before and after it."""
    before = time.time()
    value = call()
    return [value, before, time.time()]


def event_set(*indices: int) -> Any:
    """An event set for the XID errors of these GPUs, kept until the end."""
    made = pynvml.nvmlEventSetCreate()
    for index in indices:
        pynvml.nvmlDeviceRegisterEvents(h(index), pynvml.nvmlEventTypeXidCriticalError, made)
    kept["events"] = made


def wait(milliseconds: int) -> list[int]:
    """The next event: index of the GPU and number of the error."""
    event = pynvml.nvmlEventSetWait_v2(kept["events"], milliseconds)
    handle = ctypes.c_void_p(event.device) if isinstance(event.device, int) else event.device
    return [pynvml.nvmlDeviceGetIndex(handle), event.eventData]


kept: dict[str, Any] = {}


def plain(value: Any) -> Any:
    """The value in JSON's types: structures become mappings, bytes text."""
    if isinstance(value, ctypes.Structure | ctypes.Union):
        return {name: plain(getattr(value, name)) for name, *_ in value._fields_}
    if isinstance(value, ctypes.Array | list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, ctypes.c_uint):
        return value.value
    if isinstance(value, dict):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, int | float | str | bool) or value is None:
        return value
    if hasattr(value, "__dict__"):  # nvidia-ml-py's copies of structures
        return plain(vars(value))
    return str(value)


def main() -> None:
    """Answers until standard input ends."""
    names = vars(pynvml) | globals()
    for line in sys.stdin:
        try:
            answer = plain(eval(line, names))  # noqa: S307 - the test's own words
        except NVMLError as error:
            answer = {"error": error.value}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
