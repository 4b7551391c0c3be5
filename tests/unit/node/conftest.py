"""What the tests of the node's parts share: a job's place, and its commands as processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hpml_orchestrator
from hpml_orchestrator.records.files import write_text
from hpml_orchestrator.records.job import AGENT_FILE, Job, NodeJob, SiteLimits, Stage
from hpml_orchestrator.records.store import Store
from tests.patience import PATIENCE_SECONDS, eventually

ROOT = str(Path(hpml_orchestrator.__file__).parents[1])
CODE = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); "
    "from hpml_orchestrator.node.main import main; sys.exit(main(sys.argv[1:]))"
)
SID = "probe-20240101-000000-abcdef"


UNLIMITED = SiteLimits()


def stage(name: str, source: Path, target: Path, **more: Any) -> Stage:
    """An entry of `stage`."""
    return Stage(name, str(source), target=str(target), **more)


def describe(submission: Path, site: SiteLimits = UNLIMITED, **fields: Any) -> None:
    """Write the `agent.json` of a submission: the job with these fields."""
    write_text(submission / AGENT_FILE, NodeJob(Job("probe", **fields), site).text())


class Node:
    """One node of a job, whose commands run as real processes."""

    def __init__(self, root: Path) -> None:
        self.store = Store(root / "records")
        self.submission = self.store.prepare(
            SID, script="", shared={}, submit={"name": "probe"}, runs={0: {"name": "probe"}}
        )
        self.run_directory = self.store.runs_dir / SID
        self.attempt = self.run_directory / "attempts" / "0"
        self.describe()

    @property
    def places(self) -> tuple[str, str]:
        """The directories that most commands are given: of the attempt and of the submission."""
        return str(self.attempt), str(self.submission.directory)

    def describe(self, site: SiteLimits = UNLIMITED, **fields: Any) -> None:
        """Write `agent.json`: the job with these fields."""
        describe(self.submission.directory, site, **fields)

    def environment(self, job_id: str, **more: str) -> dict[str, str]:
        """The variables of a job on node n1."""
        kept = {n: v for n, v in os.environ.items() if not n.startswith(("SLURM", "HPML_"))}
        slurm = {
            "SLURM_JOB_ID": job_id,
            "SLURM_NNODES": "1",
            "SLURM_JOB_NODELIST": "n1",
            "SLURMD_NODENAME": "n1",
            "SLURM_CLUSTER_NAME": "test",
        }
        return {**kept, **slurm, **more}

    def start(self, *words: str, job_id: str = "1", **more: str) -> subprocess.Popen[str]:
        """Start a command of the node archive."""
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", CODE, ROOT, *words],
            env=self.environment(job_id, **more),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def call(self, *words: str, job_id: str = "1", **more: str) -> tuple[int, str, str]:
        """Run a command and return its status, output and errors."""
        with self.start(*words, job_id=job_id, **more) as process:
            out, err = process.communicate(timeout=PATIENCE_SECONDS)
        return process.returncode, out, err

    def claim(self, job_id: str, **more: str) -> tuple[int, str, str]:
        """Claim the run for a job."""
        return self.call("claim", str(self.submission.directory), job_id=job_id, **more)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """A node, and a submission of one run that nobody has claimed."""
    return Node(tmp_path)


@pytest.fixture
def until() -> Callable[[Callable[[], object]], object]:
    """Wait for something to become true."""
    return eventually
