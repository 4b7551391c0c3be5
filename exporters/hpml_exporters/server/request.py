"""Requests as RFC 9112 has them, as far as a page without parameters and bodies needs it."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["BadRequestError", "Request", "parse"]

_END = b"\r\n\r\n"
_TOKEN = frozenset("!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_BLANK_BYTES = 4  # clients may send an empty line or two after an earlier request
_SINGLE = frozenset(
    {"host", "authorization", "content-length", "x-prometheus-scrape-timeout-seconds"}
)
_VERSIONS = {"HTTP/1.1": True, "HTTP/1.0": False}
_DELETE = 0x7F
_SPACE = 0x20


class BadRequestError(Exception):
    """What came is no request that is answered.

    Attributes:
        status: code of the answer.
        reason: sentence for its body.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class Request(NamedTuple):
    """One request.

    Attributes:
        method: as it was written.
        path: without what follows a question mark.
        headers: by lower-case name; several of one name are joined by commas.
        keep_alive: the client wants to use the connection again.
        http11: its version is 1.1, not 1.0.
    """

    method: str
    path: str
    headers: dict[str, str]
    keep_alive: bool
    http11: bool


def parse(buffer: bytearray, *, header_bytes: int, headers: int) -> Request | None:
    """Take the first request off a buffer.

    Args:
        buffer: what came so far; a whole request is removed from its start.
        header_bytes: longest request.
        headers: most lines of headers.

    Returns:
        The request, or nothing while its end has not come.

    Raises:
        BadRequestError: this will never be a request that is answered.
    """
    blank = 0
    while buffer.startswith(b"\r\n", blank) and blank < _BLANK_BYTES:
        blank += 2
    if blank:
        del buffer[:blank]
    end = buffer.find(_END, 0, header_bytes)
    if end < 0:
        _check_begun(buffer, header_bytes)
        return None
    text = buffer[:end].decode("latin-1")
    del buffer[: end + len(_END)]
    return _request(text, headers)


def _check_begun(buffer: bytearray, header_bytes: int) -> None:
    """Refuse early what cannot become a request, so that nobody waits for its end.

    Raises:
        BadRequestError: it is too long, or no HTTP.
    """
    if len(buffer) >= header_bytes:
        if b"\r\n" in buffer:
            raise BadRequestError(431, f"the headers are longer than {header_bytes} bytes")
        raise BadRequestError(414, f"the request line is longer than {header_bytes} bytes")
    newline = buffer.find(b"\n")
    if newline == 0 or (newline > 0 and buffer[newline - 1] != ord("\r")):
        raise BadRequestError(400, "lines end in CR LF")
    if buffer and not _is_letter(buffer[0]):
        raise BadRequestError(400, "this is no HTTP request")


def _is_letter(byte: int) -> bool:
    return ord("A") <= byte <= ord("Z") or ord("a") <= byte <= ord("z")


def _request(text: str, most_headers: int) -> Request:
    """Return the request in a text without its last empty line.

    Raises:
        BadRequestError: it breaks the rules.
    """
    first, *lines = text.split("\r\n")
    method, target, version = _request_line(first)
    if len(lines) > most_headers:
        raise BadRequestError(431, f"there are more than {most_headers} headers")
    headers = _headers(lines)
    http11 = version
    if http11 and "host" not in headers:
        raise BadRequestError(400, "HTTP/1.1 needs a header Host")
    options = {word.strip().lower() for word in headers.get("connection", "").split(",")}
    keep_alive = "close" not in options if http11 else "keep-alive" in options
    return Request(method, _path(target), headers, keep_alive, http11)


def _request_line(line: str) -> tuple[str, str, bool]:
    """Return method, target, and whether the version is 1.1.

    Raises:
        BadRequestError: it is no request line.
    """
    words = line.split(" ")
    if len(words) != 3:  # noqa: PLR2004 - method, target, version
        raise BadRequestError(400, "a request line is METHOD PATH HTTP/1.1")
    method, target, version = words
    if not method or not _TOKEN.issuperset(method):
        raise BadRequestError(400, "the method is no word")
    if version not in _VERSIONS:
        if version.startswith("HTTP/"):
            raise BadRequestError(505, "HTTP/1.1 and HTTP/1.0 are spoken here")
        raise BadRequestError(400, "a request line is METHOD PATH HTTP/1.1")
    if not target or not _printable(target):
        raise BadRequestError(400, "the path has characters that no path has")
    return method, target, _VERSIONS[version]


def _path(target: str) -> str:
    """Return the path of a target: `/metrics?x=1` and `http://host/metrics` are `/metrics`."""
    target = target.partition("?")[0]
    scheme, separator, rest = target.partition("://")
    if separator and scheme.lower() in {"http", "https"}:
        slash = rest.find("/")
        target = rest[slash:] if slash >= 0 else "/"
    return target


def _headers(lines: list[str]) -> dict[str, str]:
    """Return headers by lower-case name.

    Raises:
        BadRequestError: a line is no header, or one that may stand once stands twice.
    """
    found: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or not _TOKEN.issuperset(name):
            raise BadRequestError(400, "a header is NAME: VALUE")
        value = value.strip(" \t")
        if not _printable(value.replace(" ", "").replace("\t", "")):
            raise BadRequestError(400, "a header has control characters")
        name = name.lower()
        if name in found:
            if name in _SINGLE:
                raise BadRequestError(400, f"the header {name} stands twice")
            value = f"{found[name]}, {value}"
        found[name] = value
    return found


def _printable(text: str) -> bool:
    """Whether no control character and no space is in a text of Latin-1."""
    return all(_SPACE < ord(char) != _DELETE for char in text)
