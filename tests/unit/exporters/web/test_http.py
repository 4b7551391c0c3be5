"""What HTTP clients get, over real sockets."""

from __future__ import annotations

import gzip
import shutil
import subprocess

import pytest
from hpml_exporters.web.server import RequestLimits, Server

from hpml_orchestrator.errors import InputError
from tests.patience import eventually
from tests.unit.exporters.web.support import (
    GET,
    OPENMETRICS,
    PATIENT,
    Address,
    StaticPages,
    connect,
    exchange,
    held_port,
    read_to_end,
    scrape,
    serving,
    statuses,
)

HEALTH = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"


def test_metrics_as_text_and_as_prometheus_asks_for_it(address: Address) -> None:
    """Format, compression and names are those of the request."""
    answer = scrape(address)
    assert (answer.status, answer.body) == (200, StaticPages().body)
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    answer = scrape(address, Accept=f"{OPENMETRICS},*/*;q=0.1", Accept_Encoding="gzip")
    assert gzip.decompress(answer.body) == StaticPages().body + b"# EOF\n"
    assert answer.headers["content-type"] == OPENMETRICS
    assert answer.headers["vary"] == "Accept, Accept-Encoding"
    assert scrape(address, "/metrics?name[]=up&name%5B%5D=x").body == b"only up x\n"


@pytest.mark.parametrize(
    ("healthy", "status"), [((True, "ok"), 200), ((False, "stuck: gpu"), 503)], ids=["ok", "stuck"]
)
def test_health(healthy: tuple[bool, str], status: int) -> None:
    pages = StaticPages()
    pages.healthy = healthy
    with serving(pages=pages) as (_, address):
        answer = scrape(address, "/healthz")
        assert (answer.status, answer.body) == (status, f"{healthy[1]}\n".encode())


@pytest.mark.parametrize(
    ("request_text", "status"),
    [
        (b"GET / HTTP/1.0", 200),
        (b"GET http://node/metrics HTTP/1.1\r\nHost: node\r\nConnection: close", 200),
        (b"GET /metrics HTTP/1.0\r\nContent-Length: 0", 200),
        (b"GET /metrics/ HTTP/1.0", 404),
        (b"GET /../etc/passwd HTTP/1.0", 404),
        (b"GET * HTTP/1.0", 404),
        (b"POST /metrics HTTP/1.0", 501),
        (b"GET /metrics HTTP/2.0", 505),
        (b"GET /metrics a HTTP/1.0", 400),
        (b"GET http://[ HTTP/1.0", 400),
        (b"GET /metrics?" + b"&" * 200 + b" HTTP/1.0", 400),
        (b"GET / HTTP/1.0\r\n" + b"X: a\r\n" * 200, 431),
    ],
    ids=range(12),
)
def test_every_request_gets_its_status(address: Address, request_text: bytes, status: int) -> None:
    assert statuses(exchange(address, request_text + b"\r\n\r\n")) == [status]


def test_head_sends_no_body(address: Address) -> None:
    head, _, body = exchange(address, b"HEAD /metrics HTTP/1.0\r\n\r\n").partition(b"\r\n\r\n")
    assert f"Content-Length: {len(StaticPages().body)}".encode() in head
    assert body == b""


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (HEALTH * 20 + b"GET /x HTTP/1.0\r\n\r\n", [200] * 20 + [404]),
        (HEALTH + b"\x00\x01garbage a b c\r\n\r\n" + HEALTH, [200, 400]),
        (GET.replace(b"Host", b"Content-Length: 9\r\nHost") + HEALTH, [200]),
        (b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\nGET / HTTP/1.0\r\n\r\n", [200, 200]),
        (b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" + HEALTH, [200]),
    ],
    ids=["pipelined", "garbage", "body", "1.0", "close"],
)
def test_requests_on_one_connection(address: Address, sent: bytes, expected: list[int]) -> None:
    """They are answered in order; what may not be a request ends the connection."""
    assert statuses(exchange(address, sent)) == expected


