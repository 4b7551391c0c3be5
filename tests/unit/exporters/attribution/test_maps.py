"""The prolog's map is believed only where root or we wrote it, about a job that is here."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hpml_exporters.jobs.finder import JobFinder
from hpml_exporters.jobs.board import JobFacts
from hpml_exporters.jobs.maps import LARGEST

from tests.unit.exporters.attribution.trees import Machine, Task

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
MAP = {
    "schema_version": 1,
    "jobid": "77",
    "uid": 1000,
    "user": "alice",
    "account": "vision",
    "partition": "gpu",
    "name": "train",
    "gpus": ["1", "3"],
}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    made.step_1("slurm/uid_1000/job_77", "batch", 70, (71,))
    environment = {"SLURM_JOB_ID": "77", "SLURM_JOB_ACCOUNT": "forged", "SLURM_JOB_NAME": "mine"}
    made.process(Task(71, environment=environment))
    (made.run / "jobs").mkdir(mode=0o755)
    return made


def write(machine: Machine, value: Any = None, **changes: Any) -> Path:
    path = machine.run / "jobs" / "77.json"
    draft = path.with_suffix(".new")
    draft.write_text(json.dumps({**MAP, **changes} if value is None else value))
    draft.chmod(0o644)
    draft.replace(path)
    return path


def facts(machine: Machine) -> JobFacts:
    return JobFinder(machine.options).look(0).by_id["77"].facts


def believed(machine: Machine) -> bool:
    return facts(machine).account == "vision"


def test_what_the_prolog_says_wins(machine: Machine) -> None:
    """The environment, which the user can change, only fills in."""
    write(machine, name="")
    found = facts(machine)
    assert (found.user, found.account, found.partition) == ("alice", "vision", "gpu")
    assert found.gpus == ("1", "3")
    assert found.name == "mine"


def test_a_new_map_is_read(machine: Machine) -> None:
    """A requeued job may get other GPUs."""
    finder = JobFinder(machine.options)
    write(machine)
    assert finder.look(0).by_id["77"].facts.gpus == ("1", "3")
    write(machine, gpus=["2"])
    assert finder.look(5).by_id["77"].facts.gpus == ("2",)


def test_no_gpus_is_not_unknown_gpus(machine: Machine) -> None:
    """An empty list is an answer, null is none."""
    write(machine, gpus=[])
    assert facts(machine).gpus == ()
    write(machine, gpus=None)
    assert facts(machine).gpus is None


def test_a_map_of_another_user_is_stale(machine: Machine) -> None:
    """The control group says whose job it is."""
    write(machine, uid=1001)
    assert not believed(machine)
    assert facts(machine).uid == 1000


def test_a_map_of_another_job_is_foreign(machine: Machine) -> None:
    """Whatever the file is called."""
    write(machine, jobid="78")
    assert not believed(machine)


def test_maps_of_jobs_that_are_not_here_are_not_read(machine: Machine) -> None:
    """A file alone makes no job."""
    write(machine)
    machine.run.joinpath("jobs/78.json").write_text(json.dumps({**MAP, "jobid": "78"}))
    assert set(JobFinder(machine.options).look(0).by_id) == {"77"}


@pytest.mark.parametrize("mode", [0o664, 0o646])
def test_a_file_others_can_write_to(machine: Machine, mode: int) -> None:
    """Group or world: no."""
    write(machine).chmod(mode)
    assert not believed(machine)


def test_a_directory_others_can_write_to(machine: Machine) -> None:
    """They could move any file of root's there."""
    write(machine)
    (machine.run / "jobs").chmod(0o777)
    assert not believed(machine)


@needs_root
def test_a_file_of_another_user(machine: Machine) -> None:
    """Neither root nor we wrote it."""
    os.chown(write(machine), 12345, 0)
    assert not believed(machine)


@needs_root
def test_a_directory_of_another_user(machine: Machine) -> None:
    """Its owner decides what lies in it."""
    write(machine)
    os.chown(machine.run / "jobs", 12345, 0)
    assert not believed(machine)


def test_a_link(machine: Machine, tmp_path: Path) -> None:
    """It could lead anywhere."""
    path = write(machine)
    path.rename(tmp_path / "elsewhere.json")
    path.symlink_to(tmp_path / "elsewhere.json")
    assert not believed(machine)


def test_a_pipe_does_not_block(machine: Machine) -> None:
    """Opening it to read would wait for a writer."""
    os.mkfifo(machine.run / "jobs" / "77.json", 0o644)
    assert not believed(machine)


def test_a_file_that_is_too_large(machine: Machine) -> None:
    """It is not even read."""
    write(machine, padding="x" * LARGEST)
    assert not believed(machine)


def test_a_file_from_before_the_machine_booted(machine: Machine) -> None:
    """Job numbers begin again on some controllers; /run is not in memory everywhere."""
    path = write(machine)
    os.utime(path, (999_999_000, 999_999_000))
    assert not believed(machine)


def set_back(machine: Machine) -> None:
    """The clock goes 2 h back; the kernel's btime goes with it."""
    (machine.proc / "stat").write_text("cpu  1 2 3\nbtime 999992800\n")


def test_a_clock_that_was_set_back(machine: Machine) -> None:
    """When the machine booted is asked again before a map counts as older."""
    finder = JobFinder(machine.options)
    set_back(machine)
    os.utime(write(machine), (999_994_000, 999_994_000))
    assert finder.look(0).by_id["77"].facts.account == "vision"


def test_a_map_that_was_refused_before_the_clock_was_set(machine: Machine) -> None:
    """That it was too old is not for good."""
    os.utime(write(machine), (999_994_000, 999_994_000))
    finder = JobFinder(machine.options)
    assert finder.look(0).by_id["77"].facts.account == "forged"
    set_back(machine)
    assert finder.look(5).by_id["77"].facts.account == "vision"


@pytest.mark.parametrize(
    "value", [[], "x", 7, {}, {**MAP, "schema_version": 2}, {**MAP, "uid": []}]
)
def test_what_is_no_map(machine: Machine, value: Any) -> None:
    """Whatever is in it, there is no error; a broken field is left out."""
    write(machine, value)
    assert facts(machine).uid == 1000


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b"[" * 10000, b"null"])
def test_what_is_no_json(machine: Machine, data: bytes) -> None:
    """Neither is there for what cannot be parsed."""
    write(machine).write_bytes(data)
    assert not believed(machine)
