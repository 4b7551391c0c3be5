"""The server's thread: one loop over all connections, which never waits for any of them.

selectors and not asyncio: measured, asyncio alone takes 9.7 MiB of memory, a quarter of all that
the exporter may have, for what is a dozen states here.
"""

from __future__ import annotations

import os
import selectors
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from hpml_exporters.server.answers import answer, has_body, scrape_seconds
from hpml_exporters.server.connection import Connection, Shake, State
from hpml_exporters.server.counters import Counters
from hpml_exporters.server.gate import Gate
from hpml_exporters.server.limits import Limits
from hpml_exporters.server.pages import Pages
from hpml_exporters.server.request import BadRequestError, Request, parse
from hpml_exporters.server.response import Response, head, plain
from hpml_exporters.server.settings import Settings
from hpml_orchestrator.errors import InputError

__all__ = ["Loop"]

_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
_ACCEPTED_AT_ONCE = 64
_COMPLAINT_SECONDS = 60.0
_FAULT_SECONDS = 0.1
_FOREVER = float("inf")
_NO_HANDSHAKE = "Client sent an HTTP request to an HTTPS server."
_RANK = {State.LINGER: 0, State.HANDSHAKE: 1, State.READING: 1, State.IDLE: 1}
"""Who makes place first; those that got an answer before come after those that never did."""


