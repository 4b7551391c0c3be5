"""The form of the metrics follows the client's weights."""

from __future__ import annotations

import pytest
from hpml_exporters.server.negotiate import wants_gzip, wants_openmetrics

PROMETHEUS_2_42 = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;"
    "escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
PROTOBUF_FIRST = (
    "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited;q=0.8,"
    + PROMETHEUS_3
)


@pytest.mark.parametrize(
    ("accept", "openmetrics"),
    [
        (PROMETHEUS_2_42, True),
        (PROMETHEUS_3, True),
        (PROTOBUF_FIRST, True),
        ("", False),
        ("*/*", False),  # curl
        ("text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", False),
        ("application/openmetrics-text", True),
        ('application/openmetrics-text; version="1.0.0"; charset=utf-8', True),
        ("application/openmetrics-text;version=0.0.1", False),
        ("application/openmetrics-text;version=2.0.0,text/plain;q=0.1", False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=0.4,text/plain;q=0.5", False),
        ("application/openmetrics-text;q=0.5,text/plain;version=1.0.0", True),
        ("application/openmetrics-text;q=0.3,text/plain;q=0,*/*;q=0.9", True),
        ("application/openmetrics-text;q=0.3,text/*;q=0.5", False),
        ("APPLICATION/OpenMetrics-Text;Q=1", True),
        ("application/openmetrics-text;q=nan", True),
        (";;,=;q=", False),
    ],
)
def test_openmetrics_by_weight(accept: str, openmetrics: bool) -> None:
    """Real headers of Prometheus, browsers and curl, and odd ones."""
    assert wants_openmetrics(accept) is openmetrics


@pytest.mark.parametrize(
    ("header", "gzip"),
    [
        ("", False),
        ("gzip", True),
        ("deflate, gzip, br, zstd", True),
        ("GZIP;q=0.001", True),
        ("gzip;q=0", False),
        ("*", True),
        ("*;q=0", False),
        ("gzip;q=0, *;q=1", False),
        ("identity", False),
        ("x-gzip", True),
    ],
)
def test_gzip_where_it_is_taken(header: str, gzip: bool) -> None:
    """A weight of zero is a no."""
    assert wants_gzip(header) is gzip
