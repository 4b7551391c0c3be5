"""Who may connect to a node of a chain, and whom it waits for."""

from __future__ import annotations

import socket
import threading
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.chain import ChainPosition, Link, Listener, connect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SECRET = bytes(range(32))


def place_of(root: Path, index: int) -> ChainPosition:
    """Return the position of one of two nodes."""
    names = ("n0", "n1")
    return ChainPosition(
        f"{root}/chain/data", lambda: False, index, 2, names[index], names, ["lo"], join_seconds=60
    )


@pytest.fixture
def second(root: Path) -> Iterator[tuple[Listener, tuple[str, int]]]:
    """Give the second node's listener and its address."""
    place_of(root, 0).post("0", node="n0")
    place = place_of(root, 1)
    listener = Listener(place, SECRET)
    card = place.record(1)
    yield listener, (card["address"], card["port"])
    listener.close()


def joined(root: Path, listener: Listener) -> tuple[Link, Link]:
    """Connect the first node; return its link and the second's."""
    found: list[Link] = []
    caller = threading.Thread(target=lambda: found.append(connect(place_of(root, 0), SECRET)))
    caller.start()
    link = listener.link()
    caller.join()
    return found[0], link


def test_strangers_neither_get_in_nor_keep_a_node_out(
    root: Path, second: tuple[Listener, tuple[str, int]]
) -> None:
    """Many that are silent, one that talks nonsense, one with another secret: then the node."""
    listener, address = second
    strangers = [socket.create_connection(address) for _ in range(100)]
    strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises((AuthenticationError, EOFError, OSError)):
        Client(address, authkey=bytes(32))
    near, far = joined(root, listener)
    near.send("word", {"some": "thing"})
    assert far.receive()[1:] == ("word", {"some": "thing"})
    assert (near.peer, far.peer) == ("n1", "n0")
    near.close()
    far.close()
    for one in strangers:
        one.close()


def test_another_program_at_the_address_is_not_a_node(
    root: Path, serve: Callable[[bytes], int]
) -> None:
    """The first node ends, and its error names the reason."""
    place = place_of(root, 0)
    place.post("1", node="n1", address="127.0.0.1", port=serve(b"220 mail.example.org ESMTP\r\n"))
    hasty = ChainPosition(place.path, lambda: False, 0, 2, "n0", join_seconds=0.5, timeout=0.5)
    with pytest.raises(StagingError, match=r"node 1 of 2 did not come within 0 s \("):
        connect(hasty, SECRET)


@pytest.fixture
def serve() -> Iterator[Callable[[bytes], int]]:
    """Give a function that starts a server that sends a greeting, and returns its port."""
    made: list[socket.socket] = []

    def start(greeting: bytes) -> int:
        server = socket.create_server(("127.0.0.1", 0))
        made.append(server)

        def answer() -> None:
            while server.fileno() >= 0:
                try:
                    sock, _ = server.accept()
                except OSError:
                    return
                with sock:
                    sock.sendall(greeting)

        threading.Thread(target=answer, daemon=True).start()
        return int(server.getsockname()[1])

    yield start
    for server in made:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
