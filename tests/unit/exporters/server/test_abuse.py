"""Whatever bad clients do, another client's scrape is answered at once, and nothing piles up."""

from __future__ import annotations

import json
import random
import resource
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest
from hpml_exporters.server import Limits, Server
from hpml_exporters.server.gate import Gate

from tests.patience import eventually
from tests.unit.exporters.server.support import (
    GET,
    PATIENT,
    Certificates,
    Process,
    StaticPages,
    basic,
    connect,
    read_to_end,
    scrape,
    status_of,
)

SCRAPES = 15
ROUNDS = 2
# Whoever waits for a bad client waits for ten minutes: that is how long the server bears with one.
GENEROUS_SECONDS = 10.0
Address = tuple[str, int]


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    """A plain server that ends no attack by its clock while the others are measured."""
    with Process(limits=PATIENT) as made:
        yield made


@pytest.fixture(scope="module")
def secure(certificates: Certificates) -> Iterator[Process]:
    """The same with TLS."""
    path = certificates.folder / "abuse.yml"
    path.write_text("tls_server_config: {cert_file: server.crt, key_file: server.key}\n")
    with Process(str(path), PATIENT) as made:
        yield made


def scrapes_go_on(process: Process, what: str, certificates: Certificates | None = None) -> None:
    """Scrape in new connections: all succeed, and the usual one is quick."""
    context = certificates.client_context() if certificates else None
    taken = []
    for _ in range(SCRAPES):
        answer = scrape(process.address, context=context)
        assert answer.status == 200
        assert answer.body == StaticPages().body
        taken.append(answer.seconds)
    middle = statistics.median(taken)
    print(f"{what}: median {middle * 1e3:.2f} ms, worst {max(taken) * 1e3:.2f} ms")
    assert middle < GENEROUS_SECONDS


@contextmanager
def clients(address: Address, count: int) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        yield [stack.enter_context(connect(address)) for _ in range(count)]


@contextmanager
def attack(step: Callable[[], None]) -> Iterator[None]:
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


def test_in_peace(process: Process) -> None:
    """The figure to compare the others with."""
    scrapes_go_on(process, "nobody else")


def test_200_idle_connections(process: Process) -> None:
    """They stay open, and nobody waits for them."""
    with clients(process.address, 200) as idle:
        scrapes_go_on(process, "200 idle connections")
        assert process.counters()["connections"] >= 200
        idle[0].sendall(GET)
        assert idle[0].recv(12) == b"HTTP/1.1 200"


