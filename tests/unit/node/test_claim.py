"""A run belongs to one job: the first act claims it, a duplicate ends there."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpml_orchestrator.node.startup import EXIT_DUPLICATE
from hpml_orchestrator.records.files import write_json, write_text
from hpml_orchestrator.records.store import Run
from tests.patience import PATIENCE_SECONDS

if TYPE_CHECKING:
    from tests.unit.node.conftest import Node


def test_the_first_job_gets_the_run(node: Node) -> None:
    """It prints the attempt's directory and writes down its id, its head node and its start."""
    status, out, err = node.claim("17", SLURM_NNODES="3", SLURM_JOB_NODELIST="n[1-3]")
    assert (status, out, err) == (0, f"{node.attempt}\n", "")
    assert (node.attempt / "started" / "job_id").read_text() == "17\n"
    head = json.loads((node.attempt / "head.json").read_text())
    assert head["node"] == head["names"][0] == "n1"
    assert not any(name.startswith("localhost") for name in head["names"])
    (attempt,) = node.store.run(node.run_directory.name).attempts()
    (event,) = attempt.events()
    assert (event.event, event.node) == ("started", "batch")
    expected = {"job_id": "17", "attempt": 0, "head": "n1", "nodes": "n[1-3]", "node_count": 3}
    assert event.data == expected
    assert {path.name for path in node.attempt.iterdir()} >= {"nodes", "events", "binding"}


def test_another_job_of_the_same_run_is_a_duplicate(node: Node) -> None:
    """It exits 75, says whose the run is, and changes nothing."""
    node.claim("17")
    before = sorted(path.name for path in node.attempt.rglob("*"))
    for restart in ("0", "1"):
        status, out, err = node.claim("18", SLURM_RESTART_COUNT=restart)
        assert (status, out) == (EXIT_DUPLICATE, "") == (75, "")
        assert "this run belongs to job 17; job 18 is a duplicate" in err
    assert sorted(path.name for path in node.attempt.rglob("*")) == before


def test_a_requeued_job_gets_the_next_attempt(node: Node) -> None:
    """SLURM_RESTART_COUNT counts the attempts."""
    node.claim("17")
    status, out, _ = node.claim("17", SLURM_RESTART_COUNT="1")
    assert (status, out) == (0, f"{node.run_directory}/attempts/1\n")
    assert node.claim("17", SLURM_RESTART_COUNT="3")[1].endswith("/attempts/3\n")
    assert [one.number for one in node.store.run(node.run_directory.name).attempts()] == [0, 1, 3]


def test_the_same_job_started_again_forgets_its_markers(node: Node) -> None:
    """Without a requeue it is the same attempt: who was ready then need not be ready now."""
    node.claim("17")
    write_json(node.attempt / "nodes" / "n1.ready.json", {"node": "n1"})
    for name in ("plan/n1.txt", "binding/n1.jsonl", "binding/n1.proof.json"):
        write_text(node.attempt / name, "{}")
    write_text(node.attempt / "over", "")
    write_json(node.attempt / "ended.json", {"exit_code": 1})
    status, out, _ = node.claim("17")
    assert (status, out) == (0, f"{node.attempt}\n")
    for name in ("nodes", "plan", "binding"):
        assert list((node.attempt / name).iterdir()) == []
    assert not (node.attempt / "over").exists()
    assert not (node.attempt / "ended.json").exists()


def test_of_two_jobs_at_once_one_wins(node: Node) -> None:
    """However close they come: one claims the run, the other is told whose it is."""
    for number in range(4):
        for path in (node.run_directory / "attempts").glob("*"):
            path.rename(node.store.root / f"old-{number}")
        words = ("claim", str(node.submission.directory))
        racers = {job_id: node.start(*words, job_id=job_id) for job_id in ("21", "22")}
        told = {
            job_id: racer.communicate(timeout=PATIENCE_SECONDS) for job_id, racer in racers.items()
        }
        statuses = {job_id: racer.returncode for job_id, racer in racers.items()}
        assert sorted(statuses.values()) == [0, EXIT_DUPLICATE]
        winner = next(job_id for job_id, status in statuses.items() if status == 0)
        loser = "22" if winner == "21" else "21"
        assert f"belongs to job {winner}" in told[loser][1]
        assert (node.attempt / "started" / "job_id").read_text() == f"{winner}\n"


