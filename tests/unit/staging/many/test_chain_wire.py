"""What comes over the network is not trusted: chunks, messages, handshakes."""

from __future__ import annotations

import hmac
import itertools
import json
import os
import queue
import socket
import stat
import struct
import threading
import time
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.chunks import ChunkWriter
from hpml_orchestrator.staging.hashing import hashing
from hpml_orchestrator.staging.link import DATA, Link, Listener, connect, packed
from hpml_orchestrator.staging.plan import Entry, Plan

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SECRET = bytes(range(32))


def chunk(number: int, offset: int, data: bytes, length: int | None = None) -> memoryview:
    head = struct.pack(">QQI", number, offset, len(data) if length is None else length)
    return memoryview(head + data)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[ChunkWriter]:
    """Give a writer of two files, 10 bytes and 5 MiB, and an empty one."""
    sizes = {"small": 10, "large": 5 << 20, "empty": 0}
    files = [Entry(name, stat.S_IFREG | 0o644, 0, size, size) for name, size in sizes.items()]
    fd = os.open(tmp_path, os.O_RDONLY)
    yield ChunkWriter(Plan("/source", Entry("", 0o755, 0), files=files), fd, hashing())
    os.close(fd)


@pytest.mark.parametrize(
    "message",
    [
        memoryview(b"x"),
        chunk(3, 0, b"1"),
        chunk(1 << 63, 0, b"1"),
        chunk(0, 0, bytes(11)),
        chunk(0, 1 << 63, b"12345"),
        chunk(0, 0, b""),
        chunk(0, 0, b"123", 4),
        chunk(1, 5 << 20, bytes(6)),
    ],
)
def test_chunks_for_no_place_are_refused(writer: ChunkWriter, message: memoryview) -> None:
    """Beyond the file, in no file, empty, or shorter than announced."""
    with pytest.raises(StagingError):
        writer.take(message)


def test_chunks_come_in_order(writer: ChunkWriter, tmp_path: Path) -> None:
    """One that does not follow the one before is refused; one that begins again is taken."""
    writer.take(chunk(0, 0, b"abcd"))
    with pytest.raises(StagingError, match="out of order"):
        writer.take(chunk(0, 6, b"abcd"))
    writer.take(memoryview(bytes(chunk(0, 0, b"ABCD")) + bytes(chunk(0, 4, b"efghij"))))
    assert (tmp_path / "small").read_bytes() == b"ABCDefghij"


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
    """Another secret: the connector finds out before it has said anything. Another index."""
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
    """Each has a thread of its own that gives it up."""
    strangers = [socket.create_connection(("127.0.0.1", ends.listener.port)) for _ in range(100)]
    near = ends.dial()
    ends.inbox.get(timeout=60)[2][0].close()
    near.close()
    for stranger in strangers:
        stranger.close()


def test_messages_arrive_in_order_and_then_the_end(ends: Ends) -> None:
    """What was sent before the connection ended is received first."""
    one = Link(ends.near, "far", SECRET, 60, queue.Queue())
    other = Link(ends.far, "near", SECRET, 60, ends.inbox)
    one.send(packed(SECRET, "plan", "a" * 500_000))
    one.send(DATA + b"123")
    threading.Thread(target=one.close).start()
    assert ends.heard() == [
        ("plan", "a" * 500_000),
        ("data", b"123"),
        ("lost", "near was lost: its connection ended"),
    ]
    other.close()


def test_silence_is_noticed(ends: Ends) -> None:
    """A neighbour whose threads do not even give signs of life."""
    link = Link(ends.near, "far", SECRET, 0.3, ends.inbox)
    assert ends.heard() == [("lost", "far hangs: no sign of life for 0 s")]
    ends.far.close()
    link.close()


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


@settings(max_examples=30, deadline=None)
@given(some.binary(min_size=1, max_size=200))
def test_nonsense_on_a_link_breaks_it(data: bytes) -> None:
    """Bytes that are not a message are never delivered."""
    ends = Ends()
    link = Link(ends.near, "far", SECRET, 60, ends.inbox)
    os.write(ends.far.fileno(), data)
    ends.far.close()
    assert [word for word, _ in ends.heard()] == ["lost"]
    link.close()
    ends.listener.close()


def test_what_was_changed_on_the_way_is_not_delivered(ends: Ends) -> None:
    """A message whose digest was made with another secret."""
    one = Link(ends.near, "far", SECRET, 60, queue.Queue())
    other = Link(ends.far, "near", SECRET, 60, ends.inbox)
    one.send(packed(bytes(32), "commit"))
    assert ends.heard() == [("lost", "what came from near is damaged")]
    one.close()
    other.close()
