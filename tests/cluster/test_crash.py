"""A submission killed at any point: never two jobs, never a lost one.

strace ends `hpml submit` with SIGKILL at the entry of one chosen system call, so each point is hit
every time, not by luck. Then the controller is asked how many jobs have the submission's directory.
Jobs are held in the queue: what is counted is submissions, not runs.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.cluster.conftest import SlurmCluster
from tests.cluster.hpml_on_slurm import HPML, Desk, eventually

CALLS = "rename,link,linkat,mkdir,fsync,vfork,wait4,clock_nanosleep,openat,write"
WAITS = ("wait4", "clock_nanosleep", "poll", "select")


@dataclass(frozen=True)
class Point:
    """The entry of the n-th system call of that name in the main process."""

    call: str
    number: int
    about: str


# The check before a submission writes nothing and is over before the first record; its threads
# would make the number of system calls differ from one call to the next.
SUBMIT = ("submit", "--no-check", "crash.yaml")


@pytest.fixture(scope="module")
def desk(slurm_cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    """A desk with one job file; its jobs wait in the queue, held, and are cancelled at the end."""
    if shutil.which("strace") is None:
        pytest.skip("NO CRASH TESTS: strace is not installed")
    made = Desk(slurm_cluster, tmp_path_factory.mktemp("crash"))
    made.job("crash", command=["true"], resources={"extra": ["--hold"]})
    made.hpml("submit", "crash.yaml")  # the directories are there from now on
    yield made
    ids = made.slurm("squeue", "--noheader", "--name=crash", "--format=%A").split()
    if ids:
        made.slurm("scancel", *ids)


@pytest.fixture(scope="module")
def points(desk: Desk) -> list[Point]:
    """Every counted system call of a submission, from its first directory to its last record."""
    trace = desk.directory / "trace"
    traced = strace(desk, "-s", "400", "-o", str(trace), "-e", f"trace={CALLS}")
    assert traced.returncode == 0, traced.stderr
    counts: Counter[str] = Counter()
    found: list[Point] = []
    for line in trace.read_text(errors="replace").splitlines():
        if match := re.match(r"(\w+)\(", line):
            counts[match[1]] += 1
            if found or ("/submissions/" in line and match[1] == "mkdir"):
                found.append(Point(match[1], counts[match[1]], line[:300]))
    return found


def strace(desk: Desk, *options: str) -> subprocess.CompletedProcess[str]:
    """Submit a job under strace; it starts what becomes the ordinary user's hpml."""
    return subprocess.run(
        ["strace", "-qq", *options, *HPML, *SUBMIT],
        env=desk.environment,
        cwd=desk.directory,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )


def chosen(points: list[Point]) -> dict[str, Point]:
    """The points that matter most, by what would happen next."""

    def first(call: str, about: str) -> Point:
        return next(p for p in points if p.call.startswith(call) and re.search(about, p.about))

    start = [p for p in points if p.call == "vfork"][-1]
    during = next(p for p in points[points.index(start) :] if p.call == "wait4")
    return {
        "publishing the submission": first("rename", r'\.tmp", ".*/submissions/[^/"]+"\) = 0$'),
        "marking the start": first("link", r'/sbatch\.started"(?:, 0)?\) = 0$'),
        "starting sbatch": start,
        "waiting for sbatch": during,
        "recording the job": first("rename", r'job\.json"\) = 0$'),
    }


def submissions(desk: Desk) -> set[Path]:
    folder = desk.records / "submissions"
    return {path for path in folder.iterdir() if not path.name.startswith(".")}


def kill_at(desk: Desk, point: Point) -> list[Path]:
    """Kill `hpml submit` there and return the submissions that it had published by then."""
    before = submissions(desk)
    kill = f"inject={point.call}:signal=KILL:when={point.number}"
    done = strace(desk, "-o", "/dev/null", "-e", f"trace={point.call}", "-e", kill)
    # How often it waits depends on the load: a submission that waits less often is not killed.
    ends = {-signal.SIGKILL, 128 + signal.SIGKILL} | ({0} if point.call in WAITS else set())
    assert done.returncode in ends, (point, done)
    return sorted(submissions(desk) - before)


def kill_after_publishing(desk: Desk, point: Point) -> Path:
    """Kill `hpml submit` there and return the submission.

    How often git is waited for before varies with the load: a kill that came too early, when
    nothing was on record, is tried again.
    """
    for _ in range(10):
        made = kill_at(desk, point)
        if made:
            return made[0]
    pytest.fail(f"10 kills, all before the submission was on record: {point}")