class Loop:
    """All connections of a server.

    Attributes:
        counters: what is counted.
    """

    def __init__(
        self,
        listener: socket.socket,
        settings: Settings,
        pages: Pages,
        limits: Limits,
        counters: Counters,
    ) -> None:
        """Take a socket that listens.

        Raises:
            InputError: there are users, and no bcrypt.
        """
        self.counters = counters
        self._listener = listener
        self._settings = settings
        self._pages = pages
        self._limits = limits
        self._generation = 0
        self._connections: dict[int, Connection] = {}
        self._again: deque[Connection] = deque()
        self._changed: deque[Settings] = deque()
        self._next_look = _FOREVER
        self._ended = False
        self._complained = -_FOREVER
        self._gate = Gate(settings, limits, self.wake)
        self._selector = selectors.DefaultSelector()
        self._wakeup_lock = threading.Lock()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wakeup, _READ)
        self._selector.register(listener.fileno(), _READ)

    def run(self) -> None:
        """Serve until told to end."""
        try:
            while not self._ended:
                try:
                    self._turn()
                except Exception as error:  # noqa: BLE001 - a deaf exporter is worse than a fault
                    self.counters.errors += 1
                    self._complain(error)
                    time.sleep(_FAULT_SECONDS)
        finally:
            for one in list(self._connections.values()):
                self._drop(one)
            self._gate.stop()
            self._selector.close()
            self._listener.close()
            with self._wakeup_lock:
                os.close(self._wakeup)
                self._wakeup = -1

    def stop(self) -> None:
        """Make `run` end soon; may be called from any thread."""
        self._ended = True
        self.wake()

    def change(self, settings: Settings) -> None:
        """Hand over other settings; may be called from any thread."""
        self._changed.append(settings)
        self.wake()

    def wake(self) -> None:
        """Make the loop look around; may be called from any thread."""
        with self._wakeup_lock:  # never a descriptor that somebody else has by now
            if self._wakeup >= 0:
                os.eventfd_write(self._wakeup, 1)

    def _turn(self) -> None:
        """Wait for something to happen and see to all of it."""
        timeout = 0.0 if self._again else max(0.0, self._next_look - time.monotonic())
        found = self._selector.select(None if timeout == _FOREVER else timeout)
        now = time.monotonic()
        for key, _ in found:
            if key.fd == self._wakeup:
                os.eventfd_read(self._wakeup)
            elif key.fd == self._listener.fileno():
                self._accept(now)
            else:
                self._advance_if_open(key.data, now)
        for _ in range(len(self._again)):
            self._advance_if_open(self._again.popleft(), now)
        while self._changed:
            self._apply(self._changed.popleft(), now)
        for one, right in self._gate.verdicts(now):
            self._settle(one, right, now)
        if now >= self._next_look:
            self._look(now)

    # -- connections come and go

    def _accept(self, now: float) -> None:
        """Take connections that wait, some at a time."""
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                sock, address = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue
            except OSError:  # no descriptor or no memory is left
                if not self._make_place():
                    time.sleep(0.05)
                return
            while len(self._connections) >= self._limits.connections and self._make_place():
                pass
            with suppress(OSError):
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._begin(sock, address[0], now)

    def _begin(self, sock: socket.socket, peer: str, now: float) -> None:
        """Start a connection; its request may be there already."""
        limits, settings = self._limits, self._settings
        if settings.context is None:
            one = Connection(sock, peer, now)
            one.deadline = now + limits.header_seconds
        else:
            from hpml_exporters.server.secure import SecureConnection  # noqa: PLC0415 - with TLS alone

            one = SecureConnection(sock, peer, now, settings.context, settings.names)
            one.deadline = now + limits.handshake_seconds
        one.generation = self._generation
        self._connections[one.fd] = one
        self.counters.accepted += 1
        self.counters.connections = len(self._connections)
        self._set_deadline(one, one.deadline)
        self._want(one, _READ)
        self._advance(one, now)

    def _make_place(self) -> bool:
        """Close the least promising connection; return whether there was one."""
        if not self._connections:
            return False
        victim = min(
            self._connections.values(),
            key=lambda one: (_RANK.get(one.state, 3) + one.proven, one.since),
        )
        if victim.state is not State.LINGER:
            self.counters.refused += 1
        self._drop(victim)
        return True

    def _drop(self, one: Connection) -> None:
        """Forget a connection."""
        if self._connections.get(one.fd) is one:
            self._want(one, 0)
            del self._connections[one.fd]
            self.counters.connections = len(self._connections)
        one.close()

    def _want(self, one: Connection, events: int) -> None:
        """Wait for events of a connection."""
        if events == one.events:
            return
        if not events:
            self._selector.unregister(one.fd)
        elif one.events:
            self._selector.modify(one.fd, events, one)
        else:
            self._selector.register(one.fd, events, one)
        one.events = events

    def _set_deadline(self, one: Connection, deadline: float) -> None:
        one.deadline = deadline
        self._next_look = min(self._next_look, deadline)

    def _look(self, now: float) -> None:
        """End what lasts too long, and find out when to look again."""
        for one in list(self._connections.values()):
            if one.deadline <= now:
                self._expire(one, now)
        deadlines = [one.deadline for one in self._connections.values()]
        self._next_look = min(deadlines, default=_FOREVER)

    def _expire(self, one: Connection, now: float) -> None:
        """See to a connection whose time is over."""
        if one.state in {State.HANDSHAKE, State.READING, State.WRITING, State.CHECKING}:
            self.counters.timeouts += 1
        if one.state is State.READING and one.buffer:
            one.head_only = False
            self._guard(one, lambda: self._respond(one, plain(408, "too slow", close=True), now))
        elif one.state is State.CHECKING and one.give_up > now:
            self._guard(one, lambda: self._respond(one, _busy(), now))
        else:
            self._drop(one)

    # -- one connection goes on

    def _advance_if_open(self, one: Connection, now: float) -> None:
        """Go on with a connection unless another one's turn has just closed it."""
        if self._connections.get(one.fd) is one:
            self._advance(one, now)

    def _advance(self, one: Connection, now: float) -> None:
        """Go on with a connection as far as it can go now."""
        if one.state is State.LINGER:
            self._guard(one, lambda: self._linger(one))
        elif one.state is State.WRITING:
            self._guard(one, lambda: self._write(one, now))
        elif one.state is State.HANDSHAKE:
            self._guard(one, lambda: self._shake(one, now))
        elif one.state is not State.CHECKING:
            self._guard(one, lambda: self._read(one, now))

    def _guard(self, one: Connection, step: Callable[[], None]) -> None:
        """Do a step; what goes wrong in it ends this connection and no other."""
        try:
            step()
        except OSError:
            self._drop(one)
        except Exception as error:  # noqa: BLE001 - a fault of ours must not end the server
            self.counters.errors += 1
            self._complain(error)
            self._drop(one)

    def _complain(self, error: Exception) -> None:
        """Write a fault of ours down, once in a while."""
        now = time.monotonic()
        if now - self._complained > _COMPLAINT_SECONDS:
            self._complained = now
            print(f"hpml export: fault while serving: {error!r}", file=sys.stderr)  # noqa: T201

    def _shake(self, one: Connection, now: float) -> None:
        """Go on with a handshake.

        Raises:
            OSError: the connection is broken.
        """
        try:
            need = one.shake()
        except (OSError, ValueError):
            self.counters.handshakes_failed += 1
            self._end(one, now)
            return
        if need is Shake.PLAIN:
            self.counters.handshakes_failed += 1
            self._respond(one, plain(400, _NO_HANDSHAKE, close=True), now)
        elif need is Shake.DONE:
            one.state = State.READING
            self._set_deadline(one, now + self._limits.header_seconds)
            self._read(one, now)
        else:
            self._want(one, _READ if need is Shake.READ else _WRITE)

    def _read(self, one: Connection, now: float) -> None:
        """Read until a request is there, and answer it.

        Raises:
            OSError: the connection is broken.
        """
        limits = self._limits
        while True:
            if one.buffer:
                if one.state is State.IDLE:
                    one.state = State.READING
                    self._set_deadline(one, now + limits.header_seconds)
                try:
                    request = parse(
                        one.buffer, header_bytes=limits.header_bytes, headers=limits.headers
                    )
                except BadRequestError as error:
                    one.head_only = False  # of the request before, whose connection this was
                    self._respond(one, plain(error.status, error.reason, close=True), now)
                    return
                if request:
                    self._handle(one, request, now)
                    return
            data = one.receive(limits.header_bytes - len(one.buffer))
            if data is None:
                self._want(one, _READ)
                return
            if not data:
                self._drop(one)
                return
            one.buffer += data

    def _handle(self, one: Connection, request: Request, now: float) -> None:
        """See to a request: may it be answered, and with what.

        Raises:
            OSError: the connection is broken.
        """
        one.head_only = request.method == "HEAD"
        one.keep_alive = request.keep_alive and not has_body(request)
        one.give_up = now + scrape_seconds(request)
        if self._gate.take_token(now):
            self._authorize(one, request, now)
        else:
            self._respond(one, plain(429, "too many requests"), now)

    def _authorize(self, one: Connection, request: Request, now: float) -> None:
        """Answer a request once it is known whether it may be.

        Raises:
            OSError: the connection is broken.
        """
        right = self._gate.ask(one, request, now)
        if right is not None:
            self._decide(one, request, now, right=right)
            return
        one.state = State.CHECKING
        one.request = request
        self._want(one, 0)
        self._set_deadline(one, min(now + self._limits.check_seconds, one.give_up))

    def _decide(self, one: Connection, request: Request, now: float, *, right: bool) -> None:
        """Answer a request by whether it may be.

        Raises:
            OSError: the connection is broken.
        """
        if right:
            self._answer(one, request, now)
        else:
            ask = 'WWW-Authenticate: Basic realm="hpml", charset="UTF-8"'
            self._respond(one, plain(401, "who are you?", ask), now)

    def _answer(self, one: Connection, request: Request, now: float) -> None:
        """Answer a request that may be answered.

        Raises:
            OSError: the connection is broken.
        """
        try:
            response = answer(request, self._pages)
        except Exception as error:  # noqa: BLE001 - a page that fails is an answer too
            self._complain(error)
            response = plain(500, "the page could not be made")
        self._respond(one, response, now)

    def _respond(self, one: Connection, response: Response, now: float) -> None:
        """Begin to send an answer.

        Raises:
            OSError: the connection is broken.
        """
        self.counters.requests[response.status] += 1
        one.keep_alive = (
            one.keep_alive and not response.close and one.generation == self._generation
        )
        one.proven = one.proven or response.status < 400  # noqa: PLR2004 - the good codes
        start = head(response, keep_alive=one.keep_alive, extra=self._settings.headers)
        one.out = [memoryview(start)]
        if response.body and not one.head_only:
            one.out.append(memoryview(response.body))
        one.state = State.WRITING
        one.request = None
        self._set_deadline(one, min(now + self._limits.write_seconds, one.give_up))
        self._write(one, now)

    def _write(self, one: Connection, now: float) -> None:
        """Send what can be sent, and go on after the last byte.

        Raises:
            OSError: the connection is broken.
        """
        if not one.send():
            self._want(one, _WRITE)
            return
        if not one.keep_alive:
            self._end(one, now)
            return
        one.state = State.IDLE
        one.since = now
        one.give_up = _FOREVER
        self._set_deadline(one, now + self._limits.idle_seconds)
        self._want(one, _READ)
        if one.has_more():
            self._again.append(one)  # not at once: others have their turn between two requests

    def _end(self, one: Connection, now: float) -> None:
        """Say good-bye; without waiting for the client's end, it might lose the last answer.

        Raises:
            OSError: the connection is broken.
        """
        one.state = State.LINGER
        one.buffer.clear()
        self._want(one, 0)
        one.finish()
        self._set_deadline(one, now + self._limits.linger_seconds)
        self._want(one, _READ)

    def _linger(self, one: Connection) -> None:
        """Throw away what an ended connection still brings.

        Raises:
            OSError: the connection is broken.
        """
        if one.discard():
            self._drop(one)

    def _apply(self, settings: Settings, now: float) -> None:
        """Go on with other settings; connections of the earlier ones end with their next answer."""
        try:
            again = self._gate.use(settings)
        except InputError as error:  # the first users came, and there is no bcrypt
            self._complain(error)
            return
        self._settings = settings
        self._generation += 1
        for one in again:
            self._settle(one, None, now, again=True)
        for one in list(self._connections.values()):
            if one.state is State.IDLE:
                self._drop(one)

    def _settle(
        self, one: Connection, right: bool | None, now: float, *, again: bool = False
    ) -> None:
        """Answer a request whose password was waited for; `again`: ask once more."""
        request = one.request
        if self._connections.get(one.fd) is not one or request is None:
            return
        if again:
            self._guard(one, lambda: self._authorize(one, request, now))
        elif right is None:
            self._guard(one, lambda: self._respond(one, _busy(), now))
        else:
            self._guard(one, lambda: self._decide(one, request, now, right=right))


def _busy() -> Response:
    """Return the answer where a password could not be checked in time."""
    return plain(503, "too many passwords are being checked", "Retry-After: 1", close=True)
