"""The web-config file: what it may say, and that its changes wait for a restart."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import bcrypt
import pytest
from hpml_exporters.web.server import Server

from hpml_orchestrator.errors import InputError
from tests.unit.exporters.web.support import (
    Certificates,
    StaticPages,
    basic,
    exchange,
    make_certificates,
    scrape,
    serving,
    status,
)

HASH = bcrypt.hashpw(b"right", bcrypt.gensalt(4)).decode()
USERS = f"basic_auth_users: {{bob: {HASH}}}\n"
TLS = "tls_server_config:\n  cert_file: server.crt\n  key_file: server.key\n"
VERIFY = "  client_ca_file: ca.crt\n  client_auth_type: RequireAndVerifyClientCert\n"
HEADERS = "http_server_config: {headers: {X-Frame-Options: deny}}\n"

GOOD = ["", "{}", USERS, USERS.replace("$2b$", "$2y$"), TLS, TLS + VERIFY, TLS + USERS, HEADERS]
GOOD += ["http_server_config: {http2: false}", f"{TLS}  min_version: TLS13\n"]
GOOD += ["# a comment\nbasic_auth_users:\n", f"{TLS}  max_version: TLS12\n"]

BAD = [
    ("users: {bob: x}", "users"),
    ("[a, b]", ""),
    ("{", "line 1: not valid YAML: expected FIELD: VALUE"),
    ("basic_auth_users:\n  bob: 'a", "line 2: not valid YAML"),
    ("basic_auth_users: {bob: a, bob: b}", "line 1: the same field twice"),
    ("basic_auth_users: {bob: secret}", "basic_auth_users.bob"),
    ("basic_auth_users: {bob: {x: y}}", "basic_auth_users.bob"),
    ("http_server_config: {http3: true}", "http_server_config.http3"),
    ("http_server_config: {headers: {X-Other: a}}", "http_server_config.headers.X-Other"),
    ("tls_server_config: {cert_file: server.crt}", "tls_server_config.key_file"),
    ("tls_server_config: {cert_file: none, key_file: server.key}", "tls_server_config.cert_file"),
    (
        "tls_server_config: {cert_file: server.crt, key_file: client.key}",
        "tls_server_config.key_file",
    ),
    (
        "tls_server_config: {cert_file: server.key, key_file: server.key}",
        "tls_server_config.cert_file",
    ),
    (f"{TLS}  min_version: TLS9\n", "tls_server_config.min_version"),
    (f"{TLS}  client_auth_type: Require\n", "tls_server_config.client_auth_type"),
    (f"{TLS}  client_ca_file: ca.crt\n", "tls_server_config.client_ca_file"),
]
"""Files that Prometheus' own tool refuses too, and the field that is named."""

UNSUPPORTED = [
    ("http_server_config: {http2: true}", "http_server_config.http2"),
    ("rate_limit: {interval: 1s, burst: 3}", "rate_limit"),
    (f"{TLS}  min_version: TLS10\n", "tls_server_config.min_version"),
    (f"{TLS}  cipher_suites: [TLS_AES_128_GCM_SHA256]\n", "tls_server_config.cipher_suites"),
    (f"{TLS}  curve_preferences: [X25519]\n", "tls_server_config.curve_preferences"),
    ("tls_server_config: {cert: a, key: b}", "tls_server_config.cert"),
    (f"{TLS}  client_auth_type: RequireAnyClientCert\n", "tls_server_config.client_auth_type"),
    (
        f"{TLS}  client_auth_type: RequireAndVerifyClientCert\n",
        "tls_server_config.client_ca_file",
    ),
    (f"{TLS}  client_allowed_sans: [a]\n", "tls_server_config.client_allowed_sans"),
    (f"{TLS}  min_version: TLS13\n  max_version: TLS12\n", "tls_server_config.min_version"),
]
"""Files of Prometheus' format that are refused here."""


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool")
@pytest.mark.parametrize("text", [*GOOD, *(text for text, _ in BAD)], ids=range(len(GOOD + BAD)))
def test_promtool_agrees(certificates: Certificates, text: str) -> None:
    """The same file serves node_exporter and this exporter."""
    path = certificates.write("web.yml", text)
    command = ["promtool", "check", "web-config", str(path)]
    good = subprocess.run(command, capture_output=True, check=False).returncode == 0
    assert good == (text in GOOD)


