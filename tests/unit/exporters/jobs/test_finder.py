"""Jobs are found in every layout of control groups, and without any, with the right user."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hpml_exporters.jobs.board import Jobs
from hpml_exporters.jobs.finder import MOST_PER_USER, JobFinder
from hpml_exporters.options import NodeOptions

from hpml_orchestrator.scheduler.local.jobs import Home
from tests.unit.exporters.jobs.machine import SCOPE, Machine, Task

V1 = "slurm/uid_1000/job_77"
V2 = f"{SCOPE}/job_77"
OF_77 = {"SLURM_JOB_ID": "77"}
STEPS = {"batch": {71, 72}, "0": {81, 82}}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def look(machine: Machine, now: float = 0.0) -> Jobs:
    return JobFinder(machine.options).look(now)


def pids(jobs: Jobs) -> dict[str, set[int]]:
    return {jobid: set(job.pids) for jobid, job in jobs.by_id.items()}


def version_1(machine: Machine, job: str = V1, **mounts: str) -> None:
    machine.step_1(job, "batch", 70, (71, 72), mounts)
    machine.step_1(job, "0", 80, (81, 82), mounts)


def version_2(machine: Machine, job: str = V2, jobid: str = "77", first: int = 70) -> None:
    machine.unified()
    machine.step_2(job, "batch", machine.stepd(first, jobid, "batch"), {0: (first + 1, first + 2)})
    stepd = machine.stepd(first + 10, jobid, "0")
    machine.step_2(job, "0", stepd, {0: (first + 11,), 1: (first + 12,)})
    for pid in (first + 1, first + 2, first + 11, first + 12):
        machine.process(Task(pid))


def hybrid(machine: Machine) -> None:
    machine.unified("unified")
    machine.group("unified/system.slice/ssh.service", (5,))
    version_1(machine)


def prepended(machine: Machine) -> None:
    machine.group("freezer/user.slice/uid_1000/job_1/step_0", (5,))
    version_1(machine, "batchsystem/main/uid_1000/job_77")
    machine.stepd(80, "77", "0")
    (machine.proc / "80/cgroup").write_text("9:freezer:/batchsystem/main/uid_1000/job_77\n")


def linked(machine: Machine) -> None:
    version_1(machine)
    for controller in list(machine.cgroup.iterdir()):
        real = machine.cgroup.with_name(f"real-{controller.name}")
        controller.rename(real)
        controller.symlink_to(real)


LAYOUTS: dict[str, Callable[[Machine], None]] = {
    "version 1": version_1,
    "one of several slurmd": lambda m: version_1(m, "slurm_node1/uid_1000/job_77"),
    "controllers share a mount": lambda m: version_1(m, freezer="freezer", cpuacct="cpu,cpuacct"),
    "controllers are links": linked,
    "no freezer": lambda m: version_1(m, memory="memory"),
    "CgroupPrepend": prepended,
    "hybrid": hybrid,
    "version 2": version_2,
    "version 2, one of several slurmd": lambda m: version_2(
        m, "system.slice/node7_slurmstepd.scope/job_77"
    ),
    "CgroupSlice": lambda m: version_2(m, "batch.slice/batch-gpu.slice/slurmstepd.scope/job_77"),
    "container": lambda m: version_2(
        m, "docker.slice/docker-0a1b.scope/system.slice/slurmstepd.scope/job_77"
    ),
    "SLUID": lambda m: version_2(m, f"{SCOPE}/s5K1KKYAYG5D00"),
    "a name of digits": lambda m: version_2(m, f"{SCOPE}/5017005"),
    "only slurmstepd knows": lambda m: version_2(m, "payload/odd.service/jobs/job_77"),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(machine: Machine, layout: Callable[[Machine], None]) -> None:
    """User and steps are known; slurmstepd, services and logins are in no job."""
    layout(machine)
    machine.group("system.slice/sshd.service", (61,))
    finder = JobFinder(machine.options)
    for now in (0, 5, 10):
        jobs = finder.look(now)
        assert set(jobs.by_id) == {"77"}
        assert dict(jobs.by_id["77"].steps) == STEPS
        assert jobs.by_id["77"].facts.uid == 1000
    (groups,) = jobs.by_id["77"].groups
    assert all(Path(path, "step_0").is_dir() for path in groups.values())
    assert groups.get("cpu") == groups.get("cpuacct") or "cpu" not in groups


def test_several_slurmd(machine: Machine) -> None:
    """A job on two of them is one job."""
    version_1(machine, "slurm_node1/uid_1000/job_77")
    machine.step_1("slurm_node2/uid_1000/job_77", "0", 90, (91,))
    machine.step_1("slurm_node2/uid_1001/job_78", "0", 92, (93,))
    jobs = look(machine)
    assert pids(jobs) == {"77": {71, 72, 81, 82, 91}, "78": {93}}
    memory = {one["memory"].split("/")[-3] for one in jobs.by_id["77"].groups}
    assert memory == {"slurm_node1", "slurm_node2"}


def test_a_controller_that_gets_the_job_later(machine: Machine) -> None:
    """Slurm creates a job's groups in sequence."""
    finder = JobFinder(machine.options)
    machine.step_1(V1, "0", 80, (81,), {"freezer": "freezer"})
    assert [set(one) for one in finder.look(0).by_id["77"].groups] == [{"freezer"}]
    machine.step_1(V1, "0", 80, (81,), {"memory": "memory"})
    assert [set(one) for one in finder.look(5).by_id["77"].groups] == [{"freezer", "memory"}]


