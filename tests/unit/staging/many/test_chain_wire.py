"""What comes over the network is not believed: plans, chunks, messages, handshakes."""

from __future__ import annotations

import hmac
import os
import socket
import stat
import struct
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.hashing import hashing_named
from hpml_orchestrator.staging.many.chunks import (
    CHUNK,
    HEAD_BYTES,
    ChunkHead,
    Landing,
    chunk_hashing,
    make_empty,
    pack_head,
    unpack_head,
)
from hpml_orchestrator.staging.many.link import (
    CONTROL,
    DATA,
    DONE,
    FAIL,
    PLAN,
    BrokenLinkError,
    Caller,
    Door,
    Link,
    call,
)
from hpml_orchestrator.staging.many.planwire import add_part, plan_parts
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
    made = Plan("/source", Entry("", 0, 0), at_least=plan.at_least)
    for part in plan_parts(plan):
        add_part(made, part)
    return made


@given(some.lists(entries, max_size=20, unique_by=lambda entry: entry.path), some.booleans())
def test_a_plan_comes_as_it_was(files: list[Entry], at_least: bool) -> None:
    """Any names that a file system can hold, any sizes and times."""
    plan = plan_of(files)
    plan.at_least = at_least
    plan.stamps = [(number, 1 << 62, 7) for number in range(len(files))]
    if files:
        plan.symlinks = [Symlink(files[0].path + "~link", "x", 7)]
        plan.hard_links = [HardLink(files[0].path + "~hard", files[0].path)]
    assert carried(plan) == plan


def test_a_large_plan_comes_in_parts() -> None:
    """Parts stay small whatever the plan's size, and directories come before what is in them."""
    below = [Entry("d", stat.S_IFDIR | 0o700, 1), Entry("d/e", stat.S_IFDIR | 0o700, 1)]
    plan = plan_of([Entry(f"d/e/{n}", stat.S_IFREG | 0o644, n, n, n) for n in range(20_000)], below)
    parts = list(plan_parts(plan))
    assert len(parts) > 2
    assert max(map(len, parts)) <= 1 << 20
    assert carried(plan) == plan


def test_a_name_that_no_message_holds_is_an_error() -> None:
    """Archives may have any."""
    with pytest.raises(StagingError, match="the name is too long"):
        list(plan_parts(plan_of([Entry("x" * (1 << 20), stat.S_IFREG | 0o644, 0)])))


@given(
    some.builds(
        ChunkHead,
        some.just(CHUNK),
        some.integers(1, 1 << 20),
        some.integers(0, (1 << 64) - 1),
        some.integers(0, (1 << 64) - 1),
        some.binary(min_size=16, max_size=16),
    ),
    some.integers(0, HEAD_BYTES * 8 - 1),
)
def test_any_flipped_bit_of_a_head_is_seen(head: ChunkHead, bit: int) -> None:
    """A chunk must not go to another place."""
    packed = bytearray(pack_head(head))
    assert unpack_head(packed, 0) == head
    packed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(StagingError, match="head"):
        unpack_head(packed, 0)


def test_chunk_digests_without_xxhash_need_the_secret() -> None:
    """BLAKE2b is keyed: another job's digest is another one."""
    assert chunk_hashing("blake2b_128", b"a")(b"x") != chunk_hashing("blake2b_128", b"b")(b"x")
    assert chunk_hashing("xxh3_128", b"a")(b"x") == chunk_hashing("xxh3_128", b"b")(b"x")


# landing


@pytest.fixture
def landing(tmp_path: Path) -> Iterator[Landing]:
    """Give a place for two files: 10 bytes, and 5 MiB."""
    files = [
        Entry("small", stat.S_IFREG | 0o644, 0, 10, 10),
        Entry("large", stat.S_IFREG | 0o644, 0, 5 << 20, 5 << 20),
    ]
    how = hashing_named("xxh3_128")
    assert how is not None
    fd = os.open(tmp_path, os.O_RDONLY)
    make_empty(plan_of(files), fd)
    made = Landing(plan_of(files), fd, how, same=True)
    yield made
    made.close()
    os.close(fd)


