"""Jobs are found in every layout of control groups, and without any."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hpml_exporters.jobs import raw
from hpml_exporters.jobs.finder import JobFinder
from hpml_exporters.jobs.board import Jobs

from tests.unit.exporters.attribution.trees import SCOPE, Machine, Task

JOB = "slurm/uid_1000/job_77"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def look(machine: Machine, now: float = 0.0) -> Jobs:
    return JobFinder(machine.options).look(now)


def pids(jobs: Jobs) -> dict[str, set[int]]:
    return {jobid: set(job.pids) for jobid, job in jobs.by_id.items()}


def version_1(machine: Machine, job: str = JOB) -> None:
    machine.step_1(job, "batch", 70, (71, 72))
    machine.step_1(job, "0", 80, (81,))


def version_2(machine: Machine, job: str, jobid: str = "77", first: int = 70) -> None:
    machine.unified()
    stepd = machine.stepd(first, jobid, "batch")
    machine.step_2(job, "batch", stepd, {0: (first + 1, first + 2)})
    stepd = machine.stepd(first + 10, jobid, "0")
    machine.step_2(job, "0", stepd, {0: (first + 11,), 1: (first + 12,)})
    for pid in (first + 1, first + 2, first + 11, first + 12):
        machine.process(Task(pid))


def test_version_1(machine: Machine) -> None:
    """The user is in the path, steps have their processes, slurmstepd is in none."""
    version_1(machine)
    job = look(machine).by_id["77"]
    assert job.facts.uid == 1000
    assert dict(job.steps) == {"batch": {71, 72}, "0": {81}}
    assert job.pids == {71, 72, 81}
    cgroup = machine.options.roots.cgroup
    assert dict(job.groups) == {
        name: f"{cgroup}/{name}/{JOB}" for name in ("freezer", "memory", "cpuacct", "cpuset")
    }


def test_version_1_of_several_slurmd(machine: Machine) -> None:
    """Each has a directory with its node's name; a job on two of them is one job."""
    version_1(machine, "slurm_node1/uid_1000/job_77")
    machine.step_1("slurm_node2/uid_1000/job_77", "0", 90, (91,))
    machine.step_1("slurm_node2/uid_1001/job_78", "0", 92, (93,))
    finder = JobFinder(machine.options)
    jobs = finder.look(0)
    assert pids(jobs) == {"77": {71, 72, 81, 91}, "78": {93}}
    assert jobs.by_id["77"].steps["0"] == {81, 91}
    memory = {one["memory"].split("/")[-3] for one in finder.groups("77")}
    assert memory == {"slurm_node1", "slurm_node2"}


def test_version_1_with_controllers_that_share_a_mount(machine: Machine) -> None:
    """`cpu,cpuacct` is both."""
    mounts = {"freezer": "freezer", "cpuacct": "cpu,cpuacct"}
    machine.step_1(JOB, "0", 80, (81,), mounts)
    job = look(machine).by_id["77"]
    assert job.groups["cpuacct"] == job.groups["cpu"]
    assert job.groups["cpuacct"].endswith(f"/cpu,cpuacct/{JOB}")
    assert "memory" not in job.groups


def test_version_1_without_freezer(machine: Machine) -> None:
    """Where processes are tracked otherwise, the memory controller has them too."""
    machine.group("freezer")
    machine.step_1(JOB, "0", 80, (81,), {"memory": "memory"})
    assert pids(look(machine)) == {"77": {81}}


def test_version_1_under_a_name_of_the_site(machine: Machine) -> None:
    """CgroupPrepend may be anything; what has users with jobs in it is it."""
    machine.group("freezer/user.slice/uid_1000/job_1/step_0", (5,))
    version_1(machine, "batchsystem/main/uid_1000/job_77")
    assert set(look(machine).by_id) == {"77"}


def test_a_controller_that_gets_the_job_later(machine: Machine) -> None:
    """Slurm makes a job's groups one after the other."""
    finder = JobFinder(machine.options)
    machine.step_1(JOB, "0", 80, (81,), {"freezer": "freezer"})
    assert set(finder.look(0).by_id["77"].groups) == {"freezer"}
    machine.step_1(JOB, "0", 80, (81,), {"memory": "memory"})
    assert set(finder.look(5).by_id["77"].groups) == {"freezer", "memory"}


