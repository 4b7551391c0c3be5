"""The line of `hpml show` about the software of a run."""

from __future__ import annotations

from typing import Any

import pytest

from hpml_orchestrator.records.schema import SoftwareRecord
from hpml_orchestrator.runs.reporting.description import (
    requirements_text,
    software_line,
    torch_lines,
)

TORCH = {"torch": "2.4.0", "zlib-ng": "1", "numpy": "2.0"}


@pytest.mark.parametrize(
    ("record", "line"),
    [
        (
            {
                "python": "/env/python",
                "packages": TORCH,
                "modules": ["gcc/12", "a"],
                "nvidia_driver": "550.1",
                "cuda": "12.4",
            },
            "/env/python, 3 packages (torch 2.4.0), modules gcc/12 and a, driver 550.1 (CUDA 12.4)",
        ),
        ({"python": "/p", "packages": {"a": "1"}}, "/p, 1 package"),
        ({"python": None, "packages": None, "modules": []}, "Python unknown"),
        ({}, "Python unknown"),
    ],
)
def test_the_line(record: SoftwareRecord, line: str) -> None:
    """It has what was recorded; older and damaged records lack some of it."""
    assert software_line(record) == line


def test_the_lines_of_pytorch() -> None:
    """One with the build, and one for each thing that does not fit; none of a damaged record."""
    build = {"version": "2.13.0+cpu", "mkl": True, "onednn": True}
    limits = {"ATEN_CPU_CAPABILITY": "default"}
    record: Any = {"torch": build, "vectors": {"cpu": "AVX2", "limits": limits}}
    assert torch_lines(record) == [
        "2.13.0+cpu, for CPUs only, oneDNN, MKL, vectors default of the CPU's AVX2",
        "warning: ATEN_CPU_CAPABILITY=default keeps it from this CPU's AVX2: unset it",
    ]
    assert torch_lines({"python": "/p"}) == []
    damaged: Any = {"torch": build, "vectors": {"cpu": 3}}
    assert torch_lines(damaged) == []


def test_a_requirements_file() -> None:
    """A line per package; what would be an option of pip, or no version, is a comment."""
    packages = {
        "a.b-c": "1!2.0",
        "pip": "24",
        "torch": "2.13.0+cpu",
        "evil": "1 --index-url x\n-e .",
        "none": "None",
    }
    record: SoftwareRecord = {"python": "/p", "python_version": "3.11.2", "packages": packages}
    text = requirements_text(record, "7-a")
    first, python, *_, one, index, torch, evil, none = text.split("\n")
    assert "run 7-a: `pip install -r`" in first
    assert python == "# Python 3.11.2, /p; loaded modules: none"
    assert (one, torch) == ("a.b-c==1!2.0", "torch==2.13.0+cpu")
    assert index == "# +cpu is in another package index: give pip its --index-url"
    assert evil == "# left out, no plain version: evil==1 --index-url x\ufffd-e ."
    assert none == "# left out, no plain version: none==None"
