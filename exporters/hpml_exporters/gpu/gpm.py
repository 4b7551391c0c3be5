"""GPU performance monitoring (GPM): what multiprocessors and memory did between two readings.

Hopper and later, without root and without DCGM. A sample is the GPU's counters at one moment; NVML
computes metrics from two of them, so each value is the exact mean of the time between.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

from hpml_exporters.gpu.calls import Values
from hpml_exporters.gpu.counting import Integral
from hpml_exporters.gpu.nvml import FUNCTION_NOT_FOUND, SUCCESS, UNSUPPORTED, Code, Nvml

__all__ = ["Gpm"]

NOT_SUPPORTED = 3
_MIB = 1024.0**2
_RATIOS = {
    "sm_active": 2,
    "sm_occupancy": 3,
    "tensor_active": 5,
    "dram_active": 10,
}
"""NVML_GPM_METRIC_SM_UTIL, _SM_OCCUPANCY, _ANY_TENSOR_UTIL, _DRAM_BW_UTIL; percent."""
_GRAPHICS = 1
"""NVML_GPM_METRIC_GRAPHICS_UTIL, percent."""
_RATES = {"pcie_transmit": 20, "pcie_receive": 21, "nvlink_receive": 60, "nvlink_transmit": 61}
"""NVML_GPM_METRIC_PCIE_TX_PER_SEC, _RX_, _NVLINK_TOTAL_RX_PER_SEC, _TX_; MiB/s."""

_HEADER = struct.Struct("<IIQQ")  # version, number of metrics, both samples
_METRIC_SIZE = 40  # sizeof(nvmlGpmMetric_t): id, return code, double, three strings
_METRICS_MAX = 1024  # the driver's struct has room for NVML_GPM_METRIC_MAX (477 in 2026)


class Gpm:
    """The metrics of one GPU or MIG instance.

    Attributes:
        refused: rates that were asked for, and that this GPU does not have.
    """

    period = 1.0
    most = 5.0

    def __init__(
        self,
        nvml: Nvml,
        handle: int,
        instance: int,
        totals: dict[str, Integral],
        rates: Sequence[str],
        *,
        busy: bool,
    ) -> None:
        """Allocate both samples.

        Args:
            nvml: the library.
            handle: of the whole GPU, for an instance its parent's.
            instance: number of the GPU instance, -1 for a whole GPU.
            totals: integrals by key; they outlive this object.
            rates: which of the rates are wanted as totals.
            busy: whether utilization is read here too: NVML has no other for instances.
        """
        self.refused: set[str] = set()
        self._nvml = nvml
        self._handle = ctypes.c_void_p(handle)
        self._instance = ctypes.c_uint(instance)
        self._whole = instance < 0
        self._sample = nvml.call("nvmlGpmSampleGet" if self._whole else "nvmlGpmMigSampleGet")
        self._metrics = nvml.call("nvmlGpmMetricsGet")
        self._samples: list[ctypes.c_void_p] = []
        self._taken = 0.0  # when the older sample was; 0: there is none
        self._totals = totals
        wanted = dict(_RATIOS)
        if busy:
            wanted["utilization"] = _GRAPHICS
        wanted.update({key: number for key, number in _RATES.items() if key in rates})
        self._wanted = list(wanted)
        self.keys = (*wanted, "busy") if busy else tuple(wanted)
        self._buffer = ctypes.create_string_buffer(_HEADER.size + _METRIC_SIZE * _METRICS_MAX)
        for index, number in enumerate(wanted.values()):
            struct.pack_into("<I", self._buffer, _HEADER.size + _METRIC_SIZE * index, number)
        self._layout = struct.Struct("<" + "4xId24x" * len(wanted))

    def open(self) -> Code:
        """Ask whether the GPU can do it, and make room for two samples."""
        support = (ctypes.c_uint * 2)(1, 0)  # version, whether it is supported
        query = self._nvml.call("nvmlGpmQueryDeviceSupport")
        code = query(self._handle, ctypes.byref(support))
        if code != SUCCESS:
            return code
        if not support[1] or not self._nvml.has("nvmlGpmMetricsGet"):
            return NOT_SUPPORTED
        allocate = self._nvml.call("nvmlGpmSampleAlloc")
        for _ in range(2):
            sample = ctypes.c_void_p()
            code = allocate(ctypes.byref(sample))
            if code != SUCCESS:
                self.close()
                return code
            self._samples.append(sample)
        return SUCCESS

    def close(self) -> None:
        """Give the samples back."""
        free = self._nvml.call("nvmlGpmSampleFree")
        while self._samples:
            free(self._samples.pop())

    def read(self, values: Values, now: float) -> Code:
        """Take a sample, leave what lies between it and the last, and return NVML's code."""
        if len(self._samples) != 2:  # noqa: PLR2004 - closed
            return FUNCTION_NOT_FOUND
        older, newer = self._samples
        code = (
            self._sample(self._handle, newer)
            if self._whole
            else self._sample(self._handle, self._instance, newer)
        )
        if code != SUCCESS:
            self._taken = 0.0
            return code
        self._samples.reverse()  # what is newer now is the older one of the next reading
        taken, self._taken = self._taken, now
        if not taken or now <= taken:
            return SUCCESS
        _HEADER.pack_into(self._buffer, 0, 1, len(self._wanted), older.value or 0, newer.value or 0)
        code = self._metrics(self._buffer)
        if code == SUCCESS:
            self._leave(values, now - taken)
        return code

    def _leave(self, values: Values, seconds: float) -> None:
        flat = self._layout.unpack_from(self._buffer, _HEADER.size)
        for key, code, number in zip(self._wanted, flat[::2], flat[1::2], strict=True):
            # NaN and negative numbers have been seen when a GPU wakes up
            if code != SUCCESS or not number >= 0:
                if code in UNSUPPORTED or key not in _RATES:
                    values.pop(key, None)
                if code in UNSUPPORTED and key in _RATES:
                    self.refused.add(key)
            elif key in _RATES:
                values[key] = self._totals[key].grow(number * _MIB * seconds)
            else:
                values[key] = min(number / 100, 1.0)
                if key == "utilization":
                    values["busy"] = self._totals["busy"].grow(values[key] * seconds)
