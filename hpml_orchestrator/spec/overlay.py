"""Lay data over data: nested mappings, their dotted field names, and where values came from."""

from __future__ import annotations

from typing import Any

__all__ = ["covers", "leaves", "merged", "values"]


def leaves(data: Any, prefix: str = "") -> list[str]:
    """Return the dotted names of all values; lists of plain values count as one.

    >>> leaves({"a": {"b": 1, "c": [2, 3]}})
    ['a.b', 'a.c']
    """
    if isinstance(data, dict) and data:
        return [
            name
            for key, value in data.items()
            for name in leaves(value, f"{prefix}.{key}" if prefix else str(key))
        ]
    if isinstance(data, list) and any(isinstance(item, dict) for item in data):
        return [
            name for index, item in enumerate(data) for name in leaves(item, f"{prefix}.{index}")
        ]
    return [prefix] if prefix else []


def values(data: Any, prefix: str = "") -> list[str]:
    """Return the dotted names of all values that data sets; an empty mapping sets none.

    >>> values({"a": {}, "b": {"c": None}})
    ['b.c']
    """
    if isinstance(data, dict):
        return [
            name
            for key, value in data.items()
            for name in values(value, f"{prefix}.{key}" if prefix else str(key))
        ]
    return leaves(data, prefix)


def covers(given: str, name: str) -> bool:
    """Return whether a field that was given has to do with another: is it, holds it, or is in it.

    >>> covers("a.b", "a.b.c"), covers("a.b.c", "a.b"), covers("a.b", "a.bc")
    (True, True, False)
    """
    return name == given or name.startswith(f"{given}.") or given.startswith(f"{name}.")


def merged(below: dict[str, Any], above: dict[str, Any], *, whole: str = "") -> dict[str, Any]:
    """Return a mapping laid over another: mappings are joined key by key, all else is replaced.

    Args:
        below: what counts where `above` says nothing.
        above: what counts.
        whole: a top-level key whose entries replace each other whole.

    >>> merged({"a": {"b": 1, "c": 2}}, {"a": {"c": 3}, "d": 4})
    {'a': {'b': 1, 'c': 3}, 'd': 4}
    """
    result = dict(below)
    for key, value in above.items():
        there = result.get(key)
        if isinstance(there, dict) and isinstance(value, dict):
            result[key] = {**there, **value} if key == whole else merged(there, value)
        else:
            result[key] = value
    return result
