"""What a build of PyTorch is, read from its files, and where it does not fit a node."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.records.torch_build import (
    READ_BUILD,
    read_vectors,
    torch_text,
    torch_warnings,
)

AVX2, AVX512 = "fpu avx2 fma", "fpu avx2 fma avx512f avx512vl avx512bw avx512dq"
# of torch 2.5.1+cu124
VERSION = "debug = False\ncuda: Optional[str] = '12.4'\nhip: Optional[str] = None\n"
CONFIG = "#define AT_MKLDNN_ENABLED() 1\n#define AT_MKLDNN_ACL_ENABLED() 0\n"
BUILD = {"version": "2.5.1+cu124", "cuda": "12.4", "rocm": None, "mkl": True, "onednn": True}
ON_CPUS = {**BUILD, "version": "2.13.0+cpu", "cuda": None}


def test_a_cuda_build_is_read_from_its_files(tmp_path: Path) -> None:
    """Nothing is imported; a directory `torch` where the program started is another thing."""
    site, here = tmp_path / "site", tmp_path / "here"
    (site / "torch" / "include" / "ATen").mkdir(parents=True)
    (here / "torch").mkdir(parents=True)
    (site / "torch" / "__init__.py").write_text("raise SystemExit('imported')\n")
    (site / "torch" / "version.py").write_text(f"__version__ = '2.5.1+cu124'\n{VERSION}")
    config = site / "torch" / "include" / "ATen" / "Config.h"
    config.write_text(f"{CONFIG}#define AT_MKL_ENABLED() 0\n")
    for name, version in {"nvidia_cudnn_cu12": "9.1.0.70", "nvidia_nccl_cu12": "2.21.5"}.items():
        info = site / f"{name}-{version}.dist-info"
        info.mkdir()
        text = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        (info / "METADATA").write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", READ_BUILD],
        env=environment,
        cwd=here,
        capture_output=True,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found == {**BUILD, "mkl": False, "cudnn": "9.1.0.70", "nccl": "2.21.5"}
    assert torch_text({"torch": found}) == (
        "2.5.1+cu124, CUDA 12.4, cuDNN 9.1.0.70, NCCL 2.21.5, oneDNN, no MKL"
    )


@pytest.mark.parametrize(
    ("flags", "variables", "expected"),
    [
        (AVX512, {}, {"cpu": "AVX512", "limits": {}}),
        (AVX2, {"ATEN_CPU_CAPABILITY": "avx2"}, {"cpu": "AVX2", "limits": {}}),
        (AVX2, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, {"cpu": "AVX2", "limits": {}}),
        (
            AVX512,
            {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "DEFAULT"},
            {"cpu": "AVX512", "limits": {"ATEN_CPU_CAPABILITY": "default"}},
        ),
        ("fpu sse2", {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}, {"cpu": "DEFAULT", "limits": {}}),
        ("", {}, None),  # no x86
    ],
)
def test_vectors(flags: str, variables: dict[str, str], expected: Any, tmp_path: Path) -> None:
    """The CPU's level, and only those variables that allow less."""
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor : 0\nflags\t\t: {flags}\n" if flags else "Features : asimd\n")
    assert read_vectors(variables, cpuinfo) == expected


LIMITED = {"cpu": "AVX512", "limits": {"ATEN_CPU_CAPABILITY": "avx2"}}


@pytest.mark.parametrize(
    ("software", "words"),
    [
        ({"torch": BUILD, "cuda": "12.4", "nvidia_driver": "550", "has_gpus": True}, ""),
        ({"torch": BUILD, "cuda": "11.8"}, "built for CUDA 12.4, the driver supports 11.8"),
        ({"torch": BUILD, "cuda": "12.2"}, "newer than the driver's 12.2"),
        ({"torch": BUILD, "cuda": "13.0"}, ""),
        ({"torch": ON_CPUS, "nvidia_driver": "550", "has_gpus": True}, "built without CUDA"),
        ({"torch": ON_CPUS, "nvidia_driver": "550", "has_gpus": False}, ""),
        ({"torch": ON_CPUS, "vectors": LIMITED}, "ATEN_CPU_CAPABILITY=avx2 keeps it from this"),
        ({"torch": {**ON_CPUS, "mkl": False}, "vectors": {**LIMITED, "limits": {}}}, "without MKL"),
        ({"torch": {**ON_CPUS, "mkl": False}}, ""),  # on ARM there is none
        ({"torch": {**ON_CPUS, "onednn": False}}, "without oneDNN"),
        ({"torch": None}, ""),
        ({}, ""),
    ],
)
def test_warnings(software: Any, words: str) -> None:
    """Each names what does not fit; a build that fits has none."""
    found = torch_warnings(software)
    assert [words in one for one in found] == ([True] if words else [])
