"""Which processes have a GPU open, and how much of its memory they hold."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

from hpml_exporters.gpu.devices import Place
from hpml_exporters.gpu.nvml import INSUFFICIENT_SIZE, UNSUPPORTED, Nvml, check, code_of

__all__ = ["ProcessLists"]

_KINDS = ("Compute", "MPSCompute", "Graphics")
_TRIES = 4


class ProcessLists:
    """The process lists of all GPUs.

    nvitop knows which of the five layouts of nvmlProcessInfo_t the driver has. Its objects of
    processes are not used: they read /proc for names and times that are shown nowhere.

    Attributes:
        calls: how often the driver was asked for a list.
    """

    def __init__(self, nvml: Nvml) -> None:
        """Begin with all kinds of lists; what a GPU has not is asked for once."""
        self.calls = 0
        self._nvml: Any = nvml.nvitop.libnvml
        self._error = nvml.error
        self._without: set[tuple[str, str]] = set()

    def of(self, place: Place) -> Mapping[int, int | None]:
        """Return bytes of GPU memory by process id; None where the driver does not say.

        A process that computes and draws, or is a client of MPS, stands in several lists with the
        same memory.

        Raises:
            GpuLostError: the GPU does not answer.
            DriverLostError: nothing does.
        """
        found: dict[int, int | None] = {}
        handle = ctypes.c_void_p(place.handle)
        for kind in _KINDS:
            if (place.uuid, kind) in self._without:
                continue
            for one in self._list(place.uuid, kind, handle):
                memory = one.usedGpuMemory if isinstance(one.usedGpuMemory, int) else None
                before = found.get(one.pid)
                found[one.pid] = memory if before is None else max(before, memory or 0)
        return found

    def _list(self, uuid: str, kind: str, handle: ctypes.c_void_p) -> list[Any]:
        ask = getattr(self._nvml, f"nvmlDeviceGet{kind}RunningProcesses")
        for _ in range(_TRIES):
            self.calls += 1
            try:
                answer: list[Any] = ask(handle)
            except self._error as error:
                code = code_of(error)
                check(code)
                if code == INSUFFICIENT_SIZE:  # more came between the size and the list
                    continue
                if code in UNSUPPORTED:
                    self._without.add((uuid, kind))
                return []
            return answer
        return []
