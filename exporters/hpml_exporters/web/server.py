"""The server: one thread and one loop over all connections, which never waits for one of them.

Why not asyncio, or prometheus_client's own server: 200 silent TLS clients cost the first 60 MiB and
stop the second for good.
"""

from __future__ import annotations

import selectors
import socket
import sys
import threading
import time
from collections import Counter, deque
from contextlib import suppress

from hpml_exporters.web.address import listen_on
from hpml_exporters.web.auth import Authenticator
from hpml_exporters.web.connection import Connection, Service
from hpml_exporters.web.http import Pages
from hpml_exporters.web.limits import Counters, Limits
from hpml_exporters.web.settings import Settings, Watcher, load

__all__ = ["Server"]

_ACCEPTED_PER_TURN = 64
_STOP_SECONDS = 5.0
_FAULT_SECONDS = 0.1
_REPORT_SECONDS = 60.0
_FOREVER = float("inf")


class Server:
    """Serves /metrics and /healthz by HTTP, or HTTPS where a web-config file says so.

    Attributes:
        counters: numbers that any thread may read at any time.
        scheme: http, or https once `start` has read a file with TLS.
    """

    def __init__(
        self,
        listen: str,
        web_config: str,
        pages: Pages,
        limits: Limits | None = None,
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
        self.counters = Counters()
        self.scheme = "http"
        self._listen = listen
        self._any_port = any_port
        self._web_config = web_config
        self._pages = pages
        self._limits = limits or Limits()
        self._stopped = False
        self._changed: deque[Settings] = deque()
        self._connections: dict[int, Connection] = {}
        self._reported = -_FOREVER
        self._watcher: Watcher | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> tuple[str, int]:
        """Serve in a thread of its own; returns the address that it listens on.

        Raises:
            InputError: the address cannot be used, or the web-config file is wrong.
        """
        settings = load(self._web_config) if self._web_config else Settings()
        self.scheme = "https" if settings.context else "http"
        authenticator = Authenticator(self._limits, self._wake)
        self._listener = listen_on(self._listen, any_port=self._any_port)
        authenticator.use(settings.config.users)
        self._service = Service(self._pages, self._limits, self.counters, settings, authenticator)
        self._wake_sender, self._wake_receiver = socket.socketpair()
        self._wake_sender.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)
        self._thread.start()
        if self._web_config:
            seconds = self._limits.watch_seconds
            self._watcher = Watcher(settings, seconds, self._change, self.counters)
            self._watcher.start()
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    def stop(self) -> None:
        """Close all connections and stop; responses under way are cut off."""
        if self._watcher:
            self._watcher.stop()
        if self._thread:
            self._stopped = True
            self._wake()
            self._thread.join(_STOP_SECONDS)

    def _wake(self) -> None:
        """Make the loop look at passwords and settings; may be called from any thread."""
        with suppress(OSError):  # woken already, or stopped
            self._wake_sender.send(b"\0")

    def _change(self, settings: Settings) -> None:
        """Hand over changed settings; called by the watcher."""
        self._changed.append(settings)
        self._wake()

    def _run(self) -> None:
        """Serve until stopped."""
        try:
            while not self._stopped:
                try:
                    self._turn()
                except Exception as error:  # noqa: BLE001 - a deaf exporter is worse than a fault
                    self._report(error)
                    time.sleep(_FAULT_SECONDS)
        finally:
            for connection in list(self._connections.values()):
                self._close(connection)
            self._service.authenticator.stop()
            for ours in (self._selector, self._listener, self._wake_sender, self._wake_receiver):
                ours.close()

    def _turn(self) -> None:
        """Wait for something to happen, and resume every connection that it concerns."""
        until = min((one.until for one in self._connections.values()), default=_FOREVER)
        timeout = None if until == _FOREVER else max(0.0, until - time.monotonic())
        for key, _ in self._selector.select(timeout):
            if isinstance(key.data, Connection):
                self._resume(key.data, timed_out=False)
            elif key.fileobj is self._listener:
                self._accept()
            else:
                self._wakened()
        now = time.monotonic()
        for connection in list(self._connections.values()):
            if connection.until <= now:
                self._resume(connection, timed_out=True)

    def _wakened(self) -> None:
        """Apply changed settings, and resume clients whose password was checked."""
        self._wake_receiver.recv(4096)
        while self._changed:
            settings = self._changed.popleft()
            self._service.authenticator.use(settings.config.users)
            self._service.settings = settings
            for connection in list(self._connections.values()):
                if connection.idle:  # the others end with their next response
                    self._close(connection)
        for connection in list(self._connections.values()):
            if not connection.events:
                self._resume(connection, timed_out=False)

    def _accept(self) -> None:
        """Accept clients that wait, some at a time."""
        for _ in range(_ACCEPTED_PER_TURN):
            try:
                sock, address = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError:  # no descriptor or no memory left
                if not self._make_room():
                    time.sleep(_FAULT_SECONDS)
                return
            if len(self._connections) >= self._limits.connections:
                self._make_room()
            with suppress(OSError):
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = Connection(sock, address[0], self._service)
            self._connections[connection.fd] = connection
            self.counters.accepted += 1
            self.counters.connections = len(self._connections)
            self._resume(connection)

    def _make_room(self) -> bool:
        """Close the least useful connection; returns whether there was one.

        That is the oldest one, of the address with most connections, which was never served.
        """
        if not self._connections:
            return False
        per_peer = Counter(one.peer for one in self._connections.values())
        victim = max(
            self._connections.values(),
            key=lambda one: (not one.served, per_peer[one.peer], -one.opened),
        )
        self.counters.closed["crowded"] += 1
        self._close(victim)
        return True

    def _resume(self, connection: Connection, *, timed_out: bool | None = None) -> None:
        """Continue a connection until its next wait; `timed_out` is None at its start."""
        if self._connections.get(connection.fd) is not connection:
            return  # closed by another one's turn
        try:
            events, connection.until = connection.steps.send(timed_out)  # type: ignore[arg-type]
        except StopIteration:
            self._close(connection)
        except Exception as error:  # noqa: BLE001 - a fault ends this connection and no other
            self._report(error)
            self._close(connection)
        else:
            self._wait_for(connection, events)

    def _wait_for(self, connection: Connection, events: int) -> None:
        """Have the selector wait for events of a connection."""
        if events == connection.events:
            return
        if not events:
            self._selector.unregister(connection.fd)
        elif connection.events:
            self._selector.modify(connection.fd, events, connection)
        else:
            self._selector.register(connection.fd, events, connection)
        connection.events = events

    def _close(self, connection: Connection) -> None:
        self._wait_for(connection, 0)
        del self._connections[connection.fd]
        self.counters.connections = len(self._connections)
        connection.close()

    def _report(self, error: Exception) -> None:
        """Count a fault of the server, and print one of them per minute."""
        self.counters.closed["error"] += 1
        now = time.monotonic()
        if now - self._reported > _REPORT_SECONDS:
            self._reported = now
            print(f"hpml export: error while serving: {error!r}", file=sys.stderr)  # noqa: T201
