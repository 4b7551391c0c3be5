"""HTTP/1.1 requests and responses, as far as two pages without request bodies need (RFC 9112)."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from http import HTTPStatus
from typing import NamedTuple, Protocol
from urllib.parse import parse_qs, urlsplit

__all__ = ["BadRequestError", "Pages", "Request", "Response", "answer", "parse", "plain"]

_INDEX = b'<!DOCTYPE html><title>hpml exporter</title><a href="/metrics">metrics</a>\n'
_TEXT = "text/plain; charset=utf-8"
_HEAD_END = b"\r\n\r\n"
_REQUEST_LINE = re.compile(r"([A-Za-z]+) ([!-~\x80-\xff]+) HTTP/(\d)\.(\d)")
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_ONCE = frozenset({"host", "authorization", "content-length"})
_MAX_NAMES = 100


class Pages(Protocol):
    """What the server serves; called in its only thread, so both must be quick."""

    def metrics(self, accept: str, names: Sequence[str], *, gzip: bool) -> tuple[bytes, str]:
        """Return body and content type of /metrics.

        Args:
            accept: the header Accept; empty where there is none.
            names: of the time series to return, from `?name[]=`; empty: all.
            gzip: compress the body.
        """

    def health(self) -> tuple[bool, str]:
        """Return whether the exporter works, and a line that says so or what is wrong."""


class BadRequestError(Exception):
    """The client sent something that is not a request.

    Attributes:
        status: of the response.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Request(NamedTuple):
    """One request.

    Attributes:
        method: as the client wrote it.
        path: of the target, without its query.
        names: values of `name[]` in the query.
        headers: by lower-case name; repeated ones are joined by commas.
        keep_alive: whether the connection may be used again.
    """

    method: str
    path: str
    names: Sequence[str]
    headers: dict[str, str]
    keep_alive: bool

    @property
    def has_body(self) -> bool:
        """Whether a body follows, which is never read."""
        length = self.headers.get("content-length", "0")
        return length.strip("0") != "" or "transfer-encoding" in self.headers


class Response(NamedTuple):
    """One response; `headers` are whole lines."""

    status: int
    body: bytes
    content_type: str = _TEXT
    headers: tuple[str, ...] = ()

    def head(self, *, keep_alive: bool, extra: Sequence[str] = ()) -> bytes:
        """Return status line and headers, with `extra` lines."""
        lines = [
            f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}",
            # English whatever the locale: Python sets no LC_TIME by itself.
            time.strftime("Date: %a, %d %b %Y %H:%M:%S GMT", time.gmtime()),
            f"Content-Type: {self.content_type}",
            f"Content-Length: {len(self.body)}",
            f"Connection: {'keep-alive' if keep_alive else 'close'}",
            *self.headers,
            *extra,
            "\r\n",
        ]
        return "\r\n".join(lines).encode("latin-1")


def plain(status: int, text: str, *headers: str) -> Response:
    """Return a response of one line of text."""
    return Response(status, f"{text}\n".encode(), headers=headers)


def parse(buffer: bytearray, most_bytes: int) -> Request | None:
    """Take the first request off a buffer.

    Args:
        buffer: what was received so far; a complete request is removed from its start.
        most_bytes: longest request line with headers.

    Returns:
        The request, or None while it is incomplete.

    Raises:
        BadRequestError: this cannot become a valid request.
    """
    while buffer.startswith(b"\r\n"):  # clients may send empty lines after an earlier request
        del buffer[:2]
    if buffer and not buffer[:1].isalpha():
        raise BadRequestError(400, "not an HTTP request")
    end = buffer.find(_HEAD_END, 0, most_bytes)
    if end < 0:
        if len(buffer) >= most_bytes:
            raise BadRequestError(431, f"the headers are longer than {most_bytes} bytes")
        return None
    first, *lines = buffer[:end].decode("latin-1").split("\r\n")
    del buffer[: end + len(_HEAD_END)]
    return _request(first, _headers(lines))


def _request(line: str, headers: dict[str, str]) -> Request:
    """Return the request of a request line and its headers.

    Raises:
        BadRequestError: the line is wrong, or a header is missing.
    """
    match = _REQUEST_LINE.fullmatch(line)
    if not match:
        raise BadRequestError(400, "the request line must be METHOD PATH HTTP/1.1")
    method, target, major, minor = match.groups()
    if major != "1":
        raise BadRequestError(505, "this server speaks HTTP/1.1 and HTTP/1.0")
    if minor != "0" and "host" not in headers:
        raise BadRequestError(400, "HTTP/1.1 requires a Host header")
    try:
        url = urlsplit(target)
        names = parse_qs(url.query, max_num_fields=_MAX_NAMES).get("name[]", [])
    except ValueError:
        raise BadRequestError(400, "invalid path") from None
    options = {option.strip().lower() for option in headers.get("connection", "").split(",")}
    keep_alive = "keep-alive" in options if minor == "0" else "close" not in options
    return Request(method, url.path or "/", names, headers, keep_alive)


def _headers(lines: list[str]) -> dict[str, str]:
    """Return headers by lower-case name.

    Raises:
        BadRequestError: a line is not a header, or one that may appear once is repeated.
    """
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not _TOKEN.fullmatch(name) or _CONTROL.search(value):
            raise BadRequestError(400, "a header must be NAME: VALUE")
        name, value = name.lower(), value.strip(" \t")
        if name in headers:
            if name in _ONCE:
                raise BadRequestError(400, f"the header {name} is repeated")
            value = f"{headers[name]}, {value}"
        headers[name] = value
    return headers


def answer(request: Request, pages: Pages) -> Response:
    """Return the response to a request that is allowed."""
    if request.method not in {"GET", "HEAD"}:
        return plain(405, "only GET and HEAD are supported", "Allow: GET, HEAD")
    if request.has_body:
        return plain(413, "requests must not have a body")
    if request.path == "/metrics":
        gzip = _accepts_gzip(request.headers.get("accept-encoding", ""))
        accept = request.headers.get("accept", "")
        body, content_type = pages.metrics(accept, request.names, gzip=gzip)
        encoding = ("Content-Encoding: gzip",) if gzip else ()
        return Response(200, body, content_type, ("Vary: Accept, Accept-Encoding", *encoding))
    if request.path == "/healthz":
        healthy, message = pages.health()
        return plain(200 if healthy else 503, message, "Cache-Control: no-store")
    if request.path == "/":
        return Response(200, _INDEX, "text/html; charset=utf-8")
    return plain(404, "not found: the pages are /metrics and /healthz")


def _accepts_gzip(header: str) -> bool:
    """Return whether a header Accept-Encoding allows gzip.

    >>> _accepts_gzip("deflate, gzip;q=0.5"), _accepts_gzip("gzip; q=0"), _accepts_gzip("")
    (True, False, False)
    """
    for choice in header.lower().split(","):
        name, _, weight = choice.replace(" ", "").partition(";q=")
        if name == "gzip":
            return weight.strip("0.") != "" or not weight
    return False
