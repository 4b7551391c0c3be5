"""The web server for /metrics and /healthz: a thread per connection, each with a time-out.

prometheus_client's own server stops for good at one silent TLS client: its accept loop waits for
the handshake. Here the client's thread does the handshake.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import secrets
import socket
import ssl
import sys
import threading
import time
from base64 import b64decode
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import LineTooLong
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import parse_qs, urlsplit

from prometheus_client.exposition import gzip_accepted

from hpml_exporters.web.config import listen_on
from hpml_orchestrator.errors import InputError, extra_hint

if TYPE_CHECKING:
    from hpml_exporters.web.config import WebConfig

STATUSES = (200, 400, 401, 404, 414, 431, 500, 501, 503, 505)
"""Every status that the server ever sends."""

_LOG = logging.getLogger(__name__)
_INDEX = b'<!DOCTYPE html><title>hpml exporter</title><a href="/metrics">metrics</a>\n'
_TEXT = "text/plain; charset=utf-8"
_TLS_HANDSHAKE = b"\x16"  # the first byte of a TLS connection, RFC 8446, 5.1
_USE_HTTPS = b"HTTP/1.0 400 Bad Request\r\n\r\nthis is an HTTPS port: use https://\n"
_PAUSE_SECONDS = 0.05
_REPORT_SECONDS = 60.0
_FOREVER = 1e6
_HEAD_BYTES = 16 << 10  # of a request; http.server itself takes 6.5 MB
_RECEIVED_BYTES = 4096
_EVICTION_SECONDS = 0.2
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_BCRYPT_BYTES = 72  # bcrypt reads no further
_REMEMBERED = 128


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
        """Return whether the exporter works, and a line about faults."""


@dataclass(frozen=True)
class RequestLimits:
    """Limits of the server.

    Attributes:
        connections: open at the same time; beyond that, the one whose last answer is oldest is
            closed.
        request_seconds: of a TLS handshake's waits, of the head of a request, and of a response.
        idle_seconds: between two requests on one connection.
    """

    connections: int = 256
    request_seconds: float = 5.0
    idle_seconds: float = 150.0


@dataclass
class Counters:
    """Plain numbers, written by the server's threads and read by any.

    Attributes:
        connections: open now.
        accepted: connections since the start.
        responses: since the start, by status; every status of STATUSES is there from the start.
        closed: connections that the server ended early, by reason: `crowded` (too many of them),
            `timeout` (the client was too slow), `tls` (the handshake failed), `error` (a fault of
            the server).
    """

    connections: int = 0
    accepted: int = 0
    responses: dict[int, int] = field(default_factory=lambda: dict.fromkeys(STATUSES, 0))
    closed: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("crowded", "timeout", "tls", "error"), 0)
    )


class Passwords:
    """Decides who may read; any thread may ask.

    bcrypt makes a check slow on purpose: one is made at a time, and a right password is remembered
    under a keyed hash, so its client is checked once.
    """

    def __init__(self, users: Mapping[str, str]) -> None:
        """Take bcrypt hashes by user; without users everybody may read.

        Raises:
            InputError: bcrypt is not installed.
        """
        self._users = {user: text.encode() for user, text in users.items()}
        self._secret = secrets.token_bytes(32)
        self._right: set[bytes] = set()
        self._lock = threading.Lock()
        if users:
            try:
                import bcrypt  # noqa: PLC0415 - only with users
            except ImportError:
                raise InputError(
                    "needs bcrypt", field="basic_auth_users", hint=extra_hint("export")
                ) from None
            self._check = bcrypt.checkpw

    def allow(self, authorization: str) -> bool:
        """Return whether a client may read.

        Args:
            authorization: the header of this name.
        """
        if not self._users:
            return True
        scheme, _, encoded = authorization.partition(" ")
        try:
            name, colon, password = b64decode(encoded.strip(), validate=True).partition(b":")
        except ValueError:
            return False
        if scheme.lower() != "basic" or not colon:
            return False
        # The length keeps `ab` with `c` apart from `a` with `bc`.
        text = len(name).to_bytes(4, "big") + name + password
        key = hashlib.blake2b(text, key=self._secret, digest_size=32).digest()
        if key in self._right:
            return True
        hashed = self._users.get(name.decode("utf-8", "replace"))
        # An unknown name takes as long as the slowest known one.
        any_hash = max(self._users.values(), key=lambda text: text[4:6])  # its cost
        with self._lock, suppress(ValueError):  # a password that bcrypt refuses
            right = self._check(password[:_BCRYPT_BYTES], hashed or any_hash) and hashed is not None
            if right and len(self._right) < _REMEMBERED:  # the same one can be written in many ways
                self._right.add(key)
            return right
        return False


class Heads:
    """Reads the heads of a connection's requests, with limits on size and time."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        """Read from a connection; a head must be complete after so many seconds."""
        self._connection, self._seconds = connection, seconds
        self._data = b""
        self._left = 0
        self._wait = seconds
        self._end: float | None = None

    @property
    def has_begun(self) -> bool:
        """Whether a part of the head has arrived."""
        return self._end is not None

    def begin(self, wait: float) -> None:
        """Expect a head; wait so many seconds for its first byte."""
        self._left, self._wait = _HEAD_BYTES, wait
        self._end = time.monotonic() + self._seconds if self._data else None

    def readline(self, _limit: int = -1) -> bytes:
        """Return the next line, the rest at the end of the connection.

        Raises:
            LineTooLong: the head is too large.
            TimeoutError: it takes too long.
        """
        if self._left <= 0:
            raise LineTooLong("header line")
        while b"\n" not in self._data and len(self._data) < self._left:
            left = self._wait if self._end is None else self._end - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._connection.settimeout(left)
            data = self._connection.recv(_RECEIVED_BYTES)
            if not data:
                break
            self._end = self._end or time.monotonic() + self._seconds
            self._data += data
        length = min(self._data.find(b"\n") + 1 or len(self._data), self._left)
        line, self._data = self._data[:length], self._data[length:]
        self._left -= length
        return line

    def close(self) -> None:
        """Do nothing: it holds no resources."""


