"""What control groups count, read as the kernel writes it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hpml_exporters.jobs.usage import Usage, count_cpus, read_usage

from tests.unit.exporters.jobs.machine import V1_MEMORY_STAT, Machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def version_2(machine: Machine) -> Path:
    machine.group("job_1/step_0/user/task_0", (5,))
    return machine.counts_2(
        "job_1", user=1_500_000, system=250_000, rss=300 << 20, cache=64 << 20, shmem=16 << 20
    )


def usage(groups: dict[str, str]) -> Usage:
    return read_usage(groups)


def counted(found: Usage) -> dict[tuple[str, str], float]:
    """What is counted, by what and mode, over all groups."""
    sums: dict[tuple[str, str], float] = {}
    for (_, what, mode), value in found.counters.items():
        sums[what, mode] = sums.get((what, mode), 0) + value
    return sums


def test_version_2(machine: Machine) -> None:
    """Microseconds, bytes, and kinds of memory that do not overlap."""
    found = usage({"": str(version_2(machine))})
    assert counted(found) == {("cpu", "user"): 1.5, ("cpu", "system"): 0.25, ("oom", ""): 1}
    assert found.memory == {"rss": 300 << 20, "cache": 48 << 20, "shmem": 16 << 20}
    # Not said are a limit, CPUs that Slurm set, and what old kernels do not count: never 0.
    assert (found.limit, found.peak, found.cpus) == (None, None, None)


def test_the_rest_of_version_2(machine: Machine) -> None:
    """Limit, peak, CPUs and pressure, where they are."""
    path = version_2(machine)
    path.joinpath("memory.max").write_text("8589934592\n")
    path.joinpath("memory.peak").write_text("400000000\n")
    path.joinpath("cpuset.cpus").write_text("0-3,64-67\n")
    for name, total in (("cpu", 1500000), ("memory", 0), ("io", 42)):
        path.joinpath(f"{name}.pressure").write_text(
            f"some avg10=0.00 avg60=0.10 avg300=0.01 total={total}\n"
            "full avg10=0.00 avg60=0.00 avg300=0.00 total=7\n"
        )
    found = usage({"": str(path)})
    assert (found.limit, found.peak, found.cpus) == (8 << 30, 400_000_000, 8)
    pressure = {key[1]: value for key, value in counted(found).items() if key[0] == "pressure"}
    assert pressure == {"cpu": 1.5, "memory": 0.0, "io": 0.000042}


def test_memory_not_counted(machine: Machine) -> None:
    """Slurm without ConstrainRAMSpace and jobacct_gather/cgroup may leave the controller off."""
    path = version_2(machine)
    for name in ("memory.stat", "memory.max", "memory.events"):
        path.joinpath(name).unlink()
    found = usage({"": str(path)})
    assert (found.memory, found.limit) == ({}, None)
    assert counted(found) == {("cpu", "user"): 1.5, ("cpu", "system"): 0.25}


def version_1(machine: Machine) -> dict[str, str]:
    groups = {}
    for name in ("memory", "cpuacct", "cpuset"):
        machine.group(f"{name}/slurm/uid_0/job_1/step_0/task_0", (5,))
        groups[name] = str(machine.cgroup / name / "slurm/uid_0/job_1")
    memory, cpuacct, cpuset = (Path(groups[name]) for name in ("memory", "cpuacct", "cpuset"))
    cpuacct.joinpath("cpuacct.stat").write_text("user 250\nsystem 50\n")
    cpuset.joinpath("cpuset.cpus").write_text("4-5\n")
    stat = V1_MEMORY_STAT.format(cache=64 << 20, rss=300 << 20, shmem=16 << 20)
    memory.joinpath("memory.stat").write_text(stat)
    memory.joinpath("memory.limit_in_bytes").write_text("9223372036854771712\n")
    memory.joinpath("memory.max_usage_in_bytes").write_text("12345\n")
    for path, kills in ((memory, 0), (memory / "step_0", 0), (memory / "step_0/task_0", 1)):
        text = f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n"
        path.joinpath("memory.oom_control").write_text(text)
    return groups


def test_version_1(machine: Machine) -> None:
    """Ticks, hierarchical memory, and kills counted at the task."""
    found = usage(version_1(machine))
    ticks = os.sysconf("SC_CLK_TCK")
    cpu = {("cpu", "user"): 250 / ticks, ("cpu", "system"): 50 / ticks}
    assert counted(found) == {**cpu, ("oom", ""): 1}
    assert found.memory == {"rss": 300 << 20, "cache": 48 << 20, "shmem": 16 << 20}
    assert (found.limit, found.peak, found.cpus) == (None, 12345, 2)
    groups = version_1(machine)
    Path(groups["memory"], "memory.limit_in_bytes").write_text("4194304000\n")
    assert usage(groups).limit == 4194304000


def test_groups_that_are_gone() -> None:
    """Nothing, and no error."""
    assert usage({"": "/nonexistent/job_1"}) == Usage()
    assert usage({"memory": "/nonexistent/m", "cpuacct": "/nonexistent/c"}) == Usage()


@pytest.mark.parametrize(
    ("text", "count"),
    [("0", 1), ("0-3,8", 5), ("", None), ("0-255", 256), ("0,2,4-5", 4), ("x", None)],
)
def test_lists_of_cpus(text: str, count: int | None) -> None:
    """As the kernel writes them."""
    assert count_cpus(text) == count