@pytest.mark.parametrize(
    "scope",
    [
        SCOPE,
        "system.slice/node7_slurmstepd.scope",
        "batch.slice/batch-gpu.slice/slurmstepd.scope",
        "docker.slice/docker-0a1b.scope/system.slice/slurmstepd.scope",
    ],
)
def test_version_2(machine: Machine, scope: str) -> None:
    """The scope of one slurmd, of one of several, in a slice of the site, in a container."""
    version_2(machine, f"{scope}/job_77")
    machine.group(f"{scope}/system", (60,))
    machine.group("system.slice/sshd.service", (61,))
    job = look(machine).by_id["77"]
    assert job.facts.uid == 1000
    assert dict(job.steps) == {"batch": {71, 72}, "0": {81, 82}}
    assert dict(job.groups) == {"": f"{machine.options.roots.cgroup}/{scope}/job_77"}


def test_names_by_sluid(machine: Machine) -> None:
    """Slurm 26.05 names the directory by no job id; the title of slurmstepd has it."""
    version_2(machine, f"{SCOPE}/s5K1KKYAYG5D00", "1234567")
    version_2(machine, f"{SCOPE}/job_s5K1KKYAYG5D01", "1234568", 170)
    version_2(machine, f"{SCOPE}/job_99", "99", 270)
    jobs = look(machine)
    assert pids(jobs) == {
        "1234567": {71, 72, 81, 82},
        "1234568": {171, 172, 181, 182},
        "99": {271, 272, 281, 282},
    }


def test_a_sluid_is_kept_when_slurmstepd_is_gone(machine: Machine) -> None:
    """Processes that outlive it still are the job's."""
    version_2(machine, f"{SCOPE}/s5K1KKYAYG5D00", "1234567")
    finder = JobFinder(machine.options)
    finder.look(0)
    for pid in (70, 80):
        machine.ended(pid)
    assert set(finder.look(5).by_id) == {"1234567"}


def test_a_sluid_nobody_explains(machine: Machine) -> None:
    """What is not known is not there, and is asked for again."""
    version_2(machine, f"{SCOPE}/s5K1KKYAYG5D00", "5")
    (machine.proc / "70/cmdline").write_bytes(b"/bin/evil [5.0]\0")
    (machine.proc / "80/cmdline").write_bytes(b"")
    finder = JobFinder(machine.options)
    assert pids(finder.look(0)) == {}
    machine.stepd(80, "5", "0")
    assert set(finder.look(5).by_id) == {"5"}


def test_array_tasks_and_parts_of_het_jobs(machine: Machine) -> None:
    """Each has a number of its own, and that is what counts."""
    for number in (41, 42, 43):
        version_2(machine, f"{SCOPE}/job_{number}", str(number), number * 100)
    assert set(look(machine).by_id) == {"41", "42", "43"}


def test_groups_that_a_job_makes_itself(machine: Machine) -> None:
    """A container runtime in a step nests deeper; its processes are the step's."""
    version_2(machine, f"{SCOPE}/job_77")
    machine.group(f"{SCOPE}/job_77/step_0/user/task_1/libpod/inner", (85, 86))
    assert look(machine).by_id["77"].steps["0"] == {81, 82, 85, 86}


def test_hybrid_mounts(machine: Machine) -> None:
    """Controllers of version 1 beside an empty version 2."""
    machine.unified("unified")
    machine.group("unified/system.slice/ssh.service", (5,))
    version_1(machine)
    assert pids(look(machine)) == {"77": {71, 72, 81}}


def test_a_place_that_only_slurmstepd_knows(machine: Machine) -> None:
    """Where no search by name would look, /proc/PID/cgroup of slurmstepd says it."""
    version_2(machine, "payload/odd.service/jobs/job_77")
    path = "0::/payload/odd.service/jobs/job_77/step_0/slurm\n"
    (machine.proc / "80/cgroup").write_text(path)
    assert set(look(machine).by_id) == {"77"}


def test_steps_come_and_go(machine: Machine) -> None:
    """Also one that goes in the same moment in which another one comes."""
    version_2(machine, f"{SCOPE}/job_77")
    finder = JobFinder(machine.options)
    finder.look(0)
    shutil.rmtree(machine.cgroup / SCOPE / "job_77/step_0")
    machine.step_2(f"{SCOPE}/job_77", "1", 90, {0: (91,)})
    assert dict(finder.look(5).by_id["77"].steps) == {"batch": {71, 72}, "1": {91}}
    version_2(machine, f"{SCOPE}/job_78", "78", 170)
    assert set(finder.look(10).by_id) == {"77", "78"}
    shutil.rmtree(machine.cgroup / SCOPE / "job_77")
    assert set(finder.look(15).by_id) == {"78"}


