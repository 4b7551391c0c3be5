"""The installed build of PyTorch, and whether it suits the CPU, the GPUs and their driver.

This reads files of the package, because importing PyTorch would delay the job's start by seconds.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpml_orchestrator.records.schema import SoftwareRecord, TorchRecord, VectorRecord

READ_BUILD = r"""
import glob, importlib.metadata, importlib.util, json, os, re, sys

def of_file(pattern, *names):
    try:
        with open(os.path.join(home, *names)) as stream:
            return dict(re.findall(pattern, stream.read(), re.M))
    except (OSError, ValueError):
        return {}

def of_package(name):
    for package in ("nvidia-%s-cu%s" % (name, major), "nvidia-" + name):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pass
    for path in sorted(glob.glob(os.path.join(sys.prefix, "conda-meta", name + "-[0-9]*.json"))):
        return os.path.basename(path).split("-")[1]

sys.path[:] = [path for path in sys.path if path]  # else a directory `torch` of the user counts
found, build = importlib.util.find_spec("torch"), None
if found is not None and found.origin:
    home = os.path.dirname(found.origin)
    version = of_file(r"^(__version__|cuda|hip)\b.*= '(.*)'", "version.py")
    config = of_file(r"^#define (AT_\w+_ENABLED)\(\) ([01])", "include", "ATen", "Config.h")
    major = version.get("cuda", "").split(".")[0]
    build = {"version": version.get("__version__"), "cuda": version.get("cuda"),
             "rocm": version.get("hip"), "cudnn": None, "nccl": None}
    if major:
        build.update(cudnn=of_package("cudnn"), nccl=of_package("nccl"))
    for name, key in (("mkl", "AT_MKL_ENABLED"), ("onednn", "AT_MKLDNN_ENABLED")):
        build[name] = config[key] == "1" if key in config else None
print(json.dumps(build))
"""
"""Code to run in the job's Python: prints a TorchRecord as JSON, or null without PyTorch."""

_LEVELS = ("DEFAULT", "AVX2", "AVX512")
_FLAGS = {  # CPU flags in /proc/cpuinfo that PyTorch requires for a level
    "AVX512": {"avx512f", "avx512vl", "avx512bw", "avx512dq", "fma"},
    "AVX2": {"avx2", "fma"},
}
_LIMITS = (
    "ATEN_CPU_CAPABILITY",  # PyTorch's own kernels
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",  # its old name
    "MKL_ENABLE_INSTRUCTIONS",
)


def read_vectors(
    environment: Mapping[str, str], cpuinfo: Path = Path("/proc/cpuinfo")
) -> VectorRecord | None:
    """Return the vector instructions of the CPU and variables that restrict them; None if not x86.

    Args:
        environment: of the program.
        cpuinfo: text of /proc/cpuinfo.
    """
    try:
        with cpuinfo.open(encoding="utf-8", errors="replace") as stream:
            line = next((line for line in stream if line.startswith("flags")), "")
    except OSError:
        return None
    flags = set(line.partition(":")[2].split())
    if not flags:
        return None
    cpu = next((level for level, wanted in _FLAGS.items() if wanted <= flags), _LEVELS[0])
    limits = {name: environment[name] for name in _LIMITS if environment.get(name)}
    lower = {name: value for name, value in limits.items() if _is_below(name, value, cpu)}
    return {"cpu": cpu, "limits": lower}


def _is_below(name: str, value: str, cpu: str) -> bool:
    """Return whether the value of a variable allows less than the CPU supports."""
    text = value.upper()
    if name != _LIMITS[0] and text in ("ALL", "DEFAULT"):  # oneDNN: no limit
        return False
    if any(part in text for part in ("AVX512", "AVX10", "AMX")):
        return False
    return _LEVELS.index("AVX2" if "AVX2" in text else "DEFAULT") < _LEVELS.index(cpu)


def torch_text(software: SoftwareRecord) -> str:
    """Return PyTorch's build as one line; empty without PyTorch."""
    build = software.get("torch")
    if not build:
        return ""
    names = {"cuda": "CUDA", "rocm": "ROCm", "cudnn": "cuDNN", "nccl": "NCCL"}
    parts = [str(build.get("version") or "of an unknown version")]
    parts += [f"{text} {build[name]}" for name, text in names.items() if build.get(name)]  # type: ignore[literal-required]
    if not build.get("cuda") and not build.get("rocm"):
        parts.append("for CPUs only")
    libraries = {"oneDNN": build.get("onednn"), "MKL": build.get("mkl")}
    parts += [name if has else f"no {name}" for name, has in libraries.items() if has is not None]
    if vectors := software.get("vectors"):
        own = [name for name in vectors["limits"] if name == _LIMITS[0]]
        used = (
            f"{vectors['limits'][own[0]]} of the CPU's {vectors['cpu']}" if own else vectors["cpu"]
        )
        parts.append(f"vectors {used}")
    return ", ".join(parts)


def torch_warnings(software: SoftwareRecord) -> list[str]:
    """Return how PyTorch's build does not suit the node, and what to do."""
    build = software.get("torch")
    if not build:
        return []
    found = [*_gpu_warnings(software, build)]
    vectors = software.get("vectors")
    if vectors and build.get("mkl") is False:
        found.append(
            "built without MKL: linear algebra on the CPU may be slower; use PyTorch's wheels"
        )
    if build.get("onednn") is False:
        found.append("built without oneDNN: convolutions on the CPU are slow; use PyTorch's wheels")
    if vectors:
        for name, value in vectors["limits"].items():
            found.append(f"{name}={value} keeps it from this CPU's {vectors['cpu']}: unset it")
    return found


def _gpu_warnings(software: SoftwareRecord, build: TorchRecord) -> list[str]:
    cuda, driver = build.get("cuda"), software.get("cuda")
    if not cuda and not build.get("rocm"):
        has_gpus = software.get("has_gpus") and software.get("nvidia_driver")
        return ["built without CUDA, but there are GPUs: install a CUDA build"] if has_gpus else []
    if not cuda or not driver or _numbers(cuda) <= _numbers(driver):
        return []
    if _numbers(cuda)[:1] > _numbers(driver)[:1]:
        return [f"built for CUDA {cuda}, the driver supports {driver}: install a build for that"]
    text = f"built for CUDA {cuda}, newer than the driver's {driver}: what is compiled at run time"
    return [f"{text} may fail; install a build for that"]


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)[:2]]