@pytest.mark.parametrize("restart", ["0", "1"])
def test_a_claim_that_is_being_written_is_waited_for(node: Node, restart: str) -> None:
    """Between the winner's mkdir and its id another job waits, and does not take the run."""
    (node.attempt / "started").mkdir(parents=True)
    words = ("claim", str(node.submission.directory))
    late = node.start(*words, job_id="22", SLURM_RESTART_COUNT=restart)
    timer = threading.Timer(0.7, write_text, (node.attempt / "started" / "job_id", "21\n"))
    timer.start()
    _, err = late.communicate(timeout=PATIENCE_SECONDS)
    timer.join()
    assert late.returncode == EXIT_DUPLICATE
    assert "belongs to job 21" in err  # which it can only know from what came later


def test_by_hand_there_is_no_table(node: Node, tmp_path: Path) -> None:
    """A script given to sbatch by hand keeps its records below its own directory, by job."""
    status, out, _ = node.call("claim", str(tmp_path), job_id="5")
    assert (status, out) == (0, f"{tmp_path}/runs/5/attempts/0\n")
    assert node.call("claim", str(tmp_path), job_id="6")[1] == f"{tmp_path}/runs/6/attempts/0\n"


def test_an_array_task_claims_its_own_run(node: Node) -> None:
    """The table gives the run of each index; an index that it lacks is an error.

    Its output lies in the submission, and from its first start on in its own directory, too.
    """
    sid = "many-20240101-000000-abcdef"
    many = node.store.prepare(sid, script="", archive=b"", submit={}, runs={0: {}, 7: {}})
    words = ("claim", str(many.directory))
    run = Run(node.store.runs_dir / f"{sid}.7")
    output = many.directory / "output" / "7.log"
    assert run.output == output
    output.write_text("hi\n")
    for restart in ("0", "1"):
        task = {"SLURM_ARRAY_TASK_ID": "7", "SLURM_RESTART_COUNT": restart}
        out = node.call(*words, job_id="9", **task)[1]
        assert out == f"{run.directory}/attempts/{restart}\n"
        assert run.output == run.directory / "output.log"
        assert run.output.read_text() == "hi\n"
    status, _, err = node.call(*words, job_id="9", SLURM_ARRAY_TASK_ID="3")
    assert (status, "has no run of index 3" in err) == (3, True)


def test_a_task_writes_down_its_array(node: Node) -> None:
    """Its claim is by its own id; the array's, which sbatch answered with, stands beside it."""
    sid = "many-20240101-000000-abcdef"
    many = node.store.prepare(sid, script="", archive=b"", submit={}, runs={0: {}, 7: {}})
    words = ("claim", str(many.directory))
    task = {"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_JOB_ID": "8"}
    assert node.call(*words, job_id="9", **task)[0] == 0
    (attempt,) = node.store.run(f"{sid}.7").attempts()
    assert (attempt.job_id, attempt.submitted_id) == ("9", "8")
    assert node.call(*words, job_id="12", **task)[0] == EXIT_DUPLICATE


def test_by_hand_a_task_is_named_by_its_array(node: Node, tmp_path: Path) -> None:
    """Without a table the records of a task lie under the array's id and its index."""
    task = {"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_JOB_ID": "8"}
    out = node.call("claim", str(tmp_path), job_id="9", **task)[1]
    assert out == f"{tmp_path}/runs/8_7/attempts/0\n"


def test_outside_a_job_there_is_nothing_to_claim(node: Node) -> None:
    """The script says that it belongs into a job."""
    status, _, err = node.claim("")
    assert status == 2
    assert "not inside a job" in err
    assert "hint: give the script to sbatch" in err
