"""`hpml list` and `hpml cancel` choose runs by name, age, state, sweep; tables fit a terminal."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hpml_orchestrator.records.files import write_json
from hpml_orchestrator.records.ids import stamp, stamp_of
from hpml_orchestrator.records.texts import clock_text
from hpml_orchestrator.scheduler.model import JobState
from hpml_orchestrator.testing.scheduler import FakeScheduler
from tests.unit.cli.support import HPML, Hpml, Result, Shell, in_terminal

NAMES = ("digits", "digits-big", "w" * 39 + "xy", "digits", "other")
"""Of the runs of `desk`, the oldest first; their jobs are 1 to 5."""
STATES = {
    "1": JobState.FAILED,
    "2": JobState.RUNNING,
    "3": JobState.COMPLETED,
    "4": JobState.PENDING,
    "5": JobState.TIMEOUT,
}


class Desk:
    """Runs of several names, ages and states on a FAKE Slurm, in separate records."""

    def __init__(self, shell: Shell, hpml: Hpml, slurm: FakeScheduler, records: Path) -> None:
        self.hpml, self.slurm, self.records = hpml, slurm, records
        self.sids: list[str] = []
        for age, name in zip((100, 50, 5, 1, 0), NAMES, strict=True):
            sid = self("submit", "--no-check", "--json", shell.job(name)).json()["id"]
            self.sids.append(self._older(sid, age * 3600))
        for job_id, state in STATES.items():
            slurm.move(job_id, state)

    def __call__(self, *words: str) -> Result:
        """Run hpml with these records."""
        return self.hpml("--records", str(self.records), *words)

    def _older(self, sid: str, seconds: float) -> str:
        """Make a submission that many seconds older."""
        older = sid.replace(stamp_of(sid), stamp(time.time() - seconds))
        for place in ("submissions", "runs"):
            (self.records / place / sid).rename(self.records / place / older)
        (self.records / "submissions" / older / "runs.tsv").write_text(f"0\t{older}\n")
        for job in self.slurm.jobs.values():
            job.status = replace(job.status, directory=job.status.directory.replace(sid, older))
        return older

    def listed(self, *words: str) -> list[int]:
        """The numbers of the runs that `hpml list` prints, newest first."""
        rows = self("list", *words).out.splitlines()[1:]
        return [self.sids.index(row.split("\t")[0]) + 1 for row in rows]

    def cancelled(self) -> set[str]:
        """The ids of the jobs that were cancelled."""
        jobs = self.slurm.jobs.items()
        return {name for name, job in jobs if job.states[-1][1] is JobState.CANCELLED}


@pytest.fixture
def desk(shell: Shell, hpml: Hpml, slurm: FakeScheduler, tmp_path: Path) -> Desk:
    """Five runs."""
    return Desk(shell, hpml, slurm, tmp_path / "records")


def test_list_and_show_say_why_a_job_waits_and_until_when(desk: Desk) -> None:
    """Slurm's word, its meaning, the next step and the planned start."""
    job, start = desk.slurm.jobs["4"], time.time() + 3600
    for reason, expected, text in (
        ("JobHeldUser", None, "JobHeldUser: you hold it; `scontrol release 4` lets it start"),
        ("Resources", start, f"are in use; expected start {clock_text(start)}"),
    ):
        job.status = replace(job.status, reason=reason, expected_start=expected)
        assert text in desk("list", "--name", "digits").out
        assert text in desk("show", desk.sids[3]).out


