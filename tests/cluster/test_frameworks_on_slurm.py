"""The programs of docs/frameworks.md on two nodes of a real Slurm, requeued once by hpml."""

from __future__ import annotations

import importlib.util
import re

import pytest

from tests.cluster.hpml_on_slurm import Desk, eventually
from tests.cluster.user import VENV
from tests.pages import blocks


def steps(word: str, output: str) -> list[int]:
    """The steps at which ranks say that they begin or end, in order and without repeats."""
    found = re.findall(rf"rank \d {word} at step (\d+)", output)
    return sorted({int(step) for step in found})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "launcher", "length", "last", "needs"),
    [
        ("train_plain.py", "torchrun", "300", 300, ["torch"]),
        ("train_lightning.py", "torchrun", "300", 300, ["lightning", "torchdata"]),
        ("train_lightning.py", "srun", "300", 300, ["lightning", "torchdata"]),
        ("train_trainer.py", "torchrun", "10", 320, ["transformers", "accelerate"]),
    ],
)
def test_a_requeued_training_continues_where_it_stopped(
    program: str, launcher: str, length: str, last: int, needs: list[str], desk: Desk
) -> None:
    """The ranks of both nodes save after the same step, and the job is requeued only once."""
    missing = [name for name in needs if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"NOT TESTED: {program} needs {' and '.join(missing)} (pip install)")
    for block in blocks("docs/frameworks.md"):
        if block.words[1:]:
            (desk.directory / block.words[1]).write_text(block.text, encoding="utf-8")
    job = desk.submit(
        "training",
        launcher=launcher,
        script=program,
        args=[length, "{checkpoint.dir}"],
        environment={"venv": str(VENV)},
        resources={"nodes": 2, "ranks_per_node": 1, "time": "00:10:00"},
        checkpoint={"signal": "USR1"},
    )

    def output() -> str:
        return desk.hpml("logs", job["id"], code=None).stdout

    eventually(lambda: output().count("begins at step 0") == 2)
    desk.hpml("requeue", job["id"])
    desk.hpml("wait", job["id"], code=None)
    (state,) = desk.json("status", job["id"])
    story = output()
    outcome = (state["state"], state["attempts"], state["job_id"])
    assert outcome == ("COMPLETED", 2, job["job_id"]), story
    stopped, ended = steps("ends", story)
    assert steps("begins", story) == [0, stopped], story
    assert 0 < stopped < ended == last
    assert "Restarts=1 " in desk.slurm("scontrol", "show", "job", job["job_id"])
