"""Calls of a Python function as tasks of a job array: arguments in, results out, by JSON files.

    write_calls(directory, "train.py:objective", [{"lr": 0.1}, {"lr": 0.2}])
    # command of a job with `array: 0-1`, in the directory that the function is to run in:
    #     python -u -m hpml_orchestrator.sweeps.calls DIRECTORY {array.index}
    read_result(directory, 1)

The directory has `calls.json` and, as calls end, `<index>.result.json`; the nodes must see it. With
several ranks, each calls the function, and what the first one returns is the result.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import InputError, NotFoundError
from hpml_orchestrator.records.files import read_json, write_json

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

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
        InputError: there is no such file, module or function. What the module itself raises is
            passed on.
    """

    def wrong(message: str) -> InputError:
        return InputError(message, field="function", value=reference)

    place, _, name = reference.rpartition(":")
    if not place or not name:
        raise wrong("must be FILE.py:NAME or MODULE:NAME")
    function: Any = _module_of_file(Path(place)) if place.endswith(".py") else _module(place)
    if function is None:
        raise wrong(f"there is no {'file' if place.endswith('.py') else 'module'} {place}")
    for part in name.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        raise wrong(f"{place} has no function {name}")
    return function  # type: ignore[no-any-return]


def _module_of_file(path: Path) -> ModuleType | None:
    if not path.is_file():
        return None
    path = path.resolve()
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None  # noqa: S101 - its name ends in .py
    assert spec.loader is not None  # noqa: S101
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # before it runs: pickle and multiprocessing look there
    spec.loader.exec_module(module)
    return module


def _module(name: str) -> ModuleType | None:
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            return None
        raise


def write_calls(
    directory: Path, function: str, arguments: Sequence[Mapping[str, Any]] | Mapping[int, Any]
) -> None:
    """Write the calls of a function: keyword arguments by the task's index.

    Args:
        directory: is made if it is missing.
        function: as `load_function` takes it; a relative path is one from the working directory.
        arguments: of each call, in order from 0 or by index.

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
    items = arguments.items() if isinstance(arguments, Mapping) else enumerate(arguments)
    calls = {str(index): dict(values) for index, values in items}
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
