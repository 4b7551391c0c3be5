"""What the server counts of itself, for the metrics about the exporter."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpml_exporters.server.response import REASONS

__all__ = ["Counters"]


@dataclass
class Counters:
    """Plain numbers, written by the server's thread and read by any.

    Attributes:
        connections: open now.
        accepted: connections since the start.
        requests: answers by code since the start; every code that exists is there from the start.
        refused: connections that were closed to make place for another one.
        timeouts: connections that were closed because the client took too long.
        handshakes_failed: TLS connections that did not come to a request.
        reload_failures: changed web-config files that could not be used.
        errors: connections that were closed because of a fault of ours.
    """

    connections: int = 0
    accepted: int = 0
    requests: dict[int, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    refused: int = 0
    timeouts: int = 0
    handshakes_failed: int = 0
    reload_failures: int = 0
    errors: int = 0
