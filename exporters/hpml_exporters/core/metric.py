"""Metrics and their series, as families of prometheus_client that are also text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias, cast

from prometheus_client.core import Metric
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

MetricType = Literal["counter", "gauge", "info", "histogram"]
_UNITS = frozenset(["seconds", "bytes", "ratio", "joules", "watts", "celsius", "hertz"])
_SUFFIX = {"counter": "_total", "info": "_info"}
_SPARE_LINES = 64


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


class _Line(NamedTuple):
    """What all samples of one series have in common.

    Attributes:
        start: of its line in the text formats, up to the value.
        name: of the sample.
        labels: of the sample.
    """

    start: str
    name: str
    labels: dict[str, str]


class Family(Metric):
    """The series of a metric at one moment.

    A scrape needs the text alone, which costs a tenth of prometheus_client's samples and encoders;
    the samples are made for those who look at them.

    Attributes:
        rows: the number of each series.
    """

    def __init__(self, spec: MetricSpec, rows: Sequence[tuple[_Line, float]]) -> None:
        """Take a metric, and the number of each series."""
        vars(self).update(spec.blank)
        self._spec, self.rows, self._text = spec, rows, ""

    def __len__(self) -> int:
        """Return the number of series."""
        return len(self.rows)

    def __bool__(self) -> bool:
        """Return True: a family without series is a family."""
        return True

    def __getattr__(self, name: str) -> list[Sample]:
        """Make the samples when they are first looked at."""
        if name != "samples":
            raise AttributeError(name)
        self.samples = [Sample(line.name, line.labels, number) for line, number in self.rows]
        return self.samples

    def text(self, *, openmetrics: bool) -> str:
        """Return what prometheus_client's encoders make of it."""
        if not self._text:
            go = cast("Callable[[float], str]", floatToGoString)
            lines = [f"{line.start}{go(number)}\n" for line, number in self.rows]
            self._text = "".join(lines)
        return self._spec.head(openmetrics) + self._text

    def joined(self, others: Iterable[Family]) -> Family:
        """Return a family with the series of others too; of equal series the first counts."""
        rows = {line.start: (line, number) for line, number in self.rows}
        for line, number in (row for other in others for row in other.rows):
            rows.setdefault(line.start, (line, number))
        return Family(self._spec, list(rows.values()))


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

    @cached_property
    def blank(self) -> dict[str, object]:
        """Attributes of a family of prometheus_client, without its samples."""
        found = vars(Metric(self.family_name, self.help, self.type, self.unit)).copy()
        del found["samples"]
        return found

    @cached_property
    def _lines(self) -> dict[tuple[str, ...], _Line]:
        return {}

    @cached_property
    def _heads(self) -> tuple[str, str]:
        kind = "gauge" if self.type == "info" else self.type
        help_ = self.help.replace("\\", r"\\").replace("\n", r"\n")
        plain = f"# HELP {self.name} {help_}\n# TYPE {self.name} {kind}\n"
        name, quoted = self.family_name, help_.replace('"', r"\"")
        unit = f"# UNIT {name} {self.unit}\n" if self.unit else ""
        return plain, f"# HELP {name} {quoted}\n# TYPE {name} {self.type}\n{unit}"

    def head(self, openmetrics: bool) -> str:
        """Return the lines before the series in the text formats."""
        return self._heads[openmetrics]

    def family(self, samples: Iterable[Row] = ()) -> Family:
        """Return these series as a family; a counter below zero or NaN is left out.

        Raises:
            ValueError: a sample has not the labels of this metric.
            TypeError: a label is not text, a value is not a number, or not a histogram if one is
                wanted.
        """
        rows: list[tuple[_Line, float]] = []
        lines, counter, histogram = self._lines, self.type == "counter", self.type == "histogram"
        for labels, value in samples:
            # Every series of every reading comes through here: only new ones pay for their text.
            values = tuple(labels)
            if histogram or isinstance(value, Histogram):
                rows += self._buckets(values, value)
            # NaN fails this comparison too. Prometheus would take either for a counter reset.
            elif not counter or value >= 0:
                line = lines.get(values) or self._line(self.name, values)
                rows.append((line, float(value)))
        if rows and len(lines) > 2 * len(rows) + _SPARE_LINES:  # most belong to jobs that are gone
            lines.clear()
        return Family(self, rows)

    def _buckets(self, values: tuple[str, ...], value: Value) -> Iterable[tuple[_Line, float]]:
        if self.type != "histogram" or not isinstance(value, Histogram):
            raise TypeError(f"{self.name} cannot have the value {value!r}")
        total = 0
        bounds = [*(repr(float(bound)) for bound in value.bounds), "+Inf"]
        for bound, count in zip(bounds, value.counts, strict=True):
            total += count
            yield self._line(f"{self.name}_bucket", values, bound), total
        yield self._line(f"{self.name}_count", values), total
        yield self._line(f"{self.name}_sum", values), value.sum

    def _line(self, name: str, values: tuple[str, ...], bound: str = "") -> _Line:
        key = (name, *values, bound) if self.type == "histogram" else values
        line = self._lines.get(key)
        if line is None:
            labels = dict(zip(self.labels, map(_sendable, values), strict=True))
            if bound:
                labels["le"] = bound
            pairs = ",".join(f'{key}="{_escaped(labels[key])}"' for key in sorted(labels))
            line = _Line(f"{name}{{{pairs}}} " if pairs else f"{name} ", name, labels)
            self._lines[key] = line
        return line


def series_count(family: Metric) -> int:
    """Return how many series a family has."""
    return len(family) if isinstance(family, Family) else len(family.samples)


def shown_name(family: Metric) -> str:
    """Return the name of a family's series, which is that of its `MetricSpec`."""
    return family.name + _SUFFIX.get(family.type, "")


def families(rows: Mapping[MetricSpec, Iterable[Row]]) -> list[Metric]:
    """Return the families of all metrics that have series."""
    made = (spec.family(samples) for spec, samples in rows.items())
    return [family for family in made if len(family)]


def _sendable(value: str) -> str:
    """Return a label's value as valid UTF-8: file names may hold any bytes."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not the text of a label")
    return value.encode("utf-8", "replace").decode().replace("\0", "\ufffd")


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


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
