"""What collectors say of real jobs: in control groups, on several slurmd, and without groups."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hpml_exporters.attribution.jobs import JobFacts
from hpml_exporters.collectors import jobs, processes
from hpml_exporters.context import Context
from hpml_exporters.options import NodeOptions
from hpml_exporters.roots import Roots

from tests.cluster.conftest import SlurmCluster, booted
from tests.cluster.hpml_on_slurm import eventually, install_prolog
from tests.storage import in_memory, stored_folder

MIB = 1 << 20
GROUPS = """\
ProctrackType=proctrack/cgroup
TaskPlugin=task/cgroup
JobAcctGatherType=jobacct_gather/cgroup
PrologFlags=Alloc,Contain
"""
# Holds, burns and writes what it is told, says so, and stays.
WORK = """\
#!/bin/bash
#SBATCH --output={where}/%j.out
exec {python} -S - "$1" "$2" "$3" {where}/$SLURM_JOB_ID <<'END'
import os, sys, time
memory, seconds, size, path = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
held = os.urandom(1 << 16) * (memory << 4)
end = time.process_time() + seconds
while time.process_time() < end:
    pass
fd = os.open(path + ".data", os.O_WRONLY | os.O_CREAT)
for _ in range(size):
    os.write(fd, b"x" * (1 << 20))
open(path + ".done", "w").close()
time.sleep(300)
END
"""


@dataclass
class Site:
    """A cluster, a folder on the real disk that its nodes see, and what the exporter is told."""

    cluster: SlurmCluster
    where: Path
    options: NodeOptions

    def submit(self, memory: int, seconds: float, size: int, *options: str) -> str:
        """Submit the work; returns the job's id."""
        command = ["sbatch", "--parsable", *options, str(self.where / "work.sh")]
        done = self.cluster.run(*command, str(memory), str(seconds), str(size))
        return done.stdout.strip()

    def wait(self, *paths: str) -> None:
        """Wait until the work says that it is done."""
        eventually(lambda: all((self.where / path).exists() for path in paths), what=str(paths))

    def cancel(self, *jobids: str) -> None:
        """End jobs, and wait until their epilogs have run."""
        self.cluster.run("scancel", *jobids)
        listing = ("squeue", "-h", "-o", "%A")
        eventually(lambda: not {*self.cluster.run(*listing).stdout.split()} & {*jobids})


class Exporter:
    """The two collectors together."""

    def __init__(self, options: NodeOptions) -> None:
        self.context = Context(options)
        self.collectors = (jobs.make(self.context), processes.make(self.context))
        self.now = 0.0

    def sample(self) -> dict[tuple[str, ...], float]:
        """All series, none of them twice."""
        self.now += 10
        found: dict[tuple[str, ...], float] = {}
        for collector in self.collectors:
            for family in collector.sample(self.now):
                for sample in family.samples:
                    key = (family.spec.name, *sample.labels)
                    assert key not in found
                    assert isinstance(sample.value, int | float)
                    found[key] = sample.value
        return found


def of(found: dict[tuple[str, ...], float], jobid: str) -> dict[tuple[str, ...], float]:
    """The series of one job, without its id in the keys."""
    return {(key[0], *key[2:]): value for key, value in found.items() if key[1] == jobid}


def burnt(found: dict[tuple[str, ...], float]) -> float:
    """CPU seconds; a loop that reads a clock spends most of them in the kernel."""
    return sum(found["hpml_job_cpu_seconds_total", mode] for mode in ("user", "system"))


@contextmanager
def place() -> Iterator[Path]:
    """A folder that the nodes see, with the work in it."""
    with stored_folder() as folder:
        folder.chmod(0o755)
        where = folder / "shared"
        where.mkdir()
        python = shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin") or "python3"
        work = WORK.replace("{where}", str(where)).replace("{python}", python)
        (where / "work.sh").write_text(work)
        yield where


