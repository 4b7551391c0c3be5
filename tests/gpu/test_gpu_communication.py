"""communication.py on a real GPU: every method with NCCL, and two ranks that share the GPU."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.gpu_runs import Started, finish_all, need_gpu, print_figures
from tests.unit.training_runs import JOBS, load

METHODS = ("allreduce", "fp16", "bf16", "powersgd", "int8", "topk", "localsgd", "stale", "ps")
SHARED = ("allreduce", "int8", "topk", "ps")  # an all-reduce, all-gathers and an exchange
SHORT = ["--epochs=2", "--width=32", "--run-on"]


@pytest.fixture(scope="module", autouse=True)
def _needs_a_gpu() -> None:
    need_gpu()
    pytest.importorskip("sklearn", reason="HARDWARE: no scikit-learn, which has the digits")


def test_every_method_reaches_the_target_with_nccl(tmp_path: Path) -> None:
    """One rank: NCCL refuses two on one GPU. Its collectives get every method's types."""
    started = {}
    for method in METHODS:
        script = ["communication.py", f"--method={method}", "--batch-size=64"]
        (started[method],) = Started.ranks(1, *script, output=tmp_path / method)
    found: dict[str, Any] = {method: one for method, (one, _) in finish_all(started).items()}
    figures = ("test_accuracy", "seconds_to_accuracy", "steps_to_accuracy", "comm_seconds")
    by_method = {m: {name: one[name] for name in figures} for m, one in found.items()}
    print_figures("communication, nccl, one rank, all methods at once", methods=by_method)
    for method, result in found.items():
        assert result["test_accuracy"] >= 0.95, method
        assert 0 < result["comm_seconds"] < result["train_seconds"], method


def test_two_ranks_that_share_the_gpu_train_as_one(tmp_path: Path) -> None:
    """With gloo, which takes the GPU's tensors; exact methods give one rank's parameters."""
    started: dict[str, Started] = {}
    for ranks, methods in ((1, ("allreduce",)), (2, SHARED)):
        for method in methods:
            place = tmp_path / f"{method}{ranks}"
            script = ["communication.py", *SHORT, f"--method={method}", "--backend=gloo"]
            script += [f"--batch-size={32 // ranks}", f"--checkpoint={place}"]
            for rank, run in enumerate(Started.ranks(ranks, *script, output=place)):
                started[f"{method}{ranks} rank {rank}"] = run
    finish_all(started)
    names = dict.fromkeys(name.partition(" ")[0] for name in started)
    saved = {name: newest(tmp_path / name)["vector"].cpu() for name in names}
    assert saved["allreduce2"].numpy() == pytest.approx(saved["allreduce1"].numpy(), abs=1e-4)
    assert saved["ps2"].numpy() == pytest.approx(saved["allreduce1"].numpy(), abs=1e-4)
    assert all(math.isfinite(float(vector.sum())) for vector in saved.values())


def test_a_resumed_training_keeps_its_memory_on_the_gpu(tmp_path: Path) -> None:
    """Errors of topk, late gradients of stale and factors of powersgd are tensors of the GPU."""
    methods = ("topk", "stale", "powersgd")

    def train() -> dict[str, Any]:
        started = {}
        for method in methods:
            place = tmp_path / method
            script = ["communication.py", *SHORT, f"--method={method}", f"--checkpoint={place}"]
            (started[method],) = Started.ranks(1, *script, "--checkpoint-every=30", output=place)
        finish_all(started)
        return {method: newest(tmp_path / method) for method in methods}

    whole = train()
    for method in methods:
        (last,) = (tmp_path / method).glob(f"step-{whole[method]['steps']:08d}")
        shutil.rmtree(last)
        assert newest(tmp_path / method)["steps"] < whole[method]["steps"]
    for method, state in train().items():
        assert state["steps"] == whole[method]["steps"]
        expected = whole[method]["vector"].cpu().numpy()
        assert state["vector"].cpu().numpy() == pytest.approx(expected, abs=1e-3), method


def newest(directory: Path) -> Any:
    return load(JOBS / "hpml_checkpoint.py").Checkpoints(directory).latest().state
