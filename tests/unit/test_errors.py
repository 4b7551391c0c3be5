"""Every error has a status with one meaning, and near names are found."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from hpml_orchestrator import errors
from hpml_orchestrator.cli.__main__ import EXIT_INTERRUPTED as EXIT_OF_ENTRY
from hpml_orchestrator.cli.process import EXIT_INTERRUPTED
from hpml_orchestrator.cli.reference import exit_statuses
from hpml_orchestrator.errors import HpmlError, InputError, did_you_mean, nearest

ROOT = Path(__file__).parents[2]
# class, what is above it, status: written by hand, as people know them
TREE = [
    ("HpmlError", "Exception", 1),
    ("InputError", "HpmlError", 2),
    ("CapacityError", "InputError", 2),
    ("WaitTimeoutError", "HpmlError", 1),
    ("NotFoundError", "HpmlError", 3),
    ("SchedulerError", "HpmlError", 4),
    ("SchedulerUnavailable", "SchedulerError", 5),
    ("JobFailedError", "HpmlError", 6),
    ("RecordError", "HpmlError", 7),
    ("StagingError", "HpmlError", 8),
    ("BindingError", "HpmlError", 79),
]


def classes() -> list[type[HpmlError]]:
    return [
        one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, HpmlError)
    ]


def test_the_table_has_every_error() -> None:
    """A new class of errors gets its line here, in the module's tree and in the documentation."""
    assert {one.__name__ for one in classes()} == {name for name, _, _ in TREE}
    named = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert named - {"Iterable"} <= {name for name, _, _ in TREE}


@pytest.mark.parametrize(("name", "above", "code"), TREE)
def test_an_error_is_what_the_documentation_says(name: str, above: str, code: int) -> None:
    """Its place and status are those of the drawn tree, and its meaning is the tree's."""
    error = getattr(errors, name)
    assert (error.__bases__[0].__name__, error.exit_code) == (above, code)
    line = re.search(rf"[─ ]{name} +exit (\d+)(?: +(.*))?$", errors.__doc__ or "", re.MULTILINE)
    assert line, f"{name} is not in the tree"
    assert int(line[1]) == code
    assert error.meaning
    rows = (ROOT / "docs" / "records.md").read_text("utf-8")
    assert re.search(rf"^\| {code} \| \w", rows, re.MULTILINE)


def test_a_status_has_one_meaning() -> None:
    """Only a subclass shares the status of an error: then both are documented together."""
    first: dict[int, type[HpmlError]] = {}
    for error in classes():
        other = first.setdefault(error.exit_code, error)
        assert issubclass(error, other) or issubclass(other, error), error


def test_every_status_of_hpml_is_told() -> None:
    """The manual's statuses and those of the map are the same, word for word."""
    text = (ROOT / "docs" / "records.md").read_text("utf-8")
    table = text.partition("Of `hpml`:")[2].partition("Of the script")[0]
    rows = dict(re.findall(r"^\| (\d+) \| (.*) \|$", table, re.MULTILINE))
    told = {str(code): meaning for code, meaning in exit_statuses().items()}
    # what happens on a node: of the script's statuses, not of the command's
    del told["79"]
    assert rows == told


def test_ctrl_c_has_one_status() -> None:
    """The entry point, which imports nothing, and the rest agree on 130."""
    assert EXIT_OF_ENTRY == EXIT_INTERRUPTED == 130


def test_an_input_error_names_field_value_and_what_is_right() -> None:
    """Long values are cut, and absent ones are not shown."""
    shown = InputError("must be short", field="name", value="x" * 400, hint="cut it")
    assert str(shown) == f"name: must be short (got '{'x' * 299}… (402 characters))"
    assert (shown.field, shown.hint) == ("name", "cut it")
    deep = "/scratch" + "/a-folder-of-a-project" * 10
    assert str(InputError("no such file", value=deep)) == f"no such file (got '{deep}')"
    assert str(InputError("must be given", field="name")) == "name: must be given"


@pytest.mark.parametrize(
    ("word", "known", "found"),
    [
        ("sumbit", ["submit", "status"], "submit"),
        ("LAST", ["last"], "last"),
        ("slrum", ["auto", "slurm", "local"], "slurm"),
        ("resorces", ["resources", "name"], "resources"),
        ("pbs", ["auto", "slurm", "local"], ""),
        ("", ["auto"], ""),
        ("x", [], ""),
    ],
)
def test_near_names_are_found(word: str, known: list[str], found: str) -> None:
    """A slip of the fingers finds its name; what is near to nothing finds none."""
    assert nearest(word, known) == found
    assert did_you_mean(word, known) == (f"did you mean {found}?" if found else "")


def test_examples_in_the_docstrings_hold() -> None:
    """What the docstrings show is what happens."""
    assert doctest.testmod(errors).failed == 0
