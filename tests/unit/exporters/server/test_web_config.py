"""The web-config file: what is taken, what is refused with which words, and what a change does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Self

import pytest
from hpml_exporters.server import Server
from hpml_exporters.server.settings import load

from hpml_orchestrator.errors import InputError
from tests.patience import eventually as until
from tests.unit.exporters.server.support import (
    PATIENT,
    Certificates,
    StaticPages,
    basic,
    connect,
    make_certificates,
    read_to_end,
    scrape,
)

HASH = "$2b$04$0J0TRTqZJYOcnIr3o0.xTeS2GLz7aV0mQ1WbqZJ8Jf8Zb6f1f6vYu"
KEYS = "cert_file: server.crt, key_file: server.key"
TLS = "tls_server_config: {" + KEYS + ", %s}"

GOOD = [
    "",
    "# nothing but a remark",
    "tls_server_config:",
    "tls_server_config: {}",
    "basic_auth_users: {}",
    "basic_auth_users:\n",
    "basic_auth_users: {12: " + HASH + ", 'null': " + HASH.replace("2b", "2y") + "}",
    "http_server_config: {http2: yes}",
    "http_server_config: {http2: off, headers: {}}",
    "http_server_config: {headers: {X-Frame-Options: deny, X-Content-Type-Options: nosniff}}",
    "http_server_config: {headers: {X-XSS-Protection: '1', Strict-Transport-Security: max-age=1}}",
    "http_server_config: {headers: {Content-Security-Policy: default-src 'self'}}",
    "http_server_config: {headers: {X-XSS-Protection: ''}}",
    TLS % "",
    TLS % "client_auth_type: NoClientCert",
    TLS % "client_auth_type: RequestClientCert",
    TLS % "client_auth_type: RequireClientCert",
    TLS % "client_auth_type: RequireAnyClientCert",
    TLS % "client_auth_type: VerifyClientCertIfGiven",
    TLS % "client_auth_type: RequireAndVerifyClientCert, client_ca_file: ca.crt",
    TLS % "min_version: TLS10, max_version: TLS13",
    TLS % "prefer_server_cipher_suites: n",
    TLS % "curve_preferences: [CurveP256, CurveP384, CurveP521, X25519]",
    TLS % "cipher_suites: [TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA, TLS_RSA_WITH_AES_256_GCM_SHA384]",
    TLS % "cipher_suites: []",
]
"""Files that the exporter toolkit of Debian's Prometheus takes too; the test asks it."""

BAD = [
    ("foo: 1", "foo"),
    ("tls_server_config: {cert_files: x}", "tls_server_config.cert_files"),
    ("tls_server_config: [a]", "tls_server_config"),
    ("- a", "web_config"),
    ("just words", "web_config"),
    ("a: {b", "web_config"),
    ("\tx: 1", "web_config"),
    ("basic_auth_users: {bob: a, bob: b}", "web_config"),
    ("basic_auth_users: {bob: secret}", "basic_auth_users.bob"),
    ("basic_auth_users: {bob: }", "basic_auth_users.bob"),
    ("basic_auth_users: {bob: {x: y}}", "basic_auth_users.bob"),
    ("basic_auth_users: {bob: " + HASH.replace("$04$", "$03$") + "}", "basic_auth_users.bob"),
    ("http_server_config: {http2: maybe}", "http_server_config.http2"),
    ("http_server_config: {http3: true}", "http_server_config.http3"),
    ("http_server_config: {headers: {X-Other: a}}", "http_server_config.headers.X-Other"),
    (
        "http_server_config: {headers: {X-Frame-Options: DENY}}",
        "http_server_config.headers.X-Frame-Options",
    ),
    ("tls_server_config: {cert_file: server.crt}", "tls_server_config.key_file"),
    ("tls_server_config: {key_file: server.key}", "tls_server_config.cert_file"),
    ("tls_server_config: {client_ca_file: ca.crt}", "tls_server_config.cert_file"),
    (
        "tls_server_config: {cert_file: none.crt, key_file: server.key}",
        "tls_server_config.cert_file",
    ),
    ("tls_server_config: {cert_file: server.crt, key_file: none}", "tls_server_config.key_file"),
    (
        "tls_server_config: {cert_file: server.key, key_file: server.key}",
        "tls_server_config.cert_file",
    ),
    (
        "tls_server_config: {cert_file: server.crt, key_file: client.key}",
        "tls_server_config.key_file",
    ),
    (TLS % "min_version: TLS9", "tls_server_config.min_version"),
    (TLS % "max_version: TLSv1.3", "tls_server_config.max_version"),
    (TLS % "client_auth_type: Require", "tls_server_config.client_auth_type"),
    (TLS % "client_ca_file: ca.crt", "tls_server_config.client_ca_file"),
    (
        TLS % "client_ca_file: none.crt, client_auth_type: RequireAndVerifyClientCert",
        "tls_server_config.client_ca_file",
    ),
    (TLS % "cipher_suites: [ECDHE-RSA-AES128-GCM-SHA256]", "tls_server_config.cipher_suites"),
    (TLS % "cipher_suites: {a: b}", "tls_server_config.cipher_suites"),
    (TLS % "curve_preferences: [P-256]", "tls_server_config.curve_preferences"),
    (TLS % "prefer_server_cipher_suites: [true]", "tls_server_config.prefer_server_cipher_suites"),
]
"""Files that the toolkit refuses too, and the field of our refusal."""

