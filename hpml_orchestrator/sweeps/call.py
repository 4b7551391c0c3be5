"""Call a Python function with a point's values; run by its path in the job's own Python.

    python call.py FILE.py:NAME METRIC lr=0.1 optimizer='"adam"'

Values are JSON. The function returns a number, which becomes the figure METRIC, or a mapping of
figures; rank 0 writes them to result.json in the run's directory. Standard library only.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["call", "load_function", "main"]


def load_function(reference: str) -> Callable[..., Any]:
    """Return the function that `FILE.py:NAME` or `MODULE:NAME` names.

    The file's directory, for a module the working directory, is on Python's path from then on.

    Raises:
        ImportError: there is no such file or module, or Python has loaded another of that name.
        AttributeError: it has no such function.
    """
    place, _, name = reference.rpartition(":")
    path = Path(place)
    is_file = place.endswith(".py")
    sys.path.insert(0, str(path.resolve().parent) if is_file else os.getcwd())
    module = importlib.import_module(path.stem if is_file else place)
    if is_file and not path.samefile(module.__file__ or "."):
        raise ImportError(f"{path} has the name of a module of Python: rename it")
    function: Any = module
    for part in name.split("."):
        function = getattr(function, part)
    loaded: Callable[..., Any] = function
    return loaded


def call(reference: str, metric: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Call the function and return its figures; `seed` is passed only if it takes one.

    Raises:
        TypeError: it returns neither a number nor a mapping.
    """
    function = load_function(reference)
    parameters = inspect.signature(function).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    names = {parameter.name for parameter in parameters}
    given = {
        name: value
        for name, value in values.items()
        if name != "seed" or takes_any or name in names
    }
    returned = function(**given)
    if isinstance(returned, Mapping):
        return dict(returned)
    return {metric: float(returned)}


def _number(value: Any) -> Any:
    """Return a number of NumPy or PyTorch as Python's."""
    if not hasattr(value, "item"):
        raise TypeError(f"{type(value).__name__} is neither a number nor a text")
    return value.item()


def main(argv: list[str]) -> None:
    """Call the function that the arguments name, and write its result."""
    # Python has put this file's directory on its path, where hpml's `statistics`, `models` and
    # others would come before those of the user and of Python.
    here = os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != here]
    reference, metric, *pairs = argv
    values = {name: json.loads(text) for name, _, text in (pair.partition("=") for pair in pairs)}
    figures = json.dumps(call(reference, metric, values), default=_number)
    if os.environ.get("RANK", "0") == "0":
        target = Path(os.environ.get("HPML_RUN_DIR", "."), "result.json")
        target.with_suffix(".tmp").write_text(figures, encoding="utf-8")
        os.replace(target.with_suffix(".tmp"), target)
    sys.stdout.write(f"{figures}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
