"""The server as its user sees it: started, stopped, counted."""

from __future__ import annotations

import threading

from hpml_exporters.server.address import listen_on
from hpml_exporters.server.counters import Counters
from hpml_exporters.server.limits import Limits
from hpml_exporters.server.loop import Loop
from hpml_exporters.server.pages import Pages
from hpml_exporters.server.settings import Settings, Watch

__all__ = ["Server"]

_STOP_SECONDS = 5.0


class Server:
    """Serves two pages by HTTP, or HTTPS where a web-config file says so.

    Attributes:
        counters: what it counts of itself; numbers that any thread may read at any time.
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
            listen: ADDRESS:PORT; port 0 takes a free one, no address takes all.
            web_config: file in Prometheus' web-config format; empty: plain HTTP for everybody.
            pages: what is served.
            limits: how much clients may take.
            any_port: take a free port where that of `listen` is another's.
        """
        self.counters = Counters()
        self._listen = listen
        self._any_port = any_port
        self._pages = pages
        self._limits = limits or Limits()
        self._web_config = web_config
        self._watch: Watch | None = None
        self._loop: Loop | None = None
        self._thread: threading.Thread | None = None
        self._scheme = "http"

    def start(self) -> tuple[str, int]:
        """Serve from now on, in a thread of its own; return the address that is listened on.

        Raises:
            InputError: the address cannot be had, or the web-config file is wrong.
        """
        settings = Settings()
        if self._web_config:
            self._watch = Watch(
                self._web_config, self._limits.watch_seconds, self.counters, self._change
            )
            settings = self._watch.first()
        self._scheme = "https" if settings.context else "http"
        listener = listen_on(self._listen, self._limits, any_port=self._any_port)
        try:
            self._loop = Loop(listener, settings, self._pages, self._limits, self.counters)
        except BaseException:
            listener.close()
            raise
        host, port = listener.getsockname()[:2]
        self._thread = threading.Thread(target=self._loop.run, name="server", daemon=True)
        self._thread.start()
        if self._watch:
            self._watch.start()
        return str(host), int(port)

    @property
    def scheme(self) -> str:
        """How it is asked: http, or https once `start` has found that the file wants TLS."""
        return self._scheme

    def stop(self) -> None:
        """Close everything; open answers are cut off."""
        if self._watch:
            self._watch.stop()
        if self._loop and self._thread:
            self._loop.stop()
            self._thread.join(_STOP_SECONDS)

    def _change(self, settings: Settings) -> None:
        """Pass changed settings on."""
        if self._loop:
            self._loop.change(settings)
