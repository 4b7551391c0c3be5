"""Which GPUs and MIG instances there are, found through nvitop."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from hpml_exporters.gpu.nvml import NO_PERMISSION, GpuLostError, Nvml, check, code_of

if TYPE_CHECKING:
    from nvitop.api import MigDevice, PhysicalDevice
    from nvitop.api.libnvml import c_nvmlDevice_t

_NVIDIA = "0x10de"
_DISPLAY = "0x03"


@dataclass(frozen=True)
class GpuDevice:
    """A GPU or MIG instance: its names, and its handles in NVML.

    Attributes:
        uuid: "GPU-…" or "MIG-…"; of a GPU that was lost before its UUID was read, the PCI address.
        index: NVML's number of the GPU, of an instance its GPU's; -1 unknown.
        name: product name.
        pci: PCI address with eight digits of domain and small letters ("00000000:3b:00.0"), of an
            instance its GPU's; empty unknown.
        minor: number of the device file (/dev/nvidia<minor>), of an instance its GPU's; -1 unknown.
            It is not an index: NVML orders GPUs by PCI address, the kernel by when they came up.
        serial: number on the board, of an instance its GPU's; empty unknown.
        mig: "" for a whole GPU, "enabled" for a GPU that is split, else the instance's profile
            ("1g.10gb").
        parent: UUID of the GPU that an instance belongs to, else empty.
        instance: number of the GPU instance, -1 for a GPU.
        slices: of an instance; of a split GPU how many there are; 0 unknown.
        handle: NVML's handle, 0 when lost.
        parent_handle: NVML's handle of the parent, 0 for a GPU.
    """

    uuid: str
    index: int = -1
    name: str = ""
    pci: str = ""
    minor: int = -1
    serial: str = ""
    mig: str = ""
    parent: str = ""
    instance: int = -1
    slices: int = 0
    handle: int = 0
    parent_handle: int = 0

    @property
    def key(self) -> tuple[str, str, int, int]:
        """What must not change for cached handles to stay valid."""
        return (self.uuid, self.mig, self.handle, self.instance)

    @cached_property
    def info(self) -> tuple[str, ...]:
        """Values of the labels of hpml_gpu_info."""
        numbers = [str(n) if n >= 0 else "" for n in (self.index, self.minor, self.instance)]
        return (
            *(self.uuid, numbers[0], self.name, self.pci, numbers[1]),
            *(self.serial, self.mig, self.parent, numbers[2]),
        )


KnownGpu = tuple["PhysicalDevice", GpuDevice]
"""A GPU as nvitop's object and as ours."""


def pci_address(text: str) -> str:
    """Return a PCI address in the form of `GpuDevice.pci`, however many digits its domain has.

    >>> pci_address("0000:3B:00.0")
    '00000000:3b:00.0'
    """
    domain, _, rest = text.strip().lower().partition(":")
    if rest.count(":") == 0:  # no domain at all
        domain, rest = "0", f"{domain}:{rest}"
    return f"{domain:0>8}:{rest}"


def gpus_on_bus(sys: str) -> list[str]:
    """Return PCI addresses of NVIDIA GPUs that the kernel sees, with or without a driver.

    Those that were given to virtual machines (vfio-pci) are left out.

    Args:
        sys: mount point of sysfs.
    """
    addresses = []
    for path in sorted(Path(sys, "bus/pci/devices").glob("*")):
        try:
            ours = (path / "vendor").read_text().startswith(_NVIDIA)
            display = (path / "class").read_text().startswith(_DISPLAY)
        except OSError:
            continue
        driver = path / "driver"
        if ours and display and not (driver.exists() and driver.resolve().name == "vfio-pci"):
            addresses.append(pci_address(path.name))
    return addresses


