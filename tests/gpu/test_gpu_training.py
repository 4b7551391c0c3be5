"""The example training on a real GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

JOBS = Path(__file__).parents[2] / "training_jobs"
LIMIT_SECONDS = 300


@pytest.fixture(scope="module", autouse=True)
def _needs_a_gpu() -> None:
    torch = pytest.importorskip("torch", reason="HARDWARE: no torch here")
    if not torch.cuda.is_available():
        pytest.skip(
            "HARDWARE: no CUDA device (torch.cuda.is_available() is False with torch "
            f"{torch.__version__}); NCCL and mixed precision were not exercised"
        )


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
    environment = {key: value for key, value in os.environ.items() if key != "RANK"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=1", str(JOBS / "ddp_images.py"), "--data", str(digits)]
    command += ["--device", "cuda", "--amp", amp, "--target-accuracy", "0.95", "--epochs", "8"]
    command += ["--checkpoint", str(tmp_path / "c"), "--output", str(tmp_path)]
    for more in (["--stop-after-epochs", "4"], []):
        done = subprocess.run(
            [*command, *more],
            env={**environment, "NCCL_DEBUG": "VERSION"},
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    assert "NCCL version" in done.stdout + done.stderr
    assert "resumed from" in done.stdout
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["test_accuracy"] >= 0.95
    assert result["device"] != "cpu"
    assert result["amp"] in ({"fp16"} if amp == "fp16" else {"bf16", "fp16"})
    assert result["samples_per_second"] > 0
