"""Attempts of a run on the command line: `status`, `show` and the lines while following."""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path

import pytest

from hpml_orchestrator.cli import follow
from hpml_orchestrator.records import feed
from hpml_orchestrator.records.files import write_json, write_text
from hpml_orchestrator.records.store import Store
from hpml_orchestrator.runs.state import State
from hpml_orchestrator.runs.status import states
from hpml_orchestrator.scheduler.model import JobState
from hpml_orchestrator.testing.scheduler import FakeScheduler
from tests.unit.cli.support import Hpml, Shell


def add_attempt(
    run: Path, number: int, began: float, *events_: tuple[str, dict[str, float]]
) -> None:
    """Write the records of one attempt, whose events come 10 s apart."""
    attempt = run / "attempts" / str(number)
    (attempt / "started").mkdir(parents=True)
    write_text(attempt / "started" / "job_id", "1\n")
    path = attempt / "events" / "batch.jsonl"
    feed.append(path, "started", node="batch", now=began, nodes="n1")
    for place, (name, data) in enumerate(events_, 1):
        moment = began + 10 * place
        feed.append(attempt / "events" / "n1.jsonl", name, node="n1", rank=0, now=moment, **data)


@pytest.fixture
def run(shell: Shell, hpml: Hpml, slurm: FakeScheduler) -> Path:
    """The directory of a run whose second attempt runs."""
    job = shell.job("long", checkpoint={"requeue": ["time_limit"]})
    submitted = hpml("submit", "--no-check", "--json", job).json()
    now, run = time.time(), Path(submitted["directory"])
    add_attempt(run, 0, now - 300, ("step", {"steps_total": 0}), ("step", {"steps_total": 50}))
    end = {"exit_code": 75, "reason": "time limit", "why": "time_limit", "goes_on": True}
    write_json(run / "attempts" / "0" / "ended.json", {**end, "step": 41200, "time": now - 100})
    add_attempt(
        run,
        1,
        now - 60,
        ("resumed", {"step": 41200}),
        ("training", {"step": 41200, "total_steps": 90000}),
        ("step", {"steps_total": 0}),
        ("step", {"steps_total": 100}),
    )
    slurm.move(submitted["job_id"], JobState.RUNNING)
    return run


def test_status_tells_attempt_progress_and_what_restarts_cost(hpml: Hpml, run: Path) -> None:
    """Below the table for people, in `life` for programs."""
    shown = hpml("status", run.name)
    assert (
        f"{run.name}\tattempt 2 of at most 20, resumed at step 41,200, time limit in " in shown.out
    )
    assert "% of the time lost to restarts" in shown.out
    assert "\tstep 41,300 of 90,000 (46%), 10 steps/s, time limit in " in shown.out
    (told,) = hpml("status", "--json", run.name).json()
    assert told["life"]["attempts"][0]["why"] == "time_limit"
    assert [one["began_step"] for one in told["life"]["attempts"]] == [0, 41200]
    life = hpml("show", "--json", run.name).json()["life"]
    assert (life["step"], life["at_most"], life["lost_seconds"]) == (
        41300,
        20,
        told["life"]["lost_seconds"],
    )


def test_a_directory_of_checkpoints_has_one_run_at_a_time(
    shell: Shell, hpml: Hpml, slurm: FakeScheduler
) -> None:
    """Another job may save there once the first run is over."""
    shared = {"directory": str(shell.root / "shared")}
    first = hpml("submit", "--no-check", "--json", shell.job("one", checkpoint=shared)).json()
    slurm.move(first["job_id"], JobState.RUNNING)
    other = shell.job("two", checkpoint=shared)
    message = f"checkpoint.directory: {first['id']}, which is RUNNING, saves its checkpoints there"
    assert hpml("submit", "--no-check", other).refuses(2, f"hpml: error: {message}")
    slurm.move(first["job_id"], JobState.COMPLETED)
    assert hpml("submit", "--no-check", other).code == 0


def test_variables_that_send_jobs_to_another_cluster(
    shell: Shell, hpml: Hpml, slurm: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are refused by name; the name of this cluster changes nothing."""
    job = shell.job("elsewhere")
    for name in ("SLURM_CLUSTERS", "SBATCH_CLUSTERS"):
        monkeypatch.setitem(shell.variables, name, "slaking")
        error = f"{name}: jobs go to the cluster of this login node, fake (got 'slaking')"
        assert hpml("submit", "--no-check", job).refuses(2, error, f"`unset {name}`")
        monkeypatch.setitem(shell.variables, name, "Fake")
    before = len(slurm.jobs)
    assert hpml("submit", "--no-check", job).code == 0
    assert len(slurm.jobs) == before + 1


@pytest.mark.parametrize("trains", [True, False])
def test_following_names_each_attempt_once(
    shell: Shell, run: Path, slurm: FakeScheduler, monkeypatch: pytest.MonkeyPatch, *, trains: bool
) -> None:
    """Also where the scheduler is asked again and again, and the time left gets less."""
    monkeypatch.setattr("hpml_orchestrator.runs.history.time.time", slurm.clock.time)
    if not trains:
        log = run / "attempts" / "1" / "events" / "n1.jsonl"
        log.write_text("".join(log.read_text().splitlines(keepends=True)[:2]))
    store = Store(shell.records)
    submission = store.resolve(run.name)

    def ask() -> State:
        return states(store, [submission], backends=lambda *_: slurm)[0]

    def wait(*_: object, each: object, **__: object) -> State:
        assert callable(each)
        for _number in range(3):
            state = ask()
            each(state)
            each(state)
            slurm.clock.sleep(200)
        slurm.move(state.job_id, JobState.COMPLETED)
        each(ask())
        return ask()

    monkeypatch.setattr(follow, "wait_until_over", wait)
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    assert follow.follow(store, submission, out=sys.stdout, output=False).state == "COMPLETED"
    text = said.getvalue()
    assert text.count("hpml: no step for ") == trains
    (line,) = [line for line in text.splitlines() if "attempt 2 of at most 20" in line]
    assert line.startswith("hpml: attempt 2 of at most 20, resumed at step 41,200, time limit in ")
