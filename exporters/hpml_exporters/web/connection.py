"""One client, from its handshake to its end, as a generator that says what it waits for."""

from __future__ import annotations

import selectors
import socket
import ssl
import sys
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from hpml_exporters.web.auth import Authenticator, BusyError
from hpml_exporters.web.http import (
    BadRequestError,
    Pages,
    Request,
    Response,
    answer,
    parse,
    plain,
)
from hpml_exporters.web.limits import Counters, Limits, Pace
from hpml_exporters.web.settings import Settings

__all__ = ["Connection", "Service"]

Wait: TypeAlias = "tuple[int, float]"
"""Events of the selector, 0 for none, and until when to wait for them, time.monotonic()."""
_Result = TypeVar("_Result")
Steps: TypeAlias = "Generator[Wait, bool, _Result]"
"""Yields what it waits for, and is sent whether that time is over."""

_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
_NOTHING = 0
_TLS_HANDSHAKE = b"\x16"  # the first byte of a TLS connection, RFC 8446, 5.1
_CHUNK_BYTES = 65536
_HANDSHAKE_QUEUE_SECONDS = 2.0
_KNOWN_ADDRESSES = 128
_OK = 200
_CHALLENGE = 'WWW-Authenticate: Basic realm="hpml", charset="UTF-8"'
_NOT_TLS = plain(400, "this is an HTTPS port: use https://")


class _TooSlowError(Exception):
    """The client took too long."""


@dataclass
class Service:
    """What all connections of a server share.

    Attributes:
        known: a handshake budget for each address that was served before.
        strangers: the one for all other addresses.
    """

    pages: Pages
    limits: Limits
    counters: Counters
    settings: Settings
    authenticator: Authenticator
    known: dict[str, Pace] = field(default_factory=dict)
    strangers: Pace = field(init=False)

    def __post_init__(self) -> None:
        self.strangers = self._pace()

    def trust(self, peer: str) -> None:
        """Give an address that was served a handshake budget of its own."""
        if peer not in self.known:
            if len(self.known) >= _KNOWN_ADDRESSES:
                del self.known[next(iter(self.known))]
            self.known[peer] = self._pace()

    def _pace(self) -> Pace:
        return Pace(self.limits.handshakes, self.limits.handshakes_at_once)


