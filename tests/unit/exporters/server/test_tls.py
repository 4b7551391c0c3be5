"""TLS as the web-config file asks for it, with real handshakes."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hpml_exporters.server import Limits, Server

from tests.patience import eventually
from tests.unit.exporters.server.support import (
    GET,
    PATIENT,
    WAIT_SECONDS,
    Certificates,
    StaticPages,
    connect,
    read_to_end,
    scrape,
    status_of,
)

KINDS = (
    "NoClientCert",
    "RequestClientCert",
    "RequireAnyClientCert",
    "VerifyClientCertIfGiven",
    "RequireAndVerifyClientCert",
)


@contextmanager
def serving(certificates: Certificates, **tls: Any) -> Iterator[Server]:
    """A server with settings of TLS; its address is `server.address`."""
    path = certificates.folder / "tls.yml"
    given = {"cert_file": certificates.cert, "key_file": certificates.key, **tls}
    path.write_text(json.dumps({"tls_server_config": given}))
    server = Server("127.0.0.1:0", str(path), StaticPages(), PATIENT)
    server.address = server.start()  # type: ignore[attr-defined]
    yield server
    server.stop()


def outcome(server: Server, context: ssl.SSLContext) -> int:
    """The status that a client gets; 0 where the connection does not come to one."""
    try:
        return scrape(server.address, context=context).status  # type: ignore[attr-defined]
    except (OSError, http.client.HTTPException):
        return 0


def test_tls_brings_the_metrics(certificates: Certificates) -> None:
    """A client that trusts the authority reads them; one that does not refuses."""
    with serving(certificates) as server:
        assert outcome(server, certificates.client_context()) == 200
        assert outcome(server, ssl.create_default_context()) == 0
        eventually(lambda: server.counters.handshakes_failed == 1)


@pytest.mark.parametrize(
    ("kind", "nobody", "client", "stranger"),
    [
        ("NoClientCert", 200, 200, 200),
        ("RequestClientCert", 200, 200, 200),
        ("RequireAnyClientCert", 0, 200, 200),
        ("RequireClientCert", 0, 200, 200),
        ("VerifyClientCertIfGiven", 200, 200, 0),
        ("RequireAndVerifyClientCert", 0, 200, 0),
    ],
)
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_client_certificates(
    certificates: Certificates,
    kind: str,
    nobody: int,
    client: int,
    stranger: int,
    version: ssl.TLSVersion,
) -> None:
    """Every kind lets in whom Go's type of that name lets in."""
    more = {} if kind == "NoClientCert" else {"client_ca_file": certificates.ca}
    contexts = [
        certificates.client_context(),
        certificates.client_context(certificates.client, certificates.client_key),
        certificates.client_context(certificates.stranger, certificates.stranger_key),
    ]
    for context in contexts:
        context.maximum_version = version
    with serving(certificates, client_auth_type=kind, **more) as server:
        assert [outcome(server, one) for one in contexts] == [nobody, client, stranger]


@pytest.mark.parametrize("kind", ["RequireAnyClientCert", "RequireAndVerifyClientCert"])
@pytest.mark.parametrize(
    ("names", "status"),
    [(["other", "prometheus.example"], 200), (["prometheus"], 0), (["*.example"], 0)],
)
def test_allowed_names(
    certificates: Certificates, kind: str, names: list[str], status: int
) -> None:
    """One of the names is in the client's certificate, exactly."""
    context = certificates.client_context(certificates.client, certificates.client_key)
    more = {"client_ca_file": certificates.ca, "client_allowed_sans": names}
    with serving(certificates, client_auth_type=kind, **more) as server:
        assert outcome(server, context) == status


def test_addresses_are_names_too(certificates: Certificates) -> None:
    """The server's own certificate, shown by a client, has 127.0.0.1."""
    context = certificates.client_context(certificates.cert, certificates.key)
    more = {"client_auth_type": "RequireAndVerifyClientCert", "client_ca_file": certificates.ca}
    for name, status in (("127.0.0.1", 200), ("localhost", 200), ("127.0.0.2", 0)):
        with serving(certificates, client_allowed_sans=[name], **more) as server:
            assert outcome(server, context) == status


@pytest.mark.parametrize(
    ("least", "most", "accepted"),
    [
        ("", "", "TLSv1.2 TLSv1.3"),
        ("TLS13", "", "TLSv1.3"),
        ("", "TLS12", "TLSv1.2"),
        ("TLS10", "TLS11", "TLSv1 TLSv1.1"),
        ("TLS10", "", "TLSv1 TLSv1.1 TLSv1.2 TLSv1.3"),
    ],
)
def test_versions(certificates: Certificates, least: str, most: str, accepted: str) -> None:
    """TLS 1.0 and 1.1 are refused unless they are asked for by name."""
    with serving(certificates, min_version=least, max_version=most) as server:
        found = []
        for version in ("TLSv1", "TLSv1_1", "TLSv1_2", "TLSv1_3"):
            context = certificates.client_context()
            context.set_ciphers("DEFAULT:@SECLEVEL=0")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                context.minimum_version = ssl.TLSVersion[version]
                context.maximum_version = ssl.TLSVersion[version]
            if outcome(server, context):
                found.append(version.replace("_", "."))
        assert found == accepted.split()


def negotiated(server: Server, context: ssl.SSLContext) -> str:
    """The cipher suite that a client and the server agree on; empty: none."""
    with connect(server.address) as plain:  # type: ignore[attr-defined]
        try:
            with context.wrap_socket(plain, server_hostname="localhost") as client:
                chosen = client.cipher()
                return chosen[0] if chosen else ""
        except (ssl.SSLError, ConnectionResetError):
            return ""


