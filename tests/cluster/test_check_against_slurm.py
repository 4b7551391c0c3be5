"""The check accepts the jobs that a real Slurm runs, and refuses those that it refuses."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.check.rules import check
from hpml_orchestrator.records.job import Job
from hpml_orchestrator.scheduler.slurm.cluster import read_cluster, with_group_limits
from hpml_orchestrator.script.render import Capabilities, render
from tests.cluster.conftest import SlurmCluster
from tests.cluster.hpml_on_slurm import Desk, eventually
from tests.cluster.rich_cluster import USER, as_user, enforce, rich_cluster

COUNT = 150


@pytest.fixture(scope="module")
def site() -> Iterator[SlurmCluster]:
    """A cluster with limits of every kind."""
    with rich_cluster() as cluster:
        yield cluster


# Each field is left alone most of the time, so that about half of all jobs are right.
CHOICES: dict[str, tuple[float, list[Any]]] = {
    "partition": (
        0.7,
        "main long gpu whole vip nodev fast noslow capped broken off drained percpu rootonly games "
        "booked nope main,long long,main gpu,main whole,main main,off off,long broken,long "
        "main,vip vip,main fast,main main,broken long,gpu capped,main".split(),
    ),
    "nodes": (0.4, [1, 2, 2, 3, 4, 5]),
    "cpus_per_rank": (0.4, [1, 2, 4, 8, 9, 12, 13, 16, 17]),
    "ranks_per_node": (0.2, [1, 2, 3, 8, 600]),
    "memory": (0.4, ["500M", "1500M", "4000M", "7900M", "8000M", "9000M", "16001M", "33000M"]),
    "gpus": (
        0.3,
        "1 4 5 7 a100:2 a100:4 a100:5 h100:1 1g.10gb:4 1g.10gb:5 3g.20gb:1 "
        "a100:2,1g.10gb:1".split(),
    ),
    "time": (0.5, ["00:10:00", "00:25:00", "00:45:00", "01:30:00", "03:00:00", "2-0", "8-0"]),
    "account": (0.3, ["dev", "course", "vip", "nope"]),
    "qos": (
        0.3,
        ["normal", "fast", "slow", "gpuq", "tiny", "grpq", "minq", "nojobs", "minutes", "nope"],
    ),
    "constraint": (
        0.25,
        "cpu gpu avx512 rack1 avx512&gpu cpu&gpu nope cpu&nope".split(),  # others are not judged
    ),
    "exclusive": (0.1, [True]),
}


def generated(seed: int) -> Iterator[Job]:
    """Jobs of all sorts, the same for the same seed."""
    dice = random.Random(seed)
    for index in range(COUNT):
        resources: dict[str, Any] = {"time": "00:10:00"}
        # Some jobs are wrong in many ways, most in none or one.
        eagerness = dice.choice([0.35, 0.6, 1.0])
        for field, (chance, values) in CHOICES.items():
            if dice.random() < chance * eagerness:
                resources[field] = dice.choice(values)
        launcher = dice.choice(["srun", "torchrun"])
        yield Job.from_json(
            {"name": f"j{index}", "launcher": launcher, "command": ["true"], "resources": resources}
        )


def submit(site: SlurmCluster, job: Job) -> tuple[str, str]:
    """Really submit a job's script: its id, or Slurm's words."""
    script = render(job, Capabilities("/usr/bin/python3"))
    done = as_user(site, "sbatch", "--parsable", "--output=/dev/null", "--chdir=/", input=script)
    return (done.stdout.strip(), done.stderr) if done.returncode == 0 else ("", done.stderr)


def states(site: SlurmCluster) -> dict[str, tuple[str, str]]:
    """State and reason of each job in the controller."""
    listed = site.run("squeue", "--noheader", "--states=all", "--format=%i|%T|%r").stdout
    rows = [line.split("|") for line in listed.splitlines()]
    return {job_id: (state, reason) for job_id, state, reason in rows}


@pytest.mark.parametrize("how", ["NO", "ALL", "ANY"])
def test_the_check_and_slurm_agree(site: SlurmCluster, how: str) -> None:
    """A job without an error is taken and starts; one with an error is refused or never starts."""
    enforce(site, how)
    cluster = read_cluster(env=site.environment, user=USER)  # as a user without rights sees it
    cluster = with_group_limits(cluster, env=site.environment)
    assert cluster.limits.enforce_partition_limits == how
    jobs = list(generated(seed=3))
    found = [[hit for hit in check(job, cluster).findings if hit.level == "error"] for job in jobs]
    answers = [submit(site, job) for job in jobs]
    good = [job_id for errors, (job_id, _) in zip(found, answers, strict=True) if not errors]

    def all_started() -> bool:
        # A node that Slurm drained since a job could not be ended in time, as on a busy machine.
        site.run("scontrol", "update", "nodename=ALL", "state=resume", check=False)
        now = states(site)
        return all(not job_id or now[job_id][0] != "PENDING" for job_id in good)

    with contextlib.suppress(AssertionError):  # reported below, job by job
        eventually(all_started)
    now = states(site)
    wrong = []
    outcomes: Counter[str] = Counter()
    for job, errors, (job_id, words) in zip(jobs, found, answers, strict=True):
        state, reason = now[job_id] if job_id else ("REFUSED", words.strip())
        starts = state not in ("REFUSED", "PENDING")
        outcomes[state if state in ("REFUSED", "PENDING") else "STARTED"] += 1
        if starts == bool(errors):
            asked = job.resources.to_json(defaults=False)
            wrong.append(f"{asked} {job.launcher}: {state} {reason}; found {[*map(str, errors)]}")
    site.run("scancel", f"--user={USER}", check=False)  # status 1 if none is left, from 24.11 on
    assert wrong == []
    # The comparison is worth nothing if all jobs are alike.
    assert outcomes["STARTED"] >= 30
    assert outcomes["REFUSED"] >= 30
    if how == "NO":
        assert outcomes["PENDING"] >= 10


def test_more_jobs_than_may_be_queued(site: SlurmCluster, tmp_path: Path) -> None:
    """Slurm itself is asked: `check` says what it refuses, and the hint is about that limit."""
    desk = Desk(site, tmp_path)
    file = desk.job("many", command=["true"], array="0-3", resources={"time": "5"})
    limit = ("sacctmgr", "-i", "modify", "user", USER, "account=dev", "set")
    desk.slurm(*limit, "MaxSubmitJobs=3")
    try:
        for words in (("check",), ("submit", "--no-check")):
            told = desk.hpml(*words, file, code=None)
            assert told.returncode != 0
            assert "AssocMaxSubmitJobLimit" in told.stdout + told.stderr
            assert "or submit fewer (array tasks count)" in told.stdout + told.stderr
    finally:
        desk.slurm(*limit, "MaxSubmitJobs=-1")
    free = "can start now unless running jobs fill limits of QOS grpq"
    told = desk.hpml("check", file, "--set", "resources.qos=grpq")
    assert free in told.stdout
