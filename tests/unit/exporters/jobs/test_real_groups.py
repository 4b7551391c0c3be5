"""Real control groups of version 1, with a process that uses given amounts of resources."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hpml_exporters.jobs import collector as jobs
from hpml_exporters.jobs import processes
from hpml_exporters.options import Context, NodeOptions

from tests.patience import eventually
from tests.storage import in_memory, stored_folder
from tests.unit.exporters.collectors.families import values

CGROUP = Path("/sys/fs/cgroup")
CONTROLLERS = ("freezer", "memory", "cpuacct")
MIB = 1 << 20

# Holds 300 MiB of private and 32 MiB of shared memory, burns 1 s, writes 64 MiB to the disk.
WORK = """
import mmap, os, sys, time
sys.stdin.readline()
held = os.urandom(1 << 16) * (300 << 4)
shared = mmap.mmap(-1, 32 << 20)
for at in range(0, 32 << 20, 4096):
    shared[at] = 1
end = time.process_time() + 1
while time.process_time() < end:
    pass
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
for _ in range(64):
    os.write(fd, b"x" * (1 << 20))
print("done", flush=True)
sys.stdin.readline()
"""


def _writable() -> bool:
    return os.geteuid() == 0 and all((CGROUP / name / "tasks").exists() for name in CONTROLLERS)


pytestmark = pytest.mark.skipif(not _writable(), reason="needs root and control groups, version 1")


@pytest.fixture
def job() -> Iterator[str]:
    """The id of a job whose groups have the layout of Slurm 22.05, below a separate root."""
    jobid = str(10**9 + os.getpid())
    made = [CGROUP / name / f"slurm_test{jobid}" for name in CONTROLLERS]
    for root in made:
        step = root / "uid_0" / f"job_{jobid}" / "step_0"
        (step if root.parent.name == "freezer" else step / "task_0").mkdir(parents=True)
    yield jobid
    for root in made:
        for path, _, _ in os.walk(root, topdown=False):
            os.rmdir(path)


def enter(jobid: str, pid: int) -> None:
    for name in CONTROLLERS:
        step = CGROUP / name / f"slurm_test{jobid}/uid_0/job_{jobid}/step_0"
        step = step if name == "freezer" else step / "task_0"
        (step / "cgroup.procs").write_text(str(pid))


def test_what_a_job_was_told_to_use(job: str) -> None:
    """Memory by kind, CPU time and I/O are the amounts that the process uses."""
    with stored_folder() as directory:
        worker = subprocess.Popen(
            [sys.executable, "-S", "-c", WORK, f"{directory}/file"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            enter(job, worker.pid)
            context = Context(NodeOptions(cluster="c"))
            collectors = (jobs.make(context), processes.make(context))

            def look(now: float) -> dict[tuple[str, ...], float]:
                found: dict[tuple[str, ...], float] = {}
                for one in collectors:
                    found |= values(one.sample(now))
                return {key: value for key, value in found.items() if key[2] == job}

            first = look(0.0)
            worker.stdin.write("go\n")
            worker.stdin.flush()
            assert worker.stdout.readline() == "done\n"
            rss = ("hpml_job_memory_bytes", "c", job, "rss")
            looks = iter(range(10, 5000, 10))
            # the kernel updates memory.stat every 2 s, or later on a busy machine
            eventually(lambda: look(next(looks))[rss] - first[rss] >= 296 * MIB)
            second = look(next(looks))
        finally:
            worker.kill()
            worker.communicate()
        assert first["hpml_job_info", "c", job, "root", *[""] * 6] == 1
        assert context.jobs.now.job_of(worker.pid) == job

        def grown(*key: str) -> float:
            return second[key[0], "c", job, *key[1:]] - first[key[0], "c", job, *key[1:]]

        assert grown("hpml_job_memory_bytes", "rss") / MIB == pytest.approx(300, abs=4)
        assert in_memory() or grown("hpml_job_memory_bytes", "shmem") / MIB == pytest.approx(
            32, abs=1
        )
        assert in_memory() or 60 <= grown("hpml_job_memory_bytes", "cache") / MIB <= 70
        assert second["hpml_job_memory_peak_bytes", "c", job] >= 390 * MIB
        burnt = sum(grown("hpml_job_cpu_seconds_total", mode) for mode in ("user", "system"))
        assert 0.95 <= burnt <= 3
        written = grown("hpml_job_io_syscall_write_bytes_total")
        assert written / MIB == pytest.approx(64, abs=0.1)
        stored = grown("hpml_job_io_write_bytes_total") / MIB
        assert in_memory() or stored == pytest.approx(64, abs=0.5)
        assert second["hpml_job_processes", "c", job] == 1
        third = look(next(looks))
        assert (
            third["hpml_job_io_write_bytes_total", "c", job]
            == second["hpml_job_io_write_bytes_total", "c", job]
        )


def test_a_job_that_the_kernel_ends_for_want_of_memory(job: str) -> None:
    """The kill is counted while the step's group is there."""
    limit = CGROUP / f"memory/slurm_test{job}/uid_0/job_{job}/memory.limit_in_bytes"
    limit.write_text(str(48 * MIB))
    eater = "import sys; sys.stdin.readline(); x = bytearray(200 << 20)"
    worker = subprocess.Popen([sys.executable, "-S", "-c", eater], stdin=subprocess.PIPE)
    enter(job, worker.pid)
    collector = jobs.make(Context(NodeOptions(cluster="c")))
    before = values(collector.sample(0.0))
    worker.communicate(b"go\n")
    assert worker.returncode == -9
    after = values(collector.sample(5.0))
    assert before["hpml_job_memory_limit_bytes", "c", job] == 48 * MIB
    assert before["hpml_job_oom_events_total", "c", job] == 0
    assert after["hpml_job_oom_events_total", "c", job] == 1