def own_cluster(where: Path, settings: str) -> AbstractContextManager[SlurmCluster]:
    """Two nodes, whose jobs have other numbers than those of any cluster beside it."""
    path = where / "own.conf"
    path.write_text(f"{settings}FirstJobId={100_000 + time.time_ns() // 1000 % 60_000_000}\n")
    command = ("--nodes", "2", "--cpus", "4", "--gpus", "2", "--no-accounting")
    return booted(*command, "--slurm-conf", path, shares=[where])


@pytest.fixture(scope="module")
def grouped() -> Iterator[Site]:
    """Two slurmd of one machine with control groups, and our prolog and epilog."""
    if not Path("/sys/fs/cgroup/freezer/tasks").exists():
        pytest.skip("HARDWARE: no control groups of version 1 here")
    with place() as where:
        options = NodeOptions(roots=Roots(run=str(where / "run")))
        with own_cluster(where, GROUPS + install_prolog(where)) as cluster:
            yield Site(cluster, where, options)


def test_two_jobs_share_a_node(grouped: Site) -> None:
    """Each has what it was told to use, and the GPUs that Slurm gave it."""
    first = grouped.submit(300, 1.0, 64, "-wnode1", "-n1", "--gpus=1", "-Jheavy")
    second = grouped.submit(50, 0.0, 0, "-wnode1", "-n1", "--gpus=1", "-Jlight")
    exporter = Exporter(grouped.options)
    exporter.sample()
    grouped.wait(f"{first}.done", f"{second}.done")
    rss = ("hpml_job_memory_bytes", "rss")

    def both() -> list[dict[tuple[str, ...], float]]:
        found = exporter.sample()
        heavy, light = of(found, first), of(found, second)
        right = heavy[rss] / MIB == pytest.approx(300, abs=20)
        return [heavy, light] if right and light[rss] / MIB == pytest.approx(50, abs=20) else []

    # The kernel brings memory.stat up to date every 2 s.
    heavy, light = eventually(both, what="300 and 50 MiB")
    assert 0.95 <= burnt(heavy) <= 10
    assert burnt(heavy) - burnt(light) >= 0.7  # both have a Python and Slurm's own processes
    written = ("hpml_job_io_write_bytes_total",)
    if not in_memory():
        assert heavy[written] / MIB == pytest.approx(64, abs=1)
    assert light[written] / MIB <= 1
    assert heavy["hpml_job_info", "root", "", "main", "heavy"] == 1
    seen = exporter.context.jobs.now.by_id
    given = {jobid: seen[jobid].facts.gpus for jobid in (first, second)}
    for jobid, gpus in given.items():
        shown = grouped.cluster.run("scontrol", "show", "job", "-d", jobid).stdout
        assert gpus is not None
        assert f"(IDX:{','.join(gpus)})" in shown
    assert sorted(str(gpus) for gpus in given.values()) == ["('0',)", "('1',)"]
    assert "extern" in seen[first].steps
    grouped.cancel(first, second)
    left = exporter.sample()
    assert (of(left, first), of(left, second)) == ({}, {})
    assert list((grouped.where / "run" / "jobs").iterdir()) == []


def test_the_map_of_a_running_job(grouped: Site) -> None:
    """The real prolog's file says what Slurm knows, and hides nothing of a job without GPUs.

    The real epilog removes it, and an old draft with it.
    """
    jobid = grouped.submit(1, 0.0, 0, "-wnode2", "-n1")
    grouped.wait(f"{jobid}.done")
    jobs = grouped.where / "run" / "jobs"
    value = json.loads((jobs / f"{jobid}.json").read_text())
    old, new = jobs / ".1.2", jobs / ".3.4"  # as prologs that were killed leave them
    for draft in (old, new):
        draft.touch()
    os.utime(old, (time.time() - 720,) * 2)
    grouped.cancel(jobid)
    eventually(lambda: not old.exists() and not (jobs / f"{jobid}.json").exists())
    new.unlink()  # raises where that was swept as well
    assert value == {
        "schema_version": 1,
        "jobid": jobid,
        "uid": 0,
        "user": "root",
        "account": "",
        "partition": "main",
        "name": "",
        "gpus": [],
    }