def discover(
    nvml: Nvml, known: dict[int, KnownGpu], sys: str
) -> tuple[Sequence[GpuDevice], list[GpuDevice]]:
    """Return all GPUs and MIG instances that answer, and the GPUs that do not.

    nvitop's objects of lost GPUs have no handle, and each of its answers may be NA. Its own loops
    over all GPUs and instances are not used: they end at the first that gives an error.

    Args:
        nvml: the library.
        known: what was found before by index, to use again and to add to: a handle takes
            milliseconds to read with some drivers, and names never change.
        sys: mount point of sysfs, which knows the PCI addresses of GPUs that do not answer. The
            name and UUID of such a device are empty if NVML does not identify it.

    Raises:
        DriverLostError: nothing answers.
    """
    found: list[GpuDevice] = []
    lost: list[int] = []
    count = nvml.nvitop.Device.count()
    if any(index >= count for index in known):  # a GPU is gone, so the indexes have shifted
        known.clear()
    for index in range(count):
        try:
            before = known.get(index)
            device = before[0] if before else nvml.nvitop.PhysicalDevice(index)
        except nvml.error as error:
            if _is_lost(error):
                lost.append(index)
            continue
        gpu = None if device.handle is None else _gpu(nvml, index, device, before and before[1])
        if gpu is None:
            lost.append(index)
            known.pop(index, None)
            continue
        known[index] = device, gpu
        found.append(gpu)
        found.extend(_instances(nvml, gpu, device))
    silent = sorted(set(gpus_on_bus(sys)) - {gpu.pci for gpu in found}) if lost else []
    # NVML does not identify a lost GPU, but the kernel does. Their numbers must agree: other silent
    # devices on the bus may belong to somebody else, and a wrong address is worse than none.
    if len(silent) != len(lost):
        silent = [""] * len(lost)
    # NVML orders GPUs by PCI address, so both lists are in the same order.
    pairs = zip(lost, silent, strict=True)
    return found, [GpuDevice(pci, index if pci else -1, pci=pci) for index, pci in pairs]


def _is_lost(error: Exception) -> bool:
    """Return whether a GPU does not answer; one that this user may not see is not lost."""
    code = code_of(error)
    # A driver that is gone is not one lost GPU: DriverLostError passes through.
    with contextlib.suppress(GpuLostError):
        check(code)
    return code != NO_PERMISSION  # a GPU that the job's device list excludes


def _instances(nvml: Nvml, gpu: GpuDevice, device: PhysicalDevice) -> Iterator[GpuDevice]:
    if not gpu.mig:
        return
    for index in range(device.max_mig_device_count()):
        try:
            one = _instance(gpu, device.mig_device(index))
        except nvml.error:  # numbers of instances have gaps
            continue
        if one is not None:
            yield one


def _gpu(
    nvml: Nvml, index: int, device: PhysicalDevice, before: GpuDevice | None
) -> GpuDevice | None:
    uuid = _text(device.uuid())
    if not uuid:
        return None
    split = device.is_mig_mode_enabled()
    if before is not None and (before.uuid, before.mig) == (uuid, "enabled" if split else ""):
        return before
    minor = nvml.nvitop.libnvml.nvmlQuery("nvmlDeviceGetMinorNumber", device.handle)
    pci = _text(device.bus_id())
    return GpuDevice(
        uuid=uuid,
        index=index,
        name=_text(device.name()),
        pci=pci_address(pci) if pci else "",
        minor=minor if isinstance(minor, int) else -1,
        serial=_text(device.serial()),
        mig="enabled" if split else "",
        slices=device.max_mig_device_count() if split else 0,
        handle=_address(device.handle),
    )


def _instance(gpu: GpuDevice, device: MigDevice) -> GpuDevice | None:
    uuid = _text(device.uuid())
    if device.handle is None or not uuid:
        return None
    number = device.gpu_instance_id()
    name = _text(device.name())
    profile = name.rpartition("MIG ")[2].split(" ")[0]
    slices = profile.rpartition("g.")[0].rpartition(".")[2]  # "1c.2g.20gb" has two
    return GpuDevice(
        uuid=uuid,
        index=gpu.index,
        name=name,
        pci=gpu.pci,
        minor=gpu.minor,
        serial=gpu.serial,
        mig=profile or "unknown",
        parent=gpu.uuid,
        slices=int(slices) if slices.isdigit() else 0,
        instance=number if isinstance(number, int) else -1,
        handle=_address(device.handle),
        parent_handle=gpu.handle,
    )


def _text(answer: object) -> str:
    return str(answer) if type(answer) is str else ""


def _address(handle: c_nvmlDevice_t | None) -> int:
    return ctypes.cast(handle or 0, ctypes.c_void_p).value or 0
