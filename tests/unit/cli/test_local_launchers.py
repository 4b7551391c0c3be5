"""Open MPI's own mpirun starts the ranks of jobs on this machine."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.patience import eventually
from tests.unit.cli.support import Shell


def _open_mpi() -> bool:
    try:
        told = subprocess.run(
            ["mpirun", "--version"], capture_output=True, text=True, check=False, timeout=120
        )
    except OSError:
        return False
    return "Open MPI" in told.stdout


pytestmark = pytest.mark.xdist_group("local runs")


@pytest.fixture(scope="module", autouse=True)
def mpirun() -> None:
    """Without it there is nothing to test here."""
    if not _open_mpi():
        pytest.skip("not installed: mpirun of Open MPI (Debian: openmpi-bin)")


@pytest.fixture(autouse=True)
def root(shell: Shell) -> None:
    """Open MPI starts nothing for root, unless root's own shell says so."""
    shell.variables["OMPI_ALLOW_RUN_AS_ROOT"] = "1"
    shell.variables["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"


def job(shell: Shell, name: str, code: str) -> str:
    return shell.job(
        name,
        launcher="mpirun",
        command=["bash", "-c", code],
        resources={"ranks_per_node": 2},
        environment={"variables": {"WORD": "two words"}},
    )


def test_mpirun_starts_the_ranks(shell: Shell) -> None:
    """As many as asked for, each with the job's environment and its number."""
    code = 'echo "$OMPI_COMM_WORLD_RANK of $OMPI_COMM_WORLD_SIZE: $WORD, $PYTHONUNBUFFERED"'
    told = shell.hpml("run", "--local", job(shell, "ranks", code))
    assert told.code == 0, told.err
    found = sorted(re.findall(r"^\d of .*$", told.out, re.MULTILINE))
    assert found == ["0 of 2: two words, 1", "1 of 2: two words, 1"]


def test_a_rank_that_fails_ends_the_job(shell: Shell) -> None:
    """With its own status; the other rank does not go on."""
    code = "[[ $OMPI_COMM_WORLD_RANK == 0 ]] || exit 7; sleep 300"
    told = shell.hpml("run", "--local", job(shell, "fails", code))
    assert told.code == 6
    assert "ended FAILED, exit code 7" in told.err


def test_cancel_ends_all_ranks(shell: Shell, tmp_path: Path) -> None:
    """No rank is left behind."""
    file = f"{tmp_path}/$OMPI_COMM_WORLD_RANK"
    code = f"echo $$ >{file}.part; mv {file}.part {file}; exec sleep 300"
    sid = shell.hpml("submit", "--local", "--json", job(shell, "long", code)).json()["id"]
    eventually(lambda: all((tmp_path / rank).exists() for rank in "01"))
    processes = [Path("/proc", (tmp_path / rank).read_text().strip()) for rank in "01"]
    assert all(process.exists() for process in processes)
    assert shell.hpml("cancel", sid).code == 0
    shell.hpml("wait", sid)
    eventually(lambda: not any(process.exists() for process in processes))
