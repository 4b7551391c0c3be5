"""What comes over the network is not believed: plans, chunks, messages, handshakes."""

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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.chain import plan_of as plan_heard
from hpml_orchestrator.staging.chain import plan_parts
from hpml_orchestrator.staging.chunks import Landing, Sender, make_empty
from hpml_orchestrator.staging.hashing import hashing_named
from hpml_orchestrator.staging.link import CONTROL, DATA, Caller, Door, Heard, Link, call
from hpml_orchestrator.staging.plan import Entry, HardLink, Plan, Symlink
from tests.patience import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

SECRET = bytes(range(32))
names = (
    some.binary(min_size=1, max_size=40)
    .map(lambda raw: os.fsdecode(raw.replace(b"/", b"_").replace(b"\0", b"0")))
    .filter(lambda name: name not in {".", ".."})
)
entries = some.builds(
    Entry,
    names,
    some.integers(0, 0o777).map(lambda bits: bits | stat.S_IFREG),
    some.integers(-(1 << 62), 1 << 62),
    some.integers(0, 1 << 62),
    some.integers(0, 1 << 62),
    some.just(0),  # the inode is the source's own matter
)


def plan_of(files: list[Entry], directories: list[Entry] | None = None) -> Plan:
    return Plan("/source", Entry("", stat.S_IFDIR | 0o755, 5), directories or [], files)


def carried(plan: Plan) -> Plan:
    return plan_heard("/source", [json.loads(json.dumps(part)) for part in plan_parts(plan)])


@given(some.lists(entries, max_size=20, unique_by=lambda entry: entry.path))
def test_a_plan_comes_as_it_was(files: list[Entry]) -> None:
    """Any names that a file system can hold, any sizes and times."""
    plan = plan_of(files)
    plan.stamps = [(number, 1 << 62, 7) for number in range(len(files))]
    if files:
        plan.symlinks = [Symlink(files[0].path + "~link", "x", 7)]
        plan.hard_links = [HardLink(files[0].path + "~hard", files[0].path)]
    assert carried(plan) == plan


def test_a_large_plan_comes_in_parts() -> None:
    """Directories come before what is in them."""
    below = [Entry("d", stat.S_IFDIR | 0o700, 1), Entry("d/e", stat.S_IFDIR | 0o700, 1)]
    plan = plan_of([Entry(f"d/e/{n}", stat.S_IFREG | 0o644, n, n, n) for n in range(20_000)], below)
    assert len(list(plan_parts(plan))) > 20
    assert carried(plan) == plan


@pytest.mark.parametrize("part", [["files", [1]], ["files", 7], ["top", []], [], 5, ["top", [[]]]])
def test_a_plan_that_is_none_is_damaged(part: Any) -> None:
    """An error, and no traceback."""
    with pytest.raises(StagingError, match="damaged"):
        plan_heard("/source", [part])


# landing


def chunk(number: int, offset: int, data: bytes, length: int | None = None) -> bytes:
    return struct.pack(">QQI", number, offset, len(data) if length is None else length) + data


@pytest.fixture
def landing(tmp_path: Path) -> Iterator[Landing]:
    """Give a place for two files, 10 bytes and 5 MiB, and an empty one."""
    files = [
        Entry("small", stat.S_IFREG | 0o644, 0, 10, 10),
        Entry("large", stat.S_IFREG | 0o644, 0, 5 << 20, 5 << 20),
        Entry("empty", stat.S_IFREG | 0o644, 0),
    ]
    how = hashing_named("xxh3_128")
    assert how is not None
    fd = os.open(tmp_path, os.O_RDONLY)
    make_empty(plan_of(files), fd)
    yield Landing(plan_of(files), fd, how)
    os.close(fd)


@pytest.mark.parametrize(
    "message",
    [
        b"x",
        chunk(3, 0, b"1"),
        chunk(1 << 63, 0, b"1"),
        chunk(0, 0, bytes(11)),
        chunk(0, 1 << 63, b"12345"),
        chunk(0, 0, b""),
        chunk(0, 0, b"123", 4),
        chunk(1, 5 << 20, bytes(6)),
    ],
)
def test_chunks_for_no_place_are_refused(landing: Landing, message: bytes) -> None:
    """Beyond the file, in no file, nothing at all, or less than is said."""
    with pytest.raises(StagingError):
        landing.take(message)


