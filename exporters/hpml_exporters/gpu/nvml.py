"""The driver's library: loaded late, called through ctypes with as little as possible between.

nvidia-ml-py and nvitop raise, look up and copy at each call, which is right for discovery and too
much for what is called every second; so the hot path takes return codes of the same library.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import ModuleType

from hpml_exporters.core.collector import DriverLostError, NotHereError

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
        error: what nvitop and nvidia-ml-py raise.
    """

    def __init__(self) -> None:
        """Load and initialise.

        Raises:
            NotHereError: no driver, no right to ask it, or no nvitop.
            DriverLostError: there is one, and it does not work: a fault to report, such as
                the versions of library and kernel module after an upgrade.
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
        """Return the first of these functions that the library has; it returns an NVML code.

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
        # copy until every user has closed it: without this only a restart of the exporter would
        # help.
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
