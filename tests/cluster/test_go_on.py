"""A run continues, exactly once, after its time limit, a preemption and a node failure."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hpml_on_slurm import HPML, Desk, eventually

LONG = os.environ.get("HPML_LONG") == "1"
KILLS = 10 if LONG else 1

# Counts its starts; a program without the channel, which ends on request.
PROGRAM = (
    "import os, signal, sys, time\n"
    "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))\n"
    "path = sys.argv[1] + os.environ['RANK']\n"
    "open(path, 'a').write('start\\n')\n"
    "n = open(path).read().count('start')\n"
    "open(os.path.join(os.environ['HPML_CHECKPOINT_DIR'], str(n)), 'w').close()\n"
    "time.sleep(600 if n < int(sys.argv[2]) else 0)\n"
)

# Takes two steps, saves, and is stopped as by a full disk or a debugger; in its second start it is
# done at once.
STOPPED = """\
import json, os, signal, socket
channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
channel.bind("")
def tell(event, **data):
    message = {"v": 1, "type": "event", "event": event, "rank": 0, "data": data}
    channel.sendto(json.dumps(message).encode(), "\\0" + os.environ["HPML_CHANNEL"])
tell("training", step=0, total_steps=100)
tell("step", steps_total=2)
saved = os.path.join(os.environ["HPML_CHECKPOINT_DIR"], "2")
if not os.path.exists(saved):
    open(saved, "w").close()
    tell("checkpoint", step=2, seconds=0.1)
    os.kill(os.getpid(), signal.SIGSTOP)
