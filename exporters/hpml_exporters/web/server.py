"""The server: a thread per connection, and limits on what a client can hold or wait for.

prometheus_client's own server stops for good at one silent TLS client: it waits for its handshake
where it accepts the next one.
"""

from __future__ import annotations

import errno
import logging
import socket
import ssl
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from typing import Any

from hpml_exporters.web.address import listen_on
from hpml_exporters.web.config import WebConfig, fingerprint, read, tls_context
from hpml_exporters.web.handler import STATUSES, Client, Handler, Pages, RequestLimits
from hpml_exporters.web.passwords import Passwords

_LOG = logging.getLogger(__name__)
_PAUSE_SECONDS = 0.01
_LOOK_SECONDS = 0.1
_REPORT_SECONDS = 60.0
_FOREVER = 1e6
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


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
        config_changed: whether the web-config file, or one that it names, is another than at the
            start.
    """

    connections: int = 0
    accepted: int = 0
    responses: dict[int, int] = field(default_factory=lambda: dict.fromkeys(STATUSES, 0))
    closed: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("crowded", "timeout", "tls", "error"), 0)
    )
    config_changed: bool = False


class Server(ThreadingHTTPServer):
    """Serves /metrics and /healthz by HTTP, or HTTPS if a web-config file asks for it.

    Attributes:
        pages: what is served.
        limits: how much clients may use.
        counters: numbers that any thread may read at any time.
        config: content of the web-config file at the start.
        context: of TLS; None: plain HTTP.
        passwords: who may read.
    """

    daemon_threads = True
    passwords: Passwords

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
        self.pages = pages
        self.limits = limits or RequestLimits()
        self.counters = Counters()
        self.config = WebConfig()
        self.context: ssl.SSLContext | None = None
        self._rendering = threading.Lock()
        self._listen, self._any_port, self._web_config = listen, any_port, web_config
        self._lock = threading.Lock()
        self._clients: set[Client] = set()
        self._reported = -_FOREVER
        self._stopped = threading.Event()

    @property
    def scheme(self) -> str:
        """http, or https once `start` has read a file with TLS."""
        return "https" if self.context else "http"

    def start(self) -> tuple[str, int]:
        """Serve in other threads; returns the address that it listens on.

        Raises:
            InputError: the address cannot be used, or the web-config file is wrong.
        """
        if self._web_config:
            # Read passwords and certificates before listening: the port is never open without them.
            self.config = read(self._web_config)
            loaded = fingerprint(self._web_config, self.config)
            if self.config.tls:
                self.context = tls_context(self.config.tls, self._web_config)
        self.passwords = Passwords(self.config.users)
        self.socket = listen_on(self._listen, any_port=self._any_port)
        if self._web_config:
            threading.Thread(target=self._watch, args=(loaded,), daemon=True).start()
        # Its poll interval is for ever: `stop` wakes it through the socket.
        threading.Thread(target=self.serve_forever, args=(_FOREVER,), daemon=True).start()
        host, port = self.socket.getsockname()[:2]
        return str(host), int(port)

    def stop(self) -> None:
        """Close all connections and stop; responses under way are cut off."""
        self._stopped.set()
        if self.fileno() >= 0:
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes serve_forever
            self.shutdown()
            self.server_close()
        with self._lock:
            for client in list(self._clients):
                self._drop(client)

    def health(self) -> tuple[bool, str]:
        """Return whether the exporter works, and in words what fails or waits for a restart."""
        healthy, message = self.pages.health()
        if self.counters.config_changed:
            message += f"; {self._web_config} has changed: restart the exporter to apply it"
        return healthy, message

    @contextmanager
    def turn(self, client: Client) -> Iterator[None]:
        """Wait until no other page is being rendered.

        Raises:
            ConnectionAbortedError: the client had to go meanwhile.
        """
        # Not one long wait: a connection that was closed meanwhile must give its thread back.
        while not self._rendering.acquire(timeout=_LOOK_SECONDS):
            if client not in self._clients:
                raise ConnectionAbortedError
        try:
            yield
        finally:
            self._rendering.release()

    def answered(self, status: int) -> None:
        """Count a response."""
        with self._lock:
            self.counters.responses[status] += 1

    def gave_up(self, reason: str) -> None:
        """Count a connection that is ended early."""
        with self._lock:
            self.counters.closed[reason] += 1

    def get_request(self) -> tuple[Any, object]:
        """Accept a client; if descriptors are exhausted, close another connection."""
        try:
            sock, address = self.socket.accept()
        except OSError as error:
            if error.errno in _NO_ROOM:
                with self._lock:
                    self._make_room()
                time.sleep(_PAUSE_SECONDS)
            raise
        return Client(sock, address[0]), address

    def process_request(self, request: Any, client_address: object) -> None:
        """Serve a client in a new thread; if there are too many, close another connection."""
        with self._lock:
            of_this = sum(one.peer == request.peer for one in self._clients)
            if of_this >= self.limits.connections_of_one_address:
                self._make_room(request.peer)
            elif len(self._clients) >= self.limits.connections:
                self._make_room()
            self._clients.add(request)
            self.counters.connections = len(self._clients)
            self.counters.accepted += 1
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection whose thread ends."""
        with self._lock:
            self._drop(request)
            request.sock.close()

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002
        """Count an error of the server; prints one per minute at most."""
        self.gave_up("error")
        if time.monotonic() - self._reported > _REPORT_SECONDS:
            self._reported = time.monotonic()
            _LOG.error("error while serving: %r", sys.exception())

    def _make_room(self, peer: str = "") -> None:
        """End the longest idle connection of an address, else of the address with most."""
        if self._clients:
            number = Counter(one.peer for one in self._clients)
            # not by most_common, which imports something: that needs a descriptor
            peer = peer or max(number, key=number.__getitem__)
            of_this = (one for one in self._clients if one.peer == peer)
            self._drop(min(of_this, key=lambda one: one.since))
            self.counters.closed["crowded"] += 1

    def _drop(self, client: Client) -> None:
        self._clients.discard(client)
        self.counters.connections = len(self._clients)
        # Shut down only; its own thread closes it, as a new connection could get the number of a
        # descriptor that is still in use. Not by SSLSocket.shutdown, which takes the TLS object
        # away from the thread that reads from it.
        with suppress(OSError):  # ended already
            socket.socket.shutdown(client.sock, socket.SHUT_RDWR)

    def _watch(self, loaded: bytes) -> None:
        """Check now and then whether the web-config file has changed.

        A change has no effect while the exporter runs: a file caught half-written could open what
        was closed.
        """
        while not self._stopped.wait(self.limits.watch_seconds):
            changed = fingerprint(self._web_config, self.config) != loaded
            if changed and not self.counters.config_changed:
                _LOG.warning("%s has changed: restart to apply it", self._web_config)
            self.counters.config_changed = changed
