"""One web-config file means the same to Debian's node_exporter and to ours."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import bcrypt
import pytest
from hpml_exporters.server import Server

from tests.monitoring.prometheus_support import program, static
from tests.patience import eventually
from tests.unit.exporters.server.support import (
    PATIENT,
    SERIES,
    StaticPages,
    make_certificates,
)

if TYPE_CHECKING:
    from tests.monitoring.prometheus_support import BootPrometheus, Promtool

START_SECONDS = 240

TLS = {"cert_file": "server.crt", "key_file": "server.key"}
ASKING = {**TLS, "client_ca_file": "ca.crt"}
USERS = {
    "bob": bcrypt.hashpw(b"right", bcrypt.gensalt(4)).decode(),
    "eve": bcrypt.hashpw(b"other", bcrypt.gensalt(4)).decode().replace("$2b$", "$2y$"),
}
FILES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "users": {"basic_auth_users": USERS},
    "tls": {"tls_server_config": TLS},
    "tls and users": {"tls_server_config": TLS, "basic_auth_users": USERS},
    "request": {"tls_server_config": {**ASKING, "client_auth_type": "RequestClientCert"}},
    "require any": {"tls_server_config": {**ASKING, "client_auth_type": "RequireAnyClientCert"}},
    "if given": {"tls_server_config": {**ASKING, "client_auth_type": "VerifyClientCertIfGiven"}},
    "verify": {"tls_server_config": {**ASKING, "client_auth_type": "RequireAndVerifyClientCert"}},
    "only 1.3": {"tls_server_config": {**TLS, "min_version": "TLS13"}},
    "only 1.2": {"tls_server_config": {**TLS, "max_version": "TLS12"}},
    "old": {"tls_server_config": {**TLS, "min_version": "TLS10"}},
    "suites": {
        "tls_server_config": {
            **TLS,
            "cipher_suites": ["TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256"],
            "curve_preferences": ["CurveP384", "X25519"],
            "prefer_server_cipher_suites": False,
        }
    },
    "1.3 suites": {
        "tls_server_config": {**TLS, "cipher_suites": ["TLS_AES_128_GCM_SHA256"]},
        "http_server_config": {"http2": False},  # with it, node_exporter ends at once: h2 wants one
    },
    "no certificate": {"tls_server_config": {"min_version": "TLS13"}},
    "headers": {"http_server_config": {"http2": False, "headers": {"X-Frame-Options": "deny"}}},
}
SECURE = ("--cacert", "ca.crt")
OLD = ("-k", "--http1.1", "--ciphers", "DEFAULT@SECLEVEL=0", "--tlsv1.0")
CALLS: tuple[tuple[str, ...], ...] = (
    ("http:",),
    ("http:", "-u", "bob:right"),
    ("http:", "-u", "eve:other"),
    ("http:", "-u", "bob:wrong"),
    ("http:", "-u", "nobody:right"),
    ("http:", "-H", "Authorization: Bearer right"),
    ("http:", "-I"),
    ("https:",),
    ("https:", *SECURE),
    ("https:", *SECURE, "-u", "bob:right"),
    ("https:", *SECURE, "-u", "bob:wrong"),
    ("https:", *SECURE, "--http1.1"),
    ("https:", *SECURE, "--cert", "client.crt", "--key", "client.key"),
    ("https:", *SECURE, "--cert", "stranger.crt", "--key", "stranger.key"),
    ("https:", *SECURE, "--tls-max", "1.2", "--cert", "stranger.crt", "--key", "stranger.key"),
    ("https:", *SECURE, "--tls-max", "1.2"),
    ("https:", *SECURE, "--tlsv1.3"),
    ("https:", *SECURE, "--tls-max", "1.2", "--ciphers", "ECDHE-ECDSA-AES256-GCM-SHA384"),
    ("https:", *SECURE, "--curves", "P-521"),
    ("https:", *SECURE, "--curves", "P-384"),
    ("https:", *OLD, "--tls-max", "1.0"),
    ("https:", *OLD, "--tls-max", "1.1"),
)


@contextmanager
def node_exporter(web_config: Path) -> Iterator[str]:
    """Debian's, with nothing to tell but itself; gives its ADDRESS:PORT."""
    log = web_config.with_suffix(".log")
    with log.open("wb") as output:
        child = subprocess.Popen(
            [
                program("prometheus-node-exporter"), "--collector.disable-defaults",
                "--web.listen-address=127.0.0.1:0",
                f"--web.config.file={web_config}",
            ],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        )  # fmt: skip
    try:
        eventually(lambda: "TLS is " in log.read_text() or child.poll() is not None)
        found = re.search(r"address=(\S+)", log.read_text())
        assert found, log.read_text()
        yield found[1]
    finally:
        child.kill()
        child.wait()


