"""A Python function as the tasks of an array."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.sweeps.calls import load_function, read_result, write_calls
from tests.unit.local_runs import Desk

OBJECTIVE = """\
import helper
import numpy

class Model:
    @staticmethod
    def train(lr):
        return lr

def objective(lr, layers=()):
    if lr < 0:
        raise ValueError(f"lr is {lr}")
    return {"loss": numpy.float32(lr / helper.TWO), "layers": layers}

def odd():
    return object()
"""


@pytest.fixture(autouse=True)
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's program; what a test imports of it is forgotten."""
    (tmp_path / "train.py").write_text(OBJECTIVE)
    (tmp_path / "helper.py").write_text("TWO = 2\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    for name in ("train", "helper"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path / "train.py"


def call(directory: Path, index: int, code: int = 0, **environment: str) -> str:
    """Make one call as a job does; returns what it printed to standard error."""
    done = subprocess.run(
        [sys.executable, "-m", "hpml_orchestrator.sweeps.calls", str(directory), str(index)],
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done.stderr


def test_results_and_exceptions_come_back(tmp_path: Path) -> None:
    """Numbers of NumPy are numbers; an exception is its traceback, and a second try replaces it."""
    folder = tmp_path / "calls"
    write_calls(folder, "train.py:objective", {0: {"lr": 1, "layers": [8, 8]}, 1: {"lr": -1}})
    assert read_result(folder, 0) is None
    call(folder, 0, RANK="0")
    call(folder, 0, RANK="1")  # leaves the first rank's result alone
    result = read_result(folder, 0)
    assert result is not None
    assert (result.value, result.error) == ({"loss": 0.5, "layers": [8, 8]}, "")
    assert "ValueError: lr is -1" in call(folder, 1, code=1)
    failed = read_result(folder, 1)
    assert failed is not None
    assert (failed.value, failed.error.splitlines()[-1]) == (None, "ValueError: lr is -1")
    write_calls(folder, "train:objective", {1: {"lr": 3}})
    call(folder, 1)
    again = read_result(folder, 1)
    assert again is not None
    assert (again.value["loss"], again.error) == (1.5, "")
    assert "calls.json has no call 5" in call(folder, 5, code=1)
    write_calls(folder, "train.py:odd", {0: {}})
    assert "the function returned object" in call(folder, 0, code=1)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("train.py", "there is no module"),
        ("none.py:objective", "there is no file none.py"),
        ("none.at.all:objective", "there is no module none.at.all"),
        ("train.py:Model.test", "train.py has no function Model.test"),
    ],
)
def test_references_to_nothing(reference: str, message: str) -> None:
    """The error names what is missing."""
    with pytest.raises(InputError, match=message):
        load_function(reference)


def test_functions_are_found() -> None:
    """In a file and its directory, in a module of the working directory, in a class."""
    for reference in ("train.py:Model.train", "train:Model.train"):
        assert load_function(reference)(3) == 3
    with pytest.raises(InputError, match="arguments must be numbers"):
        write_calls(Path("calls"), "train.py:objective", {0: {"lr": object()}})
    with pytest.raises(InputError, match="there is no file none.py"):
        write_calls(Path("calls"), "none.py:objective", {0: {}})


def test_calls_run_as_an_array(tmp_path: Path) -> None:
    """The command of the module's description, as tasks of a local job."""
    desk = Desk(tmp_path)
    write_calls(tmp_path / "calls", "train.py:objective", {0: {"lr": 4}, 1: {"lr": -4}})
    module = ["-u", "-m", "hpml_orchestrator.sweeps.calls"]
    command = [sys.executable, *module, str(tmp_path / "calls"), "{array.index}"]
    fields: dict[str, Any] = {"name": "calls", "command": command, "array": "0-1"}
    done = json.loads(desk.hpml("run", desk.job(**fields), "--local", "--json", code=6))
    assert [task["exit_code"] for task in done["tasks"]] == [0, 1]
    results = [read_result(tmp_path / "calls", index) for index in (0, 1)]
    assert [bool(result and result.error) for result in results] == [False, True]
