"""What a program runs in: packages of its own Python, modules and driver."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpml_orchestrator.node.software import installed, python_of, record, start

VERSION = ".".join(platform.python_version_tuple()[:2])


def package(directory: Path, name: str, version: str) -> None:
    """Install an empty package."""
    info = directory / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def virtual_environment(path: Path, *, system: bool = False) -> Path:
    """Make a virtual environment as `python -m venv` and `uv venv` do; return its Python."""
    (path / "bin").mkdir(parents=True)
    (path / "bin" / "python").symlink_to(sys.executable)
    base = Path(os.path.realpath(sys.executable)).parent
    text = f"home = {base}\ninclude-system-site-packages = {str(system).lower()}\n"
    (path / "pyvenv.cfg").write_text(text)
    package(path / "lib" / f"python{VERSION}" / "site-packages", "py-alpha", "1.2")
    return path / "bin" / "python"


def test_the_packages_of_this_python() -> None:
    """The same names and versions as the interpreter itself lists."""
    found = installed(sys.executable, dict(os.environ))
    listed = {one.metadata["Name"]: one.version for one in importlib.metadata.distributions()}
    assert found is not None
    assert {"pytest", "hypothesis"} <= set(found)
    assert {name: listed[name] for name in found} == found


def test_a_virtual_environment_has_its_own_packages(tmp_path: Path) -> None:
    """Those of the system count only if it includes them; PYTHONPATH comes first."""
    alone = virtual_environment(tmp_path / "alone")
    package(tmp_path / "path", "py-alpha", "9")
    assert installed(str(alone), {}) == {"py-alpha": "1.2"}
    assert installed(str(alone), {"PYTHONPATH": str(tmp_path / "path")}) == {"py-alpha": "9"}
    mixed = virtual_environment(tmp_path / "mixed", system=True)
    package(tmp_path / ".local" / "lib" / f"python{VERSION}" / "site-packages", "beta", "3")
    found = installed(str(mixed), {"HOME": str(tmp_path)}) or {}
    assert (found["py-alpha"], found["beta"]) == ("1.2", "3")


def test_a_damaged_package_is_left_out(tmp_path: Path) -> None:
    """The others are listed."""
    python = virtual_environment(tmp_path / "env")
    (tmp_path / f"env/lib/python{VERSION}/site-packages/broken-1.dist-info").mkdir()
    assert installed(str(python), {}) == {"py-alpha": "1.2"}


def test_a_python_that_lists_nothing(tmp_path: Path) -> None:
    """Packages are unknown if it fails, prints something else, or is not there."""
    for words in ("exit 1", "echo nonsense"):
        python = tmp_path / "python"
        python.write_text(f"#!/bin/sh\n{words}\n")
        python.chmod(0o755)
        assert installed(str(python), {}) is None
    assert installed(str(tmp_path / "none"), {}) is None


@pytest.mark.parametrize(
    ("program", "python"),
    [
        ("python", "env/bin/python"),
        ("lightning", "other/python3.11"),  # a console script: its first line
        ("bash", "env/bin/python"),  # its Python is the one on its PATH
        ("/nowhere/python", "env/bin/python"),
    ],
)
def test_the_python_of_a_program(tmp_path: Path, program: str, python: str) -> None:
    """The program itself, that of its first line, or the one on PATH."""
    for name in ("env/bin/python", "env/bin/lightning", "env/bin/bash", "other/python3.11"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        first = f"#!{tmp_path}/other/python3.11 -u\n"
        path.write_text(first if name.endswith("lightning") else "\x7fELF")
        path.chmod(0o755)
    environment = {"PATH": f"/none:{tmp_path}/env/bin"}
    assert python_of(program, environment) == f"{tmp_path}/{python}"
    assert python_of(program, {}) == ""


def test_a_live_process_is_recorded(tmp_path: Path) -> None:
    """A process of its own writes the file, without hpml's packages on its path."""
    python = virtual_environment(tmp_path / "env")
    environment = {"LOADEDMODULES": "gcc/12.3:cuda/12.4", "PATH": str(python.parent)}
    with subprocess.Popen(
        [shutil.which("sleep") or "sleep", "60"], env={**os.environ, **environment}
    ) as sleeper:
        recorder = start(tmp_path, sleeper.pid, "bash")
        assert recorder is not None
        assert recorder.wait(60) == 0
        sleeper.kill()
    found = json.loads((tmp_path / "software.json").read_text())
    assert found["python"] == str(python)
    assert found["packages"] == {"py-alpha": "1.2"}
    assert found["modules"] == ["gcc/12.3", "cuda/12.4"]


def test_a_process_that_has_ended_is_no_error(tmp_path: Path) -> None:
    """What is still known is written."""
    record(tmp_path, str(tmp_path / "proc"), "bash")
    found = json.loads((tmp_path / "software.json").read_text())
    assert (found["python"], found["packages"], found["modules"]) == (None, None, [])
