"""lm.py on a real GPU: loss, MFU, equality of DDP and FSDP, compilation, resume and a profile."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.diagnosis.profile import read_profile
from tests.gpu.gpu_runs import (
    DEVICE,
    JOBS,
    LIMIT_SECONDS,
    Started,
    finish_all,
    need_gpu,
    numbers_text,
    print_figures,
)

NCCL = {"NCCL_DEBUG": "VERSION"}
TORCHRUN = ("--standalone", "--nproc-per-node=1")
SMALL: list[object] = ["--layers", 2, "--heads", 4, "--width", 128, "--sequence", 128]
SMALL += ["--lr", 0.003, "--lr-warmup-steps", 20]
# In float32, so that what differs is not rounding: 40 steps, of which the last 30 are measured.
SHORT = [*SMALL, "--steps", 40, "--eval-every", 20, "--checkpoint-every", 20, "--amp", "off"]
SHORT += ["--batch-size", 8, "--warm-up-steps", 10]
# By name: the options of a training that has to learn what DDP learns.
EQUAL: dict[str, list[object]] = {
    "fsdp": ["--parallel", "fsdp"],
    "recompute": ["--recompute"],
    "compile": ["--compile"],
    "compile and recompute": ["--compile", "--recompute"],
    "fsdp, compile and recompute": ["--parallel", "fsdp", "--compile", "--recompute"],
}
TARGET_BITS = 2.3  # on a CPU, in float32, it reaches 1.96
PEAK_H100 = "989 TFLOP/s (bfloat16 on NVIDIA H100 80GB HBM3, specification)"


@pytest.fixture(scope="module", autouse=True)
def _needs_a_gpu() -> None:
    need_gpu()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return numbers_text(tmp_path_factory.mktemp("text"))


def test_the_loss_falls_under_torchrun_with_nccl_and_bf16(text: Path, tmp_path: Path) -> None:
    """200 steps of a small model in bfloat16 reach the stated loss of the test text."""
    script = ["lm.py", *SMALL, "--data", text, "--steps", 200, "--amp", "bf16"]
    run = Started(*script, output=tmp_path, launcher=TORCHRUN, variables=NCCL)
    result, printed = run.finish()
    assert "bfloat16" in printed
    assert DEVICE == "cpu" or "NCCL version" in printed
    assert result["validation_loss"] < TARGET_BITS < result["evaluations"]["0"][1]
    assert result["tokens_per_second"] > 0
    figures = ("validation_loss", "test_loss", "tokens_per_second", "mfu", "train_seconds")
    print_figures("lm, torchrun, nccl, bf16", **{name: result[name] for name in figures})


@pytest.mark.parametrize("more", [[], ["--compile"]], ids=["eager", "compile"])
def test_mfu_is_that_of_the_device(text: Path, tmp_path: Path, more: list[object]) -> None:
    """A model that fills the GPU; the peak is that of the H100's tensor cores in bfloat16."""
    size = [8, 16, 1024, 512, 32] if DEVICE == "cuda" else [1, 2, 16, 32, 2]
    names = ("--layers", "--heads", "--width", "--sequence", "--batch-size")
    script: list[object] = [part for pair in zip(names, size, strict=True) for part in pair]
    script += ["--data", text, "--steps", 60, "--lr", 3e-4, "--amp", "bf16", *more]
    result, _ = Started("lm.py", *script, output=tmp_path).finish()
    first, last = result["evaluations"]["0"][1], result["validation_loss"]
    assert last < first
    figures = ("tokens_per_second", "mfu", "peak", "flops_per_token", "validation_loss")
    print_figures(f"lm, MFU {more}", **{name: result[name] for name in figures})
    if "H100 80GB HBM3" in result["peak"]:
        assert result["peak"] == PEAK_H100
    if result["mfu"] is not None:  # None: the table has no such device
        assert 0.05 < result["mfu"] < 1
        used = result["tokens_per_second"] * result["flops_per_token"]
        peak = float(result["peak"].split()[0]) * 1e12
        assert result["mfu"] == pytest.approx(used / peak)


