"""What a run was: its command, times, code, results and hours, in lines and for programs."""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from hpml_orchestrator.records.files import append_line, write_json
from hpml_orchestrator.records.texts import elapsed_text
from hpml_orchestrator.runs.facts import gather
from hpml_orchestrator.runs.reporting.description import Description, Hours, command_text, describe
from hpml_orchestrator.runs.reporting.summary import summarise
from hpml_orchestrator.runs.reporting.text import array_lines, summary_lines
from hpml_orchestrator.scheduler.model import JobState

if TYPE_CHECKING:
    from hpml_orchestrator.records.submission import Submission
    from tests.unit.runs.conftest import World
    from tests.unit.runs.repositories import Repository


pytestmark = pytest.mark.usefixtures("zone")


def shown(world: World, submission: Submission) -> tuple[dict[str, str], Description]:
    """The lines about a run, those of one name joined, and the same for programs."""
    state = world.state(submission)
    summary = summarise(state)
    lines: dict[str, str] = {}
    name = ""
    for head, text in array_lines(state) if state.tasks else summary_lines(state, summary):
        name = head or name
        lines[name] = f"{lines[name]}\n{text}" if name in lines else text
    return lines, describe(state, summary, now=world.clock.now)


def test_a_run_from_the_queue_to_its_end(world: World, repository: Repository) -> None:
    """Placeholders until rank 0 has recorded what it received; times have a zone and a length."""
    repository.write("train.py")
    commit = repository.commit()
    submission = world.submit(
        command=None,
        script="train.py",
        args=["--out={run.dir}", "--name=a b"],
        workdir=str(repository.top),
        resources={"nodes": 2, "gpus": 4, "cpus_per_rank": 8},
    )
    lines, waiting = shown(world, submission)
    path = repository.top / "train.py"
    assert lines["command"] == f"torchrun: python {path} '--out={{run.dir}}' '--name=a b'"
    assert lines["submitted"] == "2027-01-15 10:00:00 XYZ"
    assert lines["code"] == f"{commit[:7]} (branch main)"
    assert (waiting.received, waiting.hours) == (False, None)
    attempt = world.starts(submission, "1")
    received = ["python", str(path), "--out=/r", "--name=a b\n"]
    line = {"rank": 0, "node": "n1", "world_size": 8, "command": received}
    append_line(attempt / "binding" / "n1.jsonl", json.dumps(line))
    world.scheduler.move("1", JobState.RUNNING)
    world.clock.sleep(1800)
    lines, running = shown(world, submission)
    assert lines["command"] == f"torchrun: python {path} --out=/r $'--name=a b\\n'"
    assert running.hours == Hours(4, 32, "requested", 1, 0.5)
    assert lines["started"].startswith("2027-01-15 10:00:00 XYZ, ")
    world.clock.sleep(1800)
    world.ends(attempt, 3, "rank 0 exited with code 3")
    world.scheduler.move("1", JobState.FAILED, exit_code=3)
    lines, ended = shown(world, submission)
    assert lines["ended"] == "2027-01-15 11:00:00 XYZ, after 1:00:00, exit code 3"
    assert lines["reason"] == "rank 0 exited with code 3"
    assert "submitted" not in lines
    told = ended.to_json()
    assert (told["launcher"], told["command"], told["received"]) == ("torchrun", received, True)
    assert told["code"] == {"commit": commit, "branch": "main", "dirty": False, "snapshot": False}
    assert told["hours"] == {
        "gpu": 8.0,
        "core": 64.0,
        "basis": "requested",
        "attempts": 1,
        "wall": 1.0,
    }


def test_changes_and_a_missing_repository_are_told(world: World, repository: Repository) -> None:
    """Uncommitted changes are part of the code; without a repository no commit is known."""
    repository.write("train.py")
    commit = repository.commit()
    repository.write("train.py", "changed")
    dirty = world.submit("dirty", workdir=str(repository.top))
    assert shown(world, dirty)[0]["code"] == f"{commit[:7]} + changes (branch main)"
    subprocess.run(["git", "-C", repository.top, "checkout", "-q", "--detach"], check=True)
    detached = world.submit("detached", workdir=str(repository.top))
    assert shown(world, detached)[0]["code"] == f"{commit[:7]} + changes"
    assert shown(world, world.submit("none"))[0]["code"] == "no git commit is known"


def test_hours_of_all_attempts(world: World) -> None:
    """A requeued start counts until it ended; recorded allocations replace the request."""
    submission = world.submit(resources={"cpus_per_rank": 2})
    for number, allocated in enumerate([{"cpus": 64}, {"cpus": 64, "gpus": 8}]):
        attempt = world.starts(submission, "1", number)
        world.event(attempt, "started", **allocated)
        world.scheduler.move("1", JobState.RUNNING)
        world.clock.sleep(3600)
        world.ends(attempt, number, "preempted")
        world.scheduler.move("1", JobState.FAILED if number else JobState.PENDING)
        world.clock.sleep(7200)
    lines, told = shown(world, submission)
    assert lines["allocated"] == "8 GPU-hours, 128 core-hours in 2 attempts"
    assert told.hours is not None
    assert (told.hours.gpu, told.hours.core) == (8.0, 128.0)


