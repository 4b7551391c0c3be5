"""Job arrays from the command line: what each command prints of an array and of its tasks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.unit.cli.conftest import Result, Shell

pytestmark = pytest.mark.xdist_group("local runs")

Hpml = Callable[..., "Result"]


@pytest.fixture(scope="module")
def ran(shell: Shell) -> tuple[Result, str]:
    """What `hpml run --local` of an array prints, of which task 2 fails, and its id."""
    command = ["bash", "-c", "echo task $0; exit $(($0 / 2))", "{array.index}"]
    told = shell.hpml("run", "--local", shell.job("many", array="0-2%1", command=command))
    return told, re.findall(r"submitted (\S+)", told.err)[0]


def test_a_run_tells_the_counts(ran: tuple[Result, str]) -> None:
    """The states go by, no task's output does; the end names the tasks that failed, status 6."""
    told, sid = ran
    assert told.code == 6
    assert f"submitted {sid} as job 1 (3 tasks)" in told.err
    assert "hpml: FAILED (2 of 3 done, 1 failed)" in told.err
    assert f"hint: hpml logs {sid}.2" in told.err
    assert "task 0\n" not in told.out
    assert told.out.splitlines()[:4] == [
        f"run        {sid}  FAILED",
        "job        1 (local), 3 tasks",
        "tasks      2 of 3 done, 1 failed",
        "task 2     FAILED, exit code 1: rank 0 exited with code 1",
    ]


def test_each_command_takes_a_task(hpml: Hpml, ran: tuple[Result, str]) -> None:
    """`RUN.INDEX`, `last.INDEX` and the scheduler's own form name one task."""
    sid = ran[1]
    assert hpml("logs", f"{sid}.1").out.endswith("task 1\n")
    assert hpml("logs", "-f", "1_0").out.endswith("task 0\n")
    assert hpml("status", "last.2").out.splitlines()[1].split("\t")[:4] == [
        f"{sid}.2",
        "1_2",
        "local",
        "FAILED",
    ]
    assert hpml("show", "last.0").out.startswith(f"run        {sid}.0  COMPLETED\n")
    assert hpml("wait", "last.0").code == 0
    assert hpml("wait", "last.2").code == 6
    assert "is over already (FAILED)" in hpml("cancel", "last.2").out
    (state,) = hpml("status", "last.1", "--json").json()
    assert (state["id"], state["tasks"]) == (f"{sid}.1", [])


def test_the_whole_array(hpml: Hpml, ran: tuple[Result, str]) -> None:
    """One line in lists, one line per task in `show`, and every task in JSON."""
    sid = ran[1]
    (line,) = hpml("list", "-n", "1").out.splitlines()[1:]
    assert line.split("\t")[6] == "2 of 3 done, 1 failed"
    rows = hpml("show", sid).out.partition("\nTASK\t")[2].splitlines()[1:]
    assert [row.split("\t")[2] for row in rows] == ["COMPLETED", "COMPLETED", "FAILED"]
    (state,) = hpml("status", sid, "--json").json()
    assert [(task["run"], task["exit_code"]) for task in state["tasks"]] == [
        (f"{sid}.0", 0),
        (f"{sid}.1", 0),
        (f"{sid}.2", 1),
    ]
    assert hpml("submit", "--resume", f"{sid}.1").out == f"{sid} is job 1 (3 tasks)\n"


def test_words_that_name_no_task(hpml: Hpml, ran: tuple[Result, str]) -> None:
    """Each mistake is told with what would be right."""
    sid = ran[1]
    whole = hpml("logs", sid)
    assert (whole.code, "is a job array of 3 tasks" in whole.err) == (2, True)
    assert f"hint: name one: {sid}.0, {sid}.1, {sid}.2\n" in whole.err
    missing = hpml("logs", f"{sid}.9")
    assert (missing.code, "has no task 9" in missing.err) == (3, True)
    assert "hint: its tasks: 0, 1, 2" in missing.err


def test_a_submission_names_its_tasks(shell: Shell, hpml: Hpml) -> None:
    """For programs: every task's index, run and directory."""
    told = hpml("submit", "--local", "--json", shell.job("one", array=[4])).json()
    (task,) = told["tasks"]
    assert (task["index"], task["run"]) == (4, f"{told['id']}.4")
    assert told["directory"] is None
    assert hpml("wait", told["id"]).code == 0
    assert hpml("logs", told["id"]).out.endswith("hi\n")  # of one task there is one output


def test_mpi_needs_a_cluster(shell: Shell, hpml: Hpml) -> None:
    """This machine's own srun has no PMIx: refused by the field before anything is written."""
    told = hpml("submit", "--local", shell.job("ranks", mpi="pmix"))
    assert (told.code, "hpml: error: mpi: " in told.err) == (2, True)
    assert "ranks" not in hpml("list", "--all").out