def test_sluids(machine: Machine) -> None:
    """The title of slurmstepd has the job id; it is kept when that is gone, else asked again."""
    version_2(machine, f"{SCOPE}/s5K1KKYAYG5D00", "1234567")
    version_2(machine, f"{SCOPE}/s5K1KKYAYG5D01", "5", 170)
    (machine.proc / "170/cmdline").write_bytes(b"/bin/evil [5.0]\0")
    (machine.proc / "180/cmdline").write_bytes(b"")
    finder = JobFinder(machine.options)
    assert pids(finder.look(0)) == {"1234567": {71, 72, 81, 82}}
    for pid in (70, 80):
        machine.ended(pid)
    machine.stepd(180, "5", "0")
    assert set(finder.look(5).by_id) == {"1234567", "5"}


def test_groups_that_a_job_makes_itself(machine: Machine) -> None:
    """A container runtime in a step nests deeper; its processes are the step's."""
    version_2(machine)
    finder = JobFinder(machine.options)
    finder.look(0)
    machine.group(f"{V2}/step_0/user/task_1/libpod/inner", (85, 86))
    for now in range(5, 40, 5):
        jobs = finder.look(now)
    assert jobs.by_id["77"].steps["0"] == {81, 82, 85, 86}


def test_steps_and_jobs_come_and_go(machine: Machine) -> None:
    """Also one that goes in the same moment in which another one comes."""
    version_2(machine)
    finder = JobFinder(machine.options)
    finder.look(0)
    shutil.rmtree(machine.cgroup / V2 / "step_0")
    machine.step_2(V2, "1", 90, {0: (91,)})
    assert dict(finder.look(5).by_id["77"].steps) == {"batch": {71, 72}, "1": {91}}
    version_2(machine, f"{SCOPE}/job_78", "78", 170)
    assert set(finder.look(10).by_id) == {"77", "78"}
    shutil.rmtree(machine.cgroup / V2)
    assert set(finder.look(15).by_id) == {"78"}
    shutil.rmtree(machine.cgroup / "system.slice")
    assert set(finder.look(20).by_id) == set()
    version_2(machine, f"{SCOPE}/job_79", "79", 270)
    assert set(finder.look(25).by_id) == {"79"}


def empty(machine: Machine, job: str, content: str = "") -> None:
    for path in (machine.cgroup / job).rglob("cgroup.procs"):
        path.write_text(content)


def test_jobs_without_processes(machine: Machine) -> None:
    """Groups that Slurm left behind do not count; a job between two steps stays for three looks."""
    version_2(machine)
    machine.step_2(f"{SCOPE}/job_66", "0", 60, {0: (61,)})
    empty(machine, f"{SCOPE}/job_66")
    finder = JobFinder(machine.options)
    assert set(finder.look(0).by_id) == {"77"}
    empty(machine, V2)
    assert [set(finder.look(now).by_id) for now in (5, 10, 15)] == [{"77"}, {"77"}, set()]
    empty(machine, V2, "0\n")  # processes outside of the exporter's process-id namespace
    assert pids(finder.look(20)) == {"77": set()}


def mapped(machine: Machine, jobid: str, *gpus: str, **more: Any) -> Path:
    """Leave the prolog's map of a job; returns its path."""
    path = machine.run / "jobs" / f"{jobid}.json"
    path.parent.mkdir(mode=0o755, exist_ok=True)
    facts = {"jobid": jobid, "uid": 1000, "user": "ada", "start": 100, "gpus": gpus}
    path.write_text(json.dumps({"schema_version": 1, **facts, **more}))
    path.chmod(0o644)
    return path


