"""The collector of jobs posts them for the others, and shows their groups' counters unchanged."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hpml_exporters.jobs import collector as jobs
from hpml_exporters.jobs.collector import SPECS
from hpml_exporters.options import Context

from tests.unit.exporters.collectors.families import values
from tests.unit.exporters.jobs.machine import SCOPE, V1_MEMORY_STAT, Machine, Task

JOB = f"{SCOPE}/job_77"
TICKS = os.sysconf("SC_CLK_TCK")
MIB = 1 << 20
Files = dict[str, str | None]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def version_2(machine: Machine, files: Files) -> None:
    machine.unified()
    machine.step_2(JOB, "0", machine.stepd(70, "77", "0"), {0: (71, 72)})
    for pid in (71, 72):
        machine.process(Task(pid, uid=3999999))
    counts = {"user": 2_000_000, "system": 500_000, "rss": 300 * MIB, "cache": 3 * MIB}
    write(machine.counts_2(JOB, **counts, shmem=MIB), files)


def version_1(machine: Machine, files: Files) -> None:
    machine.step_1("slurm/uid_3999999/job_77", "0", 70, (71, 72))
    stat = V1_MEMORY_STAT.format(cache=3 * MIB, rss=300 * MIB, shmem=MIB)
    oom = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"
    usual: Files = {
        "cpuacct/job_77/cpuacct.stat": f"user {2 * TICKS}\nsystem {TICKS // 2}\n",
        "memory/job_77/memory.stat": stat,
        "memory/job_77/memory.oom_control": oom.format(0),
        "memory/job_77/step_0/task_0/memory.oom_control": oom.format(1),
    }
    for name, text in {**usual, **files}.items():
        controller, _, below = name.partition("/")
        write(machine.cgroup / controller / "slurm/uid_3999999", {below: text})


def write(directory: Path, files: Files) -> None:
    for name, text in files.items():
        if text is None:
            (directory / name).unlink()
        else:
            (directory / name).write_text(text)


def pressure(total: int) -> str:
    avg = "avg10=0.00 avg60=0.10 avg300=0.01"
    return f"some {avg} total={total}\nfull {avg} total=7\n"


Shown = dict[tuple[str, ...], float]
INFO: tuple[str, ...] = ("info", "3999999", *[""] * 6)
CPU: Shown = {("cpu_seconds_total", "user"): 2.0, ("cpu_seconds_total", "system"): 0.5}
MEMORY: Shown = {
    ("memory_bytes", "rss"): 300 * MIB,
    ("memory_bytes", "cache"): 2 * MIB,
    ("memory_bytes", "shmem"): MIB,
}
USUAL: Shown = {INFO: 1, ("processes",): 2, **CPU, **MEMORY, ("oom_events_total",): 1}
LIMIT, PEAK, CPUS = ("memory_limit_bytes",), ("memory_peak_bytes",), ("cpus",)
V2_REST: Files = {
    "memory.max": "8589934592\n",
    "memory.peak": "400000000\n",
    "cpuset.cpus": "0-3,64-67\n",
    "cpu.pressure": pressure(1_500_000),
    "memory.pressure": pressure(0),
    "io.pressure": pressure(42),
}
WAITED = {"cpu": 1.5, "memory": 0.0, "io": 0.000042}
V1_REST: Files = {
    "cpuset/job_77/cpuset.cpus": "4-5\n",
    "memory/job_77/memory.limit_in_bytes": "4194304000\n",
    "memory/job_77/memory.max_usage_in_bytes": "12345\n",
}
NO_MEMORY: Files = dict.fromkeys(("memory.stat", "memory.max", "memory.events"))
GROUPS: dict[str, tuple[Callable[[Machine, Files], None], Files, Shown]] = {
    # how groups lie, files in them that are not as usual, series without hpml_job_ and the job
    # A missing value (a limit, CPUs that Slurm set, what old kernels do not count) is not a zero.
    "version 2": (version_2, {}, USUAL),
    "the rest of version 2": (
        version_2,
        V2_REST,
        {
            **USUAL,
            LIMIT: 8 << 30,
            PEAK: 400_000_000,
            CPUS: 8,
            **{("pressure_seconds_total", name): value for name, value in WAITED.items()},
        },
    ),
    # Without ConstrainRAMSpace and jobacct_gather/cgroup the controller may be off.
    "no memory controller": (version_2, NO_MEMORY, {INFO: 1, ("processes",): 2, **CPU}),
    "CPUs that are none": (version_2, {"cpuset.cpus": "x"}, USUAL),
    # Ticks, hierarchical memory, and kills counted at the task.
    "version 1": (version_1, {}, USUAL),
    "the rest of version 1": (
        version_1,
        V1_REST,
        USUAL | {LIMIT: 4194304000, PEAK: 12345, CPUS: 2},
    ),
    "no limit in version 1": (
        version_1,
        {"memory/job_77/memory.limit_in_bytes": "9223372036854771712\n"},
        USUAL,
    ),
}


@pytest.mark.parametrize(("lay_out", "files", "expected"), GROUPS.values(), ids=GROUPS)
def test_what_groups_count(
    machine: Machine, lay_out: Callable[[Machine, Files], None], files: Files, expected: Shown
) -> None:
    """Seconds, bytes, and kinds of memory that do not overlap."""
    lay_out(machine, files)
    for pid in (71, 72):
        machine.process(Task(pid, uid=3999999))
    context = Context(machine.options)
    collector = jobs.make(context)
    found = values(collector.sample(0.0))
    assert {key[1:3] for key in found} == {("c", "77")}
    assert {(key[0].removeprefix("hpml_job_"), *key[3:]): n for key, n in found.items()} == expected
    assert context.jobs.now.job_of(72) == "77"
    for controller in machine.cgroup.rglob("*job_77"):
        shutil.rmtree(controller, ignore_errors=True)
    assert values(collector.sample(5.0)) == {}, "a job that ended has no series"
    collector.close()


def test_the_agents_facts_are_shown(machine: Machine) -> None:
    """An exporter inside a job has the job's run."""
    version_2(machine, {})
    options = machine.only(
        *(
            "77",
            3999999,
            "alice",
            "vision",
            "gpu",
            "long",
            "train",
            "70",
            "7",
            1790000000,
            1790003600,
        ),
        *(8, ()),
        *("r1", "s", "4"),
    )
    found = values(jobs.make(Context(options)).sample(0.0))
    assert found["hpml_run_info", "c", "77", "r1", "s", "4"] == 1
    who = ("alice", "vision", "gpu", "long", "train", "70", "7")
    assert found["hpml_job_info", "c", "77", *who] == 1
    assert found["hpml_job_start_timestamp_seconds", "c", "77"] == 1790000000
    assert found["hpml_job_end_timestamp_seconds", "c", "77"] == 1790003600
    assert found["hpml_job_ranks", "c", "77"] == 8


