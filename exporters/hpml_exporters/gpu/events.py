"""XID errors: the driver's reports of failing GPUs."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import NamedTuple

from prometheus_client.core import Metric

from hpml_exporters.core import procfs
from hpml_exporters.gpu.devices import SUCCESS, GpuDevice, Nvml
from hpml_exporters.gpu.figures import XID_ERRORS, XID_LAST
from hpml_exporters.options import Roots
from hpml_orchestrator.errors import HpmlError
from hpml_orchestrator.records.files import read_json, write_json

_XID = 8  # nvmlEventTypeXidCriticalError
_AT_ONCE = 64
_KINDS = 24
_FILE = "xids.json"


class _Event(ctypes.Structure):
    """nvmlEventData_t."""

    _fields_ = (
        ("device", ctypes.c_void_p),
        ("type", ctypes.c_ulonglong),
        ("data", ctypes.c_ulonglong),
        ("instance", ctypes.c_uint),
        ("compute", ctypes.c_uint),
    )


class _Xid(NamedTuple):
    """How often an error was reported, when last, and by which driver."""

    times: int
    when: float
    driver: str


class XidLog:
    """The errors reported so far; they outlive the driver, and the exporter until it is reloaded.

    A driver does not repeat them, and a GPU with an error may need a reset.
    """

    def __init__(self, roots: Roots | None = None) -> None:
        """Start with the errors that an earlier exporter recorded since the driver was loaded.

        Args:
            roots: where a node's exporter keeps them, in `run`; None: nowhere.
        """
        self._seen: dict[tuple[str, str], _Xid] = {}
        self._roots = roots
        self._unsaved = False
        if roots is None:
            return
        try:
            data = read_json(os.path.join(roots.run, _FILE))
            if data["driver"] and data["driver"] == _driver(roots):
                for uuid, xid, count, when in data["xids"]:
                    self._seen[str(uuid), str(xid)] = _Xid(int(count), float(when), data["driver"])
        except (OSError, HpmlError, ValueError, LookupError, TypeError):
            self._seen.clear()  # missing or damaged

    def save(self) -> None:
        """Store new errors for the next exporter; without write permission they are lost."""
        driver = _driver(self._roots) if self._unsaved and self._roots else ""
        self._unsaved = False
        if driver and self._roots:
            found = self._seen.items()
            xids = [[*key, one.times, one.when] for key, one in found if one.driver == driver]
            with suppress(OSError, HpmlError):
                path = os.path.join(self._roots.run, _FILE)
                write_json(path, {"driver": driver, "xids": xids})

    def add(self, uuid: str, xid: int, when: float) -> None:
        """Count an error.

        Args:
            uuid: the GPU.
            xid: NVIDIA's number of the error.
            when: Unix time, seconds.
        """
        name = str(xid)
        # A failing GPU may report ever new numbers: limit the number of series.
        if (uuid, name) not in self._seen and sum(one == uuid for one, _ in self._seen) >= _KINDS:
            name = "other"
        before = self._seen.get((uuid, name))
        driver = _driver(self._roots) if self._roots else ""
        self._seen[uuid, name] = _Xid(before.times + 1 if before else 1, when, driver)
        self._unsaved = True

    def families(self, shown: Collection[str]) -> list[Metric]:
        """Return all errors, including those of lost GPUs, which explain the loss.

        Args:
            shown: UUIDs of GPUs that may be shown.
        """
        seen = [(key, value) for key, value in self._seen.items() if key[0] in shown]
        if not seen:
            return []
        return [
            XID_ERRORS.family((key, one.times) for key, one in seen),
            XID_LAST.family((key, one.when) for key, one in seen),
        ]


class XidEvents:
    """An event set of the driver, polled without waiting.

    A thread that waits in a stuck driver cannot be ended; polling once per reading costs some
    microseconds for all GPUs together.
    """

    def __init__(self, nvml: Nvml, gpus: Sequence[GpuDevice]) -> None:
        """Register for the XID errors of these GPUs if they support it."""
        self._free = nvml.call("nvmlEventSetFree")
        self._wait = nvml.call("nvmlEventSetWait_v2", "nvmlEventSetWait")
        register = nvml.call("nvmlDeviceRegisterEvents")
        self._uuids = {one.handle: one.uuid for one in gpus}
        self._event = _Event()
        self._set = ctypes.c_void_p()
        self._open = nvml.call("nvmlEventSetCreate")(ctypes.byref(self._set)) == SUCCESS
        if self._open:
            codes = [
                register(ctypes.c_void_p(one.handle), ctypes.c_ulonglong(_XID), self._set)
                for one in gpus
            ]
            if SUCCESS not in codes:
                self.close()
        self._arguments = (self._set, ctypes.byref(self._event), ctypes.c_uint(0))

    def poll(self, log: XidLog, when: float) -> None:
        """Move reported errors to the log.

        Args:
            log: of this exporter.
            when: Unix time, seconds.
        """
        if not self._open:
            return
        # Bounded: a GPU that reports endlessly must not delay the readings of the others.
        for _ in range(_AT_ONCE):
            # Any error ends the loop, GPU_IS_LOST too: the readers find out which GPU it is.
            if self._wait(*self._arguments) != SUCCESS:
                break
            uuid = self._uuids.get(self._event.device or 0)
            if uuid is not None and self._event.type & _XID:
                log.add(uuid, self._event.data, when)
        log.save()

    def close(self) -> None:
        """Release the event set."""
        if self._open:
            self._open = False
            self._free(self._set)


def _driver(roots: Roots) -> str:
    """Return an id of this load of the driver's kernel module; empty without a module.

    The kernel reuses no inode number of sysfs until the next boot.
    """
    try:
        number = os.stat(f"{roots.sys}/module/nvidia").st_ino
    except OSError:
        return ""
    return f"{procfs.text(f'{roots.proc}/sys/kernel/random/boot_id')}/{number}"
