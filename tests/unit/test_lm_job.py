"""lm.py by its command line: equal at any number of ranks, exact resume, one-line errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.training_runs import JOBS, TRAINS, load, result_of, run, run_ranks

TRAIN = JOBS / "lm.py"
SMALL: list[object] = ["--layers", 2, "--heads", 4, "--width", 32, "--sequence", 64, "--lr", 0.003]
SMALL += ["--lr-warmup-steps", 5, "--steps", 20, "--eval-every", 10, "--checkpoint-every", 10]

pytestmark = TRAINS


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A text of 50 kB that does not depend on the machine."""
    file = tmp_path / "text.txt"
    file.write_text("".join(f"{n} and {n * n} are {n + n * n}. " for n in range(2300)))
    return file


def losses(ranks: int, text: Path, out: Path, *more: object) -> dict[str, float]:
    """Train with 8 sequences per step; return the test loss by step."""
    command = [TRAIN, *SMALL, "--data", text, "--output", out, "--batch-size", 8 // ranks, *more]
    done = run_ranks(ranks, command)
    assert [one.returncode for one in done] == [0] * ranks, done
    found: dict[str, Any] = result_of(out)["evaluations"]
    return {step: loss for step, (_, loss) in found.items()}


def test_one_rank_two_and_fsdp_learn_the_same_and_a_resume_is_exact(
    text: Path, tmp_path: Path
) -> None:
    """To float tolerance between worlds and methods; to the bit after a resume, with FSDP too."""
    alone = losses(1, text, tmp_path / "1")
    assert list(alone) == ["0", "10", "20"]
    assert alone["20"] < 6.5 < alone["0"]
    for name, parallel in (("ddp", "ddp"), ("fsdp", "fsdp")):
        saved = tmp_path / name
        more = ["--parallel", parallel, "--checkpoint", saved, "--recompute"]
        whole = losses(2, text, tmp_path / f"{name}1", *more)
        assert whole == pytest.approx(alone, abs=1e-3)
        for file in sorted((saved / "step-00000020").rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
        (saved / "step-00000020").rmdir()
        assert losses(2, text, tmp_path / f"{name}2", *more) == whole


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--steps", "0"], "--steps 0 is not"),
        (["--width", "10"], "--width 10 is not a multiple of --heads 4"),
        (["--data", "/no/such"], "/no/such"),
    ],
)
def test_wrong_options_are_one_line(arguments: list[str], named: str) -> None:
    """Exit status 2, and the option with its value."""
    done = run([TRAIN, *arguments])
    assert done.returncode == 2
    assert named in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_mfu_is_the_formula(text: Path, tmp_path: Path) -> None:
    """L = 2, H = 4, Q = 8, T = 64, N = 33,920: 6 * 33,920 + 12 * 2 * 4 * 8 * 64 = 252,672."""
    losses(1, text, tmp_path, "--peak-tflops", 0.5, "--warm-up-steps", 5)
    result = result_of(tmp_path)
    assert result["flops_per_token"] == 252_672
    assert result["mfu"] == pytest.approx(result["tokens_per_second"] * 252_672 / 0.5e12)
    losses(1, text, tmp_path)
    assert result_of(tmp_path)["mfu"] is None


def test_the_rate_continues_after_the_warm_up() -> None:
    """It rises to --lr, then falls to a tenth by a cosine; only the step decides."""
    import sys  # noqa: PLC0415

    sys.path.insert(0, str(JOBS))
    job = load(TRAIN)
    sys.path.remove(str(JOBS))
    options = job.parse(["--steps", "100", "--lr-warmup-steps", "10", "--lr", "1"])
    rates = [job.learning_rate(step, options) for step in (0, 9, 10, 55, 100)]
    assert rates == pytest.approx([0.1, 1, 1, 0.55, 0.1])
