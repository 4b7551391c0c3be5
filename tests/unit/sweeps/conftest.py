"""What the tests of the controller share: a sweep's folder and a small Slurm with limits."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.errors import SchedulerError
from hpml_orchestrator.jobfile.sweep import make_sweep
from hpml_orchestrator.records.files import read_json, write_json
from hpml_orchestrator.records.ids import parse_array
from hpml_orchestrator.records.store import Store
from hpml_orchestrator.scheduler.model import JobState, JobStatus, SubmitRequest
from hpml_orchestrator.sweeps import plan as plans
from hpml_orchestrator.sweeps.controller import Controller
from hpml_orchestrator.sweeps.expand import make_plan
from hpml_orchestrator.sweeps.rows import PointRow
from hpml_orchestrator.sweeps.table import SweepProgress, Table
from hpml_orchestrator.testing.scheduler import FakeScheduler, Killed

JOB: dict[str, Any] = {
    "name": "probe",
    "launcher": "srun",
    "command": ["./train"],
    "args": ["--lr=0.1", "--seed=1"],
    "resources": {"nodes": 1, "ranks_per_node": 1, "time": "30:00"},
}
QOS_LIMIT = (
    "QOSMaxSubmitJobPerUserLimit; Batch job submission failed: Job violates accounting/QOS policy"
    " (job submit limit, user's size and/or time limits)"
)
ARRAY_LIMIT = "Batch job submission failed: Invalid job array specification"


class SmallSlurm(FakeScheduler):
    """A Slurm in memory that refuses what is too much, and runs what it took."""

    def __init__(self) -> None:
        super().__init__()
        self.submit_limit = 10**6  # most tasks in the queue
        self.array_limit = 1001  # MaxArraySize
        self.refusals: list[str] = []  # what the next calls of sbatch are refused with
        self.ends: list[JobState] = []  # the end of each new task, in turn; then COMPLETED
        self.sizes: list[int] = []  # of the arrays that were accepted
        self.calls: Counter[str] = Counter()  # of each command

    def submit(self, request: SubmitRequest, arguments: Sequence[str] = ()) -> str:
        """Refuse it, or take it."""
        self.calls["sbatch"] += 1
        script = (request.directory / "job.sh").read_text()
        (line,) = [line for line in script.splitlines() if line.startswith("#SBATCH --array=")]
        array = parse_array(line.partition("=")[2])
        words = self.refusals.pop(0) if self.refusals else ""
        if array.max_index >= self.array_limit:
            words = ARRAY_LIMIT
        elif self.queued + len(array.indices) > self.submit_limit:
            words = QOS_LIMIT
        if words:
            lines = "".join(f"sbatch: error: {line}\n" for line in words.split("; "))
            (request.directory / "sbatch.out").write_text("")
            (request.directory / "sbatch.err").write_text(lines)
            raise SchedulerError(words)
        job_id = super().submit(request, arguments)
        self.sizes.append(len(array.indices))
        return job_id

    def query(self, job_ids: Sequence[str]) -> dict[str, JobStatus]:
        """Count the questions."""
        self.calls["squeue"] += 1
        return super().query(job_ids)

    def find(self, directory: Path, *, name: str, since: float) -> list[str]:
        """Count this question too."""
        self.calls["squeue"] += 1
        return super().find(directory, name=name, since=since)

    @property
    def queued(self) -> int:
        """Tasks that are not over."""
        ages = [(self.clock.now - (job.status.submitted or 0), job) for job in self.jobs.values()]
        return sum(
            not any(state.over and age >= after for after, state in job.states) for age, job in ages
        )

    def run(self, seconds: float = 60.0) -> None:
        """Let everything start that waits, and end so many seconds later."""
        for job in self.jobs.values():
            if job.states == ((0.0, JobState.PENDING),):
                since = self.clock.time() - (job.status.submitted or 0.0)
                end = self.ends.pop(0) if self.ends else JobState.COMPLETED
                job.states = [
                    (0.0, JobState.PENDING),
                    (since, JobState.RUNNING),
                    (since + seconds, end),
                ]


class SweepFolder:
    """A base job, sweeps of it, and the records of their runs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = Store(root / "records")
        self.slurm = SmallSlurm()
        self.environment = {"PATH": os.environ["PATH"], "USER": "me"}

    def plan(self, job: dict[str, Any] | None = None, **fields: Any) -> plans.SweepPlan:
        """Write the plan of a sweep on Slurm: by default a grid of six points of one shape."""
        grid = {"mode": "grid", "axes": {"--lr": [0.1, 0.2, 0.3]}, "repeats": 2}
        planned = self.local_plan(job, backend="slurm", now=self.slurm.clock.now, **grid | fields)
        # As if scontrol had reported the usual MaxArraySize; the tests have no scontrol.
        table = Table(self.store, planned)
        table.limits.array = 1000
        table.save()
        return planned

    def local_plan(
        self,
        job: dict[str, Any] | None = None,
        *,
        backend: str = "local",
        now: float | None = None,
        **fields: Any,
    ) -> plans.SweepPlan:
        """Write the plan of a sweep on this machine."""
        (self.root / "job.yaml").write_text(json.dumps(JOB | (job or {})))
        sweep = make_sweep({"base": "job.yaml"} | fields, self.root / "sweep.yaml")
        planned = make_plan(sweep, backend=backend, now=now or time.time())
        plans.write(self.store, planned)
        return plans.read(plans.directory_of(self.store, planned.id))

    def controller(self, planned: plans.SweepPlan) -> Controller:
        """Return a controller of a sweep on the small Slurm."""
        return Controller(
            self.store,
            planned,
            backends=lambda _name, _host: self.slurm,
            environment=self.environment,
            clock=self.slurm.clock.time,
        )

    def carry_on(
        self,
        planned: plans.SweepPlan,
        ticks: int = 200,
        task_seconds: float = 60.0,
    ) -> SweepProgress:
        """Tick until a sweep is finished; a controller that is killed is followed by another."""
        controller = self.controller(planned)
        for _ in range(ticks):
            try:
                progress = controller.tick()
            except Killed:
                controller = self.controller(planned)
                self.slurm.clock.sleep(1.0)
                continue
            if progress.finished:
                return progress
            self.slurm.run(task_seconds)
            self.slurm.clock.sleep(max(progress.next_tick_seconds, task_seconds / 4))
        raise AssertionError(f"not finished after {ticks} ticks: {progress}")

    def rows(self, planned: plans.SweepPlan) -> list[PointRow]:
        """Return the sweep's rows."""
        return Table(self.store, planned).rows()

    def attempt(self, job_id: str) -> Path:
        """Return the directory of the first attempt of a task's run, made on demand."""
        job, index = self.slurm.jobs[job_id], job_id.partition("_")[2]
        run = self.store.runs_dir / f"{Path(job.status.directory).name}.{index}"
        (run / "attempts" / "0" / "started").mkdir(parents=True, exist_ok=True)
        (run / "attempts" / "0" / "started" / "job_id").write_text(job_id)
        return run / "attempts" / "0"

    def report(self, job_id: str, **result: float) -> None:
        """Let a task end as COMPLETED by its own record, with a result."""
        attempt = self.attempt(job_id)
        write_json(attempt.parents[1] / "result.json", result)
        end = {"exit_code": 0, "state": "COMPLETED", "time": self.slurm.clock.now}
        write_json(attempt / "ended.json", end)

    def started(self) -> list[int]:
        """Return the numbers of the points that the small Slurm has tasks of, sorted."""
        numbers = []
        for job_id, job in self.slurm.jobs.items():
            submission = read_json(Path(job.status.directory) / "submit.json")
            numbers.append(submission["points"][int(job_id.partition("_")[2])])
        return sorted(numbers)


@pytest.fixture
def folder(tmp_path: Path) -> SweepFolder:
    """A folder for sweeps."""
    return SweepFolder(tmp_path)