def test_a_page_that_fails_is_a_response(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(StaticPages):
        def health(self) -> tuple[bool, str]:
            raise RuntimeError("no such family")

    with serving(pages=Broken()) as (server, address):
        assert scrape(address, "/healthz").status == 500
        assert scrape(address).status == 200
        assert server.counters.responses[500] == 1
    assert "no such family" in caplog.text


def test_slow_and_idle_clients_are_closed_in_time() -> None:
    """Whether they say nothing, begin a request, have had an answer, or read none."""
    limits = RequestLimits(request_seconds=0.3, idle_seconds=0.3)
    with serving(limits=limits, pages=StaticPages(b"x" * 20_000_000)) as (server, address):
        assert exchange(address, b"") == b""
        assert exchange(address, b"GET /metr") == b""
        assert statuses(exchange(address, HEALTH)) == [200]  # idle after it
        with connect(address) as reader:
            reader.sendall(GET)
            eventually(lambda: server.counters.closed["timeout"] == 3)
            assert len(read_to_end(reader)) < 20_000_000
        eventually(lambda: server.counters.connections == 0)


def test_counters() -> None:
    with serving() as (server, address):
        scrape(address)
        scrape(address, "/nothing")
        with connect(address) as client:
            client.sendall(HEALTH)
            client.recv(4096)
            eventually(lambda: server.counters.connections == 1)
            assert server.counters.accepted == 3
            assert (server.counters.responses[200], server.counters.responses[404]) == (2, 1)
    eventually(lambda: server.counters.connections == 0)


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
@pytest.mark.parametrize("version", ["--http1.0", "--http1.1", "--http2"])
def test_curl_reads_it(address: Address, version: str) -> None:
    """The commonest client, twice on one connection, compressed."""
    url = f"http://{address[0]}:{address[1]}/metrics"
    command = ["curl", "-sS", "--fail", "--compressed", version, url, url]
    done = subprocess.run(command, capture_output=True, check=True, timeout=120)
    assert done.stdout == StaticPages().body * 2


@pytest.mark.parametrize(
    ("listen", "hosts"),
    [("localhost:0", {"127.0.0.1"}), (":0", {"::", "0.0.0.0"}), ("[::1]:0", {"::1"})],  # noqa: S104
)
def test_names_and_families(listen: str, hosts: set[str]) -> None:
    server = Server(listen, "", StaticPages())
    try:
        host, port = server.start()
    except InputError:
        pytest.skip("this machine has no IPv6")
    assert host in hosts
    assert scrape(("::1" if host == "::1" else "127.0.0.1", port), "/healthz").status == 200
    server.stop()


def test_a_port_in_use(address: Address) -> None:
    """It is refused, or another one is taken where any will do."""
    listen = f"127.0.0.1:{address[1]}"
    with pytest.raises(InputError, match="in use") as caught:
        Server(listen, "", StaticPages()).start()
    assert caught.value.field == "listen"
    assert str(address[1]) in caught.value.hint
    server = Server(listen, "", StaticPages(), any_port=True)
    host, port = server.start()
    assert (host, port) != address
    assert scrape((host, port), "/healthz").status == 200
    server.stop()


@pytest.mark.parametrize(
    "listen",
    [
        "", "9445", "127.0.0.1", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536", "127.0.0.1:-1",
        "::1:9445", "[::1]", "[]:1", "[x:1", "http://127.0.0.1:9445", "127.0.0.1:\uff19", "a b:1",
        "no-such-host.invalid:0", "192.0.2.1:0", "127.0.0.1:0/metrics", ".:0", "a" * 300 + ":0",
    ],
)  # fmt: skip
def test_wrong_addresses_are_refused(listen: str) -> None:
    """Each with its field and what would be right; `any_port` means the port alone."""
    with pytest.raises(InputError) as caught:
        Server(listen, "", StaticPages(), any_port=True).start()
    assert caught.value.field == "listen"
    assert caught.value.hint


def test_a_stopped_server_is_gone() -> None:
    """Its port is free at once, and open connections end."""
    with held_port() as port:
        server = Server(f"127.0.0.1:{port}", "", StaticPages(), PATIENT)
        address = server.start()
        with connect(address) as client:
            server.stop()
            assert read_to_end(client) == b""
        again = Server(f"127.0.0.1:{port}", "", StaticPages())
        assert again.start() == address
        again.stop()
