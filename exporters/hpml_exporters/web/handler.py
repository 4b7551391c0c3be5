"""One client: its TLS handshake, requests and responses (RFC 9112), each with a time limit."""

from __future__ import annotations

import io
import logging
import re
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Protocol, TypeVar
from urllib.parse import parse_qs, urlsplit

from prometheus_client.exposition import gzip_accepted

from hpml_exporters.web.passwords import TooManyPasswordsError

if TYPE_CHECKING:
    from hpml_exporters.web.server import Server

STATUSES = (200, 400, 401, 404, 405, 408, 413, 431, 500, 503, 505)
"""Every status that the server ever sends."""

_LOG = logging.getLogger(__name__)
_INDEX = b'<!DOCTYPE html><title>hpml exporter</title><a href="/metrics">metrics</a>\n'
_TEXT = "text/plain; charset=utf-8"
_TLS_HANDSHAKE = b"\x16"  # the first byte of a TLS connection, RFC 8446, 5.1
_HEAD_END = b"\r\n\r\n"
_HEAD = re.compile(
    rb"[A-Za-z]+ [!-~\x80-\xff]+ HTTP/\d\.\d"
    rb"(\r\n[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t -~\x80-\xff]*)*"
)
_ONCE = ("Host", "Authorization", "Content-Length")
_MAX_NAMES = 100
_CHUNK_BYTES = 65536
_LINGER_SECONDS = 1.0
_Result = TypeVar("_Result")


class Pages(Protocol):
    """What the server serves; called in any thread."""

    def metrics(self, accept: str, names: Sequence[str], *, gzip: bool) -> tuple[bytes, str]:
        """Return body and content type of /metrics; one thread at a time calls this.

        Args:
            accept: the header Accept; may be empty.
            names: of the time series to return, from `?name[]=`; empty: all.
            gzip: compress the body.
        """

    def health(self) -> tuple[bool, str]:
        """Return whether the exporter works, and a line about what is wrong."""


@dataclass(frozen=True)
class RequestLimits:
    """Limits of the server; times in seconds, sizes in bytes.

    Attributes:
        connections: open at the same time; beyond that, one of the address with most is closed.
        connections_of_one_address: the same of a single address.
        header_bytes: of a request line with all its headers.
        request_seconds: for a TLS handshake, until the first byte of a request, and until its end.
        idle_seconds: between two requests on one connection.
        write_seconds: from a response's first byte to its last.
        watch_seconds: between two looks at the web-config file.
    """

    connections: int = 256
    connections_of_one_address: int = 128
    header_bytes: int = 8192
    request_seconds: float = 5.0
    idle_seconds: float = 150.0
    write_seconds: float = 10.0
    watch_seconds: float = 10.0


@dataclass(eq=False)
class Client:
    """A connection.

    Attributes:
        sock: its socket; another one once TLS begins.
        peer: the client's address.
        since: when its last request came, or it connected, by time.monotonic().
    """

    sock: socket.socket
    peer: str
    since: float = field(default_factory=time.monotonic)


