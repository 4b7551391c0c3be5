"""What the tests of a job's way share: a store, prepared submissions, jobs that write records."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.records import feed
from hpml_orchestrator.records.files import write_json, write_text
from hpml_orchestrator.records.schema import WaitedRun
from hpml_orchestrator.records.store import Store
from hpml_orchestrator.records.submission import Submission
from hpml_orchestrator.runs.load import load_job
from hpml_orchestrator.runs.prepare import prepare, render_job
from hpml_orchestrator.runs.requeue import requeue
from hpml_orchestrator.runs.state import State
from hpml_orchestrator.runs.status import states
from hpml_orchestrator.runs.submit import resume, submit
from hpml_orchestrator.script.render import Capabilities
from hpml_orchestrator.testing.clock import FakeClock
from hpml_orchestrator.testing.scheduler import FakeScheduler
from tests.unit.runs.repositories import Repository, init


class World:
    """A store, a small Slurm in memory, and the jobs' own hands on their records."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = Store(root / "records")
        self.scheduler = FakeScheduler(FakeClock())

    @property
    def clock(self) -> FakeClock:
        """The one clock of hpml and of the scheduler."""
        return self.scheduler.clock

    def prepare(
        self,
        name: str = "probe",
        backend: str = "slurm",
        after: Sequence[WaitedRun] = (),
        **fields: Any,
    ) -> Submission:
        """Prepare a submission of a small job."""
        path = self.root / f"{name}.yaml"
        path.write_text(json.dumps({"name": name, "command": ["true"], **fields}))
        rendered = render_job(load_job(path, backend=backend), Capabilities("/usr/bin/python3"))
        environment = {"PATH": "/bin", "USER": "me", "SLURM_JOB_ID": "9", "TOKEN": "x"}
        return prepare(
            self.store,
            rendered,
            cluster=self.scheduler.cluster() if backend == "slurm" else "",
            argv=["hpml", "submit"],
            environment=environment,
            after=after,
            now=self.clock.now,
        )

    def go(self, submission: Submission) -> str:
        """Submit what was prepared."""
        return submit(submission, self.scheduler, environment={}, clock=self.clock.time)

    def resume(self, submission: Submission, said: list[str] | None = None, **more: Any) -> str:
        """Complete an interrupted submission; its notices are added to `said`."""
        return resume(
            self.store,
            submission,
            self.scheduler,
            environment={},
            clock=self.clock.time,
            notice=(said if said is not None else []).append,
            **{"sleep": self.clock.sleep, **more},
        )

    def submit(self, name: str = "probe", **fields: Any) -> Submission:
        """Prepare and submit a small job, which then waits in the queue."""
        submission = self.prepare(name, **fields)
        self.go(submission)
        return submission

    def requeue(self, submission: Submission) -> dict[str, str]:
        """Continue a run, or have a running one save and continue."""
        return requeue(
            self.store,
            replace(submission),
            environment={},
            clock=self.clock.time,
            sleep=self.clock.sleep,
            backends=self.backends,
        )

    def state(self, submission: Submission) -> State:
        """Ask for the state of a submission."""
        own = replace(submission)  # a command of its own, which reads the records again
        (state,) = states(self.store, [own], backends=self.backends, now=self.clock.time)
        return state

    def backends(self, _name: str = "", _host: str = "") -> FakeScheduler:
        """The one scheduler, whatever name and host are asked for."""
        return self.scheduler

    def starts(self, submission: Submission, job_id: str, number: int = 0) -> Path:
        """Write what a job writes when it starts."""
        attempt = self.store.runs_dir / submission.label / "attempts" / str(number)
        for name in ("started", "events", "nodes", "binding"):
            (attempt / name).mkdir(parents=True)
        write_text(attempt / "started" / "job_id", f"{job_id}\n")
        queued = submission.started_at()
        if number == 0 and queued is not None:
            feed.append(attempt / "events" / "batch.jsonl", "queued", node="batch", now=queued)
        self.event(attempt, "started", nodes="n[1-2]")
        return attempt

    def event(self, attempt: Path, event: str, rank: int | None = None, **data: Any) -> None:
        """Write one event now."""
        node = "batch" if event in ("started", "ended") else "n1"
        path = attempt / "events" / f"{node}.jsonl"
        feed.append(path, event, node=node, rank=rank, now=self.clock.now, **data)

    def ends(
        self, attempt: Path, code: int = 0, reason: str = "completed", state: str = ""
    ) -> None:
        """Write what a job writes when it ends."""
        end: dict[str, Any] = {"exit_code": code, "reason": reason}
        end["state"] = state or ("FAILED" if code else "COMPLETED")
        write_json(attempt / "ended.json", {**end, "time": self.clock.now})
        self.event(attempt, "ended", **end)


@pytest.fixture
def zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A time zone with its own name; the next test in this process has its own again."""
    with monkeypatch.context() as patched:
        patched.setenv("TZ", "XYZ-2")
        time.tzset()
        yield
    time.tzset()


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A fresh world."""
    return World(tmp_path)


GIT_CONFIG = """\
[user]
name = Ada
email = ada@example.org
[init]
defaultBranch = main
[protocol "file"]
allow = always
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new home directory, so that git settings of the machine do not matter."""
    directory = tmp_path / "home"
    directory.mkdir()
    (directory / ".gitconfig").write_text(GIT_CONFIG)
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(directory))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    return directory


@pytest.fixture
def repository(tmp_path: Path, home: Path) -> Repository:
    """A repository with one commit: two scripts, one in a directory."""
    assert home.is_dir()
    made = init(tmp_path / "code")
    made.write("train.py", "print('old')\n")
    made.write("tools/eval.py", "print('eval')\n")
    made.commit()
    return made