def test_chunks_come_in_order(landing: Landing, tmp_path: Path) -> None:
    """One that does not follow the one before is refused; one that begins again is taken."""
    landing.take(chunk(0, 0, b"abcd"))
    with pytest.raises(StagingError, match="out of order"):
        landing.take(chunk(0, 6, b"abcd"))
    landing.take(chunk(0, 0, b"ABCD") + chunk(0, 4, b"efghij"))
    assert (tmp_path / "small").read_bytes() == b"ABCDefghij"


def test_a_file_that_is_there_is_not_overwritten(landing: Landing, tmp_path: Path) -> None:
    """Also not one that a link leads to."""
    (tmp_path / "other").write_bytes(b"keep")
    (tmp_path / "small").symlink_to("other")
    with pytest.raises(StagingError, match="File exists"):
        landing.take(chunk(0, 0, b"0123456789"))
    assert (tmp_path / "other").read_bytes() == b"keep"


class Kept:
    """A fake connection that keeps what is sent: nothing but the bytes matters here."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send_bytes(self, data: bytes) -> None:
        self.sent.append(bytes(data))

    def close(self) -> None:
        self.sent.append(b"closed")


def test_what_was_gathered_is_sent_at_the_end() -> None:
    """Small files go together in one message; a worker without work opens no connection."""
    kept = Kept()
    opened: list[Kept] = []

    def connect() -> Any:
        opened.append(kept)
        return kept

    Sender(connect, "n2", 1.0).close()
    assert opened == []
    sender = Sender(connect, "n2", 1.0)
    sender.send(0, 0, b"abc")
    sender.send(1, 0, memoryview(b"defg"))
    assert kept.sent == []
    sender.close()
    assert kept.sent == [chunk(0, 0, b"abc") + chunk(1, 0, b"defg"), b"", b"closed"]
    sender.close()


# handshake and link


@pytest.fixture
def door() -> Iterator[Door]:
    made = Door("127.0.0.1", SECRET, caller=0, timeout=60)
    yield made
    made.close()


def dial(door: Door, kind: str = CONTROL, secret: bytes = SECRET, me: int = 0) -> Connection:
    return call("127.0.0.1", door.port, secret, kind, me=me, name="n0", timeout=60)


def pair(door: Door, kind: str = CONTROL) -> tuple[Connection, Caller]:
    """Two ends that proved themselves to each other."""
    return dial(door, kind), door.callers.get(timeout=60)


def test_who_knows_the_secret_is_let_in(door: Door) -> None:
    """With the kind of the connection and the node's name."""
    near, far = pair(door, DATA)
    assert (far.kind, far.name) == (DATA, "n0")
    near.send_bytes(b"data")
    assert far.connection.recv_bytes() == b"data"
    near.close()
    far.connection.close()


def test_who_is_not_expected_is_not_let_in(door: Door) -> None:
    """Another secret: the connector finds out before it has said anything. Another number."""
    with pytest.raises((StagingError, OSError)):
        dial(door, secret=bytes(32))
    other = dial(door, me=7)
    assert other.poll(60)  # it is closed
    with pytest.raises((EOFError, OSError)):
        other.recv_bytes()
    other.close()
    assert door.callers.empty()


