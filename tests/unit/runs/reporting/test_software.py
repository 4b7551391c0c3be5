"""The line of `hpml show` about the software of a run."""

from __future__ import annotations

import pytest

from hpml_orchestrator.records.schema import SoftwareRecord
from hpml_orchestrator.runs.reporting.software import software_line

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