class Connection:
    """One connection of a client.

    Attributes:
        fd: descriptor of its socket, the same for all of its life.
        peer: address of the client.
        opened: time.monotonic().
        steps: what it does, one wait after the other.
        events: that the selector waits for now.
        until: when the present wait is over.
        idle: whether it waits for a further request.
        served: whether it has received a page.
    """

    def __init__(self, sock: socket.socket, peer: str, service: Service) -> None:
        self.fd = sock.fileno()
        self.peer = peer
        self.opened = time.monotonic()
        self.steps = self._run()
        self.events = _NOTHING
        self.until = 0.0
        self.idle = False
        self.served = False
        self._sock = sock
        self._service = service
        self._settings = service.settings
        self._buffer = bytearray()

    def close(self) -> None:
        """Close the socket at once."""
        self.steps.close()
        with suppress(OSError):
            self._sock.close()

    def _run(self) -> Steps[None]:
        """Serve requests until the client or the server ends the connection."""
        limits, closed = self._service.limits, self._service.counters.closed
        try:
            context = self._settings.context
            if context is None or (yield from self._handshake(context)):
                deadline = time.monotonic() + limits.request_seconds
                while (yield from self._exchange(deadline)):
                    if not (yield from self._wait_for_request()):
                        return
                    deadline = time.monotonic() + limits.request_seconds
            yield from self._linger()
        except _TooSlowError:
            closed["timeout"] += 1
        except OSError:
            return

    def _handshake(self, context: ssl.SSLContext) -> Steps[bool]:
        """Begin TLS; returns whether it succeeded."""
        closed = self._service.counters.closed
        deadline = self.opened + self._service.limits.handshake_seconds
        # A client that stays silent costs no TLS state.
        first = yield from self._retry(_READ, deadline, self._sock.recv, 1, socket.MSG_PEEK)
        if first != _TLS_HANDSHAKE:
            closed["tls"] += 1
            if first:
                yield from self._send(_NOT_TLS, keep_alive=False, head_only=False)
            return False
        if not (yield from self._handshake_turn()):
            closed["handshakes"] += 1
            return False
        try:
            self._sock = secure = context.wrap_socket(
                self._sock, server_side=True, do_handshake_on_connect=False
            )
            yield from self._retry(_READ, deadline, secure.do_handshake)
            if self._has_allowed_name(secure):
                return True
        except (OSError, ValueError):
            pass
        closed["tls"] += 1
        return False

    def _handshake_turn(self) -> Steps[bool]:
        """Wait until the budget of handshakes has room; returns False if that takes too long."""
        now = time.monotonic()
        pace = self._service.known.get(self.peer, self._service.strangers)
        delay = pace.delay(now)
        if delay > _HANDSHAKE_QUEUE_SECONDS:
            return False
        pace.use(now)
        while time.monotonic() < now + delay:
            yield _NOTHING, now + delay
        return True

    def _has_allowed_name(self, secure: ssl.SSLSocket) -> bool:
        """Return whether the client's certificate has one of `client_allowed_sans`, if any."""
        tls = self._settings.config.tls
        if tls is None or not tls.client_allowed_sans:
            return True
        names = (secure.getpeercert() or {}).get("subjectAltName", ())
        return any(name[1] in tls.client_allowed_sans for name in names)

    def _exchange(self, deadline: float) -> Steps[bool]:
        """Read a request and answer it; returns whether the connection stays open."""
        request = yield from self._read(deadline)
        if request is None:
            return False
        if isinstance(request, Response):
            yield from self._send(request, keep_alive=False, head_only=False)
            return False
        response = yield from self._respond(request)
        if response.status == _OK:
            self.served = True
            self._service.trust(self.peer)
        current = self._settings is self._service.settings
        keep_alive = request.keep_alive and not request.has_body and current
        head_only = request.method == "HEAD"
        yield from self._send(response, keep_alive=keep_alive, head_only=head_only)
        return keep_alive

    def _read(self, deadline: float) -> Steps[Request | Response | None]:
        """Return the next request, the response to a wrong one, or None if the client is gone."""
        limits = self._service.limits
        while True:
            try:
                request = parse(self._buffer, limits.header_bytes)
            except BadRequestError as error:
                return plain(error.status, str(error))
            if request:
                return request
            room = limits.header_bytes - len(self._buffer)
            try:
                data = yield from self._retry(_READ, deadline, self._sock.recv, room)
            except _TooSlowError:
                if not self._buffer:
                    raise
                self._service.counters.closed["timeout"] += 1
                return plain(408, "the request took too long")
            if not data:
                return None
            self._buffer += data

    def _respond(self, request: Request) -> Steps[Response]:
        """Return the response to a request, once it is known whether the client may read."""
        service = self._service
        deadline = time.monotonic() + service.limits.check_seconds
        authorization = request.headers.get("authorization", "")
        try:
            while True:
                allowed = service.authenticator.allows(authorization, self.peer)
                if allowed is not None:
                    break
                if (yield _NOTHING, deadline):
                    raise BusyError
        except BusyError:
            return plain(503, "too many passwords are being checked", "Retry-After: 1")
        if not allowed:
            return plain(401, "wrong user or password", _CHALLENGE)
        try:
            return answer(request, service.pages)
        except Exception as error:  # noqa: BLE001 - a page that fails is a response too
            print(f"hpml export: {request.path}: {error!r}", file=sys.stderr)  # noqa: T201
            return plain(500, "the page could not be made")

    def _send(self, response: Response, *, keep_alive: bool, head_only: bool) -> Steps[None]:
        """Send a response."""
        service = self._service
        service.counters.responses[response.status] += 1
        deadline = time.monotonic() + service.limits.write_seconds
        head = response.head(keep_alive=keep_alive, extra=self._settings.config.headers)
        rest = memoryview(head if head_only else head + response.body)
        while rest:
            sent = yield from self._retry(_WRITE, deadline, self._sock.send, rest[:_CHUNK_BYTES])
            rest = rest[sent:]

    def _wait_for_request(self) -> Steps[bool]:
        """Wait between two requests; returns whether another one has begun."""
        self.idle = True
        if self._buffer:
            yield _NOTHING, 0.0  # pipelined: other clients have their turn first
        else:
            limits = self._service.limits
            deadline = time.monotonic() + limits.idle_seconds
            try:
                self._buffer += yield from self._retry(
                    _READ, deadline, self._sock.recv, limits.header_bytes
                )
            except _TooSlowError:
                return False
        self.idle = False
        return bool(self._buffer)

    def _linger(self) -> Steps[None]:
        """End the connection, and give the client time to read the last response."""
        if isinstance(self._sock, ssl.SSLSocket):
            with suppress(OSError, ValueError):
                self._sock.unwrap()
            self._sock = socket.socket(fileno=self._sock.detach())
            self._sock.setblocking(False)
        self._sock.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + self._service.limits.linger_seconds
        while not (yield _READ, deadline):
            with suppress(BlockingIOError):
                if not self._sock.recv(_CHUNK_BYTES):
                    return

    def _retry(
        self, events: int, deadline: float, operation: Callable[..., _Result], *arguments: object
    ) -> Steps[_Result]:
        """Return the result of a socket's operation, once it does not have to wait any more.

        Raises:
            _TooSlowError: the deadline passed before.
        """
        while True:
            try:
                return operation(*arguments)
            except BlockingIOError:
                needed = events
            except ssl.SSLWantReadError:
                needed = _READ
            except ssl.SSLWantWriteError:
                needed = _WRITE
            if (yield needed, deadline):
                raise _TooSlowError
