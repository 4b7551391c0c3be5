"""Metrics and their series, as families of prometheus_client."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from prometheus_client.core import Metric
from prometheus_client.samples import Sample

MetricType = Literal["counter", "gauge", "info", "histogram"]
_UNITS = frozenset(["seconds", "bytes", "ratio", "joules", "watts", "celsius", "hertz"])
_SUFFIX = {"counter": "_total", "info": "_info"}


@dataclass(frozen=True)
class Histogram:
    """The value of one series of a histogram.

    Attributes:
        bounds: upper bounds of the buckets, rising, without infinity.
        counts: observations in each bucket, and last those above the highest bound.
        sum: of all observed values.
    """

    bounds: Sequence[float]
    counts: Sequence[int]
    sum: float


Value: TypeAlias = float | Histogram
Row: TypeAlias = tuple[Sequence[str], Value]
"""One series: values of the labels, and the number."""


@dataclass(frozen=True, eq=False)  # a key of many dicts: hashed by identity
class MetricSpec:
    """The definition of one metric.

    Attributes:
        name: full name with unit and suffix: counters end in `_total`, identity in `_info`.
        type: of the metric.
        help: one sentence about what it counts, and since when if that matters.
        labels: names of its labels, in the order in which samples give their values.
        unit: base unit, as in the name (seconds, bytes, ratio, joules, watts, celsius,
            hertz); empty for plain numbers.
        source: where the value is read: a file, a driver call.
    """

    name: str
    type: MetricType
    help: str
    labels: tuple[str, ...] = ()
    unit: str = ""
    source: str = ""

    @property
    def family_name(self) -> str:
        """The name without the suffix of its type."""
        return self.name.removesuffix(_SUFFIX.get(self.type, ""))

    def family(self, samples: Iterable[Row] = ()) -> Metric:
        """Return these series as a family; a counter below zero or NaN is left out.

        Raises:
            ValueError: a sample has not the labels of this metric.
            TypeError: a label is not text, a value is not a number, or not a histogram if one is
                wanted.
        """
        found = Metric(self.family_name, self.help, self.type, self.unit)
        for values, value in samples:
            # Every series of every scrape comes through here, and nearly all labels are plain
            # ASCII: only the others pay for an encoding.
            text = "".join(values)
            plain = text.isascii() and "\0" not in text
            sent = values if plain else map(_sendable, values)
            labels = dict(zip(self.labels, sent, strict=True))
            if isinstance(value, Histogram) != (self.type == "histogram"):
                raise TypeError(f"{self.name} cannot have the value {value!r}")
            if isinstance(value, Histogram):
                found.samples += _buckets(self.name, labels, value)
            # NaN fails this comparison too. Prometheus would take either for a counter reset.
            elif self.type != "counter" or value >= 0:
                found.samples.append(Sample(self.name, labels, float(value)))
        return found


def shown_name(family: Metric) -> str:
    """Return the name of a family's series, which is that of its `MetricSpec`."""
    return family.name + _SUFFIX.get(family.type, "")


def families(rows: Mapping[MetricSpec, Iterable[Row]]) -> list[Metric]:
    """Return the families of all metrics that have series."""
    made = (spec.family(samples) for spec, samples in rows.items())
    return [family for family in made if family.samples]


def _buckets(name: str, labels: dict[str, str], value: Histogram) -> Iterable[Sample]:
    total = 0
    bounds = [*(repr(float(bound)) for bound in value.bounds), "+Inf"]
    for bound, count in zip(bounds, value.counts, strict=True):
        total += count
        yield Sample(f"{name}_bucket", {**labels, "le": bound}, total)
    yield Sample(f"{name}_count", labels, total)
    yield Sample(f"{name}_sum", labels, value.sum)


def _sendable(value: str) -> str:
    """Return a label's value as valid UTF-8: file names may hold any bytes."""
    return value.encode("utf-8", "replace").decode().replace("\0", "\ufffd")


def metric(name: str, help_: str, labels: str = "", *, source: str = "") -> MetricSpec:
    """Return a metric whose type and unit follow from its name; histograms do not.

    Args:
        name: see `MetricSpec`.
        help_: see `MetricSpec.help`.
        labels: names of its labels, separated by blanks.
        source: see `MetricSpec`.
    """
    suffix = name.rpartition("_")[2]
    kinds: dict[str, MetricType] = {"total": "counter", "info": "info"}
    unit = name.removesuffix("_total").rpartition("_")[2]
    return MetricSpec(
        name,
        kinds.get(suffix, "gauge"),
        help_,
        tuple(labels.split()),
        unit if unit in _UNITS else "",
        source,
    )
