"""Prometheus scrapes through TLS, a client certificate and a password."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import bcrypt

from tests.monitoring.prometheus_support import static
from tests.unit.exporters.web.support import SERIES, make_certificates, serving

if TYPE_CHECKING:
    from tests.monitoring.prometheus_support import BootPrometheus

TLS = {"cert_file": "server.crt", "key_file": "server.key"}
ASKING = {**TLS, "client_ca_file": "ca.crt"}
USERS = {"bob": bcrypt.hashpw(b"right", bcrypt.gensalt(4)).decode()}
VERIFY = {**ASKING, "client_auth_type": "RequireAndVerifyClientCert"}


def test_prometheus_scrapes_with_tls_and_a_password(
    prometheus: BootPrometheus, tmp_path: Path
) -> None:
    """And with its own certificate: every series arrives, all over one connection."""
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
        # Prometheus closes the connection if a response comes too late.
        late = booted.value('sum_over_time((up{job="hpml"} == bool 0)[5m:1s])')
        assert server.counters.responses[200] >= 3
        assert server.counters.accepted <= 1 + late
