"""What plain HTTP clients get, over real sockets."""

from __future__ import annotations

import gzip
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from hpml_exporters.server import Limits, Server, loop

from hpml_orchestrator.errors import InputError
from tests.patience import eventually
from tests.unit.exporters.collecting import Turned
from tests.unit.exporters.server.support import (
    ENDING,
    GET,
    PATIENT,
    StaticPages,
    connect,
    exchange,
    held_port,
    read_to_end,
    scrape,
    status_of,
)

Address = tuple[str, int]
OPENMETRICS = "application/openmetrics-text;version=1.0.0,*/*;q=0.1"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Turned:
    """The server's clock; it looks at it again when somebody comes."""
    made = Turned()
    monkeypatch.setattr(loop, "time", made)
    return made


def test_metrics_as_text(address: Address) -> None:
    """Without a wish it is the text format, as it is."""
    answer = scrape(address)
    assert (answer.status, answer.body) == (200, StaticPages().body)
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "content-encoding" not in answer.headers


def test_metrics_as_openmetrics_and_gzip(address: Address) -> None:
    """As Prometheus asks for it."""
    answer = scrape(address, Accept=OPENMETRICS, Accept_Encoding="gzip")
    assert gzip.decompress(answer.body) == StaticPages().body + ENDING
    assert answer.headers["content-type"] == (
        "application/openmetrics-text; version=1.0.0; charset=utf-8"
    )
    assert answer.headers["vary"] == "Accept, Accept-Encoding"


def test_head_has_the_headers_alone(address: Address) -> None:
    """The length is that of the body that GET would bring."""
    answer = exchange(address, b"HEAD /metrics HTTP/1.0\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert f"Content-Length: {len(StaticPages().body)}".encode() in head
    assert body == b""


def test_health() -> None:
    """Healthy is 200, not healthy 503, and both say why."""
    pages = StaticPages()
    server = Server("127.0.0.1:0", "", pages)
    address = server.start()
    try:
        assert scrape(address, "/healthz")[::2] == (200, b"all is well\n")
        pages.healthy = (False, "a driver is stuck")
        assert scrape(address, "/healthz")[::2] == (503, b"a driver is stuck\n")
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET / HTTP/1.0", 200),
        (b"GET /metrics/ HTTP/1.0", 404),
        (b"GET /../etc/passwd HTTP/1.0", 404),
        (b"GET /%6detrics HTTP/1.0", 404),
        (b"GET /debug/pprof HTTP/1.0", 404),
        (b"GET * HTTP/1.0", 404),
        (b"POST /metrics HTTP/1.0", 405),
        (b"DELETE / HTTP/1.0", 405),
        (b"CONNECT x:1 HTTP/1.0", 405),
        (b"GET /metrics HTTP/1.0\r\nContent-Length: 5", 413),
        (b"GET /metrics HTTP/1.0\r\nContent-Length: 0", 200),
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked", 413),
        (b"GET /metrics HTTP/1.0\r\nExpect: 100-continue", 417),
        (b"GET /metrics HTTP/2.0", 505),
        (b"\x16\x03\x01\x02\x00\x01\x00", 400),
    ],
)
def test_everything_else_is_refused(address: Address, request_line: bytes, status: int) -> None:
    """Two pages, two methods, no bodies."""
    with connect(address) as client:
        client.sendall(request_line + b"\r\n\r\n")
        client.shutdown(socket.SHUT_WR)
        assert status_of(read_to_end(client)) == status


def test_a_connection_is_used_again(address: Address) -> None:
    """Three requests on one connection of HTTP/1.1."""
    with connect(address) as client, client.makefile("rb") as answers:
        for _ in range(3):
            client.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            lines = [answers.readline() for _ in range(7)]
            assert lines[0] == b"HTTP/1.1 200 OK\r\n"
            assert b"Connection: keep-alive\r\n" in lines
            assert answers.read(len(b"all is well\n")) == b"all is well\n"


def test_requests_sent_at_once_are_answered_in_order(address: Address) -> None:
    """Pipelining: whole answers, one after the other, and the last one ends the connection."""
    sent = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" * 20 + b"GET /x HTTP/1.0\r\n\r\n"
    answers = exchange(address, sent).split(b"HTTP/1.1 ")[1:]
    assert [int(one[:3]) for one in answers] == [200] * 20 + [404]


