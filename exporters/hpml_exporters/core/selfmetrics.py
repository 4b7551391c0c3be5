"""The health of an exporter's collectors and of its web server, as metrics."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from prometheus_client.core import Metric

from hpml_exporters.core.metric import MetricSpec, MetricType, families, series_count
from hpml_orchestrator import __version__

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
