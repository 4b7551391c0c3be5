"""What a collector is: something with a name and an interval that reads and returns families."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, Protocol, TypeAlias, cast

from prometheus_client.core import Metric
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from hpml_orchestrator.version import __version__

# Metrics and their series, as families of prometheus_client that are also text.

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


class NotHereError(Exception):
    """There is nothing to read on this machine now: no driver, no such file system.

    The collector shows no series, which is not a failure; it is tried again a minute later.
    """


class DriverLostError(Exception):
    """The source is gone (a GPU off the bus, a driver reloaded): create the collector again."""


class StaleError(Exception):
    """This reading failed; keep showing the families of an earlier one."""

    def __init__(self, message: str, families: Iterable[Metric]) -> None:
        super().__init__(message)
        self.families = families


class Collector(Protocol):
    """One source of metrics. It reads in a separate thread, which may hang in a call.

    Attributes:
        name: of the switch (`--no-gpu`) and the label `collector`.
        interval: seconds between two readings.
        specs: all metrics it can ever return.
    """

    name: str
    interval: float
    specs: Sequence[MetricSpec]

    def sample(self, now: float) -> Iterable[Metric]:
        """Read once and return all families as they are now.

        A scrape iterates them once, when it first needs them, so a generator can put off expensive
        work until then. An error raised there counts as this reading's.

        Args:
            now: time.monotonic() of this reading, seconds.

        Raises:
            NotHereError: there is nothing to read.
            DriverLostError: the collector must be created again.
            StaleError: this reading failed; the families that it brings are shown.
            Exception: this reading failed; the families of the last one are dropped, the next
                reading is tried at its time.
        """

    def close(self) -> None:
        """Release what was opened; called by the reading thread."""


# The health of an exporter's collectors and of its web server, as metrics.

Outcome = Literal["new", "good", "absent", "failed"]


@dataclass(frozen=True)
class CollectorState:
    """The state of one collector.

    Attributes:
        outcome: of the last reading.
        families: what is shown of it.
        posted: when it ended, by time.monotonic().
        duration: how long it took, seconds.
        last_success: when the last good one ended, seconds since the epoch; 0: never.
        errors: readings that failed.
        stuck_readings: readings that did not end in time.
        stuck: one of these has not ended.
    """

    outcome: Outcome = "new"
    families: Iterable[Metric] = ()
    posted: float = 0.0
    duration: float = 0.0
    last_success: float = 0.0
    errors: int = 0
    stuck_readings: int = 0
    stuck: bool = False


def _spec(
    name: str,
    type_: MetricType,
    help_: str,
    source: str = "the sampler",
    labels: tuple[str, ...] = ("collector",),
) -> MetricSpec:
    unit = "seconds" if name.endswith("_seconds") else ""
    return MetricSpec(f"hpml_exporter_{name}", type_, help_, labels, unit, source)


_UP = _spec(
    "up",
    "gauge",
    "Whether the collector works: 0 after a reading that failed, is stuck or is too old, else 1.",
)
_PRESENT = _spec(
    "collector_present",
    "gauge",
    "Whether there is something for the collector to read on this machine now.",
)
_DURATION = _spec(
    "collect_duration_seconds", "gauge", "How long the collector's last reading took."
)
_LAST_SUCCESS = _spec(
    "last_success_timestamp_seconds",
    "gauge",
    "When the collector's last good reading ended, since the epoch.",
)
_ERRORS = _spec(
    "errors_total", "counter", "Readings of the collector that failed since the exporter's start."
)
_STUCK = _spec(
    "stuck_readings_total",
    "counter",
    "Readings of the collector that did not end in time since the exporter's start.",
    "the watchdog",
)
_SERIES = _spec("series", "gauge", "Series that the collector shows.")
_BUILD = _spec(
    "build_info", "info", "Which exporter this is.", "the exporter", ("version", "python")
)
_NODE = MetricSpec(
    "hpml_node_info",
    "info",
    "Which node this is, for joins on instance; scope is job for the exporter of a single job.",
    ("cluster", "node", "scope"),
    source="options of the exporter, else the machine's name",
)
_CONNECTIONS = _spec(
    "open_connections",
    "gauge",
    "Connections to the web server that are open.",
    "the web server",
    (),
)
_RESPONSES = _spec(
    "http_responses_total",
    "counter",
    "Answers of the web server since the exporter's start, of all pages.",
    "the web server",
    ("code",),
)
_DROPPED = _spec(
    "connections_dropped_total",
    "counter",
    "Connections that the web server closed by itself: there were too many (crowded), the client "
    "was too slow or its TLS failed, or by a fault.",
    "the web server",
    ("reason",),
)
SPECS = tuple(spec for spec in tuple(globals().values()) if isinstance(spec, MetricSpec))
"""All of them, in the order of the documentation."""


def self_families(states: Iterable[tuple[str, CollectorState]]) -> list[Metric]:
    """Return the health metrics of the collectors.

    Args:
        states: names of all collectors, and the state of each.
    """
    known = [((name,), one) for name, one in states if one.outcome != "new" or one.stuck]
    return families(
        {
            _UP: [(name, one.outcome != "failed") for name, one in known],
            _PRESENT: [(name, one.outcome != "absent") for name, one in known],
            _DURATION: [(name, one.duration) for name, one in known],
            _LAST_SUCCESS: [(name, one.last_success) for name, one in known if one.last_success],
            _ERRORS: [(name, one.errors) for name, one in known],
            _STUCK: [(name, one.stuck_readings) for name, one in known],
            _SERIES: [(name, sum(map(series_count, one.families))) for name, one in known],
            _BUILD: [((__version__, platform.python_version()), 1)],
        }
    )


def node_families(cluster: str, node: str, scope: str) -> list[Metric]:
    """Return the node's identity."""
    return [_NODE.family([((cluster, node, scope), 1)])]


def server_families(
    connections: int, responses: Mapping[int, int], dropped: Mapping[str, int]
) -> list[Metric]:
    """Return the metrics of a web server.

    Args:
        connections: open now.
        responses: answers by code.
        dropped: connections that it closed by itself, by reason.
    """
    return families(
        {
            _CONNECTIONS: [((), connections)],
            _RESPONSES: [((str(code),), number) for code, number in responses.items()],
            _DROPPED: [((reason,), number) for reason, number in dropped.items()],
        }
    )
