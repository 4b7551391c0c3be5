"""Before a submission it is known whether the monitor will start, and who will see it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.batch.check_finding import Finding
from hpml_orchestrator.jobs.check_monitor import check_monitor
from hpml_orchestrator.spec import Job

MOUNTS = "server:/home /shared nfs rw 0 0\nnone /ram tmpfs rw 0 0\n"
Found = list[Finding]


def told(tmp_path: Path, *, missing: str = "", gpus: int = 0, **monitor: Any) -> Found:
    """What is found of a job that other machines run."""
    fields = {"name": "a", "command": ["true"], "resources": {"gpus": gpus}}
    job = Job.model_validate({**fields, "monitor": {"enabled": True, **monitor}})
    mounts = tmp_path / "mounts"
    mounts.write_text(MOUNTS)
    return check_monitor(
        job, on_nodes=True, mounts=str(mounts), installed=lambda name: name not in missing.split()
    )


def codes(found: Found) -> list[str]:
    """Their codes; none of them keeps a job from running."""
    assert {one.level for one in found} <= {"warning"}
    assert all(one.hint for one in found)
    return [one.code for one in found]


def test_without_a_monitor_nothing_is_looked_at(tmp_path: Path) -> None:
    """Whatever its fields say."""
    assert told(tmp_path, missing="hpml_exporters", enabled=False, listen="0.0.0.0:1") == []


def test_loopback_is_for_the_node_alone(tmp_path: Path) -> None:
    """It is safe, and no Prometheus of a cluster will find it; on one machine that is well."""
    assert codes(told(tmp_path)) == ["monitor.alone"]
    assert codes(told(tmp_path, listen="[::1]:0")) == ["monitor.alone"]
    job = Job.model_validate({"name": "a", "command": ["true"], "monitor": {"enabled": True}})
    assert check_monitor(job, on_nodes=False) == []


def test_an_open_door_is_told(tmp_path: Path) -> None:
    """Listening for others without a web config."""
    web = tmp_path / "web.yml"
    web.write_text("basic_auth_users: {}\n")
    assert codes(told(tmp_path, listen="0.0.0.0:0")) == ["monitor.open"]
    assert codes(told(tmp_path, listen="0.0.0.0:0", web_config=str(web))) == []
    assert codes(told(tmp_path, listen="0.0.0.0:0", web_config="/none")) == ["monitor.web_config"]


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
    found = told(tmp_path, missing=missing, gpus=gpus, listen="10.0.0.1:0", web_config="/dev/null")
    assert codes(found) == [code] * bool(code)


def test_targets_where_nobody_finds_them(tmp_path: Path) -> None:
    """A directory of this machine, and one that cannot be written."""
    named: dict[str, Any] = {"listen": "10.0.0.1:0", "web_config": "/dev/null"}
    assert codes(told(tmp_path, targets="/dev/shm/targets", **named)) == ["monitor.targets_local"]
    wrong = str(tmp_path / "mounts" / "targets")  # below a file nobody can make a directory
    (found,) = [one for one in told(tmp_path, targets=wrong, **named) if one.code[-1] != "l"]
    assert (found.code, found.field, found.value) == ("monitor.targets", "monitor.targets", wrong)
