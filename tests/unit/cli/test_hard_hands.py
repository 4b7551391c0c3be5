"""hpml in hard hands: Ctrl-C, closed and full outputs, edited scripts, torn records."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hpml_orchestrator.scheduler.local.backend import LocalScheduler

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.cli.conftest import Result, Shell

    Hpml = Callable[..., Result]


def submissions(shell: Shell) -> set[str]:
    """Ids on record."""
    folder = shell.records / "submissions"
    names = [path.name for path in folder.glob("*")] if folder.exists() else []
    return {name for name in names if not name.startswith(".")}


@pytest.mark.parametrize("command", ["submit", "run"])
def test_ctrl_c_during_a_submission_names_the_job_that_came_of_it(
    shell: Shell, hpml: Hpml, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """The interrupt waits for the scheduler's answer; the id is told; exit status 130."""
    real = LocalScheduler.submit

    def interrupted(self: LocalScheduler, request: Any) -> str:
        signal.raise_signal(signal.SIGINT)
        return real(self, request)

    monkeypatch.setattr(LocalScheduler, "submit", interrupted)
    told = hpml(command, "--local", shell.job())
    assert told.code == 130
    found = re.search(r"submitted (\S+) as job \d+; the job goes on", told.err)
    assert found, told.err
    assert found[1] in submissions(shell)


