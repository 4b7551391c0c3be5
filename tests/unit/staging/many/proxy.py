"""A labelled fake: a stretch of network between two nodes that damages what passes."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from pathlib import Path

THROUGH_PROXY = """
import socket
_connect = socket.create_connection
socket.create_connection = lambda address, timeout: _connect(("127.0.0.1", {port}), timeout)
"""


class Proxy:
    """Passes connections on to the node whose address is in a file, with one bit flipped.

    Args:
        card: the notice, read when a connection comes.
        at: how many bytes pass unharmed.
    """

    def __init__(self, card: Path, *, at: int) -> None:
        self._card = card
        self._at = at
        self.flipped = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.before = THROUGH_PROXY.format(port=self.port)
        self._open: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                card = json.loads(self._card.read_text())
                far = socket.create_connection((card["address"], card["port"]))
                self._open += [near, far]
                for pair, onward in (((near, far), True), ((far, near), False)):
                    threading.Thread(target=self._pass, args=(*pair, onward), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, onward: bool) -> None:
        seen = 0
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                if onward and seen <= self._at < seen + len(data):
                    data[self._at - seen] ^= 1
                    self.flipped += 1
                seen += len(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Cut everything."""
        self._listener.close()
        for one in self._open:
            one.close()