@pytest.mark.parametrize("text", GOOD, ids=range(len(GOOD)))
def test_good_files(certificates: Certificates, text: str) -> None:
    with serving(certificates.write("web.yml", text)) as (server, address):
        assert server.scheme == ("https" if TLS in text else "http")
        context = certificates.context("client") if TLS in text else None
        assert status(address, context, Authorization=basic("bob", "right")) == 200


@pytest.mark.parametrize(("text", "field"), BAD + UNSUPPORTED, ids=range(len(BAD + UNSUPPORTED)))
def test_bad_files(certificates: Certificates, text: str, field: str) -> None:
    """The field is named, and what would be right; nothing is silently ignored."""
    path = certificates.write("web.yml", text)
    with pytest.raises(InputError) as caught:
        Server("127.0.0.1:0", str(path), StaticPages()).start()
    assert str(caught.value).startswith(f"{path}: {field}")


@pytest.mark.parametrize(
    "text",
    [
        "basic_auth_users: {bob: Secret-1}",
        "basic_auth_users: {bob: [Secret-1]}",
        "basic_auth_users: {bob: Secret-1, bob: Secret-1}",
        "basic_auth_users: {bob: Secret-1",
        "basic_auth_users:\n  bob: *Secret-1",
    ],
)
def test_secrets_are_never_shown(tmp_path: Path, text: str) -> None:
    """A wrong hash may be the password itself."""
    path = tmp_path / "web.yml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        Server("127.0.0.1:0", str(path), StaticPages()).start()
    assert "Secret" not in f"{caught.value} {caught.value.hint} {caught.value.value}"


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("", {"": 200, "client": 200, "stranger": 200}),
        ("  client_auth_type: RequestClientCert\n", {"": 200, "client": 200, "stranger": 200}),
        (
            "  client_ca_file: ca.crt\n  client_auth_type: VerifyClientCertIfGiven\n",
            {"": 200, "client": 200, "stranger": 0},
        ),
        (VERIFY, {"": 0, "client": 200, "stranger": 0}),
        (f"{VERIFY}  client_allowed_sans: [prometheus.example]\n", {"": 0, "client": 200}),
        (f"{VERIFY}  client_allowed_sans: [other.example]\n", {"": 0, "client": 0}),
    ],
    ids=["none", "request", "if-given", "verify", "san", "other-san"],
)
def test_client_certificates(
    certificates: Certificates, more: str, expected: dict[str, int]
) -> None:
    """Who gets in: without a certificate, with ours, with one that signs itself."""
    with serving(certificates.write("web.yml", TLS + more)) as (_, address):
        got = {name: status(address, certificates.context(name)) for name in expected}
    assert got == expected


def test_plain_http_to_a_tls_port_is_told(certificates: Certificates) -> None:
    with serving(certificates.write("web.yml", TLS)) as (_, address):
        answer = exchange(address, b"GET / HTTP/1.0\r\n\r\n")
        assert answer.startswith(b"HTTP/1.0 400 ")
        assert b"https://" in answer


def test_headers_are_added_to_every_response(certificates: Certificates) -> None:
    with serving(certificates.write("web.yml", HEADERS)) as (_, address):
        for page in ("/metrics", "/nothing"):
            assert scrape(address, page).headers["x-frame-options"] == "deny"


def test_a_renewed_certificate_waits_for_a_restart(certificates: Certificates) -> None:
    """As every change of the file: who got in still does, until the exporter is started again."""
    path = certificates.write("web.yml", TLS)
    old = certificates.context()
    with serving(path) as (_, address):
        make_certificates(certificates.folder, serial=" 2")
        certificates.write("web.yml", USERS + TLS)
        assert status(address, old) == 200
    with serving(path) as (_, address):
        assert status(address, certificates.context()) == 401
        assert status(address, old) == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {"locked": False, "tls": False}),
        (USERS, {"locked": True, "tls": False}),
        (TLS, {"locked": False, "tls": True}),
        (TLS + VERIFY, {"locked": True, "tls": True}),
        ("rate_limit: {}", {"error": "rate_limit: unknown or not supported"}),
    ],
    ids=["nothing", "users", "tls", "verify", "refused"],
)
def test_the_command_says_what_a_file_asks_for(
    tmp_path: Path, text: str, expected: dict[str, object]
) -> None:
    """For `hpml check`: without the certificates, which are on the nodes."""
    (tmp_path / "web.yml").write_text(text)
    argv = [sys.executable, "-I", "-m", "hpml_exporters.web.config", str(tmp_path / "web.yml")]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    found.pop("hint", None)
    assert found == expected
