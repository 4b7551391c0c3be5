"""Which GPUs and MIG instances there are, found through nvitop."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hpml_exporters.gpu.nvml import NO_PERMISSION, GpuLostError, Nvml, check, code_of

__all__ = ["Place", "discover", "pci_address"]


@dataclass(frozen=True)
class Place:
    """A GPU or MIG instance: what it is called, and how NVML is asked for it.

    Attributes:
        uuid: "GPU-…" or "MIG-…".
        name: product name.
        pci: PCI address with eight digits of domain and small letters ("00000000:3b:00.0"), of an
            instance its GPU's; empty unknown.
        minor: number of the device file (/dev/nvidia<minor>), of an instance its GPU's; -1 unknown.
            It is no index: NVML orders GPUs by PCI address, the kernel by when they came up.
        mig: "" for a whole GPU, "enabled" for a GPU that is split, else the instance's profile
            ("1g.10gb").
        parent: UUID of the GPU that an instance belongs to, else empty.
        instance: number of the GPU instance, -1 for a GPU.
        handle: NVML's handle, 0 when lost.
        parent_handle: NVML's handle of the parent, 0 for a GPU.
    """

    uuid: str
    name: str = ""
    pci: str = ""
    minor: int = -1
    mig: str = ""
    parent: str = ""
    instance: int = -1
    handle: int = 0
    parent_handle: int = 0

    @property
    def key(self) -> tuple[str, str, int, int]:
        """What must be the same for cached handles to be right still."""
        return (self.uuid, self.mig, self.handle, self.instance)


def pci_address(text: str) -> str:
    """Return a PCI address as `Place.pci` has it, whatever number of digits the domain came with.

    >>> pci_address("0000:3B:00.0")
    '00000000:3b:00.0'
    """
    domain, _, rest = text.strip().lower().partition(":")
    if rest.count(":") == 0:  # no domain at all
        domain, rest = "0", f"{domain}:{rest}"
    return f"{domain:0>8}:{rest}"


def discover(nvml: Nvml, devices: dict[int, Any]) -> tuple[Sequence[Place], int]:
    """Return all GPUs and MIG instances that answer, and the number of GPUs that do not.

    nvitop's objects of lost GPUs have no handle, and each of its answers may be NA. Its own loops
    over all GPUs and instances are not used: they end at the first that gives an error.

    Args:
        nvml: the library.
        devices: nvitop's objects of this driver by index, to use again and to add to: a handle
            takes milliseconds to get on some drivers.

    Raises:
        DriverLostError: nothing answers.
    """
    places: list[Place] = []
    lost = 0
    count = nvml.nvitop.Device.count()
    if any(index >= count for index in devices):  # one is gone, and indexes are others now
        devices.clear()
    for index in range(count):
        try:
            device = devices.get(index) or nvml.nvitop.PhysicalDevice(index)
        except nvml.error as error:
            lost += _is_lost(error)
            continue
        gpu = None if device.handle is None else _gpu(nvml, device)
        if gpu is None:
            lost += 1
            devices.pop(index, None)
            continue
        devices[index] = device
        places.append(gpu)
        places.extend(_instances(nvml, gpu, device))
    return places, lost


def _is_lost(error: Exception) -> bool:
    """Tell a GPU that does not answer from one that is none of our business.

    Raises:
        DriverLostError: nothing answers.
    """
    code = code_of(error)
    with contextlib.suppress(GpuLostError):
        check(code)
    return code != NO_PERMISSION  # one that a job's devices do not include


def _instances(nvml: Nvml, gpu: Place, device: Any) -> Iterator[Place]:
    if not gpu.mig:
        return
    for index in range(device.max_mig_device_count()):
        try:
            one = _instance(gpu, device.mig_device(index))
        except nvml.error:  # numbers of instances have gaps
            continue
        if one is not None:
            yield one


def _gpu(nvml: Nvml, device: Any) -> Place | None:
    uuid = _text(device.uuid())
    if not uuid:
        return None
    minor = nvml.nvitop.libnvml.nvmlQuery("nvmlDeviceGetMinorNumber", device.handle)
    pci = _text(device.bus_id())
    return Place(
        uuid=uuid,
        name=_text(device.name()),
        pci=pci_address(pci) if pci else "",
        minor=minor if isinstance(minor, int) else -1,
        mig="enabled" if device.is_mig_mode_enabled() else "",
        handle=_address(device.handle),
    )


def _instance(gpu: Place, device: Any) -> Place | None:
    uuid = _text(device.uuid())
    if device.handle is None or not uuid:
        return None
    number = device.gpu_instance_id()
    name = _text(device.name())
    return Place(
        uuid=uuid,
        name=name,
        pci=gpu.pci,
        minor=gpu.minor,
        mig=name.rpartition("MIG ")[2].split(" ")[0] or "unknown",
        parent=gpu.uuid,
        instance=number if isinstance(number, int) else -1,
        handle=_address(device.handle),
        parent_handle=gpu.handle,
    )


def _text(answer: object) -> str:
    """Return an answer of nvitop's, empty for its NA (which is a str of a class of its own)."""
    return str(answer) if type(answer) is str else ""


def _address(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
