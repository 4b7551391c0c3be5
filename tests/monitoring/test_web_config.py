"""One web-config file means the same to Debian's node_exporter and to ours; Prometheus scrapes it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bcrypt
import pytest
from hpml_exporters.server import Server

from tests.unit.exporters.server.support import SERIES, StaticPages, make_certificates

NODE_EXPORTER = shutil.which("prometheus-node-exporter") or ""
pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
START_SECONDS = 30

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
    "1.3 suites": {"tls_server_config": {**TLS, "cipher_suites": ["TLS_AES_128_GCM_SHA256"]}},
    "no certificate": {"tls_server_config": {"min_version": "TLS13"}},
    "headers": {"http_server_config": {"http2": False, "headers": {"X-Frame-Options": "deny"}}},
}
SECURE = ("--cacert", "ca.crt")
OLD = ("-k", "--ciphers", "DEFAULT@SECLEVEL=0", "--tlsv1.0")
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
                NODE_EXPORTER, "--collector.disable-defaults", "--web.listen-address=127.0.0.1:0",
                f"--web.config.file={web_config}",
            ],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        )  # fmt: skip
    try:
        end = time.monotonic() + START_SECONDS
        while not (found := re.search(r'TLS is .*address=(\S+)|"Listening on" address=(\S+)\n.*TLS is', log.read_text())):
            assert time.monotonic() < end, log.read_text()
            assert child.poll() is None, log.read_text()
            time.sleep(0.02)
        yield found[1] or found[2]
    finally:
        child.kill()
        child.wait()


@contextmanager
def ours(web_config: Path) -> Iterator[str]:
    """Ours, with 1,300 series; gives its ADDRESS:PORT."""
    server = Server("127.0.0.1:0", str(web_config), StaticPages())
    host, port = server.start()
    yield f"{host}:{port}"
    server.stop()


def outcomes(address: str, folder: Path) -> dict[str, int]:
    """The code that each call gets; 0 where it gets none."""
    found = {}
    for scheme, *words in CALLS:
        command = ["curl", "-s", "-m", "20", "-o", "/dev/null", "-w", "%{http_code}", *words]
        url = f"{scheme}//{address}/metrics"
        done = subprocess.run(
            [*command, url], cwd=folder, capture_output=True, text=True, check=False
        )
        found[" ".join((scheme, *words))] = int(done.stdout) if done.returncode == 0 else 0
    return found


@pytest.mark.skipif(not NODE_EXPORTER, reason="no prometheus-node-exporter")
@pytest.mark.parametrize("name", FILES)
def test_a_file_means_what_it_means_to_node_exporter(name: str, tmp_path: Path) -> None:
    """The same file, the same calls of curl, the same codes."""
    make_certificates(tmp_path)
    path = tmp_path / "web.yml"
    path.write_text(json.dumps(FILES[name]))
    with node_exporter(path) as address:
        expected = outcomes(address, tmp_path)
    with ours(path) as address:
        assert outcomes(address, tmp_path) == expected
    assert {200} <= set(expected.values())


def test_prometheus_scrapes_with_tls_and_a_password(tmp_path: Path) -> None:
    """And with a certificate of its own: every series arrives, in OpenMetrics."""
    if shutil.which("prometheus") is None or shutil.which("promtool") is None:
        pytest.skip("no prometheus")
    make_certificates(tmp_path)
    (tmp_path / "web.yml").write_text(
        json.dumps(
            {
                "tls_server_config": {
                    **ASKING,
                    "client_auth_type": "RequireAndVerifyClientCert",
                    "client_allowed_sans": ["prometheus.example"],
                },
                "basic_auth_users": USERS,
            }
        )
    )
    (tmp_path / "password").write_text("right")
    server = Server("127.0.0.1:0", str(tmp_path / "web.yml"), StaticPages())
    host, port = server.start()
    scrape: dict[str, Any] = {
        "job_name": "hpml",
        "scheme": "https",
        "scrape_interval": "1s",
        "tls_config": {"ca_file": "ca.crt", "cert_file": "client.crt", "key_file": "client.key"},
        "basic_auth": {"username": "bob", "password_file": "password"},
        "static_configs": [{"targets": [f"{host}:{port}"]}],
    }
    config = tmp_path / "prometheus.yml"
    config.write_text(json.dumps({"scrape_configs": [scrape]}))
    done = subprocess.run(
        ["promtool", "check", "config", str(config)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    try:
        with prometheus(config) as url:
            assert value(url, "count(hpml_gpu_busy_seconds_total)") == SERIES
            assert value(url, 'up{job="hpml"}') == 1
            assert value(url, "max(hpml_gpu_busy_seconds_total)") == (SERIES - 1) * 1.5
        assert server.counters.requests[200] >= 1
        assert server.counters.accepted == 1  # one connection for all scrapes
        assert server.counters.handshakes_failed == 0
    finally:
        server.stop()
