"""An ordinary user, whom the tests' jobs belong to, and an hpml that this user can run.

If the tests run as root, as virtual nodes need, other users may have no access to the directories
of Python and the checkout. So the user gets a virtual environment below /tmp, made of hard links.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_IS_ROOT = os.geteuid() == 0
_USER = pwd.getpwnam("games") if _IS_ROOT else pwd.getpwuid(os.getuid())
UID = _USER.pw_uid
HOME = Path(tempfile.gettempdir()) / f"hpml-tests-user-{os.getpid()}"
VENV = HOME / "venv" if _IS_ROOT else Path(sys.prefix)
PYTHON = str(VENV / "bin" / "python") if _IS_ROOT else sys.executable
# env is what the user executes: setpriv itself finds programs with the rights of root.
AS_USER = (
    ["setpriv", f"--reuid={UID}", f"--regid={_USER.pw_gid}", "--init-groups", "env"]
    if _IS_ROOT
    else []
)
HPML = [*AS_USER, PYTHON, "-m", "hpml_orchestrator.cli"]
_SOURCES = ("hpml_orchestrator", "exporters", "templates", "dashboards", "training_jobs")


@cache
def install() -> Path:
    """Make the user's virtual environment, once per process; it goes when the process ends."""
    if not _IS_ROOT:
        return HOME
    HOME.mkdir(mode=0o755)
    atexit.register(shutil.rmtree, HOME, ignore_errors=True)
    subprocess.run([_python(), "-m", "venv", "--without-pip", VENV], check=True, timeout=120)
    target = next(VENV.glob("lib/python3*/site-packages"))
    for place in dict.fromkeys(path for path in sys.path if path.endswith("site-packages")):
        _link(f"{place}/.", target)
    for pointer in target.glob("*.pth"):
        pointer.unlink()
    (HOME / "src").mkdir()
    for name in _SOURCES:
        _link(ROOT / name, HOME / "src")
    (target / "hpml.pth").write_text(f"{HOME}/src\n{HOME}/src/exporters\n{HOME}/src/dashboards\n")
    for script in Path(sys.executable).parent.iterdir():
        if script.is_symlink() or (VENV / "bin" / script.name).exists():
            continue
        head, _, rest = script.read_bytes().partition(b"\n")
        if head.startswith(b"#!") and b"python" in head:
            copy = VENV / "bin" / script.name
            copy.write_bytes(f"#!{PYTHON}\n".encode() + rest)
            copy.chmod(0o755)
    return HOME


def hand_over(directory: Path) -> None:
    """Give a directory and all in it to the user, and let the user get there."""
    if not _IS_ROOT:
        return
    for folder, _, files in os.walk(directory):
        for path in (folder, *(os.path.join(folder, name) for name in files)):
            with contextlib.suppress(FileNotFoundError):  # a running job's files come and go
                if os.lstat(path).st_uid == 0:
                    os.lchown(path, UID, _USER.pw_gid)
    for parent in directory.parents:
        if parent.stat().st_uid == 0 and parent.is_relative_to(tempfile.gettempdir()):
            parent.chmod(parent.stat().st_mode | 0o111)


class Directories:
    """Makes temporary directories that belong to the user; used as pytest's tmp_path_factory."""

    def __init__(self, base: Path) -> None:
        self._base = base
        base.mkdir(exist_ok=True)

    def getbasetemp(self) -> Path:
        """Return the directory that holds all others."""
        return self._base

    def mktemp(self, name: str) -> Path:
        """Make a directory."""
        made = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self._base))
        hand_over(made)
        return made


def _python() -> str:
    """Return a Python of this version that others may start."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for path in (os.path.realpath(sys.executable), f"/usr/bin/{version}"):
        started = subprocess.run(
            [*AS_USER, path, "-c", ""], capture_output=True, timeout=60, check=False, cwd="/"
        )
        if started.returncode == 0:
            return path
    return pytest.skip(f"NO CLUSTER TESTS: user {_USER.pw_name} can start no {version}")


def _link(source: str | Path, target: Path) -> None:
    """Copy a tree with hard links, or its bytes if links are impossible."""
    for flags in ("-alf", "-af"):
        done = subprocess.run(
            ["cp", flags, str(source), str(target)], capture_output=True, timeout=600, check=False
        )
        if done.returncode == 0:
            return
    raise AssertionError(done.stderr)
