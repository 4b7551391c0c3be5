"""lm.py by its command line: equal at any number of ranks, exact resume, one-line errors."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from hpml_orchestrator.diagnosis.devices import specification
from tests.unit.training_runs import JOBS, TRAINS, load, result_of, run, run_forked, write_text

TRAIN = JOBS / "lm.py"
SMALL: list[object] = ["--layers", 2, "--heads", 4, "--width", 32, "--sequence", 64, "--lr", 0.003]
SMALL += ["--lr-warmup-steps", 5, "--steps", 20, "--eval-every", 10, "--checkpoint-every", 10]

pytestmark = TRAINS


def losses(directory: Path) -> dict[str, float]:
    """Return the loss of the validation text, by step."""
    found: dict[str, Any] = result_of(directory)["evaluations"]
    return {step: loss for step, (_, loss) in found.items()}


# Rank 1 is asked to stop at its tenth look, which is after nine steps.
STOP = """
if rank == 1:
    looks = iter(range(1000))
    job.Channel.stop_requested = lambda self: next(looks) >= 9
"""
# What averages the gradients is taken out: each rank keeps its own.
DEAF = {
    "ddp": """
import hpml_waits, torch

def own(group, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future

hpml_waits._average = own
""",
    "fsdp": """
import torch.distributed as dist

def own_part(output, input, group=None, **_):
    output.copy_(input.chunk(group.size())[group.rank()])

for name in ("reduce_scatter_single", "reduce_scatter_tensor"):  # the newer name, the older one
    if hasattr(dist, name):
        setattr(dist, name, own_part)
""",
}


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    """lm.py as a module."""
    sys.path.insert(0, str(JOBS))
    yield load(TRAIN)
    sys.path.remove(str(JOBS))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of what `learned` ran, by name."""
    return tmp_path_factory.mktemp("learned")


@pytest.fixture(scope="module")
def learned(home: Path) -> dict[str, dict[str, float]]:
    """Losses by `ddp2`, …: of 20 steps with 8 sequences each, whatever the number of ranks."""
    wanted = []

    def add(name: str, ranks: int, *more: str, change: str = "", saved: str = "") -> None:
        arguments = [*map(str, SMALL), f"--data={write_text(home)}", f"--output={home / name}"]
        arguments += [f"--batch-size={8 // ranks}", f"--checkpoint={home / 'saved' / saved}"]
        wanted.append((ranks, [*arguments[: None if saved else -1], *more], change))

    add("ddp1", 1, "--peak-tflops=0.5", "--warm-up-steps=5")
    for parallel in ("ddp", "fsdp"):
        more = (f"--parallel={parallel}", "--recompute")
        for ranks in (2, 4):
            add(f"{parallel}{ranks}", ranks, *more)
        add(f"{parallel} deaf", 2, *more, change=DEAF[parallel])
        add(f"{parallel} stopped", 2, *more, change=STOP, saved=parallel)
        add(f"{parallel} resumed", 2, *more, saved=parallel)
    printed = run_forked(home, "lm", wanted)
    assert printed.count("stopped: ") == 2
    return {
        place.name: losses(place) for place in home.iterdir() if (place / "result.json").exists()
    }


@pytest.mark.parametrize("name", ["ddp2", "ddp4", "fsdp2", "fsdp4"])
def test_ranks_learn_what_one_rank_learns(learned: dict[str, Any], name: str) -> None:
    """To float tolerance, with the same tokens in each step."""
    assert list(learned["ddp1"]) == ["0", "10", "20"]
    assert learned["ddp1"]["20"] < 6.5 < learned["ddp1"]["0"]
    assert learned[name] == pytest.approx(learned["ddp1"], abs=1e-4)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_ranks_that_keep_their_gradients_learn_something_else(
    learned: dict[str, Any], parallel: str
) -> None:
    """Without DDP's all-reduce or FSDP's reduce-scatter the equality fails."""
    deaf, alone = learned[f"{parallel} deaf"], learned["ddp1"]
    assert deaf["0"] == pytest.approx(alone["0"], abs=1e-3)
    assert abs(deaf["20"] - alone["20"]) > 0.01


def test_the_job_reaches_its_target(tmp_path: Path) -> None:
    """lm.yaml under torchrun, on the licences of this machine: the loss that docs/lm.md states."""
    arguments = YAML(typ="safe").load(TRAIN.with_suffix(".yaml"))["args"]
    arguments = [one.replace("{run.dir}", str(tmp_path)) for one in arguments]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = run([*launcher, TRAIN, *arguments, "--device=cpu"])
    assert done.returncode == 0, done.stderr
    result = result_of(tmp_path)
    assert result["world_size"] == 2
    assert result["validation_loss"] <= result["target_loss"] == 4.1
    assert result["validation_loss"] == losses(tmp_path)["200"]
    assert f"test loss {result['test_loss']:.4f} bits per byte" in done.stdout
    assert done.stdout.count("test loss") == 1, "the test text is used once"
    assert 0 < result["seconds_to_loss"] <= result["train_seconds"]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_compiled_and_recomputed_blocks_learn_the_same(
    learned: dict[str, Any], tmp_path: Path, parallel: str
) -> None:
    """With two ranks; compiling takes minutes on busy cores and must not hang."""
    more = ["--compile", "--recompute", f"--parallel={parallel}", f"--output={tmp_path}"]
    arguments = [*map(str, SMALL), f"--data={write_text(tmp_path)}", "--batch-size=4", *more]
    assert "compiles" in run_forked(tmp_path, "lm", [(2, arguments, "")])
    assert losses(tmp_path) == pytest.approx(learned["ddp1"], abs=1e-4)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_resume_is_exact(learned: dict[str, Any], parallel: str) -> None:
    """Stopped at one rank's request and continued: the same losses to the bit."""
    assert learned[f"{parallel} resumed"] == learned[f"{parallel}2"]


@pytest.mark.parametrize("name", ["ddp2", "fsdp2"])
def test_bytes_are_counted(learned: dict[str, Any], home: Path, name: str) -> None:
    """Two ranks send gradients, 2 (n-1)/n of them; FSDP also gathers weights, blocks twice."""
    assert learned
    result = result_of(home / name)
    blocks = 2 * (12 * 32 * 32 + 13 * 32)
    times = {
        "ddp2": 1,
        "fsdp2": 1.5 * blocks / result["parameters"] + 1 - blocks / result["parameters"],
    }
    assert result["sent_bytes_dp"] == pytest.approx(
        4 * result["parameters"] * times[name], rel=1e-3
    )
    assert result["sent_bytes_dp_formula"] == pytest.approx(result["sent_bytes_dp"], rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--steps", "0"], "--steps 0 must be at least 1"),
        (["--width", "10"], "--width 10 is not a multiple of --heads 4"),
        (["--parallel", "zp=2"], "--parallel zp=2: 'zp=2' is not valid; it needs ddp or fsdp"),
        (["--parallel", "tp=0"], "'tp=0' is not valid"),
        (["--parallel", "fsdp,pp=2"], "fsdp works with dp and tp, not with pp"),
        (["--parallel", "tp=3"], "--heads 4 is not a multiple of tp"),
        (["--parallel", "pp=2", "--batch-size", "6"], "--batch-size 6 is not a multiple of"),
    ],
)
def test_wrong_options_are_one_line(
    script: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    """Exit status 2, and the option with its value."""
    with pytest.raises(SystemExit, match="2"):
        script.parse(arguments)
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line


def test_missing_data_are_one_line() -> None:
    """Found after the ranks have met; it ends like a wrong option."""
    done = run([TRAIN, "--data", "/no/such"])
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "/no/such" in line


def test_mfu_is_the_formula(learned: dict[str, Any], home: Path) -> None:
    """L = 2, H = 4, Q = 8, T = 64, N = 33,664: 6 * 33,664 + 12 * 2 * 4 * 8 * 64 = 251,136.

    N has the token embedding, which the tied head multiplies with, not that of places.
    """
    assert learned
    result = result_of(home / "ddp1")
    assert result["flops_per_token"] == 251_136
    assert result["mfu"] == pytest.approx(result["tokens_per_second"] * 251_136 / 0.5e12)
    assert result_of(home / "ddp2")["mfu"] is None


def test_the_rate_continues_after_the_warm_up(script: Any) -> None:
    """It rises to --lr, then falls to a tenth by a cosine; only the step decides."""
    options = script.parse(["--lr-warmup-steps", "10", "--lr", "1"])
    learning_rate = sys.modules["hpml_job"].learning_rate
    rates = [learning_rate(step, 100, options, floor=0.1) for step in (0, 9, 10, 55, 100)]
    assert rates == pytest.approx([0.1, 1, 1, 0.55, 0.1])


def test_peaks_are_those_of_the_reports(script: Any) -> None:
    """lm_model.py travels without hpml, so it has its own table, with the same figures."""
    peaks = sys.modules["lm_model"].PEAKS
    assert peaks["NVIDIA H100 80GB HBM3"] == (67, 989)
    for name, tflops in peaks.items():
        found = specification(name)
        assert found is not None, name
        assert tflops == (found.flops["float32"] / 1e12, found.flops["bfloat16"] / 1e12), name
