"""Simulated NVIDIA GPUs: builds the library, writes its state, makes environments.

    simulator = Simulator()
    state = State(gpus=(a100(0), a100(1)))
    simulator.write(state, path)
    subprocess.run(["nvitop", "-1"], env=os.environ | simulator.environment(path))

Device names end in "(simulated)". README.md describes the state file.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deploy.gpusim._curves import Curve, Number, Ramp, Square, integral, value
from deploy.gpusim._model import XID, Device, Event, Fault, Process, State, a100, divided, h100

__all__ = [
    "OLD_DRIVER",
    "XID",
    "Curve",
    "Device",
    "Event",
    "Fault",
    "GpusimError",
    "Number",
    "Process",
    "Ramp",
    "Simulator",
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
_FLAGS = "-std=gnu11 -O1 -fPIC -shared -fvisibility=hidden -Wall -Wextra -Werror".split()

OLD_DRIVER = """
nvmlDeviceGetMemoryInfo_v2 nvmlDeviceGetTemperatureV nvmlDeviceGetConfComputeMemSizeInfo
nvmlDeviceGetComputeRunningProcesses_v2 nvmlDeviceGetComputeRunningProcesses_v3
nvmlDeviceGetGraphicsRunningProcesses_v2 nvmlDeviceGetGraphicsRunningProcesses_v3
nvmlDeviceGetMPSComputeRunningProcesses_v2 nvmlDeviceGetMPSComputeRunningProcesses_v3
nvmlDeviceGetRunningProcessDetailList nvmlDeviceGetCurrentClocksEventReasons
nvmlGpmQueryDeviceSupport nvmlGpmSampleAlloc nvmlGpmSampleGet
nvmlGpmMigSampleGet nvmlGpmMetricsGet nvmlGpmSampleFree""".split()
"""What drivers of the 450 series lack: with real ones the dynamic linker finds no such symbol."""


class GpusimError(Exception):
    """The library cannot be built here."""


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "hpml" / "gpusim"


@dataclass(frozen=True)
class Simulator:
    """The library, built once for each content of its sources and set of functions it lacks."""

    without: Sequence[str] = ()  # functions that this driver does not have
    cache: Path = field(default_factory=_cache)
    compiler: str = "gcc"

    def build(self) -> Path:
        """Builds the library if it is not there yet.

        Returns:
            The directory that holds libnvidia-ml.so.1, for LD_LIBRARY_PATH.

        Raises:
            GpusimError: There is no compiler, or it fails; the message contains its output.
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
        scratch = target.with_name(f".{target.name}.{os.getpid()}")
        scratch.write_text(state.text())
        scratch.chmod(0o644)  # other users' programs read it, too
        scratch.replace(target)
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
        (directory / _LIBRARY).touch()  # the dynamic linker stops at a file that is not a library
        return {"LD_LIBRARY_PATH": _library_path(directory)}


def _library_path(directory: Path) -> str:
    others = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    return ":".join([str(directory), *(path for path in others if path)])
