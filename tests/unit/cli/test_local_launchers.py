"""Open MPI's own mpirun starts the ranks of jobs on this machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.patience import eventually
from tests.unit.cli.support import Shell

pytestmark = pytest.mark.xdist_group("local runs")


@pytest.fixture(autouse=True)
def open_mpi(shell: Shell) -> None:
    """Skip without Open MPI, which starts nothing for root unless root's environment allows it."""
    if "Open MPI" not in shell.bash("mpirun --version").out:
        pytest.skip("not installed: mpirun of Open MPI (Debian: openmpi-bin)")
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
    """As many ranks as requested, each with the job's environment; a failed one ends the job."""
    code = (
        'echo "$OMPI_COMM_WORLD_RANK of $OMPI_COMM_WORLD_SIZE: $WORD, $PYTHONUNBUFFERED"\n'
        "[[ $OMPI_COMM_WORLD_RANK != 0 ]] || { sleep .1; touch said; sleep 300; }\n"
        "until [[ -e said ]]; do sleep .05; done; exit 7"
    )
    ended = shell.hpml("run", "--local", job(shell, "ranks", code))
    lines = sorted(re.findall(r"^\d of .*$", ended.out, re.MULTILINE))
    assert lines == ["0 of 2: two words, 1", "1 of 2: two words, 1"]
    assert (ended.code, "ended FAILED, exit code 7" in ended.err) == (6, True)


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
