"""What comes over the network is not trusted: chunks, messages, handshakes."""

from __future__ import annotations

import hmac
import itertools
import json
import os
import queue
import socket
import time
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import pytest

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.link import Link, Listener, connect

if TYPE_CHECKING:
    from collections.abc import Iterator

SECRET = bytes(range(32))


class Ends:
    """A listener, and both ends of a connection that proved themselves to each other."""

    def __init__(self) -> None:
        self.inbox: queue.Queue[Any] = queue.Queue()
        self.listener = Listener("127.0.0.1", SECRET, 0, 60, self.inbox)
        self.near = self.dial()
        _, word, body, _ = self.inbox.get(timeout=60)
        self.far: Connection = body[0]
        assert (word, body[1]) == ("caller", "n0")

    def dial(self, secret: bytes = SECRET, index: int = 0) -> Connection:
        return connect("127.0.0.1", self.listener.port, secret, (index, "n0"), 60)

    def heard(self) -> list[tuple[str, Any]]:
        """All that comes until the connection ends."""
        found: list[tuple[str, Any]] = []
        while not found or found[-1][0] != "lost":
            found.append(self.inbox.get(timeout=60)[1:3])
        return found

    def close(self) -> None:
        self.listener.close()
        self.near.close()
        self.far.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


def test_callers_that_are_not_expected_are_refused(ends: Ends) -> None:
    """Another secret: the connector notices before it sends its name. Another index."""
    with pytest.raises((StagingError, OSError)):
        ends.dial(secret=bytes(32))
    other = ends.dial(index=7)
    assert other.poll(60)  # it is closed
    with pytest.raises((EOFError, OSError)):
        other.recv_bytes()
    other.close()
    assert ends.inbox.empty()


def test_a_replayed_conversation_is_refused(ends: Ends) -> None:
    """A recorded proof does not open the door again: the listener's nonce is new."""
    nonce = bytes(32)

    def speak(proof: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", ends.listener.port)) as sock:
            sock.settimeout(None)
            end = Connection(os.dup(sock.fileno()))
            end.send_bytes(nonce)
            theirs = end.recv_bytes()
            real = hmac.digest(SECRET, b"connector" + nonce + theirs, "sha256")
            end.send_bytes(proof or real)
            end.send_bytes(json.dumps([0, "n0"]).encode())
            end.recv_bytes()
            if proof:
                with pytest.raises((EOFError, OSError)):
                    end.recv_bytes()
            end.close()
            return real

    real = speak(b"")
    ends.inbox.get(timeout=60)[2][0].close()
    speak(real)
    assert ends.inbox.empty()


def test_many_silent_strangers_do_not_keep_a_node_out(ends: Ends) -> None:
    """Each has its own thread, which gives up."""
    strangers = [socket.create_connection(("127.0.0.1", ends.listener.port)) for _ in range(100)]
    near = ends.dial()
    ends.inbox.get(timeout=60)[2][0].close()
    near.close()
    for stranger in strangers:
        stranger.close()


def test_a_job_that_was_suspended_continues(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its nodes were silent because all of them were stopped."""
    hours = itertools.count(0, 3600)
    monkeypatch.setattr(time, "monotonic", lambda: next(hours))
    link = Link(ends.near, "far", SECRET, 0.2, ends.inbox)
    with pytest.raises(queue.Empty):
        ends.inbox.get(timeout=0.8)
    monkeypatch.undo()
    ends.far.close()
    link.close()