def test_options_of_list_select_runs(desk: Desk) -> None:
    """They combine, and apply before the number; a name is whole unless it is a pattern."""
    today, long_ago = time.strftime("%Y-%m-%d"), "2020-01-01"
    record = desk.records / "submissions" / desk.sids[1] / "submit.json"
    write_json(record, {**json.loads(record.read_text()), "sweep": "toy-1"})
    for words, numbers in {
        "": [5, 4, 3, 2, 1],
        "--state failed": [1],
        "--state Timeout,RUNNING --state pending": [5, 4, 2],
        "--state timeout --state failed -n 1": [5],
        "--state special_exit": [],
        "--name digits": [4, 1],
        "--name digits -n 1": [4],
        "--name digits*": [4, 2, 1],
        "--name digit": [],
        "--name DIGITS": [],
        f"--name {NAMES[2]}": [3],
        f"--name {NAMES[2][:-1]}": [],
        "--since 2h": [5, 4],
        "--since 90m": [5, 4],
        "--since 3d": [5, 4, 3, 2],
        f"--since {long_ago}": [5, 4, 3, 2, 1],
        "--since today --name other": [5],
        "--since Yesterday --name other": [5],
        f"--since {long_ago}T08:00 --name digits --state failed": [1],
        f"--since {today} --name other": [5],
    }.items():
        assert desk.listed(*words.split()) == numbers, words
    nothing = desk("list", "--name", "nobody")
    assert (nothing.code, nothing.out, nothing.err) == (0, "", "no runs match\n")
    assert len(desk("list", "--state", "failed", "--json").json()) == 1


def test_runs_of_a_sweep_are_listed(desk: Desk) -> None:
    """By the sweep's id; one that does not exist is named."""
    assert desk("list", "--sweep", "last").refuses(3, "no sweep 'last' under ")


@pytest.mark.parametrize(
    ("line", "code", "message", "hint"),
    [
        ("list --state fialed", 2, "--state: unknown state (got 'fialed')", "FAILED?"),
        ("list --state zzz", 2, "--state: unknown state", "not_submitted"),
        ("list --state failed,", 2, "--state: unknown state (got '')", "states: "),
        ("list --since yesterdy", 2, "--since: must be an age such as 2h or 3d, today", ""),
        ("list --since 3", 2, "--since: must be an age such as 2h", ""),
        ("list --since 2999-01-01", 2, "--since: is in the future (got '2999-01-01')", ""),
        ("cancel", 2, "choose runs with RUN, --name or --all", "hpml cancel last"),
        ("cancel --all last", 2, "RUN: cannot be given together with --all", ""),
        ("cancel --all --name digits", 2, "--name: cannot be given together with --all", ""),
        ("cancel last --name digits", 2, "RUN: cannot be given together with --name", ""),
        ("cancel --name digts", 3, "no run is named 'digts'", "did you mean digits?"),
    ],
)
def test_what_selects_no_runs_is_refused(
    desk: Desk, line: str, code: int, message: str, hint: str
) -> None:
    """The option and its value are named; nothing is cancelled."""
    assert desk(*line.split()).refuses(code, message, hint)
    assert not desk.cancelled()


@pytest.mark.parametrize(
    ("words", "numbers"),
    [
        ("--all", {2, 4}),
        ("--name digits", {4}),
        ("--name digits-*", {2}),
        ("--name other", set()),
    ],
)
def test_cancel_takes_unfinished_runs_of_the_user(
    desk: Desk, words: str, numbers: set[int]
) -> None:
    """Those of the name, or all; without a terminal it does not ask, and prints each."""
    done = desk("cancel", *words.split())
    assert done.code == 0, done.err
    assert desk.cancelled() == {str(number) for number in numbers}
    printed = {desk.sids.index(line.partition(":")[0]) + 1 for line in done.out.splitlines()}
    assert printed == numbers
    assert numbers or done.err == "no unfinished runs\n"


def test_cancel_leaves_runs_of_others_alone(desk: Desk) -> None:
    """In records that several users share, and where the scheduler has forgotten a run."""
    if os.getuid() != 0:
        pytest.skip("NOT TESTED: giving a directory away needs root")
    os.chown(desk.records / "submissions" / desk.sids[1], 65534, 65534)
    del desk.slurm.jobs["4"]
    started = desk.records / "submissions" / desk.sids[3] / "sbatch.started"
    write_json(started, {**json.loads(started.read_text()), "time": time.time() - 3600})
    done = desk("cancel", "--all")
    assert (done.code, done.out, done.err) == (0, "", "no unfinished runs\n")
    assert not desk.cancelled()


