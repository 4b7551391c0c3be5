"""The axes of a sweep: lists of values, ranges, and the values of others with which they apply."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    Tag,
    model_validator,
)

from hpml_orchestrator.jobfile.text import Model

_Number = StrictInt | StrictFloat
Positive = Annotated[_Number, Field(gt=0)]


def _plain(value: object) -> object:
    if not isinstance(value, (bool, int, float, str)):
        raise ValueError("must be a number, a text, true or false")  # noqa: TRY004 - for pydantic
    return value


Scalar = Annotated[StrictBool | StrictInt | StrictFloat | str, BeforeValidator(_plain)]


def distinct(value: list[object]) -> list[object]:
    """Return the list, whose entries must differ."""
    known: set[object] = set()
    for entry in value:
        if entry in known:
            raise ValueError(f"names {entry} twice")
        known.add(entry)
    return value


_Values = Annotated[list[Scalar], Field(min_length=1), AfterValidator(distinct)]
_When = dict[
    str,
    Annotated[
        Annotated[_Values, Tag("[values]")] | Annotated[Scalar, Tag("[value]")],
        Discriminator(lambda value: "[values]" if isinstance(value, list) else "[value]"),
    ],
]


class Choices(Model):
    """Values of an axis that belongs to some values of other axes only."""

    values: _Values
    """Its values."""
    when: Annotated[_When, Field(min_length=1)]
    """The values of other axes with which it applies, `{--model: vit}`. Runs with other values have
    this axis not at all: the argument is not given, a field stays as in the base job."""


class Range(Model):
    """A range that a search takes values from."""

    low: _Number
    """Smallest value."""
    high: _Number
    """Largest value."""
    log: StrictBool = False
    """Whether to search evenly in the logarithm."""
    step: Positive | None = None
    """Distance of neighbouring values; whole numbers have 1."""
    when: _When = Field(default={})
    """The values of other axes with which it applies, as of a list."""

    @model_validator(mode="after")
    def _ordered(self) -> Range:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ValueError(f"must have low below high, not {self.low} and {self.high}")
        if self.log and (self.low <= 0 or self.step is not None):
            raise ValueError("log needs low above zero, and no step")
        return self

    @property
    def whole(self) -> bool:
        """Whether its values are whole numbers."""
        return isinstance(self.low, int) and isinstance(self.high, int)


def _axis_kind(value: object) -> str:
    if isinstance(value, Choices) or (isinstance(value, dict) and "values" in value):
        return "[choices]"
    return "[range]" if isinstance(value, (dict, Range)) else "[values]"


Axis = Annotated[
    Annotated[_Values, Tag("[values]")]
    | Annotated[Range, Tag("[range]")]
    | Annotated[Choices, Tag("[choices]")],
    Discriminator(_axis_kind),
]
