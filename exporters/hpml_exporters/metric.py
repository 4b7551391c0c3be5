"""What a metric is: its description once, its samples as plain immutable values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = ["Family", "Histogram", "MetricSpec", "MetricType", "Sample", "Value"]

MetricType = Literal["counter", "gauge", "info", "histogram"]


@dataclass(frozen=True)
class MetricSpec:
    """One metric as it is documented and shown.

    Attributes:
        name: full name with unit and suffix: counters end in `_total`, identity in `_info`.
        type: what may be done with it.
        help: one sentence that says what it counts, and from when where that matters.
        labels: names of its labels, in the order in which samples give their values.
        unit: base unit as it stands in the name (seconds, bytes, ratio, joules, watts, celsius,
            hertz); empty for plain numbers.
        source: where the value is read: a file, a driver call.
    """

    name: str
    type: MetricType
    help: str
    labels: tuple[str, ...] = ()
    unit: str = ""
    source: str = ""


class Histogram(NamedTuple):
    """Values of a histogram.

    Attributes:
        bounds: upper bounds of the buckets, rising, without +Inf.
        counts: observations at or below each bound (cumulative).
        total: all observations.
        sum: of all observed values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: int
    sum: float


Value = float | Histogram


class Sample(NamedTuple):
    """One series at one moment: values of the labels, and the number.

    A label's value may be empty; what is shown then is the series without that label.
    """

    labels: tuple[str, ...]
    value: Value


@dataclass(frozen=True)
class Family:
    """All series of one metric that one collector read at one moment."""

    spec: MetricSpec
    samples: tuple[Sample, ...]