@pytest.mark.parametrize("refused", [b"GET /metrics HTTP/9.9\r\n\r\n", b"\x00\x01\r\n\r\n"])
def test_a_refusal_after_head_has_its_body(address: Address, refused: bytes) -> None:
    """What is refused was no HEAD: its Content-Length is that of what follows."""
    sent = b"HEAD /healthz HTTP/1.1\r\nHost: x\r\n\r\n" + refused
    head, _, body = exchange(address, sent).split(b"HTTP/1.1 ", 2)[2].partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}\r\n".encode() in head
    assert body


def test_garbage_after_a_request_is_refused(address: Address) -> None:
    """The good request is answered, the rest gets one refusal."""
    answers = exchange(address, GET + b"\x00\x01garbage\r\n\r\n" + GET)
    head, _, rest = answers.partition(StaticPages().body)
    assert status_of(head) == 200
    assert status_of(rest) == 400
    assert answers.count(b"HTTP/1.1 ") == 2


def test_the_body_of_a_refused_request_is_no_request(address: Address) -> None:
    """What follows a refused POST is never taken for the next request."""
    sent = b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n" + GET
    assert exchange(address, sent).count(b"HTTP/1.1 ") == 1


def test_a_half_closed_connection_gets_its_answer(address: Address) -> None:
    """A client may end its side right after the request."""
    with connect(address) as client:
        client.sendall(GET)
        client.shutdown(socket.SHUT_WR)
        answer = read_to_end(client)
    assert answer.endswith(StaticPages().body)


def test_a_refusal_arrives_though_more_is_being_sent(address: Address) -> None:
    """The million bytes behind it do not reset the connection before it was read."""
    with connect(address) as client:
        client.sendall(b"GET /" + b"a" * 1_000_000)
        assert status_of(read_to_end(client)) == 414


def test_a_page_that_fails_is_an_answer(capfd: pytest.CaptureFixture[str]) -> None:
    """A fault in a page is a 500 and a line, and the server goes on."""

    class Broken(StaticPages):
        def metrics(self, **_: bool) -> bytes:
            raise RuntimeError("no such family")

    server = Server("127.0.0.1:0", "", Broken())
    address = server.start()
    try:
        assert scrape(address).status == 500
        assert scrape(address, "/healthz").status == 200
        assert server.counters.requests[500] == 1
    finally:
        server.stop()
    assert "no such family" in capfd.readouterr().err


def test_an_answer_that_nobody_waits_for_is_given_up(clock: Turned) -> None:
    """Prometheus says how long it waits; a reader slower than that is cut off."""
    server = Server("127.0.0.1:0", "", StaticPages(b"x" * 20_000_000), PATIENT)
    address = server.start()
    try:
        with connect(address) as client:
            sent = GET.replace(b"\r\n\r\n", b"\r\nX-Prometheus-Scrape-Timeout-Seconds: 300\r\n\r\n")
            client.sendall(sent)
            eventually(lambda: server.counters.requests[200] == 1)
            for _ in range(2):
                clock.ahead += 100
                assert server.counters.timeouts == 0
                assert scrape(address, "/healthz").status == 200
            clock.ahead += 101
            assert scrape(address, "/healthz").status == 200
            eventually(lambda: server.counters.timeouts == 1)
            assert len(read_to_end(client)) < 20_000_000
    finally:
        server.stop()


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "soon", "1e400"])
def test_an_odd_time_out_is_none(address: Address, seconds: str) -> None:
    """It is as if it was not there."""
    assert scrape(address, X_Prometheus_Scrape_Timeout_Seconds=seconds).status == 200


def test_counters_count() -> None:
    """Answers by code, and connections as they come and go."""
    server = Server("127.0.0.1:0", "", StaticPages())
    address = server.start()
    try:
        scrape(address)
        scrape(address, "/nothing")
        with connect(address) as client:
            client.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            client.recv(4096)
            eventually(lambda: server.counters.connections == 1)  # the others' ends are noticed
            assert server.counters.accepted == 3
            eventually(lambda: server.counters.requests[200] == 2)
            assert server.counters.requests[404] == 1
    finally:
        server.stop()
    assert server.counters.connections == 0


