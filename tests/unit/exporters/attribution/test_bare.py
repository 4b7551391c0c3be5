"""What environments say makes only so many jobs, of numbers that Slurm could give."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from hpml_exporters.jobs import bare
from hpml_exporters.jobs.bare import MOST, BareJobs

from tests.unit.exporters.attribution.trees import Machine, Task


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def look(machine: Machine) -> dict[str, bare.BareJob]:
    return {job.jobid: job for job in BareJobs(str(machine.proc)).jobs(0.0)}


def show(machine: Machine, numbers: range, uid: int) -> None:
    """Show a process for each job of a user, in the order of their numbers."""
    for number in numbers:
        environment = {"SLURM_JOB_ID": str(number)}
        machine.process(Task(number, uid=uid, start=number, environment=environment))


@pytest.mark.parametrize("number", ["1", "67108863", "4294967295"])
def test_numbers_that_slurm_gives(machine: Machine, number: str) -> None:
    """Up to 32 bits: those of federations have the cluster in them."""
    machine.process(Task(50, environment={"SLURM_JOB_ID": number}))
    assert set(look(machine)) == {number}


@pytest.mark.parametrize(
    "number",
    ["", "0", "007", "-5", "7.0", "x", "1" * 11, pytest.param("9" * 100_000, id="very long")],
)
def test_numbers_that_no_job_has(machine: Machine, number: str) -> None:
    """They would be labels of any length."""
    machine.process(Task(50, environment={"SLURM_JOB_ID": number}))
    assert look(machine) == {}


def test_a_step_of_any_length(machine: Machine) -> None:
    """It is none that Slurm has, and is not kept."""
    machine.process(Task(50, environment={"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "9" * 100_000}))
    assert look(machine)["7"].steps == {"batch": {50}}


def test_a_user_with_very_many_jobs(machine: Machine) -> None:
    """Those that began first are there, and those of other users are."""
    assert max(64, os.cpu_count() or 0) == MOST
    show(machine, range(1000, 1000 + MOST + 50), 1000)
    show(machine, range(5000, 5003), 1001)
    assert set(look(machine)) == {str(n) for n in (*range(1000, 1000 + MOST), *range(5000, 5003))}


def test_very_many_jobs_of_many_users(machine: Machine) -> None:
    """All together have a bound, too; a job that is there keeps its place."""
    for user in range(6):
        first = 10_000 * (user + 1)
        show(machine, range(first, first + MOST), 1000 + user)
    found = Counter(job.uid for job in look(machine).values())
    assert found == {1000: MOST, 1001: MOST, 1002: MOST, 1003: MOST}


def test_jobs_that_are_not_shown_are_told_of(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    """How many, once an hour."""
    jobs = BareJobs(str(machine.proc))
    show(machine, range(1000, 1000 + MOST), 1000)
    jobs.jobs(0.0)
    assert capsys.readouterr().err == ""
    show(machine, range(9000, 9007), 1000)
    for now in (5.0, 10.0, 3600.0):
        jobs.jobs(now)
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "7 jobs are not shown" in told
    jobs.jobs(3605.0)
    assert "7 jobs are not shown" in capsys.readouterr().err


def test_the_one_job_of_an_exporter_has_its_place(machine: Machine) -> None:
    """However many others name jobs in their environments."""
    show(machine, range(1000, 1000 + MOST + 50), 1000)
    last = str(1000 + MOST + 49)
    assert [job.jobid for job in BareJobs(str(machine.proc)).jobs(0.0, last)] == [last]


@pytest.mark.parametrize("context", ["prolog_slurmd", "epilog_slurmd"])
def test_the_sites_own_programs_are_no_job(machine: Machine, context: str) -> None:
    """A prolog has the job's number in its environment, and so has what it leaves behind."""
    of_job = {"SLURM_JOB_ID": "77"}
    machine.process(
        Task(40, uid=0, start=10, environment={**of_job, "SLURM_SCRIPT_CONTEXT": context})
    )
    assert look(machine) == {}
    machine.process(Task(50, uid=1000, start=20, environment=of_job))
    job = look(machine)["77"]
    assert (job.uid, job.steps) == (1000, {"batch": {50}})


@pytest.mark.parametrize("context", ["prolog_task", "epilog_task"])
def test_programs_of_a_task_are_the_jobs(machine: Machine, context: str) -> None:
    """They run as its user, for its step."""
    environment = {"SLURM_JOB_ID": "77", "SLURM_SCRIPT_CONTEXT": context}
    machine.process(Task(40, environment=environment))
    assert set(look(machine)) == {"77"}