OURS = [
    (TLS % "min_version: TLS13, max_version: TLS12", "tls_server_config.min_version"),
    (
        TLS % "max_version: TLS12, cipher_suites: [TLS_AES_128_GCM_SHA256]",
        "tls_server_config.cipher_suites",
    ),
    (
        TLS % "client_allowed_sans: [a], client_auth_type: RequestClientCert",
        "tls_server_config.client_allowed_sans",
    ),
    (
        TLS % "client_ca_file: server.key, client_auth_type: RequireAndVerifyClientCert",
        "tls_server_config.client_ca_file",
    ),
    ("rate_limit: {interval: soon}", "rate_limit.interval"),
    ("rate_limit: {interval: 1s, burst: -1}", "rate_limit.burst"),
    ("rate_limit: {every: 1s}", "rate_limit.every"),
    ("rate_limit: {interval: 1s}", "rate_limit.burst"),
]
"""Files that Debian's older toolkit knows nothing about, or takes and then answers nobody."""

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool")


def written(folder: Path, text: str) -> Path:
    path = folder / "web.yml"
    path.write_text(text)
    return path


def promtool_takes(path: Path) -> bool:
    command = ["promtool", "check", "web-config", str(path)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@needs_promtool
@pytest.mark.parametrize("text", GOOD)
def test_what_promtool_takes_is_taken(certificates: Certificates, text: str) -> None:
    """The same file serves node_exporter and this exporter."""
    path = written(certificates.folder, text)
    assert promtool_takes(path)
    load(str(path))


@needs_promtool
@pytest.mark.parametrize(("text", "field"), BAD)
def test_what_promtool_refuses_is_refused(
    certificates: Certificates, text: str, field: str
) -> None:
    """With the field that is wrong."""
    path = written(certificates.folder, text)
    assert not promtool_takes(path)
    with pytest.raises(InputError) as caught:
        load(str(path))
    assert caught.value.field == field


@pytest.mark.parametrize(("text", "field"), OURS)
def test_what_cannot_be_meant_is_refused(certificates: Certificates, text: str, field: str) -> None:
    """A server that would answer nobody, or everybody, does not start."""
    with pytest.raises(InputError) as caught:
        load(str(written(certificates.folder, text)))
    assert caught.value.field == field


@pytest.mark.parametrize(
    "text",
    [
        "basic_auth_users: {bob: Secret-1}",
        "basic_auth_users: {bob: [Secret-1]}",
        "basic_auth_users: {bob: Secret-1, bob: Secret-1}",
        "basic_auth_users: {bob: Secret-1",
        "basic_auth_users:\n  bob: *Secret-1",
        "tls_server_config: {cert: a, key: Secret-1}",
    ],
)
def test_secrets_are_never_shown(tmp_path: Path, text: str) -> None:
    """A wrong hash may be the password itself."""
    with pytest.raises(InputError) as caught:
        load(str(written(tmp_path, text)))
    assert "Secret" not in f"{caught.value} {caught.value.hint} {caught.value.value}"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """Missing, a folder, and too long."""
    (tmp_path / "long.yml").write_text("#" * 2_000_000)
    for name in ("missing.yml", ".", "long.yml"):
        with pytest.raises(InputError) as caught:
            Server("127.0.0.1:0", str(tmp_path / name), StaticPages()).start()
        assert caught.value.field == "web_config"


@pytest.mark.parametrize("name", ["web.yml", "server.crt", "server.key"])
def test_a_pipe_in_the_place_of_a_file_holds_nobody_up(
    certificates: Certificates, tmp_path: Path, name: str
) -> None:
    """Opening it for reading would wait for a writer; a link to a file is one."""
    folder = tmp_path / "folder"
    shutil.copytree(certificates.folder, folder)
    path = written(folder, "tls_server_config: {cert_file: server.crt, key_file: server.key}")
    (folder / name).rename(folder / "moved")
    (folder / name).symlink_to("moved")
    load(str(path))
    (folder / name).unlink()
    os.mkfifo(folder / name)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(InputError, match="no regular file"):
        load(str(path))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_locked_key_is_refused_without_a_question(certificates: Certificates) -> None:
    """Nobody is at the terminal to type its password."""
    from cryptography.hazmat.primitives import serialization  # noqa: PLC0415 - for this test

    key = serialization.load_pem_private_key(
        (certificates.folder / "server.key").read_bytes(), None
    )
    (certificates.folder / "locked.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"word"),
        )
    )
    text = "tls_server_config: {cert_file: server.crt, key_file: locked.key}"
    with pytest.raises(InputError, match="password"):
        load(str(written(certificates.folder, text)))


