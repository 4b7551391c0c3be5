"""The shipped fakes do what the real ones do."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from hpml_orchestrator import testing
from hpml_orchestrator.errors import SchedulerError, SchedulerUnavailable
from hpml_orchestrator.scheduler.command import Clock, CommandMissing, Completed, Runner
from hpml_orchestrator.scheduler.model import JobState, Scheduler, SubmitRequest
from hpml_orchestrator.testing import FakeClock, FakeRunner, FakeScheduler, Fault, Killed


def request_in(directory: Path) -> SubmitRequest:
    return SubmitRequest(directory, directory / "log", "train", "c", {})


def test_names() -> None:
    """Every public name is there, and the fakes fit the Protocols."""
    module = importlib.import_module(testing.__name__)
    assert all(hasattr(module, name) for name in testing.__all__)
    scheduler: Scheduler = FakeScheduler()
    runner: Runner = FakeRunner({})
    clock: Clock = FakeClock()
    assert scheduler.name == "fake"
    assert runner
    assert clock.time() == clock.monotonic()


def test_move_and_cancel(tmp_path: Path) -> None:
    """A job can be put into any state; what is over is not cancelled."""
    fake = FakeScheduler()
    first, second = fake.submit(request_in(tmp_path)), fake.submit(request_in(tmp_path))
    fake.move(first, JobState.FAILED, exit_code=3)
    fake.cancel([first, second, "999"])
    found = fake.query([first, second])
    assert [s.state.value for s in found.values()] == ["FAILED", "CANCELLED"]
    assert found[first].exit_code == 3
    assert fake.find(tmp_path, name="train", since=0) == [first, second]


def test_faults(tmp_path: Path) -> None:
    """Each fault happens once, in its own way."""
    fake = FakeScheduler()
    for fault, error, jobs in (
        (Fault.UNAVAILABLE, SchedulerUnavailable, 0),
        (Fault.REFUSED, SchedulerError, 0),
        (Fault.KILLED_BEFORE, Killed, 0),
        (Fault.KILLED_DURING, Killed, 0),
        (Fault.KILLED_AFTER, Killed, 2),
        (Fault.LOST_ANSWER, SchedulerUnavailable, 3),
    ):
        fake.faults = [fault]
        with pytest.raises(error):
            fake.submit(request_in(tmp_path))
        if fault is Fault.KILLED_DURING:
            assert fake.submitting(tmp_path)
            fake.clock.sleep(31)
            assert not fake.submitting(tmp_path)
        else:
            assert len(fake.jobs) == jobs
    fake.faults = [Fault.LOST_ANSWER]
    with pytest.raises(SchedulerUnavailable):
        fake.cancel(["1"])
    assert fake.query(["1"])["1"].state is JobState.CANCELLED
    fake.faults = [Fault.UNAVAILABLE]
    with pytest.raises(SchedulerUnavailable):
        fake.cancel(["2"])
    assert fake.arguments(request_in(tmp_path))[0] == "sbatch"


def test_runner_answers_in_turn() -> None:
    """Answers come in turn, the last one for ever; other commands are not installed."""
    runner = FakeRunner({"a": [Completed(1), Completed(2)]})
    codes = [runner.run(["a"], env={}, timeout=1).returncode for _ in range(3)]
    assert codes == [1, 2, 2]
    assert runner.count("a") == 3
    with pytest.raises(CommandMissing):
        runner.run(["b"], env={}, timeout=1)
