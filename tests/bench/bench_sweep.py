"""Planning, submitting, following and reporting a sweep of 10,000 points, and alternatives.

    python tests/bench/bench_sweep.py [--points N] [--follow SECONDS] [--no-slurm]

A grid of N points (default 10,000) of one shape: N/100 values of one argument, 10 of another, 10
repeats. Memory is the largest resident set of the command. The goals of planning (3 s) and of the
report (20 s, 400 MB) are of processor seconds, which other work on the machine hardly changes.

Planning and reporting need no cluster. The report is about N rows that this file writes, as if
a training had reported its figures; nothing was run. The peer parses the same
lines with Python's json.

Submitting needs root and a development Slurm, whose partition is down, so that nothing starts. The
peers are submitit (map_array, split by hand at MaxArraySize) and a shell loop that calls sbatch for
each of 200 points; what it takes is scaled to N. Then each is followed for SECONDS (default 60):
hpml by `sweep resume`, submitit by `done()` of every job each second, which is what `Job.wait`
does, the loop by `squeue --me` every 10 s. Calls are counted by wrappers on the PATH. Goals: one
sbatch for 1,000 points at most, and fewer queries than either peer.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import pwd
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TypeAlias

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hpml_orchestrator.jobfile.sweep import load_sweep
from hpml_orchestrator.records.store import Store
from hpml_orchestrator.sweeps import plan
from hpml_orchestrator.sweeps.expand import make_plan
from hpml_orchestrator.sweeps.rows import PointRow
from tests.cluster.conftest import SlurmCluster, booted
from tests.cluster.user import AS_USER, PYTHON, UID, VENV, Directories, hand_over, install

HPML = [sys.executable, "-m", "hpml_orchestrator.cli"]
PLAN_SECONDS, REPORT_SECONDS, REPORT_BYTES = 3.0, 20.0, 400e6
LOOP_POINTS, LOOP_PAUSE_SECONDS, MAX_ARRAY = 200, 10, 1001
COUNTED = ("sbatch", "squeue", "sacct", "scontrol", "sinfo", "sacctmgr")
QUERIES = ("squeue", "sacct")
SLURM_CONF = f"MaxArraySize={MAX_ARRAY}\nMaxJobCount=100000\n"
JOB = """{name: task, launcher: srun, command: ["true"], args: [n=0, --lr, 0.1],
resources: {time: "2:00", memory: 50M}}"""
Command: TypeAlias = list[str | Path]
READ = "import json, sys\nrows = [json.loads(line) for line in open(sys.argv[1])]"
MEASURE = """
import json, os, subprocess, sys, time
begin = time.perf_counter()
child = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(child.pid, 0)
cpu_seconds = usage.ru_utime + usage.ru_stime
print(json.dumps([time.perf_counter() - begin, cpu_seconds, usage.ru_maxrss * 1024]))
sys.exit(os.waitstatus_to_exitcode(status))
"""
SUBMITIT = """
import pickle, sys, submitit
points, size, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
executor = submitit.AutoExecutor(folder=folder, cluster="slurm")
executor.update_parameters(timeout_min=2, mem_gb=0.05, cpus_per_task=1)
jobs = []
for start in range(0, points, size):
    jobs += executor.map_array(abs, range(start, min(points, start + size)))
with open(folder + "/jobs.pickle", "wb") as stream:
    pickle.dump(jobs, stream)
"""
FOLLOW_SUBMITIT = """
import pickle, sys, time
with open(sys.argv[1] + "/jobs.pickle", "rb") as stream:
    jobs = pickle.load(stream)
for job in jobs:
    job.watcher.register_job(job.job_id)
while not all([job.done() for job in jobs]):
    time.sleep(1)
"""
LOOP = """
for point in $(seq "$1"); do
    sbatch --parsable --time=2 --mem=50M --output=/dev/null --wrap "true n=$point" > /dev/null