def several(machine: Machine, node: str, ticks: int, kills: dict[str, int]) -> None:
    for controller in ("freezer", "memory", "cpuacct"):
        for step in kills:
            machine.group(f"{controller}/slurm_{node}/uid_5/job_9/step_{step}/task_0", (90,))
    job = f"slurm_{node}/uid_5/job_9"
    write(machine.cgroup / "cpuacct" / job, {"cpuacct.stat": f"user {ticks}\nsystem 0\n"})
    stat = V1_MEMORY_STAT.format(cache=0, rss=1000, shmem=0)
    write(machine.cgroup / "memory" / job, {"memory.stat": stat})
    for step, count in kills.items():
        path = f"step_{step}/task_0/memory.oom_control"
        write(machine.cgroup / "memory" / job, {path: f"under_oom 0\noom_kill {count}\n"})


def test_counters_do_not_go_back_when_a_part_ends(machine: Machine) -> None:
    """Two slurmd of one machine have the job; kills in a step that is over stay counted."""
    several(machine, "node1", 10 * TICKS, {"0": 1})
    several(machine, "node2", 5 * TICKS, {"0": 0})
    collector = jobs.make(Context(machine.options))

    def look(now: float) -> list[float]:
        found = values(collector.sample(now))
        keys = ("cpu_seconds_total", "user"), ("oom_events_total",), ("memory_bytes", "rss")
        return [found[f"hpml_job_{name}", "c", "9", *labels] for name, *labels in keys]

    assert look(0.0) == [15.0, 1, 2000]
    for controller in ("freezer", "memory", "cpuacct"):
        shutil.rmtree(machine.cgroup / controller / "slurm_node2/uid_5/job_9")
        shutil.rmtree(machine.cgroup / controller / "slurm_node1/uid_5/job_9/step_0")
    several(machine, "node1", 11 * TICKS, {"1": 1})
    assert look(5.0) == [16.0, 2, 1000]


def test_series_per_job_are_few() -> None:
    """At most 25 with everything known, with those of its processes."""
    names = [spec.name for spec in SPECS]
    assert len(names) == len(set(names))
    doubled = {"hpml_job_cpu_seconds_total": 2, "hpml_job_memory_bytes": 3}
    doubled["hpml_job_pressure_seconds_total"] = 3
    assert sum(doubled.get(name, 1) for name in names) <= 25
