"""Whose a job is, where what was seen first was not it: prologs, tasks of root's, earlier jobs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hpml_exporters.jobs.finder import JobFinder
from hpml_exporters.jobs.board import JobSeen

from tests.unit.exporters.attribution.trees import SCOPE, Machine, Task

JOB = f"{SCOPE}/job_77"
OF_77 = {"SLURM_JOB_ID": "77"}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A node whose slurmd has made its groups, and no job yet."""
    made = Machine(tmp_path)
    made.unified()
    made.group(f"{SCOPE}/system")
    (made.run / "jobs").mkdir(mode=0o755)
    return made


def write_map(machine: Machine, uid: int = 1000, jobid: str = "77") -> None:
    path = machine.run / "jobs" / f"{jobid}.json"
    facts = {"jobid": jobid, "uid": uid, "user": "alice", "account": "vision", "gpus": ["0", "1"]}
    path.write_text(json.dumps({"schema_version": 1, **facts}))
    path.chmod(0o644)


def begin(machine: Machine, *tasks: Task) -> None:
    """Give job 77 a step with these tasks, in control groups."""
    machine.step_2(JOB, "0", machine.stepd(70, "77", "0"), {0: tuple(one.pid for one in tasks)})
    for one in tasks:
        machine.process(one)


def who(job: JobSeen) -> tuple[int, str, str, str, tuple[str, ...] | None]:
    facts = job.facts
    return facts.uid, facts.user, facts.account, facts.name, facts.gpus


def test_a_prolog_says_nothing_of_the_job(machine: Machine) -> None:
    """On a node without a job in a group it may be taken for one; the job itself begins anew."""
    finder = JobFinder(machine.options)
    machine.process(Task(50, uid=0, environment={**OF_77, "SLURM_JOB_NAME": "prolog's"}))
    finder.look(0)
    machine.ended(50)
    write_map(machine)
    begin(machine, Task(71, environment={**OF_77, "SLURM_JOB_NAME": "train"}))
    job = finder.look(5).by_id["77"]
    assert who(job) == (1000, "alice", "vision", "train", ("0", "1"))
    assert job.pids == {71}


def test_a_prolog_of_a_slow_start(machine: Machine) -> None:
    """It still runs when the job's groups are there; without a map the task says whose it is."""
    finder = JobFinder(machine.options)
    machine.process(Task(50, uid=0, environment=OF_77))
    finder.look(0)
    begin(machine, Task(71, uid=3999999))
    job = finder.look(5).by_id["77"]
    assert (job.facts.uid, job.facts.user, set(job.pids)) == (3999999, "3999999", {71})


def test_an_epilog_is_no_job(machine: Machine) -> None:
    """The job's groups are gone, and what names it in its environment is not it."""
    finder = JobFinder(machine.options)
    begin(machine, Task(71))
    finder.look(0)
    shutil.rmtree(machine.cgroup / JOB)
    machine.ended(71)
    machine.process(Task(90, uid=0, environment=OF_77))
    assert set(finder.look(5).by_id) == set()


def test_what_outlived_its_job_is_no_job(machine: Machine) -> None:
    """Once a job was in a group, no environment makes one; also while the groups are gone."""
    finder = JobFinder(machine.options)
    machine.process(Task(60, uid=1000, environment={"SLURM_JOB_ID": "66"}))
    begin(machine, Task(71))
    assert set(finder.look(0).by_id) == {"77"}
    shutil.rmtree(machine.cgroup / JOB)
    assert set(finder.look(5).by_id) == set()
    shutil.rmtree(machine.cgroup / "system.slice")
    assert set(finder.look(60).by_id) == set()


def test_groups_that_never_had_a_job(machine: Machine) -> None:
    """Slurm may make its scope, and track processes without it: environments say it then."""
    finder = JobFinder(machine.options)
    machine.process(Task(50, environment=OF_77))
    assert [set(finder.look(now).by_id) for now in (0, 5, 60)] == [{"77"}] * 3


def test_a_task_that_is_roots_yet(machine: Machine) -> None:
    """Slurmstepd's child becomes the user a moment later: the map is believed before and after."""
    write_map(machine)
    finder = JobFinder(machine.options)
    begin(machine, Task(71, uid=0, environment={**OF_77, "SLURM_JOB_NAME": "stepd's"}))
    assert who(finder.look(0).by_id["77"])[:3] == (1000, "alice", "vision")
    machine.process(Task(71, uid=1000, environment={**OF_77, "SLURM_JOB_NAME": "train"}))
    for now in (5, 10):
        assert who(finder.look(now).by_id["77"])[:4] == (1000, "alice", "vision", "train")


