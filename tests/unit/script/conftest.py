"""A place in which rendered scripts run for real."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hpml_orchestrator.runs.load import ResolvedJob, load_job
from hpml_orchestrator.scheduler import local
from hpml_orchestrator.script import archive
from hpml_orchestrator.script.render import Capabilities, render, render_agent
from tests.unit.script.support import CANARY

if TYPE_CHECKING:
    from hpml_orchestrator.records.job import Job

RECORDER = """\
import json, os, sys
with open(os.environ["RECORD_TO"], "w") as stream:
    json.dump({"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd()}, stream)
"""
SRUN = Path(local.__file__).with_name("srun.py")


class Sandbox:
    """A directory in which rendered scripts run for real."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.submission = root / "submission"
        self.submission.mkdir()
        for name, content in archive.node_files().items():
            (self.submission / name).write_bytes(content)
        self.bin = root / "bin"
        self.bin.mkdir()
        srun = self.bin / "srun"
        srun.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "{SRUN}" "$@"\n')
        srun.chmod(0o755)
        (root / "recorder.py").write_text(RECORDER)
        self.count = 0

    def load(self, data: dict[str, Any]) -> ResolvedJob:
        """Load a job through its file; JSON is YAML."""
        path = self.root / "job.yaml"
        path.write_text(json.dumps(data))
        return load_job(path)

    def set(self, data: dict[str, Any]) -> ResolvedJob:
        """Load a job whose fields come from the command line, which spares the YAML parser."""
        path = self.root / "job.yaml"
        path.write_text("{}\n")
        return load_job(path, list(data.items()))

    def run(self, job: Job) -> dict[str, Any]:
        """Run the script of a job as a scheduler would and return what its program saw."""
        done = self.start(job)
        assert done.returncode == 0, done.stderr.decode(errors="replace")
        seen: dict[str, Any] = json.loads((self.root / "record.json").read_text())
        return seen

    def start(
        self, job: Job, *, without: str = "", agent: str = ""
    ) -> subprocess.CompletedProcess[bytes]:
        """Run the script of a job as a scheduler would, however it ends.

        Args:
            job: the job.
            without: a file that is missing.
            agent: other content for `agent.json`.
        """
        self.count += 1
        text = self.submission / "job.sh"
        text.write_text(render(job, Capabilities()), encoding="utf-8")
        content = agent or render_agent(job)
        (self.submission / "agent.json").write_text(content, encoding="utf-8")
        if without:
            (self.submission / without).unlink()
        record = self.root / "record.json"
        record.unlink(missing_ok=True)
        done = subprocess.run(
            ["bash", str(text)],
            cwd=self.submission,
            env={
                "PATH": f"{self.bin}:/usr/bin:/bin",
                "HOME": str(self.root),
                "SLURM_JOB_ID": str(self.count),
                "SLURM_NNODES": "1",
                "SLURM_JOB_NODELIST": "node1",
                "SLURMD_NODENAME": "node1",
                "SLURM_CLUSTER_NAME": "sandbox",
                "RECORD_TO": str(record),
                "LC_ALL": "C.UTF-8",
            },
            capture_output=True,
            timeout=120,
            check=False,
        )
        assert not [*self.root.rglob(CANARY)], "a value became shell code"
        return done


@pytest.fixture
def make_sandbox(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Sandbox]:
    """Make a fresh sandbox each time."""
    return lambda: Sandbox(tmp_path_factory.mktemp("sandbox"))


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    """A fresh sandbox."""
    return Sandbox(tmp_path)
