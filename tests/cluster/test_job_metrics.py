"""What collectors say of real jobs in control groups, on several slurmd of one machine."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hpml_exporters.jobs import collector as jobs
from hpml_exporters.jobs import processes
from hpml_exporters.jobs.board import JobFacts
from hpml_exporters.options import Context, NodeOptions, Roots

from tests.cluster.conftest import SlurmCluster, booted
from tests.cluster.hpml_on_slurm import eventually, install_prolog
from tests.storage import stored_folder

MIB = 1 << 20
GROUPS = """\
ProctrackType=proctrack/cgroup
TaskPlugin=task/cgroup
JobAcctGatherType=jobacct_gather/cgroup
PrologFlags=Alloc,Contain
"""
# Allocates the given MiB, reports it, and keeps running.
WORK = """\
#!/bin/bash
#SBATCH --output={where}/%j.out
exec {python} -S - "$1" {where}/$SLURM_JOB_ID.done <<'END'
import os, sys, time
held = os.urandom(1 << 16) * (int(sys.argv[1]) << 4)
open(sys.argv[2], "w").close()
time.sleep(300)
END
"""


@dataclass
class Site:
    """A cluster, a folder on the real disk that its nodes see, and the exporter's options."""

    cluster: SlurmCluster
    where: Path
    options: NodeOptions

    def submit(self, *options: str) -> str:
        """Submit work, and wait until it runs; returns the job's id."""
        command = ["sbatch", "--parsable", *options, str(self.where / "work.sh"), "1"]
        jobid = self.cluster.run(*command).stdout.strip()
        eventually((self.where / f"{jobid}.done").exists)
        return jobid

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
        series: dict[tuple[str, ...], float] = {}
        for collector in self.collectors:
            for family in collector.sample(self.now):
                for sample in family.samples:
                    key = (sample.name, *sample.labels.values())
                    assert key not in series
                    series[key] = sample.value
        return series


@pytest.fixture(scope="module")
def grouped() -> Iterator[Site]:
    """Two slurmd of one machine with control groups, and our prolog and epilog."""
    if not Path("/sys/fs/cgroup/freezer/tasks").exists():
        pytest.skip("HARDWARE: no control groups of version 1 here")
    with stored_folder() as folder:
        folder.chmod(0o755)
        where = folder / "shared"
        where.mkdir()
        python = shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin") or "python3"
        work = WORK.replace("{where}", str(where)).replace("{python}", python)
        (where / "work.sh").write_text(work)
        # its jobs have other numbers than those of any other cluster here
        first = f"FirstJobId={100_000 + time.time_ns() // 1000 % 60_000_000}\n"
        (where / "own.conf").write_text(GROUPS + install_prolog(where) + first)
        command = ("--nodes", "2", "--cpus", "4", "--gpus", "2", "--no-accounting")
        with booted(*command, "--slurm-conf", where / "own.conf", shares=[where]) as cluster:
            yield Site(cluster, where, NodeOptions(roots=Roots(run=str(where / "run"))))


def test_the_map_of_a_running_job(grouped: Site) -> None:
    """The real prolog's file has the facts from Slurm, and is complete for a job without GPUs.

    The real epilog removes it, and an old draft with it.
    """
    jobid = grouped.submit("-wnode2", "-n1")
    jobs = grouped.where / "run" / "jobs"
    value = json.loads((jobs / f"{jobid}.json").read_text())
    old, new = jobs / ".1.2", jobs / ".3.4"  # as prologs that were killed leave them
    for draft in (old, new):
        draft.touch()
    os.utime(old, (time.time() - 720,) * 2)
    grouped.cancel(jobid)
    eventually(lambda: not old.exists() and not (jobs / f"{jobid}.json").exists())
    new.unlink()  # raises if that was removed as well
    assert abs(value.pop("start") - time.time()) < 600
    assert value.pop("qos") in {"", "normal"}, "if this Slurm passes it"
    end = value.pop("end")
    assert end == 0 or end > time.time(), "likewise"
    assert value == {
        "schema_version": 1,
        "jobid": jobid,
        "uid": 0,
        "user": "root",
        "account": "",
        "partition": "main",
        "name": "",
        "array_job": "",
        "array_task": "",
        "gpus": [],
    }


def test_a_job_on_two_slurmd_of_one_machine(grouped: Site) -> None:
    """It is one job with the processes and the memory of both."""
    script = f"srun -N2 -n2 bash {grouped.where}/work.sh 100"
    command = ("sbatch", "--parsable", "-N2", "-n2", "-o/dev/null", f"--wrap={script}")
    jobid = grouped.cluster.run(*command).stdout.strip()
    exporter = Exporter(grouped.options)

    def held() -> float:
        rss = exporter.sample().get(("hpml_job_memory_bytes", "", jobid, "rss"), 0)
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

    def tasks() -> set[tuple[str, str]]:
        exporter.sample()
        facts = [exporter.context.jobs.now.by_id[jobid].facts for jobid in ids]
        return {(one.array_job, one.array_task) for one in facts}

    ids = eventually(running)
    eventually(lambda: tasks() == {(array, task) for task in "123"})
    grouped.cancel(*ids)


def test_inside_of_a_job_only_that_job(grouped: Site) -> None:
    """The other job of the node is not looked at."""
    ids = [grouped.submit("-wnode1", "-n1") for _ in range(2)]
    series = Exporter(replace(grouped.options, job=JobFacts(ids[0], run="r1"))).sample()
    assert {key[2] for key in series} == {ids[0]}
    assert series["hpml_run_info", "", ids[0], "r1", "", ""] == 1
    grouped.cancel(*ids)
