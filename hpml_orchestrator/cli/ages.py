"""How long ago, as options take it."""

from __future__ import annotations

import re

from hpml_orchestrator.errors import InputError

__all__ = ["parse_age"]

_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}


def parse_age(text: str, *, field: str) -> float:
    """Return the seconds of an age such as 7d.

    Args:
        text: a number and its unit.
        field: the option that it was given to.

    Raises:
        InputError: it is none.

    >>> parse_age("90m", field="--older"), parse_age("1.5h", field="--older")
    (5400.0, 5400.0)
    """
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?)([smhdw])", text.strip(), re.ASCII)
    if match is None:
        raise InputError(
            "must be a number and s, m, h, d or w, such as 90m, 12h or 7d",
            field=field,
            value=text,
        )
    return float(match[1]) * _SECONDS[match[2]]
