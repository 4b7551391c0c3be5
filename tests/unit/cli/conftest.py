"""Fixtures of the tests of the command line: hpml in this process, with its own environment."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.cli import main as module
from hpml_orchestrator.scheduler.slurm import client
from hpml_orchestrator.testing.clock import FakeClock
from hpml_orchestrator.testing.scheduler import FakeScheduler
from tests.unit.cli.support import Node, Result, Shell


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    """A shell for all tests of a module."""
    return Shell(tmp_path_factory.mktemp("shell"))


@pytest.fixture
def hpml(shell: Shell, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """Run hpml's `main` in this process, in the shell's place: spares the start of Python."""

    def run(*words: str) -> Result:
        for name in set(os.environ) - set(shell.environment()):
            monkeypatch.delenv(name)
        for name, value in shell.environment().items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(shell.root)
        monkeypatch.setattr(sys, "argv", ["hpml", *words])
        capfd.readouterr()
        code = 0
        try:
            module.main()
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        sys.stdout.flush()
        sys.stderr.flush()
        captured = capfd.readouterr()
        return Result(code, captured.out, captured.err)

    return run


@pytest.fixture
def node(hpml: Any, shell: Shell, tmp_path: Path) -> Iterator[Node]:
    """Two places to stage to, of this test alone."""
    made = Node(tmp_path, hpml, shell)
    yield made
    made.stage("clean", "--all", str(made.ram), str(made.disk))


@pytest.fixture
def slurm(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> FakeScheduler:
    """A FAKE Slurm in memory, for commands in this process; its sbatch on PATH is never called."""
    (shell.root / "bin").mkdir(exist_ok=True)
    sbatch = shell.root / "bin" / "sbatch"
    sbatch.write_text("#!/bin/sh\necho 'a fake sbatch' >&2\nexit 70\n")
    sbatch.chmod(0o755)
    path = f"{shell.root / 'bin'}:{os.environ['PATH']}"
    monkeypatch.setitem(shell.variables, "PATH", path)
    fake = FakeScheduler(FakeClock(time.time()))
    monkeypatch.setattr(client, "SlurmScheduler", lambda: fake)
    return fake


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts small file systems, which mount(8)'s `size=` describes."""
    mounted: list[Path] = []

    def mount(size: str) -> Path:
        place = tmp_path / f"tmpfs-{size}"
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(place)]
        if os.getuid() != 0 or subprocess.run(command, check=False).returncode:
            pytest.skip("NOT TESTED: mounting needs root")
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", "-l", place], check=True)