done
"""
FOLLOW_LOOP = f"while squeue --me --noheader | grep -q .; do sleep {LOOP_PAUSE_SECONDS}; done"


@dataclass(frozen=True)
class Cost:
    """What a command took by the clock and of the processor, and its largest memory."""

    seconds: float
    cpu_seconds: float
    memory_bytes: int

    def __str__(self) -> str:
        memory = self.memory_bytes / 1e6
        return f"{self.seconds:>8.2f} s {self.cpu_seconds:>7.2f} s CPU {memory:>6.0f} MB"


def measure(command: Command, environment: Mapping[str, str] | None = None) -> Cost:
    """Run a command to its end and return what it took.

    A small process starts it: a child's largest memory is at least that of its parent.
    """
    words = [sys.executable, "-c", MEASURE, *map(str, command)]
    done = subprocess.run(words, env=environment, check=True, stdout=subprocess.PIPE)
    return Cost(*json.loads(done.stdout))


def write_plan(place: Path, points: int) -> tuple[Path, plan.SweepPlan]:
    """Write a job that does nothing, a sweep of it and the plan; return the sweep's file too."""
    (place / "task.yaml").write_text(JOB, "utf-8")
    axes = {"n=": list(range(points // 100)), "--lr": [rate / 100 for rate in range(1, 11)]}
    sweep = {"base": "task.yaml", "mode": "grid", "axes": axes, "repeats": 10}
    path = place / "sweep.yaml"
    path.write_text(json.dumps(sweep), "utf-8")
    planned = make_plan(load_sweep(path), backend="slurm", now=time.time())
    plan.write(Store(place / "records"), planned)
    return path, planned


def finished_rows(points: Sequence[plan.Point]) -> Iterator[PointRow]:
    """Yield a row for each point as a training of some 20 s leaves it; one in 100 failed."""
    chance = random.Random(0)
    for point in points:
        start, seconds = 1.8e9 + point.number, chance.lognormvariate(3.0, 0.05)
        failed = point.number % 100 == 99
        figures = {
            "accuracy": chance.gauss(0.95, 0.005),
            "samples_per_second": 60000 / seconds,
            "learning_rate": point.values["--lr"],
            "steps": 900,
        }
        phases = {"queue": 4.0, "start-up": 1.5, "launch": 1.1, "warm-up": 2.0, "end": 1.4}
        known = {
            **figures,
            "phases": {**phases, "training": seconds - 6.0, "evaluation": 0.8},
            "total_seconds": seconds,
            "data_wait_ratio": 0.05,
            "batch_global": 64,
            "result": {**figures, "device": "cpu", "batch_size_per_rank": 64},
            "verified": True,
        }
        yield PointRow(
            point.number,
            run=f"task-20261122-120000-abcdef.{point.number}",
            job_id=f"{100 + point.number // 1000}_{point.number % 1000}",
            state="FAILED" if failed else "COMPLETED",
            reason="exit status 1" if failed else "",
            over=True,
            attempts=1,
            started=start,
            ended=start + seconds,
            nodes=f"node{point.number % 2 + 1}",
            core_hours=seconds / 3600,
            code="0123456789abcdef0123456789abcdef01234567",
            binding="1 of 1 ranks bound as planned",
            **({} if failed else known),
        )


def bench_files(place: Path, points: int) -> list[str]:
    """Measure planning and reporting; return the goals that were missed."""
    sweep, planned = write_plan(place, points)
    records = place / "records"
    hpml: Command = [*HPML, "--records", records, "sweep"]
    rows = plan.directory_of(Store(records), planned.id) / "rows.jsonl"
    lines = (json.dumps(asdict(row)) for row in finished_rows(planned.points))
    rows.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    commands: dict[str, Command] = {
        "python json.loads": [sys.executable, "-c", READ, rows],
        "hpml --help": [*HPML, "--help"],
        "hpml sweep plan": [*hpml, "plan", sweep, "--backend", "slurm"],
        "hpml sweep plan --json": [*hpml, "plan", sweep, "--backend", "slurm", "--json"],
        "hpml sweep status": [*hpml, "status", "last"],
        "hpml sweep status --json": [*hpml, "status", "last", "--json"],
        "hpml sweep report": [*hpml, "report", "last"],
        "hpml sweep report --json": [*hpml, "report", "last", "--json"],
    }
    print(f"\n{points} points, {rows.stat().st_size / 1e6:.1f} MB of rows")
    costs = {}
    for name, command in commands.items():
        costs[name] = measure(command)
        ratio = costs[name].cpu_seconds / costs["python json.loads"].cpu_seconds
        print(f"  {name:<26}{costs[name]} {ratio:>6.1f} x json")
    report = costs["hpml sweep report"]
    light = report.cpu_seconds < REPORT_SECONDS and report.memory_bytes < REPORT_BYTES
    goals = {"planning": costs["hpml sweep plan"].cpu_seconds < PLAN_SECONDS, "report": light}
    return [name for name, reached in goals.items() if not reached]


def write_wrappers(place: Path) -> tuple[Path, Path]:
    """Write wrappers of Slurm's commands; return their directory, and the file they log to."""
    directory, log = place / "counted", place / "calls"
    directory.mkdir()
    log.touch()
    for name in COUNTED:
        wrapper = directory / name
        wrapper.write_text(f'#!/bin/sh\necho {name} >> {log}\nexec {shutil.which(name)} "$@"\n')
        wrapper.chmod(0o755)
    return directory, log


def calls_in(log: Path) -> Counter[str]:
    """Return how often each command was called since the last time."""
    calls = Counter(log.read_text("utf-8").split())
    os.truncate(log, 0)
    return calls


def bench_slurm(cluster: SlurmCluster, points: int, follow: float) -> list[str]:
    """Measure submitting and following; return the goals that were missed."""
    place = Directories(install() / "bench").mktemp("sweep")
    wrappers, log = write_wrappers(place)
    write_plan(place, points)
    hand_over(place)
    path = f"{wrappers}:{VENV}/bin:{os.environ['PATH']}"
    environment = {**cluster.environment, "PATH": path, "HOME": str(place)}
    shell: Command = [*AS_USER, "--chdir", place, "sh", "-c"]
    python: Command = [*AS_USER, "--chdir", place, PYTHON]
    hpml: Command = [
        *python,
        "-m",
        "hpml_orchestrator.cli",
        "--records",
        place / "records",
        "sweep",
    ]
    cluster.run("scontrol", "update", "partitionname=main", "state=down")
    ways: dict[str, tuple[Command, Command, int]] = {
        "hpml": ([*hpml, "tick", "last"], [*hpml, "resume", "last"], points),
        "submitit": (
            [*python, "-c", SUBMITIT, str(points), str(MAX_ARRAY - 1), place / "submitit"],
            [*python, "-c", FOLLOW_SUBMITIT, place / "submitit"],
            points,
        ),
        "shell loop": ([*shell, LOOP, "sh", str(LOOP_POINTS)], [*shell, FOLLOW_LOOP], LOOP_POINTS),
    }
    submits, queries = {}, {}
    print(f"\nsubmitting {points} points, then following them for {follow:g} s")
    for name, (submit, watch, count) in ways.items():
        cost = measure(submit, environment)
        submitting = calls_in(log)
        words: Command = ["timeout", f"{follow}s", *watch]  # ends its children too
        subprocess.run(words, env=environment, check=False, capture_output=True)
        following = calls_in(log)
        submits[name] = submitting["sbatch"] * 1000 / count
        queries[name] = sum(following[query] for query in QUERIES)
        scaled = f", {cost.seconds * points / count:.0f} s scaled" if count < points else ""
        print(f"  {name:<12}{cost}, {count} points{scaled}")
        print(f"    submitting: {submits[name]:g} sbatch per 1,000 points; {dict(submitting)}")
        print(f"    following:  {queries[name] * 1000 / points:g} per 1,000; {dict(following)}")
        cluster.run("scancel", f"--user={pwd.getpwuid(UID).pw_name}")
    shutil.rmtree(place, ignore_errors=True)
    goals = {
        "one sbatch per 1,000 points": submits["hpml"] <= 1,
        "fewer queries": queries["hpml"] < min(queries["submitit"], queries["shell loop"]),
    }
    return [name for name, reached in goals.items() if not reached]


def main() -> int:
    """Measure and print; the status is 1 when a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--points", type=int, default=10_000, help="a multiple of 100")
    parser.add_argument("--follow", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--no-slurm", action="store_true", help="only what needs no cluster")
    arguments = parser.parse_args()
    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    print(f"host      {platform.node()}, {os.cpu_count()} CPUs, load {load}")
    print(f"kernel    {platform.system()} {platform.release()}, Python {platform.python_version()}")
    with tempfile.TemporaryDirectory() as directory:
        kind = ["stat", "--file-system", "--format=%T", directory]
        print(f"files     {subprocess.check_output(kind, text=True).strip()}")
        missed = bench_files(Path(directory), arguments.points)
        if not arguments.no_slurm:
            lines = Path(directory, "slurm.conf")
            lines.write_text(SLURM_CONF, "utf-8")
            with booted("--nodes", "1", "--slurm-conf", lines) as cluster:
                slurm = cluster.run("sbatch", "--version").stdout.strip()
                print(f"\nslurm     {slurm}, submitit {version('submitit')}")
                missed += bench_slurm(cluster, arguments.points, arguments.follow)
    print(f"\ngoals: {'MISSED: ' + ', '.join(missed) if missed else 'reached'}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
