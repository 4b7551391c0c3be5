"""One connection of a client: its socket, how far it is, and until when."""

from __future__ import annotations

import socket
from contextlib import suppress
from enum import Enum, auto

from hpml_exporters.server.request import Request

__all__ = ["Connection", "Shake", "State"]


class State(Enum):
    """How far a connection is."""

    HANDSHAKE = auto()
    READING = auto()  # a first request, or one that has begun
    IDLE = auto()  # between two requests
    CHECKING = auto()  # a password is being checked
    WRITING = auto()
    LINGER = auto()  # all is said; what the client still sends is thrown away


class Shake(Enum):
    """What a handshake needs next."""

    DONE = auto()
    READ = auto()
    WRITE = auto()
    PLAIN = auto()  # the client does not speak TLS


class Connection:
    """A connection without TLS.

    Attributes:
        fd: of the socket, the same for all of its life.
        state: how far it is.
        since: when it came or its last answer ended, time.monotonic().
        deadline: when its state has lasted too long, time.monotonic().
        give_up: when nobody waits for its answer any longer, time.monotonic().
        buffer: what was read and not yet understood.
        out: what is still to be sent.
        head_only: the answer goes without its body.
        keep_alive: it stays open after the answer that is being sent.
        proven: it got what it asked for at least once.
        generation: of the settings under which it came.
        events: that the selector waits for; 0: it is not in the selector.
        peer: address of the client.
        request: whose password is being checked.
    """

    __slots__ = (
        "_sock", "buffer", "deadline", "events", "fd", "generation", "give_up", "head_only",
        "keep_alive", "out", "peer", "proven", "request", "since", "state",
    )  # fmt: skip

    def __init__(self, sock: socket.socket, peer: str, now: float) -> None:
        self._sock = sock
        self.fd = sock.fileno()
        self.peer = peer
        self.since = now
        self.deadline = now
        self.give_up = float("inf")
        self.state = State.READING
        self.buffer = bytearray()
        self.out: list[memoryview] = []
        self.head_only = False
        self.keep_alive = False
        self.proven = False
        self.generation = 0
        self.events = 0
        self.request: Request | None = None

    def shake(self) -> Shake:
        """Go on with the handshake.

        Raises:
            OSError: it failed.
        """
        return Shake.DONE

    def receive(self, most: int) -> bytes | None:
        """Return what came, empty at the end; nothing while nothing came.

        Raises:
            OSError: the connection is broken.
        """
        try:
            return self._sock.recv(most)
        except (BlockingIOError, InterruptedError):
            return None

    def send(self) -> bool:
        """Send as much as the kernel takes; return whether all is sent.

        Raises:
            OSError: the connection is broken.
        """
        while self.out:
            try:
                sent = self._sock.sendmsg(self.out)
            except (BlockingIOError, InterruptedError):
                return False
            self.sent(sent)
        return True

    def sent(self, count: int) -> None:
        """Forget the first bytes of what is to be sent."""
        while self.out and count >= len(self.out[0]):
            count -= len(self.out.pop(0))
        if count:
            self.out[0] = self.out[0][count:]

    def discard(self) -> bool:
        """Throw away what came, some of it at a time; return whether the client ended too.

        Raises:
            OSError: the connection is broken.
        """
        try:
            return not self._sock.recv(65536)
        except (BlockingIOError, InterruptedError):
            return False

    def has_more(self) -> bool:
        """Return whether something was read already that the selector knows nothing of."""
        return bool(self.buffer)

    def finish(self) -> None:
        """Say that nothing more will come, and leave the client time to read what came.

        Raises:
            OSError: the connection is broken.
        """
        self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Give the socket back."""
        with suppress(OSError):
            self._sock.close()