@contextmanager
def ours(web_config: Path) -> Iterator[str]:
    """Ours, with 1,300 series; gives its ADDRESS:PORT."""
    server = Server("127.0.0.1:0", str(web_config), StaticPages(), PATIENT)
    host, port = server.start()
    try:
        yield f"{host}:{port}"
    finally:
        server.stop()


def outcomes(address: str, folder: Path, scheme_served: str) -> dict[str, int]:
    """The code that each call gets, 0 for none; one call of the other scheme is enough."""
    found: dict[str, int] = {}
    for scheme, *words in CALLS:
        if scheme != scheme_served and words:
            continue
        command = [
            program("curl"),
            "-s",
            "-m",
            "120",
            "-o",
            "/dev/null",
            "-w",
            "%{http_code}",
            *words,
        ]
        url = f"{scheme}//{address}/metrics"
        done = subprocess.run(
            [*command, url], cwd=folder, capture_output=True, text=True, check=False
        )
        found[" ".join((scheme, *words))] = int(done.stdout) if done.returncode == 0 else 0
    return found


@pytest.mark.parametrize("name", FILES)
def test_a_file_means_what_it_means_to_node_exporter(name: str, tmp_path: Path) -> None:
    """The same file, the same calls of curl, the same codes."""
    make_certificates(tmp_path)
    path = tmp_path / "web.yml"
    path.write_text(json.dumps(FILES[name]))
    tls = "cert_file" in FILES[name].get("tls_server_config", {})
    scheme = "https:" if tls else "http:"
    with node_exporter(path) as address:
        expected = outcomes(address, tmp_path, scheme)
    with ours(path) as address:
        assert outcomes(address, tmp_path, scheme) == expected
    assert {200} <= set(expected.values())


def test_prometheus_scrapes_with_tls_and_a_password(
    prometheus: BootPrometheus, promtool: Promtool, tmp_path: Path
) -> None:
    """And with a certificate of its own: every series arrives, all over one connection."""
    make_certificates(tmp_path)
    path = tmp_path / "web.yml"
    asked = {"client_auth_type": "RequireAndVerifyClientCert"}
    asked |= {"client_allowed_sans": ["prometheus.example"]}  # type: ignore[dict-item]
    config = {"tls_server_config": {**ASKING, **asked}, "basic_auth_users": USERS}
    path.write_text(json.dumps(config))
    (tmp_path / "password").write_text("right")
    server = Server("127.0.0.1:0", str(path), StaticPages(), PATIENT)
    host, port = server.start()
    files = {"ca_file": "ca.crt", "cert_file": "client.crt", "key_file": "client.key"}
    scrape = static(
        "hpml",
        f"{host}:{port}",
        scheme="https",
        tls_config={key: str(tmp_path / file) for key, file in files.items()},
        basic_auth={"username": "bob", "password_file": str(tmp_path / "password")},
    )
    try:
        booted = prometheus([scrape])
        booted.wait_for(f"count(hpml_gpu_busy_seconds_total) == {SERIES}")
        booted.wait_for('sum_over_time(up{job="hpml"}[5m]) >= 3')
        assert booted.value("max(hpml_gpu_busy_seconds_total)") == (SERIES - 1) * 1.5
        assert not booted.was_refused("hpml", "5m")
        checked = promtool("check", "config", booted.folder / "prometheus.yml")
        assert checked.returncode == 0, checked.stderr
        # Prometheus breaks the connection where an answer comes too late
        late = booted.value('sum_over_time((up{job="hpml"} == bool 0)[5m:1s])')
        assert server.counters.requests[200] >= 3
        assert server.counters.accepted <= 1 + late
        assert server.counters.handshakes_failed <= late
    finally:
        server.stop()
