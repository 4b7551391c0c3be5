"""What the tests of hpml on a real Slurm share: calling it, and reading what it did."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpml_orchestrator import assets
from tests import patience
from tests.cluster.user import AS_USER, HPML, PYTHON, UID, VENV, hand_over

if TYPE_CHECKING:
    from tests.cluster.conftest import SlurmCluster

__all__ = [
    "HPML",
    "MPIRUN_AS_ROOT",
    "PYTHON",
    "ROOT",
    "UID",
    "Desk",
    "eventually",
    "install_prolog",
]

ROOT = Path(__file__).parents[2]
# Open MPI needs permission to run as root, and the tests do.
MPIRUN_AS_ROOT = (
    {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if os.geteuid() == 0
    else {}
)
_SECONDS = 240
_WRAPPER = """\
#!/bin/sh
HPML_RUN={where}/run
export HPML_RUN
exec {script}
"""


@dataclass
class Desk:
    """An ordinary user's desk: a directory, separate records, and a cluster for the jobs."""

    cluster: SlurmCluster
    directory: Path
    more: dict[str, str] = field(default_factory=dict)  # variables
    as_root: bool = False
    seconds: float = _SECONDS  # most for one command

    def __post_init__(self) -> None:
        """Let the user work there."""
        self.hand_over()

    def hand_over(self) -> None:
        """Make the user the owner of everything there, including files of the test."""
        if not self.as_root:
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

    def call(
        self, *command: str | Path, code: int | None = 0, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Call a command as the user; `code` is the exit status that is wanted, None for any."""
        self.hand_over()
        done = subprocess.run(
            [*([] if self.as_root else AS_USER), *map(str, command)],
            env=self.environment,
            cwd=cwd or self.directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=self.seconds,
            check=False,
        )
        assert code is None or done.returncode == code, f"{done.stdout}\n{done.stderr}"
        return done

    def hpml(
        self, *arguments: str | Path, code: int | None = 0
    ) -> subprocess.CompletedProcess[str]:
        """Call hpml as `call` does any command."""
        python = sys.executable if self.as_root else PYTHON
        done = self.call(python, "-m", "hpml_orchestrator.cli", *arguments, code=code)
        # Only hpml's: the job's output is in it too, and torchrun may log one and continue.
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

    def submit(self, name: str, **fields: Any) -> Any:
        """Submit a job; returns its state."""
        return self.json("submit", self.job(name, **fields))

    def run(self, name: str, *, code: int = 0, **fields: Any) -> Any:
        """Run a job to its end; returns its record."""
        return self.json("run", self.job(name, **fields), code=code)

    def slurm(self, *command: str) -> str:
        """Call one of Slurm's commands as root and return its output."""
        return self.cluster.run(*command).stdout

    def staged(self, job_id: str = "") -> list[str]:
        """Files that hpml's staging left on the nodes, of one job or of all."""
        own = re.compile(rf"/hpml-{UID}.*-{job_id}(/|$)" if job_id else f"/hpml-{UID}")
        return [
            f"{node}:{path}"
            for node in self.cluster.nodes
            for path in self.cluster.leftovers(node)
            if own.search(path)
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


def install_prolog(where: Path) -> str:
    """Write a prolog and an epilog that keep their map in `where`/run; returns slurm.conf lines."""
    for name in ("prolog", "epilog"):
        script = assets.path(f"templates/prolog/hpml-{name}.sh")
        (where / name).write_text(_WRAPPER.format(where=where, script=script))
        (where / name).chmod(0o755)
    return f"Prolog={where}/prolog\nEpilog={where}/epilog\n"
