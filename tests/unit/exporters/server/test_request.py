"""The parser takes what HTTP/1 says, refuses the rest early, and never fails in another way."""

from __future__ import annotations

import pytest
from hpml_exporters.server.request import BadRequestError, Request, parse
from hypothesis import given, settings
from hypothesis import strategies as st

GOOD = b"GET /metrics HTTP/1.1\r\nHost: node1\r\nAccept: */*\r\n\r\n"


def taken(data: bytes, header_bytes: int = 8192, headers: int = 64) -> Request | None:
    return parse(bytearray(data), header_bytes=header_bytes, headers=headers)


CODES = {400, 414, 431, 505}


def refusal(data: bytes) -> int:
    with pytest.raises(BadRequestError) as caught:
        taken(data)
    return caught.value.status


def test_a_request_is_taken_off_the_buffer() -> None:
    """Bytes after it stay for the next one."""
    buffer = bytearray(GOOD + b"GET /next")
    request = parse(buffer, header_bytes=8192, headers=64)
    assert request == Request(
        "GET", "/metrics", {"host": "node1", "accept": "*/*"}, keep_alive=True, http11=True
    )
    assert buffer == b"GET /next"


@pytest.mark.parametrize("cut", range(len(GOOD)))
def test_a_part_of_a_request_waits_for_the_rest(cut: int) -> None:
    """Wherever it is cut, nothing is decided too early."""
    assert taken(GOOD[:cut]) is None


@pytest.mark.parametrize(
    ("version", "connection", "kept"),
    [
        ("1.1", "", True),
        ("1.1", "Connection: close\r\n", False),
        ("1.1", "Connection: TE, Close\r\n", False),
        ("1.0", "", False),
        ("1.0", "Connection: keep-alive\r\n", True),
    ],
)
def test_who_keeps_a_connection(version: str, connection: str, kept: bool) -> None:
    """1.1 keeps it unless told otherwise, 1.0 closes it unless told otherwise."""
    request = taken(f"GET / HTTP/{version}\r\nHost: x\r\n{connection}\r\n".encode())
    assert request is not None
    assert request.keep_alive is kept


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("/metrics?collect[]=gpu", "/metrics"),
        ("http://node1:9445/metrics", "/metrics"),
        ("http://node1", "/"),
        ("*", "*"),
        ("/a?x=http://y/z", "/a"),
        ("http://a.b?x=/metrics", "/"),
        ("http://a.b/c?x=http://y/metrics", "/c"),
    ],
)
def test_the_path_of_a_target(target: str, path: str) -> None:
    """Queries and the scheme of a proxy's request are no part of it."""
    request = taken(f"GET {target} HTTP/1.0\r\n\r\n".encode())
    assert request is not None
    assert request.path == path


def test_a_list_may_come_in_several_headers() -> None:
    """Accept twice is one list."""
    request = taken(b"GET / HTTP/1.0\r\nAccept: a\r\nACCEPT: \tb \r\n\r\n")
    assert request is not None
    assert request.headers == {"accept": "a, b"}


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /metrics\r\n\r\n", 400),  # HTTP/0.9
        (b"GET  / HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),  # no Host
        (b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", 400),
        (b"GET / HTTP/1.0\r\nAuthorization: a\r\nAuthorization: b\r\n\r\n", 400),
        (b"GET / HTTP/1.0\r\nno colon\r\n\r\n", 400),
        (b"GET / HTTP/1.0\r\nspace : x\r\n\r\n", 400),
        (b"GET / HTTP/1.0\r\nA: b\r\n folded\r\n\r\n", 400),
        (b"GET / HTTP/1.0\r\nA: b\x00c\r\n\r\n", 400),
        (b"GET /\x7f HTTP/1.0\r\n\r\n", 400),
        (b"G(T / HTTP/1.0\r\n\r\n", 400),
        (b"GET / HTTP/1.0\n\n", 400),  # bare line feeds
        (b"\n", 400),
        (b"\x16\x03\x01\x02\x00\x01", 400),  # TLS to a plain port
        (b"\x00" * 100, 400),
        (b"PRI * HTTP/2.0\r\n\r\n", 505),
        (b"GET / HTTP/3\r\n\r\n", 505),
        (b"GET / FTP/1.0\r\n\r\n", 400),
        (b"GET /" + b"a" * 9000, 414),
        (b"GET / HTTP/1.0\r\nA: " + b"a" * 9000, 431),
        (b"GET / HTTP/1.0\r\n" + b"A: b\r\n" * 65 + b"\r\n", 431),
    ],
)
def test_what_is_refused_and_how(data: bytes, status: int) -> None:
    """A wrong request gets the code that says what is wrong."""
    assert refusal(data) == status


def test_empty_lines_before_a_request_are_nothing() -> None:
    """RFC 9112, 2.2: some clients send one after a request."""
    assert taken(b"\r\n" + GOOD) is not None


@settings(deadline=None)
@given(st.binary(max_size=600), st.integers(1, 512))
def test_bytes_end_in_a_request_a_refusal_or_a_wait(data: bytes, most: int) -> None:
    """Nothing else can come out, whatever comes in."""
    buffer = bytearray(data)
    try:
        request = parse(buffer, header_bytes=most, headers=4)
    except BadRequestError as error:
        refused = error.status
    else:
        refused = 0
        assert request is not None or len(buffer) < most
        assert data.endswith(bytes(buffer))
    assert refused in {0, *CODES}


PIECES = st.lists(
    st.sampled_from(
        [
            b"GET", b"POST", b" ", b"/", b"/metrics", b"HTTP/1.1", b"HTTP/1.0", b"\r\n", b"\n",
            b"\r", b":", b"Host", b"Host: x\r\n", b"Accept: ", b"Connection: close", b"\r\n\r\n",
            b"\t", b"\x00", b"\xff", b"Content-Length: 5\r\n", b"aaaa",
        ]
    ),
    max_size=40,
)  # fmt: skip


@settings(deadline=None)
@given(PIECES)
def test_pieces_of_requests_end_as_well(pieces: list[bytes]) -> None:
    """Near misses find what random bytes do not; a request that is taken keeps its promises."""
    buffer = bytearray(b"".join(pieces))
    refused, request = 0, None
    try:
        request = parse(buffer, header_bytes=256, headers=4)
    except BadRequestError as error:
        refused = error.status
    assert refused in {0, *CODES}
    if request:
        assert request.method
        assert " " not in request.path
        assert all(name == name.lower() for name in request.headers)
        assert not any("\r" in value or "\n" in value for value in request.headers.values())


@settings(deadline=None)
@given(st.binary(max_size=80), st.lists(st.integers(1, 40), max_size=10))
def test_how_bytes_are_cut_does_not_matter(tail: bytes, cuts: list[int]) -> None:
    """A request in pieces is the same request."""
    data = GOOD + tail
    whole = bytearray(data)
    expected = parse(whole, header_bytes=8192, headers=64)
    buffer = bytearray()
    found, at = None, 0
    for size in [*cuts, len(data)]:
        buffer += data[at : at + size]
        at += size
        found = parse(buffer, header_bytes=8192, headers=64)
        if found:
            break
    assert found == expected
