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

from tests.monitoring.prometheus_support import program, static
from tests.patience import eventually
from tests.unit.exporters.web.support import SERIES, make_certificates, serving

if TYPE_CHECKING:
    from tests.monitoring.prometheus_support import BootPrometheus

TLS = {"cert_file": "server.crt", "key_file": "server.key"}
ASKING = {**TLS, "client_ca_file": "ca.crt"}
USERS = {
    "bob": bcrypt.hashpw(b"right", bcrypt.gensalt(4)).decode(),
    "eve": bcrypt.hashpw(b"other", bcrypt.gensalt(4)).decode().replace("$2b$", "$2y$"),
}
VERIFY = {**ASKING, "client_auth_type": "RequireAndVerifyClientCert"}
FILES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "users": {"basic_auth_users": USERS},
    "tls and users": {"tls_server_config": TLS, "basic_auth_users": USERS},
    "if given": {"tls_server_config": {**ASKING, "client_auth_type": "VerifyClientCertIfGiven"}},
    "verify": {"tls_server_config": VERIFY},
    "only 1.3": {"tls_server_config": {**TLS, "min_version": "TLS13"}},
    "only 1.2": {"tls_server_config": {**TLS, "max_version": "TLS12"}},
}
SECURE = ("https:", "--cacert", "ca.crt")
CALLS: tuple[tuple[str, ...], ...] = (
    ("http:",),
    ("http:", "-u", "bob:right"),
    ("http:", "-u", "eve:other"),
    ("http:", "-u", "bob:wrong"),
    ("http:", "-H", "Authorization: Bearer right"),
    ("https:",),
    SECURE,
    (*SECURE, "-u", "bob:right"),
    (*SECURE, "--cert", "client.crt", "--key", "client.key"),
    (*SECURE, "--cert", "stranger.crt", "--key", "stranger.key"),
    (*SECURE, "--tls-max", "1.2"),
    (*SECURE, "--tlsv1.3"),
    (*SECURE, "-k", "--tls-max", "1.1"),
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


def outcomes(address: str, folder: Path, scheme_served: str) -> dict[str, int]:
    """The status that each call gets, 0 for none; one call of the other scheme is enough."""
    found: dict[str, int] = {}
    for scheme, *options in CALLS:
        if scheme == scheme_served or not options:
            command = [program("curl"), "-s", "-m", "120", "-o", "/dev/null", "-w", "%{http_code}"]
            done = subprocess.run(
                [*command, *options, f"{scheme}//{address}/metrics"],
                cwd=folder, capture_output=True, text=True, check=False,
            )  # fmt: skip
            found[" ".join((scheme, *options))] = 0 if done.returncode else int(done.stdout)
    return found


@pytest.mark.parametrize("name", FILES)
def test_a_file_means_what_it_means_to_node_exporter(name: str, tmp_path: Path) -> None:
    """The same file, the same calls of curl, the same statuses."""
    make_certificates(tmp_path)
    path = tmp_path / "web.yml"
    path.write_text(json.dumps(FILES[name]))
    scheme = "https:" if "tls_server_config" in FILES[name] else "http:"
    with node_exporter(path) as address:
        expected = outcomes(address, tmp_path, scheme)
    with serving(path) as (_, (host, port)):
        assert outcomes(f"{host}:{port}", tmp_path, scheme) == expected
    assert 200 in expected.values()


def test_prometheus_scrapes_with_tls_and_a_password(
    prometheus: BootPrometheus, tmp_path: Path
) -> None:
    """And with a certificate of its own: every series arrives, all over one connection."""
    make_certificates(tmp_path)
    path = tmp_path / "web.yml"
    tls = {**VERIFY, "client_allowed_sans": ["prometheus.example"]}
    path.write_text(json.dumps({"tls_server_config": tls, "basic_auth_users": USERS}))
    (tmp_path / "password").write_text("right")
    files = {"ca_file": "ca.crt", "cert_file": "client.crt", "key_file": "client.key"}
    with serving(path) as (server, (host, port)):
        scrape = static(
            "hpml",
            f"{host}:{port}",
            scheme="https",
            tls_config={key: str(tmp_path / file) for key, file in files.items()},
            basic_auth={"username": "bob", "password_file": str(tmp_path / "password")},
        )
        booted = prometheus([scrape])
        booted.wait_for(f"count(hpml_gpu_busy_seconds_total) == {SERIES}")
        booted.wait_for('sum_over_time(up{job="hpml"}[5m]) >= 3')
        assert booted.value("max(hpml_gpu_busy_seconds_total)") == (SERIES - 1) * 1.5
        assert not booted.was_refused("hpml", "5m")
        # Prometheus breaks the connection where a response comes too late.
        late = booted.value('sum_over_time((up{job="hpml"} == bool 0)[5m:1s])')
        assert server.counters.responses[200] >= 3
        assert server.counters.accepted <= 1 + late
