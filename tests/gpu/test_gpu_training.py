"""ddp_images.py on a real GPU: NCCL and mixed precision, a resume, and a ResNet-18."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.gpu_runs import DEVICE, JOBS, Started, need_gpu, print_figures

NCCL = {"NCCL_DEBUG": "VERSION"}
TORCHRUN = ("--standalone", "--nproc-per-node=1")
FIGURES = ("test_accuracy", "samples_per_second", "train_seconds", "model", "amp", "world_size")


@pytest.fixture(scope="module", autouse=True)
def _needs_a_gpu() -> None:
    need_gpu()
    for module in ("sklearn", "PIL"):
        pytest.importorskip(module, reason=f"HARDWARE: no {module}, which the digits need")


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("data") / "digits"
    subprocess.run([sys.executable, str(JOBS / "make_digits.py"), str(target)], check=True)
    return target


@pytest.mark.parametrize("amp", ["auto", "fp16"])
def test_one_gpu_trains_under_nccl_with_mixed_precision(
    digits: Path, tmp_path: Path, amp: str
) -> None:
    """One rank under torchrun: NCCL, DDP and AMP reach 0.95, also from a resumed checkpoint."""
    script = ["ddp_images.py", "--data", digits, "--amp", amp, "--target-accuracy", 0.95]
    script += ["--epochs", 8, "--checkpoint", tmp_path / "c"]
    for more in (["--stop-after-epochs", 4], []):
        started = Started(*script, *more, output=tmp_path, launcher=TORCHRUN, variables=NCCL)
        result, printed = started.finish()
    assert "NCCL version" in printed or DEVICE == "cpu"
    assert "resumed from" in printed
    assert result["test_accuracy"] >= 0.95
    assert (result["device"] == "cpu") == (DEVICE == "cpu")
    assert result["amp"] in ({"fp16"} if amp == "fp16" else {"bf16", "fp16"})
    assert result["samples_per_second"] > 0
    print_figures("images, cnn", **{name: result[name] for name in FIGURES})


def test_a_resnet_18_reaches_its_accuracy(digits: Path, tmp_path: Path) -> None:
    """In bfloat16, channels_last, each batch in two parts: 0.97 on the test set."""
    script = ["ddp_images.py", "--data", digits, "--model", "resnet18", "--lr", 0.02]
    script += ["--amp", "bf16", "--channels-last", "--accumulate", 2, "--batch-size", 64]
    script += ["--workers", 4, "--epochs", 12, "--width", 64 if DEVICE == "cuda" else 8]
    result, _ = Started(*script, output=tmp_path, launcher=TORCHRUN).finish()
    print_figures("images, ResNet-18", **{name: result[name] for name in FIGURES})
    assert result["test_accuracy"] >= 0.97
    assert (result["model"], result["amp"]) == ("resnet18", "bf16")