def test_a_job_on_two_slurmd_of_one_machine(grouped: Site) -> None:
    """It is one job with the processes and the memory of both."""
    script = f"srun -N2 -n2 bash {grouped.where}/work.sh 100 0 0"
    command = ("sbatch", "--parsable", "-N2", "-n2", "-o/dev/null", f"--wrap={script}")
    jobid = grouped.cluster.run(*command).stdout.strip()
    exporter = Exporter(grouped.options)

    def held() -> float:
        rss = of(exporter.sample(), jobid).get(("hpml_job_memory_bytes", "rss"), 0)
        return rss if rss >= 200 * MIB else 0

    assert eventually(held) / MIB == pytest.approx(200, abs=30)
    seen = exporter.context.jobs.now.by_id[jobid]
    assert {"batch", "extern", "0"} == set(seen.steps)
    assert len(seen.steps["0"]) == 2
    grouped.cancel(jobid)


def test_array_tasks_are_jobs_of_their_own(grouped: Site) -> None:
    """By the number that Slurm gave each of them."""
    command = ("sbatch", "--parsable", "--array=1-3", "-o/dev/null", "--wrap=sleep 600")
    array = grouped.cluster.run(*command).stdout.strip()
    exporter = Exporter(grouped.options)

    def running() -> list[str]:
        rows = grouped.cluster.run("squeue", "-h", "-tR", "-o", "%F %A").stdout.splitlines()
        ids = [row.split()[1] for row in rows if row.split()[0] == array]
        exporter.sample()
        return ids if len(ids) == 3 and {*ids} <= {*exporter.context.jobs.now.by_id} else []

    grouped.cancel(*eventually(running))


def test_inside_of_a_job_only_that_job(grouped: Site) -> None:
    """The other job of the node is not looked at."""
    ids = [grouped.submit(1, 0.0, 0, "-wnode1", "-n1") for _ in range(2)]
    grouped.wait(*(f"{jobid}.done" for jobid in ids))
    options = replace(grouped.options, job=JobFacts(ids[0], run="r1"))
    found = Exporter(options).sample()
    assert {key[1] for key in found} == {ids[0]}
    assert found["hpml_run_info", ids[0], "r1", "", ""] == 1
    grouped.cancel(*ids)


@pytest.fixture
def bare() -> Iterator[Site]:
    """Slurm tracks processes without control groups, and has no prolog."""
    with place() as where:
        (where / "nothing").mkdir()  # other clusters of this machine may have groups
        options = NodeOptions(roots=Roots(cgroup=str(where / "nothing"), run=str(where / "run")))
        with own_cluster(where, "") as cluster:
            yield Site(cluster, where, options)


def test_without_control_groups(bare: Site) -> None:
    """Processes are tracked by Slurm alone: environments say whose they are."""
    jobid = bare.submit(300, 1.0, 64, "-n1", "--gpus=1", "-Jbare")
    exporter = Exporter(bare.options)
    exporter.sample()
    bare.wait(f"{jobid}.done")
    found = of(exporter.sample(), jobid)
    assert found["hpml_job_info", "root", "", "main", "bare"] == 1
    assert exporter.context.jobs.now.by_id[jobid].facts.gpus is None  # numbers alone
    assert found["hpml_job_memory_bytes", "rss"] / MIB == pytest.approx(300, abs=20)
    assert 0.95 <= burnt(found) <= 10
    if not in_memory():
        assert found["hpml_job_io_write_bytes_total",] / MIB == pytest.approx(64, abs=1)
    bare.cancel(jobid)
    assert of(exporter.sample(), jobid) == {}
