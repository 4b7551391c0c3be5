"""Lay nested mappings over one another, by the dotted names of their fields."""

from __future__ import annotations

import copy
from typing import Any

__all__ = ["covers", "is_in", "leaves", "merged"]


def leaves(data: Any, prefix: str = "", *, empty: bool = True) -> list[str]:
    """Return the dotted names of all values; a list of plain values counts as one.

    Args:
        data: nested mappings and lists.
        prefix: the dotted name of `data` itself.
        empty: whether an empty mapping counts as a value.

    >>> leaves({"a": {"b": 1, "c": [2, 3]}, "d": {}}), leaves({"d": {}}, empty=False)
    (['a.b', 'a.c', 'd'], [])
    """
    items: Any = ()
    if isinstance(data, dict):
        if not data and not empty:
            return []
        items = data.items()
    elif isinstance(data, list) and any(isinstance(item, dict) for item in data):
        items = enumerate(data)
    names = [
        name
        for key, value in items
        for name in leaves(value, f"{prefix}.{key}" if prefix else str(key), empty=empty)
    ]
    return names or ([prefix] if prefix and not items else [])


def is_in(field: str, around: str) -> bool:
    """Return whether a field is another one, or in it."""
    return f"{field}.".startswith(f"{around}.")


def covers(given: str, name: str) -> bool:
    """Return whether one field is the other, holds it, or is in it.

    >>> covers("a.b", "a.b.c"), covers("a.b.c", "a.b"), covers("a.b", "a.bc")
    (True, True, False)
    """
    return is_in(name, given) or is_in(given, name)


def merged(below: dict[str, Any], above: dict[str, Any], *, whole: str = "") -> dict[str, Any]:
    """Return a mapping laid over another: mappings are joined key by key, all else is replaced.

    Args:
        below: what counts where `above` has nothing.
        above: what counts.
        whole: a top-level key whose entries replace each other whole.

    >>> merged({"a": {"b": 1, "c": 2}}, {"a": {"c": 3}, "d": 4})
    {'a': {'b': 1, 'c': 3}, 'd': 4}
    """
    result = copy.deepcopy(below)
    for key, value in above.items():
        lower = result.get(key)
        if isinstance(lower, dict) and isinstance(value, dict):
            result[key] = {**lower, **value} if key == whole else merged(lower, value)
        else:
            result[key] = value
    return result
