"""GPU performance monitoring (GPM): what multiprocessors and memory did between two readings.

Hopper and later, without root and without DCGM. A sample is the GPU's counters at one moment; NVML
computes metrics from two of them, so each value is the exact mean of the time between.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

from hpml_exporters.gpu.devices import GpuDevice
from hpml_exporters.gpu.nvml import SUCCESS, Code, Nvml, check

_HEADER = struct.Struct("<IIQQ")  # version, number of metrics, both samples
_METRIC_SIZE = 40  # sizeof(nvmlGpmMetric_t): id, return code, double, three strings
_METRICS_MAX = 1024  # the driver's struct has room for NVML_GPM_METRIC_MAX (477 in 2026)


class Gpm:
    """The metrics of one GPU or MIG instance."""

    def __init__(self, nvml: Nvml, device: GpuDevice) -> None:
        """Prepare; `open` allocates."""
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
        """Read these metrics from now on (NVML_GPM_METRIC_...)."""
        self._count, self._taken = len(numbers), False
        for index, number in enumerate(numbers):
            struct.pack_into("<I", self._buffer, _HEADER.size + _METRIC_SIZE * index, number)
        self._layout = struct.Struct("<" + "4xId24x" * len(numbers))

    def open(self) -> bool:
        """Allocate two samples; returns whether the GPU has GPM.

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
        """Take a sample; returns NVML's code, and code and value of each chosen metric.

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
