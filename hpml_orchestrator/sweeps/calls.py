"""Calls of a Python function as tasks of a job array: arguments in, results out, by JSON files.

    write_calls(directory, "train.py:objective", {0: {"lr": 0.1}, 1: {"lr": 0.2}})
    # command of a job with `array: 0-1`, in the directory that the function is to run in:
    #     python -u -m hpml_orchestrator.sweeps.calls DIRECTORY {array.index}
    read_result(directory, 1)

The directory has `calls.json` and, as calls end, `<index>.result.json`; the nodes must see it. With
several ranks, each calls the function, and what the first one returns is the result.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hpml_orchestrator.errors import InputError, NotFoundError
from hpml_orchestrator.records.files import read_json, write_json

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Result", "load_function", "main", "read_result", "write_calls"]

_CALLS = "calls.json"


@dataclass(frozen=True)
class Result:
    """What a call ended with.

    Attributes:
        value: what the function returned: a number, a text, or lists and mappings of such.
        error: the traceback of its exception; empty if it returned.
    """

    value: Any = None
    error: str = ""


def load_function(reference: str) -> Callable[..., Any]:
    """Return the function that `FILE.py:NAME` or `MODULE:NAME` names.

    A file's directory, and for a module the working directory, are on Python's path from then on.

    Raises:
        InputError: there is no such file, module or function; what the module itself raises is
            passed on.
    """
    place, _, name = reference.rpartition(":")
    path, kind, module = Path.cwd() / place, "module", place
    if place.endswith(".py"):
        path, kind, module = path.resolve(), "file", path.stem
    missing = InputError(f"there is no {kind} {place}", field="function", value=reference)
    if not place or (kind == "file" and not path.is_file()):
        raise missing
    sys.path.insert(0, str(path.parent if kind == "file" else Path.cwd()))
    try:
        function: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if f"{module}.".startswith(f"{error.name}."):
            raise missing from None
        raise
    for part in name.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        message = f"{place} has no function {name}"
        raise InputError(message, field="function", value=reference)
    return cast("Callable[..., Any]", function)


def write_calls(directory: Path, function: str, arguments: Mapping[int, Mapping[str, Any]]) -> None:
    """Write the calls of a function.

    Args:
        directory: is made if it is missing.
        function: as `load_function` takes it; a relative path starts at the working directory.
        arguments: of each call, keyword arguments by the task's index.

    Raises:
        InputError: there is no such file, or arguments are not what JSON can hold.
        RecordError: the directory cannot be written.
    """
    place, _, name = function.rpartition(":")
    if place.endswith(".py"):
        path = Path(os.path.abspath(place))
        if not path.is_file():
            raise InputError(f"there is no file {place}", field="function", value=function)
        function = f"{path}:{name}"
    calls = {str(index): dict(values) for index, values in arguments.items()}
    try:
        json.dumps(calls)
    except TypeError as error:
        raise InputError(
            f"arguments must be numbers, texts, lists or mappings: {error}", field="arguments"
        ) from error
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / _CALLS, {"function": function, "calls": calls})


def read_result(directory: Path, index: int) -> Result | None:
    """Return the result of a call; None while it has none.

    Raises:
        RecordError: it cannot be read.
    """
    try:
        record = read_json(_result_path(directory, index))
    except NotFoundError:
        return None
    return Result(record["value"], record["error"])


def main(argv: list[str]) -> int:
    """Make the call `DIRECTORY INDEX`; return 0, or 1 after an exception, which is printed.

    Raises:
        NotFoundError: there is no such call.
        RecordError: the calls cannot be read, or the result cannot be written.
    """
    directory, index = Path(argv[0]), int(argv[1])
    record = read_json(directory / _CALLS)
    if str(index) not in record["calls"]:
        raise NotFoundError(f"{directory / _CALLS} has no call {index}")
    path = _result_path(directory, index)
    first = os.environ.get("RANK", "0") == "0"
    if first:
        path.unlink(missing_ok=True)  # of an earlier attempt
    value, error = None, ""
    try:
        returned = load_function(record["function"])(**record["calls"][str(index)])
        value = json.loads(json.dumps(returned, default=_plain))
    except Exception:  # noqa: BLE001 - the user's function
        error = traceback.format_exc()
        sys.stderr.write(error)
    if first:
        write_json(path, {"value": value, "error": error})
    return 1 if error else 0


def _plain(value: Any) -> Any:
    """Return a number of NumPy or PyTorch as Python's."""
    if not hasattr(value, "item"):
        raise TypeError(f"the function returned {type(value).__name__}, which JSON cannot hold")
    return value.item()


def _result_path(directory: Path, index: int) -> Path:
    return directory / f"{index}.result.json"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
