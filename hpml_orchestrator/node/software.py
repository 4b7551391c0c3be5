"""What a program runs in: its Python's packages, the loaded modules and the GPU driver.

The agent of the job's first node starts this once per attempt, for a rank there, in a process of
its own: neither a slow file system nor a driver that hangs may delay the job. The process ends
itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import RecordError
from hpml_orchestrator.node.environment import node_name
from hpml_orchestrator.records.files import write_json
from hpml_orchestrator.records.run import SOFTWARE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_LIST_SECONDS = 1.0  # packages that are not read by then are left out
_END_SECONDS = 5.0  # the system ends this process, whatever it waits for
_KILL_SECONDS = 1.0
_PYTHON = re.compile(r"python[\d.]*")
_CODE = """\
import sys
sys.path.append(sys.argv.pop(1))
from hpml_orchestrator.node.software import main
main(*sys.argv[1:])
"""


def start(attempt: Path, pid: int, program: str) -> subprocess.Popen[bytes] | None:
    """Start a process that records the software of a rank; None if it cannot be started.

    Args:
        attempt: the attempt's directory.
        pid: process of the rank.
        program: the first word of the rank's command.
    """
    root = str(Path(__file__).parents[2])  # a directory, or hpml-node.pyz
    words = [sys.executable, "-I", "-S", "-c", _CODE, root, str(attempt), str(pid), program]
    nothing = subprocess.DEVNULL
    try:
        return subprocess.Popen(words, stdin=nothing, stdout=nothing, stderr=nothing)
    except OSError:
        return None


def end(recorder: subprocess.Popen[bytes]) -> None:
    """End the process; one that a driver or a file system holds is left to the system."""
    recorder.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        recorder.wait(_KILL_SECONDS)


def main(attempt: str, pid: str, program: str) -> None:
    """Record the software of a rank, and end after some seconds at the latest."""
    signal.setitimer(signal.ITIMER_REAL, _END_SECONDS)  # SIGALRM ends the process
    record(Path(attempt), f"/proc/{pid}", program)


def record(attempt: Path, process: str, program: str) -> None:
    """Write what a rank runs in, first without the driver's versions: a call of it may hang.

    Args:
        attempt: the attempt's directory.
        process: the rank's directory below `/proc`.
        program: the first word of the rank's command.
    """
    environment = _environment(process)
    python = python_of(program, environment, root=f"{process}/root")
    packages: dict[str, str] | None = None
    complete = True
    if python:
        packages, complete = installed(python, environment, root=f"{process}/root")
    found: dict[str, object] = {
        "node": node_name(),
        "python": python or None,
        "packages": packages,
        "complete": complete,
        "modules": [*filter(None, environment.get("LOADEDMODULES", "").split(":"))],
    }
    with contextlib.suppress(RecordError):
        write_json(attempt / SOFTWARE, found)
        if versions := nvidia_versions():
            write_json(attempt / SOFTWARE, {**found, **versions})


def _environment(process: str) -> dict[str, str]:
    try:
        text = Path(process, "environ").read_bytes().decode("utf-8", "surrogateescape")
    except OSError:
        return {}
    return dict(pair.split("=", 1) for pair in text.split("\0") if "=" in pair)


def python_of(program: str, environment: Mapping[str, str], *, root: str = "") -> str:
    """Return the path of the Python that a program runs in; empty if it is not known.

    It is the program itself, or the one that its first line names. For any other program, such as
    a shell, it is the `python` on its PATH.

    Args:
        program: the first word of a command.
        environment: of the process.
        root: of the process's file system, which in a container is another one.
    """
    path = _which(program, environment, root)
    if path and not _PYTHON.fullmatch(os.path.basename(path)):
        with contextlib.suppress(OSError), open(root + path, "rb") as stream:
            first = os.fsdecode(stream.readline(4096)).rstrip()
            words = first[2:].split() if first.startswith("#!") else []
            path = words[0] if words else ""
    if path and _PYTHON.fullmatch(os.path.basename(path)):
        return path
    return _which("python", environment, root) or _which("python3", environment, root)


def _which(program: str, environment: Mapping[str, str], root: str) -> str:
    if os.path.isabs(program):
        return program if os.path.exists(root + program) else ""
    directories = [path for path in environment.get("PATH", "").split(":") if os.path.isabs(path)]
    found = shutil.which(program, path=":".join(f"{root}{path}" for path in directories))
    return found[len(root) :] if found else ""


def installed(
    python: str, environment: Mapping[str, str], *, root: str = ""
) -> tuple[dict[str, str], bool]:
    """Return name and version of the packages of a Python, and whether these are all of them.

    Args:
        python: its path.
        environment: of the process.
        root: of the process's file system.
    """
    packages: dict[str, str] = {}
    until = time.monotonic() + _LIST_SECONDS
    paths = [f"{root}{path}" for path in _package_directories(python, environment, root)]
    for distribution in importlib.metadata.distributions(path=paths):
        if time.monotonic() > until:
            return packages, False
        with contextlib.suppress(Exception):  # damaged metadata of one package
            if name := distribution.metadata["Name"]:
                packages.setdefault(name, distribution.version)
    return dict(sorted(packages.items(), key=lambda pair: pair[0].lower())), True


def _package_directories(python: str, environment: Mapping[str, str], root: str) -> Iterator[str]:
    """Yield where a Python finds packages, those that it takes first at the beginning."""
    for path in environment.get("PYTHONPATH", "").split(":"):
        if os.path.isabs(path):
            yield path
    prefix = os.path.dirname(os.path.dirname(python))
    settings = {}
    with contextlib.suppress(OSError):  # only a virtual environment has this file
        lines = Path(f"{root}{prefix}/pyvenv.cfg").read_text("utf-8").splitlines()
        settings = {
            name.strip(): value.strip() for name, _, value in (x.partition("=") for x in lines)
        }
    if settings:
        yield from _site_directories(prefix, "*", root)
        if settings.get("include-system-site-packages") != "true":
            return
        python = os.path.join(settings.get("home", ""), "python3")
    real = os.path.realpath(root + python)
    version = os.path.basename(real)[len("python") :] or "*"
    if (home := environment.get("HOME", "")) and not environment.get("PYTHONNOUSERSITE"):
        yield from _site_directories(f"{home}/.local", version, root)
    inside = real[len(root) :] if real.startswith(f"{root}/") else python
    for path in dict.fromkeys([python, inside]):
        above = os.path.dirname(os.path.dirname(path))
        yield from _site_directories(f"{above}/local", version, root)
        yield from _site_directories(above, version, root)


def _site_directories(prefix: str, version: str, root: str) -> Iterator[str]:
    """Yield the directories of packages below the prefix of a Python; Debian has its own names."""
    for part in (f"lib*/python{version}/site-packages", f"lib/python{version}/dist-packages"):
        yield from (str(path)[len(root) :] for path in sorted(Path(root + prefix).glob(part)))
    yield f"{prefix}/lib/python3/dist-packages"


def nvidia_versions() -> dict[str, str]:
    """Return the version of NVIDIA's driver, and the newest CUDA that it supports."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2():
            return {}
        text, number = ctypes.create_string_buffer(96), ctypes.c_int()
        versions = {}
        if not nvml.nvmlSystemGetDriverVersion(text, len(text)):
            versions["nvidia_driver"] = text.value.decode("ascii", "replace")
        if not nvml.nvmlSystemGetCudaDriverVersion(ctypes.byref(number)):
            versions["cuda"] = f"{number.value // 1000}.{number.value % 1000 // 10}"
        nvml.nvmlShutdown()
    except (OSError, AttributeError):
        return {}
    return versions
