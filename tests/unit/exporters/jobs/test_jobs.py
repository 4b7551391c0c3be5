"""The collector of jobs posts them for all, and shows what their groups counted."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hpml_exporters.jobs import collector as jobs
from hpml_exporters.jobs.metrics import SPECS
from hpml_exporters.options import Context

from tests.unit.exporters.collectors.families import values
from tests.unit.exporters.jobs.machine import SCOPE, V1_MEMORY_STAT, Machine, Task

JOB = f"{SCOPE}/job_77"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    made.unified()
    stepd = made.stepd(70, "77", "0")
    made.step_2(JOB, "0", stepd, {0: (71, 72)})
    for pid in (71, 72):
        made.process(Task(pid, uid=3999999))
    made.counts_2(JOB, user=2_000_000, system=500_000, rss=300 << 20, cache=2 << 20, shmem=1 << 20)
    return made


def test_a_job_in_full(machine: Machine) -> None:
    """Known things are there, unknown ones are not: no limit, no CPUs, no account, no run."""
    context = Context(machine.options)
    collector = jobs.make(context)
    found = values(collector.sample(0.0))
    assert found == {
        ("hpml_job_info", "c", "77", "3999999", *[""] * 6): 1,
        ("hpml_job_cpu_seconds_total", "c", "77", "user"): 2.0,
        ("hpml_job_cpu_seconds_total", "c", "77", "system"): 0.5,
        ("hpml_job_memory_bytes", "c", "77", "rss"): 300 << 20,
        ("hpml_job_memory_bytes", "c", "77", "cache"): 1 << 20,
        ("hpml_job_memory_bytes", "c", "77", "shmem"): 1 << 20,
        ("hpml_job_oom_events_total", "c", "77"): 1,
        ("hpml_job_processes", "c", "77"): 2,
    }
    assert context.jobs.now.job_of(72) == "77"
    collector.close()


def test_the_agents_facts_are_shown(machine: Machine) -> None:
    """An exporter inside of a job knows its run."""
    options = machine.only(
        *("77", 3999999, "alice", "vision", "gpu", "long", "train", "70", "7", 1790000000, 8, ()),
        *("r1", "s", "4"),
    )
    found = values(jobs.make(Context(options)).sample(0.0))
    assert found["hpml_run_info", "c", "77", "r1", "s", "4"] == 1
    who = ("alice", "vision", "gpu", "long", "train", "70", "7")
    assert found["hpml_job_info", "c", "77", *who] == 1
    assert found["hpml_job_start_timestamp_seconds", "c", "77"] == 1790000000
    assert found["hpml_job_ranks", "c", "77"] == 8


def test_a_job_that_ended_has_no_series(machine: Machine) -> None:
    """Whatever it had counted."""
    collector = jobs.make(Context(machine.options))
    before = values(collector.sample(0.0))
    shutil.rmtree(machine.cgroup / JOB)
    assert before != {}
    assert values(collector.sample(5.0)) == {}


def version_1(machine: Machine, node: str, ticks: int, kills: dict[str, int]) -> None:
    for controller in ("freezer", "memory", "cpuacct"):
        for step in kills:
            machine.group(f"{controller}/slurm_{node}/uid_5/job_9/step_{step}/task_0", (90,))
    job = f"slurm_{node}/uid_5/job_9"
    (machine.cgroup / "cpuacct" / job / "cpuacct.stat").write_text(f"user {ticks}\nsystem 0\n")
    memory = machine.cgroup / "memory" / job
    memory.joinpath("memory.stat").write_text(V1_MEMORY_STAT.format(cache=0, rss=1000, shmem=0))
    for step, count in kills.items():
        path = memory / f"step_{step}/task_0/memory.oom_control"
        path.write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {count}\n")


def test_counters_do_not_go_back_when_a_part_ends(tmp_path: Path) -> None:
    """Two slurmd of one machine have the job; kills in a step that is over stay counted."""
    machine = Machine(tmp_path)
    version_1(machine, "node1", 1000, {"0": 1})
    version_1(machine, "node2", 500, {"0": 0})
    collector = jobs.make(Context(machine.options))
    found = values(collector.sample(0.0))
    user = ("hpml_job_cpu_seconds_total", "c", "9", "user")
    oom = ("hpml_job_oom_events_total", "c", "9")
    assert (found[user], found[oom]) == (15.0, 1)
    assert found["hpml_job_memory_bytes", "c", "9", "rss"] == 2000
    for controller in ("freezer", "memory", "cpuacct"):
        shutil.rmtree(machine.cgroup / controller / "slurm_node2/uid_5/job_9")
        shutil.rmtree(machine.cgroup / controller / "slurm_node1/uid_5/job_9/step_0")
    version_1(machine, "node1", 1100, {"1": 1})
    found = values(collector.sample(5.0))
    assert (found[user], found[oom]) == (16.0, 2)
    assert found["hpml_job_memory_bytes", "c", "9", "rss"] == 1000


def test_series_per_job_are_few(machine: Machine) -> None:
    """At most 25 with everything known, with those of its processes."""
    names = [spec.name for spec in SPECS]
    assert len(names) == len(set(names))
    doubled = {"hpml_job_cpu_seconds_total": 2, "hpml_job_memory_bytes": 3}
    doubled["hpml_job_pressure_seconds_total"] = 3
    assert sum(doubled.get(name, 1) for name in names) <= 25
