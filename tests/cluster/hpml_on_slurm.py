"""What the tests of hpml on a real Slurm share: calling it, and reading what it did."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests import patience
from tests.cluster.user import AS_ROOT, HPML, PYTHON, UID, VENV, hand_over

__all__ = ["AS_ROOT", "HPML", "PYTHON", "ROOT", "UID", "Desk", "eventually"]

if TYPE_CHECKING:
    from tests.cluster.conftest import SlurmCluster

ROOT = Path(__file__).parents[2]
_SECONDS = 240


@dataclass
class Desk:
    """An ordinary user's desk: a directory, records of its own, and a cluster to send jobs to."""

    cluster: SlurmCluster
    directory: Path
    more: dict[str, str] = field(default_factory=dict)
    words: list[str] = field(default_factory=lambda: HPML)  # how hpml is called, and as whom

    def __post_init__(self) -> None:
        """Let the user work there."""
        self.hand_over()

    def hand_over(self) -> None:
        """Give what lies there to the user, files that a test has made too."""
        if self.words is HPML:
            hand_over(self.directory)

    @property
    def records(self) -> Path:
        return self.directory / "records"

    @property
    def environment(self) -> dict[str, str]:
        return {
            **self.cluster.environment,
            "HPML_HOME": str(self.records),
            "HOME": str(self.directory),
            "XDG_CONFIG_HOME": str(self.directory / "config"),  # not the developer's own profile
            "PATH": f"{VENV}/bin:{os.environ['PATH']}",
            **self.more,
        }

    def hpml(
        self, *arguments: str | Path, code: int | None = 0, seconds: float = _SECONDS
    ) -> subprocess.CompletedProcess[str]:
        """Call hpml; `code` is the exit status that is wanted, None for any."""
        self.hand_over()
        done = subprocess.run(
            [*self.words, *map(str, arguments)],
            env=self.environment,
            cwd=self.directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        assert code is None or done.returncode == code, f"{done.stdout}\n{done.stderr}"
        # hpml's own: the output of the job stands there too, and torchrun may log one and go on.
        assert not re.search(r"Traceback[^\0]*hpml_orchestrator", done.stderr), done.stderr
        return done

    def json(self, *arguments: str | Path, code: int | None = 0) -> Any:
        """Call hpml with --json and return what it printed."""
        return json.loads(self.hpml(*arguments, "--json", code=code).stdout)

    def job(self, name: str, **fields: Any) -> Path:
        """Write a job file; JSON is YAML."""
        path = self.directory / f"{name}.yaml"
        path.write_text(json.dumps({"name": name, "launcher": "srun", **fields}))
        return path

    def slurm(self, *command: str) -> str:
        """Call one of Slurm's commands and return its output."""
        return self.cluster.run(*command).stdout

    def staged(self) -> list[str]:
        """What of hpml's staging lies on the nodes."""
        return [
            f"{node}:{path}"
            for node in self.cluster.nodes
            for path in self.cluster.leftovers(node)
            if f"/hpml-{UID}" in path
        ]

    def jobs_of(self, submission: Path) -> list[str]:
        """Ids of the controller's jobs whose working directory is the submission's."""
        listed = self.slurm("squeue", "--noheader", "--states=all", "--format=%A %Z")
        return [
            line.split(" ", 1)[0]
            for line in listed.splitlines()
            if line.split(" ", 1)[1] == str(submission)
        ]


def eventually(check: Callable[[], Any], seconds: float = 120, what: str = "") -> Any:
    """Return the first true answer; a look asks Slurm, so that there are few."""
    return patience.eventually(check, what, seconds, pause=0.2)
