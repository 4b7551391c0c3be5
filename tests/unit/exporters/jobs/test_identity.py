"""The identity of a job: from the prolog's map if it can be trusted, and from its processes."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hpml_exporters.jobs.board import JobFacts
from hpml_exporters.jobs.finder import LARGEST_MAP, JobFinder, UserNames

from tests.patience import eventually
from tests.unit.exporters.jobs.machine import SCOPE, Machine, Task

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
JOB = f"{SCOPE}/job_77"
OF_77 = {"SLURM_JOB_ID": "77"}
MAP: dict[str, Any] = {
    "schema_version": 1,
    "jobid": "77",
    "uid": 1000,
    "user": "alice",
    "account": "vision",
    "partition": "gpu",
    "qos": "normal",
    "name": "",
    "array_job": "70",
    "array_task": "7",
    "start": 1790000000,
    "gpus": ["1", "3"],
}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A node with job 77 of user 1000, and an environment that the user has changed."""
    made = Machine(tmp_path)
    made.unified()
    (made.run / "jobs").mkdir(mode=0o755)
    values = {**OF_77, "SLURM_JOB_ACCOUNT": "forged", "SLURM_JOB_NAME": "mine"}
    begin(made, Task(71, environment=values))
    return made


def begin(machine: Machine, *tasks: Task) -> None:
    machine.step_2(JOB, "0", machine.stepd(70, "77", "0"), {0: tuple(one.pid for one in tasks)})
    for one in tasks:
        machine.process(one)


def write(machine: Machine, **changes: Any) -> Path:
    path = machine.run / "jobs" / "77.json"
    draft = path.with_suffix(".new")
    draft.write_text(json.dumps({**MAP, **changes}))
    draft.chmod(0o644)
    draft.replace(path)
    return path


def facts(machine: Machine, finder: JobFinder | None = None, now: float = 0) -> JobFacts:
    return (finder or JobFinder(machine.options)).look(now).by_id["77"].facts


def test_what_the_prolog_says_wins(machine: Machine) -> None:
    """The environment, which the user can change, only fills in; a requeued job is read again."""
    write(machine)
    finder = JobFinder(machine.options)
    given = {key: value for key, value in MAP.items() if key != "schema_version"}
    assert facts(machine) == JobFacts(**{**given, "name": "mine", "gpus": ("1", "3")})
    for gpus in (["2"], [], None):
        write(machine, gpus=gpus)
        assert facts(machine, finder).gpus == (None if gpus is None else tuple(gpus))


def rename(path: Path) -> None:
    target = path.with_name("elsewhere")
    path.rename(target)
    path.symlink_to(target)


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o644)


def change(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**MAP, **changes}))


SPOILT: dict[str, Callable[[Path], object]] = {
    "writable for the group": lambda path: path.chmod(0o664),
    "writable for all": lambda path: path.chmod(0o646),
    "in a directory that is": lambda path: path.parent.chmod(0o777),
    "a link": rename,
    "a pipe": make_pipe,
    "too large": lambda path: path.write_text(path.read_text() + " " * LARGEST_MAP),
    "older than the machine's start": lambda path: os.utime(path, (999_999_000, 999_999_000)),
    "empty": lambda path: path.write_bytes(b""),
    "half": lambda path: path.write_bytes(b"{"),
    "no text": lambda path: path.write_bytes(b"\xff\xfe"),
    "null": lambda path: path.write_bytes(b"null"),
    "a list": lambda path: path.write_bytes(b"[]"),
    "of another form": lambda path: change(path, schema_version=2),
    "without one": lambda path: path.write_bytes(b"{}"),
    "of another user": lambda path: change(path, uid=1001),
    "of another job": lambda path: change(path, jobid="78"),
}
AS_ROOT: dict[str, Callable[[Path], object]] = {
    "another user's": lambda path: os.chown(path, 12345, 0),
    "another user's directory": lambda path: os.chown(path.parent, 12345, 0),
}