class Handler(BaseHTTPRequestHandler):
    """Serves one connection until its end, in its thread."""

    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"  # an answer always has a status
    disable_nagle_algorithm = True
    server: Server
    rfile: Heads  # type: ignore[assignment] # all that http.server needs of a stream
    _served = False

    def setup(self) -> None:
        """Read by `Heads` instead of a buffered file."""
        super().setup()
        self.rfile.close()
        self.rfile = Heads(self.connection, self.server.limits.request_seconds)

    def handle_one_request(self) -> None:
        """Wait for a request, longer only between two requests, and answer it."""
        limits = self.server.limits
        self.rfile.begin(limits.idle_seconds if self._served else limits.request_seconds)
        super().handle_one_request()

    def parse_request(self) -> bool:
        """Read the headers of a request that has begun."""
        try:
            return super().parse_request()
        finally:
            self.connection.settimeout(self.server.limits.request_seconds)  # of the response

    def do_GET(self) -> None:
        """Answer a request of an authorised client."""
        if {"Content-Length", "Transfer-Encoding"} & set(map(str.title, self.headers)):
            self.close_connection = True  # a body is never read
        if not self.server.passwords.allow(self.headers.get("Authorization", "")):
            challenge = {"WWW-Authenticate": 'Basic realm="hpml", charset="UTF-8"'}
            self._respond(401, b"wrong user or password\n", **challenge)
            return
        try:
            url = urlsplit(self.path)
            names = parse_qs(url.query, max_num_fields=100).get("name[]", [])
        except ValueError:
            self.send_error(400, "invalid path")
            return
        try:
            self._respond_with(url.path or "/", names)
        except OSError:
            raise  # the client is gone, or too slow
        except Exception as error:  # noqa: BLE001 - the client gets a 500
            _LOG.error("%s: %r", url.path, error)
            self._respond(500, b"the page could not be made\n")

    do_HEAD = do_GET  # noqa: N815 - http.server's name

    def _respond_with(self, path: str, names: list[str]) -> None:
        if path == "/metrics":
            accept = ", ".join(self.headers.get_all("Accept", ()))
            gzip = gzip_accepted(self.headers.get("Accept-Encoding", ""))
            with self.server.rendering:  # a client may read slowly afterwards
                body, kind = self.server.pages.metrics(accept, names, gzip=gzip)
            more = {"Content-Encoding": "gzip"} if gzip else {}
            self._respond(200, body, kind, Vary="Accept, Accept-Encoding", **more)
        elif path == "/healthz":
            healthy, message = self.server.pages.health()
            self._respond(200 if healthy else 503, f"{message}\n".encode())
        elif path == "/":
            self._respond(200, _INDEX, "text/html; charset=utf-8")
        else:
            self._respond(404, b"not found: the pages are /metrics and /healthz\n")

    def send_error(self, code: int, message: str | None = None, _: str | None = None) -> None:
        """Answer a malformed request, and end the connection."""
        self.close_connection = True
        self._respond(code, f"{message or self.responses[code][0]}\n".encode())

    def _respond(self, status: int, body: bytes, kind: str = _TEXT, **headers: str) -> None:
        self.server.answered(self.client_address, status)
        if status != HTTPStatus.OK:
            self.close_connection = True  # an unauthorised client keeps no connection
        self.send_response(status)
        fixed = {"Content-Type": kind, "Content-Length": str(len(body))}
        if self.close_connection:
            fixed["Connection"] = "close"
        for name, text in {**fixed, **headers, **self.server.headers}.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)  # the time-out is that of the whole body
        self._served = True

    def log_error(self, format: str, *args: object) -> None:  # noqa: A002, ARG002 - as http.server's
        """Count a client that was too slow, which http.server reports here."""
        is_idle = self._served and not self.rfile.has_begun
        if any(isinstance(one, TimeoutError) for one in args) and not is_idle:
            self.server.gave_up("timeout")

    def log_request(self, code: object = "-", size: object = "-") -> None:
        """Log no requests."""

    def version_string(self) -> str:
        """Return the header Server without versions."""
        return "hpml"