@pytest.mark.parametrize(("ours", "first"), [(True, "AES256"), (False, "AES128")])
def test_cipher_suites_in_order(certificates: Certificates, ours: bool, first: str) -> None:
    """Only those are offered, and the order of the one who is to be preferred counts."""
    suites = [f"TLS_ECDHE_ECDSA_WITH_AES_{size}" for size in ("256_GCM_SHA384", "128_GCM_SHA256")]
    context = certificates.client_context()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    more = {"cipher_suites": suites, "prefer_server_cipher_suites": ours}
    with serving(certificates, **more) as server:
        context.set_ciphers("ECDHE-ECDSA-AES128-GCM-SHA256:ECDHE-ECDSA-AES256-GCM-SHA384")
        assert first in negotiated(server, context)
        context.set_ciphers("ECDHE-ECDSA-CHACHA20-POLY1305")
        assert negotiated(server, context) == ""


def test_suites_of_tls_13_alone_leave_nothing_of_12(certificates: Certificates) -> None:
    """As with Go: a list without a suite of TLS 1.2 has none for it."""
    context = certificates.client_context()
    with serving(certificates, cipher_suites=["TLS_AES_128_GCM_SHA256"]) as server:
        assert outcome(server, context) == 200
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        assert outcome(server, context) == 0


def test_curves(certificates: Certificates) -> None:
    """A client that has none of them does not get in."""
    with serving(certificates, curve_preferences=["X25519", "CurveP384"]) as server:
        context = certificates.client_context()
        assert outcome(server, context) == 200
        context.set_ecdh_curve("secp384r1")
        assert outcome(server, context) == 200
        context.set_ecdh_curve("secp521r1")
        assert outcome(server, context) == 0


def test_http_to_the_tls_port(certificates: Certificates) -> None:
    """It is told so, in plain HTTP."""
    with serving(certificates) as server, connect(server.address) as client:  # type: ignore[attr-defined]
        client.sendall(GET)
        answer = read_to_end(client)
    assert status_of(answer) == 400
    assert b"HTTPS" in answer


def test_a_tls_connection_is_used_again_and_pipelined(certificates: Certificates) -> None:
    """What OpenSSL has read already is not waited for again."""
    with serving(certificates) as server:
        plain = connect(server.address)  # type: ignore[attr-defined]
        context = certificates.client_context()
        with context.wrap_socket(plain, server_hostname="localhost") as client:
            client.sendall(GET * 3 + b"GET /x HTTP/1.0\r\n\r\n")
            answer = read_to_end(client)
    assert answer.count(StaticPages().body) == 3
    assert answer.count(b"HTTP/1.1 404") == 1


def test_nothing_is_left_lying_in_openssl(certificates: Certificates) -> None:
    """More requests in one TLS record than are read at once, with a cut between two of them."""
    line = b"HEAD / HTTP/1.1\r\nHost: x\r\nX-Fill: "
    one = line + b"a" * (64 - len(line) - 4) + b"\r\n\r\n"
    assert Limits().header_bytes % len(one) == 0
    count = Limits().header_bytes // len(one) + 10
    with serving(certificates) as server:
        plain = connect(server.address)  # type: ignore[attr-defined]
        context = certificates.client_context()
        found = b""
        with context.wrap_socket(plain, server_hostname="localhost") as client:
            client.sendall(one * count)
            while found.count(b"HTTP/1.1 200") < count:
                found += client.recv(65536)


def test_certificate_and_key_may_stand_in_the_file(certificates: Certificates) -> None:
    """`cert`, `key` and `client_ca` in place of files."""
    text = {
        key: (certificates.folder / file).read_text()
        for key, file in (("cert", "server.crt"), ("key", "server.key"), ("client_ca", "ca.crt"))
    }
    good = certificates.client_context(certificates.client, certificates.client_key)
    more = {"client_auth_type": "RequireAndVerifyClientCert", "cert_file": "", "key_file": ""}
    with serving(certificates, **text, **more) as server:
        assert outcome(server, good) == 200
        assert outcome(server, certificates.client_context()) == 0


def test_silence_ends_with_the_time_of_the_handshake(certificates: Certificates) -> None:
    """A client that never shakes hands is let go."""
    path = certificates.folder / "silence.yml"
    path.write_text("tls_server_config: {cert_file: server.crt, key_file: server.key}\n")
    server = Server("127.0.0.1:0", str(path), StaticPages(), Limits(handshake_seconds=0.3))
    with connect(server.start()) as client:
        assert client.recv(1) == b""
    eventually(lambda: server.counters.timeouts == 1)
    server.stop()


def test_tls_ends_as_it_should(certificates: Certificates) -> None:
    """The last answer is followed by TLS's own end: a cut cannot be taken for it."""
    with serving(certificates) as server:
        plain = connect(server.address)  # type: ignore[attr-defined]
        context = certificates.client_context()
        with context.wrap_socket(
            plain, server_hostname="localhost", suppress_ragged_eofs=False
        ) as client:
            client.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
            found = b""
            while part := client.recv(4096):
                found += part
    assert found.endswith(b"all is well\n")


def test_a_slow_reader_gets_all_of_it(certificates: Certificates) -> None:
    """Parts that the kernel did not take are sent again as OpenSSL wants it."""
    body = bytes(range(256)) * 20_000
    path = certificates.folder / "slow.yml"
    path.write_text("tls_server_config: {cert_file: server.crt, key_file: server.key}\n")
    server = Server("127.0.0.1:0", str(path), StaticPages(body), PATIENT)
    plain = socket.socket()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    plain.settimeout(WAIT_SECONDS)
    plain.connect(server.start())
    with certificates.client_context().wrap_socket(plain, server_hostname="localhost") as client:
        client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert read_to_end(client).partition(b"\r\n\r\n")[2] == body
    server.stop()
