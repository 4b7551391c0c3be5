"""A run on this machine hangs, is requeued by its user, and completes in its third attempt."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.patience import eventually
from tests.unit.local_runs import Desk

ROOT = Path(__file__).parents[2]
STEPS = 60

# Trains nothing: counts steps, keeps the step as its checkpoint, and stops when it is asked. In the
# first attempt rank 1 hangs; the second one waits for the request.
RANK = f"""
import os, sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT / "training_jobs")!r})
from hpml_channel import Channel
channel, rank = Channel.from_env(), int(os.environ["RANK"])
saved = Path(os.environ["HPML_CHECKPOINT_DIR"], "step")
attempt = int(Path(os.environ["HPML_ATTEMPT_DIR"]).name)
step = int(saved.read_text()) if attempt else 0
if step:
    channel.event("resumed", step=step)
channel.event("training", step=step, total_steps={STEPS})
while step < {STEPS}:
    time.sleep(0.05)
    step += 1
    channel.count(steps=1, step_seconds=0.05)
    while attempt == 0 and step == 15 and rank == 1:
        time.sleep(3600)
    while attempt == 0 and step == 25:
        time.sleep(3600)  # in a collective with rank 1
    while attempt == 1 and step == 30 and not channel.stop_requested():
        time.sleep(0.05)
        channel.count(steps=0)
    if rank == 0 and (step % 10 == 0 or channel.stop_requested()):
        saved.write_text(str(step))
        channel.event("checkpoint", step=step, seconds=0.01, size_bytes=2)
    if channel.stop_requested():
        channel.event("stopping", step=step)
        break
channel.close()
"""


def test_a_hang_and_a_requeue(tmp_path: Path) -> None:
    """Each attempt begins where the last one saved; the stacks of the hang are on record."""
    desk = Desk(tmp_path)
    (tmp_path / "rank.py").write_text(RANK)
    job = desk.job(
        name="life",
        script="rank.py",
        environment={"python": sys.executable},
        resources={"ranks_per_node": 2, "time": "10:00", "extra": ["--overcommit"]},
        checkpoint={"hang": "3s"},
    )
    rid = desk.json("submit", job, "--local")["id"]

    def second_attempt_waits() -> bool:
        (state,) = desk.json("status", rid)
        return state["attempts"] == 2 and (state["life"] or {}).get("step") == 30

    eventually(second_attempt_waits)
    desk.hpml("requeue", rid)
    desk.hpml("wait", rid)
    shown = desk.json("show", rid)
    attempts = shown["life"]["attempts"]
    assert [one["why"] for one in attempts] == ["hang", "requested", ""]
    assert [one["began_step"] for one in attempts] == [0, 20, 30]
    (stacks,) = (tmp_path / "records" / "runs" / rid / "attempts" / "0" / "stacks").iterdir()
    assert stacks.read_text().count("rank.py") >= 2
    text = desk.hpml("show", rid)
    assert str(stacks) in text
    assert "1: ranks hung after " in text
    assert "3: completed after " in text


def test_a_program_that_ignores_the_request_is_told_so(tmp_path: Path) -> None:
    """After all that launchers print: in the output, and in `show`."""
    desk = Desk(tmp_path)
    job = desk.job(
        name="stubborn",
        command=["sleep", "600"],
        resources={"time": "00:00:14"},
        checkpoint={"lead": "8s", "requeue": []},
    )
    rid = desk.json("submit", job, "--local")["id"]
    desk.hpml("wait", rid, code=6)
    ignored = (
        "your program did not react to the request to stop and was ended; the work since its last "
        "checkpoint is lost; hpml_checkpoint.py shows how"
    )
    assert desk.hpml("logs", rid).rstrip().endswith(f"hpml: {ignored}")
    assert ignored in desk.hpml("show", rid)
