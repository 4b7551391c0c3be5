"""What clients may use of the server, and what the server counts."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["STATUSES", "Counters", "Limits", "Pace"]

STATUSES = (200, 400, 401, 404, 405, 408, 413, 431, 500, 503, 505)
"""Every status that the server ever sends."""


@dataclass(frozen=True)
class Limits:
    """Limits of the server; times in seconds, sizes in bytes.

    Attributes:
        connections: open at the same time; beyond that, a client that was never served is closed.
        header_bytes: of a request line with all its headers.
        handshake_seconds: from the connection to the end of the TLS handshake.
        request_seconds: from the connection, or the first byte of a later request, to its end.
        idle_seconds: between two requests on one connection.
        check_seconds: a password waits for its check.
        write_seconds: from a response's first byte to its last.
        linger_seconds: a closed connection waits for the client to close it too.
        handshakes: TLS handshakes per second of each known address, and of all others together.
        handshakes_at_once: that may exceed this rate.
        password_cpu: share of a core that checking passwords may take.
        password_burst: CPU seconds that may exceed this share.
        waiting_checks: passwords that wait for their check.
        watch_seconds: between two looks at the web-config file.
    """

    connections: int = 256
    header_bytes: int = 8192
    handshake_seconds: float = 5.0
    request_seconds: float = 5.0
    idle_seconds: float = 150.0
    check_seconds: float = 10.0
    write_seconds: float = 10.0
    linger_seconds: float = 1.0
    handshakes: float = 50.0
    handshakes_at_once: int = 10
    password_cpu: float = 0.1
    password_burst: float = 0.5
    waiting_checks: int = 32
    watch_seconds: float = 2.0


@dataclass
class Counters:
    """Plain numbers, written by the server's threads and read by any.

    Attributes:
        connections: open now.
        accepted: connections since the start.
        responses: since the start, by status; every status of STATUSES is there from the start.
        closed: connections that the server ended early, by reason: `crowded` (too many of them),
            `timeout` (the client was too slow), `tls` (the handshake failed), `handshakes` (too
            many of them), `error` (a fault of the server).
        reload_failures: changed web-config files that could not be used.
    """

    connections: int = 0
    accepted: int = 0
    responses: dict[int, int] = field(default_factory=lambda: dict.fromkeys(STATUSES, 0))
    closed: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            ("crowded", "timeout", "tls", "handshakes", "error"), 0
        )
    )
    reload_failures: int = 0


class Pace:
    """A rate limit with a burst; it says how long to wait (the generic cell rate algorithm)."""

    def __init__(self, rate: float, burst: float) -> None:
        """Start with the whole burst; `rate` is in units per second, `burst` in units."""
        self._rate = rate
        self._ahead = burst / rate
        self._used_until = float("-inf")

    def delay(self, now: float) -> float:
        """Return the seconds until the next use; 0 while it is within the limit."""
        return max(0.0, self._used_until - self._ahead - now)

    def use(self, now: float, units: float = 1.0) -> None:
        """Count a use of so many units."""
        self._used_until = max(self._used_until, now) + units / self._rate
