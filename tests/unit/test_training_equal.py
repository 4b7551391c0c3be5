"""Trainings of ddp_images.py that have to be equal, and what breaks the equality."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.diagnosis.profile import read_profile
from tests.unit.training_runs import JOBS, TRAINS, load, result_of, run, run_ranks

TRAIN = JOBS / "ddp_images.py"

pytestmark = TRAINS


def alone(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Train with one rank."""
    return run([TRAIN, "--workers", 0, *arguments])


def newest(directory: Path) -> Any:
    return load(JOBS / "hpml_checkpoint.py").Checkpoints(directory).latest()


def test_four_ranks_continue_to_the_bit(few: Path, tmp_path: Path) -> None:
    """The first step after a restart adds gradients in the order of an uninterrupted run."""
    common = [TRAIN, "--data", few, "--workers", 0, "--epochs", 2, "--bucket-mb", 0.01]
    for name, arguments in (("one", []), ("two", ["--stop-after-epochs", 1]), ("two", [])):
        for done in run_ranks(4, [*common, "--checkpoint", tmp_path / name, *arguments]):
            assert done.returncode == 0, done.stderr
    one, two = (newest(tmp_path / name).state["network"] for name in ("one", "two"))
    assert difference(one, two) == 0


# What the equalities are compared with: no dropout, as its random numbers are those of a rank; and
# the full learning rate from the beginning, as the warm-up starts from that of one rank.
GLOBAL_BATCH, RATE = 24, 0.1
WITHOUT = """
import sys
sys.path.insert(0, sys.argv[1])
import ddp_images, hpml_waits, hpml_checkpoint
from torch import Tensor
from torch.futures import Future
lost = sys.argv[2]

def average_alone(group, bucket):
    future = Future()
    future.set_result(bucket.buffer())
    return future

if lost == "gradients":
    hpml_waits._average = average_alone
elif lost == "accuracies":
    real = hpml_checkpoint.Ranks.gather
    hpml_checkpoint.Ranks.gather = lambda ranks, value: (
        [value] if isinstance(value, int) else real(ranks, value)
    )
ddp_images.main(sys.argv[3:])
"""


def figures_of(ranks: int, data: Path, output: Path, lost: str = "", *more: object) -> Any:
    """Train with so many ranks and the same global batch; return the weights and the accuracy."""
    program = output / "without.py"
    program.write_text(WITHOUT)
    command = [program, JOBS, lost or "nothing", "--data", data, "--epochs", 2, "--workers", 0]
    command += ["--batch-size", GLOBAL_BATCH // ranks, "--lr", RATE / ranks, "--output", output]
    command += ["--lr-warmup-epochs", 0, "--dropout", 0, "--checkpoint", output / "c", *more]
    for done in run_ranks(ranks, command):
        assert done.returncode == 0, done.stderr
    return newest(output / "c").state["network"], result_of(output)["test_accuracy"]


def difference(one: Any, other: Any) -> float:
    """Return the largest difference of two models' weights."""
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.fixture(scope="module")
def one_rank(few: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Weights and accuracy that one rank reaches."""
    return figures_of(1, few, tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize(
    ("ranks", "lost", "more"),
    [
        (2, "", []),
        (4, "", ["--bucket-mb", 0.01]),
        (2, "", ["--accumulate", 3]),
        (2, "gradients", []),
        (2, "accuracies", []),
    ],
)
def test_more_ranks_train_what_one_does(
    ranks: int, lost: str, more: list[object], few: Path, tmp_path: Path, one_rank: Any
) -> None:
    """Equal to float tolerance with the same global batch; not if an all-reduce is taken out."""
    weights, accuracy = figures_of(ranks, few, tmp_path, lost, *more)
    changed = difference(one_rank[0], weights)
    assert (changed < 1e-4) == (lost != "gradients"), changed
    if not lost:
        assert accuracy == one_rank[1]
    if lost == "accuracies":  # of its half of the images, rank 0 can have no more than half
        assert accuracy <= 0.5 < one_rank[1] or accuracy < one_rank[1]


def test_the_other_ways_to_compute(few: Path, tmp_path: Path) -> None:
    """ResNet-18, bf16, channels last, and a trace of five steps; the loss falls."""
    done = alone(
        *("--data", few, "--model", "resnet18", "--width", 8, "--amp", "bf16", "--channels-last"),
        *("--epochs", 3, "--lr", 0.02, "--warm-up-steps", 3, "--output", tmp_path),
        *("--profile", tmp_path / "profile"),
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert losses[-1] < losses[0]
    result = result_of(tmp_path)
    assert (result["model"], result["amp"]) == ("resnet18", "bf16")
    profile = read_profile(tmp_path / "profile")
    assert profile is not None
    assert (profile.steps, profile.ranks) == (5, (0,))
    assert profile.data is not None


@pytest.mark.slow  # the compiler takes half a minute
def test_a_compiled_model_trains_the_same(few: Path) -> None:
    """The loss of each epoch is that of the model as it is, to three digits."""
    common = ("--data", few, "--epochs", 2, "--eval-every", 2)
    losses = []
    for more in ((), ("--compile",)):
        done = alone(*common, *more)
        assert done.returncode == 0, done.stderr
        losses.append([float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)])
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)
