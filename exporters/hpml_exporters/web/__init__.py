"""A small, hardened web server for /metrics and /healthz."""

from hpml_exporters.web.http import Pages
from hpml_exporters.web.limits import Counters, Limits
from hpml_exporters.web.server import Server

__all__ = ["Counters", "Limits", "Pages", "Server"]