"""


def start(desk: Desk, name: str, starts: int = 2, **fields: Any) -> dict[str, Any]:
    """Submit a run that is done in its last start; each of the others has to be ended."""
    (desk.directory / "program.py").write_text(PROGRAM)
    fields.setdefault("checkpoint", {"lead": "00:00:15", "signal": "USR1"})
    fields.setdefault("resources", {"time": "00:10:00"})
    command = ["python3", str(desk.directory / "program.py"), str(desk.directory / name)]
    job: dict[str, Any] = desk.submit(name, command=[*command, str(starts)], **fields)
    return job


def started(desk: Desk, name: str, count: int) -> None:
    """Wait until the program was started so often."""
    path = desk.directory / f"{name}0"
    eventually(lambda: path.exists() and path.read_text().count("start") >= count)


def attempts(job: dict[str, Any]) -> list[dict[str, Any]]:
    """How each attempt of a run ended, and which job made it."""
    found = []
    for path in sorted(Path(job["directory"], "attempts").iterdir(), key=lambda one: int(one.name)):
        ended = path / "ended.json"
        job_id = (path / "started" / "job_id").read_text().strip()
        known = json.loads(ended.read_text()) if ended.exists() else {}
        found.append({**known, "job": job_id})
    return found


def over(desk: Desk, job: dict[str, Any]) -> dict[str, Any]:
    """Wait until a run is over, and return its state."""

    def look() -> dict[str, Any] | None:
        (state,) = desk.json("status", job["id"])
        return state if state["over"] else None

    state: dict[str, Any] = eventually(look, seconds=180)
    return state


def test_a_run_is_requeued_as_it_was_asked(desk: Desk) -> None:
    """`hpml requeue` of a running run: the same job runs again, and nodes may be excluded."""
    job = start(desk, "asked")
    started(desk, "asked", 1)
    (attempt,) = Path(job["directory"], "attempts").iterdir()
    (node,) = (path.name.partition(".")[0] for path in (attempt / "nodes").glob("*.ready.json"))
    (attempt / "nodes" / f"{node}.failed.json").write_text(json.dumps({"node": node}))
    assert "asked to save" in desk.hpml("requeue", job["id"]).stdout
    state = over(desk, job)
    assert (state["state"], state["job_id"]) == ("COMPLETED", job["job_id"])
    first, second = attempts(job)
    assert (first["goes_on"], first["why"], first["job"]) == (True, "requested", job["job_id"])
    assert (second["goes_on"], second["exit_code"], second["job"]) == (False, 0, job["job_id"])
    (other,) = Path(job["directory"], "attempts", "1", "nodes").glob("*.ready.json")
    assert other.name.partition(".")[0] != node
    assert "has completed" in desk.hpml("requeue", job["id"], code=2).stderr


def test_the_only_usable_node_is_not_left_out(desk: Desk) -> None:
    """A node failed and the other is drained: `hpml requeue` says so, and the run continues."""
    job = start(desk, "only", resources={"time": "00:10:00", "nodes": 1})
    started(desk, "only", 1)
    (attempt,) = Path(job["directory"], "attempts").iterdir()
    (node,) = (path.name.partition(".")[0] for path in (attempt / "nodes").glob("*.ready.json"))
    (other,) = set(desk.cluster.nodes) - {node}
    desk.hpml("cancel", job["id"])
    over(desk, job)
    (attempt / "nodes" / f"{node}.failed.json").write_text(json.dumps({"node": node}))
    desk.slurm("scontrol", "update", f"NodeName={other}", "State=DRAIN", "Reason=test")
    try:
        notice = desk.hpml("requeue", job["id"]).stderr
        assert over(desk, job)["state"] == "COMPLETED"
    finally:
        desk.slurm("scontrol", "update", f"NodeName={other}", "State=RESUME")
    assert f"the next attempt may get {node} again" in notice


def test_a_continuation_where_requeueing_is_forbidden(desk: Desk) -> None:
    """Another job continues the run, in the same records; both are found by their ids."""
    job = start(desk, "forbidden")
    started(desk, "forbidden", 1)
    desk.slurm("scontrol", "update", f"JobId={job['job_id']}", "Requeue=0")
    desk.hpml("requeue", job["id"])
    state = over(desk, job)
    assert state["state"] == "COMPLETED"
    assert state["job_id"] != job["job_id"]
    jobs = desk.jobs_of(Path(job["submission"]))
    assert sorted(jobs) == sorted([job["job_id"], state["job_id"]])
    assert [one["job"] for one in attempts(job)] == [job["job_id"], state["job_id"]]
    for job_id in jobs:
        assert desk.json("status", job_id)[0]["id"] == job["id"]


def test_the_time_left_is_that_of_slurms_limit(desk: Desk) -> None:
    """Whoever changes the limit of a running job: a user shortens it, an administrator extends it.

    Slurm does so as well: with `--time-min`, and before a maintenance.
    """
    job = start(desk, "changed")
    started(desk, "changed", 1)
    for limit, minutes in (("4", 4), ("UNLIMITED", 365 * 24 * 60), ("60", 60)):
        desk.slurm("scontrol", "update", f"JobId={job['job_id']}", f"TimeLimit={limit}")
        for name in ("status", "show"):
            told = desk.json(name, job["id"])
            life = (told[0] if name == "status" else told)["life"]
            assert 60 * minutes - 50 < life["left_seconds"] <= 60 * minutes, name
        (shown,) = desk.json("top", job["id"])["jobs"]
        assert 60 * minutes - 50 < shown["left_seconds"] <= 60 * minutes
    assert re.search(r"time limit in (59|60) min", desk.hpml("show", job["id"]).stdout)
    desk.hpml("cancel", job["id"])


def test_a_stopped_rank_does_not_look_healthy(desk: Desk) -> None:
    """Every command says since when it is silent; a requeue ends and continues it all the same."""
    (desk.directory / "program.py").write_text(STOPPED)
    checkpoint = {"lead": "00:00:10", "hang": "00:30:00"}
    command = ["python3", str(desk.directory / "program.py")]
    job = desk.submit(
        "stopped", command=command, checkpoint=checkpoint, resources={"time": "20:00"}
    )
    attempt = Path(job["directory"], "attempts", "0")

    def reports() -> list[Path]:
        logs = attempt.glob("events/node*.jsonl")
        return [path for path in logs if '"checkpoint"' in path.read_text()]

    (log,) = eventually(reports)
    # Six minutes pass in the records.
    log.write_text(
        re.sub(r'(?<="time":)[\d.]+', lambda at: str(float(at[0]) - 380), log.read_text())
    )
    silent = r"no step for 6:[2-5]\d"  # the commands take their time on a busy machine
    said = desk.hpml("status", job["id"]).stdout + desk.hpml("show", job["id"]).stdout
    assert len(re.findall(rf"of 100 \(2%\), {silent} \(hang ends it at 30:00\)", said)) == 2, said
    assert re.search(f"stalled: {silent}", desk.hpml("top", job["id"]).stdout)
    assert re.search(f"verdict +{silent}", desk.hpml("report", job["id"]).stdout)
    requeued = desk.hpml("requeue", job["id"]).stdout
    assert re.search(f"seems not to react: {silent}", requeued)
    desk.hpml("wait", job["id"])
    assert len(attempts(job)) == 2


def test_a_run_goes_on_after_its_time_limit(desk: Desk) -> None:
    """The limit of a program that cannot be asked ends its attempt; the next one is done."""
    job = start(desk, "limit", resources={"time": "00:01:00"})
    state = over(desk, job)
    assert (state["state"], state["job_id"]) == ("COMPLETED", job["job_id"])
    assert [one.get("why") for one in attempts(job)] == ["time_limit", ""]


def test_a_preempted_run_goes_on_once(desk: Desk) -> None:
    """Slurm requeues it by itself and only once, also where JobRequeue=0 is the default."""
    resources = {"time": "00:10:00", "partition": "low"}
    with desk.cluster.configured("JobRequeue=0"):
        job = start(desk, "preempted", resources=resources)
        started(desk, "preempted", 1)
        both = {"nodes": 2, "exclusive": True}
        other = desk.submit("first", command=["sleep", "3"], resources=both)
        assert over(desk, other)["state"] == "COMPLETED"
        state = over(desk, job)
    assert (state["state"], state["job_id"]) == ("COMPLETED", job["job_id"])
    assert len(attempts(job)) == 2
    assert desk.jobs_of(Path(job["submission"])) == [job["job_id"]]
    assert (desk.directory / "preempted0").read_text() == "start\n" * 2


@pytest.mark.parametrize("which", ["first", "second"] if LONG else ["first"])
def test_a_run_goes_on_after_the_failure_of_a_node(desk: Desk, which: str) -> None:
    """Slurm requeues the job by itself, also if it was the script's node: one attempt more."""
    name = f"failure-{which}"
    job = start(desk, name, resources={"time": "00:10:00", "nodes": 2})
    started(desk, name, 1)
    node = desk.cluster.nodes[which == "second"]
    desk.slurm("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")
    try:
        eventually(lambda: desk.json("status", job["id"])[0]["state"] == "PENDING")
    finally:
        # Its slurmd lives and may have brought it back already.
        desk.cluster.run("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)
    state = over(desk, job)
    assert (state["state"], state["job_id"]) == ("COMPLETED", job["job_id"])
    first, second = attempts(job)
    assert first.get("why", "node_failure") == "node_failure"  # a lost script leaves no record
    assert (second["exit_code"], second["why"]) == (0, "")
    assert desk.jobs_of(Path(job["submission"])) == [job["job_id"]]
    assert (desk.directory / f"{name}0").read_text() == "start\n" * 2


def test_a_cancelled_run_does_not_go_on(desk: Desk) -> None:
    """Slurm would requeue a job that is being cancelled; hpml does not ask it to."""
    job = start(desk, "cancelled")
    started(desk, "cancelled", 1)
    desk.hpml("cancel", job["id"])
    assert over(desk, job)["state"] == "CANCELLED"
    assert [one.get("goes_on") for one in attempts(job)] == [False]
    answer = desk.json("requeue", job["id"])
    assert answer["job_id"] != job["job_id"]
    assert over(desk, job)["state"] == "COMPLETED"
    assert len(attempts(job)) == 2


def test_one_task_of_an_array_goes_on(desk: Desk) -> None:
    """A task is continued by itself, and the others stay as they ended."""
    fields: dict[str, Any] = {"array": "0-1", "resources": {"time": "00:10:00"}}
    job = start(desk, "tasks", starts=3, **fields)  # of three starts the third is done
    started(desk, "tasks", 2)
    desk.hpml("cancel", job["id"])
    over(desk, job)
    assert "is a job array" in desk.hpml("requeue", job["id"], code=2).stderr
    answer = desk.json("requeue", f"{job['id']}.1")
    assert answer["id"] == f"{job['id']}.1"
    task = over(desk, {"id": answer["id"]})
    zero, one = task["tasks"] or desk.json("status", job["id"])[0]["tasks"]
    assert (zero["state"], zero["attempts"]) == ("CANCELLED", 1)
    assert (one["state"], one["attempts"]) == ("COMPLETED", 2)
    assert one["job_id"] == f"{answer['job_id']}_1"


def test_two_requeues_at_the_same_time_make_one_job(desk: Desk) -> None:
    """One of them may be killed at any moment: there is one job then, and the other names it."""
    resources = {"time": "00:10:00", "extra": ["--hold"]}
    job = start(desk, "race", resources=resources)
    desk.slurm("scontrol", "release", job["job_id"])
    started(desk, "race", 1)
    desk.hpml("cancel", job["id"])
    over(desk, job)
    longest, moments, made = 0.0, random.Random(27), {job["job_id"]}
    for turn in range(KILLS + 1):  # no one is killed in the first
        began = time.monotonic()
        both = [requeueing(desk, job) for _ in range(2)]
        if turn:
            time.sleep(moments.uniform(0.1, longest))
            both[0].kill()
        answers = [process.communicate(timeout=desk.seconds) for process in both]
        longest = longest or time.monotonic() - began
        alive = set(desk.jobs_of(Path(job["submission"]))) - made
        assert len(alive) == 1, (turn, alive, answers)
        for process, (out, err) in zip(both, answers, strict=True):
            killed = turn and process is both[0]
            named = json.loads(out)["job_id"] if process.returncode == 0 else err
            assert killed or alive & {named} or "is PENDING, job" in named, (turn, answers)
        made |= alive
        if turn < KILLS:
            desk.hpml("cancel", job["id"])
            over(desk, job)
    desk.slurm("scontrol", "release", *alive)
    state = over(desk, job)
    assert (state["state"], {state["job_id"]}) == ("COMPLETED", alive)
    assert [one["job"] for one in attempts(job)] == [job["job_id"], state["job_id"]]
    assert set(desk.jobs_of(Path(job["submission"]))) == made


def requeueing(desk: Desk, job: dict[str, Any]) -> subprocess.Popen[str]:
    """Start `hpml requeue` of a run as the user."""
    return subprocess.Popen(
        [*HPML, "requeue", job["id"], "--json"],
        env=desk.environment,
        cwd=desk.directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
