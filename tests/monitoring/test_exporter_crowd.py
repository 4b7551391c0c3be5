"""Ten thousand processes on a node: read in time, scraped meanwhile, and gone in any order.

The processes are a fixture: a tree that looks like /proc and the control groups of version 2. So
many real ones would take gigabytes of the machine's memory.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.monitoring.prometheus_support import static
from tests.unit.exporters.jobs.machine import SCOPE, Machine, Task

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.monitoring.exporter_support import StartExporter
    from tests.monitoring.prometheus_support import BootPrometheus

JOBS = 20
PROCESSES = 500  # of each job
WRITTEN = 4096  # bytes by each process


def pids_of(number: int) -> range:
    """Process ids of a job."""
    return range(100_000 + number * PROCESSES, 100_000 + (number + 1) * PROCESSES)


@pytest.fixture(scope="module")
def crowd() -> Iterator[Machine]:
    """A node with 20 jobs of 500 processes, in memory."""
    folder = Path(tempfile.mkdtemp(prefix="hpml-crowd-", dir="/dev/shm"))
    try:
        machine = Machine(folder)
        machine.unified()
        for number in range(JOBS):
            group = f"{SCOPE}/job_{number}"
            stepd = machine.stepd(50_000 + number, str(number), "batch")
            machine.step_2(group, "batch", stepd, {0: tuple(pids_of(number))})
            machine.counts_2(group, user=9_000_000, system=1_000_000, rss=4096, cache=0, shmem=0)
            for pid in pids_of(number):
                machine.process(Task(pid, write_bytes=WRITTEN, environment={}))
        yield machine
    finally:
        shutil.rmtree(folder)


def test_ten_thousand_processes(
    crowd: Machine, exporter: StartExporter, prometheus: BootPrometheus
) -> None:
    """Each is counted; what ended stays in the sums."""
    roots = [f"{name}={getattr(crowd, name)}" for name in ("proc", "cgroup", "run")]
    rhythm = ("--job-interval", "1", "--process-interval", "1")
    here = exporter(*rhythm, *(word for one in roots for word in ("--root", one)))
    server = prometheus([static("node", here.address)])
    server.wait_for(f"sum(hpml_job_processes) == {JOBS * PROCESSES}")
    # a look at processes has a budget of time: what is left over is read at the next one
    whole = JOBS * PROCESSES * WRITTEN
    server.wait_for(f"sum(hpml_job_io_write_bytes_total) == {whole}")
    written = server.query("hpml_job_io_write_bytes_total")
    assert [one.value for one in written] == [PROCESSES * WRITTEN] * JOBS
    assert server.value("sum(hpml_job_cpu_seconds_total)") == JOBS * 10
    # one job ends as a whole, another loses every second process, while they are read
    for number, gone in ((3, list(pids_of(3))), (7, list(pids_of(7))[::2])):
        for pid in gone:
            crowd.ended(pid)
        left = tuple(pid for pid in pids_of(number) if pid not in gone)
        task = crowd.cgroup / f"{SCOPE}/job_{number}/step_batch/user/task_0"
        (task / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in left))
    shutil.rmtree(crowd.cgroup / f"{SCOPE}/job_3")
    server.wait_for(f"sum(hpml_job_processes) == {(JOBS - 1) * PROCESSES - PROCESSES // 2}")
    assert server.value('hpml_job_io_write_bytes_total{jobid="7"}') == PROCESSES * WRITTEN
    server.wait_for('{jobid="3"}', lambda found: not found)
    assert server.query("hpml_exporter_up == 0") == []
    assert server.query("hpml_exporter_errors_total > 0") == []
    assert server.counters_that_fell("5m", "node") == []
    assert not server.was_refused("node", "5m")
