"""How the collectors and the web server of an exporter do, as metrics."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from prometheus_client.core import Metric

from hpml_exporters.core.metric import MetricSpec, families
from hpml_orchestrator import __version__

__all__ = [
    "SPECS",
    "Outcome",
    "ServerCounts",
    "State",
    "node_families",
    "self_families",
    "server_families",
]

Outcome = Literal["new", "good", "absent", "failed"]


@dataclass(frozen=True)
class State:
    """How a collector does.

    Attributes:
        outcome: of the last reading.
        families: what is shown of it.
        posted: when it ended, by time.monotonic().
        duration: how long it took, seconds.
        last_success: when the last good one ended, seconds since the epoch; 0: never.
        errors: readings that failed.
        stuck_readings: readings that did not end in time.
        stuck: one of these goes on.
    """

    outcome: Outcome = "new"
    families: Iterable[Metric] = ()
    posted: float = 0.0
    duration: float = 0.0
    last_success: float = 0.0
    errors: int = 0
    stuck_readings: int = 0
    stuck: bool = False


_EACH = ("collector",)
_UP = MetricSpec(
    "hpml_exporter_up",
    "gauge",
    "Whether the collector works: 0 after a reading that failed, is stuck or is too old, else 1.",
    _EACH,
    source="the sampler",
)
_PRESENT = MetricSpec(
    "hpml_exporter_collector_present",
    "gauge",
    "Whether there is something for the collector to read on this machine now.",
    _EACH,
    source="the sampler",
)
_DURATION = MetricSpec(
    "hpml_exporter_collect_duration_seconds",
    "gauge",
    "How long the collector's last reading took.",
    _EACH,
    "seconds",
    "the sampler",
)
_LAST_SUCCESS = MetricSpec(
    "hpml_exporter_last_success_timestamp_seconds",
    "gauge",
    "When the collector's last good reading ended, since the epoch.",
    _EACH,
    "seconds",
    "the sampler",
)
_ERRORS = MetricSpec(
    "hpml_exporter_errors_total",
    "counter",
    "Readings of the collector that failed since the exporter's start.",
    _EACH,
    source="the sampler",
)
_STUCK = MetricSpec(
    "hpml_exporter_stuck_readings_total",
    "counter",
    "Readings of the collector that did not end in time since the exporter's start.",
    _EACH,
    source="the watchdog",
)
_SERIES = MetricSpec(
    "hpml_exporter_series",
    "gauge",
    "Series that the collector shows.",
    _EACH,
    source="the sampler",
)
_BUILD = MetricSpec(
    "hpml_exporter_build_info",
    "info",
    "Which exporter this is.",
    ("version", "python"),
    source="the exporter",
)
_NODE = MetricSpec(
    "hpml_node_info",
    "info",
    "Which node this is, for joins on instance; scope is job for the exporter of a single job.",
    ("cluster", "node", "scope"),
    source="options of the exporter, else the machine's name",
)
_CONNECTIONS = MetricSpec(
    "hpml_exporter_open_connections",
    "gauge",
    "Connections to the web server that are open.",
    source="the web server",
)
_RESPONSES = MetricSpec(
    "hpml_exporter_http_responses_total",
    "counter",
    "Answers of the web server since the exporter's start, of all pages.",
    ("code",),
    source="the web server",
)
_DROPPED = MetricSpec(
    "hpml_exporter_connections_dropped_total",
    "counter",
    "Connections that the web server closed by itself: to make place for others, because the "
    "client was too slow or its TLS failed, or by a fault.",
    ("reason",),
    source="the web server",
)
_RELOAD_FAILURES = MetricSpec(
    "hpml_exporter_web_config_failures_total",
    "counter",
    "Changed web-config files that could not be used; the settings before them stay.",
    source="the web server",
)

SPECS = (
    _UP,
    _PRESENT,
    _DURATION,
    _LAST_SUCCESS,
    _ERRORS,
    _STUCK,
    _SERIES,
    _BUILD,
    _NODE,
    _CONNECTIONS,
    _RESPONSES,
    _DROPPED,
    _RELOAD_FAILURES,
)
"""All of them, in the order of the documentation."""


def self_families(states: Iterable[tuple[str, State]]) -> list[Metric]:
    """Return how collectors do.

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
            _SERIES: [(name, sum(len(f.samples) for f in one.families)) for name, one in known],
            _BUILD: [((__version__, platform.python_version()), 1)],
        }
    )


def node_families(cluster: str, node: str, scope: str) -> list[Metric]:
    """Return which node this is."""
    return [_NODE.family([((cluster, node, scope), 1)])]


@dataclass(frozen=True)
class ServerCounts:
    """What a web server counts.

    Attributes:
        connections: open now.
        responses: answers by code.
        dropped: connections that it closed by itself, by reason.
        reload_failures: changed web-config files that could not be used.
    """

    connections: int
    responses: dict[int, int]
    dropped: dict[str, int]
    reload_failures: int


def server_families(counts: ServerCounts) -> list[Metric]:
    """Return how a web server does."""
    return families(
        {
            _CONNECTIONS: [((), counts.connections)],
            _RESPONSES: [((str(code),), number) for code, number in counts.responses.items()],
            _DROPPED: [((reason,), number) for reason, number in counts.dropped.items()],
            _RELOAD_FAILURES: [((), counts.reload_failures)],
        }
    )
