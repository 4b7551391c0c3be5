"""`hpml attach` to a job of the local backend."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.cli.support import HPML, Hpml, Shell, in_terminal

pytestmark = pytest.mark.xdist_group("local runs")

WAIT = 'touch "$HPML_RUN_DIR/up"; while [[ ! -e "$HPML_RUN_DIR/end" ]]; do sleep 0.1; done'


@pytest.fixture(scope="module")
def running(shell: Shell) -> Iterator[str]:
    """The id of a run whose rank waits; it has one CPU."""
    (shell.root / "work").mkdir()
    job = shell.job("waits", command=["bash", "-c", WAIT], workdir=str(shell.root / "work"))
    submitted = shell.hpml("submit", "--local", "--json", job).json()
    directory = submitted["directory"]
    deadline = time.monotonic() + 60
    while not os.path.exists(f"{directory}/up") and time.monotonic() < deadline:
        time.sleep(0.05)
    yield submitted["id"]
    open(f"{directory}/end", "w").close()
    shell.hpml("wait", submitted["id"])


def test_a_program_runs_in_the_job(shell: Shell, running: str) -> None:
    """It has the job's directory, variables and CPUs, reads this input, and its status counts."""
    script = 'echo "$PWD $SLURM_JOB_ID $HPML_RUN_DIR $(nproc)"; cat; exit 7'
    words = ("attach", running, "--", "bash", "-c", script)
    with shell.start(*words, stdin=subprocess.PIPE) as process:
        out, err = process.communicate("hello\n", timeout=60)
    assert process.returncode == 7, err
    where, job_id, run, cpus = out.splitlines()[0].split()
    assert (where, run) == (str(shell.root / "work"), str(shell.records / "runs" / running))
    assert job_id.isdigit()
    assert cpus == "1"
    assert out.splitlines()[1:] == ["hello"]


def test_a_shell_on_a_terminal(shell: Shell, running: str) -> None:
    """A program that asks finds the terminal."""
    words: list[str | Path] = [
        HPML,
        "attach",
        running,
        "--",
        "bash",
        "-c",
        "test -t 0 && echo on a terminal",
    ]
    assert "on a terminal" in in_terminal(words, shell.environment())


@pytest.mark.parametrize(
    ("words", "code", "parts"),
    [
        (("--node", "elsewhere"), 2, ("--node: is not a node of this job (got 'elsewhere')",)),
        (("--node", ""), 2, ("--node: must not be empty",)),
        (("--", "no-such-program"), 3, ("no such program: no-such-program",)),
        (("nvidia-smi",), 2, ("hpml attach RUN -- ARGUMENT",)),
    ],
)
def test_refusals(
    hpml: Hpml, running: str, words: tuple[str, ...], code: int, parts: tuple[str, ...]
) -> None:
    """Each names what is wrong."""
    assert hpml("attach", running, *words).refuses(code, *parts)
