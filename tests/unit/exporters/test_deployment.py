"""What a site copies to run the exporter is valid, to the programs that will read it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SYSTEMD = ROOT / "deploy" / "systemd"
UNITS = sorted(SYSTEMD.glob("*.service"))


def values(unit: Path, name: str) -> list[str]:
    """The values of a setting in a unit."""
    return re.findall(rf"^{name}=(.*)$", unit.read_text("utf-8"), re.MULTILINE)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_accepts_the_unit(unit: Path, tmp_path: Path) -> None:
    """It knows each setting and its value."""
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("NOT TESTED: systemd-analyze is not installed (apt-get install systemd)")
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text("utf-8").replace("/opt/hpml/bin/hpml", "/bin/true"))
    done = subprocess.run(
        [program, "verify", "--man=no", copy],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    if "Failed to " in done.stderr:
        pytest.skip(f"NOT TESTED: systemd-analyze does not work here: {done.stderr}")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("name", "user", "capabilities", "hides"),
    [
        ("hpml-exporter-node", "hpml-exporter", "CAP_SYS_PTRACE CAP_DAC_READ_SEARCH", []),
        ("hpml-exporter-slurm", "hpml-slurm", "", ["yes", "closed", "invisible"]),
    ],
)
def test_a_unit_has_only_the_rights_that_it_needs(
    name: str, user: str, capabilities: str, hides: list[str]
) -> None:
    """A separate user; the node's exporter has access to GPUs and processes, Slurm's has not."""
    unit = SYSTEMD / f"{name}.service"
    assert values(unit, "User") == values(unit, "Group") == [user]
    assert values(unit, "AmbientCapabilities") == [capabilities]
    assert values(unit, "CapabilityBoundingSet") == [capabilities]
    assert values(unit, "NoNewPrivileges") == ["yes"]
    assert values(unit, "ProtectSystem") == ["strict"]
    assert values(unit, "Restart") == ["on-failure"]
    settings = ("PrivateDevices", "DevicePolicy", "ProtectProc")
    assert [value for setting in settings for value in values(unit, setting)] == hides


def calls_of(filters: str) -> set[str]:
    """The system calls in systemd's sets of them."""
    found: set[str] = set()
    for word in filters.split():
        if not word.startswith("@"):
            found.add(word)
            continue
        argv = ["systemd-analyze", "syscall-filter", word]
        lines = subprocess.check_output(argv, text=True, timeout=60).splitlines()[1:]
        inner = (line.strip() for line in lines)
        found |= calls_of(" ".join(line for line in inner if line and line[0] != "#"))
    return found