def test_settings_of_tls_without_a_certificate_warn(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The toolkit serves plain HTTP then and says nothing; here it is said."""
    path = written(tmp_path, "tls_server_config: {min_version: TLS13}")
    server = Server("127.0.0.1:0", str(path), StaticPages())
    address = server.start()
    assert scrape(address).status == 200
    server.stop()
    assert "plain HTTP" in capfd.readouterr().err


def test_headers_are_added_to_every_answer(tmp_path: Path) -> None:
    """Good ones and refusals."""
    headers = "{headers: {X-Frame-Options: deny, Content-Security-Policy: default-src 'none'}}"
    path = written(tmp_path, f"http_server_config: {headers}")
    server = Server("127.0.0.1:0", str(path), StaticPages())
    address = server.start()
    for page in ("/metrics", "/nothing"):
        found = scrape(address, page).headers
        assert found["x-frame-options"] == "deny"
        assert found["content-security-policy"] == "default-src 'none'"
    server.stop()


def test_the_rate_limit(tmp_path: Path) -> None:
    """A burst of three, and one more after a while."""
    path = written(tmp_path, "rate_limit: {interval: 1m30s, burst: 3}")
    server = Server("127.0.0.1:0", str(path), StaticPages())
    address = server.start()
    assert [scrape(address).status for _ in range(5)] == [200, 200, 200, 429, 429]
    server.stop()
    path.write_text("rate_limit: {interval: 10ms, burst: 1}")
    server = Server("127.0.0.1:0", str(path), StaticPages())
    address = server.start()
    found = []
    for _ in range(5):
        time.sleep(0.03)
        found.append(scrape(address).status)
    server.stop()
    assert found == [200] * 5


class Reloading:
    """A server that looks at its files often."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.server = Server(
            "127.0.0.1:0", str(path), StaticPages(), replace(PATIENT, watch_seconds=0.02)
        )
        self.address = self.server.start()

    def write(self, text: str) -> None:
        """Replace the file in one step, as tools do."""
        new = self.path.with_suffix(".new")
        new.write_text(text)
        os.replace(new, self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.stop()


def user(name: str) -> str:
    import bcrypt  # noqa: PLC0415 - for these tests

    return f"{name}: {bcrypt.hashpw(b'x', bcrypt.gensalt(4)).decode()}"


def test_changed_users_count_at_once(tmp_path: Path) -> None:
    """A user who is taken out is out, remembered or not, and an open connection of his ends."""
    with Reloading(written(tmp_path, f"basic_auth_users: {{{user('bob')}}}")) as made:
        bob, eve = basic("bob", "x"), basic("eve", "x")
        assert scrape(made.address, Authorization=bob).status == 200
        assert scrape(made.address, Authorization=eve).status == 401
        with connect(made.address) as kept:
            line = f"GET /healthz HTTP/1.1\r\nHost: x\r\nAuthorization: {bob}\r\n\r\n"
            kept.sendall(line.encode())
            assert kept.recv(12) == b"HTTP/1.1 200"
            made.write(f"basic_auth_users: {{{user('eve')}}}")
            until(lambda: scrape(made.address, Authorization=eve).status == 200)
            assert scrape(made.address, Authorization=bob).status == 401
            assert b"all is well" in read_to_end(kept)


@pytest.mark.parametrize(
    "broken", ["basic_auth_users: {bob: x}", "a: b", "{", "", "basic_auth_users: {}"]
)
def test_a_broken_change_keeps_what_was_there(
    tmp_path: Path, broken: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is said once; an empty file, caught while it is written, opens no door."""
    with Reloading(written(tmp_path, f"basic_auth_users: {{{user('bob')}}}")) as made:
        made.write(broken)
        until(lambda: made.server.counters.reload_failures > 0)
        assert scrape(made.address, Authorization=basic("bob", "x")).status == 200
        assert scrape(made.address).status == 401
        until(lambda: made.server.counters.reload_failures > 1)  # it was tried again
        made.write(f"basic_auth_users: {{{user('eve')}}}")
        until(lambda: scrape(made.address, Authorization=basic("eve", "x")).status == 200)
    assert capfd.readouterr().err.count("the settings before it stay") == 1


def test_a_missing_file_keeps_what_was_there(tmp_path: Path) -> None:
    """Taken away, and put back."""
    with Reloading(written(tmp_path, f"basic_auth_users: {{{user('bob')}}}")) as made:
        made.path.unlink()
        until(lambda: made.server.counters.reload_failures > 0)
        assert scrape(made.address, Authorization=basic("bob", "x")).status == 200


def test_a_renewed_certificate_is_shown(tmp_path: Path) -> None:
    """As soon as both its files are there; between the two the old one goes on."""
    old = make_certificates(tmp_path, serial=" 1")
    new = make_certificates(tmp_path / "new", serial=" 2")
    with Reloading(written(tmp_path, TLS % "")) as made:
        trusting_old, trusting_new = old.client_context(), new.client_context()
        assert scrape(made.address, context=trusting_old).status == 200
        os.replace(new.folder / new.cert, tmp_path / old.cert)
        until(lambda: made.server.counters.reload_failures > 0)
        assert scrape(made.address, context=trusting_old).status == 200
        os.replace(new.folder / new.key, tmp_path / old.key)

        def renewed() -> bool:
            try:
                return scrape(made.address, context=trusting_new).status == 200
            except OSError:
                return False

        until(renewed)


def test_what_a_changed_file_lacks_is_waited_for(tmp_path: Path) -> None:
    """It names a certificate that is not there yet; once it comes, it counts."""
    make_certificates(tmp_path, serial=" 1")
    new = make_certificates(tmp_path / "new", serial=" 2")
    with Reloading(written(tmp_path, TLS % "")) as made:
        made.write("tls_server_config: {cert_file: later.crt, key_file: later.key}")
        until(lambda: made.server.counters.reload_failures > 0)
        shutil.copy(new.folder / new.cert, tmp_path / "later.crt")
        shutil.copy(new.folder / new.key, tmp_path / "later.key")

        def there() -> bool:
            try:
                return scrape(made.address, context=new.client_context()).status == 200
            except OSError:
                return False

        until(there)


def test_tls_is_never_switched_off_by_a_change(certificates: Certificates) -> None:
    """That takes a new start."""
    with Reloading(written(certificates.folder, TLS % "")) as made:
        made.write("http_server_config: {http2: false}")
        until(lambda: made.server.counters.reload_failures > 0)
        assert scrape(made.address, context=certificates.client_context()).status == 200


def test_yaml_leaves_nothing_in_memory(tmp_path: Path) -> None:
    """Neither ruamel.yaml nor, without users and TLS, bcrypt and ssl are loaded while it serves."""
    path = written(tmp_path, "http_server_config: {http2: false}")
    program = (
        "import sys; from hpml_exporters.server import Server\n"
        f"s = Server('127.0.0.1:0', {str(path)!r}, None); s.start()\n"
        "heavy = {'ruamel', 'bcrypt', 'ssl', 'asyncio', 'ctypes', 'email', 'logging', 'http'}\n"
        "print(sorted(heavy & {m.split('.')[0] for m in sys.modules})); s.stop()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
