"""What a site copies to run the exporter is valid, to the programs that will read it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
UNIT = ROOT / "deploy" / "systemd" / "hpml-exporter-node.service"


def values(name: str) -> list[str]:
    """What the unit says of a setting."""
    return re.findall(rf"^{name}=(.*)$", UNIT.read_text("utf-8"), re.MULTILINE)


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """No setting is unknown to it, and none has a wrong value."""
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("NOT TESTED: systemd-analyze is not installed (apt-get install systemd)")
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text("utf-8").replace("/opt/hpml/bin/hpml", "/bin/true"))
    done = subprocess.run(
        [program, "verify", "--man=no", unit],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    if "Failed to " in done.stderr:
        pytest.skip(f"NOT TESTED: systemd-analyze does not work here: {done.stderr}")
    assert (done.returncode, done.stderr) == (0, "")


def test_the_unit_has_no_more_rights_than_it_needs() -> None:
    """A user of its own with two capabilities, and devices of GPUs that stay within reach."""
    rights = "CAP_SYS_PTRACE CAP_DAC_READ_SEARCH"
    assert values("User") == ["hpml-exporter"]
    assert values("AmbientCapabilities") == values("CapabilityBoundingSet") == [rights]
    assert values("NoNewPrivileges") == ["yes"]
    assert values("ProtectSystem") == ["strict"]
    assert values("Restart") == ["on-failure"]
    assert values("PrivateDevices") == values("DevicePolicy") == values("ProtectProc") == []


@pytest.mark.parametrize("whole", [False, True], ids=["as-it-is", "with-its-comments"])
def test_prometheus_takes_the_example(tmp_path: Path, *, whole: bool) -> None:
    """Also with what is commented out put in place."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("NOT TESTED: promtool is not installed (apt-get install prometheus)")
    text = (ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text("utf-8")
    if whole:
        comments = text.count("# ")
        fields = (
            r"^(    )# (?=file_sd|  - files|scheme|tls_|basic_)",
            r"^(  )# (?=- job_name|  (honor|file_sd)| {4}- files| {6}ref)",
        )
        for field in fields:
            text = re.sub(field, r"\1", text, flags=re.MULTILINE)
        assert comments - text.count("# ") == 10
    (tmp_path / "prometheus.yml").write_text(text)
    for name in ("ca.crt", "password"):
        shutil.copy(ROOT / "LICENSE", tmp_path / name)
    (tmp_path / "nodes").mkdir()
    (tmp_path / "nodes" / "all.json").write_text('[{"targets": ["node1:9445", "node2:9445"]}]')
    argv = [promtool, "check", "config", "--syntax-only", f"{tmp_path}/prometheus.yml"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
