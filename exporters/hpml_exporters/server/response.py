"""Answers as bytes: status line and headers here, bodies as they come."""

from __future__ import annotations

import time
from typing import NamedTuple

__all__ = ["REASONS", "Response", "head", "plain"]

REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    413: "Content Too Large",
    414: "URI Too Long",
    417: "Expectation Failed",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
    505: "HTTP Version Not Supported",
}
"""Every code that is ever answered."""

_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_MONTHS = "Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split()


class Response(NamedTuple):
    """One answer.

    Attributes:
        status: one of REASONS.
        body: bytes; not sent to HEAD.
        content_type: of the body.
        headers: further ones, each a line without its end.
        close: the connection ends with it.
    """

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    headers: tuple[str, ...] = ()
    close: bool = False


def plain(status: int, text: str, *headers: str, close: bool = False) -> Response:
    """Return an answer of one line of text."""
    return Response(status, f"{text}\n".encode(), headers=headers, close=close)


def head(response: Response, *, keep_alive: bool, extra: tuple[str, ...] = ()) -> bytes:
    """Return status line and headers.

    Args:
        response: what is answered.
        keep_alive: the connection stays open after it.
        extra: headers that the web-config file adds to every answer.
    """
    lines = [
        f"HTTP/1.1 {response.status} {REASONS[response.status]}",
        f"Date: {_date(time.time())}",
        f"Content-Type: {response.content_type}",
        f"Content-Length: {len(response.body)}",
        f"Connection: {'keep-alive' if keep_alive else 'close'}",
        *response.headers,
        *extra,
        "\r\n",
    ]
    return "\r\n".join(lines).encode("latin-1")


def _date(now: float) -> str:
    """Return a moment as HTTP writes it, in English whatever the locale.

    >>> _date(0)
    'Thu, 01 Jan 1970 00:00:00 GMT'
    """
    at = time.gmtime(now)
    day, month = _DAYS[at.tm_wday], _MONTHS[at.tm_mon - 1]
    clock = f"{at.tm_hour:02}:{at.tm_min:02}:{at.tm_sec:02}"
    return f"{day}, {at.tm_mday:02} {month} {at.tm_year} {clock} GMT"
