"""One connection with TLS. Apart from the plain one, so that `ssl` is loaded only with TLS."""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress

from hpml_exporters.server.connection import Connection, Shake, State
from hpml_exporters.server.tls import allowed

__all__ = ["SecureConnection"]

_RECORD = 0x16  # the first byte of a handshake's record, RFC 8446, 5.1
_CHUNK_BYTES = 65536


class SecureConnection(Connection):
    """A connection whose TLS state is made when its first byte has come."""

    __slots__ = ("_context", "_names", "_tls")

    def __init__(
        self,
        sock: socket.socket,
        peer: str,
        now: float,
        context: ssl.SSLContext,
        names: tuple[str, ...],
    ) -> None:
        super().__init__(sock, peer, now)
        self.state = State.HANDSHAKE
        self._context = context
        self._names = names
        self._tls: ssl.SSLSocket | None = None

    def shake(self) -> Shake:
        """Go on with the handshake.

        Raises:
            OSError: it failed, or the client's certificate has none of the allowed names.
        """
        if self._tls is None:
            try:
                first = self._sock.recv(1, socket.MSG_PEEK)
            except (BlockingIOError, InterruptedError):
                return Shake.READ
            if not first:
                raise ConnectionResetError
            if first[0] != _RECORD:
                return Shake.PLAIN
            self._tls = self._context.wrap_socket(
                self._sock, server_side=True, do_handshake_on_connect=False
            )
            self._sock = self._tls
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return Shake.READ
        except ssl.SSLWantWriteError:
            return Shake.WRITE
        if not allowed(self._tls, self._names):
            raise PermissionError
        return Shake.DONE

    def receive(self, most: int) -> bytes | None:
        """Return what came, empty at the end; nothing while nothing came."""
        try:
            return self._sock.recv(most)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return b""

    def send(self) -> bool:
        """Send as much as the kernel takes; return whether all is sent."""
        if self._tls is None:
            return super().send()
        while self.out:
            try:
                # The same slice again after a refusal, as OpenSSL wants it.
                sent = self._tls.send(self.out[0][:_CHUNK_BYTES])
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return False
            self.sent(sent)
        return True

    def has_more(self) -> bool:
        """Return whether something was read already that the selector knows nothing of."""
        return bool(self.buffer) or (self._tls is not None and self._tls.pending() > 0)

    def finish(self) -> None:
        """Say that nothing more will come, in TLS and below it."""
        if self._tls is not None:
            with suppress(OSError, ValueError):
                self._tls.unwrap()
            self._sock = socket.socket(fileno=self._tls.detach())
            self._sock.setblocking(False)
            self._tls = None
        super().finish()
