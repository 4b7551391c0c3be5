"""Which request gets which answer; nothing here knows a socket."""

from __future__ import annotations

import math

from hpml_exporters.server import negotiate
from hpml_exporters.server.pages import Pages
from hpml_exporters.server.request import Request
from hpml_exporters.server.response import Response, plain

__all__ = ["answer", "has_body", "scrape_seconds"]

_INDEX = b'<!DOCTYPE html><title>hpml exporter</title><a href="/metrics">metrics</a>\n'
_VARY = "Vary: Accept, Accept-Encoding"


def has_body(request: Request) -> bool:
    """Return whether a body follows a request; none is ever read."""
    length = request.headers.get("content-length", "0")
    return length.strip("0") != "" or "transfer-encoding" in request.headers


def scrape_seconds(request: Request) -> float:
    """Return for how many seconds Prometheus waits; without end where it does not say."""
    try:
        seconds = float(request.headers.get("x-prometheus-scrape-timeout-seconds", "inf"))
    except ValueError:
        return math.inf
    return seconds if seconds > 0 else math.inf


def answer(request: Request, pages: Pages) -> Response:
    """Return what a request that may be answered gets."""
    if request.method not in {"GET", "HEAD"}:
        return plain(405, "only GET and HEAD are answered", "Allow: GET, HEAD")
    if has_body(request):
        return plain(413, "no request here has a body")
    if "expect" in request.headers:
        return plain(417, "nothing is expected here")
    if request.path == "/metrics":
        return _metrics(request, pages)
    if request.path == "/healthz":
        good, words = pages.health()
        return plain(200 if good else 503, words, "Cache-Control: no-store")
    if request.path == "/":
        return Response(200, _INDEX, "text/html; charset=utf-8")
    return plain(404, "there are /metrics and /healthz")


def _metrics(request: Request, pages: Pages) -> Response:
    """Return the metrics in the form that is asked for."""
    gzip = negotiate.wants_gzip(request.headers.get("accept-encoding", ""))
    body, kind = pages.metrics(request.headers.get("accept", ""), gzip=gzip)
    return Response(200, body, kind, (_VARY, "Content-Encoding: gzip") if gzip else (_VARY,))