class Handler(BaseHTTPRequestHandler):
    """Serves one connection until its end, in its thread."""

    protocol_version = "HTTP/1.1"
    request: Client
    server: Server

    def setup(self) -> None:
        """Prepare; bytes are read and written by methods with a time limit."""
        self.request.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer, self._served = b"", False
        self.command, self.close_connection = "", True

    def finish(self) -> None:
        """Leave the rest to the server."""

    def handle(self) -> None:
        """Serve requests until the client or the server ends the connection."""
        with suppress(OSError):  # the client is gone
            if self.server.context is None or self._begin_tls(self.server.context):
                self.close_connection = False
                while not self.close_connection:
                    self._handle_request()
            self._linger()

    def _begin_tls(self, context: ssl.SSLContext) -> bool:
        """Shake hands; returns whether that succeeded."""
        deadline = time.monotonic() + self.server.limits.request_seconds
        reason = "tls"
        try:
            # A client that stays silent costs no TLS state.
            first = self._within(deadline, self.request.sock.recv, 1, socket.MSG_PEEK)
            if first == _TLS_HANDSHAKE:
                self.request.sock = secure = context.wrap_socket(
                    self.request.sock, server_side=True, do_handshake_on_connect=False
                )
                self._within(deadline, secure.do_handshake)
                allowed = self.server.config.tls.get("client_allowed_sans", ())
                names = (secure.getpeercert() or {}).get("subjectAltName", ()) if allowed else ()
                if not allowed or any(name[1] in allowed for name in names):
                    return True
            elif first:
                self._respond_in_words(400, "this is an HTTPS port: use https://")
        except TimeoutError:
            reason = "timeout"
        except (OSError, ValueError):
            pass
        self.server.gave_up(reason)
        return False

    def _handle_request(self) -> None:
        """Read a request and answer it; sets `close_connection` if it is the last one."""
        self.command, self.close_connection = "", True
        head = self._read_head()
        if head is None:
            return
        self.request.since = time.monotonic()
        if not _HEAD.fullmatch(head):
            self.send_error(400, "not an HTTP request")
            return
        line, _, headers = head.partition(b"\r\n")
        self.raw_requestline, self.rfile = line, io.BytesIO(headers + _HEAD_END)
        if self.parse_request():
            self._respond()

    def _read_head(self) -> bytes | None:
        """Return request line and headers; None if none will come."""
        limits = self.server.limits
        deadline = time.monotonic()
        deadline += limits.idle_seconds if self._served else limits.request_seconds
        try:
            while True:
                # clients may send empty lines after an earlier request
                self._buffer = self._buffer.lstrip(b"\r\n")
                # Refuse binary data, such as TLS on a plain port, at its first byte. Waiting for
                # the end of the headers would hold the thread until the time-out.
                if self._buffer and not self._buffer[:1].isalpha():
                    self.send_error(400, "not an HTTP request")
                    return None
                head, end, rest = self._buffer.partition(_HEAD_END)
                if end:
                    self._buffer = rest
                    return head
                room = limits.header_bytes - len(self._buffer)
                if room <= 0:
                    text = f"the headers are longer than {limits.header_bytes} bytes"
                    self.send_error(431, text)
                    return None
                data = self._within(deadline, self.request.sock.recv, room)
                if not data:
                    return None
                # From the first byte on one deadline holds for the whole head: a client that sends
                # a byte now and then gains no time by it.
                if not self._buffer:
                    deadline = time.monotonic() + limits.request_seconds
                self._buffer += data
        except TimeoutError:
            if self._buffer or not self._served:
                self.server.gave_up("timeout")
            if self._buffer:
                self.send_error(408, "the request took too long")
            return None

    def _respond(self) -> None:
        """Answer a request, if the client may read."""
        headers = self.headers
        # Of two equal headers a proxy in front may believe the other one.
        repeated = any(len(headers.get_all(name, ())) > 1 for name in _ONCE)
        if repeated or (self.request_version == "HTTP/1.1" and "Host" not in headers):
            self.send_error(400, "the headers Host and Authorization must be there once")
            return
        length = headers.get("Content-Length", "0")
        has_body = length.strip("0") != "" or "Transfer-Encoding" in headers
        self.close_connection |= has_body  # it is never read
        try:
            allowed = self.server.passwords.allow(
                headers.get("Authorization", ""), self.request.peer
            )
        except TooManyPasswordsError:
            self._respond_in_words(503, "too many passwords are being checked", "Retry-After: 1")
            return
        if not allowed:
            challenge = 'WWW-Authenticate: Basic realm="hpml", charset="UTF-8"'
            self._respond_in_words(401, "wrong user or password", challenge)
        elif self.command not in {"GET", "HEAD"}:
            self._respond_in_words(405, "only GET and HEAD are supported", "Allow: GET, HEAD")
        elif has_body:
            self._respond_in_words(413, "requests must not have a body")
        else:
            try:
                url = urlsplit(self.path)
                names = parse_qs(url.query, max_num_fields=_MAX_NAMES).get("name[]", [])
            except ValueError:
                self.send_error(400, "invalid path")
                return
            self._send(*self._page(url.path or "/", names))

    def _page(self, path: str, names: list[str]) -> tuple[int, bytes, str, tuple[str, ...]]:
        try:
            if path == "/metrics":
                accept = ", ".join(self.headers.get_all("Accept", ()))
                gzip = gzip_accepted(self.headers.get("Accept-Encoding", ""))
                with self.server.turn(self.request):  # rendering only: a client may read slowly
                    body, kind = self.server.pages.metrics(accept, names, gzip=gzip)
                encoding = ("Content-Encoding: gzip",) if gzip else ()
                return 200, body, kind, ("Vary: Accept, Accept-Encoding", *encoding)
            if path == "/healthz":
                healthy, message = self.server.health()
                status = 200 if healthy else 503
                return status, f"{message}\n".encode(), _TEXT, ("Cache-Control: no-store",)
        except ConnectionAbortedError:
            raise
        except Exception as error:  # noqa: BLE001 - a page that fails is a response too
            _LOG.error("%s: %r", path, error)
            return 500, b"the page could not be made\n", _TEXT, ()
        if path == "/":
            return 200, _INDEX, "text/html; charset=utf-8", ()
        return 404, b"not found: the pages are /metrics and /healthz\n", _TEXT, ()

    def send_error(self, code: int, message: str | None = None, _: str | None = None) -> None:
        """Answer a malformed request, and end the connection."""
        self.close_connection = True
        self._respond_in_words(code, message or HTTPStatus(code).phrase)

    def handle_expect_100(self) -> bool:
        """Do not ask for a body."""
        return True

    def _respond_in_words(self, status: int, text: str, *headers: str) -> None:
        self._send(status, f"{text}\n".encode(), _TEXT, headers)

    def _send(self, status: int, body: bytes, kind: str, headers: Sequence[str]) -> None:
        self.server.answered(status)
        lines = [
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
            f"Date: {self.date_time_string()}",
            f"Content-Type: {kind}",
            f"Content-Length: {len(body)}",
            f"Connection: {'close' if self.close_connection else 'keep-alive'}",
            *headers,
            *self.server.config.headers,
            "\r\n",
        ]
        head = "\r\n".join(lines).encode("latin-1")
        rest = memoryview(head if self.command == "HEAD" else head + body)
        # One deadline for the whole response, not for each chunk: a client that reads slowly would
        # otherwise hold the thread and the body.
        deadline = time.monotonic() + self.server.limits.write_seconds
        try:
            while rest:
                rest = rest[self._within(deadline, self.request.sock.send, rest[:_CHUNK_BYTES]) :]
        except TimeoutError:
            self.server.gave_up("timeout")
            raise
        self._served = True

    def _linger(self) -> None:
        # Closing a socket with unread data sends a reset, which may destroy the response on its way
        # (RFC 9112, 9.6). So end the sending, then read what the client still sends.
        deadline = time.monotonic() + _LINGER_SECONDS
        self.request.sock.shutdown(socket.SHUT_WR)  # of TLS, too
        while self._within(deadline, self.request.sock.recv, _CHUNK_BYTES):
            pass

    def _within(
        self, deadline: float, operation: Callable[..., _Result], *arguments: object
    ) -> _Result:
        self.request.sock.settimeout(max(0.001, deadline - time.monotonic()))
        return operation(*arguments)
