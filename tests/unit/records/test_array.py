"""The tasks of a job array: Slurm's forms, YAML's traps, one text for the same tasks."""

from __future__ import annotations

from typing import Any

import pytest

from hpml_orchestrator.records.ids import parse_array


@pytest.mark.parametrize(
    ("value", "indices", "limit", "text"),
    [
        ("0-3", (0, 1, 2, 3), None, "0-3"),
        ("0-3%2", (0, 1, 2, 3), 2, "0-3%2"),
        ("1,3,7", (1, 3, 7), None, "1,3,7"),
        ("0-12:4", (0, 4, 8, 12), None, "0-12:4"),
        ("0-15:4", (0, 4, 8, 12), None, "0-12:4"),
        ("7,0-2,9-11:2%3", (0, 1, 2, 7, 9, 11), 3, "0-2,7,9,11%3"),
        ("3,3,3", (3,), None, "3"),
        ("1,3", (1, 3), None, "1,3"),
        (" 1, 3 ", (1, 3), None, "1,3"),
        ("007", (7,), None, "7"),
        (5, (5,), None, "5"),
        (0, (0,), None, "0"),
        ([7, 1, 3], (1, 3, 7), None, "1,3,7"),
        ([0, 1, 2], (0, 1, 2), None, "0-2"),
        ("4000000", (4000000,), None, "4000000"),
    ],
)
def test_every_form(value: Any, indices: tuple[int, ...], limit: int | None, text: str) -> None:
    """Each form gives the tasks that sbatch makes of it, once each and sorted."""
    spec = parse_array(value)
    assert (spec.indices, spec.limit, str(spec)) == (indices, limit, text)
    assert spec.max_index == max(indices)
    assert parse_array(text) == spec


def test_the_most_tasks_are_taken() -> None:
    """Ten thousand tasks are one submission."""
    assert len(parse_array("1-10000").indices) == 10_000
    assert len(parse_array("0-9999,0-9999").indices) == 10_000
