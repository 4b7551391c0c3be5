"""Job arrays on this machine: a process per task, in order, never more at once than asked for."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from hpml_orchestrator.errors import SchedulerError
from hpml_orchestrator.scheduler.local.processes import send
from hpml_orchestrator.scheduler.model import JobState, JobStatus, SubmitRequest
from tests.patience import PATIENCE_SECONDS
from tests.unit.scheduler.local.test_backend import ROOT, Bench, bench

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["bench"]


def request(bench: Bench, array: str, body: str, directory: str = "sub") -> SubmitRequest:
    """An array whose tasks write to `<directory>/output/<index>.log`."""
    made = bench.request(f"#SBATCH --array={array}\n{body}", directory=directory)
    (made.directory / "output").mkdir()
    return replace(made, array=True)


def states(bench: Bench, job_ids: list[str]) -> list[str]:
    found = bench.scheduler().query(job_ids)
    return [found[job_id].state.value for job_id in job_ids]


def test_every_task_runs_with_its_own_variables_and_output(bench: Bench) -> None:
    """The variables are those that Slurm sets for an array; each task writes to its own file."""
    asked = request(bench, "1,3,7", "env | grep ^SLURM_ARRAY | sort; echo id=$SLURM_JOB_ID")
    job_id = bench.scheduler().submit(asked)
    assert bench.over(job_id).state is JobState.COMPLETED
    assert states(bench, [f"{job_id}_{n}" for n in (1, 3, 7)]) == ["COMPLETED"] * 3
    ids = set()
    for index in (1, 3, 7):
        told = dict(line.split("=") for line in asked.task_output(index).read_text().split())
        ids.add(told.pop("id"))
        assert told == {
            "SLURM_ARRAY_JOB_ID": job_id,
            "SLURM_ARRAY_TASK_ID": str(index),
            "SLURM_ARRAY_TASK_COUNT": "3",
            "SLURM_ARRAY_TASK_MIN": "1",
            "SLURM_ARRAY_TASK_MAX": "7",
            "SLURM_ARRAY_TASK_STEP": "2",
        }
    assert len(ids) == 3
    assert (asked.directory / "sbatch.out").read_text() == f"{job_id}\n"
    assert bench.scheduler().find(asked.directory, name="job", since=0) == [job_id]
    assert set(bench.scheduler().query([f"{job_id}_2", "99_1", "x_1"])) == set()


def test_no_more_tasks_at_once_than_asked_for(bench: Bench) -> None:
    """With %1 the second task waits for the first, and says why, though CPUs are free."""
    release = bench.path / "release"
    asked = request(bench, "0-2%1", f"touch started; while [ ! -e {release} ]; do sleep 0.02; done")
    job_id = bench.scheduler().submit(asked)
    bench.until(f"{job_id}_0", lambda status: status.state is JobState.RUNNING)
    second = bench.scheduler().query([f"{job_id}_1"])[f"{job_id}_1"]
    assert second.state is JobState.PENDING
    assert second.reason == "Priority: the array runs 1 task at once"
    later = bench.scheduler().submit(bench.request("true", directory="later"))
    assert bench.over(later).state is JobState.COMPLETED  # what has room passes by
    release.touch()
    ended: list[JobStatus] = [bench.over(f"{job_id}_{n}") for n in range(3)]
    for first, second in itertools.pairwise(ended):
        assert first.ended is not None
        assert second.started is not None
        assert first.ended <= second.started


def test_one_task_or_all_are_cancelled(bench: Bench) -> None:
    """By the task's id only that one ends, by the array's all of them."""
    job_id = bench.scheduler().submit(request(bench, "0-3", "exec sleep 600"))
    bench.until(f"{job_id}_1", lambda status: status.state is JobState.RUNNING)
    bench.scheduler().cancel([f"{job_id}_1", f"{job_id}_3"])
    assert bench.over(f"{job_id}_1").state is JobState.CANCELLED
    assert bench.over(f"{job_id}_3").started is None
    assert bench.scheduler().query([f"{job_id}_0"])[f"{job_id}_0"].state is JobState.RUNNING
    assert bench.scheduler().query([job_id])[job_id].state is JobState.RUNNING
    bench.scheduler().cancel([job_id])
    for index in range(4):
        assert bench.over(f"{job_id}_{index}").state is JobState.CANCELLED
    assert bench.over(job_id).state is JobState.CANCELLED


def test_one_task_that_fails_is_the_arrays_end(bench: Bench) -> None:
    """The others go on; what the array's own id tells is the bad end."""
    job_id = bench.scheduler().submit(request(bench, "0-2", "exit $SLURM_ARRAY_TASK_ID"))
    assert bench.over(job_id).state is JobState.FAILED
    found = bench.scheduler().query([f"{job_id}_{n}" for n in range(3)])
    assert [status.exit_code for status in found.values()] == [0, 1, 2]