def settled_jobs(desk: Desk, submission: Path) -> list[str]:
    """Resume a submission and return its jobs in the controller."""
    answer = desk.json("submit", "--resume", submission.name)
    jobs = desk.jobs_of(submission)
    assert jobs == [answer["job_id"]], "never two, never a lost one"
    again = desk.json("submit", "--resume", submission.name)
    assert again["job_id"] == answer["job_id"]
    assert desk.jobs_of(submission) == jobs
    (listed,) = desk.json("status", submission.name)
    assert listed["state"] == "PENDING"
    return jobs


@pytest.mark.parametrize(
    ("name", "published", "jobs_before_resume"),
    [
        ("publishing the submission", False, {0}),
        ("marking the start", True, {0}),
        ("starting sbatch", True, {0}),
        ("waiting for sbatch", True, {0, 1}),
        ("recording the job", True, {1}),
    ],
)
def test_one_job_comes_of_a_submission_killed(
    desk: Desk, points: list[Point], name: str, published: bool, jobs_before_resume: set[int]
) -> None:
    """Killed at this point, the submission ends with exactly one job, found or made by --resume."""
    point = chosen(points)[name]
    if not published:
        assert kill_at(desk, point) == []
        return
    submission = kill_after_publishing(desk, point)
    assert len(desk.jobs_of(submission)) in jobs_before_resume
    settled_jobs(desk, submission)


def test_a_listing_finds_the_job_of_a_submission_that_was_cut_off(
    desk: Desk, points: list[Point]
) -> None:
    """`hpml list` alone puts the job of a killed submission on record; no resuming is needed."""
    submission = kill_after_publishing(desk, chosen(points)["waiting for sbatch"])
    eventually(lambda: desk.jobs_of(submission))
    state = next(s for s in desk.json("list") if s["id"] == submission.name)
    assert [state["job_id"]] == desk.jobs_of(submission)
    assert state["state"] == "PENDING"


@pytest.mark.parametrize("races", [2, pytest.param(25, marks=pytest.mark.slow)])
def test_one_job_comes_of_two_that_resume_at_the_same_time(
    desk: Desk, points: list[Point], races: int
) -> None:
    """Two `submit --resume` of a run without a job, started together: one sbatch, one answer."""
    for _ in range(races):
        submission = kill_after_publishing(desk, chosen(points)["marking the start"])
        assert not list(submission.glob("sbatch.*"))
        with ThreadPoolExecutor(2) as both:
            resume = partial(desk.json, "submit", "--resume")
            answers = list(both.map(resume, [submission.name] * 2))
        jobs = desk.jobs_of(submission)
        assert len(jobs) == 1
        assert [answer["job_id"] for answer in answers] == jobs * 2
        assert [path.name for path in submission.glob("sbatch.started*")] == ["sbatch.started"]


@pytest.mark.slow
def test_one_job_comes_of_a_submission_killed_at_every_point(
    desk: Desk, points: list[Point]
) -> None:
    """Every counted system call of a submission in turn: one job each, or none and no record."""
    unsettled = []
    for point in points:
        made = kill_at(desk, point)
        assert len(made) <= 1
        for submission in made:
            assert len(desk.jobs_of(submission)) <= 1, point
            unsettled.append(submission)
    for submission in unsettled:
        settled_jobs(desk, submission)
    sys.stdout.write(
        f"killed {len(points)} submissions: {len(unsettled)} on record, one job each\n"
    )
    assert len(points) > 50


@pytest.mark.slow
def test_one_job_comes_of_a_submission_killed_together_with_its_sbatch(desk: Desk) -> None:
    """Both hpml and sbatch killed at random moments: what is on record has exactly one job."""
    made: set[Path] = set()
    for turn in range(40):
        before = submissions(desk)
        process = subprocess.Popen(
            [*HPML, "submit", "crash.yaml"],
            env=desk.environment,
            cwd=desk.directory,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        eventually(partial(published_or_over, desk, before, process))
        time.sleep(turn % 10 * 0.004)
        for pid in children_of(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.kill()
        process.wait(timeout=120)
        made |= submissions(desk) - before
    for submission in sorted(made):
        assert len(desk.jobs_of(submission)) <= 1
        settled_jobs(desk, submission)
    sys.stdout.write(f"killed 40 with their sbatch: {len(made)} on record, one job each\n")


def published_or_over(desk: Desk, before: set[Path], process: subprocess.Popen[bytes]) -> bool:
    """Whether a submission is on record that was not, or its hpml has ended."""
    return bool(submissions(desk) - before) or process.poll() is not None


def children_of(pid: int) -> list[int]:
    """Children of a process that this test started."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []
