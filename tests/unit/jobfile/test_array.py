"""`array` in a job file and on the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hpml_orchestrator.records.ids import ArraySpec, parse_array

if TYPE_CHECKING:
    from tests.unit.jobfile.conftest import Load


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("array: 0-9%2", "0-9%2"),
        ("array: 1,3", "1,3"),
        ("array: 1,000", "0-1"),
        ("array: 5", "5"),
        ("array: 007", "7"),
        ("array: [1, 3, 7]", "1,3,7"),
        ("array: '4'", "4"),
        ("array:", None),
    ],
)
def test_in_a_job_file(load: Load, line: str, text: str | None) -> None:
    """YAML's own reading of numbers and lists does no harm."""
    job = load(f"name: a\nscript: x.py\n{line}\n").job
    assert job.array == (None if text is None else parse_array(text))
    assert job.written("array") == text


def test_from_the_command_line(load: Load) -> None:
    """`--set array=…` has the same effect as the job file."""
    base = "name: a\nscript: x.py\n"
    assert load(base, "array=0-31:4%2").job.array == ArraySpec(tuple(range(0, 32, 4)), 2)
    assert load(base, "array=3").job.array == ArraySpec((3,))
    assert load(base + "array: 0-9", "array=null").job.array is None