def test_200_idle_connections_that_were_good_once(process: Process) -> None:
    """Kept alive after an answer."""
    with clients(process.address, 200) as idle:
        for client in idle:
            client.sendall(b"HEAD /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            assert client.recv(12) == b"HTTP/1.1 200"
        scrapes_go_on(process, "200 kept-alive connections")


def test_1000_idle_connections_lock_nobody_out(process: Process) -> None:
    """More than there is place for: the oldest of them go."""
    with clients(process.address, 1000):
        scrapes_go_on(process, "1,000 idle connections")
        counters = process.counters()
        assert counters["connections"] <= Limits().connections
        assert counters["refused"] >= 700


def test_bytes_that_trickle(process: Process) -> None:
    """Slow-loris: 100 clients send a byte now and then and never end."""
    with clients(process.address, 100) as slow:
        letters = iter(b"GET /metrics HTTP/1.1\r\nX-Slow: " + b"a" * 100_000)

        def trickle() -> None:
            letter = bytes([next(letters)])
            for client in slow:
                try:
                    client.send(letter)
                except OSError:
                    continue
            time.sleep(0.02)

        with attack(trickle):
            scrapes_go_on(process, "100 clients of a byte each 20 ms")


def test_trickling_clients_are_cut_off_in_time() -> None:
    """A byte now and then gains nothing: the time of the whole header counts."""
    with Process(limits=Limits(header_seconds=1.5)) as made:
        begun = time.monotonic()
        with connect(made.address) as slow:
            slow.settimeout(0.3)
            answer = b""
            for letter in b"GET /" + b"a" * 200:  # a minute of them
                try:
                    slow.sendall(bytes([letter]))
                    answer = slow.recv(100)
                except TimeoutError:
                    continue
                except OSError:  # a byte that came too late has broken the connection
                    pass
                break
        assert time.monotonic() - begun >= 1.5
        assert status_of(answer) in {408, 0}
        assert made.counters()["requests"]["408"] == 1


def test_silent_tls_clients(secure: Process, certificates: Certificates) -> None:
    """Connect and say nothing: what stops prometheus_client's server for good."""
    with clients(secure.address, 100):
        scrapes_go_on(secure, "100 silent TLS clients", certificates)


def test_tls_clients_that_stop_half_way(secure: Process, certificates: Certificates) -> None:
    """A hello that is never finished, and one that promises 16 KiB and brings 100 bytes."""
    with clients(secure.address, 100) as silent:
        for client in silent:
            client.sendall(b"\x16\x03\x01\x40\x00\x01" + b"\x00" * 100)
        scrapes_go_on(secure, "100 TLS clients in mid-handshake", certificates)


def test_garbage_to_a_tls_port(secure: Process, certificates: Certificates) -> None:
    """Random bytes that begin like TLS, as fast as one client can."""
    dice = random.Random(6)

    def garbage() -> None:
        with connect(secure.address) as client:
            client.sendall(b"\x16" + dice.randbytes(300))

    with attack(garbage):
        scrapes_go_on(secure, "garbage in place of handshakes", certificates)
    assert secure.counters()["handshakes_failed"] > 0


def test_headers_without_end(process: Process) -> None:
    """Lines upon lines, as fast as they go."""

    def flood() -> None:
        with connect(process.address) as client:
            client.sendall(b"GET /metrics HTTP/1.1\r\n" + b"X-A: b\r\n" * 10_000)
            assert status_of(read_to_end(client)) == 431

    with attack(flood):
        scrapes_go_on(process, "huge headers")


def test_a_line_of_a_million_bytes(process: Process) -> None:
    """It is refused after 8 KiB."""

    def flood() -> None:
        with connect(process.address) as client:
            client.sendall(b"GET /" + b"a" * 1_000_000)
            assert status_of(read_to_end(client)) == 414

    before = process.memory_kib()
    with attack(flood):
        scrapes_go_on(process, "lines of a million bytes")
    assert process.memory_kib() - before < 4096


def test_slow_readers(process: Process) -> None:
    """They ask for much and read nothing: the kernel's buffer fills, and nobody waits for it."""
    with clients(process.address, 100) as readers:
        for client in readers:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.sendall(GET * 40)
        scrapes_go_on(process, "100 readers that do not read")


def test_slow_readers_are_cut_off_in_time() -> None:
    """What is not taken within the time of writing is given up."""
    with Process(limits=Limits(write_seconds=0.5)) as made, connect(made.address) as client:
        client.sendall(GET * 100)
        eventually(lambda: made.counters()["timeouts"])
        eventually(lambda: made.counters()["connections"] == 0)
        assert made.counters()["timeouts"] == 1


def test_resets(process: Process) -> None:
    """Connections broken before, in the middle of and after a request."""
    abort = struct.pack("ii", 1, 0)

    def reset() -> None:
        for sent in (b"", GET[:9], GET, GET * 50):
            with connect(process.address) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, abort)
                client.sendall(sent)

    with attack(reset):
        scrapes_go_on(process, "resets")
    assert process.counters()["errors"] == 0