@pytest.mark.parametrize(
    ("number", "offset", "length"),
    [
        (2, 0, 1),
        (1 << 63, 0, 1),
        (0, 0, 11),
        (0, 10, 1),
        (0, 1 << 63, 5),
        (0, 0, 0),
        (1, 5 << 20, 6),
    ],
)
def test_chunks_for_no_place_are_refused(
    landing: Landing, number: int, offset: int, length: int
) -> None:
    """Beyond the file, in no file, or nothing at all."""
    with pytest.raises(StagingError):
        landing.check(ChunkHead(CHUNK, length, number, offset, bytes(16)))


def test_chunks_come_in_order(landing: Landing) -> None:
    """One that does not follow the one before is refused; one that begins again is taken."""
    assert landing.take(ChunkHead(CHUNK, 4, 0, 0, b""), b"abcd") is None
    with pytest.raises(StagingError, match="out of order"):
        landing.take(ChunkHead(CHUNK, 4, 0, 6, b""), b"abcd")
    assert landing.take(ChunkHead(CHUNK, 4, 0, 0, b""), b"ABCD") is None
    done = landing.take(ChunkHead(CHUNK, 6, 0, 4, b""), b"efghij")
    how = hashing_named("xxh3_128")
    assert how is not None
    whole = how.new()
    whole.update(b"ABCDefghij")
    assert done == (0, whole.digest())


def test_a_file_that_is_there_is_not_overwritten(landing: Landing, tmp_path: Path) -> None:
    """Also not one that a link leads to."""
    (tmp_path / "other").write_bytes(b"keep")
    (tmp_path / "small").symlink_to("other")
    with pytest.raises(FileExistsError):
        landing.take(ChunkHead(CHUNK, 10, 0, 0, b""), b"0123456789")
    assert (tmp_path / "other").read_bytes() == b"keep"


# handshake and link


def pair(kind: int = CONTROL) -> tuple[Caller, Caller]:
    """Two ends that proved themselves to each other."""
    door = Door("127.0.0.1", SECRET, me=1, caller=0)
    found: list[Caller] = []

    def connect() -> None:
        found.append(call("127.0.0.1", door.port, SECRET, kind, me=0, callee=1, timeout=120))

    thread = threading.Thread(target=connect)
    thread.start()
    came: list[Caller] = []
    while not came:
        came = door.poll(0.1)
    thread.join()
    door.close()
    return found[0], came[0]


def test_both_ends_get_the_same_new_key() -> None:
    """Another one for each connection."""
    first, second = pair(DATA), pair(DATA)
    assert first[0].key == first[1].key != second[0].key
    assert first[1].kind == DATA
    for caller in (*first, *second):
        caller.sock.close()


@pytest.mark.parametrize("wrong", ["secret", "me", "callee"])
def test_who_is_not_expected_is_not_let_in(wrong: str) -> None:
    """Another secret, another number: the connector finds out before it has said anything."""
    door = Door("127.0.0.1", SECRET, me=1, caller=0)
    secret = bytes(32) if wrong == "secret" else SECRET
    me, callee = (7 if wrong == "me" else 0), (7 if wrong == "callee" else 1)
    failed: list[Exception] = []

    def connect() -> None:
        try:
            call("127.0.0.1", door.port, secret, CONTROL, me=me, callee=callee, timeout=120)
        except (OSError, StagingError) as error:
            failed.append(error)

    thread = threading.Thread(target=connect)
    thread.start()
    while thread.is_alive():  # the call has its own timeout
        assert door.poll(0.05) == []
    assert failed
    door.close()


def test_a_replayed_conversation_is_refused() -> None:
    """What a connector once said does not open the door again: the acceptor's nonce is new."""
    door = Door("127.0.0.1", SECRET, me=1, caller=0)
    hello = struct.pack(">8sBII32s", b"HPMLchn1", CONTROL, 0, 1, bytes(32))

    def speak(proof: bytes) -> tuple[bytes, list[Caller]]:
        with socket.create_connection(("127.0.0.1", door.port)) as sock:
            sock.sendall(hello)
            for _ in range(3):
                assert door.poll(0.1) == []
            answer = sock.recv(64)
            real = hmac.digest(SECRET, b"connect" + hello + answer[:32], "sha256")
            sock.sendall(proof or real)
            return real, [*door.poll(0.3), *door.poll(0.1)]

    real, let_in = speak(b"")
    assert len(let_in) == 1
    let_in[0].sock.close()
    assert speak(real)[1] == []
    door.close()