def test_ctrl_c_is_not_meant_for_what_a_script_started_with_an_ampersand(
    shell: Shell, hpml: Hpml, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a shell has SIGINT ignored: the command goes on, whatever is pressed for another one."""
    real = LocalScheduler.submit

    def interrupted(self: LocalScheduler, request: Any) -> str:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        return real(self, request)

    monkeypatch.setattr(LocalScheduler, "submit", interrupted)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        told = hpml("run", "--local", shell.job())
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert told.code == 0, told.err
    assert "Ctrl-C" not in told.err


def test_a_second_ctrl_c_says_how_to_find_out(
    shell: Shell, hpml: Hpml, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the answer is not waited for, the submission's id and `--resume` are told."""

    def hanging(_self: LocalScheduler, _request: Any) -> str:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError

    monkeypatch.setattr(LocalScheduler, "submit", hanging)
    told = hpml("submit", "--local", shell.job())
    assert told.code == 130
    found = re.search(r"hpml submit --resume (\S+?)`", told.err)
    assert found, told.err
    assert found[1] in submissions(shell)


@pytest.mark.parametrize("redirect", [">/dev/full", ">&-"])
def test_a_submission_whose_answer_cannot_be_written_has_not_failed(
    shell: Shell, redirect: str
) -> None:
    """A job exists: the exit status is 0, and standard error names it if it can."""
    before = submissions(shell)
    done = shell_line(shell, f'"$HPML" submit --local "$JOB" {redirect}')
    assert done.returncode == 0, done.stderr
    (made,) = submissions(shell) - before
    if redirect == ">/dev/full":
        assert f"submitted {made} as job" in done.stderr


@pytest.mark.parametrize(
    ("command", "redirect", "status"),
    [
        ("list", ">&-", 0),
        ("list --json", ">/dev/full", 74),
        ("schema", ">/dev/full", 74),
        ('render "$JOB"', ">/dev/full", 74),
        ('run --local "$JOB"', ">&-", 0),
    ],
)
def test_an_output_that_cannot_be_written_is_no_fault_of_hpml(
    shell: Shell, command: str, redirect: str, status: int
) -> None:
    """A closed output is nobody's; a full one is told in one line."""
    done = shell_line(shell, f'"$HPML" {command} {redirect}')
    assert done.returncode == status, done.stderr
    assert "internal error" not in done.stderr
    if status:
        assert "standard output cannot be written: No space left on device" in done.stderr


def shell_line(shell: Shell, line: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash in the shell's place; $HPML and $JOB stand for the command and a job."""
    return subprocess.run(
        ["bash", "-c", line],
        env={**shell.environment(), "HPML": str(program()), "JOB": shell.job()},
        cwd=shell.root,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )


def program() -> Path:
    from tests.unit.cli.conftest import HPML  # noqa: PLC0415

    return HPML


def test_a_script_edited_by_hand_is_not_overwritten(shell: Shell, hpml: Hpml) -> None:
    """`render -o` leaves a job.sh that differs alone, and says how to replace it."""
    job = shell.job()
    target = shell.root / "by hand"
    wrote = hpml("render", job, "-o", str(target))
    assert f"cd '{target}' && sbatch job.sh" in wrote.out
    assert hpml("render", job, "-o", str(target)).code == 0  # the same again
    script = target / "job.sh"
    script.write_text(script.read_text() + "# my edit\n")
    refused = hpml("render", job, "-o", str(target))
    assert refused.code == 2
    assert "--force" in refused.err
    assert script.read_text().endswith("# my edit\n")
    assert hpml("render", job, "-o", str(target), "--force").code == 0
    assert not script.read_text().endswith("# my edit\n")


def test_a_job_whose_record_cannot_be_read_does_not_count_as_over(shell: Shell) -> None:
    """Cancel and wait fail with the reason, exit 7; with the record mended the job is cancelled."""
    job = shell.job(command=["sleep", "600"])
    submitted = shell.hpml("submit", "--local", "--json", job).json()
    record = Path(submitted["submission"], "job.json")
    text = record.read_text()
    record.write_text(json.dumps({**json.loads(text), "schema_version": 99}))
    for command in ("cancel", "wait"):
        told = shell.hpml(command, submitted["id"])
        assert (told.code, "schema_version 99" in told.err) == (7, True), told
    record.write_text(text)
    assert shell.hpml("cancel", submitted["id"]).code == 0
    assert shell.hpml("wait", submitted["id"]).code == 6


def test_paths_that_are_not_there_are_told_before_the_job_waits(shell: Shell, hpml: Hpml) -> None:
    """A missing script or source is refused at submission, unless the user knows better."""
    job = shell.job(
        command=None,
        script="nope.py",
        stage=[{"name": "data", "source": "no/where", "target": "shm"}],
    )
    told = hpml("submit", "--local", job)
    assert (told.code, told.out) == (2, "")
    assert re.search(r"error: script: .*/nope\.py does not exist", told.err)
    assert re.search(r"stage\.0\.source: .*/no/where cannot be staged: No such file", told.err)
    assert "`--no-check` submits it as it is" in told.err
    assert hpml("submit", "--local", "--no-check", job).code == 0


def test_a_cause_that_hpml_knows_is_the_reason_of_the_end(shell: Shell) -> None:
    """A node that was not made ready is named in the state, not only `NonZeroExitCode`."""
    job = shell.job(stage=[{"name": "data", "source": "no/where", "target": "shm"}])
    told = shell.hpml("run", "--local", "--no-check", "--json", job)
    assert told.code == 6
    assert re.search(r"was not made ready: .*no/where", told.json()["reason"])
    assert "User defined signal" not in told.err


def test_what_is_cancelled_while_it_waits_has_no_exit_status(shell: Shell) -> None:
    """A job that never ran was cancelled before it started: no stale reason, no exit code 0."""
    first = shell.hpml(
        "submit",
        "--local",
        "--json",
        shell.job("first", command=["sleep", "600"], resources={"cpus_per_rank": cpus()}),
    ).json()
    second = shell.hpml(
        "submit", "--local", "--json", shell.job("second", resources={"cpus_per_rank": cpus()})
    ).json()
    deadline = time.monotonic() + 120
    while shell.hpml("status", "--json", first["id"]).json()[0]["state"] != "RUNNING":
        assert time.monotonic() < deadline
    assert shell.hpml("cancel", second["id"]).code == 0
    told = shell.hpml("wait", "--json", second["id"])
    state = told.json()
    assert (state["state"], state["exit_code"]) == ("CANCELLED", None)
    assert state["reason"] == "cancelled before it started"
    assert shell.hpml("cancel", first["id"]).code == 0


def cpus() -> int:
    """All CPUs that the local backend gives away."""
    from hpml_orchestrator.scheduler.local.resources import cpu_ids  # noqa: PLC0415

    return len(cpu_ids())
