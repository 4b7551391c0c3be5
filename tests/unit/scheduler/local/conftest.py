"""A new local backend for each test, on a machine of two CPUs and two GPUs."""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hpml_orchestrator.records.job import Job, NodeJob
from hpml_orchestrator.records.process import read_stat
from hpml_orchestrator.scheduler.local.backend import LocalScheduler
from hpml_orchestrator.scheduler.local.processes import Identity, LocalMachine, marked
from hpml_orchestrator.scheduler.model import JobState, JobStatus, SubmitRequest
from tests.patience import PATIENCE_SECONDS, eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass
class Bench:
    """A home with its scheduler."""

    path: Path

    def scheduler(self) -> LocalScheduler:
        machine = LocalMachine((0, 1), ("GPU-a", "GPU-b"), 1024)
        return LocalScheduler(self.path / "home", machine=machine)

    def request(
        self,
        body: str,
        *,
        name: str = "job",
        directory: str = "sub",
        array: str = "",
        launcher: str = "srun",
        **resources: Any,
    ) -> SubmitRequest:
        where = self.path / directory
        (where / "output").mkdir(parents=True, exist_ok=True)
        where.joinpath("job.sh").write_text(f"#!/bin/bash\n{body}\n")
        given = {"name": "job", "launcher": launcher, "resources": resources}
        job = Job.from_json({**given, "array": array or None})
        where.joinpath("agent.json").write_text(NodeJob(job).text())
        environment = {"PATH": os.environ["PATH"], "MINE": "yes", "HPML_TEST": str(self.path)}
        output = where / "out.txt"
        return SubmitRequest(where, output, name, "", environment, array=bool(array))

    def submit(self, body: str, **more: Any) -> str:
        return self.scheduler().submit(self.request(body, **more))

    def array(self, tasks: str, body: str) -> SubmitRequest:
        return self.request(body, array=tasks)

    def status(self, job_id: str) -> JobStatus:
        return self.scheduler().query([job_id])[job_id]

    def until(self, job_id: str, right: Callable[[JobStatus], bool]) -> JobStatus:
        until = time.monotonic() + PATIENCE_SECONDS
        while not right(status := self.status(job_id)):
            assert time.monotonic() < until, status
            time.sleep(0.02)
        return status

    def waits(self, job_id: str, reason: str) -> None:
        """Wait until that is why it waits."""
        status = self.until(job_id, lambda status: status.reason == reason)
        assert status.state is JobState.PENDING

    def running(self, job_id: str) -> None:
        self.until(job_id, lambda status: status.state is JobState.RUNNING)

    def over(self, job_id: str) -> JobStatus:
        return self.until(job_id, lambda status: status.state.over)

    def run(self, body: str, **more: Any) -> JobStatus:
        return self.over(self.submit(body, **more))

    def supervisor(self, job_id: str, position: int = 0) -> Identity:
        path = self.path / "home" / "jobs" / job_id / f"{position}.json"
        supervisor = json.loads(path.read_text())["supervisor"]
        return Identity(supervisor["pid"], supervisor["start_ticks"])

    def file(self, name: str, directory: str = "sub") -> str:
        path = self.path / directory / name
        eventually(lambda: path.exists() and path.stat().st_size, f"{path} appears")
        return path.read_text()

    def output(self, directory: str = "sub") -> str:
        return (self.path / directory / "out.txt").read_text()

    def processes(self) -> list[str]:
        """Return the command lines of all processes that belong to a job of this bench."""
        lines = []
        for who in marked(["MINE=yes", f"HPML_TEST={self.path}"]):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # ended meanwhile
                if read_stat(who.pid):
                    lines.append(Path(f"/proc/{who.pid}/cmdline").read_text())
        return lines


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """A bench that leaves no process behind."""
    monkeypatch.setenv("HPML_LOCAL_KILL_WAIT", str(PATIENCE_SECONDS))
    bench = Bench(tmp_path)
    yield bench
    jobs = tmp_path / "home" / "jobs"
    numbers = [path.name for path in jobs.glob("[0-9]*")] if jobs.exists() else []
    bench.scheduler().cancel(numbers)
    for number in numbers:
        if bench.scheduler().query([number]):  # not a killed submission that was cleaned up since
            bench.over(number)
    eventually(lambda: not bench.processes())