class Server(ThreadingHTTPServer):
    """Serves /metrics and /healthz by HTTP, or HTTPS if a web-config file asks for it.

    Attributes:
        pages: what is served.
        limits: how much clients may use.
        counters: numbers that any thread may read at any time.
        headers: added to every response.
        passwords: who may read.
        lock: of the counters.
        rendering: held while a page is made.
    """

    daemon_threads = True

    def __init__(
        self,
        listen: str,
        web_config: str,
        pages: Pages,
        limits: RequestLimits | None = None,
        *,
        any_port: bool = False,
    ) -> None:
        """Prepare; nothing is opened or read.

        Args:
            listen: ADDRESS:PORT; port 0 takes a free one, an empty address takes all.
            web_config: file in Prometheus' web-config format; empty: plain HTTP without passwords.
            pages: what is served.
            limits: how much clients may use.
            any_port: if the port of `listen` is in use, take a free one.
        """
        super().__init__(("", 0), Handler, bind_and_activate=False)
        self.socket.close()  # `start` opens the one that is used
        self.pages, self.limits = pages, limits or RequestLimits()
        self.counters = Counters()
        self.headers: Mapping[str, str] = {}
        self.passwords = Passwords({})
        self.lock, self.rendering = threading.Lock(), threading.Lock()
        self._context: ssl.SSLContext | None = None
        self._sans: Sequence[str] = ()
        self._listen, self._any_port, self._web_config = listen, any_port, web_config
        self._room = threading.Semaphore(self.limits.connections)
        self._clients: dict[object, tuple[float, socket.socket]] = {}
        # By address: when it was answered last, or came.
        self._reported = -_FOREVER

    @property
    def scheme(self) -> str:
        """http, or https once `start` has read a file with TLS."""
        return "https" if self._context else "http"

    def start(self) -> tuple[str, int]:
        """Serve in other threads; returns the address that it listens on.

        Raises:
            InputError: the address cannot be used, or the web-config file is wrong.
        """
        if self._web_config:
            # Imported only with a file: most exporters need no pydantic. Read before listening:
            # the port is never open without passwords.
            from hpml_exporters.web.config import read, tls_context  # noqa: PLC0415 - as above

            config: WebConfig = read(self._web_config)
            self.headers = {
                str(name): text for name, text in config.http_server_config.headers.items()
            }
            self.passwords = Passwords(config.basic_auth_users)
            if config.tls:
                self._context = tls_context(config.tls, self._web_config)
                self._sans = config.tls.client_allowed_sans
        self.socket = listen_on(self._listen, any_port=self._any_port)
        # Its poll interval is for ever: `stop` wakes it through the socket.
        threading.Thread(target=self.serve_forever, args=(_FOREVER,), daemon=True).start()
        host, port = self.socket.getsockname()[:2]
        return str(host), int(port)

    def stop(self) -> None:
        """Close all connections and stop; responses under way are cut off."""
        if self.fileno() >= 0:
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes serve_forever
            self.shutdown()
            self.server_close()
        with self.lock:
            for _, client in self._clients.values():
                _shut(client)

    def answered(self, address: object, status: int) -> None:
        """Count a response to a client."""
        with self.lock:
            self.counters.responses.setdefault(status, 0)
            self.counters.responses[status] += 1
            if address in self._clients:
                self._clients[address] = (time.monotonic(), self._clients[address][1])

    def gave_up(self, reason: str) -> None:
        """Count a connection that the server ends early."""
        with self.lock:
            self.counters.closed[reason] += 1

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a client."""
        try:
            return self.socket.accept()
        except OSError as error:
            if error.errno in _NO_ROOM:
                time.sleep(_PAUSE_SECONDS)  # until there are free descriptors
            raise

    def process_request(self, request: Any, client_address: object) -> None:
        """Serve a client in a new thread; if there are too many, close an idle one."""
        if not self._room.acquire(blocking=False):
            self.gave_up("crowded")
            with self.lock:
                _shut(min(self._clients.values(), key=lambda one: one[0])[1])
            if not self._room.acquire(timeout=_EVICTION_SECONDS):
                request.close()
                return
        with self.lock:
            self._clients[client_address] = (time.monotonic(), request)
            self.counters.connections = len(self._clients)
            self.counters.accepted += 1
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started
            self._forget(client_address)
            raise

    def _forget(self, address: object) -> None:
        with self.lock:
            self._clients.pop(address, None)
            self.counters.connections = len(self._clients)
        self._room.release()

    def process_request_thread(self, request: Any, client_address: object) -> None:
        """Serve a client until its end."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._forget(client_address)

    def finish_request(self, request: Any, client_address: object) -> None:
        """Shake hands if this is a TLS port, then serve requests."""
        with suppress(OSError):  # the client is gone
            if self._context is None:
                super().finish_request(request, client_address)
                return
            with self._secured(self._context, request) as secure:
                with self.lock:  # the plain socket has lost its descriptor
                    self._clients[client_address] = (time.monotonic(), secure)
                super().finish_request(secure, client_address)

    def _secured(self, context: ssl.SSLContext, client: socket.socket) -> ssl.SSLSocket:
        client.settimeout(self.limits.request_seconds)
        try:
            # A client that stays silent costs no TLS state.
            first = client.recv(1, socket.MSG_PEEK)
            if first and first != _TLS_HANDSHAKE:
                client.sendall(_USE_HTTPS)
            if first != _TLS_HANDSHAKE:
                raise ConnectionAbortedError
            secure = context.wrap_socket(client, server_side=True, do_handshake_on_connect=False)
            try:
                secure.do_handshake()
                if not self._is_allowed(secure):
                    raise ConnectionAbortedError
            except BaseException:
                secure.close()
                raise
        except OSError as error:
            self.gave_up("timeout" if isinstance(error, TimeoutError) else "tls")
            raise
        return secure

    def _is_allowed(self, client: ssl.SSLSocket) -> bool:
        names = (client.getpeercert() or {}).get("subjectAltName", ()) if self._sans else ()
        return not self._sans or any(name[1] in self._sans for name in names)

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002
        """Count an error of the server; prints one per minute at most."""
        self.gave_up("error")
        if time.monotonic() - self._reported > _REPORT_SECONDS:
            self._reported = time.monotonic()
            _LOG.error("error while serving: %r", sys.exception())


def _shut(client: socket.socket) -> None:
    with suppress(OSError):  # already closed
        # Not by SSLSocket.shutdown, which takes the TLS object from its reader.
        socket.socket.shutdown(client, socket.SHUT_RDWR)
