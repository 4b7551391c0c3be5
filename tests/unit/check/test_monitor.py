"""Before a submission it is known whether the monitor will start, and who will see it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.check.job import check_monitor
from hpml_orchestrator.check.request import CheckFinding
from hpml_orchestrator.records.job import Job

TLS = "tls_server_config: {cert_file: c, key_file: k"
USERS = f"basic_auth_users: {{a: $2y$10${'x' * 53}}}"
Found = list[CheckFinding]


def told(*, missing: str = "", gpus: int = 0, **monitor: Any) -> Found:
    """What is found of a job that other machines run."""
    fields = {"name": "a", "command": ["true"], "resources": {"gpus": gpus}}
    job = Job.from_json({**fields, "monitor": {"enabled": True, **monitor}})
    return check_monitor(job, on_nodes=True, installed=lambda name: name not in missing.split())


def written(tmp_path: Path, text: str) -> str:
    """A web-config file; braces that are open are closed."""
    path = tmp_path / "web.yml"
    path.write_text(text + "}" * (text.count("{") - text.count("}")))
    return str(path)


def locked(tmp_path: Path) -> str:
    """A file that brings TLS and asks for users."""
    return written(tmp_path, f"{USERS}\n{TLS}")


def codes(found: Found) -> list[str]:
    """Their codes; none of them keeps a job from running."""
    assert {one.level for one in found} <= {"warning"}
    assert all(one.hint for one in found)
    return [one.code for one in found]


def test_without_a_monitor_nothing_is_looked_at() -> None:
    """Whatever its fields say."""
    assert told(missing="hpml_exporters", enabled=False, listen="0.0.0.0:1") == []


def test_loopback_is_for_the_node_alone() -> None:
    """It is safe, and no Prometheus of a cluster will find it; on one machine that is well."""
    assert codes(told()) == ["monitor.alone"]
    assert codes(told(listen="[::1]:0")) == ["monitor.alone"]
    assert codes(told(listen="127.example.org:0")) == ["monitor.open"]  # a name, not an address
    job = Job.from_json({"name": "a", "command": ["true"], "monitor": {"enabled": True}})
    assert check_monitor(job, on_nodes=False) == []


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (None, "monitor.open"),
        ("", "monitor.open"),
        (TLS, "monitor.open"),
        (f"{TLS}, client_auth_type: RequestClientCert", "monitor.open"),
        (f"{TLS}, client_auth_type: VerifyClientCertIfGiven, client_ca_file: c", "monitor.open"),
        (f"{TLS}, client_auth_type: RequireAndVerifyClientCert, client_ca_file: c", ""),
        (USERS, "monitor.unencrypted"),
        (f"{USERS}\n{TLS}", ""),
    ],
)
def test_an_open_door_is_told(tmp_path: Path, text: str | None, code: str) -> None:
    """What counts is whom the file asks for, not that there is one; loopback needs none."""
    config = written(tmp_path, text) if text is not None else None
    found = told(listen="0.0.0.0:0", web_config=config)
    assert codes(found) == [code] * bool(code)
    assert {one.field for one in found} <= {"monitor.web_config" if config else "monitor.listen"}
    assert codes(told(web_config=config)) == ["monitor.alone"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("basic_auth_users: {a: geheim-geheim}", "basic_auth_users.a: not a bcrypt hash"),
        ("[unclosed", "line 1"),
    ],
)
def test_a_file_that_the_exporter_would_refuse(tmp_path: Path, text: str, words: str) -> None:
    """Then nothing at all is monitored, whatever it listens at; secrets are not shown."""
    config = written(tmp_path, text)
    for listen in ("127.0.0.1:0", "0.0.0.0:0"):
        found = told(listen=listen, web_config=config)
        (one,) = [each for each in found if each.code != "monitor.alone"]
        assert one.code == "monitor.web_config"
        assert words in one.message
        assert one.message.endswith("the job will not be monitored")
        assert "geheim" not in str(found)


@pytest.mark.parametrize(
    ("missing", "gpus", "code"),
    [
        ("hpml_exporters", 0, "monitor.missing"),
        ("hpml_exporters nvitop", 1, "monitor.missing"),
        ("nvitop", 1, "monitor.no_gpus"),
        ("pynvml", 1, "monitor.no_gpus"),
        ("nvitop", 0, ""),
    ],
)
def test_what_is_not_installed(tmp_path: Path, missing: str, gpus: int, code: str) -> None:
    """The exporter, or what it needs to see GPUs where the job has some."""
    found = told(missing=missing, gpus=gpus, listen="10.0.0.1:0", web_config=locked(tmp_path))
    assert codes(found) == [code] * bool(code)