def test_a_task_that_is_roots_for_long(machine: Machine) -> None:
    """Without a map the user is asked for until it is another than root."""
    finder = JobFinder(machine.options)
    begin(machine, Task(71, uid=0))
    for look in range(20):
        assert finder.look(5.0 * look).by_id["77"].facts.uid == 0
    machine.process(Task(71, uid=3999999, environment={**OF_77, "SLURM_JOB_ACCOUNT": "vision"}))
    facts = finder.look(100).by_id["77"].facts
    assert (facts.uid, facts.user, facts.account) == (3999999, "3999999", "vision")


def test_another_users_map_once_the_user_is_known(machine: Machine) -> None:
    """While the task is root's nothing speaks against the map; then it is seen to be stale."""
    write_map(machine, uid=1001)
    finder = JobFinder(machine.options)
    begin(machine, Task(71, uid=0))
    finder.look(0)
    machine.process(Task(71, uid=1000))
    assert who(finder.look(5).by_id["77"])[2:] == ("", "", None)


def test_a_job_of_roots_with_another_users_process(machine: Machine) -> None:
    """What root starts by su is still root's job, wherever in the order of ids it is."""
    begin(machine, Task(71, uid=1000, parent=72), Task(72, uid=0, parent=70))
    finder = JobFinder(machine.options)
    assert [finder.look(now).by_id["77"].facts.uid for now in (0, 5)] == [0, 0]


def test_a_user_that_the_path_names_is_certain(machine: Machine) -> None:
    """In version 1 a job of root's stays that, and another user's map stale."""
    machine.step_1("slurm/uid_0/job_88", "0", 80, (81,))
    machine.process(Task(81, uid=1000))
    write_map(machine, uid=1000, jobid="88")
    facts = JobFinder(machine.options).look(0).by_id["88"].facts
    assert (facts.uid, facts.account) == (0, "")


def test_local_jobs_of_one_number(machine: Machine) -> None:
    """Bob's job 1 is there at the look after alice's: nothing of hers is said of it."""
    finder = JobFinder(machine.options)
    hers = {"SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "secret", "HPML_RUN_DIR": "/r/runs/hers"}
    machine.process(Task(50, uid=1000, start=10, environment=hers))
    first = finder.look(0).by_id["1"]
    assert (first.facts.uid, first.facts.name, first.facts.run) == (1000, "secret", "hers")
    machine.ended(50)
    machine.process(Task(51, uid=1001, start=20, environment={"SLURM_JOB_ID": "1"}))
    second = finder.look(5).by_id["1"]
    assert (second.facts.uid, second.facts.name, second.facts.run) == (1001, "", "")
    assert first.whose != second.whose


def test_local_jobs_of_one_number_and_user(machine: Machine) -> None:
    """Every directory of records has another name of its cluster; a job's processes have one."""
    finder = JobFinder(machine.options)
    one = {"SLURM_JOB_ID": "1", "SLURM_CLUSTER_NAME": "local-1", "SLURM_JOB_NAME": "first"}
    machine.process(Task(50, start=10, environment=one))
    first = finder.look(0).by_id["1"]
    machine.ended(50)
    machine.process(Task(51, start=20, environment={"SLURM_JOB_ID": "1"}))
    same = finder.look(5).by_id["1"]
    machine.ended(51)
    machine.process(Task(52, start=30, environment={**one, "SLURM_CLUSTER_NAME": "local-2"}))
    other = finder.look(10).by_id["1"]
    assert (first.whose == same.whose, same.whose == other.whose) == (True, False)


def test_a_cluster_that_is_learned_late_makes_no_other_job(machine: Machine) -> None:
    """Its counters go on, and it is the job that the name tells from the next one."""
    finder = JobFinder(machine.options)
    machine.process(Task(50, start=10, environment={"SLURM_JOB_ID": "1"}))
    first = finder.look(0).by_id["1"]
    named = {"SLURM_JOB_ID": "1", "SLURM_CLUSTER_NAME": "local-1"}
    machine.process(Task(51, start=20, environment=named))
    same = finder.look(5).by_id["1"]
    machine.ended(50)
    machine.ended(51)
    machine.process(Task(52, start=30, environment={**named, "SLURM_CLUSTER_NAME": "local-2"}))
    other = finder.look(10).by_id["1"]
    assert (first.whose == same.whose, same.whose == other.whose) == (True, False)
