"""Clients that mean no good, in threads of the test: silent, slow, half-way through TLS."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

# The first bytes of a TLS record: a handshake of 512 bytes, which never come.
HALF_A_HELLO = b"\x16\x03\x01\x02\x00\x01"
_LOOK_SECONDS = 0.2


class Crowd(NamedTuple):
    """So many connections that send some bytes at once, and then some more again and again."""

    size: int
    first: bytes = b""
    more: bytes = b""


SILENT = Crowd(200)
SLOW_LORIS = Crowd(20, b"GET /metrics HTTP/1.1\r\nHost: node\r\n", b"X-Again: 1\r\n")
HALF_TLS = Crowd(20, HALF_A_HELLO)


@contextlib.contextmanager
def crowded(address: str, *crowds: Crowd) -> Iterator[None]:
    """Keep the crowds connected until the block ends: whoever is thrown out comes again."""
    host, _, port = address.rpartition(":")
    ended = threading.Event()
    full = threading.Event()

    def press() -> None:
        there: list[tuple[socket.socket, Crowd]] = []
        missing = [crowd for crowd in crowds for _ in range(crowd.size)]
        while not ended.is_set():
            for crowd in missing:
                with contextlib.suppress(OSError):
                    one = socket.create_connection((host, int(port)), timeout=60)
                    one.setblocking(False)
                    one.sendall(crowd.first)
                    there.append((one, crowd))
            full.set()
            ended.wait(_LOOK_SECONDS)
            alive = [(one, crowd) for one, crowd in there if _is_open(one, crowd)]
            missing = [crowd for one, crowd in there if one.fileno() < 0]
            there = alive
        for one, _ in there:
            one.close()

    thread = threading.Thread(target=press)
    thread.start()
    try:
        assert full.wait(240)
        yield
    finally:
        ended.set()
        thread.join(240)
        assert not thread.is_alive()


def _is_open(one: socket.socket, crowd: Crowd) -> bool:
    """Send some more; a connection that the other side ended is closed here too."""
    try:
        if crowd.more:
            one.send(crowd.more)
        if one.recv(4096):
            return True
    except BlockingIOError:
        return True
    except OSError:
        pass
    one.close()
    return False


def answer_to(address: str, request: bytes, seconds: float = 60.0) -> bytes:
    """Send raw bytes; returns all that comes until the other side ends the connection."""
    host, _, port = address.rpartition(":")
    answer = b""
    end = time.monotonic() + seconds
    with socket.create_connection((host, int(port)), timeout=seconds) as one:
        with contextlib.suppress(OSError):
            one.sendall(request)
        with contextlib.suppress(OSError):
            while time.monotonic() < end and (part := one.recv(65536)):
                answer += part
    return answer
