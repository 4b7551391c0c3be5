"""The programs of docs/frameworks.md: stopped by the signal, started again, equal weights."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.pages import blocks
from tests.unit.training_runs import environment

PAGE = "docs/frameworks.md"
RANKS = 2


@dataclass(frozen=True)
class Outcome:
    """What the ranks of one start printed: their first step, their last one, their weights."""

    begin: set[int]
    end: set[int]
    weights: set[str]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with the programs of the page."""
    for block in blocks(PAGE):
        if block.words[1:]:
            (tmp_path / block.words[1]).write_text(block.text, encoding="utf-8")
    return tmp_path


def start(folder: Path, program: str, length: int, checkpoints: str) -> subprocess.Popen[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.Popen(
        [*launcher, f"--nproc-per-node={RANKS}", program, str(length), checkpoints],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str], before: str = "") -> Outcome:
    output = before + process.communicate(timeout=300)[0]
    aborted = "terminate called without an active exception" in output  # gloo, at a rank's exit
    assert process.returncode == 0 or aborted, output
    ends = re.findall(r"rank \d ends at step (\d+)(?:: (\[\[[^]]*\]\]))?", output)
    assert len(ends) == RANKS, output
    begins = {int(step) for step in re.findall(r"rank \d begins at step (\d+)", output)}
    return Outcome(begins, {int(step) for step, _ in ends}, {weights for _, weights in ends})


def ranks_of(launcher: int) -> list[int]:
    """The processes that torchrun started, in the order of their ranks."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text()
    return [int(pid) for pid in children.split()][:RANKS]


@pytest.mark.parametrize(
    ("program", "length", "needs"),
    [
        ("train_plain.py", 40, ["torch"]),
        pytest.param("train_lightning.py", 40, ["lightning", "torchdata"], marks=pytest.mark.slow),
        pytest.param("train_trainer.py", 2, ["transformers", "accelerate"], marks=pytest.mark.slow),
    ],
)
def test_a_stopped_training_ends_as_one_that_was_not(
    program: str, length: int, needs: list[str], folder: Path
) -> None:
    """One rank gets the signal; both save after the same step, and no step is lost or repeated."""
    missing = [name for name in needs if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"NOT TESTED: {program} needs {' and '.join(missing)} (pip install)")
    whole = start(folder, program, length, "whole")
    stopped = start(folder, program, length, "checkpoints")
    assert stopped.stdout is not None
    output = ""
    while len(re.findall("begins at step 0", output)) < RANKS:
        line = stopped.stdout.readline()
        assert line, output
        output += line
    time.sleep(0.1)  # some steps
    os.kill(ranks_of(stopped.pid)[-1], signal.SIGUSR1)
    cut, complete = finish(stopped, output), finish(whole)
    (last,) = complete.end
    (step,) = cut.end
    assert 0 < step < last
    again = start(folder, program, length, "checkpoints")
    # hpml may start a finished program once more: it cannot distinguish it from a stopped one
    once_more = finish(start(folder, program, length, "whole"))
    assert finish(again) == Outcome({step}, {last}, complete.weights)
    assert (once_more.end, once_more.weights) == (complete.end, complete.weights)