def test_groups_that_were_left_behind_are_no_job(machine: Machine) -> None:
    """Slurm does not always remove them; nothing of that job is here any more."""
    version_2(machine, f"{SCOPE}/job_77")
    machine.step_2(f"{SCOPE}/job_66", "0", 60, {0: (61,)})
    for path in (machine.cgroup / SCOPE / "job_66").rglob("cgroup.procs"):
        path.write_text("")
    assert set(look(machine).by_id) == {"77"}


def test_a_job_between_two_steps_stays(machine: Machine) -> None:
    """It has no process for a moment; after three looks it is taken for over."""
    version_2(machine, f"{SCOPE}/job_77")
    finder = JobFinder(machine.options)
    finder.look(0)
    step = machine.cgroup / SCOPE / "job_77/step_0"
    for path in (machine.cgroup / SCOPE / "job_77").rglob("cgroup.procs"):
        path.write_text("")
    assert [set(finder.look(now).by_id) for now in (5, 10, 15)] == [{"77"}, {"77"}, set()]
    (step / "slurm/cgroup.procs").write_text("80\n")
    assert set(finder.look(20).by_id) == {"77"}


def test_processes_without_an_id_here_are_processes(machine: Machine) -> None:
    """The kernel shows 0 for those outside of the exporter's process-id namespace."""
    version_2(machine, f"{SCOPE}/job_77")
    for path in (machine.cgroup / SCOPE / "job_77").rglob("cgroup.procs"):
        path.write_text("0\n")
    assert pids(look(machine)) == {"77": set()}


def test_unchanged_directories_are_not_listed_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link count says when one has changed."""
    version_2(machine, f"{SCOPE}/job_77")
    finder = JobFinder(machine.options)
    finder.look(0)
    listed: list[str] = []
    real = raw.subdirectories

    def subdirectories(path: str) -> list[str] | None:
        listed.append(path)
        return real(path)

    monkeypatch.setattr(raw, "subdirectories", subdirectories)
    assert len(finder.look(5).by_id["77"].pids) == 4
    assert listed == []
    machine.step_2(f"{SCOPE}/job_77", "1", 90, {0: (91,)})
    assert len(finder.look(10).by_id["77"].pids) == 5
    assert [path for path in listed if path.endswith("/step_batch")] == []


def test_a_root_that_goes_while_it_is_read(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault no test can time: all groups are removed after they were listed."""
    version_2(machine, f"{SCOPE}/job_77")
    finder = JobFinder(machine.options)
    real = raw.numbers

    def numbers(path: str) -> list[int] | None:
        shutil.rmtree(machine.cgroup / "system.slice", ignore_errors=True)
        return real(path)

    monkeypatch.setattr(raw, "numbers", numbers)
    assert pids(finder.look(0)) == {}
    monkeypatch.undo()
    version_2(machine, f"{SCOPE}/job_78", "78", 170)
    assert set(finder.look(5).by_id) == {"78"}


def test_inside_of_a_job_only_that_job_is_seen(machine: Machine) -> None:
    """With what the agent said of it, which the kernel's user completes."""
    version_2(machine, f"{SCOPE}/s5K1KKYAYG5D00", "77")
    version_2(machine, f"{SCOPE}/job_78", "78", 170)
    jobs = JobFinder(machine.only("77", run="r1", sweep="s", point="3")).look(0)
    assert set(jobs.by_id) == {"77"}
    facts = jobs.by_id["77"].facts
    assert (facts.uid, facts.run, facts.sweep, facts.point) == (1000, "r1", "s", "3")


def test_without_control_groups(machine: Machine) -> None:
    """Environments of the processes that may be read say it: linuxproc, a laptop, hpml local."""
    batch = {"SLURM_JOB_ID": "77", "SLURM_JOB_NAME": "train", "PATH": "/bin"}
    machine.process(Task(50, environment=batch))
    machine.process(Task(51, environment={**batch, "SLURM_STEP_ID": "0"}))
    machine.process(Task(52, environment={"PATH": "/bin"}))
    jobs = look(machine)
    assert dict(jobs.by_id["77"].steps) == {"batch": {50}, "0": {51}}
    assert jobs.by_id["77"].groups == {}
    assert jobs.by_id["77"].facts.name == "train"
    assert jobs.job_of(51) == "77"
    assert jobs.job_of(52) is None