@pytest.mark.parametrize(
    "spoil",
    [
        *(pytest.param(spoil, id=name) for name, spoil in SPOILT.items()),
        *(pytest.param(spoil, id=name, marks=needs_root) for name, spoil in AS_ROOT.items()),
    ],
)
def test_maps_that_are_not_trusted(machine: Machine, spoil: Callable[[Path], object]) -> None:
    """Anybody may have written them, or they are of another job or time; they are ignored."""
    path = write(machine)
    assert facts(machine).account == "vision"
    spoil(path)
    assert (facts(machine).uid, facts(machine).account) == (1000, "forged")


def test_fields_that_make_no_sense(machine: Machine) -> None:
    """They are unknown, the others are known."""
    write(machine, uid=[], user=7, gpus="0", start=None, array_job={})
    found = facts(machine)
    assert (found.uid, found.account, found.gpus, found.start) == (1000, "vision", None, 0)


def test_the_environment_fills_in(machine: Machine) -> None:
    """The variables that Slurm and hpml set, from a process of that job and that user."""
    values = {
        **OF_77,
        "SLURM_JOB_ACCOUNT": "vision",
        "SLURM_JOB_PARTITION": "gpu",
        "SLURM_JOB_QOS": "long",
        "SLURM_JOB_NAME": "train",
        "SLURM_ARRAY_JOB_ID": "70",
        "SLURM_ARRAY_TASK_ID": "7",
        "SLURM_JOB_START_TIME": "1790000000",
        "SLURM_JOB_END_TIME": "1790003600",
        "SLURM_JOB_GPUS": "GPU-1a,GPU-3c",
        "SLURM_NNODES": "1",
    }
    begin(
        machine,
        Task(71, environment={**values, "SLURM_JOB_ID": "76", "SLURM_JOB_NAME": "no"}),
        Task(72, environment=values),
    )
    finder = JobFinder(machine.options)
    found = facts(machine, finder)
    assert (found.account, found.partition, found.qos) == ("vision", "gpu", "long")
    assert found.name == "train"
    assert (found.array_job, found.array_task) == ("70", "7")
    assert (found.start, found.end) == (1790000000, 1790003600)
    assert (found.gpus, found.run, found.ranks) == (("GPU-1a", "GPU-3c"), "", 0)
    # Values that are not numbers of ranks or times.
    odd = {**values, "WORLD_SIZE": "9" * 40, "SLURM_JOB_START_TIME": "-1e300"}
    begin(machine, Task(72, environment=odd))
    assert (facts(machine).ranks, facts(machine).start) == (0, 0)
    # The ranks begin later, when the data are staged; hpml's variables are theirs alone.
    more = {"HPML_RUN_DIR": "/r/runs/r-x7/", "HPML_SWEEP": "s", "HPML_POINT": "4"}
    begin(machine, Task(72, environment={**values, **more, "WORLD_SIZE": "8"}))
    for now in range(5, 100, 5):
        found = facts(machine, finder, now)
    assert (found.run, found.sweep, found.point, found.ranks) == ("r-x7", "s", "4", 8)


ONE, TWO = {"SLURM_NNODES": "1"}, {"SLURM_NNODES": "2"}