@pytest.mark.parametrize("grouped", [True, False], ids=["control groups", "none"])
def test_a_map_says_that_its_job_lives(machine: Machine, *, grouped: bool) -> None:
    """`salloc` has no process before its first step; the epilog takes the map away."""
    if grouped:
        version_2(machine)
    path = mapped(machine, "78", "4", "5")
    (path.parent / ".79.123").touch()  # a draft of the prolog's
    finder = JobFinder(machine.options)
    for now in (0, 5, 100):
        jobs = finder.look(now)
        assert set(jobs.by_id) == {"78"} | ({"77"} if grouped else set())
        seen = jobs.by_id["78"]
        assert (seen.pids, seen.facts.gpus, seen.facts.user) == (frozenset(), ("4", "5"), "ada")
        assert (seen.facts.uid, seen.facts.start) == (1000, 100)
    assert "78" not in JobFinder(machine.only("77")).look(0).by_id
    path.unlink()
    assert "78" not in finder.look(105).by_id


def test_maps_that_their_epilog_left_behind(machine: Machine) -> None:
    """They end with the next job on their GPUs, or a day after their time limit."""
    version_2(machine)
    mapped(machine, "77", "0")
    mapped(machine, "60", "0")  # 77 has processes
    mapped(machine, "61", "1", "2")
    mapped(machine, "62", "2", start=101)
    mapped(machine, "63", "3", end=200)
    mapped(machine, "64", "4", end=int(time.time()) - 3600)  # the limit may have been extended
    mapped(machine, "65")
    assert set(look(machine).by_id) == {"77", "62", "64", "65"}


def test_inside_of_a_job_only_that_job_is_seen(machine: Machine) -> None:
    """With the facts from the agent, and the user from the kernel."""
    version_2(machine, f"{SCOPE}/s5K1KKYAYG5D00", "77")
    version_2(machine, f"{SCOPE}/job_78", "78", 170)
    jobs = JobFinder(machine.only("77", run="r1", sweep="s", point="3")).look(0)
    assert set(jobs.by_id) == {"77"}
    facts = jobs.by_id["77"].facts
    assert (facts.uid, facts.run, facts.sweep, facts.point) == (1000, "r1", "s", "3")


def test_without_control_groups(machine: Machine) -> None:
    """Environments say it; a job is that of the user who had its number first."""
    batch = {**OF_77, "SLURM_JOB_NAME": "train"}
    machine.process(Task(50, start=10, environment=batch))
    machine.process(Task(51, start=11, environment={**batch, "SLURM_STEP_ID": "0"}))
    machine.process(Task(52, environment={"PATH": "/bin"}))
    machine.process(Task(40, start=20, uid=2000, environment=OF_77))
    jobs = look(machine)
    assert dict(jobs.by_id["77"].steps) == {"batch": {50}, "0": {51}}
    assert jobs.by_id["77"].groups == ()
    assert (jobs.by_id["77"].facts.name, jobs.by_id["77"].facts.uid) == ("train", 1000)
    assert (jobs.job_of(51), jobs.job_of(52), jobs.job_of(40)) == ("77", None, None)


def test_processes_change(machine: Machine) -> None:
    """One starts its program a moment after its fork; an id may come again, and a job's number.

    Facts of an earlier job are not shown for another user's job that gets the same number.
    """
    machine.process(Task(50, environment={"PATH": "/bin"}))
    finder = JobFinder(machine.options)
    assert pids(finder.look(0)) == {}
    machine.process(Task(50, environment={**OF_77, "SLURM_JOB_NAME": "secret"}))
    jobs = finder.look(5)
    assert (pids(jobs), jobs.by_id["77"].facts.name) == ({"77": {50}}, "secret")
    machine.process(Task(50, start=99, environment={"SLURM_JOB_ID": "78"}))
    machine.process(Task(51, uid=1001, environment=OF_77))
    jobs = finder.look(10)
    assert pids(jobs) == {"78": {50}, "77": {51}}
    assert (jobs.by_id["77"].facts.uid, jobs.by_id["77"].facts.name) == (1001, "")


RUNS = Home(Path("/home/alice/.hpml")).cluster  # as the local backend names it


def local(pid: int, cluster: str = RUNS, **more: str) -> Task:
    return Task(pid, environment={**OF_77, "SLURM_CLUSTER_NAME": cluster, **more})


def test_local_runs(machine: Machine) -> None:
    """Their ids differ from those of Slurm's jobs and each other; the prolog's map is ignored."""
    version_2(machine)
    (machine.run / "jobs").mkdir(mode=0o755)
    (machine.run / "jobs/77.json").write_text(
        '{"schema_version": 1, "jobid": "77", "account": "vision"}'
    )
    machine.process(local(50, SLURM_JOB_NAME="train"))
    machine.process(local(51, "local-000000"))
    machine.process(local(71))  # started inside of the job
    machine.process(Task(53, environment={"SLURM_JOB_ID": "78", "SLURM_CLUSTER_NAME": "local-x"}))
    finder = JobFinder(machine.options)
    for now in (0, 5):
        jobs = finder.look(now)
        found = {key: (job.facts.key, set(job.pids)) for key, job in jobs.by_id.items()}
        assert found == {
            "77": ("77", {71, 72, 81, 82}),
            f"{RUNS}-77": (f"{RUNS}-77", {50}),
            "local-000000-77": ("local-000000-77", {51}),
        }
        assert jobs.job_of(50) == f"{RUNS}-77"
    facts = jobs.by_id[f"{RUNS}-77"].facts
    assert (facts.name, facts.account) == ("train", "")
    assert jobs.by_id["77"].facts.account == "vision"


