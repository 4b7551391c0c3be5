"""Metrics of the exporter itself: what it costs, and how its collectors do."""

from __future__ import annotations

from hpml_exporters.metric import MetricSpec

__all__ = [
    "BUILD",
    "CLOSED",
    "CONNECTIONS",
    "CPU",
    "DURATION",
    "ERRORS",
    "LAST_SUCCESS",
    "MEMORY",
    "PRESENT",
    "RELOAD_FAILURES",
    "RESPONSES",
    "SCRAPES",
    "SERIES",
    "SPECS",
    "STARTED",
    "STUCK",
    "UP",
]

_EACH = ("collector",)

UP = MetricSpec(
    "hpml_exporter_up",
    "gauge",
    "Whether the collector works: 0 after a reading that failed, is stuck or is too old, else 1.",
    _EACH,
    source="the sampler",
)
PRESENT = MetricSpec(
    "hpml_exporter_collector_present",
    "gauge",
    "Whether there is something for the collector to read on this machine now.",
    _EACH,
    source="the sampler",
)
DURATION = MetricSpec(
    "hpml_exporter_collect_duration_seconds",
    "gauge",
    "How long the collector's last reading took.",
    _EACH,
    "seconds",
    "the sampler",
)
LAST_SUCCESS = MetricSpec(
    "hpml_exporter_last_success_timestamp_seconds",
    "gauge",
    "When the collector's last good reading ended, since the epoch.",
    _EACH,
    "seconds",
    "the sampler",
)
ERRORS = MetricSpec(
    "hpml_exporter_errors_total",
    "counter",
    "Readings of the collector that failed since the exporter's start.",
    _EACH,
    source="the sampler",
)
STUCK = MetricSpec(
    "hpml_exporter_stuck_readings_total",
    "counter",
    "Readings of the collector that did not end in time since the exporter's start.",
    _EACH,
    source="the watchdog",
)
SERIES = MetricSpec(
    "hpml_exporter_series",
    "gauge",
    "Series that the collector shows.",
    _EACH,
    source="the sampler",
)
CPU = MetricSpec(
    "hpml_exporter_cpu_seconds_total",
    "counter",
    "CPU time that the exporter used, in user and kernel mode.",
    (),
    "seconds",
    "clock_gettime(CLOCK_PROCESS_CPUTIME_ID)",
)
MEMORY = MetricSpec(
    "hpml_exporter_resident_memory_bytes",
    "gauge",
    "Memory of the exporter that is in RAM.",
    (),
    "bytes",
    "/proc/self/statm",
)
STARTED = MetricSpec(
    "hpml_exporter_start_timestamp_seconds",
    "gauge",
    "When the exporter started, since the epoch; changes tell restarts.",
    (),
    "seconds",
    "clock_gettime(CLOCK_REALTIME)",
)
SCRAPES = MetricSpec(
    "hpml_exporter_scrapes_total",
    "counter",
    "Answers with metrics since the exporter's start.",
    source="the web server",
)
CONNECTIONS = MetricSpec(
    "hpml_exporter_open_connections",
    "gauge",
    "Connections to the web server that are open.",
    source="the web server",
)
RESPONSES = MetricSpec(
    "hpml_exporter_http_responses_total",
    "counter",
    "Answers of the web server since the exporter's start, of all pages.",
    ("code",),
    source="the web server",
)
CLOSED = MetricSpec(
    "hpml_exporter_connections_dropped_total",
    "counter",
    "Connections that the web server closed by itself: to make place for others, because the "
    "client was too slow or its TLS failed, or by a fault.",
    ("reason",),
    source="the web server",
)
RELOAD_FAILURES = MetricSpec(
    "hpml_exporter_web_config_failures_total",
    "counter",
    "Changed web-config files that could not be used; the settings before them stay.",
    source="the web server",
)
BUILD = MetricSpec(
    "hpml_exporter_build_info",
    "info",
    "Which exporter this is.",
    ("version", "python"),
    source="the exporter",
)

SPECS = (
    UP,
    PRESENT,
    DURATION,
    LAST_SUCCESS,
    ERRORS,
    STUCK,
    SERIES,
    CPU,
    MEMORY,
    STARTED,
    SCRAPES,
    CONNECTIONS,
    RESPONSES,
    CLOSED,
    RELOAD_FAILURES,
    BUILD,
)
"""All of them, in the order of the documentation."""