@pytest.mark.parametrize(
    ("values", "step", "table", "gpus"),
    [
        ({**ONE, "SLURM_JOB_GPUS": "GPU-1a,MIG-2b"}, "0", "", ("GPU-1a", "MIG-2b")),
        ({**ONE, "SLURM_JOB_GPUS": "1,3"}, "0", "", ("1", "3")),
        ({"SLURM_JOB_GPUS": "1,3"}, "batch", "", ("1", "3")),
        ({**TWO, "SLURM_JOB_GPUS": "1,3"}, "0", "", None),  # those of the first node
        ({**ONE, "SLURM_JOB_GPUS": "1,0"}, "0", "# a\n\n5 x\nGPU-1a\n", ("GPU-1a", "5")),
        ({**ONE, "SLURM_JOB_GPUS": "2"}, "0", "5\n2\n", None),
        ({**ONE, "SLURM_JOB_GPUS": "gpu:2"}, "0", "", None),
        (ONE, "0", "", None),
    ],
)
def test_gpus_of_the_environment(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    values: dict[str, str],
    step: str,
    table: str,
    gpus: tuple[str, ...] | None,
) -> None:
    """Numbers are translated as in the prolog; values inherited from another node are not shown."""
    (machine.run / "gpus").write_text(table)
    monkeypatch.setenv("HPML_GPUS", str(machine.run / "gpus"))
    machine.ended(71)
    shutil.rmtree(machine.cgroup / JOB)
    machine.step_2(JOB, step, machine.stepd(70, "77", step), {0: (71,)})
    machine.process(Task(71, environment={**OF_77, **values}))
    assert facts(machine).gpus == gpus
    own = JobFinder(machine.only("77")).look(0).by_id["77"].facts
    assert own.gpus is None, "the agent has looked at the devices"


def test_a_requeued_job_is_asked_again(machine: Machine) -> None:
    """Also one that was never seen away, and long after its first look: its times are others."""
    finder = JobFinder(machine.options)
    for pid, begun in ((71, 1790000000), (81, 1790007200)):
        times = {
            "SLURM_JOB_START_TIME": str(begun),
            "SLURM_JOB_END_TIME": str(begun + 3600),
            "HPML_RUN_DIR": "/records/runs/one",
        }
        begin(machine, Task(pid, environment={**OF_77, **times}))
        for now in range(5):
            found = facts(machine, finder, now)
        assert (found.start, found.end, found.run) == (begun, begun + 3600, "one")


def test_a_task_that_is_still_root_s(machine: Machine) -> None:
    """Slurmstepd's child becomes the user a moment later: until then the map names the user."""
    finder = JobFinder(machine.options)
    begin(machine, Task(71, uid=0, environment={**OF_77, "SLURM_JOB_NAME": "stepd's"}))
    assert facts(machine, finder).uid == 0, "nobody else is seen"
    write(machine)
    found = facts(machine, finder, 5)
    assert (found.uid, found.user, found.account) == (1000, "alice", "vision")
    begin(machine, Task(71, environment={**OF_77, "SLURM_JOB_NAME": "train"}))
    found = facts(machine, finder, 10)
    assert (found.uid, found.user, found.name) == (1000, "alice", "train")
    write(machine, uid=1001)
    assert facts(machine, finder, 15).account == "", "it is another job's"


def test_a_user_in_the_path_is_certain(machine: Machine) -> None:
    """In version 1 a job of root's stays that, and another user's map is another job's."""
    other = Machine(machine.proc.parent / "other")
    other.step_1("slurm/uid_0/job_77", "0", 80, (81,))
    other.process(Task(81))
    (other.run / "jobs").mkdir(mode=0o755)
    write(other)
    assert (facts(other).uid, facts(other).account) == (0, "")


def test_user_names() -> None:
    """Names from the system, else the number; a slow directory service does not block."""
    names = UserNames()
    eventually(lambda: names.name(0, 0.0) == "root")
    eventually(lambda: names.name(3999999, 0.0) == "3999999")
    assert names.name(-1, 0.0) == ""
    answer = threading.Event()
    asked: list[int] = []

    def lookup(uid: int) -> str:
        asked.append(uid)
        answer.wait(120)
        if asked == [1]:
            raise OSError("down")
        return f"user{uid}"

    slow = UserNames(lookup)
    assert [slow.name(uid, 0.0) for uid in (1, 2, 1)] == [""] * 3
    assert asked == [1], "one question at a time"
    answer.set()
    eventually(lambda: slow.name(2, 1.0) == "user2")
    assert slow.name(1, 1.0) == "", "asked again after ten minutes"
    eventually(lambda: slow.name(1, 601.0) == "user1")
    assert (slow.name(1, 9999.0), asked) == ("user1", [1, 2, 1])