def test_a_local_run_s_own_exporter(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's job of the same number is none of it."""
    version_2(machine)
    machine.process(local(50))
    monkeypatch.setenv("SLURM_CLUSTER_NAME", RUNS)
    told = json.loads(replace(machine.only("77"), cluster=RUNS).to_json())
    options = NodeOptions.from_json(json.dumps(told))
    assert options.cluster != RUNS
    assert pids(JobFinder(options).look(0)) == {f"{RUNS}-77": {50}}


@pytest.mark.parametrize(
    ("number", "program", "is_job"),
    [
        *((number, "", True) for number in ("1", "4294967295")),
        # Those that Slurm gives, up to 32 bits: others would be labels of any length.
        *((number, "", False) for number in ("", "0", "007", "-5", "7.0", "x", "1" * 11)),
        # The site's programs have the job's number, too; those of tasks are the job's.
        *(("77", program, False) for program in ("prolog_slurmd", "epilog_slurmd")),
        ("77", "prolog_task", True),
    ],
)
def test_what_an_environment_must_say(
    machine: Machine, number: str, program: str, is_job: bool
) -> None:
    """A number of a job, in a process that is not the site's."""
    values = {"SLURM_JOB_ID": number, "SLURM_SCRIPT_CONTEXT": program}
    machine.process(Task(50, environment={**values, "SLURM_STEP_ID": "9" * 1000}))
    steps = {jobid: set(job.steps) for jobid, job in look(machine).by_id.items()}
    assert steps == ({number: {"batch"}} if is_job else {})


def test_very_many_jobs(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    """Each user's first ones are shown, four times as many in total; one message reports it."""
    for user in range(6):
        for number in range(10_000 * (user + 1), 10_000 * (user + 1) + MOST_PER_USER + 1):
            environment = {"SLURM_JOB_ID": str(number)}
            machine.process(Task(number, uid=user + 1, start=number, environment=environment))
    finder = JobFinder(machine.options)
    found = [finder.look(now) for now in (0, 5)][-1]
    users = Counter(job.facts.uid for job in found.by_id.values())
    assert users == dict.fromkeys(range(1, 5), MOST_PER_USER)
    assert caplog.text.count("are not shown: the limit") == 1
    last = str(60_000 + MOST_PER_USER)
    assert set(JobFinder(machine.only(last)).look(0).by_id) == {last}, "its own is always shown"


def test_jobs_in_groups_end_the_look_at_environments(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    """Processes that only have a job's variables, or outlived it, are not a job: logged once."""
    finder = JobFinder(machine.options)
    machine.unified()
    machine.group(f"{SCOPE}/system")
    machine.process(Task(50, uid=0, environment={**OF_77, "SLURM_JOB_NAME": "prolog's"}))
    assert [set(finder.look(now).by_id) for now in (0, 60)] == [{"77"}] * 2
    version_2(machine)
    for now in (65, 70, 75):
        job = finder.look(now).by_id["77"]
        assert (job.facts.uid, job.facts.name, set(job.pids)) == (1000, "", {71, 72, 81, 82})
    assert caplog.text == "", "its job is shown"
    machine.process(Task(51, environment={"SLURM_JOB_ID": "78"}))
    assert [set(finder.look(now).by_id) for now in (80, 85, 90)] == [{"77"}] * 3
    assert caplog.text.count("processes of job 78 are in no control group") == 1
    shutil.rmtree(machine.cgroup / V2)
    assert set(finder.look(95).by_id) == set()


def test_jobs_of_one_number_inside_of_a_job(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Local jobs of two directories of records, and a machine that is two nodes of a job."""
    mine = {"SLURM_CLUSTER_NAME": "local-1", "SLURMD_NODENAME": "n1"}
    for pid, more in enumerate(
        (mine, {**mine, "SLURM_CLUSTER_NAME": "local-2"}, {**mine, "SLURMD_NODENAME": "n2"}, {}),
        start=50,
    ):
        machine.process(Task(pid, environment={**OF_77, **more}))
    for name, value in mine.items():
        monkeypatch.setenv(name, value)
    assert pids(JobFinder(machine.only("77")).look(0)) == {"77": {50, 53}}


def test_a_machine_without_anything(machine: Machine) -> None:
    """No control groups, no /proc to speak of: no jobs, and no error."""
    shutil.rmtree(machine.cgroup)
    shutil.rmtree(machine.proc)
    assert pids(look(machine)) == {}
