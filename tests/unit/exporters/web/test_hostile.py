"""Whatever bad clients do, another client's scrape is answered, and nothing piles up.

Bad clients come from 127.0.0.2 where their address matters.
"""

from __future__ import annotations

import json
import random
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import bcrypt
import pytest
from hpml_exporters.web.server import RequestLimits

from tests.patience import eventually
from tests.unit.exporters.web.support import (
    GET,
    PATIENT,
    Address,
    Certificates,
    Process,
    StaticPages,
    basic,
    connect,
    read_to_end,
    scrape,
    serving,
    status,
    statuses,
)

TLS = "tls_server_config: {cert_file: server.crt, key_file: server.key}"
BODY = StaticPages().body
STRANGER = "127.0.0.2"
MEMORY_KIB = 30 * 1024


@contextmanager
def clients(
    address: Address, count: int, sent: bytes = b"", *, source: str = STRANGER
) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        found = [stack.enter_context(connect(address, source)) for _ in range(count)]
        for client in found:
            client.sendall(sent)
        yield found


@contextmanager
def repeated(step: Callable[[], None]) -> Iterator[None]:
    """Repeat a step in a thread while something else is done."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.is_set():
            try:
                step()
            except OSError:
                time.sleep(0.001)

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_200_silent_tls_clients(certificates: Certificates) -> None:
    """What stops prometheus_client's server for good; no memory is spent on them."""
    with Process(certificates.write("web.yml", TLS)) as made:
        context = certificates.context()
        for _ in range(20):
            assert status(made.address, context) == 200
        before = made.memory_kib()
        with clients(made.address, 100), clients(made.address, 100, source="127.0.0.3"):
            for _ in range(20):
                assert status(made.address, context) == 200
            assert made.memory_kib() - before < MEMORY_KIB
            assert made.counters()["connections"] >= 200


HALF_HELLO = b"\x16\x03\x01\x40\x00\x01" + b"\x00" * 100


@pytest.mark.parametrize(
    ("count", "sent"),
    [
        (200, b""),
        (100, b"GET /metrics HTTP/1.1\r\nX-Slow: "),
        (100, GET * 40),
        (50, GET + b"\x00\x01\x02" * 500),
        (100, HALF_HELLO),
    ],
    ids=["idle", "half-a-head", "reads-nothing", "pipelined-garbage", "tls"],
)
def test_bad_clients_hold_nobody_up(count: int, sent: bytes, certificates: Certificates) -> None:
    """The server tolerates them for ten minutes; scrapes continue, one more connection fits."""
    path = certificates.write("web.yml", TLS) if sent == HALF_HELLO else ""
    context = certificates.context() if path else None
    with Process(path) as made:
        assert scrape(made.address, context=context).body == BODY
        with clients(made.address, count, sent):
            for _ in range(10):
                assert scrape(made.address, context=context).body == BODY
            counters = made.counters()
            assert counters["connections"] <= RequestLimits().connections
            assert counters["closed"]["error"] == 0


def test_floods_hold_nobody_up() -> None:
    """Resets, endless lines and garbage as fast as one client can; nothing stays of them."""
    dice = random.Random(6)
    abort = struct.pack("ii", 1, 0)

    def flood() -> None:
        for sent in (b"", GET[:9], GET * 50, b"GET /" + b"a" * 1_000_000, dice.randbytes(2000)):
            with connect(made.address) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, abort)
                client.sendall(sent)

    with Process() as made:
        for _ in range(100):
            assert status(made.address) == 200
        before = made.memory_kib()
        with repeated(flood):
            for _ in range(50):
                assert scrape(made.address).body == BODY
        eventually(lambda: not made.counters()["connections"])
        assert made.memory_kib() - before < MEMORY_KIB
        assert made.counters()["closed"]["error"] == 0


def test_whoever_holds_all_connections_locks_nobody_out() -> None:
    """The one that was answered longest ago goes, and a scrape always gets through."""
    limits = replace(PATIENT, connections=20)
    with serving(limits=limits) as (server, address):
        with clients(address, 60):
            eventually(lambda: server.counters.closed["crowded"] >= 40)
            assert status(address) == 200
            assert server.counters.connections <= 20
        eventually(lambda: server.counters.connections == 0)


def test_the_head_of_a_request_is_limited() -> None:
    """In size as a whole, and in time however steadily it comes."""
    with serving(limits=RequestLimits(request_seconds=1.0)) as (server, address):
        with connect(address) as large, suppress(OSError):
            large.sendall(b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 20_000)
        eventually(lambda: server.counters.responses[431] == 1)
        with connect(address) as slow, suppress(OSError):
            for _ in range(200):
                slow.sendall(b"G")
                time.sleep(0.05)
        eventually(lambda: server.counters.closed["timeout"] == 1)


def test_without_descriptors_scrapes_go_on_when_clients_have_timed_out() -> None:
    """Nothing breaks meanwhile."""
    with Process(limits=RequestLimits(request_seconds=1.0)) as made:
        resource.prlimit(made.pid, resource.RLIMIT_NOFILE, (40, 40))
        with clients(made.address, 100):
            eventually(lambda: status(made.address) == 200)
            assert made.counters()["closed"]["error"] == 0


def users(folder: Path, cost: int) -> Path:
    hashed = bcrypt.hashpw(b"right", bcrypt.gensalt(cost)).decode()
    path = folder / "users.yml"
    path.write_text(json.dumps({"basic_auth_users": {"bob": hashed}}))
    return path


@pytest.mark.parametrize(
    ("authorization", "expected"),
    [
        (basic("bob", "right"), 200),
        (basic("bob", "wrong"), 401),
        (basic("bob", ""), 401),
        (basic("eve", "right"), 401),
        (basic("bob", "right" + "x" * 100), 401),
        (basic("bob", "\0"), 401),
        ("Basic ####", 401),
        ("Bearer right", 401),
        ("", 401),
    ],
    ids=range(9),
)
def test_who_gets_in(tmp_path: Path, authorization: str, expected: int) -> None:
    """The right password of a user, and nothing else; it is asked for."""
    with serving(users(tmp_path, 4)) as (_, address):
        for _ in range(2):  # checked, and remembered
            answer = scrape(address, "/healthz", Authorization=authorization)
            assert answer.status == expected
            assert ("www-authenticate" in answer.headers) == (expected == 401)


def test_guesses_slow_nobody_known(tmp_path: Path) -> None:
    """One password is checked at a time; who is known is answered without a check."""
    number = iter(range(1_000_000))

    def guess() -> None:
        with clients(made.address, 8) as guessers:
            for client in guessers:
                password = basic("bob", str(next(number)))
                client.sendall(f"GET / HTTP/1.0\r\nAuthorization: {password}\r\n\r\n".encode())
            assert [statuses(read_to_end(client)) for client in guessers] == [[401]] * 8

    with Process(users(tmp_path, 8)) as made:
        good = basic("bob", "right")
        assert status(made.address, Authorization=good) == 200
        with repeated(guess):
            eventually(lambda: made.counters()["responses"]["401"] > 0)
            for _ in range(20):
                assert status(made.address, Authorization=good) == 200
