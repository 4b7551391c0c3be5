"""The way out: a small, hardened web server for /metrics and /healthz."""

from hpml_exporters.server.limits import Limits
from hpml_exporters.server.pages import Pages
from hpml_exporters.server.server import Server

__all__ = ["Limits", "Pages", "Server"]
