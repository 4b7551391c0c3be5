"""Software of a rank: its Python's packages, PyTorch's build, modules and the GPU driver.

The agent of the job's first node records it once per attempt, for a rank on that node. This runs in
a separate process, so that a slow file system or a hanging driver cannot delay the job. The process
ends itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpml_orchestrator.errors import RecordError
from hpml_orchestrator.node.environment import node_name
from hpml_orchestrator.records.files import write_json
from hpml_orchestrator.records.run import SOFTWARE
from hpml_orchestrator.records.torch_build import READ_BUILD, read_vectors

_LIST_SECONDS = 10.0
_END_SECONDS = 20.0  # the kernel then ends this process in any case
_KILL_SECONDS = 1.0
_WORDS = 8
_MOST_BYTES = 16 * 1024**2
_PYTHON = re.compile(r"python[\d.]*")
_CODE = """\
import sys
sys.path.append(sys.argv.pop(1))
from hpml_orchestrator.node.software import main
main(*sys.argv[1:])
"""
_READ_VERSION = "import json, platform; print(json.dumps(platform.python_version()))"
_LIST_PACKAGES = """\
import importlib.metadata, json
found = {}
for one in importlib.metadata.distributions():
    try:
        found.setdefault(one.metadata["Name"], one.version)
    except Exception:  # damaged metadata of one package
        pass
found.pop(None, None)
print(json.dumps(found))
"""


def start(attempt: Path, pid: int, program: str) -> subprocess.Popen[bytes] | None:
    """Start a process that records the software of a rank; return None if that fails.

    Args:
        attempt: the attempt's directory.
        pid: process ID of the rank.
        program: the first word of the rank's command.
    """
    root = str(Path(__file__).parents[2])  # a directory, or hpml-node.pyz
    words = [sys.executable, "-I", "-S", "-c", _CODE, root, str(attempt), str(pid), program]
    nothing = subprocess.DEVNULL
    try:
        return subprocess.Popen(
            words, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True
        )
    except OSError:
        return None


def end(recorder: subprocess.Popen[bytes]) -> None:
    """End the process and the Python that it started; leave processes in a hanging driver."""
    if recorder.poll() is None:  # else its pid may already be reused
        os.killpg(recorder.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        recorder.wait(_KILL_SECONDS)


def main(attempt: str, pid: str, program: str) -> None:
    """Record the software of a rank; end after a few seconds at the latest."""
    signal.setitimer(signal.ITIMER_REAL, _END_SECONDS)  # SIGALRM ends the process
    record(Path(attempt), f"/proc/{pid}", program)


def record(attempt: Path, process: str, program: str) -> None:
    """Write the software of a rank, first without driver versions, because the driver may hang.

    Args:
        attempt: the attempt's directory.
        process: the rank's directory below `/proc`.
        program: the first word of the rank's command.
    """
    environment = _environment(process)
    python = "" if _is_in_container(process) else python_of(program, environment)
    found: dict[str, object] = {
        "node": node_name(),
        "python": python or None,
        "python_version": _ask(python, _READ_VERSION, environment) if python else None,
        "packages": installed(python, environment) if python else None,
        "modules": [*filter(None, environment.get("LOADEDMODULES", "").split(":"))],
        "files": digests(process),
        "torch": _ask(python, READ_BUILD, environment) if python else None,
        "vectors": read_vectors(environment),
        "has_gpus": bool(environment.get("CUDA_VISIBLE_DEVICES")),
    }
    with contextlib.suppress(RecordError):
        write_json(attempt / SOFTWARE, found)
        if versions := nvidia_versions():
            write_json(attempt / SOFTWARE, {**found, **versions})


def _is_in_container(process: str) -> bool:
    """Return whether a process has a different root: its Python cannot be started from outside."""
    try:
        return not os.path.samefile(f"{process}/root", "/")
    except OSError:  # it has ended
        return False


def _environment(process: str) -> dict[str, str]:
    """Return the initial variables of a process; empty if it has ended."""
    try:
        text = Path(process, "environ").read_bytes().decode("utf-8", "surrogateescape")
    except OSError:
        return {}
    return dict(pair.split("=", 1) for pair in text.split("\0") if "=" in pair)


def digests(process: str) -> dict[str, str]:
    """Return the SHA-256 of small files among the first words of a command, such as its script."""
    found = {}
    with contextlib.suppress(OSError):
        words = os.fsdecode(Path(process, "cmdline").read_bytes()).split("\0")[1:_WORDS]
        for path in (word for word in words if os.path.isabs(word)):
            with contextlib.suppress(OSError):
                if os.path.isfile(path) and os.path.getsize(path) <= _MOST_BYTES:
                    found[path] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return found


def python_of(program: str, environment: Mapping[str, str]) -> str:
    """Return the path of the Python that runs a program; empty if unknown.

    It is the program itself or the interpreter in its first line. For other programs, such as a
    shell, it is `python` in PATH.

    Args:
        program: the first word of a command.
        environment: of the process.
    """
    search = environment.get("PATH", "")
    path = shutil.which(program, path=search) or ""
    if path and not _PYTHON.fullmatch(os.path.basename(path)):
        with contextlib.suppress(OSError), open(path, "rb") as stream:
            first = os.fsdecode(stream.readline(4096)).rstrip()
            path = (first[2:].split() or [""])[0] if first.startswith("#!") else ""
    if path and _PYTHON.fullmatch(os.path.basename(path)):
        return path
    return shutil.which("python", path=search) or shutil.which("python3", path=search) or ""


def installed(python: str, environment: Mapping[str, str]) -> dict[str, str] | None:
    """Return names and versions of a Python's packages; None if it cannot list them.

    Args:
        python: path of the interpreter.
        environment: of the process.
    """
    packages: dict[str, str] | None = _ask(python, _LIST_PACKAGES, environment)
    if packages is None:
        return None
    return dict(sorted(packages.items(), key=lambda pair: pair[0].lower()))


def _ask(python: str, code: str, environment: Mapping[str, str]) -> Any:
    """Return the JSON output of code in a Python, decoded; None without any."""
    try:
        answered = subprocess.run(
            [python, "-c", code],
            cwd="/",  # `-c` adds the current directory to the path
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_LIST_SECONDS,
            check=True,
        )
        return json.loads(answered.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def nvidia_versions() -> dict[str, str]:
    """Return the version of NVIDIA's driver and the newest CUDA version that it supports."""
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
