"""A real Slurm of two virtual nodes, booted once per session for the tests of this folder."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.records.files import write_text
from hpml_orchestrator.records.process import read_stat
from tests.cluster.hpml_on_slurm import Desk
from tests.cluster.user import Directories, install

DEVCLUSTER = Path(__file__).parents[2] / "deploy" / "devcluster" / "devcluster"
# The programs a cluster needs, as they are found with the system folders on the path.
_PROGRAMS = ("slurmctld", "slurmd", "slurmdbd", "srun", "sacct", "munged", "mariadbd", "nsenter")
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_COMMAND_SECONDS = 240


def clean_environment() -> dict[str, str]:
    """The environment without what points to another cluster or gives sbatch other defaults."""
    prefixes = ("SLURM_", "SBATCH_", "SALLOC_", "SQUEUE_", "SACCT_", "SINFO_")
    return {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}


def devcluster(*arguments: str | Path, seconds: float = 300) -> subprocess.CompletedProcess[str]:
    """Runs the devcluster program."""
    return subprocess.run(
        [sys.executable, str(DEVCLUSTER), *map(str, arguments)],
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


@dataclass(frozen=True)
class SlurmCluster:
    """A cluster that is up: its directory, and functions to use and inspect it."""

    box: Path
    slurm_conf: Path
    nodes: tuple[str, ...]
    visible: tuple[Path, ...]  # folders below /tmp and /dev/shm that the nodes share
    pids: dict[str, int]  # of the daemons by name; a node's is its slurmd's

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs in order to reach this cluster and no other."""
        return clean_environment() | {"SLURM_CONF": str(self.slurm_conf)}

    def run(self, *command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
        """Runs a command on the login node; raises for a failure unless check=False is given.

        `env` adds to the environment; the other options are those of subprocess.run.
        """
        environment = self.environment | options.pop("env", {})
        if "input" not in options:
            options["stdin"] = subprocess.DEVNULL
        standard = {"capture_output": True, "text": True, "timeout": _COMMAND_SECONDS}
        done: subprocess.CompletedProcess[str] = subprocess.run(
            [*map(str, command)],
            env=environment,
            check=options.pop("check", True),
            **(standard | options),
        )
        return done

    @contextlib.contextmanager
    def configured(self, line: str) -> Iterator[None]:
        """Have the controller read one more line of slurm.conf, for a while."""
        before = self.slurm_conf.read_text()
        self.reconfigure(f"{before}{line}\n")
        try:
            yield
        finally:
            self.reconfigure(before)

    def reconfigure(self, text: str) -> None:
        """Have the daemons read another slurm.conf.

        It is replaced whole: a slurmd that still answers the last call ends when it finds it empty.
        """
        write_text(self.slurm_conf, text)
        self.run("scontrol", "reconfigure")

    def exec(self, node: str, *command: str | Path) -> subprocess.CompletedProcess[str]:
        """Runs a command on a node, outside of any job; the caller looks at its status."""
        return devcluster("exec", "--box", self.box, node, "--", *command)

    def restart(self, daemon: str, *, kill: bool = False) -> None:
        """End slurmctld or a node's slurmd, by SIGKILL if wanted, and start it again."""
        options = ["--kill"] if kill else []
        done = devcluster("restart", "--json", "--box", self.box, *options, daemon)
        assert done.returncode == 0, done.stderr
        self.pids[daemon] = json.loads(done.stdout)["pid"]

    def leftovers(self, node: str) -> list[str]:
        """Lists the contents of a node's private /tmp and /dev/shm, without shared folders."""
        found = self.exec(node, "find", "/tmp", "/dev/shm", "-xdev", "-mindepth", "1", "-print0")
        assert found.returncode == 0, found.stderr
        # Mount points of shared folders, and the folders they lie in, are the cluster's own.
        own = {str(part) for path in self.visible for part in (path, *path.parents)}
        return sorted(path for path in found.stdout.split("\0") if path and path not in own)

    def jobs(self) -> list[dict[str, Any]]:
        """Lists the jobs in slurmctld (squeue --json), ended ones too; newest last."""
        output = self.run("squeue", "--json", "--states=all").stdout
        jobs: list[dict[str, Any]] = json.loads(output)["jobs"]
        return sorted(jobs, key=lambda job: int(job["job_id"]))


def require_cluster() -> None:
    """Skips, or fails on CI, if no cluster can be booted; the reason names what is missing."""
    missing = [name for name in _PROGRAMS if shutil.which(name, path=_SYSTEM_PATH) is None]
    if missing:
        hint = "deploy/devcluster/devcluster install"
        pytest.skip(f"NO CLUSTER TESTS: not installed: {', '.join(missing)} ({hint})")
    if os.geteuid() != 0:
        pytest.skip("NO CLUSTER TESTS: not root, which virtual nodes need")


@contextlib.contextmanager
def booted(*options: str | Path, shares: Iterable[Path] = ()) -> Iterator[SlurmCluster]:
    """Boots a cluster and takes it down again.

    On its nodes are the user's directory with all of pytest's tmp_path, this checkout, and what
    is shared. Its box is not in pytest's folder: that is closed to other users, MariaDB's too.
    """
    require_cluster()
    box = Path(tempfile.mkdtemp(prefix="hpml-devcluster-test-", dir="/tmp"))
    shared = (*shares, DEVCLUSTER.parents[2], install())  # a checkout may itself lie below /tmp
    try:
        started = devcluster(
            *("up", "--json", "--box", box, *options),
            *(word for path in shared for word in ("--share", path)),
        )
        if started.returncode != 0:
            pytest.fail(f"the cluster does not boot:\n{started.stderr}", pytrace=False)
        facts = json.loads(started.stdout)
        yield SlurmCluster(
            box=box,
            slurm_conf=Path(facts["slurm_conf"]),
            nodes=tuple(facts["nodes"]),
            visible=tuple(Path(path) for path in facts["visible"]),
            pids=facts["pids"],
        )
    finally:
        ended = devcluster("down", "--purge", "--box", box)
        shutil.rmtree(box, ignore_errors=True)
        assert ended.returncode == 0, ended.stderr


@pytest.fixture(scope="session")
def tmp_path_factory() -> Directories:
    """Makes directories of the user, in place of pytest's, which are closed to others."""
    return Directories(install() / "tests")


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: Directories) -> Path:
    """A directory of the user."""
    return tmp_path_factory.mktemp(re.sub(r"\W", "_", request.node.name)[:30])


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[SlurmCluster]:
    """Boots 2 nodes of 4 CPUs and 2 GPUs with accounting.

    The tests' own environment stays as it is: SLURM_CONF is set by `run` alone, so a test of
    code that starts sbatch itself sets it with monkeypatch (`environment` has it).
    """
    with booted("--nodes", "2", "--cpus", "4", "--gpus", "2") as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def daemons_live(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail at once with a dead daemon's last log lines, before each test waits for it in vain."""

    def check() -> None:
        for name, pid in cluster.pids.items():
            stat = read_stat(pid)
            if stat is None or stat.ended:
                log = (cluster.box / "log" / f"{name}.log").read_text(errors="replace")
                pytest.fail(f"{name} ended:\n{log[-2000:]}", pytrace=False)

    if "slurm_cluster" not in request.fixturenames:
        yield
        return
    cluster: SlurmCluster = request.getfixturevalue("slurm_cluster")
    check()
    yield
    check()


@pytest.fixture
def bare_cluster() -> Iterator[SlurmCluster]:
    """Boots one node without accounting."""
    with booted("--nodes", "1", "--no-accounting") as cluster:
        yield cluster


@pytest.fixture
def desk(slurm_cluster: SlurmCluster, tmp_path: Path) -> Desk:
    """An ordinary user's empty desk in front of the session's cluster."""
    return Desk(slurm_cluster, tmp_path)


@pytest.fixture
def bare(bare_cluster: SlurmCluster, tmp_path: Path) -> Desk:
    """A desk in front of a separate one-node cluster without accounting."""
    return Desk(bare_cluster, tmp_path)