def test_limits_in_seconds_hold(clock: Turned) -> None:
    """Silent, slow and idle clients are let go after their time, slow ones with a word."""
    server = Server("127.0.0.1:0", "", StaticPages(), Limits(header_seconds=300, idle_seconds=600))
    address = server.start()

    def look(seconds: float, left: int) -> None:
        """Have the server look at that moment; so many clients are left then."""
        clock.ahead = seconds
        for _ in range(2):  # when the second is answered, the look after the first is over
            assert scrape(address, "/nothing").status == 404
        eventually(lambda: server.counters.connections == left)

    try:
        with connect(address) as silent, connect(address) as slow, connect(address) as idle:
            slow.sendall(b"HEAD /healthz HTTP/1.1\r\nHost: x\r\n\r\nGET /met")
            idle.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            eventually(lambda: server.counters.requests[200] == 2)
            look(150, left=3)
            assert server.counters.timeouts == 0
            clock.ahead = 301
            assert scrape(address, "/nothing").status == 404
            assert read_to_end(silent) == b""
            late = read_to_end(slow).split(b"HTTP/1.1 ")[2]
            assert late.startswith(b"408")
            assert late.endswith(b"\r\n\r\ntoo slow\n")
            slow.close()
            look(450, left=1)
            look(601, left=0)
            assert status_of(read_to_end(idle)) == 200
    finally:
        server.stop()


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
@pytest.mark.parametrize("version", ["--http1.0", "--http1.1", "--http2", "--http0.9"])
def test_curl_of_every_version_reads_it(address: Address, version: str, tmp_path: Path) -> None:
    """The commonest client, with and without compression, twice on one connection."""
    url = f"http://{address[0]}:{address[1]}/metrics"
    command = ["curl", "-sS", "--fail", "--compressed", version, url, url]
    done = subprocess.run(command, capture_output=True, check=True, timeout=120)
    assert done.stdout == StaticPages().body * 2


def test_ipv6() -> None:
    """An address of IPv6 stands in brackets."""
    server = Server("[::1]:0", "", StaticPages())
    try:
        host, port = server.start()
    except InputError:
        pytest.skip("this machine has no IPv6")
    try:
        assert host == "::1"
        assert scrape((host, port), "/healthz").status == 200
    finally:
        server.stop()


def test_names_are_resolved_and_an_empty_one_means_all() -> None:
    """The name localhost is IPv4's first; all addresses are both families' where there are both."""
    server = Server("localhost:0", "", StaticPages())
    try:
        assert server.start()[0] == "127.0.0.1"
    finally:
        server.stop()
    server = Server(":0", "", StaticPages())
    try:
        host, port = server.start()
        assert host in {"::", "0.0.0.0"}  # noqa: S104 - what is asked for
        assert scrape(("127.0.0.1", port), "/healthz").status == 200
    finally:
        server.stop()


def test_a_busy_port_is_said(address: Address) -> None:
    """The field, the value, and how to find out who has it."""
    with pytest.raises(InputError) as caught:
        Server(f"127.0.0.1:{address[1]}", "", StaticPages()).start()
    assert caught.value.field == "listen"
    assert "already" in str(caught.value)
    assert str(address[1]) in caught.value.hint


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", ""])  # noqa: S104 - asked for
def test_a_busy_port_gives_way_where_any_will_do(host: str) -> None:
    """A job's exporter, beside that of another job with the same wish: the same address."""
    first = Server(f"{host}:0", "", StaticPages(), any_port=True)
    second: Server | None = None
    try:
        told = first.start()
        second = Server(f"{host}:{told[1]}", "", StaticPages(), any_port=True)
        other = second.start()
        assert other[0] == told[0]
        assert other[1] not in {0, told[1]}
        assert scrape(("127.0.0.1", other[1]), "/healthz").status == 200
    finally:
        first.stop()
        if second is not None:
            second.stop()


def test_any_port_is_not_any_address() -> None:
    """Another address would be reached by others than the one that was named."""
    with pytest.raises(InputError) as caught:
        Server("192.0.2.1:9", "", StaticPages(), any_port=True).start()
    assert "no such address" in str(caught.value)


@pytest.mark.parametrize(
    "listen",
    [
        "", "9445", "127.0.0.1", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536", "127.0.0.1:-1",
        "::1:9445", "[::1]", "[]:1", "[x:1", "http://127.0.0.1:9445", "127.0.0.1:\uff19", "a b:1",
        "no-such-host.invalid:0", "192.0.2.1:0", "127.0.0.1:0/metrics", ".:0", "a" * 300 + ":0",
    ],
)  # fmt: skip
def test_wrong_addresses_are_refused(listen: str) -> None:
    """Each with its field and what would be right."""
    with pytest.raises(InputError) as caught:
        Server(listen, "", StaticPages()).start()
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