@pytest.fixture(scope="module")
def equals(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Result and output of DDP and of all methods that must equal it; they run in parallel."""
    home = tmp_path_factory.mktemp("equal")
    started = {}
    for name, more in {"ddp": [], **EQUAL}.items():
        place = home / name.replace(" ", "")
        script = ["lm.py", *SHORT, "--data", text, "--checkpoint", place / "saved", *more]
        started[name] = Started(*script, "--profile", place / "profile", output=place)
    return finish_all(started)


def losses(result: dict[str, Any]) -> list[float]:
    return [loss for _, loss in result["evaluations"].values()]


@pytest.mark.parametrize("name", list(EQUAL))
def test_equal_to_ddp(equals: dict[str, Any], name: str) -> None:
    """FSDP, activation checkpointing and compilation change nothing but rounding."""
    expected, found = losses(equals["ddp"][0]), losses(equals[name][0])
    print_figures(f"lm, {name}", test_losses=found, ddp=expected)
    assert found == pytest.approx(expected, abs=0.01)
    assert len(found) == 3
    assert found[2] < 4 < found[0]


def test_a_resumed_training_is_the_same(
    equals: dict[str, Any], text: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """From step 20 of the runs above, one with DDP and one with FSDP; to float tolerance."""
    home = next(tmp_path_factory.getbasetemp().glob("equal*"))
    started = {}
    for name in ("ddp", "fsdp"):
        saved = home / name / "saved"
        shutil.rmtree(saved / "step-00000040")
        script = ["lm.py", *SHORT, "--data", text, "--checkpoint", saved, *EQUAL.get(name, [])]
        started[name] = Started(*script, output=home / name)
    for name, (result, printed) in finish_all(started).items():
        assert "20 of 40 steps are done" in printed
        assert losses(result) == pytest.approx(losses(equals[name][0]), abs=0.01), name
        assert losses(result)[:2] == losses(equals[name][0])[:2]


def test_the_profile_shows_the_gpu(
    equals: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Five steps, with kernels of the GPU."""
    home = next(tmp_path_factory.getbasetemp().glob("equal*"))
    for name in ("ddp", "fsdp"):
        found = read_profile(home / name / "profile")
        assert found is not None
        assert found.steps == 5
        assert found.device == ("GPU" if DEVICE == "cuda" else "CPU")
        assert found.compute > 0
        print_figures(f"lm, profile of {name}", profile=found.text())


def test_hpml_report_sums_up_the_profile(text: Path, tmp_path: Path) -> None:
    """`hpml run --local` with the GPU and `--profile`; `hpml report` has its GPU compute."""
    for module in ("pydantic", "ruamel.yaml", "typer", "tomlkit", "jinja2", "rich"):
        pytest.importorskip(module, reason=f"HARDWARE: hpml's own dependency {module} is missing")
    for file in sorted(one.name for kind in ("lm*.py", "hpml_*.py") for one in JOBS.glob(kind)):
        shutil.copy(JOBS / file, tmp_path)
    arguments = [*SHORT, "--data", text, "--device", DEVICE, "--output", "{run.dir}"]
    job = {
        "name": "gpu-profile",
        "launcher": "torchrun",
        "script": "lm.py",
        "args": [*map(str, arguments), "--profile"],
        "environment": {"python": sys.executable},
        "resources": {"ranks_per_node": 1, "cpus_per_rank": 2, "time": "5"},
    }
    if DEVICE == "cuda":
        job["resources"] = {"gpus": 1, "cpus_per_rank": 2, "time": "5"}
    (tmp_path / "job.yaml").write_text(json.dumps(job))

    def hpml(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "hpml_orchestrator.cli", "--records", "records", *words],
            cwd=tmp_path,
            env={**os.environ, "XDG_CONFIG_HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    hpml("run", "--local", "job.yaml")
    report = json.loads(hpml("report", "last", "--json"))
    print_figures("hpml report", profile=report["facts"]["profile"])
    profile = report["facts"]["profile"]
    assert profile["device"] == ("GPU" if DEVICE == "cuda" else "CPU")
    assert profile["compute"] > 0
