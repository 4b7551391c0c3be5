"""Names for sources that were given none: what a person would call them, as far as rules allow."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.staging.faults import shown
from hpml_orchestrator.staging.request import SUFFIXES

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["name_of", "names_of"]

_MOST_CHARACTERS = 31


def name_of(source: str) -> str:
    """Return a valid name made of the last part of a path.

    >>> name_of("/scratch/ImageNet-1k.tar.gz"), name_of("2024/"), name_of("/")
    ('imagenet_1k', 'data_2024', 'data')
    """
    last = os.path.basename(os.path.abspath(source)).lower()
    for suffix in sorted(SUFFIXES, key=len, reverse=True):
        if last.endswith(suffix):
            last = last[: -len(suffix)]
            break
    plain = re.sub(r"[^a-z0-9]+", "_", last).strip("_")
    if not re.match("[a-z]", plain):
        plain = f"data_{plain}" if plain else "data"
    return plain[:_MOST_CHARACTERS]


def names_of(sources: Sequence[str]) -> list[str]:
    """Return a name for each source.

    Raises:
        InputError: two of them would have the same; names both.
    """
    whose: dict[str, str] = {}
    for source in sources:
        name = name_of(source)
        if name in whose:
            raise InputError(
                f"{shown(whose[name])} and {shown(source)} would both be called {name}",
                field="SRC",
                hint="stage one after the other, each with a --name of its own",
            )
        whose[name] = source
    return list(whose)