@pytest.mark.parametrize("more", ["as it is", "without the clock"])
def test_the_node_exporter_reads_all_under_its_filter(more: str, tmp_path: Path) -> None:
    """All collectors work as without it; one that may not read the clock says so."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("NOT TESTED: systemd-analyze is not installed (apt-get install systemd)")
    unit = SYSTEMD / "hpml-exporter-node.service"
    calls = calls_of(" ".join(values(unit, "SystemCallFilter")))
    assert not values(unit, "ProtectClock"), "it forbids adjtimex, and closes /dev/nvidia*"
    if more == "without the clock":
        calls -= calls_of("@clock")
    (tmp_path / "calls").write_text(" ".join(calls))
    command = [sys.executable, "-m", "hpml_orchestrator.cli", "export", "node", "--once"]
    filtered = [sys.executable, str(Path(__file__).with_name("callfilter.py"))]
    shown, logs = [], []
    for prefix in ([], [*filtered, str(tmp_path / "calls")]):
        argv = [*prefix, *command]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=240, check=False)
        if done.returncode == 77:
            pytest.skip("NOT TESTED: no libseccomp, or no filters of system calls here")
        assert done.returncode == 0, done.stderr
        shown.append(set(re.findall(r"^# TYPE (hpml_(?!job|run)\S+)", done.stdout, re.MULTILINE)))
        logs.append(re.sub(r"^\S+ ", "", done.stderr, flags=re.MULTILINE))
        assert 'hpml_exporter_up{collector="health"} 1.0' in done.stdout
    clock = {"hpml_node_clock_synchronized", "hpml_node_clock_error_seconds"}
    unwatched = "WARNING collector health: the clock is not watched: Operation not permitted\n"
    if more == "without the clock":
        assert shown[0] - shown[1] == clock
        assert unwatched in logs[1]
    else:
        assert shown[0] == shown[1]
        assert logs[0] == logs[1]


def test_the_health_check_runs_the_hpml_that_it_was_installed_with(tmp_path: Path) -> None:
    """Whatever the prefix is, and also through a link."""
    place = tmp_path / "opt/share/hpml/slurm"
    shutil.copytree(ROOT / "deploy" / "slurm", place)
    (tmp_path / "opt" / "bin").mkdir()
    hpml = tmp_path / "opt" / "bin" / "hpml"
    hpml.write_text('#!/bin/sh\necho "$0 $*"\n')
    hpml.chmod(0o755)
    (tmp_path / "link").symlink_to(place / "hpml-health.sh")
    output = subprocess.check_output([tmp_path / "link"], text=True)
    assert output == f"{hpml} doctor --node --drain\n"


@pytest.mark.parametrize("manpath", [{}, {"MANPATH": "/usr/man"}])
def test_the_modulefile_adds_commands_and_manual_pages(manpath: dict[str, str]) -> None:
    """MANPATH is only extended: alone it would hide the system's pages."""
    program = shutil.which("tclsh")
    if program is None:
        pytest.skip("NOT TESTED: tclsh is not installed (apt-get install tcl)")
    code = (
        "proc module-whatis args {}; proc conflict args {}; proc prepend-path args {puts $args};"
        f"source {{{ROOT}/deploy/modulefiles/hpml}}"
    )
    output = subprocess.check_output([program], input=code, text=True, env=manpath)
    added = ["PATH /opt/hpml/commands", *(["MANPATH /opt/hpml/share/man"] if manpath else [])]
    assert output.splitlines() == added


@pytest.mark.parametrize("whole", [False, True], ids=["as-it-is", "with-its-comments"])
def test_prometheus_takes_the_example(tmp_path: Path, *, whole: bool) -> None:
    """It has a job for each exporter; also valid with what is commented out put in place."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("NOT TESTED: promtool is not installed (apt-get install prometheus)")
    text = (ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text("utf-8")
    jobs = re.findall(r"^  - job_name: (\S+)", text, re.MULTILINE)
    assert jobs == ["hpml-node", "hpml-slurm", "hpml-job"]
    if whole:
        fields = r"^( *)# (?=scheme:|tls_|basic_|alerting:|  alertm|    - static)"
        text, count = re.subn(fields, r"\1", text, flags=re.MULTILINE)
        assert count == 6
    (tmp_path / "prometheus.yml").write_text(text)
    for name in ("ca.crt", "password"):
        shutil.copy(ROOT / "LICENSE", tmp_path / name)
    (tmp_path / "nodes").mkdir()
    (tmp_path / "nodes" / "all.json").write_text('[{"targets": ["node1:9445", "node2:9445"]}]')
    argv = [promtool, "check", "config", "--syntax-only", f"{tmp_path}/prometheus.yml"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("number", range(4))
def test_prometheus_takes_what_docs_show(number: int, tmp_path: Path) -> None:
    """Each prometheus.yml on the page about large clusters is valid without changes."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("NOT TESTED: promtool is not installed (apt-get install prometheus)")
    page = (ROOT / "docs" / "scale.md").read_text("utf-8")
    shown = re.findall(r"^```text prometheus.yml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(shown) == 4
    (tmp_path / "password").touch()
    (tmp_path / "prometheus.yml").write_text(shown[number])
    argv = [promtool, "check", "config", "--syntax-only", f"{tmp_path}/prometheus.yml"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
