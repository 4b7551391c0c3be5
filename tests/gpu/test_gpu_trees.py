"""trees.py on a real GPU: NCCL and bfloat16 reach the accuracy, with a small and a large model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.gpu_runs import DEVICE, Started, need_gpu, print_figures

NCCL = {"NCCL_DEBUG": "VERSION"}
TORCHRUN = ("--standalone", "--nproc-per-node=1")
FIGURES = ("test_accuracy", "samples_per_second", "train_seconds", "parameters", "amp", "device")
# The large one has as many features of a tree as the paper's, and trains with all points.
LARGE = ["--width", 128, "--points", 1024, "--batch-size", 64]
SIZES = {"small": [], "large": LARGE if DEVICE == "cuda" else ["--points", 64]}


@pytest.fixture(scope="module", autouse=True)
def _needs_a_gpu() -> None:
    need_gpu()


@pytest.mark.parametrize("size", SIZES)
def test_pointnet_reaches_its_accuracy_in_bf16(size: str, tmp_path: Path) -> None:
    """0.9 on the test trees, also from a checkpoint that is complete."""
    script = ["trees.py", "--amp", "bf16", "--checkpoint", tmp_path / "c", *SIZES[size]]
    found = []
    for _ in range(2):
        started = Started(*script, output=tmp_path, launcher=TORCHRUN, variables=NCCL)
        result, printed = started.finish()
        assert DEVICE == "cpu" or "NCCL version" in printed
        found.append(result)
    print_figures(f"trees, {size}", **{name: found[0][name] for name in FIGURES})
    assert found[0]["test_accuracy"] >= 0.9
    assert found[0]["samples_per_second"] > 0
    assert found[1]["test_accuracy"] == found[0]["test_accuracy"]
    assert (found[0]["amp"], found[0]["device"] == "cpu") == ("bf16", DEVICE == "cpu")