def test_many_silent_strangers_do_not_keep_a_node_out() -> None:
    """More than the door remembers: the oldest go."""
    door = Door("127.0.0.1", SECRET, me=1, caller=0)
    strangers = [socket.create_connection(("127.0.0.1", door.port)) for _ in range(100)]
    for _ in range(200):
        door.poll(0.001)
    made: list[Caller] = []
    thread = threading.Thread(
        target=lambda: made.append(
            call("127.0.0.1", door.port, SECRET, CONTROL, me=0, callee=1, timeout=120)
        )
    )
    thread.start()
    came = eventually(lambda: door.poll(0.1))
    thread.join()
    for sock in (*strangers, came[0].sock, made[0].sock):
        sock.close()
    door.close()


def test_messages_arrive_in_order_and_then_the_end() -> None:
    """What was said before the connection ended is heard first."""
    near, far = pair()
    one = Link(near, "far", connector=True, timeout=120)
    other = Link(far, "near", connector=False, timeout=120)
    one.send(PLAN, b"a" * 500_000)
    one.send(FAIL, b"why")
    closer = threading.Thread(target=one.close)
    closer.start()
    heard, error = until_broken(other)
    assert "near was lost" in error
    assert [(kind, len(payload)) for kind, payload in heard] == [(PLAN, 500_000), (FAIL, 3)]
    other.close()
    closer.join()


def test_silence_counts_only_while_watched() -> None:
    """A neighbour may be busy before all are ready; then it has to give signs of life."""
    near, far = pair()
    now = [0.0]
    link = Link(near, "far", connector=True, timeout=30, clock=lambda: now[0])
    now[0] = 1000.0
    assert link.tick() == []
    link.watch()
    for now[0] in (1010.0, 1020.0, 1029.0):
        assert link.tick() == []
    now[0] = 1031.0
    with pytest.raises(BrokenLinkError, match="far hangs: no sign of life for 30 s"):
        link.tick()
    far.sock.close()
    link.close()


def test_silence_counts_only_while_listening() -> None:
    """A job that was suspended goes on: its nodes were silent because all of them were stopped."""
    near, far = pair()
    now = [0.0]
    link = Link(near, "far", connector=True, timeout=30, clock=lambda: now[0])
    link.watch()
    for now[0] in (10.0, 3610.0, 3620.0, 3629.0):
        assert link.tick() == []
    now[0] = 3631.0
    with pytest.raises(BrokenLinkError, match="far hangs"):
        link.tick()
    far.sock.close()
    link.close()


@settings(max_examples=30, deadline=None)
@given(some.binary(min_size=1, max_size=200))
def test_nonsense_on_a_link_breaks_it(data: bytes) -> None:
    """Bytes that nobody who knows the key can have said are never heard."""
    near, far = pair()
    link = Link(near, "far", connector=True, timeout=120)
    far.sock.sendall(data)
    far.sock.close()
    assert until_broken(link)[0] == []
    link.close()


def test_an_old_message_said_again_breaks_the_link() -> None:
    """Every message counts: one that was recorded is not taken a second time."""
    near, far = pair()
    link = Link(near, "far", connector=True, timeout=120)
    true = Link(far, "near", connector=False, timeout=120)
    said: list[bytes] = []
    real = far.sock.send
    spy = Spy(far.sock, said)
    true._sock = spy  # type: ignore[assignment]
    true.send(DONE, b"x")
    real(said[0])
    heard, error = until_broken(link)
    assert "damaged" in error
    assert heard in ([], [(DONE, b"x")])
    link.close()
    far.sock.close()


def until_broken(link: Link) -> tuple[list[tuple[int, bytes]], str]:
    """What a link hears until it breaks, and why it does."""
    heard: list[tuple[int, bytes]] = []
    with pytest.raises(BrokenLinkError) as broken:
        eventually(lambda: heard.extend(link.tick()), "it does not break", pause=0)
    return heard, str(broken.value)


class Spy:
    """A socket that remembers what was sent."""

    def __init__(self, sock: socket.socket, said: list[bytes]) -> None:
        self._sock = sock
        self._said = said

    def send(self, data: bytes) -> int:
        self._said.append(bytes(data))
        return self._sock.send(data)