def test_a_task_whose_supervisor_died_is_alone_in_that(bench: Bench) -> None:
    """Its end is a node failure; the other tasks are not touched."""
    release = bench.path / "release"
    asked = request(bench, "0-1", f"while [ ! -e {release} ]; do sleep 0.02; done")
    job_id = bench.scheduler().submit(asked)
    second = str(int(job_id) + 1)
    bench.until(f"{job_id}_1", lambda status: status.state is JobState.RUNNING)
    send(bench.supervisor(second), signal.SIGKILL)
    assert bench.over(f"{job_id}_1").state is JobState.NODE_FAIL
    release.touch()
    assert bench.over(f"{job_id}_0").state is JobState.COMPLETED


DYING = """
import os, sys
from pathlib import Path
from hpml_orchestrator.scheduler.local import jobs as local_jobs
from hpml_orchestrator.scheduler.local.backend import LocalScheduler
from hpml_orchestrator.scheduler.model import SubmitRequest
where, locks, left = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
rename = os.rename
def dying(source, target):
    global left
    if left == 0:
        os._exit(9)
    left -= 1
    rename(source, target)
os.rename = dying
LocalScheduler(where / "home", cpu_ids=lambda: [0, 1], gpu_ids=lambda: [], memory_mb=lambda: 1024,
    kill_wait_seconds=0.5, lock_root=locks).submit(SubmitRequest(directory=where / "sub",
    output=where / "sub" / "run" / "out.txt", name="job", comment="",
    environment={"PATH": os.environ["PATH"]}, array=True))
"""


@pytest.mark.parametrize("published", [0, 1, 2])
def test_a_submission_that_dies_half_way_has_made_no_job(bench: Bench, published: int) -> None:
    """Tasks without their first are not seen, never run, and are removed; nothing is lost after."""
    asked = request(bench, "0-2", "true")
    words = [str(bench.path), str(bench.path / "locks"), str(published)]
    done = subprocess.run(
        [sys.executable, "-c", DYING, *words],
        env={**os.environ, "PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 9, done.stderr
    scheduler = bench.scheduler()
    assert len(scheduler._home.numbers()) == published
    assert scheduler.find(asked.directory, name="job", since=0) == []
    assert scheduler.query(["1", "1_0", "2", "1_2"]) == {}
    again = scheduler.submit(asked)
    assert bench.over(again).state is JobState.COMPLETED
    assert scheduler.find(asked.directory, name="job", since=0) == [again]
    left = {int(again) + n for n in range(3)}
    assert set(bench.scheduler()._home.numbers()) == left


def test_too_many_tasks_are_refused(bench: Bench) -> None:
    """Each is a job of this machine's queue; the message says how many it takes."""
    with pytest.raises(SchedulerError, match="the local backend takes 1000 at once") as caught:
        bench.scheduler().submit(request(bench, "0-1000", "true"))
    assert "Slurm" in caught.value.hint
    assert bench.scheduler()._home.numbers() == []


def test_a_record_of_an_earlier_release_is_a_single_job(bench: Bench) -> None:
    """Jobs written before there were arrays have no such entry, and are told as before."""
    job_id = bench.scheduler().submit(bench.request("true"))
    bench.over(job_id)
    path: Path = bench.home / "jobs" / job_id / "job.json"
    record = json.loads(path.read_text())
    del record["array"]
    path.write_text(json.dumps(record))
    assert bench.scheduler().query([job_id])[job_id].state is JobState.COMPLETED