@pytest.mark.parametrize(("goes_on", "end"), [(True, 3600), (False, 3590)])
def test_what_waits_or_is_lost_takes_no_hours(world: World, end: int, *, goes_on: bool) -> None:
    """An attempt counts until its end, or its last sign of life; the queue is not computing."""
    submission = world.submit(resources={"nodes": 2, "gpus": 32})
    attempt = world.starts(submission, "1")
    world.scheduler.move("1", JobState.RUNNING)
    world.clock.sleep(3590)
    world.event(attempt, "step", 0)
    events = attempt / "events"
    os.utime(events / "n1.jsonl", (world.clock.now, world.clock.now))
    os.utime(events / "batch.jsonl", (1, 1))
    world.clock.sleep(10)
    if goes_on:
        write_json(attempt / "ended.json", {"exit_code": 75, "reason": "", "time": world.clock.now})
    for moment in ("waits", "runs again", "is lost"):
        world.scheduler.move("1", JobState.RUNNING if moment == "runs again" else JobState.PENDING)
        if moment == "is lost":
            del world.scheduler.jobs["1"]
        world.clock.sleep(36_000)
        state = world.state(submission)
        assert moment != "waits" or elapsed_text(state.started, state.ended) == "-"
        hours = describe(state, summarise(state), now=world.clock.now).hours
        assert hours is not None
        assert hours.gpu == pytest.approx(64 * end / 3600), moment
        assert gather(state, now=world.clock.now).elapsed_seconds == pytest.approx(end), moment


def test_an_array_and_its_task(world: World) -> None:
    """The array has the sum of its tasks' hours; a point of a sweep has its values."""
    submission = world.submit(array="0-1", args=["{array.index}"])
    record = json.loads((submission.directory / "submit.json").read_text())
    values = [{"nodes": 2, "lr": 0.1, "name": "a\x1b[31m"}, {"nodes": 4, "lr": 0.2}]
    sweep = {"sweep": "s-1", "points": [7, 9], "values": values}
    write_json(submission.directory / "submit.json", {**record, **sweep})
    for index in (0, 1):
        world.starts(submission.at(index), f"1_{index}")
        world.scheduler.move(f"1_{index}", JobState.RUNNING)
    world.clock.sleep(3600)
    for index in (0, 1):
        world.scheduler.move(f"1_{index}", JobState.COMPLETED)
    lines, _ = shown(world, submission)
    assert lines["job"] == "1 (slurm, cluster fake), 2 tasks"
    assert (lines["point"], lines["requested"]) == ("s-1", "2 core-hours in 2 attempts")
    assert lines["command"] == "torchrun: true '{array.index}'"
    lines, told = shown(world, submission.at(0))
    assert lines["point"] == "7 of s-1: nodes 2, lr 0.1, name a[31m"
    assert (told.sweep, told.point, told.values["lr"]) == ("s-1", 7, 0.1)
    write_json(submission.directory / "submit.json", {**record, **sweep, "values": []})
    assert shown(world, submission.at(1))[0]["point"] == "9 of s-1"


@pytest.mark.parametrize(
    ("content", "result", "error"),
    [
        (b'{"schema_version": 1, "f1": 0.123456789}', "f1 0.123457", ""),
        (
            b'{"best": {"epoch": 3, "classes": ["cat", "dog"]}}',
            "best.epoch 3, best.classes [cat, dog]",
            "",
        ),
        (
            b'{"a": true, "b": null, "c": 123456789, "d": 1e-9}',
            "a true, b null, c 123456789, d 1e-09",
            "",
        ),
        (b'{"a": NaN, "b": 1e999, "c": []}', "a NaN, b 1e999, c []", ""),
        (b'{"a\\u001b]0;x": "b\\u0007\\nc\\u202e"}', "a]0;x b c", ""),
        (b'{"loss": 2.5}', "loss 1.5 (result.json: 2.5)", ""),
        (b"", "", "not JSON"),
        (b"\xff{}", "", "not JSON"),
        (b"[1]", "", "not a JSON object"),
        (b'{"a": ' + b"9" * 5000 + b"}", "", "not JSON"),
        ("directory", "", "Is a directory"),
    ],
)
def test_results_of_any_name_are_shown(world: World, content: Any, result: str, error: str) -> None:
    """Those of the file, those of the channel, and both; a broken file is named and no more."""
    submission = world.submit()
    attempt = world.starts(submission, "1")
    own = {"loss": 1.5} if "loss" in result else {"mine": "\x1b[31m"}
    world.event(attempt, "evaluation", 0, final=True, **own)
    path = attempt.parents[1] / "result.json"
    if isinstance(content, str):
        path.mkdir()
    else:
        path.write_bytes(content)
    lines, told = shown(world, submission)
    mine = "" if "loss" in own else ", mine [31m"
    if not error:
        assert lines["result"] == f"{result}{mine}"
        assert told.result_error == ""
        json.dumps(told.to_json(), allow_nan=False)
        return
    assert told.result_file is None
    text, _, problem = lines["result"].partition("\n")
    assert text == "mine [31m"
    assert problem == told.result_error
    assert problem.startswith(f"{path} cannot be read: ")
    assert error in problem


def test_a_long_result_is_cut(world: World) -> None:
    """A hundred figures are listed, on lines of a readable length; the rest is counted."""
    submission = world.submit()
    attempt = world.starts(submission, "1")
    many = {f"figure_{number}": number / 3 for number in range(150)} | {"text": "x" * 5000}
    write_json(attempt.parents[1] / "result.json", many | {"list": list(range(99))})
    lines, told = shown(world, submission)
    rows = lines["result"].splitlines()
    assert rows[-1] == "… and 52 more: hpml show --json"
    assert all(len(row) < 100 for row in rows)
    assert len(told.result) == 152


@pytest.mark.parametrize("words", [["a b", "$x"], ["c\nd\t'e'\\"], ["\x1b\x07é\u202e"], [""]])
def test_bash_reads_a_command_as_the_same_words(words: list[str]) -> None:
    """Whatever characters they have; none of them is a control character in the line."""
    line = command_text(words)
    assert line.isprintable()
    script = f"printf '%s\\0' {line}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, check=True)
    assert done.stdout.decode().split("\0")[:-1] == words