def test_nobody_enters_the_job_of_another_user(machine: Machine) -> None:
    """An environment says what its user likes; the job is that of who had its number first."""
    machine.process(Task(50, uid=1000, start=10, environment={"SLURM_JOB_ID": "77"}))
    machine.process(Task(40, uid=2000, start=20, environment={"SLURM_JOB_ID": "77"}))
    job = look(machine).by_id["77"]
    assert job.facts.uid == 1000
    assert job.pids == {50}


def test_a_process_that_starts_its_program_a_moment_later(machine: Machine) -> None:
    """It has the new environment then, and the old id."""
    machine.process(Task(50, environment={"PATH": "/bin"}))
    finder = JobFinder(machine.options)
    assert pids(finder.look(0)) == {}
    machine.process(Task(50, environment={"SLURM_JOB_ID": "77"}))
    assert pids(finder.look(5)) == {"77": {50}}


def test_an_id_that_another_process_has_by_now(machine: Machine) -> None:
    """Within a few looks its start time tells."""
    machine.process(Task(50, start=10, environment={"SLURM_JOB_ID": "77"}))
    finder = JobFinder(machine.options)
    finder.look(0)
    machine.process(Task(50, start=99, environment={"SLURM_JOB_ID": "78"}))
    for now in range(5, 70, 5):
        jobs = finder.look(now)
    assert pids(jobs) == {"78": {50}}


def test_control_groups_win(machine: Machine) -> None:
    """A made-up number in an environment makes no job where Slurm has control groups."""
    version_2(machine, f"{SCOPE}/job_77")
    machine.process(Task(500, environment={"SLURM_JOB_ID": "4711"}))
    assert set(look(machine).by_id) == {"77"}


def test_the_environment_fills_in(machine: Machine) -> None:
    """What Slurm told the job, and the run of hpml; of a step that is of that job."""
    version_2(machine, f"{SCOPE}/job_77")
    values = {
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_ACCOUNT": "vision",
        "SLURM_JOB_PARTITION": "gpu",
        "SLURM_JOB_NAME": "train",
        "SLURM_JOB_GPUS": "GPU-1a,GPU-3c",
        "HPML_RUN_DIR": "/records/runs/20261121-x7/",
    }
    machine.process(Task(81, environment={**values, "SLURM_JOB_ID": "76", "SLURM_JOB_NAME": "no"}))
    machine.process(Task(82, environment=values))
    facts = look(machine).by_id["77"].facts
    assert (facts.account, facts.partition, facts.name) == ("vision", "gpu", "train")
    assert (facts.gpus, facts.run) == (("GPU-1a", "GPU-3c"), "20261121-x7")


def test_numbers_of_gpus_in_an_environment_tell_of_none(machine: Machine) -> None:
    """They count places in gres.conf, which only the site's prolog can translate."""
    version_2(machine, f"{SCOPE}/job_77")
    machine.process(Task(82, environment={"SLURM_JOB_ID": "77", "SLURM_JOB_GPUS": "1,3"}))
    assert look(machine).by_id["77"].facts.gpus is None


def test_the_run_is_told_by_a_child_of_the_batch_shell(machine: Machine) -> None:
    """Slurm starts the shell with its own variables; hpml's script adds the run's for the rest."""
    version_1(machine)
    values = {"SLURM_JOB_ID": "77", "SLURM_JOB_NAME": "mine", "SLURM_JOB_PARTITION": "gpu"}
    machine.process(Task(71, environment=values))
    finder = JobFinder(machine.options)
    facts = finder.look(0.0).by_id["77"].facts
    assert (facts.name, facts.run) == ("mine", "")
    step = {**values, "SLURM_JOB_NAME": "other", "HPML_RUN_DIR": "/records/runs/20261121-x7"}
    machine.process(Task(81, environment=step))
    facts = finder.look(5.0).by_id["77"].facts
    assert (facts.name, facts.partition, facts.run) == ("mine", "gpu", "20261121-x7")


def test_a_machine_without_anything(machine: Machine) -> None:
    """No control groups, no /proc to speak of: no jobs, and no error."""
    shutil.rmtree(machine.cgroup)
    shutil.rmtree(machine.proc)
    assert pids(look(machine)) == {}
