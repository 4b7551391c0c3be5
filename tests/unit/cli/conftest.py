"""What the tests of the command line share: the command in this process, and as a real one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.cli import main as module
from tests.unit.cli.stage_node import Node

HPML = Path(sys.executable).parent / "hpml"


def as_anybody() -> list[str]:
    """What to put before a command so that file permissions count for it, even for root."""
    if os.geteuid() != 0:
        return []
    return ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]


@dataclass
class Result:
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """Standard output as one JSON document."""
        return json.loads(self.out)


@dataclass
class Shell:
    """A user's shell: a directory, records, variables."""

    root: Path
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def records(self) -> Path:
        """Where records live."""
        return self.root / "records"

    def environment(self) -> dict[str, str]:
        """The variables of the shell; nothing of the test machine's Slurm."""
        dropped = ("SLURM", "HPML", "SBATCH", "COV_", "PYTEST")
        kept = {n: v for n, v in os.environ.items() if not n.startswith(dropped)}
        return {
            **kept,
            "HPML_HOME": str(self.records),
            "XDG_CONFIG_HOME": str(self.root / "config"),  # not the developer's own profile
            "HPML_LOCAL_KILL_WAIT": "3",
            "COLUMNS": "100",
            **self.variables,
        }

    def job(self, name: str = "probe", **fields: Any) -> str:
        """Write a job file (JSON is YAML) and return its path."""
        data = {"name": name, "launcher": "srun", "command": ["bash", "-c", "echo hi"], **fields}
        path = self.root / f"{name}.yaml"
        path.write_text(json.dumps(data))
        return str(path)

    def start(self, *words: str, **more: Any) -> subprocess.Popen[str]:
        """Start hpml as a process of its own."""
        return subprocess.Popen(
            [HPML, *words],
            env=self.environment(),
            cwd=self.root,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **more,
        )

    def hpml(self, *words: str) -> Result:
        """Run hpml as a process of its own."""
        with self.start(*words) as process:
            out, err = process.communicate(timeout=120)
        return Result(process.returncode, out, err)


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
def node(hpml: Callable[..., Result], shell: Shell, tmp_path: Path) -> Iterator[Node]:
    """Two places to stage to, of this test alone."""
    made = Node(tmp_path, hpml, shell)
    made.make()
    yield made
    made.clean()
