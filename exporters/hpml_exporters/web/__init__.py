"""A small, hardened web server for /metrics and /healthz."""

from hpml_exporters.web.handler import Limits, Pages
from hpml_exporters.web.server import Counters, Server

__all__ = ["Counters", "Limits", "Pages", "Server"]