def test_a_replayed_conversation_is_refused(door: Door) -> None:
    """What a connector once said does not open the door again: the acceptor's nonce is new."""
    nonce = bytes(32)

    def speak(proof: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", door.port)) as sock:
            sock.settimeout(None)
            end = Connection(os.dup(sock.fileno()))
            end.send_bytes(nonce)
            theirs = end.recv_bytes()
            real = hmac.digest(SECRET, b"connector" + nonce + theirs, "sha256")
            end.send_bytes(proof or real)
            end.send_bytes(json.dumps([CONTROL, 0, "n0"]).encode())
            end.recv_bytes()
            if proof:
                with pytest.raises((EOFError, OSError)):
                    end.recv_bytes()
            end.close()
            return real

    real = speak(b"")
    door.callers.get(timeout=60).connection.close()
    speak(real)
    assert door.callers.empty()


def test_many_silent_strangers_do_not_keep_a_node_out(door: Door) -> None:
    """Each has a thread of its own that gives it up."""
    strangers = [socket.create_connection(("127.0.0.1", door.port)) for _ in range(100)]
    near, far = pair(door)
    for stranger in strangers:
        stranger.close()
    near.close()
    far.connection.close()


def heard_until_lost(heard: queue.SimpleQueue[Heard]) -> list[tuple[str, Any]]:
    """All that came, and last why no more does."""
    found: list[tuple[str, Any]] = []
    while not found or found[-1][0] != "lost":
        found.append(heard.get(timeout=60)[1:])
    return found


def test_messages_arrive_in_order_and_then_the_end(door: Door) -> None:
    """What was said before the connection ended is heard first."""
    near, far = pair(door)
    heard: queue.SimpleQueue[Heard] = queue.SimpleQueue()
    one, other = (
        Link(near, "far", SECRET, 60, queue.SimpleQueue()),
        Link(far.connection, "near", SECRET, 60, heard),
    )
    one.send("plan", "a" * 500_000)
    one.send("fail", {"why": 1})
    threading.Thread(target=one.close).start()
    assert heard_until_lost(heard) == [
        ("plan", "a" * 500_000),
        ("fail", {"why": 1}),
        ("lost", "near was lost: its connection ended"),
    ]
    other.close()


def test_silence_is_noticed(door: Door) -> None:
    """A neighbour whose threads do not even give signs of life."""
    near, far = pair(door)
    heard: queue.SimpleQueue[Heard] = queue.SimpleQueue()
    link = Link(near, "far", SECRET, 0.3, heard)
    assert heard_until_lost(heard) == [("lost", "far hangs: no sign of life for 0 s")]
    far.connection.close()
    link.close()


def test_a_job_that_was_suspended_goes_on(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its nodes were silent because all of them were stopped."""
    near, far = pair(door)
    heard: queue.SimpleQueue[Heard] = queue.SimpleQueue()
    hours = itertools.count(0, 3600)
    monkeypatch.setattr(time, "monotonic", lambda: next(hours))
    link = Link(near, "far", SECRET, 0.2, heard)
    with pytest.raises(queue.Empty):
        heard.get(timeout=0.8)
    monkeypatch.undo()
    far.connection.close()
    link.close()


@settings(max_examples=30, deadline=None)
@given(some.binary(min_size=1, max_size=200))
def test_nonsense_on_a_link_breaks_it(data: bytes) -> None:
    """Bytes that are no message are never heard."""
    door = Door("127.0.0.1", SECRET, caller=0, timeout=60)
    near, far = pair(door)
    heard: queue.SimpleQueue[Heard] = queue.SimpleQueue()
    link = Link(near, "far", SECRET, 60, heard)
    os.write(far.connection.fileno(), data)
    far.connection.close()
    assert [word for word, _ in heard_until_lost(heard)] == ["lost"]
    link.close()
    door.close()


def test_what_was_changed_on_the_way_is_not_heard(door: Door) -> None:
    """A message whose digest was made with another secret."""
    near, far = pair(door)
    heard: queue.SimpleQueue[Heard] = queue.SimpleQueue()
    one, other = (
        Link(near, "far", bytes(32), 60, queue.SimpleQueue()),
        Link(far.connection, "near", SECRET, 60, heard),
    )
    one.send("commit")
    assert heard_until_lost(heard) == [("lost", "what came from near is damaged")]
    one.close()
    other.close()


def test_nobody_listens_after_the_end() -> None:
    """A closed door is closed within a second."""
    door = Door("127.0.0.1", SECRET, caller=0, timeout=60)
    door.close()

    def refused() -> bool:
        with socket.socket() as sock:
            return sock.connect_ex(("127.0.0.1", door.port)) != 0

    eventually(refused)
