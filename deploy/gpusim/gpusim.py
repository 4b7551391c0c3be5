"""Simulated NVIDIA GPUs: builds the library, writes its state, makes environments.

    simulator = Simulator()
    state = State(gpus=(a100(0), a100(1)))
    simulator.write(state, path)
    subprocess.run(["nvitop", "-1"], env=os.environ | simulator.environment(path))

Device names end in "(simulated)". STATE.md describes the state file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import tempfile
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.gpusim._curves import Constant, Curve, Number, Ramp, Sine, Square, integral, value
from deploy.gpusim._model import TOTALS, XID, Event, Fault, Gpu, Mig, Process, State

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "OLD_DRIVER",
    "TOTALS",
    "XID",
    "Constant",
    "Curve",
    "Event",
    "Fault",
    "Gpu",
    "GpusimError",
    "Mig",
    "Number",
    "Process",
    "Ramp",
    "Simulator",
    "Sine",
    "Square",
    "State",
    "a100",
    "divided",
    "h100",
    "integral",
    "value",
]

_SOURCES = Path(__file__).parent / "src"
_LIBRARY = "libnvidia-ml.so.1"
_FLAGS = (
    "-std=gnu11",
    "-O1",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Werror",
)
_GIB = 1 << 30

# What drivers of the 450 series lack: with real ones the dynamic linker finds no such symbol.
OLD_DRIVER = (
    *(
        "nvmlDeviceGetMemoryInfo_v2",
        "nvmlDeviceGetTemperatureV",
        "nvmlDeviceGetConfComputeMemSizeInfo",
    ),
    *("nvmlDeviceGetComputeRunningProcesses_v2", "nvmlDeviceGetComputeRunningProcesses_v3"),
    *("nvmlDeviceGetGraphicsRunningProcesses_v2", "nvmlDeviceGetGraphicsRunningProcesses_v3"),
    *("nvmlDeviceGetMPSComputeRunningProcesses_v2", "nvmlDeviceGetMPSComputeRunningProcesses_v3"),
    *("nvmlDeviceGetRunningProcessDetailList", "nvmlDeviceGetProcessesUtilizationInfo"),
    *("nvmlGpmQueryDeviceSupport", "nvmlGpmSampleAlloc", "nvmlGpmSampleGet", "nvmlGpmMigSampleGet"),
    *("nvmlGpmMetricsGet", "nvmlGpmSampleFree", "nvmlDeviceGetCurrentClocksEventReasons"),
    *("nvmlDeviceGetSupportedClocksEventReasons", "nvmlDeviceGetJpgUtilization"),
    *("nvmlDeviceGetOfaUtilization", "nvmlDeviceGetMarginTemperature", "nvmlDeviceGetNumaNodeId"),
)


class GpusimError(Exception):
    """The library cannot be built here."""


def _identity(number: int) -> dict[str, Any]:
    made = uuid.uuid5(uuid.NAMESPACE_URL, f"hpml-gpusim/{number}")
    return {
        "uuid": f"GPU-{made}",
        "serial": f"132462200{number:04d}",
        "bus_id": f"0000:{0x07 + 8 * number:02x}:00.0",
        "minor": number,
    }


def a100(number: int, **settings: Any) -> Gpu:
    """An A100 of 80 GB, idle; `number` makes its UUID, serial, PCI address and minor number."""
    settings = {
        "name": "NVIDIA A100-SXM4-80GB (simulated)",
        **_identity(number),
        "mem_total": 80 * _GIB,
        "mem_reserved": 600 << 20,
        "mem_base": 4 << 20,
        "bar1_total": 128 * _GIB,
        "bar1_used": 1 << 20,
        **settings,
    }
    return Gpu(**settings)


def h100(number: int, **settings: Any) -> Gpu:
    """An H100 of 80 GB, idle: it has GPM, and 18 NVLinks."""
    hopper: dict[str, Any] = {
        "name": "NVIDIA H100 80GB HBM3 (simulated)",
        "pci_id": "233010DE",
        "pci_subsystem": "16C110DE",
        "cc_major": 9,
        "arch": 9,
        "cores": 16896,
        "power_limit": 700,
        "power_default": 700,
        "power_min": 200,
        "power_max": 700,
        "power_enforced": 700,
        "power": 75,
        "clock_graphics": 345,
        "clock_sm": 345,
        "clock_mem": 2619,
        "max_graphics": 1980,
        "max_sm": 1980,
        "max_mem": 2619,
        "pcie_gen": 5,
        "pcie_max_gen": 5,
        "nvlink_links": 18,
        "gpm": 1,
    }
    zero = dict.fromkeys((rate for rate in TOTALS if rate.startswith("gpm_")), 0)
    return a100(number, **{**hopper, **zero, **settings})


def divided(gpu: Gpu, *slices: int) -> Gpu:
    """The GPU in MIG mode with one MIG device per number of slices (of 7): 1, 2, 3, 4 or 7."""
    model = gpu.name.removesuffix(" (simulated)")
    devices = []
    for index, size in enumerate(slices):
        memory = min(80, {1: 10, 2: 20, 3: 40, 4: 40, 7: 80}[size]) * _GIB
        made = uuid.uuid5(uuid.NAMESPACE_URL, f"{gpu.uuid}/{index}")
        devices.append(
            Mig(
                name=f"{model} MIG {size}g.{memory // _GIB}gb (simulated)",
                uuid=f"MIG-{made}",
                mem_total=memory,
                mem_reserved=0,
                mem_base=12 << 20,
                bar1_total=16 * _GIB,
                bar1_used=0,
                gi=7 + index,
                ci=0,
                gi_slices=size,
                ci_slices=size,
                sm_count=14 * size,
                copy_engines=min(size, 7),
                gpm_sm=0 if gpu.gpm else None,
                gpm_tensor=0 if gpu.gpm else None,
                gpm_dram=0 if gpu.gpm else None,
                gpm_occupancy=0 if gpu.gpm else None,
            ),
        )
    return Gpu(**{**vars(gpu), "mig_mode": 1, "mig": tuple(devices)})


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "hpml" / "gpusim"


@dataclass(frozen=True)
class Simulator:
    """The library, built once for each content of its sources and set of functions it lacks."""

    without: tuple[str, ...] = ()  # functions that this driver does not have
    cache: Path = field(default_factory=_cache)
    compiler: str = "gcc"

    def build(self) -> Path:
        """Builds the library if it is not there yet.

        Returns:
            The directory that holds libnvidia-ml.so.1, for LD_LIBRARY_PATH.

        Raises:
            GpusimError: There is no compiler, or it fails; the message has what it said.
        """
        directory = self.cache / self._key()
        if (directory / _LIBRARY).exists():
            return directory
        if shutil.which(self.compiler) is None:
            raise GpusimError(f"no C compiler: {self.compiler} (apt-get install gcc)")
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            self._compile(Path(scratch))
            os.replace(Path(scratch) / _LIBRARY, directory / _LIBRARY)  # builders may race
        return directory

    def _compile(self, scratch: Path) -> None:
        script = scratch / "exports"
        hidden = "".join(f"{name}; " for name in (*self.without, "*"))
        script.write_text(f"{{ global: nvml*; local: {hidden}}};\n")
        command = [self.compiler, *_FLAGS, f"-Wl,--version-script={script},-soname,{_LIBRARY}"]
        sources = sorted(str(path) for path in _SOURCES.glob("*.c"))
        command += ["-Wl,-Bsymbolic", "-o", str(scratch / _LIBRARY), *sources, "-lm", "-lpthread"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise GpusimError(f"{self.compiler} failed:\n{done.stderr}")

    def _key(self) -> str:
        digest = hashlib.sha256(repr((self.without, self.compiler, _FLAGS)).encode())
        for path in sorted(_SOURCES.glob("*.[ch]")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
        return digest.hexdigest()[:16]

    def write(self, state: State, path: str | os.PathLike[str]) -> State:
        """Puts a state in place of what the path held, at once and whole; gives the state back."""
        target = Path(path)
        descriptor, scratch = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(state.text())
            os.chmod(scratch, 0o644)  # other users' programs read it, too
            os.replace(scratch, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(scratch)
            raise
        return state

    def environment(
        self, path: str | os.PathLike[str], *, calls: Path | None = None
    ) -> dict[str, str]:
        """Variables that make programs load the library with this state; builds it if need be.

        Args:
            path: The state file.
            calls: A file that gets the name of every function called, one per line.
        """
        variables = {"LD_LIBRARY_PATH": _library_path(self.build()), "HPML_GPUSIM": str(path)}
        return variables | ({} if calls is None else {"HPML_GPUSIM_CALLS": str(calls)})

    def missing(self) -> dict[str, str]:
        """Variables that make programs find no NVML, also on a machine that has it."""
        directory = self.cache / "missing"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / _LIBRARY).touch()  # the dynamic linker stops at a file that is no library
        return {"LD_LIBRARY_PATH": _library_path(directory)}


def _library_path(directory: Path) -> str:
    return ":".join([str(directory), *_others(os.environ.get("LD_LIBRARY_PATH", "").split(":"))])


def _others(paths: Sequence[str]) -> list[str]:
    return [path for path in paths if path]
