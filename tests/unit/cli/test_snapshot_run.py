"""A job with a snapshot runs the code of the moment it was submitted, on this machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hpml_orchestrator.scheduler.local.resources import cpu_ids
from tests.unit.cli.support import Shell

pytestmark = pytest.mark.xdist_group("local runs")


def repository(top: Path) -> Path:
    """A repository with a package in src and a script in bin that uses it."""
    (top / "src" / "own").mkdir(parents=True)
    (top / "src" / "own" / "__init__.py").write_text("WORD = 'old'\n")
    (top / "bin").mkdir()
    (top / "bin" / "train.py").write_text("import own, os\nprint(own.WORD, os.getcwd())\n")
    git(top, "init", "--quiet")
    git(top, "add", "--all")
    git(top, "commit", "--quiet", "--message", "x")
    return top


def git(top: Path, *words: str) -> None:
    identity = ("-c", "user.name=Ada", "-c", "user.email=ada@example.org")
    subprocess.run(["git", *identity, "-C", top, *words], check=True, timeout=120)


def test_the_old_code_runs(shell: Shell) -> None:
    """The tree is edited, and then is gone, while the job waits for its CPUs."""
    top = repository(shell.root / "code")
    (top / "src" / "own" / "__init__.py").write_text("WORD = 'tried out'\n")
    go = shell.root / "go"
    waiting = f"until [[ -e '{go}' ]]; do sleep 0.1; done"
    first = shell.job(
        "first", command=["bash", "-c", waiting], resources={"cpus_per_rank": len(cpu_ids())}
    )
    second = shell.job(
        "second",
        command=None,
        script="bin/train.py",
        workdir=str(top),
        snapshot=True,
        environment={"python": sys.executable, "variables": {"PYTHONPATH": "src"}},
    )
    assert shell.hpml("submit", "--local", first).code == 0
    told = shell.hpml("submit", "--local", "--json", second).json()
    (top / "src" / "own" / "__init__.py").write_text("WORD = 'edited'\n")
    git(top, "checkout", "--quiet", "--orphan", "other")
    top.rename(shell.root / "moved")
    assert shell.hpml("status", "--json", told["id"]).json()[0]["state"] == "PENDING"
    go.touch()
    assert shell.hpml("wait", told["id"]).code == 0
    code = Path(told["submission"], "code")
    assert f"tried out {code}\n" in shell.hpml("logs", told["id"]).out
    assert " + changes (snapshot)\n" in shell.hpml("show", told["id"]).out


def test_a_rendered_directory_is_all_it_needs(shell: Shell) -> None:
    """`render` prints what -o writes, and the script beside its code is what is submitted."""
    top = repository(shell.root / "other")
    path = shell.job(
        "by-hand", command=None, script="bin/train.py", workdir=str(top), snapshot=True
    )
    printed = shell.hpml("render", path).out
    assert shell.hpml("render", path, "-o", "out").code == 0
    assert (shell.root / "out" / "job.sh").read_text() == printed
    assert (shell.root / "out" / "code" / "bin" / "train.py").exists()
    told = shell.hpml("submit", "--local", "--json", path).json()
    assert Path(told["submission"], "job.sh").read_text() == printed
    assert shell.hpml("cancel", told["id"]).code == 0
