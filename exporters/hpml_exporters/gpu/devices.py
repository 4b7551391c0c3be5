"""The node's GPUs and MIG instances, found with nvitop."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from hpml_exporters.core.collector import DriverLostError, NotHereError

if TYPE_CHECKING:
    from nvitop.api import MigDevice, PhysicalDevice
    from nvitop.api.libnvml import c_nvmlDevice_t

# The driver's library: loaded late, called through ctypes with as little as possible between.
#
# nvidia-ml-py and nvitop raise, look up and copy at each call. That is fine for discovery and too
# slow for calls made every second, so the hot path uses the library's return codes.

LIBRARY = "libnvidia-ml.so.1"
SUCCESS = 0
NOT_SUPPORTED = 3
NO_PERMISSION = 4
INSUFFICIENT_SIZE = 7
FUNCTION_NOT_FOUND = 13
NO_DATA = 21
GPU_LOST = frozenset({15, 16, 28})
"""NVML_ERROR_GPU_IS_LOST, _RESET_REQUIRED, _GPU_NOT_FOUND."""
UNSUPPORTED = frozenset({2, 3, 13, 22, 25, 26})
"""Codes of a call that will never work here: NVML_ERROR_INVALID_ARGUMENT,
_NOT_SUPPORTED, _FUNCTION_NOT_FOUND, _VGPU_ECC_NOT_SUPPORTED,
_ARGUMENT_VERSION_MISMATCH, _DEPRECATED."""
_DRIVER_GONE = {1: "not initialised", 9: "not loaded", 12: "library not found", 18: "other version"}
_ABSENT = frozenset({NO_PERMISSION, 9, 12})
"""Codes of nvmlInit that mean no driver, or none for this user."""

Code = int
_Call = Callable[..., Code]


class GpuLostError(Exception):
    """A GPU no longer answers; the others may."""


def check(code: Code) -> bool:
    """Return whether a call succeeded.

    Raises:
        GpuLostError: the GPU has fallen off the bus or needs a reset.
        DriverLostError: the driver is gone.
    """
    if code == SUCCESS:
        return True
    if code in GPU_LOST:
        raise GpuLostError(f"NVML error {code}")
    if code in _DRIVER_GONE:
        raise DriverLostError(f"the NVIDIA driver: {_DRIVER_GONE[code]} (NVML error {code})")
    return False


def code_of(error: Exception) -> Code:
    """Return the NVML code of an exception of nvidia-ml-py."""
    return int(getattr(error, "value", 999))


def _missing(*_: object) -> Code:
    return FUNCTION_NOT_FOUND


class Nvml:
    """An initialised library.

    Attributes:
        nvitop: nvitop's API (`nvitop.api`), for discovery and processes; it asks the same library.
        error: exception class of nvitop and nvidia-ml-py.
    """

    def __init__(self) -> None:
        """Load and initialise.

        Raises:
            NotHereError: no driver, no permission to use it, or no nvitop.
            DriverLostError: the driver does not work, for example because library and kernel
                module have different versions after an upgrade.
        """
        try:
            # Before anything heavy: most nodes of many clusters have no GPU.
            self._library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise NotHereError(f"no NVIDIA driver: {error}") from None
        self.nvitop = _nvitop()
        self._nvml = self.nvitop.libnvml
        self.error: type[Exception] = self._nvml.NVMLError
        try:
            self._nvml.nvmlInit()
        except self.error as error:
            code = code_of(error)
            if code == 18:  # noqa: PLR2004 - LIB_RM_VERSION_MISMATCH
                self._unload()
            kind = NotHereError if code in _ABSENT else DriverLostError
            raise kind(f"the NVIDIA driver does not answer: {error}") from None

    def call(self, *names: str) -> _Call:
        """Return the first of these functions that the library has. It returns an NVML code.

        Args:
            names: newest first; arguments must be ctypes objects.
        """
        for name in names:
            found: _Call | None = getattr(self._library, name, None)
            if found is not None:
                return found
        return _missing

    def driver_version(self) -> str:
        """Return the version of the driver, empty unknown."""
        try:
            return str(self._nvml.nvmlSystemGetDriverVersion())
        except self.error:
            return ""

    def shutdown(self) -> None:
        """Release everything; blocks for as long as the driver is stuck."""
        try:
            self._nvml.nvmlShutdown()
        except self.error:  # it was gone already
            # nvitop counts initialisations: with a stale count it would skip the next one.
            getattr(self._nvml, "__flags", []).clear()

    def _unload(self) -> None:
        import _ctypes  # noqa: PLC0415 - rare

        import pynvml  # type: ignore[import-untyped]  # noqa: PLC0415 - heavy

        # After an upgrade of the driver the old library is still mapped, and dlopen returns that
        # copy until every user has closed it. Otherwise the exporter would need a restart.
        for library in (self._library, pynvml.nvmlLib):
            if library is not None:
                _ctypes.dlclose(library._handle)  # noqa: SLF001 - ctypes has no other way
        pynvml.nvmlLib = None
        getattr(pynvml, "_nvmlGetFunctionPointer_cache", {}).clear()


def _nvitop() -> ModuleType:
    """Import nvitop's API (never its terminal program) without its banner and its log file."""
    import logging  # noqa: PLC0415 - nvitop needs it, nodes without a GPU do not

    logger = logging.getLogger("nvitop.api.libnvml")
    if not logger.handlers:  # with LOGLEVEL=DEBUG it writes nvitop.log to the working directory
        logger.addHandler(logging.NullHandler())
    try:
        from nvitop import api  # noqa: PLC0415 - 12 MiB
    except ImportError as error:
        raise NotHereError(f"GPUs are read through nvitop: {error}") from None
    logger.disabled = True
    return api


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
        """Cached handles stay valid as long as this key does not change."""
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
    """Return the PCI addresses of the kernel's NVIDIA GPUs, with or without a driver.

    GPUs passed to virtual machines (vfio-pci) are left out.

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

    nvitop's objects for lost GPUs have no handle, and any answer may be NA. Its own loops over GPUs
    and instances are not used: they end at the first error.

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