def test_cancel_names_a_run_that_it_cannot_read(desk: Desk) -> None:
    """The others are cancelled and printed; the exit status is that of an unreadable record."""
    (desk.records / "submissions" / desk.sids[1] / "submit.json").write_text("{")
    done = desk("cancel", "--all")
    assert (done.code, "is not JSON" in done.err) == (7, True)
    assert done.out == f"{desk.sids[3]}: cancelled job 4\n"


@pytest.mark.parametrize(
    ("answer", "words", "asked", "numbers"),
    [
        ("y\n", (), True, {"2", "4"}),
        ("n\n", (), True, set()),
        ("\n", (), True, set()),
        ("", ("--yes",), False, {"2", "4"}),
    ],
)
def test_cancel_asks_on_a_terminal(
    desk: Desk,
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    words: tuple[str, ...],
    asked: bool,
    numbers: set[str],
) -> None:
    """It lists the runs first; whoever does not agree cancels nothing."""
    leader, follower = os.openpty()
    os.write(leader, answer.encode())
    with open(follower, encoding="utf-8") as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        done = desk("cancel", "--all", *words)
    os.close(leader)
    assert (f"{desk.sids[1]}  RUNNING\n" in done.err) == asked
    assert ("Cancel 2 runs? [y/N]" in done.err) == asked
    assert (done.code, desk.cancelled()) == (0 if numbers else 1, numbers)


def test_cancelling_runs_of_a_sweep_names_the_sweep(desk: Desk) -> None:
    """Its controller submits more."""
    record = desk.records / "submissions" / desk.sids[1] / "submit.json"
    write_json(record, {**json.loads(record.read_text()), "sweep": "toy-1"})
    assert "hpml sweep cancel toy-1" in desk("cancel", "--name", "digits-big").err


@pytest.fixture(scope="module")
def ended(shell: Shell) -> list[str]:
    """Ids of a run that failed with a long reason, and of one with a long name."""
    path = shell.job("bad", command=["bash", "-c", "exit 42"])
    shell.hpml("run", "--local", path)
    shell.hpml("run", "--local", shell.job("a-rather-long-name-for-a-run"))
    return [run["id"] for run in json.loads(shell.hpml("list", "--json").out)]


@pytest.mark.parametrize(
    ("width", "columns"),
    [
        (40, "RUN STATE"),
        (60, "RUN STATE"),
        (80, "RUN STATE REASON"),
        (120, "RUN JOB BACKEND STATE TIME NODES REASON"),
    ],
)
@pytest.mark.xdist_group("local runs")
def test_narrow_terminals_show_fewer_columns(
    shell: Shell, ended: list[str], width: int, columns: str
) -> None:
    """Ids and headers are never broken; `show` of a run leaves out columns of its ranks."""
    environment = {**shell.environment(), "COLUMNS": str(width), "TERM": "xterm"}

    def drawn(*words: str) -> list[str]:
        printed = in_terminal([HPML, *words], environment)
        return re.sub(r"\x1b\[[0-9;]*m", "", printed).replace("\r", "").splitlines()

    header, *rows = drawn("list")
    assert header.split() == columns.split()
    for sid in ended:
        assert sum(row.startswith(f"{sid}  ") for row in rows) == 1
    state = header.index("STATE")
    assert {row[state : state + 9].rstrip() for row in rows} - {""} == {"FAILED", "COMPLETED"}
    assert all(len(row.rstrip()) <= max(width, state + 9) for row in [header, *rows])
    if "REASON" in columns:
        start = header.index("REASON")
        words = " ".join(row[start:].strip() for row in rows).split()
        assert " ".join(words[-6:] if words[-1] == "42" else words).endswith("with code 42")
    assert drawn("status", ended[0])[0].split()[:1] == ["RUN"]
    ranks = next(line for line in drawn("show", ended[0]) if line.startswith("RANK"))
    assert set(ranks.split()) <= set(RANKS.split())
    assert {"RANK", "NODE", "STATUS"} <= set(ranks.split())
    assert len(ranks.rstrip()) <= width


RANKS = "RANK NODE GPU CPUS CORES NUMA DISTANCE NIC THREADS STATUS"