def test_pipelined_garbage(process: Process) -> None:
    """Requests and rubbish in one stream."""
    dice = random.Random(7)

    def rubbish() -> None:
        with connect(process.address) as client:
            client.sendall(b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n" * 50 + dice.randbytes(2000))
            read_to_end(client)

    with attack(rubbish):
        scrapes_go_on(process, "pipelined garbage")
    assert process.counters()["errors"] == 0


def test_wrong_passwords_do_not_hold_up_the_known_one(certificates: Certificates) -> None:
    """Checks cost 50 ms each and stand in a bounded queue; who was right before does not wait."""
    import bcrypt  # noqa: PLC0415 - not for the other tests

    hashed = bcrypt.hashpw(b"right", bcrypt.gensalt(8)).decode()
    path = certificates.folder / "passwords.yml"
    path.write_text(json.dumps({"basic_auth_users": {"bob": hashed}}))
    number = iter(range(1_000_000))
    with Process(str(path), PATIENT) as made:
        good = basic("bob", "right")
        assert scrape(made.address, Authorization=good).status == 200

        waits: list[float] = []

        def guess() -> None:
            begun = time.perf_counter()
            with clients(made.address, 60) as guessers:
                for client in guessers:
                    word = basic("bob", str(next(number)))
                    line = f"GET / HTTP/1.0\r\nAuthorization: {word}\r\n\r\n"
                    client.sendall(line.encode())
                assert {status_of(read_to_end(client)) for client in guessers} <= {401, 503}
            waits.append(time.perf_counter() - begun)

        taken: list[float] = []
        with attack(guess):
            while len(taken) < SCRAPES or len(waits) < ROUNDS:
                answer = scrape(made.address, Authorization=good)
                assert answer.status == 200
                taken.append(answer.seconds)
        middle, queue = statistics.median(taken), statistics.median(waits)
        print(f"60 guessers: median {middle * 1e3:.2f} ms, of their own {queue * 1e3:.2f} ms")
        assert middle < queue / 4
        counters = made.counters()
        assert counters["requests"]["401"] > 0


def test_without_descriptors_scrapes_go_on() -> None:
    """With 40 of them and 100 idle clients, the oldest clients make place."""
    with Process(limits=PATIENT) as made:
        resource.prlimit(made.pid, resource.RLIMIT_NOFILE, (40, 40))
        with clients(made.address, 100):
            scrapes_go_on(made, "no descriptor left")
        assert made.counters()["errors"] == 0


def test_a_fault_of_ours_does_not_end_the_server(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A fake, for a fault that we know nothing of: one turn of the loop fails in the middle."""
    answers = iter([RuntimeError("a fault that nobody knows")])

    def verdicts(gate: Gate, now: float) -> list[object]:
        for error in answers:
            raise error
        return []

    monkeypatch.setattr(Gate, "verdicts", verdicts)
    server = Server("127.0.0.1:0", "", StaticPages(), PATIENT)
    address = server.start()
    assert [scrape(address).status for _ in range(3)] == [200] * 3
    server.stop()
    assert server.counters.errors == 1
    assert "nobody knows" in capfd.readouterr().err


@dataclass
class Level:
    """Memory and descriptors of a process at one moment."""

    kib: int
    descriptors: int


@pytest.mark.parametrize(("tls", "count"), [(False, 2000), (True, 500)])
def test_many_connections_leave_nothing(
    process: Process, secure: Process, certificates: Certificates, tls: bool, count: int
) -> None:
    """Memory and descriptors are as before, TLS or not."""
    made = secure if tls else process
    context = certificates.client_context() if tls else None

    def level() -> Level:
        eventually(lambda: not made.counters()["connections"])
        return Level(made.memory_kib(), made.descriptors())

    for _ in range(200):
        scrape(made.address, context=context)
    before = level()
    begun = made.cpu_seconds()
    for _ in range(count):
        assert scrape(made.address, context=context).status == 200
    cost = (made.cpu_seconds() - begun) / count
    after = level()
    print(f"tls {tls}: {cost * 1e6:.0f} us of CPU a scrape, {before} -> {after}")
    assert after.descriptors == before.descriptors
    assert after.kib - before.kib < 1024
