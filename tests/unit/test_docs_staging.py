"""The page of staging's promises names tests that are there, and no promise is without one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = "docs/staging-correctness.md"
LINES = 11
"""Lines of the list of what staging has to keep to."""


def rows(header: str) -> list[list[str]]:
    """Return the cells of the rows of the table that begins with a word."""
    text = (ROOT / PAGE).read_text("utf-8")
    table = text.partition(f"| {header} |")[2].partition("\n\n")[0]
    cells = [line.strip("|").split("|") for line in table.splitlines()[2:]]
    return [[cell.strip() for cell in row] for row in cells]


def functions(path: Path) -> set[str]:
    """Return the names of the functions of a module."""
    tree = ast.parse(path.read_text("utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_line_has_its_tests() -> None:
    """All lines of the list are there, in order, and no row of either table is without a test."""
    promises, faults = rows("line"), rows("fault")
    numbers = [int(row[0]) for row in promises]
    assert numbers == sorted(numbers)
    assert set(numbers) == set(range(1, LINES + 1))
    assert len(faults) >= 10
    for row in [*promises, *faults]:
        assert re.fullmatch(r"(`tests/[\w/]+\.py::test_\w+` ?)+", row[-1]), row


def test_the_tests_that_are_named_are_there() -> None:
    """Whoever renames or removes one finds out which promise it stood for."""
    named = re.findall(r"`(tests/\S+)::(\w+)`", (ROOT / PAGE).read_text("utf-8"))
    assert len(named) > 60
    for path, test in named:
        assert test in functions(ROOT / path), f"{path} has no {test}"
