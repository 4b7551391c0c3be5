"""`hpml prune` removes the chosen ended runs completely, and prints the bytes that it freed."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.records.files import read_json, write_json, write_text
from hpml_orchestrator.records.store import Store
from hpml_orchestrator.records.submission import Submission
from hpml_orchestrator.runs.load import load_job
from hpml_orchestrator.runs.prepare import prepare, render_job
from hpml_orchestrator.script.render import Capabilities
from tests.unit.cli.support import Hpml, Shell

DAY = 86_400


@pytest.fixture
def store(shell: Shell) -> Store:
    """Records of this test alone."""
    shutil.rmtree(shell.records, ignore_errors=True)
    return Store(shell.records)


@pytest.fixture
def made(shell: Shell, store: Store) -> Callable[..., Submission]:
    """Make the records of a job of some days ago; with a state it is over."""

    def make(
        name: str, days: float, state: str = "", *, job: str = "77", **fields: Any
    ) -> Submission:
        rendered = render_job(load_job(shell.job(name, **fields), backend="local"), Capabilities())
        now = time.time() - days * DAY
        submission = prepare(store, rendered, cluster="", argv=["hpml"], environment={}, now=now)
        for _, rid in submission.runs():
            (store.runs_dir / rid).mkdir(exist_ok=True)  # a task makes its own when it starts
            write_text(store.runs_dir / rid / "checkpoint.pt", "x" * 20_000)
        if job:
            submission.mark_started(now=now)
            submission.record_job(job, how="sbatch", now=now)
        if state:
            end = {"job_id": job, "state": state, "reason": "", "nodes": "", "attempts": 0}
            end.update(started=now, ended=now, exit_code=0)
            write_json(submission.directory / "final.json", end)
        return submission

    return make


def disk(store: Store) -> int:
    """Bytes on disk of all records, by du."""
    return int(subprocess.check_output(["du", "-s", "-B1", store.root]).split()[0])


def traces(store: Store, submission: Submission) -> list[Path]:
    """All paths that have the submission in their names."""
    return list(store.root.rglob(f"*{submission.sid}*"))


@pytest.mark.parametrize(
    ("words", "gone"),
    [
        ("--state FAILED,cancelled", "b c d"),
        ("--state failed --keep 1", "d"),
        ("--keep 0", "a b c d"),
        ("a b --older-than 1d", "b"),
    ],
)
def test_what_is_chosen_goes_and_nothing_else(
    store: Store, hpml: Hpml, made: Callable[..., Submission], words: str, gone: str
) -> None:
    """First nothing but a word about it; with --yes submissions, runs and their blocks on disk."""
    runs = {
        "a": made("a", 0.1, "COMPLETED"),
        "b": made("b", 20, "FAILED"),
        "c": made("c", 40, "CANCELLED", array="0-2"),
        "d": made("d", 400, "FAILED"),
    }
    shutil.rmtree(store.runs_dir / f"{runs['c'].sid}.1")  # a task that never started has none
    before = disk(store)
    dry = hpml("prune", *words.split(), "--json").json()
    assert (dry["dry_run"], disk(store)) == (True, before)
    text = hpml("prune", *words.split()).out
    assert f"would remove {len(gone.split())} run" in text
    done = hpml("prune", *words.split(), "--yes", "--json").json()
    assert {run["id"] for run in done["removed"]} == {runs[name].sid for name in gone.split()}
    assert dry == {**done, "dry_run": True}
    assert done["bytes"] == before - disk(store)
    for name, submission in runs.items():
        assert bool(traces(store, submission)) == (name not in gone.split())


def test_what_is_not_known_to_be_over_stays(
    store: Store, hpml: Hpml, made: Callable[..., Submission]
) -> None:
    """Each with its reason; one that is named makes the command fail."""
    stays = {
        made("lost", 90): "has not ended: UNKNOWN (the scheduler has forgotten it",
        made("damaged", 90): "has not ended: UNREADABLE (",
        made("fresh", 0, job=""): "has not ended: SUBMITTING (hpml is about to call sbatch",
        made("again", 90, "FAILED"): "was started again after its end",
    }
    _, damaged, _, again = stays
    write_text(damaged.directory / "submit.json", "{")
    (store.runs_dir / again.sid / "attempts" / "0").mkdir(parents=True)
    others = made("theirs", 90, "FAILED")
    if os.getuid() == 0:
        os.chown(others.directory, 65534, 65534)
        stays[others] = "belongs to nobody"
    gone = made("never", 90, job="")
    ended = hpml("prune", "--keep", "0", "--yes")
    assert ended.code == 0, ended.err
    assert not traces(store, gone)
    for submission, reason in stays.items():
        assert submission == others or f"kept: {submission.sid} {reason}" in ended.out
        assert traces(store, submission)
        by_name = hpml("prune", submission.sid, "--yes")
        assert (by_name.code, reason in by_name.out) == (2, True)
        assert traces(store, submission)


def test_the_local_job_goes_with_its_submission(shell: Shell, store: Store, hpml: Hpml) -> None:
    """From any host; the jobs of other hosts that have the same id stay."""
    job = shell.job("local", command=["true"])
    first, second = (hpml("run", job, "--local", "--json").json() for _ in range(2))
    host = socket.gethostname()
    os.rename(store.local_home(host), store.local_home("elsewhere"))
    shutil.copytree(store.local_home("elsewhere"), store.local_home(host))
    for run in (first, second):
        path = Path(run["submission"], "submit.json")
        write_json(path, {**read_json(path), "host": "elsewhere"})
    other = store.local_home("elsewhere") / "jobs" / second["job_id"] / "job.json"
    write_json(other, {**read_json(other), "directory": "/another/records/submissions/probe"})
    before = disk(store)
    done = hpml("prune", "--keep", "0", "--yes", "--json").json()
    assert {run["id"] for run in done["removed"]} == {first["id"], second["id"]}
    assert done["bytes"] == before - disk(store)
    left = {path.parent.relative_to(store.root) for path in store.root.rglob("job.json")}
    jobs = [("elsewhere", second), (host, first), (host, second)]
    assert left == {Path("local", name, "jobs", run["job_id"]) for name, run in jobs}


@pytest.mark.parametrize("step", range(3))
def test_a_removal_that_is_cut_off_is_completed_by_the_next(
    store: Store,
    hpml: Hpml,
    made: Callable[..., Submission],
    monkeypatch: pytest.MonkeyPatch,
    step: int,
) -> None:
    """Whenever it is killed, no other command stumbles over what is left."""
    submission = made("cut", 90, "FAILED", array="0-1")
    left = [step]
    remove = shutil.rmtree

    def killed(*words: Any, **more: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise SystemExit(137)
        remove(*words, **more)

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", killed)
        assert hpml("prune", "--keep", "0", "--yes").code == 137
    assert traces(store, submission)
    for words in ("list", "status", "prune --keep 0"):
        ended = hpml(*words.split())
        assert (ended.code, "internal" in ended.err) == (0, False), words
    assert hpml("list", "--json").json() == []
    (done,) = hpml("prune", "--older-than", "9w", "--yes", "--json").json()["removed"]
    assert (done["id"], done["state"]) == (submission.sid, "LEFT OVER")
    assert not traces(store, submission)


def test_a_shared_node_archive_goes_with_its_last_submission(
    store: Store, hpml: Hpml, made: Callable[..., Submission]
) -> None:
    """A file with several hard links frees nothing until the last one goes."""
    first, second = made("first", 9, "FAILED"), made("second", 8, "FAILED")
    kept = store.root / "archives" / "0123.pyz"
    kept.parent.mkdir(exist_ok=True)
    kept.write_bytes((first.directory / "hpml-node.pyz").read_bytes())
    for submission in (first, second):
        (submission.directory / "hpml-node.pyz").unlink()
        os.link(kept, submission.directory / "hpml-node.pyz")
    for submission, stays in ((first, True), (second, False)):
        before = disk(store)
        dry = hpml("prune", submission.sid, "--json").json()
        done = hpml("prune", submission.sid, "--yes", "--json").json()
        assert dry["bytes"] == done["bytes"] == before - disk(store)
        assert kept.exists() == stays


def test_two_at_once_while_a_job_runs(
    shell: Shell, store: Store, hpml: Hpml, made: Callable[..., Submission]
) -> None:
    """Real processes: what is over is removed once, and the job that runs ends well."""
    go = shell.root / "go"
    waits = ["bash", "-c", f"until [[ -e '{go}' ]]; do sleep 0.1; done"]
    running = hpml("submit", "--local", "--json", shell.job("runs", command=waits)).json()
    over = [made(f"over{number}", 9, "FAILED") for number in range(5)]
    both = [shell.start("prune", "--keep", "0", "--yes") for _ in range(2)]
    for process in both:
        out, err = process.communicate(timeout=120)
        assert (process.returncode, err) == (0, "")
        assert f"kept: {running['id']} has not ended: " in out
    assert not any(traces(store, submission) for submission in over)
    go.touch()
    assert hpml("wait", running["id"]).code == 0
    assert hpml("prune", running["id"], "--yes").code == 0
    assert hpml("list", "--json").json() == []
