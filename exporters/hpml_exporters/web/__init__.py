"""A small, hardened web server for /metrics and /healthz."""

from hpml_exporters.web.handler import Pages, RequestLimits
from hpml_exporters.web.server import Counters, Server

__all__ = ["Counters", "Pages", "RequestLimits", "Server"]
